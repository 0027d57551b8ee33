"""A running job that is switched by `shardyard set` while a server, the coordinator and a worker are killed: each
sample counts once an epoch, and the switch ends."""

from __future__ import annotations

import time

import pytest

from shardyard.wire.v1 import coordinator_pb2 as wire
from tests.support.switches import set_
from tests.support.yards import Probes, RoleYard, finish

EPOCHS = 3
DEADLINE_S = 60.0


def until_set(yard: RoleYard, *what: str) -> str:
    """What is told when a switch is taken that has to wait for the one before."""
    until = time.monotonic() + DEADLINE_S
    while (told := set_(yard, *what)).returncode:
        assert "is being switched" in told.stderr, told.stderr
        assert time.monotonic() < until, told.stderr
    return told.stdout


@pytest.mark.long
@pytest.mark.parametrize("durability", ["checkpoint", "wal"])
def test_promises_1_and_2_hold_for_a_job_whose_processes_die_while_it_is_switched(
    yard: RoleYard, probes: Probes, durability: str
) -> None:
    options = ("--epochs", str(EPOCHS), "--pause-ms", "80")
    settings = {
        "coordinator": yard.address,
        "job__workers_expected": 3,
        "job__checkpoint__every_steps": 7,
        "job__data__batches_per_data_shard": 5,
        "job__durability": durability,
    }
    started = [probes.start("count", *options, **settings) for _ in range(3)]  # type: ignore[arg-type]
    for script, _ in started:
        script.wait_for("computed 4")
    yard.coordinator.wait_for("checkpoint 2 of step")
    first = set_(yard, "consistency.mode=bounded", "consistency.staleness=2")
    assert (first.returncode, first.stdout) == (0, "job probe changes to bounded, 2 steps\n"), first.stderr
    victim, _ = started.pop()
    victim.kill()
    yard.kill_server(1)
    yard.kill_coordinator()
    yard.restart_coordinator()
    yard.restart_server(1)
    assert until_set(yard, "probe", "consistency.staleness=5") == "job probe changes to bounded, 5 steps\n"
    told = until_set(yard, "consistency.mode=async", "--wait")
    assert told.splitlines() == [
        "job probe changes to async",
        "all servers and workers of job probe have changed",
    ]
    results = [finish(script, out) for script, out in started]
    assert [result["counts"] for result in results] == [[float(EPOCHS)] * 203] * 2
    (job,) = yard.ended().jobs
    assert job.state == wire.JOB_STATE_FINISHED
    assert job.consistency.consistency == wire.Consistency(number=3, mode=wire.CONSISTENCY_MODE_ASYNC)
