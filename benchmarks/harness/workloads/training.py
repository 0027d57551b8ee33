"""Training, the same for both sides: models, data in memory, the loop, and the check that no gradient was lost.

Owns: what a step is and what is timed. Must not know: how a side exchanges gradients for parameters.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812

BATCH = 64
SAMPLES = 6400
CLASSES = 10
FALL = 0.98
"""What the last loss may be of the first at most; a short run takes a handful of steps of the large model."""


@dataclass(frozen=True, slots=True)
class Task:
    """A multilayer perceptron by its widths, and the learning rate of SGD."""

    widths: tuple[int, ...]
    lr: float


TASKS = {
    "mlp": Task((784, 128, CLASSES), lr=0.1),
    "25m": Task((1024, 4096, 4096, 1024), lr=0.1),
}


class NumbersDiffer(Exception):
    """The parameters are not what the gradients make of them, or the loss does not fall."""


def make_model(task: Task) -> torch.nn.Sequential:
    torch.manual_seed(1)
    layers: list[torch.nn.Module] = []
    for wide, narrow in zip(task.widths, task.widths[1:], strict=False):
        layers += [torch.nn.Linear(wide, narrow), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1])


def make_data(task: Task, worker: int, workers: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This worker's part of a synthetic set, which a linear teacher has labelled with ten classes."""
    random = np.random.default_rng(0)
    inputs = random.random((SAMPLES, task.widths[0]), dtype=np.float32) - np.float32(0.5)
    teacher = random.standard_normal((task.widths[0], CLASSES)).astype(np.float32)
    labels = (inputs @ teacher).argmax(axis=1)
    return torch.from_numpy(inputs[worker::workers].copy()), torch.from_numpy(labels[worker::workers].astype(np.int64))


class Loop:
    """`exchange()` pushes all `.grad` and returns when the parameters are those to compute the next gradient on.

    `forward` is the model, or what wraps it; `zero` forgets the last gradients.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        data: tuple[torch.Tensor, torch.Tensor],
        *,
        exchange: Callable[[], None],
        zero: Callable[[], None],
        forward: Callable[[torch.Tensor], torch.Tensor] | None = None,
        worker: int,
    ) -> None:
        self._parameters = list(model.parameters())
        self._inputs, self._labels = data
        self._forward = forward or model
        self._exchange = exchange
        self._zero = zero
        self._worker = worker
        self._steps = 0
        self._first_loss = 0.0

    def handlers(self) -> dict[str, Callable[..., Mapping[str, Any]]]:
        return {
            "train": self.train,
            "compute": self.compute,
            "verify": self.verify,
            "alone": self.alone,
            "save": self.save,
        }

    def compute(self, steps: int) -> dict[str, Any]:
        """So many steps without an exchange: their gradients are forgotten."""
        begin = time.perf_counter()
        for _ in range(steps):
            self._compute()
        passed_s = time.perf_counter() - begin
        self._zero()
        return {"steps": steps, "seconds": passed_s}

    def train(self, steps: int = 0, seconds: float = 0.0) -> dict[str, Any]:
        """So many steps, or for so long. `loss` is the mean over all of them, `first_loss` that of the first batch of
        this worker's life."""
        losses: list[torch.Tensor] = []
        begin, cpu_begin = time.perf_counter(), time.process_time()
        until = begin + seconds
        while len(losses) < steps if steps else time.perf_counter() < until:
            losses.append(self._compute())
            self._exchange()
        passed_s, cpu_s = time.perf_counter() - begin, time.process_time() - cpu_begin
        loss = torch.stack(losses).mean().item()
        return {
            "steps": len(losses),
            "seconds": passed_s,
            "cpu_s": cpu_s,
            "loss": loss,
            "first_loss": self._first_loss,
        }

    def verify(self, steps: int, folder: str) -> dict[str, Any]:
        """Takes some untimed steps. Writes the sum of the pushed gradients, for `check_sum`."""
        total = [np.zeros(parameter.shape, np.float64) for parameter in self._parameters]
        for _ in range(steps):
            self._compute()
            for sum_, parameter in zip(total, self._parameters, strict=True):
                sum_ += _gradient(parameter).numpy()
            self._exchange()
        _write(Path(folder, f"gradients-{self._worker}.npy"), total)
        return {}

    def alone(self, steps: int, lr: float) -> dict[str, Any]:
        """Takes some steps alone: each must end with the parameters that its own gradient makes."""
        for _ in range(steps):
            self._compute()
            wanted = [
                (parameter.detach().double() - lr * _gradient(parameter).double()) for parameter in self._parameters
            ]
            self._exchange()
            for index, (parameter, each) in enumerate(zip(self._parameters, wanted, strict=True)):
                found = parameter.detach().double()
                if not torch.allclose(found, each, rtol=1e-6, atol=1e-7):
                    off = (found - each).abs().max().item()
                    raise NumbersDiffer(f"parameter {index} is off by {off:.3g} after a step: not the newest values")
        return {}

    def save(self, path: str, settle: bool) -> dict[str, Any]:
        """Writes the parameters; with `settle` after an exchange of gradients of zero, so that they are the newest."""
        if settle:
            self._compute()
            for parameter in self._parameters:
                _gradient(parameter).zero_()
            self._exchange()
        _write(Path(path), [parameter.detach().numpy() for parameter in self._parameters])
        return {}

    def _compute(self) -> torch.Tensor:
        offset = self._steps * BATCH % (len(self._inputs) - BATCH + 1)
        self._steps += 1
        inputs, labels = self._inputs[offset : offset + BATCH], self._labels[offset : offset + BATCH]
        self._zero()
        loss = F.cross_entropy(self._forward(inputs), labels)
        torch.autograd.backward(loss)
        if self._steps == 1:
            self._first_loss = loss.item()
        return loss.detach()


def check_sum(
    before: npt.NDArray[np.float64],
    after: npt.NDArray[np.float64],
    gradients: Sequence[npt.NDArray[np.float64]],
    *,
    lr: float,
    mean: bool,
    steps: int,
    lossy: float = 0.0,
) -> None:
    """Raises NumbersDiffer unless `after` is `before` less `lr` times all workers' gradients, or their mean.

    `gradients`: each worker's, summed over `steps` steps. `lossy`: which part of a gradient compression may change. The
    tolerance is that, and what float32 loses in so many additions; one worker's gradient of one step must be much
    larger, else nothing would be shown.
    """
    total = np.sum(gradients, axis=0) / (len(gradients) if mean else 1)
    off = float(np.abs(before - lr * total - after).max())
    additions = steps * (1 if mean else len(gradients))
    tolerance = (additions + 2) * float(np.finfo(np.float32).eps) * float(np.abs(after).max())
    tolerance += lossy * lr * float(np.abs(total).max())
    typical = lr * float(np.abs(total).max()) / additions
    if tolerance > 0.1 * typical:
        raise NumbersDiffer(f"a lost gradient ({typical:.3g}) would not show beside the tolerance ({tolerance:.3g})")
    if not off <= tolerance:
        raise NumbersDiffer(
            f"the parameters are off by {off:.3g}, expected at most {tolerance:.3g}; one step changes them by "
            f"{typical:.3g}: a gradient was lost, or applied twice"
        )


def check_falls(name: str, losses: Sequence[float]) -> None:
    """Raises NumbersDiffer unless the last loss is below the first by more than the noise of a batch."""
    if not losses[-1] < FALL * losses[0]:
        raise NumbersDiffer(f"{name}: the loss does not fall: {', '.join(f'{loss:.4g}' for loss in losses)}")


def read(path: Path) -> npt.NDArray[np.float64]:
    values: npt.NDArray[np.float64] = np.load(path).astype(np.float64)
    return values


def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _write(path: Path, arrays: Sequence[npt.NDArray[Any]]) -> None:
    np.save(path, np.concatenate([each.reshape(-1) for each in arrays]))
