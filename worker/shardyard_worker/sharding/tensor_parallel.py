"""Cuts the linear layers of a plan, by DTensor's `parallelize_module` (job.strategy tensor).

Must not know: how the plan was made, batches, steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shardyard_worker.collectives.default_group import mesh_of
from shardyard_worker.sharding.tensor_plan import TensorPlan

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def cut(model: torch.nn.Module, plan: TensorPlan, group: Any) -> None:
    """Cuts the layers over the members of torch's default group. All do it alike, and have the same values."""
    # imported with the first group: it takes a second, and most jobs are not cut
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = mesh_of(group)
    styles: dict[str, Any] = {name: ColwiseParallel() for name in plan.colwise}
    styles |= {name: RowwiseParallel() for name in plan.rowwise}
    parallelize_module(model, mesh, styles, src_data_rank=None)
    for name in styles:
        layer = model.get_submodule(name)
        for key, parameter in [*layer.named_parameters(recurse=False)]:
            assert isinstance(parameter, DTensor)
            layer.register_parameter(key, _with_own_memory(parameter))


def _with_own_memory(parameter: DTensor) -> torch.nn.Parameter:
    """The same part, which does not keep the whole in memory."""
    from torch.distributed.tensor import DTensor

    local = parameter.to_local().detach().clone()
    found = DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return torch.nn.Parameter(found, parameter.requires_grad)
