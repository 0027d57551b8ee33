"""Tells the user of `shardyard up` how the jobs found in the state folder continue.

Owns: how long to wait until lost partitions are restored; the words. Invariants: the wait is bounded, and nothing is
changed. Must not know: how partitions are restored.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import Final

import psutil

from shardyard.runtime.waits import ExplainedWait
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_launcher.status.report import TIMEOUT_MS, UNFINISHED
from shardyard_launcher.status.words import describe_checkpoint, describe_restored
from shardyard_launcher.terminal.coordinator_client import CoordinatorClient

LATE_MS: Final = 10_000
"""How much longer than a lease, after which dead servers are noticed, the wait for lost partitions lasts."""
LOOK_S: Final = 0.1


def report_jobs(client: CoordinatorClient, lease_ms: int, stop: threading.Event, say: Callable[[str], None]) -> None:
    """Says a line for each unfinished job of an earlier yard, once its partitions have servers again. This takes
    `lease_ms` and a moment. For a yard that was started just now. Raises CoordinatorUnavailable."""
    give_up = time.monotonic() + (lease_ms + LATE_MS) / 1000
    told: set[int] = set()
    waiting: list[str] = []
    with ExplainedWait(lambda: f"the partitions of {', '.join(waiting)} to be restored") as wait:
        while True:
            status = client.status(timeout_ms=TIMEOUT_MS)
            late = time.monotonic() >= give_up or stop.is_set()
            waiting = []
            for job in status.jobs:
                if job.state not in UNFINISHED or job.job in told:
                    continue
                if late or not _is_lost(status, job):
                    told.add(job.job)
                    say(describe_job(status, job))
                else:
                    waiting.append(f"job {job.name}")
            if not waiting:
                return
            wait.tick()
            stop.wait(LOOK_S)


def describe_job(status: wire.StatusReply, job: wire.JobStatus) -> str:
    """From which state a job of an earlier yard continues."""
    if not job.HasField("checkpoint"):
        return f"job {job.name} goes on; it has no checkpoint"
    checkpoint = describe_checkpoint(job.checkpoint, status.time_ms)
    newest = f"its newest checkpoint is {checkpoint}"
    if _is_lost(status, job):
        waits = "; ".join(job.waits) or "its servers' leases to run out"
        return f"job {job.name} is not restored yet: it waits for {waits}; {newest}"
    if job.HasField("restored"):
        # that checkpoint may no longer be the newest
        taken = describe_checkpoint(job.restored.checkpoint, status.time_ms)
        return f"job {job.name} goes on from checkpoint {taken}: {describe_restored(job.restored)}"
    if job.step > job.checkpoint.step:
        return f"job {job.name} goes on at step {job.step:,}; {newest}"
    what_to_do = "" if job.workers else "; it has no workers: start its script again"
    return f"job {job.name} goes on from checkpoint {checkpoint}{what_to_do}"


def _is_lost(status: wire.StatusReply, job: wire.JobStatus) -> bool:
    """Whether partitions lack a living server, as far as it is visible here. A server that died with its yard stays a
    member until its lease has run out."""
    servers = {member.incarnation: member for member in status.members if member.role == wire.ROLE_SERVER}
    owners = {owner.server for owner in job.map.owners}
    here = socket.gethostname()
    dead = {number for number, each in servers.items() if each.host == here and not psutil.pid_exists(each.pid)}
    return job.recovering or bool(owners & dead) or not owners <= set(servers)
