"""RPCs about checkpoints: taking one, going back to one, and the workers' residuals that belong to it."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from shardyard.checkpoints.convert import written_from_wire
from shardyard.domain.errors import ConfigurationError, MalformedPayload
from shardyard.domain.ids import Caller, Generation
from shardyard.security.identity import Identity
from shardyard.transport.error_codes import to_detail
from shardyard.wire import common_messages, methods
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_coordinator.core import events
from shardyard_coordinator.core.effects import CheckpointProgress, FeedbackVerdict, RestorePlanned
from shardyard_coordinator.service.residual_collection import ResidualReport, Stage
from shardyard_coordinator.service.rpcs import parts
from shardyard_coordinator.service.rpcs.rpc import Backend, decided, identified, served

_STAGES: Final[dict[wire.FeedbackStage, Stage]] = {
    wire.FEEDBACK_STAGE_READY: Stage.READY,
    wire.FEEDBACK_STAGE_COPIED: Stage.COPIED,
    wire.FEEDBACK_STAGE_ENDED: Stage.ENDED,
}


def take_checkpoint_event(request: wire.TakeCheckpointRequest) -> events.CheckpointRequested:
    caller = common_messages.caller_from_wire(request.caller)
    name = parts.job_name(request.job_name)
    return events.CheckpointRequested(caller if caller.incarnation else None, name, request.ticket)


def take_checkpoint_reply(progress: CheckpointProgress) -> wire.TakeCheckpointReply:
    taken = progress.taken
    return wire.TakeCheckpointReply(
        ticket=progress.ticket,
        done=taken is not None,
        number=0 if taken is None else taken.number,
        step=0 if taken is None else taken.step,
        url=progress.url,
        job_name=progress.job_name,
        failure=None if progress.failure is None else to_detail(progress.failure),
    )


def _restore_checkpoint(
    backend: Backend, request: wire.RestoreCheckpointRequest, caller: Identity | None
) -> wire.RestoreCheckpointReply:
    """Looks at the storage here, because the machine knows of none. What a person of an owner orders is for jobs of
    that owner."""
    name, owner = parts.job_name(request.job_name), "" if caller is None else caller.owner
    url = common_messages.text(request.url, "the URL of checkpoints")
    if request.cancel:
        backend.ask(events.RestoreCancelled(name, owner), RestorePlanned)
        return wire.RestoreCheckpointReply()
    with backend.mailbox.machine() as machine:
        urls = [job.book.url for job in machine.jobs if job.settings.name == name]
    url = url or next((each for each in reversed(urls) if each), None) or backend.checkpoints or ""
    if not url:
        raise ConfigurationError(
            f"the coordinator does not know where the checkpoints of job {name!r} are", why="", todo="give --url"
        )
    origin, damaged = backend.checkpoint_io.find(url, name, request.number, trust=request.trust)
    planned = backend.ask(events.RestoreOrdered(replace(origin, owner=owner)), RestorePlanned)
    return wire.RestoreCheckpointReply(
        number=origin.number, step=origin.step, url=url, running=planned.running, damaged=damaged
    )


def residual_report(request: wire.ReportResidualRequest) -> tuple[Caller, ResidualReport]:
    """What the request says of a file that is not written yet is ignored."""
    caller, stage = common_messages.caller_from_wire(request.caller), _STAGES.get(request.stage)
    if stage is None:
        raise MalformedPayload(f"a residual's report at stage {request.stage}, which this release does not know")
    if stage is not Stage.ENDED:
        return caller, ResidualReport(stage)
    failure = common_messages.sentences(request.failure, "why a residual was not written")
    written = None
    if request.length and not failure:
        written = written_from_wire(request.length, request.sha256, "a worker's file")
    return caller, ResidualReport(stage, written, failure)


def _report_residual(backend: Backend, request: wire.ReportResidualRequest) -> wire.ReportResidualReply:
    caller, report = residual_report(request)
    copy = backend.residuals.report(caller.job, caller.incarnation, request.number, report)
    return wire.ReportResidualReply(copy=copy)


def take_up_residual_event(request: wire.TakeUpResidualRequest) -> events.FeedbackRead:
    return events.FeedbackRead(
        common_messages.caller_from_wire(request.caller),
        Generation(request.generation),
        common_messages.text(request.worker, "a worker's name", parts.NAME_CHARACTERS_MAX),
        common_messages.sentences(request.failure, "why a residual could not be read"),
    )


def take_up_residual_reply(verdict: FeedbackVerdict) -> wire.TakeUpResidualReply:
    return wire.TakeUpResidualReply(taken=verdict.taken)


RPCS = (
    decided(methods.TAKE_CHECKPOINT, take_checkpoint_event, CheckpointProgress, take_checkpoint_reply),
    identified(methods.RESTORE_CHECKPOINT, _restore_checkpoint),
    served(methods.REPORT_RESIDUAL, _report_residual),
    decided(methods.TAKE_UP_RESIDUAL, take_up_residual_event, FeedbackVerdict, take_up_residual_reply),
)
