"""The gate of a synchronous step, and the verdict on what it gathered (docs/internals/ledger.md, rules B1, B2, B5)."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardyard.domain.errors import InvalidRequest, NotReady, RateMismatch
from shardyard.domain.ids import PartitionId, Rank
from shardyard_ps_server.partition.step_gate import StepGate, verdict

PARTITION = PartitionId(2)


@dataclass(frozen=True)
class Word:
    """A contribution as the gate sees it."""

    text: str
    weight: float = 1.0
    groups: tuple[tuple[float, ...], ...] | None = ((0.1, 0.9),)
    overflow: bool = False
    table_groups: tuple[tuple[float, ...], ...] = ()


EMPTY = Word("empty", 0.0, None)


def give(gate: StepGate[Word], rank: int, step: int, word: Word) -> None:
    gate.check(Rank(rank), step, word)
    gate.record(Rank(rank), word)


def take(gate: StepGate[Word], rank: int, step: int, word: Word) -> tuple[Word, ...]:
    """With the last rank of the step."""
    gate.check(Rank(rank), step, word)
    taken = gate.with_last(Rank(rank), word)
    gate.next_step()
    return taken


@pytest.mark.parametrize("arrival", list(itertools.permutations(range(4))))
def test_rule_b2_step_is_in_rank_order_whatever_the_order_of_arrival(arrival: tuple[int, ...]) -> None:
    gate: StepGate[Word] = StepGate(PARTITION, 4)
    for rank in arrival[:-1]:
        give(gate, rank, 0, Word(f"of rank {rank}"))
    taken = take(gate, arrival[-1], 0, Word(f"of rank {arrival[-1]}"))
    assert [word.text for word in taken] == [f"of rank {rank}" for rank in range(4)]


def test_missing_names_the_ranks_that_have_not_contributed() -> None:
    gate: StepGate[Word] = StepGate(PARTITION, 3)
    assert gate.missing() == (0, 1, 2)
    give(gate, 1, 0, Word("a"))
    assert gate.missing() == (0, 2)
    give(gate, 0, 0, EMPTY)
    assert gate.missing() == (2,)
    give(gate, 2, 0, Word("c"))
    assert gate.missing() == ()


def test_rank_completes_a_step_where_it_alone_is_missing() -> None:
    gate: StepGate[Word] = StepGate(PARTITION, 3)
    for _ in range(2):
        step = gate.step
        assert not any(gate.completes(Rank(rank)) for rank in range(3))
        give(gate, 2, step, Word("a"))
        assert not any(gate.completes(Rank(rank)) for rank in range(3))
        give(gate, 0, step, Word("a"))
        assert [gate.completes(Rank(rank)) for rank in range(3)] == [False, True, False]
        take(gate, 1, step, Word("a"))


def test_next_step_is_gathered_from_nothing() -> None:
    gate: StepGate[Word] = StepGate(PARTITION, 2)
    for step in range(3):
        assert gate.step == step
        assert gate.missing() == (0, 1)
        give(gate, 0, step, Word("a", groups=((float(step),),)))
        take(gate, 1, step, Word("b", groups=((float(step),),)))


def test_later_step_is_not_ready() -> None:
    gate: StepGate[Word] = StepGate(PARTITION, 2)
    give(gate, 0, 0, Word("a"))
    with pytest.raises(NotReady, match="step 1 in partition 2, which gathers step 0"):
        gate.check(Rank(0), 1, Word("b"))
    assert gate.missing() == (1,)


def test_rank_that_does_not_exist_is_refused() -> None:
    gate: StepGate[Word] = StepGate(PARTITION, 2)
    with pytest.raises(InvalidRequest, match="logical rank 2; the job has 2"):
        gate.check(Rank(2), 0, Word("a"))
    assert gate.missing() == (0, 1)


def test_rule_b5_ranks_of_a_step_that_use_different_rates_are_an_error() -> None:
    gate: StepGate[Word] = StepGate(PARTITION, 3)
    give(gate, 2, 0, Word("a", groups=((0.1, 0.0), (0.5, 0.0))))
    with pytest.raises(RateMismatch) as refused:
        gate.check(Rank(0), 0, Word("b", groups=((0.1, 0.0), (0.25, 0.0))))
    assert refused.value.what == (
        "logical rank 0 of step 0 has the settings [0.25, 0.0] in parameter group 1, not [0.5, 0.0] of logical rank 2"
    )
    assert gate.missing() == (0, 1)


def test_rule_b5_ranks_with_different_numbers_of_groups_are_an_error() -> None:
    gate: StepGate[Word] = StepGate(PARTITION, 2)
    give(gate, 0, 0, Word("a", groups=((0.1,),)))
    with pytest.raises(RateMismatch, match="of a different number of parameter groups"):
        gate.check(Rank(1), 0, Word("b", groups=((0.1,), (0.2,))))


def test_rule_b5_rates_may_change_from_step_to_step() -> None:
    gate: StepGate[Word] = StepGate(PARTITION, 1)
    for step, rate in enumerate((0.1, 0.05)):
        take(gate, 0, step, Word("a", groups=((rate,),)))


def test_named_empty_push_has_no_rates_to_disagree_with() -> None:
    gate: StepGate[Word] = StepGate(PARTITION, 3)
    give(gate, 0, 0, EMPTY)
    give(gate, 1, 0, Word("a", groups=((0.1,),)))
    assert len(take(gate, 2, 0, EMPTY)) == 3


def test_named_empty_push_counts_as_present_and_has_no_share() -> None:
    found = verdict((Word("a", 3.0), EMPTY, Word("c", 1.0)))
    assert [word.text for word in found.members] == ["a", "c"]
    assert found.shares == (0.75, 0.25)


def test_gradient_of_weight_zero_has_no_share() -> None:
    found = verdict((Word("a", 0.0), Word("b", 2.0)))
    assert [word.text for word in found.members] == ["b"]
    assert found.shares == (1.0,)


def test_step_of_empty_pushes_has_no_members() -> None:
    found = verdict((EMPTY, EMPTY))
    assert (found.members, found.shares) == ((), ())


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=64))
def test_rule_b1_shares_are_by_samples(samples: list[int]) -> None:
    found = verdict([Word("a", float(weight)) for weight in samples])
    assert found.shares == tuple(weight / sum(samples) for weight in samples)
    assert sum(found.shares) == pytest.approx(1.0, abs=1e-12)


def test_rule_b1_shares_are_summed_in_rank_order() -> None:
    weights = (1e16, 1.0, 1.0)  # in another order the total would be another number
    found = verdict([Word("a", weight) for weight in weights])
    assert found.shares == tuple(weight / 1e16 for weight in weights)


def test_rule_b6_an_overflow_of_one_rank_skips_the_step_for_all_and_its_buffers_count() -> None:
    found = verdict((Word("a", 3.0), Word("b", 1.0, overflow=True)))
    assert found.skips
    assert [word.text for word in found.members] == ["a", "b"]
    assert found.shares == (0.75, 0.25)
    assert not verdict((Word("a", 3.0), Word("b", 1.0))).skips


def test_rule_b6_what_does_not_count_has_no_overflow_either() -> None:
    assert not verdict((Word("a"), Word("b", 0.0, overflow=True))).skips
