"""What `shardyard up` and `status` say of jobs of an earlier yard."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys

import pytest
from rich.console import Console

from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_launcher.checkpoints.resume_notice import describe_job
from shardyard_launcher.status.as_json import to_json
from shardyard_launcher.status.as_tables import as_tables
from shardyard_launcher.status.report import YardReport

NOW_S = 1_700_000_100
CHECKPOINT = wire.CheckpointStatus(number=11, step=4_950, created_s=NOW_S - 32)


@pytest.fixture
def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def yard(job: wire.JobStatus, *, pid: int | None = None) -> wire.StatusReply:
    server = wire.MemberStatus(
        incarnation=5, role=wire.ROLE_SERVER, host=socket.gethostname(), pid=os.getpid() if pid is None else pid
    )
    job.map.owners.add(partition=0, server=5, address="s:1")
    return wire.StatusReply(members=[server], jobs=[job], time_ms=1_000 * NOW_S)


def job(**fields: object) -> wire.JobStatus:
    return wire.JobStatus(job=1, name="digits", state=wire.JOB_STATE_RUNNING, step=5_000, **fields)  # type: ignore[arg-type]


def restored(**fields: object) -> wire.JobStatus:
    return job(
        checkpoint=wire.CheckpointStatus(number=12, step=5_000, created_s=NOW_S),
        restored=wire.RestoredStatus(checkpoint=CHECKPOINT, **fields),  # type: ignore[arg-type]
    )


def said(found: wire.JobStatus, pid: int | None = None) -> str:
    return describe_job(yard(found, pid=pid), found)


def test_job_that_was_restored_says_from_which_checkpoint_and_what_is_computed_again() -> None:
    assert said(restored(partitions=8, leased_again=3)) == (
        "job digits goes on from checkpoint 11 of step 4,950, 32 s old: 8 partitions, 3 data shards leased anew"
    )
    assert said(restored(partitions=1, leased_again=1)).endswith(": 1 partition, 1 data shard leased anew")
    assert said(restored(partitions=8, logs=True)).endswith(
        ": 8 partitions, with what logs say after it; nothing is computed again"
    )


def test_job_whose_servers_have_lived_goes_on_where_it_stands() -> None:
    assert said(job(checkpoint=CHECKPOINT)) == (
        "job digits goes on at step 5,000; its newest checkpoint is 11 of step 4,950, 32 s old"
    )
    assert said(job()) == "job digits goes on; it has no checkpoint"


def test_job_of_a_yard_that_went_down_in_order_goes_on_from_its_checkpoint() -> None:
    """The new coordinator has heard of no step yet."""
    stands = job(checkpoint=CHECKPOINT, workers=1)
    stands.step = 0
    assert said(stands) == "job digits goes on from checkpoint 11 of step 4,950, 32 s old"
    stands.workers = 0
    assert said(stands).endswith("32 s old; it has no workers: start its script again")


def test_job_whose_server_has_died_is_not_said_to_go_on(dead_pid: int) -> None:
    assert said(job(checkpoint=CHECKPOINT), dead_pid) == (
        "job digits is not restored yet: it waits for its servers' leases to run out; "
        "its newest checkpoint is 11 of step 4,950, 32 s old"
    )
    waits = ["a server for partition 0"]
    assert "waits for a server for partition 0;" in said(job(checkpoint=CHECKPOINT, recovering=True, waits=waits))


def test_status_shows_checkpoint_and_recovery() -> None:
    status = yard(restored(partitions=8, leased_again=3))
    report = YardReport("here:1", status, {})
    out = io.StringIO()
    Console(file=out, width=200).print(as_tables(report))
    assert "newest checkpoint: 12 of step 5,000, 0 s old" in out.getvalue()
    assert "restored from checkpoint 11 of step 4,950: 8 partitions, 3 data shards leased anew" in out.getvalue()
    (shown,) = json.loads(to_json(report))["jobs"]
    assert shown["checkpoint"] == {"number": 12, "step": 5_000, "created_s": NOW_S}
    assert shown["restored"] == {
        "checkpoint": {"number": 11, "step": 4_950, "created_s": NOW_S - 32},
        "partitions": 8,
        "data_shards_leased_again": 3,
        "logs": False,
    }
    assert shown["recovering"] is False


def test_job_without_a_checkpoint_has_none_in_status() -> None:
    report = YardReport("here:1", yard(job()), {})
    (shown,) = json.loads(to_json(report))["jobs"]
    assert (shown["checkpoint"], shown["restored"]) == (None, None)
