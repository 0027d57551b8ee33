"""What faults, checkpoints and logs cost.

    make bench BENCH=reliability        (with options: ARGS="--kills 3 --mib 8 --pairs 1 --seconds 5")

One worker takes steps on leased data, on three servers, all of them processes of a local yard, which are started again
when they die. `recovery`: a server is killed (kill -9), again and again; from the kill to the first step that was
acknowledged after it, on all partitions, and of that the time until the coordinator noticed. `coordinator`: the same,
with the coordinator, for which a worker waits when it needs another data shard, of 20 steps. `pause`: how long steps
take while a checkpoint is written, and while none is, and what that costs of a minute. `locks`: for how long a
partition is locked, in one process, with checkpoints and without. `overhead`: steps a second, with a checkpoint every
minute, and with none. `log`: steps a second, with a log and with checkpoints alone.

Every parameter counts the samples: at the end of each measurement all of them must say how many were acknowledged.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from harness.measuring.pairs import Figures, column, measure_pairs, ratios, spread
from harness.measuring.report import Panel, options_of, report
from harness.processes.programs import Program, Programs
from harness.workloads.locks import longest_locks
from shardyard.config import configuration
from shardyard_launcher.yard.local_cluster import LocalCluster

SERVERS = 3
MIB = 1 << 20
SMALL_BYTES = 64 * 1024
DURABILITIES = ("checkpoint", "wal")
CHECKPOINT_S = 2
"""From one checkpoint to the next while servers are killed."""
DEFAULT_S = 60
PAUSE_S = 0.5
"""For so long after a checkpoint steps may still take longer than others."""
LOOK_S = 0.005
SETTLE_S = 3.0
"""After a recovery, before the next kill: what was taken back has been computed again."""
RECOVERED_S_MAX = 60.0
NOTICED = ("back to checkpoint", "its log is read")


class NotRecovered(Exception):
    """No step was acknowledged in time."""


class Yard:
    """A local yard that restarts its processes, and its one worker."""

    def __init__(self, cluster: LocalCluster, worker: Program, folder: Path) -> None:
        self._cluster = cluster
        self._worker = worker
        self._folder = folder
        self.times: list[float] = []

    def look(self) -> None:
        """Restarts dead processes, and reads the worker's steps. Raises NotRecovered."""
        self._cluster.poll()
        self._cluster.check()
        answer = self._worker.ask("took")
        if answer["failure"]:
            raise NotRecovered(answer["failure"])
        self.times += answer["times"]

    def run(self, seconds: float) -> list[float]:
        """Returns the times of the steps of the next `seconds`."""
        begin = time.monotonic()
        while time.monotonic() < begin + seconds:
            self.look()
            time.sleep(LOOK_S)
        return [each for each in self.times if each >= begin]

    def kill(self, name: str) -> tuple[float, float]:
        """kill -9 of a process of this yard: when, by the monotonic and by the wall clock."""
        process = next(each for each in self._cluster.state.processes if each.name == name)
        os.kill(process.pid, signal.SIGKILL)
        return time.monotonic(), time.time()

    def gap_after(self, at: float) -> float:
        """The end of the longest gap between steps that lasts beyond `at` or begins after it, once steps go on."""
        until = time.monotonic() + RECOVERED_S_MAX
        while True:
            self.look()
            before = [each for each in self.times if each < at][-1:]
            after = [*before, *(each for each in self.times if each >= at)]
            gaps = [(end - begin, end) for begin, end in pairwise(after)]
            waiting = time.monotonic() - after[-1] if after else 0.0
            # the gap is over when steps have gone on for longer than it takes to notice a death
            if gaps and max(gaps)[0] > waiting and time.monotonic() - max(gaps)[1] > SETTLE_S:
                return max(gaps)[1]
            if time.monotonic() > until:
                raise NotRecovered(f"no step within {RECOVERED_S_MAX:g} s of a kill")
            time.sleep(LOOK_S)

    def noticed_after(self, at: float) -> float | None:
        """When the coordinator first logged a death after that time (wall clock)."""
        log = self._folder / "logs" / "coordinator.log"
        for line in log.read_text(encoding="utf-8").splitlines():
            if not line.startswith("{"):
                continue
            entry = json.loads(line)
            when = datetime.fromisoformat(entry["time"]).timestamp()
            if when >= at and any(words in entry["message"] for words in NOTICED):
                return when
        return None

    def finish(self) -> None:
        answer = self._worker.ask("finish")
        if answer["failure"]:
            raise NotRecovered(answer["failure"])


@contextmanager
def yard(nbytes: int, **job: object) -> Iterator[Yard]:
    """`job`: its settings, "." written as "__"."""
    given = {
        "yard.servers": SERVERS,
        "yard.workers": 1,
        "yard.coordinator_port": 0,
        "yard.restarts_max": 1_000,
        "yard.restarts_window_ms": 1_000,
        "log.format": "json",
    }
    settings = {f"job.{name.replace('__', '.')}": value for name, value in job.items()}
    with tempfile.TemporaryDirectory(prefix="shardyard-bench-") as name, Programs() as programs:
        cluster = LocalCluster(configuration.load(None, {}, given).settings, Path(name), tied=True)
        try:
            cluster.start(stop=threading.Event())
            environment = {"SHARDYARD_COORDINATOR": cluster.coordinator, "OMP_NUM_THREADS": "1"}
            options = ["--bytes", str(nbytes), "--settings", json.dumps({"job.partitions": 8, **settings})]
            worker = programs.start("shardyard.steps", *options, environment=environment)
            worker.await_ready()
            made = Yard(cluster, worker, Path(name))
            yield made
            made.finish()
        finally:
            cluster.stop()


# ---- what is measured


def recovery(durability: str, kills: int, nbytes: int) -> list[Figures]:
    """Kills the servers in turn, while a checkpoint is taken every few seconds."""
    found: list[Figures] = []
    with yard(nbytes, durability=durability, checkpoint__every_s=CHECKPOINT_S) as made:
        made.run(2 * CHECKPOINT_S)
        for number in range(kills):
            at, wall = made.kill(f"server-{number % SERVERS}")
            end = made.gap_after(at)
            noticed = made.noticed_after(wall)
            if noticed is None:
                raise NotRecovered("the coordinator has not noticed a death")
            figures = {"total_s": end - at, "detection_s": noticed - wall, "recovery_s": end - at - (noticed - wall)}
            found.append(figures)
            print(f"kill {number + 1}/{kills}, {durability}: " + ", ".join(f"{k} {v:.2f}" for k, v in figures.items()))
    return found


def coordinator_restart(kills: int, nbytes: int) -> list[Figures]:
    """`gap_ms`: the longest time without a step from the kill until a coordinator is there again, and a while after."""
    found: list[Figures] = []
    with yard(nbytes) as made:
        usual = 1e3 * float(np.max(np.diff(made.run(3.0))))
        for number in range(kills):
            at, _ = made.kill("coordinator")
            steps = [each for each in made.run(2 * SETTLE_S) if each >= at]
            found.append({"gap_ms": 1e3 * float(np.max(np.diff([at, *steps]))), "usual_gap_ms": usual})
            print(f"kill {number + 1}/{kills} of the coordinator: longest gap {found[-1]['gap_ms']:.1f} ms")
    return found


def pause(nbytes: int, seconds: float) -> Figures:
    """Compares steps that end while a checkpoint is written with the other steps of the same run."""
    with tempfile.TemporaryDirectory(prefix="shardyard-bench-") as name:
        settings = {"checkpoint__url": name, "checkpoint__every_s": CHECKPOINT_S}
        with yard(nbytes, **settings) as made, Watch(Path(name, "steps")) as watch:
            times = np.array(made.run(seconds))
        each_ms = 1e3 * np.diff(times)
        during = np.array(
            [any(begin <= end and start <= finish for begin, finish in watch.spans) for start, end in pairwise(times)]
        )
        if not watch.spans or not during.any():
            raise NotRecovered(f"no step in {len(watch.spans)} checkpoints; measure for longer")
        usual_ms = float(np.percentile(each_ms[~during], 50))
        near = np.array(
            [
                any(begin <= end and start <= finish + PAUSE_S for begin, finish in watch.spans)
                for start, end in pairwise(times)
            ]
        )
        lost_ms = float(np.sum(each_ms[near] - usual_ms)) / len(watch.spans)
        return {
            "lost_ms": lost_ms,
            "lost_share": lost_ms / (1e3 * DEFAULT_S),
            "p50_ms": usual_ms,
            "p99_ms": float(np.percentile(each_ms[~during], 99)),
            "during_p50_ms": float(np.percentile(each_ms[during], 50)),
            "during_p99_ms": float(np.percentile(each_ms[during], 99)),
            "checkpoint_ms": 1e3 * float(np.median([finish - begin for begin, finish in watch.spans])),
            "checkpoint_bytes": float(watch.nbytes),
        }


class Watch:
    """Records when checkpoints in a folder begin and end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.spans: list[tuple[float, float]] = []
        self.nbytes = 0
        """Of the newest whole one."""

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        begun: dict[str, float] = {}
        while not self._stop.wait(LOOK_S):
            for found in sorted(self._folder.glob("*")):
                if found.name not in begun:
                    begun[found.name] = time.monotonic()
                elif begun[found.name] and (found / "manifest.json").exists():
                    self.spans.append((begun[found.name], time.monotonic()))
                    begun[found.name] = 0.0
                    self.nbytes = sum(file.stat().st_size for file in found.iterdir())


def rate(nbytes: int, seconds: float, **job: object) -> Figures:
    with yard(nbytes, **job) as made:
        made.run(1.0)
        return {"steps_per_s": len(made.run(seconds)) / seconds}


# ---- all of it


def percentiles(values: Sequence[float]) -> str:
    p50, p99 = np.percentile(values, [50, 99])
    return f"p50 {p50:.3g}, p99 {p99:.3g} (n {len(values)})"


def main() -> None:
    parser = options_of(__doc__, pairs=3)
    parser.add_argument(
        "--kills", type=int, default=20, help="of servers, for each durability, and the coordinator (20)"
    )
    parser.add_argument("--mib", type=int, default=100, help="MiB of parameters where servers are killed (100)")
    parser.add_argument("--seconds", type=float, default=65.0, help="length of a measurement of steps a second (65)")
    parser.add_argument("--durability", nargs="+", choices=DURABILITIES, default=list(DURABILITIES))
    options = parser.parse_args()
    nbytes = options.mib * MIB
    raw: dict[str, Any] = {}
    for durability in options.durability:
        raw[f"recovery, {durability}"] = recovery(durability, options.kills, nbytes)
    raw["coordinator restart"] = coordinator_restart(options.kills, SMALL_BYTES)
    raw["pause"] = [pause(nbytes, options.seconds)]
    raw["locks"] = [longest_locks(nbytes, checkpoints) for checkpoints in (False, True)]
    sides: dict[str, Callable[[], Figures]] = {
        "never": lambda: rate(nbytes, options.seconds, checkpoint__url="never"),
        "every minute": lambda: rate(nbytes, options.seconds, checkpoint__every_s=DEFAULT_S),
    }
    raw |= measure_pairs(sides, options.pairs)
    found = {"checkpoint_overhead": ratios(raw["every minute"], raw["never"], "steps_per_s")}
    if "wal" in options.durability:
        for name, size in (("small", SMALL_BYTES), ("large", nbytes)):
            modes: dict[str, Callable[[], Figures]] = {
                f"{durability}, {name}": lambda durability=durability, size=size: rate(  # type: ignore[misc]
                    size, options.seconds / 4, durability=durability
                )
                for durability in DURABILITIES
            }
            results = measure_pairs(modes, options.pairs)
            raw |= results
            found[f"wal_{name}"] = ratios(results[f"wal, {name}"], results[f"checkpoint, {name}"], "steps_per_s")
    for durability in options.durability:
        for figure in ("total_s", "detection_s", "recovery_s"):
            print(f"{durability}, {figure}: {percentiles(column(raw[f'recovery, {durability}'], figure))}")
    print(f"coordinator restart: {spread(column(raw['coordinator restart'], 'gap_ms'))} ms without a step")
    print(f"pause: {raw['pause'][0]}")
    print(f"locks, without and with checkpoints: {raw['locks']}")
    bars = {f"shardyard, {d}": column(raw[f"recovery, {d}"], "total_s") for d in options.durability}
    panels = [
        Panel("from the kill of a server to the next step", "s", bars=bars),
        Panel("steps, one worker", "steps/s", bars={n: column(raw[n], "steps_per_s") for n in sides}),
    ]
    report("reliability", raw, found, panels=panels, folder=options.figures)


if __name__ == "__main__":
    main()
