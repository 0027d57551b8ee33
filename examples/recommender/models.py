"""Models of clicks: 13 numbers and 26 categories become the log-odds of a click.

All categories are in one table without a size, since no two have the same id (clicks.py).
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from clicks import CATEGORIES, NUMBERS

import shardyard as sy


def layers(*widths: int) -> torch.nn.Sequential:
    """Linear layers with a ReLU between two of them."""
    found: list[torch.nn.Module] = []
    for width, following in pairwise(widths):
        found += [torch.nn.Linear(width, following), torch.nn.ReLU()]
    return torch.nn.Sequential(*found[:-1])


class DLRM(torch.nn.Module):
    """Naumov et al., Deep Learning Recommendation Model for Personalization and Recommendation Systems
    (arXiv:1906.00091), with the layers of its example for Criteo's smaller data set."""

    def __init__(self, dim: int, rate: float) -> None:
        super().__init__()
        self.rows = sy.Embedding(dim, optimizer=sy.tables.Adagrad(lr=rate), initial=sy.tables.uniform(0.01))
        self.bottom = torch.nn.Sequential(layers(NUMBERS, 512, 256, 64, dim), torch.nn.ReLU())
        features = CATEGORIES + 1
        self.top = layers(dim + features * (features - 1) // 2, 512, 256, 1)
        self.register_buffer("pairs", torch.tril_indices(features, features, offset=-1), persistent=False)

    def forward(self, numbers: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Shape (n,), for shapes (n, 13) and (n, 26)."""
        dense = self.bottom(numbers)
        features = torch.cat([dense.unsqueeze(1), self.rows(ids)], dim=1)
        products = torch.bmm(features, features.transpose(1, 2))
        return self.top(torch.cat([dense, products[:, self.pairs[0], self.pairs[1]]], dim=1)).squeeze(1)

    def asked(self, ids: torch.Tensor) -> dict[torch.nn.Module, torch.Tensor]:
        """What will be looked up for these, for `look_ahead`."""
        return {self.rows: ids}


class DeepFM(torch.nn.Module):
    """Guo et al., DeepFM: A Factorization-Machine based Neural Network for CTR Prediction (IJCAI 2017): weights of
    single features, products of all pairs, and layers over the same vectors, added up."""

    def __init__(self, dim: int, rate: float, widths: Sequence[int] = (400, 400, 400)) -> None:
        super().__init__()
        optimizer = sy.tables.Adagrad(lr=rate)
        self.rows = sy.EmbeddingCollection(
            {
                "weight": sy.Embedding(1, table="weights", optimizer=optimizer, initial=sy.tables.zeros()),
                "vector": sy.Embedding(dim, table="vectors", optimizer=optimizer, initial=sy.tables.uniform(0.01)),
            }
        )
        self.weights = torch.nn.Linear(NUMBERS, 1)
        self.vectors = torch.nn.Parameter(0.01 * torch.randn(NUMBERS, dim))
        self.deep = layers((NUMBERS + CATEGORIES) * dim, *widths, 1)

    def forward(self, numbers: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Shape (n,), for shapes (n, 13) and (n, 26)."""
        rows = self.rows({"weight": ids, "vector": ids})
        single = self.weights(numbers).squeeze(1) + rows["weight"].sum(dim=(1, 2))
        vectors = torch.cat([numbers.unsqueeze(2) * self.vectors, rows["vector"]], dim=1)
        pairs = (vectors.sum(dim=1).square() - vectors.square().sum(dim=1)).sum(dim=1) / 2
        return single + pairs + self.deep(vectors.flatten(1)).squeeze(1)

    def asked(self, ids: torch.Tensor) -> dict[torch.nn.Module, dict[str, torch.Tensor]]:
        """What will be looked up for these, for `look_ahead`."""
        return {self.rows: {"weight": ids, "vector": ids}}


Model = DLRM | DeepFM
MODELS: dict[str, type[Model]] = {"dlrm": DLRM, "deepfm": DeepFM}
