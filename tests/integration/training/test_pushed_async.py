"""Asynchronous replicas whose variables are on the servers: each is one worker to the ledgers."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardyard.runtime.restart_policy import LEFT_IN_ORDER
from shardyard_launcher.yard.local_cluster import LocalCluster
from tests.support import spread_jobs
from tests.support.spread_jobs import STRATEGIES, Started, alone, counts_mode, start
from tests.support.yards import Probes, RoleYard, Script, computed, finish, running_yard, wait_for_any

LEASE_MS = 1_500


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    given = {"membership.lease_ms": LEASE_MS, "membership.heartbeat_ms": 100}
    with running_yard(tmp_path_factory.mktemp("yard"), servers=2, settings=given) as cluster:
        yield cluster


def settings(
    yard: LocalCluster | RoleYard, job: str, workers: int = 2, *, strategy: str = "pipeline", **more: object
) -> dict[str, object]:
    common = {
        "job__between": "parameter_server",
        "job__consistency__mode": "async",
        "job__checkpoint__url": "never",
        "job__data__batches_per_data_shard": 5,
    }
    return spread_jobs.settings(yard, job, strategy, workers) | common | more


def counted(samples: int, epochs: int, *more: str, strategy: str = "pipeline") -> tuple[str, ...]:
    return (counts_mode(strategy), "--samples", str(samples), "--epochs", str(epochs), *more)


def place_of(script: Script, workers: int = 2) -> int | None:
    """The place that the worker has, or had last."""
    places = (int(line.split(" of ")[0].split()[-1]) for line in script.lines if f" of {workers} in group" in line)
    return max(places, default=None)


def take(started: Started, place: int, workers: int = 2) -> tuple[Script, Path]:
    """The worker that has this place, which is no longer one of the others."""
    found = next(each for each in started if place_of(each[0], workers) == place)
    started.remove(found)
    return found


@pytest.mark.long("1-pipeline", "1-sharded", "2-tensor")
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("replicas", [1, 2])
def test_each_sample_counts_once_in_each_part(yard: LocalCluster, probes: Probes, replicas: int, strategy: str) -> None:
    common = settings(yard, f"counts-{replicas}-{strategy}", 2 * replicas, strategy=strategy)
    given = counted(96, 3, "--accumulate", str(replicas), strategy=strategy)
    results = [finish(script, out) for script, out in start(probes, 2 * replicas, *given, **common)]
    for result in results:
        assert result["counts"] == [[3.0] * 96] * 2
    assert sum(result["computed"] for result in results) == 2 * 3 * 24, "one replica computes a batch"


def test_a_stop_between_two_batches_of_a_work_drops_it_in_all_stages(yard: LocalCluster, probes: Probes) -> None:
    given = counted(96, 2, "--accumulate", "2", "--stop-at", "5")
    for script, out in start(probes, 2, *given, **settings(yard, "stopped")):
        first, second = finish(script, out)["counts"]
        assert first == second
        assert sum(first) % 8 == 0, "two batches of four samples a work"


@pytest.mark.long("3")
@pytest.mark.parametrize("place", [0, 3])
def test_promise_2_each_sample_counts_once_when_one_of_two_pipelines_is_lost(
    yard: LocalCluster, probes: Probes, place: int
) -> None:
    """The other one trains alone. If a newcomer comes, it makes a second pipeline with the worker that is left. If none
    comes, that worker has given back what it had leased."""
    common, given = settings(yard, f"of-two-{place}", 4), counted(96, 4, "--pause-ms", "20")
    started = start(probes, 4, *given, **common)
    wait_for_any([script for script, _ in started], "computed 7")
    victim, _ = take(started, place, 4)
    victim.process.send_signal(signal.SIGKILL)
    wait_for_any([script for script, _ in started], "has place 1 of 2")
    if place == 0:
        started += start(probes, 1, *given, **common)
        started[-1][0].wait_for(" of 4 in group")
    for script, out in started:
        assert finish(script, out)["counts"] == [[4.0] * 96] * 2


@pytest.mark.long("tensor")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_are_compressed(yard: LocalCluster, probes: Probes, strategy: str) -> None:
    given = ("stages", "--samples", "160", "--epochs", "2")
    wanted = probes.run(*given, **alone(yard, f"whole-{strategy}", mode="async"))["losses"]
    coarse = {"job__compression__push": "bf16", "job__compression__whole_elements_max": 0}
    common = settings(yard, f"compressed-{strategy}", strategy=strategy, **coarse)
    for script, out in start(probes, 2, *given, **common):
        losses = finish(script, out)["losses"]
        assert losses == pytest.approx(wanted, rel=0.05)
        assert losses[5:] != pytest.approx(wanted[5:], rel=1e-5)


@pytest.mark.long("pipeline-clipped", "sharded-clipped", "tensor-clipped")
@pytest.mark.parametrize("clip", [0.0, 0.05], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_losses_of_one_replica_are_those_of_one_worker(
    yard: LocalCluster, probes: Probes, strategy: str, clip: float
) -> None:
    """The norm that clips is that over all parts."""
    given, more = ("stages", "--samples", "160", "--epochs", "2"), {"job__clip__norm": clip}
    wanted = probes.run(*given, **alone(yard, f"alone-{strategy}-{clip}", mode="async") | more)
    together = settings(yard, f"together-{strategy}-{clip}", strategy=strategy, **more)
    for script, out in start(probes, 2, *given, **together):
        result = finish(script, out)
        assert result["losses"] == pytest.approx(wanted["losses"], rel=1e-5)
        assert result["evaluated"] == pytest.approx(wanted["evaluated"], rel=1e-5)
        assert sum(result["losses"][-5:]) < sum(result["losses"][:5])


@pytest.mark.long("pipeline", "tensor")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_norm_that_clips_is_that_of_variables_and_rows(yard: LocalCluster, probes: Probes, strategy: str) -> None:
    given, clip = counted(96, 2, "--with-rows", strategy=strategy), {"job__clip__norm": 0.3}
    wanted = probes.run(*given, **alone(yard, f"clipped-rows-{strategy}-alone", mode="async") | clip)["counts"]
    common = settings(yard, f"clipped-rows-{strategy}", strategy=strategy, **clip)
    if strategy == "pipeline":
        common["job__pipeline__cut"] = "counts.second"
    for script, out in start(probes, 2, *given, **common):
        for counts, of_one in zip(finish(script, out)["counts"], wanted, strict=True):
            assert counts == pytest.approx(of_one, rel=1e-5)
            assert 0.0 < max(counts) < 1.0, "without clipping it is 2"


def test_a_fast_pipeline_does_not_wait_for_a_slow_one(yard: LocalCluster, probes: Probes, tmp_path: Path) -> None:
    """It computes fifty batches while the other one stands after its second."""
    common, go_on = settings(yard, "speeds", 4), tmp_path / "go on"
    fast = start(probes, 2, *counted(400, 1), **common)
    for script, _ in fast:
        script.wait_for("the model is cut")  # the workers of a pipeline are those that came first
    slow = start(probes, 2, *counted(400, 1, "--hold-at", "2", "--hold", str(go_on)), **common)
    for script, text in ((slow[0][0], "computed 2"), (slow[1][0], "computed 2"), (fast[0][0], "computed 50")):
        script.wait_for(text)
    assert [computed(script) for script, _ in slow] == [2, 2]
    go_on.touch()
    results = [finish(script, out) for script, out in (*fast, *slow)]
    assert all(result["counts"] == [[1.0] * 400] * 2 for result in results)
    steps = [result["computed"] for result in results]
    assert steps[:2] == [100 - steps[2]] * 2


@pytest.mark.long("pipeline-variables-1-frozen", "pipeline-rows-0-killed", "sharded-rows-1-frozen")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("with_rows", [False, True], ids=["variables", "rows"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_promise_2_each_sample_counts_once_when_a_part_is_lost(
    yard: LocalCluster, probes: Probes, strategy: str, with_rows: bool, place: int, how: signal.Signals
) -> None:
    """It is lost before it pushes a batch, which the other one may have pushed. A worker in reserve takes its place.
    There is no checkpoint to go back to. One that was frozen pushes the batch when it wakes up. The second stage looks
    up rows."""
    rows = ("--with-rows",) if with_rows else ()
    given = counted(48, 4, "--pause-ms", "20", "--lose", str(place), "8", str(int(how)), *rows, strategy=strategy)
    more = {"job__pipeline__cut": "counts.second"} if with_rows and strategy == "pipeline" else {}
    job = f"lost-{how.name}-{place}-{strategy}-{with_rows}".lower()
    started = start(probes, 3, *given, **settings(yard, job, strategy=strategy, **more))
    wait_for_any([script for script, _ in started], "is lost")
    victim, _ = take(started, place)
    for script, _ in started:
        script.wait_for("in group 2")
    victim.process.send_signal(signal.SIGCONT)
    for script, out in started:
        assert finish(script, out)["counts"] == [[4.0] * 48] * (2 + with_rows)
    assert victim.wait() != 0


@pytest.mark.long("sharded")
@pytest.mark.parametrize("strategy", ["sharded", "tensor"])
def test_promise_2_gradients_of_rows_of_a_lost_work_are_dropped(
    yard: LocalCluster, probes: Probes, tmp_path: Path, strategy: str
) -> None:
    """A worker is lost between two batches of a work. The other one has gradients of rows of the first batch."""
    common = settings(yard, f"half-{strategy}", strategy=strategy, job__data__batches_per_data_shard=4)
    given = ("--accumulate", "2", "--with-rows", "--hold-at", "7", "--hold", str(tmp_path / "go"))
    started = start(probes, 3, *counted(96, 2, *given, strategy=strategy), **common)
    for at in range(2):
        wait_for_any([script for script, _ in started], f"has place {at} of 2")
    victim, _ = take(started, 1)  # batches of a data shard whose leader has died are pushed one by one
    for script in (victim, next(script for script, _ in started if place_of(script) == 0)):
        script.wait_for("computed 7")
    victim.process.send_signal(signal.SIGKILL)
    time.sleep(LEASE_MS / 1000 + 0.5)  # then the other one learns of it before it computes the second batch
    (tmp_path / "go").touch()
    for script, out in started:
        assert finish(script, out)["counts"] == [[2.0] * 96] * 3


@pytest.mark.long("1")
@pytest.mark.parametrize("place", [0, 1])
def test_a_worker_that_leaves_in_order_changes_no_step(
    yard: LocalCluster, probes: Probes, tmp_path: Path, place: int
) -> None:
    """A worker in reserve takes its place, with the values of the servers. Nothing is computed twice."""
    go_on, given = tmp_path / "go on", ("stages", "--samples", "160", "--epochs", "2")
    wanted = probes.run(*given, **alone(yard, f"stays-{place}", mode="async"))
    common = settings(yard, f"leaves-{place}")
    started = start(probes, 3, *given, "--hold-at", "13", "--hold", str(go_on), **common)
    everyone = [script for script, _ in started]
    for at in range(2):
        wait_for_any(everyone, f"has place {at} of 2")
    leaver, (other, _) = take(started, place)[0], next(each for each in started if place_of(each[0]) == 1 - place)
    leaver.wait_for("computed 13")
    leaver.process.send_signal(signal.SIGTERM)
    go_on.touch()
    assert leaver.wait() == LEFT_IN_ORDER, leaver.output
    assert computed(leaver) < 40
    for script, out in started:
        result = finish(script, out)
        assert result["evaluated"] == pytest.approx(wanted["evaluated"], rel=1e-5)
        if script is other:
            assert result["losses"] == pytest.approx(wanted["losses"], rel=1e-5)
    assert sum(map(computed, everyone)) == 2 * 40


@pytest.mark.long("pipeline-rows", "sharded-variables", "tensor-rows")
@pytest.mark.parametrize("with_rows", [False, True], ids=["variables", "rows"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradient_that_is_not_finite_in_one_part_counts_in_none(
    yard: LocalCluster, probes: Probes, strategy: str, with_rows: bool
) -> None:
    given = counted(48, 2, "--nan-samples", "3", *(["--with-rows"] if with_rows else []), strategy=strategy)
    more = {"job__pipeline__cut": "counts.second"} if with_rows and strategy == "pipeline" else {}
    common = settings(yard, f"nan-{strategy}-{with_rows}".lower(), strategy=strategy, **more)
    started = start(probes, 2, *given, **common)
    (first, *others), again = finish(*started[0])["counts"], finish(*started[1])["counts"]
    assert [first, *others] == again
    assert others == [first] * (1 + with_rows)
    assert first[3] == 0.0
    # each epoch has other batches: those with the sample do not count, and the others do
    assert sum(first) == 2 * (48 - 4)
    told = [line for script, _ in started for line in script.lines if "is not finite" in line]
    assert len(told) == 2, told


def test_mistakes_are_refused_with_an_explanation(yard: LocalCluster, probes: Probes) -> None:
    for script, out in start(probes, 2, "stage-mistakes", **settings(yard, "mistakes")):
        found = finish(script, out)["errors"]
        assert found["batch"].startswith("job.train_step outside of job.batches in a job whose job.strategy")
        assert found["step"].startswith("a step outside of job.batches in an asynchronous job")
        assert found["forward"].startswith("the forward of the whole model")
        assert found["last"].startswith("a batch of 6 samples")
        assert found["sampler"].startswith("job.sampler in an asynchronous job")


@pytest.mark.parametrize("leavers", [(0,), (1,), (0, 1)], ids=["leader", "other", "both"])
def test_workers_leave_a_data_set_with_one_that_leaves_it(
    yard: LocalCluster, probes: Probes, leavers: tuple[int, ...]
) -> None:
    """They go on in the next one, whoever leads."""
    given = ("two-sets", "--samples", "48", "--leavers", *map(str, leavers))
    started = start(probes, 2, *given, **settings(yard, f"leave-{len(leavers)}-{leavers[0]}"))
    for script, out in started:
        result = finish(script, out)
        assert result["computed"][0] in (3, 4), "one batch more may be computed, which does not count"
        assert_counts_of_both_sets(result)


def test_a_worker_in_reserve_does_not_stay_in_a_data_set_that_others_have_left(
    yard: LocalCluster, probes: Probes
) -> None:
    started = start(probes, 3, "two-sets", "--samples", "48", "--leavers", "0", "1", **settings(yard, "reserve-leaves"))
    results = [finish(script, out) for script, out in started]
    assert sorted(result["computed"] for result in results) == [[0, 0], [3, 12], [3, 12]]
    for result in results:
        assert_counts_of_both_sets(result)


def assert_counts_of_both_sets(result: dict[str, Any]) -> None:
    first, second = result["counts"]
    assert first == second
    assert {*first} == {1.0, 2.0}
    assert sum(first) == 48 + 3 * 4, "three batches of the first data set"


@pytest.mark.parametrize("place", [0, 1])
def test_a_worker_that_comes_when_the_others_have_left_a_data_set_leaves_it_too(
    yard: LocalCluster, probes: Probes, tmp_path: Path, place: int
) -> None:
    """A worker in reserve takes the place of one that is lost in the second data set."""
    go_on = tmp_path / "go on"
    given = ("two-sets", "--samples", "48", "--hold-at", "6", "--hold", str(go_on), "--leavers", "0", "1")
    started = start(probes, 3, *given, **settings(yard, f"leave-early-{place}"))
    wait_for_any([script for script, _ in started], "computed 6")
    victim, _ = take(started, place)
    victim.process.send_signal(signal.SIGKILL)
    go_on.touch()
    results = [finish(script, out) for script, out in started]
    for result in results:
        assert_counts_of_both_sets(result)
    assert sorted(result["computed"][0] for result in results) == [0, 3]


@pytest.mark.long
def test_batch_that_kills_the_first_worker_of_a_pipeline_counts_in_no_stage(yard: LocalCluster, probes: Probes) -> None:
    common = settings(yard, "poison", job__data__poison_deaths=2)
    started = start(probes, 4, *counted(48, 1, "--poison", "5"), **common)
    alive = [each for each in started if each[0].process.wait(60) == 0]
    assert len(alive) == 2, "the first worker dies before anything is announced, and the second at the batch"
    for script, out in alive:
        first, second = finish(script, out)["counts"]
        assert first == second
        assert (first[5], sum(first)) == (0.0, 44.0)


@pytest.mark.long
def test_partitions_of_one_stage_that_go_back_get_again_what_they_lack(probes: Probes, tmp_path: Path) -> None:
    """Of the first stage or of the second. The other worker pushes the same batches again, and its partitions skip
    them."""
    yard = RoleYard(tmp_path, lease_ms=1_500)
    try:
        more = {"job__checkpoint__url": tmp_path / "checkpoints", "job__checkpoint__every_steps": 30}
        common = settings(yard, "restored", **more, job__partitions=2)
        started = start(probes, 2, *counted(96, 3, "--pause-ms", "20"), **common)
        wait_for_any([script for script, _ in started], "computed 35")
        yard.kill_server(1)
        yard.restart_server(1)
        for script, out in started:
            result = finish(script, out)
            assert result["counts"] == [[3.0] * 96] * 2
        lost = [line for script, _ in started for line in script.lines if "does not count" in line]
        assert any("whose next is #" in line for line in lost), lost
    finally:
        yard.stop()
