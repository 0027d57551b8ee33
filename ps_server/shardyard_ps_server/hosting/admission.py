"""Which requests this server accepts.

In: the header of a request. Out: the job that it is about, or a refusal. Everything that can be checked without the
payload is checked here, so that memory is allocated only for requests that fit the layout. A request of a stale
incarnation, generation or term changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shardyard.domain import limits, optimizers
from shardyard.domain.errors import (
    InvalidRequest,
    NotFound,
    NotReady,
    ShapeMismatch,
    StaleIncarnation,
    StaleTerm,
    TooLarge,
)
from shardyard.domain.ids import Caller, Generation, Incarnation
from shardyard.domain.pulls import PullHeader, RequestedRows, RowCode
from shardyard.domain.push_names import WorkerSource
from shardyard.domain.pushes import PushHeader, PushKind
from shardyard.security.passes import speaker
from shardyard_ps_server.hosting.hosted_job import HostedJob
from shardyard_ps_server.hosting.store import Store
from shardyard_ps_server.rows.pushed_rows import check_pushed, requested_bytes_max


def check_coordinator(store: Store, caller: Caller) -> None:
    """Raises StaleTerm if another coordinator has replaced the caller."""
    with store.lock:
        if caller.term < store.identity.term:
            raise StaleTerm(f"term {caller.term}; this server has seen {store.identity.term}")
        store.identity.term = caller.term


def admit(
    store: Store, caller: Caller, server: Incarnation, generation: Generation, *, reads: bool = False
) -> HostedJob:
    """Finds the job that a request is about. Raises StaleIncarnation, StaleGeneration, NotFound, InvalidRequest.

    `reads`: the caller may have no incarnation, like the coordinator and readers. Others must have one. A caller with a
    certificate must have a pass for the job and the incarnation, else NotPermitted.
    """
    speaking = speaker.get()
    if speaking is not None:
        speaking.check(caller.job, caller.incarnation)
    with store.lock:
        identity = store.identity
        if server != identity.incarnation:
            raise StaleIncarnation(
                f"a request for server {server}; this is server {identity.incarnation}",
                why="the server was started again and does not have what the other one had",
                todo="fetch the partition map, and send again to the server that it names; workers do so by themselves",
            )
        if caller.incarnation in identity.fenced:
            raise StaleIncarnation(f"a request of member {caller.incarnation}, which was declared dead")
    if caller.incarnation == 0 and not reads:
        raise InvalidRequest("a request without an incarnation", todo="register with the coordinator first")
    hosted = store.find(caller.job)
    hosted.check_generation(generation)
    return hosted


class Admitted(NamedTuple):
    """A request that was admitted to a job, and the store's epoch before it was. With the epoch 0, which no store has,
    it is always checked again."""

    hosted: HostedJob
    epoch: int


def check_still_admitted(store: Store, admitted: Admitted, header: PushHeader) -> None:
    """Repeats the checks of admission just before partitions change, if their answers may have changed meanwhile."""
    hosted, epoch = admitted
    if store.epoch == epoch:
        return
    if admit(store, header.caller, header.server, header.generation) is not hosted:
        raise NotFound(f"job {hosted.job} was dropped while {header.name} was on its way")


def admit_push(store: Store, header: PushHeader) -> Admitted:
    """Checks everything of a push except its payload."""
    epoch = store.epoch
    hosted = admit(store, header.caller, header.server, header.generation)
    if (header.kind is PushKind.VALUES) == hosted.open:
        if hosted.open:
            raise InvalidRequest(f"first values for job {hosted.job}, which is open")
        raise NotReady(f"job {hosted.job} has no first values yet")
    check_push_header(hosted, header)
    if header.pull is not None:
        admit_pull(store, header.pull)
    return Admitted(hosted, epoch)


def check_push_header(hosted: HostedJob, header: PushHeader, before: PushHeader | None = None) -> None:
    """`before`: an admitted header of the same worker, its plan. What both headers share is not checked again."""
    source = header.name.key.source
    if isinstance(source, WorkerSource) and source.incarnation != header.caller.incarnation:
        raise InvalidRequest(f"{header.name} sent by worker {header.caller.incarnation}")
    if header.name.key.lane != 0:
        raise InvalidRequest(f"lane {header.name.key.lane}; this job has lane 0 only")
    if before is None or header.parts is not before.parts or header.kind is not before.kind:
        _check_parts(hosted, header)
    if header.kind is PushKind.GRADIENT:
        if header.weight == 0:
            raise InvalidRequest(f"{header.name}: a gradient of weight 0", todo="send an empty push instead")
        if before is None or header.groups is not before.groups:
            optimizers.check_update(hosted.layout.optimizer, header.groups)
    if header.rows:
        groups = None if header.kind is PushKind.VALUES else header.table_groups
        check_pushed(hosted.layout.tables, header.rows, groups)
    if header.bases and hosted.rules.stale is None:
        raise InvalidRequest(
            f"{header.name} says what it was computed on, in job {hosted.job}, which has no rule for that"
        )


def _check_parts(hosted: HostedJob, header: PushHeader) -> None:
    first_values = header.kind is PushKind.VALUES
    for part in header.parts:
        partition = hosted.find(part.partition)
        if part.code_bytes and header.kind is not PushKind.EMPTY:
            if first_values:
                raise InvalidRequest("first values that are compressed", todo="send them as they are")
            if header.shared_at is not None or header.rest is not None:
                raise InvalidRequest("codes in shared memory, or ahead of their header", todo="send them as data")
            partition.payload.check_codes(part)
            continue
        expected = 0 if header.kind is PushKind.EMPTY else partition.payload.expected_bytes(part)
        whole = header.shared_at is not None or header.rest is not None
        if whole and part.payload_bytes and header.kind is not PushKind.EMPTY:
            expected = partition.payload.nbytes  # read in place, so the blocks that were not pushed have bytes too
        if first_values:  # first rows come in separate pushes
            expected = 0 if header.rows else partition.payload.nbytes
        if part.payload_bytes != expected:
            raise ShapeMismatch(f"partition {part.partition} with {part.payload_bytes} bytes; expected {expected}")


def admit_pull(store: Store, pull: PullHeader) -> HostedJob:
    hosted = admit(store, pull.caller, pull.server, pull.generation, reads=bool(pull.pin))
    for partition in pull.partitions:
        hosted.find(partition)
    return hosted


def check_requested_rows(
    hosted: HostedJob,
    requested: Sequence[RequestedRows],
    bytes_max: int = limits.ROWS_ANSWERED_BYTES_MAX,
    code: RowCode = RowCode.FLOAT32,
) -> None:
    """Checks a look-up before its ids arrive. Raises InvalidRequest, MalformedPayload, TooLarge, NotFound."""
    nbytes = requested_bytes_max(hosted.layout.tables, requested, code)
    if nbytes > bytes_max:
        raise TooLarge(
            f"a look-up of {nbytes} bytes of rows; at most {bytes_max} are given at a time",
            todo="ask for fewer at a time",
        )
    for each in requested:
        for number in each.partitions:
            hosted.find(number)
