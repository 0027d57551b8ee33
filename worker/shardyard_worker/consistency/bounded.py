"""Bounded staleness: asynchronous updates, and no worker more than so many steps ahead of another.

Stale synchronous parallel (Ho et al., NIPS 2013), by the servers: each exchange says how many steps this worker has
taken, and its values come once nobody else is too far behind. A worker joins beside the slowest with its first work,
and nobody waits for it while it has none (docs/ledger.md, rule C3). A job that is switched gets a bound, another one,
or none, between two steps.

Invariants: what a gradient of leased work is computed on was given by all servers for this worker's clock, or a later
one; a worker that waits for work, or has left its loop, has said so, to the servers of the newest map that it can know,
since those were told to expect it where it had work when the map was made; before it says its pace under a bound the
coordinator knows that it will. Without a bound it says none, and is an asynchronous worker like any. Must not know: how
servers count.
"""

from __future__ import annotations

import contextlib
import logging
from typing import NoReturn

from shardyard.domain import errors
from shardyard.domain.consistency import SspPhase, SspReport, UpdateMode
from shardyard.domain.push_names import PushName
from shardyard_worker.consistency.strategies import NEWEST, AsyncStrategy, LostWork
from shardyard_worker.exchange.requests import ExchangeResult, PullSpec
from shardyard_worker.exchange.server_group import ServerGroup
from shardyard_worker.rows.cache_rules import check_bound
from shardyard_worker.training.table_binding import Upcoming
from shardyard_worker.training.trainer import SLICE_MS, Trainer, explain
from shardyard_worker.training.variables import StepInput

log = logging.getLogger("shardyard.worker")


class BoundedStrategy(AsyncStrategy):
    """Of a job that has a bound, or had, or may get one."""

    def __init__(self, training: Trainer) -> None:
        """Raises ConfigurationError where a window is larger than the bound that the job was started with."""
        _check_window(training)
        super().__init__(training)
        self._consistency = self._session.consistency
        self._turn = 0
        self._clock = 0
        self._resting = True
        self._leaves = False
        self._known_to: ServerGroup | None = None
        """Whose servers have heard how far this worker is."""
        self._rest_known_to: ServerGroup | None = None
        """Whose servers have heard that it takes no steps."""
        self._session.went_over(self._consistency)
        self._bind_cache()

    @property
    def _bound(self) -> int | None:
        return self._consistency.bound

    def resume(self) -> None:
        self._switch()
        # while it had nothing leased nobody told servers that were new to expect it
        if not self._resting and (self._bound is None or self._known_to is self._training.router):
            return
        if self._bound is not None:
            self._training.values.complete()
            self._join(anew=self._resting)
        self._resting = False

    def rest(self) -> None:
        with contextlib.suppress(LostWork):  # told where the work was given up; here only its end matters
            self._switch()
        self._rest()

    def contribute(self, name: PushName | None, sending: StepInput | None, upcoming: Upcoming | None = None) -> None:
        name = name or self._own_name()  # first: nobody waits for who waits for a switch
        if self._bound is not None and self._resting and not self._leaves:
            self.resume()  # the script's own work, of which nobody could know before
        super().contribute(name, sending, upcoming)
        if self._waits_at_once:
            self.drain()
        if self._session.consistency.number != self._consistency.number and not self._leaves:
            self._switch()

    def leave(self, groups: tuple[tuple[float, ...], ...]) -> None:
        self._rest()
        self._leaves = True
        super().leave(groups)

    # ---- inside

    def _rest(self) -> None:
        if not self._resting and self._training.cache is not None:
            self._training.cache.clear()  # others go on meanwhile
        if self._bound is not None and (not self._resting or self._others_expect_it):
            with contextlib.suppress(LostWork):
                self.drain()
            self._say_that_it_rests()
            self._rest_known_to = self._training.router
        self._resting = True

    @property
    def _others_expect_it(self) -> bool:
        """Whether there may be servers that wait for the steps that it took when their map was made."""
        router = self._training.router
        return router.is_behind or router is not self._rest_known_to

    def _say_that_it_rests(self) -> None:
        def tell(router: ServerGroup) -> None:
            if self._session.mode is not UpdateMode.SYNC:  # servers of a newer map may be
                router.report_rest(self._turn)

        self._training.values.complete()
        self._training.reach(tell)
        self._turn += 1

    @property
    def _waits_at_once(self) -> bool:
        """Whether a push is not left under way though this worker has a window, since the job's bound leaves no room
        for that: a worker would wait for others to take steps that wait for its own."""
        return self._bound is not None and self._window > self._bound

    @property
    def _window(self) -> int:
        return self._session.settings.worker.window

    @property
    def _keeps(self) -> int:
        """For so many steps after its own a row that is read now may be used."""
        return 0 if self._training.cache is None else self._training.cache.staleness

    def _bind_cache(self) -> None:
        """Rows that are kept are used as long as the bound of their last step leaves room for it."""
        cache, bound, worker = self._training.cache, self._bound, self._session.settings.worker
        if cache is None:
            return
        left = worker.cached_rows_steps if bound is None else max(0, bound - worker.window)
        if left < worker.cached_rows_steps:
            log.warning("worker.cached_rows_steps is %d for now, since staleness has a bound of %d", left, bound)
        cache.staleness = min(worker.cached_rows_steps, left)
        cache.clear()

    def _switch(self) -> None:
        """To what the job was switched to, if it was. Between two steps. Raises LostWork."""
        latest = self._session.consistency
        if latest.number == self._consistency.number or self.is_to_go_over:
            return
        self.drain()
        if self._bound is not None and not self._resting:
            self._say_that_it_rests()  # what is said of the clock that it had may come late
        self._consistency = latest
        log.info("goes over to %s", latest)
        self._session.went_over(latest)
        self._bind_cache()
        if self._waits_at_once:
            log.warning("worker.window %d is not used: staleness has a bound of %d now", self._window, latest.bound)
        if self._bound is not None and not self._resting:
            self._training.values.complete()
            self._join(anew=True)

    def _give_up(self, name: PushName, error: errors.ShardyardError) -> NoReturn:
        self._clock -= 1  # the step that was not taken
        super()._give_up(name, error)

    def _make_wish(self) -> PullSpec:
        if self._leaves:
            return NEWEST
        self._clock += 1
        return NEWEST if self._bound is None else self._wish_at(SspPhase.STEPS)

    def _wish_at(self, stride: SspPhase) -> PullSpec:
        ahead = 0 if self._waits_at_once else self._window
        pace = SspReport(stride, self._turn, self._clock, ahead + self._keeps)
        return PullSpec(0, exactly=False, wait_ms=SLICE_MS, prefetched=True, ssp_report=pace)

    def _newest(self) -> ExchangeResult:
        if self._resting or self._bound is None:
            return super()._newest()
        self._training.router.abandon_pull()
        return self._take(ExchangeResult())

    def _arrive(self, answer: ExchangeResult) -> None:
        if not answer.missing:
            self._known_to = self._training.router
            self._training.values.load(answer.ahead)
            return
        self._take(answer)

    def _join(self, *, anew: bool) -> None:
        """Takes its place beside the slowest; not `anew`: on servers that have not heard of it."""
        self._training.router.abandon_pull()
        answer = self._pull(self._wish_at(SspPhase.JOINS))
        # servers may have heard of the others at different times; what they gave is asked for again, at one clock
        # a clock does not fall while its worker takes steps
        self._clock = answer.clock if anew else max(self._clock, answer.clock)
        self._training.router.abandon_pull()
        self._take(answer)

    def _pull(self, wish: PullSpec) -> ExchangeResult:
        router = self._training.router
        answer = self._training.reach(lambda router: router.pull(wish))
        self._moved = self._moved or router is not self._training.router
        return answer

    def _take(self, answer: ExchangeResult) -> ExchangeResult:
        """Asks until nobody is too far behind for this worker's clock. `answer`: who is, as was said last."""
        wish = self._wish_at(SspPhase.STEPS)

        def waiting_for() -> str:
            return f"values in which at most {self._bound} steps of others are missing: {explain(answer)}"

        with self._session.wait_registry.over(waiting_for):
            while True:
                answer = self._pull(wish)
                if not answer.missing:
                    break
                self._session.check()
        self._known_to = self._training.router
        self._training.values.load(answer.ahead)
        self._step = max(self._step, answer.version_max)
        return answer


def _check_window(training: Trainer) -> None:
    consistency, window = training.session.consistency, training.session.settings.worker.window
    if consistency.bound is not None and window > consistency.bound and not consistency.number:
        raise errors.ConfigurationError(
            f"worker.window {window} in a job with job.consistency.staleness {consistency.bound}",
            why="a worker would wait for others to take steps that wait for its own",
            todo=f"set worker.window to {consistency.bound}, or job.consistency.staleness to {window}",
        )
    if consistency.bound is not None and training.cache is not None and not consistency.number:
        check_bound(training.session.settings.worker, consistency.bound)
