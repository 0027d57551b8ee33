"""A cut shows a partition as it was at one moment, whatever was pushed since; and a partition that is restored from one
goes on to the same bits (docs/internals/ledger.md, rules A7 to A10, B7)."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shardyard.checkpoints.partition_file import BlockState, PartitionState
from shardyard.domain.consistency import UpdateMode
from shardyard.domain.errors import CheckpointDamaged, InvalidRequest, SequenceGap, StaleToken, TooLarge
from shardyard.domain.ids import Incarnation, PartitionId, Rank, Token, Version
from shardyard.domain.layout.layouts import Block, JobLayout, PartitionLayout
from shardyard.domain.optimizers import OptimizerSpec, make_group
from shardyard.domain.push_names import (
    DataShardSource,
    DoneDataShards,
    PushName,
    RankSource,
    Source,
    SourceKey,
    SourceMark,
    WorkerSource,
)
from shardyard.domain.pushes import Outcome
from shardyard.domain.variables import DType, VariableKind, VariableSpec
from shardyard_ps_server.partition import dense_state as module
from shardyard_ps_server.partition.checkpoint_cuts import await_named_cut, block_arrays, name_cut, take_cut, unname_cut
from shardyard_ps_server.partition.contribution import Contribution
from shardyard_ps_server.partition.dense_state import StateCut
from shardyard_ps_server.partition.partition import Cut, Partition
from shardyard_ps_server.partition.push import apply_push
from shardyard_ps_server.partition.reads import hold_version
from shardyard_ps_server.partition.update_rules import UpdateRules
from shardyard_ps_server.values.versions import aligned_empty

KINDS: dict[str, dict[str, float]] = {
    "sgd": {},
    "momentum": {"momentum": 0.9},
    "adam": {"amsgrad": 1.0},
    "adagrad": {"initial_accumulator_value": 0.5},
    "rmsprop": {"centered": 1.0, "momentum": 0.5},
    "adamax": {"weight_decay": 0.1},
    "nadam": {"weight_decay": 0.1},
    "radam": {"beta2": 0.9},
    "lamb": {},
    "lion": {"weight_decay": 0.1},
    "ftrl": {"l1": 0.5},
}
PARTITION = PartitionId(0)
SIZES = (24, 8, 40)  # elements of float64: blocks of 192, 64 and 320 bytes
NBYTES = 8 * sum(SIZES)


def layout_of(kind: str) -> JobLayout:
    name = "sgd" if kind == "momentum" else kind
    kinds = (VariableKind.PARAMETER, VariableKind.BUFFER, VariableKind.PARAMETER)
    variables = tuple(
        VariableSpec(str(number), DType.FLOAT64, (size,), what)
        for number, (size, what) in enumerate(zip(SIZES, kinds, strict=True))
    )
    starts = (0, 8 * SIZES[0], 8 * (SIZES[0] + SIZES[1]))
    blocks = tuple(
        Block(number, 0, size, start) for number, (size, start) in enumerate(zip(SIZES, starts, strict=True))
    )
    optimizer = OptimizerSpec(name, (make_group(name, {"lr": 0.1} | KINDS[kind]),))
    return JobLayout(variables, optimizer, (PartitionLayout(PARTITION, NBYTES, blocks),))


def partition_of(kind: str, ranks: int) -> Partition:
    mode = UpdateMode.SYNC if ranks else UpdateMode.ASYNC
    return Partition(layout_of(kind), PARTITION, UpdateRules(mode, ranks))


def contribution(kind: str, rng: np.random.Generator, *, some: bool = False) -> Contribution:
    payload = aligned_empty(NBYTES)
    payload.view(np.float64)[:] = rng.normal(size=NBYTES // 8)
    present = tuple(bool(rng.integers(2)) for _ in SIZES) if some else (True,) * len(SIZES)
    return Contribution(1.0, layout_of(kind).optimizer.groups, payload, present)


def push(partition: Partition, source: Source, sequence: int, what: Contribution, token: int = 1) -> Outcome:
    name = PushName(SourceKey(source), Token(token), sequence, sequence)
    return apply_push(partition, name, what, lambda: None).outcome


def blocks_at(partition: Partition, cut: Cut) -> list[dict[str, npt.NDArray[Any]]]:
    cut.complete()
    return [
        {name: array.copy() for name, array in block_arrays(partition, index, cut).items()}
        for index in range(len(partition.payload.blocks))
    ]


@dataclass
class Taken:
    """A whole copy of a partition."""

    blocks: list[dict[str, npt.NDArray[Any]]]
    version: Version
    counts: list[int]
    marks: tuple[SourceMark, ...]
    floor: Token


def take(partition: Partition) -> Taken:
    cut = take_cut(partition)
    blocks = blocks_at(partition, cut)
    cut.release()
    return Taken(blocks, cut.version, cut.counts.tolist(), cut.marks, cut.floor)


def restored(kind: str, ranks: int, taken: Taken) -> Partition:
    partition = partition_of(kind, ranks)
    partition.restore(state_of(taken))
    return partition


def state_of(taken: Taken) -> PartitionState:
    blocks = tuple(
        BlockState(index, block["values"], {name: block[name] for name in block if name != "values"}, count)
        for index, (block, count) in enumerate(zip(taken.blocks, taken.counts, strict=True))
    )
    version = Version(taken.version.life + 1, taken.version.number)
    return PartitionState(PARTITION, version, blocks, taken.marks, taken.floor)


def assert_same(left: Taken, right: Taken) -> None:
    assert (left.version.number, left.counts, left.marks) == (right.version.number, right.counts, right.marks)
    for one, other in zip(left.blocks, right.blocks, strict=True):
        assert {name: values.tobytes() for name, values in one.items()} == {
            name: values.tobytes() for name, values in other.items()
        }


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CUT_PIECE_BYTES", 128)


# ---- asynchronous


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(6))
def test_rule_a9_cut_is_what_was_there_and_updates_go_on(kind: str, seed: int) -> None:
    rng, chance = np.random.default_rng(seed), random.Random(seed)
    partition = partition_of(kind, 0)
    partition.open()
    source = WorkerSource(Incarnation(1))
    sequence = 0

    def advance(pushes: int) -> None:
        nonlocal sequence
        for _ in range(pushes):
            push(partition, source, sequence, contribution(kind, rng, some=chance.random() < 0.5))
            sequence += 1

    advance(chance.randrange(4))
    before = take(partition)
    cut = take_cut(partition)
    for _ in range(chance.randrange(5)):
        advance(1)
        cut.state.keep_next()
    found = Taken(blocks_at(partition, cut), cut.version, cut.counts.tolist(), cut.marks, cut.floor)
    cut.release()
    assert_same(found, before)
    # the next one shows what has come since, and a partition restored from either goes on like this one
    now = take(partition)
    other = restored(kind, 0, now)
    for _ in range(3):
        what = contribution(kind, rng, some=chance.random() < 0.5)
        for each in (partition, other):
            push(each, source, sequence, what)
        sequence += 1
    assert_same(take(partition), take(other))
    assert take(other).version.life == now.version.life + 1


def _take_again(partition: Partition, found: list[Taken], done: threading.Event) -> None:
    while not done.is_set():
        found.append(take(partition))


def test_cut_taken_while_threads_push_is_one_of_the_versions() -> None:
    kind = "adam"
    states: dict[int, Taken] = {}
    for _ in range(2):
        rng = np.random.default_rng(3)
        partition = partition_of(kind, 0)
        partition.open()
        found: list[Taken] = []
        done = threading.Event()

        def cut_again(
            partition: Partition = partition, found: list[Taken] = found, done: threading.Event = done
        ) -> None:
            while not done.is_set():
                found.append(take(partition))

        thread = threading.Thread(target=cut_again)
        record = not states
        if not record:
            thread.start()
        for sequence in range(60):
            if record:
                states[sequence] = take(partition)
            push(partition, WorkerSource(Incarnation(1)), sequence, contribution(kind, rng))
        if record:
            states[60] = take(partition)
        else:
            done.set()
            thread.join()
            assert found
            for taken in found:
                assert_same(taken, states[taken.version.number])


def test_two_cuts_at_a_time_are_refused() -> None:
    partition = partition_of("adam", 0)
    first = take_cut(partition)
    with pytest.raises(InvalidRequest, match="two checkpoints"):
        take_cut(partition)
    first.release()
    take_cut(partition).release()


def test_values_at_a_cut_are_not_written_until_it_is_released() -> None:
    partition = partition_of("sgd", 0)
    rng = np.random.default_rng(0)
    cut = take_cut(partition)
    before = cut.values.tobytes()
    for sequence in range(5):
        push(partition, WorkerSource(Incarnation(1)), sequence, contribution("sgd", rng))
    assert cut.values.tobytes() == before
    cut.release()
    assert not partition.versions._readers


def test_pieces_are_copied_once_and_only_what_is_touched() -> None:
    state = {"a": aligned_empty(1000)}
    state["a"][:] = 1
    cut = StateCut(state)
    cut.keep(130, 250)
    state["a"][:] = 2
    cut.keep(0, 1000)
    assert cut._copies["a"][128:256].tolist() == [1] * 128
    assert set(cut._copies["a"][:128].tolist()) == {2}
    while not cut.complete:
        cut.keep_next()
    state["a"][:] = 3
    cut.keep(0, 1000)
    assert set(cut.of("a")[256:].tolist()) == {2}
    assert StateCut({}).complete


# ---- synchronous


@pytest.mark.parametrize("kind", KINDS)
def test_rule_b7_cut_of_a_step_named_ahead_holds_nothing_of_the_next(kind: str) -> None:
    rng = np.random.default_rng(5)
    partition, reference = partition_of(kind, 2), partition_of(kind, 2)
    for each in (partition, reference):
        each.open()
        for rank in range(2):
            each.open_source(SourceKey(RankSource(Rank(rank))), Token(1))
    cuts: list[Cut | None] = []
    name_cut(partition, 3)
    waits = threading.Thread(target=lambda: cuts.append(await_named_cut(partition, time.monotonic() + 10)))
    waits.start()
    expected = None
    for step in range(6):
        if step == 3:
            expected = take(reference)
        for rank in range(2):
            what = contribution(kind, rng)
            for each in (partition, reference):
                push(each, RankSource(Rank(rank)), step, what)
    waits.join()
    (cut,) = cuts
    assert cut is not None
    assert expected is not None
    found = Taken(blocks_at(partition, cut), cut.version, cut.counts.tolist(), cut.marks, cut.floor)
    assert_same(found, expected)
    assert {mark.next for mark in found.marks} == {3}
    cut.release()
    # from step 3 on again: the same bits as without
    rng = np.random.default_rng(5)
    for _ in range(6):
        contribution(kind, rng)
    again = restored(kind, 2, found)
    for step in range(3, 6):
        for rank in range(2):
            assert push(again, RankSource(Rank(rank)), step, contribution(kind, rng)) in (
                Outcome.RECORDED,
                Outcome.APPLIED,
            )
    assert_same(take(again), take(reference))


def test_contributions_to_the_next_step_are_not_in_a_cut() -> None:
    partition = partition_of("sgd", 2)
    rng = np.random.default_rng(1)
    partition.open()
    for rank in range(2):
        partition.open_source(SourceKey(RankSource(Rank(rank))), Token(1))
    push(partition, RankSource(Rank(0)), 0, contribution("sgd", rng))
    name_cut(partition, 0)
    cut = await_named_cut(partition, time.monotonic())
    assert cut is not None
    assert [mark.next for mark in cut.marks] == [0, 0]
    cut.release()


def test_step_that_has_passed_or_does_not_come_cannot_be_cut() -> None:
    partition = partition_of("sgd", 1)
    partition.open()
    partition.open_source(SourceKey(RankSource(Rank(0))), Token(1))
    name_cut(partition, 1)
    with pytest.raises(InvalidRequest, match="two checkpoints"):
        name_cut(partition, 2)
    assert await_named_cut(partition, time.monotonic() + 0.01) is None
    unname_cut(partition)
    push(partition, RankSource(Rank(0)), 0, contribution("sgd", np.random.default_rng(0)))
    with pytest.raises(InvalidRequest) as raised:
        name_cut(partition, 0)
    assert raised.value.facts == {"newest": "1"}
    # one that came, and is not wanted any more
    name_cut(partition, 2)
    push(partition, RankSource(Rank(0)), 1, contribution("sgd", np.random.default_rng(0)))
    unname_cut(partition)
    assert partition.named_cut is None
    assert not partition.versions._readers
    take(partition)


def test_update_counts_where_its_cut_has_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    partition = partition_of("adam", 1)
    partition.open()
    partition.open_source(SourceKey(RankSource(Rank(0))), Token(1))

    def none_left(nbytes: int) -> Any:
        raise TooLarge(f"{nbytes} bytes")

    name_cut(partition, 1)
    monkeypatch.setattr(module, "aligned_empty", none_left)
    assert push(partition, RankSource(Rank(0)), 0, contribution("adam", np.random.default_rng(0))) is Outcome.APPLIED
    with pytest.raises(TooLarge):
        await_named_cut(partition, time.monotonic())
    monkeypatch.undo()
    take_cut(partition).release()


# ---- back to a checkpoint


@pytest.mark.parametrize("ranks", [0, 2])
def test_partition_goes_back_in_place_and_its_readers_are_not_disturbed(ranks: int) -> None:
    rng = np.random.default_rng(7)
    partition = partition_of("adam", ranks)
    partition.open()
    sources: list[Source] = [RankSource(Rank(rank)) for rank in range(2)] if ranks else [WorkerSource(Incarnation(1))]
    for source in sources:
        if ranks:
            partition.open_source(SourceKey(source), Token(1))

    def steps(begin: int, end: int, to: Partition = partition) -> None:
        for step in range(begin, end):
            for source in sources:
                push(to, source, step, contribution("adam", np.random.default_rng(100 * step + sources.index(source))))

    steps(0, 3)
    taken = take(partition)
    steps(3, 5)
    after = take(partition)
    if ranks:  # one of two contributions to step 5, which the restored partition has never seen
        push(partition, sources[0], 5, contribution("adam", rng))
    found = hold_version(partition, 0, False, time.monotonic())
    assert isinstance(found, tuple)
    version, reading = found
    before = reading.tobytes()
    cut = take_cut(partition)
    partition.restore(state_of(taken))
    assert reading.tobytes() == before
    assert_same(Taken(blocks_at(partition, cut), after.version, after.counts, after.marks, after.floor), after)
    cut.release()
    partition.release(reading)
    assert (version.life, take(partition).version) == (1, Version(2, 3))
    assert_same(take(partition), taken)
    steps(3, 5)
    assert_same(take(partition), after)
    assert not partition.versions._readers


def test_state_that_lacks_an_optimizers_array_is_damaged_and_changes_nothing() -> None:
    partition = partition_of("adam", 0)
    partition.open()
    push(partition, WorkerSource(Incarnation(1)), 0, contribution("adam", np.random.default_rng(0)))
    before = take(partition)
    state = state_of(before)
    del state.blocks[0].slots["exp_avg"]  # type: ignore[attr-defined]
    with pytest.raises(CheckpointDamaged, match="block 0 of partition 0 with the state"):
        partition.restore(state)
    assert_same(take(partition), before)


# ---- ledgers


def test_rule_a7_what_is_forgotten_cannot_come_back() -> None:
    partition = partition_of("sgd", 0)
    partition.open()
    closed, live = (SourceKey(DataShardSource(0, 0, index)) for index in range(2))
    partition.open_source(closed, Token(3))
    partition.open_source(live, Token(5))
    rng = np.random.default_rng(0)
    push(partition, closed.source, 0, contribution("sgd", rng), token=3)
    done = [DoneDataShards(0, 10, 2, frozenset({1}))]
    partition.forget(done, [], Token(3), lambda: None)
    assert len(take(partition).marks) == 2, "a token that is not below the floor"
    partition.forget(done, [], Token(5), lambda: None)
    assert [mark.key for mark in take(partition).marks] == [live]
    for sequence in (0, 1):
        with pytest.raises(StaleToken):
            push(partition, closed.source, sequence, contribution("sgd", rng), token=3)
    with pytest.raises(StaleToken):
        partition.open_source(closed, Token(4))
    assert push(partition, live.source, 0, contribution("sgd", rng), token=5) is Outcome.APPLIED


def test_rule_a8_restored_ledger_counts_on_from_where_it_stood() -> None:
    partition = partition_of("sgd", 0)
    partition.open()
    key = SourceKey(DataShardSource(0, 1, 2))
    partition.open_source(key, Token(4))
    rng = np.random.default_rng(0)
    for sequence in range(3):
        push(partition, key.source, sequence, contribution("sgd", rng), token=4)
    taken = take(partition)
    taken.floor = Token(2)
    other = restored("sgd", 0, taken)
    assert push(other, key.source, 2, contribution("sgd", rng), token=4) is Outcome.DUPLICATE
    with pytest.raises(SequenceGap):
        push(other, key.source, 4, contribution("sgd", rng), token=4)
    with pytest.raises(StaleToken):
        other.open_source(key, Token(3))
    with pytest.raises(StaleToken):
        other.open_source(SourceKey(DataShardSource(0, 0, 0)), Token(1))
    assert push(other, key.source, 3, contribution("sgd", rng), token=4) is Outcome.APPLIED
    assert take(other).version == Version(2, 4)
