"""Checks that a worker that leaves in order loses and repeats nothing (docs/internals/ledger.md, rule A18): no other
worker computes again what it has pushed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardyard.domain.ids import Incarnation
from shardyard.domain.push_names import PushName, RankSource, SourceKey
from shardyard_worker.consistency.synchronous import SyncStrategy
from shardyard_worker.data.feed import Feed
from shardyard_worker.session.drain import Drained

SETBACKS = frozenset(
    {
        "job_started",
        "job_resumed",
        "job_switched",
        "partitions_lost",
        "recovery_begun",
        "partitions_placed_again",
        "partitions_moved",
    }
)
"""Records after which partitions may lack what they had."""


class HandOvers:
    """Who has pushed which work of one run since partitions last went back."""

    def __init__(self) -> None:
        self.setbacks = 0
        self._pushed: dict[tuple[SourceKey, int], Incarnation] = {}
        self._left: set[Incarnation] = set()
        self._repeated: list[tuple[Incarnation, str]] = []

    def set_back(self) -> None:
        self.setbacks += 1
        self._pushed.clear()

    def pushes(self, worker: Incarnation, name: PushName) -> None:
        for sequence in range(name.first, name.last + 1):
            self._pushed[name.key, sequence] = worker

    def computes(self, worker: Incarnation, key: SourceKey, sequence: int) -> None:
        """A batch is given to the worker's script."""
        before = self._pushed.get((key, sequence))
        if before is not None and before != worker:
            self._repeated.append(
                (
                    before,
                    f"worker {worker} computes #{sequence} of {key.source} again, which worker {before} has pushed",
                )
            )

    def left(self, worker: Incarnation) -> None:
        """The coordinator has written down that the worker has left in order."""
        self._left.add(worker)

    def repeated(self) -> list[str]:
        """What was computed again of the work of those that have left in order."""
        return [f"{told}, and left in order" for worker, told in self._repeated if worker in self._left]


def watch_hand_overs(now: Callable[[], HandOvers]) -> Callable[[], None]:
    """Patches the worker, so that its batches and pushes are noted. Returns a function that undoes it."""
    real_contribute, real_fetch = Feed._contribute, Feed._fetch

    def contribute(self: Any, work: Any, sending: Any) -> None:
        before = now().setbacks
        try:
            real_contribute(self, work, sending)
        except Drained:  # in a wait for others; all servers may have the push
            if _is_recorded(self._strategy, work.name):
                note(self, work, before)
            raise
        note(self, work, before)

    def note(feed: Any, work: Any, before: int) -> None:
        if not work.lost and now().setbacks == before:
            now().pushes(feed._session.caller.incarnation, work.name)

    def fetch(self: Any, *given: Any) -> Any:
        name = self.work.name
        now().computes(self._session.caller.incarnation, name.key, name.last)
        return real_fetch(self, *given)

    Feed._contribute, Feed._fetch = contribute, fetch  # type: ignore[method-assign]

    def undo() -> None:
        Feed._contribute, Feed._fetch = real_contribute, real_fetch  # type: ignore[method-assign]

    return undo


def _is_recorded(strategy: Any, name: PushName) -> bool:
    source = name.key.source
    if not isinstance(strategy, SyncStrategy) or not isinstance(source, RankSource):
        return False
    held = strategy.ranks.held.get(source.rank)
    return held is not None and held.next > name.last
