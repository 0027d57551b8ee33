"""The network: encoded messages that take time, get lost, or come twice or late, through the shipped handlers.

It keeps what a gRPC connection guarantees: messages of one call come in order, a call that was answered was served, and
each wait for an answer has a deadline. The seed decides all else: how long a message takes, and so which of two calls
comes first; connections that break, before or after a call was served; links that are silently dead in one direction
for a while, and deliver later what they were given; calls that come a second time, long after.

A call carries the identity of its caller, as a certificate of TLS would, and its pass. The shipped door of the listener
decides whether it is admitted.

Owns: which process listens where, calls under way, the state of links. Invariants: what travels is bytes, encoded and
decoded by the methods' own codecs. A process that has ended sends nothing more. Must not know: what the messages mean.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Collection, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shardyard.domain import errors
from shardyard.security.door import Door
from shardyard.security.identity import Identity
from shardyard.transport.dispatch import serve, serve_at_once
from shardyard.transport.error_codes import from_detail, to_detail
from shardyard.transport.grpc_server import _context_of
from shardyard.transport.interfaces import PASS_KEY, REQUEST_ID_KEY, LocalAddress, Service
from shardyard.wire.method import Method
from shardyard.wire.v1 import common_pb2 as wire

from .world import MS, SECOND, Process, Task, World, current

LATE_MAX = 15 * SECOND
"""How much later a second copy of a call may come."""
HEARD_CALLS_MAX = 5
"""How many calls of one caller and method are remembered, if somebody listens."""
HEARD_MAX = 20
"""How many requests of one call are remembered."""


@dataclass(frozen=True)
class Weather:
    """The probabilities of faults, for each message."""

    lost: float = 0.0
    """The connection breaks, and the message is lost."""
    slow: float = 0.0
    """The message takes up to `slow_max`."""
    twice: float = 0.0
    """For each call: a copy of it comes later."""
    slow_max: int = 1 * SECOND


class Shown(NamedTuple):
    """What a caller shows. `identity`: of its certificate; None: this yard has none."""

    identity: Identity | None
    job_pass: bytes


class Overheard(NamedTuple):
    """A call that was sent, and its first requests. `caller`: its host."""

    caller: str
    method: Method[Any, Any]
    address: str
    shown: Shown
    sent: list[bytes]


@dataclass(frozen=True)
class Listener:
    """`door`: None without certificates. `vital`: as in GrpcServer."""

    process: Process
    handlers: dict[str, tuple[Method[Any, Any], Any]]
    door: Door | None
    vital: frozenset[str]
    served: dict[Call, None] = field(default_factory=dict)

    def revoke(self, holders: frozenset[str]) -> None:
        """As GrpcServer.revoke."""
        if self.door is not None:
            self.door.revoked = holders
        for call in list(self.served):
            if call.shown.identity is not None and call.shown.identity.holder in holders:
                call.break_off()


class Wires:
    """All links and listeners of a world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.weather = Weather()
        self.dead_links: set[tuple[str, str]] = set()
        self.calls = 0
        self.overheard: dict[tuple[str, Method[Any, Any]], deque[Overheard]] | None = None
        """The newest calls of each caller and method, if somebody listens."""
        self._stuck: dict[tuple[str, str], list[Any]] = {}
        self._listeners: dict[str, Listener] = {}

    def listen(self, address: str, services: Sequence[Service], door: Door | None, vital: Collection[str]) -> None:
        process = current().process
        handlers = {
            method.path: (method, handler) for service in services for method, handler in service.handlers.items()
        }
        listener = self._listeners[address] = Listener(process, handlers, door, frozenset(vital))

        def gone() -> None:
            if self._listeners.get(address) is listener:
                del self._listeners[address]

        process.at_end[gone] = None

    def leave(self, address: str) -> None:
        self._listeners.pop(address, None)

    def at(self, address: str) -> Listener | None:
        return self._listeners.get(address)

    def delay(self) -> int:
        rng = self.world.rng
        if not self.world.calm and rng.random() < self.weather.slow:
            return rng.randrange(self.weather.slow_max)
        return 50 + int(rng.expovariate(1 / 250))

    def loses(self) -> bool:
        return not self.world.calm and self.world.rng.random() < self.weather.lost

    def repeats(self) -> bool:
        return not self.world.calm and self.world.rng.random() < self.weather.twice

    def kill_link(self, source: str, target: str) -> None:
        self.dead_links.add((source, target))

    def mend_link(self, source: str, target: str) -> None:
        """Delayed messages arrive now, unless their connection has broken meanwhile."""
        self.dead_links.discard((source, target))
        for call, deliver in self._stuck.pop((source, target), ()):
            if not self.world.calm and self.world.rng.random() < 0.3:
                call.break_off()
            elif not call.broken:
                deliver()  # before what comes after it

    def carry(self, call: Call, source: str, target: str, after: int, deliver: Any) -> None:
        def arrive() -> None:
            if (source, target) in self.dead_links:
                self._stuck.setdefault((source, target), []).append((call, deliver))
            else:
                deliver()

        self.world.call(after, arrive)


class Call:
    """Both ends of one call. `caller` None: a copy, whose answers are dropped."""

    def __init__(
        self,
        wires: Wires,
        method: Method[Any, Any],
        address: str,
        caller: Process,
        shown: Shown,
        *,
        is_copy: bool,
    ) -> None:
        self.wires = wires
        self.shown = shown
        self.world = wires.world
        self.method = method
        self.address = address
        self.caller = caller
        self.is_copy = is_copy
        self.number = wires.calls
        wires.calls += 1
        # the caller's end
        self.inbox: deque[tuple[str, Any]] = deque()
        self.waiting: Task | None = None
        self.closed = False
        self.broken = False
        # the server's end
        self.server: Process | None = None
        self.arrived: deque[bytes] = deque()
        self.reader: Task | None = None
        self.ended = False
        self.gone = False
        self.at_once: Any = None
        self._busy = False
        self._there_at = self._back_at = 0
        self.target = address.rpartition(":")[0]
        self._heard: list[bytes] = []
        if not is_copy:
            caller.at_end[self._caller_has_ended] = None
            if wires.overheard is not None:
                calls = wires.overheard.setdefault((caller.host, method), deque(maxlen=HEARD_CALLS_MAX))
                calls.append(Overheard(caller.host, method, address, shown, self._heard))

    # ---- from the caller to the server

    def send(self, data: bytes) -> None:
        world = self.world
        world.note(data)
        if self.wires.overheard is not None and len(self._heard) < HEARD_MAX:
            self._heard.append(data)
        if self.broken:
            return
        if self.wires.loses():
            self.break_off()
            return
        self._go(lambda: self._arrive(data))

    def end(self) -> None:
        """No more requests."""
        self._go(self._no_more)

    def cancel(self) -> None:
        """The caller has cancelled the call."""
        if not self.closed:
            self.closed = True
            self._forget()
            if not self.broken:
                self._go(self._caller_is_gone)
            if self.waiting is not None:
                self.world.wake(self.waiting)

    def break_off(self) -> None:
        """The connection is broken. Each end notices at its own time."""
        if self.broken:
            return
        self.broken = True
        world, rng = self.world, self.world.rng
        world.call(rng.randrange(300 * MS), self._caller_is_gone)
        world.call(rng.randrange(300 * MS), lambda: self._give(("lost", "connection reset")), self.caller)

    def _go(self, deliver: Any) -> None:
        at = max(self.world.now + self.wires.delay(), self._there_at)
        self._there_at = at
        self.wires.carry(self, self.caller.host, self.target, at - self.world.now, deliver)

    def _arrive(self, data: bytes) -> None:
        found = self.wires.at(self.address)
        if self.server is None:
            if found is None:
                self._back(("lost", "nobody is there"))
                return
            # a process that is frozen gets what the kernel has taken for it when it wakes
            self.server = found.process
            self.server.spawn(lambda: self._serve(found), f"serve-{self.number}-{self.method.name}")
            self.server.at_end[self._server_has_ended] = None
        if self.server.alive:
            self.arrived.append(data)
            self._look()

    def _no_more(self) -> None:
        self.ended = True
        if self.server is not None and self.server.alive:
            self._look()

    def _caller_is_gone(self) -> None:
        self.gone = True
        self._no_more()

    def _caller_has_ended(self) -> None:
        if not self.closed:
            self.closed = True
            self._go(self._caller_is_gone)

    def _server_has_ended(self) -> None:
        self.world.call(self.wires.delay(), lambda: self._give(("lost", "connection reset")), self.caller)

    # ---- at the server

    def _look(self) -> None:
        if self.reader is None or self._busy:
            return
        assert self.server is not None
        if self.at_once is not None and self.arrived and self.world.rng.random() < 0.7:
            self._busy = True
            self.server.spawn(self._poll, f"poll-{self.number}")
        else:
            reader, self.reader = self.reader, None
            self.world.wake(reader)

    def _poll(self) -> None:
        """Does what the thread does that takes the server's events: answers what it can without waking the handler."""
        while self.arrived and not self.gone:
            answer = serve_at_once(self.method, self.at_once, self.arrived[0])
            if answer is None:
                break
            self.arrived.popleft()
            self._back(("answer", answer))
        self._busy = False
        if (self.arrived or self.ended) and self.reader is not None:
            reader, self.reader = self.reader, None
            self.world.wake(reader)

    def _requests(self) -> Iterator[bytes]:
        while True:
            while not self.arrived:
                if self.ended:
                    return
                self.reader = current()
                self.world.park()
                self.reader = None
            if self.gone:
                return
            yield self.arrived.popleft()

    def _serve(self, listener: Listener) -> None:
        known = listener.handlers.get(self.method.path)
        try:
            if known is None:
                raise errors.ProtocolMismatch(f"no method {self.method.path}")
            method, handler = known
            context, id_ = _context_of(
                method,
                self,  # type: ignore[arg-type]
                listener.door,
                lambda way: setattr(self, "at_once", way),
            )
            listener.served[self] = None
            door = None if method.path in listener.vital else listener.door
            with contextlib.nullcontext() if door is None or context.speaker is None else door.call_of(context.speaker):
                requests = self._requests()
                sent = requests if method.streams_in else next(requests, None)
                if sent is None:
                    return
                # as over gRPC, an answer's error comes after the answers
                for answer in serve(method, handler, sent, context, id_):
                    if answer is not None:
                        self._back(("answer", answer))
            self._back(("end", None))
        except errors.ShardyardError as error:
            self._back(("error", to_detail(error).SerializeToString(deterministic=True)))
        finally:
            self.at_once = None
            listener.served.pop(self, None)
            if self.server is not None:
                self.server.at_end.pop(self._server_has_ended, None)

    # what the listener asks of gRPC's call

    def invocation_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        return (REQUEST_ID_KEY, f"call-{self.number}"), (PASS_KEY, self.shown.job_pass)

    def auth_context(self) -> dict[str, list[bytes]]:
        """What TLS would know of the caller. The URI is in the place of the certificate's bytes too."""
        assert self.shown.identity is not None
        uri = self.shown.identity.uri.encode()
        return {"x509_pem_cert": [uri], "x509_subject_alternative_name": [uri]}

    def peer(self) -> str:
        return "simulated"

    def is_active(self) -> bool:
        return not self.gone

    # ---- from the server to the caller

    def _back(self, item: tuple[str, Any]) -> None:
        if self.closed or self.is_copy or self.broken:
            return
        if isinstance(item[1], bytes):
            self.world.note(item[1])
        if item[0] != "lost" and self.wires.loses():
            self.break_off()
            return
        at = max(self.world.now + self.wires.delay(), self._back_at)
        self._back_at = at
        self.wires.carry(self, self.target, self.caller.host, at - self.world.now, lambda: self._give(item))

    def _give(self, item: tuple[str, Any]) -> None:
        if self.closed or self.is_copy or not self.caller.alive:
            return
        if self.broken and item[0] != "lost":
            return  # what was on its way behind an answer that is lost would be taken for it
        self.inbox.append(item)
        if self.waiting is not None:
            waiting, self.waiting = self.waiting, None
            self.world.wake(waiting)

    # ---- at the caller

    def take(self, timeout: int, peer: SimulatedPeer) -> bytes | None:
        """The next answer; None at the end. Raises what the peer raised, or Unavailable."""
        until = self.world.now + timeout
        while not self.inbox:
            if self.closed:
                raise peer.unavailable("the call was cancelled")
            left = until - self.world.now
            if left <= 0:
                self.cancel()
                raise errors.DeadlineExceeded(f"{peer.name} did not answer {self.method.path} in time")
            self.waiting = current()
            self.world.park(left)
            self.waiting = None
        kind, what = self.inbox.popleft()
        if kind == "answer":
            assert isinstance(what, bytes)
            return what
        self.closed = True
        self._forget()
        if kind == "end":
            return None
        if kind == "error":
            raise from_detail(wire.ErrorDetail.FromString(what)) from None
        raise peer.unavailable(f"{peer.name} does not answer ({what})")

    def _forget(self) -> None:
        self.caller.at_end.pop(self._caller_has_ended, None)


class SimulatedNetwork:
    """The network of one process. See shardyard.transport.interfaces.Network. `identity`: whom its certificate is for;
    None: this yard has none."""

    job_pass = b""

    def __init__(self, wires: Wires, process: Process, identity: Identity | None) -> None:
        self.wires = wires
        self.process = process
        self.identity = identity

    @property
    def shown(self) -> Shown:
        return Shown(self.identity, self.job_pass)

    def connect(
        self, address: str, *, name: str, unavailable: type[errors.Unavailable] = errors.ServerUnavailable
    ) -> SimulatedPeer:
        return SimulatedPeer(self, address, name, unavailable)


class SimulatedPeer:
    credentials = None

    def __init__(
        self, network: SimulatedNetwork, address: str, name: str, unavailable: type[errors.Unavailable]
    ) -> None:
        self._network = network
        self._address = address
        self._name = name
        self.unavailable = unavailable
        self._closed = False
        self._open: dict[Call, None] = {}

    @property
    def name(self) -> str:
        return f"{self._name} at {self._address}"

    def call(self, method: Method[Any, Any], request: Any, *, timeout_ms: int) -> Any:
        return next(self.run(method, [request], timeout_ms))

    def send(self, method: Method[Any, Any], requests: Iterable[Any], *, timeout_ms: int) -> Any:
        return next(self.run(method, requests, timeout_ms))

    def receive(self, method: Method[Any, Any], request: Any, *, timeout_ms: int) -> Iterator[Any]:
        return self.run(method, [request], timeout_ms)

    def open(self, method: Method[Any, Any], *, timeout_ms: int, socket: LocalAddress | None = None) -> SimulatedStream:
        return SimulatedStream(self, method)

    def close(self) -> None:
        self._closed = True
        for call in list(self._open):
            call.cancel()
        self._open.clear()

    def begin(self, method: Method[Any, Any]) -> Call:
        if self._closed:
            raise self.unavailable(f"{self.name} was closed")
        network = self._network
        call = Call(network.wires, method, self._address, network.process, network.shown, is_copy=False)
        self._open[call] = None
        return call

    def end(self, call: Call) -> None:
        self._open.pop(call, None)

    def run(self, method: Method[Any, Any], requests: Iterable[Any], timeout_ms: int) -> Generator[Any, None, None]:
        call = self.begin(method)
        until = call.world.now + timeout_ms * MS
        try:
            sent = [method.request.encode(each) for each in requests]
            for data in sent:
                call.send(data)
            call.end()
            self.copy(call, sent)
            while True:
                answer = call.take(until - call.world.now, self)
                if answer is None:
                    return
                decoded = method.response.decode(answer)
                if not method.streams_out:
                    call.cancel()
                    self.end(call)
                yield decoded
        finally:
            call.cancel()
            self.end(call)

    def copy(self, call: Call, sent: Sequence[bytes]) -> None:
        """Sends a second copy of the call, if the seed says so."""
        wires = self._network.wires
        if not sent or call.method.name == "Register" or not wires.repeats():
            return
        again = Call(wires, call.method, self._address, self._network.process, call.shown, is_copy=True)

        def deliver() -> None:
            for data in sent:
                again._arrive(data)
            again._no_more()

        wires.carry(again, again.caller.host, again.target, wires.world.rng.randrange(LATE_MAX), deliver)


class SimulatedStream:
    """See shardyard.transport.interfaces.Stream."""

    descriptors = None

    def __init__(self, peer: SimulatedPeer, method: Method[Any, Any]) -> None:
        self._peer = peer
        self._method = method
        self._call = peer.begin(method)
        self._begun = False

    def send(self, requests: Iterable[Any], *, answered: bool = True) -> None:
        sent = [self._method.request.encode(each) for each in requests]
        for data in sent:
            self._call.send(data)
        if not self._begun and answered:
            # the first exchange of a stream says all that it means
            self._peer.copy(self._call, sent)
        self._begun = True

    def receive(self, *, timeout_ms: int) -> Any:
        answer = self._call.take(timeout_ms * MS, self._peer)
        return None if answer is None else self._method.response.decode(answer)

    def cancel(self) -> None:
        self._call.cancel()
        self._peer.end(self._call)
