"""Optimizers that torch does not have, as `shardyard.optim`: LAMB, Lion, FTRL.

Owns: their formulas in operations of torch, and their options. Each also trains without Shardyard, and names the
servers' update rule that replaces it in `job.prepare`; tests compare the two. Invariants: parameters are dense and
real; a parameter without a gradient, and its state, stay as they are. Must not know: jobs, servers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, overload

import torch
from torch.optim.optimizer import ParamsT

__all__ = ["FTRL", "LAMB", "Lion"]

_State = dict[str, Any]


class _DenseOptimizer(torch.optim.Optimizer):
    """Updates parameter by parameter."""

    def _update(self, group: dict[str, Any], parameter: torch.Tensor, gradient: torch.Tensor, state: _State) -> None:
        """Takes one step of one parameter, down `gradient`. `state` is empty at the first step."""
        raise NotImplementedError

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Takes one step. Returns the closure's loss. Raises ValueError for a sparse or complex gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if parameter.grad.is_sparse or parameter.grad.is_complex():
                    raise ValueError(f"{type(self).__name__} takes dense, real gradients only")
                gradient = -parameter.grad if group["maximize"] else parameter.grad
                self._update(group, parameter, gradient, self.state[parameter])
        return loss


def _check(low: float, high: float, **options: float) -> None:
    for name, value in options.items():
        if not low <= float(value) < high:
            raise ValueError(f"{name} is {value}; expected at least {low:g} and below {high:g}")


class LAMB(_DenseOptimizer):
    """LAMB: You et al., Large Batch Optimization for Deep Learning (ICLR 2020), algorithm 2.

    Its scaling function is the identity. The rate of a parameter is `lr` times its norm, divided by the norm of its
    update, or `lr` if one of the two norms is 0. `job.prepare` replaces it by the same rule on the servers. Raises
    ValueError for an option out of range.

    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = sy.optim.LAMB(model.parameters(), lr=0.01, weight_decay=0.0)
    >>> model(torch.ones(2, 4)).sum().backward()
    >>> optimizer.step()
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
    ) -> None:
        _check(0.0, math.inf, lr=float(lr), eps=eps, weight_decay=weight_decay)
        _check(0.0, 1.0, beta1=betas[0], beta2=betas[1])
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, options)

    def _update(self, group: dict[str, Any], parameter: torch.Tensor, gradient: torch.Tensor, state: _State) -> None:
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        count, (beta1, beta2) = float(state["step"]), group["betas"]
        mean = state["exp_avg"].lerp_(gradient, 1 - beta1)
        square = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        denominator = (square / (1 - beta2**count)).sqrt_().add_(group["eps"])
        update = mean / (1 - beta1**count) / denominator
        if group["weight_decay"] != 0:
            update.add_(parameter, alpha=group["weight_decay"])
        norm, update_norm = torch.linalg.vector_norm(parameter), torch.linalg.vector_norm(update)
        trust = torch.where((norm > 0) & (update_norm > 0), norm / update_norm, 1.0)
        parameter.sub_(update * (trust * float(group["lr"])))


class Lion(_DenseOptimizer):
    """Lion: Chen et al., Symbolic Discovery of Optimization Algorithms (NeurIPS 2023), program 1.

    A parameter moves by `lr` along the sign of an interpolation between its mean gradient and the present one, and
    shrinks by lr * weight_decay. `job.prepare` replaces it by the same rule on the servers. Raises ValueError for an
    option out of range.

    >>> weight = torch.nn.Parameter(torch.tensor([1.0, -1.0]))
    >>> optimizer = sy.optim.Lion([weight], lr=0.25)
    >>> weight.square().sum().backward()
    >>> optimizer.step()
    >>> weight.tolist()
    [0.75, -0.75]
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        _check(0.0, math.inf, lr=float(lr), weight_decay=weight_decay)
        _check(0.0, 1.0, beta1=betas[0], beta2=betas[1])
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize})

    def _update(self, group: dict[str, Any], parameter: torch.Tensor, gradient: torch.Tensor, state: _State) -> None:
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
        (beta1, beta2), lr = group["betas"], float(group["lr"])
        mean = state["exp_avg"]
        direction = (mean * beta1).add_(gradient, alpha=1 - beta1).sign_()
        parameter.mul_(1 - lr * group["weight_decay"]).sub_(direction, alpha=lr)
        mean.mul_(beta2).add_(gradient, alpha=1 - beta2)


class FTRL(_DenseOptimizer):
    """FTRL-Proximal: McMahan et al., Ad Click Prediction: a View from the Trenches (KDD 2013), algorithm 1.

    Each element has a rate of lr / (beta + sqrt(sum of squared gradients)), and is 0 while its sum of gradients is
    within `l1`. The paper begins at 0. Other first values enter through the first proximal term, which is centered at
    them, as later terms are at later values. `job.prepare` replaces it by the same rule on the servers. Raises
    ValueError for an option out of range.

    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> optimizer = sy.optim.FTRL([weight], lr=0.1, l1=1.0)
    >>> (weight * torch.tensor([0.5, 3.0])).sum().backward()
    >>> optimizer.step()
    >>> [round(value, 2) for value in weight.tolist()]  # the first gradient is within l1
    [0.0, -0.05]
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 0.1,
        beta: float = 1.0,
        l1: float = 0.0,
        l2: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        _check(0.0, math.inf, lr=float(lr), beta=beta, l1=l1, l2=l2)
        if float(lr) == 0:
            raise ValueError("lr is 0; expected more, since it is divided by")
        super().__init__(params, {"lr": lr, "beta": beta, "l1": l1, "l2": l2, "maximize": maximize})

    def _update(self, group: dict[str, Any], parameter: torch.Tensor, gradient: torch.Tensor, state: _State) -> None:
        lr, beta, l1 = float(group["lr"]), group["beta"], group["l1"]
        if not state:
            state["z"] = parameter * -(beta / lr)
            state["n"] = torch.zeros_like(parameter)
        z, n = state["z"], state["n"]
        former = n.sqrt()
        root = n.addcmul_(gradient, gradient).sqrt()
        z.add_(gradient - (root - former) / lr * parameter)
        solution = (z.sign() * l1 - z) / ((root + beta) / lr + group["l2"])
        parameter.copy_(torch.where(z.abs() <= l1, torch.zeros_like(z), solution))
