"""A whole yard under faults whose synchronous job is switched to asynchronous updates: whatever dies on the way, it is
in one mode, and each sample counts once an epoch (rule B8). SHARDYARD_SEEDS says how many seeds are run."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from simulator.parallel import run_seeds
from simulator.yard import make_plan, run_plan, simulation, warm_up

from shardyard.ground.types import JobId
from shardyard_coordinator.going_over import GoingOver
from shardyard_ps_server.store import PartitionState, Restore
from shardyard_worker.brake import Brake

SEEDS = int(os.environ.get("SHARDYARD_SEEDS", "100"))
SEEDS_FOR_A_MUTATION = 60
KIND = "sync-switch-checkpoint"


@pytest.mark.long
@pytest.mark.timeout(1_200)
def test_yard_that_goes_over_counts_each_sample_once_under_every_seed() -> None:
    met: Counter[str] = Counter()
    for found in run_seeds(range(SEEDS), kind=KIND):
        assert not found["violations"], f"seed {found['seed']}: {found['violations']}"
        met.update(set(found["happened"]))
    assert met["went over"] >= SEEDS // 2
    assert met["kill server"] + met["kill coordinator"] + met["kill worker"] >= SEEDS // 2


def test_job_with_logs_stays_as_it_is() -> None:
    for found in run_seeds(range(2), kind="sync-switch-wal"):
        assert not found["violations"], f"seed {found['seed']}: {found['violations']}"
        assert "went over" not in found["happened"]


@pytest.fixture(scope="module")
def simulated() -> Iterator[None]:
    with simulation():
        warm_up()
        yield


def goes_on_behind_the_halt(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Brake.permits
    monkeypatch.setattr(Brake, "permits", lambda self, step: real(self, step) is not False)


def takes_any_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goes over from the newest, whatever its step."""
    real: Callable[..., Any] = GoingOver._go_over

    def go_over(going_over: GoingOver, now_ms: int) -> Any:
        job = going_over._job
        committed = job.keeping.book.committed
        if job.halting.step is not None and committed is not None and job.ranks is not None:
            job.keeping.book.committed = replace(committed, step=job.halting.step)
        return real(going_over, now_ms)

    monkeypatch.setattr(GoingOver, "_go_over", go_over)


def forgets_what_steps_have_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Data shards that are counted in part begin anew."""
    real = Restore.adapted

    def adapted(restore: Restore, state: PartitionState, job: JobId) -> PartitionState:
        return real(replace(restore, begun=()), state, job)

    monkeypatch.setattr(Restore, "adapted", adapted)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "mutation",
    [
        goes_on_behind_the_halt,
        takes_any_checkpoint,
        forgets_what_steps_have_counted,
    ],
    ids=lambda each: each.__name__,
)
@pytest.mark.usefixtures("simulated")
def test_without_a_part_of_rule_b8_some_seed_is_red(mutation: object, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation(monkeypatch)  # type: ignore[operator]
    for seed in range(SEEDS_FOR_A_MUTATION):
        if run_plan(make_plan(seed, KIND)).red:
            return
    pytest.fail(f"{SEEDS_FOR_A_MUTATION} seeds are green")
