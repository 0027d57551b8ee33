"""The workers of one job: the living, those that departed, and how long the job waits for more.

Owns: the living workers and their numbers; the departed workers, as long as servers must refuse them; since when the
job has had no worker, and when it is over for that reason. Invariants: after a chief has said goodbye, no worker is
chief. A worker that joins puts off the end. A worker keeps its number while it lives, and no other living worker has
it. Memory does not grow with the number of departed workers. Must not know: what workers compute, when their work is
free, how a job ends.
"""

from __future__ import annotations

import bisect
from typing import Final

from shardyard.domain.ids import Incarnation
from shardyard_coordinator.records import Body, Entry

FENCED_MAX: Final = 1_024
"""So many fenced workers are named to servers again and again, the latest."""
LATE_MS: Final = 10_000
"""A job that is left by its last worker stays open for so long if fewer workers than expected have said goodbye: one
that starts late, or is restarted, finds its work done, where it would else begin the whole run anew."""


class Roster:
    def __init__(self, now_ms: int) -> None:
        self.living: list[Incarnation] = []
        """In the order in which they have registered."""
        self.numbers: dict[Incarnation, int] = {}
        """Of each living worker, from 0: the lowest number that was free when it joined. In the order of `living`."""
        self._free: list[int] = []
        """The numbers below the highest of them that no living worker has, ascending."""
        self.fenced: list[Incarnation] = []
        """They departed; servers refuse them, or will."""
        self.fencing: list[Incarnation] = []
        """Those whose pushes servers may still take. No other worker has their work yet."""
        self.last_lost = ""
        self.goodbyes = 0
        self._chief_is_done = False
        self._idle_since_ms = now_ms
        self._over_at_ms: int | None = None

    @property
    def chief(self) -> Incarnation | None:
        """The living worker that came first. None once a chief has said goodbye, because a chief's work at the end of a
        script is done by then."""
        return self.living[0] if self.living and not self._chief_is_done else None

    @property
    def gone(self) -> tuple[Incarnation, ...]:
        """The workers that have left, or that the servers refuse."""
        return tuple(worker for worker in self.fenced if worker not in self.fencing)

    def idle_ms(self, now_ms: int) -> int:
        """How long no worker has been there, since `rest`."""
        return now_ms - self._idle_since_ms

    def is_over(self, now_ms: int) -> bool:
        """Whether the last worker has finished all work and the time for late workers is over."""
        return self._over_at_ms is not None and now_ms >= self._over_at_ms

    @property
    def numbers_end(self) -> int:
        """The highest number of a living worker, plus 1."""
        return len(self.numbers) + len(self._free)

    def has(self, number: int) -> bool:
        """Whether a living worker has that number."""
        return number < self.numbers_end and number not in self._free

    def enter(self, worker: Incarnation) -> None:
        self.enter_as(worker, self._free[0] if self._free else self.numbers_end)

    def enter_as(self, worker: Incarnation, number: int) -> None:
        """No living worker has that number."""
        if number < self.numbers_end:
            self._free.remove(number)
        else:
            self._free += range(self.numbers_end, number)
        is_last = not self.living or worker > self.living[-1]
        self.living = [*self.living, worker] if is_last else sorted([*self.living, worker])
        self.numbers[worker] = number
        if not is_last:
            self.numbers = dict(sorted(self.numbers.items()))
        self._over_at_ms = None

    def leave(self, worker: Incarnation, how: str, now_ms: int, *, goodbye: bool) -> None:
        """The worker is gone, and servers must refuse it."""
        if goodbye:
            self.goodbyes += 1
            self._chief_is_done = self._chief_is_done or self.chief == worker
        self.living = [each for each in self.living if each != worker]
        bisect.insort(self._free, self.numbers.pop(worker))
        while self._free and self._free[-1] == self.numbers_end - 1:
            self._free.pop()
        self.last_lost = f"worker {worker}, {how}"
        if not self.living:
            self.rest(now_ms)
        self.fenced = [*self.fenced, worker][-FENCED_MAX:]
        self.fencing = [*self.fencing, worker]

    def rest(self, now_ms: int) -> None:
        """Starts the time for which a job may be without workers."""
        self._idle_since_ms = now_ms

    def close_at(self, over_at_ms: int | None) -> None:
        """Sets when the job is over if no worker joins. None: it does not end for that reason."""
        self._over_at_ms = over_at_ms

    def refuse(self, worker: Incarnation) -> None:
        """The servers accept nothing from the worker any more."""
        self.fencing = [each for each in self.fencing if each != worker]

    # ---- records

    def entries(self) -> list[Entry]:
        """Records that rebuild this: each living worker joins, then the state of the others."""
        gone: Entry = (
            "workers_gone",
            {
                "goodbyes": self.goodbyes,
                "chief_is_done": self._chief_is_done,
                "last_lost": self.last_lost,
                "fenced": self.fenced,
                "fencing": self.fencing,
                "finishes": self._over_at_ms is not None,
            },
        )
        joined = [self.joined(worker) for worker in self.living]
        return [*joined, *([gone] if self.last_lost else [])]

    def joined(self, worker: Incarnation) -> Entry:
        return "worker_joined", {"worker": worker, "number": self.numbers[worker]}

    def restore(self, body: Body, now_ms: int) -> None:
        """Applies the record of the departed workers. Raises DamagedRecord."""
        self.goodbyes, self._chief_is_done = body.number("goodbyes"), body.flag("chief_is_done")
        self.last_lost = body.text("last_lost")
        self.fenced = [Incarnation(each) for each in body.numbers("fenced")][-FENCED_MAX:]
        self.fencing = [Incarnation(each) for each in body.numbers("fencing")]
        self._over_at_ms = now_ms + LATE_MS if body.flag("finishes") else None
