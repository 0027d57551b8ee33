"""Reads the payload of each exchange on one stream: from frames, or in shared memory.

Invariant: memory is allocated only for lengths that an admitted header has announced.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardyard.domain.errors import MalformedPayload
from shardyard.domain.pushes import PushHeader, PushKind
from shardyard.wire.frames import Assembler, Frame, Scatter
from shardyard_ps_server.hosting.hosted_job import HostedJob
from shardyard_ps_server.service.stream_memory import StreamMemory
from shardyard_ps_server.values.receive_memory import WAIT_S, ReceiveBuffer, ReceiveMemory
from shardyard_ps_server.values.versions import NO_BYTES, Bytes


class PayloadReader:
    """Keeps its buffer from exchange to exchange. Close it."""

    def __init__(self, memory: StreamMemory, receiving: ReceiveMemory) -> None:
        self._memory = memory
        self._buffer = ReceiveBuffer(receiving)
        self._room: Bytes = NO_BYTES
        self._early: Scatter | None = None
        """Frames of a push that arrived before its header, which are put into `_room`."""

    def add_early(self, frame: Frame, hosted: HostedJob) -> None:
        """Takes data of a push whose header has not arrived."""
        if self._early is None:
            self._room = self._buffer.take(hosted.job, hosted.nbytes)
            self._early = Scatter(self._room.data)
        self._early.add(frame)

    def release(self) -> None:
        """The payload was used."""
        self._early, self._room = None, NO_BYTES
        self._buffer.release()

    def close(self) -> None:
        self._buffer.close()

    def read(
        self, header: PushHeader, first: Frame, rest: Iterator[Frame], *, at_once: bool
    ) -> tuple[Bytes, Bytes, Bytes]:
        """Returns the payload, which is valid until the next exchange, and the bytes of rows and of ids that follow
        it. `at_once`: without waiting for memory. Raises NotReady."""
        wait_s = 0.0 if at_once else WAIT_S
        has_push = header.kind is not PushKind.NOTHING
        requested = header.requested_bytes if header.requested else 0
        more = (header.rows_bytes if has_push and header.rows else 0) + requested
        if header.rest is not None and has_push:
            return self._complete_early(header, first, rest), NO_BYTES, NO_BYTES
        if header.rows_at is None:
            payload, behind = self._payload_and_more(header, more, first, rest, wait_s)
            if not more:
                return payload, NO_BYTES, NO_BYTES
        else:
            # a copy: the same bytes are checked, logged and applied, whatever the worker writes meanwhile
            behind = self._memory.rows(header.rows_at, more, align=1).copy()
            payload, _ = self._payload_and_more(header, 0, first, rest, wait_s)
        ids_at = more - requested
        return payload, behind[:ids_at], behind[ids_at:]

    def _payload_and_more(
        self, header: PushHeader, more: int, first: Frame, rest: Iterator[Frame], wait_s: float
    ) -> tuple[Bytes, Bytes]:
        has_push = header.kind is not PushKind.NOTHING
        shared_at = header.shared_at if has_push else None
        nbytes = header.payload_bytes if has_push and shared_at is None else 0
        if not more and (shared_at is not None or not has_push):
            if len(first.data):
                where = "beside a place in shared memory" if has_push else "in an exchange without a push"
                raise MalformedPayload(f"{len(first.data)} bytes of payload {where}")
            sent = NO_BYTES
        else:
            room = self._buffer.take(header.caller.job, nbytes + more, wait_s=wait_s)
            sent = _assembled(room, first, rest)
        payload = sent[:nbytes] if shared_at is None else self._memory.payload(shared_at, header.payload_bytes)
        return payload, sent[nbytes:].copy()

    def _complete_early(self, header: PushHeader, first: Frame, rest: Iterator[Frame]) -> Bytes:
        """Returns the payload in the order of the push's parts, including the frames that arrived early."""
        if self._early is None:
            raise MalformedPayload("the rest of a payload of which nothing came ahead")
        left = (header.rest or 0) - self._early.add(first)
        while left > 0:
            frame = next(rest, None)
            if frame is None:
                break
            left -= self._early.add(frame)
        if left or not self._early.complete:
            raise MalformedPayload(f"{header.rest} bytes after what came ahead do not make the payload whole")
        return self._room[: header.payload_bytes]


def _assembled(payload: Bytes, first: Frame, rest: Iterator[Frame]) -> Bytes:
    assembler = Assembler(payload.data)
    assembler.add(first)
    while not assembler.complete:
        frame = next(rest, None)
        if frame is None:
            assembler.finish()
            break
        assembler.add(frame)
    return payload
