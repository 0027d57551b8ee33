"""One worker's exchanges on one stream: a push and a pull, then the next, with what they need not say twice.

Owns: what the stream has established (who speaks, which partitions), the worker's attached memory, the buffer that
payloads are put together in. Invariants: what `again` leaves out was admitted on this stream and is admitted anew;
nothing that a worker writes is trusted as a length or a place; a stream that breaks off leaves nothing behind but the
versions lent to its worker, which stay lent until its next exchange, or its end, is known. Must not know: how anything
is stored.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace

from shardyard.domain.consistency import UpdateMode
from shardyard.domain.errors import InvalidRequest, MalformedPayload, NotShareable
from shardyard.domain.ids import PartitionId
from shardyard.domain.limits import FRAME_BYTES, ROWS_ALONG_BYTES_MAX
from shardyard.domain.pulls import PullHeader, ShmHandle, ShmLocation
from shardyard.domain.pushes import ExchangeReply, PushHeader, PushKind
from shardyard.transport.shared_memory import AttachedMemory, attach
from shardyard.wire import frames, push_messages
from shardyard.wire.frames import Assembler, Frame, Scatter
from shardyard.wire.headers import HeaderReader
from shardyard_ps_server.hosting import admission, lookups, pulls, pushes
from shardyard_ps_server.hosting.hosted_job import HeldValues, HostedJob
from shardyard_ps_server.hosting.store import Store
from shardyard_ps_server.rows.partition_tables import RowQuery, check_wanted
from shardyard_ps_server.service.pull_encoder import PullEncoder
from shardyard_ps_server.service.pull_order import PullRun, runs_in_order
from shardyard_ps_server.values.versions import NO_BYTES, Bytes, aligned_empty

log = logging.getLogger("shardyard.server")


NOTHING_SAID = ExchangeReply()

ROOM_ALIGN = 64
"""Of places that rows are put into."""

AT_ONCE_BYTES_MAX = FRAME_BYTES
"""Of all partitions together. An update of so much is done before another thread would have been woken twice."""


class ExchangeStream:
    """Serves one stream. Used by one thread, and while that waits for a request, by any that has one."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._headers = HeaderReader()
        self._hosted: HostedJob | None = None
        self._memory: AttachedMemory | None = None
        self._rows_memory: AttachedMemory | None = None
        self._received: Bytes | None = None
        self._ahead: Scatter | None = None
        self._regions_known = 0
        self._lends = False
        self._coding: tuple[str, PullEncoder] | None = None
        self._takes_a_moment = False
        self._runs: tuple[tuple[PartitionId, ...], tuple[int, ...], tuple[PullRun, ...]] | None = None

    def run(self, stream: Iterator[Frame]) -> Iterator[Frame]:
        """The answers' frames. Ends when the worker ends the stream, or after an exchange where too many are open."""
        stays_open = self._store.begin_stream()
        try:
            for first in stream:
                if self._hosted is not None and not first.header:
                    self._take_ahead(first, self._hosted)
                    continue
                before = self._headers.before
                yield from self._exchange(self._headers.read(first.header), before, first, stream)
                self._ahead = None
                if not stays_open:
                    return
        finally:
            self._store.end_stream(attached=self._is_attached)

    def at_once(self, first: Frame) -> Frame | None:
        """The answer to an exchange that is like the one before, where that never waits for anybody. May be asked while
        `run` waits for a request. What is refused here has changed nothing, and will be refused by `run`."""
        before = self._headers.before
        order = self._headers.read_alike(first.header) if self._takes_a_moment else None
        if order is None:
            return None
        (answer,) = self._exchange(order, before, first, iter(()))
        return answer

    def _exchange(
        self, order: PushHeader, before: PushHeader | None, first: Frame, rest: Iterator[Frame]
    ) -> Iterator[Frame]:
        """The answer's frames. `before`: what was admitted before on this stream."""
        hosted = self._admit(order, before)
        runs = self._runs_of(order.pull, hosted) if order.pull is not None and order.pull.order else None
        if self._lends:  # else the worker may have missed the last answer of a stream before this one
            pulls.reclaim(self._store, hosted, order.caller.incarnation)
        said = NOTHING_SAID if order.attach is None else self._attach(order.attach, hosted)
        if order.attach_rows is not None:
            said = self._attach_rows(order.attach_rows, said)
        if order.verdict is not None:
            pushes.take_verdict(self._store, hosted, order, order.verdict)
        room = self._room(order, hosted)
        payload, rows, ids = self._payload(order, first, rest)
        asked = lookups.decode_queries(hosted, order.wanted, ids)
        if order.kind is not PushKind.NOTHING:
            results = pushes.push(self._store, hosted, order, payload, rows)
            said = ExchangeReply(push=results) if said is NOTHING_SAID else replace(said, push=results)
        if order.ssp_report is not None:
            said = replace(
                said, clock=pulls.report_progress(self._store, hosted, order.caller.incarnation, order.ssp_report)
            )
        self._hosted = hosted
        self._takes_a_moment = takes_a_moment(order, hosted)
        if order.detach and order.pull is not None:
            raise InvalidRequest("a pull in the exchange that detaches")
        if order.detach:
            pulls.reclaim_all(self._store, hosted, order.caller.incarnation)
        if order.pull is None:
            yield Frame(push_messages.pulled_to_header(self._with_regions(said, hosted)), 0, b"")
        elif order.pull.shared:
            yield from self._lend(said, hosted, order, asked, room)
        else:
            result, held = pulls.hold(hosted, order.pull, order.ssp_report)
            try:
                pulls.keep_base(self._store, hosted, order.caller.incarnation, result, held)
                found = replace(said, parts=result.parts, missing=result.missing, gathered=result.gathered)
                more = NO_BYTES if result.missing else self._rows(order, hosted, asked, room)
                if order.pull.coding and not result.missing:
                    codes = self._coder(order.pull.coding, hosted).codes(held)
                    found = replace(found, code_bytes=tuple(map(len, codes)))
                    self._store.count_sent(sum(found.code_bytes))
                    yield from frames.cut(push_messages.pulled_to_header(found), [b"".join(codes), more.data])
                else:
                    self._store.count_sent(held.nbytes)
                    yield from answer(found, held, runs, more)
            finally:
                held.release()

    def _admit(self, order: PushHeader, before: PushHeader | None) -> HostedJob:
        if order.kind is not PushKind.NOTHING:
            refuse_values(order)
            hosted = admission.admit_push(self._store, order, before)
        elif order.pull is not None:
            hosted = admission.admit_pull(self._store, order.pull)
        else:
            hosted = admission.admit(self._store, order.caller, order.server, order.generation)
        if self._hosted is not None and hosted is not self._hosted:
            raise InvalidRequest(f"job {hosted.job} on a stream of job {self._hosted.job}", todo="open another stream")
        if order.wanted:
            if hosted.rules.rows_have_versions and (order.pull is None or not order.pull.exactly):
                raise InvalidRequest(
                    f"rows of job {hosted.job}, which is synchronous, beside values of no version that is named",
                    todo="ask for a version exactly, or for rows with LookUp",
                )
            admission.check_requested_rows(hosted, order.wanted, ROWS_ALONG_BYTES_MAX)
        return hosted

    def _coder(self, coding: str, hosted: HostedJob) -> PullEncoder:
        """The coder for these rules; made once, since it may remember what the worker has."""
        if self._coding is None or self._coding[0] != coding:
            self._coding = coding, PullEncoder(coding, hosted.layout)
        return self._coding[1]

    def _runs_of(self, wish: PullHeader, hosted: HostedJob) -> tuple[PullRun, ...]:
        """In which runs the values go out; made once for an order that comes again."""
        kept = self._runs
        if kept is None or kept[:2] != (wish.partitions, wish.order):
            self._runs = kept = wish.partitions, wish.order, runs_in_order(hosted.layout, wish.partitions, wish.order)
        return kept[2]

    # ---- payloads

    def _payload(self, order: PushHeader, first: Frame, rest: Iterator[Frame]) -> tuple[Bytes, Bytes, Bytes]:
        """The whole payload, and the bytes of rows and of ids that follow it, to be read until the next exchange."""
        pushes = order.kind is not PushKind.NOTHING
        more = (order.rows_bytes if pushes else 0) + order.wanted_bytes
        if order.rest is not None and pushes:
            return self._complete_ahead(order, first, rest), NO_BYTES, NO_BYTES
        nbytes = order.payload_bytes if pushes and order.shared_at is None else 0
        if order.rows_at is None:
            payload, behind = self._sent(order, nbytes, more, first, rest)
        else:
            # copied, so that what is checked, logged and applied is the same, whatever the worker does meanwhile
            behind = self._place_of_rows(order.rows_at, more, align=1).copy()
            payload, _ = self._sent(order, nbytes, 0, first, rest)
        ids_at = more - order.wanted_bytes
        return payload, behind[:ids_at], behind[ids_at:]

    def _sent(
        self, order: PushHeader, nbytes: int, more: int, first: Frame, rest: Iterator[Frame]
    ) -> tuple[Bytes, Bytes]:
        """The payload, of which `nbytes` are sent, and `more` bytes that are sent behind it."""
        pushes = order.kind is not PushKind.NOTHING
        is_shared = pushes and order.shared_at is not None
        if not more and (is_shared or not pushes):
            if len(first.data):
                where = "beside a place in shared memory" if pushes else "in an exchange without a push"
                raise MalformedPayload(f"{len(first.data)} bytes of payload {where}")
            whole = NO_BYTES
        else:
            whole = self._assembled(nbytes + more, first, rest)
        payload = whole[:nbytes]
        if is_shared:
            assert order.shared_at is not None
            payload = self._shared(order.shared_at, order.payload_bytes)
        return payload, whole[nbytes:]

    def _assembled(self, nbytes: int, first: Frame, rest: Iterator[Frame]) -> Bytes:
        """So many bytes of data, all that come with this exchange."""
        if self._received is None or len(self._received) < nbytes:
            self._received = aligned_empty(nbytes)
        payload = self._received[:nbytes]
        assembler = Assembler(payload.data)
        assembler.add(first)
        while not assembler.complete:
            frame = next(rest, None)
            if frame is None:
                assembler.finish()
                break
            assembler.add(frame)
        return payload

    def _take_ahead(self, frame: Frame, hosted: HostedJob) -> None:
        """Data of a push whose header has not come."""
        if self._ahead is None:
            nbytes = hosted.nbytes
            if self._received is None or len(self._received) < nbytes:
                self._received = aligned_empty(nbytes)
            self._ahead = Scatter(self._received[:nbytes].data)
        self._ahead.add(frame)

    def _complete_ahead(self, order: PushHeader, first: Frame, rest: Iterator[Frame]) -> Bytes:
        """The payload of which a part came ahead, in the order of the push's parts."""
        if self._ahead is None or self._received is None:
            raise MalformedPayload("the rest of a payload of which nothing came ahead")
        left = (order.rest or 0) - self._ahead.add(first)
        while left > 0:
            frame = next(rest, None)
            if frame is None:
                break
            left -= self._ahead.add(frame)
        if left or not self._ahead.complete:
            raise MalformedPayload(f"{order.rest} bytes after what came ahead do not make the payload whole")
        return self._received[: order.payload_bytes]

    def _shared(self, at: int, nbytes: int) -> Bytes:
        if self._memory is None:
            raise InvalidRequest(f"{nbytes} bytes of payload in shared memory; none was attached on this stream")
        if at % 64 or at + nbytes > self._memory.nbytes:
            raise MalformedPayload(
                f"{nbytes} bytes of payload at byte {at} of shared memory that has {self._memory.nbytes}"
            )
        return self._memory.bytes[at : at + nbytes]

    # ---- the same host

    @property
    def _is_attached(self) -> bool:
        return self._memory is not None or self._rows_memory is not None

    def _attach_rows(self, ticket: ShmHandle, said: ExchangeReply) -> ExchangeReply:
        try:
            memory = attach(ticket, writable=True)
        except NotShareable as error:
            return replace(said, rows_attached=False, rows_not_attached=error.what)
        if not self._is_attached:
            self._store.attach_stream()
        self._rows_memory = memory
        return replace(said, rows_attached=True)

    def _place_of_rows(self, at: int, nbytes: int, *, align: int) -> Bytes:
        """Bytes of the memory for rows. Raises InvalidRequest, MalformedPayload."""
        memory = self._rows_memory
        if memory is None:
            raise InvalidRequest("a place for rows; no memory for them was attached on this stream")
        if at % align or at + nbytes > memory.nbytes:
            raise MalformedPayload(f"{nbytes} bytes of rows at byte {at} of shared memory that has {memory.nbytes}")
        return memory.bytes[at : at + nbytes]

    def _room(self, order: PushHeader, hosted: HostedJob) -> Bytes | None:
        """Where the rows wanted are to be put; None: they are sent. Raises InvalidRequest, MalformedPayload."""
        if order.wanted_at is None:
            return None
        nbytes = check_wanted(hosted.layout.tables, order.wanted)
        return self._place_of_rows(order.wanted_at, nbytes, align=ROOM_ALIGN)

    def _attach(self, ticket: ShmHandle, hosted: HostedJob) -> ExchangeReply:
        if not hosted.regions.shareable:
            return ExchangeReply(attached=False, not_attached="the server's versions stand in private memory")
        try:
            memory = attach(ticket)
        except NotShareable as error:
            return ExchangeReply(attached=False, not_attached=error.what)
        if not self._is_attached:
            self._store.attach_stream()
        self._memory = memory
        return ExchangeReply(attached=True)

    def _with_regions(self, said: ExchangeReply, hosted: HostedJob) -> ExchangeReply:
        """With the tickets of regions that this stream has not named yet, for a worker that is attached."""
        if self._memory is None:
            return said
        fresh = hosted.regions.tickets(known=self._regions_known)
        self._regions_known += len(fresh)
        return replace(said, regions=fresh) if fresh else said

    def _rows(self, order: PushHeader, hosted: HostedJob, asked: Sequence[RowQuery], room: Bytes | None) -> Bytes:
        """Those that ride along: of a synchronous step those of the version of the values, else as they are now. Values
        wait no more. With `room` they are put there, and nothing of them is sent. Raises StaleGeneration."""
        if not asked:
            return NO_BYTES
        number = order.pull.number if order.pull is not None and hosted.rules.rows_have_versions else None
        found = lookups.find_rows(self._store, hosted, asked, number, into=room, worker=order.caller.incarnation)
        if room is None:
            self._store.count_sent(len(found))
        hosted.check_generation(order.generation)  # else partitions may have gone back, or moved, meanwhile
        return found if room is None else NO_BYTES

    def _lend(
        self, said: ExchangeReply, hosted: HostedJob, order: PushHeader, asked: Sequence[RowQuery], room: Bytes | None
    ) -> Iterator[Frame]:
        """An answer that says where the values lie."""
        assert order.pull is not None
        if self._memory is None:
            raise InvalidRequest("a shared pull on a stream without attached memory", todo="attach first")
        if order.pull.coding:
            raise InvalidRequest("a shared pull with a coding", todo="ask for the one or the other")
        result, held = pulls.hold(hosted, order.pull, order.ssp_report)
        places: list[ShmLocation] = []
        for partition, buffer in held.buffers:
            place = partition.place(buffer)
            if place is None and len(buffer):
                held.release()
                raise NotShareable(f"version of partition {partition.id} in private memory")
            places.append(place or ShmLocation(0, 0))
        rows = NO_BYTES
        if held.buffers:  # while something is missing, the worker reads on what it has
            try:
                rows = self._rows(order, hosted, asked, room)
            except BaseException:
                held.release()
                raise
            pulls.keep_base(self._store, hosted, order.caller.incarnation, result, held)
            pulls.lend(self._store, hosted, order.caller.incarnation, held)
            self._lends = True
        found = ExchangeReply(
            parts=result.parts,
            missing=result.missing,
            push=said.push,
            attached=said.attached,
            not_attached=said.not_attached,
            places=tuple(places),
            clock=said.clock,
            gathered=result.gathered,
            rows_attached=said.rows_attached,
            rows_not_attached=said.rows_not_attached,
        )
        yield from frames.cut(push_messages.pulled_to_header(self._with_regions(found, hosted)), [rows.data])


def answer(
    result: ExchangeReply, held: HeldValues, runs: Sequence[PullRun] | None = None, rows: Bytes = NO_BYTES
) -> Iterator[Frame]:
    """A pull's answer over a stream. What fits into one frame is not worth an order."""
    header = push_messages.pulled_to_header(result)
    if not runs or not held.buffers or held.nbytes <= FRAME_BYTES:
        return frames.cut(header, [*(buffer.data for _, buffer in held.buffers), rows.data])
    return frames.cut_places(
        header, [(run.offset, held.buffers[run.part][1][run.begin : run.end].data) for run in runs]
    )


def takes_a_moment(order: PushHeader, hosted: HostedJob) -> bool:
    """Whether an exchange waits neither for the rest of its payload, nor for others' pushes, nor long for a lock, and
    is answered with one frame."""
    pull = order.pull
    return (
        hosted.mode is UpdateMode.ASYNC
        and hosted.wal is None
        and hosted.nbytes <= AT_ONCE_BYTES_MAX
        and order.rest is None
        and order.ssp_report is None
        and not order.rows
        and not order.wanted
        and (pull is None or not (pull.number or pull.coding))
    )


def refuse_values(order: PushHeader) -> None:
    if order.kind is PushKind.VALUES:
        raise InvalidRequest("first values in a push", todo="send them with Initialize")
