"""The model's `.grad`s as views on what is pushed, so that a push copies nothing.

Owns: the hooks that autograd calls when a gradient is there. Invariants: a `.grad` has torch's meaning at any time, it
only lies elsewhere: None stays None, accumulation accumulates, and what the script writes into it is what is pushed; a
gradient that cannot be a view (of a variable that is cut, or on another device) is left alone and copied when it is
pushed. Must not know: when, or whereto, gradients are pushed.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch.utils.hooks import RemovableHandle

from shardyard_worker.buckets import Buckets


class Gradients:
    """Watches parameters, by index of their variable."""

    def __init__(self, buckets: Buckets, parameters: Mapping[int, torch.Tensor]) -> None:
        self._buckets = buckets
        self._handles: list[RemovableHandle] = [
            parameter.register_post_accumulate_grad_hook(partial(self._take, index))  # type: ignore[no-untyped-call]
            for index, parameter in parameters.items()
            if buckets.view(index) is not None and parameter.is_leaf and parameter.requires_grad
        ]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _take(self, index: int, parameter: torch.Tensor) -> None:
        """Moves a gradient to where it is pushed from."""
        gradient, view = parameter.grad, self._buckets.view(index)
        if gradient is view or gradient is None or view is None or gradient.requires_grad:
            return
        if gradient.layout is view.layout and gradient.device == view.device and gradient.dtype is view.dtype:
            view.copy_(gradient)
            parameter.grad = view
