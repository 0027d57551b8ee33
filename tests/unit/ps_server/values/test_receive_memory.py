"""The memory of a server for what it receives."""

from __future__ import annotations

import threading

import pytest

from shardyard.domain import errors
from shardyard.domain.ids import JobId
from shardyard_ps_server.values import receive_memory
from shardyard_ps_server.values.receive_memory import ReceiveBuffer, ReceiveMemory
from tests.support.waiting import wait_until

ONE, TWO = JobId(1), JobId(2)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits long for memory that stays in use."""
    monkeypatch.setattr(receive_memory, "SMALL_BYTES", 0)
    monkeypatch.setattr(ReceiveMemory.take, "__defaults__", (0.05,))
    monkeypatch.setattr(ReceiveBuffer.take, "__kwdefaults__", {"wait_s": 0.05})


def test_jobs_have_the_bound_together_and_half_of_it_each() -> None:
    memory = ReceiveMemory(100)
    with memory.reserved(ONE, 40):
        with pytest.raises(errors.NotReady, match=r"receives 40 bytes at the moment, 40 of them of job 1"):
            ReceiveBuffer(memory).take(ONE, 20)
        with memory.reserved(TWO, 50):
            assert memory.used == 90
            with pytest.raises(errors.NotReady, match=r"it has 100 for that"), memory.reserved(JobId(3), 20):
                pass
            with memory.reserved(JobId(3), 10):
                assert memory.used == 100
    assert memory.used == 0


def test_what_is_larger_than_the_bound_is_received_alone() -> None:
    memory = ReceiveMemory(100)
    with memory.reserved(TWO, 1), pytest.raises(errors.NotReady), memory.reserved(ONE, 300):
        pass
    with memory.reserved(ONE, 300):
        assert memory.used == 300
        with pytest.raises(errors.NotReady), memory.reserved(TWO, 1):
            pass
    assert memory.used == 0


def test_a_buffer_is_kept_and_used_again() -> None:
    memory = ReceiveMemory(100)
    buffer = ReceiveBuffer(memory)
    first = buffer.take(ONE, 30)
    buffer.release()
    again = buffer.take(ONE, 20)
    assert again.ctypes.data == first.ctypes.data
    assert (len(again), memory.used) == (20, 30)
    assert len(buffer.take(ONE, 45)) == 45
    assert memory.used == 45
    buffer.close()
    assert memory.used == 0
    buffer.close()
    assert memory.used == 0


def test_buffers_that_are_kept_make_way_and_those_in_use_do_not() -> None:
    memory = ReceiveMemory(200)
    kept, used, late = ReceiveBuffer(memory), ReceiveBuffer(memory), ReceiveBuffer(memory)
    kept.take(ONE, 40)
    kept.release()
    used.take(ONE, 50)
    late.take(ONE, 50)
    assert memory.used == 100  # the one that was kept has gone
    with pytest.raises(errors.NotReady):
        kept.take(ONE, 40)
    late.release()
    assert len(kept.take(ONE, 40)) == 40
    for each in (kept, used, late):
        each.close()
    assert memory.used == 0


def test_memory_that_there_is_not_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(nbytes: int) -> None:
        raise errors.TooLarge(f"{nbytes} bytes")

    monkeypatch.setattr(receive_memory, "aligned_empty", none_left)
    memory = ReceiveMemory(100)
    with pytest.raises(errors.TooLarge):
        ReceiveBuffer(memory).take(ONE, 10)
    assert memory.used == 0


def test_what_waits_is_served_in_its_order_and_does_not_stop_other_jobs() -> None:
    memory, order = ReceiveMemory(100), list[str]()

    def receive(name: str, job: JobId, nbytes: int) -> None:
        memory.take(job, nbytes, 10.0)
        order.append(name)

    memory.take(ONE, 40)
    threads = []
    for waiting, (name, nbytes) in enumerate([("large", 50), ("small", 5)], 1):
        threads.append(threading.Thread(target=receive, args=(name, ONE, nbytes)))
        threads[-1].start()
        wait_until(lambda count=waiting: len(memory._waiting) == count)  # type: ignore[misc]
    receive("other", TWO, 30)
    assert order == ["other"]  # the small one would fit, and waits for its turn
    with memory._lock:
        memory._give_back(ONE, 40)
    threads[0].join()
    assert order == ["other", "large"]
    with memory._lock:
        memory._give_back(ONE, 50)
    threads[1].join()
    assert (order, memory.used) == (["other", "large", "small"], 35)


def test_a_buffer_that_is_released_makes_way_for_what_waits() -> None:
    memory = ReceiveMemory(100)
    kept = ReceiveBuffer(memory)
    kept.take(ONE, 50)
    waiting = threading.Thread(target=memory.take, args=(ONE, 50, 10.0))
    waiting.start()
    wait_until(lambda: bool(memory._waiting))
    kept.release()
    waiting.join()
    assert (kept.nbytes, memory.used) == (0, 50)


def test_small_pushes_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receive_memory, "SMALL_BYTES", 10)
    memory = ReceiveMemory(100)
    buffer = ReceiveBuffer(memory)
    with memory.reserved(ONE, 10):
        first = buffer.take(ONE, 10)
        buffer.release()
        again = buffer.take(ONE, 8)
        assert (memory.used, len(first), len(again)) == (0, 10, 8)
        assert first.ctypes.data == again.ctypes.data
        assert len(buffer.take(ONE, 11)) == 11
        assert memory.used == 11
    buffer.close()
    assert memory.used == 0
