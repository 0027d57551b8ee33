"""Rows that workers have looked up, and have not pushed yet, do not expire."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from shardyard.domain.ids import Caller, Incarnation, PartitionId, Token
from shardyard.domain.limits import ROWS_IN_FLIGHT_MAX
from shardyard.domain.push_names import PushName, SourceKey, WorkerSource
from shardyard.domain.tables.table_settings import ExpirySettings
from shardyard_ps_server.hosting import orders
from shardyard_ps_server.hosting.store import Store
from shardyard_ps_server.rows import lookups_in_flight
from shardyard_ps_server.rows.lookups_in_flight import LookupsInFlight, TablePart
from tests.support.rows_in_pushes import (
    DENSE,
    IDS,
    INITIAL,
    JOB,
    LAYOUT,
    NARROW,
    OWNER,
    PARTS,
    WIDE,
    WORKER,
    closed,
    coded,
    look_up,
    push,
    push_order,
    server,
)

__all__ = ["closed"]

HERE = TablePart(PartitionId(0), 0)
OTHER = Incarnation(int(WORKER) + 1)
CALLER = Caller(JOB, WORKER)


class Clock:
    def __init__(self) -> None:
        self.ms = 5_000

    def now_ms(self) -> int:
        return self.ms


def ids(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def flight() -> tuple[LookupsInFlight, Clock]:
    clock = Clock()
    return LookupsInFlight(clock), clock


def test_what_was_looked_up_stays_until_it_is_pushed() -> None:
    rows, _ = flight()
    rows.begin(WORKER, [(HERE, ids(1, 3, 5))])
    rows.begin(WORKER, [(HERE, ids(5, 7))])
    assert rows.without(HERE, ids(1, 2, 3, 5, 7, 9)).tolist() == [2, 9]
    rows.end(WORKER, [(HERE, ids(1, 2, 5))])
    assert rows.without(HERE, ids(1, 2, 3, 5, 7, 9)).tolist() == [1, 2, 5, 9]
    rows.end(WORKER, [(HERE, ids(3, 7))])
    assert rows.without(HERE, ids(3, 7)).tolist() == [3, 7]


def test_tables_partitions_and_workers_are_told_apart() -> None:
    rows, _ = flight()
    rows.begin(WORKER, [(HERE, ids(1)), (TablePart(PartitionId(1), 0), ids(2)), (TablePart(PartitionId(0), 1), ids(3))])
    rows.begin(OTHER, [(HERE, ids(1, 4))])
    assert rows.without(HERE, ids(1, 2, 3, 4)).tolist() == [2, 3]
    rows.end(OTHER, [(HERE, ids(1, 4))])
    assert rows.without(HERE, ids(1, 2, 3, 4)).tolist() == [2, 3, 4]
    rows.forget([WORKER])
    assert rows.without(HERE, ids(1)).tolist() == [1]
    assert rows.without(TablePart(PartitionId(1), 0), ids(2)).tolist() == [2]


def test_what_is_never_pushed_does_not_stay_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookups_in_flight, "IDS_MAX", 10)
    rows, clock = flight()
    for number in range(20):
        rows.begin(WORKER, [(TablePart(PartitionId(number % 2), 0), ids(number, number + 100))])
    assert len(rows) == 10
    assert rows.without(HERE, np.arange(20)).tolist() == [number for number in range(20) if number not in (16, 18)]
    clock.ms += lookups_in_flight.KEPT_MS
    assert 18 not in rows.without(HERE, np.arange(20))
    clock.ms += 1
    assert rows.without(HERE, np.arange(20)).tolist() == list(range(20))
    rows.begin(WORKER, [(HERE, ids(3))])
    assert len(rows) == 1


def test_what_is_not_pushed_with_the_steps_that_may_be_in_flight_goes() -> None:
    """A forward whose gradient nobody asks for, as of a validation."""
    rows, _ = flight()
    rows.begin(WORKER, [(HERE, ids(1))])
    for _ in range(ROWS_IN_FLIGHT_MAX - 1):
        rows.begin(WORKER, [(HERE, ids(2))])
        rows.end(WORKER, [(HERE, ids(2))])
        assert rows.without(HERE, ids(1, 2)).tolist() == [2]
    rows.begin(WORKER, [(HERE, ids(3))])
    rows.end(WORKER, [])
    assert rows.without(HERE, ids(1, 2, 3)).tolist() == [1, 2]


def test_one_look_up_of_many_ids_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookups_in_flight, "IDS_MAX", 10)
    rows, _ = flight()
    rows.begin(WORKER, [(HERE, ids(77))])
    rows.begin(WORKER, [(HERE, np.arange(50)), (TablePart(PartitionId(1), 0), np.arange(50))])
    assert not rows.without(HERE, np.arange(50)).size
    assert rows.without(HERE, ids(77)).tolist() == [77]
    rows.end(WORKER, [(HERE, np.arange(50)), (TablePart(PartitionId(1), 0), np.arange(50)), (HERE, np.arange(0))])
    assert len(rows) == 0


# ---- on a server


def expiring() -> Store:
    aging = dataclasses.replace(WIDE, expiry=ExpirySettings(age_steps=2))
    return server(dataclasses.replace(LAYOUT, tables=(aging, NARROW)))


def push_rows(store: Store, sequence: int, which: np.ndarray, worker: Incarnation = WORKER) -> None:
    rows, data = coded([(0, PARTS[0], IDS[which], np.ones((which.size, 3), np.float32))])
    name = PushName(SourceKey(WorkerSource(worker)), Token(0), sequence, sequence)
    push(store, push_order(sequence, rows, caller=Caller(JOB, worker), name=name), DENSE + data)


def stay(store: Store, which: np.ndarray) -> bool:
    """Whether all of these have a row. Changes nothing."""
    table = store.hosted()[0].partitions[PARTS[0]].tables["wide"]
    return table.having_row(IDS[which]).size == which.size


def test_a_row_that_a_worker_has_looked_up_stays_until_that_has_pushed_it() -> None:
    store = expiring()
    mine = np.flatnonzero(OWNER == 0)
    ever, looked_up, left = mine[:1], mine[1:3], mine[3:]
    push_rows(store, 0, mine)
    found = look_up(store, 0, IDS[looked_up], caller=Caller(JOB, OTHER))
    assert (found == INITIAL[looked_up] - 1).all()
    for sequence in range(1, 300):
        push_rows(store, sequence, ever)
    assert stay(store, looked_up)
    assert not any(stay(store, left[i : i + 1]) for i in range(left.size)), "nothing has expired"
    push_rows(store, 0, looked_up, worker=OTHER)
    assert (look_up(store, 0, IDS[looked_up]) == INITIAL[looked_up] - 2).all()
    for sequence in range(300, 600):
        push_rows(store, sequence, ever)
    assert not stay(store, looked_up[:1])


def test_a_row_that_only_a_reader_or_a_dead_worker_has_looked_up_goes() -> None:
    store = expiring()
    mine = np.flatnonzero(OWNER == 0)
    ever, read, dead = mine[:1], mine[1:2], mine[2:3]
    push_rows(store, 0, mine)
    look_up(store, 0, IDS[read])
    look_up(store, 0, IDS[dead], caller=Caller(JOB, OTHER))
    for sequence in range(1, 300):
        push_rows(store, sequence, ever)
    assert not stay(store, read)
    assert stay(store, dead)
    orders.fence(store, [OTHER])
    for sequence in range(300, 600):
        push_rows(store, sequence, ever)
    assert not stay(store, dead)


def test_nothing_is_remembered_where_no_row_expires() -> None:
    store = server()
    look_up(store, caller=CALLER)
    assert len(store.hosted()[0].rows_in_flight) == 0
