"""Runs an update rule of the servers on plain arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardyard_ps_server.values import pieces
from shardyard_ps_server.values.optimizers import LONE, Optimizer
from shardyard_ps_server.values.pieces import Array


def take_step(
    rule: Optimizer,
    settings: Sequence[float],
    count: int,
    w_in: Array,
    g: Array,
    w_out: Array,
    state: Sequence[Array],
) -> None:
    """w_out from w_in and the gradient g. All arrays are 1-D, contiguous, aligned, of one length, all float32 or all
    float64; `w_out` overlaps neither input."""
    assert count >= 1
    assert all(_fits(w_in, a) for a in (w_in, g, w_out, *state))
    # numba would compile a second time for an array that may not be written
    old = (w_in if w_in.flags.writeable else w_in.copy()).view(np.uint8)
    new, gradient = w_out.view(np.uint8), g.view(np.uint8)
    sources = np.array([pieces.locate(old, new, gradient, g.itemsize)])
    assert sources[0] != 0 or not old.size
    nothing: Array = np.empty(0, w_in.dtype)
    task = (old, new, sources, LONE, nothing, nothing, 0, old.size)
    rule.update(settings, count, task, [array.view(np.uint8) for array in state])


def _fits(w: Array, a: Array) -> bool:
    return a.ndim == 1 and a.size == w.size and a.dtype == w.dtype and a.flags.c_contiguous and a.flags.aligned
