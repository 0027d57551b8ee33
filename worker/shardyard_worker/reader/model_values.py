"""Puts a version's values into a model of the job. Must not know: where values come from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import torch

from shardyard.domain.errors import DTypeMismatch, ShapeMismatch, UnknownVariable
from shardyard_worker.training.model_variables import as_written


def load_into(model: torch.nn.Module, names: Sequence[str], arrays: Sequence[npt.NDArray[Any]]) -> None:
    """Sets a model's parameters and buffers to the values of their names, in place, once all are checked. Raises
    UnknownVariable, ShapeMismatch, DTypeMismatch, UnsupportedModel."""
    there: dict[str, torch.Tensor] = {}
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        there[as_written(name)] = tensor
    found = []
    for name, array in zip(names, arrays, strict=True):
        target = there.get(name)
        value = torch.from_numpy(array)
        if target is None:
            raise UnknownVariable(
                f"the job has a variable {name!r}, and the model has none of that name", todo="build the job's model"
            )
        if target.shape != value.shape:
            raise ShapeMismatch(f"{name!r} has the shape {tuple(target.shape)}; the job's {tuple(value.shape)}")
        if target.dtype != value.dtype:
            raise DTypeMismatch(f"{name!r} is {target.dtype}; the job's {value.dtype}")
        found.append((target, value))
    with torch.no_grad():
        for target, value in found:
            target.copy_(value)
