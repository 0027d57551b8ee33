"""Launches under fire: `shardyard run` and `shardyard up` with a script survive what a yard survives.

`make chaos` plays 50 (LAUNCHES=n for another number) and repeats one (LAUNCH=seed). `make test-long` plays the first,
and those that were red once.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from shardyard.checkpoints.library import CheckpointLibrary
from shardyard.storage.storage import open_storage
from tests.chaos import oracle
from tests.chaos.launches import AGENT, COORDINATOR, PLAY_S, SERVER, SUPERVISOR, TRAINING, draw_launch, play_launch

HERE = Path(__file__).parent
FIRST_SEEDS = int(os.environ.get("CHAOS_LAUNCHES", 0))
ONE_SEED = os.environ.get("CHAOS_LAUNCH", "")


def red_launches() -> list[int]:
    lines = (HERE / "red_launches.txt").read_text(encoding="utf-8").splitlines()
    return [int(line.split()[0]) for line in lines if line.strip() and not line.startswith("#")]


def seeds() -> list[Any]:
    if ONE_SEED:
        return [int(ONE_SEED)]
    more = [pytest.param(seed, marks=pytest.mark.long) for seed in sorted({0, *red_launches()}) if seed >= FIRST_SEEDS]
    return [*range(FIRST_SEEDS), *more]


@pytest.mark.timeout(PLAY_S + 90)
@pytest.mark.parametrize("seed", seeds())
def test_launch_ends_well_under_fire(seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schedule = draw_launch(seed)

    def tell(line: str) -> None:
        with capsys.disabled():
            print(line, flush=True)

    tell(f"\n{schedule}")
    outcome = play_launch(schedule, tmp_path / "launch", tell=lambda line: tell(f"    {line}"))
    assert set(outcome.codes) == {0}, outcome.output
    assert outcome.left == []
    plan = schedule.plan
    library = CheckpointLibrary(open_storage(outcome.checkpoints))
    assert not library.verify(oracle.JOB)
    manifest = library.load(oracle.JOB)
    oracle.check_counts(plan, library, manifest)
    oracle.check_ledgers(plan, library, manifest)
    if plan.sync:
        assert manifest.step == oracle.BATCHES // plan.logical_ranks, manifest.step
    for result in outcome.results:
        oracle.check_counts_of_worker(result)
    missing = [sample for sample in range(oracle.SAMPLES) if outcome.computed[sample] < oracle.EPOCHS]
    assert missing == [], "samples that were computed less than once an epoch"


def test_schedules_are_functions_of_their_seeds_and_strike_everybody_at_any_time() -> None:
    drawn = [draw_launch(seed) for seed in range(50)]
    assert drawn == [draw_launch(seed) for seed in range(50)]
    strikes = [strike for each in drawn for strike in each.strikes]
    assert {strike.role for strike in strikes} == {COORDINATOR, SERVER, AGENT, TRAINING, SUPERVISOR}
    assert {(each.command, each.plan.sync) for each in drawn} == {
        (command, sync) for command in ("run", "up") for sync in (True, False)
    }
    assert {(strike.stopped_s > 0, strike.after_s is None) for strike in strikes} == {
        (stopped, late) for stopped in (True, False) for late in (True, False)
    }
    assert any(strike.again for strike in strikes)
