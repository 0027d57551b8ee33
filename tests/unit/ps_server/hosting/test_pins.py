"""Versions that readers hold on a server: what they read, what they cost, how they end (docs/internals/ledger.md, rule
C7)."""

from __future__ import annotations

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from shardyard.checkpoints.partition_file import BlockState, PartitionState
from shardyard.domain import limits
from shardyard.domain.consistency import UpdateMode
from shardyard.domain.errors import (
    InvalidRequest,
    NotFound,
    NotReady,
    ShardyardError,
    StaleGeneration,
    StaleIncarnation,
    TooLarge,
)
from shardyard.domain.ids import Caller, Generation, Incarnation, JobId, PartitionId, Rank, Term, Token, Version
from shardyard.domain.pulls import NotReadyPart, PinRequest, PullHeader
from shardyard.domain.push_names import RankSource
from shardyard_ps_server.hosting import admission, lookups, orders, pins, pulls, pushes
from shardyard_ps_server.hosting.hosted_job import CreateRequest
from shardyard_ps_server.hosting.pins import Pins
from shardyard_ps_server.hosting.store import Store
from shardyard_ps_server.partition.checkpoint_cuts import block_arrays, take_cut
from shardyard_ps_server.partition.partition import Partition
from shardyard_ps_server.partition.reads import await_pinned, pin_version, unpin
from shardyard_ps_server.partition.update_rules import UpdateRules
from shardyard_ps_server.values.versions import KEPT, VersionPin, Versions
from tests.unit.ps_server.hosting.test_store import GENERATION, HERE, JOB, LAYOUT, MOVED, OWNED, order, payload, server

READER = Caller(JOB, Incarnation(0), Term(0))
PIN = bytes(range(16))
DEADLINE_S = 30.0


def wish(pin: bytes = PIN, number: int | None = None, **changed: object) -> PinRequest:
    found = PinRequest(READER, HERE, GENERATION, pin, number, lease_ms=1_000)
    return dataclasses.replace(found, **changed)  # type: ignore[arg-type]


def pull(found: Store, pin: bytes = PIN, owned: list[PartitionId] = OWNED) -> dict[int, tuple[Version, set[float]]]:
    """Version and values of each partition."""
    asked = PullHeader(READER, HERE, GENERATION, tuple(owned), 0, exactly=False, pin=pin)
    result, held = pulls.hold(admission.admit_pull(found, asked), asked)
    try:
        return {
            part.partition: (part.version, set(buffer.view(np.float64).tolist()))
            for part, (_, buffer) in zip(result.parts, held.buffers, strict=True)
        }
    finally:
        held.release()


def push(found: Store, sequence: int, source: object = None) -> None:
    made = order(sequence=sequence) if source is None else order(source, sequence)  # type: ignore[arg-type]
    pushes.push(found, admission.admit_push(found, made), made, payload(made))


def step(found: Store, number: int, ranks: int = 2) -> None:
    """A synchronous step."""
    for rank in range(ranks):
        push(found, number, RankSource(Rank(rank)))


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ms = 5_000
        for module in (pulls, lookups):
            monkeypatch.setattr(module, "now_ms", lambda: self.now_ms)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def pins_of(found: Store) -> Pins:
    return found.hosted()[0].pins


# ---- what is read


def test_pinned_values_stay_whatever_is_pushed() -> None:
    found = server()
    push(found, 0)
    parts, missing = pulls.pin(found, wish())
    assert [part.partition for part in parts] == OWNED
    assert not missing
    for sequence in range(1, 9):
        push(found, sequence)
    assert pull(found) == {number: (Version(1, 1), {-1.0}) for number in OWNED}


def test_named_step_is_held_when_it_comes_though_many_follow() -> None:
    found = server(UpdateMode.SYNC)
    parts, missing = pulls.pin(found, wish(number=3))
    assert not parts
    assert [(each.partition, each.have.number, each.want) for each in missing] == [(0, 0, 3), (2, 0, 3)]
    with pytest.raises(NotReady):
        pull(found)
    for number in range(9):
        step(found, number)
    parts, missing = pulls.pin(found, wish(number=3))
    assert [part.version for part in parts] == [Version(1, 3)] * 2
    assert pull(found) == {number: (Version(1, 3), {-3.0}) for number in OWNED}


def test_step_that_has_passed_is_refused_and_says_where_servers_stand() -> None:
    found = server(UpdateMode.SYNC)
    for number in range(4):
        step(found, number)
    with pytest.raises(InvalidRequest) as refused:
        pulls.pin(found, wish(number=2))
    assert refused.value.facts == {"newest": "4"}
    with pytest.raises(InvalidRequest) as refused:
        pulls.pin(found, wish())
    assert refused.value.facts == {"newest": "4"}
    assert len(pins_of(found)) == 0
    pulls.pin(found, wish(number=3))  # the one before the newest is kept, for partitions of others may be there
    assert pull(found)[0] == (Version(1, 3), {-3.0})


def test_version_of_an_asynchronous_job_cannot_be_named() -> None:
    with pytest.raises(InvalidRequest, match="async, at a version"):
        pulls.pin(server(), wish(number=1))


# ---- leases


def test_pin_ends_with_its_lease_and_its_memory_is_used_again(clock: Clock) -> None:
    found = server()
    pulls.pin(found, wish())
    clock.now_ms += 999
    pulls.expire_pins(found)
    assert len(pins_of(found)) == 1
    clock.now_ms += 1
    pulls.expire_pins(found)
    assert len(pins_of(found)) == 0
    with pytest.raises(NotFound, match="pin that is not here"):
        pull(found)


def test_same_pin_again_renews_its_lease(clock: Clock) -> None:
    found = server()
    pulls.pin(found, wish())
    clock.now_ms += 900
    pulls.pin(found, wish())
    clock.now_ms += 900
    pulls.expire_pins(found)
    assert pull(found)
    with pytest.raises(InvalidRequest, match="asked for as one of version 3"):
        pins_of(found).take(PIN, [], 3, now_ms=clock.now_ms, lease_ms=1)


def test_lease_is_renewed_while_another_reader_waits_for_memory_or_a_push(monkeypatch: pytest.MonkeyPatch) -> None:
    found = server()
    pulls.pin(found, wish())
    asked, given = threading.Event(), threading.Event()
    real = pins.pin_version

    def slow(*wanted: Any, **more: Any) -> VersionPin:
        asked.set()
        assert given.wait(DEADLINE_S)
        return real(*wanted, **more)

    monkeypatch.setattr(pins, "pin_version", slow)
    with ThreadPoolExecutor(2) as readers:
        try:
            other = readers.submit(pulls.pin, found, wish(bytes(16)))
            assert asked.wait(DEADLINE_S)
            parts, _ = readers.submit(pulls.pin, found, wish()).result(5)
            assert [part.partition for part in parts] == OWNED
            assert not other.done()
        finally:
            given.set()
    assert len(pins_of(found)) == 2


def test_lease_that_runs_out_takes_nothing_from_a_pull_under_way(clock: Clock) -> None:
    found = server()
    push(found, 0)
    pulls.pin(found, wish())
    asked = PullHeader(READER, HERE, GENERATION, tuple(OWNED), 0, exactly=False, pin=PIN)
    _, held = pulls.hold(admission.admit_pull(found, asked), asked)
    clock.now_ms += 2_000
    pulls.expire_pins(found)
    for sequence in range(1, 9):
        push(found, sequence)
    assert {float(each) for _, buffer in held.buffers for each in buffer.view(np.float64)} == {-1.0}
    held.release()


def test_pin_that_is_let_go_is_gone_and_once_more_does_nothing() -> None:
    found = server()
    pulls.pin(found, wish())
    pulls.unpin(found, JOB, PIN)
    pulls.unpin(found, JOB, PIN)
    pulls.unpin(found, JobId(99), PIN)
    with pytest.raises(NotFound):
        pull(found)


# ---- what it costs


def buffers(partition: Partition) -> int:
    made = partition.versions
    return len(made._kept) + len(made._idle) + len(made._retired)


def test_memory_that_updates_need_beside_a_pin_was_there_before() -> None:
    found = server()
    partition = found.hosted()[0].partitions[PartitionId(0)]
    pulls.pin(found, wish())
    before = buffers(partition)
    assert before == KEPT + 2
    for sequence in range(6):
        push(found, sequence)
    assert buffers(partition) == before


def test_pins_one_after_the_other_take_the_same_memory() -> None:
    found = server()
    partition = found.hosted()[0].partitions[PartitionId(0)]
    for sequence in range(20):
        name = sequence.to_bytes(16, "big")
        pulls.pin(found, wish(name))
        push(found, sequence)
        pulls.unpin(found, JOB, name)
    assert buffers(partition) == KEPT + 2
    assert not partition.versions._readers
    assert not partition.versions._pins


def test_no_more_than_so_many_versions_are_held() -> None:
    found = server()
    for number in range(limits.PINS_MAX):
        pulls.pin(found, wish(number.to_bytes(16, "big")))
    with pytest.raises(TooLarge, match="are pinned"):
        pulls.pin(found, wish(bytes(15) + b"\xff"))
    pulls.unpin(found, JOB, bytes(16))
    pulls.pin(found, wish(bytes(15) + b"\xff"))


def test_pin_without_memory_is_refused_and_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    found = server()
    hosted = found.hosted()[0]

    def no_memory(self: Versions) -> object:
        raise TooLarge("no memory")

    last = hosted.partitions[OWNED[-1]]
    monkeypatch.setattr(last.versions, "allocate", no_memory.__get__(last.versions))
    with pytest.raises(TooLarge, match="no memory"):
        pulls.pin(found, wish())
    assert len(hosted.pins) == 0
    assert not hosted.partitions[OWNED[0]].versions._pins
    monkeypatch.undo()
    push(found, 0)


# ---- who may, and what ends it


@pytest.mark.parametrize(
    ("changed", "refused"),
    [
        ({"server": Incarnation(9)}, StaleIncarnation),
        ({"generation": Generation(3)}, StaleGeneration),
        ({"caller": Caller(JobId(9), Incarnation(0), Term(0))}, NotFound),
    ],
)
def test_pin_at_the_wrong_door_is_refused(changed: dict[str, object], refused: type[ShardyardError]) -> None:
    with pytest.raises(refused):
        pulls.pin(server(), wish(**changed))


def test_pin_before_there_are_values_is_to_come_again() -> None:
    with pytest.raises(NotReady):
        pulls.pin(server(opened=False), wish())


def test_reader_without_an_incarnation_reads_its_pin_and_nothing_else() -> None:
    found = server()
    with pytest.raises(InvalidRequest, match="without an incarnation"):
        admission.admit_pull(found, PullHeader(READER, HERE, GENERATION, tuple(OWNED), 0, exactly=False))


def test_partitions_that_move_end_their_pins() -> None:
    found = server()
    pulls.pin(found, wish())
    orders.create(found, CreateRequest(JOB, Generation(5), LAYOUT, OWNED, UpdateRules(UpdateMode.ASYNC, 2), MOVED))
    assert len(pins_of(found)) == 0
    with pytest.raises(StaleGeneration):
        pull(found)
    again = PullHeader(READER, HERE, Generation(5), tuple(OWNED), 0, exactly=False, pin=PIN)
    with pytest.raises(NotFound):
        pulls.hold(admission.admit_pull(found, again), again)


def test_job_that_is_dropped_ends_its_pins() -> None:
    found = server()
    pulls.pin(found, wish())
    held = pins_of(found)
    orders.drop(found, JOB)
    assert len(held) == 0


def test_version_that_was_named_does_not_come_where_the_partition_goes_back() -> None:
    found = Partition(LAYOUT, PartitionId(0), UpdateRules(UpdateMode.SYNC, 1))
    found.open()
    wanted = pin_version(found, 2)
    cut = take_cut(found)
    cut.complete()
    arrays = [block_arrays(found, index, cut) for index in range(len(found.payload.blocks))]
    cut.release()
    blocks = tuple(BlockState(index, each["values"].copy(), {}, 0) for index, each in enumerate(arrays))
    found.restore(PartitionState(PartitionId(0), Version(2, 0), blocks, (), Token(0)))
    with pytest.raises(NotFound, match="gone back"):
        pins.await_pin(pins.Pin(2, ((found, wanted),), 0), 0.0)
    unpin(found, wanted)


def test_waiting_for_a_version_ends_in_time() -> None:
    found = Partition(LAYOUT, PartitionId(0), UpdateRules(UpdateMode.SYNC, 1))
    found.open()
    wanted = pin_version(found, 1)
    assert isinstance(await_pinned(found, wanted, 0.0), NotReadyPart)


def test_version_that_is_wanted_is_never_written() -> None:
    versions = Versions(64)
    versions.return_unused(versions.allocate())
    held = versions.pin(1)
    assert held is not None
    for number in range(1, 6):
        buffer = versions.take_idle()
        buffer = versions.allocate() if buffer is None else buffer
        buffer[:] = number
        versions.publish(buffer)
    assert held.buffer is not None
    assert set(held.buffer) == {1}
    versions.unpin(held)
    versions.unpin(held)
    assert not versions._readers
