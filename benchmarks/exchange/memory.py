"""The memory of a worker under strategies that have the variables in workers, phase by phase, and what the plan says.

    make bench BENCH=memory            (with options: ARGS="--workers 2 4 --only sharded")

A model of linear layers with AdamW, 103 million float32 parameters. Each worker reads its resident memory, and the peak
of each phase, from /proc: beyond what it has before it builds its model. Servers are reached over streams, as from
another machine, so that their memory is not counted here. Every process has one thread.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from typing import Any

from harness.machine.facts import machine_facts
from harness.processes.sides import shardyard_side
from harness.workloads.memory import CHECKPOINT_STEPS
from shardyard.config.settings import JobSettings
from shardyard.domain.replica_groups import Strategy
from shardyard_worker.planning.costs import costs_of
from shardyard_worker.planning.dry_run import PlannedModel

STRATEGIES = ("multi_worker_mirrored", "sharded", "pipeline", "tensor")
PHASES = ("builds its model", "prepares", "begins", "trains", "publishes", "ends")
WIDTH, LAYERS = 3584, 8


def settings_of(strategy: str, workers: int, folder: str) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "job.strategy": strategy,
        "job.workers_expected": workers,
        "job.consistency.mode": "sync",
        "job.checkpoint.url": folder,
        "job.checkpoint.every_s": 0,
        "job.checkpoint.every_steps": CHECKPOINT_STEPS,
        "worker.same_host": "never",
    }
    if strategy == "pipeline":
        settings |= {"job.pipeline.stages": workers, "job.pipeline.microbatches": workers}
    if strategy == "tensor":
        settings["job.tensor.size"] = workers
    return settings


def planned(strategy: str, workers: int, width: int, layers: int) -> int:
    """What `shardyard plan` says of a worker."""
    nbytes = 4 * layers * (width + 1) * width
    model = PlannedModel(JobSettings(), "adamw", nbytes // 4, nbytes, 2 * nbytes, 0, 0, cut=nbytes)
    return next(cost.worker for cost in costs_of(model, workers, 1) if cost.strategy is Strategy(strategy))


def measure(strategy: str, workers: int, width: int, layers: int) -> dict[str, dict[str, int]]:
    """The largest of all workers."""
    ranks = workers if strategy in ("multi_worker_mirrored", "sharded") else 1
    options = [f"--{name}={number}" for name, number in (("width", width), ("layers", layers), ("ranks", ranks))]
    with tempfile.TemporaryDirectory(prefix="shardyard-bench-") as folder:
        given = settings_of(strategy, workers, folder)
        with shardyard_side("shardyard.memory", *options, workers=workers, settings=given) as side:
            answers = side.ask("train", timeout_s=300)
    found: dict[str, dict[str, int]] = {}
    for phase in PHASES:
        each = [answer["phases"][phase] for answer in answers]
        found[phase] = {name: max(one[name] for one in each) for name in each[0]}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--only", nargs="+", choices=STRATEGIES, default=[*STRATEGIES], help="strategies (all)")
    parser.add_argument("--width", type=int, default=WIDTH, help="of each layer (%(default)s)")
    parser.add_argument("--layers", type=int, default=LAYERS, help="(%(default)s)")
    options = parser.parse_args()
    raw: dict[str, Any] = {}
    model = 4 * options.layers * (options.width + 1) * options.width
    print(f"MB, the model {model / 1e6:.0f}; in brackets: resident after the phase, of it shared memory")
    for workers in options.workers:
        for strategy in options.only:
            found = measure(strategy, workers, options.width, options.layers)
            plan = planned(strategy, workers, options.width, options.layers)
            raw[f"{strategy}, {workers}"] = {"plan": plan, **found}
            cells = [
                f"{phase} {each['VmHWM'] / 1e6:.0f} ({each['VmRSS'] / 1e6:.0f}, {each['RssShmem'] / 1e6:.0f})"
                for phase, each in found.items()
            ]
            print(f"{strategy}, {workers} workers: plan {plan / 1e6:.0f}; {'; '.join(cells)}", flush=True)
    print(json.dumps({"machine": machine_facts(), "model": model, "bytes": raw}))


if __name__ == "__main__":
    main()
