"""The strategies of a job against what each is compared with: steps a second of two workers together.

    make bench BENCH=strategies            (with options: ARGS="--pairs 3 --seconds 2")

mlp, 25m: the models and the checks of `training`. multi_worker_mirrored against DistributedDataParallel in its fastest
form, both over gloo. recommender: a dense network and a table; multi_worker_mirrored, with the table on two servers,
against parameter_server in mode sync, with all on the same two servers; both look ahead. Before the measurement the
variables and rows of both sides are the same after some steps. pipeline, with mlp and 25m: against
torch.distributed.pipelining used bare. Every process has one thread.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np

from exchange import pipelines
from exchange.training import ONE_THREAD, WORKERS, run, show
from harness.measuring.pairs import Figures, measure_pairs, ratios
from harness.measuring.report import options_of
from harness.processes.sides import Side, shardyard_side
from harness.workloads.training import TASKS, NumbersDiffer, check_falls

MIRRORED, SERVED = "multi_worker_mirrored", "parameter_server"
RECOMMENDER = "recommender"
SERVERS = 2
VERIFIED_STEPS, WARM_STEPS = 10, 30


class Recommenders:
    """The workers of one strategy."""

    def __init__(self, side: Side, name: str) -> None:
        self._side, self._name = side, name
        side.ask("train", steps=VERIFIED_STEPS)
        with tempfile.TemporaryDirectory(prefix="shardyard-bench-") as folder:
            path = Path(folder, "values.npy")
            side.ask("save", workers=1, path=str(path))
            self.values = np.load(path)
        warm = side.ask("train", steps=WARM_STEPS)
        self._steps_per_s = min(answer["steps"] / answer["seconds"] for answer in warm)
        self._losses = [warm[0]["first_loss"]]

    def measure(self, seconds: float) -> Figures:
        answers = self._side.ask("train", steps=max(2, round(self._steps_per_s * seconds)))
        self._losses.append(sum(answer["loss"] for answer in answers) / len(answers))
        return {"steps_per_s": sum(answer["steps"] / answer["seconds"] for answer in answers)}

    def check_falls(self) -> None:
        check_falls(self._name, self._losses)


def run_recommender(pairs: int, seconds: float) -> dict[str, list[Figures]]:
    """Raises NumbersDiffer."""
    with ExitStack() as stack:
        ready = {}
        for strategy in (SERVED, MIRRORED):
            settings = {"job.strategy": strategy, "job.consistency.mode": "sync", "job.partitions": 2 * SERVERS}
            side = shardyard_side("shardyard.clicks", workers=WORKERS, servers=SERVERS, settings=settings)
            name = f"{strategy}, sync, {RECOMMENDER}"
            ready[name] = Recommenders(stack.enter_context(side), name)
        served, mirrored = ready.values()
        if not np.allclose(served.values, mirrored.values, rtol=1e-3, atol=1e-5):
            off = float(np.abs(served.values - mirrored.values).max())
            raise NumbersDiffer(f"variables and rows differ by up to {off:.3g} after {VERIFIED_STEPS} steps")
        results = measure_pairs({name: partial(each.measure, seconds) for name, each in ready.items()}, pairs)
        for each in ready.values():
            each.check_falls()
        return results


def main() -> None:
    parser = options_of(__doc__, pairs=7)
    parser.add_argument("--seconds", type=float, default=4.0, help="length of a measurement (4)")
    names = [*TASKS, RECOMMENDER]
    parser.add_argument("--tasks", nargs="+", choices=names, default=names, help="the models (all)")
    options = parser.parse_args()
    os.environ[ONE_THREAD] = "1"
    raw: dict[str, list[Figures]] = {}
    found: dict[str, list[float]] = {}
    for task in options.tasks:
        pairs = max(1, options.pairs // 2) if task == "25m" else options.pairs
        if task == RECOMMENDER:
            results = run_recommender(pairs, options.seconds)
            name = "tables_beside_replicas"
        else:
            settings = {"job.strategy": MIRRORED}
            ours = shardyard_side("shardyard.training", "--task", task, workers=WORKERS, settings=settings, tls=True)
            results = run(task, "sync", pairs, options.seconds, ours, MIRRORED)
            name = f"all_reduce_{task}"
        raw |= results
        peer, mirrored = results.values()
        found[name] = ratios(mirrored, peer, "steps_per_s")
        if task != RECOMMENDER:
            results = pipelines.run(task, pairs, options.seconds)
            raw |= results
            bare, pipelined = results.values()
            found[f"pipeline_{task}"] = ratios(pipelined, bare, "steps_per_s")
    show("strategies", options.tasks, raw, found, options.figures)


if __name__ == "__main__":
    main()
