"""A version that servers hold for a reader, as the reader's process sees it: its leases, its look-ups, its end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from shardyard.domain.consistency import UpdateMode
from shardyard.domain.errors import (
    Internal,
    MalformedPayload,
    NotFound,
    NotReady,
    ServerUnavailable,
    ShardyardError,
    VersionPassed,
)
from shardyard.domain.ids import Generation, Incarnation, JobId, PartitionId, Version
from shardyard.domain.layout.layouts import JobLayout, PartitionLayout, PartitionMap, PartitionOwner
from shardyard.domain.optimizers import OptimizerSpec, make_group
from shardyard.domain.pulls import PulledPart
from shardyard.domain.tables.table_settings import TableSettings
from shardyard.runtime.waits import WaitRegistry
from shardyard.wire import methods, pull_messages
from shardyard.wire.frames import Frame
from shardyard_worker.reader import pinned_version
from shardyard_worker.reader.pinned_version import Leases, Pin, PinnedVersion, ReadServer, View, ViewServers
from shardyard_worker.rows.dedup import unique_ids
from shardyard_worker.rows.row_prefetch import RowQuery

DEADLINE_S = 30.0
SERVERS = (Incarnation(11), Incarnation(12))
PARTITIONS = (PartitionId(0), PartitionId(1))
HELD = (Version(1, 7), Version(1, 7))
IDS = np.arange(100, dtype=np.int64)

Answer = Callable[[], Any]


@dataclass
class Server:
    """Answers as it is told."""

    partition: PartitionId
    name: str = "server"
    pinned: Answer = lambda: None
    rows: Answer = lambda: None
    all_rows: Answer = lambda: ()
    asked: list[object] = field(default_factory=list)

    def call(self, method: object, request: object, *, timeout_ms: int) -> Any:
        self.asked.append(method)
        if method is methods.LOOK_UP:
            return self.rows()
        if method is methods.PIN:
            self.pinned()
            return pull_messages.pinned_to_wire((PulledPart(self.partition, HELD[self.partition]),), ())
        return None

    def receive(self, method: object, request: object, *, timeout_ms: int) -> Iterator[Frame]:
        self.asked.append(method)
        yield from self.all_rows()


def view() -> View:
    group = make_group("sgd", {"lr": 0.1})
    layout = JobLayout(
        (),
        OptimizerSpec("sgd", (group,)),
        tuple(PartitionLayout(number, 0, ()) for number in PARTITIONS),
        (TableSettings("t", 1, "sgd", group),),
    )
    owners = [PartitionOwner(number, server, "") for number, server in zip(PARTITIONS, SERVERS, strict=True)]
    return View(JobId(1), UpdateMode.ASYNC, PartitionMap(Generation(1), tuple(owners)), layout)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """One thread, so that what comes later waits for what came before."""
    with ThreadPoolExecutor(1) as made:
        yield made


@pytest.fixture
def wait_registry() -> Iterator[WaitRegistry]:
    made = WaitRegistry()
    yield made
    made.close()


def made(
    peers: Sequence[Server], pool: ThreadPoolExecutor, wait_registry: WaitRegistry, *, as_of: float | None = None
) -> PinnedVersion:
    def call_all(servers: Sequence[ReadServer], ask: Callable[[ReadServer], Any]) -> list[Any]:
        calls = [pool.submit(ask, server) for server in servers]
        errors = [error for call in calls if (error := call.exception(DEADLINE_S)) is not None]
        if errors:
            raise errors[0]
        return [call.result() for call in calls]

    servers = tuple(
        ReadServer(incarnation, peer, (peer.partition,))  # type: ignore[arg-type]
        for incarnation, peer in zip(SERVERS, peers, strict=True)
    )
    begun = time.monotonic() if as_of is None else as_of
    asked = ViewServers(view(), servers, call_all, wait_registry)
    return PinnedVersion(asked, Pin(bytes(16), None, rows=True), HELD, begun)


def two() -> list[Server]:
    return [Server(number) for number in PARTITIONS]


def failing(error: ShardyardError) -> Answer:
    def answer() -> None:
        raise error.anew()

    return answer


def eventually(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < until
        threading.Event().wait(0.005)


def test_leases_of_others_are_renewed_whatever_a_server_says_of_one(
    monkeypatch: pytest.MonkeyPatch, pool: ThreadPoolExecutor, wait_registry: WaitRegistry
) -> None:
    monkeypatch.setattr(pinned_version, "RENEW_MS", 5)
    broken, whole = two(), two()
    broken[1].pinned = failing(Internal("something unforeseen"))
    first, second = made(broken, pool, wait_registry), made(whole, pool, wait_registry)
    leases = Leases()
    leases.keep(first)
    leases.keep(second)
    eventually(lambda: first.is_lost)
    before = len(whole[0].asked)
    eventually(lambda: len(whole[0].asked) > before + 3)
    assert not second.is_lost
    with pytest.raises(VersionPassed, match="something unforeseen"):
        first.check()
    leases.close()


def test_what_comes_to_be_held_when_all_is_let_go_is_let_go_too(
    pool: ThreadPoolExecutor, wait_registry: WaitRegistry
) -> None:
    servers = two()
    held, leases = made(servers, pool, wait_registry), Leases()
    leases.close()
    leases.keep(held)
    assert held.is_lost
    assert [server.asked for server in servers] == [[methods.UNPIN]] * 2


def test_look_ups_that_wait_for_a_thread_ask_nobody_once_the_version_is_lost(
    pool: ThreadPoolExecutor, wait_registry: WaitRegistry
) -> None:
    frozen, waited_for = two(), threading.Event()

    def away() -> None:
        assert waited_for.wait(DEADLINE_S)
        raise ServerUnavailable("it does not answer")

    for server in frozen:
        server.rows = away
    held = made(frozen, pool, wait_registry)
    asked = [RowQuery(0, unique_ids(IDS, len(PARTITIONS)), 1)]
    lost: list[VersionPassed] = []

    def look_up() -> None:
        with pytest.raises(VersionPassed) as passed:
            held.look_up(asked)
        lost.append(passed.value)

    requests = [threading.Thread(target=look_up) for _ in range(5)]
    for request in requests:
        request.start()
    eventually(lambda: pool._work_queue.qsize() == 2 * len(requests) - 1)
    waited_for.set()
    for request in requests:
        request.join(DEADLINE_S)
    assert len(lost) == len(requests)
    assert len(frozen[0].asked) + len(frozen[1].asked) == 1


def test_a_lease_that_may_have_run_out_is_not_renewed(pool: ThreadPoolExecutor, wait_registry: WaitRegistry) -> None:
    """A pin that a server gives anew has rows of another moment, which its version need not tell (hybrid)."""
    renewed = made(two(), pool, wait_registry)
    renewed.renew()
    assert not renewed.is_lost
    servers = two()
    asleep = made(servers, pool, wait_registry, as_of=time.monotonic() - pinned_version.LEASE_MS / 1000)
    asleep.renew()
    assert asleep.is_lost
    assert [server.asked[-1] for server in servers] == [methods.UNPIN] * 2


# ---- all rows


def piece(before: int, *numbers: int) -> Frame:
    """Each row has its id for its value."""
    ids = np.array(numbers, np.int64)
    return Frame(b"", before, ids.tobytes() + ids.astype(np.float32).tobytes())


def test_all_rows_of_a_partition_come_once_however_often_they_are_sent(
    pool: ThreadPoolExecutor, wait_registry: WaitRegistry
) -> None:
    servers = two()
    servers[0].all_rows = lambda: iter([piece(0, 7, -3), piece(2, 9), piece(3, 7, 4)])
    servers[1].all_rows = lambda: iter([piece(0, 8)])
    held = made(servers, pool, wait_registry)
    first, second = (held.read_rows(0, 1, partition) for partition in PARTITIONS)
    assert [(ids.tolist(), rows.tolist()) for ids, rows in first] == [
        ([7, -3], [[7], [-3]]),
        ([9], [[9]]),
        ([4], [[4]]),
    ]
    assert [ids.tolist() for ids, _ in second] == [[8]]
    assert made(two(), pool, wait_registry).read_rows(0, 1, PARTITIONS[0]) == []


@pytest.mark.parametrize("error", [NotFound("a pin that is not here"), ServerUnavailable("it does not answer")])
def test_all_rows_of_a_version_that_a_server_does_not_hold_are_lost_with_it(
    pool: ThreadPoolExecutor, wait_registry: WaitRegistry, error: ShardyardError
) -> None:
    servers = two()
    servers[1].all_rows = failing(error)
    held = made(servers, pool, wait_registry)
    assert held.read_rows(0, 1, PARTITIONS[0]) == []
    with pytest.raises(VersionPassed, match=error.what):
        held.read_rows(0, 1, PARTITIONS[1])
    assert held.is_lost


def test_who_reads_all_rows_waits_while_somebody_else_does(
    pool: ThreadPoolExecutor, wait_registry: WaitRegistry
) -> None:
    servers, refused = two(), []

    def read() -> Iterator[Frame]:
        if len(refused) < 2:
            refused.append(1)
            raise NotReady("a cut of this table is being taken")
        return iter([piece(0, 7)])

    servers[0].all_rows = read
    held = made(servers, pool, wait_registry)
    assert [ids.tolist() for ids, _ in held.read_rows(0, 1, PARTITIONS[0])] == [[7]]
    assert len(refused) == 2
    assert not held.is_lost


def test_who_waits_for_rows_of_a_version_that_is_lost_meanwhile_hears_of_it(
    pool: ThreadPoolExecutor, wait_registry: WaitRegistry
) -> None:
    servers = two()
    held = made(servers, pool, wait_registry)

    def busy() -> Iterator[Frame]:
        held._lose(ServerUnavailable("it does not answer"))
        raise NotReady("a cut of this table is being taken")

    servers[0].all_rows = busy
    with pytest.raises(VersionPassed, match="does not answer"):
        held.read_rows(0, 1, PARTITIONS[0])


@pytest.mark.parametrize("frames", [[piece(1, 7)], [piece(0, 7), piece(2, 8)], [Frame(b"", 0, b"thirteen byte")]])
def test_rows_that_do_not_fit_are_refused(
    pool: ThreadPoolExecutor, wait_registry: WaitRegistry, frames: list[Frame]
) -> None:
    servers = two()
    servers[0].all_rows = lambda: iter(frames)
    with pytest.raises(MalformedPayload, match="of rows of 12 bytes from row"):
        made(servers, pool, wait_registry).read_rows(0, 1, PARTITIONS[0])
