"""From one push or pull to one message for each server, all at once, and again where a server did not answer.

Owns: the peers of the servers. Invariants: a push goes to every server and lists all its partitions (rule A3); what is
sent again carries the same name; a pull becomes current only when all servers' parts are there; nobody is waited for
under a map that is not the job's any more. Must not know: what a push is named after, and why.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from shardyard.domain import errors
from shardyard.domain.consistency import SspPhase, SspReport, UpdateMode
from shardyard.domain.ids import Generation, Incarnation, PartitionId, Token, Version
from shardyard.domain.layout.layouts import PartitionMap
from shardyard.domain.limits import KIB
from shardyard.domain.pulls import LookupRequest, NotReadyPart, PulledPart, PullHeader, RequestedRows
from shardyard.domain.push_names import NO_NAME, PushName, SourceKey, Watermark
from shardyard.domain.pushes import ExchangeReply, Outcome, PartResult, PushedRows, PushHeader, PushKind, StepVerdict
from shardyard.wire import common_messages, frames, lease_messages, methods, push_messages
from shardyard.wire import table_messages as tables
from shardyard.wire.frames import Frame
from shardyard.wire.v1 import parameter_server_pb2 as wire
from shardyard_worker.exchange.flat_buffers import Codes, FlatBuffers
from shardyard_worker.exchange.norm_sums import NormSums
from shardyard_worker.exchange.overlap import Overlap
from shardyard_worker.exchange.server_stream import Piece, ServerStream, StreamSettings
from shardyard_worker.rows.dedup import Float32s, Int64s
from shardyard_worker.rows.row_codec import EncodedRows, RowLookup
from shardyard_worker.rows.row_prefetch import RowPrefetch
from shardyard_worker.session.retry import RetryPolicy
from shardyard_worker.session.session import Session

log = logging.getLogger("shardyard.worker")

_MOVED = (errors.StaleGeneration, errors.StaleIncarnation)
_NOBODY: frozenset[PartitionId] = frozenset()
R = TypeVar("R")
Bases = Mapping[PartitionId, Version]
"""The versions of the values that something was computed on."""
Describe = Callable[[], str]
Request = tuple[PushHeader, Sequence[Piece], Sequence[memoryview]]
"""With the payload that travels, and the memory for rows that are wanted."""
Make = Callable[[ServerStream], Request | None]
"""What to ask of a server, if anything; made when the line is open."""

ROWS_WAIT_MS = 200
"""How long a server holds a look-up of rows before the worker looks around."""
LOOK_AGAIN_MS = 50
"""Between two looks for a map that is to come."""
RECOVERING = "its partitions wait to be restored (see `shardyard status`)"
"""What the coordinator says of a job whose server is lost."""
THREADS_BYTES_MIN = 256 * KIB
"""Where more than this travels over streams to several servers, each has a thread."""


@dataclass(frozen=True)
class PushRequest:
    """A push, before it is cut for servers. `absent`: indices of variables that it does not carry."""

    name: PushName
    kind: PushKind
    weight: float
    groups: tuple[tuple[float, ...], ...] = ()
    absent: frozenset[int] = frozenset()
    codes: Codes | None = None
    slot: int = 0
    """Where its gradients lie in the buckets: others may be filled in while it is under way."""
    bases: Bases | None = None
    """What its gradients were computed on, where servers ask for that."""
    overflow: bool = False
    rows: EncodedRows | None = None
    """Of tables."""
    ahead: RowPrefetch | None = None
    """Rows that shall come with the values that are pulled after it."""


@dataclass(frozen=True)
class PullSpec:
    """The version that a pull asks for, of every partition. `prefetched`: it may be answered while values are still on
    their way, where the worker has an order for them."""

    number: int
    exactly: bool
    wait_ms: int = 0
    prefetched: bool = False
    ssp_report: SspReport | None = None
    """How far this worker is, where staleness is bounded."""


@dataclass(frozen=True)
class ExchangeResult:
    """What the servers said, all partitions together. `missing` is empty when the values wished are current."""

    results: tuple[PartResult, ...] = ()
    missing: tuple[NotReadyPart, ...] = ()
    version_max: int = 0
    clock: int = 0
    """From here on this worker counts its steps, if it has joined."""
    foreign: frozenset[PartitionId] = frozenset()
    """Partitions that had this work from somebody else."""
    ahead: RowPrefetch | None = None
    """Rows that have come with the values."""


class MapChanged(Exception):
    """Partitions have moved, or were restored: what was asked is to be asked again under the newest map."""


class ServerGroup:
    """Reaches all servers of a job under one partition map. Used by one thread, but for `close`, and for reads of rows,
    which another one may ask for meanwhile."""

    def __init__(
        self,
        session: Session,
        map_: PartitionMap,
        buckets: FlatBuffers,
        *,
        coding: str = "",
        follows: bool = False,
        tables: bool = False,
    ) -> None:
        """`coding`: how pulled values shall be coded (PullHeader). `follows`: under a map before this one something may
        have been sent already. `tables`: whether the job has any."""
        self.needed: tuple[int, ...] = ()
        """Indices of variables in the order in which their values are needed; empty: all at once."""
        self._coding = coding
        self._follows = follows
        self._session = session
        self._map = map_
        self._buckets = buckets
        settings = session.settings.worker
        self._arrivals = ThreadPoolExecutor(len(map_.by_server()), "arrival") if settings.prefetch == "always" else None
        line_settings = StreamSettings(
            settings.same_host == "auto",
            settings.pull == "view",
            settings.rpc_deadline_ms,
            settings.overlap == "always",
            self._take_later,
            tables,
        )
        self._lines = {
            server: ServerStream(
                server, session.network.connect(owners[0].address, name=f"server {server}"), buckets, line_settings
            )
            for server, owners in map_.by_server().items()
        }
        self._all = list(self._lines.values())
        self._owned = {server: tuple(o.partition for o in owners) for server, owners in map_.by_server().items()}
        self._landed: set[Incarnation] = set()
        self._versions: dict[Incarnation, int] = {}
        self._coming: dict[Incarnation, tuple[PulledPart, ...]] = {}
        self.current: tuple[tuple[PulledPart, ...], ...] = ()
        """The versions that are current in the buckets, by server."""
        self._ahead_rows: RowPrefetch | None = None
        """What comes with the pull under way."""
        self._wishes: dict[Incarnation, tuple[PullSpec, bool, tuple[int, ...], PullHeader]] = {}
        self._closed = threading.Event()
        self._pool = ThreadPoolExecutor(len(self._lines), "router")
        self._readers: ThreadPoolExecutor | None = None
        self._readers_lock = threading.Lock()
        self._wait_registry = session.wait_registry
        waits = session.mode is UpdateMode.SYNC and bool(session.job_settings.clip.norm)
        self._verdicts = NormSums(len(map_.owners)) if waits else None
        self._members: StepVerdict | None = None
        self._ahead: Overlap | None = None
        if settings.overlap == "always":
            self._ahead = Overlap(buckets, self._lines, self._wait_registry)
        session.on_failure(self.close)
        session.on_newer_map(self._leave_the_frozen)

    def leave(self) -> None:
        """Tells the servers that their memory is not read any more."""
        waits: list[str] = []
        with self._wait_registry.over(lambda: f"{waits[-1]} to hear that its memory is not read any more"):
            for server, line in self._lines.items():
                waits.append(line.peer.name)
                line.detach(self._order(server, PushKind.NOTHING, detach=True))

    def close(self) -> None:
        """Ends every call under way. Safe from any thread."""
        self._session.not_on_failure(self.close)
        self._session.not_on_newer_map(self._leave_the_frozen)
        self._closed.set()
        self._break_off()
        if self._ahead is not None:
            self._ahead.close()
        self._pool.shutdown(wait=False)
        if self._readers is not None:
            self._readers.shutdown(wait=False)
        if self._arrivals is not None:
            self._arrivals.shutdown(wait=False)

    # ---- the four things a worker asks of servers

    def initialize(self, shipment: PushRequest) -> None:
        """Gives every server the first values that lie in the buckets."""

        def send(line: ServerStream) -> None:
            parts, pieces = self._buckets.parts(line.server, frozenset())
            order = replace(self._order(line.server, shipment.kind), name=shipment.name, parts=parts)
            sent = frames.cut(push_messages.push_to_wire(order).SerializeToString(), pieces)
            line.peer.send(methods.INITIALIZE, sent, timeout_ms=self._deadline_ms)

        self._everywhere(send, f"the first values to arrive ({shipment.name})")

    def initialize_rows(self, name: PushName, rows: EncodedRows) -> None:
        """Gives every server the first rows that are its own, over those that it has."""

        def send(line: ServerStream) -> None:
            said, pieces = rows.of(self._owned[line.server])
            if not said:
                return
            parts = self._buckets.empty_parts(line.server)
            order = replace(self._order(line.server, PushKind.VALUES), name=name, parts=parts, rows=said)
            sent = frames.cut(push_messages.push_to_wire(order).SerializeToString(), pieces)
            line.peer.send(methods.INITIALIZE, sent, timeout_ms=self._deadline_ms)

        self._everywhere(send, f"the first rows to arrive ({name})")

    # ---- rows

    @property
    def owned(self) -> Mapping[Incarnation, tuple[PartitionId, ...]]:
        """The partitions of each server."""
        return self._owned

    def look_up(
        self, asked: Mapping[Incarnation, Sequence[RowLookup]], into: Sequence[Float32s], number: int | None = None
    ) -> None:
        """Asks all servers at once; the rows that come are put into the arrays of the look-ups. Beside an exchange that
        is under way in another thread. `number`: of a synchronous job, the version of which rows are wanted; None: the
        newest of each partition. Raises NotFound (facts: newest) where that has passed."""
        code = self._session.job_settings.compression.rows_pull

        def ask(server: Incarnation) -> None:
            peer = self._lines[server].peer
            for question in asked[server]:
                wait_ms = 0 if number is None else ROWS_WAIT_MS
                header = tables.look_up_to_header(
                    LookupRequest(
                        self._session.caller, server, self._map.generation, question.wanted, number, wait_ms, code
                    )
                )
                frame = Frame(header, 0, b"".join(question.codes))
                answer = peer.call(methods.LOOK_UP, frame, timeout_ms=self._deadline_ms)
                question.put(memoryview(answer.data), into, code)

        self._ask_for_rows([server for server, each in asked.items() if each], ask, "rows that are looked up")

    def count_rows(self, table: str) -> int:
        """How many rows the servers have of a table of this job."""

        def ask(server: Incarnation) -> int:
            request = wire.DescribeServerRequest()
            said = self._lines[server].peer.call(methods.DESCRIBE_SERVER, request, timeout_ms=self._deadline_ms)
            job = self._session.caller.job
            return sum([each.rows for each in said.tables if each.job == job and each.name == table])

        return sum(self._ask_for_rows(list(self._lines), ask, f"the number of rows of table {table!r}"))

    def read_rows(self, table: int, dim: int, partition: PartitionId) -> list[tuple[Int64s, Float32s]]:
        """All rows of a table in a partition, in pieces."""
        server = next(server for server, owned in self._owned.items() if partition in owned)
        ask = partial(self._read_rows, partition=partition, table=table, dim=dim)
        (found,) = self._ask_for_rows([server], ask, f"all rows of table {table} in partition {partition}")
        return found

    def _read_rows(
        self, server: Incarnation, partition: PartitionId, table: int, dim: int
    ) -> list[tuple[Int64s, Float32s]]:
        request = wire.ReadRowsRequest(
            caller=common_messages.caller_to_wire(self._session.caller),
            server=server,
            generation=self._map.generation,
            partition=partition,
            table=table,
        )
        frames = self._lines[server].peer.receive(methods.READ_ROWS, request, timeout_ms=self._deadline_ms)
        return tables.rows_from_frames(frames, dim, f"server {server}")

    def _ask_for_rows(self, servers: Sequence[Incarnation], ask: Callable[[Incarnation], R], what: str) -> list[R]:
        """Reads from these servers, all at once, each again while it does not answer."""
        self._check()
        patiences = {server: self._patience(self._lines[server], what) for server in servers}
        tries = {server: partial(patiences[server].call, partial(ask, server)) for server in servers}
        try:
            if len(servers) == 1:
                with self._wait_registry.over(lambda: patiences[servers[0]].explanation):
                    return [tries[servers[0]]()]
            with self._readers_lock:
                if self._readers is None:
                    self._readers = ThreadPoolExecutor(len(self._lines), "rows")
                readers = self._readers
            under_way = {server: readers.submit(each) for server, each in tries.items()}
            with self._wait_registry.over(
                lambda: "; ".join(patiences[s].explanation for s, each in under_way.items() if not each.done())
            ):
                wait(under_way.values())
            return [each.result() for each in under_way.values()]
        except (errors.NotFound, errors.Unavailable, errors.StaleGeneration, errors.StaleIncarnation) as error:
            self._look_around(error)
            raise
        except RuntimeError:
            # closed meanwhile, by a failure that another thread has heard of
            self._session.check()
            raise

    def push(self, shipment: PushRequest) -> ExchangeResult:
        """Applies a push on all servers. Raises what one of them refused."""
        pushes = shipment.kind is PushKind.GRADIENT
        make = partial(self._shipped, shipment, None)
        answers = self._exchange(make, partial(_applied, shipment), pushes=pushes)
        results = tuple(result for answer in answers for result in answer.push)
        return ExchangeResult(results=results, foreign=self._foreign(answers))

    def push_pull(self, shipment: PushRequest, wish: PullSpec) -> ExchangeResult:
        """A push, and then a pull of what is wished, in one round trip for each server."""
        self._landed.clear()
        self._ahead_rows = shipment.ahead
        pushes = shipment.kind is PushKind.GRADIENT
        make = partial(self._shipped, shipment, wish)
        return self._answer(self._exchange(make, partial(_applied, shipment), pushes=pushes))

    def pull(self, wish: PullSpec) -> ExchangeResult:
        """Asks the servers whose parts have not landed since the last complete pull. To begin a new one, or after a
        push_pull that is not complete, ask until `missing` is empty."""
        verdict = self._verdict_for(wish)

        def ask(line: ServerStream) -> Request | None:
            if line.server in self._landed:
                return None
            wanted, codes, places = self._wanted(line.server)
            order = self._order(line.server, PushKind.NOTHING)
            order = replace(
                order, pull=self._wish(line, wish), ssp_report=wish.ssp_report, verdict=verdict, wanted=wanted
            )
            if not wanted:
                return order, (), ()
            rows_at, wanted_at = line.put_rows(codes, places)
            order = replace(order, rows_at=rows_at, wanted_at=wanted_at)
            return order, _placed(codes) if rows_at is None else (), places

        return self._answer(self._exchange(ask, lambda: f"version {wish.number} of the parameters", pushes=False))

    def bring(self, verdict: StepVerdict | None) -> None:
        """What is told to the servers with the next pull of the version that the step makes."""
        self._members = verdict

    def norm_of(self, step: int) -> float | None:
        """Of a synchronous job that clips by norm: the 2-norm of the step's gradient, where all servers have told."""
        return None if self._verdicts is None else self._verdicts.norm(step)

    def rest(self, turn: int) -> None:
        """Tells the servers that this worker takes no steps for now: the end of that turn."""

        def tell(line: ServerStream) -> Request:
            return (
                replace(self._order(line.server, PushKind.NOTHING), ssp_report=SspReport(SspPhase.RESTS, turn)),
                (),
                (),
            )

        self._exchange(tell, lambda: "word that this worker takes no steps for now", pushes=False)

    def ready(self, index: int, wait: Callable[[], None] | None = None) -> None:
        """The gradient of a variable lies in its view, once `wait` has returned; it may change before it is pushed."""
        if self._ahead is not None:
            self._ahead.ready(index, wait=wait)

    def abandon_pull(self) -> None:
        """Forgets what has landed of a pull that was not completed."""
        self._landed.clear()
        self._ahead_rows = None

    def open_sources(self, sources: Sequence[tuple[SourceKey, Token]]) -> dict[SourceKey, tuple[Watermark, ...]]:
        """Rule A5: writes tokens to every partition, and brings back all watermarks."""

        def ask(line: ServerStream) -> wire.OpenSourcesReply:
            request = wire.OpenSourcesRequest(
                caller=common_messages.caller_to_wire(self._session.caller),
                server=line.server,
                generation=self._map.generation,
                sources=lease_messages.sources_to_wire(sources),
            )
            return line.peer.call(methods.OPEN_SOURCES, request, timeout_ms=self._deadline_ms)

        found: dict[SourceKey, tuple[Watermark, ...]] = {}
        for reply in self._everywhere(ask, f"{sources[0][0].source} to be opened"):
            for key, marks in lease_messages.watermarks_from_wire(reply.sources):
                found[key] = found.get(key, ()) + marks
        return found

    def pause(self, pause_ms: int) -> None:
        """Waits, unless the job fails meanwhile."""
        self._closed.wait(pause_ms / 1000)

    @property
    def generation(self) -> Generation:
        """Of its map."""
        return self._map.generation

    @property
    def is_behind(self) -> bool:
        """Whether there is a newer map."""
        return self._session.generation > self._map.generation

    # ---- inside

    @property
    def _deadline_ms(self) -> int:
        return self._session.settings.worker.rpc_deadline_ms

    def _order(self, server: Incarnation, kind: PushKind, *, detach: bool = False) -> PushHeader:
        return PushHeader(self._session.caller, server, self._map.generation, NO_NAME, kind, (), 0.0, (), detach=detach)

    def _wanted(
        self, server: Incarnation
    ) -> tuple[tuple[RequestedRows, ...], Sequence[memoryview], Sequence[memoryview]]:
        """Rows that come along from a server, the codes of their ids, and the memory for them."""
        ahead = self._ahead_rows
        question = None if ahead is None else ahead.question(self._owned[server])
        if ahead is None or question is None:
            return (), (), ()
        return question.wanted, question.codes, ahead.places(question)

    def _shipped(self, shipment: PushRequest, wish: PullSpec | None, line: ServerStream) -> Request | None:
        """A server's part of a shipment, and its payload unless that is read where it lies."""
        server, shared_at, rest, bases = line.server, None, None, shipment.bases
        pieces: Sequence[Piece] = ()
        if shipment.kind is PushKind.EMPTY:
            parts = self._buckets.empty_parts(server)
        elif shipment.codes is not None:
            parts, codes = self._buckets.coded_parts(server, shipment.absent, shipment.codes)
            pieces = _placed(codes)
        elif line.shared:
            parts, shared_at = (
                self._buckets.shared_parts(server, shipment.absent),
                self._buckets.place(server, shipment.slot),
            )
        else:
            rest = self._ahead.rest(server) if self._ahead is not None else None
            if rest is not None:
                parts = self._buckets.shared_parts(server, shipment.absent)
                payload = self._buckets.payload(server)
                pieces = [(span.begin, payload[span.begin : span.end].data) for span in rest]
            else:
                parts, whole = self._buckets.parts(server, shipment.absent, shipment.slot)
                pieces = _placed(whole)
        rows: tuple[PushedRows, ...] = ()
        behind: list[memoryview] = []
        if shipment.rows is not None:
            rows, behind = shipment.rows.of(self._owned[server])
        wanted: tuple[RequestedRows, ...] = ()
        places: Sequence[memoryview] = ()
        if wish is not None and self._ahead_rows is not None:
            wanted, ids, places = self._wanted(server)
            behind = [*behind, *ids]
        rows_at, wanted_at = line.put_rows(behind, places) if behind else (None, None)
        if behind and rows_at is None:
            pieces = _placed([*(piece for _, piece in pieces), *behind])
        order = PushHeader(
            self._session.caller,
            server,
            self._map.generation,
            shipment.name,
            shipment.kind,
            parts,
            shipment.weight,
            shipment.groups,
            None if wish is None else self._wish(line, wish),
            shared_at,
            rest=None if rest is None else sum([len(piece) for _, piece in pieces]),
            ssp_report=None if wish is None else wish.ssp_report,
            bases=() if bases is None else tuple([bases[part.partition] for part in parts]),
            overflow=shipment.overflow,
            rows=rows,
            table_groups=shipment.rows.groups if shipment.rows is not None and rows else (),
            wanted=wanted,
            rows_at=rows_at,
            wanted_at=wanted_at,
        )
        return order, pieces, places

    def _wish(self, line: ServerStream, wish: PullSpec) -> PullHeader:
        """Made once for a wish that comes again, so that headers are seen to be alike."""
        kept = self._wishes.get(line.server)
        if kept is not None and kept[0] is wish and kept[1] == line.shared and kept[2] is self.needed:
            return kept[3]
        made = self._make_wish(line, wish)
        self._wishes[line.server] = wish, line.shared, self.needed, made
        return made

    def _make_wish(self, line: ServerStream, wish: PullSpec) -> PullHeader:
        return PullHeader(
            self._session.caller,
            line.server,
            self._map.generation,
            self._owned[line.server],
            wish.number,
            wish.exactly,
            wish.wait_ms,
            coding=self._coding,
            shared=line.shared and not self._coding,
            order=self.needed if wish.prefetched and not line.shared else (),
        )

    def _exchange(self, make: Make, waiting_for: Describe, *, pushes: bool) -> list[ExchangeReply]:
        """An exchange with every server for which `make` has one, all at once. Raises the first refusal when all are
        done. Where much travels over streams each server has a thread; else this one does it all."""
        self._check()
        lines = self._all
        if self._ahead is not None:
            self._ahead.drain()
            if not pushes:
                self._ahead.forget()
        try:
            if len(lines) > 1 and self._streamed_bytes(lines) > THREADS_BYTES_MIN:
                found = self._ask_all(partial(self._attempt, make), waiting_for())
                return [result for result in found if result is not None]
            return self._exchange_here(lines, make, waiting_for)
        except (errors.NotFound, errors.Unavailable, errors.StaleGeneration, errors.StaleIncarnation) as error:
            self._look_around(error)
            raise

    def _streamed_bytes(self, lines: Sequence[ServerStream]) -> int:
        return sum([self._buckets.nbytes(line.server) for line in lines if not line.shared])

    def _exchange_here(self, lines: Sequence[ServerStream], make: Make, waiting_for: Describe) -> list[ExchangeReply]:
        begun: dict[Incarnation, PushHeader] = {}
        waits: list[str] = []
        results: list[ExchangeReply] = []
        refusals: list[errors.ShardyardError] = []
        try:
            with self._wait_registry.over(lambda: f"{waiting_for()} on {waits[-1] if waits else 'all servers'}"):
                for line in lines:
                    try:
                        order = self._begin(make, line)
                        if order is not None:
                            begun[line.server] = order
                    except errors.Unavailable:
                        log.debug("%s: asked again (%s)", line.peer.name, waiting_for())
                for line in lines:
                    waits.append(line.peer.name)
                    try:
                        result = self._finish(line, make, begun.get(line.server), waiting_for)
                    except errors.ShardyardError as error:
                        refusals.append(error)
                    else:
                        if result is not None:
                            results.append(result)
        except BaseException:
            # nobody shall take answers that were not waited for as those to what is asked next
            for line in lines:
                line.break_off()
            raise
        if refusals:
            raise next((each for each in refusals if isinstance(each, _MOVED)), refusals[0])
        return results

    def _take_later(self, take: Callable[[], None]) -> None:
        assert self._arrivals is not None
        try:
            self._arrivals.submit(take)
        except RuntimeError as error:  # the job is being left, or has failed, in another thread
            raise errors.ServerUnavailable("the servers are not listened to any more") from error

    def _begin(self, make: Make, line: ServerStream) -> PushHeader | None:
        line.settle()
        if not line.is_open:
            line.open(self._order(line.server, PushKind.NOTHING))
        made = make(line)
        if made is None:
            return None
        line.begin(*made)
        return made[0]

    def _attempt(self, make: Make, line: ServerStream) -> ExchangeReply | None:
        """A whole exchange with one server. Somebody else's answer cannot be told from that to an earlier try."""
        line.asked_again = True
        order = self._begin(make, line)
        return None if order is None else line.finish(order)

    def _finish(
        self, line: ServerStream, make: Make, order: PushHeader | None, waiting_for: Describe
    ) -> ExchangeReply | None:
        line.asked_again = order is None or self._follows
        if order is not None:
            try:
                return line.finish(order)
            except (errors.Unavailable, errors.NotReady):
                log.debug("%s: asked again (%s)", line.peer.name, waiting_for())
        line.asked_again = True
        return self._patience(line, waiting_for()).call(partial(self._attempt, make, line))

    def _patience(self, line: ServerStream, waiting_for: str) -> RetryPolicy:
        budget_ms = self._session.settings.worker.retry_budget_ms
        return RetryPolicy(
            budget_ms,
            self._check,
            f"{waiting_for} on {line.peer.name}",
            worthwhile=lambda: RECOVERING if self._session.recovering else "",
        )

    def _everywhere(self, ask: Callable[[ServerStream], R], waiting_for: str) -> list[R]:
        """Calls all servers at once, each again while it does not answer. Raises the first refusal when all are
        done."""
        self._check()
        try:
            return self._ask_all(ask, waiting_for)
        except (errors.NotFound, errors.Unavailable, errors.StaleGeneration, errors.StaleIncarnation) as error:
            self._look_around(error)
            raise

    def _check(self) -> None:
        """Raises MapChanged, and what the job failed with."""
        self._session.check()
        if self.is_behind:
            raise MapChanged

    def _leave_the_frozen(self) -> None:
        """There may be a newer map. A server of this one that is frozen does not answer before it wakes up; and what
        the others answer does not matter, since all of it is asked again."""
        if self.is_behind:
            self._break_off()

    def _break_off(self) -> None:
        """Ends every call under way; none begins any more. Safe from any thread."""
        for line in self._lines.values():
            line.break_off()
            line.peer.close()

    def _look_around(self, error: errors.ShardyardError) -> None:
        """The coordinator knows why a server does not do its part: the job has failed, or its partitions have moved, or
        will have in a moment."""
        if isinstance(error, errors.NotFound) and "newest" not in error.facts:
            # no version that has passed: a job that has failed is dropped by servers before its workers hear of it
            self._session.learn()
        else:
            self._session.refresh()
        self._check()
        # a server that was started again knows nothing of the job, and the coordinator may not know of it yet
        moved = isinstance(error, _MOVED)
        if moved or self._session.recovering:
            with self._wait_registry.over(lambda: f"a partition map after generation {self._map.generation}"):
                while True:
                    self.pause(LOOK_AGAIN_MS)
                    self._session.refresh()
                    self._check()
                    if not moved and not self._session.recovering:
                        return

    def _ask_all(self, ask: Callable[[ServerStream], R], waiting_for: str) -> list[R]:
        asked: dict[Future[R], RetryPolicy] = {}
        try:
            for line in self._lines.values():
                patience = self._patience(line, waiting_for)
                asked[self._pool.submit(patience.call, partial(ask, line))] = patience
        except RuntimeError:
            # closed meanwhile, by a failure that another thread has heard of
            self._session.check()
            raise

        def explain_rest() -> str:
            return "; ".join(patience.explanation for future, patience in asked.items() if not future.done())

        # explained from here, since a single call may last for longer than a wait may go without a word
        with self._wait_registry.over(explain_rest):
            wait(asked)
        return [future.result() for future in asked]

    def _verdict_for(self, wish: PullSpec) -> StepVerdict | None:
        """What the step that makes the version wished may wait for."""
        if not wish.exactly or not wish.number:
            return None
        norm = None if self._verdicts is None else self._verdicts.on(wish.number - 1)
        members = self._members
        if members is None or members.step != wish.number - 1:
            return norm
        return members if norm is None else norm._replace(members=members.members)

    def _explained(self, missing: tuple[NotReadyPart, ...], verdicts: NormSums) -> tuple[NotReadyPart, ...]:
        """Where a verdict waits for other servers' partitions, with those: a server knows its own alone."""
        step = missing[0].want - 1  # of all of a pull
        lacking = frozenset(verdicts.lacking(step))
        if step < 0 or not lacking:
            return missing
        lack = [(server, [number for number in owned if number in lacking]) for server, owned in self._owned.items()]
        told = [f"{', '.join(map(str, numbers[:8]))} (server {server})" for server, numbers in lack if numbers]
        what = f"step {step}: the square norms of partitions {'; '.join(told)}"
        return tuple([each if each.partition in lacking else replace(each, waiting_for=what) for each in missing])

    def _answer(self, results: Sequence[ExchangeReply]) -> ExchangeResult:
        missing = _joined([result.missing for result in results])
        if self._verdicts is not None:
            for result in results:
                self._verdicts.hear(result.gathered)
            missing = self._explained(missing, self._verdicts) if missing else missing
        for server, result in zip(self._asked(), results, strict=True):
            if not result.missing:
                self._landed.add(server)
                self._versions[server] = max([part.version.number for part in result.parts], default=0)
                self._coming[server] = result.parts
        ahead = None
        if not missing:
            self._landed.clear()
            self._buckets.flip()
            self.current = tuple(self._coming.values())
            ahead, self._ahead_rows = self._ahead_rows, None
        return ExchangeResult(
            results=_joined([result.push for result in results]),
            missing=missing,
            version_max=max(self._versions.values(), default=0),
            clock=max([result.clock or 0 for result in results], default=0),
            foreign=self._foreign(results),
            ahead=ahead,
        )

    def _foreign(self, results: Sequence[ExchangeReply]) -> frozenset[PartitionId]:
        """A duplicate at the first try had the work from another worker; at a later one it may be this one's own."""
        twice = [part.partition for result in results for part in result.push if part.outcome is Outcome.DUPLICATE]
        if not twice:
            return _NOBODY
        again = {partition for s, line in self._lines.items() if line.asked_again for partition in self._owned[s]}
        return frozenset(partition for partition in twice if partition not in again)

    def _asked(self) -> list[Incarnation]:
        return [server for server in self._lines if server not in self._landed]


def _applied(shipment: PushRequest) -> str:
    return f"push {shipment.name} to be applied"


def _joined(pieces: Sequence[tuple[R, ...]]) -> tuple[R, ...]:
    return pieces[0] if len(pieces) == 1 else tuple(item for piece in pieces for item in piece)


def _placed(pieces: Sequence[memoryview]) -> list[Piece]:
    """Pieces one after the other."""
    found: list[Piece] = []
    at = 0
    for piece in pieces:
        found.append((at, piece))
        at += len(piece)
    return found
