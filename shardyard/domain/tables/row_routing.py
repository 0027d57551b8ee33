"""The partitions of a batch of ids: the same as row_ids.partition_of, in one compiled pass."""

from __future__ import annotations

from typing import Final

import numpy as np

from shardyard.domain.compiling import compiled
from shardyard.domain.tables.row_ids import Ids, Partitions, check, writable
from shardyard.domain.tables.splitmix_loops import mixed

_S32: Final = np.uint64(32)


@compiled
def put_partitions(ids: Ids, partitions: int, out: Partitions) -> None:
    """For loops that are compiled: sets out[i] to the partition of ids[i]."""
    count = np.uint64(partitions)
    for i in range(ids.size):
        out[i] = np.int32((mixed(np.uint64(ids[i])) >> _S32) * count >> _S32)


@compiled
def _first_misplaced(ids: Ids, counts: Ids, owners: Ids, partitions: int) -> int:
    of, begin = np.uint64(partitions), 0
    for k in range(counts.size):
        for i in range(begin, begin + counts[k]):
            if np.int64((mixed(np.uint64(ids[i])) >> _S32) * of >> _S32) != owners[k]:
                return i
            if i > begin and ids[i] <= ids[i - 1]:
                return i
        begin += counts[k]
    return -1


def first_misplaced(ids: Ids, counts: Ids, owners: Ids, partitions: int) -> int | None:
    """The place of the first id that is in the wrong partition, or not larger than the one before it in its partition;
    None: all are right. The first counts[0] ids should be in partition owners[0], the next counts[1] in owners[1], and
    so on. All int64."""
    check(ids, partitions)
    found = _first_misplaced(writable(ids), counts, owners, partitions)
    return None if found < 0 else found


def partition_of(ids: Ids, partitions: int) -> Partitions:
    """The partition of each id, in [0, partitions): int32, shape (n,). `ids`: int64, shape (n,)."""
    check(ids, partitions)
    out = np.empty(ids.size, np.int32)
    put_partitions(writable(ids), partitions, out)
    return out
