"""A model's variables in a job, by name. Must not know: servers."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch

from shardyard.domain.errors import UnsupportedModel
from shardyard.domain.variables import VariableKind
from shardyard_worker.embedding.table import Table
from shardyard_worker.exchange.buffers.tensor_types import spec_of
from shardyard_worker.training.variables import BufferPlace, Variable

log = logging.getLogger("shardyard.worker")


def parameters_of(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, tables: Mapping[str, Table]
) -> list[Variable]:
    """The optimizer's parameters, without the weights of tables, which have no elements. Those that are in no module of
    the model are named after their place in the optimizer. Raises UnsupportedModel."""
    weights = {table.weight for table in tables.values()}
    names = {parameter: as_written(name) for name, parameter in model.named_parameters()}
    found, foreign = [], []
    for group_index, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            if parameter in weights:
                continue
            name = names.pop(parameter, "")
            if not name:
                name = f"optimizer.{group_index}.{index}"
                foreign.append(f"{name} of shape {tuple(parameter.shape)}")
            found.append(Variable(spec_of(name, parameter, VariableKind.PARAMETER, group_index), parameter))
    if not found and not tables:
        raise UnsupportedModel("the optimizer has no parameters", todo="give it model.parameters()")
    untrained = [name for parameter, name in names.items() if parameter.requires_grad and parameter not in weights]
    if foreign and untrained:
        raise _of_another_model(foreign, untrained, len(found))
    if foreign:
        log.info("parameters of the optimizer that are in no module of the model: %s", _listed(foreign))
    return found


def _of_another_model(foreign: Sequence[str], untrained: Sequence[str], count: int) -> UnsupportedModel:
    return UnsupportedModel(
        f"{'all' if len(foreign) == count else len(foreign)} of the optimizer's {count} parameters are in no module of"
        f" the model ({_listed(foreign)}), and parameters of the model are not in the optimizer ({_listed(untrained)})",
        why="the servers would train tensors that the model does not use; most often the model, or a part of it, was"
        " built again after the optimizer",
        todo="build the optimizer after the model: torch.optim.Adam(model.parameters()); then call job.prepare. If both"
        " are meant, give all modules to job.prepare as one torch.nn.ModuleList, and freeze what is not trained with"
        " requires_grad_(False)",
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")


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
