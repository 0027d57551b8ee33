"""RPCs about a job as a whole: joining it, its variables, stopping it, its consistency mode, its readers."""

from __future__ import annotations

import math
import time

from shardyard.config.configuration import parse_job_settings
from shardyard.config.settings import AUTO, NEVER
from shardyard.domain import limits
from shardyard.domain.errors import InvalidRequest, TooLarge
from shardyard.domain.ids import Generation, Incarnation, JobId
from shardyard.security.identity import Identity
from shardyard.transport.error_codes import to_detail
from shardyard.wire import common_messages, layout_messages, lease_messages, methods, table_messages
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_coordinator.core import events
from shardyard_coordinator.core.effects import JobView, Joined, StopTaken, SwitchTaken, VariablesPlaced
from shardyard_coordinator.members.evaluations import Best, Evaluation
from shardyard_coordinator.service.rpcs import parts
from shardyard_coordinator.service.rpcs.rpc import Backend, acknowledged, decided, identified


def join_job_event(request: wire.JoinJobRequest, caller: Identity | None = None) -> events.JobJoined:
    settings = parse_job_settings(request.settings_json)
    run = parts.run_name(request.run_id, request.run_number)
    owner = "" if caller is None else caller.owner
    return events.JobJoined(Incarnation(request.caller.incarnation), parts.job_name(request.name), settings, run, owner)


def _join_job(backend: Backend, request: wire.JoinJobRequest, caller: Identity | None) -> wire.JoinJobReply:
    """Looks at the URL here, because the machine knows of no storage."""
    event = join_job_event(request, caller)
    url = event.settings.checkpoint.url
    if url not in (AUTO, NEVER):
        backend.access.check(url)
    reply = join_job_reply(backend.ask(event, Joined))
    reply.job_pass = backend.sign_pass(JobId(reply.job), event.incarnation, caller)
    return reply


def join_job_reply(joined: Joined) -> wire.JoinJobReply:
    return wire.JoinJobReply(
        job=joined.job,
        settings_json=joined.settings.model_dump_json(),
        started=joined.started,
        seed=joined.settings.seed,
        ranks=lease_messages.rank_leases_to_wire(joined.ranks),
        logical_ranks=joined.logical_ranks,
        chief=joined.chief,
        number=joined.number,
        world_size=joined.world_size,
        stop=parts.stop(joined.stop),
        consistency=parts.consistency(joined.consistency),
        switch_point=parts.switch_point(joined.switch_point),
        checkpoint=parts.checkpoint(joined.checkpoint),
    )


def register_variables_event(request: wire.RegisterVariablesRequest) -> events.VariablesRegistered:
    optimizer = layout_messages.optimizer_from_wire(request.optimizer)
    variables = layout_messages.variables_from_wire(request.variables, len(optimizer.groups))
    tables = table_messages.tables_from_wire(request.tables)
    places = tuple(common_messages.bounded(request.places, len(variables), "places of variables"))
    caller = common_messages.caller_from_wire(request.caller)
    return events.VariablesRegistered(caller, variables, optimizer, tables, places)


def register_variables_reply(placed: VariablesPlaced) -> wire.RegisterVariablesReply:
    return wire.RegisterVariablesReply(
        layout=layout_messages.layout_to_wire(placed.layout),
        map=layout_messages.map_to_wire(placed.map),
        initializer=placed.initializer,
        feedback=map(parts.residual, placed.feedback),
        restored_generation=placed.restored_generation,
        consistency=parts.consistency(placed.consistency),
    )


def commit_variables_event(request: wire.CommitVariablesRequest) -> events.VariablesCommitted:
    return events.VariablesCommitted(common_messages.caller_from_wire(request.caller), Generation(request.generation))


def stop_job_event(request: wire.StopJobRequest) -> events.StopRequested:
    caller = common_messages.caller_from_wire(request.caller)
    reason = common_messages.sentences(request.reason, "the reason of a stop")
    return events.StopRequested(caller if caller.incarnation else None, parts.job_name(request.job_name), reason)


def stop_job_reply(taken: StopTaken) -> wire.StopJobReply:
    return wire.StopJobReply(job_name=taken.job_name, job=taken.job, stop=parts.stop(taken.stop), first=taken.first)


def switch_consistency_event(request: wire.SwitchConsistencyRequest) -> events.SwitchRequested:
    name = parts.job_name(request.job_name)
    unspecified = request.mode == wire.CONSISTENCY_MODE_UNSPECIFIED
    mode = None if unspecified else common_messages.CONSISTENCY_MODES.from_wire(request.mode)
    staleness = request.staleness if request.HasField("staleness") else None
    return events.SwitchRequested(name, mode, staleness, lease_messages.strategy_from_wire(request.strategy))


def switch_consistency_reply(taken: SwitchTaken) -> wire.SwitchConsistencyReply:
    return wire.SwitchConsistencyReply(
        job_name=taken.job_name, job=taken.job, consistency=parts.consistency(taken.consistency), first=taken.first
    )


def follow_job_event(request: wire.FollowJobRequest) -> events.ReaderHeard:
    name = parts.job_name(request.job_name)
    reader = common_messages.random_name(request.reader)
    return events.ReaderHeard(JobId(request.job) if request.job else None, name, reader, request.leaves)


def _follow_job(backend: Backend, request: wire.FollowJobRequest, caller: Identity | None) -> wire.FollowJobReply:
    view = backend.ask(follow_job_event(request), JobView)
    return wire.FollowJobReply(
        job=view.job,
        job_name=view.job_name,
        state=parts.STATES[view.state],
        failure=None if view.failure is None else to_detail(view.failure),
        mode=common_messages.UPDATE_MODES.to_wire(view.mode),
        map=None if view.map is None else layout_messages.map_to_wire(view.map),
        layout=layout_messages.layout_to_wire(view.layout) if request.layout and view.layout is not None else None,
        url=view.url or "",
        job_pass=backend.sign_pass(view.job, Incarnation(0), caller),
        authorities=backend.authorities,
    )


def report_evaluation_event(request: wire.ReportEvaluationRequest, now_s: int) -> events.EvaluationReported:
    """`now_s`: the coordinator's time, in seconds since 1970; the evaluator's clock does not count."""
    if len(request.metrics) > limits.METRICS_MAX:
        raise TooLarge(f"an evaluation with {len(request.metrics)} metrics; at most {limits.METRICS_MAX} are taken")
    metrics = tuple((parts.metric_name(metric.name), _finite(metric.value)) for metric in request.metrics)
    best = None
    if request.HasField("best"):
        kept = request.best
        url = common_messages.text(kept.url, "the URL of what is kept")
        step = parts.sequence(kept.step, "an evaluation of step")
        best = Best(parts.metric_name(kept.metric), kept.lowest, _finite(kept.value), step, url, now_s)
    step = parts.sequence(request.step, "an evaluation of step")
    return events.EvaluationReported(JobId(request.job), Evaluation(step, metrics, now_s), best)


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise InvalidRequest(f"a metric that is {value}; expected a finite number")
    return value


RPCS = (
    identified(methods.JOIN_JOB, _join_job),
    decided(methods.REGISTER_VARIABLES, register_variables_event, VariablesPlaced, register_variables_reply),
    acknowledged(methods.COMMIT_VARIABLES, commit_variables_event, wire.CommitVariablesReply),
    decided(methods.STOP_JOB, stop_job_event, StopTaken, stop_job_reply),
    decided(methods.SWITCH_CONSISTENCY, switch_consistency_event, SwitchTaken, switch_consistency_reply),
    identified(methods.FOLLOW_JOB, _follow_job),
    acknowledged(
        methods.REPORT_EVALUATION,
        lambda request: report_evaluation_event(request, int(time.time())),
        wire.ReportEvaluationReply,
    ),
)
