"""Streams between two processes of one user on one machine, over Unix sockets instead of gRPC.

A message there and back takes a tenth of the time that it takes over gRPC. A socket of type SOCK_SEQPACKET keeps the
bounds of packets. A packet begins with one byte, its kind; a message is one packet or several. The first packet of a
connection carries the id of the request. File descriptors of shared memory travel beside a message (SCM_RIGHTS).

`LocalListener` serves one method with streams in both directions. Each connection has a thread, which blocks until the
next message is there; a handler that pauses is carried on by the thread that ends its pause. `LocalStream` is the
caller's side. Invariants: both sides ask the kernel which user the other side is (SO_PEERCRED), and talk only to their
own; a message beyond the limits ends the connection; whatever way a process ends, the kernel tells the other side, and
descriptors that nobody took are closed. Must not know: what messages mean.
"""

from __future__ import annotations

import array
import contextlib
import logging
import math
import os
import secrets
import select
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

from google.protobuf.message import DecodeError

from shardyard.domain import errors
from shardyard.domain.limits import KIB, MESSAGE_BYTES_MAX
from shardyard.runtime.waits import WaitRegistry
from shardyard.transport.dispatch import serve_with_pauses
from shardyard.transport.error_codes import from_detail, to_detail
from shardyard.transport.interfaces import Context, Descriptors, Handler, Pause, next_request_id
from shardyard.wire.method import Method
from shardyard.wire.v1 import common_pb2 as wire

log = logging.getLogger("shardyard.serving")

PACKET_BYTES: Final = 64 * KIB
"""The message bytes of one packet. The kernel takes packets of this size without other settings."""
DESCRIPTORS_MAX: Final = 64
"""Descriptors that come with one packet, and that wait to be taken."""
_BUFFER_BYTES: Final = 1024 * KIB
_HELLO_MS: Final = 5_000
"""How long a connection may take to send its first packet."""
_RETRY_S: Final = 0.1
_WHOLE, _PIECE, _ERROR, _END = b"m", b"p", b"e", b"d"
_CREDENTIALS: Final = struct.Struct("3i")
_DESCRIPTOR_BYTES: Final = array.array("i").itemsize
_ANCILLARY_BYTES: Final = socket.CMSG_SPACE(DESCRIPTORS_MAX * _DESCRIPTOR_BYTES) if hasattr(socket, "CMSG_SPACE") else 0
_TIMEVAL: Final = struct.Struct("ll")
_FOLDER_MODE: Final = 0o700
_CUT: Final = int(socket.MSG_TRUNC | socket.MSG_CTRUNC)
_RIGHTS: Final = (socket.SOL_SOCKET, socket.SCM_RIGHTS) if hasattr(socket, "SCM_RIGHTS") else None


def available() -> bool:
    """Whether this system has what local sockets need."""
    return sys.platform == "linux" and hasattr(socket, "SO_PEERCRED")


class Connection:
    """Packets on a connected socket. One thread may receive while another one sends; any thread may call `cancel`."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._receiving, self._sending = threading.Lock(), threading.Lock()
        self._cancelled = False
        self._buffer = bytearray(1 + PACKET_BYTES)
        self._view = memoryview(self._buffer)
        self._timeout_ms = 0
        self._descriptors: deque[int] = deque()
        self._outgoing: list[int] = []
        connected.setblocking(True)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            connected.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)

    def limit_sends(self, timeout_ms: int) -> None:
        """A packet that cannot be sent within `timeout_ms` raises TimeoutError."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(timeout_ms))

    def pass_descriptors(self, descriptors: Iterable[int]) -> None:
        self._outgoing += descriptors

    def take_descriptor(self) -> int | None:
        return self._descriptors.popleft() if self._descriptors else None

    def send(self, kind: bytes, message: bytes) -> None:
        """Raises OSError."""
        with self._sending:
            if self._outgoing:
                self._send_descriptors()
            if len(message) <= PACKET_BYTES:
                self._socket.send(kind + message)
                return
            view = memoryview(message)
            last = (len(message) - 1) // PACKET_BYTES * PACKET_BYTES
            for begin in range(0, last, PACKET_BYTES):
                self._socket.sendmsg([_PIECE, view[begin : begin + PACKET_BYTES]])
            self._socket.sendmsg([kind, view[last:]])

    def _send_descriptors(self) -> None:
        while self._outgoing:
            some = self._outgoing[:DESCRIPTORS_MAX]
            self._socket.sendmsg([_PIECE], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", some))])
            del self._outgoing[: len(some)]
            for descriptor in some:
                os.close(descriptor)

    def receive(self, timeout_ms: int = 0) -> tuple[bytes, bytes]:
        """Returns the next message and its kind; an empty kind if the other side is gone. `timeout_ms`: for each
        packet; 0: without a limit. Raises OSError, BlockingIOError after the timeout, TooLarge."""
        with self._receiving:
            if timeout_ms != self._timeout_ms:
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(timeout_ms))
                self._timeout_ms = timeout_ms
            kind, message = self._packet()
            if kind != _PIECE:
                return kind, message
            pieces, nbytes = [message], len(message)
            while kind == _PIECE:
                kind, message = self._packet()
                pieces.append(message)
                nbytes += len(message)
                if nbytes > MESSAGE_BYTES_MAX:
                    raise errors.TooLarge(f"a message of more than {MESSAGE_BYTES_MAX} bytes")
            return kind, b"".join(pieces)

    def _packet(self) -> tuple[bytes, bytes]:
        length, ancillary, flags, _ = self._socket.recvmsg_into((self._buffer,), _ANCILLARY_BYTES)
        for level, kind, data in ancillary:
            if (level, kind) == _RIGHTS:
                whole = len(data) - len(data) % _DESCRIPTOR_BYTES
                self._descriptors.extend(array.array("i", data[:whole]))
        if flags & _CUT or len(self._descriptors) > DESCRIPTORS_MAX:
            raise errors.TooLarge(f"a packet of more than {PACKET_BYTES} bytes, or {DESCRIPTORS_MAX} descriptors")
        return bytes(self._view[:1][:length]), bytes(self._view[1:length])

    def is_alive(self) -> bool:
        """Whether the other side has the connection, and this side has not cancelled it."""
        if self._cancelled:
            return False
        poll = select.poll()
        try:
            poll.register(self._socket, select.POLLRDHUP)
            return not poll.poll(0)
        except (OSError, ValueError):
            return False

    def cancel(self) -> None:
        """Ends the connection. A thread that sends or receives is woken. May be repeated."""
        self._cancelled = True
        with contextlib.suppress(OSError):  # the other side has ended it, or it was closed
            self._socket.shutdown(socket.SHUT_RDWR)
        # the number of a closed socket may be given to another file, so it stays open while a thread uses it
        if self._receiving.acquire(blocking=False):
            try:
                if self._sending.acquire(blocking=False):
                    try:
                        self._close()
                    finally:
                        self._sending.release()
            finally:
                self._receiving.release()

    def close(self) -> None:
        """Frees the socket, by the thread that received."""
        with self._receiving, self._sending:
            self._close()

    def _close(self) -> None:
        self._socket.close()
        while self._descriptors:
            os.close(self._descriptors.popleft())
        while self._outgoing:
            os.close(self._outgoing.pop())


class LocalStream:
    """The caller's side. See shardyard.transport.interfaces.Stream."""

    def __init__(
        self,
        address: str,
        method: Method[Any, Any],
        *,
        peer: str,
        unavailable: type[errors.Unavailable],
        timeout_ms: int,
    ) -> None:
        """`address`: of a LocalListener. `timeout_ms`: how long it may take to send one packet. Raises NotShareable if
        no process of this user listens there."""
        if not available():
            raise errors.NotShareable(f"{sys.platform} has no local sockets that name their user")
        self._peer, self._method, self._unavailable = peer, method, unavailable
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connected.connect(_raw(address))
            user = _user_of(connected)
            if user != os.geteuid():
                raise errors.NotShareable(f"{peer} runs as user {user}; this process is user {os.geteuid()}")
            self._connection = Connection(connected)
            self._connection.limit_sends(timeout_ms)
        except OSError as error:
            connected.close()
            raise errors.NotShareable(
                f"{peer} cannot be reached over its local socket ({error.strerror}); is it in another container?"
            ) from error
        except errors.NotShareable:
            connected.close()
            raise
        with contextlib.suppress(OSError):  # `receive` tells why the other side has ended the stream
            self._connection.send(_WHOLE, next_request_id().encode())

    @property
    def descriptors(self) -> Descriptors:
        return self._connection

    def send(self, requests: Iterable[Any], *, answered: bool = True) -> None:
        del answered
        encode = self._method.request.encode
        try:
            for request in requests:
                self._connection.send(_WHOLE, encode(request))
        except BlockingIOError:
            self.cancel()
            raise self._late() from None
        except OSError:
            pass  # `receive` tells why the other side has ended the stream

    def receive(self, *, timeout_ms: int) -> Any:
        try:
            kind, message = self._connection.receive(timeout_ms)
        except BlockingIOError:
            self.cancel()
            raise self._late() from None
        except OSError as error:
            self._connection.close()
            raise self._unavailable(f"{self._peer} does not answer ({error.strerror})") from None
        except errors.ShardyardError:
            self.cancel()
            raise
        if kind == _WHOLE:
            return self._method.response.decode(message)
        self._connection.close()
        if kind == _END:
            return None
        if kind == _ERROR:
            try:
                raise from_detail(wire.ErrorDetail.FromString(message))
            except DecodeError:
                raise errors.MalformedPayload(f"{self._peer} ended a stream with an error that is none") from None
        raise self._unavailable(f"{self._peer} does not answer (its local socket was closed)")

    def cancel(self) -> None:
        self._connection.cancel()

    def _late(self) -> errors.ShardyardError:
        return errors.DeadlineExceeded(f"{self._peer} did not answer {self._method.path} in time")


class LocalListener:
    """Serves one method to the processes of this user on this machine.

    `folder`: where the socket gets its name, for processes that share a folder and not a network, such as containers.
    None: a name that the kernel forgets with the process, for all processes of this network namespace. Raises
    NotShareable if this system has no such sockets, or the folder cannot be used.
    """

    def __init__(
        self, method: Method[Any, Any], handler: Handler, *, connections_max: int, folder: Path | None = None
    ) -> None:
        if not available():
            raise errors.NotShareable(f"{sys.platform} has no local sockets that name their user")
        self._method, self._handler = method, handler
        self._connections_max = connections_max
        self._lock = threading.Lock()
        self._served: dict[Connection, threading.Thread] = {}
        self._stopped = False
        name = f"shardyard-{os.getpid()}-{secrets.token_hex(8)}"
        self._path = None if folder is None else folder / f"{name}.sock"
        self.address = f"@{name}" if self._path is None else str(self._path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            if folder is not None:
                folder.mkdir(_FOLDER_MODE, parents=True, exist_ok=True)
                _delete_stale(folder)
            self._socket.bind(_raw(self.address))
            self._socket.listen(connections_max)
        except OSError as error:
            self._socket.close()
            raise errors.NotShareable(f"no local socket at {self.address}: {error.strerror or error}") from error
        self._accepts = threading.Thread(target=self._accept, name="local-accept", daemon=True)

    def start(self) -> None:
        self._accepts.start()

    def stop(self) -> None:
        """Ends all connections, and waits for their threads."""
        with self._lock:
            self._stopped = True
            served = dict(self._served)
        wait_registry = WaitRegistry()
        try:
            with wait_registry.over(lambda: f"the streams of local socket {self.address} to end"):
                with contextlib.suppress(OSError):  # it does not listen yet
                    self._socket.shutdown(socket.SHUT_RDWR)
                if self._accepts.ident is not None:
                    self._accepts.join()
                self._socket.close()
                if self._path is not None:
                    self._path.unlink(missing_ok=True)
                for connection, thread in served.items():
                    connection.cancel()
                    thread.join()
        finally:
            wait_registry.close()

    def _accept(self) -> None:
        while True:
            try:
                connected, _ = self._socket.accept()
            except OSError:
                if self._stopped:
                    return
                time.sleep(_RETRY_S)  # no descriptor is free, for example
                continue
            if _user_of(connected) != os.geteuid():
                connected.close()
                continue
            connection = Connection(connected)
            thread = threading.Thread(target=self._serve, args=(connection,), name="serve-local", daemon=True)
            with self._lock:
                if self._stopped or len(self._served) >= self._connections_max:
                    connection.close()
                    continue
                self._served[connection] = thread
                thread.start()

    def _serve(self, connection: Connection) -> None:
        try:
            ServedConnection(connection, self._method, self._handler).run()
        except (OSError, errors.ShardyardError) as error:
            log.debug("%s: a connection has ended (%s)", self._method.path, error)
        finally:
            connection.close()
            with self._lock:
                del self._served[connection]


class ServedConnection:
    """A connection, and the handler of its stream. The thread that calls `run` receives; it carries the handler on
    when a message has come, and another thread does when it has ended the handler's pause."""

    def __init__(self, connection: Connection, method: Method[Any, Any], handler: Handler) -> None:
        self._connection = connection
        self._method, self._handler = method, handler
        self._handling = threading.Lock()
        """Held by the thread that carries the handler on. No circle of threads waits here: a thread takes the lock of
        another handler only while it runs its own, and the other handler was paused then."""
        self._answers: Generator[bytes | Pause | None, None, None]
        self._arrived: tuple[bytes, bytes] | None = None
        self._pause: Pause | None = None
        self._has_ended = False

    def run(self) -> None:
        """Serves the stream until it ends. Raises OSError, ShardyardError."""
        connection = self._connection
        kind, hello = connection.receive(_HELLO_MS)
        if kind != _WHOLE:
            return
        context = Context(peer="local", is_active=connection.is_alive, descriptors=connection)
        self._answers = serve_with_pauses(
            self._method, self._handler, self._requests(), context, hello.decode(errors="replace")
        )
        try:
            with self._handling:
                self._carry_on()
            while not self._has_ended:
                arrived = self._receive()
                with self._handling:
                    if self._has_ended or (arrived is not None and self._pause is not None):
                        break  # during a pause, only the end can come
                    self._arrived = arrived
                    if arrived is not None or self._is_overdue():
                        self._carry_on()
        finally:
            with self._handling:
                self._end_pause()
                self._answers.close()
        # if the socket is closed while it has unread packets, the kernel drops the answer
        while connection.receive(_HELLO_MS)[0]:
            pass

    def _receive(self) -> tuple[bytes, bytes] | None:
        """Returns the next packet; None: the handler's pause is over. An empty kind: the caller is gone."""
        pause = self._pause
        left_ms = 0 if pause is None else max(1, math.ceil((pause.until - time.monotonic()) * 1000))
        try:
            return self._connection.receive(left_ms)
        except BlockingIOError:
            return None
        except OSError:
            return b"", b""

    def _requests(self) -> Iterator[bytes]:
        """Yields requests until the caller has ended the stream, in whatever way."""
        while True:
            arrived, self._arrived = self._arrived, None
            if arrived is None:
                try:
                    arrived = self._connection.receive()
                except OSError:
                    return
            kind, message = arrived
            if kind != _WHOLE:
                return
            yield message

    # ---- with `_handling` held

    def _carry_on(self) -> None:
        """Runs the handler until it waits for a request, pauses, or ends."""
        self._end_pause()
        try:
            for answer in self._answers:
                if answer is None:
                    return
                if not isinstance(answer, Pause):
                    self._connection.send(_WHOLE, answer)
                elif answer.begin(partial(self._go_on, answer)):
                    self._pause = answer
                    return
            self._connection.send(_END, b"")
        except errors.ShardyardError as error:
            with contextlib.suppress(OSError):
                self._connection.send(_ERROR, to_detail(error).SerializeToString())
        except OSError as error:
            log.debug("%s: a connection has ended (%s)", self._method.path, error)
        self._has_ended = True

    def _end_pause(self) -> None:
        pause, self._pause = self._pause, None
        if pause is not None:
            pause.end()

    def _is_overdue(self) -> bool:
        return self._pause is not None and time.monotonic() >= self._pause.until

    def _go_on(self, pause: Pause) -> None:
        """Called by the thread that has ended the pause."""
        with self._handling:
            if self._pause is pause:
                self._carry_on()


def _raw(address: str) -> str:
    """The address as the kernel takes it: a name without a file begins with a zero byte."""
    return "\0" + address[1:] if address.startswith("@") else address


def _user_of(connected: socket.socket) -> int:
    """The user of the process at the other end, when it connected or began to listen."""
    raw = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(raw)
    return int(user)


def _timeval(timeout_ms: int) -> bytes:
    return _TIMEVAL.pack(timeout_ms // 1000, timeout_ms % 1000 * 1000)


def _delete_stale(folder: Path) -> None:
    """Deletes the sockets of processes that were killed: nobody listens there."""
    for path in folder.glob("shardyard-*.sock"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
            except OSError:
                continue
