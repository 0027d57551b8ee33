"""Writes partitions into the files of a checkpoint: cut, copy, write, release.

Invariants: pushes and pulls go on meanwhile; a cut is released however the writing ends. Must not know: when a
checkpoint is due, manifests, how a checkpoint is read.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from shardyard.checkpoints import partition_file
from shardyard.checkpoints.manifest import FileRef, PartitionFile, TableEntry, partition_path
from shardyard.checkpoints.partition_file import BlockSource, PartitionHead
from shardyard.domain.errors import InvalidRequest, NotReady
from shardyard.domain.ids import Incarnation, PartitionId, Token, Version
from shardyard.domain.layout.layouts import JobLayout
from shardyard.domain.variables import DType
from shardyard.runtime.waits import WaitRegistry
from shardyard.storage.storage import Storage
from shardyard.storage.tensors import bytes_of
from shardyard_ps_server.checkpoint.table_saver import TableSaver
from shardyard_ps_server.partition.checkpoint_cuts import (
    await_named_cut,
    block_arrays,
    name_cut,
    take_cut,
    unname_cut,
    unseal,
)
from shardyard_ps_server.partition.partition import Cut, Partition
from shardyard_ps_server.rows.table_states import Since

log = logging.getLogger("shardyard.server")

REMEMBERED = 3
"""For how many checkpoints it is known which blocks of a partition have changed since."""


@dataclass(frozen=True)
class SaveRequest:
    """`step`: the version of a synchronous job to save; None: the present one. `base`: the number of a committed
    checkpoint; blocks that have not changed since are left out; 0: none. `wait_ms`: how long to wait for the step. With
    a log, `oldest` is the oldest checkpoint that may still be restored, and `logs` are the dead servers whose logs it
    needs. `attempt`: how many steps were named for this checkpoint before. `seal`: no partition changes after its cut,
    because another server continues from it.
    """

    number: int
    step: int | None
    base: int
    wait_ms: int
    oldest: int = 0
    logs: frozenset[Incarnation] = frozenset()
    attempt: int = 0
    seal: bool = False

    @property
    def place(self) -> tuple[int, int]:
        """The order of requests: a lower place is an earlier request."""
        return self.number, self.attempt


@dataclass(frozen=True)
class Saved:
    """A partition's file, with the blocks that are in it. `token`: the highest token in its ledger. `tables`: all files
    of each table."""

    partition: PartitionId
    version: Version
    file: PartitionFile
    token: Token
    tables: tuple[TableEntry, ...] = ()


@dataclass(frozen=True)
class _Written:
    """What a checkpoint has of a partition: its life, and the update count of each block."""

    life: int
    counts: npt.NDArray[np.int64]


class Saver:
    """Writes the partitions of one job on one server. One checkpoint at a time; `save` in any thread. A request that
    is repeated, however late, writes nothing: a manifest may name its files by then."""

    def __init__(self, server: Incarnation, wait_registry: WaitRegistry, layout: JobLayout) -> None:
        self._server = server
        self._wait_registry = wait_registry
        self._layout = layout
        self._tables = TableSaver(server)
        self._written: dict[PartitionId, dict[int, _Written]] = {}
        self._saving = threading.Lock()
        self._last: tuple[SaveRequest, list[Saved]] | None = None

    def save(
        self, partitions: Sequence[Partition], request: SaveRequest, storage: Storage, *, between: bool = False
    ) -> list[Saved]:
        """Writes all partitions. With `seal` they change no more after their cuts; otherwise, and after an error, none
        is sealed. `between`: cuts a synchronous job only between two steps (see `name_cut`). Raises InvalidRequest
        (facts: newest) if the step has passed, NotReady if it does not come in time or another checkpoint is being
        written, StorageUnavailable, TooLarge."""
        if not self._saving.acquire(blocking=False):
            raise NotReady(f"checkpoint {request.number} while server {self._server} writes another")
        try:
            if self._last is not None:
                last, saved = self._last
                if request.place == last.place:
                    return saved
                if request.place < last.place:
                    what = f"checkpoint {request.number}, attempt {request.attempt}"
                    raise InvalidRequest(f"{what}, after {last.number}, attempt {last.attempt}, was written")
            unseal(partitions)
            try:
                found = self._save_all(partitions, request, storage, between)
            except BaseException:
                unseal(partitions)
                raise
            self._last = request, found
            return found
        finally:
            self._saving.release()

    def _save_all(
        self, partitions: Sequence[Partition], request: SaveRequest, storage: Storage, between: bool
    ) -> list[Saved]:
        if request.step is None:
            return [
                self._save(
                    partition,
                    partial(take_cut, partition, self._since(partition, request), seal=request.seal),
                    request,
                    storage,
                )
                for partition in partitions
            ]
        until = time.monotonic() + request.wait_ms / 1000
        with ExitStack() as named:
            for partition in partitions:  # all, before any is waited for
                since = self._since(partition, request)
                name_cut(partition, request.step, between=between, since=since, seal=request.seal)
                named.callback(unname_cut, partition)
            return [
                self._save(
                    partition, partial(self._named, partition, request.number, request.step, until), request, storage
                )
                for partition in partitions
            ]

    def _named(self, partition: Partition, number: int, step: int, until: float) -> Cut:
        with self._wait_registry.over(lambda: f"step {step} of partition {partition.id}, for checkpoint {number}"):
            cut = await_named_cut(partition, until)
        if cut is None:
            raise NotReady(f"step {step} of partition {partition.id} for a checkpoint: it has not been reached in time")
        return cut

    def _save(self, partition: Partition, take: Callable[[], Cut], request: SaveRequest, storage: Storage) -> Saved:
        cut = take()
        try:
            cut.complete()
            tables = self._save_tables(partition, cut, request, storage)
            blocks = self._changed(cut, request.base)
            head = PartitionHead(partition.id, cut.version, cut.marks, cut.floor)
            sources = [self._source(partition, cut, index) for index in blocks]
            path = partition_path(request.number, partition.id, self._server)
            with self._wait_registry.over(lambda: f"{storage.locate(path)} to be written"):
                written = storage.write(path, partition_file.pieces(head, sources))
        finally:
            cut.release()
        self._remember(cut, request.number)
        token = max((mark.token for mark in cut.marks), default=Token(0))
        return Saved(partition.id, cut.version, PartitionFile(FileRef(path, written), tuple(blocks)), token, tables)

    def _since(self, partition: Partition, request: SaveRequest) -> Since:
        found = {
            name: self._tables.since(partition.id, name, table, request.base)
            for name, table in partition.tables.items()
        }
        return {name: generation for name, generation in found.items() if generation is not None}

    def _save_tables(
        self, partition: Partition, cut: Cut, request: SaveRequest, storage: Storage
    ) -> tuple[TableEntry, ...]:
        found = []
        for index, settings in enumerate(self._layout.tables):
            of_table = cut.tables[settings.name]
            what = f"table {settings.name!r} of partition {partition.id} to be written to {storage.url}"
            with self._wait_registry.over(lambda what=what: what):  # type: ignore[misc]
                found.append(self._tables.save(self._layout, partition.id, index, of_table, request.number, storage))
        return tuple(found)

    def _changed(self, cut: Cut, base: int) -> list[int]:
        before = self._written.get(cut.partition, {}).get(base)
        if before is None or before.life != cut.version.life:
            return list(range(len(cut.counts)))
        return [int(index) for index in np.flatnonzero(before.counts != cut.counts)]

    def _remember(self, cut: Cut, number: int) -> None:
        kept = self._written.setdefault(cut.partition, {})
        kept[number] = _Written(cut.version.life, cut.counts)
        for old in sorted(kept)[:-REMEMBERED]:
            del kept[old]

    def _source(self, partition: Partition, cut: Cut, index: int) -> BlockSource:
        arrays = block_arrays(partition, index, cut)
        values = arrays.pop("values")
        return BlockSource(
            index,
            DType(values.dtype.name),
            len(values),
            int(cut.counts[index]),
            partial(bytes_of, values),
            {name: partial(bytes_of, array) for name, array in arrays.items()},
        )
