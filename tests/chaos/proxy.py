"""A TCP proxy whose connections can be cut, slowed down and held.

Owns: a listening port, the connections that came to it, one to the target for each, two threads a connection.
Invariants: bytes are passed on in order, or not at all; `close` ends every thread and socket. Must not know: what the
bytes mean, and when something shall go wrong.
"""

from __future__ import annotations

import contextlib
import enum
import socket
import struct
import threading
import time
from collections.abc import Iterator

CHUNK_BYTES = 64 * 1024
CONNECT_S = 2.0
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER of a socket whose close is a reset."""


class Way(enum.Enum):
    """Of bytes: from the one who connected, or back to it."""

    REQUESTS = "requests"
    REPLIES = "replies"


class _Pair:
    """A connection and its other half."""

    def __init__(self, caller: socket.socket, target: socket.socket) -> None:
        self.ends = {Way.REQUESTS: (caller, target), Way.REPLIES: (target, caller)}
        self.passing = len(Way)
        """Threads that pass on what comes; the last closes the sockets."""

    def reset(self) -> None:
        for each in self.ends[Way.REQUESTS]:
            with contextlib.suppress(OSError):
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            # wakes the threads that wait for it
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


class Proxy:
    """Passes on what comes to `address`. Safe for several threads.

    `target`: HOST:PORT; without one, connections are reset until `aim` has said it.
    """

    def __init__(self, target: str = "") -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._target = target
        self._changed = threading.Condition()
        self._pairs: set[_Pair] = set()
        self._threads: list[threading.Thread] = []
        self._held: set[Way] = set()
        self._delay_ms = 0
        self._cut: dict[Way, int] = {}
        self._closed = False
        self.cuts = 0
        """Connections that were cut."""
        self._accepting = threading.Thread(target=self._accept, name="proxy-accept")
        self._accepting.start()

    # ---- what can go wrong

    def aim(self, target: str) -> None:
        with self._changed:
            self._target = target

    def cut_after(self, way: Way, nbytes: int) -> None:
        """The connection in which the next `nbytes` bytes of that way are passed on is reset then, in the middle of
        what it was saying."""
        with self._changed:
            self._cut[way] = nbytes

    def cut_now(self) -> None:
        """Resets all connections."""
        with self._changed:
            pairs = list(self._pairs)
            self.cuts += len(pairs)
        for pair in pairs:
            pair.reset()

    def slow(self, delay_ms: int) -> None:
        """Holds every piece back for so long; 0: no more."""
        with self._changed:
            self._delay_ms = delay_ms

    def hold(self, *ways: Way) -> None:
        """A black hole: nothing of these ways is passed on until `let_go`."""
        with self._changed:
            self._held = set(ways)

    def let_go(self) -> None:
        """What was held is passed on, as after a cable that was plugged in again."""
        with self._changed:
            self._held = set()
            self._delay_ms = 0
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._accepting.join()
        self._listener.close()
        self.cut_now()
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- inside

    def _accept(self) -> None:
        while True:
            try:
                caller, _ = self._listener.accept()
            except OSError:
                return
            with self._changed:
                target = self._target
            if (pair := _connect(caller, target)) is None:
                continue
            threads = [
                threading.Thread(target=self._pass_on, args=(pair, way), name=f"proxy-{way.value}") for way in Way
            ]
            with self._changed:
                self._pairs.add(pair)
                self._threads = [*(each for each in self._threads if each.is_alive()), *threads]
                # `close` joins them, so they are begun under its lock
                for thread in threads:
                    thread.start()
                if self._closed:
                    pair.reset()

    def _pass_on(self, pair: _Pair, way: Way) -> None:
        source, sink = pair.ends[way]
        try:
            while piece := source.recv(CHUNK_BYTES):
                for part, cut in self._parts(way, piece):
                    sink.sendall(part)
                    if cut:
                        pair.reset()
                        return
            with contextlib.suppress(OSError):
                sink.shutdown(socket.SHUT_WR)
        except OSError:
            pair.reset()
        finally:
            self._end(pair)

    def _parts(self, way: Way, piece: bytes) -> Iterator[tuple[bytes, bool]]:
        """What of a piece is passed on, when it may be; True with the last before a cut."""
        with self._changed:
            delay_ms = self._delay_ms
        if delay_ms:
            time.sleep(delay_ms / 1000)
        with self._changed:
            while way in self._held and not self._closed:
                self._changed.wait()
            if self._closed:
                raise ConnectionResetError
            left = self._cut.get(way)
            if left is not None and len(piece) >= left:
                del self._cut[way]
                self.cuts += 1
                yield piece[:left], True
                return
            if left is not None:
                self._cut[way] = left - len(piece)
        yield piece, False

    def _end(self, pair: _Pair) -> None:
        with self._changed:
            pair.passing -= 1
            if pair.passing:
                return
            self._pairs.discard(pair)
        for each in pair.ends[Way.REQUESTS]:
            each.close()


def _connect(caller: socket.socket, target: str) -> _Pair | None:
    host, _, port = target.rpartition(":")
    try:
        if not port:
            raise ConnectionRefusedError
        there = socket.create_connection((host, int(port)), timeout=CONNECT_S)
    except OSError:
        # as it is where nobody listens
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        caller.close()
        return None
    there.settimeout(None)
    for each in (caller, there):
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return _Pair(caller, there)
