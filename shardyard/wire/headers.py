"""Headers of exchanges on one stream, written and read whole only where more than the name has changed.

From step to step a worker's header differs in the name of the push alone, and building and checking all of it costs
more than the rest of a small exchange. So a header begins with its name, and what follows is kept: equal bytes mean the
same. Any client may write its fields in any order; then each header is read in full.

Owns: what the exchange before on the stream said. Invariant: `read` gives what convert.push_from_header gives.
"""

from __future__ import annotations

from google.protobuf.message import DecodeError

from shardyard.ground.errors import MalformedPayload
from shardyard.ground.types import PushKind, PushName, PushOrder
from shardyard.wire import convert
from shardyard.wire.v1 import common_pb2 as common

_TAG_NAME = 4 << 3 | 2
_ONE_BYTE_MAX = 0x7F


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
        return self._rest if order.kind is PushKind.NOTHING else _name(order) + self._rest


class HeaderReader:
    """For one stream, from its first exchange on. `read` raises what convert.push_from_header raises."""

    def __init__(self) -> None:
        self.before: PushOrder | None = None
        self._rest = b""

    def read_alike(self, header: bytes) -> PushOrder | None:
        """What `read` gives, where the header differs from the one before in its name alone; else None."""
        end = _name_end(header)
        if not end or self.before is None or not self._rest or header[end:] != self._rest:
            return None
        self.before = self.before.renamed(_read_name(header[2:end]))
        return self.before

    def read(self, header: bytes) -> PushOrder:
        order = self.read_alike(header)
        if order is None:
            order = convert.push_from_header(header, self.before)
            end = _name_end(header)
            self._rest = header[end:] if end else b""
            self.before = order
        return order


def _name(order: PushOrder) -> bytes:
    name = convert.name_to_wire(order.name).SerializeToString()
    assert len(name) <= _ONE_BYTE_MAX
    return bytes((_TAG_NAME, len(name))) + name


def _name_end(header: bytes) -> int:
    """Where the name ends that the header begins with; 0 where it begins with something else."""
    return 2 + header[1] if len(header) > 2 and header[0] == _TAG_NAME and header[1] <= _ONE_BYTE_MAX else 0


def _read_name(data: bytes) -> PushName:
    try:
        return convert.name_from_wire(common.PushName.FromString(data))
    except DecodeError as error:
        raise MalformedPayload(f"the name of a push: {error}") from error


def _alike(order: PushOrder, before: PushOrder) -> bool:
    """Whether they differ in the name alone."""
    return (
        order.kind is before.kind
        and order.parts is before.parts
        and order.groups == before.groups
        and order.weight == before.weight
        and order.shared_at == before.shared_at
        and order.rest == before.rest
        and (order.pull is before.pull or order.pull == before.pull)
        and order.pace == before.pace
        and order.attach is None
        and before.attach is None
        and not order.detach
        and not before.detach
        and (order.caller, order.server, order.generation) == (before.caller, before.server, before.generation)
    )
