"""When a checkpoint of a job is taken, what it holds, and what the newest one has.

Invariants: the data ledger is copied before any partition is cut (rule A9). No checkpoint is begun while partitions are
lost. Sources are forgotten only when a committed checkpoint has them (rule A7). Must not know: how a job goes back to a
checkpoint (recovery), how it continues or ends, how servers are called, the clock.
"""

from __future__ import annotations

from dataclasses import replace

from shardyard.domain import errors
from shardyard.domain.ids import Incarnation, Token
from shardyard_coordinator.core.effects import (
    CheckpointProgress,
    Effect,
    ForgetSources,
    JobSpec,
    LogMessage,
    Reply,
    TakeCheckpoint,
)
from shardyard_coordinator.core.events import CheckpointTaken
from shardyard_coordinator.core.job_state import JobState
from shardyard_coordinator.flows import lost_pushes
from shardyard_coordinator.placement.deployment import Stage
from shardyard_coordinator.storage.checkpoint_book import Committed, Draft
from shardyard_coordinator.work import checkpoint_copy
from shardyard_coordinator.work.data_ledger import DataLedger
from shardyard_coordinator.work.step_ledger import StepLedger

# ---- taking a checkpoint


def request(job: JobState, ticket: int) -> list[Effect]:
    """Asks for a checkpoint that begins after `ticket` was given; 0: after now. Raises InvalidRequest if the job has no
    checkpoints, NotReady if it has no values yet, and the failure of a failed job."""
    book = job.book
    if book.url is None:
        raise errors.InvalidRequest(
            f"{job.title} has no checkpoints", why="job.checkpoint.url is never, or there is no state folder"
        )
    found = book.outcome(ticket) if ticket else None
    if found is None:
        job.require_unfinished()
        if job.deployment.stage is not Stage.OPEN:
            raise errors.NotReady(f"{job.title} has no values yet", todo="call job.prepare first")
    progress = CheckpointProgress(job.settings.name, ticket or book.ask(), book.url)
    if isinstance(found, Committed):
        progress = replace(progress, taken=found)
    elif found is not None:
        progress = replace(progress, failure=found)
    return [Reply(progress)]


def begin_if_due(job: JobState, now_ms: int, leaving: frozenset[Incarnation] = frozenset()) -> list[Effect]:
    """`leaving`: servers of the job whose partitions go to others with this checkpoint."""
    deployed, book, logs = job.deployment, job.book, job.log_owners
    sealed = frozenset[Incarnation]() if book.draft is None else book.draft.sealed
    if leaving - sealed or (book.draft is None and not job.may_acknowledge):
        book.want()
    if deployed.stage is not Stage.OPEN:
        return []
    waived = [] if job.may_acknowledge or logs is not None else _waive_first(job, now_ms)
    # without a worker, the servers have no more than replicas have given them last
    replicas = job.replicas if job.settings.has_replicas else None
    step = job.progress.step if replicas is None or job.workers else replicas.published
    if not book.is_due(now_ms, step):
        return waived
    if replicas is not None and job.workers and not replicas.take_published():
        return waived  # begun when the replicas have given the servers their state
    assert deployed.map is not None
    assert book.url is not None
    # before any partition is cut (rule A9)
    entries = [[kind, body] for kind, body in checkpoint_copy.entries_for_copy(job.feeds)]
    ledger = {"entries": entries, "closed": job.feeds.closed, "token": job.tokens.latest}
    floor = Token(0)
    if isinstance(job.feeds, DataLedger):
        # lower tokens belong to ended leases, and future tokens are higher
        floor = Token(min((lease.token for lease in job.feeds.leases), default=job.tokens.latest + 1))
    # no worker may have reported yet after a restart of the coordinator; then the newest checkpoint knows more
    step = step or (0 if book.committed is None else book.committed.step)
    if replicas is not None:
        step = replicas.published
    draft, record = book.begin(now_ms, step, ledger, floor, job.roster.gone, leaving)
    return [
        *waived,
        *job.records([record]),
        TakeCheckpoint(
            spec_of(job),
            deployed.map,
            draft,
            book.url,
            book.base,
            job.settings.checkpoint.keep,
            0 if logs is None else logs.oldest,
            frozenset() if logs is None else logs.needed,
            deployed.workers if job.has_error_feedback else (),
            "" if book.committed is None else book.committed.trusted,
        ),
    ]


def _waive_first(job: JobState, now_ms: int) -> list[Effect]:
    """Begins the job without a first checkpoint if that does not come."""
    record = job.book.waive(now_ms)
    if record is None:
        return []
    warning = f"{job.title} begins without a checkpoint, which is not written yet; until it is, the job ends if a"
    return [*job.records([record]), LogMessage(f"{warning} server dies", warning=True)]


def end(job: JobState, taken: CheckpointTaken) -> list[Effect]:
    """The checkpoint is written. Ignored if it is not under way any more."""
    record = job.book.commit(taken.draft, taken.step, taken.number, taken.created_s, taken.feedback)
    if record is None:
        return []
    committed(job, taken.number)
    message = LogMessage(f"{job.title}: checkpoint {taken.number} of step {taken.step:,}")
    return [*job.records([record]), message, *_forget_sources(job)]


def committed(job: JobState, number: int) -> None:
    """The job has a checkpoint of its own, so it has begun. Forgets what the checkpoint has."""
    assert job.book.committed is not None
    if job.log_owners is not None:
        job.log_owners.commit(number)
    job.origin = None
    lost_pushes.forget_departed(job, job.book.committed.gone)
    if isinstance(job.feeds, StepLedger):
        # no partition goes back before that step: it goes back to the newest checkpoint, or, on command, to one that
        # has closed the same feeds
        checkpoint_copy.forget_made_up(job.feeds, job.book.committed.data_ledger)


def fail(job: JobState, draft: int, failure: errors.ShardyardError, now_ms: int) -> list[Effect]:
    """Nothing was committed. Another checkpoint is begun later."""
    if not job.book.fail(draft, failure, now_ms):
        return []
    return [LogMessage(f"{job.title}: checkpoint {draft} was not taken: {failure.what}", warning=True)]


def note_log_bytes(job: JobState, nbytes: int) -> None:
    """A server's log has grown to this size since the last checkpoint was begun."""
    most = job.settings.checkpoint.every_log_bytes
    if job.log_owners is not None and most and nbytes >= most and job.book.draft is None:
        job.book.want()


def spec_of(job: JobState) -> JobSpec:
    assert job.deployment.layout is not None
    return JobSpec(job.id, job.settings, job.deployment.layout, job.mode.latest.number)


def _forget_sources(job: JobState) -> list[Effect]:
    """Forgets what the newest checkpoint has and no worker may push any more (rule A7). What is closed in one
    checkpoint is closed in the next, so servers that were not reached need not be asked again."""
    newest, map_ = job.book.committed, job.deployment.map
    assert newest is not None
    assert map_ is not None
    if not isinstance(job.feeds, DataLedger):  # ranks are few, and their tokens last as long as the job
        return []
    done = checkpoint_copy.done_data_shards(newest.data_ledger)
    return [ForgetSources(job.id, map_, done, newest.gone, newest.floor)]


# ---- what the newest checkpoint has


def is_current(job: JobState) -> bool:
    """Whether another checkpoint of a job that has stopped working would have nothing new. True for a job without
    checkpoints."""
    if not job.book.enabled or job.deployment.stage is not Stage.OPEN:
        return True
    newest = job.book.committed
    return newest is not None and job.may_acknowledge and not job.recovery.needed and _is_of_now(job, newest)


def ask_for_the_last(job: JobState) -> int:
    """A ticket for the last checkpoint of a job that has stopped working. If the checkpoint under way was begun at the
    job's present state, that one is used."""
    draft = job.book.draft
    return draft.number if draft is not None and _is_of_now(job, draft) else job.book.ask()


def has_all_data(job: JobState) -> bool:
    """Whether the newest checkpoint has all data that is closed. A job without a first checkpoint cannot go back to
    one, and a job with logs does not go back."""
    if job.log_owners is not None:
        return True
    newest, draft = job.book.committed, job.book.draft
    if newest is None:
        return job.book.is_in_doubt and (draft is None or _has_closed(job, draft))
    return _has_closed(job, newest)


def has_all_steps_of(job: JobState, feed: int) -> bool:
    """The same as `has_steps_before`, for a feed."""
    return not isinstance(job.feeds, StepLedger) or has_steps_before(job, job.feeds.feed(feed).end)


def has_steps_before(job: JobState, end: int) -> bool:
    """Whether the newest checkpoint of a synchronous job has all steps before `end`, the last of which is done. If not,
    asks for another checkpoint."""
    if job.log_owners is not None:
        return True
    newest, draft = job.book.committed, job.book.draft
    if newest is None and job.book.is_in_doubt and (draft is None or draft.step >= end):
        return True
    if newest is not None and newest.step >= end:
        return True
    job.book.want()
    return False


def _is_of_now(job: JobState, taken: Draft | Committed) -> bool:
    return taken.step == job.progress.step and _has_closed(job, taken)


def _has_closed(job: JobState, taken: Draft | Committed) -> bool:
    return taken.data_ledger.get("closed") == job.feeds.closed
