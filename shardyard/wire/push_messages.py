"""Converts the headers of exchanges and of their replies."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from shardyard.domain import limits
from shardyard.domain.consistency import SspPhase, SspReport
from shardyard.domain.errors import InvalidRequest, MalformedPayload, TooLarge
from shardyard.domain.ids import Generation, Incarnation, PartitionId, Rank, Version
from shardyard.domain.pulls import NotReadyPart, PulledPart, RequestedRows, ShmLocation
from shardyard.domain.push_names import NO_NAME
from shardyard.domain.pushes import (
    ExchangeReply,
    GatheredPart,
    Outcome,
    PartResult,
    PushedRows,
    PushHeader,
    PushKind,
    PushPart,
    StepVerdict,
)
from shardyard.wire import table_messages
from shardyard.wire.common_messages import (
    EnumNumbers,
    bounded,
    caller_from_wire,
    caller_to_wire,
    check_unique,
    name_from_wire,
    name_to_wire,
    parsed,
    version_from_wire,
)
from shardyard.wire.layout_messages import groups_from_wire, groups_to_wire
from shardyard.wire.pull_messages import (
    missing_from_wire,
    missing_to_wire,
    pull_of_push_from_wire,
    pull_of_push_to_wire,
    ticket_from_wire,
    ticket_to_wire,
)
from shardyard.wire.v1 import parameter_server_pb2 as server

_PUSH_KINDS = EnumNumbers(PushKind, server.PushKind, "PUSH_KIND_", "the kind of a push")
_SSP_PHASES = EnumNumbers(SspPhase, server.SspPhase, "SSP_PHASE_", "the phase of a worker")
OUTCOMES = EnumNumbers(Outcome, server.Outcome, "OUTCOME_", "the outcome of a push")


# ---- pushes and pulls


def push_to_wire(order: PushHeader) -> server.PushHeader:
    return server.PushHeader(
        caller=caller_to_wire(order.caller),
        server=order.server,
        generation=order.generation,
        name=None if order.kind is PushKind.NOTHING else name_to_wire(order.name),
        kind=_PUSH_KINDS.to_wire(order.kind),
        parts=() if order.kind is PushKind.NOTHING else [_part_to_wire(part) for part in order.parts],
        weight=order.weight,
        detach=order.detach,
        groups=groups_to_wire(order.groups),
        pull=pull_of_push_to_wire(order.pull) if order.pull is not None else None,
        shared_at=order.shared_at,
        rest=order.rest,
        attach=ticket_to_wire(order.attach) if order.attach is not None else None,
        ssp_report=ssp_report_to_wire(order.ssp_report) if order.ssp_report is not None else None,
        bases=bases_to_wire(order.bases) if order.bases else None,
        verdict=verdict_to_wire(order.verdict) if order.verdict is not None else None,
        overflow=order.overflow,
        rows=table_messages.pushed_to_wire(order.rows),
        table_groups=groups_to_wire(order.table_groups) if order.rows else (),
        requested=table_messages.requested_to_wire(order.requested),
        expired=table_messages.requested_to_wire(order.expired),
        attach_rows=ticket_to_wire(order.attach_rows) if order.attach_rows is not None else None,
        rows_at=order.rows_at,
        requested_at=order.requested_at,
    )


def bases_to_wire(bases: Sequence[Version]) -> server.Bases:
    """Equal versions in a row are sent once, with the number of repetitions."""
    message = server.Bases()
    last: server.Base | None = None
    said: Version | None = None
    for base in bases:
        if last is not None and base == said:
            last.alike += 1
            continue
        said = base
        last = message.parts.add()
        last.version.life = base.life
        last.version.number = base.number
    return message


def bases_from_wire(message: server.Bases, count: int) -> tuple[Version, ...]:
    """`count`: the number of parts of the push. Raises MalformedPayload if the bases are not as many."""
    found: list[Version] = []
    for base in message.parts:
        if len(found) + 1 + base.alike > count:
            raise MalformedPayload(f"a push of {count} parts has more than {count} base versions")
        found += [version_from_wire(base.version)] * (1 + base.alike)
    if len(found) != count:
        raise MalformedPayload(f"a push of {count} parts has {len(found)} base versions")
    return tuple(found)


def _part_to_wire(part: PushPart) -> server.PushPart:
    return server.PushPart(
        partition=part.partition,
        payload_bytes=part.payload_bytes,
        absent_blocks=part.absent_blocks,
        code_bytes=part.code_bytes,
    )


def push_from_header(header: bytes, *, recorded: bool = False) -> PushHeader:
    """Reads and checks the header of a push. The payload that it announces is bounded. `recorded`: it comes from a log.

    Raises MalformedPayload, InvalidRequest, TooLarge.
    """
    if not header:
        raise MalformedPayload("the first frame of a push has no header")
    message = parsed(server.PushHeader, header, "the header of a push")
    if message.HasField("step"):
        raise InvalidRequest("a header that names a plan, outside of an exchange", todo="send it whole")
    return push_from_wire(message, recorded=recorded)


def push_from_wire(message: server.PushHeader, *, recorded: bool = False) -> PushHeader:
    """See push_from_header."""
    kind = _PUSH_KINDS.from_wire(message.kind)
    caller, to = caller_from_wire(message.caller), Incarnation(message.server)
    generation = Generation(message.generation)
    order = PushHeader(
        caller=caller,
        server=to,
        generation=generation,
        name=NO_NAME if kind is PushKind.NOTHING else name_from_wire(message.name),
        kind=kind,
        parts=_parts_from_wire(message),
        weight=checked_weight(message.weight),
        groups=groups_from_wire(message.groups),
        pull=pull_of_push_from_wire(message.pull, caller, to, generation) if message.HasField("pull") else None,
        shared_at=message.shared_at if message.HasField("shared_at") else None,
        attach=ticket_from_wire(message.attach) if message.HasField("attach") else None,
        detach=message.detach,
        rest=message.rest if message.HasField("rest") else None,
        ssp_report=ssp_report_from_wire(message.ssp_report) if message.HasField("ssp_report") else None,
        verdict=verdict_from_wire(message.verdict) if message.HasField("verdict") else None,
        overflow=message.overflow,
        rows=table_messages.pushed_from_wire(message.rows) if message.rows else (),
        table_groups=groups_from_wire(message.table_groups) if message.table_groups else (),
        requested=table_messages.requested_from_wire(message.requested) if message.requested else (),
        expired=table_messages.requested_from_wire(message.expired, limits.ROWS_PER_PART_MAX),
        attach_rows=ticket_from_wire(message.attach_rows) if message.HasField("attach_rows") else None,
        rows_at=message.rows_at if message.HasField("rows_at") else None,
        requested_at=message.requested_at if message.HasField("requested_at") else None,
    )
    if order.expired and not recorded:
        raise InvalidRequest(
            "a push names rows that expire", why="the server decides which rows expire", todo="leave them out"
        )
    check_rows(order, recorded=recorded)
    if order.overflow and kind is not PushKind.GRADIENT:
        raise InvalidRequest(f"a push of kind {kind.value} reports an overflow; only gradients are scaled")
    if message.HasField("bases"):
        if kind is not PushKind.GRADIENT:
            raise MalformedPayload(f"a push of kind {kind.value} has base versions; only gradients have them")
        order.bases = bases_from_wire(message.bases, len(order.parts))
    _check_sizes(order)
    if kind in (PushKind.EMPTY, PushKind.NOTHING) and order.payload_bytes:
        raise MalformedPayload(f"an empty push has {order.payload_bytes} bytes of payload")
    return order


def checked_weight(weight: float) -> float:
    """Raises InvalidRequest."""
    if not math.isfinite(weight) or weight < 0:
        raise InvalidRequest(f"a push has the weight {weight}; expected the number of its samples")
    return weight


def check_rows(order: PushHeader, *, recorded: bool = False) -> None:
    """Checks the rows that the header of a push announces. `recorded`: it comes from a log. Raises MalformedPayload,
    InvalidRequest, TooLarge."""
    if not recorded and any(each.now_ms for each in order.rows):
        raise InvalidRequest(
            "a push says when it came", why="the server has the clocks of tables", todo="leave the times out"
        )
    if order.rows or order.expired:
        _check_rows(order)
    if order.requested:
        _check_requested(order)
    if (order.rows_at is not None and not (order.rows or order.requested)) or (
        order.requested_at is not None and not order.requested
    ):
        raise MalformedPayload("an exchange names a place for rows, but has and requests none")


def _check_rows(order: PushHeader) -> None:
    if order.kind not in (PushKind.GRADIENT, PushKind.VALUES):
        raise MalformedPayload(f"a push of kind {order.kind.value} has rows")
    if order.overflow:
        raise InvalidRequest("a gradient that overflowed has rows", todo="leave them out")
    if order.rest is not None:
        raise InvalidRequest("a push has rows, and data that came before its header", todo="send the header first")
    listed = {part.partition for part in order.parts}
    said: list[PushedRows | RequestedRows] = [*order.rows, *order.expired]
    for each in said:
        strange = [partition for partition in each.partitions if partition not in listed]
        if strange:
            raise MalformedPayload(
                f"a push has rows of table {each.table} in partition {strange[0]}, which it does not list"
            )
    if order.rows_bytes > limits.ROW_BYTES_MAX:
        raise TooLarge(f"a push has rows of {order.rows_bytes} bytes; at most {limits.ROW_BYTES_MAX} are allowed")


def _check_requested(order: PushHeader) -> None:
    if order.pull is None and order.kind is PushKind.NOTHING and order.rest is None:
        return  # a look-up
    if order.pull is None or order.pull.order or order.rest is not None:
        raise InvalidRequest(
            "an exchange requests rows with a push but without a pull, or in an order, or sent data before its header",
            why="rows follow the values of a pull, and their ids follow the push",
            todo="ask for them in an exchange of their own, or with LookUp",
        )
    pulled = set(order.pull.partitions)
    for each in order.requested if pulled else ():  # a pull of no partition brings rows alone
        strange = [partition for partition in each.partitions if partition not in pulled]
        if strange:
            raise MalformedPayload(
                f"an exchange requests rows of table {each.table} in partition {strange[0]}, which it does not pull"
            )


def _parts_from_wire(message: server.PushHeader) -> tuple[PushPart, ...]:
    absent = sum(len(p.absent_blocks) for p in message.parts)
    if absent > limits.BLOCKS_MAX:
        raise TooLarge(f"a push has {absent} absent blocks; at most {limits.BLOCKS_MAX} are allowed")
    codes = sum(len(p.code_bytes) for p in message.parts)
    if codes > limits.BLOCKS_MAX:
        raise TooLarge(f"a push has {codes} codes; at most {limits.BLOCKS_MAX} are allowed")
    parts = tuple(
        PushPart(PartitionId(p.partition), p.payload_bytes, tuple(p.absent_blocks), tuple(p.code_bytes))
        for p in bounded(message.parts, limits.PARTITIONS_MAX, "parts of a push")
    )
    check_unique([part.partition for part in parts], "a push")
    for part in parts:
        if part.code_bytes and sum(part.code_bytes) != part.payload_bytes:
            raise MalformedPayload(
                f"partition {part.partition} has codes of {sum(part.code_bytes)} bytes in all; announced "
                f"{part.payload_bytes}"
            )
    return parts


def _check_sizes(order: PushHeader) -> None:
    if order.payload_bytes > limits.PUSH_BYTES_MAX:
        raise TooLarge(f"a push has {order.payload_bytes} bytes; at most {limits.PUSH_BYTES_MAX} are allowed")


def ssp_report_to_wire(report: SspReport) -> server.SspReport:
    return server.SspReport(
        phase=_SSP_PHASES.to_wire(report.phase), epoch=report.epoch, clock=report.clock, ahead=report.ahead
    )


def ssp_report_from_wire(message: server.SspReport) -> SspReport:
    if message.clock > limits.SEQUENCE_MAX or message.ahead > limits.STALENESS_MAX:
        raise InvalidRequest(f"a worker reports {message.clock} steps, {message.ahead} ahead, which is too many")
    return SspReport(_SSP_PHASES.from_wire(message.phase), message.epoch, message.clock, message.ahead)


def verdict_to_wire(verdict: StepVerdict) -> server.StepVerdict:
    return server.StepVerdict(step=verdict.step, square_norm=verdict.square_norm, members=verdict.members)


def verdict_from_wire(message: server.StepVerdict) -> StepVerdict:
    if message.step > limits.SEQUENCE_MAX:
        raise TooLarge(f"a verdict is on step {message.step}; the last step is {limits.SEQUENCE_MAX}")
    members = ranks_from_wire(message.members, f"members of step {message.step}")
    if not message.HasField("square_norm"):
        return StepVerdict(message.step, members=members)
    if message.square_norm < 0:
        raise InvalidRequest(
            f"a verdict on step {message.step} has the square norm {message.square_norm}; expected at least 0"
        )
    return StepVerdict(message.step, message.square_norm, members)


def ranks_from_wire(ranks: Sequence[int], what: str) -> tuple[Rank, ...]:
    """Logical ranks that a job can have, ascending. Raises TooLarge, MalformedPayload."""
    found = tuple([Rank(rank) for rank in bounded(ranks, limits.LOGICAL_RANKS_MAX, what)])
    if found and (list(found) != sorted(set(found)) or found[-1] >= limits.LOGICAL_RANKS_MAX):
        raise MalformedPayload(f"{what} are {list(found[:8])}; expected logical ranks in ascending order")
    return found


def given_to_wire(verdict: StepVerdict, partitions: Iterable[PartitionId]) -> server.VerdictGiven:
    return server.VerdictGiven(verdict=verdict_to_wire(verdict), partitions=partitions)


def given_from_wire(message: server.VerdictGiven) -> tuple[StepVerdict, tuple[PartitionId, ...]]:
    partitions = bounded(message.partitions, limits.PARTITIONS_MAX, "partitions that were given a verdict")
    check_unique(partitions, "a verdict")
    return verdict_from_wire(message.verdict), tuple(map(PartitionId, partitions))


def results_to_wire(results: Sequence[PartResult]) -> server.PushReply:
    """Equal results in a row are sent once, with the number of repetitions."""
    reply = server.PushReply()
    last: server.PartReply | None = None
    said: tuple[Outcome, int, Version] | None = None
    for result in results:
        saying = (result.outcome, result.next, result.version)
        if last is not None and saying == said:
            last.alike += 1
            continue
        said = saying
        last = reply.parts.add(partition=result.partition, outcome=OUTCOMES.to_wire(result.outcome), next=result.next)
        last.version.life = result.version.life
        last.version.number = result.version.number
    return reply


def results_from_wire(message: server.PushReply, partitions: Sequence[PartitionId]) -> tuple[PartResult, ...]:
    """`partitions`: those of the push, in its order. Raises MalformedPayload if the answer has other ones."""
    found: list[PartResult] = []
    for part in message.parts:
        at, end = len(found), len(found) + 1 + part.alike
        if end > len(partitions) or partitions[at] != part.partition:
            raise MalformedPayload(f"the answer to a push names partition {part.partition} in place {at}")
        outcome = OUTCOMES.from_wire(part.outcome)
        version = version_from_wire(part.version)
        found += [PartResult(partition, outcome, part.next, version) for partition in partitions[at:end]]
    if len(found) != len(partitions):
        raise MalformedPayload(f"the answer to a push of {len(partitions)} parts has {len(found)}")
    return tuple(found)


def pulled_to_header(result: ExchangeReply) -> bytes:
    header = server.PullHeader(code_bytes=result.code_bytes)
    if result.push:
        header.push.CopyFrom(results_to_wire(result.push))
    last: server.PulledPart | None = None
    said: Version | None = None
    for part in result.parts:
        if last is not None and said == part.version:
            last.alike += 1
            continue
        said = part.version
        last = header.parts.add(partition=part.partition)
        last.version.life = said.life
        last.version.number = said.number
    if result.places:
        header.place_regions.extend([place.region for place in result.places])
        header.places.extend([place.at for place in result.places])
    for ticket in result.regions:
        header.regions.append(ticket_to_wire(ticket))
    for missing in result.missing:
        header.not_yet.missing.append(missing_to_wire(missing))
    if result.clock is not None:
        header.clock = result.clock
    for partition, step, square_norm in result.gathered:
        header.gathered.add(partition=partition, step=step, square_norm=square_norm)
    if result.attached is not None:
        header.attached = result.attached
        header.not_attached = result.not_attached
    if result.rows_attached:
        header.rows_attached = True
    if result.rows_not_attached:
        header.rows_not_attached = result.rows_not_attached
    return header.SerializeToString()


def pulled_from_header(
    header: bytes, pulled: Sequence[PartitionId], pushed: Sequence[PartitionId] = ()
) -> ExchangeReply:
    """`pulled`, `pushed`: the partitions that were asked for. Raises MalformedPayload if the answer has other ones."""
    message = parsed(server.PullHeader, header, "the header of the answer to a pull")
    parts: list[PulledPart] = []
    for part in message.parts:
        at, end = len(parts), len(parts) + 1 + part.alike
        if end > len(pulled) or pulled[at] != part.partition:
            raise MalformedPayload(f"the answer to a pull names partition {part.partition} in place {at}")
        version = version_from_wire(part.version)
        parts += [PulledPart(partition, version) for partition in pulled[at:end]]
    missing: tuple[NotReadyPart, ...] = ()
    if message.HasField("not_yet"):
        missing = tuple(missing_from_wire(each) for each in message.not_yet.missing)
    if len(message.place_regions) != len(message.places):
        raise MalformedPayload(
            f"the answer to a pull has {len(message.places)} places in {len(message.place_regions)} regions"
        )
    if not missing and len(parts) != len(pulled):
        raise MalformedPayload(f"the answer to a pull of {len(pulled)} partitions has {len(parts)}")
    return ExchangeReply(
        parts=tuple(parts),
        missing=missing,
        push=results_from_wire(message.push, pushed),
        attached=message.attached,
        not_attached=message.not_attached,
        regions=tuple(ticket_from_wire(ticket) for ticket in message.regions) if message.regions else (),
        places=tuple(map(ShmLocation, message.place_regions, message.places)) if message.places else (),
        code_bytes=tuple(message.code_bytes) if message.code_bytes else (),
        clock=message.clock if message.HasField("clock") else None,
        gathered=_gathered_from_wire(message.gathered) if message.gathered else (),
        rows_attached=message.rows_attached,
        rows_not_attached=message.rows_not_attached,
    )


def _gathered_from_wire(messages: Sequence[server.Gathered]) -> tuple[GatheredPart, ...]:
    check_unique([each.partition for each in messages], "what was gathered")
    for each in messages:
        if each.step > limits.SEQUENCE_MAX or each.square_norm < 0:
            raise MalformedPayload(
                f"the answer to a pull says that partition {each.partition} has gathered step {each.step}, of square "
                f"norm {each.square_norm}"
            )
    return tuple([GatheredPart(PartitionId(each.partition), each.step, each.square_norm) for each in messages])
