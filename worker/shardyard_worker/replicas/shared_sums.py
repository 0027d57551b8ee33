"""Sums over the members of a group that are on one machine, through memory that they share.

gloo sends everything over loopback, which takes a processor several times as long as the sum itself. Here each member
writes its tensor into memory that the others read. Then each adds up a part of it, and copies the parts of the others:

    written   when all members have written the tensor, each adds up its part, in the order of the members
    reduced   when all parts are there, each copies them into its tensor (each adds up all of a small one)
    taken     when all members have copied them, the memory is used again

Each member counts the sums of which it has come so far, in its own memory. A count is written after what it speaks of:
x86 processors show a member's stores to others in their order, and other processors are not used so.

Owns: the memory. Invariants: a sum has the same bits in each member; a member that has died or left ends the waits of
the others. Must not know: groups, what is summed.
"""

from __future__ import annotations

import os
import platform
import select
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from shardyard.domain.errors import NotShareable
from shardyard.domain.pulls import ShmHandle
from shardyard.transport.shared_memory import Bytes, SharedMemory, attach
from shardyard_worker.replicas.group_store import GroupLost

Array = npt.NDArray[Any]

_DTYPES: Final = (torch.float32, torch.float64, torch.int64)
LARGEST_BYTES: Final = 4 << 20
"""Of a tensor. gloo sums larger ones, in threads of its own, while the backward goes on."""
WHOLE_BYTES: Final = 8 << 10
"""Each member adds up all of a small tensor, which takes less time than to wait for the others' parts."""
ARENA_BYTES: Final = 3 * LARGEST_BYTES
"""Of the tensors that are being summed, and as much for their sums. Untouched pages take no memory."""
_HEADER_BYTES: Final = 4096
_NBYTES: Final = _HEADER_BYTES + 2 * ARENA_BYTES
_ALIGN: Final = 64
_WRITTEN, _REDUCED, _TAKEN, _LEFT = (each * _ALIGN // 8 for each in range(4))
"""Places of numbers in the header, each in a cache line of its own."""
_LOOK_S: Final = 5e-5, 1e-3
"""The pauses between two looks at a number: at first, and after a while."""
_CHECK_S: Final = 0.1


@dataclass(frozen=True)
class Offer:
    """Where other members find a member's memory. `machine`: in it process ids and descriptors mean the same to all."""

    machine: str
    pid: int
    fd: int

    def __str__(self) -> str:
        return f"{self.machine} {self.pid} {self.fd}"

    @staticmethod
    def of(text: str) -> Offer | None:
        """None if it is no offer."""
        machine, *numbers = text.split(" ")
        if len(numbers) != 2 or not all(each.isdecimal() for each in numbers):
            return None
        return Offer(machine, *map(int, numbers))


@dataclass(frozen=True)
class SharedSum:
    """A sum under way: the `number`th of the group, which is at `begin` of the members' arenas. `array`: of this
    member, which gets it."""

    number: int
    array: Array
    begin: int


class OfferedMemory:
    """What this member offers. Raises NotShareable, TooLarge if there is nothing to offer."""

    def __init__(self) -> None:
        if platform.machine() != "x86_64":
            raise NotShareable(f"a {platform.machine()} processor, whose stores others may see in another order")
        self.memory = SharedMemory(_NBYTES, read_only=False)
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
            space = os.stat("/proc/self/ns/pid").st_ino
        except OSError as error:
            raise NotShareable(f"this machine does not say which it is: {error}") from error
        self.offer = Offer(f"{boot}-{space}-{os.geteuid()}", os.getpid(), self.memory.ticket().fd)

    def join(self, offers: Sequence[Offer], check: Callable[[], None]) -> SharedSums:
        """With the members that have made these offers, of which this is one. `check` raises GroupLost once the group
        lacks a member. Raises NotShareable if a member's memory cannot be mapped."""
        found: list[Bytes] = []
        processes: dict[int, int] = {}
        try:
            for place, each in enumerate(offers):
                found.append(self.memory.bytes if each == self.offer else _opened(each))
                if each != self.offer:
                    processes[place] = os.pidfd_open(each.pid)
        except (OSError, NotShareable) as error:
            for process in processes.values():
                os.close(process)
            raise NotShareable(f"the memory of another member cannot be mapped: {error}") from error
        return SharedSums(self.memory, found, offers.index(self.offer), processes, check)


def _opened(offer: Offer) -> Bytes:
    """Raises OSError, NotShareable."""
    fd = os.open(f"/proc/{offer.pid}/fd/{offer.fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return attach(ShmHandle(_NBYTES, fd=fd)).bytes
    finally:
        os.close(fd)


class SharedSums:
    """For one thread. `found`: the memory of all members, in their order. `processes`: descriptors of the others, by
    their places."""

    def __init__(
        self,
        own: SharedMemory,
        found: Sequence[Bytes],
        place: int,
        processes: Mapping[int, int],
        check: Callable[[], None],
    ) -> None:
        self._own = own
        self._place = place
        self._check = check
        self._place_of = {process: other for other, process in processes.items()}
        self._died = select.poll()
        for process in self._place_of:
            self._died.register(process, select.POLLIN)
        self._counts = [each[:_HEADER_BYTES].view("<u8") for each in found]
        self._arenas = [each[_HEADER_BYTES:] for each in found]
        self._begun = self._end = 0
        """The number of the newest sum, and the end of its memory."""
        self._pending: deque[SharedSum] = deque()
        self._used: deque[tuple[int, int, int]] = deque()
        """The numbers, begins and ends of sums whose memory may be in use, the oldest first."""

    @staticmethod
    def fits(tensor: torch.Tensor) -> bool:
        if tensor.device.type != "cpu" or tensor.dtype not in _DTYPES or not tensor.is_contiguous():
            return False
        return 0 < tensor.nbytes <= LARGEST_BYTES

    # ---- a sum

    def begin(self, tensor: torch.Tensor) -> SharedSum:
        """Begins to sum a tensor over all members, in place. `wait` must follow. All members begin the same sums in the
        same order. Raises GroupLost."""
        array = tensor.detach().numpy().reshape(-1)
        self._begun += 1
        found = SharedSum(self._begun, array, self._room(array.nbytes))
        self._input(self._place, found)[:] = array
        self._counts[self._place][_WRITTEN] = self._begun
        self._pending.append(found)
        return found

    def _room(self, nbytes: int) -> int:
        """The begin of so much memory, the same in all members, which none needs any more for an earlier sum."""
        begin = -(-self._end // _ALIGN) * _ALIGN
        if begin + nbytes > ARENA_BYTES:
            begin = 0
        self._end = end = begin + nbytes
        taken = min(counts[_TAKEN] for counts in self._counts)
        while self._used and self._used[0][0] <= taken:
            self._used.popleft()
        while any(first < end and begin < last for _, first, last in self._used):
            number = self._used.popleft()[0]
            self._finish(number)
            self._await(_TAKEN, number)
        self._used.append((self._begun, begin, end))
        return begin

    def _input(self, place: int, work: SharedSum) -> Array:
        return self._arenas[place][work.begin : work.begin + work.array.nbytes].view(work.array.dtype)

    def _sum(self, place: int, work: SharedSum) -> Array:
        begin = ARENA_BYTES + work.begin
        return self._arenas[place][begin : begin + work.array.nbytes].view(work.array.dtype)

    def wait(self, work: SharedSum) -> None:
        """Returns when the tensor has the sum. Raises GroupLost."""
        self._finish(work.number)

    def _finish(self, number: int) -> None:
        """All sums up to this one."""
        while self._pending and self._pending[0].number <= number:
            self._add_up(self._pending[0])
            self._pending.popleft()

    def _add_up(self, work: SharedSum) -> None:
        count, places = len(self._arenas), range(len(self._arenas))
        parts = [slice(work.array.size * at // count, work.array.size * (at + 1) // count) for at in places]
        own, part = self._counts[self._place], parts[self._place]
        self._await(_WRITTEN, work.number)
        inputs = [self._input(place, work) for place in places]
        if work.array.nbytes <= WHOLE_BYTES:
            _add(inputs, work.array)
            own[_REDUCED] = own[_TAKEN] = work.number
            return
        _add([each[part] for each in inputs], self._sum(self._place, work)[part])
        own[_REDUCED] = work.number
        self._await(_REDUCED, work.number)
        for place in places:
            work.array[parts[place]] = self._sum(place, work)[parts[place]]
        own[_TAKEN] = work.number

    # ---- waits

    def _await(self, step: int, number: int) -> None:
        """Returns when all members have come so far. Raises GroupLost."""
        began = checked = time.monotonic()
        while any(counts[step] < number for counts in self._counts):
            now = time.monotonic()
            if now - began > _LOOK_S[1]:
                self._check_others(step, number)
            if now - checked > _CHECK_S:
                self._check()
                checked = now
            time.sleep(min(max(_LOOK_S[0], (now - began) / 20), _LOOK_S[1]))

    def _check_others(self, step: int, number: int) -> None:
        """Raises GroupLost if a member that has not come so far has left or died."""
        gone = {self._place_of[process] for process, _ in self._died.poll(0)}
        gone |= {place for place, counts in enumerate(self._counts) if counts[_LEFT]}
        # counted before they left
        if any(self._counts[place][step] < number for place in gone):
            raise GroupLost("a member of the replica group is gone")

    def check(self) -> None:
        """Raises GroupLost if a sum under way will not end."""
        if self._pending:
            self._check_others(_WRITTEN, self._pending[-1].number)

    def leave(self) -> None:
        """This member sums no more."""
        self._counts[self._place][_LEFT] = 1
        self._pending.clear()
        self._own.close()
        for process in self._place_of:
            os.close(process)
        self._place_of.clear()


def _add(arrays: Sequence[Array], total: Array) -> None:
    """In their order."""
    first, second, *others = arrays
    np.add(first, second, out=total)
    for each in others:
        np.add(total, each, out=total)
