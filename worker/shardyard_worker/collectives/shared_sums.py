"""Sums over the members of a group that are on one machine, through memory that they share.

gloo sends everything over loopback, which takes a processor several times as long as the sum itself. Here each member
writes its tensor into memory that the others read. Then each adds up a part of it, and copies the parts of the others:

    begun     when its place in the memory is free, a member writes the tensor there
    written   when all members have written the tensor, each adds up its part, in the order of the members
    reduced   when all parts are there, each copies them into its tensor (each adds up all of a small one)
    summed    with other machines: the first member adds up with the first members of those, the others copy from it
    taken     when all members have the sum, its place is free

Each member counts the sums that have come so far. Sums take these steps in their order, one behind another. To begin a
sum never waits: that is done within a backward.

Invariant: a sum has the same bits in each member. Must not know: groups, what is summed, how machines are connected.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from shardyard_worker.collectives.hooked_sum import Hook
from shardyard_worker.collectives.shared_members import (
    ALIGN,
    LARGEST_BYTES,
    REDUCED,
    SUMMED,
    TAKEN,
    WRITTEN,
    Array,
    SharedMembers,
)

_DTYPES: Final = (torch.float32, torch.float64, torch.int64)
WHOLE_BYTES: Final = 8 << 10
"""Each member adds up all of a small tensor, which takes less time than to wait for the others' parts."""
SUMS_BYTES: Final = 6 * LARGEST_BYTES
"""Of the tensors that are being summed."""
_FIRST: Final = 0
"""The place of the member that sums with other machines."""


@dataclass(frozen=True)
class Between:
    """How the first member of this machine sums a tensor with the first members of others, in place. `begin` gets the
    sum's hook and returns torch's work; `end` is called when that is completed. Both raise GroupLost."""

    begin: Callable[[torch.Tensor, Hook | None], Any]
    end: Callable[[Any], None]


@dataclass(slots=True)
class SharedSum:
    """A sum under way: the `number`th of the group, which is at `at` of the members' memory. `tensor` gets it; `array`
    is its memory. `hook`: compresses the sum with other machines. `between`: that sum, when it has begun."""

    number: int
    tensor: torch.Tensor
    array: Array
    at: int
    hook: Hook | None
    between: Any = None

    @property
    def is_whole(self) -> bool:
        """Whether a member adds up all of it."""
        return self.array.nbytes <= WHOLE_BYTES


class SharedSums:
    """For one thread, in the first SUMS_BYTES of the members' memory. `between`: if there are other machines."""

    def __init__(self, members: SharedMembers, between: Between | None = None) -> None:
        self._members = members
        self._between = between
        self._is_first = members.place == _FIRST
        self._meanwhile: Callable[[], object] = _do_nothing if between is None else self._advance
        """Called between two looks. With other machines there is something to do then: they wait for it."""
        self._own = members.counts[members.place]
        self._all = range(members.size)
        self._begun = self._end = 0
        """The number of the newest sum, and the end of its memory."""
        self._waiting: deque[SharedSum] = deque()
        self._written: deque[SharedSum] = deque()
        self._reduced: deque[SharedSum] = deque()
        self._summed: deque[SharedSum] = deque()
        """The sums under way, by what is done next with them."""
        self._used: deque[tuple[int, int, int]] = deque()
        """The numbers, begins and ends of sums whose memory may be in use, the oldest first."""

    @staticmethod
    def fits(tensor: torch.Tensor) -> bool:
        """Whether a tensor can be summed so, as a whole or in pieces of LARGEST_BYTES."""
        if tensor.device.type != "cpu" or tensor.dtype not in _DTYPES or not tensor.is_contiguous():
            return False
        return tensor.numel() > 0

    def begin(self, tensor: torch.Tensor, hook: Hook | None = None) -> SharedSum:
        """Begins to sum a tensor of at most LARGEST_BYTES over all members, in place. `wait` must follow. All members
        begin the same sums in the same order. `hook`: compresses the sum with other machines. Raises GroupLost."""
        flat = tensor.detach().view(-1)
        array = flat.numpy()
        begin = -(-self._end // ALIGN) * ALIGN
        if begin + array.nbytes > SUMS_BYTES:
            begin = 0
        self._begun += 1
        self._end = begin + array.nbytes
        found = SharedSum(self._begun, flat, array, begin, hook)
        self._waiting.append(found)
        if self._between is None:
            self._write()
        else:
            self._advance()
        return found

    def _write(self) -> None:
        """The tensors of sums that have begun, as far as their memory is free."""
        while self._waiting and not self._needed_for(self._waiting[0]):
            work = self._waiting.popleft()
            self._memory(self._members.place, work)[:] = work.array
            self._used.append((work.number, work.at, work.at + work.array.nbytes))
            self._own[WRITTEN] = work.number
            self._written.append(work)

    def _needed_for(self, work: SharedSum) -> int:
        """The newest sum that all members must have before the memory of this one is free; 0: it is free."""
        taken, begin, end = self._counted(TAKEN), work.at, work.at + work.array.nbytes
        while self._used and self._used[0][0] <= taken:
            self._used.popleft()
        return max((number for number, first, last in self._used if first < end and begin < last), default=0)

    def _memory(self, place: int, work: SharedSum) -> Array:
        memory = self._members.memory[place]
        return memory[work.at : work.at + work.array.nbytes].view(work.array.dtype)

    def _counted(self, which: int) -> int:
        """How far all members have come."""
        return min([int(counts[which]) for counts in self._members.counts])

    def wait(self, work: SharedSum) -> None:
        """Returns when the tensor has the sum. Raises GroupLost."""
        self._finish(work.number)

    def _finish(self, number: int) -> None:
        """All sums up to this one."""
        self._advance()
        while (awaited := self._awaited()) is not None:
            oldest, places, which, count = awaited
            if oldest.number > number:
                return
            self._members.wait(places, which, count, self._meanwhile)
            self._advance()

    def _awaited(self) -> tuple[SharedSum, Sequence[int], int, int] | None:
        """The oldest sum under way, and how far which members must come before something can be done with it."""
        if self._summed:
            return self._summed[0], (_FIRST,), SUMMED, self._summed[0].number
        if self._reduced:
            return self._reduced[0], self._all, REDUCED, self._reduced[0].number
        if self._written:
            return self._written[0], self._all, WRITTEN, self._written[0].number
        if self._waiting:
            return self._waiting[0], self._all, TAKEN, self._needed_for(self._waiting[0])
        return None

    def _advance(self) -> None:
        """Does what can be done now of the sums under way. Raises GroupLost."""
        if self._waiting:
            self._write()
        if self._written:
            written = self._counted(WRITTEN)
            while self._written and self._written[0].number <= written:
                self._add_up(self._written.popleft())
        if self._reduced:
            reduced = self._counted(REDUCED)
            while self._reduced and (self._reduced[0].is_whole or self._reduced[0].number <= reduced):
                self._collect(self._reduced.popleft())
        while self._summed and self._has_sum(self._summed[0]):
            self._own[TAKEN] = self._summed.popleft().number

    def _add_up(self, work: SharedSum) -> None:
        """This member's part."""
        inputs = [self._memory(each, work) for each in self._all]
        if not work.is_whole:
            part = self._part(self._members.place, work)
            _add([each[part] for each in inputs], work.array[part])
            inputs[self._members.place][part] = work.array[part]  # no other member reads this part before
        elif self._between is None or self._is_first:
            _add(inputs, work.array)
        self._own[REDUCED] = work.number
        self._reduced.append(work)

    def _part(self, place: int, work: SharedSum) -> slice:
        size, count = work.array.size, self._members.size
        return slice(size * place // count, size * (place + 1) // count)

    def _collect(self, work: SharedSum) -> None:
        """The parts of all members."""
        if self._between is None or self._is_first:
            for each in self._all if not work.is_whole else ():
                if each != self._members.place:
                    part = self._part(each, work)
                    work.array[part] = self._memory(each, work)[part]
        if self._between is None:
            self._own[TAKEN] = work.number
            return
        if self._is_first:
            work.between = self._between.begin(work.tensor, work.hook)
        self._summed.append(work)

    def _has_sum(self, work: SharedSum) -> bool:
        """Whether the tensor has the sum over all machines."""
        if not self._is_first:
            if self._members.counts[_FIRST][SUMMED] < work.number:
                return False
            work.array[:] = self._memory(_FIRST, work)
            return True
        if not work.between.is_completed():
            return False
        assert self._between is not None
        self._between.end(work.between)
        self._memory(_FIRST, work)[:] = work.array
        self._own[SUMMED] = work.number
        return True

    def check(self) -> None:
        """Raises GroupLost if a sum under way will not end. Does what can be done of them."""
        self._advance()
        awaited = self._awaited()
        if awaited is not None:
            _, places, which, count = awaited
            self._members.check(places, which, count)
            self._members.check(self._all, WRITTEN, self._begun)


def _do_nothing() -> None:
    """Nobody waits for this."""


def _add(arrays: Sequence[Array], total: Array) -> None:
    """In their order."""
    first, second, *others = arrays
    np.add(first, second, out=total)
    for each in others:
        np.add(total, each, out=total)
