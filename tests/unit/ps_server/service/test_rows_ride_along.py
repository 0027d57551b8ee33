"""Rows that an exchange brings along with the values: as they are after its push, and never where it is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from shardyard.codecs.dense.decoding import decode
from shardyard.domain.consistency import SspPhase, SspReport, UpdateMode
from shardyard.domain.errors import InvalidRequest, MalformedPayload, NotReady, ShardyardError, TooLarge
from shardyard.domain.ids import Caller, Incarnation, Rank, Term, Token
from shardyard.domain.limits import FRAME_BYTES
from shardyard.domain.pulls import PullHeader, RequestedRows
from shardyard.domain.push_names import NO_NAME, PushName, RankSource, SourceKey, WorkerSource
from shardyard.domain.pushes import ExchangeReply, PushedRows, PushHeader, PushKind, PushPart
from shardyard.domain.tables.row_ids import partition_of
from shardyard.domain.tables.row_values import initial_rows, row_key
from shardyard.transport.in_process import InProcessDescriptors
from shardyard.transport.shared_memory import SharedMemory
from shardyard.wire import frames, push_messages
from shardyard.wire.frames import Assembler, Frame
from shardyard.wire.headers import HeaderReader, HeaderWriter, reply_from_header
from shardyard_ps_server.hosting import orders, pushes
from shardyard_ps_server.hosting.hosted_job import CreateRequest
from shardyard_ps_server.hosting.store import Store
from shardyard_ps_server.partition.update_rules import UpdateRules
from shardyard_ps_server.service.exchange_stream import ExchangeStream
from shardyard_ps_server.service.servicer import Servicer
from tests.support.exchanges import replies_of
from tests.support.rows_in_pushes import CONTEXT, DENSE, GENERATION, HERE, IDS, JOB, PARTS, RATE, WIDE, WORKER, coded
from tests.support.rows_in_pushes import LAYOUT as LAYOUT_OF_TWO

TABLE = dataclasses.replace(WIDE, rows_max=1 << 20)
DIM = TABLE.dim
LAYOUT = dataclasses.replace(LAYOUT_OF_TWO, tables=(TABLE,))
PAYLOAD_BYTES = 128


@pytest.fixture
def store() -> Iterator[Store]:
    made = Store(shareable=True)
    made.become(HERE, Term(1))
    orders.create(made, CreateRequest(JOB, GENERATION, LAYOUT, list(PARTS), UpdateRules(UpdateMode.ASYNC, 1)))
    orders.open_partitions(made, JOB, GENERATION)
    yield made
    made.close()


def by_partition(ids: np.ndarray) -> list[np.ndarray]:
    return [np.sort(ids[partition_of(ids, 2) == p]) for p in PARTS]


def asked(ids: np.ndarray = IDS) -> tuple[tuple[RequestedRows, ...], bytes]:
    rows = tuple(mine.size for mine in by_partition(ids))
    return (RequestedRows(0, PARTS, rows),), b"".join(mine.tobytes() for mine in by_partition(ids))


def pushed(ids: np.ndarray = IDS, scale: float = 1.0) -> tuple[tuple[PushedRows, ...], bytes]:
    return coded(
        [
            (0, p, mine, np.full((mine.size, DIM), scale, np.float32))
            for p, mine in zip(PARTS, by_partition(ids), strict=True)
        ]
    )


INITIAL = np.concatenate([initial_rows(mine, DIM, TABLE.initial, row_key(5, "wide")) for mine in by_partition(IDS)])


class Wire:
    """A worker's end of a stream. What it sends and gets is encoded, as between processes."""

    def __init__(self, store: Store) -> None:
        self._writer = HeaderWriter()
        self._sent: list[Frame] = []
        self.descriptors, there = InProcessDescriptors.pair()
        self._answers = replies_of(ExchangeStream(store, there), self._frames())

    def _frames(self) -> Iterator[Frame]:
        while self._sent:
            yield frames.decode(frames.encode(self._sent.pop(0)))

    def exchange(
        self, order: PushHeader, data: bytes = b"", *, frame_bytes: int = 50
    ) -> tuple[ExchangeReply, list[Frame]]:
        """The answer's head, and its frames."""
        self._sent += frames.cut(self._writer.write(order), [data], frame_bytes)
        first = frames.decode(frames.encode(next(self._answers)))
        pulled = () if order.pull is None else order.pull.partitions
        pushed = tuple(part.partition for part in order.parts)
        shared = order.pull is not None and order.pull.shared
        result = reply_from_header(first.header, pulled, pushed, shared=shared)
        found = [first]
        while sum(len(frame.data) for frame in found) < self._expected(order, result):
            found.append(frames.decode(frames.encode(next(self._answers))))
        return result, found

    @staticmethod
    def _expected(order: PushHeader, result: ExchangeReply) -> int:
        if result.missing:
            return 0
        if order.pull is None:
            return 0 if order.requested_at is not None else 4 * DIM * sum(sum(each.rows) for each in order.requested)
        is_alone = order.pull.shared or not order.pull.partitions
        values = sum(result.code_bytes) if order.pull.coding else 0 if is_alone else PAYLOAD_BYTES
        return (
            values
            if order.requested_at is not None
            else values + 4 * DIM * sum(sum(each.rows) for each in order.requested)
        )


def wish(**more: Any) -> PullHeader:
    return dataclasses.replace(PullHeader(Caller(JOB, WORKER), HERE, GENERATION, PARTS, 0, False), **more)


def order(sequence: int | None, rows: tuple[PushedRows, ...] = (), **more: Any) -> PushHeader:
    """A push, or None: none."""
    caller = Caller(JOB, WORKER)
    made = PushHeader(caller, HERE, GENERATION, NO_NAME, PushKind.NOTHING, (), 0.0, (), pull=wish())
    if sequence is not None:
        name = PushName(SourceKey(WorkerSource(WORKER)), Token(0), sequence, sequence)
        parts = tuple(PushPart(p, 64) for p in PARTS)
        made = dataclasses.replace(made, name=name, kind=PushKind.GRADIENT, parts=parts, weight=1.0, groups=(RATE,))
        made = dataclasses.replace(made, rows=rows, table_groups=(RATE,) if rows else ())
    return dataclasses.replace(made, **more)


def taken(found: Sequence[Frame], before: int = PAYLOAD_BYTES) -> tuple[bytes, np.ndarray]:
    """Values, and the rows that follow them."""
    data = bytearray(sum(len(frame.data) for frame in found))
    assembler = Assembler(memoryview(data))
    for frame in found:
        assembler.add(frame)
    assembler.finish()
    return bytes(data[:before]), np.frombuffer(bytes(data[before:]), np.float32).reshape(-1, DIM)


def test_rows_are_those_after_the_push_that_they_come_with(store: Store) -> None:
    wire = Wire(store)
    requested, ids = asked()
    expected = INITIAL
    for sequence in range(4):
        rows, data = pushed()
        expected = expected - np.float32(1)
        result, found = wire.exchange(order(sequence, rows, requested=requested), DENSE + data + ids)
        values, seen = taken(found)
        assert (np.frombuffer(values, np.float32) == -(sequence + 1)).all()
        assert (seen == expected).all()
        assert [part.version.number for part in result.parts] == [sequence + 1] * 2
    rows, data = pushed()
    _, found = wire.exchange(order(3, rows, requested=requested), DENSE + data + ids)
    assert (taken(found)[1] == expected).all()


def test_rows_come_without_a_push_too_and_with_one_that_has_none(store: Store) -> None:
    wire = Wire(store)
    requested, ids = asked()
    _, found = wire.exchange(order(None, requested=requested), ids)
    assert (taken(found)[1] == INITIAL).all()
    _, found = wire.exchange(order(0, requested=requested), DENSE + ids)
    assert (np.frombuffer(taken(found)[0], np.float32) == -1).all()
    assert (taken(found)[1] == INITIAL).all()
    nothing = tuple(PushPart(p, 0) for p in PARTS)
    empty = order(1, requested=requested, kind=PushKind.EMPTY, weight=0.0, groups=(), parts=nothing)
    _, found = wire.exchange(empty, ids)
    assert (taken(found)[1] == INITIAL).all()
    _, found = wire.exchange(order(None))
    assert len(taken(found)[0]) == PAYLOAD_BYTES
    assert sum(len(frame.data) for frame in found) == PAYLOAD_BYTES


def test_rows_come_alone_as_they_are_now(store: Store) -> None:
    wire = Wire(store)
    requested, ids = asked()
    _, found = wire.exchange(order(None, requested=requested, pull=None), ids)
    assert (taken(found, 0)[1] == INITIAL).all()
    rows, data = pushed()
    wire.exchange(order(0, rows), DENSE + data)
    _, found = wire.exchange(order(None, requested=requested, pull=None), ids)
    assert (taken(found, 0)[1] == INITIAL - 1).all()
    result, found = wire.exchange(order(None))
    assert [part.version.number for part in result.parts] == [1] * 2


def test_rows_do_not_come_alone_before_a_job_is_open_or_where_they_have_versions(
    stepping: tuple[Store, list[PushName]],
) -> None:
    requested, ids = asked()
    with pytest.raises(InvalidRequest, match="beside values of no version that is named"):
        Wire(stepping[0]).exchange(order(None, requested=requested, pull=None), ids)
    closed = Store(shareable=False)
    try:
        closed.become(HERE, Term(1))
        orders.create(closed, CreateRequest(JOB, GENERATION, LAYOUT, list(PARTS), UpdateRules(UpdateMode.ASYNC, 0)))
        with pytest.raises(NotReady, match="no first values yet"):
            Wire(closed).exchange(order(None, requested=requested, pull=None), ids)
    finally:
        closed.close()


def test_rows_follow_codes_and_places(store: Store) -> None:
    requested, ids = asked()
    coded, found = Wire(store).exchange(order(None, requested=requested, pull=wish(coding="bf16")), ids)
    codes, rows = taken(found, sum(coded.code_bytes))
    values = np.ones(16, np.float32)
    decode(codes[: coded.code_bytes[0]], values)
    assert (values == 0).all()
    assert (rows == INITIAL).all()

    memory = SharedMemory(4096, read_only=False)
    try:
        memory.bytes[64:192] = np.frombuffer(DENSE, np.uint8)
        wire = Wire(store)
        wire.descriptors.pass_descriptors([memory.descriptor()])
        assert wire.exchange(order(None, pull=None, attach=memory.ticket()))[0].attached
        rows_said, data = pushed()
        shared = order(0, rows_said, requested=requested, shared_at=64, pull=wish(shared=True))
        result, found = wire.exchange(shared, data + ids)
        assert len(result.places) == 2
        assert (taken(found, 0)[1] == INITIAL - 1).all()
        alone = order(1, requested=requested, shared_at=64, pull=wish(shared=True))
        assert (taken(wire.exchange(alone, ids)[1], 0)[1] == INITIAL - 1).all()
    finally:
        memory.close()


# ---- in memory that the worker and the server share


class Room:
    """Memory for rows, as a worker has it: pushed rows from byte 100 on, requested rows from byte 1024 on."""

    PUSHED, READ = 100, 1024

    def __init__(self, wire: Wire, nbytes: int = 2048) -> None:
        self.memory = SharedMemory(nbytes, read_only=False)
        self.memory.bytes[:] = 0xAB
        wire.descriptors.pass_descriptors([self.memory.descriptor()])
        head, _ = wire.exchange(order(None, pull=None, attach_rows=self.memory.ticket()))
        assert (head.rows_attached, head.rows_not_attached) == (True, "")

    def put(self, data: bytes) -> int:
        self.memory.bytes[self.PUSHED : self.PUSHED + len(data)] = np.frombuffer(data, np.uint8)
        return self.PUSHED

    @property
    def rows(self) -> np.ndarray:
        nbytes = INITIAL.nbytes
        assert (self.memory.bytes[self.READ + nbytes :] == 0xAB).all()
        return self.memory.bytes[self.READ : self.READ + nbytes].view(np.float32).reshape(-1, DIM)


@pytest.mark.parametrize("pushed_there", [True, False])
@pytest.mark.parametrize("read_there", [True, False])
def test_rows_pass_through_shared_memory_both_ways(store: Store, pushed_there: bool, read_there: bool) -> None:
    wire = Wire(store)
    room = Room(wire)
    requested, ids = asked()
    for sequence in range(3):
        rows, data = pushed()
        at = room.put(data + ids) if pushed_there else None
        said = order(sequence, rows, requested=requested, rows_at=at, requested_at=Room.READ if read_there else None)
        _, found = wire.exchange(said, DENSE if pushed_there else DENSE + data + ids)
        values, seen = taken(found)
        assert (np.frombuffer(values, np.float32) == -(sequence + 1)).all()
        assert seen.size == 0 if read_there else seen.shape == INITIAL.shape
        assert ((room.rows if read_there else seen) == INITIAL - np.float32(sequence + 1)).all()


def test_rows_in_shared_memory_are_not_counted_as_moved(store: Store) -> None:
    wire = Wire(store)
    room = Room(wire)
    (rows, data), (requested, ids) = pushed(), asked()
    wire.exchange(order(0, rows, requested=requested, rows_at=room.put(data + ids), requested_at=Room.READ), DENSE)
    assert (store.counters.bytes_received, store.counters.bytes_sent) == (len(DENSE), PAYLOAD_BYTES)
    assert store.counters.streams_attached == 1


def test_rows_requested_alone_come_through_shared_memory(store: Store) -> None:
    wire = Wire(store)
    room = Room(wire)
    requested, ids = asked()
    _, found = wire.exchange(order(None, requested=requested, rows_at=room.put(ids), requested_at=Room.READ))
    assert len(taken(found)[0]) == PAYLOAD_BYTES
    assert (room.rows == INITIAL).all()


@pytest.mark.parametrize(
    ("more", "kind", "text"),
    [
        ({"rows_at": 2048 - 8}, MalformedPayload, "of shared memory that has 2048"),
        ({"requested_at": 1024 + 8}, MalformedPayload, "at byte 1032 of shared memory"),
        ({"requested_at": 2048 - 64}, MalformedPayload, "of shared memory that has 2048"),
        ({"requested_at": (1 << 64) - 64}, MalformedPayload, "of shared memory that has 2048"),
        ({"requested": ()}, MalformedPayload, "has and requests none"),
        ({"rows": (), "requested": (), "requested_at": None}, MalformedPayload, "has and requests none"),
    ],
)
def test_a_place_for_rows_that_cannot_be_is_refused_with_its_push(
    store: Store, more: dict[str, Any], kind: type[ShardyardError], text: str
) -> None:
    wire = Wire(store)
    room = Room(wire)
    (rows, data), before = pushed(), state(store)
    given = {"requested": GOOD, "rows_at": room.put(data + GOOD_IDS), "requested_at": Room.READ}
    with pytest.raises(kind, match=text):
        wire.exchange(dataclasses.replace(order(0, rows, **given), **more), DENSE)
    assert state(store) == before
    assert (room.memory.bytes[Room.READ :] == 0xAB).all()


def test_a_place_for_rows_without_memory_for_them_is_refused(store: Store) -> None:
    (rows, _), before = pushed(), state(store)
    for more in ({"rows_at": 0}, {"rows_at": 0, "requested": GOOD}, {"requested": GOOD, "requested_at": 0}):
        with pytest.raises(InvalidRequest, match="no memory for them was attached"):
            Wire(store).exchange(order(0, rows, **more), DENSE)
    assert state(store) == before


def test_rows_in_shared_memory_and_as_data_too_are_refused(store: Store) -> None:
    wire = Wire(store)
    room = Room(wire)
    (rows, data), before = pushed(), state(store)
    with pytest.raises(MalformedPayload, match="the header announced"):
        wire.exchange(order(0, rows, rows_at=room.put(data)), DENSE + data)
    assert state(store) == before


def test_memory_for_rows_that_cannot_be_opened_is_said_and_the_stream_goes_on(store: Store) -> None:
    wire, memory = Wire(store), SharedMemory(2048, read_only=False)
    requested, ids = asked()
    shown = SharedMemory(2048, read_only=True)  # nobody else can write there
    for offered, nbytes in ((memory, 2049), (shown, 2048)):
        wire.descriptors.pass_descriptors([offered.descriptor()])
        ticket = dataclasses.replace(offered.ticket(), nbytes=nbytes)
        head, _ = wire.exchange(order(None, pull=None, attach_rows=ticket))
        assert not head.rows_attached
        assert head.rows_not_attached
    assert (taken(wire.exchange(order(None, requested=requested), ids)[1])[1] == INITIAL).all()
    assert store.counters.streams_attached == 0


def test_what_a_worker_writes_while_its_rows_are_applied_changes_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire = Wire(store)
    room = Room(wire)
    rows, data = pushed()
    push = pushes.push

    def scribble(*given: Any) -> Any:
        room.memory.bytes[: Room.READ] = 0xFF
        return push(*given)

    monkeypatch.setattr(pushes, "push", scribble)
    wire.exchange(order(0, rows, rows_at=room.put(data)), DENSE)
    requested, ids = asked()
    assert (taken(Wire(store).exchange(order(None, requested=requested), ids)[1])[1] == INITIAL - 1).all()


def test_rows_are_in_shared_memory_when_no_value_is_missing_and_not_before() -> None:
    store = Store(shareable=False)
    store.become(HERE, Term(1))
    orders.create(
        store,
        CreateRequest(
            JOB, GENERATION, LAYOUT, list(PARTS), UpdateRules(UpdateMode.ASYNC, 1), staleness=0, working=[WORKER, 11]
        ),
    )
    orders.open_partitions(store, JOB, GENERATION)
    wire = Wire(store)
    room = Room(wire)
    requested, ids = asked()
    said = order(
        0,
        requested=requested,
        ssp_report=SspReport(SspPhase.STEPS, 0, 1, 0),
        rows_at=room.put(ids),
        requested_at=Room.READ,
    )
    result, _ = wire.exchange(said, DENSE)
    assert result.missing
    assert (room.memory.bytes[Room.READ :] == 0xAB).all()
    store.close()


def test_many_rows_come_in_frames_that_are_taken(store: Store) -> None:
    many = np.arange(FRAME_BYTES // (4 * DIM) + 500, dtype=np.int64)
    requested, ids = asked(many)
    _, found = Wire(store).exchange(order(None, requested=requested), ids, frame_bytes=FRAME_BYTES)
    assert len(found) > 1
    expected = [initial_rows(mine, DIM, TABLE.initial, row_key(5, "wide")) for mine in by_partition(many)]
    assert (taken(found)[1] == np.concatenate(expected)).all()


def test_rows_come_with_the_values_and_not_before() -> None:
    """Where staleness is bounded and somebody is too far behind, neither do."""
    store = Store(shareable=False)
    other = Incarnation(11)
    store.become(HERE, Term(1))
    orders.create(
        store,
        CreateRequest(
            JOB, GENERATION, LAYOUT, list(PARTS), UpdateRules(UpdateMode.ASYNC, 1), staleness=0, working=[WORKER, other]
        ),
    )
    orders.open_partitions(store, JOB, GENERATION)
    requested, ids = asked()
    rows, data = pushed()
    ours, theirs = Wire(store), Wire(store)
    pace = SspReport(SspPhase.STEPS, 0, 1, 0)
    result, found = ours.exchange(order(0, rows, requested=requested, ssp_report=pace), DENSE + data + ids)
    assert result.missing
    assert sum(len(frame.data) for frame in found) == 0
    name = PushName(SourceKey(WorkerSource(other)), Token(0), 0, 0)
    said = order(0, rows, name=name, caller=Caller(JOB, other), pull=None, ssp_report=pace)
    theirs.exchange(said, DENSE + data)
    result, found = ours.exchange(order(None, requested=requested, ssp_report=pace), ids)
    assert not result.missing
    assert (taken(found)[1] == INITIAL - 2).all()
    store.close()


def state(store: Store) -> object:
    (hosted,) = store.hosted()
    return [
        (partition.describe(), sorted(i for chunk in partition.tables["wide"].cuts.items() for i in chunk.ids.tolist()))
        for partition in hosted.partitions.values()
    ]


GOOD, GOOD_IDS = asked()
WRONG: dict[str, tuple[dict[str, Any], bytes, type[ShardyardError], str]] = {
    "nothing is pulled": ({"pull": None}, GOOD_IDS, InvalidRequest, "without a pull"),
    "an order": ({"pull": wish(order=(0,))}, GOOD_IDS, InvalidRequest, "in an order"),
    "a partition that is not pulled": (
        {"pull": wish(partitions=PARTS[:1])}, GOOD_IDS, MalformedPayload, "which it does not pull"
    ),
    "no such table": (
        {"requested": (dataclasses.replace(GOOD[0], table=1),)}, GOOD_IDS, InvalidRequest, "has 1 tables"
    ),
    "a table twice": ({"requested": GOOD * 2}, GOOD_IDS * 2, MalformedPayload, "names a table twice"),
    "more than is given at a time": (
        {"requested": (RequestedRows(0, PARTS, (1 << 24, 1 << 24)),)}, b"", TooLarge, "at a time"
    ),
    "ids cut short": ({}, GOOD_IDS[:-1], MalformedPayload, "ended after"),
    "an id twice": ({}, GOOD_IDS[:8] + GOOD_IDS[:8] + GOOD_IDS[16:], MalformedPayload, "do not ascend"),
    "another partition's ids": (
        {"requested": (dataclasses.replace(GOOD[0], partitions=PARTS[::-1]),)},
        GOOD_IDS,
        InvalidRequest,
        "in partition 1",
    ),
    "bytes too many": ({}, GOOD_IDS + b"x", MalformedPayload, "the header announced"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_ride_along_is_refused_with_its_push(store: Store, name: str) -> None:
    more, ids, kind, text = WRONG[name]
    before = state(store)
    rows, data = pushed()
    with pytest.raises(kind, match=text):
        Wire(store).exchange(order(0, rows, **{"requested": GOOD} | more), DENSE + data + ids)
    assert state(store) == before
    _, found = Wire(store).exchange(order(0, rows, requested=GOOD), DENSE + data + GOOD_IDS)
    assert (taken(found)[1] == INITIAL - 1).all()


def test_rows_ride_along_in_exchanges_alone(store: Store) -> None:
    before = state(store)
    rows, data = pushed()
    header = push_messages.push_to_wire(order(0, rows, requested=GOOD)).SerializeToString()
    sent = frames.cut(header, [DENSE + data + GOOD_IDS])
    with pytest.raises(InvalidRequest, match="outside of an exchange"):
        Servicer(store).push(sent, CONTEXT)
    assert state(store) == before


@pytest.fixture
def stepping() -> Iterator[tuple[Store, list[PushName]]]:
    """A synchronous job of two ranks, and the names of their parts of step 0."""
    made = Store(shareable=False)
    made.become(HERE, Term(1))
    orders.create(made, CreateRequest(JOB, GENERATION, LAYOUT, list(PARTS), UpdateRules(UpdateMode.SYNC, 2)))
    orders.open_partitions(made, JOB, GENERATION)
    keys = [SourceKey(RankSource(Rank(rank))) for rank in range(2)]
    pushes.open_sources(made.hosted()[0], [(key, Token(1)) for key in keys])
    yield made, [PushName(key, Token(1), 0, 0) for key in keys]
    made.close()


def test_rows_of_a_synchronous_job_ride_along_as_the_version_of_the_values_has_them(
    stepping: tuple[Store, list[PushName]],
) -> None:
    store, named = stepping
    requested, ids = asked()
    rows, data = pushed()
    ours, theirs = Wire(store), Wire(store)
    result, found = ours.exchange(
        order(0, rows, name=named[0], requested=requested, pull=wish(number=1, exactly=True)), DENSE + data + ids
    )
    assert result.missing
    assert sum(len(frame.data) for frame in found) == 0
    theirs.exchange(order(0, rows, name=named[1], pull=None), DENSE + data)
    for name in named:  # the step after it is taken, before anybody asks
        theirs.exchange(order(0, rows, name=dataclasses.replace(name, first=1, last=1), pull=None), DENSE + data)
    for version, steps in ((1, 1), (2, 2)):
        pull = wish(number=version, exactly=True)
        result, found = ours.exchange(order(None, requested=requested, pull=pull), ids)
        assert not result.missing
        assert (taken(found)[1] == INITIAL - np.float32(steps)).all()


def test_rows_of_a_synchronous_job_come_with_a_version_that_is_named_or_not(
    stepping: tuple[Store, list[PushName]],
) -> None:
    store, named = stepping
    before = state(store)
    rows, data = pushed()
    with pytest.raises(InvalidRequest, match="of no version that is named"):
        Wire(store).exchange(
            order(0, rows, name=named[0], requested=GOOD, pull=wish(number=1)), DENSE + data + GOOD_IDS
        )
    assert state(store) == before


def test_rows_of_a_version_come_without_values_once_it_is_there(stepping: tuple[Store, list[PushName]]) -> None:
    store, named = stepping
    (rows, data), (requested, ids) = pushed(), asked()
    ours, theirs = Wire(store), Wire(store)
    alone = wish(partitions=(), number=1, exactly=True)
    late, nothing = ours.exchange(order(0, rows, name=named[0], requested=requested, pull=alone), DENSE + data + ids)
    assert [each.partition for each in late.missing] == [0, 1]
    assert [each.next for each in late.push] == [1, 1]
    assert sum(len(frame.data) for frame in nothing) == 0
    patient = order(None, requested=requested, pull=dataclasses.replace(alone, wait_ms=1_000))
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(ours.exchange, patient, ids)
        last = order(0, rows, name=named[1], requested=requested, pull=alone)
        found = [theirs.exchange(last, DENSE + data + ids), waits.result()]
    for answer, frames_of_it in found:
        assert (answer.parts, answer.missing) == ((), ())
        assert (taken(frames_of_it, 0)[1] == INITIAL - 1).all()


def test_headers_that_are_alike_keep_the_requested_rows() -> None:
    writer, reader = HeaderWriter(), HeaderReader()
    parts, pull = tuple(PushPart(p, 64) for p in PARTS), wish()
    fewer = (RequestedRows(0, PARTS[:1], (1,)),)
    for sequence, requested in enumerate([GOOD, GOOD, GOOD, fewer, fewer, GOOD, (), GOOD]):
        made = order(sequence, requested=requested, parts=parts, pull=pull)
        found, _ = reader.read(writer.write(made))
        assert (found.requested, found.name) == (made.requested, made.name)


def test_rows_of_a_hybrid_job_ride_along_with_the_version_that_they_belong_to() -> None:
    """A look-up waits for no step, but those that come along come with the values."""
    store = Store(shareable=False)
    store.become(HERE, Term(1))
    orders.create(
        store, CreateRequest(JOB, GENERATION, LAYOUT, list(PARTS), UpdateRules(UpdateMode.SYNC, 2, rows_at_once=True))
    )
    orders.open_partitions(store, JOB, GENERATION)
    keys = [SourceKey(RankSource(Rank(rank))) for rank in range(2)]
    pushes.open_sources(store.hosted()[0], [(key, Token(1)) for key in keys])
    requested, ids = asked()
    rows, data = pushed()
    ours, theirs = Wire(store), Wire(store)
    named = [PushName(key, Token(1), 0, 0) for key in keys]
    result, found = ours.exchange(
        order(0, rows, name=named[0], requested=requested, pull=wish(number=1, exactly=True)), DENSE + data + ids
    )
    assert result.missing
    assert sum(len(frame.data) for frame in found) == 0
    theirs.exchange(order(0, rows, name=named[1], pull=None), DENSE + data)
    result, found = ours.exchange(order(None, requested=requested, pull=wish(number=1, exactly=True)), ids)
    assert not result.missing
    assert (taken(found)[1] == INITIAL - np.float32(0.5) - np.float32(0.5)).all()
    store.close()
