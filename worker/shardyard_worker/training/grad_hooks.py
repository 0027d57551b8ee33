"""The model's `.grad`s as views on the memory that is pushed, so that a push copies nothing.

Owns: the hooks that autograd calls when a gradient is there. Invariants: a `.grad` always means what it does in torch,
only its memory differs: None stays None, accumulation accumulates, and what the script writes into it is pushed. A
gradient that cannot be a view (its variable is cut, or on a GPU) is copied: from a GPU beside the computation,
otherwise when it is pushed. Must not know: when gradients are pushed, and where to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch.utils.hooks import RemovableHandle

from shardyard.domain.limits import KIB
from shardyard_worker.exchange.buffers.flat_buffers import FlatBuffers

Ready = Callable[[int, Callable[[], None] | None], None]

WATCHED_BYTES_MIN = 16 * KIB
"""A smaller gradient is copied when it is pushed, in less time than autograd takes to call a hook."""


class GradHooks:
    """Watches parameters, by index of their variable."""

    def __init__(
        self,
        buffers: FlatBuffers,
        parameters: Mapping[int, torch.Tensor],
        *,
        ready: Ready | None = None,
        partial_now: Callable[[], bool] = lambda: False,
    ) -> None:
        """`ready` is called with a gradient's index and a function; once that returns, the gradient is in its view.
        A later backward may still add to it. `partial_now`: whether one surely will; then the gradient is neither
        announced nor copied yet."""
        self._buffers = buffers
        self._ready = ready
        self._partial_now = partial_now
        self._handles: list[RemovableHandle] = [
            parameter.register_post_accumulate_grad_hook(partial(self._take, index))  # type: ignore[no-untyped-call]
            for index, parameter in parameters.items()
            if (
                buffers.carries(parameter)
                or ((ready is not None or parameter.nbytes >= WATCHED_BYTES_MIN) and buffers.view(index) is not None)
            )
            and parameter.is_leaf
            and parameter.requires_grad
        ]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _take(self, index: int, parameter: torch.Tensor) -> None:
        """Moves a gradient to the memory from which it is pushed."""
        gradient, view = parameter.grad, self._buffers.view(index)
        if gradient is None or gradient.requires_grad:
            return
        if gradient is view:
            self._tell(index)
            return
        if self._buffers.carries(gradient):
            if self._partial_now():
                return
            wait = self._buffers.take(index, gradient)
            if wait is not None:
                self._tell(index, wait)
            return
        if view is None:
            return
        if gradient.layout is view.layout and gradient.device == view.device and gradient.dtype is view.dtype:
            view.copy_(gradient)
            parameter.grad = view
            self._tell(index)

    def _tell(self, index: int, wait: Callable[[], None] | None = None) -> None:
        if self._ready is not None and not self._partial_now():
            self._ready(index, wait)
