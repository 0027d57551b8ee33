"""Each rule of docs/internals/ledger.md is needed: with one switched off, some seed of a simulated yard goes red."""

from __future__ import annotations

import pytest

from tests.simulator.mutations import MUTATIONS, Mutation, first_red
from tests.simulator.plan import make_plan

SEEDS_FOR_A_MUTATION = 400
OF_THE_TEST = ("TypeError", "AttributeError", "ValueError")
"""What a patch raises that does not fit what it takes the place of."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda each: f"{each.rule}-{each.apply.__name__}")
@pytest.mark.usefixtures("simulated")
def test_without_a_rule_some_seed_is_red(mutation: Mutation) -> None:
    seeds = (*mutation.first, *range(SEEDS_FOR_A_MUTATION))
    found = first_red((make_plan(seed, mutation.mode) for seed in seeds), mutation.apply)
    assert found, f"{SEEDS_FOR_A_MUTATION} seeds are green although {mutation.what} (rule {mutation.rule})"
    # what is switched off, and no more: else any seed is red
    assert not [each for each in found.violations if any(name in each for name in OF_THE_TEST)], found.violations
