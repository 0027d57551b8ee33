"""The stream to one server: one exchange at a time, reopened after an error, with shared memory where possible.

Owns: the stream, what was agreed on it, the server's memory that this process has attached. Invariants: an exchange
ends before the next one begins; an exchange that broke off is sent again whole, under the same name; a location that a
server names is checked against the memory before it is used. For one thread at a time. Must not know: other servers,
what is pushed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from shardyard.config.settings import WorkerSettings
from shardyard.domain import errors
from shardyard.domain.ids import Incarnation, PartitionId
from shardyard.domain.limits import CODE_HEAD_BYTES_MAX
from shardyard.domain.pulls import ShmHandle
from shardyard.domain.pushes import ExchangeReply, PushHeader, PushKind
from shardyard.transport.interfaces import Descriptors, LocalAddress, Peer, Stream
from shardyard.transport.shared_memory import AttachedMemory
from shardyard.wire import frames, methods
from shardyard.wire.frames import Assembler, Frame
from shardyard.wire.headers import HeaderWriter, reply_from_header
from shardyard.wire.v1 import parameter_server_pb2 as wire
from shardyard_worker.exchange.buffers.buffer_layout import Bytes, Key
from shardyard_worker.exchange.buffers.flat_buffers import FlatBuffers
from shardyard_worker.exchange.buffers.partial_reply import PartialReply
from shardyard_worker.exchange.buffers.shm_rows import ShmRows

log = logging.getLogger("shardyard.worker")

DETACH_MS = 1_000


class ServerStream:
    """To one server, under one partition map."""

    def __init__(
        self,
        server: Incarnation,
        peer: Peer,
        buffers: FlatBuffers,
        settings: WorkerSettings,
        *,
        tables: bool,
        receive_later: Callable[[Callable[[], None]], None],
    ) -> None:
        """`tables`: whether the job has any. `receive_later`: another thread receives the rest of an answer whose
        values have an order."""
        self.server = server
        self._partitions = buffers.partitions(server)
        self.peer = peer
        self._buffers = buffers
        self._deadline_ms = settings.rpc_deadline_ms
        self._views = settings.exchange != "blocking"
        self._receive_later = receive_later
        self._stream: Stream | None = None
        self._headers = HeaderWriter()
        self._local = settings.same_host == "auto"
        self._shareable = self._local and buffers.memory(server) is not None
        self._rows_shareable = self._local and tables
        self._shm_rows: ShmRows | None = None
        self._regions: dict[int, AttachedMemory] = {}
        self._exchanges = 0
        self._arrival: PartialReply | None = None
        self._rows: Sequence[memoryview] = ()
        self.shared = False
        """Whether payloads lie in shared memory."""
        self.retried = False
        """Whether the last answer may be that of an earlier attempt."""

    @property
    def is_open(self) -> bool:
        return self._stream is not None

    def open(self, header: PushHeader) -> None:
        """Opens the stream, and finds out whether shared memory works. Raises Unavailable."""
        self._stream = self._open_stream()
        self._exchanges = 0
        self._headers = HeaderWriter()
        self.shared = False
        self._regions.clear()
        self._buffers.values.forget(self.server)
        self._shm_rows = None
        if self._stream.descriptors is None:
            self._shareable = self._rows_shareable = False
        if self._shareable or self._rows_shareable:
            self._attach(header)

    def put_rows(self, pieces: Sequence[memoryview], places: Sequence[memoryview]) -> tuple[int | None, int | None]:
        """Copies rows and ids of the next exchange into shared memory. Returns where they are, and where the server
        must put the rows for `places`. None: they travel over the stream."""
        memory = self._shm_rows
        if memory is None:
            return None, None
        return memory.put(pieces), memory.place(places)

    @property
    def can_send_early(self) -> bool:
        """Whether pieces of the next payload may be sent before its header."""
        busy = self._arrival is not None and not self._arrival.complete
        return self._stream is not None and not self.shared and self._exchanges > 0 and not busy

    def send_early(self, at: int, piece: memoryview) -> None:
        """Sends a piece of the next push's payload. Another thread may call this between exchanges."""
        frame = frames.cut_places(b"", [(at, piece)])
        self._opened().send(frame, answered=False)

    def _opened(self) -> Stream:
        stream = self._stream
        if stream is None:
            raise errors.ServerUnavailable(f"the stream to server {self.server} was ended")
        return stream

    def await_answer(self) -> None:
        """Waits until the last answer is complete, or the stream has failed. Call it before the next exchange."""
        arrival, self._arrival = self._arrival, None
        if arrival is not None:
            arrival.await_end()

    def begin(
        self,
        header: PushHeader,
        pieces: Sequence[memoryview] = (),
        rows: Sequence[memoryview] = (),
        begins: Sequence[int] | None = None,
    ) -> None:
        """Sends a request (see ServerRequest); `finish` must follow, and `pieces` must not change before."""
        stream = self._opened()
        self._buffers.values.await_copies()
        self._rows = rows
        written = self._headers.write(header)
        if begins is None:
            stream.send(frames.cut(written, pieces))
        else:
            stream.send(frames.cut_places(written, zip(begins, pieces, strict=True)))

    def finish(self, header: PushHeader, *, deadline_ms: int | None = None) -> ExchangeReply:
        """Returns the answer. The buffers then have the pulled values; if the pull has an order, some may still be
        arriving. Raises the server's refusal, or Unavailable."""
        try:
            return self._take(header, self._deadline_ms if deadline_ms is None else deadline_ms)
        except errors.NotShareable as error:
            self._shareable = False
            self.cancel()
            log.info("server %s: payloads travel over streams from now on (%s)", self.server, error.what)
            raise errors.ServerUnavailable(f"server {self.server} has no shared memory any more") from error
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Ends the stream. The next exchange opens another one. Safe from any thread."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.cancel()

    def detach(self, header: PushHeader) -> None:
        """Tells the server that its memory is no longer read. A server that does not answer is ignored."""
        if self._stream is None or not self.shared:
            return
        try:
            self.begin(header)
            self.finish(header, deadline_ms=DETACH_MS)
        except errors.ShardyardError as error:
            log.debug("server %s: not detached: %s", self.server, error.what)

    # ---- inside

    def _open_stream(self) -> Stream:
        """Opens the stream: over the server's local socket, if it has one that this process can reach."""
        if self._local:
            attached = self.peer.call(methods.ATTACH, wire.AttachRequest(), timeout_ms=self._deadline_ms)
            socket = LocalAddress(attached.socket, attached.key) if attached.socket else None
            try:
                return self.peer.open(methods.PUSH_PULL, timeout_ms=self._deadline_ms, socket=socket)
            except errors.NotShareable as error:
                self._local = False
                log.info("server %s: payloads travel over gRPC (%s)", self.server, error.what)
        return self.peer.open(methods.PUSH_PULL, timeout_ms=self._deadline_ms)

    def _attach(self, header: PushHeader) -> None:
        """Offers memory. Each kind is tried once, since a reason against it stays."""
        memory = self._buffers.memory(self.server) if self._shareable else None
        rows = self._make_shm_rows()
        if memory is None and rows is None:
            return
        offered = [each.descriptor() for each in (memory, rows) if each is not None]
        self._descriptors().pass_descriptors(offered)
        offer = replace(
            header,
            kind=PushKind.NOTHING,
            parts=(),
            groups=(),
            pull=None,
            shared_at=None,
            attach=None if memory is None else memory.ticket(),
            attach_rows=None if rows is None else rows.ticket(),
        )
        self.begin(offer)
        answer = self.finish(offer)
        if rows is not None:
            rows.close()
            self._rows_shareable = answer.rows_attached
            if answer.rows_attached:
                self._shm_rows = rows
            else:
                log.info("server %s: rows travel over streams (%s)", self.server, answer.rows_not_attached)
        if memory is None:
            return
        why = answer.not_attached
        if answer.attached:
            try:
                for ticket in answer.regions:
                    self._attach_region(ticket)
                self.shared = True
                log.debug("server %s: payloads lie in shared memory", self.server)
                return
            except errors.NotShareable as error:
                why = error.what
                self.cancel()
        self._shareable = False
        log.info("server %s: payloads travel over streams (%s)", self.server, why)
        if not self.is_open:
            self.open(header)

    def _descriptors(self) -> Descriptors:
        found = self._opened().descriptors
        assert found is not None
        return found

    def _attach_region(self, ticket: ShmHandle) -> None:
        self._regions[ticket.region] = self._buffers.values.attach(self.server, ticket, self._descriptors())

    def _make_shm_rows(self) -> ShmRows | None:
        if not self._rows_shareable:
            return None
        try:
            return ShmRows()
        except (errors.NotShareable, errors.TooLarge) as error:
            self._rows_shareable = False
            log.info("server %s: rows travel over streams (%s)", self.server, error.what)
            return None

    def _take(self, header: PushHeader, deadline_ms: int) -> ExchangeReply:
        stream = self._opened()
        first = stream.receive(timeout_ms=deadline_ms)
        if first is None:
            # the server has more streams than threads, and has not begun this exchange
            if (self.shared or self._shm_rows is not None) and self._exchanges == 1:
                self._shareable = self._rows_shareable = False
                log.info("server %s: payloads travel over streams (it keeps none open)", self.server)
            raise errors.ServerUnavailable(f"server {self.server} has ended the stream")
        self._exchanges += 1
        pull = header.pull
        pulled: tuple[PartitionId, ...] = () if pull is None else pull.partitions
        pushed = () if header.kind is PushKind.NOTHING else self._partitions  # rule A3
        result = reply_from_header(first.header, pulled, pushed, shared=pull is not None and pull.shared)
        for ticket in result.regions:
            if self.shared:
                self._attach_region(ticket)
        if result.missing:
            return result
        if header.requested_at is not None:
            assert self._shm_rows is not None
            self._shm_rows.take(self._rows)
            self._rows = ()
        if pull is None or not pulled:
            if self._rows or len(first.data):
                self._assemble(stream, first, deadline_ms)
            return result
        if pull.shared:
            places = self._places(result)
            if self._rows or len(first.data):
                self._assemble(stream, first, deadline_ms)
            self._buffers.values.note_shared(self.server, places)
            return result
        if pull.order:
            self._begin_arrival(stream, first, deadline_ms)
            return result
        if not pull.coding:
            self._assemble(stream, first, deadline_ms, self._buffers.values.stream_buffer(self.server))
            self._buffers.values.note_streamed(self.server)
            return result
        codes = np.empty(self._coded_bytes(result), np.uint8)
        self._assemble(stream, first, deadline_ms, codes.data)
        self._buffers.values.decode(self.server, codes, result.code_bytes, to_shadow="delta" in pull.coding)
        return result

    def _assemble(self, stream: Stream, first: Frame, deadline_ms: int, *into: memoryview) -> None:
        """Receives the data of an answer, and the rows after it."""
        assembler = Assembler(*into, *self._rows)
        assembler.add(first)
        while not assembler.complete:
            frame = stream.receive(timeout_ms=deadline_ms)
            if frame is None:
                break
            assembler.add(frame)
        assembler.finish()

    def _begin_arrival(self, stream: Stream, first: Frame, deadline_ms: int) -> None:
        arrival = PartialReply(self.server, self._buffers.values.stream_buffer(self.server))
        arrival.add(first)
        if arrival.complete:
            self._buffers.values.note_streamed(self.server)
            return
        self._receive_later(partial(self._receive, stream, arrival, deadline_ms))
        self._arrival = arrival
        self._buffers.values.note_streamed(self.server, arrival)

    def _receive(self, stream: Stream, arrival: PartialReply, deadline_ms: int) -> None:
        """Receives the rest of an answer, in another thread."""
        lost: errors.ShardyardError = errors.ServerUnavailable(f"values of server {self.server} will not come")
        try:
            while not arrival.complete:
                frame = stream.receive(timeout_ms=deadline_ms)
                if frame is None:
                    lost = errors.ServerUnavailable(f"server {self.server} has ended the stream within an answer")
                    return
                if not len(frame.data):
                    raise errors.MalformedPayload(f"server {self.server} answered with a frame without data")
                arrival.add(frame)
        except errors.ShardyardError as error:
            lost = error
            log.debug("server %s: the rest of an answer did not come: %s", self.server, error)
        finally:
            if not arrival.complete:
                if self._stream is stream:
                    self.cancel()
                arrival.lose(lost)

    def _coded_bytes(self, result: ExchangeReply) -> int:
        """The length of all codes, checked before memory is allocated for them."""
        sizes, blocks = result.code_bytes, self._buffers.values.blocks(self.server)
        if len(sizes) != blocks:
            raise errors.MalformedPayload(f"server {self.server} answered with {len(sizes)} codes for {blocks} blocks")
        total = sum(sizes)
        if total > self._buffers.nbytes(self.server) + blocks * CODE_HEAD_BYTES_MAX:
            raise errors.MalformedPayload(
                f"server {self.server} answered with codes of {total} bytes for values of "
                f"{self._buffers.nbytes(self.server)}"
            )
        return total

    def _places(self, result: ExchangeReply) -> list[tuple[Key, Bytes]]:
        if len(result.places) != len(result.parts):
            raise errors.MalformedPayload(
                f"server {self.server} answered a shared pull of {len(result.parts)} partitions with "
                f"{len(result.places)} places"
            )
        found: list[tuple[Key, Bytes]] = []
        for part, place in zip(result.parts, result.places, strict=True):
            nbytes = self._buffers.payload_bytes(part.partition)
            memory = self._regions.get(place.region)
            if nbytes and (memory is None or place.at + nbytes > memory.nbytes):
                raise errors.MalformedPayload(
                    f"server {self.server} answered a pull with byte {place.at} of region {place.region}, "
                    f"{'which is not there' if memory is None else f'which has {memory.nbytes}'}"
                )
            if memory is None:
                found.append(((0, 0), _NOTHING))
                continue
            if self._views and memory.private:
                memory.refresh(place.at, nbytes)
            found.append(((place.region, place.at), memory.bytes[place.at : place.at + nbytes]))
        return found


_NOTHING: Bytes = np.empty(0, np.uint8)
