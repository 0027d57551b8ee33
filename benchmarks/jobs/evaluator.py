"""What an evaluator costs training: steps a second of a job, alone and with one beside it that reads every second.

    make bench BENCH=evaluator           (with options: ARGS="--pairs 3 --mib 16 --seconds 5")

A yard of processes, one worker that takes steps on a model of so many MiB, asynchronous and synchronous. Measured pair
by pair are the job alone, with an evaluator that reads a version a second, and with one that computes on one core for
--compute-ms after each, as an evaluation does that shares the machine. `evaluator_slowdown` is the time of a step
beside the one that reads, over that of the job alone; `..._computing`, beside the one that computes too.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable
from functools import partial

from harness.measuring.pairs import Figures, column, measure_pairs, ratios
from harness.measuring.report import Panel, options_of, report
from harness.processes.programs import Program, Programs
from harness.processes.sides import shardyard_side

ALONE, READS, COMPUTES = "alone", "an evaluator reads", "an evaluator reads and computes"
MODES = ("async", "sync")
ANSWER_S_MAX = 60
MIB = 1 << 20


class NothingRead(Exception):
    """The evaluator read no version, or the job took no step: there is nothing to compare."""


def measure(worker: Program, evaluator: Program, seconds: float, every_s: float, compute_ms: float | None) -> Figures:
    """`compute_ms`: after each version; None: without an evaluator."""
    worker.ask("took")
    if compute_ms is not None:
        evaluator.send("read", seconds=seconds, every_s=every_s, compute_ms=compute_ms)
    begun = time.monotonic()
    time.sleep(seconds)
    ended = time.monotonic()
    times = worker.ask("took")["times"]
    read = {} if compute_ms is None else evaluator.receive(seconds + ANSWER_S_MAX)
    steps = sum(begun <= each < ended for each in times)
    if not steps or (compute_ms is not None and not read["versions"]):
        raise NothingRead(f"{steps} steps in {seconds} s, and {read}")
    return {"steps_per_s": steps / (ended - begun), **{name: float(value) for name, value in read.items()}}


def run(mode: str, pairs: int, mib: int, seconds: float, every_s: float, compute_ms: float) -> dict[str, list[Figures]]:
    settings = {"job.consistency.mode": mode, "log.level": "error"}
    with (
        shardyard_side("shardyard.steps", "--bytes", str(mib * MIB), workers=1, settings=settings) as side,
        Programs() as programs,
    ):
        environment = {"SHARDYARD_COORDINATOR": side.coordinator}
        given = json.dumps({"log.level": "error"})
        evaluator = programs.start("shardyard.evaluator", "--settings", given, environment=environment)
        programs.await_ready()
        (worker,) = side.workers
        # what it imports, and memory that it takes once, are not what a version costs
        evaluator.ask("read", seconds=2 * every_s, every_s=every_s, compute_ms=0.0, timeout_s=ANSWER_S_MAX)
        sides: dict[str, Callable[[], Figures]] = {
            name: partial(measure, worker, evaluator, seconds, every_s, compute)
            for name, compute in ((ALONE, None), (READS, 0.0), (COMPUTES, compute_ms))
        }
        found = measure_pairs(sides, pairs)
        evaluator.end()
        evaluator.stop()
        return found


def main() -> None:
    parser = options_of(__doc__, pairs=7)
    parser.add_argument("--mib", type=int, default=64, help="of the model (64)")
    parser.add_argument("--seconds", type=float, default=10.0, help="of a measurement (10)")
    parser.add_argument("--every-s", type=float, default=1.0, help="from one version to the next (1)")
    parser.add_argument("--compute-ms", type=float, default=200.0, help="of an evaluation (200)")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES, help="(async sync)")
    given = parser.parse_args()
    # so that processes are ended then too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    raw, found, panels = {}, {}, []
    for mode in given.modes:
        raw[mode] = measured = run(mode, given.pairs, given.mib, given.seconds, given.every_s, given.compute_ms)
        name = "evaluator_slowdown" if mode == MODES[0] else f"evaluator_slowdown_{mode}"
        found[name] = ratios(measured[ALONE], measured[READS], "steps_per_s")
        found[f"{name}_computing"] = ratios(measured[ALONE], measured[COMPUTES], "steps_per_s")
        bars = {f"shardyard {each}": column(figures, "steps_per_s") for each, figures in measured.items()}
        panels.append(Panel(f"{mode}, {given.mib} MiB", "steps/s", bars))
    report("evaluator", raw, found, panels=panels, folder=given.figures)


if __name__ == "__main__":
    main()
