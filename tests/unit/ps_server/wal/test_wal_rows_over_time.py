"""Rows in a log whose ages are times, for which there is no room, or which are damaged."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardyard.codecs.rows.row_ids import encode_ids
from shardyard.codecs.rows.row_values import RowCode, encode_rows
from shardyard.domain.errors import (
    Internal,
    LogDamaged,
    ShardyardError,
    TableFull,
    TooLarge,
)
from shardyard.domain.ids import Incarnation, Token
from shardyard.domain.pulls import RequestedRows
from shardyard.domain.push_names import DataShardSource, SourceKey
from shardyard.domain.pushes import Outcome, PushedRows, PushHeader
from shardyard.runtime import failpoints
from shardyard.runtime.waits import WaitRegistry
from shardyard_ps_server.hosting import pushes
from shardyard_ps_server.hosting.store import Store
from shardyard_ps_server.values.versions import aligned_empty
from shardyard_ps_server.wal.records import RecordKind
from shardyard_ps_server.wal.replay import begin_head, push_head
from shardyard_ps_server.wal.wal import Wal
from tests.support.rows_in_logs import (
    AGING,
    ROWS,
    TABLES,
    TIMED,
    Entry,
    Ticks,
    clock,
    contents,
    everything,
    hold,
    ids_of,
    order_with,
    push_rows,
    some,
    table_of,
    timed,
    yard,
)
from tests.support.servers_with_logs import (
    FIRST,
    GENERATION,
    JOB,
    OWNED,
    THIRD,
    Generation,
    Yard,
    order_of,
    payload_of,
    yard_of,
)

__all__ = ["clock", "yard"]

# ---- ages in time


def test_a_replay_goes_on_from_the_time_of_the_last_push(yard: Yard, clock: Ticks) -> None:
    """However long the server was gone: a row that was pushed 100 ms before the end is as old at the beginning."""
    first, ids = yard.first(), ids_of(0, 3)
    saved = yard.save(first, 2)
    push_rows(first, 0, [(TIMED, OWNED[0], ids[:2])])
    clock.ms += 1_000
    push_rows(first, 1, [(TIMED, OWNED[0], ids[2:])])
    push_rows(first, 2, [(TIMED, OWNED[0], ids[2:])])
    assert contents(table_of(first, TIMED)).keys() == {int(ids[2])}
    push_rows(first, 3, [(TIMED, OWNED[0], ids[:1])])
    then = table_of(first, TIMED).state.now_ms
    clock.ms += 10**9
    second = yard.successor(saved, 2, FIRST)
    assert table_of(second, TIMED).state.now_ms == then
    clock.ms += 50
    push_rows(second, 4, [(TIMED, OWNED[0], ids[1:2])])
    assert 50 <= table_of(second, TIMED).state.now_ms - then < 150
    assert contents(table_of(second, TIMED)).keys() == set(ids.tolist())
    clock.ms += 180
    for sequence in range(5, 8):
        push_rows(second, sequence, [(TIMED, OWNED[0], ids[1:2])])
    assert contents(table_of(second, TIMED)).keys() == {int(ids[1])}


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.one_of(st.just("push"), st.just("die"), st.just("save"), st.integers(1, 300)), min_size=4, max_size=24),
    st.integers(0, 1 << 20),
)
def test_whenever_a_server_dies_the_same_rows_have_expired_by_time(
    clock: Ticks, does: list[str | int], seed: int
) -> None:
    with TemporaryDirectory() as folder, yard_of(Path(folder), layout=ROWS) as yard:
        present = yard.first()
        saved, number, trail, sequence = yard.save(present, 2), 2, [present.incarnation], 0
        for what in does:
            if what == "push":
                entries = [entry for entry in some(present, sequence, seed) if entry[0] in (0, TIMED)]
                push_rows(present, sequence, entries, seed=seed)
                sequence += 1
            elif what == "save":
                number += 1
                saved, trail = yard.save(present, number), [present.incarnation]
            elif what == "die":
                then = everything(present)
                times = [table_of(present, TIMED, p).state.now_ms for p in range(len(OWNED))]
                clock.ms += 1_000_000
                incarnation, life = Incarnation(present.incarnation + 1), yard_life(present) + 1
                present = yard.successor(
                    saved, number, *trail, incarnation=incarnation, life=life, generation=Generation(10 + life)
                )
                trail.append(incarnation)
                assert everything(present) == then
                assert [table_of(present, TIMED, p).state.now_ms for p in range(len(OWNED))] == times
            else:
                clock.ms += int(what)


def yard_life(store: Store) -> int:
    return store.hosted()[0].partitions[OWNED[0]].describe()[0].life


# ---- rows for which there is no room


def test_a_table_that_pushes_on_their_way_fill_refuses_the_next_before_it_is_recorded(tmp_path: Path) -> None:
    """Else one of its partitions might refuse what the others, and the log, have taken."""
    small = dataclasses.replace(ROWS, tables=(dataclasses.replace(TABLES[0], rows_max=8),))
    with yard_of(tmp_path, layout=small) as yard:
        first, saved = yard.begun()
        other = DataShardSource(0, 0, 1)
        pushes.open_sources(first.hosted()[0], [(SourceKey(other), Token(1))])
        errors: list[BaseException] = []

        def fill() -> None:
            try:
                entries = [(0, OWNED[0], ids_of(0, 2, begin=9)), (0, OWNED[1], ids_of(1, 6, begin=9))]
                push_rows(first, 0, entries, source=other)
            except BaseException as error:  # noqa: BLE001
                errors.append(error)

        thread = threading.Thread(target=fill)
        waiting = threading.Event()
        wal = first.hosted()[0].wal
        assert wal is not None
        drain = wal.drain

        def seen() -> None:
            waiting.set()
            drain()

        def meanwhile() -> None:
            wal.drain = seen  # type: ignore[method-assign]
            thread.start()
            assert waiting.wait(30)

        entries = [(0, OWNED[0], ids_of(0, 5)), (0, OWNED[1], ids_of(1, 5))]
        hold(first, "wal.before_sync", lambda: push_rows(first, 0, entries), meanwhile)
        thread.join()
        assert [type(each) for each in errors] == [TableFull]
        assert [table_of(first, 0, p).rows for p in OWNED] == [5, 5]
        then = everything(first)
        assert everything(yard.successor(saved, 2, FIRST)) == then


def no_memory(_: str) -> None:
    raise MemoryError


def test_rows_that_are_applied_in_part_stop_the_server_and_come_back_whole(yard: Yard, tmp_path: Path) -> None:
    first, saved = yard.begun()
    push_rows(first, 0, untimed(first, 0))
    with failpoints.armed("rows.before_update", no_memory), pytest.raises(Internal, match="applied in part"):
        push_rows(first, 1, untimed(first, 1))
    assert [type(each) for each in yard.failures] == [Internal]
    with pytest.raises(ShardyardError):
        push_rows(first, 2)
    with failpoints.armed("rows.before_update", no_memory), pytest.raises(TooLarge, match="no memory now"):
        yard.successor(saved, 2, FIRST)
    second = yard.successor(saved, 2, FIRST, incarnation=THIRD)
    assert push_rows(second, 1, untimed(second, 1)) == {Outcome.DUPLICATE}
    with yard_of(tmp_path / "other", layout=ROWS) as undisturbed:
        reference = undisturbed.first()
        for sequence in range(2):
            push_rows(reference, sequence, untimed(reference, sequence))
        assert everything(reference) == everything(second)


def untimed(store: Store, sequence: int) -> list[Entry]:
    """What is the same whenever it comes."""
    return some(store, sequence, tables=TIMED)


# ---- what is damaged


Made = tuple[PushHeader, np.ndarray]


def with_ids(store: Store, ids: np.ndarray, value: float = 1.0) -> Made:
    """Rows for partition 0 of table "all", whatever the ids."""
    values = np.full((ids.size, 3), value, np.float32)
    code = bytes(encode_ids(ids)), bytes(encode_rows(values, RowCode.FLOAT32))
    said = PushedRows(0, (OWNED[0],), (ids.size,), (len(code[0]),), (len(code[1]),))
    order = dataclasses.replace(order_of(store, 1), rows=(said,), table_groups=tuple(each.group for each in TABLES))
    return order, np.frombuffer(b"".join(code), np.uint8)


def with_groups(store: Store, *groups: tuple[float, ...]) -> Made:
    order, rows = with_ids(store, ids_of(0, 1))
    return dataclasses.replace(order, table_groups=groups), rows


def of_table(store: Store, table: int) -> Made:
    order, rows = with_ids(store, ids_of(0, 1))
    return dataclasses.replace(order, rows=(dataclasses.replace(order.rows[0], table=table),)), rows


def in_bytes(store: Store, rows: bytes) -> Made:
    return with_ids(store, ids_of(0, 1))[0], np.frombuffer(rows, np.uint8)


def with_gone(store: Store, table: int, ids: np.ndarray, announced: int | None = None) -> Made:
    order, rows = with_ids(store, ids_of(0, 1))
    said = RequestedRows(table, (OWNED[0],), (announced or ids.size,))
    return dataclasses.replace(order, expired=(said,)), np.concatenate([rows, ids.view(np.uint8)])


def with_time(store: Store) -> Made:
    order, rows = with_ids(store, ids_of(0, 1))
    return dataclasses.replace(order, rows=(dataclasses.replace(order.rows[0], now_ms=(5,)),)), rows


SPOILT: dict[str, tuple[Callable[[Store], Made], str]] = {
    "an id of another partition": (lambda s: with_ids(s, ids_of(1, 1)), "in partition 0"),
    "a row that is not finite": (lambda s: with_ids(s, ids_of(0, 1), np.inf), "not finite"),
    "bytes cut short": (lambda s: in_bytes(s, bytes(9)), "its header says"),
    "no code of ids": (lambda s: in_bytes(s, b"M" * with_ids(s, ids_of(0, 1))[1].size), "ids"),
    "a table that is not there": (lambda s: of_table(s, 9), "the job has 7 tables"),
    "a table of another dim": (lambda s: of_table(s, 3), "the block has 1"),
    "settings of another optimizer": (lambda s: with_groups(s, *[(1.0,)] * 7), "has 1 values"),
    "settings for other tables": (lambda s: with_groups(s, TABLES[0].group), "settings for 1 tables"),
    "what expires in a table that is not there": (lambda s: with_gone(s, 9, ids_of(0, 1)), "the job has 7 tables"),
    "what expires in another partition": (lambda s: with_gone(s, AGING, ids_of(1, 1)), "in partition 0"),
    "no time where ages are told in time": (
        lambda s: order_with(s, order_of(s, 1), [(TIMED, OWNED[0], ids_of(0, 1))]),
        "with 0 times; expected 1",
    ),
    "a time where ages are told in steps": (lambda s: with_time(s), "with 1 times; expected 0"),
    "another number of what expires": (lambda s: with_gone(s, AGING, ids_of(0, 3), 2), "its header says"),
}


@pytest.mark.parametrize("what", list(SPOILT))
def test_rows_of_a_record_are_checked_as_a_peers(yard: Yard, what: str) -> None:
    """In a record whose checksums are right."""
    make, told = SPOILT[what]
    first, saved = yard.begun()
    push_rows(first, 0)
    wal = Wal(yard.logs.log(JOB, THIRD), segment=2, on_failure=yard.failures.append, wait_registry=WaitRegistry())
    good, rows = order_with(first, order_of(first, 0), some(first, 0))
    good = dataclasses.replace(good, rows=timed(good.rows))
    with wal.order:
        wal.append(RecordKind.BEGIN, begin_head(GENERATION, OWNED), aligned_empty(0))
        wal.append(RecordKind.PUSH, push_head(good), payload_of(good), rows)
        order, spoilt_rows = make(first)
        ticket = wal.append(RecordKind.PUSH, push_head(order), payload_of(order), spoilt_rows)
    wal.sync(ticket)
    wal.close()
    with pytest.raises(LogDamaged, match=told) as damaged:
        yard.successor(saved, 2, THIRD)
    assert damaged.value.facts["path"].endswith("000000000002.log")
