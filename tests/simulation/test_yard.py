"""A whole yard under faults, with nothing but the shipped machines."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.simulator import yard
from tests.simulator.parallel import KINDS_OF_TEN, PID_MAX, Run, folder_name, mixed, run_seeds
from tests.simulator.plan import make_plan
from tests.simulator.yard import run_plan

FIRST_SEEDS = range(50)
MORE_SEEDS = range(50, 1_000)
SEEDS_OF_A_KIND = range(50)
FIRST_SEEDS_OF_A_KIND = range(10)
RED_SEEDS = Path(__file__).with_name("red_yards.txt")
SAMPLE = range(8)


def told(found: dict[str, object]) -> str:
    return f"yard seed {found['seed']} {found['kind']} ({found['mode']}): {found['violations']}"


def red_seeds() -> list[tuple[int, str]]:
    lines = (line.split("#")[0].split() for line in RED_SEEDS.read_text().splitlines())
    return [(int(words[0]), words[1] if len(words) > 1 else "") for words in lines if words]


@pytest.mark.long("first")
@pytest.mark.timeout(1_200)
@pytest.mark.parametrize("seeds", [FIRST_SEEDS, MORE_SEEDS], ids=["first", "more"])
def test_yard_keeps_its_promises_under_every_seed(seeds: range, run: Run) -> None:
    """Exactly once, the same bits, fenced, whole checkpoints, and an end: promises 1, 2, 3, 4, 6 and 7."""
    met: Counter[str] = Counter()
    for found in run(seeds):
        assert not found["violations"], f"{told(found)}\nadd it to {RED_SEEDS.name}"
        met.update([found["mode"], *found["happened"]])
    assert sum(met.values()) >= len(seeds)
    assert min(met.values()) >= 5, met


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["async-switch", "bounded-switch", "bounded-lag-switch"])
def test_job_that_is_switched_keeps_its_promises_under_every_seed(kind: str, run: Run) -> None:
    met: Counter[str] = Counter()
    for found in run(SEEDS_OF_A_KIND, kind=kind):
        assert not found["violations"], f"{told(found)}\nadd it to {RED_SEEDS.name}"
        met.update(found["happened"])
    assert met["switch"] >= len(SEEDS_OF_A_KIND)
    assert met["gone over"] >= len(SEEDS_OF_A_KIND)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["async-full", "sync-full", "hybrid-full"])
def test_yard_whose_journal_cannot_be_written_for_a_while_keeps_its_promises(kind: str, run: Run) -> None:
    met: Counter[str] = Counter()
    for found in run(SEEDS_OF_A_KIND, kind=kind):
        assert not found["violations"], f"{told(found)}\nadd it to {RED_SEEDS.name}"
        met.update(found["happened"])
    assert met["full journal"] >= len(SEEDS_OF_A_KIND)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["async-sampler", "sync-sampler"])
def test_promise_2_loader_that_reads_ahead_counts_each_sample_once_under_every_seed(kind: str, run: Run) -> None:
    for found in run(SEEDS_OF_A_KIND, kind=kind):
        assert not found["violations"], f"{told(found)}\nadd it to {RED_SEEDS.name}"


@pytest.mark.long("async-stolen-first", "sync-stolen-first")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seeds", [FIRST_SEEDS_OF_A_KIND, SEEDS_OF_A_KIND], ids=["first", "all"])
@pytest.mark.parametrize("kind", ["async-stolen", "bounded-stolen", "sync-stolen", "hybrid-stolen"])
def test_promise_s2_stolen_certificate_of_a_worker_spoils_no_result(kind: str, seeds: range, run: Run) -> None:
    met: Counter[str] = Counter()
    for found in run(seeds, kind=kind):
        assert not found["violations"], f"{told(found)}\nadd it to {RED_SEEDS.name}"
        met.update(found["happened"])
    assert met["revoked"] >= len(seeds) / 4, met


@pytest.mark.long("sync-leave-first")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seeds", [FIRST_SEEDS_OF_A_KIND, SEEDS_OF_A_KIND], ids=["first", "all"])
@pytest.mark.parametrize("kind", ["async-leave", "sync-leave", "hybrid-leave"])
def test_yard_whose_servers_leave_in_order_keeps_its_promises(kind: str, seeds: range, run: Run) -> None:
    met: Counter[str] = Counter()
    for found in run(seeds, kind=kind):
        assert not found["violations"], f"{told(found)}\nadd it to {RED_SEEDS.name}"
        met.update(found["happened"])
    assert met["leave server"] >= len(seeds)


@pytest.mark.long("async-drain-first")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seeds", [FIRST_SEEDS_OF_A_KIND, SEEDS_OF_A_KIND], ids=["first", "all"])
@pytest.mark.parametrize(
    "kind",
    [
        "async-drain",
        "bounded-drain",
        "sync-drain",
        "hybrid-drain",
        "local-drain",
        "async-drain-sampler",
        "sync-drain-sampler",
    ],
)
def test_yard_whose_workers_leave_in_order_keeps_its_promises(kind: str, seeds: range, run: Run) -> None:
    met: Counter[str] = Counter()
    for found in run(seeds, kind=kind):
        assert not found["violations"], f"{told(found)}\nadd it to {RED_SEEDS.name}"
        met.update(found["happened"])
    assert met["leave worker"] + met["drain worker"] >= len(seeds)
    assert met["left in order"] >= len(seeds) / 4, met


@pytest.mark.long("hybrid-first")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seeds", [FIRST_SEEDS_OF_A_KIND, SEEDS_OF_A_KIND], ids=["first", "all"])
@pytest.mark.parametrize(
    "kind",
    ["async-rows", "async-rows-lives", "bounded-rows-lives", "sync-rows", "sync-rows-cold", "hybrid", "hybrid-cold"],
)
def test_job_with_a_table_keeps_its_promises_under_every_seed(kind: str, seeds: range, run: Run) -> None:
    met: Counter[str] = Counter()
    for found in run(seeds, kind=kind):
        assert not found["violations"], f"{told(found)}\nadd it to {RED_SEEDS.name}"
        met.update([found["mode"]])
    assert min(met.values()) >= 2, met


def test_a_soak_has_each_seed_once_and_jobs_with_a_table_of_each_mode() -> None:
    found = mixed(range(40))
    assert sorted(seed for mine in found.values() for seed in mine) == list(range(40))
    assert {kind: len(mine) for kind, mine in found.items()} == {"": 24} | dict.fromkeys(KINDS_OF_TEN.values(), 4)
    plans = [make_plan(mine[0], kind) for kind, mine in found.items() if kind]
    assert {(plan.mode, plan.hybrid) for plan in plans if plan.rows} == {
        ("async", False),
        ("sync", False),
        ("sync", True),
    }


@pytest.mark.usefixtures("simulated")
def test_yards_that_were_red_once_stay_green() -> None:
    for seed, kind in red_seeds():
        found = run_plan(make_plan(seed, kind))
        assert not found.red, (seed, kind, found.violations)


@pytest.mark.timeout(600)
def test_seed_has_one_trace_whatever_the_hashes_and_whatever_ran_before() -> None:
    one = {each["seed"]: each for each in run_seeds(SAMPLE, jobs=1, environment={"PYTHONHASHSEED": "1"})}
    backwards = SAMPLE[::-1]
    other = {each["seed"]: each for each in run_seeds(backwards, jobs=1, environment={"PYTHONHASHSEED": "2"})}
    for seed in SAMPLE:
        for what in ("digest", "switches", "calls", "virtual_s"):
            assert one[seed][what] == other[seed][what], (seed, what)
    assert len({each["digest"] for each in one.values()}) == len(SAMPLE)


@pytest.mark.usefixtures("simulated")
def test_seed_with_certificates_and_a_thief_has_one_trace() -> None:
    assert len({run_plan(make_plan(SAMPLE[0], "async-stolen")).digest for _ in range(2)}) == 1


@pytest.mark.usefixtures("simulated")
def test_trace_does_not_depend_on_the_number_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    found = set()
    for pid in (7, PID_MAX):
        monkeypatch.setattr(yard, "PREFIX", folder_name(pid))
        found.add(run_plan(make_plan(SAMPLE[0])).digest)
    assert len(found) == 1
