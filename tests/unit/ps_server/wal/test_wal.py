"""A server's log: what is acknowledged comes back to the bit, what is damaged is named, what is fenced stops."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest

from shardyard.checkpoints.manifest import PartitionEntry
from shardyard.domain import failpoints
from shardyard.domain.consistency import NO_CLIPPING, Clipping, Durability, StaleRule, UpdateMode
from shardyard.domain.errors import (
    InvalidRequest,
    LogDamaged,
    NotReady,
    Refused,
    SequenceGap,
    ShardyardError,
    StaleGeneration,
    StaleIncarnation,
    StorageUnavailable,
    TooLarge,
)
from shardyard.domain.ids import Caller, Generation, Incarnation, JobId, PartitionId, Rank, Term, Token, Version
from shardyard.domain.layout.layouts import Block, JobLayout, PartitionLayout
from shardyard.domain.optimizers import OptimizerSpec, make_group
from shardyard.domain.pulls import PullHeader
from shardyard.domain.push_names import DataShardSource, PushName, RankSource, Source, SourceKey, WorkerSource
from shardyard.domain.pushes import Outcome, PushHeader, PushKind, PushPart
from shardyard.domain.variables import DType, VariableSpec
from shardyard.runtime.waits import WaitRegistry
from shardyard.transport.shared_memory import SharedMemory
from shardyard_ps_server.checkpoint.restore import Restore
from shardyard_ps_server.checkpoint.saver import Saved, SaveRequest
from shardyard_ps_server.hosting import admission, orders, pulls, pushes
from shardyard_ps_server.hosting.hosted_job import CreateRequest
from shardyard_ps_server.hosting.store import Store
from shardyard_ps_server.partition import partition as partitions
from shardyard_ps_server.partition.checkpoint_cuts import block_arrays, take_cut
from shardyard_ps_server.partition.update_rules import UpdateRules
from shardyard_ps_server.service.exchange_stream import is_immediate
from shardyard_ps_server.tables.memory.budget import Budget
from shardyard_ps_server.values.versions import aligned_empty
from shardyard_ps_server.wal.records import (
    RECORD_HEADER_BYTES,
    SEGMENT_HEADER_BYTES,
    Mark,
    RecordKind,
    encode_mark,
)
from shardyard_ps_server.wal.replay import open_head, push_head
from shardyard_ps_server.wal.segments import ASIDE_KEPT_S, END, FENCED, ID, SYNCED, LogFiles, LogRoot
from shardyard_ps_server.wal.wal import Wal

JOB, FIRST, SECOND, THIRD = JobId((1 << 32) | 1), Incarnation(3), Incarnation(5), Incarnation(7)
GENERATION, NEXT = Generation(4), Generation(5)
SGD = (make_group("sgd", {"lr": 0.3, "momentum": 0.9}),)
SHARD = DataShardSource(0, 0, 0)
OWNED = [PartitionId(0), PartitionId(1)]
LAYOUT = JobLayout(
    tuple(VariableSpec(name, DType.FLOAT64, (8,)) for name in "abcd"),
    OptimizerSpec("sgd", SGD),
    tuple(PartitionLayout(p, 128, (Block(2 * p, 0, 8, 0), Block(2 * p + 1, 0, 8, 64))) for p in OWNED),
)
WORKER = Incarnation(10)
COORDINATOR = Caller(JOB, term=Term(2))


class Yard:
    """Servers that share a folder of logs, and a folder of checkpoints."""

    def __init__(
        self,
        folder: Path,
        mode: UpdateMode = UpdateMode.ASYNC,
        clipping: Clipping = NO_CLIPPING,
        *,
        stale: StaleRule | None = None,
        layout: JobLayout = LAYOUT,
    ) -> None:
        self.layout = layout
        self.logs = LogRoot(folder / "wal")
        self.checkpoints = folder / "checkpoints"
        self.mode = mode
        self.rules = UpdateRules(mode, 2, Durability.WAL, stale, clipping)
        self.failures: list[ShardyardError] = []
        self._stores: list[Store] = []
        self.budget: Budget | None = None

    def empty(self, incarnation: Incarnation) -> Store:
        store = Store(logs=self.logs, on_failure=self.failures.append, budget=self.budget)
        self._stores.append(store)
        store.become(incarnation, Term(2))
        return store

    def first(self, incarnation: Incarnation = FIRST) -> Store:
        """With checkpoint 1, of zeros."""
        store = self.empty(incarnation)
        orders.create(store, CreateRequest(JOB, GENERATION, self.layout, OWNED, self.rules))
        orders.open_partitions(store, JOB, GENERATION)
        leases(store)
        self.save(store, 1)
        return store

    def begun(self) -> tuple[Store, list[Saved]]:
        """A first server, and its checkpoint 2."""
        store = self.first()
        return store, self.save(store, 2)

    def save(self, store: Store, number: int, *, oldest: int = 1, logs: Sequence[Incarnation] = ()) -> list[Saved]:
        step = None if self.mode is UpdateMode.ASYNC else store.hosted()[0].partitions[OWNED[0]].describe()[0].number
        order = SaveRequest(number, step, 0, 0, oldest, frozenset(logs))
        generation = store.hosted()[0].generation
        return orders.save(store, COORDINATOR, store.incarnation, generation, order, str(self.checkpoints))

    def successor(
        self,
        saved: Sequence[Saved],
        number: int,
        *trail: Incarnation,
        incarnation: Incarnation = SECOND,
        life: int = 2,
        owned: Sequence[PartitionId] = OWNED,
        generation: Generation = NEXT,
        into: Store | None = None,
        job: JobId = JOB,
    ) -> Store:
        """A server that goes on where those in `trail` have stopped. `job`: who wrote the checkpoint."""
        store = into or self.empty(incarnation)
        entries = tuple(
            PartitionEntry(each.partition, Version(life, each.version.number), (each.file,), each.tables)
            for each in saved
            if each.partition in owned
        )
        restore = Restore(str(self.checkpoints), entries, number, dict.fromkeys(owned, trail), job)
        orders.create(store, CreateRequest(JOB, generation, self.layout, owned, self.rules, restore))
        return store

    def close(self) -> None:
        for store in self._stores:
            store.close()


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[Yard]:
    made = Yard(tmp_path)
    yield made
    made.close()


@contextmanager
def yard_of(
    folder: Path,
    mode: UpdateMode = UpdateMode.ASYNC,
    clipping: Clipping = NO_CLIPPING,
    *,
    stale: StaleRule | None = None,
    layout: JobLayout = LAYOUT,
) -> Iterator[Yard]:
    made = Yard(folder, mode, clipping, stale=stale, layout=layout)
    try:
        yield made
    finally:
        made.close()


def leases(store: Store, token: int = 1) -> None:
    hosted = store.hosted()[0]
    sources: list[Source] = [SHARD]
    if hosted.mode is UpdateMode.SYNC:
        sources = [RankSource(Rank(rank)) for rank in range(2)]
    pushes.open_sources(hosted, [(SourceKey(source), Token(token)) for source in sources])


def order_of(
    store: Store,
    sequence: int,
    *,
    source: Source = SHARD,
    token: int = 1,
    absent: Sequence[int] = (),
    worker: Incarnation = WORKER,
    kind: PushKind = PushKind.GRADIENT,
) -> PushHeader:
    hosted = store.hosted()[0]
    parts = tuple(
        PushPart(p, 0)
        if kind is PushKind.EMPTY
        else PushPart(p, 128 - 64 * len(absent) * (p == 0), tuple(absent) if p == 0 else ())
        for p in sorted(hosted.partitions)
    )
    name = PushName(SourceKey(source), Token(token), sequence, sequence)
    counted = kind is PushKind.GRADIENT
    return PushHeader(
        Caller(JOB, worker),
        store.incarnation,
        hosted.generation,
        name,
        kind,
        parts,
        1.0 if counted else 0.0,
        SGD if counted else (),
    )


def payload_of(order: PushHeader) -> np.ndarray:
    """Whole partitions, in their order, of a gradient of its own for each name."""
    rank = order.name.key.source.rank if isinstance(order.name.key.source, RankSource) else 9
    gradient = np.random.default_rng([order.name.first, rank]).normal(size=32)
    payload = aligned_empty(order.payload_bytes)
    at = 0
    for part in order.parts:
        mine = gradient[16 * part.partition : 16 * part.partition + part.payload_bytes // 8]
        payload[at : at + part.payload_bytes] = mine.view(np.uint8)
        at += part.payload_bytes
    return payload


def send(store: Store, order: PushHeader) -> set[Outcome]:
    hosted = admission.admit_push(store, order)
    return {result.outcome for result in pushes.push(store, hosted, order, payload_of(order))}


def push(store: Store, sequence: int, **said: object) -> set[Outcome]:
    return send(store, order_of(store, sequence, **said))  # type: ignore[arg-type]


def step(store: Store, number: int) -> None:
    for rank in range(2):
        push(store, number, source=RankSource(Rank(rank)))


def state(store: Store) -> dict[int, tuple[int, bytes, bytes, tuple[object, ...]]]:
    """All that a partition is: version, values, optimizer state, ledger."""
    found = {}
    for number, each in sorted(store.hosted()[0].partitions.items()):
        cut = take_cut(each)
        cut.complete()
        slots = b"".join(
            array.tobytes()
            for index in range(len(each.payload.blocks))
            for name, array in sorted(block_arrays(each, index, cut).items())
            if name != "values"
        )
        values = b"".join(
            block_arrays(each, index, cut)["values"].tobytes() for index in range(len(each.payload.blocks))
        )
        marks = tuple(sorted(cut.marks, key=str))
        found[int(number)] = (cut.version.number, values, slots, marks)
        cut.release()
    return found


# ---- what was acknowledged comes back


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


def test_compensation_is_refused_where_it_could_not_be_replayed(tmp_path: Path) -> None:
    with (
        yard_of(tmp_path, stale=StaleRule(compensation=0.1)) as yard,
        pytest.raises(InvalidRequest, match="which has a log, to be compensated") as refused,
    ):
        yard.first()
    assert "set job.consistency.delay_compensation to 0" in str(refused.value)


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
    first, saved = yard.begun()
    push(first, 0)
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
    first, saved = yard.begun()
    for sequence in range(3):
        push(first, sequence)
    before = state(first)
    second = yard.successor(saved, 2, FIRST, owned=[OWNED[0]])
    third = yard.successor(saved, 2, FIRST, incarnation=THIRD, owned=[OWNED[1]])
    assert state(second) | state(third) == before


def test_a_server_takes_another_ones_partitions_beside_its_own(yard: Yard) -> None:
    logs: list[Store] = []
    for incarnation, owned in ((FIRST, [OWNED[0]]), (SECOND, [OWNED[1]])):
        store = yard.empty(incarnation)
        orders.create(
            store,
            CreateRequest(JOB, GENERATION, LAYOUT, owned, UpdateRules(UpdateMode.ASYNC, 2, durability=Durability.WAL)),
        )
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
    orders.create(
        second,
        CreateRequest(JOB, NEXT, LAYOUT, OWNED, UpdateRules(UpdateMode.ASYNC, 2, durability=Durability.WAL), restore),
    )
    assert state(second) == before
    push(second, 1)
    before = state(second)
    entries = tuple(PartitionEntry(e.partition, Version(3, 0), (e.file,)) for e in saved)
    third = yard.empty(THIRD)
    trails = {OWNED[0]: (FIRST, SECOND), OWNED[1]: (SECOND,)}
    restore = Restore(str(yard.checkpoints), entries, 1, trails)
    orders.create(
        third,
        CreateRequest(
            JOB, Generation(6), LAYOUT, OWNED, UpdateRules(UpdateMode.ASYNC, 2, durability=Durability.WAL), restore
        ),
    )
    assert state(third) == before


def test_what_a_job_that_went_back_has_undone_is_not_done_again(yard: Yard) -> None:
    first, saved = yard.begun()
    push(first, 0)
    push(first, 1)
    yard.successor(saved, 2, into=first)  # as a person wished: without the log
    assert state(first)[0][0] == 0
    push(first, 0)
    before = state(first)
    assert before[0][0] == 1
    assert state(yard.successor(saved, 2, FIRST, life=3, generation=Generation(6))) == before


def test_a_job_that_goes_back_counts_nothing_of_the_time_before(yard: Yard) -> None:
    """A push that comes while partitions in use are restored is of the old generation: refused, not added to them."""
    first, saved = yard.begun()
    push(first, 0)
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
    orders.create(
        other, CreateRequest(JOB, GENERATION, LAYOUT, [], UpdateRules(UpdateMode.ASYNC, 2, durability=Durability.WAL))
    )
    orders.open_partitions(other, JOB, GENERATION)
    taken: list[int] = []
    regions = other.hosted()[0].regions
    take = regions.take

    def counted(nbytes: int) -> object:
        taken.append(nbytes)
        return take(nbytes)

    regions.take = counted  # type: ignore[assignment, method-assign]

    def die(_: str) -> None:
        raise OSError(5, "gone")

    for attempt in range(4):
        with failpoints.armed("wal.before_fence", die), pytest.raises(StorageUnavailable):
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
        hosted = admission.admit_push(first, order)
        pushes.push(first, hosted, order, payload)
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


def test_a_sync_is_shared_by_all_who_wait(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    first = yard.first()
    sources = [DataShardSource(0, 0, index) for index in range(6)]
    pushes.open_sources(first.hosted()[0], [(SourceKey(source), Token(1)) for source in sources])
    syncs = []
    held, go = threading.Event(), threading.Event()
    fdatasync = os.fdatasync

    def slow(fd: int) -> None:
        syncs.append(fd)
        if len(syncs) == 1:
            held.set()
            assert go.wait(30)
        fdatasync(fd)

    monkeypatch.setattr("shardyard_ps_server.wal.wal.os.fdatasync", slow)
    threads = [threading.Thread(target=push, args=(first, 0), kwargs={"source": source}) for source in sources]
    threads[0].start()
    assert held.wait(30)
    for thread in threads[1:]:
        thread.start()
    wal = first.hosted()[0].wal
    assert wal is not None
    deadline = threading.Event()
    for _ in range(3_000):
        if wal._appended - wal._durable == len(sources):
            break
        deadline.wait(0.01)
    go.set()
    for thread in threads:
        thread.join()
    assert len(syncs) == 2
    assert state(first)[0][0] == len(sources)


def test_nothing_is_seen_before_it_is_durable(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    first = yard.first()
    held, go = threading.Event(), threading.Event()

    def slow(_: int) -> None:
        held.set()
        assert go.wait(30)

    monkeypatch.setattr("shardyard_ps_server.wal.wal.os.fdatasync", slow)
    thread = threading.Thread(target=push, args=(first, 0))
    thread.start()
    assert held.wait(30)
    wish = PullHeader(Caller(JOB, WORKER), FIRST, GENERATION, tuple(OWNED), 0, exactly=False)
    result, buffers = pulls.hold(admission.admit_pull(first, wish), wish)
    assert [part.version.number for part in result.parts] == [0, 0]
    buffers.release()
    ((_, marks),) = pushes.read_ledger(first.hosted()[0], [(SourceKey(SHARD), Token(0))])
    assert [mark.next for mark in marks] == [0, 0]
    go.set()
    thread.join()
    assert state(first)[0][0] == 1


def test_what_is_under_way_is_in_the_segment_before_a_checkpoint(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that begins while a push is being synced waits for it."""
    first = yard.first()
    held, go = threading.Event(), threading.Event()
    fdatasync = os.fdatasync

    def slow(fd: int) -> None:
        held.set()
        assert go.wait(30)
        fdatasync(fd)

    monkeypatch.setattr("shardyard_ps_server.wal.wal.os.fdatasync", slow)
    saved: list[Saved] = []
    threads = [
        threading.Thread(target=push, args=(first, 0)),
        threading.Thread(target=lambda: saved.extend(yard.save(first, 2))),
    ]
    threads[0].start()
    assert held.wait(30)
    threads[1].start()
    threads[1].join(0.2)
    assert not saved
    go.set()
    for thread in threads:
        thread.join()
    assert [each.version.number for each in saved] == [1, 1]
    before = state(first)
    assert state(yard.successor(saved, 2, FIRST)) == before


def test_pushes_take_effect_in_the_order_of_the_log(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    first, saved = yard.begun()
    sources = [DataShardSource(0, 0, index) for index in (1, 2)]
    pushes.open_sources(first.hosted()[0], [(SourceKey(source), Token(1)) for source in sources])
    appended, go = threading.Event(), threading.Event()
    sync = Wal.sync

    def slow(wal: Wal, ticket: int) -> None:
        sync(wal, ticket)
        if not appended.is_set():
            appended.set()
            assert go.wait(30)

    monkeypatch.setattr(Wal, "sync", slow)
    threads = [threading.Thread(target=push, args=(first, 0), kwargs={"source": source}) for source in sources]
    threads[0].start()
    assert appended.wait(30)
    threads[1].start()
    threads[1].join(0.2)
    assert first.hosted()[0].partitions[OWNED[0]].describe()[0].number == 0
    go.set()
    for thread in threads:
        thread.join()
    before = state(first)
    assert before[0][0] == 2
    assert state(yard.successor(saved, 2, FIRST)) == before


def test_exchanges_are_not_answered_in_the_receiving_thread(yard: Yard) -> None:
    first = yard.first()
    order = order_of(first, 0)
    assert not is_immediate(order, first.hosted()[0])
    plain = Store()
    plain.become(FIRST, Term(2))
    orders.create(plain, CreateRequest(JOB, GENERATION, LAYOUT, OWNED, UpdateRules(UpdateMode.ASYNC, 2)))
    assert is_immediate(order, plain.hosted()[0])
    plain.close()


# ---- fences


def test_a_server_whose_log_was_taken_over_makes_nothing_visible(yard: Yard) -> None:
    first, saved = yard.begun()
    push(first, 0)
    before = state(first)
    second = yard.successor(saved, 2, FIRST)
    with pytest.raises(NotReady, match="taken over"):
        push(first, 1)
    assert state(first) == before
    assert isinstance(yard.failures[0], StaleIncarnation)
    with pytest.raises(NotReady):
        push(first, 1)
    assert push(second, 1) == {Outcome.APPLIED}


def test_a_server_whose_log_was_deleted_since_makes_nothing_visible(yard: Yard) -> None:
    """It slept until no checkpoint needed its log any more, and the fence went with it."""
    first = yard.first()
    before = state(first)
    second = yard.successor(yard.save(first, 2), 2, FIRST)
    yard.save(second, 3, oldest=3)
    assert not log_of(yard).folder.exists()
    with pytest.raises(NotReady, match="taken over"):
        push(first, 0)
    assert state(first) == before


def test_a_log_ends_for_all_where_its_first_reader_saw_the_end(yard: Yard) -> None:
    """What a zombie appends later was never acknowledged, and must not come back either."""
    first, saved = yard.begun()
    push(first, 0)
    second = yard.successor(saved, 2, FIRST)
    with pytest.raises(NotReady):
        push(first, 1)
    push(second, 1, kind=PushKind.EMPTY)
    before = state(second)
    third = yard.successor(saved, 2, FIRST, SECOND, incarnation=THIRD, life=3, generation=Generation(6))
    assert state(third) == before


def test_the_fence_is_up_before_the_log_is_read(yard: Yard) -> None:
    """A push that the owner has synced in between is either read by the successor or never acknowledged."""
    first, saved = yard.begun()
    outcomes: list[object] = []

    def late(_: str) -> None:
        try:
            outcomes.append(push(first, 0))
        except NotReady:
            outcomes.append(None)

    with failpoints.armed("wal.after_fence", late):
        second = yard.successor(saved, 2, FIRST)
    assert outcomes == [None]
    assert push(second, 0) in ({Outcome.APPLIED}, {Outcome.DUPLICATE})
    assert state(second)[0][0] == 1


def test_a_fenced_worker_and_an_old_generation_append_nothing(yard: Yard) -> None:
    first, saved = yard.begun()
    order = order_of(first, 0)
    hosted = admission.admit_push(first, order)
    orders.fence(first, [WORKER])
    with pytest.raises(StaleIncarnation):
        pushes.push(first, hosted, order, payload_of(order))
    other = dataclasses.replace(order_of(first, 0), caller=Caller(JOB, Incarnation(11)))
    hosted = admission.admit_push(first, other)
    hosted.generation = NEXT
    with pytest.raises(StaleGeneration):
        pushes.push(first, hosted, other, payload_of(other))
    assert state(yard.successor(saved, 2, FIRST))[0][0] == 0


def test_a_gap_is_refused_and_not_recorded(yard: Yard) -> None:
    first, saved = yard.begun()
    with pytest.raises(SequenceGap):
        push(first, 3)
    assert state(yard.successor(saved, 2, FIRST))[0][0] == 0


# ---- damage


def log_of(yard: Yard, server: Incarnation = FIRST) -> LogFiles:
    return yard.logs.log(JOB, server)


@pytest.fixture
def crashed(yard: Yard) -> tuple[Yard, list[Saved], dict[int, tuple[int, bytes, bytes, tuple[object, ...]]]]:
    first, saved = yard.begun()
    for sequence in range(4):
        push(first, sequence)
    return yard, saved, state(first)


Crashed = tuple[Yard, list[Saved], dict[int, tuple[int, bytes, bytes, tuple[object, ...]]]]


def test_any_bit_that_flipped_is_found_and_named(crashed: Crashed) -> None:
    yard, saved, before = crashed
    files = log_of(yard)
    whole = files.segment(2).read_bytes()
    synced = (files.folder / SYNCED).read_bytes()
    rng = random.Random(1)
    places = [(files.segment(2), whole, at) for at in rng.sample(range(len(whole)), 250)]
    places += [(files.folder / SYNCED, synced, at) for at in range(len(synced))]
    for index, (path, data, at) in enumerate(places):
        flipped = bytearray(data)
        flipped[at] ^= 1 << rng.randrange(8)
        path.write_bytes(flipped)
        for name in (FENCED, END):
            (files.folder / name).unlink(missing_ok=True)
        with pytest.raises(LogDamaged, match=str(path)) as caught:
            yard.successor(saved, 2, FIRST, incarnation=Incarnation(100 + index))
        assert int(caught.value.facts["offset"]) <= at
        path.write_bytes(data)
    (files.folder / END).unlink(missing_ok=True)
    assert state(yard.successor(saved, 2, FIRST)) == before


def test_a_log_that_lost_its_durable_end_is_damaged(crashed: Crashed) -> None:
    yard, saved, _ = crashed
    path = log_of(yard).segment(2)
    whole = path.read_bytes()
    for index, length in enumerate(random.Random(2).sample(range(len(whole)), 60)):
        path.write_bytes(whole[:length])
        with pytest.raises(LogDamaged, match=str(path)):
            yard.successor(saved, 2, FIRST, incarnation=Incarnation(100 + index))


def test_a_torn_tail_is_cut_off(crashed: Crashed) -> None:
    """As kill -9 leaves it, between a write and its sync: any part of a record that nobody was told of."""
    yard, saved, before = crashed
    files = log_of(yard)
    whole = files.segment(2).read_bytes()
    record = whole[SEGMENT_HEADER_BYTES : SEGMENT_HEADER_BYTES + (len(whole) - SEGMENT_HEADER_BYTES) // 4]
    for index, tail in enumerate((record[:1], record[:RECORD_HEADER_BYTES], record[:-1], record, b"\0" * 500)):
        files.segment(2).write_bytes(whole + tail)
        (files.folder / END).unlink(missing_ok=True)
        assert state(yard.successor(saved, 2, FIRST, incarnation=Incarnation(100 + index))) == before


def test_what_was_written_and_not_acknowledged_may_count(yard: Yard) -> None:
    """A server that dies after the sync, before the answer: the worker asks again and is told that it counts."""
    first, saved = yard.begun()

    def die(_: str) -> None:
        raise OSError(5, "gone")

    with failpoints.armed("wal.after_sync", die), pytest.raises(NotReady):
        push(first, 0)
    second = yard.successor(saved, 2, FIRST)
    assert push(second, 0) == {Outcome.DUPLICATE}
    assert state(second)[0][0] == 1


@pytest.mark.parametrize("place", ["wal.before_write", "wal.before_sync", "wal.after_sync", "wal.before_apply"])
def test_a_log_that_fails_stops_its_server(yard: Yard, place: str) -> None:
    first = yard.first()

    def fail(_: str) -> None:
        raise OSError(28, "No space left on device", str(place))

    with failpoints.armed(place, fail), pytest.raises((NotReady, OSError)):
        push(first, 0)
    assert len(yard.failures) == 1
    wish = PullHeader(Caller(JOB, WORKER), FIRST, GENERATION, tuple(OWNED), 0, exactly=False)
    _, buffers = pulls.hold(admission.admit_pull(first, wish), wish)
    assert not any(buffer.any() for _, buffer in buffers.buffers)
    buffers.release()
    with pytest.raises(NotReady, match="stops"):
        push(first, 0)


def test_a_missing_segment_is_named(crashed: Crashed) -> None:
    yard, saved, _ = crashed
    files = log_of(yard)
    shutil.move(files.segment(2), files.segment(1))
    with pytest.raises(LogDamaged, match="000000000002"):
        yard.successor(saved, 2, FIRST)


def test_a_segment_missing_in_the_middle_is_named(yard: Yard) -> None:
    first, saved = yard.begun()
    for number in (3, 4):
        push(first, number - 3)
        yard.save(first, number)
    log_of(yard).segment(3).unlink()
    with pytest.raises(LogDamaged, match=r"0004\.log at byte 0: it does not follow segment 2"):
        yard.successor(saved, 2, FIRST)


def test_a_segment_of_another_log_is_named(crashed: Crashed, tmp_path: Path) -> None:
    yard, saved, _ = crashed
    other = Yard(tmp_path / "other")
    second = other.first(SECOND)
    other.save(second, 2)
    shutil.copy(log_of(other, SECOND).segment(2), log_of(yard).segment(2))
    (log_of(yard).folder / SYNCED).write_bytes(encode_mark(Mark(2, SEGMENT_HEADER_BYTES)))
    with pytest.raises(LogDamaged, match="of server 5"):
        yard.successor(saved, 2, FIRST)
    other.close()


def test_a_log_that_is_elsewhere_is_said_to_be(yard: Yard, tmp_path: Path) -> None:
    _, saved = yard.begun()
    shutil.move(log_of(yard).folder, tmp_path / "away")
    with pytest.raises(StorageUnavailable, match="server 3 is not at"):
        yard.successor(saved, 2, FIRST)


def test_a_record_that_does_not_follow_is_damage(crashed: Crashed) -> None:
    """A whole record in the middle, with good checksums, that names work beyond the next."""
    yard, saved, _ = crashed
    wal = Wal(yard.logs.log(JOB, THIRD), segment=2, on_failure=yard.failures.append, wait_registry=WaitRegistry())
    first = yard._stores[0]
    order = order_of(first, 2)
    with wal.admission:
        wal.append(RecordKind.OPEN, open_head([(SourceKey(SHARD), Token(1))]), aligned_empty(0))
        ticket = wal.append(RecordKind.PUSH, push_head(order), payload_of(order))
    wal.sync(ticket)
    wal.close()
    with pytest.raises(LogDamaged, match="does not fit what came before"):
        yard.successor(saved, 2, THIRD)


# ---- segments and files


def test_segments_reach_back_to_the_oldest_checkpoint_that_is_kept(yard: Yard) -> None:
    first = yard.first()
    for number in (2, 3, 4):
        push(first, number - 2)
        yard.save(first, number)
    assert log_of(yard).numbers() == [1, 2, 3, 4]
    yard.save(first, 5, oldest=3)
    assert log_of(yard).numbers() == [3, 4, 5]


def test_logs_of_the_gone_are_deleted_once_no_checkpoint_needs_them(yard: Yard) -> None:
    first, saved = yard.begun()
    push(first, 0)
    second = yard.successor(saved, 2, FIRST)
    yard.save(second, 3, oldest=2, logs=[FIRST])
    assert log_of(yard).folder.is_dir()
    yard.save(second, 4, oldest=3)
    assert not log_of(yard).folder.is_dir()
    assert log_of(yard, SECOND).folder.is_dir()
    orders.drop(second, JOB)
    assert not list(yard.logs.path.glob("*/*"))


def test_server_that_was_given_up_deletes_no_log_of_its_successors(yard: Yard) -> None:
    """It wakes with an order of before the others became owners, and died."""
    first, saved = yard.begun()
    push(first, 0)
    yard.successor(saved, 2, FIRST)
    log_of(yard, SECOND).take_over(Generation(NEXT + 1))
    with contextlib.suppress(ShardyardError):
        yard.save(first, 3, oldest=2, logs=[FIRST])
    assert log_of(yard, SECOND).folder.is_dir()


def test_rule_c2_server_whose_own_log_nobody_took_over_deletes_none_of_later_owners(yard: Yard) -> None:
    """It was given up before there was a checkpoint, so values were given again, and nobody has read its log."""
    first = yard.first()
    second = yard.empty(SECOND)
    orders.create(
        second, CreateRequest(JOB, NEXT, LAYOUT, OWNED, UpdateRules(UpdateMode.ASYNC, 2, durability=Durability.WAL))
    )
    orders.open_partitions(second, JOB, NEXT)
    leases(second)
    saved = yard.save(second, 2, logs=[SECOND])
    push(second, 0)
    before = state(second)
    yard.successor(saved, 2, SECOND, incarnation=THIRD, generation=Generation(NEXT + 1))
    yard.save(first, 1, logs=[FIRST])
    fourth = yard.successor(saved, 2, SECOND, incarnation=Incarnation(THIRD + 1), generation=Generation(NEXT + 2))
    assert state(fourth) == before


def test_fence_says_the_highest_generation_under_which_it_was_raised_or_nothing(yard: Yard) -> None:
    first = yard.first()
    push(first, 0)
    files = log_of(yard)
    assert files.fenced_under is None
    files.take_over(Generation(12))
    files.take_over(NEXT)
    assert files.fenced_under == 12
    for torn in (b"", b"1", b"12", b"twelve\n"):
        (files.folder / FENCED).write_bytes(torn)
        assert files.fenced_under is None
        assert files.is_fenced
    files.take_over(NEXT)
    assert files.fenced_under == NEXT


def test_a_job_that_ends_leaves_no_log(yard: Yard) -> None:
    first = yard.first()
    push(first, 0)
    orders.drop(first, JOB)
    assert not list(yard.logs.path.iterdir())


def test_servers_of_one_folder_know_each_other(tmp_path: Path) -> None:
    first, second = LogRoot(tmp_path / "a").id, LogRoot(tmp_path / "a").id
    assert first == second
    assert LogRoot(tmp_path / "b").id != first
    (tmp_path / "a" / ID).write_text("nonsense")
    with pytest.raises(LogDamaged, match="does not name"):
        _ = LogRoot(tmp_path / "a").id


def test_a_server_without_a_folder_for_logs_refuses(yard: Yard) -> None:
    store = Store()
    store.become(FIRST, Term(2))
    with pytest.raises(InvalidRequest, match=r"yard\.wal"):
        orders.create(
            store,
            CreateRequest(JOB, GENERATION, LAYOUT, OWNED, UpdateRules(UpdateMode.ASYNC, 2, durability=Durability.WAL)),
        )
    assert not store.hosted()
    store.close()


def test_a_log_that_cannot_be_begun_leaves_nothing(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    store = yard.empty(FIRST)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shardyard_ps_server.wal.wal.os.write", full)
    with pytest.raises(StorageUnavailable, match="No space left"):
        orders.create(
            store,
            CreateRequest(JOB, GENERATION, LAYOUT, OWNED, UpdateRules(UpdateMode.ASYNC, 2, durability=Durability.WAL)),
        )
    assert not store.hosted()
    assert not yard.failures


def test_no_memory_for_what_was_recorded_stops_the_server(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    first = yard.first()

    def none(*_: object) -> object:
        raise TooLarge("no memory")

    monkeypatch.setattr(partitions.Versions, "take_idle", lambda _: None)
    monkeypatch.setattr(partitions.Versions, "allocate", none)
    with pytest.raises(TooLarge):
        push(first, 0)
    assert isinstance(yard.failures[0], TooLarge)


@pytest.mark.parametrize("place", ["wal.before_fence", "wal.after_fence", "wal.before_end", "wal.after_end"])
def test_a_successor_that_dies_while_it_takes_over_is_followed_by_another(yard: Yard, place: str) -> None:
    first, saved = yard.begun()
    push(first, 0)
    before = state(first)

    def die(_: str) -> None:
        raise OSError(5, "gone")

    with failpoints.armed(place, die), pytest.raises(StorageUnavailable):
        yard.successor(saved, 2, FIRST)
    assert state(yard.successor(saved, 2, FIRST, incarnation=THIRD)) == before


def test_a_log_that_could_not_be_begun_is_begun_later(yard: Yard) -> None:
    store = yard.empty(FIRST)

    def full(_: str) -> None:
        raise OSError(28, "No space left on device")

    with failpoints.armed("wal.after_segment", full), pytest.raises(StorageUnavailable):
        orders.create(
            store,
            CreateRequest(JOB, GENERATION, LAYOUT, OWNED, UpdateRules(UpdateMode.ASYNC, 2, durability=Durability.WAL)),
        )
    assert not log_of(yard).folder.exists()
    orders.create(
        store,
        CreateRequest(JOB, GENERATION, LAYOUT, OWNED, UpdateRules(UpdateMode.ASYNC, 2, durability=Durability.WAL)),
    )
    assert log_of(yard).numbers() == [0]


def test_numbers_that_are_given_again_begin_a_log_of_their_own(yard: Yard, caplog: pytest.LogCaptureFixture) -> None:
    """By a coordinator whose journal was lost: the other yard's log is put aside, fence and end included."""
    former = yard.first()
    push(former, 0)
    former.close()
    log_of(yard).take_over(NEXT)
    first, saved = yard.begun()
    push(first, 0)
    push(first, 1)
    assert state(yard.successor(saved, 2, FIRST)) == state(first)
    (aside,) = (each for each in log_of(yard).folder.parent.iterdir() if "of-another-yard" in each.name)
    assert {FENCED, END, SYNCED} < {each.name for each in aside.iterdir()}
    assert str(aside) in caplog.text
    assert [each.server for each in yard.logs.others(JOB, THIRD)] == [FIRST, SECOND]


def test_server_that_slept_until_its_log_was_deleted_knows_why_no_segment_can_be_begun(yard: Yard) -> None:
    first = yard.first()
    log_of(yard).take_over(NEXT)
    log_of(yard).remove()
    with pytest.raises(NotReady):
        yard.save(first, 2)
    assert [type(each) for each in yard.failures] == [StaleIncarnation]


def test_what_was_put_aside_is_deleted_after_a_week_and_nothing_else_is(yard: Yard) -> None:
    first = yard.first()
    first.close()
    os.utime(log_of(yard).folder, (0, 0))
    other = Store(logs=yard.logs)
    other.become(FIRST, Term(2))
    orders.create(
        other,
        CreateRequest(JOB, GENERATION, LAYOUT, OWNED, UpdateRules(UpdateMode.ASYNC, 2, durability=Durability.WAL)),
    )
    other.close()
    (aside,) = (each for each in log_of(yard).folder.parent.iterdir() if "of-another-yard" in each.name)
    for strange in ("3.of-another-yard-", "notes.txt", "3.of-another-yard-00000000x"):
        (aside.parent / strange).mkdir()
    before = {each.name for each in aside.parent.iterdir()}
    put_aside_s = aside.stat().st_mtime
    assert put_aside_s > 0, "when it was put aside counts, not when it was written"
    for each in (*aside.parent.iterdir(), yard.logs.path):
        if each != aside:
            os.utime(each, (0, 0))
    assert yard.logs.delete_aside(put_aside_s + ASIDE_KEPT_S - 1) == []
    assert yard.logs.delete_aside(put_aside_s + ASIDE_KEPT_S) == [aside]
    assert before - {each.name for each in aside.parent.iterdir()} == {aside.name}


def test_folder_of_logs_without_any_has_nothing_put_aside(tmp_path: Path) -> None:
    assert LogRoot(tmp_path / "none").delete_aside(1e12) == []


def test_log_of_a_server_that_was_gone_when_the_job_ended_is_put_aside(
    yard: Yard, caplog: pytest.LogCaptureFixture
) -> None:
    """What lives deletes its own; what was read is deleted; what nobody has read is kept for a while."""
    read, unread, living = yard.first(), yard.empty(THIRD), yard.empty(Incarnation(9))
    saved = yard.save(read, 2)
    for store in (unread, living):
        orders.create(
            store,
            CreateRequest(JOB, GENERATION, LAYOUT, OWNED, UpdateRules(UpdateMode.ASYNC, 2, durability=Durability.WAL)),
        )
    last = yard.successor(saved, 2, FIRST)
    read.close()
    unread.close()
    job = log_of(yard).folder.parent
    orders.drop(last, JOB)
    kept = {each.name for each in job.iterdir()}
    assert len(kept) == 2
    assert f"{Incarnation(9):x}" in kept
    (aside,) = (each for each in job.iterdir() if each.name.startswith(f"{THIRD:x}.of-an-ended-job-"))
    assert str(aside) in caplog.text
    orders.drop(living, JOB)
    assert {each.name for each in job.iterdir()} == {aside.name}
    assert yard.logs.delete_aside(aside.stat().st_mtime + ASIDE_KEPT_S) == [aside]
    assert not job.exists()


def test_log_that_is_deleted_is_locked_until_it_is_gone(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else another server would put aside what is left of it."""
    first, second = yard.first(), yard.empty(SECOND)
    orders.create(
        second,
        CreateRequest(JOB, GENERATION, LAYOUT, OWNED, UpdateRules(UpdateMode.ASYNC, 2, durability=Durability.WAL)),
    )
    remove, seen = LogFiles.remove, []

    def slowly(files: LogFiles) -> None:
        if files.server == FIRST:
            seen.append(log_of(yard).end_with_job())
        remove(files)

    monkeypatch.setattr(LogFiles, "remove", slowly)
    orders.drop(first, JOB)
    assert seen == [None]
    orders.drop(second, JOB)
    assert not list(yard.logs.path.glob("*/*"))


def values_of(store: Store, fill: float) -> None:
    hosted = store.hosted()[0]
    parts = tuple(PushPart(number, 128) for number in sorted(hosted.partitions))
    name = PushName(SourceKey(WorkerSource(WORKER)), Token(0), 0, 0)
    caller = Caller(JOB, WORKER)
    order = PushHeader(caller, store.incarnation, hosted.generation, name, PushKind.VALUES, parts, 0.0, ())
    payload = aligned_empty(order.payload_bytes)
    payload.view(np.float64)[:] = fill
    pushes.initialize(store, admission.admit_push(store, order), order, payload)


def test_first_values_are_given_again_to_servers_that_had_them(yard: Yard) -> None:
    """Another server has died before the first checkpoint."""
    first = yard.empty(FIRST)
    orders.create(
        first,
        CreateRequest(JOB, GENERATION, LAYOUT, OWNED[:1], UpdateRules(UpdateMode.ASYNC, 2, durability=Durability.WAL)),
    )
    values_of(first, 1.0)
    orders.open_partitions(first, JOB, GENERATION)
    old = order_of(first, 0)
    yard.save(first, 1, oldest=0)

    def create(generation: Generation, owned: Sequence[PartitionId] = OWNED) -> None:
        orders.create(
            first,
            CreateRequest(JOB, generation, LAYOUT, owned, UpdateRules(UpdateMode.ASYNC, 2, durability=Durability.WAL)),
        )

    before = first.hosted()[0]
    admitted = admission.admit_push(first, old)
    create(NEXT)
    for late in (lambda: send(first, old), lambda: pushes.push(first, admitted, old, payload_of(old))):
        with pytest.raises(StaleGeneration):
            late()
    with pytest.raises(StaleGeneration):
        create(GENERATION, OWNED[:1])
    with pytest.raises(NotReady, match="first values"):
        push(first, 0)
    assert {each[1:] for each in state(first).values()} == {(bytes(128), bytes(128), ())}
    values_of(first, 2.0)
    create(NEXT)
    orders.open_partitions(first, JOB, NEXT)
    leases(first)
    assert before is not first.hosted()[0]
    saved = yard.save(first, 2, oldest=0)
    push(first, 0)
    wanted = state(first)
    assert np.frombuffer(wanted[0][1])[0] != 2.0
    assert state(yard.successor(saved, 2, FIRST, generation=Generation(6), life=3)) == wanted
    assert not yard.failures


def test_partitions_that_cannot_begin_anew_stay_what_they_were(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    first = yard.empty(FIRST)
    orders.create(
        first,
        CreateRequest(JOB, GENERATION, LAYOUT, OWNED, UpdateRules(UpdateMode.ASYNC, 2, durability=Durability.WAL)),
    )
    values_of(first, 1.0)
    orders.open_partitions(first, JOB, GENERATION)
    before = state(first)

    def refuse(*_: object, **__: object) -> NoReturn:
        raise TooLarge("no memory")

    with monkeypatch.context() as patch:
        patch.setattr("shardyard_ps_server.hosting.provisioning.Partition", refuse)
        with pytest.raises(TooLarge):
            orders.create(
                first,
                CreateRequest(JOB, NEXT, LAYOUT, OWNED, UpdateRules(UpdateMode.ASYNC, 2, durability=Durability.WAL)),
            )
    assert state(first) == before
    leases(first)
    with pytest.raises(InvalidRequest, match=r"partition 0 of job 1\.1 to begin anew, which has counted work"):
        orders.create(
            first, CreateRequest(JOB, NEXT, LAYOUT, OWNED, UpdateRules(UpdateMode.ASYNC, 2, durability=Durability.WAL))
        )
    assert push(first, 0) == {Outcome.APPLIED}


def test_yards_that_share_a_folder_of_logs_do_not_share_a_log(yard: Yard) -> None:
    first = yard.first()
    push(first, 0)
    other = yard.empty(FIRST)
    with pytest.raises(StorageUnavailable, match="of another yard writes the log"):
        orders.create(
            other,
            CreateRequest(JOB, GENERATION, LAYOUT, OWNED, UpdateRules(UpdateMode.ASYNC, 2, durability=Durability.WAL)),
        )
    assert push(first, 1) == {Outcome.APPLIED}


def test_a_run_that_begins_with_a_high_checkpoint_of_another_begins_segments_of_its_own(yard: Yard) -> None:
    """Its first checkpoint has number 1 where it keeps its own. What that one has, a source that was forgotten since
    among it, is not done again."""
    run = yard.successor(yard.save(yard.first(), 40), 40, job=JobId(JOB + 1), incarnation=SECOND)
    own = SourceKey(WorkerSource(WORKER))
    send(run, order_of(run, 0, source=own.source, token=0))
    saved = yard.save(run, 1)
    assert log_of(yard, SECOND).numbers() == [1], "the one before it is not needed"
    orders.forget_sources(run, COORDINATOR, SECOND, NEXT, [], [WORKER], Token(0))
    third = yard.successor(saved, 1, SECOND, incarnation=THIRD, life=3, generation=Generation(NEXT + 1))
    assert [each[:3] for each in state(third).values()] == [each[:3] for each in state(run).values()]


@pytest.mark.parametrize("place", ["wal.before_rotate", "wal.after_rotate"])
def test_a_segment_that_cannot_be_begun_stops_the_server_and_loses_nothing(yard: Yard, place: str) -> None:
    first, saved = yard.begun()
    push(first, 0)
    before = state(first)

    def fail(_: str) -> None:
        raise OSError(28, "No space left on device")

    with failpoints.armed(place, fail), pytest.raises(NotReady):
        yard.save(first, 3)
    assert len(yard.failures) == 1
    assert state(yard.successor(saved, 2, FIRST)) == before
