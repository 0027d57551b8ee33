"""The gradients of table rows among the workers of a replica that push to partitions of their own (job.between
parameter_server).

A row's id says to which partition it belongs, and so which member pushes its gradient. Members that have computed
gradients of rows send them to these, which add up those of each row.

Must not know: steps, names of pushes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch

from shardyard.domain.ids import PartitionId
from shardyard_worker.collectives.collectives import Collectives
from shardyard_worker.rows.dedup import Float32s, Int64s, UniqueIds, sum_rows, unique_ids
from shardyard_worker.rows.row_codec import TableRows
from shardyard_worker.training.table_binding import Groups, TakenRows


def rows_in(rows: TableRows, own: Collection[PartitionId]) -> TableRows:
    """The rows that belong to these partitions."""
    starts = rows.found.starts
    kept = np.isin(np.arange(starts.size - 1), sorted(own))
    counts = np.where(kept, np.diff(starts), 0)
    chosen = np.repeat(kept, np.diff(starts))
    ends = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    found = UniqueIds(rows.found.ids[chosen], rows.found.places[:0], ends)
    return TableRows(rows.table, found, rows.values[chosen])


def own_rows(taken: TakenRows | None, own: Collection[PartitionId]) -> TakenRows | None:
    """Those that belong to these partitions. None if there are none."""
    kept = [] if taken is None else [rows_in(each, own) for each in taken.tables]
    return _taken([each for each in kept if each.found.ids.size], () if taken is None else taken.groups)


def exchange_rows(
    taken: TakenRows | None,
    groups: Groups,
    dims: Sequence[int],
    collectives: Collectives,
    owned: Sequence[Collection[PartitionId]],
    partitions: int,
) -> TakenRows | None:
    """Sends each row's gradient to the member whose partitions it belongs to, and returns those of this member, added
    up in the order of the members. None if there are none. All members call it together. `dims`: of all tables;
    `owned`: the partitions of each member; `partitions`: of the job. Raises GroupLost."""
    by_table = {} if taken is None else {each.table: each for each in taken.tables}
    none = UniqueIds(np.empty(0, np.int64), np.empty(0, np.int64), np.zeros(partitions + 1, np.int64))
    given = [by_table.get(at, TableRows(at, none, np.empty((0, dim), np.float32))) for at, dim in enumerate(dims)]
    sent = [[rows_in(each, own) for each in given] for own in owned]
    counts = torch.tensor([[each.found.ids.size for each in to] for to in sent], dtype=torch.int64)
    come = torch.empty_like(counts)
    each_way = [len(dims)] * len(owned)
    collectives.wait(collectives.exchange(come.view(-1), counts.view(-1), each_way, each_way))
    wide = torch.tensor(dims, dtype=torch.int64)
    ids = np.concatenate([each.found.ids for to in sent for each in to])
    values = np.concatenate([each.values.reshape(-1) for to in sent for each in to])
    got_ids = _exchanged(collectives, torch.from_numpy(ids), counts.sum(1), come.sum(1)).numpy()
    got_values = _exchanged(collectives, torch.from_numpy(values), counts @ wide, come @ wide).numpy()
    found = []
    for table, (table_ids, table_values) in enumerate(_by_table(got_ids, got_values, come.numpy(), dims)):
        if table_ids.size:
            order = unique_ids(table_ids, partitions)
            found.append(TableRows(table, order, sum_rows(table_values, order.places, order.ids.size)))
    return _taken(found, groups)


def _exchanged(collectives: Collectives, own: torch.Tensor, sent: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
    found = torch.empty(int(received.sum()), dtype=own.dtype)
    collectives.wait(collectives.exchange(found, own, received.tolist(), sent.tolist()))
    return found


def _by_table(ids: Int64s, values: Float32s, counts: Int64s, dims: Sequence[int]) -> list[tuple[Int64s, Float32s]]:
    """What came, in the order of the members and of the tables of each, by table."""
    ids_of: list[list[Int64s]] = [[] for _ in dims]
    values_of: list[list[Float32s]] = [[] for _ in dims]
    id_at = value_at = 0
    for of_member in counts.tolist():
        for table, (count, dim) in enumerate(zip(of_member, dims, strict=True)):
            ids_of[table].append(ids[id_at : id_at + count])
            values_of[table].append(values[value_at : value_at + count * dim].reshape(count, dim))
            id_at, value_at = id_at + count, value_at + count * dim
    return [(np.concatenate(a), np.concatenate(b)) for a, b in zip(ids_of, values_of, strict=True)]


def _taken(tables: Sequence[TableRows], groups: Groups) -> TakenRows | None:
    return TakenRows(tuple(tables), groups) if tables else None
