"""Which modules of a model FSDP2 gathers one by one (job.strategy sharded), and how it cuts them.

A module whose parameters are gathered together is a unit: it has its own all-gather before its forward and its
backward, and its own reduce-scatter after its backward. What is in no unit belongs to the whole model's. By default the
members of the outermost torch.nn.ModuleList and torch.nn.Sequential are units, as the layers of a transformer. The
weight of an embedding table has no elements, and stays as it is.

Must not know: batches, steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from shardyard.domain.errors import UnsupportedModel
from shardyard_worker.collectives.default_group import mesh_of
from shardyard_worker.sharding.module_names import matching

_NAMES_SHOWN = 8
_WITHOUT_FORWARD = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.ParameterList, torch.nn.ParameterDict)


def units_of(model: torch.nn.Module, patterns: Sequence[str]) -> tuple[str, ...]:
    """The names of the units, without the model itself. Raises UnsupportedModel."""
    _check_dtypes(model)
    found = _named_units(model, patterns) if patterns else _layers(model)
    uses = Counter(parameter for _, module in model.named_modules() for parameter in module._parameters.values())
    modules = dict(model.named_modules())
    own = {
        name: Counter(each for part in modules[name].modules() for each in part._parameters.values()) for name in found
    }
    # a parameter that modules share is gathered with the whole model, unless one unit has them all
    return tuple(
        name for name in found if all(uses[each] == count for each, count in own[name].items() if each is not None)
    )


def _layers(model: torch.nn.Module) -> list[str]:
    if isinstance(model, torch.nn.ModuleList | torch.nn.Sequential):
        containers = [("", model)]
    else:
        containers = []
        for name, module in model.named_modules():
            is_inside = any(name.startswith(f"{outer}.") for outer, _ in containers)
            if isinstance(module, torch.nn.ModuleList | torch.nn.Sequential) and not is_inside:
                containers.append((name, module))
    return [
        f"{name}.{key}".removeprefix(".")
        for name, container in containers
        for key, module in container.named_children()
        if _is_unit(module)
    ]


def _named_units(model: torch.nn.Module, patterns: Sequence[str]) -> list[str]:
    modules = {name: module for name, module in model.named_modules() if name}
    found: dict[str, None] = {}
    for pattern in patterns:
        matched = matching(modules, pattern)
        units = [name for name in matched if _is_unit(modules[name])]
        if not units:
            listed = ", ".join([*modules][:_NAMES_SHOWN]) + (", ..." if len(modules) > _NAMES_SHOWN else "")
            kinds = sorted({type(modules[name]).__name__ for name in matched})
            raise UnsupportedModel(
                f"{pattern!r} in job.sharded.modules, the name of {' and '.join(kinds) or 'no module'}",
                why="a unit is a module with a forward and with parameters",
                todo=f"name some of {listed}; members of a list are list.*",
            )
        found.update(dict.fromkeys(units))
    return [*found]


def _is_unit(module: torch.nn.Module) -> bool:
    return not isinstance(module, _WITHOUT_FORWARD) and any(each.numel() for each in module.parameters())


def _check_dtypes(model: torch.nn.Module) -> None:
    dtypes = sorted({str(each.dtype) for each in model.parameters() if each.requires_grad and each.numel()})
    if len(dtypes) > 1:
        raise UnsupportedModel(
            f"a model with parameters of {' and '.join(dtypes)} in a job with job.strategy sharded",
            why="gradients of a unit are summed as one tensor",
            todo="give all parameters one dtype; use torch.autocast for a coarser forward",
        )


def cut(model: torch.nn.Module, units: Sequence[str], group: Any, *, reshard_after_forward: bool) -> None:
    """Cuts the parameters of a model over the members of torch's default group. All do it alike."""
    # imported with the first group: it takes a while, and most jobs are not sharded
    from torch.distributed.fsdp import FSDPModule, fully_shard

    mesh = mesh_of(group)
    left_out = {each for each in model.parameters() if not each.numel()}  # of tables, which copies of a model share
    for name in (*reversed(units), ""):  # inner ones come first
        unit = model.get_submodule(name)
        fully_shard(unit, mesh=mesh, reshard_after_forward=reshard_after_forward, ignored_params=left_out)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no means


def plan_of(model: torch.nn.Module, units: Sequence[str]) -> str:
    """The plan as a table."""
    rows = [("gathered together", "parameters", "bytes")]
    for name in (*units, ""):
        inner = [each for each in units if each != name and (not name or each.startswith(f"{name}."))]
        own = set(model.get_submodule(name).parameters())
        own -= {parameter for each in inner for parameter in model.get_submodule(each).parameters()}
        elements, nbytes = sum(each.numel() for each in own), sum(each.nbytes for each in own)
        rows.append((name or "all others", f"{elements:,}", f"{nbytes:,}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
