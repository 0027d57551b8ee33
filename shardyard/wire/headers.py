"""Headers of exchanges on one stream. The part that repeats from step to step is written and read only once.

From one step to the next, a worker's header changes only in three places: the name of the push, the versions that its
gradient was computed on, and the numbers of rows that it pushes and requests. To build and check the whole header costs
more than the rest of a small exchange. So a header begins with these three, in this order, and the bytes after them are
kept: if they are equal to those of the previous header, their meaning is the same. A client may write the fields in
another order; then each header is read in full.

Owns: the previous header on the stream. Invariant: `read` returns what push_messages.push_from_header returns.
"""

from __future__ import annotations

import operator

from shardyard.domain.ids import Version
from shardyard.domain.pulls import RequestedRows
from shardyard.domain.push_names import PushName
from shardyard.domain.pushes import PushedRows, PushHeader, PushKind
from shardyard.wire import common_messages, push_messages, table_messages
from shardyard.wire.v1 import common_pb2 as common
from shardyard.wire.v1 import parameter_server_pb2 as server

_TAG_NAME = 4 << 3 | 2
_TAG_BASES = bytes((19 << 3 & 0x7F | 2 | 0x80, 19 >> 4))
_TAGS_ROWS = (bytes((100 << 3 & 0x7F | 2 | 0x80, 100 >> 4)), bytes((170 << 3 & 0x7F | 2 | 0x80, 170 >> 4)))
"""The tags of `rows` and of `requested`."""
_ONE_BYTE_MAX = 0x7F
_LENGTH_BYTES_MAX = 4


class HeaderWriter:
    """Writes the headers of one stream, from its first exchange on."""

    def __init__(self) -> None:
        self._before: PushHeader | None = None
        self._rest = b""
        self._settled = False

    def write(self, order: PushHeader) -> bytes:
        before = self._before
        alike = before is not None and _alike(order, before)
        if not (alike and self._settled):
            # the second of two equal headers is written once more: it can leave out more than the first
            self._rest = push_messages.push_to_wire(order, before, named=False).SerializeToString()
            self._settled = alike
        self._before = order
        if order.kind is PushKind.NOTHING:
            return _rows(order) + self._rest
        return b"".join((_name(order), _bases(order), _rows(order), self._rest))


class HeaderReader:
    """Reads the headers of one stream, from its first exchange on. `read` raises what push_from_header raises."""

    def __init__(self) -> None:
        self.before: PushHeader | None = None
        self._rest = b""

    def read_alike(self, header: bytes) -> PushHeader | None:
        """Reads a header that differs from the one before only in its name, its bases and its numbers of rows. Returns
        None for any other header."""
        end = _name_end(header)
        before = self.before
        if not end or before is None or not self._rest:
            return None
        rows = _bases_end(header, end)
        rest = _rows_end(header, rows)
        if header[rest:] != self._rest or (rows > end and before.kind is not PushKind.GRADIENT):
            return None
        name = _read_name(header[2:end])
        bases = _read_bases(header[end:rows], len(before.parts)) if rows > end else ()
        if rest == rows:
            if before.rows or before.requested:
                return None
            order = before.renamed(name, bases)
        else:
            pushed, requested = _read_rows(header[rows:rest])
            if (bool(pushed), bool(requested)) != (bool(before.rows), bool(before.requested)):
                return None
            if any(each.now_ms for each in pushed):  # workers may not send this: `push_from_header` refuses it
                return None
            order = before.renamed(name, bases, pushed, requested)
            push_messages.check_rows(order)
        self.before = order
        return order

    def read(self, header: bytes) -> PushHeader:
        order = self.read_alike(header)
        if order is None:
            order = push_messages.push_from_header(header, self.before)
            end = _name_end(header)
            rows = _bases_end(header, end)
            rest = _rows_end(header, rows)
            # the rest is kept only if name, bases and rows stand at the beginning
            stand = end and header[end:rows] == _bases(order) and header[rows:rest] == _rows(order)
            self._rest = header[rest:] if stand else b""
            self.before = order
        return order


def _name(order: PushHeader) -> bytes:
    name = common_messages.name_to_wire(order.name).SerializeToString()
    assert len(name) <= _ONE_BYTE_MAX
    return bytes((_TAG_NAME, len(name))) + name


def _bases(order: PushHeader) -> bytes:
    if not order.bases:
        return b""
    return server.PushHeader(bases=push_messages.bases_to_wire(order.bases)).SerializeToString()


def _rows(order: PushHeader) -> bytes:
    if not order.rows and not order.requested:
        return b""
    said = server.PushHeader(
        rows=table_messages.pushed_to_wire(order.rows), requested=table_messages.requested_to_wire(order.requested)
    )
    return said.SerializeToString()


def _rows_end(header: bytes, at: int) -> int:
    """Where the fields about rows end that begin at byte `at`; `at` if there are none."""
    while header[at : at + 2] in _TAGS_ROWS:
        end = _field_end(header, at)
        if end == at:
            break
        at = end
    return at


def _read_rows(data: bytes) -> tuple[tuple[PushedRows, ...], tuple[RequestedRows, ...]]:
    said = common_messages.parsed(server.PushHeader, data, "the rows in the header of a push")
    return table_messages.pushed_from_wire(said.rows), table_messages.requested_from_wire(said.requested)


def _bases_end(header: bytes, at: int) -> int:
    """Where the bases end that begin at byte `at`; `at` if something else begins there."""
    return _field_end(header, at) if header[at : at + 2] == _TAG_BASES else at


def _field_end(header: bytes, at: int) -> int:
    """Where the field ends that begins at byte `at` with a tag of two bytes; `at` if it is not whole."""
    length = 0
    for place, byte in enumerate(header[at + 2 : at + 2 + _LENGTH_BYTES_MAX]):
        length |= (byte & _ONE_BYTE_MAX) << 7 * place
        if byte <= _ONE_BYTE_MAX:
            end = at + 3 + place + length
            return end if end <= len(header) else at
    return at


def _name_end(header: bytes) -> int:
    """Where the name ends, if the header begins with a name; otherwise 0."""
    return 2 + header[1] if len(header) > 2 and header[0] == _TAG_NAME and header[1] <= _ONE_BYTE_MAX else 0


def _read_name(data: bytes) -> PushName:
    return common_messages.name_from_wire(common_messages.parsed(common.PushName, data, "the name of a push"))


def _read_bases(data: bytes, count: int) -> tuple[Version, ...]:
    said = common_messages.parsed(server.PushHeader, data, "the base versions in the header of a push")
    return push_messages.bases_from_wire(said.bases, count)


def _alike(order: PushHeader, before: PushHeader) -> bool:
    """Whether the two differ only in the name, the bases and the numbers of rows."""
    return (
        _KEPT(order) == _KEPT(before)
        and bool(order.rows) is bool(before.rows)
        and bool(order.requested) is bool(before.requested)
        and not (order.verdict or order.attach or order.attach_rows or order.detach)
    )


_KEPT = operator.attrgetter(
    *("caller", "server", "generation", "kind", "parts", "weight", "groups", "pull", "shared_at", "attach", "detach"),
    *("rest", "ssp_report", "verdict", "overflow", "table_groups", "attach_rows", "rows_at", "requested_at"),
)
