"""One to eight workers and one to four servers on this machine: what grows, and what does not.

    make bench BENCH=scaling            (with options: ARGS="--seconds 1")

Two kinds of asynchronous steps: 16 MiB of gradients pushed and as many parameters pulled, without any computation in
the workers; and the multilayer perceptron 784-128-10 with batches of 64. Steps a second of all workers together, what
they moved, what of it went over the loopback interface, and the CPU seconds of all processes per GB moved. The numbers
of the first kind are checked after each measurement; the loss of the second must fall.

Then, pair by pair, the perceptron's steps with two servers over those with one: `servers` with one worker,
`servers_2_workers` with two.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np

from harness.measuring.pairs import Figures, measure_pairs, ratios, significant
from harness.measuring.report import Panel, conclude, draw, options_of
from harness.processes.sides import Measured, Side, shardyard_side
from harness.workloads.training import TASKS, check_falls

SERVERS = (1, 2, 4)
WORKERS = (1, 2, 4, 8)
TENSORS = 16
ELEMENTS = 1 << 18
PAYLOAD_BYTES = TENSORS * ELEMENTS * 4
WARM_S = 1.0
PARTS = ("servers", "grid")
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


def measure_servers(workers: int, pairs: int, seconds: float) -> dict[str, list[Figures]]:
    """Compares one server with two."""

    def measure(side: Side) -> Figures:
        answers = side.ask("train", seconds=seconds)
        return {"steps_per_s": sum(answer["steps"] / answer["seconds"] for answer in answers)}

    with ExitStack() as stack:
        sides: dict[str, Callable[[], Figures]] = {}
        for servers in (1, 2):
            opened = shardyard_side("shardyard.training", "--task", "mlp", workers=workers, servers=servers)
            side = stack.enter_context(opened)
            side.ask("train", seconds=WARM_S)
            sides[key(servers, workers)] = partial(measure, side)
        return measure_pairs(sides, pairs)


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
    parser = options_of(__doc__, pairs=7)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what is measured (all)")
    parser.add_argument("--seconds", type=float, default=2.5, help="length of a measurement (2.5)")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    raw: dict[str, Any] = {}
    found: dict[str, list[float]] = {}
    if "servers" in options.parts:
        for name, workers in (("servers", 1), ("servers_2_workers", 2)):
            raw[name] = measure_servers(workers, options.pairs, options.seconds)
            one, two = raw[name].values()
            found[name] = ratios(two, one, "steps_per_s")
    if "grid" in options.parts:
        panels = measure_grid(raw, options.seconds)
        print(f"figure: {draw(panels, options.figures / 'scaling.png')}")
    conclude("scaling", raw, found)


def measure_grid(raw: dict[str, Any], seconds: float) -> list[Panel]:
    tables: dict[str, Table] = {"16 MiB": {}, "mlp": {}}
    for servers in SERVERS:
        tables["16 MiB"] |= measure_rounds(servers, seconds)
        tables["mlp"] |= measure_training(servers, seconds)
    raw |= tables
    return [
        Panel(f"{kind}: {title}", unit, lines=lines(table, figure), x="workers")
        for kind, table in tables.items()
        for title, unit, figure in (
            ("steps of all workers", "steps/s", "steps_per_s"),
            ("CPU of all processes", "s per GB moved", "cpu_s_per_gb"),
        )
    ]


if __name__ == "__main__":
    main()
