"""One worker's exchanges on one stream: a push and a pull, then the next.

Owns: what the stream has established: the worker's job, its attached memory, which plans were admitted. Invariants:
every header is admitted, also one that repeats the fields of the header before it; if it names a plan, what both share
is not checked again while the store's epoch is the same; a length or location that a worker wrote is always checked; a
stream that breaks leaves nothing behind except the versions lent to its worker. They stay lent until the worker's next
exchange that lends, or until it is known to have ended. Must not know: how anything is stored.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from shardyard.domain.consistency import UpdateMode
from shardyard.domain.errors import InvalidRequest, NotShareable
from shardyard.domain.ids import PartitionId
from shardyard.domain.limits import FRAME_BYTES, PLANS_MAX, ROWS_ALONG_BYTES_MAX
from shardyard.domain.pulls import PullHeader, ShmLocation
from shardyard.domain.pushes import ExchangeReply, PushHeader, PushKind
from shardyard.security.passes import speaker
from shardyard.security.request_rates import RequestRates
from shardyard.transport.interfaces import Descriptors, Pause, UntilPause
from shardyard.wire import frames
from shardyard.wire.frames import Frame
from shardyard.wire.headers import HeaderReader, reply_to_header
from shardyard_ps_server.hosting import admission, lookups, pulls, pushes
from shardyard_ps_server.hosting.admission import Admitted
from shardyard_ps_server.hosting.hosted_job import HeldValues, HostedJob
from shardyard_ps_server.hosting.store import Store
from shardyard_ps_server.partition.partition import Partition
from shardyard_ps_server.rows.pushed_rows import RowQuery, requested_bytes_max
from shardyard_ps_server.service.payload_reader import PayloadReader
from shardyard_ps_server.service.pull_encoder import PullEncoder
from shardyard_ps_server.service.pull_order import PullRun, runs_in_order
from shardyard_ps_server.service.stream_memory import ROWS_ALIGN, StreamMemory
from shardyard_ps_server.service.version_pause import VersionPause
from shardyard_ps_server.values.versions import NO_BYTES, Bytes

IMMEDIATE_BYTES_MAX = FRAME_BYTES
"""Bytes of all partitions together. An update of this size costs less than a thread switch."""


class ExchangeStream:
    """Used by one thread at a time. While it waits for a request, the thread that has received one may call
    `answer_at_once`."""

    def __init__(self, store: Store, descriptors: Descriptors | None = None) -> None:
        self._store = store
        self._headers = HeaderReader()
        self._memory = StreamMemory(descriptors)
        self._payloads = PayloadReader(self._memory, store.receiving)
        self._hosted: HostedJob | None = None
        self._admitted: dict[int, tuple[PushHeader, Admitted]] = {}
        """Plans of this stream, by identity, and how the last exchange that named them was admitted."""
        self._last: PushHeader | None = None
        self._lends = False
        self._encoder: tuple[str, PullEncoder] | None = None
        self._runs: tuple[tuple[PartitionId, ...], tuple[int, ...], tuple[PullRun, ...]] | None = None

    def run(self, stream: Iterator[Frame]) -> Iterator[Frame | Pause | None]:
        """Yields the replies' frames, None where it waits for a request, and its pauses. Ends when the worker ends the
        stream, or after one exchange if too many are open."""
        stays_open = self._store.begin_stream()
        try:
            while True:
                yield None
                first = next(stream, None)
                if first is None:
                    return
                if self._hosted is not None and not first.header:
                    self._payloads.add_early(first, self._hosted)
                    continue
                header, plan = self._headers.read(first.header)
                if self._store.rates is not None:
                    yield from _in_its_turn(self._store.rates, header)
                yield from self._exchange(header, plan, first, stream)
                if not stays_open:
                    return
        finally:
            self._payloads.close()
            self._store.end_stream(attached=self._memory.is_attached)

    def answer_at_once(self, first: Frame) -> Frame | None:
        """Returns the reply to an exchange like the one before, if it never has to wait. A request that is refused here
        has changed nothing, and `run` will refuse it."""
        hosted, last = self._hosted, self._last
        if hosted is None or last is None or not is_immediate(last, hosted):
            return None
        if not self._headers.is_step(first.header):
            return None
        header, plan = self._headers.read(first.header)
        if not is_immediate(header, hosted):
            return None
        if self._store.rates is not None and not self._store.rates.admits(_job_of(header)):
            return None
        (reply,) = self._exchange(header, plan, first, iter(()), at_once=True)
        assert isinstance(reply, Frame)
        return reply

    def _exchange(
        self,
        header: PushHeader,
        plan: PushHeader | None,
        first: Frame,
        rest: Iterator[Frame],
        *,
        at_once: bool = False,
    ) -> Iterator[Frame | Pause]:
        """Yields the reply's frames. `plan`: the plan that the header names, which was admitted on this stream.
        `at_once`: it waits for nothing."""
        admitted = self._admit(header, plan)
        hosted = admitted.hosted
        pull, worker = header.pull, header.caller.incarnation
        runs = self._runs_of(pull, hosted) if pull is not None and pull.order else None
        # A new stream takes nothing back: if the last reply on the stream before it was lost, the worker still reads
        # what the reply before that one lent.
        if self._lends:
            pulls.reclaim(self._store, hosted, worker)
        reply = ExchangeReply()
        if header.attach is not None or header.attach_rows is not None:
            was_attached = self._memory.is_attached
            self._memory.attach(header, hosted.regions, reply)
            if self._memory.is_attached and not was_attached:
                self._store.attach_stream()
        if header.verdict is not None:
            pushes.take_verdict(self._store, hosted, header, header.verdict)
        room = None if header.requested_at is None else self._room_for_rows(header, hosted, header.requested_at)
        payload, rows, ids = self._payloads.read(header, first, rest, at_once=at_once)
        queries: Sequence[RowQuery] = ()
        if header.requested:
            queries = lookups.read_queries(hosted, header.requested, ids)
        if header.kind is not PushKind.NOTHING:
            reply.push = pushes.push(self._store, admitted, header, payload, rows)
        self._payloads.release()
        if header.ssp_report is not None:
            reply.clock = pulls.report_progress(self._store, hosted, worker, header.ssp_report)
        self._hosted, self._last = hosted, header
        if header.detach and pull is not None:
            raise InvalidRequest("a pull in the exchange that detaches")
        if header.detach:
            pulls.reclaim_all(self._store, hosted, worker)
        if pull is None:
            self._memory.name_regions(hosted.regions, reply)
            rows_found = self._find_rows(header, hosted, queries, room)
            yield from frames.cut(reply_to_header(reply, plan), [rows_found.data])
            return
        if not pull.partitions:
            self._memory.name_regions(hosted.regions, reply)
            pulls.await_version_of_all(hosted, pull, reply)
            more = NO_BYTES if reply.missing else self._find_rows(header, hosted, queries, room)
            yield from frames.cut(reply_to_header(reply, plan), [more.data])
            return
        if pull.shared:
            yield from self._lend(reply, hosted, header, plan, pull, queries, room)
            return
        _, held = pulls.hold(hosted, pull, header.ssp_report, reply)
        try:
            pulls.keep_base(self._store, hosted, worker, reply, held)
            more = NO_BYTES if reply.missing else self._find_rows(header, hosted, queries, room)
            if pull.coding and not reply.missing:
                codes = list(self._encoder_for(pull.coding, hosted).codes(held))
                reply.code_bytes = tuple(map(len, codes))
                self._store.count_sent(sum(reply.code_bytes))
                yield from frames.cut(reply_to_header(reply, plan), [b"".join(codes), more.data])
            else:
                self._store.count_sent(held.nbytes)
                yield from values_frames(reply_to_header(reply, plan), held, runs, more)
        finally:
            held.release()

    def _admit(self, header: PushHeader, plan: PushHeader | None) -> Admitted:
        known = self._admitted.get(id(plan)) if plan is not None else None
        if known is not None and known[1].epoch == self._store.epoch:
            admitted = known[1]
            if header.kind is not PushKind.NOTHING:
                admission.check_push_header(admitted.hosted, header, plan)
        else:
            admitted = self._admit_anew(header)
            if plan is not None:
                if len(self._admitted) >= PLANS_MAX:
                    self._admitted.clear()
                self._admitted[id(plan)] = plan, admitted
        hosted = admitted.hosted
        if self._hosted is not None and hosted is not self._hosted:
            raise InvalidRequest(f"job {hosted.job} on a stream of job {self._hosted.job}", todo="open another stream")
        if header.requested:
            hosted.check_open()
            if hosted.rules.rows_have_versions and (header.pull is None or not header.pull.exactly):
                raise InvalidRequest(
                    f"rows of job {hosted.job}, which is synchronous, beside values of no version that is named",
                    todo="ask for a version exactly, or for rows with LookUp",
                )
            admission.check_requested_rows(hosted, header.requested, ROWS_ALONG_BYTES_MAX)
        return admitted

    def _admit_anew(self, header: PushHeader) -> Admitted:
        if header.kind is not PushKind.NOTHING:
            refuse_values(header)
            return admission.admit_push(self._store, header)
        epoch = self._store.epoch
        if header.pull is not None:
            return Admitted(admission.admit_pull(self._store, header.pull), epoch)
        return Admitted(admission.admit(self._store, header.caller, header.server, header.generation), epoch)

    def _encoder_for(self, coding: str, hosted: HostedJob) -> PullEncoder:
        """Returns the encoder, which is made once for a coding, since it may remember what the worker has."""
        if self._encoder is None or self._encoder[0] != coding:
            self._encoder = coding, PullEncoder(coding, hosted.layout)
        return self._encoder[1]

    def _runs_of(self, pull: PullHeader, hosted: HostedJob) -> tuple[PullRun, ...]:
        """Returns the runs in which the values are sent. They are made once for an order that comes again."""
        kept = self._runs
        if kept is None or kept[:2] != (pull.partitions, pull.order):
            self._runs = kept = pull.partitions, pull.order, runs_in_order(hosted.layout, pull.partitions, pull.order)
        return kept[2]

    def _room_for_rows(self, header: PushHeader, hosted: HostedJob, at: int) -> Bytes:
        """Returns the worker's memory for the rows that it asks for. Otherwise the rows are sent."""
        nbytes = requested_bytes_max(hosted.layout.tables, header.requested)
        return self._memory.rows(at, nbytes, align=ROWS_ALIGN)

    def _find_rows(
        self, header: PushHeader, hosted: HostedJob, queries: Sequence[RowQuery], room: Bytes | None
    ) -> Bytes:
        """Returns the rows to send. In a synchronous step they have the version of the values, otherwise the newest.
        With `room` they are written there, and none are sent. Raises StaleGeneration."""
        if not queries:
            return NO_BYTES
        number = header.pull.number if header.pull is not None and hosted.rules.rows_have_versions else None
        worker = header.caller.incarnation
        found = lookups.find_rows(self._store, hosted, queries, number, into=room, worker=worker)
        if room is None:
            self._store.count_sent(len(found))
        hosted.check_generation(header.generation)  # meanwhile partitions may have been restored or moved
        return found if room is None else NO_BYTES

    def _lend(
        self,
        reply: ExchangeReply,
        hosted: HostedJob,
        header: PushHeader,
        plan: PushHeader | None,
        pull: PullHeader,
        queries: Sequence[RowQuery],
        room: Bytes | None,
    ) -> Iterator[Frame | Pause]:
        """Yields a reply that says where the values are in shared memory."""
        worker = header.caller.incarnation
        if not self._memory.has_payloads:
            raise InvalidRequest("a shared pull on a stream without attached memory", todo="attach first")
        if pull.coding:
            raise InvalidRequest("a shared pull with a coding", todo="ask for the one or the other")
        until = time.monotonic() + pull.wait_ms / 1000
        if pull.exactly and pull.number and hosted.wal is None and not queries:
            pause = VersionPause([hosted.find(number) for number in pull.partitions], pull.number, until)
            while not pause.is_over:
                yield pause
        _, held = pulls.hold(hosted, pull, header.ssp_report, reply, until=until)
        rows = NO_BYTES
        if held.buffers:  # while something is missing, the worker keeps reading what it has
            try:
                places: list[ShmLocation] = []
                for partition, buffer in held.buffers:
                    places.append(_place_of(partition, buffer))
                reply.places = tuple(places)
                rows = self._find_rows(header, hosted, queries, room) if queries else NO_BYTES
            except BaseException:
                held.release()
                raise
            pulls.keep_base(self._store, hosted, worker, reply, held)
            pulls.lend(self._store, hosted, worker, held)
            self._lends = True
        self._memory.name_regions(hosted.regions, reply)
        yield from frames.cut(reply_to_header(reply, plan), [rows.data])


def _place_of(partition: Partition, buffer: Bytes) -> ShmLocation:
    place = partition.versions.place(buffer)
    if place is None and len(buffer):
        raise NotShareable(f"version of partition {partition.id} in private memory")
    return place or ShmLocation(0, 0)


def values_frames(
    header: bytes, held: HeldValues, runs: Sequence[PullRun] | None = None, rows: Bytes = NO_BYTES
) -> Iterator[Frame]:
    """Yields the frames of a pull's reply. Values that fit into one frame are sent in layout order."""
    if not runs or not held.buffers or held.nbytes <= FRAME_BYTES:
        return frames.cut(header, [*(buffer.data for _, buffer in held.buffers), rows.data])
    return frames.cut_places(
        header, [(run.offset, held.buffers[run.part][1][run.begin : run.end].data) for run in runs]
    )


def is_immediate(header: PushHeader, hosted: HostedJob) -> bool:
    """Whether an exchange waits neither for the rest of its payload, nor for other pushes, nor long for a lock, and its
    reply is one frame."""
    pull = header.pull
    return (
        hosted.mode is UpdateMode.ASYNC
        and hosted.wal is None
        and hosted.nbytes <= IMMEDIATE_BYTES_MAX
        and header.rest is None
        and header.ssp_report is None
        and not header.rows
        and not header.requested
        and (pull is None or not (pull.number or pull.coding))
    )


def _job_of(header: PushHeader) -> str:
    """The job whose request this is, as its pass says, if there are certificates."""
    held = speaker.get()
    return f"job {header.caller.job if held is None or held.job_pass is None else held.job_pass.job}"


def _in_its_turn(rates: RequestRates, header: PushHeader) -> Iterator[Pause]:
    """Pauses until the job may make another request."""
    until = rates.due_s(_job_of(header))
    while time.monotonic() < until:
        yield UntilPause(until)


def refuse_values(header: PushHeader) -> None:
    if header.kind is PushKind.VALUES:
        raise InvalidRequest("first values in a push", todo="send them with Initialize")
