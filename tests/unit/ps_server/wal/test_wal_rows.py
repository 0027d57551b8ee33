"""Rows of tables in a server's log: what is acknowledged comes back to the bit, and what expired stays
expired."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from shardyard.domain.consistency import StaleRule
from shardyard.domain.errors import (
    InvalidRequest,
    MalformedPayload,
)
from shardyard.domain.ids import Token, Version
from shardyard.domain.pulls import RequestedRows
from shardyard.domain.push_names import DataShardSource, SourceKey
from shardyard.domain.pushes import Outcome, PushKind
from shardyard.transport.shared_memory import SharedMemory
from shardyard.wire import push_messages
from shardyard_ps_server.hosting import admission, pushes
from shardyard_ps_server.hosting.store import Store
from shardyard_ps_server.wal.records import RecordKind
from shardyard_ps_server.wal.replay import push_head
from tests.support.rows_in_logs import (
    AGING,
    ROWS,
    TABLES,
    TIMED,
    clock,
    contents,
    everything,
    hold,
    ids_of,
    order_with,
    push_rows,
    send,
    some,
    table_of,
    timed,
    yard,
)
from tests.support.servers_with_logs import (
    FIRST,
    NEXT,
    OWNED,
    SECOND,
    THIRD,
    Generation,
    Yard,
    log_of,
    order_of,
    payload_of,
    push,
    yard_of,
)
from tests.support.waiting import wait_until

__all__ = ["clock", "yard"]


def expired(yard: Yard, base: int = 1) -> int:
    """Ids that a log says have expired. The server's end."""
    log = log_of(yard)
    records = log.records(base, log.take_over(NEXT))
    orders = [push_messages.push_from_header(r.head, recorded=True) for r in records if r.kind is RecordKind.PUSH]
    return sum(sum(each.rows) for order in orders for each in order.expired)


# ---- what was acknowledged comes back


@pytest.mark.parametrize("before", [0, 7])
def test_promise_3_rows_that_were_acknowledged_come_back_to_the_bit(yard: Yard, before: int) -> None:
    """From a checkpoint without rows, and from one with rows; initial values, admission by number, chance and estimate,
    optimizer state, what expired, and rates that a schedule moves."""
    first = yard.first()
    for sequence in range(before):
        push_rows(first, sequence)
    saved = yard.save(first, 2)
    for sequence in range(before, before + 15):
        assert push_rows(first, sequence) == {Outcome.APPLIED}
    assert push_rows(first, before + 14) == {Outcome.DUPLICATE}
    assert push(first, before + 15, kind=PushKind.EMPTY) == {Outcome.APPLIED}
    then = everything(first)
    assert all(sum(table_of(first, t, p).rows for p in OWNED) for t in range(len(TABLES)))
    second = yard.successor(saved, 2, FIRST)
    assert everything(second) == then
    assert expired(yard, 2) > 20
    assert push_rows(second, before + 14) == {Outcome.DUPLICATE}
    assert push_rows(second, before + 16) == {Outcome.APPLIED}
    undisturbed = everything(second)
    third = yard.successor(saved, 2, FIRST, SECOND, incarnation=THIRD, life=3, generation=Generation(6))
    assert everything(third) == undisturbed


def test_rows_come_back_wherever_their_partitions_go(yard: Yard) -> None:
    first, saved = yard.begun()
    for sequence in range(6):
        push_rows(first, sequence)
    before = [contents(table_of(first, t, p)) for t in range(len(TABLES)) for p in OWNED]
    stores = [
        yard.successor(saved, 2, FIRST, incarnation=server, owned=[OWNED[p]]) for p, server in ((0, SECOND), (1, THIRD))
    ]
    assert [contents(table_of(stores[p], t, p)) for t in range(len(TABLES)) for p in OWNED] == before


def test_rows_that_a_checkpoint_has_are_not_pushed_again(yard: Yard) -> None:
    """The cut is taken after the new segment has begun: what comes in between is in both, and so is what expired then;
    a row that was made again meanwhile stays."""
    first = yard.first()
    ids = ids_of(0, 3)
    push_rows(first, 0, [(AGING, OWNED[0], ids[:1])])
    hosted = first.hosted()[0]
    cut = hosted.saver.save

    def late(*given: object, **more: object) -> object:
        for sequence in range(1, 4):
            push_rows(first, sequence, [(AGING, OWNED[0], ids[1:2])])
        assert int(ids[0]) not in contents(table_of(first, AGING))
        push_rows(first, 4, [(AGING, OWNED[0], ids[:1])])
        return cut(*given, **more)  # type: ignore[arg-type]

    hosted.saver.save = late  # type: ignore[assignment]
    saved = yard.save(first, 2)
    push_rows(first, 5, [(AGING, OWNED[0], ids[2:])])
    then = everything(first)
    second = yard.successor(saved, 2, FIRST)
    assert everything(second) == then
    assert int(ids[0]) in contents(table_of(second, AGING))
    assert expired(yard, 2) > 0


@pytest.mark.parametrize("seed", range(4))
def test_any_prefix_of_a_log_has_the_rows_that_were_acknowledged(tmp_path: Path, seed: int) -> None:
    """Several workers push at once; the log's order is the order of all."""
    with yard_of(tmp_path, layout=ROWS) as yard:
        first, saved = yard.begun()
        sources = [DataShardSource(0, 0, index) for index in range(4)]
        pushes.open_sources(first.hosted()[0], [(SourceKey(source), Token(1)) for source in sources])
        errors = run(
            [lambda s=s, i=i: [push_rows(first, n, seed=10 * seed + i, source=s) for n in range(6)]
             for i, s in enumerate(sources)]
        )  # fmt: skip
        assert not errors
        then = everything(first)
        assert everything(yard.successor(saved, 2, FIRST)) == then


def run(works: Sequence[Callable[[], object]]) -> list[BaseException]:
    """All at once; what they raise."""
    errors: list[BaseException] = []
    barrier = threading.Barrier(len(works))

    def work(each: Callable[[], object]) -> None:
        try:
            barrier.wait(30)
            each()
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=work, args=(each,)) for each in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def test_rows_beside_a_payload_in_shared_memory_are_recorded(yard: Yard) -> None:
    first, saved = yard.begun()
    shared = SharedMemory(4096, read_only=False)
    order, rows = order_with(first, dataclasses.replace(order_of(first, 0), shared_at=0), some(first, 0))
    payload = shared.bytes[: order.payload_bytes]
    payload[:] = payload_of(order)
    pushes.push(first, admission.admit_push(first, order), order, payload, rows)
    shared.close()
    then = everything(first)
    assert table_of(first, 0).rows
    assert everything(yard.successor(saved, 2, FIRST)) == then


def test_places_in_shared_memory_are_not_recorded(yard: Yard) -> None:
    first = yard.first()
    placed = dataclasses.replace(order_of(first, 0), shared_at=0, rows_at=64, requested_at=128)
    order, _ = order_with(first, placed, some(first, 0))
    said = push_messages.push_from_header(push_head(order), recorded=True)
    assert (said.shared_at, said.rows_at, said.requested_at) == (None, None, None)
    assert (said.name, said.rows) == (order.name, order.rows)


def test_rates_of_late_rows_come_back_to_the_bit(tmp_path: Path) -> None:
    rule = StaleRule(divides_rate=True)
    layout = dataclasses.replace(ROWS, tables=tuple(each for each in TABLES if each.optimizer != "ftrl"))
    with yard_of(tmp_path, stale=rule, layout=layout) as yard:
        first, saved = yard.begun()
        for sequence in range(8):
            order, rows = order_with(first, order_of(first, sequence), some(first, sequence, tables=5))
            bases = tuple(Version(1, max(0, sequence - late)) for late in (4, 1))
            send(first, dataclasses.replace(order, bases=bases), rows)
        then = everything(first)
        assert [each.tally.most for _, each in sorted(first.hosted()[0].partitions.items()) if each.tally] == [4, 1]
        assert everything(yard.successor(saved, 2, FIRST)) == then
    with yard_of(tmp_path / "other", layout=layout) as plain:
        reference = plain.first()
        for sequence in range(8):
            order = order_of(reference, sequence)
            send(reference, *order_with(reference, order, some(reference, sequence, tables=5)))
        mine, others = then[1], everything(reference)[1]  # type: ignore[index]
        assert [each for each in mine if each[0] == 1] == [each for each in others if each[0] == 1]
        assert [each for each in mine if each[0] == 0] != [each for each in others if each[0] == 0]


# ---- what expires


def appending(first: Store, thread: threading.Thread) -> Callable[[], None]:
    """Starts the thread, and waits until it has appended a record to the log."""
    wal = first.hosted()[0].wal
    assert wal is not None

    def meanwhile() -> None:
        appended = wal._appended
        thread.start()
        wait_until(lambda: wal._appended > appended, "a record", deadline_s=30.0)

    return meanwhile


def test_a_row_of_a_push_that_is_recorded_and_has_not_taken_effect_does_not_expire(yard: Yard) -> None:
    """It was decided that others expire while this one was on its way to the disk."""
    first, saved = yard.begun()
    other = DataShardSource(0, 0, 1)
    pushes.open_sources(first.hosted()[0], [(SourceKey(other), Token(1))])
    old, fresh = ids_of(0, 2), ids_of(0, 4, begin=2)
    push_rows(first, 0, [(AGING, OWNED[0], old)])
    for sequence in range(1, 3):
        push_rows(first, sequence, [(AGING, OWNED[0], fresh[sequence : sequence + 1])])
    wal = first.hosted()[0].wal
    assert wal is not None
    with wal.order:  # the next one is about to say that both are old
        assert sorted(table_of(first, AGING).expiry.expiring(4, 512).ids) == old.tolist()
    outcomes: list[object] = []
    thread = threading.Thread(
        target=lambda: outcomes.append(push_rows(first, 0, [(AGING, OWNED[0], fresh[3:])], source=other))
    )
    hold(first, "wal.before_sync", lambda: push_rows(first, 3, [(AGING, OWNED[0], old[:1])]), appending(first, thread))
    thread.join()
    assert outcomes == [{Outcome.APPLIED}]
    found = contents(table_of(first, AGING))
    assert int(old[0]) in found
    assert int(old[1]) not in found
    then = everything(first)
    assert everything(yard.successor(saved, 2, FIRST)) == then


def test_what_expires_with_a_push_that_is_there_twice_expires_once(yard: Yard) -> None:
    """The second one is a duplicate only when it takes effect: what was decided with it is nobody's."""
    first, saved = yard.begun()
    ids = ids_of(0, 2)
    push_rows(first, 0, [(AGING, OWNED[0], ids[:1])])
    for sequence in range(1, 3):
        push_rows(first, sequence, [(AGING, OWNED[0], ids[1:])])
    outcomes: list[object] = []
    again = threading.Thread(target=lambda: outcomes.append(push_rows(first, 3, [(AGING, OWNED[0], ids[1:])])))
    hold(first, "wal.before_sync", lambda: push_rows(first, 3, [(AGING, OWNED[0], ids[1:])]), appending(first, again))
    again.join()
    assert outcomes == [{Outcome.DUPLICATE}]
    then = everything(first)
    assert contents(table_of(first, AGING)).keys() == {int(ids[1])}
    assert everything(yard.successor(saved, 2, FIRST)) == then
    assert expired(yard, 2) == 1


def test_a_sender_does_not_say_what_expires(yard: Yard) -> None:
    first = yard.first()
    order, _ = order_with(first, order_of(first, 0), some(first, 0))
    said = dataclasses.replace(order, expired=(RequestedRows(0, (OWNED[0],), (1,)),))
    header = push_messages.push_to_wire(said).SerializeToString()
    assert push_messages.push_from_header(header, recorded=True) == said
    with pytest.raises(InvalidRequest, match="which rows expire"):
        push_messages.push_from_header(header)


def test_a_sender_does_not_say_when_a_push_came(yard: Yard) -> None:
    first = yard.first()
    order, _ = order_with(first, order_of(first, 0), some(first, 0))
    said = dataclasses.replace(order, rows=timed(order.rows))
    header = push_messages.push_to_wire(said).SerializeToString()
    assert push_messages.push_from_header(header, recorded=True) == said
    with pytest.raises(InvalidRequest, match="says when it came"):
        push_messages.push_from_header(header)


@pytest.mark.parametrize(
    ("times", "text"), [((1,), "have 1 times"), ((1, 1 << 47), "the largest time is 140737488355327")]
)
def test_times_of_a_record_that_cannot_be_are_refused(yard: Yard, times: tuple[int, ...], text: str) -> None:
    first = yard.first()
    order, _ = order_with(first, order_of(first, 0), [(TIMED, p, ids_of(i, 2)) for i, p in enumerate(OWNED)])
    said = dataclasses.replace(order, rows=(dataclasses.replace(order.rows[0], now_ms=times),))
    with pytest.raises(MalformedPayload, match=text):
        push_messages.push_from_header(push_messages.push_to_wire(said).SerializeToString(), recorded=True)
