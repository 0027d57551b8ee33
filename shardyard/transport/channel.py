"""Calling others over gRPC.

Invariants: every call has a deadline; the channel never retries anything (it once applied a push twice), retries are
the caller's, who knows the names of the work.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import grpc

from shardyard.ground import errors
from shardyard.ground.limits import MESSAGE_BYTES_MAX
from shardyard.transport.peers import REQUEST_ID_KEY, next_request_id
from shardyard.transport.status import from_rpc_error
from shardyard.wire.methods import Method

Request = TypeVar("Request")
Response = TypeVar("Response")

OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
    # a frozen peer is noticed after keepalive_time + ping_timeout; without the latter after a minute
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)


class GrpcPeer:
    """A peer at HOST:PORT, on a channel of its own. Safe for several threads."""

    def __init__(self, address: str, *, name: str, unavailable: type[errors.Unavailable]) -> None:
        self._address = address
        self._name = name
        self._unavailable = unavailable
        self._channel = grpc.insecure_channel(address, options=OPTIONS)
        self._stubs: dict[str, Any] = {}

    @property
    def name(self) -> str:
        return f"{self._name} at {self._address}"

    def call(self, method: Method[Request, Response], request: Request, *, timeout_ms: int) -> Response:
        return self._once(method, request, timeout_ms)

    def send(self, method: Method[Request, Response], requests: Iterable[Request], *, timeout_ms: int) -> Response:
        return self._once(method, iter(requests), timeout_ms)

    def receive(self, method: Method[Request, Response], request: Request, *, timeout_ms: int) -> Iterator[Response]:
        return self._stream(method, request, timeout_ms)

    def exchange(
        self, method: Method[Request, Response], requests: Iterable[Request], *, timeout_ms: int
    ) -> Iterator[Response]:
        return self._stream(method, iter(requests), timeout_ms)

    def close(self) -> None:
        self._channel.close()

    def _once(self, method: Method[Any, Response], sent: object, timeout_ms: int) -> Response:
        try:
            answer: bytes = self._begin(method, sent, timeout_ms)
        except grpc.RpcError as error:
            raise self._failure(method, error) from None
        return method.response.decode(answer)

    def _stream(self, method: Method[Any, Response], sent: object, timeout_ms: int) -> Iterator[Response]:
        call = self._begin(method, sent, timeout_ms)
        try:
            for answer in call:
                yield method.response.decode(answer)
        except grpc.RpcError as error:
            raise self._failure(method, error) from None
        finally:
            call.cancel()

    def _begin(self, method: Method[Any, Any], sent: object, timeout_ms: int) -> Any:
        try:
            return self._stub(method)(sent, timeout=timeout_ms / 1000, metadata=((REQUEST_ID_KEY, next_request_id()),))
        except ValueError as error:  # gRPC's word for a channel that was closed
            raise self._unavailable(f"{self.name} does not answer ({error})") from None

    def _failure(self, method: Method[Any, Any], error: grpc.RpcError) -> errors.ShardyardError:
        return from_rpc_error(error, peer=self.name, path=method.path, unavailable=self._unavailable)

    def _stub(self, method: Method[Any, Any]) -> Any:
        stub = self._stubs.get(method.path)
        if stub is None:
            kind = (
                ("unary_unary", "unary_stream"),
                ("stream_unary", "stream_stream"),
            )[method.streams_in][method.streams_out]
            stub = self._stubs[method.path] = getattr(self._channel, kind)(
                method.path,
                # answers are decoded by the caller, whose error would be lost in here
                request_serializer=method.request.encode,
            )
        return stub


class GrpcNetwork:
    """Reaches peers by their addresses. See shardyard.transport.peers.Network."""

    def connect(
        self, address: str, *, name: str, unavailable: type[errors.Unavailable] = errors.ServerUnavailable
    ) -> GrpcPeer:
        return GrpcPeer(address, name=name, unavailable=unavailable)
