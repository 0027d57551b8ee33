"""Serves calls over gRPC: a threaded server with health and reflection.

Invariants: two servers never share a port without an error; messages beyond the limit are refused before they are read;
connections take at most half of the files that this process may open.
"""

from __future__ import annotations

import contextlib
import contextvars
import errno
import resource
import socket
import threading
import weakref
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import grpc
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection

from shardyard.domain import errors
from shardyard.domain.limits import MESSAGE_BYTES_MAX
from shardyard.runtime.waits import WaitRegistry
from shardyard.security.door import Door
from shardyard.security.passes import Speaker, holder_of
from shardyard.security.request_rates import RequestRates
from shardyard.transport import TRIED, grpc_private
from shardyard.transport.dispatch import serve, serve_at_once
from shardyard.transport.error_codes import DETAIL_KEY, status_of, status_text, to_detail
from shardyard.transport.grpc_private import CallThreads, InThisThread, ServedCall
from shardyard.transport.interfaces import PASS_KEY, REQUEST_ID_KEY, AtOnce, Context, Handler, Service
from shardyard.transport.tls import ServerSecurity
from shardyard.wire.method import Method, message
from shardyard.wire.methods import PACKAGE

VITAL_THREADS: Final = 64
MALFORMED_PER_S: Final = 10
"""So many malformed messages a second of one caller are refused at once. Further ones are refused up to STALL_S / 4
later, and are among the caller's open calls until then."""
OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.server_handshake_timeout_ms", 10_000),
    # a connection whose caller does not answer the first frame is closed; without this only after a minute
    ("grpc.http2.settings_timeout", 10_000),
    ("grpc.max_concurrent_streams", 1_024),  # of one connection
)

CONNECTIONS_MAX: Final = 1 << 20
_CHECK_HEALTH: Final = Method(
    health.SERVICE_NAME, "Check", message(health_pb2.HealthCheckRequest), message(health_pb2.HealthCheckResponse)
)


def split_address(address: str) -> tuple[str, int]:
    """Splits HOST:PORT. Raises ConfigurationError."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise errors.ConfigurationError(
            f"{address!r} is not an address; expected HOST:PORT, for example 127.0.0.1:7070"
        )
    return host, int(port)


def connections_max() -> int:
    """How many connections a port takes: half of the files that this process may open. Without it, whoever connects
    often enough keeps the process from opening its own files."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return CONNECTIONS_MAX if files == resource.RLIM_INFINITY else min(files // 2, CONNECTIONS_MAX)


class GrpcServer:
    """Serves services at an address until it is stopped.

    `security`: the server's certificate and whom it admits; None: without TLS, and everybody may call everything.
    `threads`: the most calls whose handlers run at a time. One that waits for a request is not one of them. `vital`:
    paths of methods with threads of their own, which are served however many other calls there are.
    Raises AddressInUse if the port is taken, ConfigurationError if this machine does not have the address.
    """

    def __init__(
        self,
        bind: str,
        services: Sequence[Service],
        security: ServerSecurity | None,
        *,
        threads: int = 64,
        vital: Collection[str] = (),
    ) -> None:
        host, port = split_address(bind)
        refusal = _refusal(host, port)
        if refusal is not None:
            raise refusal
        self._door = None if security is None else security.door
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="serve")
        self._vital = frozenset(vital)
        self._threads = CallThreads(threads)
        self._vital_threads = CallThreads(VITAL_THREADS, "serve-vital", most_of_one=VITAL_THREADS)
        self._at_first = InThisThread()
        self._malformed = RequestRates(MALFORMED_PER_S, "malformed messages a second; further ones are refused late")
        self._calls: weakref.WeakSet[ServedCall] = weakref.WeakSet()
        self._noting = threading.Lock()
        self._stopping = threading.Event()
        self._watch = threading.Thread(target=self._end_stalled_calls, name="stalled-calls", daemon=True)
        options = (*OPTIONS, ("grpc.max_allowed_incoming_connections", connections_max()))
        self._server = grpc.server(self._pool, options=options)
        self._health = health.HealthServicer()
        self._status = health_pb2.HealthCheckResponse.NOT_SERVING
        names = [f"{PACKAGE}.{service.name}" for service in services]
        for service, name in zip(services, names, strict=True):
            handlers = {method.name: self._handler_of(method, handler) for method, handler in service.handlers.items()}
            self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))
        self._server.add_generic_rpc_handlers((self._health_handler(),))
        reflection.enable_server_reflection([*names, health.SERVICE_NAME, reflection.SERVICE_NAME], self._server)
        self._names = ("", *names)
        self._started = False
        try:
            if security is None:
                self.port = self._server.add_insecure_port(bind)
            else:
                self.port = self._server.add_secure_port(bind, security.for_grpc())
        except RuntimeError:
            self.port = 0
        if self.port == 0:
            self._pool.shutdown(wait=False)
            raise errors.AddressInUse(f"cannot listen on {bind}")
        self.address = f"{host}:{self.port}"

    def start(self) -> None:
        """Starts to serve. Health says NOT_SERVING until `set_ready`."""
        self.set_ready(ready=False)
        self._begin()

    def set_ready(self, *, ready: bool) -> None:
        served = health_pb2.HealthCheckResponse
        self._status = served.SERVING if ready else served.NOT_SERVING
        for name in self._names:
            self._health.set(name, self._status)

    def revoke(self, holders: frozenset[str]) -> None:
        """From now on the certificates of these members (role/name) are refused, and their open calls end."""
        if self._door is not None:
            self._door.revoked = holders
        for call in self._open_calls():
            if call.caller in holders:
                call.cancel()

    def _note(self, call: ServedCall) -> None:
        with self._noting:
            self._calls.add(call)

    def _open_calls(self) -> list[ServedCall]:
        with self._noting:
            return list(self._calls)

    def _end_stalled_calls(self) -> None:
        while not self._stopping.wait(grpc_private.STALL_S / 4):
            for call in self._open_calls():
                call.cancel_if_stalled()
                call.end_if_delayed()

    def stop(self, grace_ms: int = 500) -> None:
        """Takes no new calls, gives running calls `grace_ms` to end, and waits for all threads."""
        self.set_ready(ready=False)
        self._health.enter_graceful_shutdown()
        if not self._started:
            self._begin()  # gRPC frees the port only of a server that was started
        wait_registry = WaitRegistry()
        try:
            with wait_registry.over(lambda: f"the calls that {self.address} still serves to end"):
                self._server.stop(grace_ms / 1000).wait()
                self._pool.shutdown(wait=True)
                self._threads.close()
                self._vital_threads.close()
                self._stopping.set()
                self._watch.join()
        finally:
            wait_registry.close()

    def _begin(self) -> None:
        self._server.start()
        self._watch.start()
        self._started = True

    def _handler_of(self, method: Method[Any, Any], handler: Handler) -> grpc.RpcMethodHandler[Any, Any]:
        is_vital = method.path in self._vital or method == _CHECK_HEALTH
        door = None if method == _CHECK_HEALTH else self._door  # everybody of the yard may ask
        threads = self._vital_threads if is_vital else self._threads
        counted = contextlib.nullcontext if is_vital or door is None else door.call_of
        if TRIED:
            return _call_handler(method, handler, threads, door, counted, self._at_first, self._malformed, self._note)
        return _grpc_handler(method, handler, door, counted)

    def _health_handler(self) -> grpc.GenericRpcHandler[Any, Any]:
        """Check is served as the vital methods are: callers that take all other threads do not make this process look
        dead. Watch is gRPC's own."""
        watch = grpc.unary_stream_rpc_method_handler(
            self._health.Watch,
            request_deserializer=health_pb2.HealthCheckRequest.FromString,
            response_serializer=health_pb2.HealthCheckResponse.SerializeToString,
        )
        handlers = {_CHECK_HEALTH.name: self._handler_of(_CHECK_HEALTH, self._check_health), "Watch": watch}
        return grpc.method_handlers_generic_handler(health.SERVICE_NAME, handlers)

    def _check_health(self, request: health_pb2.HealthCheckRequest, _: Context) -> health_pb2.HealthCheckResponse:
        if request.service not in self._names:
            raise errors.NotFound(f"{self.address} has no service {request.service!r}")
        return health_pb2.HealthCheckResponse(status=self._status)


def _refusal(host: str, port: int) -> errors.ShardyardError | None:
    """The error if the port cannot be used. gRPC does not say why, so this tries a plain socket first."""
    what = f"cannot listen on {host}:{port}"
    try:
        family, kind, number, _, where = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, number) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return errors.AddressInUse(what)
        return errors.ConfigurationError(
            f"{what}: {error.strerror}", todo="give an address of this machine, for example 127.0.0.1:0"
        )
    return None


Counted = Callable[[Any], contextlib.AbstractContextManager[None]]
"""As Door.call_of."""


def _grpc_handler(
    method: Method[Any, Any], handler: Handler, door: Door | None, counted: Counted
) -> grpc.RpcMethodHandler[Any, Any]:
    def run(sent: Any, call: grpc.ServicerContext) -> Iterator[bytes]:
        try:
            context, id_ = _context_of(method, call, door)
            with counted(context.speaker):
                for answer in serve(method, handler, sent, context, id_):
                    if answer is not None:
                        yield answer
        except errors.ShardyardError as error:
            call.set_trailing_metadata(((DETAIL_KEY, to_detail(error).SerializeToString()),))
            call.abort(status_of(error), status_text(error))

    def run_once(sent: Any, call: grpc.ServicerContext) -> bytes:
        answers = list(run(sent, call))
        return answers[0]

    if method.streams_out:
        kind = grpc.stream_stream_rpc_method_handler if method.streams_in else grpc.unary_stream_rpc_method_handler
        return kind(run)
    once = grpc.stream_unary_rpc_method_handler if method.streams_in else grpc.unary_unary_rpc_method_handler
    return once(run_once)


def _call_handler(
    method: Method[Any, Any],
    handler: Handler,
    threads: CallThreads,
    door: Door | None,
    counted: Counted,
    at_first: InThisThread,
    malformed: RequestRates,
    note: Callable[[ServedCall], None],
) -> grpc.RpcMethodHandler[Any, Any]:
    """Handles a method of any kind. A call has a thread only while its handler runs, and none before its first message
    is whole. `malformed`: how many malformed messages of a caller are refused at once. `note` gets each call that is
    served."""

    streams = method.streams_in and method.streams_out

    def run(_: Any, call: grpc.ServicerContext, __: Callable[[None], None]) -> None:
        served = ServedCall(
            call, threads, holds_back=streams or not method.streams_out, may_be_empty=method.streams_in and not streams
        )
        note(served)

        def offer(at_once: AtOnce) -> None:
            scope = contextvars.copy_context()
            served.at_once = lambda message: scope.run(serve_at_once, method, at_once, message)

        def answers() -> Generator[bytes | None, None, None]:
            try:
                context, id_ = _context_of(method, call, door, offer)
                served.caller = "" if context.speaker is None else holder_of(context.speaker.identity)
                served.until_over.enter_context(counted(context.speaker))
                yield None
                requests = served.requests()
                if method.streams_in:
                    yield from serve(method, handler, requests, context, id_)
                elif (sent := next(requests, None)) is not None and call.is_active():
                    yield from serve(method, handler, sent, context, id_)
            except errors.ShardyardError as error:
                served.is_delayed = isinstance(error, errors.MalformedPayload) and not malformed.admits(served.caller)
                call.set_trailing_metadata(((DETAIL_KEY, to_detail(error).SerializeToString()),))
                call.set_code(status_of(error))
                call.set_details(status_text(error))

        served.serve(answers())

    run.experimental_non_blocking = True  # type: ignore[attr-defined]  # the call goes on after `run` has returned
    run.experimental_thread_pool = at_first  # type: ignore[attr-defined]
    return grpc.stream_stream_rpc_method_handler(run)


def _auth_context(call: Any) -> Mapping[str, Iterable[bytes]]:
    found: Mapping[str, Iterable[bytes]] = call.auth_context()  # grpc-stubs says bytes for each
    return found


def _context_of(
    method: Method[Any, Any],
    call: grpc.ServicerContext,
    door: Door | None,
    offer: Callable[[AtOnce], None] = lambda _: None,
) -> tuple[Context, str]:
    """The context of a call, and its request's id. Raises what the door does."""
    metadata = dict(call.invocation_metadata())
    shown = metadata.get(PASS_KEY, b"")
    speaker: Speaker | None = None
    if door is not None:
        try:
            speaker = door.admit(method, _auth_context(call), bytes(shown))  # type: ignore[arg-type]
        except (errors.NotTrusted, errors.NotPermitted) as error:
            door.on_refused(method.path, call.peer(), error.what)
            raise
    context = Context(peer=call.peer(), is_active=call.is_active, offer=offer, speaker=speaker)
    return context, str(metadata.get(REQUEST_ID_KEY, ""))
