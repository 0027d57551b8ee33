"""How an epoch is cut into steps, rounds and shares of logical ranks."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shardyard.domain.epochs import EpochPlan, PlannedBatch, StepPlan

UNITS = st.builds(
    EpochPlan,
    samples=st.integers(1, 120),
    batch_size=st.integers(1, 5),
    ranks=st.integers(1, 4),
    drop_last=st.booleans(),
    accumulate=st.integers(1, 4),
    local_steps=st.integers(1, 5),
)


def shares(units: EpochPlan) -> list[tuple[int, int]]:
    return [units.span(index, rank) for index in range(units.per_epoch) for rank in range(units.ranks)]


@given(UNITS)
def test_promise_2_each_sample_of_an_epoch_is_in_one_batch_of_one_share(units: EpochPlan) -> None:
    seen: list[int] = []
    for begin, end in shares(units):
        batches = list(units.batches(end - begin))
        assert [batch.begin for batch in batches[1:]] == [batch.end for batch in batches[:-1]]
        seen += [begin + at for batch in batches for at in range(batch.begin, batch.end)]
    assert seen == list(range(units.samples_per_epoch))
    per_step = units.ranks * units.batch_size * units.accumulate
    assert units.samples_per_epoch == (units.samples // per_step * per_step if units.drop_last else units.samples)


@given(UNITS)
def test_a_step_has_as_many_batches_as_are_accumulated_where_there_are_samples_for_them(units: EpochPlan) -> None:
    for begin, end in shares(units):
        steps: list[list[PlannedBatch]] = [[]]
        for batch in units.batches(end - begin):
            assert 1 <= batch.end - batch.begin <= units.batch_size
            steps[-1].append(batch)
            if batch.due:
                steps.append([])
        assert steps.pop() == []
        for step in steps:
            samples = step[-1].end - step[0].begin
            assert len(step) == min(units.accumulate, samples)
        assert len(steps) <= units.local_steps


@given(UNITS, st.integers(1, 3))
def test_what_comes_before_a_round_is_the_sum_of_the_rounds_before(units: EpochPlan, epochs: int) -> None:
    samples = steps = 0
    for round_ in range(units.per_epoch * epochs):
        assert (units.samples_before(round_), units.steps_before(round_)) == (samples, steps)
        index = round_ % units.per_epoch
        samples += sum(end - begin for begin, end in (units.span(index, rank) for rank in range(units.ranks)))
        steps += units.steps_in(index)
    assert steps == epochs * units.steps_per_epoch


@pytest.mark.parametrize("samples", [1, 7, 24, 25])
@pytest.mark.parametrize("ranks", [1, 3])
def test_one_batch_a_step_is_cut_as_ever(samples: int, ranks: int) -> None:
    units = EpochPlan(samples, 4, ranks, drop_last=False)
    assert units.per_epoch == -(-samples // (4 * ranks))
    for index in range(units.per_epoch):
        for rank in range(ranks):
            begin = min((index * ranks + rank) * 4, samples)
            assert units.span(index, rank) == (begin, min(begin + 4, samples))
            share = min(begin + 4, samples) - begin
            assert list(units.batches(share)) == ([PlannedBatch(0, share, True)] if share else [])


def test_a_short_round_is_shared_by_all_ranks() -> None:
    units = EpochPlan(260, 10, 2, drop_last=False, local_steps=10)
    assert [units.span(1, rank) for rank in range(2)] == [(200, 230), (230, 260)]


@given(UNITS, st.integers(1, 3), st.data())
def test_promise_2_steps_have_what_data_shards_have_left_and_each_sample_of_an_epoch_once(
    units: EpochPlan, epochs: int, data: st.DataObject
) -> None:
    assume(units.per_epoch)  # a data set of no step is refused
    whole = range(0, units.samples, units.batch_size * units.accumulate)
    begun_epochs, begun = data.draw(st.integers(0, epochs)), data.draw(st.sampled_from(whole))
    begun = 0 if begun_epochs == epochs else begun
    course = StepPlan(units, units.per_epoch, epochs, 7, begun_epochs, begun)
    rest = units.samples - begun
    per_step = units.ranks * units.batch_size * units.accumulate
    there = rest // per_step * per_step if units.drop_last else rest
    seen: list[list[int]] = [[] for _ in range(epochs)]
    counted = course.samples_before(7)
    for step in range(7, course.end):
        assert course.samples_before(step) == counted + sum(map(len, seen))
        place = course.place(step)
        for rank in range(units.ranks):
            epoch, first, last = course.span(step, rank)
            assert rank or place == (epoch, first)
            seen[epoch] += range(first, last)
    assert course.place(course.end) == (epochs, 0)
    assert course.samples_before(course.end) == counted + sum(map(len, seen))
    for epoch, samples in enumerate(seen):
        if epoch < begun_epochs:
            assert samples == []
        elif epoch == begun_epochs:
            assert samples == list(range(begun, begun + (there if begun else units.samples_per_epoch)))
        else:
            assert samples == list(range(units.samples_per_epoch))
