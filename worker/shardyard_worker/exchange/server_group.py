"""All servers of a job under one partition map: pushes and pulls of whole versions.

Owns: the streams to the servers, and which servers have answered a pull. Invariants: a push goes to every server (rule
A3); a pull becomes current only when the parts of all servers are there. Must not know: how and why a push is named.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import torch

from shardyard.domain import errors
from shardyard.domain.consistency import SspPhase, SspReport, UpdateMode
from shardyard.domain.ids import Generation, Incarnation, PartitionId, Token
from shardyard.domain.layout.layouts import PartitionMap
from shardyard.domain.limits import ROWS_ALONG_BYTES_MAX
from shardyard.domain.pulls import NotReadyPart, PulledPart, RowCode
from shardyard.domain.push_names import PushName, SourceKey, Watermark
from shardyard.domain.pushes import ExchangeReply, Outcome, PartResult, PushHeader, PushKind, StepVerdict
from shardyard.wire import common_messages, frames, lease_messages, methods, push_messages
from shardyard.wire.v1 import parameter_server_pb2 as wire
from shardyard_worker.exchange.buffers.flat_buffers import FlatBuffers
from shardyard_worker.exchange.fan_out import FanOut, Make
from shardyard_worker.exchange.norm_sums import NormSums
from shardyard_worker.exchange.optimizer_exchange import OptimizerExchange
from shardyard_worker.exchange.overlap import Overlap
from shardyard_worker.exchange.request_builder import Order, RequestBuilder, ServerRequest
from shardyard_worker.exchange.requests import ExchangeResult, PullSpec, PushRequest
from shardyard_worker.exchange.row_reads import RowReads
from shardyard_worker.exchange.server_stream import ServerStream
from shardyard_worker.rows.dedup import Float32s
from shardyard_worker.rows.row_codec import EncodedRows, questions
from shardyard_worker.rows.row_prefetch import RowPrefetch, RowQuery
from shardyard_worker.session.session import Listener, Session


class ServerGroup:
    """For one thread at a time, except `close`, and `rows`, which any thread may read. Rows can be looked up in two
    ways: by the thread that made the group, in an exchange (`look_up`), and by any thread, beside exchanges (`rows`).
    """

    def __init__(
        self,
        session: Session,
        map_: PartitionMap,
        buffers: FlatBuffers,
        *,
        coding: str = "",
        order: Order = tuple,
        follows: bool = False,
        tables: bool = False,
    ) -> None:
        """`coding`, `order`: see RequestBuilder. `follows`: a request may have been sent under an earlier map already.
        `tables`: whether the job has any."""
        self._thread = threading.get_ident()
        """The thread that exchanges. The others look rows up with `rows`."""
        self.generation: Generation = map_.generation
        """The map's generation."""
        self._session = session
        self._buffers = buffers
        settings = session.settings.worker
        self._deadline_ms = settings.rpc_deadline_ms
        overlaps = settings.exchange == "overlapped"
        self._owned = {server: tuple(o.partition for o in owners) for server, owners in map_.by_server().items()}
        self._receivers = ThreadPoolExecutor(len(self._owned), "arrival") if overlaps else None
        self._streams = {
            server: ServerStream(
                server,
                session.network.connect(owners[0].address, name=f"server {server}"),
                buffers,
                settings,
                tables=tables,
                receive_later=self._receive_later,
            )
            for server, owners in map_.by_server().items()
        }
        self._overlap = Overlap(buffers, self._streams, session.wait_registry) if overlaps else None
        self._requests = RequestBuilder(session.caller, map_, self._owned, buffers, self._overlap, coding, order)
        self._fan_out = FanOut(session, map_, self._streams, buffers, self._requests, follows=follows)
        self.rows = RowReads(session, map_, self._owned, self._fan_out, self._streams)
        self.optimizer = OptimizerExchange(session, map_, self._owned, self._fan_out, buffers.layout)
        self._idle = frozenset(server for server in self._streams if not buffers.partitions(server))
        """The servers to which nothing is pushed: they have partitions of other workers only."""
        self._landed: set[Incarnation] = set()
        """The servers whose part of the current pull has come."""
        self._incoming: dict[Incarnation, tuple[PulledPart, ...]] = {}
        self.current: tuple[tuple[PulledPart, ...], ...] = ()
        """The versions of the current values, by server."""
        self._ahead: RowPrefetch | None = None
        """The rows that come with the current pull."""
        sums_norms = session.mode is UpdateMode.SYNC and bool(session.job_settings.clip.norm)
        self._norms = NormSums(len(map_.owners)) if sums_norms else None
        self._members: StepVerdict | None = None
        self._listener = Listener(on_failure=self.close, on_newer_map=self._cancel_if_behind)
        session.listen(self._listener)

    def detach(self) -> None:
        """Tells the servers that this worker no longer reads their memory."""
        waits: list[str] = []
        with self._session.wait_registry.over(lambda: f"{waits[-1]} to learn that its memory is not read any more"):
            for server, stream in self._streams.items():
                waits.append(stream.peer.name)
                stream.detach(self._requests.header(server, detach=True))

    def close(self) -> None:
        """Ends every call in flight. Safe from any thread."""
        self._session.stop_listening(self._listener)
        self._fan_out.close()
        if self._overlap is not None:
            self._overlap.close()
        if self._receivers is not None:
            self._receivers.shutdown(wait=False)

    def _cancel_if_behind(self) -> None:
        """Ends calls under an old map: a frozen server does not answer until it resumes, and all requests are sent
        again under the new map anyway."""
        if self.is_behind:
            self._fan_out.cancel()

    @property
    def is_behind(self) -> bool:
        """Whether there is a newer map."""
        return self._fan_out.is_behind

    def pause(self, pause_ms: int) -> None:
        """Waits, unless the job fails meanwhile."""
        self._fan_out.pause(pause_ms)

    # ---- before training

    def initialize(self, name: PushName, values: Sequence[torch.Tensor]) -> None:
        """Gives every server the initial values of all variables, from the tensors' own memory."""

        def send(stream: ServerStream) -> None:
            header = replace(
                self._requests.header(stream.server, PushKind.VALUES),
                name=name,
                parts=self._buffers.parts(stream.server, frozenset())[0],
            )
            self._initialize(stream, header, self._buffers.first_values(stream.server, values))

        self._fan_out.call(send, f"the first values to arrive ({name})")

    def initialize_rows(self, name: PushName, rows: EncodedRows) -> None:
        """Gives every server the initial rows of its partitions. They replace rows that it has."""

        def send(stream: ServerStream) -> None:
            pushed, pieces = rows.of(self._owned[stream.server])
            if pushed:
                parts = self._buffers.empty_parts(stream.server)
                header = self._requests.header(stream.server, PushKind.VALUES)
                self._initialize(stream, replace(header, name=name, parts=parts, rows=pushed), pieces)

        self._fan_out.call(send, f"the first rows to arrive ({name})")

    def _initialize(self, stream: ServerStream, header: PushHeader, pieces: Iterable[memoryview]) -> None:
        sent = frames.cut_in_order(push_messages.push_to_wire(header).SerializeToString(), pieces)
        stream.peer.send(methods.INITIALIZE, sent, timeout_ms=self._deadline_ms)

    def open_sources(self, sources: Sequence[tuple[SourceKey, Token]]) -> dict[SourceKey, tuple[Watermark, ...]]:
        """Rule A5: writes tokens to every partition, and returns all watermarks."""

        def ask(stream: ServerStream) -> wire.OpenSourcesReply:
            request = wire.OpenSourcesRequest(
                caller=common_messages.caller_to_wire(self._session.caller),
                server=stream.server,
                generation=self.generation,
                sources=lease_messages.sources_to_wire(sources),
            )
            return stream.peer.call(methods.OPEN_SOURCES, request, timeout_ms=self._deadline_ms)

        found: dict[SourceKey, tuple[Watermark, ...]] = {}
        for reply in self._fan_out.call(ask, f"{sources[0][0].source} to be opened"):
            for key, marks in lease_messages.watermarks_from_wire(reply.sources):
                found[key] = found.get(key, ()) + marks
        return found

    # ---- pushes and pulls

    def push(self, push: PushRequest, rows: PullSpec | None = None) -> ExchangeResult:
        """Applies a push on all servers. `rows`: the version that is waited for then; the rows of `push.ahead` come
        with it, and no values. Raises the first refusal."""
        self._drain_overlap(forget=push.kind is not PushKind.GRADIENT)
        make: Make = partial(self._requests.push, push, rows, push.ahead)
        if self._idle:
            make = self._unless_idle(make)
        return self._rows_of(self._fan_out.exchange(make, partial(_applied, push)), push.ahead)

    def pull_rows(self, rows: PullSpec, ahead: RowPrefetch | None) -> ExchangeResult:
        """The same without a push, to wait for longer."""
        make = partial(self._requests.pull, rows, self._verdict_for(rows), ahead)
        replies = self._exchange(make, f"version {rows.number} of the rows")
        if self._norms is not None:
            self._note_norms(self._norms, self._streams, replies)
        return self._rows_of(replies, ahead)

    def _rows_of(self, replies: Sequence[ExchangeReply], ahead: RowPrefetch | None) -> ExchangeResult:
        results = tuple([result for reply in replies for result in reply.push])
        missing = tuple([part for reply in replies for part in reply.missing])
        return ExchangeResult(results, missing, foreign=self._foreign(results), ahead=None if missing else ahead)

    def push_pull(self, push: PushRequest, pull: PullSpec) -> ExchangeResult:
        """A push, and then a pull, in one round trip for each server."""
        self._landed.clear()
        self._ahead = push.ahead
        self._drain_overlap(forget=push.kind is not PushKind.GRADIENT)
        make: Make = partial(self._requests.push, push, pull, push.ahead)
        if self._idle:
            make = self._unless_idle(make)
        return self._result(self._fan_out.exchange(make, partial(_applied, push)))

    def pull(self, pull: PullSpec) -> ExchangeResult:
        """Asks the servers whose parts have not come since the last complete pull. For a new pull, or after an
        incomplete push_pull, repeat it until `missing` is empty."""
        verdict = self._verdict_for(pull)

        def make(stream: ServerStream) -> ServerRequest | None:
            if stream.server in self._landed or stream.server in self._idle:
                return None
            return self._requests.pull(pull, verdict, self._ahead, stream)

        return self._result(self._exchange(make, f"version {pull.number} of the parameters"))

    def _unless_idle(self, make: Make) -> Make:
        return lambda stream: None if stream.server in self._idle else make(stream)

    def abandon_pull(self) -> None:
        """Forgets the parts of an incomplete pull."""
        self._landed.clear()
        self._ahead = None

    @property
    def looks_up_in_exchanges(self) -> bool:
        """Whether this thread may call `look_up`: rows have no versions and are not coded, and no push is in flight."""
        session = self._session
        plain = session.mode is UpdateMode.ASYNC and session.job_settings.compression.rows_pull is RowCode.FLOAT32
        return plain and not session.settings.worker.window and threading.get_ident() == self._thread

    def look_up(self, asked: Sequence[RowQuery], into: Sequence[Float32s]) -> None:
        """Looks up the newest rows, in one exchange with each server at once, and puts them into the arrays."""
        lookups = {server: questions(asked, owned, ROWS_ALONG_BYTES_MAX) for server, owned in self._owned.items()}
        for number in range(max(map(len, lookups.values()))):

            def make(stream: ServerStream, number: int = number) -> ServerRequest | None:
                of_server = lookups[stream.server]
                return self._requests.look_up(of_server[number], into, stream) if number < len(of_server) else None

            self._exchange(make, "rows that are looked up")

    def report_rest(self, epoch: int) -> None:
        """Tells the servers that after that epoch this worker takes no steps for now."""

        def make(stream: ServerStream) -> ServerRequest:
            header = self._requests.header(stream.server)
            return ServerRequest(replace(header, ssp_report=SspReport(SspPhase.RESTS, epoch)))

        self._exchange(make, "the message that this worker takes no steps for now")

    def _exchange(self, make: Make, waiting_for: str) -> list[ExchangeReply]:
        self._drain_overlap(forget=True)
        return self._fan_out.exchange(make, lambda: waiting_for)

    # ---- overlap with backward, and with forward

    def ready(self, index: int, wait: Callable[[], None] | None = None) -> None:
        """The gradient of a variable lies in its view, once `wait` has returned. It may still change before the
        push."""
        if self._overlap is not None:
            self._overlap.ready(index, wait=wait)

    def _drain_overlap(self, *, forget: bool) -> None:
        if self._overlap is not None:
            self._overlap.drain()
            if forget:
                self._overlap.forget()

    def _receive_later(self, receive: Callable[[], None]) -> None:
        assert self._receivers is not None
        try:
            self._receivers.submit(receive)
        except RuntimeError as error:  # another thread is leaving the job, or has met a failure
            raise errors.ServerUnavailable("this worker does not listen to the servers any more") from error

    # ---- verdicts of synchronous steps

    def set_members(self, verdict: StepVerdict | None) -> None:
        """Sets the verdict that the next pull of the step's version sends to the servers."""
        self._members = verdict

    def norm_of(self, step: int) -> float | None:
        """The 2-norm of the step's gradient, in a synchronous job that clips by norm. None until all servers have
        reported their part."""
        return None if self._norms is None else self._norms.norm(step)

    def lacks_norms(self, step: int) -> bool:
        """Whether the step needs the square norms of all partitions, and this worker does not know them."""
        return self._norms is not None and bool(self._norms.lacking(step))

    def _note_norms(self, norms: NormSums, servers: Iterable[Incarnation], replies: Sequence[ExchangeReply]) -> None:
        for server, reply in zip(servers, replies, strict=True):
            norms.add(reply.gathered, self._owned[server])

    def _verdict_for(self, pull: PullSpec) -> StepVerdict | None:
        """Which ranks the step that makes this version may wait for."""
        if not pull.exactly or not pull.number:
            return None
        norm = None if self._norms is None else self._norms.verdict(pull.number - 1)
        members = self._members
        if members is None or members.step != pull.number - 1:
            return norm
        return members if norm is None else norm._replace(members=members.members)

    # ---- answers

    def _result(self, replies: Sequence[ExchangeReply]) -> ExchangeResult:
        results: tuple[PartResult, ...] = ()
        missing: tuple[NotReadyPart, ...] = ()
        clock = 0
        done = self._landed | self._idle if self._idle else self._landed
        servers = [server for server in self._streams if server not in done] if done else self._streams
        if self._norms is not None:
            self._note_norms(self._norms, servers, replies)
        for server, reply in zip(servers, replies, strict=True):
            results += reply.push
            missing += reply.missing
            clock = max(clock, reply.clock or 0)
            if not reply.missing:
                self._landed.add(server)
                self._incoming[server] = reply.parts
        if missing and self._norms is not None:
            missing = self._norms.explain(missing, self._owned)
        ahead = None
        if not missing:
            self._landed.clear()
            self._buffers.values.flip()
            self.current = tuple(self._incoming.values())
            ahead, self._ahead = self._ahead, None
        version_max = 0
        for parts in self._incoming.values():
            for part in parts:
                version_max = max(version_max, part.version.number)
        return ExchangeResult(results, missing, version_max, clock, self._foreign(results), ahead)

    def _foreign(self, results: Sequence[PartResult]) -> frozenset[PartitionId]:
        """Partitions where another worker's push counted first. After a retry a duplicate may be this worker's own
        push."""
        twice: list[PartitionId] = []
        for result in results:
            if result.outcome is Outcome.DUPLICATE:
                twice.append(result.partition)
        if not twice:
            return _NONE
        retried = {partition for s, stream in self._streams.items() if stream.retried for partition in self._owned[s]}
        return frozenset(partition for partition in twice if partition not in retried)


_NONE: frozenset[PartitionId] = frozenset()


def _applied(push: PushRequest) -> str:
    return f"push {push.name} to be applied"
