"""Tensors from one member to another, if all are on one machine, through memory that they share.

Both know the sizes of the tensors between them, so both know where the next one is in the sender's memory. The sender
counts what it has written for each other member, and each counts what it has copied of each sender's. If there is no
room, the tensor is written later: when this member waits for another one, or in `flush`. A tensor is not larger than
LARGEST_BYTES, and not empty.

Must not know: groups, what is sent.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final

import torch

from shardyard_worker.collectives.shared_members import ALIGN, LARGEST_BYTES, SENT, Array, SharedMembers

RING_BYTES: Final = 2 * LARGEST_BYTES
"""Of a member's memory for what it sends to another one."""
MEMBERS_MAX: Final = 224
_COPIED: Final = SENT + MEMBERS_MAX
"""The place in the header of what was copied from the first member. At SENT is what was written for it."""


class _Ring:
    """Where tensors between two members are, one after another."""

    def __init__(self) -> None:
        self.number = self._end = 0
        """Of the newest one."""
        self.used: deque[tuple[int, int, int]] = deque()

    def next(self, nbytes: int) -> int:
        """The begin of the next tensor, of that size."""
        begin = -(-self._end // ALIGN) * ALIGN
        if begin + nbytes > RING_BYTES:
            begin = 0
        self.number, self._end = self.number + 1, begin + nbytes
        return begin


class SharedReceive:
    """A tensor under way to this member, the `number`th of its sender."""

    def __init__(self, messages: SharedMessages, tensor: torch.Tensor, place: int, number: int, begin: int) -> None:
        self._messages = messages
        self.tensor = tensor
        self.place = place
        self.number = number
        self.begin = begin

    def wait(self, timeout: Any = None) -> bool:  # noqa: ARG002 - the group ends a wait
        """Raises GroupLost."""
        self._messages.finish(self)
        return True


class SharedSend:
    """A tensor that is written, or will be. Nobody changes it, so nobody waits for it."""

    def wait(self, timeout: Any = None) -> bool:  # noqa: ARG002
        return True


class SharedMessages:
    """For one thread. `begin`: of the members' memory for this."""

    def __init__(self, members: SharedMembers, begin: int) -> None:
        self._members = members
        self._begin = begin
        self._own = members.counts[members.place]
        self._to = [_Ring() for _ in range(members.size)]
        self._from = [_Ring() for _ in range(members.size)]
        self._waiting: list[deque[tuple[int, int, Array]]] = [deque() for _ in range(members.size)]
        """For each member what is not written yet: number, begin and bytes."""
        self._receiving: list[deque[SharedReceive]] = [deque() for _ in range(members.size)]
        """From each member what is not copied yet."""

    @staticmethod
    def fits(tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cpu" and 0 < tensor.nbytes <= LARGEST_BYTES

    def send(self, tensor: torch.Tensor, place: int) -> SharedSend:
        """Sends a tensor that nobody changes."""
        array = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        ring = self._to[place]
        begin = ring.next(array.nbytes)
        self._waiting[place].append((ring.number, begin, array))
        self._write(place)
        return _SENDS

    def flush(self) -> None:
        """Returns when all has been written. Raises GroupLost."""
        for place, waiting in enumerate(self._waiting):
            while waiting:
                self._members.wait([place], _COPIED + self._members.place, self._to[place].used[0][0])
                self._write(place)

    def _write_all(self) -> None:
        for place, waiting in enumerate(self._waiting):
            if waiting:
                self._write(place)

    def _write(self, place: int) -> None:
        """What there is room for."""
        ring, waiting = self._to[place], self._waiting[place]
        copied = self._members.counts[place][_COPIED + self._members.place]
        while ring.used and ring.used[0][0] <= copied:
            ring.used.popleft()
        while waiting:
            number, begin, array = waiting[0]
            end = begin + array.nbytes
            if any(first < end and begin < last for _, first, last in ring.used):
                return
            self._bytes(self._members.place, place, begin, array.nbytes)[:] = array
            self._own[SENT + place] = number
            ring.used.append((number, begin, end))
            waiting.popleft()

    def _bytes(self, sender: int, receiver: int, begin: int, nbytes: int) -> Array:
        first = self._begin + receiver * RING_BYTES + begin
        return self._members.memory[sender][first : first + nbytes]

    def receive(self, tensor: torch.Tensor, place: int) -> SharedReceive:
        """Begins to receive the next tensor of that member."""
        ring = self._from[place]
        begin = ring.next(tensor.nbytes)
        found = SharedReceive(self, tensor.detach(), place, ring.number, begin)
        self._receiving[place].append(found)
        return found

    def finish(self, receive: SharedReceive) -> None:
        """Returns when that tensor has come, and all that its sender has sent before. Raises GroupLost."""
        place = receive.place
        pending = self._receiving[place]
        while pending and pending[0].number <= receive.number:
            each = pending[0]
            self._members.wait([place], SENT + self._members.place, each.number, self._write_all)
            self._copy(each)
            self._own[_COPIED + place] = each.number
            pending.popleft()

    def _copy(self, receive: SharedReceive) -> None:
        target, found = receive.tensor, receive.tensor
        if not target.is_contiguous():
            found = torch.empty(target.shape, dtype=target.dtype)
        come = self._bytes(receive.place, self._members.place, receive.begin, target.nbytes)
        found.view(-1).view(torch.uint8).numpy()[:] = come
        if found is not target:
            target.copy_(found)


_SENDS: Final = SharedSend()
