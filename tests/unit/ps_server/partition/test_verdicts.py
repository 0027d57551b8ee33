"""Steps that wait for a verdict (docs/internals/ledger.md, rule B6): gate, partition, and a worker's sum of what was
told."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Sequence

import numpy as np
import pytest

from shardyard.domain.consistency import Clipping, UpdateMode
from shardyard.domain.errors import InvalidRequest, NotReady, StaleGeneration, TooLarge
from shardyard.domain.ids import PartitionId, Rank, Token
from shardyard.domain.layout.layouts import Block, JobLayout, PartitionLayout
from shardyard.domain.optimizers import OptimizerSpec, make_group
from shardyard.domain.pulls import NotReadyPart
from shardyard.domain.push_names import PushName, RankSource, SourceKey
from shardyard.domain.pushes import GatheredPart, Outcome, StepVerdict
from shardyard.domain.variables import DType, VariableKind, VariableSpec
from shardyard_ps_server.partition import partition as partition_module
from shardyard_ps_server.partition.checkpoint_cuts import await_named_cut, name_cut, take_cut
from shardyard_ps_server.partition.contribution import Contribution
from shardyard_ps_server.partition.partition import Partition
from shardyard_ps_server.partition.push import apply_push
from shardyard_ps_server.partition.reads import hold_version
from shardyard_ps_server.partition.step_gate import StepGate, scale_of
from shardyard_ps_server.partition.sync_step import awaits_verdict, gathered_part, take_verdict
from shardyard_ps_server.partition.update_rules import UpdateRules
from shardyard_ps_server.values.versions import Bytes, aligned_empty
from shardyard_worker.exchange.norm_sums import NormSums

PARTITION = PartitionId(1)
RATE = (make_group("sgd", {"lr": 1.0}),)
ELEMENTS = 8
LAYOUT = JobLayout(
    (VariableSpec("a", DType.FLOAT64, (ELEMENTS,)), VariableSpec("b", DType.FLOAT64, (2,), VariableKind.BUFFER)),
    OptimizerSpec("sgd", RATE),
    (
        PartitionLayout(PartitionId(0), 0, ()),
        PartitionLayout(PARTITION, 128, (Block(0, 0, ELEMENTS, 0), Block(1, 0, 2, 64))),
    ),
)


class Word:
    """A contribution as the gate sees it."""

    weight = 1.0
    groups: tuple[tuple[float, ...], ...] | None = RATE
    table_groups: tuple[tuple[float, ...], ...] = ()


def gathered(ranks: int = 2, *, step: int = 0, square_norm: float = 4.0) -> StepGate[Word]:
    """A gate that waits for a verdict."""
    gate: StepGate[Word] = StepGate(PARTITION, ranks, step=step)
    for rank in range(ranks - 1):
        gate.record(Rank(rank), Word())
    gate.gather(square_norm)
    return gate


# ---- the gate


def test_gate_waits_once_all_ranks_are_there_and_goes_on_once_the_step_is_taken() -> None:
    gate = gathered()
    assert (gate.awaits_verdict, gate.missing(), gate.is_empty) == (True, (), False)
    assert not any(gate.completes(Rank(rank)) for rank in range(2))
    with pytest.raises(NotReady, match="step 1 in partition 1, which gathers step 0"):
        gate.check(Rank(0), 1, Word())
    gate.next_step()
    assert (gate.awaits_verdict, gate.missing(), gate.is_empty, gate.step) == (False, (0, 1), True, 1)


def test_what_a_verdict_is_made_of_is_told_until_the_next_step_is_taken() -> None:
    gate = gathered(square_norm=4.0)
    assert (gate.gathered(0), gate.gathered(1)) == (GatheredPart(PARTITION, 0, 4.0), None)
    gate.next_step()
    gate.record(Rank(1), Word())
    assert (gate.gathered(0), gate.gathered(1)) == (GatheredPart(PARTITION, 0, 4.0), None)
    gate.gather(9.0)
    assert (gate.gathered(0), gate.gathered(1)) == (GatheredPart(PARTITION, 0, 4.0), GatheredPart(PARTITION, 1, 9.0))
    gate.next_step()
    assert (gate.gathered(0), gate.gathered(1)) == (None, GatheredPart(PARTITION, 1, 9.0))


def test_verdict_is_taken_for_its_own_step_alone() -> None:
    gate = gathered(step=7)
    assert gate.judges(StepVerdict(7, 4.0))
    assert not gate.judges(StepVerdict(6, 4.0))
    with pytest.raises(InvalidRequest, match="a verdict on step 8 of partition 1, which gathers step 7"):
        gate.judges(StepVerdict(8, 4.0))
    gate.next_step()
    assert not gate.judges(StepVerdict(7, 4.0))
    with pytest.raises(InvalidRequest, match="a verdict on step 8 of partition 1, which gathers step 8"):
        gate.judges(StepVerdict(8, 4.0))


@pytest.mark.parametrize(
    ("own", "total", "possible"),
    [
        (4.0, 4.0, True),
        (4.0, 1e300, True),
        (4.0, math.inf, True),
        (4.0, math.nan, True),
        (math.inf, math.inf, True),
        (math.nan, math.nan, True),
        (4.0, 3.999, False),
        (4.0, None, False),
        (math.inf, 1e300, False),
        (math.nan, 4.0, False),
        (math.nan, math.inf, False),
    ],
)
def test_verdict_that_cannot_be_made_of_what_was_told_is_refused(
    own: float, total: float | None, possible: bool
) -> None:
    gate = gathered(square_norm=own)
    if possible:
        assert gate.judges(StepVerdict(0, total))
        return
    with pytest.raises(InvalidRequest, match="add the square norms of all partitions"):
        gate.judges(StepVerdict(0, total))


@pytest.mark.parametrize(
    ("square_norm", "scale"),
    [(0.0, 1.0), (1.0, 1.0), (4.0, 1.5 / (2.0 + 1e-6)), (math.inf, 0.0), (math.nan, math.nan)],
)
def test_scale_is_that_of_torch(square_norm: float, scale: float) -> None:
    assert scale_of(square_norm, 1.5) == pytest.approx(scale, rel=0, abs=0, nan_ok=True)


# ---- a worker's sum


def test_verdict_is_the_sum_in_the_order_of_partitions_whatever_the_order_of_answers() -> None:
    parts = [1e16, 1.0, 1.0, 1.0]
    told = [GatheredPart(PartitionId(number), 5, part) for number, part in enumerate(parts)]
    wanted = ((1e16 + 1.0) + 1.0) + 1.0
    assert wanted != sum(sorted(parts))
    for seed in range(20):
        order = random.Random(seed).sample(told, len(told))
        verdicts = NormSums(4)
        for each in order[:-1]:
            verdicts.add([each], range(4))
            assert verdicts.verdict(5) is None
        assert verdicts.lacking(5) == (order[-1].partition,)
        verdicts.add([order[-1], order[0]], range(4))
        assert (verdicts.verdict(5), verdicts.norm(5)) == (StepVerdict(5, wanted), math.sqrt(wanted))


def test_verdict_has_no_part_of_another_step() -> None:
    verdicts = NormSums(2)
    verdicts.add([GatheredPart(PartitionId(0), 5, 1.0), GatheredPart(PartitionId(1), 4, 1.0)], range(4))
    assert (verdicts.verdict(4), verdicts.verdict(5), verdicts.lacking(4)) == (None, None, (0, 1))
    verdicts.add([GatheredPart(PartitionId(1), 6, 2.0)], range(4))
    assert verdicts.lacking(6) == (0,)
    verdicts.add([GatheredPart(PartitionId(1), 5, 1.0), GatheredPart(PartitionId(0), 6, 7.0)], range(4))
    assert verdicts.verdict(6) == StepVerdict(6, 9.0)
    assert verdicts.verdict(5) is None


def test_a_server_reports_of_its_own_partitions_only() -> None:
    verdicts = NormSums(2)
    verdicts.add([GatheredPart(PartitionId(0), 5, 1.0), GatheredPart(PartitionId(1), 5, 1e30)], [PartitionId(0)])
    assert verdicts.lacking(5) == (1,)


# ---- a partition


def clipped(ranks: int = 2, *, norm: float = 1.0, value: float = 0.0) -> Partition:
    partition = Partition(LAYOUT, PARTITION, UpdateRules(UpdateMode.SYNC, ranks, clipping=Clipping(norm, value)))
    for rank in range(ranks):
        partition.open_source(SourceKey(RankSource(Rank(rank))), Token(1))
    return partition


def gradient(values: Sequence[float], weight: float = 1.0, buffer: float = 0.0) -> Contribution:
    payload = aligned_empty(128)
    payload[:] = 0
    payload.view(np.float64)[: len(values)] = values
    payload[64:80].view(np.float64)[:] = buffer
    return Contribution(weight, RATE, payload, (True, True))


EMPTY = Contribution(0.0, None, aligned_empty(0), (False, False))


def push(partition: Partition, rank: int, step: int, contribution: Contribution) -> Outcome:
    name = PushName(SourceKey(RankSource(Rank(rank))), Token(1), step, step)
    return apply_push(partition, name, contribution, current).outcome


def current() -> None:
    """The generation has not changed."""


def values(partition: Partition) -> list[float]:
    found = hold_version(partition, 0, False, 0.0)
    assert not isinstance(found, NotReadyPart)
    partition.release(found[1])
    return list(found[1].view(np.float64)[:10])


def test_step_waits_for_its_verdict_and_the_mean_is_scaled_by_it() -> None:
    partition = clipped()
    assert push(partition, 0, 0, gradient([3.0] * 8, 1.0, buffer=1.0)) is Outcome.RECORDED
    assert gathered_part(partition, 0) is None
    assert push(partition, 1, 0, gradient([1.0] * 8, 3.0, buffer=5.0)) is Outcome.RECORDED
    assert partition.describe()[0].number == 0
    assert gathered_part(partition, 0) == GatheredPart(PARTITION, 0, 8 * 1.5**2)  # of parameters alone
    take_verdict([partition], StepVerdict(0, 100.0), current)
    scale = 1.0 / (10.0 + 1e-6)
    assert values(partition) == [-1.5 * scale] * 8 + [4.0] * 2
    assert partition.describe()[0].number == 1


def test_verdict_counts_once_and_never_for_another_step() -> None:
    partition = clipped(1)
    push(partition, 0, 0, gradient([1.0] * 8))
    for _ in range(3):
        take_verdict([partition], StepVerdict(0, 16.0), current)
    after = values(partition)
    assert partition.describe()[0].number == 1
    push(partition, 0, 1, gradient([1.0] * 8))
    assert not awaits_verdict(partition, StepVerdict(0, 16.0))
    take_verdict([partition], StepVerdict(0, 16.0), current)
    assert (values(partition), partition.describe()[0].number) == (after, 1)
    with pytest.raises(InvalidRequest, match="a verdict on step 2"):
        take_verdict([partition], StepVerdict(2, 16.0), current)


def test_verdict_before_all_ranks_are_there_is_refused() -> None:
    partition = clipped()
    push(partition, 0, 0, gradient([1.0] * 8))
    with pytest.raises(InvalidRequest, match="a verdict is made of what all partitions have gathered"):
        take_verdict([partition], StepVerdict(0, 16.0), current)
    assert push(partition, 1, 0, gradient([1.0] * 8)) is Outcome.RECORDED


def test_verdict_under_an_earlier_map_changes_nothing() -> None:
    partition = clipped(1)
    push(partition, 0, 0, gradient([1.0] * 8))

    def stale() -> None:
        raise StaleGeneration("generation 1; this server is at 2")

    with pytest.raises(StaleGeneration):
        take_verdict([partition], StepVerdict(0, 16.0), stale)
    assert gathered_part(partition, 0) is not None
    assert partition.describe()[0].number == 0


def test_job_that_does_not_clip_by_norm_takes_no_verdict() -> None:
    for partition in (clipped(1, norm=0.0), clipped(1, norm=0.0, value=1.0)):
        assert push(partition, 0, 0, gradient([1.0] * 8)) is Outcome.APPLIED
        with pytest.raises(InvalidRequest, match="whose steps need none"):
            take_verdict([partition], StepVerdict(0, 8.0), current)


def test_a_norm_within_the_limit_gives_the_bits_of_a_job_that_does_not_clip() -> None:
    numbers = np.random.default_rng(3)
    plain, bounded = Partition(LAYOUT, PARTITION, UpdateRules(UpdateMode.SYNC, 3)), clipped(3, norm=1e6)
    for rank in range(3):
        plain.open_source(SourceKey(RankSource(Rank(rank))), Token(1))
    for step in range(4):
        for rank in (2, 0, 1):
            made = gradient(numbers.standard_normal(ELEMENTS).tolist(), float(rank + 1), buffer=numbers.random())
            push(plain, rank, step, made)
            push(bounded, rank, step, made)
        told = gathered_part(bounded, step)
        assert told is not None
        take_verdict([bounded], StepVerdict(step, told.square_norm), current)
        assert values(bounded) == values(plain)


def test_elements_are_clipped_before_the_norm_is_told() -> None:
    partition = clipped(1, norm=100.0, value=2.0)
    push(partition, 0, 0, gradient([5.0, -5.0, 1.0, -1.0, 2.0, -2.0, 0.0, math.inf], buffer=9.0))
    assert gathered_part(partition, 0) == GatheredPart(PARTITION, 0, 5 * 4.0 + 2 * 1.0)
    take_verdict([partition], StepVerdict(0, 22.0), current)
    assert values(partition) == [-2.0, 2.0, -1.0, 1.0, -2.0, 2.0, 0.0, -2.0, 9.0, 9.0]


def test_clipping_by_value_looks_at_the_mean_and_needs_no_verdict() -> None:
    partition = clipped(norm=0.0, value=2.0)
    push(partition, 0, 0, gradient([8.0, 8.0, -8.0, math.nan], buffer=9.0))
    assert push(partition, 1, 0, gradient([-8.0, -1.0, -8.0], buffer=9.0)) is Outcome.APPLIED
    found = values(partition)
    assert found[:3] == [0.0, -2.0, 2.0]
    assert math.isnan(found[3])
    assert found[4:] == [0.0] * 4 + [9.0] * 2


def test_gradient_that_is_not_finite_goes_as_in_torch() -> None:
    partition = clipped(1)
    push(partition, 0, 0, gradient([math.inf, 1.0]))
    told = gathered_part(partition, 0)
    assert told is not None
    assert told.square_norm == math.inf
    take_verdict([partition], StepVerdict(0, math.inf), current)
    found = values(partition)
    assert math.isnan(found[0])
    assert found[1:] == [0.0] * 9
    push(partition, 0, 1, gradient([math.nan, 1.0]))
    take_verdict([partition], StepVerdict(1, math.nan), current)
    assert all(map(math.isnan, values(partition)[:8]))


def test_step_of_empty_pushes_has_a_norm_of_zero_and_changes_nothing() -> None:
    partition = clipped()
    for rank in range(2):
        push(partition, rank, 0, EMPTY)
    assert gathered_part(partition, 0) == GatheredPart(PARTITION, 0, 0.0)
    take_verdict([partition], StepVerdict(0, 9.0), current)
    assert (values(partition), partition.describe()[0].number) == ([0.0] * 10, 1)


def test_what_a_push_brought_may_be_written_again_while_the_step_waits() -> None:
    partition = clipped()
    made = [gradient([1.0] * 8), gradient([3.0] * 8)]
    for rank, each in enumerate(made):
        push(partition, rank, 0, each)
        each.payload[:] = 0xFF
    take_verdict([partition], StepVerdict(0, 32.0), current)
    assert values(partition)[0] == pytest.approx(-2.0 / math.sqrt(32.0))


def test_who_waits_for_the_version_is_told_at_once_that_a_verdict_is_due() -> None:
    partition = clipped()
    push(partition, 0, 0, gradient([1.0]))
    found: list[object] = []
    reader = threading.Thread(target=lambda: found.append(hold_version(partition, 1, True, time.monotonic() + 60.0)))
    reader.start()
    push(partition, 1, 0, gradient([1.0]))
    reader.join(30.0)
    assert not reader.is_alive()
    (missing,) = found
    assert isinstance(missing, NotReadyPart)
    assert missing.waiting_for == "the verdict on step 0"


def test_checkpoint_of_a_step_has_nothing_of_one_that_waits_for_its_verdict() -> None:
    partition = clipped()
    before = take_cut(partition)
    before.release()
    for rank in range(2):
        push(partition, rank, 0, gradient([1.0]))
    with pytest.raises(InvalidRequest, match="which has a part of the next one"):
        name_cut(partition, 0, between=True)
    cut = take_cut(partition)
    assert (cut.version.number, {mark.next for mark in cut.marks}) == (0, {0})
    cut.release()
    name_cut(partition, 1)
    assert await_named_cut(partition, time.monotonic()) is None
    take_verdict([partition], StepVerdict(0, 9.0), current)
    cut_after = await_named_cut(partition, time.monotonic())
    assert cut_after is not None
    assert (cut_after.version.number, {mark.next for mark in cut_after.marks}) == (1, {1})
    cut_after.release()


def test_no_memory_for_the_mean_or_the_next_values_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    partition = clipped()
    push(partition, 0, 0, gradient([1.0]))
    real = aligned_empty

    def refuse(nbytes: int) -> Bytes:
        raise TooLarge(f"{nbytes} bytes")

    monkeypatch.setattr(partition_module, "aligned_empty", refuse)
    with pytest.raises(TooLarge):
        push(partition, 1, 0, gradient([1.0]))
    assert (gathered_part(partition, 0), partition.watermark(SourceKey(RankSource(Rank(1)))).next) == (None, 0)
    monkeypatch.setattr(partition_module, "aligned_empty", real)
    assert push(partition, 1, 0, gradient([1.0])) is Outcome.RECORDED
    monkeypatch.setattr(partition.versions, "_memory", lambda nbytes: refuse(nbytes))
    with pytest.raises(TooLarge):
        take_verdict([partition], StepVerdict(0, 9.0), current)
    assert partition.describe()[0].number == 0
    assert gathered_part(partition, 0) is not None
