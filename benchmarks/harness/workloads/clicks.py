"""A recommender, the same for both sides: a dense network and a table, batches in memory, the loop, and what it learns.

The shape is that of DLRM on Criteo's clicks (Naumov et al., arXiv:1906.00091): 13 numbers, 26 ids, layers of 512, 256
and 64 above and below the products of all pairs. Ids are Zipf(1.1) of a million. Owns: what a step is and what is
timed. Must not know: where variables and rows are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

import shardyard as sy

NUMBERS, CATEGORIES, DIM = 13, 26, 16
IDS, EXPONENT = 1_000_000, 1.1
BATCH, BATCHES = 256, 32
LR, ROW_LR = 1e-3, 0.05

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Recommender(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        table = sy.tables.Table(DIM, name="ids", seed=1, optimizer=sy.tables.Adagrad(lr=ROW_LR))
        self.rows = sy.Embedding(DIM, table=table)
        self.bottom = layers(NUMBERS, 512, 256, 64, DIM)
        features = CATEGORIES + 1
        self.pairs = torch.tril_indices(features, features, offset=-1)
        self.top = layers(DIM + self.pairs.shape[1], 512, 256, 1)

    def forward(self, numbers: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Log-odds, shape (n,)."""
        dense = self.bottom(numbers).relu()
        features = torch.cat([dense.unsqueeze(1), self.rows(ids)], dim=1)
        products = torch.bmm(features, features.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        found: torch.Tensor = self.top(torch.cat([dense, products], dim=1)).squeeze(1)
        return found


def layers(*widths: int) -> torch.nn.Sequential:
    found: list[torch.nn.Module] = []
    for wide, narrow in pairwise(widths):
        found += [torch.nn.Linear(wide, narrow), torch.nn.ReLU()]
    return torch.nn.Sequential(*found[:-1])


def batches_of(worker: int) -> list[Batch]:
    """Clicks depend on the numbers and on the first id."""
    random = np.random.default_rng(worker)
    ends = np.cumsum(np.arange(1, IDS + 1, dtype=np.float64) ** -EXPONENT)
    found: list[Batch] = []
    for _ in range(BATCHES):
        numbers = random.standard_normal((BATCH, NUMBERS)).astype(np.float32)
        ids = np.searchsorted(ends, random.random((BATCH, CATEGORIES)) * ends[-1])
        labels = (numbers[:, 0] + 2.0 * (ids[:, 0] % 2) > 1.0).astype(np.float32)
        keyed = ids.astype(np.int64) + IDS * np.arange(CATEGORIES)
        found.append((torch.from_numpy(numbers), torch.from_numpy(keyed), torch.from_numpy(labels)))
    return found


class Loop:
    """`ahead` wraps batches, so that their ids are announced."""

    def __init__(
        self,
        model: Recommender,
        optimizer: Any,
        ahead: Callable[[Iterator[Batch]], Iterator[Batch]],
        worker: int,
    ) -> None:
        self._model, self._optimizer, self._ahead = model, optimizer, ahead
        self._batches = batches_of(worker)
        self._steps = 0

    def handlers(self) -> dict[str, Callable[..., Mapping[str, Any]]]:
        return {"train": self.train, "save": self.save}

    def train(self, steps: int) -> dict[str, Any]:
        """`loss` is the mean over all steps, `first_loss` that of the first."""
        losses: list[torch.Tensor] = []
        begin = time.perf_counter()
        for numbers, ids, labels in self._ahead(self._given(steps)):
            self._optimizer.zero_grad()
            loss = F.binary_cross_entropy_with_logits(self._model(numbers, ids), labels)
            torch.autograd.backward(loss)
            self._optimizer.step()
            losses.append(loss.detach())
        passed_s = time.perf_counter() - begin
        loss = torch.stack(losses).mean().item()
        return {"steps": steps, "seconds": passed_s, "loss": loss, "first_loss": losses[0].item()}

    def save(self, path: str) -> dict[str, Any]:
        """Writes the parameters, and the rows of the first batch."""
        with torch.no_grad():
            parts = [*self._model.bottom.parameters(), *self._model.top.parameters()]
            found = [each.detach().reshape(-1) for each in parts]
            found.append(self._model.rows(torch.unique(self._batches[0][1])).reshape(-1))
            np.save(Path(path), torch.cat(found).numpy())
        return {}

    def _given(self, steps: int) -> Iterator[Batch]:
        for _ in range(steps):
            yield self._batches[self._steps % BATCHES]
            self._steps += 1
