"""What trouble gets: an error that names what died (promise 7), and never a write of the dead."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardyard.config import configuration
from shardyard_launcher.yard.local_cluster import LocalCluster
from shardyard_ps_server.service.process import serve
from tests.support.yards import Probes, computed, finish, running_yard

SYNC = {"job__consistency__mode": "sync", "job__consistency__logical_ranks": 2, "job__workers_expected": 2}
GRACE_MS = 4_000
IMPATIENT = {"membership.coordinator_grace_ms": GRACE_MS}
SLOW = ("--pause-ms", "20", "--epochs", "50")


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[LocalCluster]:
    with running_yard(tmp_path / "yard", settings=IMPATIENT) as cluster:
        yield cluster


def pid_of(yard: LocalCluster, role: str) -> int:
    return next(process.pid for process in yard.state.processes if process.name.startswith(role))


@pytest.mark.long("server-9-ServerLost-async")
@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.parametrize(
    ("role", "stop", "error"),
    [
        ("server", signal.SIGKILL, "ServerLost"),
        ("server", signal.SIGSTOP, "ServerLost"),
        ("coordinator", signal.SIGKILL, "CoordinatorLost"),
    ],
)
def test_promise_7_the_loss_of_a_process_is_named(
    yard: LocalCluster, probes: Probes, role: str, stop: signal.Signals, error: str, mode: str
) -> None:
    """Of a server: without checkpoints, from which the job would go on."""
    settings = (SYNC if mode == "sync" else {"job__workers_expected": 2}) | {
        "membership__coordinator_grace_ms": GRACE_MS,
        "job__checkpoint__url": "never",
    }
    started = [probes.start("model", *SLOW, coordinator=yard.coordinator, **settings) for _ in range(2)]
    for script, _ in started:
        script.wait_for("computed 3")
    pid = pid_of(yard, role)
    os.kill(pid, stop)
    try:
        for script, _ in started:
            assert script.wait(timeout_s=30) != 0
    finally:
        if stop is signal.SIGSTOP:
            os.kill(pid, signal.SIGCONT)
    for script, _ in started:
        assert f"errors.{error}: " in script.output, script.output


def test_promise_4_a_worker_that_was_stopped_past_its_lease_writes_nothing(tmp_path: Path, probes: Probes) -> None:
    lease = {"membership.heartbeat_ms": 200, "membership.lease_ms": 1500}
    with running_yard(tmp_path / "yard", settings=lease) as yard:
        common = {"coordinator": yard.coordinator, "job__workers_expected": 2}
        sleeper, _ = probes.start("count", "--epochs", "2", "--pause-ms", "15", **common)
        other = probes.start("count", "--epochs", "2", "--pause-ms", "15", **common)
        sleeper.wait_for("computed 4")
        os.kill(sleeper.process.pid, signal.SIGSTOP)
        result = finish(*other)
        assert result["counts"] == [2.0] * 203
        os.kill(sleeper.process.pid, signal.SIGCONT)
        assert sleeper.wait(timeout_s=30) != 0
        assert "StaleIncarnation" in sleeper.output or "NotFound" in sleeper.output, sleeper.output


@pytest.mark.long
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_worker_goes_on_while_a_server_that_it_waits_for_is_frozen(tmp_path: Path, probes: Probes, mode: str) -> None:
    """Nothing but the coordinator tells it that the server will not answer. The lease is long, for busy machines:
    nobody else shall be taken for dead."""
    lease = {"membership.heartbeat_ms": 200, "membership.lease_ms": 3_000}
    settings = {"job__consistency__mode": mode, "job__consistency__logical_ranks": 1} if mode == "sync" else {}
    with running_yard(tmp_path / "yard", settings=lease) as yard:
        script, out = probes.start(
            *("count", "--patient", "--epochs", "3", "--pause-ms", "15"),
            coordinator=yard.coordinator,
            worker__rpc_deadline_ms=600_000,
            **settings,
        )
        script.wait_for("computed 10")
        await_checkpoint(tmp_path / "yard")
        frozen = pid_of(yard, "server")
        os.kill(frozen, signal.SIGSTOP)
        try:
            script.wait_for(f"computed {computed(script) + 20}", timeout_s=40)
        finally:
            os.kill(frozen, signal.SIGCONT)
        assert finish(script, out)["counts"] == [3.0] * 203


def await_checkpoint(folder: Path) -> None:
    until = time.monotonic() + 30
    while not list(folder.rglob("manifest.json")):
        assert time.monotonic() < until, "no checkpoint"
        time.sleep(0.05)


def test_a_missing_coordinator_is_named_with_what_to_do(probes: Probes) -> None:
    script, _ = probes.start("model", coordinator="127.0.0.1:9", membership__coordinator_grace_ms=500)
    assert script.wait() != 0
    assert "CoordinatorUnavailable: coordinator at 127.0.0.1:9 does not answer" in script.output
    assert "shardyard coordinator" in script.output


def test_a_server_that_is_told_to_stop_while_it_looks_for_its_coordinator_ends_well() -> None:
    stop = threading.Event()
    stop.set()  # also before it began to look, as by a signal while it starts
    begin = time.monotonic()
    serve(
        coordinator="127.0.0.1:9",
        bind="127.0.0.1:0",
        advertise=None,
        settings=configuration.load(None, {}, {"worker.rpc_deadline_ms": 60_000}).settings,
        stop=stop,
        hurry=threading.Event(),
        ready=lambda address: pytest.fail(f"ready at {address}"),
    )
    assert time.monotonic() - begin < 30
