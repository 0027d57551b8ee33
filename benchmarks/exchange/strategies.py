"""The strategies of a job against what each is compared with: steps a second of two workers together.

    make bench BENCH=strategies            (with options: ARGS="--pairs 3 --seconds 2")

The models and the checks of `training`. multi_worker_mirrored against DistributedDataParallel in its fastest form, both
over gloo. Every process has one thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

from exchange.training import ONE_THREAD, PEERS, WORKERS, Trainers, their_side
from harness.measuring.pairs import Figures, column, measure_pairs, ratios, spread
from harness.measuring.report import Panel, options_of, report
from harness.processes.sides import shardyard_side
from harness.workloads.training import TASKS


def run(task: str, pairs: int, seconds: float) -> dict[str, list[Figures]]:
    peer, program, servers, arguments = PEERS[task, "sync"]
    settings = {"job.strategy": "multi_worker_mirrored"}
    with ExitStack() as stack:
        ours = shardyard_side("shardyard.training", "--task", task, workers=WORKERS, settings=settings, tls=True)
        both = {
            peer: stack.enter_context(their_side(task, program, servers, arguments)),
            "multi_worker_mirrored": stack.enter_context(ours),
        }
        trainers = {f"{name}, {task}": Trainers(side, task, "sync", name) for name, side in both.items()}
        sides: dict[str, Callable[[], Figures]] = {
            name: partial(each.measure, seconds) for name, each in trainers.items()
        }
        results = measure_pairs(sides, pairs)
        for each in trainers.values():
            each.check_falls()
        return results


def main() -> None:
    parser = options_of(__doc__, pairs=7)
    parser.add_argument("--seconds", type=float, default=4.0, help="length of a measurement (4)")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), help="the models (both)")
    options = parser.parse_args()
    os.environ[ONE_THREAD] = "1"
    raw: dict[str, list[Figures]] = {}
    found: dict[str, list[float]] = {}
    for task in options.tasks:
        results = run(task, options.pairs if task == "mlp" else max(1, options.pairs // 2), options.seconds)
        raw |= results
        peer, ours = results.values()
        found[f"all_reduce_{task}"] = ratios(ours, peer, "steps_per_s")
    for name, results_of in raw.items():
        print(f"{name}: {spread(column(results_of, 'steps_per_s'))} steps/s")
    panels = [
        Panel(
            f"{task}, two workers", "steps/s", bars={n: column(r, "steps_per_s") for n, r in raw.items() if task in n}
        )
        for task in options.tasks
    ]
    report("strategies", raw, found, panels=panels, folder=options.figures)


if __name__ == "__main__":
    main()
