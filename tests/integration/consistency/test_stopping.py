"""A job that ends before its data does: at one step for all workers of a synchronous job, with a last checkpoint,
nobody missing and nobody hanging (rule B9).

The oracle of the synchronous tests: what an undisturbed run had at that step, to the bit.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import shardyard as sy
from shardyard.checkpoints.library import CheckpointLibrary
from shardyard.domain import errors
from shardyard.storage.storage import open_storage
from shardyard.wire import methods
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_launcher.yard.local_cluster import LocalCluster
from tests.support.alone import SYNC, SYNC_2, Connect, Counted
from tests.support.identities import coordinator_at
from tests.support.yards import ROLE, Probes, finish, running_yard

SYNC_3 = {"job__consistency__mode": "sync", "job__consistency__logical_ranks": 3, "job__workers_expected": 3}
DATA = TensorDataset(torch.arange(40.0).reshape(-1, 1), torch.arange(40.0).reshape(-1, 1) * 2)


def train(job: sy.Job, batches: Callable[[sy.Job], Iterator[Any]], stop_at: int = 0) -> dict[int, list[float]]:
    """The model's values after each step of the job. `stop_at`: the batch after which it is told to stop."""
    model = torch.nn.Linear(1, 1)
    model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-4))
    values = {}
    for count, (x, y) in enumerate(batches(job), 1):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        values[job.step] = [float(each.detach().sum()) for each in model.parameters()]
        if count == stop_at:
            job.stop("enough")
        if job.should_stop and batches is own_loop:
            break
    return values


def leased(job: sy.Job) -> Iterator[Any]:
    return job.batches(DATA, batch_size=4)


def own_loop(job: sy.Job) -> Iterator[Any]:
    return iter(DataLoader(DATA, batch_size=4))


# ---- one worker


@pytest.mark.parametrize("batches", [leased, own_loop])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_promise_6_stopped_synchronous_job_ends_at_a_whole_step_with_the_bits_of_an_undisturbed_one(
    connect: Connect, ranks: int, batches: Callable[[sy.Job], Iterator[Any]]
) -> None:
    settings = SYNC | {"job.consistency.logical_ranks": ranks}
    undisturbed = train(connect(settings=settings), batches)
    for stop_at in (1, 2, 3, 4):
        job = connect(settings=settings)
        stopped = train(job, batches, stop_at)
        end = -(-stop_at // ranks)
        assert (job.step, job.should_stop, max(stopped)) == (end, True, end)
        assert stopped == {step: values for step, values in undisturbed.items() if step <= end}


@pytest.mark.parametrize("batches", [leased, own_loop])
def test_stopped_asynchronous_job_ends_with_the_batch_at_hand(
    connect: Connect, batches: Callable[[sy.Job], Iterator[Any]]
) -> None:
    job = connect()
    train(job, batches, 3)
    assert (job.step, job.should_stop) == (3, True)
    assert job.stopping is not None
    assert job.stopping.reason == "enough"


def test_batches_that_are_accumulated_when_a_job_is_stopped_are_given_up(connect: Connect) -> None:
    counted = Counted(connect(settings={"job.data.batches_per_data_shard": 4}), 16)
    for number, (index,) in enumerate(counted.job.batches(counted.data, batch_size=2, shuffle=False)):
        if number == 0:
            counted.step(index)
        else:
            counted.compute(index)
            counted.job.stop()
    assert number == 1
    assert counted.counts == [1.0] * 2 + [0.0] * 14


def test_loop_after_the_stop_yields_nothing_and_ends(connect: Connect) -> None:
    for settings in ({}, SYNC, SYNC_2):
        job = connect(settings=settings)
        train(job, leased, 2)
        before = job.step
        assert list(job.batches(DATA, batch_size=4)) == []
        assert job.step == before


def test_job_that_is_stopped_before_its_first_batch_computes_none(connect: Connect) -> None:
    for settings in ({}, SYNC):
        job = connect(settings=settings)
        job.stop()
        assert train(job, leased) == {}
        assert (job.step, job.should_stop) == (0, True)


def test_steps_of_a_loop_that_does_not_ask_count_no_more_in_a_synchronous_job(connect: Connect) -> None:
    job = connect(settings=SYNC)
    job.register({"w": torch.zeros(1)}, lr=1.0)
    for number in range(6):
        job.push({"w": -torch.ones(1)})
        if number == 2:
            job.stop()
    assert job.step == 3
    assert job.pull()["w"].tolist() == [3.0]


def test_batch_that_does_not_count_leaves_no_trace_in_the_model(connect: Connect) -> None:
    job = connect(settings=SYNC)
    model = torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.BatchNorm1d(2))
    model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for number, (x, _) in enumerate(DataLoader(DATA, batch_size=4)):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        if number == 2:
            job.stop()
    values = job.pull()
    assert int(values["1.num_batches_tracked"]) == job.step == 3
    for name, value in model.state_dict().items():
        assert torch.equal(value, values[name]), name


def test_worker_that_has_steps_to_compute_goes_on_when_the_stop_is_settled(connect: Connect) -> None:
    job = connect(settings=SYNC_2)
    job.register({"w": torch.zeros(1)}, lr=1.0)
    job.push({"w": -torch.ones(1)})
    job.stop()
    until = time.monotonic() + 10
    while not job.stopping.settled:
        assert time.monotonic() < until
        job._session.refresh()
    assert (job.stopping.step, job.should_stop) == (1, False)
    job.push({"w": -torch.ones(1)})
    assert (job.step, job.should_stop) == (1, True)


def test_first_reason_stands_and_a_long_one_is_refused(connect: Connect) -> None:
    job = connect()
    assert (job.should_stop, job.stopping) == (False, None)
    with pytest.raises(errors.InvalidRequest, match="a reason of 5000 characters"):
        job.stop("x" * 5_000)
    job.stop("first")
    job.stop("second")
    assert job.stopping is not None
    assert job.stopping.reason == "first"
    job.close()
    with pytest.raises(errors.InvalidRequest, match="has been left"):
        job.stop()


# ---- several workers, in processes of their own


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with running_yard(tmp_path_factory.mktemp("yard"), settings={"membership.heartbeat_ms": 100}) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def at_step(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], str]:
    """The digest of a run in one process that was stopped at that step, told by its own batches."""

    def digest(step: int) -> str:
        with Probes(tmp_path_factory.mktemp("undisturbed")) as running:
            result = running.run("model", "--stop-at", str(3 * step), yard__servers=1, **SYNC_3)
        assert result["step"] == step
        return str(result["digest"])

    return digest


def job_of(yard: LocalCluster, name: str) -> wire.JobStatus:
    peer = coordinator_at(yard.coordinator)
    try:
        jobs = peer.call(methods.STATUS, wire.StatusRequest(), timeout_ms=10_000).jobs
    finally:
        peer.close()
    return next(job for job in jobs if job.name == name)


def ended(yard: LocalCluster, name: str) -> wire.JobStatus:
    until = time.monotonic() + 30
    while (job := job_of(yard, name)).state != wire.JOB_STATE_FINISHED:
        assert time.monotonic() < until, job
        time.sleep(0.05)
    return job


@pytest.mark.long
def test_promise_6_all_workers_end_at_one_step_when_one_of_them_stops_the_job(
    yard: LocalCluster, probes: Probes, at_step: Callable[[int], str]
) -> None:
    common = {"coordinator": yard.coordinator, "job": "stopped", **SYNC_3}
    started = [probes.start("model", "--pause-ms", "20", *more, **common) for more in ([], ["--stop-at", "4"], [])]
    results = [finish(script, out) for script, out in started]
    (step,) = {result["step"] for result in results}
    assert 4 <= step <= 6
    assert {result["digest"] for result in results} == {at_step(step)}
    assert {(result["reason"], result["should_stop"]) for result in results} == {("computed 4", True)}
    job = ended(yard, "stopped")
    assert (job.stop.reason, job.stop.settled, job.stop.step) == ("computed 4", True, step)
    assert job.stop.worker
    assert job.checkpoint.step == step
    library = CheckpointLibrary(open_storage(str(yard._folder / "coordinator" / "checkpoints")))
    assert library.load("stopped", None).step == step


def test_promise_6_command_line_stops_a_job_of_loops_of_their_own_at_one_step(
    yard: LocalCluster, probes: Probes
) -> None:
    common = {"coordinator": yard.coordinator, "job": "own", **SYNC_3}
    started = [probes.start("loader", "--pause-ms", "30", "--epochs", "50", **common) for _ in range(3)]
    started[0][0].wait_for("computed 3")
    stop = [sys.executable, *ROLE, "stop", "own", "--reason", "tea", "--coordinator", yard.coordinator, "--wait"]
    told = subprocess.run(stop, capture_output=True, text=True, timeout=60, check=False)
    results = [finish(script, out) for script, out in started]
    (step,) = {result["step"] for result in results}
    assert {result["digest"] for result in results} == {results[0]["digest"]}
    assert (told.returncode, told.stdout.splitlines()) == (
        0,
        ["job own is told to stop", f"job own is finished, at step {step}"],
    ), told.stderr
    assert {result["reason"] for result in results} == {"tea"}
    job = job_of(yard, "own")
    assert (job.stop.reason, job.stop.worker, job.checkpoint.step) == ("tea", 0, step)


@pytest.mark.long
def test_rule_b9_worker_that_is_killed_while_a_job_stops_is_not_missed(
    yard: LocalCluster, probes: Probes, at_step: Callable[[int], str]
) -> None:
    common = {"coordinator": yard.coordinator, "job": "bereft", "job__rank_grace_ms": 200, **SYNC_3}
    started = [probes.start("model", "--pause-ms", "60", *more, **common) for more in ([], ["--stop-at", "3"], [])]
    started[1][0].wait_for("computed 3")
    victim, _ = started.pop(2)
    victim.kill()
    results = [finish(script, out) for script, out in started]
    (step,) = {result["step"] for result in results}
    assert {result["digest"] for result in results} == {at_step(step)}


@pytest.mark.long
def test_worker_on_standby_ends_with_a_job_that_is_stopped(yard: LocalCluster, probes: Probes) -> None:
    common = {"coordinator": yard.coordinator, "job": "standby", **SYNC_3, "job__workers_expected": 4}
    # so long that who starts last finds a job
    started = [probes.start("model", "--pause-ms", "600", **common) for _ in range(4)]
    stop = [sys.executable, *ROLE, "stop", "standby", "--coordinator", yard.coordinator]
    for script, _ in started:
        script.wait_for(" job 'standby'")
    subprocess.run(stop, capture_output=True, text=True, timeout=60, check=True)
    results = [finish(script, out) for script, out in started]
    assert len({(result["step"], result["digest"]) for result in results}) == 1


@pytest.mark.long
def test_promise_2_stopped_asynchronous_workers_leave_whole_batches(yard: LocalCluster, probes: Probes) -> None:
    common = {"coordinator": yard.coordinator, "job": "asynchronous", "job__workers_expected": 3}
    started = [probes.start("count", "--pause-ms", "20", *more, **common) for more in ([], ["--stop-at", "3"], [])]
    results = [finish(script, out) for script, out in started]
    assert {(result["reason"], result["should_stop"]) for result in results} == {("computed 3", True)}
    assert sum(result["computed"] for result in results) < 2 * 51
    job = ended(yard, "asynchronous")
    assert job.checkpoint.step >= max(result["step"] for result in results)
    assert {count for result in results for count in result["counts"]} == {0.0, 1.0}
    assert not any(feed.finished for feed in job.feeds)
