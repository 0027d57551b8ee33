"""What it costs the others when a worker or a server leaves in order.

    make bench BENCH=leaving        (with options: ARGS="--times 3")

A coordinator and three servers, started again when they end, and two workers with steps of 10 ms on leased data.
`drain_worker_s`: from SIGTERM to a worker until the other one's next step after that worker has left, asynchronous and
synchronous (where the other one waits for its ranks). A new worker then joins. `drain_server_s`: from SIGTERM to a
server until the end of the longest time without a step, which begins when its partitions move. `drain_twice`: the
samples that were computed more than once, over all workers.

Every parameter counts the samples, or the steps: at the end all of them must say how many were acknowledged.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from harness.measuring.pairs import Figures, column
from harness.measuring.report import Panel, options_of, report
from harness.processes.programs import Program, Programs
from shardyard.config import configuration
from shardyard_launcher.yard.local_cluster import LocalCluster

SERVERS = 3
LOOK_S = 0.005
SETTLE_S = 1.5
"""For so long steps go on before the next process leaves; and a server's leaving is over by then."""
LEFT_S_MAX = 40.0
MEMBERS = ("worker", "server")
MODES = {
    "async": {},
    "sync": {"job.consistency.mode": "sync", "job.consistency.logical_ranks": 2},
}


class NotLeft(Exception):
    """A process has not left in time, or the counts are wrong."""


class Worker:
    def __init__(self, program: Program) -> None:
        self._program = program
        program.await_ready()
        self.times: list[float] = []
        self.samples: list[int] = []
        self.left_s = 0.0

    @property
    def pid(self) -> int:
        return self._program.pid

    def look(self) -> None:
        self._take(self._program.ask("took"))

    def finish(self) -> dict[str, Any]:
        answer = self._program.ask("finish")
        self._take(answer)
        return answer

    def stop(self) -> None:
        self._program.stop()

    def _take(self, answer: dict[str, Any]) -> None:
        self.times += answer["times"]
        self.samples += answer["samples"]
        self.left_s = answer["left_s"]


class Yard:
    """A local yard that restarts its processes. One worker stays; `samples`: what the others have computed."""

    def __init__(self, cluster: LocalCluster, start: Callable[[], Worker]) -> None:
        self._cluster = cluster
        self.start = start
        self.samples: list[int] = []
        self.stayer = start()

    def look(self) -> None:
        self._cluster.poll()
        self._cluster.check()
        self.stayer.look()
        time.sleep(LOOK_S)

    def settle(self) -> None:
        until = time.monotonic() + SETTLE_S
        while time.monotonic() < until:
            self.look()

    def await_true(self, is_so: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + LEFT_S_MAX
        while not is_so():
            if time.monotonic() > until:
                raise NotLeft(f"{what} within {LEFT_S_MAX:g} s")
            self.look()

    def signal_server(self, number: int) -> float:
        process = next(each for each in self._cluster.state.processes if each.name == f"server-{number}")
        os.kill(process.pid, signal.SIGTERM)
        return time.monotonic()

    def finish(self, mode: str) -> int:
        """Checks the counts. Returns how many samples were computed more than once."""
        answer = self.stayer.finish()
        computed = self.samples + self.stayer.samples
        wanted = answer["step"] if mode == "sync" else len(set(computed))
        if not answer["low"] == answer["high"] == wanted:
            raise NotLeft(f"parameters from {answer['low']} to {answer['high']}, and not {wanted}")
        return len(computed) - len(set(computed))


@contextmanager
def yard(mode: str, workers: int) -> Iterator[Yard]:
    given = {
        "yard.servers": SERVERS,
        "yard.workers": 1,
        "yard.coordinator_port": 0,
        "yard.restarts_max": 1_000,
        "yard.restarts_window_ms": 1_000,
    }
    with tempfile.TemporaryDirectory(prefix="shardyard-bench-") as name, Programs() as programs:
        cluster = LocalCluster(configuration.load(None, {}, given).settings, Path(name), tied=True)
        try:
            cluster.start(stop=threading.Event())
            environment = {"SHARDYARD_COORDINATOR": cluster.coordinator, "OMP_NUM_THREADS": "1"}
            settings = {"job.workers_expected": workers, "job.partitions": 6, **MODES[mode]}
            options = ["--settings", json.dumps(settings)]
            yield Yard(
                cluster,
                lambda: Worker(programs.start("shardyard.leaving", *options, environment=environment)),
            )
        finally:
            cluster.stop()


def drain_workers(mode: str, times: int) -> tuple[list[Figures], int]:
    found: list[Figures] = []
    with yard(mode, 1) as made:
        for number in range(times):
            leaver = made.start()
            made.settle()
            os.kill(leaver.pid, signal.SIGTERM)
            at = time.monotonic()

            def has_left(leaver: Worker = leaver) -> bool:
                leaver.look()
                return bool(leaver.left_s)

            made.await_true(has_left, "a worker has not left")
            made.await_true(lambda: made.stayer.times[-1] > leaver.left_s, "no step of the other worker")  # noqa: B023
            after = next(each for each in made.stayer.times if each > leaver.left_s)
            found.append({"next_step_s": after - at, "left_s": leaver.left_s - at})
            print(f"worker {number + 1}/{times}, {mode}: " + ", ".join(f"{k} {v:.3f}" for k, v in found[-1].items()))
            made.samples += leaver.samples
            leaver.stop()
        return found, made.finish(mode)


def drain_servers(times: int) -> tuple[list[Figures], int]:
    found: list[Figures] = []
    with yard("async", 1) as made:
        for number in range(times):
            made.settle()
            at = made.signal_server(number % SERVERS)
            made.settle()
            made.await_true(lambda: made.stayer.times[-1] > at + SETTLE_S, "no step of a worker")  # noqa: B023
            steps = [each for each in made.stayer.times if at <= each]
            ends = np.array([at, *steps])
            longest = int(np.argmax(np.diff(ends)))
            found.append({"next_step_s": float(ends[longest + 1] - at), "longest_s": float(np.max(np.diff(ends)))})
            print(f"server {number + 1}/{times}: " + ", ".join(f"{k} {v:.3f}" for k, v in found[-1].items()))
        return found, made.finish("async")


def main() -> None:
    parser = options_of(__doc__, pairs=1)
    parser.add_argument("--times", type=int, default=20, help="how many workers and servers leave, one by one (20)")
    parser.add_argument("--members", nargs="+", choices=MEMBERS, default=list(MEMBERS), help="which of them leave")
    options = parser.parse_args()
    raw: dict[str, Any] = {}
    twice = 0
    for mode in MODES if "worker" in options.members else ():
        raw[f"worker, {mode}"], again = drain_workers(mode, options.times)
        twice += again
    if "server" in options.members:
        raw["server"], again = drain_servers(options.times)
        twice += again
    for name, found in raw.items():
        p50, p99 = np.percentile(column(found, "next_step_s"), [50, 99])
        print(f"{name}: p50 {p50:.3g} s, p99 {p99:.3g} s until the others' next step (n {len(found)})")
    print(f"samples computed twice: {twice}")
    bars = {f"shardyard, {name}": column(found, "next_step_s") for name, found in raw.items()}
    panels = [Panel("from SIGTERM until the others' next step", "s", bars=bars)]
    report("leaving", {**raw, "computed twice": twice}, {}, panels=panels, folder=options.figures)


if __name__ == "__main__":
    main()
