"""The in-process network: the same bytes through the same handlers, without a socket.

Invariant: requests and answers are encoded and decoded as over gRPC, and errors travel as ErrorDetail, so that a job
in process takes the way that a job over the network takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

from shardyard.ground import errors
from shardyard.transport.peers import Context, Service, next_request_id
from shardyard.transport.serving import serve
from shardyard.transport.status import from_detail, to_detail
from shardyard.wire.methods import Method
from shardyard.wire.v1 import common_pb2 as wire

Request = TypeVar("Request")
Response = TypeVar("Response")


class InProcessNetwork:
    """Peers by address, all in this process. See shardyard.transport.peers.Network."""

    def __init__(self) -> None:
        self._services: dict[str, dict[str, tuple[Method[Any, Any], Any]]] = {}

    def listen(self, address: str, services: Sequence[Service]) -> None:
        """Raises AddressInUse where somebody has the address."""
        if address in self._services:
            raise errors.AddressInUse(f"cannot listen on {address}")
        self._services[address] = {
            method.path: (method, handler) for service in services for method, handler in service.handlers.items()
        }

    def leave(self, address: str) -> None:
        """From now on nobody answers at the address."""
        self._services.pop(address, None)

    def connect(
        self, address: str, *, name: str, unavailable: type[errors.Unavailable] = errors.ServerUnavailable
    ) -> InProcessPeer:
        return InProcessPeer(self, address, name, unavailable)

    def handlers_at(self, address: str) -> dict[str, tuple[Method[Any, Any], Any]] | None:
        return self._services.get(address)


class InProcessPeer:
    def __init__(
        self, network: InProcessNetwork, address: str, name: str, unavailable: type[errors.Unavailable]
    ) -> None:
        self._network = network
        self._address = address
        self._name = name
        self._unavailable = unavailable
        self._closed = False

    @property
    def name(self) -> str:
        return f"{self._name} at {self._address}"

    def call(self, method: Method[Request, Response], request: Request, *, timeout_ms: int) -> Response:
        del timeout_ms
        return next(self._run(method, method.request.encode(request)))

    def send(self, method: Method[Request, Response], requests: Iterable[Request], *, timeout_ms: int) -> Response:
        del timeout_ms
        return next(self._run(method, map(method.request.encode, requests)))

    def receive(self, method: Method[Request, Response], request: Request, *, timeout_ms: int) -> Iterator[Response]:
        del timeout_ms
        return self._run(method, method.request.encode(request))

    def exchange(
        self, method: Method[Request, Response], requests: Iterable[Request], *, timeout_ms: int
    ) -> Iterator[Response]:
        del timeout_ms
        return self._run(method, map(method.request.encode, requests))

    def close(self) -> None:
        self._closed = True

    def _run(self, method: Method[Any, Response], sent: bytes | Iterable[bytes]) -> Iterator[Response]:
        services = None if self._closed else self._network.handlers_at(self._address)
        if services is None:
            raise self._unavailable(f"{self.name} does not answer (nobody is there)")
        if method.path not in services:
            raise errors.ProtocolMismatch(f"{self.name} does not know this method ({method.path})")
        known, handler = services[method.path]
        context = Context(peer="in-process", is_active=lambda: True)
        try:
            for answer in serve(known, handler, sent, context, next_request_id()):
                yield method.response.decode(answer)
        except errors.ShardyardError as error:
            data = to_detail(error).SerializeToString()
            raise from_detail(wire.ErrorDetail.FromString(data)) from None
