"""A pull that waits for a synchronous step: who carries it on, when, and that it does so without anyone's locks."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time

import pytest

from shardyard.domain.consistency import Clipping, UpdateMode
from shardyard.domain.ids import Rank, Term, Token
from shardyard.domain.push_names import PushName, RankSource, SourceKey
from shardyard.domain.pushes import Outcome, PushHeader, StepVerdict
from shardyard.transport.interfaces import Pause
from shardyard.transport.shared_memory import SharedMemory
from shardyard.wire import frames, push_messages
from shardyard_ps_server.hosting import orders, pushes
from shardyard_ps_server.hosting.hosted_job import CreateRequest
from shardyard_ps_server.hosting.store import Store
from shardyard_ps_server.partition.update_rules import UpdateRules
from shardyard_ps_server.service.exchange_stream import ExchangeStream
from shardyard_ps_server.service.version_pause import VersionPause
from tests.support.exchanges import GENERATION, HERE, JOB, LAYOUT, OWNED, PART_BYTES, Wire, server

LATER_S = 60.0


def pause_for(store: Store, number: int, seconds: float = LATER_S) -> VersionPause:
    hosted = store.hosted()[0]
    return VersionPause([hosted.find(each) for each in OWNED], number, time.monotonic() + seconds)


def contribute(wire: Wire, rank: int, step: int) -> list[Outcome]:
    name = PushName(SourceKey(RankSource(Rank(rank))), Token(1), step, step)
    return [part.outcome for part in wire.push(1.0, name=name)[0].push]


class Calls:
    """Notes each call, and that no partition is locked then."""

    def __init__(self, store: Store, pause: VersionPause) -> None:
        self._partitions = store.hosted()[0].in_order
        self._pause = pause
        self.over: list[bool] = []
        self.failed: list[str] = []

    def __call__(self) -> None:
        def try_locks() -> None:
            for partition in self._partitions:
                for lock in (partition.turn, partition.lock):
                    if lock.acquire(blocking=False):
                        lock.release()
                    else:
                        self.failed.append(f"{partition.id} is locked")

        thread = threading.Thread(target=try_locks)  # the lock of a partition may be taken twice by one thread
        thread.start()
        thread.join()
        self.over.append(self._pause.is_over)


def test_the_thread_that_makes_the_version_calls_once_it_has_no_lock() -> None:
    store = server(mode=UpdateMode.SYNC)
    wire, pause = Wire(store), pause_for(store, 1)
    calls = Calls(store, pause)
    assert pause.begin(calls)
    assert contribute(wire, 0, 0) == [Outcome.RECORDED] * 2
    assert calls.over == []
    assert not pause.is_over
    assert contribute(wire, 1, 0) == [Outcome.APPLIED] * 2
    # called once all partitions had the version
    assert (calls.over, calls.failed) == ([True], [])
    assert pause.is_over
    assert not pause.begin(calls)
    assert all(partition.awaited == {} for partition in store.hosted()[0].in_order)


def test_pause_that_has_ended_is_not_called() -> None:
    store = server(mode=UpdateMode.SYNC)
    wire, pause = Wire(store), pause_for(store, 1)
    calls = Calls(store, pause)
    assert pause.begin(calls)
    pause.end()
    pause.end()
    contribute(wire, 0, 0)
    contribute(wire, 1, 0)
    assert calls.over == []


def test_pause_is_over_in_time_and_for_a_version_that_needs_a_verdict() -> None:
    assert pause_for(server(mode=UpdateMode.SYNC), 1, seconds=0).is_over
    store = Store()
    store.become(HERE, Term(1))
    rules = UpdateRules(UpdateMode.SYNC, 2, clipping=Clipping(norm=1.0))
    orders.create(store, CreateRequest(JOB, GENERATION, LAYOUT, list(OWNED), rules))
    orders.open_partitions(store, JOB, GENERATION)
    pushes.open_sources(store.hosted()[0], [(SourceKey(RankSource(Rank(rank))), Token(1)) for rank in range(2)])
    wire, pause = Wire(store), pause_for(store, 1)
    calls = Calls(store, pause)
    assert pause.begin(calls)
    contribute(wire, 0, 0)
    contribute(wire, 1, 0)
    assert (len(calls.over), calls.failed) == (1, [])
    assert pause.is_over, "the caller may have to bring the verdict"
    for_next = pause_for(store, 2)
    calls = Calls(store, for_next)
    assert for_next.begin(calls)
    wire.ask(wire.order(verdict=StepVerdict(0, 64.0)))
    assert (calls.over, calls.failed) == ([False], [])


def test_restored_partition_calls() -> None:
    store = server(mode=UpdateMode.SYNC)
    pause = pause_for(store, 1)
    calls = Calls(store, pause)
    assert pause.begin(calls)
    (partition, _) = store.hosted()[0].in_order
    partition.wake()
    assert (len(calls.over), calls.failed) == (1, [])
    assert pause.begin(calls), "it has not come, so it is waited for again"


@pytest.mark.parametrize("shared", [True, False])
def test_only_exchanges_of_one_machine_pause(shared: bool) -> None:
    """A pull over a stream waits in its thread: another one would have to send its values."""
    store = server(mode=UpdateMode.SYNC)
    wire = Wire(store)
    orders_: list[PushHeader] = []
    if shared:
        memory = SharedMemory(4 * PART_BYTES, read_only=True)
        wire.descriptors.pass_descriptors([memory.descriptor()])
        orders_.append(wire.order(attach=memory.ticket()))
    wait_ms = 1_000 if shared else 20
    pull = dataclasses.replace(wire.wish(1, shared=shared, wait_ms=wait_ms), exactly=True)
    orders_.append(wire.order(pull=pull))
    sent = [frames.Frame(push_messages.push_to_wire(order).SerializeToString(), 0, b"") for order in orders_]
    run = ExchangeStream(store, wire.descriptors.other).run(iter(sent))
    items = [item for item in itertools.islice(run, 2 * len(orders_)) if item is not None]
    assert [isinstance(item, Pause) for item in items] == ([False, True] if shared else [False])
