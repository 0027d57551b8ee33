"""Rows of tables at a server: pushed with the rest of a push, counted by its name, looked up, and expired."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from shardyard.codecs.format.form import CodeId
from shardyard.codecs.rows.row_ids import encode_ids
from shardyard.codecs.rows.row_values import RowCode, decode_rows, encode_rows, first_code
from shardyard.domain import limits
from shardyard.domain.consistency import StaleRule
from shardyard.domain.errors import (
    InvalidRequest,
    MalformedPayload,
    NotReady,
    ShapeMismatch,
    ShardyardError,
    TableError,
    TooLarge,
)
from shardyard.domain.ids import Caller, PartitionId, Version
from shardyard.domain.pulls import LookupRequest, PullHeader, RequestedRows
from shardyard.domain.push_names import NO_NAME
from shardyard.domain.pushes import Outcome, PushedRows, PushHeader, PushKind, PushPart
from shardyard.domain.tables.initial_values import InitialKind, InitialValues
from shardyard.domain.tables.row_ids import partition_of
from shardyard.domain.tables.table_settings import Admission, AdmissionSettings, ExpirySettings, TableSettings
from shardyard.transport.in_process import InProcessDescriptors
from shardyard.transport.shared_memory import SharedMemory
from shardyard.wire import common_messages, frames, layout_messages, push_messages, table_messages
from shardyard.wire.frames import Frame
from shardyard.wire.headers import HeaderReader, HeaderWriter
from shardyard.wire.v1 import parameter_server_pb2 as wire
from shardyard_ps_server.hosting import lookups, orders
from shardyard_ps_server.rows.partition_tables import PartitionTables, RowPush, push_rows
from shardyard_ps_server.rows.pushed_rows import PushedTableRows, unpack_pushed
from shardyard_ps_server.service.exchange_stream import ExchangeStream
from shardyard_ps_server.service.servicer import Servicer
from shardyard_ps_server.tables.table import Table
from tests.support.exchanges import replies_of
from tests.support.rows_in_pushes import (
    CONTEXT,
    DENSE,
    GENERATION,
    GOOD,
    GOOD_DATA,
    HERE,
    IDS,
    INITIAL,
    JOB,
    LAYOUT,
    NARROW,
    OWNER,
    PACKED,
    PACKED_DATA,
    PARTS,
    RATE,
    WIDE,
    closed,
    coded,
    look_up,
    ones,
    packed,
    push,
    push_order,
    server,
    state,
)

__all__ = ["closed"]


def test_rows_are_pushed_with_the_rest_and_looked_up() -> None:
    store = server()
    assert (look_up(store) == INITIAL).all()
    rows, data = coded([*ones(), *ones(1, 2.0)])
    reply = push(store, push_order(0, rows), DENSE + data)
    assert [(part.outcome, part.next, part.alike) for part in reply.parts] == [(wire.OUTCOME_APPLIED, 1, 1)]
    assert (look_up(store) == INITIAL - 1).all()
    assert (look_up(store, 1) == -2).all()
    hosted = store.hosted()[0]
    assert [(each.name, each.rows) for each in hosted.describe_tables()] == [("wide", 8), ("narrow", 8)]
    assert (hosted.partitions[PARTS[0]].versions.values.view(np.float32) == -1).all()


def test_a_push_that_comes_again_changes_no_row() -> None:
    store = server()
    rows, data = coded(ones())
    for sequence in (0, 0, 1, 0, 1):
        push(store, push_order(sequence, rows), DENSE + data)
    assert (look_up(store) == INITIAL - 2).all()


def test_look_up_changes_nothing() -> None:
    store = server()
    push(store, push_order(0, *coded(ones())[:1]), DENSE + coded(ones())[1])
    before = state(store)
    look_up(store, 0, np.arange(-500, 500, dtype=np.int64))
    assert state(store) == before


def test_a_partition_without_rows_in_a_push_is_counted_all_the_same() -> None:
    store = server()
    rows, data = coded(ones()[:1])
    push(store, push_order(0, rows), DENSE + data)
    push(store, push_order(1), DENSE)
    assert (look_up(store) == INITIAL - (OWNER == 0)[:, None]).all()
    versions = [partition.describe()[0].number for partition in store.hosted()[0].partitions.values()]
    assert versions == [2, 2]


def test_an_empty_push_has_no_rows_and_a_gradient_of_none_counts() -> None:
    store = server()
    order = push_order(0, kind=PushKind.EMPTY, weight=0.0, groups=(), parts=tuple(PushPart(p, 0) for p in PARTS))
    push(store, order, b"")
    assert (look_up(store) == INITIAL).all()
    with pytest.raises(MalformedPayload, match="empty has rows"):
        push(store, dataclasses.replace(order, rows=coded(ones())[0]), b"")


def test_rates_of_a_push_are_those_of_its_rows() -> None:
    store = server()
    rows, data = coded([*ones(), *ones(1)])
    half = (0.5, *RATE[1:])
    push(store, push_order(0, rows, table_groups=(half, RATE)), DENSE + data)
    assert (look_up(store) == INITIAL - np.float32(0.5)).all()
    assert (look_up(store, 1) == -1).all()


@pytest.mark.parametrize("code", list(RowCode))
def test_rows_come_in_any_of_their_codes(code: RowCode) -> None:
    store = server()
    ids = IDS[OWNER == 0]
    values = np.full((ids.size, 3), 0.5, np.float32)
    id_code, row_code = encode_ids(ids), encode_rows(values, code)
    said = PushedRows(0, (PARTS[0],), (ids.size,), (len(id_code),), (len(row_code),))
    push(store, push_order(0, (said,)), DENSE + bytes(id_code) + bytes(row_code))
    moved = look_up(store, 0, ids) - INITIAL[OWNER == 0]
    np.testing.assert_allclose(moved, -values, rtol=0.01)


@pytest.mark.parametrize("form", [coded, packed])
def test_rows_beside_a_payload_in_shared_memory(form: Callable[..., Any]) -> None:
    store = server()
    store.shareable = True
    store.hosted()[0].regions = type(store.hosted()[0].regions)(128, shareable=True)
    shared = SharedMemory(4096, read_only=False)
    try:
        shared.bytes[64:192] = np.frombuffer(DENSE, np.uint8)
        writer = HeaderWriter()
        rows, data = form(ones())
        sent: list[Frame] = []
        here, there = InProcessDescriptors.pair()
        here.pass_descriptors([shared.descriptor()])
        answers = replies_of(ExchangeStream(store, there), iter_of(sent))
        attach = push_order(0, kind=PushKind.NOTHING, parts=(), groups=(), weight=0.0, name=NO_NAME)
        sent.append(Frame(writer.write(dataclasses.replace(attach, attach=shared.ticket())), 0, b""))
        assert push_messages.pulled_from_header(next(answers).header, ()).attached
        sent += frames.cut(writer.write(push_order(0, rows, shared_at=64)), [data], 64)
        next(answers)
    finally:
        shared.close()
    assert (look_up(store) == INITIAL - 1).all()
    assert (store.hosted()[0].partitions[PARTS[1]].versions.values.view(np.float32) == -1).all()


def iter_of(sent: list[Frame]) -> Any:
    while sent:
        yield frames.decode(frames.encode(sent.pop(0)))


def test_headers_that_are_alike_keep_their_rows() -> None:
    writer, reader = HeaderWriter(), HeaderReader()
    parts = tuple(PushPart(p, 64) for p in PARTS)
    for sequence, given in enumerate([GOOD, GOOD, GOOD, GOOD[:1], GOOD[:1], GOOD, (), GOOD]):
        order = push_order(sequence, given, parts=parts)
        found, _ = reader.read(writer.write(order))
        assert (found.rows, found.table_groups, found.name) == (order.rows, order.table_groups, order.name)


def test_headers_that_differ_in_their_rows_alone_are_not_read_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    writer, reader = HeaderWriter(), HeaderReader()
    parts = tuple(PushPart(p, 64) for p in PARTS)

    def numbered(sequence: int) -> PushHeader:
        each = dataclasses.replace(GOOD[0], rows=(sequence + 1, 5), row_bytes=(9 * sequence + 9, 60))
        requested = (RequestedRows(0, PARTS, (sequence + 2, 3)),)
        pull = PullHeader(push_order(0).caller, HERE, GENERATION, PARTS, 0, exactly=False)
        return push_order(
            sequence, (each,), parts=tuple(parts), requested=requested, pull=pull, rows_at=0, requested_at=64
        )

    assert reader.read(writer.write(numbered(0))) == (numbered(0), None)
    monkeypatch.setattr(push_messages, "push_from_wire", None)
    monkeypatch.setattr(push_messages, "push_to_wire", None)
    for sequence in range(1, 4):
        header, plan = reader.read(writer.write(numbered(sequence)))
        assert header == numbered(sequence)
        assert plan == numbered(0)


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"table": 7, "partitions": (PartitionId(9),), "rows": (1,), "id_bytes": (10,), "row_bytes": (20,)}, "list"),
        ({"rows": (1 << 25, 1)}, "at most"),
        ({"row_bytes": (20,)}, "2 codes of ids and 1 of gradients"),
        ({"now_ms": (5, 5)}, "says when it came"),
    ],
)
def test_rows_of_a_header_that_is_alike_are_checked_as_of_any_other(more: dict[str, Any], text: str) -> None:
    writer, reader = HeaderWriter(), HeaderReader()
    parts = tuple(PushPart(p, 64) for p in PARTS)
    for sequence in range(3):
        reader.read(writer.write(push_order(sequence, GOOD, parts=parts)))
    spoiled = push_order(3, (dataclasses.replace(GOOD[0], **more),), parts=parts)
    for header in (writer.write(spoiled), push_messages.push_to_wire(spoiled).SerializeToString()):
        with pytest.raises((InvalidRequest, MalformedPayload, TooLarge), match=text):
            reader.read(header)
    assert reader.read(writer.write(push_order(3, GOOD, parts=parts)))[0].rows == GOOD


def test_a_step_is_read_in_whatever_order_its_fields_stand() -> None:
    """Other clients write their fields in other orders; what is said is the same."""
    writer, reader = HeaderWriter(), HeaderReader()
    reader.read(writer.write(push_order(0, GOOD)))
    for number in range(1, 5):
        rows = (dataclasses.replace(GOOD[0], rows=(number, 1)), dataclasses.replace(GOOD[0], table=1, rows=(2, 3)))
        order = push_order(number, rows)
        step = wire.PushHeader.FromString(writer.write(order)).step
        one, two = (wire.Step(rows=table_messages.pushed_to_wire([each])).SerializeToString() for each in rows)
        step.ClearField("rows")
        fixed = step.SerializeToString()
        for mixed in (one + two + fixed, one + fixed + two, fixed + one + two):
            header, _ = reader.read(wire.PushHeader(step=wire.Step.FromString(mixed)).SerializeToString())
            assert header == order
            assert len(mixed) < 128
            header, _ = reader.read(bytes((15 << 3 | 2, len(mixed))) + mixed)
            assert header == order


def test_rows_that_come_and_go_are_not_taken_for_those_before() -> None:
    writer, reader = HeaderWriter(), HeaderReader()
    said = [push_order(0, GOOD), push_order(1, GOOD), push_order(2), push_order(3), push_order(4, GOOD)]
    for each in said:
        assert reader.read(writer.write(each))[0].rows == each.rows


def test_all_rows_of_a_partition_are_read() -> None:
    store = server()
    push(store, push_order(0, coded(ones())[0]), DENSE + coded(ones())[1])
    for p in PARTS:
        request = wire.ReadRowsRequest(
            caller=common_messages.caller_to_wire(Caller(JOB)), server=HERE, generation=GENERATION, partition=p, table=0
        )
        found = {}
        for frame in Servicer(store).read_rows(request, CONTEXT):
            n = len(frame.data) // 20
            assert frame.offset == len(found)
            ids = np.frombuffer(frame.data[: 8 * n], np.int64).tolist()
            found |= dict(zip(ids, np.frombuffer(frame.data[8 * n :], np.float32).reshape(n, 3).tolist(), strict=True))
        mine = p == OWNER
        assert found == dict(zip(IDS[mine].tolist(), (INITIAL - 1)[mine].tolist(), strict=True))


def test_rows_that_are_large_are_read_in_frames_that_are_taken() -> None:
    dim = 65_536
    layout = dataclasses.replace(LAYOUT, tables=(TableSettings("t", dim, "sgd", RATE, 5, rows_max=1 << 10),))
    store = server(layout)
    ids = np.sort(np.random.default_rng(1).integers(0, 1 << 40, 80))
    ids = ids[partition_of(ids, 2) == 0]
    rows, data = coded([(0, 0, ids, np.zeros((ids.size, dim), np.float32))])
    push(store, push_order(0, rows, table_groups=(RATE,)), DENSE + data, frame_bytes=1 << 20)
    request = wire.ReadRowsRequest(
        caller=common_messages.caller_to_wire(Caller(JOB)), server=HERE, generation=GENERATION, partition=0, table=0
    )
    found = [frames.decode(frames.encode(each)) for each in Servicer(store).read_rows(request, CONTEXT)]
    assert len(found) > 1
    assert sum(len(frame.data) for frame in found) == ids.size * (8 + 4 * dim)


def test_first_rows_are_given_before_a_job_is_open_and_may_come_again() -> None:
    store = server(opened=False)
    order = push_order(0, kind=PushKind.VALUES, weight=0.0, groups=())
    rows, data = coded(ones(0, 7.0))
    empty = tuple(PushPart(p, 0) for p in PARTS)
    giving = dataclasses.replace(order, rows=rows, parts=empty)

    def initialize(order: PushHeader, data: bytes) -> None:
        header = push_messages.push_to_wire(order).SerializeToString()
        Servicer(store).initialize(frames.cut(header, [data]), CONTEXT)

    initialize(order, DENSE)
    for _ in range(2):
        initialize(giving, data)
    with pytest.raises(NotReady):
        look_up(store)
    with pytest.raises(ShapeMismatch, match="64 bytes; expected 0"):
        initialize(dataclasses.replace(order, rows=rows), DENSE + data)
    orders.open_partitions(store, JOB, GENERATION)
    assert (look_up(store) == 7).all()
    with pytest.raises(InvalidRequest, match="which is open"):
        initialize(giving, data)
    assert (look_up(store) == 7).all()


@pytest.mark.parametrize(("code", "each"), [(RowCode.BF16, 2 * 3), (RowCode.INT8, 3 + 4)])
def test_rows_are_answered_in_a_code(code: RowCode, each: int) -> None:
    store = server()
    ids_of = [IDS[p == OWNER].tobytes() for p in PARTS]
    n = tuple(int((p == OWNER).sum()) for p in PARTS)
    requested = (
        RequestedRows(0, PARTS, n),
        RequestedRows(1, PARTS[:1], n[:1]),
    )
    asked = LookupRequest(Caller(JOB), HERE, GENERATION, requested, code=code)
    assert table_messages.look_up_from_header(table_messages.look_up_to_header(asked)) == asked
    data = lookups.look_up(store, asked, np.frombuffer(b"".join([*ids_of, ids_of[0]]), np.uint8)).data
    rest, found = memoryview(bytes(data)), []
    for rows, dim in ((n[0], 3), (n[1], 3), (n[0], 1)):
        first = first_code(rest, rows, dim)
        assert first[0] == CodeId[code.name]
        assert len(first) < rows * (each if dim == 3 else 5) + limits.CODE_HEAD_BYTES_MAX
        found.append(decode_rows(first, rows, dim))
        rest = rest[len(first) :]
    assert not len(rest)
    for p in PARTS:
        limit = np.abs(INITIAL[p == OWNER]).max(axis=1, keepdims=True) / 127
        assert (np.abs(found[p] - INITIAL[p == OWNER]) <= limit).all()
    assert not found[2].any()
    assert store.counters.bytes_sent == len(data)


def test_packed_rows_do_what_coded_rows_do() -> None:
    one, other = server(), server()
    push(one, push_order(0, GOOD), DENSE + GOOD_DATA)
    push(other, push_order(0, PACKED), DENSE + PACKED_DATA)
    assert state(one) == state(other)
    assert (look_up(other) == INITIAL - 1).all()


def test_tables_travel_as_they_are() -> None:
    every = (
        WIDE,
        TableSettings(
            "all of it", 7, "ftrl", (0.1, 1.0, 0.5, 0.25, 0.0), -3, InitialValues(InitialKind.NORMAL, 0.1), 99,
            AdmissionSettings(Admission.ESTIMATE, 3, 0.5, 128, zeros=True), ExpirySettings(1_000, 2, 0.5, 50, 9),
        ),
        TableSettings("in time", 7, expiry=ExpirySettings(age_ms=2_000, grace_ms=3)),
    )  # fmt: skip
    layout = dataclasses.replace(LAYOUT, tables=every)
    assert layout_messages.layout_from_wire(layout_messages.layout_to_wire(layout)) == layout


def test_a_late_push_moves_rows_by_the_rate_over_its_staleness() -> None:
    """As it moves parameters; the partition's version is the rows' age, also of a partition that lacks the row."""
    store = server(stale=StaleRule(divides_rate=True))
    rows, data = coded(ones())
    for sequence, bases in enumerate([(0, 0), (1, 0), (0, 2), (3, 3)]):
        order = push_order(sequence, rows, bases=tuple(Version(1, number) for number in bases))
        push(store, order, DENSE + data)
    #       staleness 0, 0; 0, 1; 2, 0; 0, 0
    moved = np.where(OWNER == 0, 1 + 1 + 1 / 2 + 1, 4).astype(np.float32)
    np.testing.assert_allclose(look_up(store), INITIAL - moved[:, None], rtol=1e-6)
    values = [p.versions.values.view(np.float32)[0] for _, p in sorted(store.hosted()[0].partitions.items())]
    assert values == [-3.5, -4.0]


def test_a_push_that_does_not_say_what_it_was_computed_on_moves_rows_by_the_rate() -> None:
    store = server(stale=StaleRule(divides_rate=True))
    rows, data = coded(ones())
    for sequence in range(3):
        push(store, push_order(sequence, rows), DENSE + data)
    assert (look_up(store) == INITIAL - 3).all()


def test_rows_expire_by_their_tables_settings() -> None:
    table = dataclasses.replace(WIDE, expiry=ExpirySettings(age_steps=3))
    store = server(dataclasses.replace(LAYOUT, tables=(table, NARROW)))
    first, rest = IDS[OWNER == 0][:1], IDS[OWNER == 0][1:]
    for sequence, ids in enumerate([first, *[rest] * 8]):
        rows, data = coded([(0, 0, ids, np.ones((ids.size, 3), np.float32))])
        push(store, push_order(sequence, rows), DENSE + data)
    assert (look_up(store, 0, first) == INITIAL[OWNER == 0][:1]).all()
    found = store.hosted()[0].describe_tables()[0]
    assert (found.rows, found.ids, found.admitted, found.expired) == (rest.size, rest.size, rest.size + 1, 1)
    assert 0 < found.ids <= found.homes


def test_partition_that_leaves_the_server_has_no_rows_to_tell_of() -> None:
    """A heartbeat may meet it then."""
    store = server(LAYOUT)
    hosted = store.hosted()[0]
    hosted.in_order[0].leave()
    assert {each.rows for each in hosted.describe_tables()} == {0}


class Clock:
    def __init__(self) -> None:
        self.ms = 7_000_000

    def now_ms(self) -> int:
        return self.ms


def aging(clock: Clock) -> PartitionTables:
    table = TableSettings("t", 1, rows_max=64, expiry=ExpirySettings(age_ms=5_000))
    return PartitionTables(dataclasses.replace(LAYOUT, tables=(table,)), clock)


def pushed(into: PartitionTables, step: int, *ids: int) -> int:
    """How many rows there are then."""
    values = np.ones((len(ids), 1), np.float32)
    rows = [PushedTableRows(0, np.array(ids, np.int64), values)]
    push_rows([RowPush(into, rows, [into.by_name["t"].settings.group], step)])
    return into.by_name["t"].rows


def test_rows_expire_by_the_clock() -> None:
    clock = Clock()
    into = aging(clock)
    assert pushed(into, 1, 1, 2) == 2
    clock.ms += 5_000
    assert pushed(into, 2, 1) == 2
    clock.ms += 1
    assert pushed(into, 3, 1) == 1


def test_ages_go_on_from_where_a_checkpoint_was_cut() -> None:
    clock, later = Clock(), Clock()
    into = aging(clock)
    pushed(into, 1, 1, 2)
    clock.ms += 3_000
    pushed(into, 2, 1)
    table = into.by_name["t"]
    restored = Table(table.settings)
    with table.cuts.take() as cut:
        for chunk in cut:
            restored.load(chunk.ids, chunk.values.copy(), chunk.state.copy(), chunk.frequencies, chunk.steps)
        restored.resume(cut.updates, cut.now_ms)
    # a day in which no server had the partition
    later.ms = 86_400_000
    again = aging(later)
    again.become({"t": restored})
    later.ms += 2_000
    assert pushed(again, 3, 1) == 2
    later.ms += 1
    assert pushed(again, 4, 1) == 1


def test_a_clock_that_a_table_does_not_age_by_is_not_kept() -> None:
    table = Table(TableSettings("t", 1, rows_max=64, expiry=ExpirySettings(age_steps=5)))
    table.push(np.arange(3), np.ones((3, 1), np.float32), 1, now_ms=9)
    assert table.state.now_ms == 0
    table.resume(1, 5)
    assert table.state.now_ms == 0


def test_a_time_that_cannot_be_is_refused() -> None:
    table = Table(TableSettings("t", 1, rows_max=64, expiry=ExpirySettings(age_ms=5)))
    for wrong in (-1, 1 << 47):
        with pytest.raises(TableError, match="ms"):
            table.push(np.arange(3), np.ones((3, 1), np.float32), 1, now_ms=wrong)
    table.push(np.arange(3), np.ones((3, 1), np.float32), 1, now_ms=9)
    for wrong in (8, 1 << 47):
        with pytest.raises(TableError, match="ms as the time"):
            table.resume(1, wrong)
    assert (table.rows, table.state.now_ms) == (3, 9)


def test_the_memory_of_tables_is_given_back_with_their_job() -> None:
    store = server()
    push(store, push_order(0, GOOD), DENSE + GOOD_DATA)
    watched = [weakref.ref(table) for p in store.hosted()[0].partitions.values() for table in p.tables.values()]
    assert all(watched)
    orders.drop(store, JOB)
    gc.collect()
    assert not any(ref() for ref in watched)


def test_outcomes_are_those_of_the_push() -> None:
    store = server()
    order = push_order(0, GOOD)
    for expected in (Outcome.APPLIED, Outcome.DUPLICATE):
        results = push_messages.results_from_wire(push(store, order, DENSE + GOOD_DATA), PARTS)
        assert {result.outcome for result in results} == {expected}


def unpacked(
    said: tuple[PushedRows, ...], data: bytes | np.ndarray, among: set[int] | None = None
) -> dict[tuple[int, int], PushedTableRows]:
    chosen = None if among is None else {PartitionId(number) for number in among}
    found = unpack_pushed(LAYOUT, said, np.frombuffer(data, np.uint8) if isinstance(data, bytes) else data, chosen)
    return {(rows.table, partition): rows for partition, rows in found}


@pytest.mark.parametrize("form", [coded, packed])
@pytest.mark.parametrize("shift", [0, 1])
def test_parts_of_several_tables_are_read_at_once_each_with_its_own(form: Callable[..., Any], shift: int) -> None:
    """`shift`: packed blocks that are not aligned."""
    entries = ones(0, 2.0) + ones(1, 3.0)
    counts = [np.arange(1, ids.size + 1).tolist() for _, _, ids, _ in ones(0)]
    said, data = form(entries, counts)
    data = np.frombuffer(b"-" * shift + data, np.uint8)[shift:]
    found = unpacked(said, data)
    assert found.keys() == {(table, partition) for table, partition, _, _ in entries}
    for table, partition, ids, values in entries:
        rows = found[table, partition]
        np.testing.assert_array_equal(rows.ids, ids)
        np.testing.assert_array_equal(rows.values, values)
        np.testing.assert_array_equal(rows.counts, np.arange(1, ids.size + 1))


def test_one_part_in_another_code_is_read_beside_the_others() -> None:
    entries = ones(0, 2.0)
    ids, codes = [bytes(encode_ids(each[2])) for each in entries], [RowCode.FLOAT32, RowCode.BF16]
    values = [bytes(encode_rows(each[3], code)) for each, code in zip(entries, codes, strict=True)]
    sizes = tuple(each[2].size for each in entries)
    said = (PushedRows(0, PARTS, sizes, tuple(map(len, ids)), tuple(map(len, values))),)
    found = unpacked(said, ids[0] + values[0] + ids[1] + values[1])
    for table, partition, numbers, gradients in entries:
        np.testing.assert_array_equal(found[table, partition].ids, numbers)
        np.testing.assert_array_equal(found[table, partition].values, gradients)


def test_packed_parts_of_other_partitions_are_passed_over_whatever_they_are() -> None:
    entries = ones(0, 2.0) + ones(1, 3.0)
    for here in PARTS:
        spoilt = [each if each[1] == here else (*each[:2], each[2][::-1], each[3] * np.nan) for each in entries]
        said, data = packed(spoilt)
        found = unpacked(said, data, {here})
        assert found.keys() == {(0, here), (1, here)}
        np.testing.assert_array_equal(found[1, here].ids, IDS[here == OWNER])
        assert (found[1, here].values == 3).all()
        with pytest.raises(ShardyardError):
            unpacked(said, data)


def test_parts_of_other_partitions_are_passed_over_whatever_they_are() -> None:
    said, data = coded(ones(0, 2.0) + ones(1, 3.0))
    for here in PARTS:
        spoilt, at = bytearray(data), 0
        for each in said:
            for partition, id_bytes, row_bytes in zip(each.partitions, each.id_bytes, each.row_bytes, strict=True):
                if partition != here:
                    spoilt[at : at + id_bytes + row_bytes] = b"\xff" * (id_bytes + row_bytes)
                at += id_bytes + row_bytes
        found = unpacked(said, bytes(spoilt), {here})
        assert found.keys() == {(0, here), (1, here)}
        np.testing.assert_array_equal(found[1, here].ids, IDS[here == OWNER])
