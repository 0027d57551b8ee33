"""Versions that readers pin: an evaluator reads one version whole, while updates go on (rule C7).

Owns: the pins of one job on one server, by the names that readers gave them, with their leases. Invariants: at most
limits.PINS_MAX at a time; the memory that updates need because of a pin is allocated before the pin is granted, so no
update fails for it; what a pin holds is released once, however it ends. Safe for several threads. Must not know:
messages, the time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from shardyard.domain import limits
from shardyard.domain.errors import InvalidRequest, NotFound, TooLarge
from shardyard.domain.ids import PartitionId, Version
from shardyard.domain.pulls import NotReadyPart, PulledPart
from shardyard_ps_server.partition.partition import Partition
from shardyard_ps_server.partition.reads import await_pinned, hold_pinned, pin_version, unpin
from shardyard_ps_server.values.versions import Bytes, VersionPin


@dataclass
class Pin:
    """`number`: the version that the reader named; None: the newest of each partition."""

    number: int | None
    wanted: tuple[tuple[Partition, VersionPin], ...]
    until_ms: int


class Pins:
    def __init__(self) -> None:
        self._taking = threading.Lock()  # held while memory is allocated, and while a push under way ends
        self._lock = threading.Lock()
        self._pins: dict[bytes, Pin] = {}

    def __len__(self) -> int:
        with self._lock:
            return len(self._pins)

    def take(
        self,
        name: bytes,
        partitions: Sequence[Partition],
        number: int | None,
        *,
        now_ms: int,
        lease_ms: int,
        rows: bool = False,
    ) -> Pin:
        """Returns a new pin, or renews the lease of the pin of that name. `rows`: the pin is also for looking up table
        rows. Raises InvalidRequest (facts: newest) if the version has passed, or another pin has the name, NotReady,
        TooLarge."""
        self.expire(now_ms)
        until_ms = now_ms + lease_ms
        pin = self._renewed(name, number, until_ms)  # renewing does not wait for `_taking`
        if pin is not None:
            return pin
        with self._taking:
            pin = self._renewed(name, number, until_ms)
            if pin is None:
                pin = Pin(number, _pin_all(partitions, number, rows=rows), until_ms)
                with self._lock:
                    self._pins[name] = pin
            return pin

    def _renewed(self, name: bytes, number: int | None, until_ms: int) -> Pin | None:
        """Renews and returns the pin of that name, if there is one. Raises InvalidRequest if it has another version,
        TooLarge if a new one is one too many."""
        with self._lock:
            pin = self._pins.get(name)
            if pin is None and len(self._pins) >= limits.PINS_MAX:
                raise TooLarge(
                    f"{len(self._pins)} versions are pinned; at most {limits.PINS_MAX} are",
                    why="each takes the memory of one version",
                    todo="run fewer evaluators, or evaluate less often",
                )
            if pin is not None:
                if pin.number != number:
                    raise InvalidRequest(f"a pin of version {pin.number}, asked for as one of version {number}")
                pin.until_ms = until_ms
            return pin

    def hold(
        self, name: bytes, partitions: Sequence[PartitionId], now_ms: int
    ) -> list[tuple[Partition, Version, Bytes]]:
        """Returns the pinned values, held once more while they are sent, since the lease may run out meanwhile. Raises
        NotFound, and InvalidRequest if the version does not exist yet."""
        self.expire(now_ms)
        with self._lock:
            found = self._found(name, partitions)
            with ExitStack() as taken:
                held = []
                for number in partitions:
                    partition, wanted = found[number]
                    version, buffer = hold_pinned(partition, wanted)
                    taken.callback(partition.release, buffer)
                    held.append((partition, version, buffer))
                taken.pop_all()
            return held

    def rows(
        self, name: bytes, partitions: Sequence[PartitionId], now_ms: int
    ) -> dict[PartitionId, tuple[Partition, VersionPin]]:
        """Returns the partitions in which a pin's rows are looked up, with the pinned version. Raises NotFound."""
        self.expire(now_ms)
        with self._lock:
            return self._found(name, partitions)

    def _found(self, name: bytes, partitions: Sequence[PartitionId]) -> dict[PartitionId, tuple[Partition, VersionPin]]:
        """Returns what a pin has of these partitions. The caller holds the lock. Raises NotFound if one is missing."""
        pin = self._pins.get(name)
        if pin is None:
            raise NotFound(
                "a pin that is not here",
                why="its lease has run out, or partitions have moved or gone back since",
                todo="take a new snapshot; `run.snapshots` does so by itself",
            )
        found = {partition.id: (partition, wanted) for partition, wanted in pin.wanted}
        missing = [number for number in partitions if number not in found]
        if missing:
            raise NotFound(f"partition {missing[0]} in a pin that has {sorted(found)}")
        return found

    def release(self, name: bytes) -> None:
        """Releases a pin, if it exists."""
        self._release(lambda each, _: each == name)

    def expire(self, now_ms: int) -> None:
        """Releases pins whose lease has run out."""
        self._release(lambda _, pin: pin.until_ms <= now_ms)

    def clear(self) -> None:
        """Releases all pins, because partitions move, are restored, or are dropped."""
        self._release(lambda *_: True)

    def _release(self, ends: Callable[[bytes, Pin], bool]) -> None:
        with self._lock:
            pins = [self._pins.pop(name) for name in [name for name, pin in self._pins.items() if ends(name, pin)]]
        for pin in pins:
            for partition, wanted in pin.wanted:
                unpin(partition, wanted)


def _pin_all(
    partitions: Sequence[Partition], number: int | None, *, rows: bool
) -> tuple[tuple[Partition, VersionPin], ...]:
    """Pins the version in all partitions, or in none."""
    with ExitStack() as taken:
        found = []
        for partition in partitions:
            pin = pin_version(partition, number, rows=rows)
            taken.callback(unpin, partition, pin)
            found.append((partition, pin))
        taken.pop_all()
    return tuple(found)


def await_pin(pin: Pin, until: float) -> tuple[tuple[PulledPart, ...], tuple[NotReadyPart, ...]]:
    """Waits until `until` (time.monotonic) at most. Returns what a pin holds, or what it lacks. Raises NotFound if
    partitions were restored before the named version came."""
    parts: list[PulledPart] = []
    missing: list[NotReadyPart] = []
    for partition, wanted in pin.wanted:
        found = await_pinned(partition, wanted, until)
        if isinstance(found, NotReadyPart):
            missing.append(found)
        else:
            parts.append(PulledPart(partition.id, found))
    return (() if missing else tuple(parts)), tuple(missing)
