"""The mean of what the logical ranks of a step give for the rows of one table, and the norm of it.

Owns: the arithmetic. Invariants: a row's mean is the sum of share times gradient over the ranks that have it, in the
order given, each product and each sum rounded to float32, as blocks have it; so its bits depend neither on which other
rows there are nor on who computed what. Ids ascend, before and after. All memory is asked for before anybody changes
anything. Must not know: tables, ranks, steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardyard.domain.compiling import compiled
from shardyard.domain.errors import TooLarge
from shardyard.domain.tables.row_ids import Ids, writable
from shardyard_ps_server.values import kernels

Floats = npt.NDArray[np.float32]
Counts = npt.NDArray[np.int64]


class Given(NamedTuple):
    """What one rank gives: ids, shape (n,), ascending, each once; gradients, shape (n, dim); how often each id occurred
    (None: once); the rank's share of the mean."""

    ids: Ids
    values: Floats
    counts: Counts | None
    share: float


class Mean(NamedTuple):
    """As Given, of all ranks together. Arrays may be a rank's own."""

    ids: Ids
    values: Floats
    counts: Counts | None


def mean_of(given: Sequence[Given], limit: float = 0.0) -> Mean:
    """Elements beyond `limit`, unless that is 0, are brought to it. Raises TooLarge where there is no memory."""
    with _memory():
        if len(given) == 1 and given[0].share == 1.0 and not limit:
            return Mean(*given[0][:3])
        ids = np.unique(np.concatenate([each.ids for each in given]))
        values = np.empty((ids.size, given[0].values.shape[1]), np.float32)
        has = np.zeros(ids.size, np.bool_)
        counted = any(each.counts is not None for each in given) or len(given) > 1
        counts = np.zeros(ids.size, np.int64) if counted else None
        for each in given:
            places = np.searchsorted(ids, each.ids)
            _add(writable(places), each.values, np.float32(each.share), values, has)
            if counts is not None:
                counts[places] += 1 if each.counts is None else each.counts
        if limit:
            np.clip(values, -limit, limit, out=values)
        return Mean(ids, values, counts)


def scaled(mean: Mean, scale: float) -> Mean:
    """Raises TooLarge."""
    if scale == 1.0:
        return mean
    with _memory():
        return mean._replace(values=mean.values * np.float32(scale))


def square_norm(mean: Mean) -> float:
    """The sum of the squares of all elements, in double precision, in the order of ids."""
    found: float = kernels.square_norm(mean.values.reshape(-1))
    return found


def warm() -> None:
    """Compiles the loops."""
    ids, values = np.arange(2, dtype=np.int64), np.ones((2, 1), np.float32)
    square_norm(mean_of([Given(ids, values, None, 0.5)] * 2))


@contextmanager
def _memory() -> Iterator[None]:
    try:
        yield
    except MemoryError:
        raise TooLarge("the mean of rows, for which this server has no memory") from None


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
