"""Pushed rows, look-ups, tables and jobs that a server refuses. A refusal changes nothing."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from shardyard.codecs.rows.row_ids import encode_ids
from shardyard.codecs.rows.row_values import RowCode, encode_rows
from shardyard.domain import limits
from shardyard.domain.consistency import StaleRule, UpdateMode
from shardyard.domain.errors import (
    Internal,
    InvalidRequest,
    MalformedPayload,
    NotFound,
    ShapeMismatch,
    ShardyardError,
    StaleGeneration,
    StaleIncarnation,
    TableFull,
    TooLarge,
    UnsupportedOptimizer,
)
from shardyard.domain.ids import Caller, Generation, Incarnation, JobId, PartitionId
from shardyard.domain.layout.layouts import JobLayout
from shardyard.domain.pulls import LookupRequest, RequestedRows
from shardyard.domain.pushes import PushedRows
from shardyard.runtime.failpoints import armed
from shardyard.wire import table_messages
from shardyard.wire.v1 import common_pb2 as common
from shardyard.wire.v1 import parameter_server_pb2 as wire
from shardyard_ps_server.hosting import lookups, orders
from shardyard_ps_server.hosting.hosted_job import CreateRequest
from shardyard_ps_server.partition.update_rules import UpdateRules
from tests.support.rows_in_pushes import (
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
    made,
    ones,
    packed,
    push,
    push_order,
    server,
    state,
)

__all__ = ["closed"]


def swapped() -> tuple[tuple[PushedRows, ...], bytes]:
    entries = ones()
    return coded([(0, 1 - p, ids, rows) for _, p, ids, rows in entries])


def raw_ids(ids: Sequence[int]) -> bytes:
    """A code of ids of which each gap is said by hand, so that they need not ascend."""
    head = bytes(encode_ids(np.array([ids[0]], np.int64)))
    return (
        bytes((head[0], len(ids)))
        + head[2:]
        + bytes((64,))
        + b"".join(
            ((after - before - 1) % (1 << 64)).to_bytes(8, "little") for before, after in itertools.pairwise(ids)
        )
    )


def by_hand(ids: Sequence[int], partition: int = 0) -> tuple[tuple[PushedRows, ...], bytes]:
    code, rows = raw_ids(ids), bytes(encode_rows(np.ones((len(ids), 3), np.float32), RowCode.FLOAT32))
    return (PushedRows(0, (PartitionId(partition),), (len(ids),), (len(code),), (len(rows),)),), code + rows


def not_finite(value: float) -> tuple[tuple[PushedRows, ...], bytes]:
    entries = ones()
    entries[1][3][0, 1] = value
    return coded(entries)


def changed(**more: Any) -> tuple[tuple[PushedRows, ...], bytes]:
    return (dataclasses.replace(GOOD[0], **more), *GOOD[1:]), GOOD_DATA


def packed_of(ids: Sequence[int], partition: int = 0) -> tuple[tuple[PushedRows, ...], bytes]:
    return packed([(0, partition, np.array(ids, np.int64), np.ones((len(ids), 3), np.float32))])


def packed_with(value: float) -> tuple[tuple[PushedRows, ...], bytes]:
    entries = ones()
    entries[1][3][0, 1] = value
    return packed(entries)


def changed_packed(**more: Any) -> tuple[tuple[PushedRows, ...], bytes]:
    return (dataclasses.replace(PACKED[0], **more), *PACKED[1:]), PACKED_DATA


MINE = [int(i) for i in IDS[OWNER == 0]]
WRONG: dict[str, tuple[Callable[[], tuple[tuple[PushedRows, ...], bytes]], type[ShardyardError], str]] = {
    "ids of another partition": (swapped, InvalidRequest, "in partition"),
    "an id twice": (lambda: by_hand([MINE[0], MINE[0]]), MalformedPayload, "beyond the largest id"),
    "ids that descend": (lambda: by_hand([MINE[1], MINE[0]]), MalformedPayload, "beyond the largest id"),
    "a NaN": (lambda: not_finite(np.nan), InvalidRequest, "not finite"),
    "an infinity": (lambda: not_finite(-np.inf), InvalidRequest, "not finite"),
    "a table that is not there": (lambda: changed(table=2), InvalidRequest, "the job has 2 tables"),
    "a table beyond all limits": (lambda: changed(table=1 << 31), TooLarge, "more than a job can have"),
    "one table twice": (lambda: (GOOD + GOOD[:1], GOOD_DATA), MalformedPayload, "twice"),
    "rows of another dim": (lambda: changed(row_bytes=(GOOD[0].row_bytes[0], 3)), ShapeMismatch, "in 3 bytes"),
    "rows of more bytes than they can have": (
        lambda: changed(row_bytes=(GOOD[0].row_bytes[0], 10_000)), ShapeMismatch, "10000 bytes"
    ),
    "ids of more bytes than they can have": (
        lambda: changed(id_bytes=(GOOD[0].id_bytes[0], 1 << 20)), ShapeMismatch, "ids in 1048576"
    ),
    "more rows than are coded": (
        lambda: changed(rows=(GOOD[0].rows[0] + 1, GOOD[0].rows[1])), MalformedPayload, "a code of"
    ),
    "fewer rows than are coded": (lambda: changed(rows=(GOOD[0].rows[0] - 1, GOOD[0].rows[1])), TooLarge, "a code has"),
    "no rows": (lambda: changed(rows=(0, GOOD[0].rows[1])), MalformedPayload, "no rows in one of the partitions"),
    "too many rows": (
        lambda: changed(rows=(limits.ROWS_PER_PART_MAX + 1, GOOD[0].rows[1])), TooLarge, "for one partition; at most"
    ),
    "bytes beyond the limit": (
        lambda: (
            (
                PushedRows(0, PARTS, (1 << 24, 1 << 24), (2 << 20, 2 << 20), (1 << 31, 1 << 31)),
            ),
            b"",
        ),
        TooLarge,
        "a push has rows of",
    ),
    "a partition twice": (lambda: changed(partitions=(0, 0)), MalformedPayload, "one of them twice"),
    "no partition": (
        lambda: changed(partitions=(), rows=(), id_bytes=(), row_bytes=()), MalformedPayload, "name no partition"
    ),
    "a partition that the push does not list": (lambda: changed(partitions=(0, 2)), MalformedPayload, "does not list"),
    "numbers of other lengths": (lambda: changed(rows=(1,)), MalformedPayload, "1 numbers of rows"),
    "codes of other lengths": (lambda: changed(row_bytes=(1,)), MalformedPayload, "2 codes of ids and 1 of gradients"),
    "bytes that are cut short": (lambda: (GOOD, GOOD_DATA[:-1]), MalformedPayload, "the stream ended after"),
    "bytes too many": (lambda: (GOOD, GOOD_DATA + b"x"), MalformedPayload, "announced"),
    "ids of no code": (lambda: (GOOD, b"\xff" + GOOD_DATA[1:]), MalformedPayload, "begins with 255"),
    "ids that are counted, of which it is not said how often": (
        lambda: changed(counted=True), MalformedPayload, "the stream ended"
    ),
    "packed ids of another partition": (lambda: packed_of(MINE, 1), InvalidRequest, "in partition 1"),
    "a packed id twice": (lambda: packed_of([MINE[0], MINE[0]]), MalformedPayload, "do not ascend"),
    "packed ids that descend": (lambda: packed_of([MINE[1], MINE[0]]), MalformedPayload, "do not ascend"),
    "a packed NaN": (lambda: packed_with(np.nan), InvalidRequest, "not finite"),
    "a packed infinity": (lambda: packed_with(np.inf), InvalidRequest, "not finite"),
    "packed rows of another dim": (
        lambda: changed_packed(row_bytes=(PACKED[0].row_bytes[0] + 4,)), ShapeMismatch, "of dim 3, in"
    ),
    "more packed rows than there are bytes": (
        lambda: changed_packed(rows=(PACKED[0].rows[0] + 1, PACKED[0].rows[1])), ShapeMismatch, "of dim 3, in"
    ),
    "lengths of packed rows by partition": (
        lambda: changed_packed(row_bytes=(12, 12)), MalformedPayload, "0 codes of ids and 2 of gradients"
    ),
    "packed bytes beyond the limit": (
        lambda: ((PushedRows(0, PARTS, (1 << 24, 1 << 24), (), (1 << 33,)),), b""), TooLarge, "a push has rows of"
    ),
    "a packed id that did not occur": (
        lambda: packed(ones(), [[0] * len(e[2]) for e in ones()]), InvalidRequest, "no time at all"
    ),
    "an id that did not occur": (
        lambda: coded(ones(), [[0] * len(e[2]) for e in ones()]), InvalidRequest, "no time at all"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_with_rows_is_refused_and_changes_nothing(name: str) -> None:
    make, kind, text = WRONG[name]
    store = server()
    push(store, push_order(0, GOOD), DENSE + GOOD_DATA)
    before = state(store)
    rows, data = make()
    with pytest.raises(kind, match=text):
        push(store, push_order(1, rows), DENSE + data)
    assert state(store) == before
    push(store, push_order(1, GOOD), DENSE + GOOD_DATA)
    assert (look_up(store) == INITIAL - 2).all()


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"table_groups": (RATE,)}, "settings for 1 tables"),
        ({"table_groups": (RATE, RATE[:2])}, "has 2 values"),
        ({"table_groups": (RATE, (-1.0, *RATE[1:]))}, "lr is -1.0"),
        ({"table_groups": (RATE, (1.0, 0.9, *RATE[2:]))}, "momentum"),
        ({"overflow": True}, "overflowed"),
        ({"rest": 3}, "before its header"),
        ({"shared_at": 0}, "outside of an exchange"),
    ],
)
def test_what_does_not_go_with_rows_is_refused(more: dict[str, Any], text: str) -> None:
    store = server()
    before = state(store)
    with pytest.raises(InvalidRequest, match=text):
        push(store, push_order(0, GOOD, **more), DENSE + GOOD_DATA)
    assert state(store) == before


def test_a_table_that_is_full_refuses_the_whole_push() -> None:
    tables_ = (WIDE, dataclasses.replace(NARROW, rows_max=2))
    store = server(dataclasses.replace(LAYOUT, tables=tables_))
    before = state(store)
    rows, data = coded([*ones(), *ones(1)])
    with pytest.raises(TableFull, match="at most 2"):
        push(store, push_order(0, rows), DENSE + data)
    assert state(store) == before
    push(store, push_order(0), DENSE)


def test_rows_that_are_half_applied_stop_the_partition_and_tell_the_server() -> None:
    told: list[ShardyardError] = []
    store = server(on_failure=told.append)

    def fail(name: str) -> None:
        raise MemoryError(name)

    with armed("rows.before_update", fail, at=1), pytest.raises(MemoryError):
        push(store, push_order(0, GOOD), DENSE + GOOD_DATA)
    assert isinstance(told[0], Internal)
    assert "in part" in told[0].what
    with pytest.raises(Internal, match="applied in part"):
        push(store, push_order(0, GOOD), DENSE + GOOD_DATA)
    with pytest.raises(Internal, match="applied in part"):
        look_up(store)


@pytest.mark.parametrize(
    ("more", "kind", "text"),
    [
        ({"requested": (RequestedRows(2, (PARTS[0],), (1,)),)}, InvalidRequest, "the job has 2 tables"),
        ({"requested": (RequestedRows(0, (PARTS[0],), (1,)),)}, MalformedPayload, "bytes of ids; announced 8"),
        ({"requested": (RequestedRows(0, PARTS, (1 << 20, 1 << 20)),)}, TooLarge, "at a time"),
        (
            {"requested": (RequestedRows(0, (PARTS[0],), (limits.LOOK_UP_IDS_MAX + 1,)),)},
            TooLarge,
            "for one partition",
        ),
        ({"requested": (RequestedRows(0, (), ()),)}, MalformedPayload, "name no partition"),
        ({"requested": (RequestedRows(0, PARTS, (1,)),)}, MalformedPayload, "numbers of rows"),
        ({"generation": Generation(3)}, StaleGeneration, "generation 3"),
        ({"server": Incarnation(9)}, StaleIncarnation, "this is server"),
        ({"caller": Caller(JobId(2))}, NotFound, "job 2"),
    ],
)
def test_a_look_up_that_cannot_be_is_refused(more: dict[str, Any], kind: type[ShardyardError], text: str) -> None:
    store = server()
    before = state(store)
    with pytest.raises(kind, match=text):
        look_up(store, **more)
    assert state(store) == before


def test_an_answer_in_an_unknown_code_is_refused() -> None:
    header = wire.LookUpHeader(server=HERE, generation=GENERATION, code=7)
    with pytest.raises(MalformedPayload, match="the code of a look-up's answer is 7"):
        table_messages.look_up_from_header(header.SerializeToString())


def test_a_look_up_of_another_partitions_ids_is_refused() -> None:
    store = server()
    ids = IDS[OWNER == 1]
    asked = LookupRequest(Caller(JOB), HERE, GENERATION, (RequestedRows(0, (PARTS[0],), (ids.size,)),))
    with pytest.raises(InvalidRequest, match="in partition 0"):
        lookups.look_up(store, asked, ids.view(np.uint8))


def spec(**more: Any) -> common.TableSpec:
    made = table_messages.table_to_wire(WIDE)
    for name, value in more.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(
    ("messages", "kind", "text"),
    [
        (lambda: [spec(name="")], InvalidRequest, "has no name"),
        (lambda: [spec(), spec()], InvalidRequest, "comes twice"),
        (lambda: [spec(name="x" * 513)], TooLarge, "513 characters"),
        (lambda: [spec(dim=0)], InvalidRequest, "rows of 0 values"),
        (lambda: [spec(dim=65_537)], InvalidRequest, "rows of 65537 values"),
        (lambda: [spec(optimizer="lion")], UnsupportedOptimizer, "lion"),
        (lambda: [spec(initial=9)], MalformedPayload, "which this release does not know"),
        (lambda: [spec(scale=np.nan)], InvalidRequest, "initial values of scale"),
        (lambda: [spec(rows_max=1 << 31)], InvalidRequest, "at most 2147483648 rows"),
        (lambda: [spec(name=str(n)) for n in range(1_025)], TooLarge, "1025 tables"),
        (lambda: [common.TableSpec(name="t", dim=1, optimizer="sgd", initial=1)], InvalidRequest, "settings"),
    ],
)
def test_tables_that_cannot_be_are_refused(messages: Any, kind: type[ShardyardError], text: str) -> None:
    with pytest.raises(kind, match=text):
        table_messages.tables_from_wire(messages())


FTRL = dataclasses.replace(LAYOUT, tables=(WIDE, dataclasses.replace(NARROW, optimizer="ftrl", group=())))


@pytest.mark.parametrize(
    ("stale", "layout", "text"),
    [
        (StaleRule(compensation=0.1), LAYOUT, "cannot be compensated"),
        (StaleRule(divides_rate=True), FTRL, "'narrow' has the optimizer ftrl"),
    ],
)
def test_jobs_of_which_rows_are_no_part_are_refused(stale: StaleRule, layout: JobLayout, text: str) -> None:
    store = made()
    with pytest.raises(InvalidRequest, match=text):
        orders.create(
            store, CreateRequest(JOB, GENERATION, layout, list(PARTS), UpdateRules(UpdateMode.ASYNC, 1, stale=stale))
        )
    assert store.hosted() == []
