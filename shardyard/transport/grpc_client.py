"""Calls over gRPC, from the side of the caller.

Invariants: every call has a deadline; the channel never retries a call (a retry once applied a push twice). Only the
caller retries, because it knows the name of its push.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import grpc
from grpc._cython import cygrpc  # type: ignore[attr-defined]

from shardyard.domain import errors
from shardyard.domain.limits import MESSAGE_BYTES_MAX
from shardyard.security.credentials import Credentials
from shardyard.transport import TRIED
from shardyard.transport.error_codes import from_rpc_error
from shardyard.transport.grpc_private import Ended, PrivateCall
from shardyard.transport.interfaces import PASS_KEY, REQUEST_ID_KEY, LocalAddress, Stream, next_request_id
from shardyard.transport.local_socket import LocalStream
from shardyard.transport.tls import explain_failure, open_channel
from shardyard.wire.method import Method

Request = TypeVar("Request")
Response = TypeVar("Response")

OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
    # a frozen peer is noticed after keepalive_time + ping_timeout; without ping_timeout only after a minute
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # how long one attempt to connect may take: a busy server needs more than the pause between attempts
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)
KNOCK_MS = 250
"""How long a call waits for a peer to come back that did not answer the call before."""
KNOCK_SLICE_MS = 50
DEADLINES_MS = 250
"""How often the deadlines of streams are checked. A late answer is noticed this much later at most."""


class GrpcPeer:
    """A peer at HOST:PORT with its own channel. Safe for several threads."""

    def __init__(
        self,
        address: str,
        *,
        name: str,
        unavailable: type[errors.Unavailable],
        network: GrpcNetwork,
    ) -> None:
        self._address = address
        self._network = network
        self._name = name
        self._unavailable = unavailable
        self._deadlines = network.deadlines
        self.credentials = network.credentials
        self._shown = None if self.credentials is None else self.credentials.pem
        self._channel = open_channel(address, name, self.credentials, OPTIONS)
        self._former: list[grpc.Channel] = []
        """Channels with a former certificate. They may have open streams."""
        self._stubs: dict[str, Any] = {}
        self._is_cut = False
        self._lock = threading.Lock()
        self._local: weakref.WeakSet[LocalStream] = weakref.WeakSet()
        self._is_closed = False

    @property
    def name(self) -> str:
        return f"{self._name} at {self._address}"

    def call(self, method: Method[Request, Response], request: Request, *, timeout_ms: int) -> Response:
        return self._once(method, request, timeout_ms)

    def send(self, method: Method[Request, Response], requests: Iterable[Request], *, timeout_ms: int) -> Response:
        return self._once(method, iter(requests), timeout_ms)

    def receive(self, method: Method[Request, Response], request: Request, *, timeout_ms: int) -> Iterator[Response]:
        call = self._begin(method, request, timeout_ms)
        try:
            for answer in call:
                yield method.response.decode(answer)
        except grpc.RpcError as error:
            raise self._failure(method, error) from None
        finally:
            call.cancel()

    def open(self, method: Method[Any, Any], *, timeout_ms: int, socket: LocalAddress | None = None) -> Stream:
        if socket is not None:
            return self._open_local(socket, method, timeout_ms)
        metadata = self._metadata()
        try:
            self._knock()
            call = (
                PrivateCall(self._channel, method.path, metadata)
                if TRIED
                else ThreadedCall(self._channel.stream_stream(method.path, None, None), metadata)
            )
        except ValueError as error:
            raise self._closed(str(error)) from None
        return GrpcStream(self.name, method, call, self._failure, self._deadlines, timeout_ms)

    def _metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        own, job_pass = (REQUEST_ID_KEY, next_request_id()), self._network.job_pass
        return (own, (PASS_KEY, job_pass)) if job_pass else (own,)

    def _open_local(self, address: LocalAddress, method: Method[Any, Any], timeout_ms: int) -> LocalStream:
        with self._lock:
            if self._is_closed:
                raise self._closed("it was closed here")
            found = LocalStream(address, method, peer=self.name, unavailable=self._unavailable, timeout_ms=timeout_ms)
            self._local.add(found)
        return found

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            local = list(self._local)
        for stream in local:
            stream.cancel()
        for channel in (*self._former, self._channel):
            channel.close()

    def _once(self, method: Method[Any, Response], sent: object, timeout_ms: int) -> Response:
        try:
            answer: bytes = self._begin(method, sent, timeout_ms)
        except grpc.RpcError as error:
            raise self._failure(method, error) from None
        return method.response.decode(answer)

    def _begin(self, method: Method[Any, Any], sent: object, timeout_ms: int) -> Any:
        try:
            self._knock()
            return self._stub(method)(sent, timeout=timeout_ms / 1000, metadata=self._metadata())
        except ValueError as error:  # gRPC raises this for a closed channel
            raise self._closed(str(error)) from None

    def _closed(self, why: str) -> errors.ShardyardError:
        return self._unavailable(f"{self.name} does not answer ({why})")

    def _failure(self, method: Method[Any, Any], error: grpc.RpcError) -> errors.ShardyardError:
        found = from_rpc_error(error, peer=self.name, path=method.path, unavailable=self._unavailable)
        if isinstance(found, self._unavailable):
            is_first, self._is_cut = not self._is_cut, True
            if self.credentials is not None and self.credentials.refresh() is not self._shown:
                return found  # the next call shows the renewed certificate
            if self._shown is not None or is_first:
                explained = explain_failure(
                    found.what, self.name, own=self._shown, address=self._address, unavailable=self._unavailable
                )
                return explained or found
        return found

    def _show_renewed(self) -> None:
        """Takes another channel if the certificate was renewed. Streams that are open stay on theirs."""
        if self.credentials is None or self.credentials.refresh() is self._shown:
            return
        with self._lock:
            if not self._is_closed and self.credentials.pem is not self._shown:
                self._shown = self.credentials.pem
                self._former.append(self._channel)
                self._channel, self._stubs = open_channel(self._address, self._name, self.credentials, OPTIONS), {}

    def _knock(self) -> None:
        """Polls for a moment if the last call got no answer. gRPC polls in the threads that wait, so it connects only
        while a thread waits, and a call on a channel that is not connected fails at once. Without this, a peer that was
        restarted might never be found. Raises ValueError for a closed channel."""
        if not self._is_cut:
            return
        self._show_renewed()
        if not TRIED:
            self._is_cut = False
            return
        core: Any = self._channel._channel  # type: ignore[attr-defined]
        until = time.monotonic() + KNOCK_MS / 1000
        state = core.check_connectivity_state(True)
        while state != cygrpc.ConnectivityState.ready and time.monotonic() < until:
            # gRPC takes the time of day, which may jump, so this waits in short slices
            core.watch_connectivity_state(state, time.time() + KNOCK_SLICE_MS / 1000)
            state = core.check_connectivity_state(True)
        self._is_cut = state != cygrpc.ConnectivityState.ready

    def _stub(self, method: Method[Any, Any]) -> Any:
        stub = self._stubs.get(method.path)
        if stub is None:
            kind = "stream_unary" if method.streams_in else "unary_stream" if method.streams_out else "unary_unary"
            stub = self._stubs[method.path] = getattr(self._channel, kind)(
                method.path,
                # the caller decodes answers: gRPC would hide an error that is raised in here
                request_serializer=method.request.encode,
            )
        return stub


class ThreadedCall:
    """Like PrivateCall, with the public interface of gRPC, which reads the requests in another thread."""

    def __init__(self, stub: Any, metadata: tuple[tuple[str, str | bytes], ...]) -> None:
        self._waiting: queue.SimpleQueue[Iterable[bytes] | None] = queue.SimpleQueue()
        self._call = stub(self._requests(), metadata=metadata)

    def _requests(self) -> Iterator[bytes]:
        while (requests := self._waiting.get()) is not None:
            yield from requests

    def send(self, messages: Iterable[bytes], *, answered: bool = True) -> None:
        del answered
        self._waiting.put(messages)

    def receive(self) -> bytes:
        try:
            answer: bytes | None = next(self._call, None)
        except grpc.RpcError as error:
            raise Ended(error) from None
        if answer is None:
            raise Ended(self._call)
        return answer

    def cancel(self) -> None:
        self._waiting.put(None)
        self._call.cancel()


class GrpcStream:
    """See shardyard.transport.interfaces.Stream."""

    descriptors = None

    def __init__(
        self,
        peer: str,
        method: Method[Any, Any],
        call: PrivateCall | ThreadedCall,
        failure: Callable[[Method[Any, Any], grpc.RpcError], errors.ShardyardError],
        deadlines: Deadlines,
        timeout_ms: int,
    ) -> None:
        self._peer = peer
        self._timeout_ms = timeout_ms
        self._method = method
        self._call = call
        self._failure = failure
        self._deadlines = deadlines
        self._overdue = False
        self._due: float | None = None
        self._send_due: float | None = None
        deadlines.watch(self)

    def send(self, requests: Iterable[Any], *, answered: bool = True) -> None:
        try:
            self._call.send(self._paced(requests), answered=answered)
        except Ended as ended:
            if ended.status.code() is not grpc.StatusCode.OK:  # if it is OK, there will be no answer
                raise self._error(ended) from None

    def _paced(self, requests: Iterable[Any]) -> Iterator[bytes]:
        """Encodes requests. Each of them must be sent in time; all together may take longer."""
        try:
            for request in requests:
                self._send_due = time.monotonic() + self._timeout_ms / 1000
                yield self._method.request.encode(request)
        finally:
            self._send_due = None

    def receive(self, *, timeout_ms: int) -> Any:
        self._due = time.monotonic() + timeout_ms / 1000
        try:
            answer = self._call.receive()
        except Ended as ended:
            self.cancel()
            if ended.status.code() is grpc.StatusCode.OK:
                return None
            raise self._error(ended) from None
        finally:
            self._due = None
        return self._method.response.decode(answer)

    def _error(self, ended: Ended) -> errors.ShardyardError:
        if self._overdue:
            return errors.DeadlineExceeded(f"{self._peer} did not answer {self._method.path} in time")
        return self._failure(self._method, ended.status)

    def is_late(self, now: float) -> bool:
        due, send_due = self._due, self._send_due
        return (due is not None and due < now) or (send_due is not None and send_due < now)

    def expire(self) -> None:
        """Ends the stream, because its answer is overdue."""
        self._overdue = True
        self._call.cancel()

    def cancel(self) -> None:
        self._deadlines.forget(self)
        self._call.cancel()


class Deadlines:
    """Ends streams whose answers are overdue. gRPC's own deadline is for a stream as a whole. Runs one thread while
    there are streams."""

    def __init__(self) -> None:
        self._streams: set[GrpcStream] = set()
        self._changed = threading.Condition()
        self._runs = False

    def watch(self, stream: GrpcStream) -> None:
        with self._changed:
            self._streams.add(stream)
            if not self._runs:
                self._runs = True
                threading.Thread(target=self._run, name="deadlines", daemon=True).start()

    def forget(self, stream: GrpcStream) -> None:
        with self._changed:
            self._streams.discard(stream)
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._streams:
                    self._runs = False
                    return
                self._changed.wait(DEADLINES_MS / 1000)
                now = time.monotonic()
                late = [stream for stream in self._streams if stream.is_late(now)]
            for stream in late:
                stream.expire()


class GrpcNetwork:
    """Connects to peers by their addresses. See shardyard.transport.interfaces.Network. `credentials`: of this process;
    None: without TLS."""

    def __init__(self, credentials: Credentials | None) -> None:
        self.credentials = credentials
        self.job_pass = b""
        self.deadlines = Deadlines()

    def connect(
        self, address: str, *, name: str, unavailable: type[errors.Unavailable] = errors.ServerUnavailable
    ) -> GrpcPeer:
        return GrpcPeer(address, name=name, unavailable=unavailable, network=self)
