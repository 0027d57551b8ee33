"""Memory that the members of a group share that are on one machine, and what each of them counts in it.

A member writes its own memory only, and reads that of the others. It says how far it has come by a number in its
header, which it writes after what the number speaks of: x86 processors show a member's stores to others in their order,
and other processors are not used so. The others look at the number, with short pauses.

Owns: the memory. Invariants: a member that has died or left ends the waits for what it has not done. Must not know:
groups, what is counted.
"""

from __future__ import annotations

import os
import platform
import select
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy.typing as npt

from shardyard.domain.errors import NotShareable
from shardyard.domain.pulls import ShmHandle
from shardyard.transport.shared_memory import Bytes, SharedMemory, attach
from shardyard_worker.collectives.group_store import GroupLost

Array = npt.NDArray[Any]

LARGEST_BYTES: Final = 4 << 20
"""Of a tensor that goes through memory as a whole. On one machine gloo takes larger ones, by threads of its own."""
ALIGN: Final = 64
NUMBERS: Final = 512
"""In the header, of eight bytes each."""
LEFT: Final = 0
"""The place of the number that says that a member has left."""
WRITTEN, REDUCED, TAKEN, SUMMED = 8, 16, 24, 32
"""Places of the numbers of sums, each in a cache line of its own."""
SENT: Final = 40
"""The place of the first number of messages."""
_HEADER_BYTES: Final = 8 * NUMBERS
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


def this_machine() -> str:
    """Its name, which those processes have in common that can open each other's memory. Raises NotShareable."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        space = os.stat("/proc/self/ns/pid").st_ino
    except OSError as error:
        raise NotShareable(f"this machine does not say which it is: {error}") from error
    return f"{boot}-{space}-{os.geteuid()}"


class OfferedMemory:
    """What this member offers: memory of so many bytes, whose pages take none before they are touched. Raises
    NotShareable, TooLarge if there is nothing to offer."""

    def __init__(self, nbytes: int) -> None:
        if platform.machine() != "x86_64":
            raise NotShareable(f"a {platform.machine()} processor, whose stores others may see in another order")
        self._memory = SharedMemory(_HEADER_BYTES + nbytes, read_only=False)
        self.offer = Offer(this_machine(), os.getpid(), self._memory.ticket().fd)

    def join(self, offers: Sequence[Offer], check: Callable[[], None]) -> SharedMembers:
        """With the members that have made these offers, of which this is one. `check` raises GroupLost once the group
        lacks a member. Raises NotShareable if a member's memory cannot be mapped."""
        found: list[Bytes] = []
        processes: dict[int, int] = {}
        try:
            for place, each in enumerate(offers):
                found.append(self._memory.bytes if each == self.offer else self._opened(each))
                if each != self.offer:
                    processes[place] = os.pidfd_open(each.pid)
        except (OSError, NotShareable) as error:
            for process in processes.values():
                os.close(process)
            raise NotShareable(f"the memory of another member cannot be mapped: {error}") from error
        return SharedMembers(self._memory, found, offers.index(self.offer), processes, check)

    def _opened(self, offer: Offer) -> Bytes:
        """Raises OSError, NotShareable."""
        fd = os.open(f"/proc/{offer.pid}/fd/{offer.fd}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            return attach(ShmHandle(self._memory.nbytes, fd=fd)).bytes
        finally:
            os.close(fd)

    def close(self) -> None:
        self._memory.close()


class SharedMembers:
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
        self.place = place
        self.size = len(found)
        self.counts = [each[:_HEADER_BYTES].view("<u8") for each in found]
        """The numbers of each member."""
        self.memory = [each[_HEADER_BYTES:] for each in found]
        self._own = own
        self._check = check
        self._place_of = {process: other for other, process in processes.items()}
        self._died = select.poll()
        for process in self._place_of:
            self._died.register(process, select.POLLIN)

    def wait(
        self, places: Sequence[int], which: int, number: int, meanwhile: Callable[[], object] = lambda: None
    ) -> None:
        """Returns when these members have counted so far in the number at place `which`. `meanwhile` is called between
        two looks. Raises GroupLost."""
        began = checked = time.monotonic()
        while any(self.counts[place][which] < number for place in places):
            meanwhile()
            now = time.monotonic()
            if now - began > _LOOK_S[1]:
                self.check(places, which, number)
            if now - checked > _CHECK_S:
                self._check()
                checked = now
            time.sleep(min(max(_LOOK_S[0], (now - began) / 20), _LOOK_S[1]))

    def check(self, places: Sequence[int], which: int, number: int) -> None:
        """Raises GroupLost if one of these members has left or died, and has not counted so far."""
        gone = {self._place_of[process] for process, _ in self._died.poll(0)}
        gone |= {place for place in places if self.counts[place][LEFT]}
        # they have counted before they left
        if any(self.counts[place][which] < number for place in gone & {*places}):
            raise GroupLost("a member of the replica group is gone")

    def leave(self) -> None:
        """This member counts no more."""
        self.counts[self.place][LEFT] = 1
        self._own.close()
        for process in self._place_of:
            os.close(process)
        self._place_of.clear()
