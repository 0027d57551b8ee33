"""A server's log while it is written: a push takes effect after its record is durable, in the log's order. A fenced
server, and a server whose disk fails, writes nothing."""

from __future__ import annotations

import dataclasses
import os
import threading
from pathlib import Path

import pytest

from shardyard.domain.consistency import StaleRule, UpdateMode
from shardyard.domain.errors import (
    InvalidRequest,
    NotReady,
    SequenceGap,
    StaleGeneration,
    StaleIncarnation,
    TooLarge,
)
from shardyard.domain.ids import Caller, Incarnation, Term, Token
from shardyard.domain.pulls import PullHeader
from shardyard.domain.push_names import DataShardSource, SourceKey
from shardyard.domain.pushes import Outcome
from shardyard.runtime import failpoints
from shardyard_ps_server.checkpoint.saver import Saved
from shardyard_ps_server.hosting import admission, orders, pulls, pushes
from shardyard_ps_server.hosting.hosted_job import CreateRequest
from shardyard_ps_server.hosting.store import Store
from shardyard_ps_server.partition import partition as partitions
from shardyard_ps_server.partition.update_rules import UpdateRules
from shardyard_ps_server.service.exchange_stream import is_immediate
from shardyard_ps_server.wal.wal import Wal
from tests.support.servers_with_logs import (
    FIRST,
    GENERATION,
    JOB,
    LAYOUT,
    NEXT,
    OWNED,
    SHARD,
    WORKER,
    Yard,
    disk_full,
    log_of,
    order_of,
    payload_of,
    push,
    state,
    yard_of,
)
from tests.support.waiting import wait_until


def test_compensation_is_refused_where_it_could_not_be_replayed(tmp_path: Path) -> None:
    with (
        yard_of(tmp_path, stale=StaleRule(compensation=0.1)) as yard,
        pytest.raises(InvalidRequest, match="which has a log, to be compensated") as refused,
    ):
        yard.first()
    assert "set job.consistency.delay_compensation to 0" in str(refused.value)


def stalled_sync(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event, list[int]]:
    """The first sync of a log sets the first event and waits for the second. The list has each sync's descriptor."""
    held, go, syncs = threading.Event(), threading.Event(), list[int]()
    fdatasync = os.fdatasync

    def slow(descriptor: int) -> None:
        syncs.append(descriptor)
        if len(syncs) == 1:
            held.set()
            assert go.wait(30)
        fdatasync(descriptor)

    monkeypatch.setattr("shardyard_ps_server.wal.wal.os.fdatasync", slow)
    return held, go, syncs


def test_a_sync_is_shared_by_all_who_wait(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    first = yard.first()
    sources = [DataShardSource(0, 0, index) for index in range(6)]
    pushes.open_sources(first.hosted()[0], [(SourceKey(source), Token(1)) for source in sources])
    held, go, syncs = stalled_sync(monkeypatch)
    threads = [threading.Thread(target=push, args=(first, 0), kwargs={"source": source}) for source in sources]
    threads[0].start()
    assert held.wait(30)
    for thread in threads[1:]:
        thread.start()
    wal = first.hosted()[0].wal
    assert wal is not None
    wait_until(lambda: wal._appended - wal._durable == len(sources), "all records", deadline_s=30.0)
    go.set()
    for thread in threads:
        thread.join()
    assert len(syncs) == 2
    assert state(first)[0][0] == len(sources)


def test_nothing_is_seen_before_it_is_durable(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    first = yard.first()
    held, go, _ = stalled_sync(monkeypatch)
    thread = threading.Thread(target=push, args=(first, 0))
    thread.start()
    assert held.wait(30)
    wish = PullHeader(Caller(JOB, WORKER), FIRST, GENERATION, tuple(OWNED), 0, exactly=False)
    result, buffers = pulls.hold(admission.admit_pull(first, wish), wish)
    assert [part.version.number for part in result.parts] == [0, 0]
    buffers.release()
    ((_, marks),) = pushes.read_ledger(first.hosted()[0], [(SourceKey(SHARD), Token(0))])
    assert [mark.next for mark in marks] == [0, 0]
    go.set()
    thread.join()
    assert state(first)[0][0] == 1


def test_what_is_under_way_is_in_the_segment_before_a_checkpoint(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that begins while a push is being synced waits for it."""
    first = yard.first()
    held, go, _ = stalled_sync(monkeypatch)
    saved: list[Saved] = []
    threads = [
        threading.Thread(target=push, args=(first, 0)),
        threading.Thread(target=lambda: saved.extend(yard.save(first, 2))),
    ]
    threads[0].start()
    assert held.wait(30)
    threads[1].start()
    threads[1].join(0.2)
    assert not saved
    go.set()
    for thread in threads:
        thread.join()
    assert [each.version.number for each in saved] == [1, 1]
    before = state(first)
    assert state(yard.successor(saved, 2, FIRST)) == before


def test_pushes_take_effect_in_the_order_of_the_log(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    first, saved = yard.begun()
    sources = [DataShardSource(0, 0, index) for index in (1, 2)]
    pushes.open_sources(first.hosted()[0], [(SourceKey(source), Token(1)) for source in sources])
    appended, go = threading.Event(), threading.Event()
    sync = Wal.sync

    def slow(wal: Wal, ticket: int) -> None:
        sync(wal, ticket)
        if not appended.is_set():
            appended.set()
            assert go.wait(30)

    monkeypatch.setattr(Wal, "sync", slow)
    threads = [threading.Thread(target=push, args=(first, 0), kwargs={"source": source}) for source in sources]
    threads[0].start()
    assert appended.wait(30)
    threads[1].start()
    threads[1].join(0.2)
    assert first.hosted()[0].partitions[OWNED[0]].describe()[0].number == 0
    go.set()
    for thread in threads:
        thread.join()
    before = state(first)
    assert before[0][0] == 2
    assert state(yard.successor(saved, 2, FIRST)) == before


def test_exchanges_are_not_answered_in_the_receiving_thread(yard: Yard) -> None:
    first = yard.first()
    order = order_of(first, 0)
    assert not is_immediate(order, first.hosted()[0])
    plain = Store()
    plain.become(FIRST, Term(2))
    orders.create(plain, CreateRequest(JOB, GENERATION, LAYOUT, OWNED, UpdateRules(UpdateMode.ASYNC, 2)))
    assert is_immediate(order, plain.hosted()[0])
    plain.close()


def test_a_server_whose_log_was_taken_over_makes_nothing_visible(yard: Yard) -> None:
    first, saved = yard.begun(1)
    before = state(first)
    second = yard.successor(saved, 2, FIRST)
    with pytest.raises(NotReady, match="taken over"):
        push(first, 1)
    assert state(first) == before
    assert isinstance(yard.failures[0], StaleIncarnation)
    with pytest.raises(NotReady):
        push(first, 1)
    assert push(second, 1) == {Outcome.APPLIED}


def test_a_server_whose_log_was_deleted_since_makes_nothing_visible(yard: Yard) -> None:
    """It slept until no checkpoint needed its log any more, and the fence went with it."""
    first = yard.first()
    before = state(first)
    second = yard.successor(yard.save(first, 2), 2, FIRST)
    yard.save(second, 3, oldest=3)
    assert not log_of(yard).folder.exists()
    with pytest.raises(NotReady, match="taken over"):
        push(first, 0)
    assert state(first) == before


def test_the_fence_is_up_before_the_log_is_read(yard: Yard) -> None:
    """A push that the owner has synced in between is either read by the successor or never acknowledged."""
    first, saved = yard.begun()
    outcomes: list[object] = []

    def late(_: str) -> None:
        try:
            outcomes.append(push(first, 0))
        except NotReady:
            outcomes.append(None)

    with failpoints.armed("wal.after_fence", late):
        second = yard.successor(saved, 2, FIRST)
    assert outcomes == [None]
    assert push(second, 0) in ({Outcome.APPLIED}, {Outcome.DUPLICATE})
    assert state(second)[0][0] == 1


def test_a_fenced_worker_and_an_old_generation_append_nothing(yard: Yard) -> None:
    first, saved = yard.begun()
    order = order_of(first, 0)
    admitted = admission.admit_push(first, order)
    orders.fence(first, [WORKER])
    with pytest.raises(StaleIncarnation):
        pushes.push(first, admitted, order, payload_of(order))
    other = dataclasses.replace(order_of(first, 0), caller=Caller(JOB, Incarnation(11)))
    admitted = admission.admit_push(first, other)
    admitted.hosted.generation = NEXT
    first.epoch += 1
    with pytest.raises(StaleGeneration):
        pushes.push(first, admitted, other, payload_of(other))
    assert state(yard.successor(saved, 2, FIRST))[0][0] == 0


def test_a_gap_is_refused_and_not_recorded(yard: Yard) -> None:
    first, saved = yard.begun()
    with pytest.raises(SequenceGap):
        push(first, 3)
    assert state(yard.successor(saved, 2, FIRST))[0][0] == 0


@pytest.mark.parametrize("place", ["wal.before_write", "wal.before_sync", "wal.after_sync", "wal.before_apply"])
def test_a_log_that_fails_stops_its_server(yard: Yard, place: str) -> None:
    first = yard.first()

    with failpoints.armed(place, disk_full), pytest.raises((NotReady, OSError)):
        push(first, 0)
    assert len(yard.failures) == 1
    wish = PullHeader(Caller(JOB, WORKER), FIRST, GENERATION, tuple(OWNED), 0, exactly=False)
    _, buffers = pulls.hold(admission.admit_pull(first, wish), wish)
    assert not any(buffer.any() for _, buffer in buffers.buffers)
    buffers.release()
    with pytest.raises(NotReady, match="stops"):
        push(first, 0)


def test_no_memory_for_what_was_recorded_stops_the_server(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    first = yard.first()

    def none(*_: object) -> object:
        raise TooLarge("no memory")

    monkeypatch.setattr(partitions.Versions, "take_idle", lambda _: None)
    monkeypatch.setattr(partitions.Versions, "allocate", none)
    with pytest.raises(TooLarge):
        push(first, 0)
    assert isinstance(yard.failures[0], TooLarge)
