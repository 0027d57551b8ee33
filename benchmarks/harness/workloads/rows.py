"""Steps with an embedding table, the same for all sides: ids, first rows, the loop, and the plain model.

A step looks up the rows of 4,096 Zipf(1.1) ids of a million, and pushes the gradient of half the square distance to
fixed targets, which depends on the rows. Owns: the step, what is timed, the expected result. Must not know: how a side
looks rows up and pushes them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

EXPONENT = 1.1
BATCHES = 64
LR, EPS = 0.05, 1e-8
FILE = "rows.npy"


class RowsDiffer(Exception):
    """The rows are not those of the plain model."""


@dataclass(frozen=True, slots=True)
class Task:
    """`rows` of `dim`, of which a step looks up `ids`, with repetitions."""

    rows: int = 1_000_000
    dim: int = 64
    ids: int = 4_096

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        for name in ("--rows", "--dim", "--ids"):
            parser.add_argument(name, type=int, required=True)

    @classmethod
    def of(cls, options: argparse.Namespace) -> Task:
        return cls(options.rows, options.dim, options.ids)

    def arguments(self) -> list[str]:
        return ["--rows", str(self.rows), "--dim", str(self.dim), "--ids", str(self.ids)]

    def batches(self) -> list[torch.Tensor]:
        """Row numbers; frequent ones are at random places."""
        random = np.random.default_rng(0)
        ends = np.cumsum(np.arange(1, self.rows + 1, dtype=np.float64) ** -EXPONENT)
        places = random.permutation(self.rows)
        drawn = np.searchsorted(ends, random.random((BATCHES, self.ids)) * ends[-1])
        return list(torch.from_numpy(places[drawn]))

    def first_rows(self) -> torch.Tensor:
        return torch.rand(self.rows, self.dim, generator=torch.Generator().manual_seed(1)) - 0.5

    def targets(self) -> torch.Tensor:
        return torch.rand(self.ids, self.dim, generator=torch.Generator().manual_seed(2)) - 0.5


class Loop:
    """`run` takes a step on each batch that it is given; `read` gives the rows of ids, shape (n, dim), afterwards."""

    def __init__(
        self,
        task: Task,
        run: Callable[[Iterator[torch.Tensor]], None],
        read: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self._batches = task.batches()
        self._run, self._read = run, read
        self._steps = 0

    def handlers(self) -> dict[str, Callable[..., Mapping[str, Any]]]:
        return {"train": self.train, "verify": self.verify}

    def train(self, seconds: float) -> dict[str, Any]:
        begin, cpu_begin, steps = time.perf_counter(), time.process_time(), self._steps
        self._run(self._given(until=begin + seconds))
        passed_s, cpu_s = time.perf_counter() - begin, time.process_time() - cpu_begin
        return {"steps": self._steps - steps, "seconds": passed_s, "cpu_s": cpu_s}

    def verify(self, steps: int, folder: str) -> dict[str, Any]:
        """Takes the very first steps. Writes the rows that they changed, by ascending id."""
        assert self._steps == 0
        assert steps <= BATCHES
        self._run(self._given(steps=steps))
        np.save(Path(folder, FILE), self._read(torch.unique(torch.cat(self._batches[:steps]))).numpy())
        return {}

    def _given(self, *, until: float = float("inf"), steps: int | None = None) -> Iterator[torch.Tensor]:
        given = 0
        while time.perf_counter() < until and given != steps:
            yield self._batches[self._steps % BATCHES]
            self._steps, given = self._steps + 1, given + 1


def check(task: Task, steps: int, folder: Path, *, window: bool = False) -> None:
    """Holds what `Loop.verify` has written against torch's embedding and its sparse Adagrad. `window`: each batch but
    the second was computed on rows that lack the push before it. The second one's are looked up while the first push
    is applied, row by row, and each may have it or not. Raises RowsDiffer."""
    found: npt.NDArray[np.float32] = np.load(folder / FILE)
    lates = (range(1, steps), range(2, steps)) if window else ((),)
    expected = np.stack([trained(task, steps, frozenset(late)) for late in lates])
    if found.shape != expected[0].shape:
        raise RowsDiffer(f"rows are of shape {found.shape}; expected {expected[0].shape}")
    wrong = np.flatnonzero(~np.isclose(found, expected, rtol=1e-4, atol=1e-5).all(axis=2).any(axis=0))
    if wrong.size:
        off = np.abs(found[wrong] - expected[:, wrong]).max(axis=2).min(axis=0).max()
        raise RowsDiffer(f"{wrong.size} of {len(found)} rows are off, by up to {off:.3g}")


def trained(task: Task, steps: int, late: frozenset[int]) -> npt.NDArray[np.float32]:
    """The rows of the plain model, by ascending id. `late`: the batches that are computed without the push before.
    Raises RowsDiffer where it learns nothing."""
    batches = task.batches()[:steps]
    ids, places = torch.unique(torch.cat(batches), return_inverse=True)
    plain = torch.nn.Embedding.from_pretrained(task.first_rows()[ids].clone(), freeze=False, sparse=True)
    first = plain.weight.detach().clone()
    before = first.clone()
    optimizer = torch.optim.Adagrad(plain.parameters(), lr=LR, eps=EPS)
    targets = task.targets()
    for number, batch in enumerate(places.split(task.ids)):
        optimizer.zero_grad()
        seen = (before if number in late else plain.weight.detach())[batch]
        before = plain.weight.detach().clone()
        torch.autograd.backward(plain(batch), seen - targets)
        optimizer.step()
    made: npt.NDArray[np.float32] = plain.weight.detach().numpy()
    if np.allclose(made, first.numpy(), atol=1e-3):
        raise RowsDiffer("the plain model has not learnt anything: a lost push would not show")
    return made
