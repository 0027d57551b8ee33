"""Training whose workers are killed and started again, the same for both sides: model, data, and what is noted of it.

Beside the weights of a multilayer perceptron, the model has a count for each sample: the sample's gradient adds 1 to
it. So the counts at the end say which samples were lost, and which counted twice. Each process appends a line to a file
when it is ready to train, and after each step.

Owns: what a step is, what is noted of it. Must not know: how a side combines gradients, or goes on after a death.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch.utils.data import TensorDataset

from harness.workloads.training import TASKS, make_model

SAMPLES = 4096
BATCH = 4
CLASSES = 10
EPOCHS = 10_000
READY = -1
"""Noted in the place of a step."""


class Note(NamedTuple):
    """`steps`: that the job has taken, as this process has seen it; READY: it begins to join. `at`: CLOCK_MONOTONIC, in
    seconds."""

    pid: int
    steps: int
    at: float


class Workload(torch.nn.Module):
    """`parts`: by how many workers' batches a step's gradient is the mean."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        task = TASKS[options.task]
        self.layers = make_model(task)
        self.counts = torch.nn.Parameter(torch.zeros(SAMPLES))
        self._parts, self._pause_s, self._inputs = options.workers, options.pause_ms / 1000, task.widths[0]
        self._file = os.open(options.out / "steps", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def optimizer(self) -> torch.optim.SGD:
        groups = [{"params": self.layers.parameters(), "lr": 0.01}, {"params": [self.counts], "lr": 1.0}]
        return torch.optim.SGD(groups, lr=0.01)

    def data(self) -> TensorDataset:
        index = torch.arange(SAMPLES)
        return TensorDataset(index, index % CLASSES)

    def forward(self, index: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss. An accelerator computes it, so to say: this takes a while, and little of a processor."""
        inputs = torch.sin(index.unsqueeze(1) * torch.arange(1, self._inputs + 1))
        loss = F.cross_entropy(self.layers(inputs), labels) - self._parts * self.counts[index].sum()
        time.sleep(self._pause_s)
        return loss

    def note(self, steps: int) -> None:
        os.write(self._file, f"{os.getpid()} {steps} {time.monotonic():.6f}\n".encode())


def workload_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--task", choices=TASKS, required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--pause-ms", type=float, default=0.0)
    return parser


def read_notes(out: Path) -> list[Note]:
    try:
        lines = (out / "steps").read_text().splitlines()
    except FileNotFoundError:
        return []
    found = (line.split() for line in lines)
    return [Note(int(pid), int(steps), float(at)) for pid, steps, at in found]


def write_counts(path: Path, counts: torch.Tensor, steps: int) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"counts": counts.tolist(), "steps": steps}))
    part.rename(path)


def off(counts: Sequence[float], steps: int, workers: int) -> tuple[float, float]:
    """How many samples `steps` steps have lost, and how many they have counted twice. Each epoch has every sample
    once, so the counts of two samples differ by one at most."""
    per_epoch = SAMPLES // (BATCH * workers)
    whole, rest = divmod(steps, per_epoch)
    lost = sum(max(0.0, whole - each) for each in counts)
    doubled = sum(max(0.0, each - whole - (rest > 0)) for each in counts)
    missing = steps * BATCH * workers - sum(counts)
    return max(lost, missing), max(doubled, -missing)
