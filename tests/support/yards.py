"""Yards of real processes for tests, and training scripts run in them. Everything started here is ended here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

from shardyard.config import configuration
from shardyard.wire import methods
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_launcher.yard import role_process
from shardyard_launcher.yard.local_cluster import LocalCluster
from tests.support.identities import coordinator_at
from tests.support.preloaded import Forked, Preloaded

SCRIPTS = Path(__file__).parent / "scripts"
LOOK_AGAIN_S = 0.5


@contextmanager
def running_yard(
    folder: Path, *, servers: int = 2, settings: Mapping[str, object] | None = None
) -> Iterator[LocalCluster]:
    """A coordinator and servers on free ports of loopback. The agent idles."""
    given = {"yard.servers": servers, "yard.workers": 1, "yard.coordinator_port": 0, **(settings or {})}
    assert Script.preloaded is not None
    with mock.patch.object(role_process, "subprocess", Script.preloaded.as_subprocess()):
        cluster = LocalCluster(configuration.load(None, {}, given).settings, folder, tied=True)
        try:
            cluster.start(stop=threading.Event())
            yield cluster
        finally:
            cluster.stop()


class Script:
    """A training script in a process of its own. `lines` is what it printed so far."""

    preloaded: ClassVar[Preloaded | None] = None
    """The process that scripts are forked from. None: each starts an interpreter of its own."""

    def __init__(self, arguments: list[str], environment: Mapping[str, str]) -> None:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("SHARDYARD")}
        given = {**kept, "OMP_NUM_THREADS": "1", **environment}
        self.process: Forked | subprocess.Popen[str]
        if self.preloaded is not None:
            self.process = self.preloaded.start(arguments, given)
        else:
            self.process = subprocess.Popen(
                [sys.executable, "-u", *arguments],
                env=given,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self.lines.append(line.rstrip())
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    def wait_for(self, text: str, *, timeout_s: float = 60, or_end: bool = False) -> None:
        """Waits until a line contains the text. With `or_end` it also returns when the process has ended."""
        until = time.monotonic() + timeout_s
        with self._changed:
            while not any(text in line for line in self.lines):
                ended = self.process.poll() is not None
                if ended and or_end:
                    return
                assert not ended or any(text in line for line in self.lines), self.output
                assert time.monotonic() < until, (text, self.output)
                self._changed.wait(LOOK_AGAIN_S)

    def wait(self, *, timeout_s: float = 90) -> int:
        try:
            code = self.process.wait(timeout_s)
        finally:
            self.kill()
        return code

    def kill(self) -> None:
        """kill -9, and no thread or pipe is left."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()

    @property
    def output(self) -> str:
        return "\n".join(self.lines[-60:])


@contextmanager
def preloaded_scripts() -> Iterator[None]:
    """Scripts are forked from a process that has imported everything: from the one that is there, or from a new one."""
    if Script.preloaded is not None:
        yield
        return
    Script.preloaded = Preloaded()
    try:
        yield
    finally:
        Script.preloaded.close()
        Script.preloaded = None


def wait_for_any(scripts: Sequence[Script], text: str, *, timeout_s: float = 60) -> None:
    """Waits until a line of one of them contains the text."""
    until = time.monotonic() + timeout_s
    while not any(text in line for script in scripts for line in tuple(script.lines)):
        assert time.monotonic() < until, [script.output for script in scripts]
        time.sleep(0.01)


class Probes:
    """Starts scripts/probe.py. As a context manager it kills the scripts that still run at the end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._scripts: list[Script] = []

    def start(
        self, mode: str, *options: str, coordinator: str = "", job: str = "probe", **settings: object
    ) -> tuple[Script, Path]:
        out = self._folder / f"{job}-{len(self._scripts)}.json"
        environment = {"SHARDYARD_JOB": job, "SHARDYARD_COORDINATOR": coordinator} | {
            f"SHARDYARD__{key.upper()}": str(value) for key, value in ({"job__partitions": 4} | settings).items()
        }
        script = Script([str(SCRIPTS / "probe.py"), mode, str(out), *options], environment)
        self._scripts.append(script)
        return script, out

    def run(self, mode: str, *options: str, **settings: Any) -> dict[str, Any]:
        script, out = self.start(mode, *options, **settings)
        return finish(script, out)

    def __enter__(self) -> Probes:
        return self

    def __exit__(self, *_: object) -> None:
        for script in self._scripts:
            script.kill()


def finish(script: Script, out: Path) -> dict[str, Any]:
    """Waits for a script to end well, and reads what it wrote."""
    assert script.wait() == 0, script.output
    result: dict[str, Any] = json.loads(out.read_text())
    return result


ROLE = ("-P", "-m", "shardyard_launcher.cli")


class RoleYard:
    """A coordinator and servers, each in a process of its own. Only the test restarts them."""

    def __init__(
        self,
        folder: Path,
        *,
        servers: int = 2,
        lease_ms: int = 0,
        grace_ms: int = 0,
        drain_s: int = 0,
        servers_expected: int = 1,
    ) -> None:
        """`lease_ms`: the lease of members, for tests that freeze a member and must not lose it. `grace_ms`: for how
        long servers continue without a coordinator. `drain_s`: how long members may take to leave in order. 0: the
        default."""
        self.state = folder / "state"
        self._lease = {"SHARDYARD__MEMBERSHIP__LEASE_MS": str(lease_ms)} if lease_ms else {}
        self._expected = {"SHARDYARD__MEMBERSHIP__SERVERS_EXPECTED": str(servers_expected)}
        self._drain = {"SHARDYARD__MEMBERSHIP__DRAIN_S": str(drain_s)} if drain_s else {}
        self._grace = {"SHARDYARD__MEMBERSHIP__COORDINATOR_GRACE_MS": str(grace_ms)} if grace_ms else {}
        self.servers: list[Script] = []
        self.coordinator = self.start_coordinator("127.0.0.1:0")
        try:
            self.coordinator.wait_for("ready ")
            self.address = next(line for line in self.coordinator.lines if line.startswith("ready ")).split()[1]
            for _ in range(servers):
                self.servers.append(self.start_server("127.0.0.1:0"))
            for server in self.servers:
                server.wait_for("ready ")
        except BaseException:
            self.stop()
            raise

    def start_coordinator(self, bind: str, failpoints: str = "") -> Script:
        return Script(
            [*ROLE, "coordinator", "--bind", bind, "--state", str(self.state), "--failpoints", failpoints],
            self._lease | self._drain | self._expected,
        )

    def start_server(self, bind: str, failpoints: str = "") -> Script:
        own = ["--coordinator", self.address, "--bind", bind, "--set", f"yard.wal={self.state / 'wal'}"]
        return Script([*ROLE, "server", *own, "--failpoints", failpoints], self._grace)

    def kill_server(self, index: int) -> None:
        self.servers[index].kill()

    def end_server(self, index: int) -> None:
        """The server leaves in order."""
        self.servers[index].process.send_signal(signal.SIGTERM)

    def restart_server(self, index: int, failpoints: str = "") -> None:
        """At the same address."""
        address = next(line for line in self.servers[index].lines if line.startswith("ready ")).split()[1]
        self.servers[index] = self.start_server(address, failpoints)
        self.servers[index].wait_for("ready ")

    def kill_coordinator(self) -> None:
        self.coordinator.kill()

    def restart_coordinator(self, failpoints: str = "") -> None:
        self.coordinator = self.start_coordinator(self.address, failpoints)
        self.coordinator.wait_for("ready ")

    def status(self) -> wire.StatusReply:
        peer = coordinator_at(self.address)
        try:
            return peer.call(methods.STATUS, wire.StatusRequest(), timeout_ms=10_000)
        finally:
            peer.close()

    def ended(self, *, timeout_s: float = 30) -> wire.StatusReply:
        """Waits until all jobs have ended. Returns the status."""
        until = time.monotonic() + timeout_s
        while True:
            found = self.status()
            if all(job.state in (wire.JOB_STATE_FINISHED, wire.JOB_STATE_FAILED) for job in found.jobs):
                return found
            assert time.monotonic() < until, found
            time.sleep(0.05)

    def stop(self) -> None:
        for script in (*self.servers, self.coordinator):
            script.kill()


def computed(script: Script) -> int:
    return sum(line.startswith("computed ") for line in script.lines)


def assert_each_sample_counts_once_in_its_row(tmp_path: Path, yard: RoleYard, died: str, **settings: object) -> None:
    """Runs two scripts with look-ahead. After the second checkpoint a worker dies, or a server, or nobody."""
    samples, epochs = 203, 3
    settings = {"job__workers_expected": 2, "job__checkpoint__every_steps": 7} | settings
    options = ("--samples", str(samples), "--epochs", str(epochs), "--pause-ms", "20", "--look-ahead")
    with Probes(tmp_path) as probes:
        started = [probes.start("rows", *options, coordinator=yard.address, **settings) for _ in range(2)]
        yard.coordinator.wait_for("checkpoint 2 of step")
        if died == "worker":
            started.pop(0)[0].kill()
        if died == "server":
            yard.kill_server(1)
            yard.restart_server(1)
        for script, out in started:
            result = finish(script, out)
            assert result["totals"] == [float(epochs)] * samples
            assert result["hits"] > 0.5
