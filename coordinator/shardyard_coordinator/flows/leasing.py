"""Whose a job's work is: feeds as workers open them, leases as they ask for them, and the end of each.

Owns: nothing but the order of things; what is decided stands in the job's ledger, ranks and tokens. Invariants: a lease
is closed by what the servers' ledgers say, read under the map of now (rules A6, A11); the end of data is told when the
newest checkpoint has all of it (rule A11). Must not know: whether work counts (counting), servers' calls, the clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from shardyard.domain import errors
from shardyard.domain.ids import Generation, Incarnation
from shardyard.domain.push_names import DataLease, DataShardSource, LeasedSource, RankSource, SourceKey
from shardyard_coordinator.core.effects import Effect, JobState, LeaseClosed, ReadLedger, Reply
from shardyard_coordinator.core.events import LeaseReturned
from shardyard_coordinator.flows.deployment import Stage
from shardyard_coordinator.records import Entry
from shardyard_coordinator.work import data_ledger, step_ledger
from shardyard_coordinator.work.data_ledger import DataLedger
from shardyard_coordinator.work.feeds import FeedDone, FeedSpec, LeaseWait, feed_opened
from shardyard_coordinator.work.step_ledger import StepLedger

if TYPE_CHECKING:
    from shardyard_coordinator.machine.job import Job


class Leasing:
    """Of one job, which it is asked of anew each time."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def open_feed(self, feed: int, spec: FeedSpec) -> list[Effect]:
        """Raises FeedConflict, InvalidRequest, TooLarge, NotReady."""
        job = self._job
        known = len(job.feeds)
        stop = job.stopping.stop
        if isinstance(job.feeds, StepLedger) and stop is not None and stop.settled:
            never = job.feeds.never(feed, spec)
            if never is not None:
                return [Reply(never)]
        opening = job.feeds.open(feed, spec)
        if opening.done and not job.keeping.has_all_steps_of(feed):
            # as to those who were here before (rule A11)
            opening = replace(opening, done=False)
        opened = [feed_opened(feed, spec, opening)] if len(job.feeds) > known else []
        return [*job.records(opened), Reply(opening)]

    def lease(self, worker: Incarnation, feed: int) -> list[Effect]:
        """A data shard for the worker, or what it waits for. Raises NotFound, InvalidRequest, NotReady."""
        job = self._job
        if job.state is not JobState.RUNNING:
            raise errors.NotReady(
                f"{job.title} has no variables on the servers yet, so no work can be counted",
                todo="call job.prepare before job.batches; then it is only a moment",
            )
        awaits = job.going_over.awaits_work
        if isinstance(job.feeds, StepLedger):
            if awaits is not None and not job.switching.goes_by_latest(worker):
                return [Reply(awaits)]
            raise errors.InvalidRequest(
                f"{job.title} is synchronous: it leases logical ranks, not data shards",
                todo="ask for no lease; the job's ranks come with heartbeats",
            )
        before = job.tokens.latest
        answer = job.feeds.lease(feed, worker, fresh=awaits is None)
        if isinstance(answer, LeaseWait):
            answer = awaits or answer
        if isinstance(answer, FeedDone) and not job.keeping.has_all_data:
            # were it lost now, nobody would be there to compute it again (rule A11)
            job.keeping.book.want()
            answer = LeaseWait("a checkpoint that has all of this data")
        leased: list[Entry] = []
        if job.tokens.latest > before:
            assert isinstance(answer, DataLease), answer
            first = self.first_of(answer.source)
            leased.append(data_ledger.data_leased(answer.source, worker, answer.token, first=first))
        if isinstance(answer, DataLease):
            answer = replace(answer, careful_below=job.counting.careful_below(answer.source))
        return [*job.records(leased), Reply(answer)]

    def return_lease(self, returned: LeaseReturned) -> list[Effect]:
        """Replies, or reads the servers' ledgers."""
        job = self._job
        if self._is_of_before(returned):
            return [Reply(LeaseClosed(done=returned.data_shard is not None))]
        if self._is_closed(returned):
            return [Reply(LeaseClosed(done=job.keeping.has_all_steps_of(returned.feed)))]
        if job.deployment.map is None or job.deployment.stage is not Stage.OPEN:
            raise errors.NotReady(f"{job.title} has no variables on the servers yet, so no work is counted")
        keys: tuple[SourceKey, ...]
        if returned.data_shard is not None:
            keys = (SourceKey(returned.data_shard),)
        else:
            assert job.ranks is not None
            keys = tuple(SourceKey(RankSource(rank)) for rank in job.ranks.all)
        return [ReadLedger(job.id, job.deployment.map, keys)]

    def close_lease(self, returned: LeaseReturned, next_sequence: int, generation: Generation) -> list[Effect]:
        """Replies; asks again where partitions have gone back since the ledgers were read."""
        job = self._job
        if generation != job.deployment.generation or self._is_of_before(returned):
            return self.return_lease(returned)
        source, worker = returned.data_shard, returned.caller.incarnation
        if isinstance(job.feeds, StepLedger):
            known = job.feeds.is_closed(returned.feed)
            done = job.feeds.close(returned.feed, next_sequence=next_sequence)
            job.reach(next_sequence)
            closed = []
            if done and not known:
                closed.append(step_ledger.feed_closed(returned.feed, job.feeds.end(returned.feed)))
            return [*job.records(closed), Reply(LeaseClosed(self._is_kept(returned.feed, next_sequence, done=done)))]
        assert source is not None
        if job.feeds.is_closed(source, worker, returned.token):
            return [Reply(LeaseClosed(done=True))]
        first = self.first_of(source)
        done = job.feeds.close(source, worker, returned.token, next_sequence=next_sequence)
        record = data_ledger.data_closed(source, worker, returned.token, done=done, first=first, reached=next_sequence)
        job.counting.settle_suspicion(source, worker, done=done)
        return [*job.records([record]), Reply(LeaseClosed(done))]

    def held(self, worker: Incarnation) -> Sequence[LeasedSource]:
        """What the worker has to compute."""
        job = self._job
        if isinstance(job.feeds, DataLedger):
            return job.feeds.held(worker)
        assert job.ranks is not None
        return [RankSource(lease.rank) for lease in job.ranks.of(worker)]

    def first_of(self, source: LeasedSource) -> int | None:
        """The batch at which the lease of a data shard began, if that is known."""
        job = self._job
        if not isinstance(job.feeds, DataLedger) or not isinstance(source, DataShardSource):
            return None
        return job.feeds.first_of(source)

    # ---- within

    def _is_of_before(self, returned: LeaseReturned) -> bool:
        """Of somebody who does not know yet that there are no steps, or, as all that were begun are done, no data
        shards."""
        job = self._job
        return job.switching.has_gone_over and (returned.data_shard is None) is (job.ranks is None)

    def _is_closed(self, returned: LeaseReturned) -> bool:
        job = self._job
        source = returned.data_shard
        if isinstance(job.feeds, StepLedger):
            if source is not None:
                raise errors.InvalidRequest(f"{source} in {job.title}, which is synchronous and has no data shards")
            return job.feeds.is_closed(returned.feed)
        if source is None or source.feed != returned.feed:
            raise errors.InvalidRequest(
                f"the lease to close is of {source or 'no data shard'} and of feed {returned.feed}; "
                "expected a data shard of that feed"
            )
        return job.feeds.is_closed(source, returned.caller.incarnation, returned.token)

    def _is_kept(self, feed: int, step: int, *, done: bool) -> bool:
        """Whether a synchronous job that stands at `step` has all that it shall have of a feed in a checkpoint."""
        job = self._job
        if done:
            return job.keeping.has_all_steps_of(feed)
        stop = job.stopping.stop
        return stop is not None and job.stopping.is_over(step) and job.keeping.has_steps_before(stop.step)
