"""Hybrid steps: variables are synchronous, rows of tables asynchronous (docs/guides/consistency.md).

A worker's part of a step is one push, named by its logical rank and step. Servers hold its gradients of variables until
all ranks are there, and update its rows at once. Each partition's ledger records what has counted of both, in two lanes
(docs/internals/ledger.md, rule A1). So no look-up waits for a step. Rows that the script announces arrive with the
values of the step that uses them (Lian et al., *Persia*, KDD 2022).

Invariant: rows that arrive with step t contain all pushes of earlier steps, of every rank, and are used for step t
alone. Must not know: how rows are requested.
"""

from __future__ import annotations

from shardyard.domain.ids import Rank
from shardyard.domain.push_names import SourceKey
from shardyard_worker.consistency.synchronous import SyncStrategy


class HybridStrategy(SyncStrategy):
    """Mode `hybrid`."""

    def _keys(self, rank: Rank) -> list[SourceKey]:
        keys = super()._keys(rank)
        return [*keys, *[key.of_rows for key in keys]]

    def rows_version(self) -> int | None:
        """The newest rows: all steps before the current version's have counted."""
        return None
