"""Steps of torch's optimizers. torch wraps each one for hooks and its profiler, which takes longer than the update of a
small model; steps that nobody watches are taken without that. Must not know: what a step does."""

from __future__ import annotations

import sys
from typing import Final

import torch

# torch deletes its submodule's name from torch.optim
_TORCH_OPTIMIZER: Final = sys.modules[torch.optim.Optimizer.__module__]


def has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether hooks are to be called before or after its steps."""
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or _TORCH_OPTIMIZER._global_optimizer_pre_hooks
        or _TORCH_OPTIMIZER._global_optimizer_post_hooks
    )


def take_step(optimizer: torch.optim.Optimizer) -> None:
    """`optimizer.step()`."""
    bare = getattr(type(optimizer).step, "__wrapped__", None)
    # a scheduler replaces the `step` of one optimizer
    if (
        bare is None
        or "step" in vars(optimizer)
        or has_hooks(optimizer)
        or torch.autograd.profiler._is_profiler_enabled
    ):
        optimizer.step()
    else:
        bare(optimizer)
