"""From one push or pull to one message for each server, all at once, and again where a server did not answer.

Owns: the peers of the servers. Invariants: a push goes to every server and lists all its partitions (rule A3); what is
sent again carries the same name; a pull becomes current only when all servers' parts are there. Must not know: what a
push is named after, and why.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from shardyard.ground import errors
from shardyard.ground.types import (
    Incarnation,
    Missing,
    PartitionMap,
    PartPull,
    PartResult,
    PullResult,
    PullWish,
    PushKind,
    PushName,
    PushOrder,
    PushPart,
    SourceKey,
    Token,
    Watermark,
)
from shardyard.runtime.waiting import ExplainedWait
from shardyard.transport.peers import Peer
from shardyard.wire import convert, frames, methods
from shardyard.wire.frames import Assembler, Frame
from shardyard.wire.v1 import parameter_server_pb2 as wire
from shardyard_worker.buckets import Buckets
from shardyard_worker.patience import Patience
from shardyard_worker.session import Session

R = TypeVar("R")


@dataclass(frozen=True)
class Shipment:
    """A push, before it is cut for servers. `absent`: indices of variables that it does not carry."""

    name: PushName
    kind: PushKind
    weight: float
    groups: tuple[tuple[float, ...], ...] = ()
    absent: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Wish:
    """The version that a pull asks for, of every partition."""

    number: int
    exactly: bool
    wait_ms: int = 0


@dataclass(frozen=True)
class Answer:
    """What the servers said, all partitions together. `missing` is empty when the values wished are current."""

    results: tuple[PartResult, ...] = ()
    missing: tuple[Missing, ...] = ()
    version_max: int = 0


class Router:
    """Reaches all servers of a job under one partition map."""

    def __init__(self, session: Session, map_: PartitionMap, buckets: Buckets) -> None:
        self._session = session
        self._map = map_
        self._buckets = buckets
        self._peers: dict[Incarnation, Peer] = {
            server: session.network.connect(owners[0].address, name=f"server {server}")
            for server, owners in map_.by_server().items()
        }
        self._owned = {server: tuple(o.partition for o in owners) for server, owners in map_.by_server().items()}
        self._landed: set[Incarnation] = set()
        self._versions: dict[Incarnation, int] = {}
        self._closed = threading.Event()
        self._pool = ThreadPoolExecutor(len(self._peers), "router")
        session.on_failure(self.close)

    def close(self) -> None:
        """Ends every call under way. Safe from any thread."""
        self._closed.set()
        for peer in self._peers.values():
            peer.close()
        self._pool.shutdown(wait=False)

    # ---- the four things a worker asks of servers

    def initialize(self, shipment: Shipment) -> None:
        """Gives every server the first values that lie in the buckets."""

        def send(server: Incarnation, peer: Peer) -> None:
            peer.send(methods.INITIALIZE, self._frames(server, shipment, None), timeout_ms=self._deadline_ms)

        self._everywhere(send, f"the first values to arrive ({shipment.name})")

    def push(self, shipment: Shipment) -> Answer:
        """Applies a push on all servers. Raises what one of them refused."""

        def send(server: Incarnation, peer: Peer) -> tuple[PartResult, ...]:
            sent = self._frames(server, shipment, None)
            return convert.results_from_wire(peer.send(methods.PUSH, sent, timeout_ms=self._deadline_ms))

        answers = self._everywhere(send, f"push {shipment.name} to be applied")
        return Answer(results=tuple(result for results in answers for result in results))

    def push_pull(self, shipment: Shipment, wish: Wish) -> Answer:
        """A push, and then a pull of what is wished, in one round trip for each server."""
        self._landed.clear()

        def send(server: Incarnation, peer: Peer) -> PullResult:
            stream = peer.exchange(
                methods.PUSH_PULL, self._frames(server, shipment, wish), timeout_ms=self._deadline_ms
            )
            return self._land(server, stream)

        return self._answer(self._everywhere(send, f"push {shipment.name} to be applied"))

    def pull(self, wish: Wish) -> Answer:
        """Asks the servers whose parts have not landed since the last complete pull. To begin a new one, or after a
        push_pull that is not complete, ask until `missing` is empty."""

        def ask(server: Incarnation, peer: Peer) -> PullResult:
            if server in self._landed:
                return PullResult()
            request = convert.pull_to_wire(self._wish(server, wish))
            return self._land(server, peer.receive(methods.PULL, request, timeout_ms=self._deadline_ms))

        return self._answer(self._everywhere(ask, f"version {wish.number} of the parameters"))

    def abandon_pull(self) -> None:
        """Forgets what has landed of a pull that was not completed."""
        self._landed.clear()

    def open_sources(self, sources: Sequence[tuple[SourceKey, Token]]) -> dict[SourceKey, tuple[Watermark, ...]]:
        """Rule A5: writes tokens to every partition, and brings back all watermarks."""

        def ask(server: Incarnation, peer: Peer) -> wire.OpenSourcesReply:
            request = wire.OpenSourcesRequest(
                caller=convert.caller_to_wire(self._session.caller),
                server=server,
                generation=self._map.generation,
                sources=convert.sources_to_wire(sources),
            )
            return peer.call(methods.OPEN_SOURCES, request, timeout_ms=self._deadline_ms)

        found: dict[SourceKey, tuple[Watermark, ...]] = {}
        for reply in self._everywhere(ask, f"{sources[0][0].source} to be opened"):
            for key, marks in convert.watermarks_from_wire(reply.sources):
                found[key] = found.get(key, ()) + marks
        return found

    def pause(self, pause_ms: int) -> None:
        """Waits, unless the job fails meanwhile."""
        self._closed.wait(pause_ms / 1000)

    # ---- inside

    @property
    def _deadline_ms(self) -> int:
        return self._session.settings.worker.rpc_deadline_ms

    def _everywhere(self, ask: Callable[[Incarnation, Peer], R], waiting_for: str) -> list[R]:
        """Asks all servers at once, each again while it does not answer. Raises the first refusal when all are done."""

        self._session.check()
        try:
            return self._ask_all(ask, waiting_for)
        except (errors.NotFound, errors.Unavailable):
            # a job that has failed is dropped from the servers that live; the coordinator knows why
            self._session.refresh()
            self._session.check()
            raise

    def _ask_all(self, ask: Callable[[Incarnation, Peer], R], waiting_for: str) -> list[R]:
        asked: dict[Future[R], Patience] = {}
        try:
            for server, peer in self._peers.items():
                budget_ms = self._session.settings.worker.retry_budget_ms
                patience = Patience(budget_ms, self._session.check, f"{waiting_for} on {peer.name}", explains=False)
                asked[self._pool.submit(patience.call, partial(ask, server, peer))] = patience
        except RuntimeError:
            # closed meanwhile, by a failure that another thread has heard of
            self._session.check()
            raise

        def explain_rest() -> str:
            return "; ".join(patience.explanation for future, patience in asked.items() if not future.done())

        # explained from here, since a single call may last for longer than a wait may go without a word
        with ExplainedWait(explain_rest) as explained:
            while wait(asked, timeout=explained.tick() / 1000).not_done:
                pass
        return [future.result() for future in asked]

    def _order(self, server: Incarnation, shipment: Shipment, wish: Wish | None) -> tuple[PushOrder, list[memoryview]]:
        pieces: list[memoryview] = []
        parts: tuple[PushPart, ...] = self._buckets.empty_parts(server)
        if shipment.kind is not PushKind.EMPTY:
            parts, pieces = self._buckets.parts(server, shipment.absent)
        order = PushOrder(
            caller=self._session.caller,
            server=server,
            generation=self._map.generation,
            name=shipment.name,
            kind=shipment.kind,
            parts=parts,
            weight=shipment.weight,
            groups=shipment.groups,
            pull=None if wish is None else self._wish(server, wish),
        )
        return order, pieces

    def _frames(self, server: Incarnation, shipment: Shipment, wish: Wish | None) -> Iterator[Frame]:
        order, pieces = self._order(server, shipment, wish)
        return frames.cut(convert.push_to_wire(order).SerializeToString(), pieces)

    def _wish(self, server: Incarnation, wish: Wish) -> PullWish:
        parts = tuple(PartPull(partition, wish.number, wish.exactly) for partition in self._owned[server])
        return PullWish(self._session.caller, server, self._map.generation, parts, wish.wait_ms)

    def _land(self, server: Incarnation, stream: Iterator[Frame]) -> PullResult:
        first = next(stream, None)
        if first is None:
            raise errors.MalformedPayload(f"server {server} answered a pull without a frame")
        result = convert.pulled_from_header(first.header)
        if result.missing:
            return result
        if tuple(part.partition for part in result.parts) != self._owned[server]:
            raise errors.MalformedPayload(f"server {server} answered a pull with other partitions than were asked for")
        assembler = Assembler(self._buckets.landing(server))
        assembler.add(first)
        for frame in stream:
            assembler.add(frame)
        assembler.finish()
        self._landed.add(server)
        self._versions[server] = max((part.version.number for part in result.parts), default=0)
        return result

    def _answer(self, results: Sequence[PullResult]) -> Answer:
        missing = tuple(item for result in results for item in result.missing)
        if not missing:
            self._landed.clear()
            self._buckets.flip()
        return Answer(
            results=tuple(item for result in results for item in result.push),
            missing=missing,
            version_max=max(self._versions.values(), default=0),
        )
