"""A model's variables in a job, by name. Must not know: servers."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from shardyard.domain.errors import UnsupportedModel
from shardyard.domain.variables import VariableKind
from shardyard_worker.embedding.table import Table
from shardyard_worker.exchange.buffers.tensor_types import spec_of
from shardyard_worker.training.variables import BufferPlace, Variable


def parameters_of(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, tables: Mapping[str, Table]
) -> list[Variable]:
    """The optimizer's parameters, without the weights of tables, which have no elements. Raises UnsupportedModel."""
    weights = {table.weight for table in tables.values()}
    names = {parameter: as_written(name) for name, parameter in model.named_parameters()}
    found = []
    for group_index, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            if parameter in weights:
                continue
            name = names.get(parameter, f"optimizer.{group_index}.{index}")
            found.append(Variable(spec_of(name, parameter, VariableKind.PARAMETER, group_index), parameter))
    if not found and not tables:
        raise UnsupportedModel("the optimizer has no parameters", todo="give it model.parameters()")
    return found


def buffers_of(model: torch.nn.Module) -> list[Variable]:
    """The persistent buffers."""
    persistent = model.state_dict(keep_vars=True)
    found = []
    for name, buffer in model.named_buffers():
        if name in persistent:
            owner, _, key = name.rpartition(".")
            place = BufferPlace(model.get_submodule(owner), key)
            found.append(Variable(spec_of(as_written(name), buffer, VariableKind.BUFFER), buffer, place))
    return found


def as_written(name: str) -> str:
    """The name without what torch.compile inserts, so that a compiled model has the same names."""
    return name.replace("_orig_mod.", "")
