"""Bounded staleness, in yards inside this process: what a gradient is computed on lacks at most so many steps of any
other worker, whoever joins, rests and leaves (docs/internals/ledger.md, rule C3)."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from torch.utils.data import TensorDataset

import shardyard as sy
from shardyard.wire import methods
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard.wire.v1 import parameter_server_pb2 as server_wire
from shardyard_launcher.yard.in_process import COORDINATOR
from tests.support.alone import local_yard

pytestmark = pytest.mark.usefixtures("alone")

PLACES = 8
SAMPLES, PER_SHARD = 160, 4
DATA = TensorDataset(torch.zeros(SAMPLES))
DEADLINE_S = 30.0
BOUNDED = {
    "yard.servers": 2,
    "job.partitions": 4,
    "job.block_bytes": 64,
    "job.consistency.mode": "bounded",
    "job.data.batches_per_data_shard": PER_SHARD,
    "log.level": "error",
}


class Traced:
    """A worker whose steps are counted at a place of its own, in variables of several partitions, so that whoever reads
    them knows how many of its steps are there."""

    def __init__(self, job: sy.Job, place: int) -> None:
        self.job = job
        self.place = place
        self.steps = 0
        self.lacks: list[tuple[int, float]] = []
        """Of each step: how many there were of all others, and the most steps by which another one was behind."""
        self.values = [torch.nn.Parameter(torch.zeros(PLACES)) for _ in range(4)]
        model = torch.nn.ParameterList(self.values)
        _, self.optimizer = job.prepare(model, torch.optim.SGD(self.values, lr=1.0))

    def look(self, others: Sequence[int]) -> None:
        there = torch.stack([values.detach() for values in self.values]).amin(0)
        self.lacks.append((int(there.sum()), max(self.steps - float(there[other]) for other in others)))

    def step(self) -> None:
        self.optimizer.zero_grad()
        torch.autograd.backward([-values[self.place] for values in self.values])
        self.optimizer.step()
        self.steps += 1


@contextmanager
def yard(**given: object) -> Iterator[Callable[..., sy.Job]]:
    """Gives jobs, all of the same name; they must be closed within."""
    with local_yard(BOUNDED | given) as (_, connect):
        yield connect


def train(
    connect: Callable[[], sy.Job],
    place: int,
    workers: int,
    *,
    joined: threading.Barrier,
    pause_s: Callable[[int], float] = lambda step: 0.0,
) -> Traced:
    """Worker `place` of so many, all of which begin when all have joined."""
    others = [other for other in range(workers) if other != place]
    with connect() as job:
        traced = Traced(job, place)
        for _ in job.batches(DATA, batch_size=1):
            if traced.steps == 0:
                joined.wait(DEADLINE_S)
            traced.look(others)
            traced.step()
            time.sleep(pause_s(traced.steps))
        return traced


@pytest.mark.parametrize(("staleness", "window"), [(0, 0), (1, 0), (1, 1), (3, 0), (3, 1)])
def test_promise_5_no_gradient_lacks_more_steps_of_another_worker_than_the_bound(staleness: int, window: int) -> None:
    joined = threading.Barrier(3)
    pauses: list[Callable[[int], float]] = [lambda step: 0.01, lambda step: 0.002 * (step % 5), lambda _: 0.0]
    given = {"job.consistency.staleness": staleness, "worker.exchange": ("blocking", "delayed")[window]}
    with yard(**given) as connect, ThreadPoolExecutor(3) as threads:
        runs = [
            threads.submit(train, connect, place, 3, joined=joined, pause_s=pause) for place, pause in enumerate(pauses)
        ]
        traced = [run.result(DEADLINE_S) for run in runs]
    assert sum(each.steps for each in traced) == SAMPLES
    # in the end, when the last data shards are leased, others have no work and are not waited for
    busy = SAMPLES - 3 * PER_SHARD - 3 * (staleness + 1)
    lacks = [lack for each in traced for total, lack in each.lacks if total < busy]
    assert len(lacks) > SAMPLES / 2
    assert max(lacks) <= staleness
    if staleness:
        assert max(lacks) > 0


def test_who_comes_late_begins_beside_the_slowest_and_nobody_waits_for_it_to_catch_up() -> None:
    with yard() as connect:
        first = connect()
        veteran = Traced(first, 0)
        batches = first.batches(DATA, batch_size=1)
        for _ in itertools.islice(batches, 20):
            veteran.step()
        with connect() as second:
            late = Traced(second, 1)
            theirs = second.batches(DATA, batch_size=1)
            for _ in itertools.islice(theirs, 2):
                late.step()
            for _ in itertools.islice(batches, 3 + 2):  # as far as the bound lets it
                veteran.step()
            ahead = ThreadPoolExecutor(1)
            next(batches)
            step = ahead.submit(veteran.step)
            with pytest.raises(TimeoutError):
                step.result(0.5)
            next(theirs)
            late.step()
            step.result(DEADLINE_S)
            ahead.shutdown()
            theirs.close()  # it rests: the other one is free
            for _ in itertools.islice(batches, 10):
                veteran.step()
            assert int(second.pull()["0"][0]) == 20 + 5 + 1 + 10
        for _ in itertools.islice(batches, 10):
            veteran.step()
        batches.close()
        first.close()


def test_promise_7_who_waits_says_for_whom_and_how_far_that_one_is(caplog: pytest.LogCaptureFixture) -> None:
    with yard(**{"job.consistency.staleness": 1}) as connect, ThreadPoolExecutor(1) as threads:
        jobs = [connect(), connect()]
        traced = [Traced(job, place) for place, job in enumerate(jobs)]
        feeds = [job.batches(DATA, batch_size=1) for job in jobs]
        for feed in feeds:
            next(feed)
        traced[1].step()
        next(feeds[1])
        step = threads.submit(traced[1].step)
        slowest = jobs[0]._session.caller.incarnation
        until = time.monotonic() + DEADLINE_S
        expected = f"waits for worker {slowest}, which is at clock 0, to reach clock 1 (staleness 1)"
        while expected not in jobs[1]._session.wait_registry.waiting_for:
            assert time.monotonic() < until, jobs[1]._session.wait_registry.waiting_for
            time.sleep(0.05)
        traced[0].step()
        step.result(DEADLINE_S)
        for feed, job in zip(feeds, jobs, strict=True):
            feed.close()
            job.close()


def test_worker_with_data_of_its_own_joins_with_its_first_push() -> None:
    with yard(**{"job.consistency.staleness": 1}) as connect, ThreadPoolExecutor(1) as threads:
        jobs = [connect(), connect()]
        traced = [Traced(job, place) for place, job in enumerate(jobs)]
        for _ in range(5):
            traced[0].step()  # alone so far
        traced[1].step()  # joins beside it
        second = threads.submit(traced[1].step)
        with pytest.raises(TimeoutError):
            second.result(0.5)
        traced[0].step()
        second.result(DEADLINE_S)
        jobs[0].close()
        for _ in range(3):
            traced[1].step()
        jobs[1].close()


def test_delay_beyond_the_bound_is_refused() -> None:
    given = BOUNDED | {"job.consistency.staleness": 0, "worker.exchange": "delayed"}
    with (
        sy.connect(settings=given) as job,
        pytest.raises(sy.errors.ConfigurationError, match=r"worker\.exchange delayed"),
    ):
        Traced(job, 0)


def test_status_shows_the_bound_and_the_most_that_was_missing() -> None:
    with yard() as connect:
        jobs = [connect(), connect()]
        traced = [Traced(job, place) for place, job in enumerate(jobs)]
        feeds = [job.batches(DATA, batch_size=1) for job in jobs]
        for feed in feeds:
            next(feed)
        for _ in range(2):
            traced[1].step()
            next(feeds[1])
        peer = jobs[0]._session.network.connect(COORDINATOR, name="coordinator")
        (job,) = peer.call(methods.STATUS, wire.StatusRequest(), timeout_ms=5_000).jobs
        assert (job.HasField("staleness"), job.staleness) == (True, 3)
        said = [
            jobs[0]
            ._session.network.connect(owner.address, name="server")
            .call(methods.DESCRIBE_SERVER, server_wire.DescribeServerRequest(), timeout_ms=5_000)
            for owner in job.map.owners
        ]
        assert {(each.job, each.most) for reply in said for each in reply.staleness} == {(job.job, 2)}
        for feed, each in zip(feeds, jobs, strict=True):
            feed.close()
            each.close()
