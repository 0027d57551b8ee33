"""The line to one server: a stream of exchanges, reopened where it broke off, with shared memory where there can be.

Owns: the stream, what it has established, the server's memory that this process has attached. Invariants: an exchange
is begun, then finished, before the next; one that broke off is sent again whole, under the same name; a server's word
about places is checked against the memory before it is used. Used by one thread at a time. Must not know: other
servers, what is pushed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from shardyard.domain import errors
from shardyard.domain.ids import Incarnation, PartitionId
from shardyard.domain.limits import CODE_HEAD_BYTES_MAX
from shardyard.domain.pushes import ExchangeReply, PushHeader, PushKind
from shardyard.transport.interfaces import Peer, Stream
from shardyard.transport.shared_memory import AttachedMemory
from shardyard.wire import frames, methods, push_messages
from shardyard.wire.frames import Assembler, Frame
from shardyard.wire.headers import HeaderWriter
from shardyard_worker.exchange.flat_buffers import Bytes, FlatBuffers, Key
from shardyard_worker.exchange.partial_reply import PartialReply
from shardyard_worker.exchange.shm_rows import ShmRows

log = logging.getLogger("shardyard.worker")

DETACH_MS = 1_000


Piece = tuple[int, memoryview]
"""Bytes of a payload and their place in it."""


@dataclass(frozen=True)
class StreamSettings:
    """`same_host`: whether shared memory is tried. `view`: whether parameters may become views on a server's memory.
    `ahead`: whether gradients are sent while others are computed. `later`: runs what takes the rest of an answer, in a
    thread of its own; needed for pulls with an order. `tables`: whether there are rows of tables."""

    same_host: bool
    view: bool
    deadline_ms: int
    ahead: bool = False
    later: Callable[[Callable[[], None]], None] | None = None
    tables: bool = False


class ServerStream:
    """To one server, under one partition map."""

    def __init__(self, server: Incarnation, peer: Peer, buckets: FlatBuffers, settings: StreamSettings) -> None:
        self.server = server
        self.peer = peer
        self._buckets = buckets
        self._settings = settings
        self._stream: Stream | None = None
        self._headers = HeaderWriter()
        self._shareable = settings.same_host and buckets.memory(server) is not None
        self._rows_shareable = settings.same_host and settings.tables
        self._room: ShmRows | None = None
        self._regions: dict[int, AttachedMemory] = {}
        self._exchanges = 0
        self._arrival: PartialReply | None = None
        self._rows: Sequence[memoryview] = ()
        self.shared = False
        self.asked_again = False

    @property
    def is_open(self) -> bool:
        return self._stream is not None

    def open(self, order: PushHeader) -> None:
        """Opens the stream, and sees whether payloads can lie in shared memory. Raises Unavailable."""
        self._stream = self.peer.open(methods.PUSH_PULL, timeout_ms=self._settings.deadline_ms)
        self._exchanges = 0
        self._headers = HeaderWriter()
        self.shared = False
        self._regions.clear()
        self._buckets.forget(self.server)
        self._room = None
        if self._shareable or self._rows_shareable:
            self._attach(order)

    def put_rows(self, pieces: Sequence[memoryview], places: Sequence[memoryview]) -> tuple[int | None, int | None]:
        """Puts rows, and ids, of the next exchange where the server reads them: where that is, and where it shall put
        the rows wanted, which belong into `places`. None: they travel over the stream."""
        room = self._room
        if room is None or not room.opened:
            return None, None
        return room.put(pieces), room.place(places)

    @property
    def takes_ahead(self) -> bool:
        """Whether a payload may be sent ahead of its header: where it travels, and is not on its way in a moment."""
        busy = self._arrival is not None and not self._arrival.complete
        travels = self._settings.ahead and self._stream is not None and not self.shared
        return travels and self._exchanges > 0 and not busy

    def send_ahead(self, at: int, piece: memoryview) -> None:
        """Sends a piece of the next push's payload. Safe from another thread than the exchanges', between them."""
        stream = self._stream
        if stream is None:
            raise errors.ServerUnavailable(f"the stream to server {self.server} was ended")
        stream.send(frames.cut_places(b"", [(at, piece)]), answered=False)

    def settle(self) -> None:
        """Until the last answer is there as a whole, or the stream has broken off. Before the next exchange."""
        arrival, self._arrival = self._arrival, None
        if arrival is not None:
            arrival.settle()

    def begin(self, order: PushHeader, pieces: Sequence[Piece], rows: Sequence[memoryview] = ()) -> None:
        """Sends a request; `finish` must follow. `pieces` must not change before. `rows`: where those go that the
        order wants."""
        stream = self._stream
        if stream is None:
            raise errors.ServerUnavailable(f"the stream to server {self.server} was ended")
        self._buckets.settle()
        self._rows = rows
        header = self._headers.write(order)
        if order.rest is None:
            stream.send(frames.cut(header, [piece for _, piece in pieces]))
        else:
            stream.send(frames.cut_places(header, pieces))

    def finish(self, order: PushHeader, *, deadline_ms: int | None = None) -> ExchangeReply:
        """The answer; values pulled are incoming in the buckets, those of a pull with an order perhaps still on their
        way. Raises what the server refused, or Unavailable."""
        try:
            result = self._take(order, self._settings.deadline_ms if deadline_ms is None else deadline_ms)
        except errors.NotShareable as error:
            self._shareable = False
            self.break_off()
            log.info("server %s: payloads travel over streams from now on (%s)", self.server, error.what)
            raise errors.ServerUnavailable(f"server {self.server} has no shared memory any more") from error
        except BaseException:
            self.break_off()
            raise
        return result

    def break_off(self) -> None:
        """Ends the stream. The next exchange opens another. Safe from any thread."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.cancel()

    def detach(self, order: PushHeader) -> None:
        """Tells the server that its memory is not read any more, if it listens."""
        if self._stream is None or not self.shared:
            return
        try:
            self.begin(order, ())
            self.finish(order, deadline_ms=DETACH_MS)
        except errors.ShardyardError as error:
            log.debug("server %s: not detached: %s", self.server, error.what)

    # ---- inside

    def _attach(self, order: PushHeader) -> None:
        """Offers memory. Each kind is tried once: what stands in the way will not change."""
        memory = self._buckets.memory(self.server) if self._shareable else None
        room = self._make_room()
        if memory is None and room is None:
            return
        offer = replace(
            order,
            kind=PushKind.NOTHING,
            parts=(),
            groups=(),
            pull=None,
            shared_at=None,
            attach=None if memory is None else memory.ticket(),
            attach_rows=None if room is None else room.ticket(),
        )
        self.begin(offer, ())
        said = self.finish(offer)
        if room is not None:
            room.settle(opened=said.rows_attached)
            self._rows_shareable = room.opened
            self._room = room if room.opened else None
            if not room.opened:
                log.info("server %s: rows travel over streams (%s)", self.server, said.rows_not_attached)
        if memory is None:
            return
        why = said.not_attached
        if said.attached:
            try:
                for ticket in said.regions:
                    self._regions[ticket.region] = self._buckets.attach(self.server, ticket)
                self.shared = True
                log.debug("server %s: payloads lie in shared memory", self.server)
                return
            except errors.NotShareable as error:
                why = error.what
                self.break_off()
        self._shareable = False
        log.info("server %s: payloads travel over streams (%s)", self.server, why)
        if not self.is_open:
            self.open(order)

    def _make_room(self) -> ShmRows | None:
        if not self._rows_shareable:
            return None
        try:
            return ShmRows()
        except (errors.NotShareable, errors.TooLarge) as error:
            self._rows_shareable = False
            log.info("server %s: rows travel over streams (%s)", self.server, error.what)
            return None

    def _take(self, order: PushHeader, deadline_ms: int) -> ExchangeReply:
        stream = self._stream
        if stream is None:
            raise errors.ServerUnavailable(f"the stream to server {self.server} was ended")
        first = stream.receive(timeout_ms=deadline_ms)
        if first is None:
            # the server has more streams than threads; this exchange was not begun there
            if (self.shared or self._room is not None) and self._exchanges == 1:
                self._shareable = self._rows_shareable = False
                log.info("server %s: payloads travel over streams (it keeps none open)", self.server)
            raise errors.ServerUnavailable(f"server {self.server} has ended the stream")
        self._exchanges += 1
        wish = order.pull
        pulled: tuple[PartitionId, ...] = () if wish is None else wish.partitions
        pushed = () if order.kind is PushKind.NOTHING else tuple(part.partition for part in order.parts)
        result = push_messages.pulled_from_header(first.header, pulled, pushed)
        for ticket in result.regions:
            if self.shared:
                self._regions[ticket.region] = self._buckets.attach(self.server, ticket)
        if wish is None or result.missing:
            return result
        if order.wanted_at is not None:
            assert self._room is not None
            self._room.take(self._rows)
            self._rows = ()
        if wish.shared:
            places = list(self._places(result))
            self._assemble(stream, first, deadline_ms)
            self._buckets.has_come(self.server, places)
            return result
        if wish.order:
            self._begin_arrival(stream, first, deadline_ms)
            return result
        if not wish.coding:
            self._assemble(stream, first, deadline_ms, self._buckets.landing(self.server))
            self._buckets.has_landed(self.server)
            return result
        codes = np.empty(self._coded_bytes(result), np.uint8)
        self._assemble(stream, first, deadline_ms, codes.data)
        self._buckets.land_codes(self.server, codes, result.code_bytes, to_shadow="delta" in wish.coding)
        return result

    def _assemble(self, stream: Stream, first: Frame, deadline_ms: int, *into: memoryview) -> None:
        """The data of an answer, and the rows that follow it."""
        assembler = Assembler(*into, *self._rows)
        assembler.add(first)
        while not assembler.complete:
            frame = stream.receive(timeout_ms=deadline_ms)
            if frame is None:
                break
            assembler.add(frame)
        assembler.finish()

    def _begin_arrival(self, stream: Stream, first: Frame, deadline_ms: int) -> None:
        arrival = PartialReply(self.server, self._buckets.landing(self.server))
        arrival.add(first)
        if arrival.complete:
            self._buckets.has_landed(self.server)
            return
        assert self._settings.later is not None
        self._settings.later(partial(self._receive, stream, arrival, deadline_ms))
        self._arrival = arrival
        self._buckets.has_landed(self.server, arrival)

    def _receive(self, stream: Stream, arrival: PartialReply, deadline_ms: int) -> None:
        """The rest of an answer, in a thread of its own."""
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
                    self.break_off()
                arrival.lose(lost)

    def _coded_bytes(self, result: ExchangeReply) -> int:
        """The length of all codes; bounded before memory is asked for."""
        sizes, blocks = result.code_bytes, self._buckets.blocks(self.server)
        if len(sizes) != blocks:
            raise errors.MalformedPayload(f"server {self.server} answered with {len(sizes)} codes for {blocks} blocks")
        total = sum(sizes)
        if total > self._buckets.nbytes(self.server) + blocks * CODE_HEAD_BYTES_MAX:
            raise errors.MalformedPayload(
                f"server {self.server} answered with codes of {total} bytes for values of "
                f"{self._buckets.nbytes(self.server)}"
            )
        return total

    def _places(self, result: ExchangeReply) -> Iterator[tuple[Key, Bytes]]:
        if len(result.places) != len(result.parts):
            raise errors.MalformedPayload(
                f"server {self.server} answered a shared pull of {len(result.parts)} partitions with "
                f"{len(result.places)} places"
            )
        for part, place in zip(result.parts, result.places, strict=True):
            nbytes = self._buckets.payload_bytes(part.partition)
            memory = self._regions.get(place.region)
            if nbytes and (memory is None or place.at + nbytes > memory.nbytes):
                raise errors.MalformedPayload(
                    f"server {self.server} answered a pull with byte {place.at} of region {place.region}, "
                    f"{'which is not there' if memory is None else f'which has {memory.nbytes}'}"
                )
            if memory is None:
                yield (0, 0), _NOTHING
                continue
            if self._settings.view and memory.private:
                memory.refresh(place.at, nbytes)
            yield (place.region, place.at), memory.bytes[place.at : place.at + nbytes]


_NOTHING: Bytes = np.empty(0, np.uint8)
