"""Look-ups of rows that are under way while steps before theirs are computed (hybrid mode).

Owns: one look-up for each of the next steps, and the threads in which they wait for servers. Invariants: what is taken
for a step was asked for it, `depth` steps before at most; a look-up that failed is as one that was never asked, since
whoever lacks rows looks them up by himself; one that was begun under a map that is not the job's any more is taken by
nobody. Must not know: models, how servers are asked.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from shardyard.domain.errors import ShardyardError
from shardyard.runtime.waits import WaitRegistry
from shardyard_worker.exchange.server_group import MapChanged
from shardyard_worker.rows.row_prefetch import RowPrefetch

log = logging.getLogger("shardyard.worker")


@dataclass(frozen=True)
class _Flight:
    rows: RowPrefetch
    landed: Future[None]


class AsyncLookups:
    """Used by the thread that trains."""

    def __init__(self, depth: int, wait_registry: WaitRegistry) -> None:
        """`depth`: so many steps before its own a look-up begins."""
        self._wait_registry = wait_registry
        self._pool = ThreadPoolExecutor(depth, "rows ahead")
        self._flights: dict[int, _Flight] = {}

    def __contains__(self, step: int) -> bool:
        return step in self._flights

    def begin(self, step: int, rows: RowPrefetch, ask: Callable[[], None]) -> None:
        """`ask` puts what servers answer into `rows`."""
        self._flights[step] = _Flight(rows, self._pool.submit(ask))

    def take(self, step: int) -> RowPrefetch | None:
        """The rows for a step, once they have come; None where none have been asked for, or they did not come. What was
        asked for steps before is not taken any more."""
        flight = self._flights.get(step)
        self._flights = {number: each for number, each in self._flights.items() if number > step}
        if flight is None:
            return None
        with self._wait_registry.over(lambda: f"rows of step {step}, which are looked up ahead"):
            wait([flight.landed])
        error = flight.landed.exception()
        if error is None:
            return flight.rows
        # a router that was closed meanwhile, for another map, takes no more calls: RuntimeError
        if not isinstance(error, ShardyardError | MapChanged | RuntimeError):
            raise error
        log.debug("rows of step %d are looked up when they are needed: %s", step, error)
        return None

    def clear(self) -> None:
        """Nothing that was asked for is taken any more."""
        self._flights.clear()

    def close(self) -> None:
        """No thread is left."""
        self.clear()
        with self._wait_registry.over(lambda: "rows that are looked up ahead, and are not needed any more"):
            self._pool.shutdown(cancel_futures=True)
