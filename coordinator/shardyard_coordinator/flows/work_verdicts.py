"""Which results of a job's workers count: batches that kill their workers, gradients that are not finite, contributions
that come late.

The job's ledger (its quarantine, its verdicts on steps), `suspects` and `not_finite` hold the decisions. Invariants: a
worker's report counts only if it is about the worker's own work. A batch is not put into quarantine for deaths if some
partition has counted it (rule A13). Nor is a batch of a data shard while a checkpoint is taken that may have copied the
ledger (rule A9). The verdict on a step is recorded before any worker is told (rule B6). Must not know: which worker
gets which work, and when it is done (leasing); how servers are called, the clock.
"""

from __future__ import annotations

from shardyard.domain import errors, limits
from shardyard.domain.consistency import NonFinite
from shardyard.domain.ids import Incarnation, Rank, Token
from shardyard.domain.push_names import DataShardSource, LeasedSource, RankSource, Source, WorkerSource
from shardyard_coordinator.core.effects import (
    BatchVerdict,
    Effect,
    LogMessage,
    MakeupBatches,
    NotFiniteVerdict,
    Reply,
    StepDecision,
)
from shardyard_coordinator.core.events import BatchBegun, NotFiniteReported
from shardyard_coordinator.core.job_state import JobState
from shardyard_coordinator.flows import job_end
from shardyard_coordinator.records import Entry
from shardyard_coordinator.work import straggler_verdicts
from shardyard_coordinator.work.data_ledger import DataLedger
from shardyard_coordinator.work.quarantine import QUARANTINED_MAX, QuarantinedWork
from shardyard_coordinator.work.step_ledger import StepLedger


def begin_batch(job: JobState, begun: BatchBegun) -> list[Effect]:
    """Decides whether an announced batch is computed (rule A13). A batch that some partition has counted was computed
    once, and is never condemned."""
    source, sequence, worker = begun.source, begun.sequence, begun.caller.incarnation
    _check_begin(job, begun)
    if job.feeds.quarantine.has(source, sequence) or _is_over_for(job, source, sequence):
        return [Reply(BatchVerdict(False, announce_until(job, source)))]
    warnings: list[Effect] = []
    entry: Entry | None
    if begun.highest > sequence or job.feeds.quarantine.full or not job.suspects.condemns(source, sequence):
        entry = job.suspects.begin(worker, source, sequence)
    elif job.book.draft is not None:
        # it may have copied the data ledger already, and may cut partitions later than this (rule A9)
        return [Reply(BatchVerdict(None, announce_until(job, source)))]
    else:
        condemned = QuarantinedWork(source, sequence, job.suspects.deaths(source, sequence))
        job.feeds.quarantine.add(condemned)
        entry = condemned.entry
        what = "step" if job.ranks is not None else "batch"
        why = f"{condemned.deaths} workers have died at it"
        warnings.append(LogMessage(f"{job.title}: {what} {sequence} of {source} is in quarantine: {why}", warning=True))
    counts = not warnings
    return [
        *job.records([] if entry is None else [entry]),
        *warnings,
        Reply(BatchVerdict(counts, announce_until(job, source))),
    ]


def report_not_finite(job: JobState, said: NotFiniteReported) -> list[Effect]:
    """A gradient is not finite. Its work does not count from now on, whichever worker computes it (rule A4). The reply
    is the last effect. If it says WorkerQuarantined, the caller must remove the worker. Raises StaleToken,
    StraddlingRange, NotFound, InvalidRequest."""
    policy, worker = job.settings.nonfinite, said.caller.incarnation
    if policy is NonFinite.ALLOW:
        raise errors.InvalidRequest(f"{said.work} of {job.title}, which takes what is not finite")
    of_data = _check_reported(job, said)
    parts = isinstance(of_data, DataShardSource) or job.settings.consistency.rows_at_once
    counted = of_data is not None and parts and said.first < said.highest
    if counted and said.highest <= said.last:
        raise errors.StraddlingRange(f"{said.work}, of which partitions have counted what is before #{said.highest}")
    sequences = range(said.first, said.last + 1) if of_data is not None and not counted else ()
    quarantine = job.feeds.quarantine
    fresh = [
        QuarantinedWork(of_data, sequence, parameter=said.parameter, worker=worker)
        for sequence in sequences
        if of_data is not None and not quarantine.has(of_data, sequence) and not _is_over_for(job, of_data, sequence)
    ]
    if policy is NonFinite.FAIL or len(quarantine) + len(fresh) > QUARANTINED_MAX:
        return _fail_by_not_finite(job, said, said.title)
    if fresh and job.ranks is None and job.book.draft is not None:
        # as for a batch that kills: a checkpoint may have copied the data ledger already (rule A9)
        return [Reply(NotFiniteVerdict(decided=False))]
    for condemned in fresh:
        quarantine.add(condemned)
    effects = job.records([each.entry for each in fresh])
    if not job.not_finite.take(worker, said.count, said.in_a_row):
        return [*effects, Reply(NotFiniteVerdict(decided=True))]
    effects += job.records([said.entry])
    effects.append(LogMessage(f"{job.title}: {said.title}; it does not count", warning=True))
    if not job.not_finite.expels(worker):
        return [*effects, Reply(NotFiniteVerdict(decided=True))]
    row = f"{said.in_a_row} gradients in a row of worker {worker} were not finite; the last: {said.title}"
    if job.workers == [worker]:
        before = job.not_finite.quarantined
        others = f", and {before} workers were out before it" if before else ""
        return [*effects, *_fail_by_not_finite(job, said, f"{row}{others}; the loss has diverged")]
    job.not_finite.quarantine()
    out: Entry = ("worker_quarantined", {"worker": worker, "step": said.step, "parameter": said.parameter})
    failure = errors.WorkerQuarantined(row, facts=said.facts)
    return [*effects, *job.records([out]), Reply(NotFiniteVerdict(decided=True, failure=failure))]


def announce_until(job: JobState, source: LeasedSource) -> int:
    """The worker announces the source's sequences before this one."""
    return limits.SEQUENCE_MAX if job.suspects.has(source) else job.feeds.quarantine.end(source)


def end_lease(job: JobState, source: LeasedSource, worker: Incarnation, *, done: bool) -> None:
    """The worker's lease is closed."""
    job.suspects.leave(worker)
    if done:
        job.suspects.clear(source)


# ---- steps that do not wait for all ranks


def decide_step(job: JobState, step: int, ranks: tuple[Rank, ...], now_ms: int) -> list[Effect]:
    """Decides which ranks count in a step (rule B6), once enough ranks have contributed and the others had a little
    more time. The verdict is recorded before any worker is told."""
    feeds, book, times = _steps(job), job.ranks, job.step_times
    assert book is not None
    if ranks and ranks[-1] >= len(book.all):
        raise errors.InvalidRequest(f"logical rank {ranks[-1]} of {job.title}, which has {len(book.all)}")
    feeds.verdicts.tell(step, ranks)
    left_out = feeds.verdicts.due(step, feeds.working(step))
    records: list[Effect] = []
    again_ms = 0
    if left_out:
        again_ms = times.patience_ms(step, job.settings.consistency.backup_patience, now_ms)
    if left_out is not None and not again_ms:
        late = feeds.decide(step, left_out)
        owners = [book.owner(rank) or Incarnation(0) for rank in late]
        dropped = [(owner, owners.count(owner)) for owner in sorted(set(owners))]
        feeds.verdicts.drop(dropped)
        records += job.records([straggler_verdicts.steps_decided(step, [left_out], dropped)])
        times.decide(step, now_ms)
    left_ms = times.left_ms(step + 1, now_ms)
    if left_ms and len(feeds.working(step + 1)) < feeds.logical_ranks:  # it may need one particular rank
        left_ms = 0
    return [*records, Reply(StepDecision(feeds.verdicts.members(step), left_ms, again_ms))]


def read_make_up(job: JobState, feed: int, step: int) -> list[Effect]:
    """Raises NotFound, InvalidRequest, NotReady."""
    return [Reply(MakeupBatches(*_steps(job).made_up(feed, step)))]


def dropped(job: JobState) -> int:
    """How many contributions came late, in total."""
    return job.feeds.verdicts.dropped if isinstance(job.feeds, StepLedger) else 0


def dropped_by(job: JobState, worker: Incarnation) -> int:
    return job.feeds.verdicts.dropped_by(worker) if isinstance(job.feeds, StepLedger) else 0


def verdicts_before(job: JobState, step: int) -> list[Entry]:
    """The verdicts on the steps before `step`, for a checkpoint."""
    return job.feeds.verdicts.entries(before=step) if isinstance(job.feeds, StepLedger) else []


def _steps(job: JobState) -> StepLedger:
    """Raises InvalidRequest if the job has no backup workers."""
    if not isinstance(job.feeds, StepLedger) or not job.settings.consistency.backup_workers:
        raise errors.InvalidRequest(f"{job.title} has no backup workers: each step is of all its ranks")
    return job.feeds


def _is_over_for(job: JobState, source: LeasedSource, step: int) -> bool:
    """Whether a rank's contribution to a step came too late. Its samples count at another step, and are not condemned
    under this name."""
    if not isinstance(job.feeds, StepLedger) or not isinstance(source, RankSource):
        return False
    return source.rank in job.feeds.verdicts.left_out(step)


def _check_begin(job: JobState, begun: BatchBegun) -> None:
    """Raises StaleToken, NotFound or InvalidRequest unless the worker holds this work."""
    source, worker, token = begun.source, begun.caller.incarnation, begun.token
    if isinstance(job.feeds, DataLedger):
        _check_former(job, source)
        job.feeds.check_begin(source, worker, token, begun.sequence)
        return
    _check_former(job, source)
    job.feeds.check_begin(source, begun.sequence)
    _check_rank(job, source, worker, token)


def _check_reported(job: JobState, said: NotFiniteReported) -> LeasedSource | None:
    """The source, if the work is from a data set. Raises StaleToken, NotFound or InvalidRequest unless the worker holds
    this work."""
    source, worker = said.source, said.caller.incarnation
    _check_former(job, source)
    if isinstance(job.feeds, DataLedger) and not isinstance(source, WorkerSource):
        job.feeds.check_begin(source, worker, said.token, said.last)
        return source
    if isinstance(job.feeds, StepLedger) and isinstance(source, RankSource) and said.first == said.last:
        _check_rank(job, source, worker, said.token)
        return source if job.feeds.feed_of(said.first) is not None else None
    if job.ranks is not None or source != WorkerSource(worker):
        raise errors.InvalidRequest(f"{said.work} by worker {worker} in {job.title}")
    return None


def _check_former(job: JobState, source: Source) -> None:
    """Raises StaleToken for work of a kind that the job no longer has."""
    of_before = RankSource if job.ranks is None else DataShardSource | WorkerSource
    if isinstance(source, of_before) and job.mode.has_switched_partitions:
        raise errors.StaleToken(f"{source} of {job.title}, which has switched to {job.mode.latest}")


def _check_rank(job: JobState, source: LeasedSource, worker: Incarnation, token: Token) -> None:
    """Raises StaleToken unless the worker has the logical rank. In a mirrored job it has ranks as a member of its
    replica group, whose generation is the token."""
    assert job.ranks is not None
    if job.replicas is not None:
        group = job.replicas.group_of(worker)
        has = group is not None and group.generation == token
    else:
        has = any(RankSource(lease.rank) == source and lease.token == token for lease in job.ranks.of(worker))
    if not has:
        raise errors.StaleToken(
            f"worker {worker} does not have {source} under token {token}", facts={"token": str(token)}
        )


def _fail_by_not_finite(job: JobState, said: NotFiniteReported, what: str) -> list[Effect]:
    failure = errors.NonFiniteGradient(what, facts=said.facts)
    return [*job_end.fail(job, failure), Reply(NotFiniteVerdict(decided=True, failure=failure))]
