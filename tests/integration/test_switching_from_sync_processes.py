"""A synchronous job that is switched by `shardyard set` while a worker, a server and the coordinator are killed, before
it goes over and right after: each sample counts once an epoch."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from switches import set_
from yards import Probes, RoleYard, Script, finish, wait_for_any

from shardyard.wire.v1 import common_pb2 as common
from shardyard.wire.v1 import coordinator_pb2 as wire

EPOCHS, SAMPLES, RANKS = 3, 160, 2
DEADLINE_S = 60.0


def until(yard: RoleYard, is_so: Callable[[wire.JobStatus], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not is_so(yard.status().jobs[0]):
        assert time.monotonic() < deadline, yard.status().jobs[0]
        time.sleep(0.02)


def is_asynchronous(job: wire.JobStatus) -> bool:
    return bool(job.mode == common.UPDATE_MODE_ASYNC)


def end_some_of_all(yard: RoleYard, victim: Script) -> None:
    victim.kill()
    yard.kill_server(1)
    yard.kill_coordinator()
    yard.restart_coordinator()
    yard.restart_server(1)


@pytest.mark.long
@pytest.mark.parametrize("when", ["before", "after"])
def test_promises_1_and_2_hold_for_a_job_whose_processes_die_while_it_goes_over(
    yard: RoleYard, probes: Probes, when: str
) -> None:
    options = ("--epochs", str(EPOCHS), "--pause-ms", "60", "--samples", str(SAMPLES), "--ranks", str(RANKS))
    settings = {
        "coordinator": yard.address,
        "job__workers_expected": 3,
        "job__consistency__mode": "sync",
        "job__consistency__logical_ranks": RANKS,
        "job__data__batches_per_data_shard": 5,
        "job__rank_grace_ms": 500,
    }
    started = [probes.start("count", *options, **settings) for _ in range(3)]  # type: ignore[arg-type]
    # who comes third has no rank
    wait_for_any([script for script, _ in started], "computed 2")
    told = set_(yard, "consistency.mode=bounded", "consistency.staleness=2")
    assert (told.returncode, told.stdout) == (0, "job probe goes over to bounded, 2 steps\n"), told.stderr
    if when == "after":
        until(yard, is_asynchronous)
    end_some_of_all(yard, started.pop()[0])
    until(yard, is_asynchronous)
    results = [finish(script, out) for script, out in started]
    assert [result["counts"] for result in results] == [[float(EPOCHS)] * SAMPLES] * 2
    (job,) = yard.ended().jobs
    assert job.state == wire.JOB_STATE_FINISHED
    assert job.consistency.consistency == wire.Consistency(number=1, mode=wire.CONSISTENCY_MODE_BOUNDED, staleness=2)
