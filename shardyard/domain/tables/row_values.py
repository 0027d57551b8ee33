"""The first values of a row: a function of (seed, table, id), so they do not depend on when the row is made.

Owns: the generators. Invariant: only operations that are rounded exactly (+, -, *, /, square root), one at a time, so
that each processor, and numpy, gives the same bits. Must not know: where rows are kept.
"""

from __future__ import annotations

import hashlib
import math
from typing import Final

import numpy as np
import numpy.typing as npt

from shardyard.domain.compiling import compiled
from shardyard.domain.tables.initial_values import InitialValues
from shardyard.domain.tables.row_ids import Ids, writable
from shardyard.domain.tables.splitmix_loops import drawn, mixed

Rows = npt.NDArray[np.float32]


def row_key(seed: int, table: str) -> int:
    """64 bits of the seed and the table's name. With the id they determine a row's first values."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {table}".encode(), digest_size=8).digest(), "little")


def initial_rows(ids: Ids, dim: int, initial: InitialValues, key: int) -> Rows:
    """The initial values of the rows of `ids` (int64, shape (n,)): float32, shape (n, dim). `key`: of `row_key`."""
    assert ids.dtype == np.int64
    assert ids.ndim == 1
    out = np.empty((ids.size, dim), np.float32)
    _fill_rows(out, initial.kind.value, np.float64(initial.scale), np.uint64(key), writable(ids))
    return out


@compiled
def _fill_rows(out: Rows, kind: int, scale: np.float64, key: np.uint64, ids: Ids) -> None:
    for i in range(ids.size):
        fill_row(out[i], kind, scale, key, ids[i])


_S12, _S40 = np.uint64(12), np.uint64(40)
_UNIT: Final = np.float32(2.0**-23)
_ONE: Final = np.float32(1)


@compiled
def fill_row(row: Rows, kind: int, scale: np.float64, key: np.uint64, number: np.int64) -> None:
    """The initial values of the row of the id `number`; `row`: float32, shape (dim,)."""
    if kind == 0:
        row[:] = 0
        return
    start = mixed(np.uint64(number) ^ key)
    if kind == 1:
        width = np.float32(scale)
        for d in range(row.size):
            row[d] = (np.float32(drawn(start, d) >> _S40) * _UNIT - _ONE) * width
    else:
        for d in range(row.size):
            # 52 bits and a half: never 0 or 1
            share = (np.float64(drawn(start, d) >> _S12) + 0.5) * 2.0**-52
            row[d] = np.float32(_quantile(share) * scale)


@compiled
def _quantile(p: float) -> float:
    """The quantile of the standard normal distribution at p, 0 < p < 1. Wichura, Algorithm AS 241: The
    Percentage Points of the Normal Distribution (Applied Statistics 37, 1988), to about 16 digits."""
    q = p - 0.5
    if abs(q) <= 0.425:
        r = 0.180625 - q * q
        above = 2.50908092873012267270e3 * r + 3.34305755835881281050e4
        above = (above * r + 6.72657709270087008530e4) * r + 4.59219539315498714570e4
        above = (above * r + 1.37316937655094611250e4) * r + 1.97159095030655144270e3
        above = (above * r + 1.33141667891784377450e2) * r + 3.38713287279636660800e0
        below = 5.22649527885285456100e3 * r + 2.87290857357219426740e4
        below = (below * r + 3.93078958000927106100e4) * r + 2.12137943015865958670e4
        below = (below * r + 5.39419602142475110770e3) * r + 6.87187007492057908300e2
        below = (below * r + 4.23133307016009112520e1) * r + 1.0
        return above * q / below
    r = math.sqrt(-_logarithm(p if q <= 0.0 else 1.0 - p))
    if r <= 5.0:
        r = r - 1.6
        above = 7.74545014278341407640e-4 * r + 2.27238449892691845833e-2
        above = (above * r + 2.41780725177450611770e-1) * r + 1.27045825245236838258e0
        above = (above * r + 3.64784832476320460504e0) * r + 5.76949722146069140550e0
        above = (above * r + 4.63033784615654529590e0) * r + 1.42343711074968357734e0
        below = 1.05075007164441684324e-9 * r + 5.47593808499534494600e-4
        below = (below * r + 1.51986665636164571966e-2) * r + 1.48103976427480074590e-1
        below = (below * r + 6.89767334985100004550e-1) * r + 1.67638483018380384940e0
        below = (below * r + 2.05319162663775882187e0) * r + 1.0
    else:
        r = r - 5.0
        above = 2.01033439929228813265e-7 * r + 2.71155556874348757815e-5
        above = (above * r + 1.24266094738807843860e-3) * r + 2.65321895265761230930e-2
        above = (above * r + 2.96560571828504891230e-1) * r + 1.78482653991729133580e0
        above = (above * r + 5.46378491116411436990e0) * r + 6.65790464350110377720e0
        below = 2.04426310338993978564e-15 * r + 1.42151175831644588870e-7
        below = (below * r + 1.84631831751005468180e-5) * r + 7.86869131145613259100e-4
        below = (below * r + 1.48753612908506148525e-2) * r + 1.36929880922735805310e-1
        below = (below * r + 5.99832206555887937690e-1) * r + 1.0
    return -above / below if q < 0.0 else above / below


@compiled
def _logarithm(x: float) -> float:
    """The natural logarithm of a normal number, by the series of atanh((m - 1) / (m + 1)) of its significand m: a
    library's logarithm differs in its last bits from machine to machine."""
    m, e = math.frexp(x)
    if m < 0.70710678118654752:
        m, e = m * 2.0, e - 1
    s = (m - 1.0) / (m + 1.0)
    square = s * s
    total = 0.0
    for n in range(23, 0, -2):
        total = total * square + 1.0 / n
    return 2.0 * s * total + e * 0.69314718055994530942
