"""The rows of the newest snapshot, for the tables of an evaluated model.

Owns: the pin under which they are read, and its renewal. Invariants: rows are pinned until the next snapshot is asked
for; if servers drop them, a synchronous job's model reads no others, and any other job's model reads those of a newer
version. Must not know: parameters, metrics.
"""

from __future__ import annotations

import logging
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial

import numpy as np
import torch

from shardyard.checkpoints.row_exports import row_sources
from shardyard.domain import errors
from shardyard.domain.consistency import UpdateMode
from shardyard.domain.layout.layouts import JobLayout
from shardyard.domain.variables import DType
from shardyard.runtime.waits import ExplainedWait
from shardyard.storage.tensors import TensorSource, bytes_of
from shardyard_worker.embedding.table import Table, tables_of
from shardyard_worker.embedding.table_io import Spool, spooled
from shardyard_worker.reader.pinned_rows import PinnedRows, Reads, bind
from shardyard_worker.reader.pinned_version import Leases, PinnedVersion, View
from shardyard_worker.reader.reader_session import ReaderSession
from shardyard_worker.reader.snapshots import AGAIN, Snapshots

log = logging.getLogger("shardyard.evaluator")


class SnapshotRows:
    """For one thread. The model that was bound may read rows in several."""

    def __init__(self, session: ReaderSession, snapshots: Snapshots) -> None:
        self._session = session
        self._snapshots = snapshots
        self._leases = Leases()
        self._renewing = threading.Lock()
        self._model: torch.nn.Module | None = None
        self._source: PinnedRows | None = None
        self._source_of: tuple[JobLayout, UpdateMode] | None = None
        self.held: PinnedVersion | None = None
        """The pin of the newest snapshot."""

    def hold(self, view: View, *, rows: bool = True) -> PinnedVersion:
        """Pins a version. Its leases are renewed until `release`, since reading it may take longer than one."""
        self.held = self._snapshots.hold(view, rows=rows)
        self._leases.keep(self.held)
        return self.held

    def release(self) -> None:
        held, self.held = self.held, None
        if self._source is not None:
            self._source.show(None)
        if held is not None:
            self._leases.release(held)

    def close(self) -> None:
        self.release()
        self._leases.close()

    def bind(self, model: torch.nn.Module) -> None:
        """From now on the model's tables read rows of the pinned version."""
        tables, self._model = tables_of(model), model
        if not tables or self.held is None:
            return
        view = self.held.view
        of = self._source_of
        if self._source is None or of is None or of[0] is not view.layout or of[1] is not view.mode:
            # synchronous: rows must be of the parameters' step; otherwise rows of any newer version will do
            self._source_of = view.layout, view.mode
            self._source = PinnedRows(view.layout, None if view.mode is UpdateMode.SYNC else self._renew)
        self._source.show(self.held.look_up, self.held.read_rows)
        bind(tables, view.layout, self._source)

    def _renew(self) -> Reads:
        """Pins a newer version after servers have dropped the old one. Raises VersionPassed if the job has ended and
        there is none."""
        why, job = "", self._session.name
        with self._renewing, ExplainedWait(lambda: f"rows of a new version of job {job}{why}", logger=log) as wait:
            lost, self.held = self.held, None
            if lost is not None and not lost.is_lost:
                self.held = lost
                return lost.look_up, lost.read_rows  # another thread has renewed it already
            if lost is not None:
                self._leases.release(lost)
            while True:
                news = self._session.ongoing()
                if news.has_ended and news.view is None:
                    raise errors.VersionPassed(f"rows of job {job}, which has ended: servers have dropped them")
                try:
                    if news.view is not None:
                        log.info("rows of job %s are those of a newer version from here on", job)
                        held = self.hold(news.view)
                        return held.look_up, held.read_rows
                except AGAIN as error:
                    why = f" ({error.what})"
                self._session.wait_for_news(news)
                wait.tick()

    def all_rows(self, spools: ExitStack) -> Iterator[TensorSource]:
        """Yields the rows of the bound model's tables under their names in its state dict. They are in files until
        `spools` ends. Raises VersionPassed, StorageUnavailable."""
        if self._model is None or self._source is None:
            return
        found: dict[Table, Spool] = {}
        for path, module in self._model.named_modules(remove_duplicate=False):
            if isinstance(module, Table) and module.source is self._source:
                prefix = (f"{path}." if path else "").replace("_orig_mod.", "")
                if module not in found:
                    found[module] = _spooled(module, spools)
                spool = found[module]
                yield from row_sources(prefix, spool.count, module.dim, spool.chunks)
                seed = np.array(module.seed, np.int64)
                yield TensorSource(prefix + "seed", DType.INT64, (), partial(bytes_of, seed))


def _spooled(table: Table, spools: ExitStack) -> Spool:
    """Reads all rows of a table. Raises VersionPassed, StorageUnavailable."""
    try:
        return spools.enter_context(spooled(table.dim, lambda: table.source.pieces(table)))
    except OSError as error:
        raise errors.StorageUnavailable(
            f"rows of table {table.name!r} cannot be kept in {tempfile.gettempdir()} for now ({error})",
            why="they wait there until all have come, to be written as one file",
            todo="make room there, or set TMPDIR to a folder that has room; or keep_best(rows=False)",
        ) from error
