"""The shared memory of one exchange stream: a worker's gradients, and room for rows.

Invariant: a location that a worker names is checked against the size of the memory.
"""

from __future__ import annotations

from shardyard.domain.errors import InvalidRequest, MalformedPayload, NotShareable
from shardyard.domain.pushes import ExchangeReply, PushHeader
from shardyard.transport.interfaces import Descriptors
from shardyard.transport.shared_memory import AttachedMemory, attach_received
from shardyard_ps_server.values.shm_regions import ShmRegions
from shardyard_ps_server.values.versions import Bytes

PAYLOAD_ALIGN = 64
ROWS_ALIGN = 64


class StreamMemory:
    """`descriptors`: those of the stream; None: it cannot carry any."""

    def __init__(self, descriptors: Descriptors | None) -> None:
        self._descriptors = descriptors
        self._payloads: AttachedMemory | None = None
        self._rows: AttachedMemory | None = None
        self._regions_named = 0

    @property
    def is_attached(self) -> bool:
        return self._payloads is not None or self._rows is not None

    @property
    def has_payloads(self) -> bool:
        return self._payloads is not None

    def attach(self, header: PushHeader, regions: ShmRegions, reply: ExchangeReply) -> None:
        """Attaches the memory that a worker offers: gradient buffers, if the server's own values are shareable, and
        memory for rows. Writes the result into `reply`."""
        if header.attach is not None:
            reply.attached = False
            try:
                memory = attach_received(header.attach, self._descriptors)
                if not regions.shareable:
                    raise NotShareable("the server's versions are in private memory")
                self._payloads, reply.attached = memory, True
            except NotShareable as error:
                reply.not_attached = error.what
        if header.attach_rows is not None:
            try:
                self._rows = attach_received(header.attach_rows, self._descriptors, writable=True)
                reply.rows_attached = True
            except NotShareable as error:
                reply.rows_not_attached = error.what

    def name_regions(self, regions: ShmRegions, reply: ExchangeReply) -> None:
        """Adds handles of the server's memory that this stream has not named yet."""
        if self._payloads is not None and self._descriptors is not None:
            reply.regions = regions.tickets(known=self._regions_named)
            if not reply.regions:
                return
            self._descriptors.pass_descriptors([region.fd for region in reply.regions])
            self._regions_named += len(reply.regions)

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
