"""The peer's parameter server for training: a model's parameters and torch.optim.SGD, under a lock."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

_lock = threading.Lock()
_parameters: list[torch.nn.Parameter] = []
_optimizers: list[torch.optim.SGD] = []
_update = ""


def hold(parameters: Sequence[torch.nn.Parameter], lr: float, update: str) -> None:
    global _update
    _update = update
    _parameters[:] = parameters
    options = {update: True} if update in ("foreach", "fused") else {}
    _optimizers[:] = [torch.optim.SGD(_parameters, lr=lr, **options)]


def push_pull(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    with _lock:
        for parameter, gradient in zip(_parameters, gradients, strict=True):
            parameter.grad = gradient
        _optimizers[0].step()
        if _update == "clone":
            return [parameter.detach().clone() for parameter in _parameters]
    return [parameter.detach() for parameter in _parameters]
