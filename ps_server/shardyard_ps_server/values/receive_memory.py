"""The memory of a server for what it receives over the network.

Owns: how many bytes all streams have together, and those of one job. Invariants: these are bounded before memory is
allocated; a push that is larger than the bound is received alone, since it would never be received otherwise; whoever
waits for memory has none; the requests of one job get theirs in their order. Streams keep their buffers for their next
push, and lose them when others need the memory. Up to SMALL_BYTES a request is not counted: a message takes as much
before it is known what it is. Safe for several threads. Must not know: what the bytes mean.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from shardyard.domain.errors import NotReady
from shardyard.domain.ids import JobId
from shardyard.domain.limits import FRAME_BYTES
from shardyard.runtime.waits import WaitRegistry
from shardyard_ps_server.values.versions import Bytes, aligned_empty

SMALL_BYTES: Final = FRAME_BYTES
WAIT_S: Final = 30.0
"""How long a push waits for memory before it is refused."""


@dataclass(eq=False, slots=True)
class _Ticket:
    """Somebody that waits for memory. Once `granted` is set, the memory is counted as its."""

    job: JobId
    nbytes: int
    granted: threading.Event = field(default_factory=threading.Event)


class ReceiveMemory:
    """`bytes_max`: of all jobs together; one job has at most half of them."""

    def __init__(self, bytes_max: int, wait_registry: WaitRegistry | None = None) -> None:
        self.bytes_max = bytes_max
        self._wait_registry = wait_registry or WaitRegistry()
        self._lock = threading.Lock()
        self._used = 0
        self._by_job: Counter[JobId] = Counter()
        self._waiting: list[_Ticket] = []
        self._idle: dict[ReceiveBuffer, None] = {}
        """Buffers that are kept, those that have been so for the longest time first."""

    @property
    def used(self) -> int:
        """In bytes, with the buffers that are kept."""
        return self._used

    @contextlib.contextmanager
    def reserved(self, job: JobId, nbytes: int) -> Iterator[None]:
        """Counts memory that the caller allocates meanwhile. Waits for it. Raises NotReady."""
        if nbytes <= SMALL_BYTES:
            yield
            return
        self.take(job, nbytes)
        try:
            yield
        finally:
            with self._lock:
                self._give_back(job, nbytes)

    def take(self, job: JobId, nbytes: int, wait_s: float = WAIT_S) -> None:
        """Raises NotReady if there is no room within `wait_s`."""
        ticket = _Ticket(job, nbytes)
        with self._lock:
            self._waiting.append(ticket)
            self._grant()
        if ticket.granted.is_set():
            return
        if wait_s:
            with self._wait_registry.over(lambda: f"memory for {nbytes:,} bytes of job {job} that are to be received"):
                ticket.granted.wait(wait_s)
        with self._lock:
            if ticket.granted.is_set():
                return
            self._waiting.remove(ticket)
            raise NotReady(
                f"this server receives {self._used:,} bytes at the moment, {self._by_job[job]:,} of them of job {job}",
                why=f"it has {self.bytes_max:,} for that (quotas.receive_bytes_max), and half of them for one job",
                todo="send again in a moment; raise the quota, or start more servers, if this lasts",
            )

    # ---- with the lock held

    def _grant(self) -> None:
        """Gives memory to those that wait, as far as there is any."""
        full: set[JobId] = set()
        for ticket in [*self._waiting]:
            if ticket.job in full:
                continue
            if not self._make_room(ticket.job, ticket.nbytes):
                full.add(ticket.job)
                continue
            self._used += ticket.nbytes
            self._by_job[ticket.job] += ticket.nbytes
            self._waiting.remove(ticket)
            ticket.granted.set()

    def _make_room(self, job: JobId, nbytes: int) -> bool:
        """Takes kept buffers away until so many bytes fit. False if they do not."""
        while not self._fits(job, nbytes):
            buffer = next(iter(self._idle), None)
            if buffer is None:
                return False
            self._forget(buffer)
        return True

    def _fits(self, job: JobId, nbytes: int) -> bool:
        of_job = self._by_job[job]
        return (not self._used or self._used + nbytes <= self.bytes_max) and (
            not of_job or of_job + nbytes <= self.bytes_max // 2
        )

    def _give_back(self, job: JobId, nbytes: int) -> None:
        self._count_off(job, nbytes)
        self._grant()

    def _forget(self, buffer: ReceiveBuffer) -> None:
        self._idle.pop(buffer, None)
        self._count_off(buffer.job, buffer.nbytes)
        buffer.bytes, buffer.nbytes = None, 0

    def _count_off(self, job: JobId, nbytes: int) -> None:
        self._used -= nbytes
        self._by_job[job] -= nbytes
        if not self._by_job[job]:
            del self._by_job[job]

    # ---- of buffers

    def keep(self, buffer: ReceiveBuffer) -> None:
        with self._lock:
            self._idle[buffer] = None
            if self._waiting:
                self._grant()

    def reuse(self, buffer: ReceiveBuffer, job: JobId, nbytes: int) -> Bytes | None:
        """The buffer's bytes, if it still has as many; otherwise it has none from now on."""
        with self._lock:
            self._idle.pop(buffer, None)
            kept = buffer.bytes
            if kept is not None and buffer.job == job and nbytes <= buffer.nbytes:
                return kept[:nbytes]
            self._forget(buffer)
            self._grant()
            return None

    def drop(self, buffer: ReceiveBuffer) -> None:
        with self._lock:
            self._forget(buffer)
            self._grant()


class ReceiveBuffer:
    """The buffer of one stream, for one thread at a time. `bytes`, `nbytes`, `job`: what it has; changed by its memory
    only."""

    def __init__(self, memory: ReceiveMemory) -> None:
        self._memory = memory
        self._small: Bytes | None = None
        """Of its own, for small pushes."""
        self.bytes: Bytes | None = None
        self.nbytes = 0
        self.job = JobId(0)

    def take(self, job: JobId, nbytes: int, *, wait_s: float = WAIT_S) -> Bytes:
        """Returns so many bytes, in use until `release`. What was in them is lost. Raises NotReady, and TooLarge if
        there is no memory."""
        if nbytes <= SMALL_BYTES:
            if self._small is None or len(self._small) < nbytes:
                self._small = aligned_empty(nbytes)
            return self._small[:nbytes]
        kept = self._memory.reuse(self, job, nbytes)
        if kept is not None:
            return kept
        self._memory.take(job, nbytes, wait_s)
        self.job, self.nbytes = job, nbytes
        try:
            self.bytes = made = aligned_empty(nbytes)
        except BaseException:
            self.close()
            raise
        return made

    def release(self) -> None:
        """The bytes are kept, while nobody else needs the memory."""
        if self.bytes is not None:
            self._memory.keep(self)

    def close(self) -> None:
        if self.nbytes:
            self._memory.drop(self)
