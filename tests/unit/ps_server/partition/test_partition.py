"""A partition: the way of a push through ledger, gate, verdict and blocks, and pulls by version."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest

from shardyard.domain.consistency import UpdateMode
from shardyard.domain.errors import (
    InvalidRequest,
    NotFound,
    NotReady,
    RateMismatch,
    Refused,
    SequenceGap,
    ShardyardError,
    StaleGeneration,
    StaleToken,
    StraddlingRange,
    TooLarge,
)
from shardyard.domain.ids import Incarnation, PartitionId, Rank, Token, Version
from shardyard.domain.layout.layouts import Block, JobLayout, PartitionLayout
from shardyard.domain.optimizers import OptimizerSpec, make_group
from shardyard.domain.pulls import NotReadyPart
from shardyard.domain.push_names import DataShardSource, PushName, RankSource, Source, SourceKey, WorkerSource
from shardyard.domain.pushes import Outcome, PartResult
from shardyard.domain.variables import DType, VariableSpec
from shardyard_ps_server.partition import dense_state
from shardyard_ps_server.partition.checkpoint_cuts import block_arrays, take_cut
from shardyard_ps_server.partition.contribution import Contribution
from shardyard_ps_server.partition.dense_state import CUT_PIECE_BYTES
from shardyard_ps_server.partition.partition import Partition
from shardyard_ps_server.partition.push import apply_push, apply_to_all, check_push
from shardyard_ps_server.partition.reads import hold_version
from shardyard_ps_server.partition.step_gate import Groups
from shardyard_ps_server.partition.update_rules import UpdateRules
from shardyard_ps_server.values import versions as versions_module
from shardyard_ps_server.values.versions import Bytes, aligned_empty

DEADLINE_S = 10.0
ELEMENTS = 8
RATE = (make_group("sgd", {"lr": 1.0}),)
LAYOUT = JobLayout(
    (VariableSpec("a", DType.FLOAT64, (ELEMENTS,)),),
    OptimizerSpec("sgd", RATE),
    (PartitionLayout(PartitionId(0), ELEMENTS * 8, (Block(0, 0, ELEMENTS, 0),)),),
)
TOKEN = Token(1)
SHARD = DataShardSource(0, 0, 0)


def current() -> None:
    """The generation has not changed."""


def gradient(*values: float, weight: float = 1.0, groups: Groups = RATE) -> Contribution:
    """Descends by `values` (zeros after them)."""
    payload = aligned_empty(ELEMENTS * 8)
    payload[:] = 0
    payload.view(np.float64)[: len(values)] = values
    return Contribution(weight, groups, payload, (True,))


EMPTY = Contribution(0.0, None, aligned_empty(0), (False,))


def name(source: Source, first: int, last: int | None = None, token: Token = TOKEN) -> PushName:
    return PushName(SourceKey(source), token, first, first if last is None else last)


def rank(number: int, step: int, token: Token = TOKEN) -> PushName:
    return name(RankSource(Rank(number)), step, token=token)


def asynchronous() -> Partition:
    """Of an asynchronous job; SHARD is open under TOKEN."""
    partition = Partition(LAYOUT, PartitionId(0), UpdateRules(UpdateMode.ASYNC, 0))
    partition.open_source(SourceKey(SHARD), TOKEN)
    return partition


def synchronous(ranks: int) -> Partition:
    """Of a synchronous job; all ranks are open under TOKEN."""
    partition = Partition(LAYOUT, PartitionId(0), UpdateRules(UpdateMode.SYNC, ranks))
    for number in range(ranks):
        partition.open_source(SourceKey(RankSource(Rank(number))), TOKEN)
    return partition


def take_steps(partition: Partition, ranks: int, steps: int) -> None:
    """Each step descends by (1, 0, ...)."""
    for _ in range(steps):
        step = partition.describe()[0].number
        for number in range(ranks):
            apply_push(partition, rank(number, step), gradient(1), current)


def values(partition: Partition, number: int | None = None) -> list[float]:
    """Of that version, or of the newest."""
    found = hold_version(partition, number or 0, number is not None, 0.0)
    assert not isinstance(found, NotReadyPart), found
    _, buffer = found
    read: list[float] = buffer.view(np.float64).tolist()
    partition.release(buffer)
    return read


def state(partition: Partition, *sources: Source) -> object:
    """All that a push could change."""
    next_ = [partition.watermark(SourceKey(source)).next for source in sources]
    return values(partition), partition.describe(), next_


# ---- asynchronous pushes


def test_rule_a2_async_push_applies_at_once_and_says_where_its_source_stands() -> None:
    partition = asynchronous()
    result = apply_push(partition, name(SHARD, 0), gradient(3), current)
    assert result == PartResult(PartitionId(0), Outcome.APPLIED, next=1, version=Version(1, 1))
    assert values(partition)[0] == -3


def test_rule_a2_duplicate_changes_nothing_and_is_answered_with_next_and_version() -> None:
    partition = asynchronous()
    for sequence in range(3):
        apply_push(partition, name(SHARD, sequence), gradient(1), current)
    before = state(partition, SHARD)
    again = apply_push(partition, name(SHARD, 1), gradient(1), current)
    assert again == PartResult(PartitionId(0), Outcome.DUPLICATE, next=3, version=Version(1, 3))
    assert state(partition, SHARD) == before


def test_rule_a4_named_empty_push_moves_the_watermark_and_makes_no_version() -> None:
    partition = asynchronous()
    result = apply_push(partition, name(SHARD, 0), EMPTY, current)
    assert result == PartResult(PartitionId(0), Outcome.APPLIED, next=1, version=Version(1, 0))
    again = apply_push(partition, name(SHARD, 0), EMPTY, current)
    assert again.outcome is Outcome.DUPLICATE


def test_rule_a12_range_of_batches_is_one_update() -> None:
    partition = asynchronous()
    result = apply_push(partition, name(SHARD, 0, 3), gradient(1, weight=4.0), current)
    assert (result.next, result.version.number) == (4, 1)


def test_workers_and_data_shards_push_side_by_side() -> None:
    partition = asynchronous()
    apply_push(partition, name(SHARD, 0), gradient(1), current)
    apply_push(partition, name(WorkerSource(Incarnation(5)), 0), gradient(1), current)
    apply_push(partition, name(WorkerSource(Incarnation(6)), 0), gradient(1), current)
    assert values(partition)[0] == -3
    assert partition.describe() == (Version(1, 3), 3)


def test_first_values_are_overwritten_until_the_partition_is_open() -> None:
    partition = asynchronous()
    partition.set_values(gradient(9, 9).payload, current)
    partition.set_values(gradient(5, 6).payload, current)
    assert partition.describe()[0] == Version(1, 0)
    partition.open()
    with pytest.raises(InvalidRequest, match="first values for partition 0, which is open"):
        partition.set_values(gradient(7).payload, current)
    assert values(partition)[:2] == [5, 6]


def test_first_values_of_a_sender_that_is_no_longer_current_are_not_taken() -> None:
    partition = asynchronous()

    def moved() -> None:
        raise StaleGeneration("generation 1")

    with pytest.raises(StaleGeneration):
        partition.set_values(gradient(9).payload, moved)
    assert values(partition) == [0] * ELEMENTS


# ---- synchronous pushes


def test_rule_b2_contribution_is_recorded_and_the_last_rank_takes_the_step() -> None:
    partition = synchronous(3)
    for number in (2, 0):
        result = apply_push(partition, rank(number, 0), gradient(3), current)
        assert result == PartResult(PartitionId(0), Outcome.RECORDED, next=1, version=Version(1, 0))
        assert values(partition) == [0] * ELEMENTS
    result = apply_push(partition, rank(1, 0), gradient(6), current)
    assert result == PartResult(PartitionId(0), Outcome.APPLIED, next=1, version=Version(1, 1))
    assert values(partition)[0] == pytest.approx(-4)


def test_rule_b2_recorded_contribution_makes_the_next_a_duplicate() -> None:
    partition = synchronous(2)
    apply_push(partition, rank(0, 0), gradient(1), current)
    again = apply_push(partition, rank(0, 0), gradient(100), current)
    assert again == PartResult(PartitionId(0), Outcome.DUPLICATE, next=1, version=Version(1, 0))
    apply_push(partition, rank(1, 0), gradient(1), current)
    assert values(partition)[0] == -1
    assert apply_push(partition, rank(0, 0), gradient(100), current).outcome is Outcome.DUPLICATE
    assert values(partition)[0] == -1


def test_rule_b1_rank_computed_again_by_another_worker_is_counted_once() -> None:
    partition = synchronous(2)
    apply_push(partition, rank(0, 0), gradient(2), current)
    assert partition.open_source(SourceKey(RankSource(Rank(0))), Token(2)).next == 1
    with pytest.raises(StaleToken):
        apply_push(partition, rank(0, 1), gradient(9), current)
    assert apply_push(partition, rank(0, 0, Token(2)), gradient(2), current).outcome is Outcome.DUPLICATE
    apply_push(partition, rank(1, 0), gradient(4), current)
    assert values(partition)[0] == -3


def test_rule_a4_step_of_empty_pushes_is_a_version_with_the_same_values() -> None:
    partition = synchronous(2)
    take_steps(partition, 2, 1)
    apply_push(partition, rank(0, 1), EMPTY, current)
    assert apply_push(partition, rank(1, 1), EMPTY, current).version == Version(1, 2)
    assert values(partition, 2) == values(partition, 1)


def test_rule_b1_mean_is_weighted_by_samples_and_empty_pushes_have_no_weight() -> None:
    partition = synchronous(3)
    apply_push(partition, rank(0, 0), gradient(8, weight=3.0), current)
    apply_push(partition, rank(1, 0), EMPTY, current)
    apply_push(partition, rank(2, 0), gradient(4, weight=1.0), current)
    assert values(partition)[0] == -7


def test_rank_that_is_ahead_by_a_step_asks_again_later() -> None:
    partition = synchronous(2)
    apply_push(partition, rank(0, 0), gradient(1), current)
    with pytest.raises(NotReady, match="step 1 in partition 0, which gathers step 0"):
        apply_push(partition, rank(0, 1), gradient(1), current)
    apply_push(partition, rank(1, 0), gradient(1), current)
    assert apply_push(partition, rank(0, 1), gradient(1), current).outcome is Outcome.RECORDED


@pytest.mark.parametrize(("source", "last"), [(WorkerSource(Incarnation(3)), 0), (RankSource(Rank(0)), 1)])
def test_synchronous_work_is_named_by_a_rank_and_one_step(source: Source, last: int) -> None:
    partition = synchronous(2)
    with pytest.raises(InvalidRequest, match="in a synchronous job"):
        apply_push(partition, name(source, 0, last), gradient(1), current)
    assert apply_push(partition, rank(0, 0), gradient(1), current).outcome is Outcome.RECORDED


# ---- refusals


def test_refused_push_leaves_values_ledger_and_version_untouched() -> None:
    partition = asynchronous()
    for sequence in range(3):
        apply_push(partition, name(SHARD, sequence), gradient(1), current)
    partition.open_source(SourceKey(SHARD), Token(5))
    before = state(partition, SHARD)
    refusals: list[tuple[PushName, type[ShardyardError]]] = [
        (name(SHARD, 3), StaleToken),
        (name(SHARD, 3, token=Token(6)), InvalidRequest),
        (name(SHARD, 4, token=Token(5)), SequenceGap),
        (name(SHARD, 2, 4, token=Token(5)), StraddlingRange),
        (name(DataShardSource(0, 0, 1), 0), InvalidRequest),
    ]
    for push, kind in refusals:
        for ask in (lambda n, c: check_push(partition, n, c), lambda n, c: apply_push(partition, n, c, current)):
            with pytest.raises(kind):
                ask(push, gradient(1))
            assert state(partition, SHARD) == before
    assert apply_push(partition, name(SHARD, 3, token=Token(5)), gradient(1), current).outcome is Outcome.APPLIED


def test_rule_b5_rate_mismatch_leaves_the_step_as_it_was() -> None:
    partition = synchronous(2)
    apply_push(partition, rank(0, 0), gradient(1), current)
    before = state(partition, RankSource(Rank(0)), RankSource(Rank(1)))
    with pytest.raises(RateMismatch):
        apply_push(partition, rank(1, 0), gradient(1, groups=(make_group("sgd", {"lr": 2.0}),)), current)
    assert state(partition, RankSource(Rank(0)), RankSource(Rank(1))) == before
    apply_push(partition, rank(1, 0), gradient(1), current)
    assert values(partition)[0] == -1


def test_rule_a3_generation_is_checked_before_anything_else() -> None:
    for partition, push in ((asynchronous(), name(SHARD, 0)), (synchronous(1), rank(0, 0))):

        def moved() -> None:
            raise StaleGeneration("generation 1")

        before = state(partition, push.key.source)
        with pytest.raises(StaleGeneration):
            apply_push(partition, push, gradient(1), moved)
        assert state(partition, push.key.source) == before
        assert apply_push(partition, push, gradient(1), current).outcome is Outcome.APPLIED


class Turn:
    """A partition's turn that notes when it is taken."""

    def __init__(self, number: int, taken: list[int]) -> None:
        self._number, self._taken = number, taken

    def __enter__(self) -> None:
        self._taken.append(self._number)

    def __exit__(self, *_: object) -> None: ...


def test_turns_are_taken_in_one_order_whatever_the_order_of_a_pushs_parts() -> None:
    """So no two pushes block each other."""
    numbers = [PartitionId(n) for n in range(3)]
    specs = tuple([VariableSpec(str(n), DType.FLOAT64, (ELEMENTS,)) for n in numbers])
    parts = tuple([PartitionLayout(n, ELEMENTS * 8, (Block(n, 0, ELEMENTS, 0),)) for n in numbers])
    layout = JobLayout(specs, LAYOUT.optimizer, parts)
    taken: list[int] = []
    partitions = [Partition(layout, n, UpdateRules(UpdateMode.ASYNC, 0)) for n in numbers]
    for partition in partitions:
        partition.open_source(SourceKey(SHARD), TOKEN)
        vars(partition)["turn"] = Turn(partition.id, taken)
    for sequence, order in enumerate(itertools.permutations(partitions)):
        taken.clear()
        results = apply_to_all([(each, gradient(1)) for each in order], name(SHARD, sequence), current)
        assert taken == [0, 1, 2]
        assert [result.partition for result in results] == [each.id for each in order]
        assert {(result.outcome, result.next) for result in results} == {(Outcome.APPLIED, sequence + 1)}


def test_checking_a_push_changes_nothing() -> None:
    for partition, push in ((asynchronous(), name(SHARD, 0)), (synchronous(1), rank(0, 0))):
        before = state(partition, push.key.source)
        check_push(partition, push, gradient(1))
        assert state(partition, push.key.source) == before


@pytest.mark.parametrize("module", [versions_module, dense_state])
def test_step_for_which_there_is_no_memory_is_refused_and_can_be_taken_later(
    module: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    partition = synchronous(2)
    apply_push(partition, rank(0, 0), gradient(1), current)
    sources = (RankSource(Rank(0)), RankSource(Rank(1)))
    before = state(partition, *sources)

    def none_left(nbytes: int) -> Bytes:
        raise TooLarge(f"{nbytes} bytes")

    with monkeypatch.context() as patch:
        patch.setattr(module, "aligned_empty", none_left)
        with pytest.raises(TooLarge):
            apply_push(partition, rank(1, 0), gradient(3), current)
        assert state(partition, *sources) == before
    assert apply_push(partition, rank(1, 0), gradient(3), current).outcome is Outcome.APPLIED
    assert values(partition)[0] == -2


def test_async_push_for_which_there_is_no_memory_is_refused_and_can_be_sent_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    partition = asynchronous()
    before = state(partition, SHARD)

    def none_left(nbytes: int) -> Bytes:
        raise TooLarge(f"{nbytes} bytes")

    with monkeypatch.context() as patch:
        patch.setattr(versions_module, "aligned_empty", none_left)
        with pytest.raises(TooLarge):
            apply_push(partition, name(SHARD, 0), gradient(3), current)
        assert state(partition, SHARD) == before
    assert apply_push(partition, name(SHARD, 0), gradient(3), current).outcome is Outcome.APPLIED


# ---- several threads


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """Runs work(0) to work(count - 1) at once; all must end without an exception."""
    barrier = threading.Barrier(count, timeout=DEADLINE_S)

    def run(number: int) -> None:
        barrier.wait()
        work(number)

    with ThreadPoolExecutor(count) as pool:
        for future in [pool.submit(run, number) for number in range(count)]:
            future.result(DEADLINE_S)


def test_rule_a2_same_name_pushed_by_two_threads_is_counted_once() -> None:
    partition = asynchronous()
    outcomes: list[Outcome] = []

    def push(_: int) -> None:
        for sequence in range(100):
            outcomes.append(apply_push(partition, name(SHARD, sequence), gradient(1), current).outcome)

    in_threads(2, push)
    assert outcomes.count(Outcome.APPLIED) == outcomes.count(Outcome.DUPLICATE) == 100
    assert values(partition)[0] == -100


def test_steps_pushed_by_a_thread_for_each_rank_are_counted_once() -> None:
    partition = synchronous(3)
    steps = 60

    def push(number: int) -> None:
        for step in range(steps):
            found = hold_version(partition, step, True, time.monotonic() + DEADLINE_S)
            assert not isinstance(found, NotReadyPart), found
            assert found[1].view(np.float64)[0] == -2 * step
            partition.release(found[1])
            for _ in range(2):
                apply_push(partition, rank(number, step), gradient(float(number + 1)), current)

    in_threads(3, push)
    assert partition.describe()[0] == Version(1, steps)
    assert values(partition)[0] == -2 * steps


# ---- turn and lock


class Held:
    """Updates wait in their arithmetic until they may go on."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()
        update = dense_state.DenseState.update

        def wait_and_update(blocks: dense_state.DenseState, *given: Any, **more: Any) -> None:
            self.begun.set()
            assert self.may_end.wait(DEADLINE_S)
            update(blocks, *given, **more)

        patch.setattr(dense_state.DenseState, "update", wait_and_update)


@pytest.mark.parametrize("mode", UpdateMode)
def test_nobody_who_reads_waits_for_the_arithmetic_of_an_update(
    monkeypatch: pytest.MonkeyPatch, mode: UpdateMode
) -> None:
    held = Held(monkeypatch)
    if mode is UpdateMode.ASYNC:
        partition, pushed = asynchronous(), name(SHARD, 0)
    else:
        partition, pushed = synchronous(2), rank(1, 0)
        apply_push(partition, rank(0, 0), gradient(1), current)
    with ThreadPoolExecutor(3) as threads:
        update = threads.submit(apply_push, partition, pushed, gradient(1), current)
        assert held.begun.wait(DEADLINE_S)
        try:
            reads = [partition.describe, partial(values, partition), partial(partition.watermark, pushed.key)]
            newest, read, watermark = [threads.submit(each).result(DEADLINE_S) for each in reads]
            changes = threads.submit(take_cut, partition), threads.submit(partition.open)
            assert not any(change.done() for change in changes)
        finally:
            held.may_end.set()
        assert newest[0] == watermark.version == Version(1, 0)
        assert (watermark.next, read) == (0, [0.0] * ELEMENTS)
        assert update.result(DEADLINE_S).outcome is Outcome.APPLIED
        cut = changes[0].result(DEADLINE_S)
        assert cut.version == Version(1, 1)
        cut.release()
    assert values(partition)[0] == -1.0


def test_cut_is_of_one_moment_whatever_updates_come_while_it_is_copied() -> None:
    """With gradients of 1 and momentum 1, update n leaves n everywhere in the momentum."""
    elements = 4 * CUT_PIECE_BYTES // 4
    group = (make_group("sgd", {"lr": 1.0, "momentum": 1.0}),)
    layout = JobLayout(
        (VariableSpec("a", DType.FLOAT32, (elements,)),),
        OptimizerSpec("sgd", group),
        (PartitionLayout(PartitionId(0), elements * 4, (Block(0, 0, elements, 0),)),),
    )
    partition = Partition(layout, PartitionId(0), UpdateRules(UpdateMode.ASYNC, 0))
    partition.open_source(SourceKey(SHARD), TOKEN)
    payload = aligned_empty(elements * 4)
    payload.view(np.float32)[:] = 1
    ends = threading.Event()

    def push_on() -> int:
        for sequence in itertools.count():
            apply_push(partition, name(SHARD, sequence), Contribution(1.0, group, payload, (True,)), current)
            if ends.is_set():
                return sequence
        raise AssertionError

    with ThreadPoolExecutor(1) as threads:
        pushes = threads.submit(push_on)
        try:
            for _ in range(30):
                cut = take_cut(partition)
                cut.complete()
                copied = block_arrays(partition, 0, cut)["momentum_buffer"]
                assert copied.min() == copied.max() == cut.version.number
                cut.release()
        finally:
            ends.set()
        assert pushes.result(DEADLINE_S) > 1


# ---- pulls


def test_rule_b3_version_can_be_pulled_while_the_next_one_exists() -> None:
    partition = synchronous(1)
    take_steps(partition, 1, 5)
    assert values(partition, 4)[0] == -4
    assert values(partition, 5)[0] == -5


def test_rule_b3_older_version_is_not_found_and_the_newest_is_named() -> None:
    partition = synchronous(1)
    take_steps(partition, 1, 5)
    with pytest.raises(NotFound, match="version 3 of partition 0, whose newest is 5") as refused:
        hold_version(partition, 3, True, 0.0)
    assert refused.value.facts == {"partition": "0", "newest": "5"}


def test_pull_of_a_version_or_a_newer_one_gives_the_newest() -> None:
    partition = synchronous(1)
    take_steps(partition, 1, 5)
    found = hold_version(partition, 2, False, 0.0)
    assert not isinstance(found, NotReadyPart)
    assert found[0] == Version(1, 5)
    partition.release(found[1])


def test_buffer_that_is_held_keeps_its_bytes_through_later_steps() -> None:
    partition = synchronous(1)
    take_steps(partition, 1, 1)
    found = hold_version(partition, 1, True, 0.0)
    assert not isinstance(found, NotReadyPart)
    take_steps(partition, 1, 8)
    assert found[1].view(np.float64)[0] == -1
    partition.release(found[1])


def test_promise_7_missing_version_names_the_ranks_that_it_waits_for() -> None:
    partition = synchronous(12)
    apply_push(partition, rank(1, 0), gradient(1), current)
    found = hold_version(partition, 1, True, 0.0)
    assert found == NotReadyPart(
        PartitionId(0), Version(1, 0), 1, waiting_for="logical rank 0, 2, 3, 4, 5, 6, 7, 8 of step 0"
    )
    for number in (0, *range(3, 12)):
        apply_push(partition, rank(number, 0), gradient(1), current)
    found = hold_version(partition, 1, False, 0.0)
    assert isinstance(found, NotReadyPart)
    assert found.waiting_for == "logical rank 2 of step 0"


def test_promise_7_missing_version_of_an_asynchronous_partition_waits_for_a_push() -> None:
    found = hold_version(asynchronous(), 1, False, 0.0)
    assert found == NotReadyPart(PartitionId(0), Version(1, 0), 1, waiting_for="a push")


def test_pull_waits_until_the_version_is_there() -> None:
    partition = synchronous(1)
    found: list[object] = []

    def work(number: int) -> None:
        if number:
            held = hold_version(partition, 3, True, time.monotonic() + DEADLINE_S)
            found.append(held if isinstance(held, NotReadyPart) else held[0])
        else:
            take_steps(partition, 1, 3)

    in_threads(2, work)
    assert found == [Version(1, 3)]


def test_pull_waits_no_longer_than_it_was_told() -> None:
    partition = synchronous(1)
    begun = time.monotonic()
    assert isinstance(hold_version(partition, 1, True, begun + 0.05), NotReadyPart)
    assert 0.05 <= time.monotonic() - begun < DEADLINE_S


def test_refusals_of_a_push_are_of_the_kind_that_the_sender_may_learn_from() -> None:
    partition = asynchronous()
    with pytest.raises(Refused) as refused:
        apply_push(partition, name(SHARD, 7), gradient(1), current)
    assert refused.value.facts["next"] == "0"


def test_rule_b6_step_that_overflows_in_one_rank_is_complete_and_changes_no_parameter() -> None:
    partition = synchronous(2)
    assert apply_push(partition, rank(0, 0), gradient(1.0), current).outcome is Outcome.RECORDED
    overflowed = Contribution(1.0, RATE, aligned_empty(0), (False,), overflow=True)
    assert apply_push(partition, rank(1, 0), overflowed, current).outcome is Outcome.APPLIED
    assert values(partition, 1) == [0.0] * ELEMENTS
    for number in range(2):
        apply_push(partition, rank(number, 1), gradient(1.0), current)
    assert values(partition, 2)[0] == -1.0


def test_rule_b6_asynchronous_an_overflow_is_that_pushs_alone() -> None:
    partition = asynchronous()
    apply_push(partition, name(SHARD, 0), gradient(1.0)._replace(overflow=True), current)
    apply_push(partition, name(SHARD, 1), gradient(1.0), current)
    assert partition.describe()[0].number == 2
    assert values(partition)[0] == -1.0
