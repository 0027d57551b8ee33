"""Sides of a comparison: a yard with its workers, or a peer's processes, started, measured and ended in the same way.

Owns: the processes of a side, and what they used of the machine during a measurement. Must not know: what they compute.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.machine.facts import cpu_seconds, loopback_bytes
from harness.processes.programs import ANSWER_S_MAX, Program, Programs, ask_all
from shardyard.config import configuration
from shardyard.security.local import FOLDER
from shardyard_launcher.yard.local_cluster import LocalCluster
from shardyard_launcher.yard.role_process import tail


@dataclass(frozen=True, slots=True)
class Measured:
    """The workers' answers, and the resources used meanwhile."""

    answers: list[dict[str, Any]]
    service_cpu_s: float
    """CPU seconds of everything but the workers: servers, coordinator, agent."""
    loopback_bytes: int
    """Of all processes on this machine."""

    def total(self, name: str) -> float:
        return float(sum(answer[name] for answer in self.answers))


@dataclass(frozen=True, slots=True)
class Side:
    """Its workers answer questions. One with `pausable` processes uses no processor while others are measured: those of
    torch.distributed.rpc ask their shared memory for news without ever sleeping."""

    workers: Sequence[Program]
    service_pids: Sequence[int]
    pausable: Programs | None = None
    servers: Sequence[str] = ()
    """Addresses of Shardyard's servers."""
    coordinator: str = ""
    identities: Path = Path()
    """The folder of certificates, of a yard that has some."""

    def ask(
        self, do: str, *, workers: int | None = None, timeout_s: float = ANSWER_S_MAX, **arguments: Any
    ) -> list[dict[str, Any]]:
        """Asks all workers at the same time, or the first few."""
        return self.measure(do, workers=workers, timeout_s=timeout_s, **arguments).answers

    def measure(
        self, do: str, *, workers: int | None = None, timeout_s: float = ANSWER_S_MAX, **arguments: Any
    ) -> Measured:
        """As `ask`, and measures the resources used."""
        chosen = self.workers[:workers]
        if self.pausable is None:
            return self._measure(chosen, do, timeout_s, arguments)
        with self.pausable.running():
            return self._measure(chosen, do, timeout_s, arguments)

    def _measure(self, chosen: Sequence[Program], do: str, timeout_s: float, arguments: Mapping[str, Any]) -> Measured:
        cpu_s, moved_bytes = cpu_seconds(self.service_pids), loopback_bytes()
        answers = ask_all(chosen, do, timeout_s=timeout_s, **arguments)
        return Measured(answers, cpu_seconds(self.service_pids) - cpu_s, loopback_bytes() - moved_bytes)


@contextmanager
def shardyard_side(
    module: str,
    *arguments: str,
    workers: int,
    servers: int = 1,
    settings: Mapping[str, object] | None = None,
    bind: str = "127.0.0.1",
    prefixes: Sequence[Sequence[str]] = ((),),
    tls: bool = True,
) -> Iterator[Side]:
    """A yard of processes on free ports of loopback, or of another address, and workers that join it, started behind
    `prefixes`, in turn. `settings` are the workers'; all others have their defaults. `tls`: False for comparisons over
    TCP with a peer that encrypts nothing."""
    given: dict[str, object] = {"yard.servers": servers, "yard.workers": workers, "yard.bind": bind}
    given |= {"yard.coordinator_port": 0, "security.tls": tls, "security.insecure_network": not tls}
    with tempfile.TemporaryDirectory(prefix="shardyard-bench-") as folder, Programs() as programs:
        # tied: the kernel ends its processes when this thread ends
        cluster = LocalCluster(configuration.load(None, {}, given).settings, Path(folder), tied=True)
        try:
            cluster.start(stop=threading.Event())
            environment = {"SHARDYARD_COORDINATOR": cluster.coordinator, "SHARDYARD_WORKERS": str(workers)}
            environment["SHARDYARD__SECURITY__TLS"] = str(tls).lower()
            if tls:
                environment["SHARDYARD__SECURITY__IDENTITY"] = str(Path(folder, FOLDER, "worker"))
            options = [*arguments, "--workers", str(workers), "--settings", json.dumps(settings or {})]
            started = [
                programs.start(module, *options, "--worker", str(worker), environment=environment, prefix=prefix)
                for worker, prefix in zip(range(workers), itertools.cycle(prefixes), strict=False)
            ]
            programs.await_ready()
            processes = cluster.state.processes
            with _explained(cluster):
                yield Side(
                    started,
                    [process.pid for process in processes],
                    servers=[process.address for process in processes if process.role == "server"],
                    coordinator=cluster.coordinator,
                    identities=Path(folder, FOLDER),
                )
            # they leave the job while there is one
            for program in started:
                program.end()
            for program in started:
                program.stop()
        finally:
            cluster.stop()


@contextmanager
def _explained(cluster: LocalCluster) -> Iterator[None]:
    """If the block fails, prints which processes died and how, and the end of every log."""
    try:
        yield
    except Exception:
        for news in cluster.poll():
            print(news, file=sys.stderr)
        for process in cluster.state.processes:
            print(f"{process} said:\n{tail(process.log)}", file=sys.stderr, flush=True)
        raise


@contextmanager
def peer_side(
    module: str,
    *arguments: str,
    workers: int,
    servers: int = 1,
    environment: Mapping[str, str] | None = None,
    prefixes: Sequence[Sequence[str]] = ((),),
) -> Iterator[Side]:
    """A peer's processes, numbered from 0, the servers first, started behind `prefixes`, in turn. They meet in a file;
    no port is chosen here."""
    with tempfile.TemporaryDirectory(prefix="shardyard-bench-") as folder, Programs() as programs:
        world = servers + workers
        meeting = ["--world", str(world), "--rendezvous", str(Path(folder, "rendezvous"))]
        started = [
            programs.start(module, "--rank", str(rank), *meeting, *arguments, environment=environment, prefix=prefix)
            for rank, prefix in zip(range(world), itertools.cycle(prefixes), strict=False)
        ]
        programs.await_ready()
        programs.pause()
        yield Side(started[servers:], [program.pid for program in started[:servers]], programs)
