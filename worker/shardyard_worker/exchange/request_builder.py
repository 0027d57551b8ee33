"""One push or pull, cut into a request for each server.

Owns: what a header says, and where its payload is: codes, shared memory, or pieces of the flat buffers. Invariant: a
push lists every partition of a server, even if it carries nothing for one (rule A3). Must not know: whether a server
answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from shardyard.domain.ids import Caller, Incarnation, PartitionId
from shardyard.domain.layout.layouts import PartitionMap
from shardyard.domain.pulls import PullHeader, RequestedRows
from shardyard.domain.push_names import NO_NAME
from shardyard.domain.pushes import PushedRows, PushHeader, PushKind, PushPart, StepVerdict
from shardyard_worker.exchange.buffers.flat_buffers import FlatBuffers
from shardyard_worker.exchange.overlap import Overlap
from shardyard_worker.exchange.requests import PullSpec, PushRequest
from shardyard_worker.exchange.server_stream import ServerStream
from shardyard_worker.rows.dedup import Float32s
from shardyard_worker.rows.row_codec import RowLookup
from shardyard_worker.rows.row_prefetch import RowPrefetch


class ServerRequest(NamedTuple):
    """`pieces`: the payload for the stream, one piece after the other. `begins`: the place of each piece in the
    payload, if it completes what was sent during backward. `rows`: the memory for rows that come back."""

    header: PushHeader
    pieces: Sequence[memoryview] = ()
    rows: Sequence[memoryview] = ()
    begins: Sequence[int] | None = None


Order = Callable[[], tuple[int, ...]]


class RequestBuilder:
    """For the servers of one partition map.

    `owned`: the partitions of each server. `coding`: how pulled values are coded (PullHeader). `order`: returns the
    indices of variables in the order in which the model needs their values; empty: all at once.
    """

    def __init__(
        self,
        caller: Caller,
        map_: PartitionMap,
        owned: Mapping[Incarnation, tuple[PartitionId, ...]],
        buffers: FlatBuffers,
        overlap: Overlap | None,
        coding: str,
        order: Order,
    ) -> None:
        self._caller = caller
        self._owned = owned
        self._generation = map_.generation
        self._buffers = buffers
        self._overlap = overlap
        self._coding = coding
        self._order = order
        self._pulls: dict[Incarnation, tuple[PullSpec, bool, tuple[int, ...], PullHeader]] = {}

    def header(self, server: Incarnation, kind: PushKind = PushKind.NOTHING, *, detach: bool = False) -> PushHeader:
        """A header without a push or a pull."""
        return PushHeader(self._caller, server, self._generation, NO_NAME, kind, (), 0.0, (), detach=detach)

    def push(
        self, push: PushRequest, pull: PullSpec | None, ahead: RowPrefetch | None, stream: ServerStream
    ) -> ServerRequest:
        """A server's part of a push, of the pull after it, and of the rows that are looked up with the pull."""
        server = stream.server
        parts, pieces, shared_at, begins = self._payload(push, stream)
        rows: tuple[PushedRows, ...] = ()
        behind: list[memoryview] = []
        if push.rows is not None:
            rows, behind = push.rows.of(self._owned[server])
        requested: tuple[RequestedRows, ...] = ()
        places: Sequence[memoryview] = ()
        if pull is not None and ahead is not None:
            requested, ids, places = self._requested(ahead, server)
            behind = [*behind, *ids]
        rows_at, requested_at = stream.put_rows(behind, places) if behind else (None, None)
        if behind and rows_at is None:
            pieces = [*pieces, *behind]
        bases = push.bases
        header = PushHeader(
            self._caller,
            server,
            self._generation,
            push.name,
            push.kind,
            parts,
            push.weight,
            push.groups,
            None if pull is None else self._pull_header(stream, pull, whole=bool(requested)),
            shared_at,
            rest=None if begins is None else sum([len(piece) for piece in pieces]),
            ssp_report=None if pull is None else pull.ssp_report,
            bases=() if bases is None else tuple([bases[part.partition] for part in parts]),
            overflow=push.overflow,
            rows=rows,
            table_groups=push.rows.groups if push.rows is not None and rows else (),
            requested=requested,
            rows_at=rows_at,
            requested_at=requested_at,
        )
        return ServerRequest(header, pieces, places, begins)

    def _payload(
        self, push: PushRequest, stream: ServerStream
    ) -> tuple[tuple[PushPart, ...], Sequence[memoryview], int | None, Sequence[int] | None]:
        """The parts of a push, the pieces for the stream, where the payload begins in shared memory, and `begins`."""
        buffers, server = self._buffers, stream.server
        if push.kind is PushKind.EMPTY or len(push.absent) == len(buffers.layout.variables):
            return buffers.empty_parts(server), (), None, None
        if push.codes is not None:
            return *buffers.coded_parts(server, push.absent, push.codes), None, None
        if stream.shared:
            begin = push.slot * buffers.nbytes(server) if push.slot else 0
            return buffers.shared_parts(server, push.absent), (), begin, None
        rest = self._overlap.rest(server) if self._overlap is not None else None
        if rest is None:
            return *buffers.parts(server, push.absent, push.slot), None, None
        payload = buffers.payload(server)
        pieces = [payload[span.begin : span.end].data for span in rest]
        return buffers.shared_parts(server, push.absent), pieces, None, [span.begin for span in rest]

    def pull(
        self, pull: PullSpec, verdict: StepVerdict | None, ahead: RowPrefetch | None, stream: ServerStream
    ) -> ServerRequest:
        """A server's part of a pull alone. `verdict`: which ranks the step that makes the version may wait for."""
        header = self.header(stream.server)
        requested, ids, places = ((), (), ()) if ahead is None else self._requested(ahead, stream.server)
        made = self._pull_header(stream, pull, whole=bool(requested))
        header = replace(header, pull=made, ssp_report=pull.ssp_report, verdict=verdict)
        if not requested:
            return ServerRequest(header)
        rows_at, requested_at = stream.put_rows(ids, places)
        header = replace(header, requested=requested, rows_at=rows_at, requested_at=requested_at)
        return ServerRequest(header, ids if rows_at is None else (), places)

    def look_up(self, lookup: RowLookup, into: Sequence[Float32s], stream: ServerStream) -> ServerRequest:
        """A look-up of rows alone, whose answer goes into these arrays."""
        header, places = self.header(stream.server), lookup.places(into)
        header.requested = lookup.requested
        header.rows_at, header.requested_at = stream.put_rows(lookup.ids, places)
        return ServerRequest(header, lookup.ids if header.rows_at is None else (), places)

    def _requested(
        self, ahead: RowPrefetch, server: Incarnation
    ) -> tuple[tuple[RequestedRows, ...], Sequence[memoryview], Sequence[memoryview]]:
        """The rows to look up on a server, their encoded ids, and the memory for the rows."""
        lookup = ahead.question(self._owned[server])
        return ((), (), ()) if lookup is None else (lookup.requested, lookup.ids, ahead.places(lookup))

    def _pull_header(self, stream: ServerStream, pull: PullSpec, *, whole: bool) -> PullHeader:
        """Returns the same object while nothing changes, so that a stream recognises the same header at once. `whole`:
        values come in one piece, since rows follow them."""
        server, order = stream.server, self._order() if pull.prefetched and not whole else ()
        kept = self._pulls.get(server)
        if kept is not None and kept[0] is pull and kept[1] == stream.shared and kept[2] is order:
            return kept[3]
        made = PullHeader(
            self._caller,
            server,
            self._generation,
            self._buffers.partitions(server) if pull.values else (),
            pull.number,
            pull.exactly,
            pull.wait_ms,
            coding=self._coding if pull.values else "",
            shared=stream.shared and not self._coding and pull.values,
            order=() if stream.shared else order,
        )
        self._pulls[server] = pull, stream.shared, order, made
        return made
