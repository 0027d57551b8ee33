"""Hybrid steps: variables as in a synchronous job, rows of tables as in an asynchronous one
(docs/guides/consistency.md).

A worker's part of a step is one push, under the name of its logical rank and step. Servers record its gradients of
variables until all ranks are there, and update its rows at once; each partition's ledger knows what of both has
counted, in two lanes (docs/internals/ledger.md, rule A1). So no look-up waits for a step. Rows that the script
announces come along with the values of the step that they are used for (Lian et al., *Persia*, KDD 2022).

Invariant: rows that come along with step t contain all pushes of the steps before t, of every rank; they are used for
step t alone. Must not know: how rows are asked for.
"""

from __future__ import annotations

from shardyard.domain.ids import Rank
from shardyard.domain.push_names import SourceKey
from shardyard_worker.consistency.synchronous import SyncStrategy
from shardyard_worker.rows.row_prefetch import RowPrefetch


class HybridStrategy(SyncStrategy):
    """Mode `hybrid`."""

    def _keys(self, rank: Rank) -> list[SourceKey]:
        keys = super()._keys(rank)
        return [*keys, *[key.of_rows for key in keys]]

    def rows_version(self) -> int | None:
        """The newest: all steps before that of the version at hand have counted."""
        return None

    def _load(self, ahead: RowPrefetch | None = None) -> None:
        assert self._version is not None
        if self._trainer.cache is not None:
            self._trainer.cache.begin(self._version)
        super()._load(ahead)
