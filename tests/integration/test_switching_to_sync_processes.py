"""An asynchronous job that is switched to steps by `shardyard set` while a worker, a server and the coordinator are
killed, before it goes over and right after: each sample counts once an epoch."""

from __future__ import annotations

import pytest
from switches import set_
from test_switching_from_sync_processes import EPOCHS, RANKS, SAMPLES, end_some_of_all, until
from yards import Probes, RoleYard, finish

from shardyard.wire.v1 import common_pb2 as common
from shardyard.wire.v1 import coordinator_pb2 as wire


def is_synchronous(job: wire.JobStatus) -> bool:
    return bool(job.mode == common.UPDATE_MODE_SYNC)


@pytest.mark.long
@pytest.mark.parametrize("when", ["before", "after"])
def test_promises_1_and_2_hold_for_a_job_whose_processes_die_while_it_goes_over_to_steps(
    yard: RoleYard, probes: Probes, when: str
) -> None:
    options = ("--epochs", str(EPOCHS), "--pause-ms", "60", "--samples", str(SAMPLES), "--ranks", str(RANKS))
    settings = {
        "coordinator": yard.address,
        "job__workers_expected": 3,
        "job__consistency__mode": "bounded",
        "job__consistency__staleness": 3,
        "job__consistency__logical_ranks": RANKS,
        "job__data__batches_per_data_shard": 4,  # what is left of an epoch has equal shares in each step
        "job__rank_grace_ms": 500,
    }
    started = [probes.start("count", *options, **settings) for _ in range(3)]  # type: ignore[arg-type]
    started[0][0].wait_for("computed 2")
    told = set_(yard, "consistency.mode=sync")
    assert (told.returncode, told.stdout) == (0, "job probe goes over to sync\n"), told.stderr
    if when == "after":
        until(yard, is_synchronous)
    end_some_of_all(yard, started.pop()[0])
    until(yard, is_synchronous)
    results = [finish(script, out) for script, out in started]
    assert [result["counts"] for result in results] == [[float(EPOCHS)] * SAMPLES] * 2
    (job,) = yard.ended().jobs
    assert job.state == wire.JOB_STATE_FINISHED
    assert job.consistency.consistency == wire.Consistency(number=1, mode=wire.CONSISTENCY_MODE_SYNC)
