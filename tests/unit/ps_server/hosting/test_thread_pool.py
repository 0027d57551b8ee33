"""Threads for the partitions of one push: order, errors, several callers, and their end."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from shardyard_ps_server.hosting.thread_pool import THREADS_MAX, BatchPool

DEADLINE_S = 10.0


@pytest.fixture(params=[1, 2, 4])
def crew(request: pytest.FixtureRequest) -> Iterator[BatchPool]:
    made = BatchPool(request.param)
    yield made
    made.close()


def crew_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("shardyard-crew")]


def giving(value: int) -> Callable[[], int]:
    return lambda: value


def test_results_come_in_the_order_of_the_works(crew: BatchPool) -> None:
    for count in (0, 1, 2, 3, 50):
        assert crew.run([giving(number) for number in range(count)]) == list(range(count))


def test_works_of_one_call_run_side_by_side() -> None:
    crew = BatchPool(3)
    barrier = threading.Barrier(3, timeout=DEADLINE_S)
    try:
        assert sorted(crew.run([barrier.wait] * 3)) == [0, 1, 2]
    finally:
        crew.close()


def test_first_error_in_order_is_raised_after_all_have_ended(crew: BatchPool) -> None:
    done: list[int] = []
    later = threading.Event()

    def work(number: int) -> Callable[[], None]:
        def do() -> None:
            if number == 1:
                later.wait(0.05)  # in a crew, so that it ends after the other error
            done.append(number)
            if number == 3:
                later.set()
            if number in (1, 3):
                raise ValueError(f"work {number}")

        return do

    for _ in range(3):
        done.clear()
        later.clear()
        with pytest.raises(ValueError, match="work 1"):
            crew.run([work(number) for number in range(6)])
        assert sorted(done) == list(range(6))
    assert crew.run([giving(5)]) == [5]


def test_crew_of_one_works_in_the_callers_thread() -> None:
    crew = BatchPool(1)
    assert crew.run([threading.get_ident] * 4) == [threading.get_ident()] * 4
    assert not crew_threads()
    crew.close()


def test_single_work_starts_no_thread() -> None:
    crew = BatchPool(4)
    assert crew.run([threading.get_ident]) == [threading.get_ident()]
    assert not crew_threads()
    crew.close()


def test_caller_goes_on_while_the_threads_are_busy_with_another_call() -> None:
    crew = BatchPool(2)
    release, begun = threading.Event(), threading.Barrier(3, timeout=DEADLINE_S)

    def stuck() -> None:
        begun.wait()
        assert release.wait(DEADLINE_S)

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(crew.run, [stuck, stuck])
        begun.wait()  # the crew's thread and the other caller are both stuck
        try:
            assert crew.run([giving(number) for number in range(8)]) == list(range(8))
        finally:
            release.set()
        other.result(DEADLINE_S)
    crew.close()


def test_many_callers_get_their_own_results(crew: BatchPool) -> None:
    def call(caller: int) -> bool:
        return all(
            crew.run([giving(caller * 100 + n) for n in range(5)]) == [caller * 100 + n for n in range(5)]
            for _ in range(50)
        )

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(call, range(4)))


def test_close_ends_the_threads_and_later_work_is_done_by_the_caller() -> None:
    crew = BatchPool(3)
    crew.run([giving(0)] * 3)
    assert len(crew_threads()) == 2
    crew.close()
    assert not crew_threads()
    assert crew.run([threading.get_ident] * 3) == [threading.get_ident()] * 3
    crew.close()


def test_threads_do_not_hold_on_to_work_that_is_done() -> None:
    crew = BatchPool(2)
    barrier = threading.Barrier(2, timeout=DEADLINE_S)

    class Held:
        def work(self) -> None:
            barrier.wait()

    held = Held()
    seen = weakref.ref(held)
    crew.run([held.work, held.work])
    del held
    until = time.monotonic() + DEADLINE_S
    while seen() is not None and time.monotonic() < until:
        gc.collect()
        time.sleep(0.001)
    assert seen() is None
    crew.close()


def test_size_is_that_of_the_machine_within_bounds() -> None:
    crew = BatchPool()
    assert 1 <= crew.size <= THREADS_MAX
    crew.close()


def test_bits_do_not_depend_on_the_number_of_threads() -> None:
    rng = np.random.default_rng(3)
    values = [rng.standard_normal(10_000).astype(np.float32) for _ in range(8)]
    found = []
    for size in (1, 2, 4):
        crew = BatchPool(size)
        found.append([each.tobytes() for each in crew.run([lambda v=v: v * np.float32(0.3) for v in values])])
        crew.close()
    assert found[0] == found[1] == found[2]
