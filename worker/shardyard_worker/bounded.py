"""Bounded staleness: asynchronous updates, and no worker more than so many steps ahead of another.

Stale synchronous parallel (Ho et al., NIPS 2013), by the servers: each exchange says how many steps this worker has
taken, and its values come once nobody else is too far behind. A worker joins beside the slowest with its first work,
and nobody waits for it while it has none (docs/ledger.md, rule C3).

Invariants: what a gradient of leased work is computed on was given by all servers for this worker's clock, or a later
one; a worker that waits for work, or has left its loop, has said so. Must not know: how servers count.
"""

from __future__ import annotations

import contextlib
from typing import NoReturn

from shardyard.ground import errors
from shardyard.ground.types import Pace, PushName, Stride
from shardyard_worker.router import Answer, Router, Wish
from shardyard_worker.strategies import NEWEST, AsyncStrategy, LostWork
from shardyard_worker.training import SLICE_MS, Sending, Training, explain


class BoundedStrategy(AsyncStrategy):
    def __init__(self, training: Training) -> None:
        """Raises ConfigurationError where a window is larger than the bound."""
        bound = self._bound_of(training)
        super().__init__(training)
        self._bound = bound
        self._turn = 0
        self._clock = 0
        self._resting = True
        self._leaves = False
        self._known_to: Router | None = None
        """Whose servers have heard how far this worker is."""

    @staticmethod
    def _bound_of(training: Training) -> int:
        bound = training.session.job_settings.consistency.staleness
        window = training.session.settings.worker.window
        if window > bound:
            raise errors.ConfigurationError(
                f"worker.window {window} in a job with job.consistency.staleness {bound}",
                why="a worker would wait for others to take steps that wait for its own",
                todo=f"set worker.window to {bound}, or job.consistency.staleness to {window}",
            )
        return bound

    def resume(self) -> None:
        # while it had nothing leased nobody told servers that were new to expect it
        if not self._resting and self._known_to is self._training.router:
            return
        self._training.complete()
        self._join()
        self._resting = False

    def rest(self) -> None:
        if self._resting:
            return
        with contextlib.suppress(LostWork):  # told where the work was given up; here only its end matters
            self.drain()
        self._training.complete()
        self._training.reach(lambda router: router.rest(self._turn))
        self._turn += 1
        self._resting = True

    def contribute(self, name: PushName | None, sending: Sending | None) -> None:
        if self._resting and not self._leaves:  # the script's own work, of which nobody could know before
            self.resume()
        super().contribute(name, sending)

    def leave(self, groups: tuple[tuple[float, ...], ...]) -> None:
        self.rest()
        self._leaves = True
        super().leave(groups)

    # ---- inside

    def _give_up(self, name: PushName, error: errors.ShardyardError) -> NoReturn:
        self._clock -= 1  # the step that was not taken
        super()._give_up(name, error)

    def _make_wish(self) -> Wish:
        if self._leaves:
            return NEWEST
        self._clock += 1
        return self._wish_at(Stride.STEPS)

    def _wish_at(self, stride: Stride) -> Wish:
        pace = Pace(stride, self._turn, self._clock, self._session.settings.worker.window)
        return Wish(0, exactly=False, wait_ms=SLICE_MS, prefetched=True, pace=pace)

    def _newest(self) -> Answer:
        if self._resting:
            return super()._newest()
        self._training.router.abandon_pull()
        return self._take(Answer())

    def _arrive(self, answer: Answer) -> None:
        if not answer.missing:
            self._known_to = self._training.router
            self._training.load(answer.ahead)
            return
        self._take(answer)

    def _join(self) -> None:
        """Takes its place beside the slowest."""
        self._training.router.abandon_pull()
        answer = self._pull(self._wish_at(Stride.JOINS))
        # servers may have heard of the others at different times; what they gave is asked for again, at one clock
        self._clock = max(self._clock, answer.clock)
        self._training.router.abandon_pull()
        self._take(answer)

    def _pull(self, wish: Wish) -> Answer:
        router = self._training.router
        answer = self._training.reach(lambda router: router.pull(wish))
        self._moved = self._moved or router is not self._training.router
        return answer

    def _take(self, answer: Answer) -> Answer:
        """Asks until nobody is too far behind for this worker's clock. `answer`: who is, as was said last."""
        wish = self._wish_at(Stride.STEPS)

        def waiting_for() -> str:
            return f"values in which at most {self._bound} steps of others are missing: {explain(answer)}"

        with self._session.vigil.over(waiting_for):
            while True:
                answer = self._pull(wish)
                if not answer.missing:
                    break
                self._session.check()
        self._known_to = self._training.router
        self._training.load(answer.ahead)
        self._step = max(self._step, answer.version_max)
        return answer
