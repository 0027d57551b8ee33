"""A server's partitions into a checkpoint and back: onto another server, beside others, and in place."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path

import pytest

from shardyard.checkpoints.manifest import PartitionEntry, PartitionFile
from shardyard.domain import limits
from shardyard.domain.consistency import UpdateMode
from shardyard.domain.errors import (
    CheckpointDamaged,
    CheckpointNotFound,
    InvalidRequest,
    NotFound,
    NotReady,
    SequenceGap,
    ShardyardError,
    StaleGeneration,
    StaleIncarnation,
    StaleToken,
    TooLarge,
)
from shardyard.domain.ids import Generation, Incarnation, PartitionId, Rank, Term, Token, Version
from shardyard.domain.push_names import (
    RankSource,
    SourceKey,
    WorkerSource,
)
from shardyard.domain.pushes import Outcome
from shardyard.wire.v1 import common_pb2 as common
from shardyard.wire.v1 import parameter_server_pb2 as wire
from shardyard_ps_server.checkpoint.restore import Restore
from shardyard_ps_server.checkpoint.saver import Saved, SaveRequest
from shardyard_ps_server.hosting import admission, orders, pushes
from shardyard_ps_server.hosting.store import Store
from shardyard_ps_server.service.servicer import _restore
from tests.support.server_checkpoints import (
    COORDINATOR,
    DONE,
    GENERATION,
    HERE,
    JOB,
    NEXT,
    OWNED,
    SHARD,
    WORKER,
    create,
    entries,
    gradient,
    leased,
    made,
    push,
    push_step,
    pushed,
    restored,
    save,
    server,
    stores_end,
    trained,
    values,
)

__all__ = ["stores_end"]


# ---- there and back


def test_restored_server_has_values_state_and_ledger_of_the_moment(tmp_path: Path) -> None:
    store = trained(3)
    before = values(store)
    saved = save(store, tmp_path, 1)
    for sequence in range(3, 5):
        push(store, sequence)
    after = values(store)
    other = restored(tmp_path, entries(saved))
    assert values(other) == before
    assert [other.hosted()[0].partitions[p].describe()[0] for p in OWNED] == [Version(2, 3)] * 2
    assert push(other, 2) == {Outcome.DUPLICATE}
    with pytest.raises(SequenceGap):
        push(other, 4)
    for sequence in range(3, 5):
        assert push(other, sequence) == {Outcome.APPLIED}
    assert values(other) == after


def test_blocks_that_have_not_changed_since_are_left_out(tmp_path: Path) -> None:
    store = trained(1)
    first = save(store, tmp_path, 1)
    assert [each.file.blocks for each in first] == [(0, 1)] * 2
    push(store, 1, absent=[1], owned=OWNED)
    second = save(store, tmp_path, 2, base=1)
    assert [each.file.blocks for each in second] == [(0,), (0, 1)]
    none = save(store, tmp_path, 3, base=2)
    assert [each.file.blocks for each in none] == [(), ()]
    assert [each.file.blocks for each in save(store, tmp_path, 4, base=9)] == [(0, 1)] * 2
    # put together from three files
    kept = (PartitionFile(first[0].file.file, (1,)), PartitionFile(second[0].file.file, (0,)))
    entry = PartitionEntry(PartitionId(0), Version(2, 2), (PartitionFile(none[0].file.file, ()), *kept))
    other = restored(tmp_path, (entry,), owned=OWNED[:1])
    assert values(other, OWNED[:1]) == values(store, OWNED[:1])


@pytest.mark.parametrize("step", [0, 2])
def test_synchronous_step_is_saved_when_it_comes(tmp_path: Path, step: int) -> None:
    store = leased(server(UpdateMode.SYNC))
    saved: list[list[Saved]] = []
    thread = threading.Thread(target=lambda: saved.append(save(store, tmp_path, 1, step=step, wait_ms=10_000)))
    thread.start()
    if step == 0:
        thread.join()
    pause = threading.Event()
    for _ in range(1_000):
        if step == 0 or all(store.hosted()[0].partitions[p].named_cut is not None for p in OWNED):
            break
        pause.wait(0.01)
    seen = {}
    for number in range(4):
        seen[number] = values(store)
        push_step(store, number)
    thread.join()
    assert [each.version for each in saved[0]] == [Version(1, step)] * 2
    other = restored(tmp_path, entries(saved[0]), UpdateMode.SYNC)
    assert values(other) == seen[step]
    for number in range(step, 4):
        assert values(other) == seen[number]
        push_step(other, number)
    assert values(other) == values(store)


def test_step_that_has_passed_somewhere_or_does_not_come_is_not_saved(tmp_path: Path) -> None:
    store = leased(server(UpdateMode.SYNC))
    with pytest.raises(NotReady, match="step 1 of partition 0"):
        save(store, tmp_path, 1, step=1, wait_ms=10)
    push_step(store, 0)
    with pytest.raises(InvalidRequest) as raised:
        save(store, tmp_path, 2, step=0)
    assert raised.value.facts == {"newest": "1"}
    assert not list(tmp_path.iterdir())
    # neither is in the way of the next
    assert len(save(store, tmp_path, 3, step=1)) == 2


# ---- a server that has partitions already


def test_living_server_takes_over_partitions_of_a_dead_one(tmp_path: Path) -> None:
    store = trained(2)
    saved = save(store, tmp_path, 1)
    living = leased(server(owned=OWNED[:1]))
    for sequence in range(3):
        push(living, sequence, owned=OWNED[:1])
    (mine,) = values(living, OWNED[:1])
    taken = Restore(str(tmp_path), entries(saved)[1:])
    for _ in range(2):  # the same order again does nothing
        create(living, taken, generation=NEXT)
    assert values(living, generation=NEXT) == (mine, values(store)[1])
    with pytest.raises(StaleGeneration):
        push(living, 3, owned=OWNED[:1])
    partitions = living.hosted()[0].partitions
    assert [partitions[p].describe()[0] for p in OWNED] == [Version(1, 3), Version(2, 2)]
    with pytest.raises(SequenceGap):
        push(living, 3, generation=NEXT)
    # rule A2: what one has and the other has not is counted once in each
    assert push(living, 2, generation=NEXT) == {Outcome.APPLIED, Outcome.DUPLICATE}


def test_whole_job_goes_back_in_place(tmp_path: Path) -> None:
    store = leased(server(UpdateMode.SYNC))
    push_step(store, 0)
    saved = save(store, tmp_path, 1, step=1)
    push_step(store, 1)
    push(store, 2, source=RankSource(Rank(0)))
    later = values(store)
    back = Restore(str(tmp_path), entries(saved))
    create(store, back, generation=NEXT, mode=UpdateMode.SYNC)
    create(store, back, generation=NEXT, mode=UpdateMode.SYNC)
    leased(store, NEXT)
    with pytest.raises(StaleGeneration):
        push_step(store, 2)
    push_step(store, 1, NEXT)
    assert values(store, generation=NEXT) == later


def steps_then_shards(tmp_path: Path) -> tuple[Store, Restore]:
    """A synchronous job of one step, and how it goes on from there: the first batch of a data shard is in that step."""
    store = leased(server(UpdateMode.SYNC))
    push_step(store, 0)
    saved = save(store, tmp_path, 1, step=1)
    return store, Restore(str(tmp_path), entries(saved), 1, job=JOB, begun=((SHARD, 1),))


def test_job_goes_over_to_asynchronous_updates_with_what_was_counted_as_steps(tmp_path: Path) -> None:
    store, restore = steps_then_shards(tmp_path)
    before = values(store)
    order = pushed(1, RankSource(Rank(0)))
    admitted = admission.admit_push(store, order)
    for _ in range(2):  # the same order again does nothing
        create(store, restore, generation=NEXT, staleness=3, switches=1)
    with pytest.raises(StaleGeneration):  # what was admitted before
        pushes.push(store, admitted, order, gradient(order))
    with pytest.raises(StaleGeneration):  # and so reads are that were under way
        admitted.hosted.check_generation(GENERATION)
    assert values(store, generation=NEXT) == before
    hosted = store.hosted()[0]
    assert (hosted.mode, hosted.clocks and hosted.clocks.bound) == (UpdateMode.ASYNC, 3)
    assert [hosted.partitions[p].describe()[0] for p in OWNED] == [Version(2, 1)] * 2
    leased(store, NEXT)
    assert push(store, 0, generation=NEXT) == {Outcome.DUPLICATE}
    assert push(store, 1, generation=NEXT) == {Outcome.APPLIED}
    with pytest.raises(InvalidRequest, match="which is async"):
        pushes.open_sources(store.hosted()[0], [(SourceKey(RankSource(Rank(0))), Token(5))])


def test_mark_that_is_higher_than_what_was_counted_as_steps_stays(tmp_path: Path) -> None:
    store = trained(3)
    saved = save(store, tmp_path, 1)
    create(store, Restore(str(tmp_path), entries(saved), begun=((SHARD, 1),)), generation=NEXT)
    leased(store, NEXT)
    assert push(store, 2, generation=NEXT) == {Outcome.DUPLICATE}


def test_job_goes_over_with_all_of_its_partitions_under_a_higher_generation_or_not_at_all(tmp_path: Path) -> None:
    store, restore = steps_then_shards(tmp_path)
    before = values(store)
    some = dataclasses.replace(restore, entries=restore.entries[:1])
    for generation, given in ((GENERATION, restore), (NEXT, some), (NEXT, Restore("", ()))):
        with pytest.raises(InvalidRequest, match="which is sync at generation 4, to be async"):
            create(store, given, generation=generation)
    with pytest.raises(StaleGeneration):
        create(store, restore, generation=Generation(3))
    assert values(store) == before
    push_step(store, 1)


@pytest.mark.parametrize("count", [limits.FEEDS_MAX + 1, 1])
def test_data_shards_that_are_begun_are_bounded(tmp_path: Path, count: int) -> None:
    shard = wire.BegunDataShard(data_shard=common.DataShardName(feed=0), next=0 if count == 1 else 1)
    with pytest.raises((InvalidRequest, TooLarge), match="data shard"):
        _restore(wire.Restore(url=str(tmp_path), begun=[shard] * count), 2)


def shards_then_steps(tmp_path: Path) -> tuple[Store, Restore]:
    """An asynchronous job of two updates, and how it goes on from there: all of it stands before step 7."""
    store = trained(2)
    saved = save(store, tmp_path, 1)
    return store, Restore(str(tmp_path), entries(saved), 1, job=JOB, step=7, ranks=2)


def test_job_goes_over_to_steps_that_begin_at_one_version_of_all_partitions(tmp_path: Path) -> None:
    store, restore = shards_then_steps(tmp_path)
    before = values(store)
    order = pushed(2, SHARD)
    admitted = admission.admit_push(store, order)
    for _ in range(2):  # the same order again does nothing
        create(store, restore, generation=NEXT, mode=UpdateMode.SYNC, switches=1)
    with pytest.raises(StaleGeneration):  # what was admitted before
        pushes.push(store, admitted, order, gradient(order))
    assert values(store, generation=NEXT) == before
    hosted = store.hosted()[0]
    assert (hosted.mode, hosted.clocks) == (UpdateMode.SYNC, None)
    assert [hosted.partitions[p].describe()[0] for p in OWNED] == [Version(2, 7)] * 2
    leased(store, NEXT)
    assert push(store, 6, source=RankSource(Rank(0)), generation=NEXT) == {Outcome.DUPLICATE}
    with pytest.raises(SequenceGap):
        push(store, 8, source=RankSource(Rank(0)), generation=NEXT)
    for rank in range(2):
        assert push(store, 7, source=RankSource(Rank(rank)), generation=NEXT) <= {Outcome.APPLIED, Outcome.RECORDED}
    assert [hosted.partitions[p].describe()[0].number for p in OWNED] == [8, 8]
    with pytest.raises(InvalidRequest, match="which is sync"):
        pushes.open_sources(hosted, [(SourceKey(SHARD), Token(5))])


def test_partitions_that_are_beyond_the_step_or_are_asynchronous_are_refused(tmp_path: Path) -> None:
    store, restore = shards_then_steps(tmp_path)
    before = values(store)
    beyond = dataclasses.replace(restore, step=1)
    for mode, given in ((UpdateMode.SYNC, beyond), (UpdateMode.ASYNC, restore)):
        with pytest.raises(InvalidRequest, match="to stand before step"):
            create(store, given, generation=NEXT, mode=mode)
    with pytest.raises(TooLarge, match="stand before step"):
        _restore(wire.Restore(url=str(tmp_path), step=limits.SEQUENCE_MAX + 1), 2)
    assert values(store) == before
    assert push(store, 2) == {Outcome.APPLIED}


def test_partitions_that_are_not_named_under_a_higher_generation_are_gone(tmp_path: Path) -> None:
    """As where a recovery was given up, and another one gives them to somebody else."""
    store = trained(1)
    saved = save(store, tmp_path, 1)
    with pytest.raises(InvalidRequest, match="without partition 1"):
        create(store, owned=OWNED[:1])
    create(store, Restore(str(tmp_path), ()), generation=NEXT, owned=OWNED[:1])
    assert sorted(store.hosted()[0].partitions) == OWNED[:1]
    with pytest.raises(NotFound):
        values(store, generation=NEXT)
    # and back again
    after = Generation(6)
    create(store, Restore(str(tmp_path), entries(saved, life=3)[1:]), generation=after)
    assert [store.hosted()[0].partitions[p].describe()[0] for p in OWNED] == [Version(1, 1), Version(3, 1)]


def test_partition_of_an_open_job_needs_values(tmp_path: Path) -> None:
    living = server(owned=OWNED[:1])
    with pytest.raises(InvalidRequest, match="partition 1 of job 1, which is open, without values"):
        create(living, Restore(str(tmp_path), ()), generation=NEXT)
    assert sorted(living.hosted()[0].partitions) == OWNED[:1]
    stranger = Restore(str(tmp_path), entries(save(server(), tmp_path, 1)))
    with pytest.raises(InvalidRequest, match="partition 1 to be restored, which is not given"):
        create(living, stranger, generation=NEXT, owned=OWNED[:1])


@pytest.mark.parametrize("damage", ["gone", "bit", "cut", "version", "blocks"])
def test_damaged_checkpoint_is_refused_and_changes_nothing(tmp_path: Path, damage: str) -> None:
    store = trained(1)
    saved = save(store, tmp_path, 1)
    push(store, 1)
    before = values(store)
    found = list(entries(saved))
    file = tmp_path / saved[1].file.file.path
    data = bytearray(file.read_bytes())
    if damage == "gone":
        file.unlink()
    elif damage == "bit":
        data[len(data) // 2] ^= 4
        file.write_bytes(data)
    elif damage == "cut":
        file.write_bytes(data[:-1])
    elif damage == "version":
        found[1] = dataclasses.replace(found[1], version=Version(2, 7))
    else:
        found[1] = dataclasses.replace(found[1], files=(PartitionFile(saved[1].file.file, (0,)),))
    with pytest.raises(
        CheckpointNotFound if damage == "gone" else CheckpointDamaged, match=r"partition-0001|partition 1"
    ):
        create(store, Restore(str(tmp_path), tuple(found)), generation=NEXT)
    assert values(store) == before
    assert push(store, 2) == {Outcome.APPLIED}
    with pytest.raises(ShardyardError):
        restored(tmp_path, tuple(found))


def test_job_without_first_values_and_the_wrong_kind_of_order_are_refused(tmp_path: Path) -> None:
    store = made()
    store.become(HERE, Term(2))
    create(store)
    with pytest.raises(NotReady):
        save(store, tmp_path, 1)
    orders.open_partitions(store, JOB, GENERATION)
    with pytest.raises(InvalidRequest, match="which is async, at a step"):
        save(store, tmp_path, 1, step=0)
    with pytest.raises(InvalidRequest, match="which is sync, without a step"):
        save(server(UpdateMode.SYNC), tmp_path, 1)
    with pytest.raises(StaleIncarnation):
        orders.save(store, COORDINATOR, Incarnation(9), GENERATION, SaveRequest(1, None, 0, 0), str(tmp_path))


def sources(store: Store) -> int:
    """The largest number of sources that a partition remembers."""
    return max(partition.describe()[1] for partition in store.hosted()[0].partitions.values())


def test_workers_that_are_gone_are_refused_before_their_sources_are_forgotten() -> None:
    store = server()
    push(store, 0, source=WorkerSource(WORKER))
    assert sources(store) == 1
    orders.forget_sources(store, COORDINATOR, HERE, GENERATION, [], [WORKER], Token(0))
    assert sources(store) == 0
    with pytest.raises(StaleIncarnation):
        push(store, 0, source=WorkerSource(WORKER))


def test_order_to_forget_that_meets_a_restore_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    store = trained(1)
    hosted = store.hosted()[0]
    fence = orders.fence

    def late(store: Store, workers: object) -> None:
        fence(store, workers)  # type: ignore[arg-type]
        hosted.generation = NEXT

    monkeypatch.setattr(orders, "fence", late)
    with pytest.raises(StaleGeneration):
        orders.forget_sources(store, COORDINATOR, HERE, GENERATION, DONE, [], Token(2))
    assert sources(store) == 1


def test_ranks_are_never_forgotten() -> None:
    store = server(UpdateMode.SYNC)
    with pytest.raises(InvalidRequest, match="which is sync"):
        orders.forget_sources(store, COORDINATOR, HERE, GENERATION, [], [], Token(9))


def test_checkpoint_that_meets_a_restore_is_not_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = leased(server())
    hosted = store.hosted()[0]
    write = hosted.saver.save

    def restored_meanwhile(*given: object, **more: object) -> object:
        found = write(*given, **more)  # type: ignore[arg-type]
        hosted.generation = NEXT
        return found

    monkeypatch.setattr(hosted.saver, "save", restored_meanwhile)
    with pytest.raises(StaleGeneration):
        save(store, tmp_path, 1)


def test_forgotten_sources_are_refused_on_all_partitions(tmp_path: Path) -> None:
    store = trained(1)
    orders.forget_sources(store, COORDINATOR, HERE, GENERATION, DONE, [], Token(1))
    assert sources(store) == 1
    orders.forget_sources(store, COORDINATOR, HERE, GENERATION, DONE, [], Token(2))
    assert sources(store) == 0
    with pytest.raises(StaleToken):
        push(store, 1)
    other = restored(tmp_path, entries(save(store, tmp_path, 1)))
    with pytest.raises(StaleToken):
        push(other, 0)
