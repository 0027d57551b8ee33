"""Turns rows into outputs: one for each id, or one for each bag of ids, with gradients.

Owns: gathering and pooling as functions of autograd, over places in a list of distinct rows. Results are those of
`torch.nn.functional.embedding` and `embedding_bag`. The gradients of a row are summed here in the order of its
occurrences; the gradient of a single occurrence is never stored. All is on the CPU in float32, whatever the model's
device: rows come from servers through host memory, and pooled outputs are smaller. Must not know: ids, tables.
"""

from __future__ import annotations

import enum
from typing import Any, Final

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from shardyard.domain.compiling import compiled
from shardyard_worker.rows.dedup import Float32s, Int32s, Int64s, sum_rows

_NO_WEIGHTS: Final = np.empty(0, np.float32)


class Mode(enum.StrEnum):
    """How a bag's rows become one."""

    SUM = "sum"
    MEAN = "mean"
    MAX = "max"


def gather(rows: torch.Tensor, places: Int64s) -> torch.Tensor:
    """Shape (n, dim): rows[places]. `rows`: shape (m, dim), float32, on the CPU."""
    found: torch.Tensor = _Gathered.apply(rows, places)  # type: ignore[no-untyped-call]
    return found


def pool(
    rows: torch.Tensor, places: Int64s, starts: Int64s, mode: Mode, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Shape (bags, dim): bag b is the sum, mean or maximum of rows[places[starts[b]:starts[b + 1]]], or zeros if that
    is empty. `weights`: shape (n,), float32, factors of the rows, only with SUM. Among equal maxima the first gets the
    gradient. All on the CPU; `starts` has been checked."""
    assert weights is None or mode is Mode.SUM
    found: torch.Tensor
    if mode is Mode.MAX:
        found = _Largest.apply(rows, places, starts)  # type: ignore[no-untyped-call]
    else:
        found = _Summed.apply(rows, weights, places, starts, mode is Mode.MEAN)  # type: ignore[no-untyped-call]
    return found


def _array(tensor: torch.Tensor) -> Float32s:
    array: Float32s = tensor.detach().contiguous().numpy()
    return array


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, places: Int64s) -> torch.Tensor:
        ctx.places, ctx.count = places, rows.shape[0]
        return rows.index_select(0, torch.from_numpy(places))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.from_numpy(sum_rows(_array(gradient), ctx.places, ctx.count)), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, weights: torch.Tensor | None, places: Int64s, starts: Int64s, mean: bool
    ) -> torch.Tensor:
        scales = _NO_WEIGHTS if weights is None else _array(weights)
        pooled = np.zeros((starts.size - 1, rows.shape[1]), np.float32)
        _sum_bags(_array(rows), scales, places, starts, mean, pooled)
        ctx.save_for_backward(rows if weights is not None and weights.requires_grad else None, weights)
        ctx.count, ctx.places, ctx.starts, ctx.mean = rows.shape[0], places, starts, mean
        return torch.from_numpy(pooled)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None, None]:
        rows, weights = ctx.saved_tensors
        above = _array(gradient)
        to_rows = to_weights = None
        if ctx.needs_input_grad[0]:
            sums = np.zeros((ctx.count, above.shape[1]), np.float32)
            scales = _NO_WEIGHTS if weights is None else _array(weights)
            _sum_gradients(above, scales, ctx.places, ctx.starts, ctx.mean, sums)
            to_rows = torch.from_numpy(sums)
        if rows is not None:
            products = np.empty(ctx.places.size, np.float32)
            _multiply(_array(rows), above, ctx.places, ctx.starts, products)
            to_weights = torch.from_numpy(products)
        return to_rows, to_weights, None, None, None


class _Largest(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, places: Int64s, starts: Int64s) -> torch.Tensor:
        pooled = np.zeros((starts.size - 1, rows.shape[1]), np.float32)
        winners = np.full(pooled.shape, -1, np.int32)
        _largest(_array(rows), places, starts, pooled, winners)
        ctx.count, ctx.winners = rows.shape[0], winners
        return torch.from_numpy(pooled)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        above = _array(gradient)
        sums = np.zeros((ctx.count, above.shape[1]), np.float32)
        _sum_winners(above, ctx.winners, sums)
        return torch.from_numpy(sums), None, None


# ---- loops


@compiled
def _sum_bags(rows: Float32s, weights: Float32s, places: Int64s, starts: Int64s, mean: bool, pooled: Float32s) -> None:
    one = np.float32(1)
    for b in range(starts.size - 1):
        for i in range(starts[b], starts[b + 1]):
            row, weight = places[i], weights[i] if weights.size else one
            for c in range(rows.shape[1]):
                pooled[b, c] += weight * rows[row, c]
        if mean and starts[b + 1] > starts[b]:
            length = np.float32(starts[b + 1] - starts[b])
            for c in range(rows.shape[1]):
                pooled[b, c] /= length


@compiled
def _sum_gradients(
    above: Float32s, weights: Float32s, places: Int64s, starts: Int64s, mean: bool, sums: Float32s
) -> None:
    one = np.float32(1)
    for b in range(starts.size - 1):
        share = one / np.float32(starts[b + 1] - starts[b]) if mean else one
        for i in range(starts[b], starts[b + 1]):
            row, weight = places[i], weights[i] if weights.size else share
            for c in range(above.shape[1]):
                sums[row, c] += weight * above[b, c]


@compiled
def _multiply(rows: Float32s, above: Float32s, places: Int64s, starts: Int64s, products: Float32s) -> None:
    for b in range(starts.size - 1):
        for i in range(starts[b], starts[b + 1]):
            row, product = places[i], np.float32(0)
            for c in range(rows.shape[1]):
                product += rows[row, c] * above[b, c]
            products[i] = product


@compiled
def _largest(rows: Float32s, places: Int64s, starts: Int64s, pooled: Float32s, winners: Int32s) -> None:
    for b in range(starts.size - 1):
        for i in range(starts[b], starts[b + 1]):
            row = places[i]
            for c in range(rows.shape[1]):
                if winners[b, c] < 0 or rows[row, c] > pooled[b, c]:
                    pooled[b, c] = rows[row, c]
                    winners[b, c] = row


@compiled
def _sum_winners(above: Float32s, winners: Int32s, sums: Float32s) -> None:
    for b in range(winners.shape[0]):
        for c in range(winners.shape[1]):
            if winners[b, c] >= 0:
                sums[winners[b, c], c] += above[b, c]
