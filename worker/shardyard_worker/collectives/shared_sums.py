"""Sums over the members of a group that are on one machine, through memory that they share.

gloo sends everything over loopback, which takes a processor several times as long as the sum itself. Here each member
writes its tensor into memory that the others read. Then each adds up a part of it, and copies the parts of the others:

    written   when all members have written the tensor, each adds up its part, in the order of the members
    reduced   when all parts are there, each copies them into its tensor (each adds up all of a small one)
    taken     when all members have copied them, the memory is used again

Each member counts the sums of which it has come so far.

Invariant: a sum has the same bits in each member. Must not know: groups, what is summed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from shardyard_worker.collectives.shared_members import ALIGN, LARGEST_BYTES, Array, SharedMembers

_DTYPES: Final = (torch.float32, torch.float64, torch.int64)
WHOLE_BYTES: Final = 8 << 10
"""Each member adds up all of a small tensor, which takes less time than to wait for the others' parts."""
ARENA_BYTES: Final = 3 * LARGEST_BYTES
"""Of the tensors that are being summed, and as much for their sums."""
SUMS_BYTES: Final = 2 * ARENA_BYTES
_WRITTEN, _REDUCED, _TAKEN = 8, 16, 24
"""Places of numbers in the header, each in a cache line of its own."""


@dataclass(frozen=True)
class SharedSum:
    """A sum under way: the `number`th of the group, which is at `begin` of the members' arenas. `array`: of this
    member, which gets it."""

    number: int
    array: Array
    begin: int


class SharedSums:
    """For one thread, in the first SUMS_BYTES of the members' memory."""

    def __init__(self, members: SharedMembers) -> None:
        self._members = members
        self._own = members.counts[members.place]
        self._all = range(members.size)
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

    def begin(self, tensor: torch.Tensor) -> SharedSum:
        """Begins to sum a tensor over all members, in place. `wait` must follow. All members begin the same sums in the
        same order. Raises GroupLost."""
        array = tensor.detach().numpy().reshape(-1)
        self._begun += 1
        found = SharedSum(self._begun, array, self._room(array.nbytes))
        self._input(self._members.place, found)[:] = array
        self._own[_WRITTEN] = self._begun
        self._pending.append(found)
        return found

    def _room(self, nbytes: int) -> int:
        """The begin of so much memory, the same in all members, which none needs any more for an earlier sum."""
        begin = -(-self._end // ALIGN) * ALIGN
        if begin + nbytes > ARENA_BYTES:
            begin = 0
        self._end = end = begin + nbytes
        taken = min(counts[_TAKEN] for counts in self._members.counts)
        while self._used and self._used[0][0] <= taken:
            self._used.popleft()
        while any(first < end and begin < last for _, first, last in self._used):
            number = self._used.popleft()[0]
            self._finish(number)
            self._members.wait(self._all, _TAKEN, number)
        self._used.append((self._begun, begin, end))
        return begin

    def _input(self, place: int, work: SharedSum) -> Array:
        memory = self._members.memory[place]
        return memory[work.begin : work.begin + work.array.nbytes].view(work.array.dtype)

    def _total(self, place: int, work: SharedSum) -> Array:
        begin = ARENA_BYTES + work.begin
        return self._members.memory[place][begin : begin + work.array.nbytes].view(work.array.dtype)

    def wait(self, work: SharedSum) -> None:
        """Returns when the tensor has the sum. Raises GroupLost."""
        self._finish(work.number)

    def _finish(self, number: int) -> None:
        """All sums up to this one."""
        while self._pending and self._pending[0].number <= number:
            self._add_up(self._pending[0])
            self._pending.popleft()

    def _add_up(self, work: SharedSum) -> None:
        count, size, place = self._members.size, work.array.size, self._members.place
        self._members.wait(self._all, _WRITTEN, work.number)
        inputs = [self._input(each, work) for each in self._all]
        if work.array.nbytes <= WHOLE_BYTES:
            _add(inputs, work.array)
            self._own[_REDUCED] = self._own[_TAKEN] = work.number
            return
        parts = [slice(size * each // count, size * (each + 1) // count) for each in self._all]
        _add([each[parts[place]] for each in inputs], self._total(place, work)[parts[place]])
        self._own[_REDUCED] = work.number
        self._members.wait(self._all, _REDUCED, work.number)
        for each, part in enumerate(parts):
            work.array[part] = self._total(each, work)[part]
        self._own[_TAKEN] = work.number

    def check(self) -> None:
        """Raises GroupLost if a sum under way will not end."""
        if self._pending:
            self._members.check(self._all, _WRITTEN, self._pending[-1].number)


def _add(arrays: Sequence[Array], total: Array) -> None:
    """In their order."""
    first, second, *others = arrays
    np.add(first, second, out=total)
    for each in others:
        np.add(total, each, out=total)
