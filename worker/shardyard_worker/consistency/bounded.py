"""The waits of a `bounded` job: a worker gets values only while no other worker is too many steps behind.

Stale synchronous parallel (Ho et al., NIPS 2013), enforced by the servers: each exchange says how many steps this
worker has taken, and a server gives values once no worker that takes steps is more than the bound behind. The wait is
`SspClock.await_values`; the server's side is `hosting/worker_clocks.py`. Example with a bound of 3: a worker that has
taken 10 steps gets its values once each other worker has taken at least 7.

A worker joins at the slowest worker's clock with its first work. While it has no work, the others do not wait for it
(docs/internals/ledger.md, rule C3). A running job can get a bound, another one, or none, between two steps.

Invariants: gradients of leased work are computed on values that all servers gave for this worker's clock, or a later
one; before a worker reports steps under a bound, the coordinator knows that it will. Without a bound it reports none.
Must not know: how servers count, pushes in flight.
"""

from __future__ import annotations

import logging

from shardyard.domain import errors
from shardyard.domain.consistency import Consistency, SspPhase, SspReport, UpdateMode
from shardyard_worker.exchange.requests import ExchangeResult, PullSpec
from shardyard_worker.exchange.server_group import ServerGroup
from shardyard_worker.rows.cache_rules import check_bound
from shardyard_worker.training.trainer import SLICE_MS, Trainer, explain

log = logging.getLogger("shardyard.worker")

NEWEST = PullSpec(0, exactly=False, prefetched=True)


class SspClock:
    """This worker's number of steps, what it has told the servers of it, and the waits under a bound."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._session = trainer.session
        self.consistency = self._session.consistency
        """The setting that this worker uses; the job may have been switched since."""
        self.bound = self.consistency.bound
        """None: values are never waited for."""
        self.steps = 0
        self.resting = True
        self._epoch = 0
        self._known_to: ServerGroup | None = None
        """The servers that know this worker's number of steps."""
        self._rest_known_to: ServerGroup | None = None
        """The servers that know that it takes no steps."""
        self._session.acknowledge_mode(self.consistency)
        self._limit_cache()

    @property
    def waits_at_once(self) -> bool:
        """Whether no push stays in flight although this worker has a window, because the bound has no room for it:
        workers would wait for each other's steps."""
        return self.bound is not None and self._window > self.bound

    # ---- joining and resting

    @property
    def is_known(self) -> bool:
        """Whether this worker takes steps, and the servers know it. Servers of a newer map do not: they were not told
        to expect a worker that had no lease."""
        return not self.resting and (self.bound is None or self._known_to is self._trainer.router)

    def join(self, *, anew: bool) -> ExchangeResult:
        """Joins at the slowest worker's clock, and waits for values. If not `anew`, this worker takes steps already,
        but these servers do not know it."""
        self._trainer.router.abandon_pull()
        spec = self._spec(SspPhase.JOINS)
        answer = self._trainer.reach(lambda router: router.pull(spec))
        # servers may have heard of the others at different times, so values are pulled again, at one clock;
        # a clock does not fall while its worker takes steps
        self.steps = answer.clock if anew else max(self.steps, answer.clock)
        self._trainer.router.abandon_pull()
        return self.await_values(answer)

    @property
    def must_say_rest(self) -> bool:
        """Whether servers may be waiting for steps of this worker, which has no work: they expect it if it had work
        when their map was made."""
        router = self._trainer.router
        is_expected = router.is_behind or router is not self._rest_known_to
        return self.bound is not None and (not self.resting or is_expected)

    def rest(self) -> None:
        """This worker takes no steps from now on."""
        if not self.resting and self._trainer.cache is not None:
            self._trainer.cache.clear()  # others go on meanwhile
        if self.must_say_rest:
            self._say_rest()
            self._rest_known_to = self._trainer.router
        self.resting = True

    def _say_rest(self) -> None:
        def say(router: ServerGroup) -> None:
            if self._session.mode is not UpdateMode.SYNC:  # those of a newer map may be synchronous
                router.report_rest(self._epoch)

        self._trainer.values.complete()
        self._trainer.reach(say)
        self._epoch += 1

    def change(self, latest: Consistency) -> None:
        """Changes to another bound, or none, from now on."""
        if self.bound is not None and not self.resting:
            self._say_rest()  # a report under the old bound may arrive late
        self.consistency, self.bound = latest, latest.bound
        log.info("changes to %s", latest)
        self._session.acknowledge_mode(latest)
        self._limit_cache()
        if self.waits_at_once:
            log.warning("step() waits for its push for now, since staleness has a bound of %d", latest.bound)

    # ---- values

    def next_pull(self) -> PullSpec:
        """The pull that goes with the next push, which is a step."""
        self.steps += 1
        return NEWEST if self.bound is None else self._spec(SspPhase.STEPS)

    def take_back(self) -> None:
        """Undoes the count of the last step, which was not taken."""
        self.steps -= 1

    def note_known(self) -> None:
        """The servers have answered a push, and so know its report."""
        self._known_to = self._trainer.link.router

    def await_values(self, answer: ExchangeResult | None = None) -> ExchangeResult:
        """Pulls until no worker is too far behind, and puts the values into the targets. `answer`: that of the last
        attempt."""
        spec = self._spec(SspPhase.STEPS)
        last = answer or ExchangeResult()

        def waiting_for() -> str:
            return f"values in which at most {self.bound} steps of others are missing: {explain(last)}"

        with self._session.wait_registry.over(waiting_for):
            while True:
                last = self._trainer.reach(lambda router: router.pull(spec))
                if not last.missing:
                    break
                self._session.check_waiting()
        self.note_known()
        self._trainer.values.load(last.ahead)
        return last

    def _spec(self, phase: SspPhase) -> PullSpec:
        """The pull with this worker's report. It says how many steps later the values may still be used: after a push
        in flight, and as cached rows."""
        ahead = 0 if self.waits_at_once else self._window
        kept = 0 if self._trainer.cache is None else self._trainer.cache.staleness
        report = SspReport(phase, self._epoch, self.steps, ahead + kept)
        return PullSpec(0, exactly=False, wait_ms=SLICE_MS, prefetched=True, ssp_report=report)

    @property
    def _window(self) -> int:
        return self._session.settings.worker.window

    def _limit_cache(self) -> None:
        """Cached rows may be used for as many steps as the bound leaves room for after their last step."""
        cache, bound, worker = self._trainer.cache, self.bound, self._session.settings.worker
        if cache is None:
            return
        left = worker.cached_rows_steps if bound is None else max(0, bound - worker.window)
        if left < worker.cached_rows_steps:
            log.warning("worker.cached_rows_steps is %d for now, since staleness has a bound of %d", left, bound)
        cache.staleness = min(worker.cached_rows_steps, left)
        cache.clear()


def check_window(trainer: Trainer) -> None:
    """Checks a job that is started with a bound. Raises ConfigurationError."""
    consistency, worker = trainer.session.consistency, trainer.session.settings.worker
    if consistency.bound is None or consistency.number:
        return
    if worker.window > consistency.bound:
        raise errors.ConfigurationError(
            f"worker.exchange delayed in a job with job.consistency.staleness {consistency.bound}",
            why="a worker would wait for others to take steps that wait for its own",
            todo=f"set worker.exchange to overlapped, or job.consistency.staleness to {worker.window}",
        )
    if trainer.cache is not None:
        check_bound(worker, consistency.bound)
