"""A successor reads the log of a stopped server: all acknowledged work comes back, to the bit, and once."""

from __future__ import annotations

import dataclasses
import os
import random
import threading
from pathlib import Path

import numpy as np
import pytest

from shardyard.checkpoints.manifest import PartitionEntry
from shardyard.domain.consistency import StaleRule, UpdateMode
from shardyard.domain.errors import (
    InvalidRequest,
    NotReady,
    Refused,
    StaleGeneration,
    StorageUnavailable,
)
from shardyard.domain.ids import Generation, Rank, Token, Version
from shardyard.domain.push_names import DataShardSource, RankSource, Source, SourceKey, WorkerSource
from shardyard.domain.pushes import Outcome, PushKind
from shardyard.runtime import failpoints
from shardyard.transport.shared_memory import SharedMemory
from shardyard_ps_server.checkpoint.restore import Restore
from shardyard_ps_server.hosting import admission, orders, pushes
from shardyard_ps_server.hosting.store import Store
from shardyard_ps_server.partition import partition as partitions
from shardyard_ps_server.wal.segments import END
from tests.support.servers_with_logs import (
    COORDINATOR,
    FIRST,
    GENERATION,
    JOB,
    NEXT,
    OWNED,
    SECOND,
    THIRD,
    WORKER,
    Yard,
    create,
    gone,
    leases,
    order_of,
    payload_of,
    push,
    send,
    state,
    step,
    yard_of,
)


def test_promise_3_what_was_acknowledged_comes_back_to_the_bit(yard: Yard) -> None:
    first, saved = yard.begun()
    for sequence in range(5):
        assert push(first, sequence, absent=[1] if sequence == 3 else []) == {Outcome.APPLIED}
    assert push(first, 5, kind=PushKind.EMPTY) == {Outcome.APPLIED}
    assert push(first, 4) == {Outcome.DUPLICATE}
    before = state(first)
    second = yard.successor(saved, 2, FIRST)
    assert state(second) == before
    assert push(second, 5, kind=PushKind.EMPTY) == {Outcome.DUPLICATE}
    assert push(second, 6) == {Outcome.APPLIED}


def test_an_overflow_is_in_the_log_so_what_was_skipped_is_skipped_again(tmp_path: Path) -> None:
    with yard_of(tmp_path, UpdateMode.SYNC) as yard:
        first, saved = yard.begun()
        step(first, 0)
        before = [values for _, values, _, _ in state(first).values()]
        push(first, 1, source=RankSource(Rank(0)))
        late = dataclasses.replace(order_of(first, 1, source=RankSource(Rank(1))), overflow=True)
        assert send(first, late) == {Outcome.APPLIED}
        assert [values for _, values, _, _ in state(first).values()] == before
        step(first, 2)
        assert state(yard.successor(saved, 2, FIRST)) == state(first)


def test_what_a_checkpoint_has_is_not_done_again(yard: Yard) -> None:
    """The cut is taken after the new segment has begun: what comes in between is in both."""
    first = yard.first()
    push(first, 0)
    hosted = first.hosted()[0]
    cut = hosted.saver.save

    def late(*given: object, **more: object) -> object:
        push(first, 1)
        return cut(*given, **more)  # type: ignore[arg-type]

    hosted.saver.save = late  # type: ignore[assignment]
    saved = yard.save(first, 2)
    push(first, 2)
    assert [each.version.number for each in saved] == [2, 2]
    before = state(first)
    assert state(yard.successor(saved, 2, FIRST)) == before
    assert before[0][0] == 3


def test_checkpoint_of_a_step_leaves_no_contribution_to_the_next_behind(tmp_path: Path) -> None:
    """One that was recorded before the checkpoint's segment began would be in neither."""
    with yard_of(tmp_path, UpdateMode.SYNC) as yard:
        first = yard.first()
        step(first, 0)
        assert push(first, 1, source=RankSource(Rank(1))) == {Outcome.RECORDED}
        with pytest.raises(InvalidRequest) as refused:
            yard.save(first, 2)
        assert refused.value.facts == {"newest": "1", "gathering": "1"}
        assert push(first, 1, source=RankSource(Rank(0))) == {Outcome.APPLIED}
        saved = yard.save(first, 2)
        before = state(first)
        assert state(yard.successor(saved, 2, FIRST)) == before


def test_what_a_successor_finds_of_a_log_is_durable_before_it_counts(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a power cut could take back what the former owner had written and not synced, behind the end noted."""
    first = yard.first()
    push(first, 0)
    synced: list[str] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    yard.logs.log(JOB, FIRST).take_over(NEXT)
    names = [name.rpartition("-")[0] or name for name in synced]
    assert names.index("000000000001.log") < names.index(f".{END}")


def test_a_synchronous_step_comes_back_with_the_contributions_that_were_recorded(tmp_path: Path) -> None:
    with yard_of(tmp_path, UpdateMode.SYNC) as yard:
        first = yard.first()
        step(first, 0)
        saved = yard.save(first, 2)
        step(first, 1)
        step(first, 2)
        assert push(first, 3, source=RankSource(Rank(1))) == {Outcome.RECORDED}
        second = yard.successor(saved, 2, FIRST)
        assert push(second, 3, source=RankSource(Rank(1))) == {Outcome.DUPLICATE}
        assert push(second, 3, source=RankSource(Rank(0))) == {Outcome.APPLIED}
        with yard_of(tmp_path / "other", UpdateMode.SYNC) as undisturbed:
            reference = undisturbed.first()
            for number in range(4):
                step(reference, number)
            assert state(reference) == state(second)


def late(store: Store, sequence: int, *numbers: int, life: int = 1) -> set[Outcome]:
    """A gradient that was computed on these versions of the partitions."""
    order = dataclasses.replace(order_of(store, sequence), bases=tuple(Version(life, number) for number in numbers))
    return send(store, order)


def test_rates_of_stale_gradients_come_back_to_the_bit(tmp_path: Path) -> None:
    """From logs in which the same version has a number in several lives, with versions that no checkpoint has."""
    rule = StaleRule(divides_rate=True)
    with yard_of(tmp_path, stale=rule) as yard:
        first = yard.first()
        for sequence in range(6):
            late(first, sequence, max(0, sequence - 3), 0)
        saved = yard.save(first, 2)
        late(first, 6, 2, 6)
        late(first, 7, 7, 4)
        before = state(first)
        tally = [each.tally for _, each in sorted(first.hosted()[0].partitions.items())]
        assert [(each.total, each.most) for each in tally if each is not None] == [(0 + 1 + 2 + 9 + 4, 4), (15 + 3, 5)]
        second = yard.successor(saved, 2, FIRST)
        assert state(second) == before
        late(second, 8, 5, 8)  # computed before the first one died
        late(second, 9, 9, 8, life=2)
        after = state(second)
        third = yard.successor(saved, 2, FIRST, SECOND, incarnation=THIRD, life=3, generation=Generation(NEXT + 1))
        assert state(third) == after
    with yard_of(tmp_path / "other", stale=rule) as undisturbed:
        reference = undisturbed.first()
        for sequence in range(6):
            late(reference, sequence, max(0, sequence - 3), 0)
        for sequence, numbers in enumerate([(2, 6), (7, 4), (5, 8), (9, 8)], 6):
            late(reference, sequence, *numbers)
        assert state(reference) == after
    with yard_of(tmp_path / "plain") as plain:
        unruled = plain.first()
        for sequence in range(10):
            push(unruled, sequence)
        assert state(unruled) != after


def test_tokens_come_back(yard: Yard) -> None:
    first, saved = yard.begun()
    leases(first, token=7)
    second = yard.successor(saved, 2, FIRST)
    with pytest.raises(Refused, match="which has seen 7"):
        push(second, 0, token=1)
    assert push(second, 0, token=7) == {Outcome.APPLIED}


def test_what_was_passed_over_stays_so(yard: Yard) -> None:
    """A worker whose own pushes a restore has taken back goes on behind them (rule A11)."""
    first, saved = yard.begun()
    orders.pass_over(first, COORDINATOR, FIRST, GENERATION, WORKER, 5)
    assert push(first, 5, source=WorkerSource(WORKER), token=0) == {Outcome.APPLIED}
    before = state(first)
    second = yard.successor(saved, 2, FIRST)
    assert state(second) == before
    assert push(second, 5, source=WorkerSource(WORKER), token=0) == {Outcome.DUPLICATE}


def test_a_chain_of_servers_that_died_comes_back(yard: Yard) -> None:
    _, saved = yard.begun(1)
    second = yard.successor(saved, 2, FIRST)
    push(second, 1)
    before = state(second)
    third = yard.successor(saved, 2, FIRST, SECOND, incarnation=THIRD, life=3, generation=Generation(6))
    assert state(third) == before


def test_an_older_checkpoint_and_a_longer_log_give_the_same(yard: Yard) -> None:
    first = yard.first()
    push(first, 0)
    older = yard.save(first, 2)
    push(first, 1)
    newer = yard.save(first, 3)
    push(first, 2)
    before = state(first)
    assert state(yard.successor(older, 2, FIRST)) == before
    assert state(yard.successor(newer, 3, FIRST, incarnation=THIRD)) == before


def test_partitions_of_one_server_go_to_several(yard: Yard) -> None:
    first, saved = yard.begun(3)
    before = state(first)
    second = yard.successor(saved, 2, FIRST, owned=[OWNED[0]])
    third = yard.successor(saved, 2, FIRST, incarnation=THIRD, owned=[OWNED[1]])
    assert state(second) | state(third) == before


def test_a_server_takes_another_ones_partitions_beside_its_own(yard: Yard) -> None:
    logs: list[Store] = []
    for incarnation, owned in ((FIRST, [OWNED[0]]), (SECOND, [OWNED[1]])):
        store = yard.empty(incarnation)
        create(store, GENERATION, owned)
        orders.open_partitions(store, JOB, GENERATION)
        leases(store)
        logs.append(store)
    first, second = logs
    saved = yard.save(first, 1) + yard.save(second, 1)
    for store in logs:
        push(store, 0)
    before = state(first) | state(second)
    restore = Restore(
        str(yard.checkpoints),
        tuple(PartitionEntry(e.partition, Version(2, 0), (e.file,)) for e in saved if e.partition == 0),
        1,
        {OWNED[0]: (FIRST,)},
    )
    create(second, NEXT, OWNED, restore)
    assert state(second) == before
    push(second, 1)
    before = state(second)
    entries = tuple(PartitionEntry(e.partition, Version(3, 0), (e.file,)) for e in saved)
    third = yard.empty(THIRD)
    trails = {OWNED[0]: (FIRST, SECOND), OWNED[1]: (SECOND,)}
    restore = Restore(str(yard.checkpoints), entries, 1, trails)
    create(third, Generation(6), OWNED, restore)
    assert state(third) == before


def test_what_a_job_that_went_back_has_undone_is_not_done_again(yard: Yard) -> None:
    first, saved = yard.begun(2)
    yard.successor(saved, 2, into=first)  # as a person wished: without the log
    assert state(first)[0][0] == 0
    push(first, 0)
    before = state(first)
    assert before[0][0] == 1
    assert state(yard.successor(saved, 2, FIRST, life=3, generation=Generation(6))) == before


def test_a_job_that_goes_back_counts_nothing_of_the_time_before(yard: Yard) -> None:
    """A push that comes while partitions in use are restored is of the old generation: refused, not added to them."""
    first, saved = yard.begun(1)
    late = order_of(first, 1)
    restore = partitions.Partition.restore
    outcomes: list[object] = []

    def slow(partition: partitions.Partition, found: object, *tables: object) -> None:
        if not outcomes:
            try:
                outcomes.append(send(first, late))
            except StaleGeneration as error:
                outcomes.append(error)
        restore(partition, found, *tables)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partitions.Partition, "restore", slow)
        yard.successor(saved, 2, into=first)
    assert [type(outcome) for outcome in outcomes] == [StaleGeneration]
    assert state(first)[0][0] == 0


def test_a_restore_that_fails_again_and_again_takes_no_more_memory(yard: Yard) -> None:
    _, saved = yard.begun()
    other = yard.empty(SECOND)
    create(other, GENERATION, [])
    orders.open_partitions(other, JOB, GENERATION)
    taken: list[int] = []
    regions = other.hosted()[0].regions
    take = regions.take

    def counted(nbytes: int) -> object:
        taken.append(nbytes)
        return take(nbytes)

    regions.take = counted  # type: ignore[assignment, method-assign]

    for attempt in range(4):
        with failpoints.armed("wal.before_fence", gone), pytest.raises(StorageUnavailable):
            yard.successor(saved, 2, FIRST, into=other, life=2 + attempt, generation=Generation(5 + attempt))
    once = len(taken)
    yard.successor(saved, 2, FIRST, into=other, life=9, generation=Generation(9))
    assert len(taken) == once
    assert state(other)[0][0] == 0


def test_shared_memory_is_copied_before_it_is_recorded(yard: Yard) -> None:
    """A worker may write into its memory while the log is written (rule C5)."""
    first, saved = yard.begun()
    shared = SharedMemory(4096, read_only=False)
    order = dataclasses.replace(order_of(first, 0), shared_at=0)
    payload = shared.bytes[: order.payload_bytes]
    payload[:] = payload_of(order)

    def scribble(_: str) -> None:
        payload[:] = 0xFF

    with failpoints.armed("wal.before_apply", scribble):
        admitted = admission.admit_push(first, order)
        pushes.push(first, admitted, order, payload)
    shared.close()
    before = state(first)
    assert np.isfinite(np.frombuffer(before[0][1])).all()
    assert state(yard.successor(saved, 2, FIRST)) == before


@pytest.mark.parametrize("mode", list(UpdateMode))
@pytest.mark.parametrize("seed", range(6))
def test_any_prefix_of_a_log_holds_what_was_acknowledged(tmp_path: Path, mode: UpdateMode, seed: int) -> None:
    """Several threads push under several sources; wherever the server dies, its successor has what it had answered,
    and the undisturbed run's bits."""
    rng = random.Random(f"{mode} {seed}")
    with yard_of(tmp_path, mode) as yard:
        first, saved = yard.begun()
        rounds = rng.randint(3, 8)
        sources: list[Source] = [RankSource(Rank(0)), RankSource(Rank(1))]
        if mode is UpdateMode.ASYNC:
            sources = [DataShardSource(0, 0, index) for index in range(4)]
            pushes.open_sources(first.hosted()[0], [(SourceKey(source), Token(1)) for source in sources])
        barrier = threading.Barrier(len(sources))
        errors: list[BaseException] = []

        def work(source: Source) -> None:
            try:
                for number in range(rounds):
                    push(first, number, source=source)
                    barrier.wait(30)
            except BaseException as error:  # noqa: BLE001 (told by the test's own thread)
                errors.append(error)
                barrier.abort()

        threads = [threading.Thread(target=work, args=(source,)) for source in sources]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors, errors
        before = state(first)
        assert before[0][0] == (rounds if mode is UpdateMode.SYNC else rounds * len(sources))
        assert state(yard.successor(saved, 2, FIRST)) == before


def test_a_log_ends_for_all_where_its_first_reader_saw_the_end(yard: Yard) -> None:
    """What a zombie appends later was never acknowledged, and must not come back either."""
    first, saved = yard.begun(1)
    second = yard.successor(saved, 2, FIRST)
    with pytest.raises(NotReady):
        push(first, 1)
    push(second, 1, kind=PushKind.EMPTY)
    before = state(second)
    third = yard.successor(saved, 2, FIRST, SECOND, incarnation=THIRD, life=3, generation=Generation(6))
    assert state(third) == before


def test_what_was_written_and_not_acknowledged_may_count(yard: Yard) -> None:
    """A server that dies after the sync, before the answer: the worker asks again and is told that it counts."""
    first, saved = yard.begun()

    with failpoints.armed("wal.after_sync", gone), pytest.raises(NotReady):
        push(first, 0)
    second = yard.successor(saved, 2, FIRST)
    assert push(second, 0) == {Outcome.DUPLICATE}
    assert state(second)[0][0] == 1


@pytest.mark.parametrize("place", ["wal.before_fence", "wal.after_fence", "wal.before_end", "wal.after_end"])
def test_a_successor_that_dies_while_it_takes_over_is_followed_by_another(yard: Yard, place: str) -> None:
    first, saved = yard.begun(1)
    before = state(first)

    with failpoints.armed(place, gone), pytest.raises(StorageUnavailable):
        yard.successor(saved, 2, FIRST)
    assert state(yard.successor(saved, 2, FIRST, incarnation=THIRD)) == before
