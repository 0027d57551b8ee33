"""Headers of exchanges on one stream, and of their answers. What repeats from step to step is written and read once.

The first header of a kind is a plan. The worker sends it whole, with a number, and the server keeps it. Later exchanges
that are like it send the number, the name of the push, the number of the version, and what else differs (`Step`). These
bytes have fixed places, so that they are written and read without protobuf objects; a client that writes them in
another order is read as well. The answer to such an exchange is, if all went as usual, a row of numbers (`words`).

Owns: the plans of the stream. Invariant: `read` returns the header that was given to `write`.
"""

from __future__ import annotations

import operator
import struct
from dataclasses import replace
from typing import Final

from shardyard.domain import limits
from shardyard.domain.errors import InvalidRequest, MalformedPayload
from shardyard.domain.ids import PartitionId, Token, Version
from shardyard.domain.pulls import PulledPart, ShmHandle, ShmLocation
from shardyard.domain.push_names import NO_NAME, SourceKey
from shardyard.domain.pushes import ExchangeReply, PartResult, PushHeader, PushKind
from shardyard.wire import common_messages, layout_messages, pull_messages, push_messages, table_messages
from shardyard.wire.v1 import parameter_server_pb2 as server

_FIXED: Final = struct.Struct("<BBBIBQBQBQBQ")
"""The tag and the length of `step`, then its first fields with their tags."""
_STEP_BYTES: Final = _FIXED.size - 2
_STEP, _PLAN, _TOKEN, _FIRST, _LAST, _NUMBER = 15 << 3 | 2, 1 << 3 | 5, 2 << 3 | 1, 3 << 3 | 1, 4 << 3 | 1, 5 << 3 | 1
_ONE_BYTE_MAX: Final = 0x7F
_WORDS: Final = 12 << 3 | 2
_new: Final = tuple.__new__  # half the time of a named tuple's own


class _Plan:
    """A header, what an exchange must have in common with it, and the fields that its steps may change."""

    def __init__(self, header: PushHeader) -> None:
        self.header = header
        self.kept = _KEPT(header)
        self.pull = None if header.pull is None else _PULL(header.pull)

    def fits(self, header: PushHeader) -> bool:
        pull, own = header.pull, self.header.pull
        if pull is not own and (pull is None or own is None or _PULL(pull) != self.pull):
            return False
        own_header = self.header
        return (
            _KEPT(header) == self.kept
            and (header.weight != 0 or own_header.weight == 0)
            and bool(header.groups) is bool(own_header.groups)
            and bool(header.table_groups) is bool(own_header.table_groups)
            and not (header.attach or header.attach_rows or header.detach)
        )


class HeaderWriter:
    """Writes the headers of one stream, from its first exchange on."""

    def __init__(self) -> None:
        self._plans: dict[int, _Plan] = {}
        self._last = 0
        self._made = 0
        self._key: SourceKey | None = None

    def write(self, header: PushHeader) -> bytes:
        number = self._find(header)
        if number:
            return self._step(number, self._plans[number].header, header)
        message = push_messages.push_to_wire(header)
        if _may_be_plan(header):
            number = self._made % limits.PLANS_MAX + 1
            self._made += 1
            self._plans[number], self._last = _Plan(header), number
            message.plan = number
        if header.kind is not PushKind.NOTHING:
            self._key = header.name.key
        return message.SerializeToString()

    def _find(self, header: PushHeader) -> int:
        """The number of a plan that the header is like; 0: none."""
        if header.name.key.lane and header.name.key != self._key:
            return 0  # a step names a source, and no lane
        last = self._plans.get(self._last)
        if last is not None and last.fits(header):
            return self._last
        for number, plan in self._plans.items():
            if plan is not last and plan.fits(header):
                self._last = number
                return number
        return 0

    def _step(self, number: int, plan: PushHeader, header: PushHeader) -> bytes:
        name, pull = header.name, header.pull
        rest = b""
        if (
            (name.key is not self._key and name.key != self._key and header.kind is not PushKind.NOTHING)
            or header.groups is not plan.groups
            or header.weight != plan.weight
            or header.ssp_report is not None
            or header.verdict is not None
            or header.bases
            or header.rows
            or header.requested
        ):
            rest = self._differences(plan, header)
        length = _STEP_BYTES + len(rest)
        begin = (number, _TOKEN, name.token, _FIRST, name.first, _LAST, name.last)
        version = 0 if pull is None else pull.number
        if length <= _ONE_BYTE_MAX:
            return _FIXED.pack(_STEP, length, _PLAN, *begin, _NUMBER, version) + rest
        fixed = _FIXED.pack(_STEP, 0, _PLAN, *begin, _NUMBER, version)
        return b"".join((fixed[:1], _varint(length), fixed[2:], rest))

    def _differences(self, plan: PushHeader, header: PushHeader) -> bytes:
        step = server.Step()
        if header.kind is not PushKind.NOTHING and header.name.key != self._key:
            self._key = header.name.key
            step.source.CopyFrom(common_messages.source_to_wire(self._key.source))
        if header.groups != plan.groups:
            step.groups.extend(layout_messages.groups_to_wire(header.groups))
        if header.weight != plan.weight:
            step.weight = header.weight
        if header.table_groups != plan.table_groups:
            step.table_groups.extend(layout_messages.groups_to_wire(header.table_groups))
        if header.ssp_report is not None:
            step.ssp_report.CopyFrom(push_messages.ssp_report_to_wire(header.ssp_report))
        if header.verdict is not None:
            step.verdict.CopyFrom(push_messages.verdict_to_wire(header.verdict))
        if header.bases:
            step.bases.CopyFrom(push_messages.bases_to_wire(header.bases))
        step.rows.extend(table_messages.pushed_to_wire(header.rows))
        step.requested.extend(table_messages.requested_to_wire(header.requested))
        return step.SerializeToString()


class HeaderReader:
    """Reads the headers of one stream, from its first exchange on."""

    def __init__(self) -> None:
        self._plans: dict[int, PushHeader] = {}
        self._key: SourceKey | None = None

    @staticmethod
    def is_step(data: bytes) -> bool:
        """Whether a header names a plan."""
        return bool(data) and data[0] == _STEP

    def read(self, data: bytes) -> tuple[PushHeader, PushHeader | None]:
        """Returns the header, and the plan that it names, if it names one. The header shares with its plan what it has
        in common with it. Raises MalformedPayload, InvalidRequest, TooLarge."""
        if len(data) == _FIXED.size and data[0] == _STEP:
            _, length, one, number, two, token, three, first, four, last, five, version = _FIXED.unpack(data)
            if (one, two, three, four, five, length) == (_PLAN, _TOKEN, _FIRST, _LAST, _NUMBER, _STEP_BYTES):
                plan = self._plan(number)
                header = self._like(plan, token, first, last, version)
                if plan.rows_at is not None or plan.requested_at is not None:
                    push_messages.check_rows(header)
                return header, plan
        return self._read_message(data)

    def _plan(self, number: int) -> PushHeader:
        plan = self._plans.get(number)
        if plan is None:
            raise MalformedPayload(f"an exchange names plan {number}, which this stream does not have")
        return plan

    def _like(self, plan: PushHeader, token: int, first: int, last: int, version: int) -> PushHeader:
        """The header of an exchange that differs from its plan only in these."""
        name = NO_NAME
        if plan.kind is not PushKind.NOTHING:
            assert self._key is not None  # its plan had one
            name = common_messages.checked_name(self._key, Token(token), first, last)
        pull = plan.pull
        if pull is None:
            if version:
                raise MalformedPayload(f"an exchange names version {version}, and pulls nothing")
        elif pull.number != version:
            pull = replace(pull, number=version)
        return PushHeader(
            plan.caller,
            plan.server,
            plan.generation,
            name,
            plan.kind,
            plan.parts,
            plan.weight,
            plan.groups,
            pull,
            plan.shared_at,
            None,
            False,
            plan.rest,
            None,
            (),
            None,
            plan.overflow,
            (),
            plan.table_groups,
            (),
            (),
            None,
            plan.rows_at,
            plan.requested_at,
        )

    def _read_message(self, data: bytes) -> tuple[PushHeader, PushHeader | None]:
        if not data:
            raise MalformedPayload("the first frame of a push has no header")
        message = common_messages.parsed(server.PushHeader, data, "the header of a push")
        if message.HasField("step"):
            step = message.step
            plan = self._plan(step.plan)
            if step.HasField("source"):
                self._key = SourceKey(common_messages.source_from_wire(step.source))
            header = self._like(plan, step.token, step.first, step.last, step.number)
            self._apply(step, header)
            push_messages.check_rows(header)
            return header, plan
        header = push_messages.push_from_wire(message)
        if message.plan:
            if message.plan > limits.PLANS_MAX or not _may_be_plan(header):
                raise InvalidRequest(f"a header as plan {message.plan}", todo="send it without a number")
            self._plans[message.plan] = header
        if header.kind is not PushKind.NOTHING:
            self._key = header.name.key
        return header, None

    @staticmethod
    def _apply(step: server.Step, header: PushHeader) -> None:
        """Puts what differs into the header."""
        if step.weight:
            header.weight = push_messages.checked_weight(step.weight)
        if step.groups:
            header.groups = layout_messages.groups_from_wire(step.groups)
        if step.table_groups:
            header.table_groups = layout_messages.groups_from_wire(step.table_groups)
        if step.HasField("ssp_report"):
            header.ssp_report = push_messages.ssp_report_from_wire(step.ssp_report)
        if step.HasField("verdict"):
            header.verdict = push_messages.verdict_from_wire(step.verdict)
        if step.HasField("bases"):
            if header.kind is not PushKind.GRADIENT:
                raise MalformedPayload(f"a push of kind {header.kind.value} has base versions; only gradients do")
            header.bases = push_messages.bases_from_wire(step.bases, len(header.parts))
        if step.rows:
            header.rows = table_messages.pushed_from_wire(step.rows)
        if step.requested:
            header.requested = table_messages.requested_from_wire(step.requested)


def _may_be_plan(header: PushHeader) -> bool:
    return not (header.attach or header.attach_rows or header.detach or header.verdict)


_KEPT = operator.attrgetter(
    *("kind", "parts", "caller", "server", "generation", "shared_at", "rest", "overflow", "rows_at", "requested_at")
)
_PULL = operator.attrgetter("caller", "partitions", "exactly", "wait_ms", "coding", "shared", "order", "pin")


# ---- answers


def reply_to_header(reply: ExchangeReply, plan: PushHeader | None) -> bytes:
    """`plan`: that of the exchange which is answered, if it named one."""
    if plan is None or reply.missing or not _is_usual(reply, plan):
        return push_messages.pulled_to_header(reply)
    words: list[int] = []
    for result in reply.push:
        version = result.version
        words += (push_messages.OUTCOMES.to_wire(result.outcome), result.next, version.life, version.number)
    for part in reply.parts:
        words += part.version
    for place in reply.places:
        words += place
    size = 8 * len(words)
    header = b"".join((bytes((_WORDS,)), _varint(size), struct.pack(f"<{len(words)}Q", *words)))
    if reply.regions:
        header += server.PullHeader(
            regions=[pull_messages.ticket_to_wire(region) for region in reply.regions]
        ).SerializeToString()
    return header


def _is_usual(reply: ExchangeReply, plan: PushHeader) -> bool:
    pull = plan.pull
    return (
        len(reply.push) == (0 if plan.kind is PushKind.NOTHING else len(plan.parts))
        and len(reply.parts) == (0 if pull is None else len(pull.partitions))
        and len(reply.places) == (len(reply.parts) if pull is not None and pull.shared else 0)
        and not reply.code_bytes
        and reply.clock is None
        and not reply.gathered
        and reply.attached is None
        and not reply.rows_attached
        and not reply.rows_not_attached
    )


def reply_from_header(
    header: bytes, pulled: tuple[PartitionId, ...], pushed: tuple[PartitionId, ...], *, shared: bool
) -> ExchangeReply:
    """`pulled`, `pushed`: the partitions of the exchange. `shared`: whether it asked for places. Raises
    MalformedPayload if the answer has other ones."""
    count = 4 * len(pushed) + (4 if shared else 2) * len(pulled)
    if not header or header[0] != _WORDS:
        return push_messages.pulled_from_header(header, pulled, pushed)
    length, at = _read_varint(header, 1)
    if length != 8 * count or at + length > len(header):
        raise MalformedPayload(f"an answer has {length} bytes of words; expected {8 * count}")
    words = struct.unpack_from(f"<{count}Q", header, at)
    regions: tuple[ShmHandle, ...] = ()
    if at + length < len(header):
        rest = common_messages.parsed(server.PullHeader, header[at + length :], "the regions in an answer")
        regions = tuple(map(pull_messages.ticket_from_wire, rest.regions))
    results = []
    at = 0
    for partition in pushed:
        outcome, following, life, number = words[at : at + 4]
        version = _new(Version, (life, number))
        results.append(_new(PartResult, (partition, push_messages.OUTCOMES.from_wire(outcome), following, version)))
        at += 4
    parts = []
    for partition in pulled:
        parts.append(_new(PulledPart, (partition, _new(Version, words[at : at + 2]))))
        at += 2
    places = []
    while at < count:
        places.append(_new(ShmLocation, words[at : at + 2]))
        at += 2
    return ExchangeReply(tuple(parts), (), tuple(results), regions=regions, places=tuple(places))


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > _ONE_BYTE_MAX:
        out.append(value & _ONE_BYTE_MAX | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    for byte in data[at : at + 5]:
        value |= (byte & _ONE_BYTE_MAX) << shift
        shift, at = shift + 7, at + 1
        if byte <= _ONE_BYTE_MAX:
            return value, at
    raise MalformedPayload("an answer ends within a length")
