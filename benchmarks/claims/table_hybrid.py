"""Hybrid mode against synchronous steps: what it gains when calls are slow, and what it loses in quality.

hybrid_speed: steps a second with a table, where each call to a server takes 5 ms more, over those of a synchronous job
whose forwards look rows up. hybrid_speed_ahead: over those of a synchronous job that has look_ahead too. One worker,
one server, one thread a process. Before the measurement, the rows of all sides after some steps equal those of a plain
model. hybrid_gap: the recommender's AUC on the day after its last training day, of a synchronous job minus that of a
hybrid one, in hundredths, a pair for each seed; two workers, two servers.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from claims import Found
from claims.table_steps import CALL_MS, one_measurement, verified
from harness.measuring.pairs import Figures, column, measure_pairs, ratios
from harness.measuring.report import Panel
from harness.processes.sides import Side, shardyard_side
from harness.workloads.rows import Task

ROOT = Path(__file__).resolve().parent.parent.parent
FIGURE = "tables-hybrid"
SYNC, SYNC_AHEAD = "shardyard, sync, rows looked up", "shardyard, sync, look_ahead"
HYBRID = "shardyard, hybrid, rows along"
MODES: Mapping[str, Mapping[str, object]] = {
    SYNC: {"job.consistency.mode": "sync"},
    SYNC_AHEAD: {"job.consistency.mode": "sync"},
    HYBRID: {"job.consistency.mode": "hybrid"},
}
TASK = Task(rows=100_000, ids=512)
"""The time of a step is that of its calls, and little else."""
AUC = re.compile(r"AUC ([0-9.]+) of [0-9,]+ clicks of the day after")
RUN_S_MAX = 900
DAYS, CLICKS = 3, 40_000


@contextmanager
def side_of(name: str, task: Task) -> Iterator[Side]:
    arguments = [*task.arguments(), "--delay-ms", str(CALL_MS), *(() if name == SYNC else ("--ahead",))]
    settings = {"job.partitions": 1, "job.consistency.logical_ranks": 1, **MODES[name]}
    with shardyard_side("shardyard.rows", *arguments, workers=1, settings=settings, tls=False) as side:
        with verified(side, task) as ready:
            yield ready


def measure_speed(task: Task, pairs: int, seconds: float) -> dict[str, list[Figures]]:
    with ExitStack() as stack:
        ready = {name: stack.enter_context(side_of(name, task)) for name in MODES}
        return measure_pairs({name: partial(one_measurement, side, seconds) for name, side in ready.items()}, pairs)


class Recommender:
    """Runs the whole example, each time with the next seed."""

    def __init__(self, mode: Mapping[str, object], days: int, clicks: int) -> None:
        self._mode, self._days, self._clicks = mode, days, clicks
        self._seed = 0

    def __call__(self) -> Figures:
        self._seed += 1
        given = [f"{name}={value}" for name, value in self._mode.items()]
        with tempfile.TemporaryDirectory(prefix="shardyard-bench-") as folder:
            given += ["yard.coordinator_port=0", f"yard.state={folder}"]
            command = [sys.executable, "-m", "shardyard_launcher.cli", "run", "-c", "configs/hybrid.yaml"]
            command += [word for setting in given for word in ("--set", setting)]
            command += ["examples/recommender/train.py", "--seed", str(self._seed), "--days", str(self._days)]
            command += ["--clicks", str(self._clicks)]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=RUN_S_MAX, check=True)
        found = AUC.findall(done.stdout)
        assert len(found) == 1, done.stdout[-2000:]
        return {"auc_percent": 100 * float(found[0])}


def measure_quality(pairs: int, days: int, clicks: int) -> dict[str, list[Figures]]:
    return measure_pairs({name: Recommender(MODES[name], days, clicks) for name in (SYNC, HYBRID)}, pairs)


def differences(over: list[Figures], under: list[Figures], figure: str) -> list[float]:
    return [a - b for a, b in zip(column(over, figure), column(under, figure), strict=True)]


def measure(pairs: int, seconds: float, clicks: int) -> Found:
    speed = measure_speed(TASK, pairs, seconds)
    quality = measure_quality(pairs, DAYS, clicks)
    found = {
        "hybrid_speed": ratios(speed[HYBRID], speed[SYNC], "steps_per_s"),
        "hybrid_speed_ahead": ratios(speed[HYBRID], speed[SYNC_AHEAD], "steps_per_s"),
        "hybrid_gap": differences(quality[SYNC], quality[HYBRID], "auc_percent"),
    }
    panels = [
        Panel(f"{CALL_MS} ms a call, 512 ids", "steps/s", {n: column(f, "steps_per_s") for n, f in speed.items()}),
        Panel("A recommender, the day after", "AUC, %", {n: column(f, "auc_percent") for n, f in quality.items()}),
    ]
    return Found({"speed": speed, "quality": quality}, found, {FIGURE: panels})
