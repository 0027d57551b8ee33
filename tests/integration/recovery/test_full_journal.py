"""The disk of the coordinator's journal is full for longer than members wait for a coordinator that is gone."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_coordinator.service.journal import FILE
from tests.support.waiting import wait_until
from tests.support.yards import Probes, RoleYard, Script, computed, finish

GRACE_MS = 1_500
FULL_S = 2 * GRACE_MS / 1_000
SAMPLES = 200
"""Whole steps of two ranks."""
SYNC = {
    "job__consistency__mode": "sync",
    "job__consistency__logical_ranks": 2,
    # whose beginning must be written down
    "job__checkpoint__every_s": 1,
}
ASYNC = {"job__data__batches_per_data_shard": 4}


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[RoleYard]:
    running = RoleYard(tmp_path, grace_ms=GRACE_MS)
    try:
        yield running
    finally:
        running.stop()


@contextmanager
def largest_file(coordinator: Script, nbytes: int) -> Iterator[None]:
    """The coordinator cannot write beyond this place of any file, as if its disk were full."""
    pid, limit = coordinator.process.pid, resource.RLIMIT_FSIZE
    resource.prlimit(pid, limit, (nbytes, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        resource.prlimit(pid, limit, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def begin(yard: RoleYard, probes: Probes, epochs: int, settings: dict[str, Any]) -> list[tuple[Script, Path]]:
    """Two workers that have begun."""
    settings = settings | {"coordinator": yard.address, "membership__coordinator_grace_ms": GRACE_MS}
    options = (
        "--samples",
        str(SAMPLES),
        "--epochs",
        str(epochs),
        "--pause-ms",
        "30",
        *(("--ranks", "2") if settings.keys() & SYNC else ()),
    )
    started = [probes.start("count", *options, job__workers_expected=2, **settings) for _ in range(2)]
    for script, _ in started:
        script.wait_for("computed 4")
    return started


def end(yard: RoleYard, started: list[tuple[Script, Path]], epochs: int) -> None:
    results = [finish(script, out) for script, out in started]
    assert [result["counts"] for result in results] == [[float(epochs)] * SAMPLES] * 2
    status = yard.ended()
    assert [job.state for job in status.jobs] == [wire.JOB_STATE_FINISHED]
    assert status.term == 1
    assert [server.process.poll() for server in yard.servers] == [None, None]
    assert "was silent" not in yard.coordinator.output


@pytest.mark.long("sync")
@pytest.mark.parametrize(("mode", "epochs"), [(ASYNC, 6), (SYNC, 10)], ids=["async", "sync"])
def test_nothing_ends_while_the_journal_cannot_be_written(
    yard: RoleYard, probes: Probes, mode: dict[str, Any], epochs: int
) -> None:
    started = begin(yard, probes, epochs, mode)
    steps = [computed(script) for script, _ in started]
    with largest_file(yard.coordinator, 0):
        until = time.monotonic() + FULL_S
        wait_until(lambda: str(yard.state / FILE) in yard.status().waiting_for, "the journal to be named")
        wait_until(lambda: time.monotonic() >= until, "the time to pass")
        status = yard.status()
        assert f"the journal {yard.state / FILE} to be written (" in status.waiting_for
        assert "bytes free on its disk), for " in status.waiting_for
        for script in (*yard.servers, *(script for script, _ in started)):
            script.wait_for(f"decides nothing before it has waited for the journal {yard.state / FILE}")
        if mode is SYNC:
            assert min(computed(script) - former for (script, _), former in zip(started, steps, strict=True)) > 10
        else:
            started[0][0].wait_for("waiting for the coordinator to answer")
        assert max(member.last_seen_ms_ago for member in status.members) < GRACE_MS
    for server in yard.servers:
        server.wait_for(f"coordinator at {yard.address} decides again")
    end(yard, started, epochs)


def test_training_goes_on_while_no_file_of_the_journal_can_grow(yard: RoleYard, probes: Probes) -> None:
    started = begin(yard, probes, 5, ASYNC)
    files = [yard.state / FILE, yard.state / f"{FILE}-wal"]
    sizes = [file.stat().st_size for file in files]
    with largest_file(yard.coordinator, min(sizes)):
        steps = [computed(script) for script, _ in started]
        until = time.monotonic() + FULL_S
        wait_until(lambda: time.monotonic() >= until, "the time to pass")
        assert min(computed(script) - former for (script, _), former in zip(started, steps, strict=True)) > 20
        assert yard.status().waiting_for == ""
    end(yard, started, 5)
