"""Sends gradients to the servers while backward still computes others.

Owns: a thread that sends, which gradients of the next push were sent, and their checksums. Invariants: what is sent
early counts only once the push names it; a gradient that has changed since (it was clipped, or more was added to it)
has another checksum, and is sent again with the push; if a stream breaks, what was sent on it is lost with it. Must
not know: names of pushes, autograd.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from shardyard.domain import errors
from shardyard.domain.ids import Incarnation
from shardyard.runtime.waits import WaitRegistry
from shardyard_worker.exchange.buffers.buffer_layout import Bytes, Span
from shardyard_worker.exchange.buffers.flat_buffers import FlatBuffers
from shardyard_worker.exchange.server_stream import ServerStream

log = logging.getLogger("shardyard.worker")


@dataclass
class _Sent:
    """What was sent to one server, by variable: its place, and the checksum of its bytes."""

    sums: dict[int, tuple[Span, int]] = field(default_factory=dict)
    broken: bool = False


class Overlap:
    """Early sends on the streams of one job. For one thread, except `close`."""

    def __init__(
        self, buffers: FlatBuffers, streams: Mapping[Incarnation, ServerStream], wait_registry: WaitRegistry
    ) -> None:
        self._buffers = buffers
        self._streams = streams
        self._sent: dict[Incarnation, _Sent] = {}
        self._waiting: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._pending = False
        self._wait_registry = wait_registry
        self._sends_to = Incarnation(0)
        self._thread = threading.Thread(target=self._run, name="ahead", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread, after the streams were ended. Safe from any thread, and to repeat."""
        self._waiting.put(None)

    def ready(self, index: int, *, wait: Callable[[], None] | None = None) -> None:
        """The gradient of a variable lies in its view, once `wait` has returned."""
        span = self._buffers.span(index)
        if span is None or not self._streams[span.server].can_send_early:
            return
        sent = self._sent.setdefault(span.server, _Sent())

        def send() -> None:
            if wait is not None:
                wait()
            if sent.broken:
                return
            self._sends_to = span.server
            payload = self._buffers.payload(span.server)[span.begin : span.end]
            sent.sums[index] = span, _sum(payload)
            try:
                self._streams[span.server].send_early(span.begin, payload.data)
            except errors.ShardyardError as error:
                sent.broken = True
                log.debug("server %s: nothing is sent ahead of this push (%s)", span.server, error.what)

        self._pending = True
        self._waiting.put(send)

    def drain(self) -> None:
        """Waits for sends in flight, since the caller's exchange needs the streams alone."""
        if self._pending:
            self._pending = False
            done = threading.Event()
            self._waiting.put(done.set)
            with self._wait_registry.over(
                lambda: f"gradients to be sent to server {self._sends_to}, ahead of their push"
            ):
                done.wait()

    def forget(self) -> None:
        """Another exchange begins, so servers drop what was sent before it. Call it after `drain`."""
        self._sent.clear()

    def rest(self, server: Incarnation) -> list[Span] | None:
        """The spans of the payload that must still be sent with the push; None if nothing was sent early. Call it once
        a push, after `drain`."""
        sent = self._sent.pop(server, None)
        if sent is None or sent.broken:
            return None
        payload = self._buffers.payload(server)
        there = [span for span, sum_ in sent.sums.values() if _sum(payload[span.begin : span.end]) == sum_]
        rest: list[Span] = []
        at = 0
        for span in sorted(there, key=lambda span: span.begin):
            if at < span.begin:
                rest.append(Span(server, at, span.begin))
            at = span.end
        if at < len(payload):
            rest.append(Span(server, at, len(payload)))
        return rest

    def _run(self) -> None:
        while (work := self._waiting.get()) is not None:
            work()
        while not self._waiting.empty():  # a thread may wait for the last of it
            work = self._waiting.get()
            if work is not None:
                work()


def _sum(payload: Bytes) -> int:
    """A checksum as fast as memory. Different bytes almost never have the same one. The length is a multiple of 64."""
    words = payload.view(np.uint64)
    # the second sum notices two words that have changed places
    half = words.size // 2
    return int(np.add.reduce(words)) ^ (int(np.add.reduce(words[:half])) << 1)
