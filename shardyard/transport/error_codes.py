"""Converts our errors to gRPC's statuses and back, by one table.

Invariant: an error that a peer raised becomes an error of the same class, with the same texts and facts.
"""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf.message import DecodeError

from shardyard.domain import errors
from shardyard.wire.v1 import common_pb2 as wire

DETAIL_KEY = "shardyard-error-bin"

# gRPC drops a call whose trailers are larger than 8 KiB, so the texts of an error are cut. In bytes:
STATUS_BYTES_MAX = 256
WHAT_BYTES_MAX = 2_048
HINT_BYTES_MAX = 512
FACTS_MAX = 8
FACT_KEY_BYTES_MAX = 64
FACT_BYTES_MAX = 128

# The first class that an error is an instance of decides, so subclasses stand first.
TABLE: tuple[tuple[type[errors.ShardyardError], grpc.StatusCode], ...] = (
    (errors.TooLarge, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.QuotaExceeded, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.ProtocolMismatch, grpc.StatusCode.UNIMPLEMENTED),
    (errors.InvalidRequest, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.SequenceGap, grpc.StatusCode.OUT_OF_RANGE),
    (errors.Refused, grpc.StatusCode.ABORTED),
    (errors.NotFound, grpc.StatusCode.NOT_FOUND),
    (errors.NotReady, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.DeadlineExceeded, grpc.StatusCode.DEADLINE_EXCEEDED),
    (errors.Unavailable, grpc.StatusCode.UNAVAILABLE),
    (errors.StorageUnavailable, grpc.StatusCode.UNAVAILABLE),
    (errors.CheckpointDamaged, grpc.StatusCode.DATA_LOSS),
    (errors.LogDamaged, grpc.StatusCode.DATA_LOSS),
    (errors.AuditDamaged, grpc.StatusCode.DATA_LOSS),
    (errors.JobFailed, grpc.StatusCode.CANCELLED),
    (errors.NotTrusted, grpc.StatusCode.UNAUTHENTICATED),
    (errors.NotPermitted, grpc.StatusCode.PERMISSION_DENIED),
    (errors.AddressInUse, grpc.StatusCode.ALREADY_EXISTS),
    (errors.Internal, grpc.StatusCode.INTERNAL),
    (errors.ShardyardError, grpc.StatusCode.UNKNOWN),
)


def status_of(error: errors.ShardyardError) -> grpc.StatusCode:
    return next(code for kind, code in TABLE if isinstance(error, kind))


def to_detail(error: errors.ShardyardError) -> wire.ErrorDetail:
    """The error as a message. Its texts are cut, so that it fits into a trailer."""
    return wire.ErrorDetail(
        code=error.code,
        what=_cut(error.what, WHAT_BYTES_MAX),
        why=_cut(error.why_text, HINT_BYTES_MAX),
        todo=_cut(error.todo_text, HINT_BYTES_MAX),
        facts={
            _cut(key, FACT_KEY_BYTES_MAX): _cut(value, FACT_BYTES_MAX)
            for key, value in sorted(error.facts.items())[:FACTS_MAX]
        },
    )


def status_text(error: errors.ShardyardError) -> str:
    """The text beside the status, for clients that do not read ErrorDetail."""
    return _cut(error.what, STATUS_BYTES_MAX)


def from_detail(detail: wire.ErrorDetail) -> errors.ShardyardError:
    return errors.rebuild(detail.code, detail.what, detail.why, detail.todo, dict(detail.facts))


def from_rpc_error(
    error: grpc.RpcError, *, peer: str, path: str, unavailable: type[errors.Unavailable]
) -> errors.ShardyardError:
    """The error that a failed call means. `peer`: the process that was called, and `path`: the method, for the message.
    `unavailable`: the class for a peer that did not answer."""
    call: Any = error if hasattr(error, "code") else None  # an error of a call; others have only a text
    for key, value in (call.trailing_metadata() or ()) if call is not None else ():
        if key == DETAIL_KEY and isinstance(value, bytes):
            try:
                return from_detail(wire.ErrorDetail.FromString(value))
            except DecodeError:
                break
    code = call.code() if call is not None else grpc.StatusCode.UNKNOWN
    said = (call.details() or "") if call is not None else str(error)
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        return unavailable(f"{peer} does not answer ({said})")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return errors.DeadlineExceeded(f"{peer} did not answer {path} in time ({said})")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return errors.ProtocolMismatch(f"{peer} does not know this method ({path})")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return errors.TooLarge(f"{peer} refused a message of {path} ({said})")
    return errors.Internal(f"{peer} failed in {path} with {code.name} ({said})")


def _cut(text: str, bytes_max: int) -> str:
    # the name of a file may have surrogates, which UTF-8 cannot encode
    return text.encode(errors="replace")[:bytes_max].decode(errors="ignore")
