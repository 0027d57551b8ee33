"""Ids of rows: any int64 is one, and a fixed mixer says which partition has its row.

Owns: `partition_of`. Invariants: partitions are uniform whatever the ids look like (running numbers, multiples,
hashes), and never change: checkpoints and clients of every release agree on where a row is. Whoever knows them can
choose ids that meet in one partition; a table's own index draws a private seed instead. Must not know: servers, maps of
partitions.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from shardyard.ground.compiling import compiled
from shardyard.ground.splitmix import mixed

Ids = npt.NDArray[np.int64]
Partitions = npt.NDArray[np.int32]

_S32: Final = np.uint64(32)


@compiled
def _put_partitions(ids: Ids, partitions: int, out: Partitions) -> None:
    count = np.uint64(partitions)
    for i in range(ids.size):
        out[i] = np.int32((mixed(np.uint64(ids[i])) >> _S32) * count >> _S32)


def partition_of(ids: Ids, partitions: int) -> Partitions:
    """The partition of each id, in [0, partitions): int32, shape (n,). `ids`: int64, shape (n,)."""
    assert ids.dtype == np.int64
    assert ids.ndim == 1
    assert 0 < partitions < 1 << 31
    out = np.empty(ids.size, np.int32)
    _put_partitions(writable(ids), partitions, out)
    return out


def writable(ids: Ids) -> Ids:
    """The same ids as the one kind of array for which loops are compiled: contiguous, and writable by type."""
    return np.require(ids, requirements=("C", "A", "W"))
