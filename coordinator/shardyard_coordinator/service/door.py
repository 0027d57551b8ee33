"""Messages to events, answers to messages. What a peer sent is checked here, before the machine sees it.

Invariant: an event that leaves this module is well-formed in itself and bounded (shardyard.domain.limits). Raises
MalformedPayload, TooLarge, InvalidRequest, ConfigurationError. Must not know: any state.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import Final

from shardyard.checkpoints.convert import written_from_wire
from shardyard.config.configuration import parse_job_settings
from shardyard.config.settings import MembershipSettings
from shardyard.domain import limits
from shardyard.domain.consistency import Consistency, Stop, SwitchPoint
from shardyard.domain.errors import InvalidRequest, MalformedPayload, TooLarge
from shardyard.domain.ids import Caller, Generation, Incarnation, JobId, PartitionId, Term, Token
from shardyard.domain.push_names import DataLease, DataShardSource, RankSource, SourceKey, Watermark
from shardyard.transport.error_codes import to_detail
from shardyard.wire import (
    common_messages,
    layout_messages,
    lease_messages,
    pull_messages,
    push_messages,
    table_messages,
)
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard.wire.v1 import parameter_server_pb2 as server_wire
from shardyard_coordinator.core import events
from shardyard_coordinator.core.effects import (
    BatchVerdict,
    CheckpointProgress,
    HeartbeatReply,
    JobState,
    JobView,
    Joined,
    MakeupBatches,
    NotFiniteVerdict,
    Rebased,
    StepDecision,
    StopTaken,
    SwitchTaken,
    VariablesPlaced,
)
from shardyard_coordinator.members.evaluations import Best, Evaluation
from shardyard_coordinator.members.membership import Registration
from shardyard_coordinator.members.progress import Report
from shardyard_coordinator.service.audit import Page
from shardyard_coordinator.service.residual_collection import ResidualReport, ResidualRequest
from shardyard_coordinator.service.residual_collection import Stage as FeedbackStage
from shardyard_coordinator.service.status import JobStatus, MemberStatus, QuarantineStatus, SwitchStatus, YardStatus
from shardyard_coordinator.storage.checkpoint_book import Committed
from shardyard_coordinator.storage.recovery import Restored
from shardyard_coordinator.storage.restored_residuals import RestoredResidual
from shardyard_coordinator.work.feeds import FeedDone, FeedOpening, FeedSpec, LeaseWait

NAME_CHARACTERS_MAX: Final = 512
"""Of addresses, host names, releases, fingerprints."""
LEASE_RETRY_MS: Final = 100
BATCH_RETRY_MS: Final = 100

_STATES: dict[JobState, wire.JobState] = {
    JobState.STARTING: wire.JOB_STATE_STARTING,
    JobState.RUNNING: wire.JOB_STATE_RUNNING,
    JobState.FINISHING: wire.JOB_STATE_FINISHING,
    JobState.FINISHED: wire.JOB_STATE_FINISHED,
    JobState.FAILED: wire.JOB_STATE_FAILED,
}

_FEEDBACK_STAGES: dict[wire.FeedbackStage, FeedbackStage] = {
    wire.FEEDBACK_STAGE_READY: FeedbackStage.READY,
    wire.FEEDBACK_STAGE_COPIED: FeedbackStage.COPIED,
    wire.FEEDBACK_STAGE_ENDED: FeedbackStage.ENDED,
}


# ---- in


def registered(request: wire.RegisterRequest) -> events.MemberRegistered:
    return events.MemberRegistered(
        Registration(
            role=common_messages.role_from_wire(request.role),
            address=common_messages.text(request.address, "an address", NAME_CHARACTERS_MAX),
            protocol=request.protocol,
            release=common_messages.text(request.release, "a release", NAME_CHARACTERS_MAX),
            host=common_messages.text(request.host, "a host name", NAME_CHARACTERS_MAX),
            pid=request.pid,
            agent=Incarnation(request.agent) if request.agent else None,
            local_index=request.local_index,
            logs=common_messages.text(request.logs, "a folder of logs", NAME_CHARACTERS_MAX),
        )
    )


def heartbeat(request: wire.HeartbeatRequest) -> events.HeartbeatReceived:
    if len(request.metrics) > limits.METRICS_MAX:
        raise TooLarge(f"a heartbeat with {len(request.metrics)} metrics; at most {limits.METRICS_MAX} are taken")
    report = Report(
        step=request.step,
        samples=request.samples,
        metrics=tuple(
            (common_messages.text(metric.name, "a metric's name", limits.METRIC_NAME_CHARACTERS_MAX), metric.value)
            for metric in request.metrics
        ),
        waiting_for=common_messages.text(request.waiting_for, "what a member waits for"),
        residual_norm=_residual(request.residual_norm),
        pushed=_pushed(request.pushed),
        reached=_reached(request.stop_heard.reached) if request.HasField("stop_heard") else None,
        halted=_halted(request.halt_heard) if request.HasField("halt_heard") else None,
        switches=request.switches,
    )
    if len(request.logs) > limits.JOBS_MAX:
        raise TooLarge(f"a heartbeat with {len(request.logs)} logs; at most {limits.JOBS_MAX} are taken")
    logs = tuple((JobId(each.job), each.length) for each in request.logs)
    return events.HeartbeatReceived(Incarnation(request.caller.incarnation), report, logs, _rows(request))


def left(request: wire.LeaveRequest) -> events.MemberLeft:
    error = common_messages.text(request.error, "an error")
    lost = _residual(request.residual_lost)
    return events.MemberLeft(Incarnation(request.caller.incarnation), error, _pushed(request.pushed), lost)


def _rows(request: wire.HeartbeatRequest) -> tuple[tuple[JobId, tuple[int, ...]], ...]:
    if len(request.tables) > limits.JOBS_MAX or any(len(each.rows) > limits.TABLES_MAX for each in request.tables):
        raise TooLarge(f"a heartbeat with the rows of {len(request.tables)} jobs; more than there can be")
    return tuple((JobId(each.job), tuple(each.rows)) for each in request.tables)


def _residual(norm: float) -> float:
    if not 0 <= norm < math.inf:
        raise MalformedPayload(f"a residual of 2-norm {norm}; expected a number from 0")
    return norm


def _pushed(pushed: int) -> int:
    if pushed > limits.SEQUENCE_MAX:
        raise TooLarge(f"{pushed} pushes; at most {limits.SEQUENCE_MAX} have names")
    return pushed


def _halted(heard: wire.HaltHeard) -> tuple[int, int]:
    return heard.number, _reached(heard.reached)


def _reached(step: int) -> int:
    if step > limits.SEQUENCE_MAX:
        raise TooLarge(f"a worker that has come to step {step}; the last one is {limits.SEQUENCE_MAX}")
    return step


def exit_reported(request: wire.ReportExitRequest) -> events.ExitReported:
    return events.ExitReported(Incarnation(request.caller.incarnation), request.pid, request.exit_code)


def joined(request: wire.JoinJobRequest) -> events.JobJoined:
    settings = parse_job_settings(request.settings_json)
    return events.JobJoined(Incarnation(request.caller.incarnation), request.name, settings)


def variables_registered(request: wire.RegisterVariablesRequest) -> events.VariablesRegistered:
    optimizer = layout_messages.optimizer_from_wire(request.optimizer)
    variables = layout_messages.variables_from_wire(request.variables, len(optimizer.groups))
    found = table_messages.tables_from_wire(request.tables)
    return events.VariablesRegistered(common_messages.caller_from_wire(request.caller), variables, optimizer, found)


def variables_committed(request: wire.CommitVariablesRequest) -> events.VariablesCommitted:
    return events.VariablesCommitted(common_messages.caller_from_wire(request.caller), Generation(request.generation))


def feed_opened(request: wire.OpenFeedRequest) -> events.FeedOpened:
    spec = FeedSpec(
        samples=request.samples,
        fingerprint=common_messages.text(request.fingerprint, "a fingerprint", NAME_CHARACTERS_MAX),
        batch_size=request.batch_size,
        epochs=request.epochs,
        shuffle=request.shuffle,
        drop_last=request.drop_last,
        accumulate=request.accumulate or 1,
    )
    return events.FeedOpened(common_messages.caller_from_wire(request.caller), request.feed, spec)


def lease_requested(request: wire.LeaseDataRequest) -> events.LeaseRequested:
    return events.LeaseRequested(common_messages.caller_from_wire(request.caller), request.feed)


def lease_returned(request: wire.CloseLeaseRequest) -> events.LeaseReturned:
    has_shard = request.HasField("data_shard")
    source = common_messages.data_shard_from_wire(request.data_shard) if has_shard else None
    feed = request.feed
    if source is not None and not feed:
        # a data shard names its feed; it need not be said twice
        feed = source.feed
    return events.LeaseReturned(common_messages.caller_from_wire(request.caller), feed, source, Token(request.token))


def batch_begun(request: wire.BeginBatchRequest) -> events.BatchBegun:
    source = common_messages.source_from_wire(request.source)
    if not isinstance(source, DataShardSource | RankSource):
        raise MalformedPayload(f"{source} is not leased, so none of its batches is announced")
    if max(request.sequence, request.highest) > limits.SEQUENCE_MAX:
        raise TooLarge(f"sequence {max(request.sequence, request.highest)}; at most {limits.SEQUENCE_MAX} are taken")
    caller = common_messages.caller_from_wire(request.caller)
    return events.BatchBegun(caller, source, Token(request.token), request.sequence, request.highest)


def not_finite_reported(request: wire.ReportNotFiniteRequest) -> events.NotFiniteReported:
    if request.last < request.first or not 0 < request.in_a_row <= request.count:
        raise MalformedPayload(
            f"gradients that are not finite, of #{request.first} to #{request.last}, {request.in_a_row} in a row of"
            f" {request.count}"
        )
    if max(request.last, request.count, request.step, request.highest) > limits.SEQUENCE_MAX:
        raise TooLarge(f"more than {limits.SEQUENCE_MAX} gradients that are not finite")
    parameter = common_messages.text(request.parameter, "a parameter's name", limits.VARIABLE_NAME_CHARACTERS_MAX)
    if not parameter:
        raise MalformedPayload("a gradient that is not finite, of a parameter without a name")
    return events.NotFiniteReported(
        common_messages.caller_from_wire(request.caller),
        common_messages.source_from_wire(request.source),
        Token(request.token),
        request.first,
        request.last,
        parameter,
        request.count,
        request.in_a_row,
        request.step,
        request.highest,
    )


def step_told_of(request: wire.DecideStepRequest) -> events.StepReported:
    caller = common_messages.caller_from_wire(request.caller)
    ranks = push_messages.ranks_from_wire(request.ranks, f"ranks that have contributed to step {request.step}")
    return events.StepReported(caller, _step(request.step), ranks)


def decision_reply(decision: StepDecision) -> wire.DecideStepReply:
    return wire.DecideStepReply(
        decided=decision.members is not None,
        members=decision.members or (),
        left_ms=decision.left_ms,
        again_ms=decision.again_ms,
    )


def make_up_asked(request: wire.ReadMakeUpRequest) -> events.MakeupRequested:
    return events.MakeupRequested(common_messages.caller_from_wire(request.caller), request.feed, _step(request.step))


def make_up_reply(made_up: MakeupBatches) -> wire.ReadMakeUpReply:
    reply = wire.ReadMakeUpReply(end=made_up.end)
    for rank, batch in sorted(made_up.batches.items()):
        reply.batches.add(rank=rank, dropped_rank=batch.rank, dropped_step=batch.step)
    return reply


def _step(step: int) -> int:
    if step > limits.SEQUENCE_MAX:
        raise TooLarge(f"step {step}; the last one is {limits.SEQUENCE_MAX}")
    return step


def audit_wanted(request: wire.ReadAuditRequest) -> tuple[str, int]:
    """A job's name or id, and the number after which to begin."""
    job = common_messages.text(request.job, "a job's name or id", limits.JOB_NAME_CHARACTERS_MAX)
    if request.after > limits.SEQUENCE_MAX:
        raise TooLarge(f"audit entries after {request.after}; at most {limits.SEQUENCE_MAX} are taken")
    return job, request.after


def checkpoint_asked(request: wire.TakeCheckpointRequest) -> events.CheckpointRequested:
    caller = common_messages.caller_from_wire(request.caller)
    name = common_messages.text(request.job_name, "a job's name", limits.JOB_NAME_CHARACTERS_MAX)
    return events.CheckpointRequested(caller if caller.incarnation else None, name, request.ticket)


def stop_asked(request: wire.StopJobRequest) -> events.StopRequested:
    caller = common_messages.caller_from_wire(request.caller)
    name = common_messages.text(request.job_name, "a job's name", limits.JOB_NAME_CHARACTERS_MAX)
    reason = common_messages.text(request.reason, "the reason of a stop")
    return events.StopRequested(caller if caller.incarnation else None, name, reason)


def switch_asked(request: wire.SwitchConsistencyRequest) -> events.SwitchRequested:
    name = common_messages.text(request.job_name, "a job's name", limits.JOB_NAME_CHARACTERS_MAX)
    unspecified = request.mode == wire.CONSISTENCY_MODE_UNSPECIFIED
    mode = None if unspecified else common_messages.consistency_mode_from_wire(request.mode)
    return events.SwitchRequested(name, mode, request.staleness if request.HasField("staleness") else None)


def reader_heard(request: wire.FollowJobRequest) -> events.ReaderHeard:
    name = common_messages.text(request.job_name, "a job's name", limits.JOB_NAME_CHARACTERS_MAX)
    reader = pull_messages.random_name(request.reader)
    return events.ReaderHeard(JobId(request.job) if request.job else None, name, reader, request.leaves)


def evaluation_reported(request: wire.ReportEvaluationRequest, now_s: int) -> events.EvaluationReported:
    """`now_s`: seconds since 1970."""
    if len(request.metrics) > limits.METRICS_MAX:
        raise TooLarge(f"an evaluation with {len(request.metrics)} metrics; at most {limits.METRICS_MAX} are taken")
    metrics = tuple((_metric_name(metric.name), _finite(metric.value)) for metric in request.metrics)
    best = None
    if request.HasField("best"):
        kept = request.best
        url = common_messages.text(kept.url, "the URL of what is kept")
        step = _evaluated(kept.step)
        best = Best(_metric_name(kept.metric), kept.lowest, _finite(kept.value), step, url, now_s)
    return events.EvaluationReported(JobId(request.job), Evaluation(_evaluated(request.step), metrics, now_s), best)


def _evaluated(step: int) -> int:
    if step > limits.SEQUENCE_MAX:
        raise TooLarge(f"an evaluation of step {step}; the last one is {limits.SEQUENCE_MAX}")
    return step


def _metric_name(name: str) -> str:
    return common_messages.text(name, "a metric's name", limits.METRIC_NAME_CHARACTERS_MAX)


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise InvalidRequest(f"a metric that is {value}; expected a finite number")
    return value


def restore_asked(request: wire.RestoreCheckpointRequest) -> tuple[str, int, str]:
    """Name, number and URL."""
    name = common_messages.text(request.job_name, "a job's name", limits.JOB_NAME_CHARACTERS_MAX)
    return name, request.number, common_messages.text(request.url, "the URL of checkpoints")


def feedback_reported(request: wire.ReportFeedbackRequest) -> tuple[Caller, ResidualReport]:
    """What of a file is said before it is written is passed over."""
    caller, stage = common_messages.caller_from_wire(request.caller), _FEEDBACK_STAGES.get(request.stage)
    if stage is None:
        raise MalformedPayload(f"a worker's file at stage {request.stage}; expected one that has a name")
    if stage is not FeedbackStage.ENDED:
        return caller, ResidualReport(stage)
    failure = common_messages.text(request.failure, "why a worker's file was not written")
    written = None
    if request.length and not failure:
        written = written_from_wire(request.length, request.sha256, "a worker's file")
    return caller, ResidualReport(stage, written, failure)


def feedback_read(request: wire.TakeUpFeedbackRequest) -> events.FeedbackRead:
    return events.FeedbackRead(
        common_messages.caller_from_wire(request.caller),
        Generation(request.generation),
        common_messages.text(request.worker, "a worker's name", NAME_CHARACTERS_MAX),
        common_messages.text(request.failure, "why it could not be taken up"),
    )


def rebase_asked(request: wire.RebaseSourceRequest) -> events.RebaseRequested:
    if request.next > limits.SEQUENCE_MAX:
        raise TooLarge(f"a source to go on with at #{request.next}; the last one is #{limits.SEQUENCE_MAX}")
    return events.RebaseRequested(common_messages.caller_from_wire(request.caller), request.next)


def nexts(reply: server_wire.ReadLedgerReply, partitions: Iterable[PartitionId]) -> list[tuple[PartitionId, int]]:
    """Of the one source that was asked about. Raises MalformedPayload where a partition is not named."""
    found = {
        mark.partition: mark.next for _, marks in lease_messages.watermarks_from_wire(reply.sources) for mark in marks
    }
    wanted = sorted(partitions)
    if not found.keys() >= set(wanted):
        raise MalformedPayload(f"watermarks of partitions {sorted(found)}; expected those of {wanted}")
    return [(partition, found[partition]) for partition in wanted]


def lowest_next(reply: server_wire.ReadLedgerReply, sources: Sequence[SourceKey], partitions: Iterable[int]) -> int:
    """The lowest next sequence of the sources over the server's partitions; 0 where one of them is not named."""
    found: dict[tuple[SourceKey, int], int] = {}
    marks: tuple[Watermark, ...]
    for key, marks in lease_messages.watermarks_from_wire(reply.sources):
        for mark in marks:
            found[key, mark.partition] = mark.next
    return min((found.get((key, partition), 0) for key in sources for partition in partitions), default=0)


def highest_next(reply: server_wire.ReadLedgerReply, sources: Sequence[SourceKey], partitions: Iterable[int]) -> int:
    """The highest next sequence of the sources over the server's partitions. Raises MalformedPayload where a source is
    not named, for it may be any."""
    marks = dict(lease_messages.watermarks_from_wire(reply.sources))
    wanted = set(partitions)
    for key in sources:
        named = {mark.partition for mark in marks.get(key, ())}
        if not named >= wanted:
            raise MalformedPayload(f"watermarks of {key} in partitions {sorted(named)}; expected {sorted(wanted)}")
    return max(mark.next for key in sources for mark in marks[key])


def highest_version(reply: server_wire.ReadLedgerReply, sources: Sequence[SourceKey], partitions: Iterable[int]) -> int:
    """The highest version number of the server's partitions. Raises as `highest_next`."""
    highest_next(reply, sources, partitions)
    wanted = set(sources)
    found = lease_messages.watermarks_from_wire(reply.sources)
    highest = max(mark.version.number for key, marks in found if key in wanted for mark in marks)
    if highest > limits.SEQUENCE_MAX:
        raise MalformedPayload(f"a partition at version {highest}; at most {limits.SEQUENCE_MAX} are taken")
    return highest


# ---- out


def register_reply(incarnation: Incarnation, term: Term, membership: MembershipSettings) -> wire.RegisterReply:
    return wire.RegisterReply(
        incarnation=incarnation,
        term=term,
        heartbeat_ms=membership.heartbeat_ms,
        lease_ms=membership.lease_ms,
    )


def heartbeat_reply(standing: HeartbeatReply, term: Term, wanted: ResidualRequest | None = None) -> wire.HeartbeatReply:
    """`wanted`: what the worker shall save."""
    return wire.HeartbeatReply(
        term=term,
        job_state=wire.JOB_STATE_UNSPECIFIED if standing.job_state is None else _STATES[standing.job_state],
        failure=None if standing.failure is None else to_detail(standing.failure),
        generation=standing.generation or 0,
        ranks=lease_messages.rank_leases_to_wire(standing.ranks),
        chief=standing.chief,
        workers=standing.workers,
        fenced=standing.fenced,
        recovering=standing.recovering,
        initializer=standing.initializer,
        save_feedback=None if wanted is None else wire.SaveFeedback(number=wanted.number, url=wanted.url),
        feedback=map(_hand_over, standing.feedback),
        gone_back=standing.gone_back,
        stop=_stop(standing.stop),
        consistency=_consistency(standing.consistency),
        halt=_halt(standing.halt),
        checkpoint=None if standing.checkpoint is None else _checkpoint_status(standing.checkpoint),
    )


def _stop(stop: Stop | None) -> wire.Stop | None:
    return None if stop is None else lease_messages.stop_to_wire(stop)


def _halt(halt: SwitchPoint | None) -> wire.Halt | None:
    return None if halt is None else lease_messages.halt_to_wire(halt)


def _consistency(consistency: Consistency | None) -> wire.Consistency | None:
    return None if consistency is None else lease_messages.consistency_to_wire(consistency)


def _hand_over(handed: RestoredResidual) -> wire.HandOver:
    file = handed.file.file
    return wire.HandOver(
        generation=handed.generation,
        worker=handed.file.worker,
        own=handed.own,
        url=handed.url,
        path=file.path,
        length=file.written.nbytes,
        sha256=bytes.fromhex(file.written.sha256),
    )


def join_reply(joined: Joined) -> wire.JoinJobReply:
    return wire.JoinJobReply(
        job=joined.job,
        settings_json=joined.settings.model_dump_json(),
        started=joined.started,
        seed=joined.settings.seed,
        ranks=lease_messages.rank_leases_to_wire(joined.ranks),
        logical_ranks=joined.logical_ranks,
        chief=joined.chief,
        stop=_stop(joined.stop),
        consistency=_consistency(joined.consistency),
        halt=_halt(joined.halt),
        checkpoint=None if joined.checkpoint is None else _checkpoint_status(joined.checkpoint),
    )


def placed_reply(placed: VariablesPlaced) -> wire.RegisterVariablesReply:
    return wire.RegisterVariablesReply(
        layout=layout_messages.layout_to_wire(placed.layout),
        map=layout_messages.map_to_wire(placed.map),
        initializer=placed.initializer,
        feedback=map(_hand_over, placed.feedback),
        gone_back=placed.gone_back,
        consistency=_consistency(placed.consistency),
    )


def feed_reply(opening: FeedOpening) -> wire.OpenFeedReply:
    return wire.OpenFeedReply(
        batches_per_data_shard=opening.batches_per_data_shard,
        units_per_epoch=opening.units_per_epoch,
        first_step=opening.first_step,
        begun_epochs=opening.begun[0],
        begun_samples=opening.begun[1],
        done=opening.done,
    )


def lease_reply(answer: DataLease | LeaseWait | FeedDone) -> wire.LeaseDataReply:
    match answer:
        case DataLease():
            return wire.LeaseDataReply(lease=lease_messages.data_lease_to_wire(answer))
        case LeaseWait(waiting_for):
            return wire.LeaseDataReply(wait=wire.LeaseWait(retry_ms=LEASE_RETRY_MS, waiting_for=waiting_for))
        case FeedDone():
            return wire.LeaseDataReply(done=wire.FeedDone())


def batch_reply(verdict: BatchVerdict) -> wire.BeginBatchReply:
    return wire.BeginBatchReply(
        quarantined=verdict.counts is False,
        retry_ms=BATCH_RETRY_MS if verdict.counts is None else 0,
        careful_below=verdict.careful_below,
    )


def not_finite_reply(verdict: NotFiniteVerdict) -> wire.ReportNotFiniteReply:
    return wire.ReportNotFiniteReply(
        retry_ms=0 if verdict.decided else BATCH_RETRY_MS,
        failure=None if verdict.failure is None else to_detail(verdict.failure),
    )


def quarantined_reply(standing: QuarantineStatus) -> wire.ListQuarantinedReply:
    return wire.ListQuarantinedReply(
        batches=[
            wire.QuarantinedBatch(
                feed=each.feed,
                epoch=each.epoch,
                source=common_messages.source_to_wire(each.condemned.source),
                sequence=each.condemned.sequence,
                begin=each.begin,
                end=each.end,
                deaths=each.condemned.deaths,
                parameter=each.condemned.parameter,
                worker=each.condemned.worker,
            )
            for each in standing.batches
        ],
        seed=standing.seed,
        feeds=[wire.FeedOrder(feed=feed, samples=spec.samples, shuffle=spec.shuffle) for feed, spec in standing.feeds],
    )


def audit_reply(job: int, page: Page) -> wire.ReadAuditReply:
    return wire.ReadAuditReply(
        entries=[
            wire.AuditEntry(
                number=each.number,
                term=each.term,
                time=each.time,
                job=each.job,
                event=each.kind,
                body_json=json.dumps(each.body, separators=(",", ":")),
            )
            for each in page.entries
        ],
        job=job,
        reached=page.reached,
        more=page.more,
        lost=page.lost,
    )


def checkpoint_reply(standing: CheckpointProgress) -> wire.TakeCheckpointReply:
    taken = standing.taken
    return wire.TakeCheckpointReply(
        ticket=standing.ticket,
        done=taken is not None,
        number=0 if taken is None else taken.number,
        step=0 if taken is None else taken.step,
        url=standing.url,
        job_name=standing.job_name,
        failure=None if standing.failure is None else to_detail(standing.failure),
    )


def stop_reply(taken: StopTaken) -> wire.StopJobReply:
    stop = lease_messages.stop_to_wire(taken.stop)
    return wire.StopJobReply(job_name=taken.job_name, job=taken.job, stop=stop, first=taken.first)


def switch_reply(taken: SwitchTaken) -> wire.SwitchConsistencyReply:
    consistency = lease_messages.consistency_to_wire(taken.consistency)
    return wire.SwitchConsistencyReply(
        job_name=taken.job_name, job=taken.job, consistency=consistency, first=taken.first
    )


def follow_reply(followed: JobView, *, layout: bool) -> wire.FollowJobReply:
    """`layout`: with it."""
    return wire.FollowJobReply(
        job=followed.job,
        job_name=followed.job_name,
        state=_STATES[followed.state],
        failure=None if followed.failure is None else to_detail(followed.failure),
        mode=common_messages.mode_to_wire(followed.mode),
        map=None if followed.map is None else layout_messages.map_to_wire(followed.map),
        layout=layout_messages.layout_to_wire(followed.layout) if layout and followed.layout is not None else None,
        url=followed.url or "",
    )


def rebase_reply(rebased: Rebased) -> wire.RebaseSourceReply:
    lost = [wire.LostRange(partition=each.partition, first=each.first, last=each.last) for each in rebased.lost]
    return wire.RebaseSourceReply(lost=lost)


def status_reply(yard: YardStatus, *, waiting_for: str) -> wire.StatusReply:
    """`waiting_for`: what the coordinator's own threads wait for."""
    return wire.StatusReply(
        term=yard.term,
        uptime_ms=yard.uptime_ms,
        members=[_member_status(member) for member in yard.members],
        jobs=[_job_status(job) for job in yard.jobs],
        waiting_for=waiting_for,
    )


def _member_status(member: MemberStatus) -> wire.MemberStatus:
    return wire.MemberStatus(
        incarnation=member.incarnation,
        role=common_messages.role_to_wire(member.role),
        address=member.address,
        host=member.host,
        pid=member.pid,
        release=member.release,
        last_seen_ms_ago=member.last_seen_ms_ago,
        job=member.job or 0,
        step=member.report.step,
        samples=member.report.samples,
        waiting_for=member.waiting_for,
        ranks=member.ranks,
        not_finite=member.not_finite,
        dropped=min(member.dropped, (1 << 64) - 1),
    )


def _job_status(job: JobStatus) -> wire.JobStatus:
    return wire.JobStatus(
        job=job.job,
        name=job.name,
        state=_STATES[job.state],
        failure=None if job.failure is None else to_detail(job.failure),
        mode=common_messages.mode_to_wire(job.mode),
        logical_ranks=job.logical_ranks,
        staleness=job.staleness,
        local_steps=job.local_steps,
        rows_in_flight=job.rows_in_flight,
        workers=job.workers,
        step=job.step,
        samples=job.samples,
        samples_per_s=job.samples_per_s,
        metrics=[wire.Metric(name=name, value=value) for name, value in job.metrics],
        map=None if job.map is None else layout_messages.map_to_wire(job.map),
        feeds=[
            wire.FeedStatus(
                feed=feed.feed,
                samples=feed.samples,
                epochs=feed.epochs,
                free=_uint32(feed.free),
                leased=feed.leased,
                done=_uint32(feed.done),
                finished=feed.finished,
                quarantined=feed.quarantined,
            )
            for feed in job.feeds
        ],
        parameters=job.parameters,
        payload_bytes=job.payload_bytes,
        residuals_lost=job.residuals_lost,
        residual_lost_norm=job.residual_lost_norm,
        lost_pushes=min(job.lost_pushes, (1 << 64) - 1),
        waits=job.waits,
        checkpoint=None if job.checkpoint is None else _checkpoint_status(job.checkpoint),
        restored=None if job.restored is None else _restored_status(job.restored),
        recovering=job.recovering,
        not_finite=job.not_finite,
        workers_quarantined=job.workers_quarantined,
        stop=_stop(job.stop),
        consistency=None if job.switch is None else _switch_status(job.switch),
        evaluation=None if job.evaluation is None else _evaluation_status(job.evaluation),
        best=None if job.best is None else _kept_best(job.best),
        readers=job.readers,
        dropped=min(job.dropped, (1 << 64) - 1),
        tables=[
            wire.TableStatus(name=table.name, dim=table.dim, optimizer=table.optimizer, rows=min(rows, (1 << 64) - 1))
            for table, rows in job.tables
        ],
    )


def _switch_status(switch: SwitchStatus) -> wire.SwitchStatus:
    consistency = lease_messages.consistency_to_wire(switch.consistency)
    return wire.SwitchStatus(
        consistency=consistency,
        servers=switch.servers,
        behind=switch.behind,
        step=switch.step,
        draining=switch.draining,
    )


def _evaluation_status(evaluation: Evaluation) -> wire.EvaluationStatus:
    metrics = [wire.Metric(name=name, value=value) for name, value in evaluation.metrics]
    return wire.EvaluationStatus(step=evaluation.step, metrics=metrics, reported_s=evaluation.reported_s)


def _kept_best(best: Best) -> wire.KeptBest:
    return wire.KeptBest(
        metric=best.metric,
        lowest=best.lowest,
        value=best.value,
        step=best.step,
        url=best.url,
        reported_s=best.reported_s,
    )


def _checkpoint_status(taken: Committed) -> wire.CheckpointStatus:
    return wire.CheckpointStatus(number=taken.number, step=taken.step, created_s=taken.created_s)


def _restored_status(restored: Restored) -> wire.RestoredStatus:
    return wire.RestoredStatus(
        checkpoint=wire.CheckpointStatus(number=restored.checkpoint, step=restored.step, created_s=restored.created_s),
        partitions=restored.partitions,
        leased_again=restored.leased_again,
        logs=restored.logs,
    )


def _uint32(count: int) -> int:
    return min(count, (1 << 32) - 1)
