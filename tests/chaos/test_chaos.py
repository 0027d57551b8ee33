"""Jobs under fire: schedules of faults, drawn from seeds, against yards of real processes.

`make chaos` plays many, `make chaos SEED=n` repeats one; the tests play the first few, and those that were red once.
Each seed also has a schedule of a mirrored job, and one of a job with another strategy.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from shardyard.domain.pipelines import PipelineSchedule
from shardyard.domain.replica_groups import Strategy
from tests.chaos import oracle
from tests.chaos.battle import play
from tests.chaos.schedules import (
    DECK,
    FAULTS,
    STRATEGIES,
    Crash,
    Cut,
    Fault,
    Full,
    Hold,
    Kill,
    Leave,
    Schedule,
    Sever,
    Slow,
    Stop,
    dealt,
    draw,
    strategy_of,
)

HERE = Path(__file__).parent
FEW = 1
"""`make test` plays the first schedule of servers, and those that were red once."""
EIGHT = 8
"""`make test-long` plays the others of the first eight, which together have every kind of fault."""
FIRST_SEEDS = int(os.environ.get("CHAOS_SEEDS", FEW))
ONE_SEED = os.environ.get("CHAOS_SEED", "")
SCHEDULE_S_MAX = 300
SEEDS = 40
"""Of `make chaos`."""


def red_seeds(file: str = "red_seeds.txt") -> list[int]:
    lines = (HERE / file).read_text(encoding="utf-8").splitlines()
    return [int(line.split()[0]) for line in lines if line.strip() and not line.startswith("#")]


def seeds_of_replicas() -> list[Any]:
    if ONE_SEED:
        return [int(ONE_SEED)]
    found = {0, 1, *range(FIRST_SEEDS), *red_seeds("red_seeds_of_replicas.txt")}
    several = "CHAOS_SEEDS" in os.environ
    # `make test-long` plays the first two, and those that were red
    return [pytest.param(seed, marks=[] if several else [pytest.mark.long]) for seed in sorted(found)]


def seeds_of_strategies() -> list[Any]:
    if ONE_SEED:
        return [int(ONE_SEED)]
    several = "CHAOS_SEEDS" in os.environ
    first = FIRST_SEEDS if several else len(STRATEGIES)
    found = {*range(first), *red_seeds("red_seeds_of_strategies.txt")}
    # `make test-long` plays a schedule of each strategy, and those that were red
    return [pytest.param(seed, marks=[] if several else [pytest.mark.long]) for seed in sorted(found)]


def seeds() -> list[Any]:
    if ONE_SEED:
        return [int(ONE_SEED)]
    more = [pytest.param(seed, marks=pytest.mark.long) for seed in range(FIRST_SEEDS, EIGHT)]
    return [*sorted({*range(FIRST_SEEDS), *red_seeds()}), *more]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> oracle.Undisturbed:
    return oracle.Undisturbed(tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.usefixtures("preloaded")
@pytest.mark.timeout(SCHEDULE_S_MAX)
@pytest.mark.parametrize("seed", seeds())
def test_books_balance_under_fire(
    seed: int, tmp_path: Path, undisturbed: oracle.Undisturbed, capsys: pytest.CaptureFixture[str]
) -> None:
    expect_balance(draw(seed), tmp_path, undisturbed, capsys)


@pytest.mark.usefixtures("preloaded")
@pytest.mark.timeout(SCHEDULE_S_MAX)
@pytest.mark.parametrize("seed", seeds_of_replicas())
def test_books_of_replicas_balance_under_fire(
    seed: int, tmp_path: Path, undisturbed: oracle.Undisturbed, capsys: pytest.CaptureFixture[str]
) -> None:
    expect_balance(draw(seed, Strategy.MULTI_WORKER_MIRRORED), tmp_path, undisturbed, capsys)


@pytest.mark.usefixtures("preloaded")
@pytest.mark.timeout(SCHEDULE_S_MAX)
@pytest.mark.parametrize("seed", seeds_of_strategies())
def test_books_of_strategies_balance_under_fire(
    seed: int, tmp_path: Path, undisturbed: oracle.Undisturbed, capsys: pytest.CaptureFixture[str]
) -> None:
    expect_balance(draw(seed, strategy_of(seed)), tmp_path, undisturbed, capsys)


def expect_balance(
    schedule: Schedule, tmp_path: Path, undisturbed: oracle.Undisturbed, capsys: pytest.CaptureFixture[str]
) -> None:
    def tell(line: str) -> None:
        with capsys.disabled():
            print(line, flush=True)

    tell(f"\n{schedule}")
    outcome = play(schedule, tmp_path, tell=lambda line: tell(f"    {line}"))
    for ending in outcome.endings:
        tell(f"    {ending}")
    oracle.check(schedule.plan, outcome, undisturbed)


# ---- schedules


def test_a_schedule_is_a_function_of_its_seed() -> None:
    assert [draw(seed) for seed in range(100)] == [draw(seed) for seed in range(100)]
    assert len({draw(seed) for seed in range(100)}) == 100


def test_the_first_seeds_have_every_kind_of_fault_in_both_modes_of_training() -> None:
    assert {kind for seed in range(EIGHT) for kind in dealt(seed)} == {name for name, _ in DECK}
    plans = [draw(seed).plan for seed in range(EIGHT)]
    assert {(plan.sync, plan.wal) for plan in plans} == {(sync, wal) for sync in (True, False) for wal in (True, False)}
    modes = {(plan.sync, plan.hybrid, plan.wal) for plan in plans if plan.tables}
    assert modes >= {(False, False, True), (False, False, False), (True, False, False), (True, True, False)}
    assert {plan.sync for plan in plans if not plan.tables} == {True, False}
    assert any(plan.looks_ahead for plan in plans)
    inflicted = [timed.fault for seed in range(EIGHT) for timed in draw(seed).faults]
    assert {type(fault) for fault in inflicted} == {Kill, Stop, Crash, Cut, Hold, Slow, Full}
    for kind in (Kill, Stop):
        assert {role(name) for name in struck(inflicted, kind)} == {"coordinator", "server", "worker", "agent"}


def test_many_seeds_have_every_kind_of_fault_in_each_mode_and_crashes_at_every_place() -> None:
    drawn = [draw(seed) for seed in range(400)]
    for sync in (True, False):
        kinds = {kind for each in drawn if each.plan.sync is sync for kind in dealt(each.seed)}
        assert kinds == {name for name, _ in DECK}
    places = {timed.fault.failpoint for each in drawn for timed in each.faults if isinstance(timed.fault, Crash)}
    found = {name for text in sources() for name in places if f'failpoint("{name}")' in text}
    assert places == found, "places that are in no source"
    assert {name.partition(".")[0] for name in places} == {"push", "wal", "storage", "journal", "checkpoint"}


def test_each_strategy_meets_every_kind_of_fault() -> None:
    drawn = [draw(seed, strategy_of(seed)) for seed in range(SEEDS)]
    for strategy in STRATEGIES:
        plans = [each.plan for each in drawn if each.plan.strategy is strategy]
        assert len(plans) == EIGHT
        waits = {plan.workers + 1 > max(plan.parts * plan.replicas, plan.logical_ranks) for plan in plans}
        assert {plan.replicas for plan in plans} == ({1, 2} if strategy.is_spread else {1})
        assert waits == {True, False} or not strategy.is_spread, "whether a worker waits in reserve"
        assert {plan.pushes for plan in plans} == {False, strategy.is_spread}
    turns = {(seed % len(STRATEGIES), dealt(seed // len(STRATEGIES))) for seed in range(SEEDS)}
    assert len(turns) == SEEDS
    assert {kind for turn in range(EIGHT) for kind in dealt(turn)} == {name for name, _ in DECK}
    for each in drawn:
        assert any(isinstance(timed.fault, Leave) for timed in each.faults)
        assert any(isinstance(timed.fault, Sever) for timed in each.faults) is each.plan.strategy.uses_groups
    pipelines = [each.plan for each in drawn if each.plan.strategy is Strategy.PIPELINE]
    assert {plan.schedule for plan in pipelines} == {*PipelineSchedule}
    assert {plan.parts for plan in pipelines} == {2, 3}
    assert {(plan.pushes, plan.wal) for plan in pipelines} == {(False, False), (True, False), (True, True)}
    assert {(plan.pushes, plan.sync) for plan in pipelines} == {(False, True), (True, False), (True, True)}
    assert {plan.replicas for plan in pipelines if plan.pushes} == {1, 2}
    drawn += [draw(seed, strategy_of(seed)) for seed in range(SEEDS, 3 * SEEDS)]
    spread = {(each.plan.strategy, each.plan.sync) for each in drawn if each.plan.pushes}
    assert spread == {(strategy, sync) for strategy in STRATEGIES if strategy.is_spread for sync in (True, False)}


def test_faults_begin_while_there_is_work_to_do() -> None:
    for seed in range(400):
        times = [timed.at for timed in draw(seed).faults]
        assert len(times) == FAULTS
        assert times == sorted(times)
        assert 0 < times[0] < times[-1] < 0.8


def struck(faults: list[Fault], kind: type[Fault]) -> list[str]:
    names: list[str] = []
    for fault in faults:
        if isinstance(fault, kind):
            names += fault.places if isinstance(fault, Kill) else [fault.place]  # type: ignore[union-attr]
    return names


def role(place: str) -> str:
    return place.partition("-")[0]


def sources() -> list[str]:
    root = HERE.parent.parent
    folders = ("shardyard", "ps_server", "coordinator")
    return [path.read_text(encoding="utf-8") for folder in folders for path in (root / folder).rglob("*.py")]
