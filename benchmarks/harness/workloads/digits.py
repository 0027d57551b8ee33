"""The digits: scikit-learn's 1,797 images of 8 x 8, one half for training, one held out; a network of a million
parameters, and a small one.

Owns: the model, the data, their order and the learning rate, all functions of the seed. Must not know: how gradients
become parameters.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from sklearn.datasets import load_digits

STEPS = 400
BATCH = 32
LR = 0.03
LR_RISES_STEPS = 20
MOMENTUM = 0.9
FOLDS = 2


def make_network(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, kernel_size=3, padding=1),
        torch.nn.BatchNorm2d(16),
        torch.nn.ReLU(),
        torch.nn.Conv2d(16, 64, kernel_size=3, padding=1),
        torch.nn.BatchNorm2d(64),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(1024, 1000),
        torch.nn.ReLU(),
        torch.nn.Linear(1000, 10),
    )


def make_small_network(seed: int, hidden: int = 128) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(64, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, 10)
    )


def lr_factor(step: int) -> float:
    """The factor of the learning rate: rises to 1 in the first steps, then falls to 0 at the last, both linearly."""
    return min(1.0, (step + 1) / LR_RISES_STEPS) * max(0.0, 1 - step / STEPS)


def split(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Training and held-out indices. FOLDS consecutive seeds hold out each image once."""
    shuffle, fold = divmod(seed, FOLDS)
    order = torch.randperm(len(load_digits().target), generator=torch.Generator().manual_seed(1_000 + shuffle))
    return torch.cat([order[k::FOLDS] for k in range(FOLDS) if k != fold]), order[fold::FOLDS]


def load() -> tuple[torch.Tensor, torch.Tensor]:
    """All images, of shape (1797, 1, 8, 8), from 0 to 1, and their labels."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    return images, torch.tensor(digits.target, dtype=torch.int64)


def accuracy_percent(model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    with torch.no_grad():
        return 100 * (model(images).argmax(dim=1) == labels).float().mean().item()


def digest_of(model: torch.nn.Module) -> str:
    """A hash of all parameters and buffers, bit by bit."""
    total = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        total.update(name.encode())
        total.update(tensor.numpy().tobytes())
    return total.hexdigest()


class Training:
    """`model` is trained by `step`, which takes the gradients that lie in it; `follow` moves the learning rate on."""

    def __init__(
        self,
        model: torch.nn.Module,
        seed: int,
        *,
        step: Callable[[], None],
        zero: Callable[[], None],
        follow: Callable[[], None],
    ) -> None:
        self._images, self._labels = load()
        self._model = model
        self._step, self._zero, self._follow = step, zero, follow
        learned, self._held_out = split(seed)
        self._batches = _batches(learned, seed)

    def train(self, steps: int) -> dict[str, Any]:
        self._model.train()
        losses = []
        begin = time.perf_counter()
        for _ in range(steps):
            batch = next(self._batches)
            self._zero()
            loss = F.cross_entropy(self._model(self._images[batch]), self._labels[batch])
            torch.autograd.backward(loss)
            self._step()
            self._follow()
            losses.append(loss.detach())
        seconds = time.perf_counter() - begin
        return {"steps": steps, "seconds": seconds, "loss": torch.stack(losses).mean().item()}

    def evaluate(self) -> dict[str, Any]:
        """The held-out accuracy in percent."""
        self._model.eval()
        return {
            "accuracy_percent": accuracy_percent(
                self._model, self._images[self._held_out], self._labels[self._held_out]
            )
        }

    def digest(self) -> dict[str, Any]:
        return {"digest": digest_of(self._model)}

    def handlers(self) -> Mapping[str, Callable[..., Mapping[str, Any]]]:
        return {"train": self.train, "evaluate": self.evaluate, "digest": self.digest}


def _batches(learned: torch.Tensor, seed: int) -> Iterator[torch.Tensor]:
    """Yields whole batches without end, each image once an epoch."""
    random = torch.Generator().manual_seed(seed)
    while True:
        order = learned[torch.randperm(len(learned), generator=random)]
        yield from (order[at : at + BATCH] for at in range(0, len(order) - BATCH + 1, BATCH))
