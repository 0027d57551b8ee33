"""The network within one process: the same bytes and the same handlers, without a socket.

Invariant: requests and answers are encoded and decoded as over gRPC, and errors travel as ErrorDetail, so that a job in
one process runs the same code as a job over the network.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from shardyard.domain import errors
from shardyard.transport.dispatch import serve
from shardyard.transport.error_codes import from_detail, to_detail
from shardyard.transport.interfaces import Context, LocalAddress, Service, next_request_id
from shardyard.wire.method import Method
from shardyard.wire.v1 import common_pb2 as wire

Request = TypeVar("Request")
Response = TypeVar("Response")


class InProcessNetwork:
    """Connects peers of this process by address. See shardyard.transport.interfaces.Network."""

    job_pass = b""

    def __init__(self) -> None:
        self._services: dict[str, dict[str, tuple[Method[Any, Any], Any]]] = {}

    def listen(self, address: str, services: Sequence[Service]) -> None:
        """Raises AddressInUse if the address is taken."""
        if address in self._services:
            raise errors.AddressInUse(f"cannot listen on {address}")
        self._services[address] = {
            method.path: (method, handler) for service in services for method, handler in service.handlers.items()
        }

    def leave(self, address: str) -> None:
        """Stops serving the address. Later calls to it fail."""
        self._services.pop(address, None)

    def connect(
        self, address: str, *, name: str, unavailable: type[errors.Unavailable] = errors.ServerUnavailable
    ) -> InProcessPeer:
        return InProcessPeer(self, address, name, unavailable)

    def handlers_at(self, address: str) -> dict[str, tuple[Method[Any, Any], Any]] | None:
        return self._services.get(address)


class InProcessPeer:
    credentials = None

    def __init__(
        self, network: InProcessNetwork, address: str, name: str, unavailable: type[errors.Unavailable]
    ) -> None:
        self._network = network
        self._address = address
        self._name = name
        self.unavailable = unavailable
        self._closed = False

    @property
    def name(self) -> str:
        return f"{self._name} at {self._address}"

    def call(self, method: Method[Request, Response], request: Request, *, timeout_ms: int) -> Response:
        del timeout_ms
        return next(self.run(method, method.request.encode(request)))

    def send(self, method: Method[Request, Response], requests: Iterable[Request], *, timeout_ms: int) -> Response:
        del timeout_ms
        return next(self.run(method, map(method.request.encode, requests)))

    def receive(self, method: Method[Request, Response], request: Request, *, timeout_ms: int) -> Iterator[Response]:
        del timeout_ms
        return self.run(method, method.request.encode(request))

    @property
    def is_gone(self) -> bool:
        return self._closed or self._network.handlers_at(self._address) is None

    def open(self, method: Method[Any, Any], *, timeout_ms: int, socket: LocalAddress | None = None) -> InProcessStream:
        del timeout_ms, socket
        return InProcessStream(self, method)

    def close(self) -> None:
        self._closed = True

    def run(
        self,
        method: Method[Any, Response],
        sent: bytes | Iterable[bytes],
        descriptors: InProcessDescriptors | None = None,
    ) -> Generator[Response, None, None]:
        services = None if self._closed else self._network.handlers_at(self._address)
        if services is None:
            raise self.unavailable(f"{self.name} does not answer (no process listens there)")
        if method.path not in services:
            raise errors.ProtocolMismatch(f"{self.name} does not know this method ({method.path})")
        known, handler = services[method.path]
        context = Context(peer="in-process", is_active=lambda: True, descriptors=descriptors)
        try:
            for answer in serve(known, handler, sent, context, next_request_id()):
                if answer is not None:
                    yield method.response.decode(answer)
        except errors.ShardyardError as error:
            data = to_detail(error).SerializeToString()
            raise from_detail(wire.ErrorDetail.FromString(data)) from None


class InProcessDescriptors:
    """One end of a pair: what is passed at the one end is taken at the other."""

    def __init__(self) -> None:
        self._come: deque[int] = deque()
        self.other = self

    @staticmethod
    def pair() -> tuple[InProcessDescriptors, InProcessDescriptors]:
        one, other = InProcessDescriptors(), InProcessDescriptors()
        one.other, other.other = other, one
        return one, other

    def pass_descriptors(self, descriptors: Iterable[int]) -> None:
        self.other._come.extend(descriptors)

    def take_descriptor(self) -> int | None:
        return self._come.popleft() if self._come else None

    def close(self) -> None:
        """Closes what was not taken at either end."""
        for end in (self, self.other):
            while end._come:
                os.close(end._come.popleft())


class InProcessStream:
    """A stream whose handler runs in the thread that waits for its answer, and only then. So all requests of an
    exchange must be sent before its answer is asked for."""

    def __init__(self, peer: InProcessPeer, method: Method[Any, Any]) -> None:
        self._encode = method.request.encode
        self._waiting: deque[Iterator[Any]] = deque()
        self._cancelled = False
        self._peer = peer
        self.descriptors, there = InProcessDescriptors.pair()
        self._answers = peer.run(method, self._requests(), there)

    def _requests(self) -> Iterator[bytes]:
        while not self._cancelled:
            assert self._waiting, "an answer was asked for before its request was sent"
            yield from map(self._encode, self._waiting.popleft())

    def send(self, requests: Iterable[Any], *, answered: bool = True) -> None:
        del answered
        self._waiting.append(iter(requests))

    def receive(self, *, timeout_ms: int) -> Any:
        del timeout_ms
        if self._cancelled:
            raise self._peer.unavailable("the stream was cancelled")
        if self._peer.is_gone:
            self.cancel()
            raise self._peer.unavailable(f"{self._peer.name} does not answer (it has left)")
        return next(self._answers, None)

    def cancel(self) -> None:
        self._cancelled = True
        with contextlib.suppress(ValueError):  # another thread waits for an answer, and will get it
            self._answers.close()
            self.descriptors.close()
