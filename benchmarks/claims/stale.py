"""The accuracy that stale gradients cost, and the share of it that their compensation restores.

Workers with a model and a job each take their steps in turn, in a yard inside this process, so with eight of them each
gradient is exactly seven updates late. They learn the digits by plain SGD at a rate that works for a single worker
and is too high for stale gradients. Each seed has the same first values and the same batches with one worker, with
eight, and with eight whose gradients are compensated, adaptively (DC-ASGD-a) and with a constant strength (DC-ASGD-c).

A ratio is the restored share of the lost points of held-out accuracy, in the mean over the seeds; 0 if less than 2
points are lost. The rate and the strengths were found with seeds that are not measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from claims import Found
from harness.measuring.intervals import paired
from harness.measuring.pairs import spread
from harness.measuring.report import Panel
from harness.workloads import digits
from shardyard.config import configuration
from shardyard_launcher.yard.in_process import COORDINATOR, LocalYard
from shardyard_worker.job import connect as worker

WORKERS = 8
STEPS = 400
BATCH = 16
HIDDEN = 64
LR = 0.25
LR_RISES_STEPS = 20
LOST_POINTS_MIN = 2.0
YARD: dict[str, object] = {
    "yard.servers": 2,
    "job.partitions": 4,
    "job.checkpoint.url": "never",
    "log.level": "error",
}
ALONE, STALE = "1 worker", f"{WORKERS} workers"
SETTINGS: dict[str, dict[str, object]] = {
    ALONE: {},
    STALE: {},
    "delay_compensation": {
        "job.consistency.delay_compensation": 3.0,
        "job.consistency.delay_compensation_decay": 0.95,
    },
    "delay_compensation_constant": {"job.consistency.delay_compensation": 4.0},
}


def lr_at(step: int) -> float:
    """Rises to LR in the first steps, then falls to 0 at the last, both linearly."""
    return LR * min(1.0, (step + 1) / LR_RISES_STEPS) * (1 - step / STEPS)


class Member:
    """A worker of the yard: a model, and its job."""

    def __init__(self, job: Any, seed: int) -> None:
        self.model = digits.make_small_network(seed, HIDDEN)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=LR)
        self.model, self.optimizer = job.prepare(self.model, optimizer)

    def step(self, images: torch.Tensor, labels: torch.Tensor, lr: float) -> None:
        """Takes a step on the values from its previous step."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(images), labels)
        torch.autograd.backward(loss)
        self.optimizer.step()


@contextmanager
def members(count: int, seed: int, given: Mapping[str, object]) -> Any:
    settings = configuration.load(None, {}, YARD | dict(given)).settings
    yard = LocalYard(settings)
    try:
        inside = settings.model_copy(update={"coordinator": COORDINATOR})
        with ExitStack() as stack:
            jobs = [stack.enter_context(worker.connect(inside, network=yard.network)) for _ in range(count)]
            yield [Member(job, seed) for job in jobs]
    finally:
        yard.close()


def train(seed: int, workers: int, given: Mapping[str, object]) -> dict[str, float]:
    """Returns the held-out accuracy in percent."""
    images, labels = digits.load()
    learned, held_out = digits.split(seed)
    random = torch.Generator().manual_seed(seed)
    order = learned[:0]
    with members(workers, seed, given) as found:
        for step in range(STEPS):
            if len(order) < BATCH:
                order = learned[torch.randperm(len(learned), generator=random)]
            batch, order = order[:BATCH], order[BATCH:]
            found[step % workers].step(images[batch], labels[batch], lr_at(step))
        last = found[(STEPS - 1) % workers].model  # has what all have pushed
        return {"accuracy_percent": digits.accuracy_percent(last, images[held_out], labels[held_out])}


def share(results: Mapping[str, list[dict[str, float]]], name: str) -> float:
    """The restored share of the points that stale gradients lose."""
    alone, stale, found = (statistics.mean(r["accuracy_percent"] for r in results[n]) for n in (ALONE, STALE, name))
    return (found - stale) / (alone - stale) if alone - stale >= LOST_POINTS_MIN else 0.0


def measure(seeds: Sequence[int]) -> Found:
    results: dict[str, list[dict[str, float]]] = {name: [] for name in SETTINGS}
    for seed in seeds:
        for name, given in SETTINGS.items():
            results[name].append(train(seed, 1 if name == ALONE else WORKERS, given))
        said = ", ".join(f"{name} {found[-1]['accuracy_percent']:.1f}%" for name, found in results.items())
        print(f"seed {seed}: {said}", flush=True)
    accuracy = {name: [each["accuracy_percent"] for each in found] for name, found in results.items()}
    for name in results:
        print(f"{name}: {spread(accuracy[name])}; against {ALONE} {paired(accuracy[name], accuracy[ALONE])} points")
    ratios = {name: [share(results, name)] for name in results if name not in (ALONE, STALE)}
    bars = {name if name == ALONE else f"shardyard {name}": found for name, found in accuracy.items()}
    panel = Panel(f"digits, held out, {WORKERS} workers in turn", "% right", bars=bars)
    return Found(results, ratios, {"async": [panel]})
