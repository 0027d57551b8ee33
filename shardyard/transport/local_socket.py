"""Streams between two processes of one user on one machine, over Unix sockets instead of gRPC.

A message there and back takes a tenth of the time that it takes over gRPC. A socket of type SOCK_SEQPACKET keeps the
bounds of packets. A packet begins with one byte, its kind; a message is one packet or several. The first packet of a
connection carries the id of the request. File descriptors of shared memory travel beside a message (SCM_RIGHTS).

`LocalStream` is the caller's side, `local_listener` the other one. Invariants: both sides ask the kernel which user the
other side is (SO_PEERCRED), and talk only to their own; a message beyond the limits ends the connection; whatever way a
process ends, the kernel tells the other side, and descriptors that nobody took are closed. Must not know: what messages
mean.
"""

from __future__ import annotations

import array
import contextlib
import logging
import os
import select
import socket
import struct
import sys
import threading
from collections import deque
from collections.abc import Iterable
from typing import Any, Final

from google.protobuf.message import DecodeError

from shardyard.domain import errors
from shardyard.domain.limits import KIB, MESSAGE_BYTES_MAX
from shardyard.transport.error_codes import from_detail
from shardyard.transport.interfaces import Descriptors, LocalAddress, next_request_id
from shardyard.wire.method import Method
from shardyard.wire.v1 import common_pb2 as wire

log = logging.getLogger("shardyard.serving")

PACKET_BYTES: Final = 64 * KIB
"""The message bytes of one packet. The kernel takes packets of this size without other settings."""
DESCRIPTORS_MAX: Final = 64
"""Descriptors that come with one packet, and that wait to be taken."""
_BUFFER_BYTES: Final = 1024 * KIB
WHOLE, PIECE, ERROR, END = b"m", b"p", b"e", b"d"
"""Kinds of packets: the last of a message, another one of it, an error, and the end of the stream."""
_CREDENTIALS: Final = struct.Struct("3i")
_DESCRIPTOR_BYTES: Final = array.array("i").itemsize
_ANCILLARY_BYTES: Final = socket.CMSG_SPACE(DESCRIPTORS_MAX * _DESCRIPTOR_BYTES) if hasattr(socket, "CMSG_SPACE") else 0
_TIMEVAL: Final = struct.Struct("ll")
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
                self._socket.sendmsg([PIECE, view[begin : begin + PACKET_BYTES]])
            self._socket.sendmsg([kind, view[last:]])

    def _send_descriptors(self) -> None:
        while self._outgoing:
            some = self._outgoing[:DESCRIPTORS_MAX]
            self._socket.sendmsg([PIECE], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", some))])
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
            if kind != PIECE:
                return kind, message
            pieces, nbytes = [message], len(message)
            while kind == PIECE:
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
        address: LocalAddress,
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
            connected.connect(raw_address(address.address))
            user = user_of(connected)
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
            self._connection.send(WHOLE, b" ".join((next_request_id().encode(), address.key)))

    @property
    def descriptors(self) -> Descriptors:
        return self._connection

    def send(self, requests: Iterable[Any], *, answered: bool = True) -> None:
        del answered
        encode = self._method.request.encode
        try:
            for request in requests:
                self._connection.send(WHOLE, encode(request))
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
        if kind == WHOLE:
            return self._method.response.decode(message)
        self._connection.close()
        if kind == END:
            return None
        if kind == ERROR:
            try:
                raise from_detail(wire.ErrorDetail.FromString(message))
            except DecodeError:
                raise errors.MalformedPayload(f"{self._peer} ended a stream with an error that is none") from None
        raise self._unavailable(f"{self._peer} does not answer (its local socket was closed)")

    def cancel(self) -> None:
        self._connection.cancel()

    def _late(self) -> errors.ShardyardError:
        return errors.DeadlineExceeded(f"{self._peer} did not answer {self._method.path} in time")


def raw_address(address: str) -> str:
    """The address as the kernel takes it: a name without a file begins with a zero byte."""
    return "\0" + address[1:] if address.startswith("@") else address


def user_of(connected: socket.socket) -> int:
    """The user of the process at the other end, when it connected or began to listen."""
    raw = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(raw)
    return int(user)


def _timeval(timeout_ms: int) -> bytes:
    return _TIMEVAL.pack(timeout_ms // 1000, timeout_ms % 1000 * 1000)
