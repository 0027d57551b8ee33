"""Looks up the rows of the next step's batches while gradients are summed and the step is taken.

Rows have the next version when the servers have recorded those of all members; that is before the sums are complete.
Owns: the thread that looks up. Invariant: rows are of the version that they were looked up for, or there are none, and
the forward looks them up itself. Must not know: which ids the next batches have.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor

from shardyard.domain.errors import ShardyardError
from shardyard_worker.exchange.fan_out import MapChanged
from shardyard_worker.rows.row_prefetch import RowPrefetch
from shardyard_worker.training.trainer import Trainer

log = logging.getLogger("shardyard.worker")


class RowsAhead:
    """One look-up at a time, for the thread that trains."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._pool = ThreadPoolExecutor(1, "rows-ahead")
        self._under_way: Future[RowPrefetch] | None = None

    def begin(self, ahead: RowPrefetch, version: int) -> None:
        """Looks up rows of that version, which comes with the step at hand."""
        reads = self._trainer.router.rows
        questions = {server: ahead.question(owned) for server, owned in reads.owned.items()}
        asked = {server: [] if question is None else [question] for server, question in questions.items()}

        def look_up() -> RowPrefetch:
            reads.look_up(asked, ahead.rows, version)
            return ahead

        self._under_way = self._pool.submit(look_up)

    def take(self) -> RowPrefetch | None:
        """The rows that `begin` has asked for; waits for them."""
        under_way, self._under_way = self._under_way, None
        if under_way is None:
            return None
        try:
            with self._trainer.session.wait_registry.over(lambda: "rows of the next step"):
                return under_way.result()
        except (MapChanged, ShardyardError) as error:
            log.info("the forward looks up its rows: %s", error)
            return None

    def drop(self) -> None:
        """The step at hand is not taken. What is under way ends by itself."""
        self._under_way = None

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
