"""A product of two thin matrices: code POWERSGD.

Vogels, Karimireddy, Jaggi: *PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization*, NeurIPS
2019: one step of subspace iteration, P = orthogonalised(M Q), Q = M^T P, warm-started with the last Q, and feedback.
Departures: there is no all-reduce of P, so each worker sends its own P and Q and the servers add up the products P Q^T
(a sum of ranks, where the paper has one rank for all); a block of a variable is coded by itself, with the variable's
columns. Where factors are not smaller than the block, it travels RAW.

A block begins at any element: `Grid` says how many columns its matrix has, and at which column it begins. The missing
elements of the first and the last row count as zeros.

Bound: y is an orthogonal projection of the columns of x, so |x - y| <= |x| in 2-norms, and x = y where x has that rank
(up to rounding).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardyard.codecs.format.compiled import LANES, Array, Float32s, Uint8s
from shardyard.codecs.format.form import CodeId, Reader, varint, whole
from shardyard.domain.compiling import compiled
from shardyard.domain.compression import RANK_MAX
from shardyard.domain.limits import BLOCK_ELEMENTS_MAX

GAIN_MIN = 4
"""How much a grid with the variable's own columns must save. Otherwise the block is treated as a square."""
_DEPENDENT = 1e-5
"""A column of which less than this part of its length is left depends on the columns before it."""


@dataclass(frozen=True, slots=True)
class Grid:
    """A block as a matrix with `columns` columns. Its first element is in column `lead` of the first row."""

    columns: int
    lead: int = 0

    def rows(self, elements: int) -> int:
        return -(-(self.lead + elements) // self.columns)

    def factor_elements(self, elements: int, rank: int) -> int:
        return rank * (self.rows(elements) + self.columns)


def grid_of(shape: tuple[int, ...], offset: int, length: int, rank: int) -> Grid:
    """The grid for elements [offset, offset + length) of a variable: rows are its first dimension, columns all others
    together, as in the paper; a near square where a block has too few of such rows."""
    columns = math.prod(shape[1:])
    if columns > 0:
        own = Grid(columns, offset % columns)
        if GAIN_MIN * own.factor_elements(length, rank) <= length:
            return own
    return Grid(max(1, math.isqrt(max(0, length - 1)) + 1))


def encode_feedback(
    gradient: Array, before: Array, after: Array, grid: Grid, factor: Float32s
) -> tuple[Uint8s, Float32s] | None:
    """The code of gradient + before, and the factor to start from next time. Puts what the code leaves out into
    `after`.

    Arrays have shape (n,) and one dtype; `factor` has shape (rank, columns), and no row of zeros. None if the factors
    are not finite; then the content of `after` is undefined.
    """
    rank, n = factor.shape[0], gradient.size
    p = np.zeros((grid.rows(n), rank), np.float32)
    _project(gradient, before, after, grid.columns, grid.lead, factor, p)
    if not np.isfinite(p).all():
        return None
    _orthogonalise(p)
    q = np.zeros((rank, grid.columns), np.float32)
    _project_back(after, grid.columns, grid.lead, p, q)
    if not np.isfinite(q).all():
        return None
    _add(after, grid.columns, grid.lead, p, q, np.float32(-1))
    header = varint(grid.columns) + varint(grid.lead) + bytes((rank,))
    return whole(CodeId.POWERSGD, n, header, p, q), q


def decode(reader: Reader, out: Array) -> None:
    columns = reader.varint("columns", BLOCK_ELEMENTS_MAX, minimum=1)
    lead = reader.varint("lead", columns - 1)
    rank = reader.byte("rank", RANK_MAX)
    rows = Grid(columns, lead).rows(out.size)
    p = reader.float32s("left factor", rows * rank).reshape(rows, rank)
    q = reader.float32s("right factor", rank * columns).reshape(rank, columns)
    reader.end()
    out[:] = 0
    _add(out, columns, lead, p, q, np.float32(1))


@compiled
def _span(row: int, columns: int, lead: int, elements: int) -> tuple[int, int, int]:
    """Begin and end of a row in the block, and its first column."""
    start = max(0, row * columns - lead)
    return start, min(elements, (row + 1) * columns - lead), start + lead - row * columns


@compiled
def _dot(a: Array, b: Float32s, lanes: Array) -> Any:
    lanes[:] = 0
    whole = a.size - a.size % LANES
    for i in range(0, whole, LANES):
        left, right = a[i : i + LANES], b[i : i + LANES]
        for k in range(LANES):
            lanes[k] += left[k] * right[k]
    total = lanes.sum()
    for i in range(whole, a.size):
        total += a[i] * b[i]
    return total


@compiled
def _project(g: Array, before: Array, v: Array, columns: int, lead: int, q: Float32s, p: Float32s) -> None:
    """v = g + before; p = v q^T."""
    lanes = np.empty(LANES, v.dtype)
    for row in range(p.shape[0]):
        start, stop, column = _span(row, columns, lead, g.size)
        gs, es, vs = g[start:stop], before[start:stop], v[start:stop]
        for i in range(vs.size):
            vs[i] = gs[i] + es[i]
        for k in range(q.shape[0]):
            p[row, k] = np.float32(_dot(vs, q[k, column : column + vs.size], lanes))


@compiled
def _project_back(v: Array, columns: int, lead: int, p: Float32s, q: Float32s) -> None:
    """q += p^T v."""
    for row in range(p.shape[0]):
        start, stop, column = _span(row, columns, lead, v.size)
        vs = v[start:stop]
        for k in range(q.shape[0]):
            weight = p[row, k]
            qs = q[k, column : column + vs.size]
            for i in range(vs.size):
                qs[i] += np.float32(weight * vs[i])


@compiled
def _add(out: Array, columns: int, lead: int, p: Float32s, q: Float32s, sign: np.float32) -> None:
    """out += sign p q, with a sign of 1 or -1."""
    for row in range(p.shape[0]):
        start, stop, column = _span(row, columns, lead, out.size)
        ys = out[start:stop]
        for k in range(q.shape[0]):
            weight = sign * p[row, k]
            qs = q[k, column : column + ys.size]
            for i in range(ys.size):
                ys[i] += weight * qs[i]


@compiled
def _orthogonalise(p: Float32s) -> None:
    """Modified Gram-Schmidt, each column twice, sums in float64. A column that depends on those before it becomes
    zeros."""
    for k in range(p.shape[1]):
        length = 0.0
        for i in range(p.shape[0]):
            length += np.float64(p[i, k]) * p[i, k]
        for _ in range(2):
            for other in range(k):
                dot = 0.0
                for i in range(p.shape[0]):
                    dot += np.float64(p[i, other]) * p[i, k]
                for i in range(p.shape[0]):
                    p[i, k] -= np.float32(dot * p[i, other])
        left = 0.0
        for i in range(p.shape[0]):
            left += np.float64(p[i, k]) * p[i, k]
        inverse = 1.0 / np.sqrt(left) if left > length * _DEPENDENT**2 and left > 1e-70 else 0.0
        for i in range(p.shape[0]):
            p[i, k] = np.float32(p[i, k] * inverse)
