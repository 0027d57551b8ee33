"""What holds for every order of arrival: names are counted once, and synchronous bits depend on the names alone."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shardyard.domain.consistency import UpdateMode
from shardyard.domain.errors import NotReady, SequenceGap
from shardyard.domain.ids import PartitionId, Rank, Token, Version
from shardyard.domain.layout.layouts import Block, JobLayout, PartitionLayout
from shardyard.domain.optimizers import OptimizerSpec, make_group
from shardyard.domain.pulls import NotReadyPart
from shardyard.domain.push_names import DataShardSource, PushName, RankSource, Source, SourceKey
from shardyard.domain.pushes import Outcome
from shardyard.domain.variables import DType, VariableSpec
from shardyard_ps_server.partition.contribution import Contribution
from shardyard_ps_server.partition.partition import Partition
from shardyard_ps_server.partition.push import apply_push
from shardyard_ps_server.partition.reads import hold_version
from shardyard_ps_server.partition.update_rules import UpdateRules
from shardyard_ps_server.values.versions import aligned_empty

ELEMENTS = 32
PARTITION = PartitionId(0)


def _layout(kind: str, rate: float) -> JobLayout:
    return JobLayout(
        (VariableSpec("a", DType.FLOAT64, (ELEMENTS,)),),
        OptimizerSpec(kind, (make_group(kind, {"lr": rate}),)),
        (PartitionLayout(PARTITION, ELEMENTS * 8, (Block(0, 0, ELEMENTS, 0),)),),
    )


def _contribution(layout: JobLayout, values: np.ndarray, weight: float) -> Contribution:
    payload = aligned_empty(ELEMENTS * 8)
    payload.view(np.float64)[:] = values
    return Contribution(weight, layout.optimizer.groups, payload, (True,))


def _push(partition: Partition, source: Source, sequence: int, contribution: Contribution) -> Outcome | str:
    try:
        name = PushName(SourceKey(source), Token(1), sequence, sequence)
        return apply_push(partition, name, contribution, lambda: None).outcome
    except (NotReady, SequenceGap) as refused:
        return refused.code


def _newest(partition: Partition) -> tuple[Version, bytes]:
    found = hold_version(partition, 0, False, 0.0)
    assert not isinstance(found, NotReadyPart)
    bits = found[1].tobytes()
    partition.release(found[1])
    return found[0], bits


@settings(max_examples=120, deadline=None)
@given(sources=st.integers(1, 4), batches=st.integers(1, 8), seed=st.integers(0, 2**32))
def test_rule_a2_pushes_in_any_order_and_number_are_counted_once_each(sources: int, batches: int, seed: int) -> None:
    rng = random.Random(seed)
    layout = _layout("sgd", 1.0)
    partition = Partition(layout, PARTITION, UpdateRules(UpdateMode.ASYNC, 0))
    for index in range(sources):
        partition.open_source(SourceKey(DataShardSource(0, 0, index)), Token(1))
    done = [0] * sources
    while min(done) < batches:
        index, batch = rng.randrange(sources), rng.randrange(batches)
        own = np.zeros(ELEMENTS)
        own[index * batches + batch] = -1
        outcome = _push(partition, DataShardSource(0, 0, index), batch, _contribution(layout, own, 1.0))
        if batch == done[index]:
            assert outcome is Outcome.APPLIED
            done[index] += 1
        else:
            assert outcome == (Outcome.DUPLICATE if batch < done[index] else "SequenceGap")
    version, bits = _newest(partition)
    assert version.number == sources * batches
    counted = np.frombuffer(bits, np.float64)
    assert counted.tolist() == [1.0] * (sources * batches) + [0.0] * (ELEMENTS - sources * batches)


@settings(max_examples=120, deadline=None)
@given(ranks=st.integers(1, 5), steps=st.integers(1, 5), kind=st.sampled_from(["sgd", "adam"]), seed=st.integers(0))
def test_rule_b1_bits_do_not_depend_on_who_came_first_or_twice(ranks: int, steps: int, kind: str, seed: int) -> None:
    rng, numbers = random.Random(seed), np.random.default_rng(seed)
    layout = _layout(kind, 0.1)
    work = {
        (rank, step): _contribution(layout, numbers.standard_normal(ELEMENTS), float(rng.randint(1, 9)))
        for rank in range(ranks)
        for step in range(steps)
    }
    calm, stormy = (Partition(layout, PARTITION, UpdateRules(UpdateMode.SYNC, ranks)) for _ in range(2))
    for partition in (calm, stormy):
        for rank in range(ranks):
            partition.open_source(SourceKey(RankSource(Rank(rank))), Token(1))
    for step in range(steps):
        for rank in range(ranks):
            _push(calm, RankSource(Rank(rank)), step, work[rank, step])
    while _newest(stormy)[0].number < steps:
        rank, step = rng.choice(sorted(work))
        now = _newest(stormy)[0].number
        outcome = _push(stormy, RankSource(Rank(rank)), step, work[rank, step])
        assert outcome is Outcome.DUPLICATE or step >= now, (rank, step, now)
        if step > now:
            assert outcome in ("NotReady", "SequenceGap")
    assert _newest(stormy) == _newest(calm)
