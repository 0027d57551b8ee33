"""Converts pulls, pins and their replies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardyard.domain import limits
from shardyard.domain.errors import InvalidRequest, MalformedPayload, TooLarge
from shardyard.domain.ids import Caller, Generation, Incarnation, PartitionId
from shardyard.domain.pulls import NotReadyPart, PinRequest, PulledPart, PullHeader, ShmHandle
from shardyard.wire.common_messages import (
    bounded,
    caller_from_wire,
    caller_to_wire,
    check_unique,
    random_name,
    text,
    version_from_wire,
    version_to_wire,
)
from shardyard.wire.v1 import parameter_server_pb2 as server


def pull_to_wire(wish: PullHeader) -> server.PullRequest:
    message = pull_of_push_to_wire(wish)
    message.caller.CopyFrom(caller_to_wire(wish.caller))
    message.server = wish.server
    message.generation = wish.generation
    return message


def pull_of_push_to_wire(wish: PullHeader) -> server.PullRequest:
    """The pull of an exchange. Its caller, server and generation stand in the header of the push."""
    return server.PullRequest(
        partitions=wish.partitions,
        number=wish.number,
        exactly=wish.exactly,
        wait_ms=wish.wait_ms,
        coding=wish.coding,
        shared=wish.shared,
        order=wish.order or None,
        pin=wish.pin,
    )


def pull_from_wire(message: server.PullRequest) -> PullHeader:
    return _pull(message, caller_from_wire(message.caller), Incarnation(message.server), Generation(message.generation))


def pull_of_push_from_wire(
    message: server.PullRequest, caller: Caller, to: Incarnation, generation: Generation
) -> PullHeader:
    """The pull of an exchange. `caller`, `to` and `generation` are those of its push."""
    if message.pin:
        raise InvalidRequest("an exchange asks for the values of a pin", todo="use Pull")
    return _pull(message, caller, to, generation)


def _pull(message: server.PullRequest, caller: Caller, to: Incarnation, generation: Generation) -> PullHeader:
    named = bounded(message.partitions, limits.PARTITIONS_MAX, "partitions of a pull")
    check_unique(named, "a pull")
    partitions = tuple(map(PartitionId, named))
    if message.wait_ms > limits.PULL_WAIT_MS_MAX:
        raise InvalidRequest(f"a pull waits {message.wait_ms} ms; at most {limits.PULL_WAIT_MS_MAX} ms are allowed")
    coding = text(message.coding, "the coding of a pull", limits.CODING_CHARACTERS_MAX) if message.coding else ""
    order = _order_from_wire(message) if message.order else ()
    if message.pin:
        random_name(message.pin)
        if message.number or message.exactly or message.wait_ms or message.coding or message.shared:
            raise InvalidRequest(
                "a pull of a pin is also coded, shared, or for a version",
                todo="leave these out; the pin has one version",
            )
    return PullHeader(
        caller,
        to,
        generation,
        partitions,
        message.number,
        message.exactly,
        message.wait_ms,
        coding,
        message.shared,
        order,
        message.pin,
    )


def pin_to_wire(wish: PinRequest) -> server.PinRequest:
    return server.PinRequest(
        caller=caller_to_wire(wish.caller),
        server=wish.server,
        generation=wish.generation,
        pin=wish.pin,
        number=wish.number,
        lease_ms=wish.lease_ms,
        wait_ms=wish.wait_ms,
        rows=wish.rows,
    )


def pin_from_wire(message: server.PinRequest) -> PinRequest:
    if not 1 <= message.lease_ms <= limits.PIN_LEASE_MS_MAX:
        raise InvalidRequest(f"a pin lasts {message.lease_ms} ms; expected 1 to {limits.PIN_LEASE_MS_MAX}")
    if message.wait_ms > limits.PULL_WAIT_MS_MAX:
        raise InvalidRequest(f"a pin waits {message.wait_ms} ms; at most {limits.PULL_WAIT_MS_MAX} ms are allowed")
    if message.number > limits.SEQUENCE_MAX:
        raise TooLarge(f"a pin asks for version {message.number}; the largest is {limits.SEQUENCE_MAX}")
    return PinRequest(
        caller_from_wire(message.caller),
        Incarnation(message.server),
        Generation(message.generation),
        random_name(message.pin),
        message.number if message.HasField("number") else None,
        message.lease_ms,
        message.wait_ms,
        message.rows,
    )


def pinned_to_wire(parts: Iterable[PulledPart], missing: Iterable[NotReadyPart]) -> server.PinReply:
    reply = server.PinReply(
        parts=[server.PulledPart(partition=part.partition, version=version_to_wire(part.version)) for part in parts]
    )
    for each in missing:
        reply.not_yet.missing.append(missing_to_wire(each))
    return reply


def pinned_from_wire(
    message: server.PinReply, expected: Sequence[PartitionId]
) -> tuple[tuple[PulledPart, ...], tuple[NotReadyPart, ...]]:
    """`expected`: the server's partitions, ascending. Raises MalformedPayload if the reply has other ones."""
    parts = tuple(PulledPart(PartitionId(part.partition), version_from_wire(part.version)) for part in message.parts)
    missing = tuple(missing_from_wire(each) for each in message.not_yet.missing)
    if not missing and [part.partition for part in parts] != list(expected):
        raise MalformedPayload(
            f"the reply to a pin has {len(parts)} partitions; expected the {len(expected)} of the server"
        )
    return parts, missing


def _order_from_wire(message: server.PullRequest) -> tuple[int, ...]:
    order = tuple(bounded(message.order, limits.VARIABLES_MAX, "variables in the order of a pull"))
    if len(set(order)) != len(order):
        raise MalformedPayload("the order of a pull names a variable twice")
    if message.coding or message.shared:
        raise InvalidRequest(
            f"a pull in an order is also {'coded' if message.coding else 'shared'}", todo="ask for one of the two"
        )
    return order


def ticket_to_wire(ticket: ShmHandle) -> server.SharedMemory:
    return server.SharedMemory(bytes=ticket.nbytes, region=ticket.region)


def ticket_from_wire(message: server.SharedMemory) -> ShmHandle:
    if message.bytes > limits.SHARED_BYTES_MAX:
        raise TooLarge(f"shared memory has {message.bytes} bytes; at most {limits.SHARED_BYTES_MAX} are allowed")
    return ShmHandle(message.bytes, message.region)


def missing_to_wire(missing: NotReadyPart) -> server.Missing:
    return server.Missing(
        partition=missing.partition,
        have=version_to_wire(missing.have),
        want=missing.want,
        waiting_for=missing.waiting_for,
    )


def missing_from_wire(message: server.Missing) -> NotReadyPart:
    return NotReadyPart(
        PartitionId(message.partition), version_from_wire(message.have), message.want, message.waiting_for
    )
