"""Which worker gets which work: opens feeds, leases data shards, and closes both.

The job's ledger, ranks and tokens hold the decisions. Invariants: a lease is closed by what the servers' ledgers say,
read under the present map (rules A6, A11). Workers are told of the end of the data when the newest checkpoint has all
of it (rule A11). Must not know: which work counts (work_verdicts), how servers are called, the clock.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from shardyard.domain import errors
from shardyard.domain.ids import Generation, Incarnation, Token
from shardyard.domain.push_names import DataLease, RankSource, SourceKey
from shardyard_coordinator.core.effects import Effect, JobPhase, LeaseClosed, ReadLedger, Reply
from shardyard_coordinator.core.events import LeaseReturned
from shardyard_coordinator.core.job_state import JobState
from shardyard_coordinator.flows import checkpointing, mode_switch, work_verdicts
from shardyard_coordinator.placement.deployment import Stage
from shardyard_coordinator.records import Entry
from shardyard_coordinator.work import step_ledger
from shardyard_coordinator.work.data_shards import data_closed, data_leased
from shardyard_coordinator.work.feeds import FeedDone, FeedSpec, LeaseWait, feed_opened
from shardyard_coordinator.work.step_ledger import StepLedger


def open_feed(job: JobState, feed: int, spec: FeedSpec) -> list[Effect]:
    """Raises FeedConflict, InvalidRequest, TooLarge, NotReady."""
    known = len(job.feeds)
    stop = job.stopping.stop
    if isinstance(job.feeds, StepLedger) and stop is not None and stop.settled:
        never = job.feeds.never(feed, spec)
        if never is not None:
            return [Reply(never)]
    opening = job.feeds.open(feed, spec)
    if opening.done and not checkpointing.has_all_steps_of(job, feed):
        # the worker gets the same answer as the workers that were here before (rule A11)
        opening = replace(opening, done=False)
    opened = [feed_opened(feed, spec, opening)] if len(job.feeds) > known else []
    return [*job.records(opened), Reply(opening)]


def lease(job: JobState, worker: Incarnation, feed: int, known: Collection[Token] = ()) -> list[Effect]:
    """Leases a data shard to the worker, or replies what it waits for. `known`: the tokens of the leases that it knows
    of; one that it holds and does not know of is given again (rule A14). Raises NotFound, InvalidRequest, NotReady."""
    if job.phase is not JobPhase.RUNNING:
        raise errors.NotReady(
            f"{job.title} has no variables on the servers yet, so no work can be counted",
            todo="call job.prepare before job.batches; then it is only a moment",
        )
    awaits = mode_switch.awaits_work(job)
    if isinstance(job.feeds, StepLedger):
        if awaits is not None and not job.mode.follows_latest(worker):
            return [Reply(awaits)]
        raise errors.InvalidRequest(
            f"{job.title} is synchronous: it leases logical ranks, not data shards",
            todo="ask for no lease; the job's ranks come with heartbeats",
        )
    if (
        job.mode.latest.bound is not None
        and job.recovery.attempt is not None
        and not job.feeds.has_unknown(feed, worker, known)
    ):
        # the servers of the next map were told which workers have work, and wait only for these (rule C3)
        return [Reply(LeaseWait(f"partitions of {job.title} on other servers"))]
    before = job.tokens.latest
    answer = job.feeds.lease(feed, worker, known=known, fresh=awaits is None)
    if isinstance(answer, LeaseWait):
        answer = awaits or answer
    if isinstance(answer, FeedDone) and not checkpointing.has_all_data(job):
        # if partitions were lost now, no worker would be left to compute the data again (rule A11)
        job.book.want()
        answer = LeaseWait("a checkpoint that has all of this data")
    leased: list[Entry] = []
    if job.tokens.latest > before:
        assert isinstance(answer, DataLease), answer
        first = job.first_of(answer.source)
        leased.append(data_leased(answer.source, worker, answer.token, first=first))
    if isinstance(answer, DataLease):
        answer = replace(answer, announce_until=work_verdicts.announce_until(job, answer.source))
    return [*job.records(leased), Reply(answer)]


def return_lease(job: JobState, returned: LeaseReturned) -> list[Effect]:
    """Replies, or reads the servers' ledgers."""
    if _is_of_former_mode(job, returned):
        return [Reply(LeaseClosed(done=returned.data_shard is not None))]
    if _is_closed(job, returned):
        return [Reply(LeaseClosed(done=checkpointing.has_all_steps_of(job, returned.feed)))]
    if job.deployment.map is None or job.deployment.stage is not Stage.OPEN:
        raise errors.NotReady(f"{job.title} has no variables on the servers yet, so no work is counted")
    keys: tuple[SourceKey, ...]
    if returned.data_shard is not None:
        keys = (SourceKey(returned.data_shard),)
    else:
        assert job.ranks is not None
        keys = tuple(SourceKey(RankSource(rank)) for rank in job.ranks.all)
    return [ReadLedger(job.id, job.deployment.map, keys)]


def close_lease(job: JobState, returned: LeaseReturned, next_sequence: int, generation: Generation) -> list[Effect]:
    """The servers' ledgers were read. Reads them again if partitions have gone back since."""
    if generation != job.deployment.generation or _is_of_former_mode(job, returned):
        return return_lease(job, returned)
    source, worker = returned.data_shard, returned.caller.incarnation
    if isinstance(job.feeds, StepLedger):
        steps = job.feeds.feed(returned.feed)
        known = steps.done
        done = steps.close(next_sequence)
        job.progress.reach(next_sequence)
        closed = []
        if done and not known:
            closed.append(step_ledger.feed_closed(returned.feed, steps.end))
        return [
            *job.records(closed),
            Reply(LeaseClosed(_is_in_checkpoint(job, returned.feed, next_sequence, done=done))),
        ]
    assert source is not None
    if job.feeds.is_closed(source, worker, returned.token):
        return [Reply(LeaseClosed(done=True))]
    first = job.first_of(source)
    done = job.feeds.close(source, worker, returned.token, next_sequence=next_sequence)
    record = data_closed(source, worker, returned.token, done=done, first=first, reached=next_sequence)
    work_verdicts.end_lease(job, source, worker, done=done)
    return [*job.records([record]), Reply(LeaseClosed(done))]


def _is_of_former_mode(job: JobState, returned: LeaseReturned) -> bool:
    """Whether a worker returns work of the former mode, because it does not know yet that the job no longer has steps,
    or data shards."""
    return job.mode.has_switched_partitions and (returned.data_shard is None) is (job.ranks is None)


def _is_closed(job: JobState, returned: LeaseReturned) -> bool:
    """Raises InvalidRequest, StaleToken, NotFound."""
    source = returned.data_shard
    if isinstance(job.feeds, StepLedger):
        if source is not None:
            raise errors.InvalidRequest(f"{source} in {job.title}, which is synchronous and has no data shards")
        return job.feeds.feed(returned.feed).done
    if source is None or source.feed != returned.feed:
        raise errors.InvalidRequest(
            f"the lease to close is of {source or 'no data shard'} and of feed {returned.feed}; "
            "expected a data shard of that feed"
        )
    return job.feeds.is_closed(source, returned.caller.incarnation, returned.token)


def _is_in_checkpoint(job: JobState, feed: int, step: int, *, done: bool) -> bool:
    """Whether a checkpoint of a synchronous job that is at `step` has everything of a feed that the job will
    compute."""
    if done:
        return checkpointing.has_all_steps_of(job, feed)
    stop = job.stopping.stop
    return stop is not None and job.stopping.is_over(step) and checkpointing.has_steps_before(job, stop.step)
