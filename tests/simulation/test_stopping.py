"""A whole yard under faults whose workers tell their job to stop: it ends, a synchronous one at one step for all, with
the bits of an undisturbed run there (rule B9)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from shardyard_coordinator.modes.stopping import Stopping
from shardyard_worker.session.step_barrier import StepBarrier
from tests.simulator.mutations import first_red
from tests.simulator.parallel import Run
from tests.simulator.plan import make_plan

SEEDS = 100
SEEDS_FOR_A_MUTATION = 200
RED_FIRST = 11
"""A seed that was red with either part switched off; it is tried first, which saves time and nothing else."""


@pytest.mark.long
@pytest.mark.timeout(1_200)
@pytest.mark.parametrize("kind", ["sync-stop", "async-stop"])
def test_promise_6_yard_that_is_told_to_stop_ends_where_it_was_settled_under_every_seed(kind: str, run: Run) -> None:
    stopped: Counter[bool] = Counter()
    for found in run(range(SEEDS), kind=kind):
        assert not found["violations"], f"seed {found['seed']}: {found['violations']}"
        stopped["stop" in found["happened"]] += 1
    if SEEDS >= 100:
        assert min(stopped[True], stopped[False]) >= 5, stopped


def goes_on_before_it_is_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    real = StepBarrier.permits
    monkeypatch.setattr(StepBarrier, "permits", lambda self, step: real(self, step) is not False)


def settles_with_the_first_that_has_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stopping, "is_due", lambda self, workers: self._is_open and bool(self._reached._steps))


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "mutation",
    [
        goes_on_before_it_is_settled,
        settles_with_the_first_that_has_heard,
    ],
    ids=lambda each: each.__name__,
)
@pytest.mark.usefixtures("simulated")
def test_without_a_part_of_rule_b9_some_seed_is_red(mutation: Callable[[pytest.MonkeyPatch], None]) -> None:
    seeds = (RED_FIRST, *range(SEEDS_FOR_A_MUTATION))
    assert first_red((make_plan(seed, "sync-stop") for seed in seeds), mutation)
