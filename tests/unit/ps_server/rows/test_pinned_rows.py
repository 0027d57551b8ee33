"""Rows of tables as they were at a version that a reader has pinned (docs/internals/ledger.md, rule C7): what is read,
what it costs, how it ends."""

from __future__ import annotations

import dataclasses
import threading
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from shardyard.domain.consistency import UpdateMode
from shardyard.domain.errors import InvalidRequest, MalformedPayload, NotFound, NotReady, TooLarge, VersionPassed
from shardyard.domain.ids import Caller, Generation, Incarnation, Term, Token
from shardyard.domain.pulls import PinRequest
from shardyard.domain.push_names import SourceKey, WorkerSource
from shardyard.domain.tables.table_settings import ExpirySettings
from shardyard.wire import pull_messages, table_messages
from shardyard_ps_server.checkpoint.restore import Restore
from shardyard_ps_server.hosting import lookups, orders, pulls
from shardyard_ps_server.hosting.hosted_job import CreateRequest
from shardyard_ps_server.hosting.pins import Pin
from shardyard_ps_server.hosting.store import Store
from shardyard_ps_server.partition import next_version, reads
from shardyard_ps_server.partition import partition as partitions
from shardyard_ps_server.partition.partition import Partition
from shardyard_ps_server.partition.push import apply_push
from shardyard_ps_server.partition.reads import look_up_pinned, pin_version, read_pinned_table, unpin
from shardyard_ps_server.partition.update_rules import UpdateRules
from shardyard_ps_server.rows.partition_tables import PartitionTables, RowsToRead
from shardyard_ps_server.rows.row_overlay import FAN, PinnedRows, RowDiff, merged, put_back
from shardyard_ps_server.values.versions import VersionPin
from tests.support import rows_in_steps as steps_of
from tests.support.rows_in_pushes import (
    DENSE,
    GENERATION,
    HERE,
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
    ones,
    push,
    push_order,
    server,
)

__all__ = ["closed"]

READER = Caller(JOB, Incarnation(0), Term(0))
PIN = bytes(range(16))
DEADLINE_S = 30.0


def wish(pin: bytes = PIN, **changed: Any) -> PinRequest:
    return dataclasses.replace(PinRequest(READER, HERE, GENERATION, pin, None, lease_ms=60_000, rows=True), **changed)


def push_ones(store: Store, sequence: int, table: int = 0) -> None:
    """Takes one from every row."""
    rows, data = coded(ones(table))
    push(store, push_order(sequence, rows), DENSE + data)


def pinned(store: Store, pin: bytes = PIN, table: int = 0, ids: np.ndarray = IDS) -> np.ndarray:
    return look_up(store, table, ids, caller=READER, pin=pin)


def after(pushes: int) -> np.ndarray:
    rows = INITIAL.copy()
    for _ in range(pushes):
        rows -= np.float32(1)
    return rows


# ---- what is read


def test_pinned_rows_stay_whatever_is_pushed() -> None:
    store = server()
    for sequence in range(3):
        push_ones(store, sequence)
    pulls.pin(store, wish())
    for sequence in range(3, 30):
        push_ones(store, sequence, sequence % 2)
        assert (pinned(store) == after(3)).all()
        assert (pinned(store, table=1) == 0).all()
    assert (look_up(store, caller=READER) == after(16)).all()


def test_a_row_that_began_since_reads_as_it_would_have_begun() -> None:
    store = server()
    pulls.pin(store, wish())
    push_ones(store, 0)
    assert (pinned(store) == INITIAL).all()


def test_each_pin_has_its_own_version() -> None:
    store = server()
    for sequence in range(8):
        pulls.pin(store, wish(bytes([sequence]) * 16))
        push_ones(store, sequence)
    for number in range(8):
        assert (pinned(store, bytes([number]) * 16) == after(number)).all()
    for number in range(0, 8, 2):
        pulls.unpin(store, JOB, bytes([number]) * 16)
    push_ones(store, 8)
    for number in range(1, 8, 2):
        assert (pinned(store, bytes([number]) * 16) == after(number)).all()


def test_rows_that_expired_since_are_there() -> None:
    expiring = dataclasses.replace(WIDE, expiry=ExpirySettings(age_steps=2))
    layout = dataclasses.replace(LAYOUT, tables=(expiring, NARROW))
    store = server(layout)
    push_ones(store, 0)
    pulls.pin(store, wish())
    owned = np.flatnonzero(OWNER == 0)[:1]
    only = [(0, PARTS[0], IDS[owned], np.ones((1, 3), np.float32))]
    rows, data = coded(only)
    for sequence in range(1, 400):
        push(store, push_order(sequence, rows), DENSE + data)
    table = store.hosted()[0].partitions[PARTS[0]].tables["wide"]
    assert table.use().expired == (OWNER == 0).sum() - 1, "nothing has expired: the test tests nothing"
    assert (pinned(store) == after(1)).all()
    assert everything(store) == {int(each): row.tolist() for each, row in zip(IDS, after(1), strict=True)}


def everything(store: Store, pin: bytes = PIN) -> dict[int, list[float]]:
    """All rows of the first table, of all partitions, as a pin has them."""
    found: dict[int, list[float]] = {}
    for part in PARTS:
        for ids, rows in lookups.read_rows(store, READER, HERE, GENERATION, part, 0, pin):
            for each, row in zip(ids.tolist(), rows.tolist(), strict=True):
                assert found.setdefault(each, row) == row, "an id came twice, with other values"
    return found


def test_all_pinned_rows_are_those_of_the_version_whatever_is_pushed() -> None:
    """Rows that began since are there with what they read as."""
    store = server()
    for sequence in range(4):
        pulls.pin(store, wish(bytes([sequence]) * 16))
        push_ones(store, sequence)
    for number in range(4):
        expected = {int(each): row.tolist() for each, row in zip(IDS, after(number), strict=True)}
        assert everything(store, bytes([number]) * 16) == expected


def test_all_rows_of_a_pin_that_is_not_there_are_refused() -> None:
    store = server()
    push_ones(store, 0)
    with pytest.raises(NotFound, match="a pin that is not here"):
        everything(store)
    pulls.pin(store, wish(rows=False))
    with pytest.raises(InvalidRequest, match="that has none"):
        everything(store)


@pytest.mark.parametrize("mode", list(UpdateMode))
def test_what_is_read_is_of_one_version_while_others_push(mode: UpdateMode) -> None:
    def read(partition: Partition, wanted: VersionPin) -> None:
        for _ in range(3):
            out = np.zeros((steps_of.IDS.size, 2), np.float32)
            look_up_pinned(partition, [RowsToRead(0, steps_of.IDS, out)], wanted)
            assert (out == -np.float32(wanted.number)).all()

    read_while_others_push(mode, read, times=100)


@pytest.mark.parametrize("mode", list(UpdateMode))
def test_all_that_is_read_is_of_one_version_while_others_push(mode: UpdateMode) -> None:
    def read(partition: Partition, wanted: VersionPin) -> None:
        for _, rows in read_pinned_table(partition, 0, wanted):
            assert (rows == -np.float32(wanted.number)).all()

    read_while_others_push(mode, read, times=20, pause_s=0.001)


def read_while_others_push(
    mode: UpdateMode, read: Callable[[Partition, VersionPin], None], *, times: int, pause_s: float = 0.0
) -> None:
    """Every push takes one from every row: rows say of how many versions they are. `pause_s`: after a push."""
    partition, push_one = counting(mode)
    stop, failed = threading.Event(), []

    def train() -> None:
        number = 0
        try:
            while not stop.is_set():
                push_one(number)
                number += 1
                if pause_s:
                    time.sleep(pause_s)
        except BaseException as error:  # noqa: BLE001 - told below
            failed.append(error)

    training = threading.Thread(target=train)
    training.start()
    seen: set[int] = set()
    try:
        until = time.monotonic() + DEADLINE_S
        while len(seen) < times and time.monotonic() < until and not failed:
            wanted = newest(partition, mode)
            try:
                read(partition, wanted)
            finally:
                unpin(partition, wanted)
            seen.add(wanted.number)
    finally:
        stop.set()
        training.join()
    assert not failed, failed
    assert len(seen) == times


def counting(mode: UpdateMode) -> tuple[Partition, Callable[[int], None]]:
    """A partition, and what takes one from each of its rows."""
    everything = steps_of.work(dict.fromkeys(range(steps_of.IDS.size), 1.0))
    exact = dataclasses.replace(steps_of.WIDE, initial=steps_of.NARROW.initial)
    layout = dataclasses.replace(steps_of.LAYOUT, tables=(exact, steps_of.NARROW))
    if mode is UpdateMode.SYNC:
        partition = steps_of.partition_of(1, layout)
        return partition, lambda number: void(steps_of.push(partition, 0, number, everything))
    partition = Partition(layout, steps_of.PARTITION, UpdateRules(mode, 1))
    partition.open()

    def push_one(number: int) -> None:
        name = steps_of.PushName(SourceKey(WorkerSource(WORKER)), Token(0), number, number)
        apply_push(partition, name, everything, steps_of.current)

    return partition, push_one


def void(_: object) -> None:
    return None


def newest(partition: Partition, mode: UpdateMode) -> VersionPin:
    """The newest version, held with its rows; of a synchronous job by its name."""
    while True:
        number = partition.describe()[0].number if mode is UpdateMode.SYNC else None
        try:
            return pin_version(partition, number, rows=True)
        except InvalidRequest:
            continue


@pytest.mark.parametrize("is_held_before", [True, False])
def test_who_pins_in_the_midst_of_a_push_reads_one_version(
    monkeypatch: pytest.MonkeyPatch, is_held_before: bool
) -> None:
    """The one before it where that is set aside for somebody, else the one that it makes."""
    partition, push_one = counting(UpdateMode.ASYNC)
    if is_held_before:
        pin_version(partition, None, rows=True)
    found: list[VersionPin] = []
    asking = threading.Thread(target=lambda: found.append(pin_version(partition, None, rows=True)))
    real = next_version.push_rows

    def between(pushes: Any) -> None:
        real(pushes)
        asking.start()
        asking.join(0.2)

    with monkeypatch.context() as patch:
        patch.setattr(next_version, "push_rows", between)
        push_one(0)
    asking.join(DEADLINE_S)
    (wanted,) = found
    assert wanted.number == (0 if is_held_before else 1)
    push_one(1)
    assert (held(partition, wanted) == -np.float32(wanted.number)).all()


def test_a_step_that_is_named_ahead_is_read_when_it_has_come() -> None:
    partition = steps_of.partition_of(1)
    wanted = pin_version(partition, 2, rows=True)
    everything = steps_of.work(dict.fromkeys(range(steps_of.IDS.size), 1.0))
    for step in range(6):
        if step < 2:
            with pytest.raises(NotReady):
                held(partition, wanted)
        steps_of.push(partition, 0, step, everything)
    assert held(partition, wanted).tobytes() == (steps_of.INITIAL - 1 - 1).tobytes()


def test_the_step_before_the_newest_can_be_held() -> None:
    partition = steps_of.partition_of(1)
    everything = steps_of.work(dict.fromkeys(range(steps_of.IDS.size), 1.0))
    for step in range(3):
        steps_of.push(partition, 0, step, everything)
    wanted = pin_version(partition, 2, rows=True)
    steps_of.push(partition, 0, 3, everything)
    assert held(partition, wanted).tobytes() == (steps_of.INITIAL - 1 - 1).tobytes()
    with pytest.raises(InvalidRequest) as refused:
        pin_version(partition, 2, rows=True)
    assert refused.value.facts == {"newest": "4"}


def held(partition: Partition, wanted: VersionPin) -> np.ndarray:
    out = np.full((steps_of.IDS.size, 2), np.nan, np.float32)
    look_up_pinned(partition, [RowsToRead(0, steps_of.IDS, out)], wanted)
    return out


# ---- what is kept


def test_what_is_put_back_is_what_was_set_aside_first_however_it_is_merged() -> None:
    draw = np.random.default_rng(5)
    for _ in range(20):
        truth = draw.standard_normal((50, 2)).astype(np.float32)
        now = truth.copy()
        kept = PinnedRows(10, bytes_max=1 << 30)
        parts: Any = ()
        for number in range(5, 5 + int(draw.integers(1, 200))):
            chosen = np.sort(draw.choice(50, draw.integers(0, 9), replace=False)).astype(np.int64)
            if number < 10:
                truth[chosen] += 1
                now = truth.copy()
                kept.add(RowDiff(number, {0: (chosen, now[chosen])}))
                continue
            kept.add(RowDiff(number, {0: (chosen, now[chosen].copy())} if chosen.size else {}))
            now[chosen] += draw.standard_normal((chosen.size, 2)).astype(np.float32)
            if draw.random() < 0.2:
                parts = kept.diffs()
                kept.replace(parts, merged(parts))
            found = now.copy()
            put_back(merged(kept.diffs()), 0, np.arange(50, dtype=np.int64), found)
            assert found.tobytes() == truth.tobytes()


def test_what_is_looked_through_grows_with_the_logarithm_of_the_updates() -> None:
    kept = PinnedRows(0, bytes_max=1 << 30)
    ids = np.arange(3, dtype=np.int64)
    for number in range(1_000):
        kept.add(RowDiff(number, {0: (ids, np.full((3, 1), number, np.float32))}))
    parts = merged(kept.diffs())
    assert len(parts) <= 4 * (FAN - 1)
    before = kept.nbytes
    kept.replace(kept.diffs(), parts)
    assert kept.nbytes < before / 30


def test_what_is_kept_takes_no_more_memory_than_it_may_however_small_its_parts_are() -> None:
    most = 1 << 20
    kept = PinnedRows(0, most)
    number = 0
    tracemalloc.start()
    try:
        while kept.nbytes or not number:
            row = np.full((1, 1), number, np.float32)
            kept.add(RowDiff(number, {0: (np.array([number]), row), 1: (np.array([number]), row.copy())}))
            number += 1
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most / 2 < peak < most * 1.1


def test_rows_that_change_beyond_what_is_kept_lose_the_version_and_training_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(partitions, "HELD_ROWS_BYTES_MAX", 200)
    store = server()
    pulls.pin(store, wish())
    assert (pinned(store) == INITIAL).all()
    for sequence in range(10):
        push_ones(store, sequence)
    with pytest.raises(VersionPassed, match="more than the 100 bytes"):
        pinned(store)
    assert (look_up(store, caller=READER) == after(10)).all()
    assert all(not each.overlay.nbytes for each in parts_of(store))
    pulls.unpin(store, JOB, PIN)
    pulls.pin(store, wish())
    assert (pinned(store) == after(10)).all()


def parts_of(store: Store) -> list[Partition]:
    return [store.hosted()[0].partitions[number] for number in PARTS]


@pytest.mark.parametrize("mode", list(UpdateMode))
def test_a_server_without_memory_for_readers_trains_on(mode: UpdateMode, monkeypatch: pytest.MonkeyPatch) -> None:
    partition, push_one = counting(mode)
    push_one(0)
    wanted = newest(partition, mode)
    push_one(1)
    real, refused = PartitionTables.set_aside, []

    def short(self: PartitionTables, *given: Any) -> RowDiff:
        if not refused:
            refused.append(True)
            raise TooLarge("no memory")
        return real(self, *given)

    monkeypatch.setattr(PartitionTables, "set_aside", short)
    push_one(2)
    assert refused
    with pytest.raises(VersionPassed, match="memory"):
        held(partition, wanted)
    assert partition.describe()[0].number == 3
    again = newest(partition, mode)
    push_one(3)
    assert (held(partition, again) == -3).all()


def test_nothing_is_kept_when_nobody_holds() -> None:
    store = server()
    pulls.pin(store, wish())
    push_ones(store, 0)
    pulls.unpin(store, JOB, PIN)
    push_ones(store, 1)
    assert all(not each.overlay.nbytes and not each.overlay.last for each in parts_of(store))


# ---- how it ends


def pin_of(store: Store) -> Pin:
    return store.hosted()[0].pins._pins[PIN]


def test_rows_of_a_pin_that_was_released_are_not_given() -> None:
    store = server()
    pulls.pin(store, wish())
    ((_, wanted), *_) = pin_of(store).wanted
    pulls.unpin(store, JOB, PIN)
    with pytest.raises(NotFound, match="a pin that is not here"):
        pinned(store)
    with pytest.raises(InvalidRequest):
        look_up_pinned(parts_of(store)[0], [], wanted)


def test_a_pin_that_is_released_while_rows_are_read_gives_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is pushed from then on is set aside for nobody."""
    store = server()
    pulls.pin(store, wish())
    real = reads.read_rows

    def between(*given: Any) -> None:
        pulls.unpin(store, JOB, PIN)
        push_ones(store, 0)
        real(*given)

    monkeypatch.setattr(reads, "read_rows", between)
    with pytest.raises(VersionPassed, match="released"):
        pinned(store)


def test_rows_of_a_pin_without_rows_are_refused() -> None:
    store = server()
    pulls.pin(store, wish(rows=False))
    with pytest.raises(InvalidRequest, match="pin it with its rows"):
        pinned(store)


def test_a_partition_that_goes_back_loses_what_was_held() -> None:
    store = server()
    pulls.pin(store, wish())
    push_ones(store, 0)
    partition = parts_of(store)[0]
    partition.leave()
    held = partition.overlay.find(pin_of(store).wanted[0][1])
    assert held is not None
    with pytest.raises(VersionPassed, match="has left this server"):
        held.diffs()


def test_a_look_up_of_another_generation_is_refused() -> None:
    store = server()
    pulls.pin(store, wish())
    rules, restore = UpdateRules(UpdateMode.ASYNC, 1), Restore("memory://checkpoints", ())
    orders.create(store, CreateRequest(JOB, Generation(5), LAYOUT, list(PARTS), rules, restore))
    with pytest.raises(NotFound):
        look_up(store, caller=READER, pin=PIN, generation=Generation(5))


# ---- on the wire


def test_a_pin_and_a_look_up_say_what_they_mean_on_the_wire() -> None:
    assert pull_messages.pin_from_wire(pull_messages.pin_to_wire(wish())) == wish()
    assert pull_messages.pin_from_wire(pull_messages.pin_to_wire(wish(rows=False))) == wish(rows=False)
    asked = steps_of.asked(pin=PIN)
    assert table_messages.look_up_from_header(table_messages.look_up_to_header(asked)) == asked


@pytest.mark.parametrize(
    ("changed", "refused"),
    [({"pin": b"short"}, MalformedPayload), ({"number": 3}, InvalidRequest), ({"wait_ms": 1}, InvalidRequest)],
)
def test_a_pinned_look_up_that_makes_no_sense_is_refused(changed: dict[str, Any], refused: type[Exception]) -> None:
    header = table_messages.look_up_to_header(steps_of.asked(**({"pin": PIN} | changed)))
    with pytest.raises(refused):
        table_messages.look_up_from_header(header)
