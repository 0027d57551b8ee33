"""RPCs about data and about what counts: feeds, leases, batches, steps, gradients that are not finite."""

from __future__ import annotations

from shardyard.domain import limits
from shardyard.domain.errors import MalformedPayload
from shardyard.domain.ids import Token
from shardyard.domain.push_names import DataLease, DataShardSource, RankSource
from shardyard.transport.error_codes import to_detail
from shardyard.wire import common_messages, lease_messages, methods, push_messages
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_coordinator.core import events
from shardyard_coordinator.core.effects import (
    BatchVerdict,
    LeaseClosed,
    MakeupBatches,
    NotFiniteVerdict,
    Rebased,
    StepDecision,
)
from shardyard_coordinator.service.rpcs import parts
from shardyard_coordinator.service.rpcs.rpc import decided
from shardyard_coordinator.work.feeds import FeedDone, FeedOpening, FeedSpec, LeaseWait


def open_feed_event(request: wire.OpenFeedRequest) -> events.FeedOpened:
    spec = FeedSpec(
        samples=request.samples,
        fingerprint=common_messages.text(request.fingerprint, "a fingerprint", parts.NAME_CHARACTERS_MAX),
        batch_size=request.batch_size,
        epochs=request.epochs,
        shuffle=request.shuffle,
        drop_last=request.drop_last,
        accumulate=request.accumulate or 1,
    )
    return events.FeedOpened(common_messages.caller_from_wire(request.caller), request.feed, spec)


def open_feed_reply(opening: FeedOpening) -> wire.OpenFeedReply:
    return wire.OpenFeedReply(
        batches_per_data_shard=opening.batches_per_data_shard,
        units_per_epoch=opening.units_per_epoch,
        first_step=opening.first_step,
        begun_epochs=opening.begun[0],
        begun_samples=opening.begun[1],
        done=opening.done,
        has_later=opening.has_later,
    )


def lease_data_event(request: wire.LeaseDataRequest) -> events.LeaseRequested:
    known = common_messages.bounded(request.known, limits.DATA_LEASES_MAX, "leases of a worker")
    tokens = tuple(Token(each) for each in known)
    return events.LeaseRequested(common_messages.caller_from_wire(request.caller), request.feed, tokens)


def lease_data_reply(answer: object) -> wire.LeaseDataReply:
    match answer:
        case DataLease():
            return wire.LeaseDataReply(lease=lease_messages.data_lease_to_wire(answer))
        case LeaseWait(waiting_for):
            return wire.LeaseDataReply(wait=wire.LeaseWait(retry_ms=parts.RETRY_MS, waiting_for=waiting_for))
        case FeedDone():
            return wire.LeaseDataReply(done=wire.FeedDone())
        case _:
            raise AssertionError(answer)


def close_lease_event(request: wire.CloseLeaseRequest) -> events.LeaseReturned:
    has_shard = request.HasField("data_shard")
    source = common_messages.data_shard_from_wire(request.data_shard) if has_shard else None
    # a data shard names its feed, so the request need not repeat it
    feed = source.feed if source is not None and not request.feed else request.feed
    return events.LeaseReturned(common_messages.caller_from_wire(request.caller), feed, source, Token(request.token))


def close_lease_reply(closed: LeaseClosed) -> wire.CloseLeaseReply:
    return wire.CloseLeaseReply(done=closed.done)


def begin_batch_event(request: wire.BeginBatchRequest) -> events.BatchBegun:
    source = common_messages.source_from_wire(request.source)
    if not isinstance(source, DataShardSource | RankSource):
        raise MalformedPayload(f"a batch of {source} was announced, but only work with a lease is announced")
    parts.sequence(max(request.sequence, request.highest), "batch")
    caller = common_messages.caller_from_wire(request.caller)
    return events.BatchBegun(caller, source, Token(request.token), request.sequence, request.highest)


def begin_batch_reply(verdict: BatchVerdict) -> wire.BeginBatchReply:
    return wire.BeginBatchReply(
        quarantined=verdict.counts is False,
        retry_ms=parts.RETRY_MS if verdict.counts is None else 0,
        announce_until=verdict.announce_until,
    )


def report_not_finite_event(request: wire.ReportNotFiniteRequest) -> events.NotFiniteReported:
    if request.last < request.first or not 0 < request.in_a_row <= request.count:
        raise MalformedPayload(
            f"gradients that are not finite, of #{request.first} to #{request.last}, {request.in_a_row} in a row of"
            f" {request.count}"
        )
    parts.sequence(max(request.last, request.count, request.step, request.highest), "a gradient that is not finite at")
    parameter = common_messages.text(request.parameter, "a parameter's name", limits.VARIABLE_NAME_CHARACTERS_MAX)
    if not parameter:
        raise MalformedPayload("a report of a gradient that is not finite names no parameter")
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


def report_not_finite_reply(verdict: NotFiniteVerdict) -> wire.ReportNotFiniteReply:
    return wire.ReportNotFiniteReply(
        retry_ms=0 if verdict.decided else parts.RETRY_MS,
        failure=None if verdict.failure is None else to_detail(verdict.failure),
    )


def decide_step_event(request: wire.DecideStepRequest) -> events.StepReported:
    caller = common_messages.caller_from_wire(request.caller)
    ranks = push_messages.ranks_from_wire(request.ranks, f"ranks that have contributed to step {request.step}")
    return events.StepReported(caller, parts.sequence(request.step, "step"), ranks)


def decide_step_reply(decision: StepDecision) -> wire.DecideStepReply:
    return wire.DecideStepReply(
        decided=decision.members is not None,
        members=decision.members or (),
        left_ms=decision.left_ms,
        again_ms=decision.again_ms,
    )


def read_make_up_event(request: wire.ReadMakeUpRequest) -> events.MakeupRequested:
    return events.MakeupRequested(
        common_messages.caller_from_wire(request.caller), request.feed, parts.sequence(request.step, "step")
    )


def read_make_up_reply(made_up: MakeupBatches) -> wire.ReadMakeUpReply:
    reply = wire.ReadMakeUpReply(end=made_up.end)
    for rank, batch in sorted(made_up.batches.items()):
        reply.batches.add(rank=rank, dropped_rank=batch.rank, dropped_step=batch.step)
    return reply


def rebase_source_event(request: wire.RebaseSourceRequest) -> events.RebaseRequested:
    next_ = parts.sequence(request.next, "a source to continue at push")
    return events.RebaseRequested(common_messages.caller_from_wire(request.caller), next_)


def rebase_source_reply(rebased: Rebased) -> wire.RebaseSourceReply:
    lost = [wire.LostRange(partition=each.partition, first=each.first, last=each.last) for each in rebased.lost]
    return wire.RebaseSourceReply(lost=lost)


RPCS = (
    decided(methods.OPEN_FEED, open_feed_event, FeedOpening, open_feed_reply),
    decided(methods.LEASE_DATA, lease_data_event, object, lease_data_reply),
    decided(methods.CLOSE_LEASE, close_lease_event, LeaseClosed, close_lease_reply),
    decided(methods.BEGIN_BATCH, begin_batch_event, BatchVerdict, begin_batch_reply),
    decided(methods.REPORT_NOT_FINITE, report_not_finite_event, NotFiniteVerdict, report_not_finite_reply),
    decided(methods.DECIDE_STEP, decide_step_event, StepDecision, decide_step_reply),
    decided(methods.READ_MAKE_UP, read_make_up_event, MakeupBatches, read_make_up_reply),
    decided(methods.REBASE_SOURCE, rebase_source_event, Rebased, rebase_source_reply),
)
