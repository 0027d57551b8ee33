"""The mean of the row gradients that the logical ranks of a step give, and its norm.

Owns: the arithmetic. Invariants: a row's mean is the sum of share times gradient over the ranks that have the row, in
the order given; each product and each sum is rounded to float32, as in dense blocks. So its bits depend neither on
which other rows there are nor on which worker computed what. Ids ascend in arguments and results. All memory is
allocated before anything changes. Must not know: tables, ranks, steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from shardyard.domain.compiling import compiled
from shardyard.domain.errors import TooLarge
from shardyard.domain.tables.row_ids import writable
from shardyard_ps_server.rows.pushed_rows import Floats, PushedTableRows
from shardyard_ps_server.values import kernels


def mean_of(
    given: Sequence[Sequence[PushedTableRows]], shares: Sequence[float], limit: float = 0.0
) -> tuple[PushedTableRows, ...]:
    """Returns the weighted mean of the row gradients of a step's members, table by table. Elements beyond `limit`,
    unless that is 0, are clipped to it. The result may share arrays with a member. Raises TooLarge."""
    tables: dict[int, list[tuple[PushedTableRows, float]]] = {}
    for rows, share in zip(given, shares, strict=True):
        for each in rows:
            tables.setdefault(each.table, []).append((each, share))
    with _memory():
        return tuple([_mean_of_table(tables[number], limit) for number in sorted(tables)])


def _mean_of_table(given: Sequence[tuple[PushedTableRows, float]], limit: float) -> PushedTableRows:
    first, share = given[0]
    if len(given) == 1 and share == 1.0 and not limit:
        return first._replace(now_ms=None)
    ids = np.unique(np.concatenate([each.ids for each, _ in given]))
    values = np.empty((ids.size, first.values.shape[1]), np.float32)
    has = np.zeros(ids.size, np.bool_)
    counted = len(given) > 1 or first.counts is not None
    counts = np.zeros(ids.size, np.int64) if counted else None
    for each, share in given:
        places = np.searchsorted(ids, each.ids)
        _add(writable(places), each.values, np.float32(share), values, has)
        if counts is not None:
            counts[places] += 1 if each.counts is None else each.counts
    if limit:
        np.clip(values, -limit, limit, out=values)
    return PushedTableRows(first.table, ids, values, counts)


def scaled(rows: Sequence[PushedTableRows], scale: float) -> Sequence[PushedTableRows]:
    """Raises TooLarge."""
    if scale == 1.0:
        return rows
    with _memory():
        return tuple([each._replace(values=each.values * np.float32(scale)) for each in rows])


def square_norm(rows: Sequence[PushedTableRows]) -> float:
    """Returns the sum of the squares of all elements, in float64, table by table in the order of ids."""
    total = 0.0
    for each in rows:
        total += kernels.square_norm(each.values.reshape(-1))
    return total


def warm() -> None:
    """Compiles the loops."""
    rows = [PushedTableRows(0, np.arange(2, dtype=np.int64), np.ones((2, 1), np.float32))]
    square_norm(mean_of([rows, rows], [0.5, 0.5]))


@contextmanager
def _memory() -> Iterator[None]:
    try:
        yield
    except MemoryError:
        raise TooLarge("the mean of rows needs memory that this server does not have") from None


@compiled
def _add(
    places: npt.NDArray[np.int64], values: Floats, share: np.float32, sums: Floats, has: npt.NDArray[np.bool_]
) -> None:
    for i in range(places.size):
        row = places[i]
        if has[row]:
            for c in range(sums.shape[1]):
                sums[row, c] += values[i, c] * share
        else:
            has[row] = True
            for c in range(sums.shape[1]):
                sums[row, c] = values[i, c] * share
