"""The strategies of a job against what each is compared with: steps a second of two workers together.

    make bench BENCH=strategies            (with options: ARGS="--pairs 3 --seconds 2")

The models and the checks of `training`. multi_worker_mirrored against DistributedDataParallel in its fastest form, both
over gloo. Every process has one thread.
"""

from __future__ import annotations

import os

from exchange.training import ONE_THREAD, WORKERS, run, show
from harness.measuring.pairs import Figures, ratios
from harness.measuring.report import options_of
from harness.processes.sides import shardyard_side
from harness.workloads.training import TASKS

MIRRORED = "multi_worker_mirrored"


def main() -> None:
    parser = options_of(__doc__, pairs=7)
    parser.add_argument("--seconds", type=float, default=4.0, help="length of a measurement (4)")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), help="the models (both)")
    options = parser.parse_args()
    os.environ[ONE_THREAD] = "1"
    raw: dict[str, list[Figures]] = {}
    found: dict[str, list[float]] = {}
    for task in options.tasks:
        pairs = options.pairs if task == "mlp" else max(1, options.pairs // 2)
        settings = {"job.strategy": MIRRORED}
        ours = shardyard_side("shardyard.training", "--task", task, workers=WORKERS, settings=settings, tls=True)
        results = run(task, "sync", pairs, options.seconds, ours, MIRRORED)
        raw |= results
        peer, mirrored = results.values()
        found[f"all_reduce_{task}"] = ratios(mirrored, peer, "steps_per_s")
    show("strategies", options.tasks, raw, found, options.figures)


if __name__ == "__main__":
    main()
