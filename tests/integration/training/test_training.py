"""Training through real processes: promises 1, 2, 4 and 6, as far as this release makes them.

The oracle of the asynchronous tests: each sample owns a coordinate and adds 1 to it, so a lost or doubled push shows as
a whole number. The oracle of the synchronous ones: the digest of all values of an undisturbed run in one process.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardyard_launcher.yard.local_cluster import LocalCluster
from tests.support.yards import Probes, Script, finish, running_yard

SYNC = {"job__consistency__mode": "sync", "job__consistency__logical_ranks": 3}


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with running_yard(tmp_path_factory.mktemp("yard")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of a synchronous run in one process with one server."""
    with Probes(tmp_path_factory.mktemp("undisturbed")) as running:
        result = running.run("model", yard__servers=1, **SYNC)
    assert result["computed"] == 2 * 203 // 8 + 2  # 26 batches an epoch, one by one
    return str(result["digest"])


def test_promise_6_bits_are_equal_for_any_number_of_servers_in_process(probes: Probes, undisturbed: str) -> None:
    assert probes.run("model", yard__servers=3, **SYNC)["digest"] == undisturbed


def test_promise_6_bits_are_equal_over_grpc_with_one_worker(
    yard: LocalCluster, probes: Probes, undisturbed: str
) -> None:
    result = probes.run("model", coordinator=yard.coordinator, job="one", **SYNC)
    assert result["digest"] == undisturbed


@pytest.mark.long
def test_promise_6_bits_are_equal_with_three_workers(yard: LocalCluster, probes: Probes, undisturbed: str) -> None:
    common = {"coordinator": yard.coordinator, "job": "three", "job__workers_expected": 3, **SYNC}
    started = [probes.start("model", **common) for _ in range(3)]
    results = [finish(script, out) for script, out in started]
    assert {result["digest"] for result in results} == {undisturbed}
    assert {result["step"] for result in results} == {18}
    assert sum(result["computed"] for result in results) == 52


def test_rule_b4_a_killed_worker_changes_no_bit(yard: LocalCluster, probes: Probes, undisturbed: str) -> None:
    common = {"coordinator": yard.coordinator, "job": "killed", "job__workers_expected": 3, **SYNC}
    started = [probes.start("model", "--pause-ms", "30", **common) for _ in range(3)]
    victim, _ = started.pop(1)
    victim.wait_for("computed 3")
    victim.kill()
    results = [finish(script, out) for script, out in started]
    assert {result["digest"] for result in results} == {undisturbed}


def test_rule_b4_a_late_worker_changes_no_bit(
    yard: LocalCluster, probes: Probes, undisturbed: str, tmp_path: Path
) -> None:
    common = {"coordinator": yard.coordinator, "job": "late", **SYNC}
    go_on = tmp_path / "go_on"
    first = probes.start("model", "--pause-ms", "20", "--hold-at", "4", "--hold", str(go_on), **common)
    first[0].wait_for("computed 4")
    second = probes.start("model", "--pause-ms", "20", **common)
    second[0].wait_for("computes logical rank")
    go_on.touch()
    results = [finish(*first), finish(*second)]
    assert {result["digest"] for result in results} == {undisturbed}
    assert results[1]["computed"] > 0


@pytest.mark.long
def test_rule_b1_workers_beyond_the_ranks_stand_by_and_step_in(
    yard: LocalCluster, probes: Probes, undisturbed: str
) -> None:
    # the grace time is long, so that only the fourth worker can step in
    common = {"coordinator": yard.coordinator, "job": "standby", "job__workers_expected": 4, **SYNC}
    common["job__rank_grace_ms"] = 60_000
    started = [probes.start("model", "--pause-ms", "400", **common) for _ in range(4)]
    for script, _ in started:
        script.wait_for(" job 'standby'")
    until = time.monotonic() + 30
    at_work: list[tuple[Script, Path]] = []
    while len(at_work) < 3:
        assert time.monotonic() < until
        at_work = [each for each in started if any("computes logical rank" in line for line in each[0].lines)]
        time.sleep(0.01)
    victim = at_work[-1]
    victim[0].wait_for("computed 1")
    victim[0].kill()
    started.remove(victim)
    results = [finish(script, out) for script, out in started]
    assert {result["digest"] for result in results} == {undisturbed}
    assert all(result["computed"] > 0 for result in results)


@pytest.mark.long
def test_promise_2_each_sample_counts_once_with_three_workers(yard: LocalCluster, probes: Probes) -> None:
    common = {"coordinator": yard.coordinator, "job": "counted", "job__workers_expected": 3}
    started = [probes.start("count", "--epochs", "3", "--pause-ms", "2", **common) for _ in range(3)]
    results = [finish(script, out) for script, out in started]
    for result in results:
        assert result["counts"] == [3.0] * 203
    assert sum(result["computed"] > 0 for result in results) >= 2


def test_promise_2_each_sample_counts_once_when_workers_are_killed(yard: LocalCluster, probes: Probes) -> None:
    common = {"coordinator": yard.coordinator, "job": "bereft", "job__workers_expected": 4}
    started = [probes.start("count", "--epochs", "4", "--pause-ms", "10", **common) for _ in range(4)]
    for at in (5, 9):
        victim, _ = started.pop(0)
        victim.wait_for(f"computed {at}")
        victim.kill()
    results = [finish(script, out) for script, out in started]
    for result in results:
        assert result["counts"] == [4.0] * 203


@pytest.mark.long("sync")
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_promise_2_a_loader_with_job_sampler_counts_each_sample_once_when_a_worker_is_killed_at_the_end(
    yard: LocalCluster, probes: Probes, mode: str
) -> None:
    settings = SYNC | {"job__consistency__logical_ranks": 2} if mode == "sync" else {}
    common = {"coordinator": yard.coordinator, "job": f"loader-{mode}", "job__workers_expected": 2, **settings}
    options = ["--samples", "96", "--epochs", "2", "--ranks", "2", "--sampler", "2", "--pause-ms", "20"]
    started = [probes.start("count", *options, **common) for _ in range(2)]
    victim, _ = started.pop(0)
    victim.wait_for("computed 22")  # of 24, where both are as fast
    victim.kill()
    (result,) = (finish(script, out) for script, out in started)
    assert result["counts"] == [2.0] * 96


def test_a_script_with_its_own_loader_and_loader_processes_trains(yard: LocalCluster, probes: Probes) -> None:
    result = probes.run("loader", coordinator=yard.coordinator, job="loader")
    assert result["computed"] == 52
    assert result["step"] == 52


@pytest.mark.long
def test_a_finished_job_leaves_its_name_to_the_next(yard: LocalCluster, probes: Probes) -> None:
    for _ in range(2):
        result = probes.run("count", "--epochs", "1", coordinator=yard.coordinator, job="again")
        assert result["counts"] == [1.0] * 203
