"""One to eight workers and one to four servers on this machine: what grows, and what does not.

    make bench BENCH=scaling            (with options: ARGS="--seconds 1")

Two kinds of asynchronous steps: 16 MiB of gradients pushed and as many parameters pulled, without any computation in
the workers; and the multilayer perceptron 784-128-10 with batches of 64. Steps a second of all workers together, what
they moved, what of it went over the loopback interface, and the CPU seconds of all processes per GB moved. The numbers
of the first kind are checked after each measurement; the loss of the second must fall.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np

from harness.measuring.pairs import Figures, significant
from harness.measuring.report import Panel, options_of, report
from harness.processes.sides import Measured, Side, shardyard_side
from harness.workloads.training import TASKS, check_falls

SERVERS = (1, 2, 4)
WORKERS = (1, 2, 4, 8)
TENSORS = 16
ELEMENTS = 1 << 18
PAYLOAD_BYTES = TENSORS * ELEMENTS * 4
WARM_S = 1.0
Table = dict[str, Figures]
"""By 'S servers, W workers'."""


def figures(measured: Measured, steps: str, step_bytes: int) -> Figures:
    moved_gb = 2 * step_bytes * measured.total(steps) / 1e9
    return {
        "steps_per_s": sum(answer[steps] / answer["seconds"] for answer in measured.answers),
        "gb_moved": moved_gb,
        "gb_loopback": measured.loopback_bytes / 1e9,
        "cpu_s_per_gb": (measured.total("cpu_s") + measured.service_cpu_s) / moved_gb,
    }


def measure_rounds(servers: int, seconds: float) -> Table:
    shape = ("--tensors", str(TENSORS), "--elements", str(ELEMENTS))
    found: Table = {}
    with shardyard_side("shardyard.rounds", *shape, workers=max(WORKERS), servers=servers) as side:
        side.ask("measure", seconds=WARM_S)
        for workers in WORKERS:
            measured = side.measure("measure", workers=workers, seconds=seconds)
            check(side)
            found[key(servers, workers)] = show("16 MiB", servers, workers, figures(measured, "rounds", PAYLOAD_BYTES))
    return found


def check(side: Side) -> None:
    counts = np.sum([answer["counts"] for answer in side.ask("counted")], axis=0)
    side.ask("check", workers=1, counts=counts.tolist())


def measure_training(servers: int, seconds: float) -> Table:
    step_bytes = 4 * sum(
        (wide + 1) * narrow for wide, narrow in zip(TASKS["mlp"].widths, TASKS["mlp"].widths[1:], strict=False)
    )
    found: Table = {}
    with shardyard_side("shardyard.training", "--task", "mlp", workers=max(WORKERS), servers=servers) as side:
        losses = [side.ask("train", seconds=WARM_S)[0]["first_loss"]]
        for workers in WORKERS:
            measured = side.measure("train", workers=workers, seconds=seconds)
            losses.append(measured.answers[0]["loss"])
            found[key(servers, workers)] = show("mlp", servers, workers, figures(measured, "steps", step_bytes))
        check_falls("mlp", losses)
    return found


def key(servers: int, workers: int) -> str:
    return f"{servers} servers, {workers} workers"


def show(kind: str, servers: int, workers: int, found: Figures) -> Figures:
    shown = ", ".join(f"{name} {significant(value):g}" for name, value in found.items())
    print(f"{kind}, {key(servers, workers)}: {shown}", flush=True)
    return found


def lines(table: Table, figure: str) -> Mapping[str, Mapping[float, float]]:
    return {
        f"{servers} servers" if servers > 1 else "1 server": {
            workers: table[key(servers, workers)][figure] for workers in WORKERS
        }
        for servers in SERVERS
    }


def main() -> None:
    parser = options_of(__doc__, pairs=1)
    parser.add_argument("--seconds", type=float, default=2.5, help="length of a measurement (2.5)")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    raw: dict[str, Table] = {"16 MiB": {}, "mlp": {}}
    for servers in SERVERS:
        raw["16 MiB"] |= measure_rounds(servers, options.seconds)
        raw["mlp"] |= measure_training(servers, options.seconds)
    panels = [
        Panel(f"{kind}: {title}", unit, lines=lines(table, figure), x="workers")
        for kind, table in raw.items()
        for title, unit, figure in (
            ("steps of all workers", "steps/s", "steps_per_s"),
            ("CPU of all processes", "s per GB moved", "cpu_s_per_gb"),
        )
    ]
    report("scaling", raw, {}, panels=panels, folder=options.figures)


if __name__ == "__main__":
    main()
