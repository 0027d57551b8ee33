"""How one role calls another, and how it is called, over any network.

Owns: `Peer` and `Network` (the caller's side), `Service` and `Context` (the other side). Two implementations, grpc
(shardyard.transport.grpc_client, .grpc_server) and in process (.in_process), pass the same contract tests.
"""

from __future__ import annotations

import contextvars
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from shardyard.domain import errors
from shardyard.wire.method import Method

Request = TypeVar("Request")
Response = TypeVar("Response")

REQUEST_ID_KEY = "shardyard-request-id"
request_id: contextvars.ContextVar[str] = contextvars.ContextVar("shardyard_request_id", default="")
"""Id of the request being served, passed on to the calls made for it; logs show it."""

_numbers = itertools.count(1)


def next_request_id() -> str:
    """The id for an outgoing request: the id of the request being served, or a new one."""
    return request_id.get() or f"{os.getpid():x}-{next(_numbers):x}"


AtOnce = Callable[[Any], Any]
"""The one answer to a request that comes while the handler waits for the next; None where it takes more than a moment,
and where it fails: then the request is served as any other. Called by the thread that receives for everybody."""


@dataclass(frozen=True)
class Context:
    """What a handler may know of the call it serves."""

    peer: str
    """The caller's address, for logs; "in-process" where there is none."""
    is_active: Callable[[], bool]
    """False once the caller has gone or its deadline has passed."""
    offer: Callable[[AtOnce], None] = lambda _: None
    """A handler of streams both ways may offer a second way to an answer, which the network may use or not."""


class Stream(Protocol):
    """A method with a stream of requests and one of answers, kept open: requests go out and answers come in for as long
    as both sides want. For one thread; `cancel` for any."""

    def send(self, requests: Iterable[Any], *, answered: bool = True) -> None:
        """Sends requests in order. `answered`: the next answer belongs to the last of them. Requests may be encoded
        while they are sent, so their arrays must not change before the answer."""
        ...

    def receive(self, *, timeout_ms: int) -> Any:
        """The next answer; None if the other side has ended the stream in good order. Raises the error that the
        peer raised, DeadlineExceeded, or a subclass of Unavailable; after an error the stream is of no use."""
        ...

    def cancel(self) -> None:
        """Ends the stream; a `receive` under way raises Unavailable."""
        ...


class Peer(Protocol):
    """A process that can be called. Every call has a deadline. A failed call raises the error that the peer raised, or
    a subclass of Unavailable if there was no answer."""

    @property
    def name(self) -> str: ...

    def call(self, method: Method[Request, Response], request: Request, *, timeout_ms: int) -> Response: ...

    def send(self, method: Method[Request, Response], requests: Iterable[Request], *, timeout_ms: int) -> Response: ...

    def receive(
        self, method: Method[Request, Response], request: Request, *, timeout_ms: int
    ) -> Iterator[Response]: ...

    def exchange(
        self, method: Method[Request, Response], requests: Iterable[Request], *, timeout_ms: int
    ) -> Iterator[Response]: ...

    def open(self, method: Method[Any, Any], *, timeout_ms: int) -> Stream:
        """`timeout_ms`: how long one request may take to be on its way."""
        ...

    def close(self) -> None: ...


class Network(Protocol):
    def connect(
        self, address: str, *, name: str, unavailable: type[errors.Unavailable] = errors.ServerUnavailable
    ) -> Peer:
        """A peer at HOST:PORT. Connects at the first call. `name`: the peer's name in errors."""
        ...


Handler = Callable[[Any, Context], Any]


@dataclass
class Service:
    """Handlers by method. A handler takes the request (or an iterator of requests) and a Context, and gives the answer
    (or an iterator of answers); it raises ShardyardError for what it refuses."""

    name: str
    handlers: dict[Method[Any, Any], Handler] = field(default_factory=dict)

    def on(self, method: Method[Any, Any], handler: Handler) -> None:
        assert method.service.endswith("." + self.name), (method.path, self.name)
        self.handlers[method] = handler
