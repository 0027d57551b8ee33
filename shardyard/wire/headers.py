"""Headers of exchanges on one stream, written and read whole only where more than the name has changed.

From step to step a worker's header differs in the name of the push alone, and in what its gradient was computed on
where that is said; building and checking all of it costs more than the rest of a small exchange. So a header begins
with its name, then has its bases if there are some, and what follows is kept: equal bytes mean the same. Any client may
write its fields in any order; then each header is read in full.

Owns: what the exchange before on the stream said. Invariant: `read` gives what convert.push_from_header gives.
"""

from __future__ import annotations

from google.protobuf.message import DecodeError

from shardyard.ground.errors import MalformedPayload
from shardyard.ground.types import PushKind, PushName, PushOrder, Version
from shardyard.wire import convert
from shardyard.wire.v1 import common_pb2 as common
from shardyard.wire.v1 import parameter_server_pb2 as server

_TAG_NAME = 4 << 3 | 2
_TAG_BASES = bytes((19 << 3 & 0x7F | 2 | 0x80, 19 >> 4))
_ONE_BYTE_MAX = 0x7F
_LENGTH_BYTES_MAX = 4


class HeaderWriter:
    """For one stream, from its first exchange on."""

    def __init__(self) -> None:
        self._before: PushOrder | None = None
        self._rest = b""
        self._settled = False

    def write(self, order: PushOrder) -> bytes:
        before = self._before
        alike = before is not None and _alike(order, before)
        if not (alike and self._settled):
            # once more for the second of two that are alike: it can leave out more than the first
            self._rest = convert.push_to_wire(order, before, named=False).SerializeToString()
            self._settled = alike
        self._before = order
        return self._rest if order.kind is PushKind.NOTHING else _name(order) + _bases(order) + self._rest


class HeaderReader:
    """For one stream, from its first exchange on. `read` raises what convert.push_from_header raises."""

    def __init__(self) -> None:
        self.before: PushOrder | None = None
        self._rest = b""

    def read_alike(self, header: bytes) -> PushOrder | None:
        """What `read` gives, where the header differs from the one before in its name and bases alone; else None."""
        end = _name_end(header)
        if not end or self.before is None or not self._rest:
            return None
        rest = _bases_end(header, end)
        if header[rest:] != self._rest or (rest > end and self.before.kind is not PushKind.GRADIENT):
            return None
        bases = _read_bases(header[end:rest], len(self.before.parts)) if rest > end else ()
        self.before = self.before.renamed(_read_name(header[2:end]), bases)
        return self.before

    def read(self, header: bytes) -> PushOrder:
        order = self.read_alike(header)
        if order is None:
            order = convert.push_from_header(header, self.before)
            end = _name_end(header)
            rest = _bases_end(header, end)
            self._rest = header[rest:] if end and header[end:rest] == _bases(order) else b""
            self.before = order
        return order


def _name(order: PushOrder) -> bytes:
    name = convert.name_to_wire(order.name).SerializeToString()
    assert len(name) <= _ONE_BYTE_MAX
    return bytes((_TAG_NAME, len(name))) + name


def _bases(order: PushOrder) -> bytes:
    if not order.bases:
        return b""
    return server.PushHeader(bases=convert.bases_to_wire(order.bases)).SerializeToString()


def _bases_end(header: bytes, at: int) -> int:
    """Where the bases end that stand at byte `at`; `at` where something else stands there."""
    if header[at : at + 2] != _TAG_BASES:
        return at
    length = 0
    for place, byte in enumerate(header[at + 2 : at + 2 + _LENGTH_BYTES_MAX]):
        length |= (byte & _ONE_BYTE_MAX) << 7 * place
        if byte <= _ONE_BYTE_MAX:
            end = at + 3 + place + length
            return end if end <= len(header) else at
    return at


def _name_end(header: bytes) -> int:
    """Where the name ends that the header begins with; 0 where it begins with something else."""
    return 2 + header[1] if len(header) > 2 and header[0] == _TAG_NAME and header[1] <= _ONE_BYTE_MAX else 0


def _read_name(data: bytes) -> PushName:
    try:
        return convert.name_from_wire(common.PushName.FromString(data))
    except DecodeError as error:
        raise MalformedPayload(f"the name of a push: {error}") from error


def _read_bases(data: bytes, count: int) -> tuple[Version, ...]:
    try:
        return convert.bases_from_wire(server.PushHeader.FromString(data).bases, count)
    except DecodeError as error:
        raise MalformedPayload(f"what a push was computed on: {error}") from error


def _alike(order: PushOrder, before: PushOrder) -> bool:
    """Whether they differ in the name and the bases alone."""
    return (
        order.kind is before.kind
        and order.parts is before.parts
        and order.groups == before.groups
        and order.weight == before.weight
        and order.shared_at == before.shared_at
        and order.rest == before.rest
        and (order.pull is before.pull or order.pull == before.pull)
        and order.pace == before.pace
        and order.verdict is None
        and before.verdict is None
        and order.overflow == before.overflow
        and order.rows == before.rows
        and order.table_groups == before.table_groups
        and order.wanted == before.wanted
        and (order.rows_at, order.wanted_at) == (before.rows_at, before.wanted_at)
        and order.attach_rows is None
        and before.attach_rows is None
        and order.attach is None
        and before.attach is None
        and not order.detach
        and not before.detach
        and (order.caller, order.server, order.generation) == (before.caller, before.server, before.generation)
    )
