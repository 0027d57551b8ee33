"""The strategies of a job against what each is compared with: steps a second of two workers together.

    make bench BENCH=strategies            (with options: ARGS="--pairs 3 --seconds 2")

mlp, 25m: the models and the checks of `training`.

all_reduce: multi_worker_mirrored against DistributedDataParallel in its fastest form, over gloo. machines: the same
with two workers on each of two machines, which needs root; also with gradients in fp16, by job.all_reduce and by
DistributedDataParallel's hook. pipeline: against torch.distributed.pipelining used bare. pushed: a pipeline with
job.between parameter_server, and one server, against one with the variables in the workers. central: central_storage
against parameter_server in mode sync with two servers, on one machine. recommender: a dense network and a table;
multi_worker_mirrored, with the table on two servers, against parameter_server in mode sync, with all on the same two
servers; both look ahead. Before the measurement the variables and rows of both sides are the same after some steps.
Every process has one thread. With --over-gloo our workers share no memory with each other or with servers.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np

from exchange import machines, pipelines
from exchange.training import ONE_THREAD, WORKERS, Trainers, run, show
from harness.machine.link import LinkUnavailable
from harness.measuring.pairs import Figures, measure_pairs, ratios
from harness.measuring.report import options_of
from harness.processes.sides import Side, shardyard_side
from harness.workloads.training import NumbersDiffer, check_falls

MIRRORED, SERVED, CENTRAL = "multi_worker_mirrored", "parameter_server", "central_storage"
SERVERS = 2
VERIFIED_STEPS, WARM_STEPS = 10, 30
Results = dict[str, list[Figures]]


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


def run_all_reduce(task: str, pairs: int, seconds: float, same_host: str) -> Results:
    settings = {"job.strategy": MIRRORED, "worker.same_host": same_host}
    ours = shardyard_side("shardyard.training", "--task", task, workers=WORKERS, settings=settings, tls=True)
    return run(task, "sync", pairs, seconds, ours, MIRRORED)


def run_central(pairs: int, seconds: float, same_host: str) -> Results:
    with ExitStack() as stack:
        ready = {}
        for strategy, servers in ((SERVED, SERVERS), (CENTRAL, 1)):
            settings = {"job.strategy": strategy, "job.consistency.mode": "sync", "worker.same_host": same_host}
            side = shardyard_side(
                "shardyard.training", "--task", "mlp", workers=WORKERS, servers=servers, settings=settings
            )
            name = f"{strategy}, sync, central"
            ready[name] = Trainers(stack.enter_context(side), "mlp", "sync", name)
        results = measure_pairs({name: partial(each.measure, seconds) for name, each in ready.items()}, pairs)
        for each in ready.values():
            each.check_falls()
        return results


def run_recommender(pairs: int, seconds: float, same_host: str) -> Results:
    """Raises NumbersDiffer."""
    with ExitStack() as stack:
        ready = {}
        for strategy in (SERVED, MIRRORED):
            settings = {"job.strategy": strategy, "job.consistency.mode": "sync", "job.partitions": 2 * SERVERS}
            settings["worker.same_host"] = same_host
            side = shardyard_side("shardyard.clicks", workers=WORKERS, servers=SERVERS, settings=settings)
            name = f"{strategy}, sync, recommender"
            ready[name] = Recommenders(stack.enter_context(side), name)
        served, mirrored = ready.values()
        if not np.allclose(served.values, mirrored.values, rtol=1e-3, atol=1e-5):
            off = float(np.abs(served.values - mirrored.values).max())
            raise NumbersDiffer(f"variables and rows differ by up to {off:.3g} after {VERIFIED_STEPS} steps")
        results = measure_pairs({name: partial(each.measure, seconds) for name, each in ready.items()}, pairs)
        for each in ready.values():
            each.check_falls()
        return results


COMPARISONS: dict[str, Callable[[int, float, str], Results]] = {
    "all_reduce_mlp": partial(run_all_reduce, "mlp"),
    "all_reduce_25m": partial(run_all_reduce, "25m"),
    "machines_mlp": partial(machines.run, "mlp"),
    "machines_25m": partial(machines.run, "25m"),
    "machines_25m_fp16": partial(machines.run, "25m", all_reduce="fp16"),
    "pipeline_mlp": partial(pipelines.run, "mlp"),
    "pipeline_25m": partial(pipelines.run, "25m"),
    "pushed_mlp": partial(pipelines.run_pushed, "mlp"),
    "pushed_25m": partial(pipelines.run_pushed, "25m"),
    "central": run_central,
    "recommender": run_recommender,
}
"""Each gives first what ours is compared with."""


def main() -> None:
    parser = options_of(__doc__, pairs=7)
    parser.add_argument("--seconds", type=float, default=4.0, help="length of a measurement (4)")
    parser.add_argument("--only", nargs="+", choices=COMPARISONS, default=[*COMPARISONS], help="comparisons (all)")
    parser.add_argument("--over-gloo", action="store_true", help="our workers share no memory")
    options = parser.parse_args()
    os.environ[ONE_THREAD] = "1"
    raw: Results = {}
    found: dict[str, list[float]] = {}
    for name in options.only:
        # a step of the large model takes a third of a second: fewer pairs
        pairs = max(1, options.pairs // 2) if "25m" in name else options.pairs
        try:
            results = COMPARISONS[name](pairs, options.seconds, "never" if options.over_gloo else "auto")
        except LinkUnavailable as error:
            print(f"{name} is left out, since a link cannot be made here (it needs root): {error}", flush=True)
            continue
        raw |= results
        other, ours = results.values()
        found[name] = ratios(ours, other, "steps_per_s")
    panels = [each for each in ("mlp", "25m", "central", "recommender") if any(each in name for name in raw)]
    show("strategies", panels, raw, found, options.figures)


if __name__ == "__main__":
    main()
