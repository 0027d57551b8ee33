"""Batches of synchronous jobs: the samples of (logical rank, step), whichever worker computes them.

The data set's settings alone decide a step (docs/internals/ledger.md, rules B1, B4, B5): `StepPlan` says which samples
of which epoch logical rank r has at step t. So a rank that moves to another worker has the same samples and random
numbers.

Owns: the steps of one data set. Must not know: how a step is completed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from shardyard.domain.epochs import EpochPlan, Indices, StepPlan
from shardyard.domain.errors import InvalidRequest, MalformedPayload, StaleToken
from shardyard.domain.ids import Rank
from shardyard.domain.push_names import RankSource
from shardyard.wire import common_messages, methods
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_worker.consistency.local_sgd import LocalRounds
from shardyard_worker.consistency.synchronous import SyncStrategy
from shardyard_worker.data.feed import Feed, Work
from shardyard_worker.data.loader_processes import Reading, Seed
from shardyard_worker.data.makeup_steps import MakeupSteps, MissedBatch
from shardyard_worker.training.table_binding import Announced

log = logging.getLogger("shardyard.worker")

STEP_OF_SEED = 3
"""Where a batch's seed has its step."""


class _Place(NamedTuple):
    """A batch of a rank's part of a step. `of`: what it is computed for. `number`: which of the part's batches."""

    rank: Rank
    step: int
    of: MissedBatch
    number: int


class SyncFeed(Feed):
    _strategy: SyncStrategy
    _at: _Place | None = None
    """The current batch."""
    _is_long = False
    """Whether a step of the job is a round of local steps."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        settings, opened, session = self._settings, self._opened, self._session
        consistency = session.job_settings.consistency
        begun = opened.begun_epochs, opened.begun_samples
        samples = self._reader.samples
        if begun[0] > settings.epochs or begun[1] >= samples or (begun[1] and begun[0] == settings.epochs):
            raise MalformedPayload(f"feed {self._number} of {settings.epochs} epochs, of which {begun} were begun")
        self._units = EpochPlan(
            samples,
            settings.batch_size,
            session.logical_ranks,
            settings.drop_last,
            settings.accumulate,
            local_steps=consistency.local_steps or 1,
        )
        self._plan = StepPlan(self._units, opened.units_per_epoch, settings.epochs, opened.first_step, *begun)
        makes_up = bool(consistency.backup_workers)
        self._makeup = MakeupSteps(session, self._number, self._plan.end, makes_up=makes_up)
        if makes_up:
            self.upcoming = None  # a step brings no values

    @property
    def _end(self) -> int:
        """The step after the last known one: where the data ends, or, before that, where the job is told to stop."""
        stop = self._session.step_barrier.end
        return self._makeup.end if stop is None else min(self._makeup.end, stop)

    @property
    def _is_leaving(self) -> bool:
        return self._session.drain.asked and self._strategy.may_leave

    def _has(self, step: int) -> bool:
        """Whether the data set has that step, and the job does not stop before it."""
        stop = self._session.step_barrier.end
        return (stop is None or step < stop) and self._makeup.has(step)

    def batches(self) -> Generator[Any, None, None]:
        self._warn_of_short_steps()
        while not self._opened.done:
            if self._is_leaving:
                return
            self._strategy.check_mode()
            if self._strategy.on_standby:
                if self._is_done_on_standby():
                    break
                continue
            self._strategy.prepare_work()
            rank = self._strategy.due()
            if not self._has(self._strategy.step):
                if self._await_done():
                    break
                continue
            if rank is not None and self._strategy.may_compute(is_long=self._is_long):
                yield from self._compute(rank)
        if not self._is_told_to_stop:
            self._makeup.find_end()
        self._strategy.end_data(self._end)

    # ---- a rank's part of a step

    def require_work(self) -> Work:
        work = super().require_work()
        if work.left:
            raise InvalidRequest(
                f"optimizer.step() {work.left} batches before the last one of {work.name}",
                why="in a synchronous job the batches of a step are one piece of work, which counts once",
                todo=f"call it after {self._settings.accumulate} batches (accumulate), or where job.step_due says so",
            )
        return work

    def _compute(self, rank: Rank) -> Iterator[Any]:
        ranks = self._strategy.ranks
        name = ranks.name_of(rank)
        step = name.first
        if step < self._opened.first_step:
            raise InvalidRequest(
                f"step {step} before the first step of this data set, {self._opened.first_step}",
                why="in a synchronous job the steps of one data set follow those of the other",
                todo="go through each job.batches to its end, and call it for the same data sets, in the same order,"
                " on all workers",
            )
        missed = self._makeup.batch(rank, step)
        if missed is None:  # other ranks repeat what was dropped
            self.work = Work(name, 0)
            self._contribute(self.work, None)
            return
        chosen = self._samples(missed)
        self._at = _Place(rank, step, missed, len(chosen))
        is_hybrid = self._session.job_settings.consistency.rows_at_once
        self.work = work = Work(name, len(chosen), highest=ranks.highest(rank) if is_hybrid else 0)
        self._early = {seed: each for seed, each in self._early.items() if seed[STEP_OF_SEED] >= step}
        if len(chosen) == 0:
            self._warned = True  # the last step of an epoch may have less work than ranks
            self._drop("no samples")
            return
        if step < ranks.announce_until(rank):
            try:
                counts, _ = self._begins(RankSource(rank), name.token, step, highest=ranks.highest(rank))
            except StaleToken as error:
                log.info("%s is another worker's now: %s", name, error.what)
                self._session.refresh()
                return
            if not counts:
                self._contribute(work, None)
                return
        batches = list(self._units.batches(len(chosen)))
        work.batches = len(batches)
        for number, batch in enumerate(batches):
            if self._is_leaving:
                return  # whoever gets the rank computes the whole step
            work.due, work.left, work.stepped = batch.due, len(batches) - number - 1, False
            self._at = _Place(rank, step, missed, number)
            self._trainer.accumulates = not batch.due
            yield self._fetch(self._seed(missed, number), chosen[batch.begin : batch.end])
        if not work.taken and not self._is_leaving:
            self._end_without_step()

    def _end_without_step(self) -> None:
        """All batches of the current work were computed, but the script pushed nothing."""
        self._drop("no optimizer.step() after a batch")

    def _samples(self, batch: MissedBatch) -> Indices:
        epoch, begin, end = self._plan.span(batch.step, batch.rank)
        return self._order(epoch=epoch)[begin:end]

    def _seed(self, of: MissedBatch, number: int) -> Seed:
        """A step's only batch is seeded by its name alone."""
        return self._session.seed, 0, of.rank, of.step, *((number,) if number else ())

    def following(self) -> Iterator[Reading]:
        if self._at is None:
            return
        rank, step, of, number = self._at
        held = self._strategy.ranks.held
        yield from self._readings(of, number + 1)
        for other in sorted(held):
            if other > rank and held[other].next == step:
                if self._is_announced(other, step):
                    return
                yield from self._readings(MissedBatch(other, step))
        for later in range(step + 1, self._plan.end):
            for each in sorted(held):
                if self._is_announced(each, later) or not self._has(later):
                    return
                yield from self._readings(MissedBatch(each, later))

    def _is_announced(self, rank: Rank, step: int) -> bool:
        return step < self._strategy.ranks.announce_until(rank)

    def _readings(self, of: MissedBatch, first: int = 0) -> Iterator[Reading]:
        """The batches of a rank's part of a step, from number `first` on."""
        chosen = self._samples(of)
        for number, batch in enumerate(self._units.batches(len(chosen)) if len(chosen) else ()):
            if number >= first:
                yield Reading(self._seed(of, number), chosen[batch.begin : batch.end].tolist())

    def _announced(self) -> Sequence[Announced]:
        """The announced ids of the next step's batches of this worker's ranks."""
        if self._look_ahead is None or self._is_told_to_stop:
            return ()
        step = self._strategy.step + 1
        following = list(takewhile(lambda reading: reading.seed[STEP_OF_SEED] == step, self.following()))
        self._read_early(following)
        return self._ids_of(following)

    # ---- the end

    def _close(self) -> bool:
        caller = common_messages.caller_to_wire(self._session.caller)
        request = wire.CloseLeaseRequest(caller=caller, feed=self._number)
        return self._session.ask(methods.CLOSE_LEASE, request).done

    def _is_done_on_standby(self) -> bool:
        """Waits for a rank. Returns True if the other workers finish the data set first."""
        with self._session.wait_registry.over(lambda: "a logical rank to compute; other workers have them all"):
            while self._strategy.on_standby:
                if self._close():
                    return True
                if self._strategy.has_moved():
                    return False
                self._trainer.router.pause(200)
                self._session.refresh()
                self._session.drain.check()
        return False

    def _await_done(self) -> bool:
        """Waits until a checkpoint contains all steps. Returns False if the job has gone back meanwhile, so that steps
        are computed again (rule A11)."""
        with self._session.wait_registry.over(lambda: f"a checkpoint that has step {self._end - 1}"):
            while not self._close():
                self._session.check_waiting()
                if self._strategy.has_moved():
                    return False
                self._trainer.router.pause(50)
        return True

    def _warn_of_short_steps(self) -> None:
        """Warns: a script that counts batches instead of asking job.step_due misses the end of a step that has
        fewer."""
        accumulate, units = self._settings.accumulate, self._units
        share = self._settings.batch_size * accumulate
        last = units.samples_per_epoch % units.samples_per_step % share
        if 0 < last < accumulate:
            log.warning(
                "the last step of an epoch has %d samples for one of the ranks, and so fewer than %d batches: call"
                " optimizer.step() where job.step_due says so, or give drop_last=True",
                last,
                accumulate,
            )


class LocalFeed(SyncFeed):
    """The feed of a job in local mode: the batches of a round are one piece of work, whatever steps are taken on
    them."""

    _is_long = True

    def __init__(self, *given: Any, local: LocalRounds, end_round: Callable[[], object], **named: Any) -> None:
        """`local` takes the steps, `end_round` pushes their sum."""
        super().__init__(*given, **named)
        self._local, self._end_round = local, end_round
        local.rounds.add(self._opened.first_step, self._units, self._settings.epochs)

    def enter(self) -> bool:
        """A step follows the current batch. Returns whether it is the round's last. Raises InvalidRequest."""
        work = Feed.require_work(self)
        work.stepped = True
        assert isinstance(work.name.key.source, RankSource)
        self._local.enter(work.name.key.source.rank, work.name.first)
        return not work.left

    def require_work(self) -> Work:
        """The work of the round that has ended."""
        assert self.work is not None
        return self.work

    def _end_without_step(self) -> None:
        if self._local.taken:
            self._end_round()
        else:
            self._drop("no optimizer.step() in a round")
