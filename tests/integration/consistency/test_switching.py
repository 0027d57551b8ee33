"""A running job goes over to another bound on staleness, or to none, in yards inside this process: each sample counts
once an epoch all the same, and the bound holds from the step at which its workers have gone over."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from shardyard.domain import errors
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_worker.consistency.asynchronous import AsyncStrategy
from tests.support.switches import (
    ASYNC,
    BOUNDED,
    DATA,
    DEADLINE_S,
    SAMPLES,
    Counting,
    errors_of,
    until,
    until_told,
    yard,
)

pytestmark = pytest.mark.usefixtures("alone")


@pytest.mark.long("0-True")
@pytest.mark.parametrize(("window", "tables"), [(0, False), (1, False), (0, True), (1, True)])
def test_each_sample_counts_once_an_epoch_over_several_switches_in_it(window: int, tables: bool) -> None:
    epochs, bounds, made = 2, [None, 2, None, 0, 5, None], 0
    share = SAMPLES * epochs // len(bounds)
    seen: list[list[int | None]] = [[] for _ in range(2)]

    with yard(**{"worker.exchange": ("blocking", "delayed")[window]}) as here, ThreadPoolExecutor(2) as threads:

        def train(number: int) -> set[float]:
            with here.connect() as job:
                counting = Counting(job, tables=tables)
                for (chosen,) in job.batches(DATA, batch_size=1, epochs=epochs):
                    counting.step(chosen)
                    assert isinstance(job._loop.strategy, AsyncStrategy)
                    seen[number].append(job._loop.strategy.clock.bound)
                    if sum(map(len, seen)) > share * (made + 1):  # leave some for when it goes by the next one
                        time.sleep(0.5)
                return counting.counts

        runs = [threads.submit(train, number) for number in range(2)]
        until(lambda: all(seen), errors_of(runs))
        for bound in bounds[1:]:
            here.change_mode(ASYNC if bound is None else BOUNDED, bound)
            until(lambda: not here.job_status().consistency.behind, here.job_status)
            made += 1
        assert [run.result(DEADLINE_S) for run in runs] == [{float(epochs)}] * 2
    for each in seen:
        order = [bound for bound, _ in itertools.groupby(each)]
        assert order == bounds[-len(order) :]
        assert len(order) > 3


def waits(step: Callable[[], object]) -> bool:
    """Whether the step waits for another worker; it must be let go then."""
    thread = threading.Thread(target=step)
    thread.start()
    thread.join(0.6)
    return thread.is_alive()


def test_from_the_step_at_which_workers_have_gone_over_the_bound_holds_and_ends_with_the_next_switch() -> None:
    with yard() as here:
        jobs = [here.connect(), here.connect()]
        fast, slow = [Counting(job) for job in jobs]
        feeds = [job.batches(DATA, batch_size=1) for job in jobs]
        slow_first = next(feeds[1])[0]
        for (chosen,) in itertools.islice(feeds[0], 30):
            fast.step(chosen)  # nobody waits: 30 steps ahead
        here.change_mode(BOUNDED, 2)
        for job in jobs:
            until_told(job, 1)
        ahead = next(feeds[0])[0]
        fast.step(ahead)
        slow.step(slow_first)  # joins beside the other, which has taken 30 steps more
        for (chosen,) in itertools.islice(feeds[0], 2):
            fast.step(chosen)
        ahead = next(feeds[0])[0]
        assert waits(lambda: fast.step(ahead)), "the bound does not hold"
        assert here.job_status().staleness == 2
        here.change_mode(ASYNC)  # lets it go, whatever the other one does
        until_told(jobs[0], 2)
        for (chosen,) in itertools.islice(feeds[0], 30):
            fast.step(chosen)
        assert fast.goes_by(None)
        assert not here.job_status().HasField("staleness")
        for feed, job in zip(feeds, jobs, strict=True):
            feed.close()
            job.close()


def test_worker_with_data_of_its_own_goes_over_between_two_pushes() -> None:
    with yard() as here, here.connect() as first, here.connect() as second:
        one, other = Counting(first), Counting(second)
        place = torch.tensor([0])
        for _ in range(9):
            one.step(place)
        here.change_mode(BOUNDED, 1)
        until_told(first, 1)
        until_told(second, 1)
        one.step(place)
        other.step(place)  # hears of it behind this push
        one.step(place)
        other.step(place)  # joins beside the other, and is a step ahead
        one.step(place)
        one.step(place)
        assert waits(lambda: one.step(place))
        other.step(place)
        assert one.goes_by(1)
        assert other.goes_by(1)


def test_worker_that_rests_is_waited_for_by_nobody_and_goes_over_with_its_next_work() -> None:
    with yard() as here, here.connect() as first, here.connect() as second:
        one, resting = Counting(first), Counting(second)
        theirs = second.batches(DATA, batch_size=1)
        resting.step(next(theirs)[0])
        theirs.close()
        here.change_mode(BOUNDED, 0)
        until_told(first, 1)
        for (chosen,) in itertools.islice(first.batches(DATA, batch_size=1), 30):
            one.step(chosen)
        assert here.job_status().consistency.behind == [second._session.caller.incarnation]
        assert one.goes_by(0)


def test_worker_that_joins_goes_by_the_switch_from_its_first_step() -> None:
    with yard() as here, here.connect() as first:
        one = Counting(first)
        place = torch.tensor([0])
        one.step(place)
        here.change_mode(BOUNDED, 1)
        until_told(first, 1)
        one.step(place)
        with here.connect() as second:
            late = Counting(second)
            assert late.goes_by(1)
            late.step(place)
            one.step(place)
            assert here.job_status().consistency.behind == []
            assert (here.job_status().consistency.consistency.number, here.job_status().staleness) == (1, 1)


def test_switch_to_what_the_job_goes_by_already_changes_nothing() -> None:
    with yard(**{"job.consistency.mode": "bounded", "job.consistency.staleness": 3}) as here, here.connect() as job:
        Counting(job)
        reply = here.switch(BOUNDED, 3)
        assert (reply.first, reply.consistency.number) == (False, 0)
        assert not here.job_status().HasField("consistency")


@pytest.mark.parametrize(
    ("given", "mode", "staleness", "expected"),
    [
        ({"job.consistency.mode": "local"}, wire.CONSISTENCY_MODE_SYNC, None, "mode local, and cannot switch to sync"),
        ({}, wire.CONSISTENCY_MODE_LOCAL, None, "runs in mode async, and cannot switch to local"),
        ({"job.consistency.mode": "sync"}, wire.CONSISTENCY_MODE_LOCAL, None, "mode sync, and cannot switch to local"),
        ({"job.consistency.mode": "local"}, BOUNDED, 2, "runs in mode local, and cannot switch to bounded"),
        ({}, wire.CONSISTENCY_MODE_UNSPECIFIED, 2, "a staleness of 2 for job 'default', whose mode is async"),
    ],
)
def test_switch_that_a_running_job_cannot_make_is_refused_and_changes_nothing(
    given: dict[str, object], mode: wire.ConsistencyMode, staleness: int | None, expected: str
) -> None:
    with yard(**given) as here, here.connect() as job:
        Counting(job)
        with pytest.raises(errors.InvalidRequest) as raised:
            here.switch(mode, staleness)
        assert expected in str(raised.value)
        assert raised.value.todo_text
        assert not here.job_status().HasField("consistency")
