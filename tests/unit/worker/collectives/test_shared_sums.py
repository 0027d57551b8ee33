"""Sums through memory that members on one machine share: exact, of the same bits in each, and ended by a loss."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from shardyard.domain.errors import NotShareable
from shardyard_worker.collectives.group_store import GroupLost
from shardyard_worker.collectives.hooked_sum import Hook
from shardyard_worker.collectives.shared_members import LARGEST_BYTES, Offer, OfferedMemory, SharedMembers
from shardyard_worker.collectives.shared_sums import SUMS_BYTES, WHOLE_BYTES, Between, SharedSums
from tests.support.shared_members import MOMENT_S, Processes, processes

Run = Callable[[SharedSums], object]


@pytest.fixture
def members() -> Iterator[Callable[..., Processes]]:
    def summing(run: Run) -> Callable[[SharedMembers], object]:
        return lambda shared: run(SharedSums(shared))

    with processes() as start:
        yield lambda *runs, **more: start(*map(summing, runs), nbytes=SUMS_BYTES, **more)


def given(place: int, number: int, size: int, dtype: np.dtype[Any]) -> np.ndarray[Any, np.dtype[Any]]:
    return np.random.default_rng([place, number]).integers(-1_000, 1_000, size).astype(dtype) / dtype.type(8)


SIZES = [1, 7, 1_000, WHOLE_BYTES // 4, WHOLE_BYTES // 4 + 1, 100_003, LARGEST_BYTES // 4, 3, LARGEST_BYTES // 4 - 1]
SIZES += [50_001] * 80  # the memory is used several times
LARGEST = [LARGEST_BYTES // 4] * (SUMS_BYTES // LARGEST_BYTES + 2)
"""More than there is memory for at a time."""


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("ahead", [1, 4])
def test_sums_are_those_of_all_members(members: Callable[..., Processes], count: int, ahead: int) -> None:
    """`ahead`: how many sums are begun before the first of them is waited for."""

    def run(place: int) -> Run:
        def sum_all(sums: SharedSums) -> list[bool]:
            found = []
            for at in range(0, len(SIZES), ahead):
                begun = []
                for number, size in enumerate(SIZES[at : at + ahead], at):
                    dtype = np.dtype(np.float64 if number % 3 == 2 and size < 1_000 else np.float32)
                    tensor = torch.from_numpy(given(place, number, size, dtype))
                    assert sums.fits(tensor)
                    begun.append((number, tensor, sums.begin(tensor)))
                for number, tensor, work in reversed(begun):
                    sums.wait(work)
                    dtype = tensor.numpy().dtype
                    wanted = sum(given(each, number, tensor.numel(), dtype) for each in range(count))
                    found.append(bool(np.array_equal(tensor.numpy(), wanted)))
            return found

        return sum_all

    for found in members(*(run(place) for place in range(count))).results():
        assert found == [True] * len(SIZES)


class OtherMachine:
    """Another machine, whose sums come after a few looks, in the order in which they were begun."""

    def __init__(self, fails_at: int = -1) -> None:
        self._begun: list[SlowSum] = []
        self._fails_at = fails_at

    @property
    def between(self) -> Between:
        return Between(self._begin, self._end)

    def _begin(self, tensor: torch.Tensor, hook: Hook | None) -> SlowSum:
        assert hook is None
        self._begun.append(SlowSum(len(self._begun), tensor))
        return self._begun[-1]

    def _end(self, work: SlowSum) -> None:
        assert work.looks == LOOKS
        if work.number == self._fails_at:
            raise GroupLost("the other machine is gone")
        array = work.tensor.numpy()
        array += given(OTHER, work.number, array.size, array.dtype)


LOOKS, OTHER = 4, 99
"""After how many looks such a sum is completed, and what `given` calls the other machine."""


@dataclass
class SlowSum:
    number: int
    tensor: torch.Tensor
    looks: int = 0

    def is_completed(self) -> bool:
        self.looks += self.looks < LOOKS
        return self.looks == LOOKS


def not_first() -> Between:
    def begin(*_: object) -> None:
        raise AssertionError("only the first member sums with other machines")

    return Between(begin, begin)


@pytest.mark.parametrize("ahead", [1, 4, 40])
@pytest.mark.parametrize("sizes", [SIZES, LARGEST], ids=["of all sizes", "large"])
def test_first_member_sums_with_other_machines(sizes: list[int], ahead: int) -> None:
    def run(place: int) -> Callable[[SharedMembers], object]:
        def sum_all(members: SharedMembers) -> list[bool]:
            sums = SharedSums(members, not_first() if place else OtherMachine().between)
            found = []
            for at in range(0, len(sizes), ahead):
                begun = []
                for number, size in enumerate(sizes[at : at + ahead], at):
                    tensor = torch.from_numpy(given(place, number, size, np.dtype(np.float32)))
                    begun.append((number, tensor, sums.begin(tensor)))
                for number, tensor, work in reversed(begun):
                    sums.wait(work)
                    wanted = sum(given(each, number, tensor.numel(), np.dtype(np.float32)) for each in (0, 1, 2, OTHER))
                    found.append(bool(np.array_equal(tensor.numpy(), wanted)))
            return found

        return sum_all

    with processes() as start:
        for found in start(*(run(place) for place in range(3)), nbytes=SUMS_BYTES).results():
            assert found == [True] * len(sizes)


@pytest.mark.parametrize("size", [10, 10_000], ids=["small", "large"])
def test_loss_of_another_machine_ends_the_sums_of_this_one(size: int) -> None:
    def run(members: SharedMembers) -> None:
        sums = SharedSums(members, not_first() if members.place else OtherMachine(fails_at=2).between)
        for _ in range(3):
            sums.wait(sums.begin(torch.zeros(size)))

    with processes() as start:
        group = start(run, run, nbytes=SUMS_BYTES)
        assert group.result(0) == "the other machine is gone"
        assert "is gone" in group.result(1)


def test_memory_is_used_again_when_all_members_have_read_it(members: Callable[..., Processes]) -> None:
    """The last sum has the place of the first one, which the second member has not read when the first comes there."""
    most = LARGEST_BYTES // 4
    sizes = [7, *[most] * (SUMS_BYTES // LARGEST_BYTES - 1), most - 16, 7]
    assert 4 * (16 + sum(sizes[1:-1])) == SUMS_BYTES

    def run(place: int) -> Run:
        def begin_all(sums: SharedSums) -> list[float]:
            tensors = [torch.from_numpy(np.full(size, at + 1.0, np.float32)) for at, size in enumerate(sizes)]
            begun = []
            for tensor in tensors:
                if len(begun) == len(sizes) - 1:
                    time.sleep(0.3 * place)
                begun.append(sums.begin(tensor))
            for work in begun:
                sums.wait(work)
            return [float(each.numpy().min()) for each in tensors]

        return begin_all

    assert members(run(0), run(1)).results() == [[2.0 * (at + 1) for at in range(len(sizes))]] * 2


def test_members_have_the_same_bits(members: Callable[..., Processes]) -> None:
    """Numbers whose sum depends on the order."""

    def run(place: int) -> Run:
        def sum_one(sums: SharedSums) -> bytes:
            tensor = torch.from_numpy(np.random.default_rng(place).standard_normal(10_001).astype(np.float32))
            sums.wait(sums.begin(tensor))
            return tensor.numpy().tobytes()

        return sum_one

    first, *others = members(*(run(place) for place in range(3))).results()
    assert others == [first] * 2


def sum_twice(sums: SharedSums) -> str:
    for _ in range(2):
        sums.wait(sums.begin(torch.zeros(10_000)))
    return "summed"


def sum_and_stop(how: signal.Signals) -> Run:
    def run(sums: SharedSums) -> None:
        sums.wait(sums.begin(torch.zeros(10_000)))
        os.kill(os.getpid(), how)

    return run


def test_member_that_dies_ends_the_sum_at_once(members: Callable[..., Processes]) -> None:
    group = members(sum_twice, sum_and_stop(signal.SIGKILL), sum_twice)
    began = time.monotonic()
    assert "is gone" in group.result(0)
    assert "is gone" in group.result(2)
    assert time.monotonic() - began < MOMENT_S / 3


def test_member_that_leaves_ends_the_sum_at_once(members: Callable[..., Processes]) -> None:
    group = members(sum_twice, lambda sums: sums.wait(sums.begin(torch.zeros(10_000))))
    assert "is gone" in group.result(0)


def test_member_that_has_all_sums_may_leave(members: Callable[..., Processes]) -> None:
    """The other one ends the sum that both have begun."""

    def leave_late(sums: SharedSums) -> str:
        work = sums.begin(torch.zeros(10))
        time.sleep(0.3)
        sums.check()
        sums.wait(work)
        return "summed"

    group = members(leave_late, lambda sums: sums.wait(sums.begin(torch.zeros(10))))
    assert group.result(0) == "summed"


def test_frozen_member_ends_the_sum_when_it_is_declared_dead(members: Callable[..., Processes]) -> None:
    def declare() -> None:
        raise GroupLost("it is declared dead")

    group = members(sum_twice, sum_and_stop(signal.SIGSTOP), check=declare)
    assert group.result(0) == "it is declared dead"


@pytest.mark.parametrize("begun", [0, 1], ids=["before it has begun", "after it has begun"])
def test_loss_is_seen_before_the_sum_is_waited_for(members: Callable[..., Processes], begun: int) -> None:
    def begin_and_look(sums: SharedSums) -> None:
        sums.wait(sums.begin(torch.zeros(10_000)))
        sums.begin(torch.zeros(10_000))
        for _ in range(1_000):
            sums.check()
            time.sleep(0.01)

    def begin_and_die(sums: SharedSums) -> None:
        sums.wait(sums.begin(torch.zeros(10_000)))
        for _ in range(begun):
            sums.begin(torch.zeros(10_000))
        os.kill(os.getpid(), signal.SIGKILL)

    assert "is gone" in members(begin_and_look, begin_and_die).result(0)


@pytest.mark.parametrize("machines", [1, 2])
def test_to_begin_a_sum_waits_for_nobody(machines: int) -> None:
    """Whatever others have done: it is called within the backward."""

    def begin_all(members: SharedMembers) -> list[float]:
        sums = SharedSums(members, None if machines == 1 else not_first() if members.place else OtherMachine().between)
        tensors = [torch.from_numpy(np.full(size, at + 1.0, np.float32)) for at, size in enumerate(LARGEST)]
        wait, members.wait = members.wait, None  # type: ignore[method-assign, assignment]
        begun = [sums.begin(each) for each in tensors]
        members.wait = wait  # type: ignore[method-assign]
        for work in begun:
            sums.wait(work)
        return [float(each.numpy()[0]) for each in tensors]

    with processes() as start:
        first, second = start(begin_all, begin_all, nbytes=SUMS_BYTES).results()
    elsewhere = [0.0 if machines == 1 else given(OTHER, at, 1, np.dtype(np.float32))[0] for at in range(len(LARGEST))]
    assert first == second == [2.0 * (at + 1) + more for at, more in enumerate(elsewhere)]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(0),
        torch.zeros(4, dtype=torch.bfloat16),
        torch.zeros(4, 4)[:, ::2],
    ],
    ids=["nothing", "bf16", "gaps"],
)
def test_other_tensors_are_left_to_torch(tensor: torch.Tensor) -> None:
    assert not SharedSums.fits(tensor)


@pytest.mark.parametrize("text", ["", "a machine", "m 1", "m 1 2 3", "m -1 2", "m 1 x"])
def test_what_is_no_offer(text: str) -> None:
    assert Offer.of(text) is None


@pytest.mark.parametrize("change", [{"pid": 2**22 + 1}, {"fd": 1_000_000}, {"pid": 1}], ids=["process", "fd", "other"])
def test_memory_that_cannot_be_opened_is_refused(change: dict[str, int]) -> None:
    memory = OfferedMemory(SUMS_BYTES)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(NotShareable, match="cannot be mapped"):
        memory.join([memory.offer, replace(memory.offer, **change)], lambda: None)
    assert len(os.listdir("/proc/self/fd")) == before
    memory.close()
