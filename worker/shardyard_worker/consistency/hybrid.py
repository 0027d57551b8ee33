"""Hybrid steps: variables as in a synchronous job, rows of tables as in an asynchronous one (docs/consistency.md).

A worker's part of a step is one push, under the name of its logical rank and step. Servers record its gradients of
variables until all ranks are there, and update its rows at once; each partition's ledger knows what of both has
counted, in two lanes (docs/ledger.md, rule A1). So no look-up waits for a step: rows come along with the values of the
next one or, so many steps before their own, while those before are computed (Lian et al., *Persia*, KDD 2022).

Invariants: the rows that came ahead for step t lack no push of a step before t - rows_in_flight, of any rank; they are
used for step t alone; where a job goes back, none that was asked for before is used after. Must not know: how rows are
asked for.
"""

from __future__ import annotations

from shardyard.domain.ids import Rank
from shardyard.domain.push_names import SourceKey
from shardyard_worker.consistency.async_lookups import AsyncLookups
from shardyard_worker.consistency.strategies import SyncStrategy
from shardyard_worker.rows.row_prefetch import RowPrefetch
from shardyard_worker.training.trainer import Trainer


class HybridStrategy(SyncStrategy):
    """As SyncStrategy, with rows that were asked for ahead."""

    def __init__(self, training: Trainer) -> None:
        super().__init__(training)
        self._depth = self._session.job_settings.consistency.rows_in_flight
        self._flights = AsyncLookups(self._depth, self._session.wait_registry) if self._depth else None

    def close(self) -> None:
        if self._flights is not None:
            self._flights.close()

    def _keys(self, rank: Rank) -> list[SourceKey]:
        keys = super()._keys(rank)
        return [*keys, *[key.of_rows for key in keys]]

    def _version_of_rows(self) -> int | None:
        """As they are now: all steps before that of the version at hand have counted."""
        return None

    def _ask_along(self) -> RowPrefetch | None:
        return super()._ask_along() if self._flights is None else None

    def _load(self, ahead: RowPrefetch | None = None) -> None:
        assert self._version is not None
        if self._training.cache is not None:
            self._training.cache.begin(self._version)
        super()._load(ahead if self._flights is None else self._flights.take(self._version))
        self._look_further(self._version)

    def _look_further(self, version: int) -> None:
        """Begins the look-ups of the steps to come that are not under way."""
        if self._flights is None:
            return
        for step in range(version + 1, version + self._depth + 1):
            if step not in self._flights:
                ahead = self._training.ask_ahead(step, step - version, along=False)
                if ahead is not None:
                    self._flights.begin(step, ahead, self._training.asking(ahead))

    def _forget_rows(self) -> None:
        super()._forget_rows()
        if self._flights is not None:
            self._flights.clear()
