"""Schedules that one would not think of first: ranks exchanged in a wait, a worker standing by, a job dropped."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from shardyard.config import configuration
from shardyard.config.settings import Settings
from shardyard.domain import errors, limits
from shardyard.domain.push_names import PushName
from shardyard.domain.pushes import ExchangeReply, PushHeader, PushKind
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_launcher.yard.in_process import COORDINATOR, LocalYard
from shardyard_ps_server.hosting import pushes
from shardyard_ps_server.hosting.store import Store
from shardyard_worker.exchange.requests import PushRequest
from shardyard_worker.exchange.server_stream import ServerStream
from shardyard_worker.job import connect as worker
from tests.support.alone import SYNC_2, Counted, status

pytestmark = pytest.mark.usefixtures("alone")

# nothing is heard by itself: the tests say when
DEAF = {"membership.heartbeat_ms": 60_000, "membership.lease_ms": 600_000, "log.level": "error"}


@contextmanager
def yard_of(**given: Any) -> Iterator[tuple[LocalYard, Settings]]:
    settings = configuration.load(None, {}, DEAF | given).settings
    yard = LocalYard(settings)
    try:
        yield yard, settings.model_copy(update={"coordinator": COORDINATOR})
    finally:
        yard.close()


def test_a_worker_whose_ranks_are_exchanged_at_once_goes_on_with_the_new_ones() -> None:
    """Between two heartbeats a worker is given a dead one's rank, and a joiner takes its own: rule B4."""
    given = SYNC_2 | {"job.workers_expected": 1, "job.rank_grace_ms": 0}
    with yard_of(**given) as (yard, inside), ThreadPoolExecutor(1) as pool:
        first = worker.connect(inside, network=yard.network)
        second = worker.connect(inside, network=yard.network)
        assert [[lease.rank for lease in job._session.ranks] for job in (first, second)] == [[0, 1], [1]]
        first._session.refresh()
        prepared = pool.submit(Counted, first, 4)
        two = Counted(second, 4)
        prepared.result(10)
        waiting: Future[None] = pool.submit(two.step, torch.tensor([1]))
        threading.Event().wait(0.3)  # rank 1 of step 0 is there; rank 0 is waited for
        assert not waiting.done()
        first.close()
        third = worker.connect(inside, network=yard.network)
        second._session.refresh()
        assert [[lease.rank for lease in job._session.ranks] for job in (second, third)] == [[0], [1]]
        waiting.result(10)  # rank 0 of step 0 is the second worker's to compute
        late = pool.submit(lambda: Counted(third, 4).step(torch.tensor([3])))
        two.step(torch.tensor([0]))
        two.step(torch.tensor([0]))
        late.result(10)
        assert two.counts == [1.0, 0.5, 0.0, 0.5]
        third.close()
        second.close()


def test_a_range_that_straddles_a_watermark_is_computed_again_from_there() -> None:
    """A worker died between its pushes to two servers; the next one accumulates other batches together: rule A12."""
    with yard_of(**{"job.data.batches_per_data_shard": 8, "yard.servers": 2}) as (yard, inside):
        with worker.connect(inside, network=yard.network) as job:
            counted = Counted(job, 16)
            for index, (chosen,) in enumerate(job.batches(counted.data, batch_size=2, shuffle=False)):
                if index == 1:
                    # batch 0 and 1 of the data shard reach one server only
                    assert job._loop.trainer is not None
                    assert job._loop.feed is not None
                    assert job._loop.feed.work is not None
                    _push_to_one_server(job, job._loop.feed.work.name)
                counted.compute(chosen)
                if index % 4 == 2:
                    counted.optimizer.step()
                    counted.optimizer.zero_grad()
            assert [(feed.leased, feed.done, feed.free) for feed in status(yard).feeds] == [(0, 1, 0)]


def _push_to_one_server(job: worker.Job, name: PushName) -> None:
    assert job._loop.trainer is not None
    router = job._loop.trainer.router
    everyone = router._fan_out._streams
    router._fan_out._streams = everyone[:1]
    try:
        router.push(PushRequest(name, PushKind.EMPTY, 0.0))
    finally:
        router._fan_out._streams = everyone


@pytest.mark.parametrize("gone", [0, 1])
def test_a_lost_server_is_named_also_by_the_answers_of_the_others(gone: int) -> None:
    """The coordinator drops a failed job from the servers that live; a worker that asks them before its next heartbeat
    hears why."""
    with yard_of(**{"membership.coordinator_grace_ms": 500, "job.partitions": 8}) as (yard, inside):
        with worker.connect(inside, network=yard.network) as job:
            counted = Counted(job, 4)
            counted.step(torch.tensor([0]))
            yard._servers[gone].leave()
            yard.network.leave(f"in-process:server-{gone}")
            assert status(yard).state == wire.JOB_STATE_FAILED
            threading.Event().wait(0.2)  # the other server drops the job
            with pytest.raises(errors.ServerLost, match=f"server-{gone} left"):
                counted.step(torch.tensor([0]))


def test_metrics_that_cannot_be_read_do_not_keep_a_worker_from_leaving() -> None:
    """After a device's failure no tensor on it can be read."""
    with yard_of() as (yard, inside):
        job = worker.connect(inside, network=yard.network)
        job.log(loss=torch.empty((), device="meta"))
        job.close("a device has failed")
        assert status(yard).state == wire.JOB_STATE_FAILED


def test_who_stands_by_never_sees_a_mixture_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker without a rank joins while another one takes steps: the values are of one version."""
    with yard_of(**SYNC_2 | {"job.consistency.logical_ranks": 1, "job.partitions": 4}) as (yard, inside):
        with (
            worker.connect(inside, network=yard.network) as training,
            worker.connect(inside, network=yard.network) as by,
        ):
            names = ("a", "b", "c", "d")
            training.register({name: torch.zeros(64) for name in names}, lr=1.0)
            take, first, lock = ServerStream._take, threading.Event(), threading.Lock()
            turns: list[int] = []

            def late(line: ServerStream, order: PushHeader, deadline_ms: int) -> ExchangeReply:
                if order.pull is None or line in training._loop.need_trainer().router._streams.values():
                    return take(line, order, deadline_ms)
                with lock:
                    turns.append(len(turns))
                    turn = len(turns)
                if turn == 1:
                    found = take(line, order, deadline_ms)
                    first.set()
                    return found
                if turn == 2:
                    assert first.wait(10)
                    for _ in range(3):
                        training.push({name: torch.ones(64) for name in names})
                return take(line, order, deadline_ms)

            monkeypatch.setattr(ServerStream, "_take", late)
            by.register({name: torch.zeros(64) for name in names}, lr=1.0)
            assert len(turns) >= 4
            assert len({float(value[0]) for value in by.pull().values()}) == 1, by.pull()


@pytest.mark.parametrize("servers", [1, 2])
def test_a_call_that_lasts_is_explained_while_it_lasts(
    servers: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Promise 7: the deadline of one call is far beyond the time that a wait may go without a word."""
    monkeypatch.setattr(limits, "EXPLAIN_WAIT_MS", 200)
    with yard_of(**{"yard.servers": servers, "log.level": "warning"}) as (yard, inside):
        with worker.connect(inside, network=yard.network) as job:
            job.register({"a": torch.zeros(3)})
            push, said = pushes.push, threading.Event()

            def hanging(store: Store, *given: Any) -> Any:
                until = time.monotonic() + 5
                while "to be applied on server 1.1" not in caplog.text and time.monotonic() < until:
                    said.wait(0.05)
                return push(store, *given)

            monkeypatch.setattr(pushes, "push", hanging)
            begin = time.monotonic()
            job.push({"a": torch.ones(3)})
            assert time.monotonic() - begin < 3
            assert "waiting for push" in caplog.text
