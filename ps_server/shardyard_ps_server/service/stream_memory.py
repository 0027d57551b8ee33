"""The shared memory of one exchange stream: a worker's gradients, and room for rows.

Invariant: a location that a worker names is checked against the size of the memory.
"""

from __future__ import annotations

from dataclasses import replace

from shardyard.domain.errors import InvalidRequest, MalformedPayload, NotShareable
from shardyard.domain.pulls import ShmHandle
from shardyard.domain.pushes import ExchangeReply
from shardyard.transport.shared_memory import AttachedMemory, attach
from shardyard_ps_server.values.shm_regions import ShmRegions
from shardyard_ps_server.values.versions import Bytes

PAYLOAD_ALIGN = 64
ROWS_ALIGN = 64


class StreamMemory:
    def __init__(self) -> None:
        self._payloads: AttachedMemory | None = None
        self._rows: AttachedMemory | None = None
        self._regions_named = 0

    @property
    def is_attached(self) -> bool:
        return self._payloads is not None or self._rows is not None

    @property
    def has_payloads(self) -> bool:
        return self._payloads is not None

    def attach(self, handle: ShmHandle, regions: ShmRegions) -> ExchangeReply:
        """Attaches the worker's gradient buffers, if the server's own values are shareable."""
        if not regions.shareable:
            return ExchangeReply(attached=False, not_attached="the server's versions are in private memory")
        try:
            self._payloads = attach(handle)
        except NotShareable as error:
            return ExchangeReply(attached=False, not_attached=error.what)
        return ExchangeReply(attached=True)

    def attach_rows(self, handle: ShmHandle, reply: ExchangeReply) -> ExchangeReply:
        """Attaches the worker's memory for rows. Returns the reply with the result."""
        try:
            self._rows = attach(handle, writable=True)
        except NotShareable as error:
            return replace(reply, rows_attached=False, rows_not_attached=error.what)
        return replace(reply, rows_attached=True)

    def with_regions(self, reply: ExchangeReply, regions: ShmRegions) -> ExchangeReply:
        """Returns the reply with handles of the server's memory that this stream has not named yet."""
        if self._payloads is None:
            return reply
        fresh = regions.tickets(known=self._regions_named)
        self._regions_named += len(fresh)
        return replace(reply, regions=fresh) if fresh else reply

    def payload(self, at: int, nbytes: int) -> Bytes:
        """Returns a push's payload. Raises InvalidRequest, MalformedPayload."""
        if self._payloads is None:
            raise InvalidRequest(f"{nbytes} bytes of payload in shared memory; none was attached on this stream")
        return _bytes_at(self._payloads, at, nbytes, align=PAYLOAD_ALIGN, what="payload")

    def rows(self, at: int, nbytes: int, *, align: int) -> Bytes:
        """Returns memory for rows that are pushed or looked up. Raises InvalidRequest, MalformedPayload."""
        if self._rows is None:
            raise InvalidRequest("a place for rows; no memory for them was attached on this stream")
        return _bytes_at(self._rows, at, nbytes, align=align, what="rows")


def _bytes_at(memory: AttachedMemory, at: int, nbytes: int, *, align: int, what: str) -> Bytes:
    if at % align or at + nbytes > memory.nbytes:
        raise MalformedPayload(f"{nbytes} bytes of {what} at byte {at} of shared memory that has {memory.nbytes}")
    return memory.bytes[at : at + nbytes]
