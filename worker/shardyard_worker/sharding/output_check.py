"""Whether a model that is cut computes what the whole model computes.

A plan can be wrong without an error: a forward that has the number of heads in it gives each head a part of its width.
So the first batch goes through both, without dropout, and the outputs are compared.

Must not know: how a model is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch.utils import _pytree as pytree

from shardyard.domain.errors import UnsupportedModel

_ERROR_MAX: Final = {torch.float64: 1e-9, torch.float32: 1e-3}
"""Of the largest element. Sums are in another order."""
_ERROR_MAX_COARSE: Final = 0.1
_TODO: Final = (
    "let job.tensor.size divide the number of heads, and let the forward count heads as view(..., -1, head_width) does;"
    " or leave these layers out of job.tensor"
)


def check_outputs(whole: torch.nn.Module, cut: torch.nn.Module, inputs: Sequence[Any]) -> None:
    """All members call it together, with the same inputs. Raises UnsupportedModel."""
    wanted = _outputs(whole, inputs)
    try:
        found = _outputs(cut, inputs)
    except RuntimeError as error:
        raise UnsupportedModel(
            f"a forward that fails with a part of its layers in each worker: {str(error).splitlines()[0][:200]}",
            why="it expects the whole output of a layer that is cut",
            todo=_TODO,
        ) from error
    if len(wanted) != len(found) or not all(map(_are_close, wanted, found)):
        raise UnsupportedModel(
            "a forward that computes something else with a part of its layers in each worker",
            why="a layer that is cut does not lead to one that adds the parts up, or heads are parted unevenly",
            todo=_TODO,
        )


@torch.no_grad()
def _outputs(model: torch.nn.Module, inputs: Sequence[Any]) -> list[torch.Tensor]:
    modules = [(module, module.training) for module in model.modules()]
    with torch.random.fork_rng(devices=[]), torch.autocast("cpu", enabled=False):
        torch.manual_seed(0)
        model.eval()
        try:
            found = model(*inputs)
        finally:
            for module, training in modules:
                module.training = training
    return [each for each in pytree.tree_leaves(found) if isinstance(each, torch.Tensor)]


def _are_close(wanted: torch.Tensor, found: torch.Tensor) -> bool:
    if wanted.shape != found.shape:
        return False
    if not wanted.is_floating_point() or not wanted.numel():
        return True
    error_max = _ERROR_MAX.get(wanted.dtype, _ERROR_MAX_COARSE)
    if not bool(torch.isfinite(wanted).all()):
        return True  # the step looks at that
    return float((wanted - found).abs().max()) <= error_max * max(float(wanted.abs().max()), 1e-30)
