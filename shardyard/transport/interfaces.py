"""The interfaces for calls between processes, over any network.

The caller uses `Peer` and `Network`; the other side uses `Service` and `Context`. There are two implementations, gRPC
(shardyard.transport.grpc_client, .grpc_server) and in process (.in_process). They pass the same contract tests.
"""

from __future__ import annotations

import contextvars
import itertools
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

from shardyard.domain import errors
from shardyard.security.credentials import Credentials
from shardyard.security.passes import Speaker
from shardyard.wire.method import Method

Request = TypeVar("Request")
Response = TypeVar("Response")

REQUEST_ID_KEY = "shardyard-request-id"
PASS_KEY = "shardyard-pass-bin"  # noqa: S105 - a name
request_id: contextvars.ContextVar[str] = contextvars.ContextVar("shardyard_request_id", default="")
"""The id of the request that is served. Calls that are made for it carry the same id, and logs show it."""

_numbers = itertools.count(1)


def next_request_id() -> str:
    """The id for an outgoing request: the id of the request being served, or a new one."""
    return request_id.get() or f"{os.getpid():x}-{next(_numbers):x}"


AtOnce = Callable[[Any], Any]
"""Answers a request that comes while the handler waits for the next one. Returns None if the answer would take more
than a moment, or fails; the handler then serves the request. It is called by the thread that receives for all calls."""


class LocalAddress(NamedTuple):
    """A local socket, and what the caller sends over it first; empty: nothing."""

    address: str
    key: bytes = b""


class Descriptors(Protocol):
    """File descriptors that travel beside the messages of a stream, in order. They end with the stream."""

    def pass_descriptors(self, descriptors: Iterable[int]) -> None:
        """Sends descriptors beside the next message, and closes them here."""
        ...

    def take_descriptor(self) -> int | None:
        """Returns the first that has come and was not taken; None: there is none. The caller closes it."""
        ...


@dataclass(frozen=True)
class Context:
    """What a handler may know about the call that it serves."""

    peer: str
    """The address of the caller, for logs; "in-process" if it has none."""
    is_active: Callable[[], bool]
    """Returns False after the caller has disconnected or its deadline has passed."""
    offer: Callable[[AtOnce], None] = lambda _: None
    """A handler with streams in both directions may offer an AtOnce. The network may use it."""
    descriptors: Descriptors | None = None
    """None: this network carries no descriptors."""
    speaker: Speaker | None = None
    """The caller, by its certificate and its pass. None: this network has no certificates."""


class Stream(Protocol):
    """An open call of a method with a stream of requests and a stream of answers. Only one thread may use it; any
    thread may call `cancel`."""

    @property
    def descriptors(self) -> Descriptors | None:
        """None: this network carries no descriptors."""
        ...

    def send(self, requests: Iterable[Any], *, answered: bool = True) -> None:
        """Sends requests in order. `answered`: the next answer belongs to the last of them. Their arrays must not
        change before the answer comes, since requests may be encoded while they are sent."""
        ...

    def receive(self, *, timeout_ms: int) -> Any:
        """Returns the next answer; None if the other side ended the stream without an error. Raises the error that the
        peer raised, DeadlineExceeded, or a subclass of Unavailable; after that the stream cannot be used."""
        ...

    def cancel(self) -> None:
        """Ends the stream. A `receive` that is waiting raises Unavailable."""
        ...


class Peer(Protocol):
    """A process that can be called. Every call has a deadline. A call that fails raises the error that the peer raised,
    or a subclass of Unavailable if there was no answer."""

    @property
    def name(self) -> str: ...

    @property
    def credentials(self) -> Credentials | None:
        """What this process shows to the peer. None: this network has no certificates."""
        ...

    def call(self, method: Method[Request, Response], request: Request, *, timeout_ms: int) -> Response: ...

    def send(self, method: Method[Request, Response], requests: Iterable[Request], *, timeout_ms: int) -> Response: ...

    def receive(
        self, method: Method[Request, Response], request: Request, *, timeout_ms: int
    ) -> Iterator[Response]: ...

    def open(self, method: Method[Any, Any], *, timeout_ms: int, socket: LocalAddress | None = None) -> Stream:
        """Opens a stream. `timeout_ms`: how long it may take to send one request. `socket`: the peer's local socket,
        which is to carry the stream. Raises NotShareable if this process cannot reach that."""
        ...

    def close(self) -> None: ...


class Network(Protocol):
    job_pass: bytes
    """What calls of this process show to servers (shardyard.security.passes); empty: nothing."""

    def connect(
        self, address: str, *, name: str, unavailable: type[errors.Unavailable] = errors.ServerUnavailable
    ) -> Peer:
        """A peer at HOST:PORT. It connects at the first call. `name`: the peer's role, which its certificate must be
        for, and what tells it from others, such as "coordinator" or "server 3"; errors name it so."""
        ...


class Pause(ABC):
    """What a handler with streams in both directions may yield while it waits for something that another call does. It
    goes on when that has happened, or at `until` (time.monotonic), in any thread."""

    until: float

    @abstractmethod
    def begin(self, go_on: Callable[[], None]) -> bool:
        """Returns False if nothing has to be waited for. Otherwise `go_on` is called once, by the thread that has done
        it, or has done a part of it: the handler then looks again."""

    @abstractmethod
    def end(self) -> None:
        """`go_on` is not called from now on, unless another thread is about to."""

    @abstractmethod
    def wait(self) -> None:
        """Waits in this thread."""


class UntilPause(Pause):
    """Ends at `until` (time.monotonic)."""

    def __init__(self, until: float) -> None:
        self.until = until

    def begin(self, go_on: Callable[[], None]) -> bool:
        del go_on
        return True

    def end(self) -> None:
        pass

    def wait(self) -> None:
        time.sleep(max(0.0, self.until - time.monotonic()))


Handler = Callable[[Any, Context], Any]


@dataclass
class Service:
    """Handlers by method. A handler takes the request (or an iterator of requests) and a Context, and returns the
    answer (or an iterator of answers). It raises a ShardyardError to refuse a request.

    A handler with streams in both directions yields None before it asks for the first message of a request. The call
    may have no thread until that message is there, and the handler may go on in another thread. It may also yield a
    Pause."""

    name: str
    handlers: dict[Method[Any, Any], Handler] = field(default_factory=dict)

    def on(self, method: Method[Any, Any], handler: Handler) -> None:
        assert method.service.endswith("." + self.name), (method.path, self.name)
        self.handlers[method] = handler
