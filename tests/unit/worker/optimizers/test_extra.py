"""The optimizers that torch does not have, against the formulas of their papers, written down here in plain numpy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

import shardyard as sy
from shardyard_worker.optimizers import extra

STEPS = 30
SHAPES = ((7, 3), (5,), (11,))
BOUND = 1e-12


class Paper(ABC):
    """One parameter."""

    def __init__(self, w: np.ndarray) -> None:
        self.w = w

    @abstractmethod
    def step(self, g: np.ndarray) -> None: ...


class LambOfThePaper(Paper):
    """Algorithm 2 of arXiv:1904.00962; phi is the identity."""

    def __init__(self, w: np.ndarray, lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
        super().__init__(w)
        self.lr, self.betas, self.eps, self.weight_decay = lr, betas, eps, weight_decay
        self.t, self.m, self.v = 0, np.zeros_like(w), np.zeros_like(w)

    def step(self, g: np.ndarray) -> None:
        self.t += 1
        beta1, beta2 = self.betas
        self.m = beta1 * self.m + (1 - beta1) * g
        self.v = beta2 * self.v + (1 - beta2) * g**2
        ratio = (self.m / (1 - beta1**self.t)) / (np.sqrt(self.v / (1 - beta2**self.t)) + self.eps)
        update = ratio + self.weight_decay * self.w
        self.w = self.w - self.lr * np.linalg.norm(self.w) / np.linalg.norm(update) * update


class LionOfThePaper(Paper):
    """Program 1 of arXiv:2302.06675."""

    def __init__(self, w: np.ndarray, lr: float, betas: tuple[float, float], weight_decay: float) -> None:
        super().__init__(w)
        self.lr, self.betas, self.weight_decay = lr, betas, weight_decay
        self.m = np.zeros_like(w)

    def step(self, g: np.ndarray) -> None:
        beta1, beta2 = self.betas
        update = np.sign(self.m * beta1 + g * (1 - beta1))
        self.m = self.m * beta2 + g * (1 - beta2)
        self.w = self.w - self.lr * (update + self.w * self.weight_decay)


class FtrlOfThePaper(Paper):
    """The definition in section 3, not algorithm 1: each w is the argmin of

        sum of g_s w  +  1/2 sum of sigma_s (w - w_s)^2  +  l1 |w|  +  1/2 l2 w^2,

    where the sigmas sum up to 1 / rate and the rate is alpha / (beta + sqrt(sum of g_s^2)).
    """

    def __init__(self, w: np.ndarray, alpha: float, beta: float, l1: float, l2: float) -> None:
        super().__init__(w)
        self.alpha, self.beta, self.l1, self.l2 = alpha, beta, l1, l2
        self.gradients: list[np.ndarray] = []
        self.centres: list[np.ndarray] = []
        self.sigmas: list[np.ndarray] = []

    def step(self, g: np.ndarray) -> None:
        self.gradients.append(g)
        self.centres.append(self.w)
        curvature = (self.beta + np.sqrt(sum(each**2 for each in self.gradients))) / self.alpha
        self.sigmas.append(curvature - sum(self.sigmas))
        linear = sum(self.gradients) - sum(s * w for s, w in zip(self.sigmas, self.centres, strict=True))
        inner = -(linear - np.sign(linear) * self.l1) / (curvature + self.l2)
        self.w = np.where(np.abs(linear) <= self.l1, 0.0, inner)


def _lamb(options: dict[str, Any]) -> Callable[[np.ndarray], Paper]:
    return lambda w: LambOfThePaper(w, options["lr"], options["betas"], options["eps"], options["weight_decay"])


def _lion(options: dict[str, Any]) -> Callable[[np.ndarray], Paper]:
    return lambda w: LionOfThePaper(w, options["lr"], options["betas"], options["weight_decay"])


def _ftrl(options: dict[str, Any]) -> Callable[[np.ndarray], Paper]:
    return lambda w: FtrlOfThePaper(w, options["lr"], options["beta"], options["l1"], options["l2"])


CASES = [
    pytest.param(
        extra.LAMB,
        _lamb,
        {"lr": 0.02, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1},
        {"lr": 0.05, "betas": (0.5, 0.9), "eps": 1e-3, "weight_decay": 0.0},
        id="lamb",
    ),
    pytest.param(
        extra.Lion,
        _lion,
        {"lr": 0.02, "betas": (0.9, 0.99), "weight_decay": 0.1},
        {"lr": 0.05, "betas": (0.5, 0.8), "weight_decay": 0.0},
        id="lion",
    ),
    pytest.param(
        extra.FTRL,
        _ftrl,
        {"lr": 0.3, "beta": 1.0, "l1": 0.5, "l2": 0.2},
        {"lr": 0.1, "beta": 0.2, "l1": 0.0, "l2": 0.0},
        id="ftrl",
    ),
]


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize(("kind", "paper", "first", "second"), CASES)
def test_parameters_are_those_of_the_paper(
    kind: Callable[..., torch.optim.Optimizer],
    paper: Callable[[dict[str, Any]], Callable[[np.ndarray], Paper]],
    first: dict[str, Any],
    second: dict[str, Any],
    maximize: bool,
) -> None:
    rng = np.random.default_rng(31)
    starts = [rng.standard_normal(shape) for shape in SHAPES]
    ours = [torch.nn.Parameter(torch.from_numpy(start.copy())) for start in starts]
    optimizer = kind([{"params": ours[:2], **first}, {"params": ours[2:], **second}], maximize=maximize)
    theirs = [paper(options)(start) for options, start in zip((first, first, second), starts, strict=True)]
    for step in range(STEPS):
        for index, (parameter, expected) in enumerate(zip(ours, theirs, strict=True)):
            if index == 1 and step % 3 == 1:  # without a gradient in this step
                parameter.grad = None
                continue
            g = rng.standard_normal(SHAPES[index]) + 0.2
            parameter.grad = torch.from_numpy(-g if maximize else g)
            expected.step(g)
        optimizer.step()
    for parameter, expected in zip(ours, theirs, strict=True):
        difference = np.linalg.norm(parameter.detach().numpy() - expected.w) / np.linalg.norm(expected.w)
        assert difference <= BOUND


def test_ftrl_from_zero_is_algorithm_1_and_gives_zeros() -> None:
    alpha, beta, l1, l2 = 0.5, 1.0, 4.0, 0.1
    rng = np.random.default_rng(32)
    parameter = torch.nn.Parameter(torch.zeros(40, dtype=torch.float64))
    optimizer = sy.optim.FTRL([parameter], lr=alpha, beta=beta, l1=l1, l2=l2)
    z, n = np.zeros(40), np.zeros(40)
    for _ in range(STEPS):
        w = np.where(np.abs(z) <= l1, 0.0, -(z - np.sign(z) * l1) / ((beta + np.sqrt(n)) / alpha + l2))
        np.testing.assert_allclose(parameter.detach().numpy(), w, rtol=1e-12, atol=1e-15)
        g = rng.standard_normal(40)
        parameter.grad = torch.from_numpy(g)
        optimizer.step()
        sigma = (np.sqrt(n + g**2) - np.sqrt(n)) / alpha
        z, n = z + g - sigma * w, n + g**2
    zeros = int((parameter == 0).sum())
    assert 0 < zeros < 40


def test_lamb_uses_the_rate_as_it_is_where_a_norm_is_0() -> None:
    nothing, still = (torch.nn.Parameter(torch.full((2,), value)) for value in (0.0, 1.0))
    optimizer = sy.optim.LAMB([nothing, still], lr=0.5, weight_decay=0.0)
    nothing.grad, still.grad = torch.tensor([3.0, -1e-2]), torch.zeros(2)
    optimizer.step()
    torch.testing.assert_close(nothing.detach(), torch.tensor([-0.5, 0.5]), rtol=1e-3, atol=0)
    assert still.tolist() == [1.0, 1.0]


ALL: Sequence[type[torch.optim.Optimizer]] = (extra.LAMB, extra.Lion, extra.FTRL)


@pytest.mark.parametrize("kind", ALL)
def test_a_closure_is_called_with_gradients_and_its_loss_returned(kind: Callable[..., Any]) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = kind([parameter], lr=0.1)

    def closure() -> float:
        loss = parameter.square().sum()
        loss.backward()
        return float(loss.detach())

    with torch.no_grad():
        assert optimizer.step(closure) == 3.0
    assert float(parameter.detach().sum()) < 3.0


@pytest.mark.parametrize("kind", ALL)
def test_state_goes_on_from_a_state_dict(kind: Callable[..., Any]) -> None:
    gradients = torch.randn(6, 4, generator=torch.Generator().manual_seed(3))
    straight, broken = (torch.nn.Parameter(torch.ones(4)) for _ in range(2))
    whole, half = kind([straight], lr=0.1), kind([broken], lr=0.1)
    for step, g in enumerate(gradients):
        straight.grad, broken.grad = g.clone(), g.clone()
        whole.step()
        half.step()
        if step == 2:
            other = kind([broken], lr=0.7)
            other.load_state_dict(half.state_dict())
            half = other
    assert torch.equal(straight, broken)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda p: extra.LAMB(p, lr=-1.0), "lr"),
        (lambda p: extra.LAMB(p, betas=(0.9, 1.0)), "beta2"),
        (lambda p: extra.LAMB(p, eps=float("nan")), "eps"),
        (lambda p: extra.Lion(p, betas=(-0.1, 0.9)), "beta1"),
        (lambda p: extra.Lion(p, weight_decay=-0.1), "weight_decay"),
        (lambda p: extra.FTRL(p, lr=0.0), "lr"),
        (lambda p: extra.FTRL(p, beta=-1.0), "beta"),
        (lambda p: extra.FTRL(p, l1=-1.0), "l1"),
        (lambda p: extra.FTRL(p, l2=float("inf")), "l2"),
    ],
)
def test_option_out_of_range_is_refused_by_name(make: Callable[[Any], object], named: str) -> None:
    with pytest.raises(ValueError, match=rf"^{named} is "):
        make([torch.nn.Parameter(torch.ones(1))])


@pytest.mark.parametrize("kind", ALL)
def test_sparse_gradient_is_refused(kind: Callable[..., Any]) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3).to_sparse()
    with pytest.raises(ValueError, match="dense"):
        kind([parameter]).step()


def test_scheduler_of_torch_sets_the_rate() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = sy.optim.Lion([parameter], lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for _ in range(3):
        parameter.grad = torch.ones(1)
        optimizer.step()
        scheduler.step()
    assert parameter.item() == -1.75
