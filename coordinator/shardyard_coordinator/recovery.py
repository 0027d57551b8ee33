"""Partitions whose server is gone: to whom they go, and in which life.

Owns: what is lost, the attempt to restore it. Invariants: each attempt has a generation and a life of its own, higher
than all before, so that what an abandoned one has left on a server is never taken for the job's (rule A10); partitions
that nobody lost stay where they are. Must not know: servers' calls, checkpoints' contents, what time it is.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from shardyard.ground.types import Generation, Incarnation, PartitionId, PartitionMap, PartitionOwner
from shardyard_coordinator.placement import Server
from shardyard_coordinator.records import Body, DamagedRecord, Entry

SERVER_GRACE_MS: Final = 3_000
"""How long lost partitions wait for a server that is started again, or is new, before the others take them."""
RETRY_MS: Final = 1_000


@dataclass(frozen=True, slots=True)
class Attempt:
    """A map under which `partitions` begin as a checkpoint has them, in a life."""

    map: PartitionMap
    life: int
    partitions: frozenset[PartitionId]


class Recovery:
    """Of one job."""

    def __init__(self) -> None:
        self._life = 1
        self._generation = 1
        self._since_ms = 0
        self._retry_at_ms = 0
        self.lost: frozenset[PartitionId] = frozenset()
        self.attempt: Attempt | None = None

    @property
    def needed(self) -> bool:
        return bool(self.lost)

    def lose(self, partitions: Collection[PartitionId], now_ms: int) -> Entry:
        """Their server is gone. An attempt under way is given up: it may have counted on that server."""
        if not self.lost:
            self._since_ms = now_ms
        self.lost |= frozenset(partitions)
        self.attempt = None
        return self._lost

    def begin(
        self, map_: PartitionMap, sizes: Sequence[int], servers: Sequence[Server], *, whole: bool, now_ms: int
    ) -> tuple[Attempt, Entry] | None:
        """An attempt, if it is time for one. `sizes`: of all partitions, in bytes; `servers`: the living; `whole`: all
        partitions go back to the checkpoint, also those that nobody lost."""
        if not self.lost or self.attempt is not None or now_ms < self._retry_at_ms:
            return None
        takers = self._takers(map_, servers, now_ms)
        if not takers:
            return None
        self._life += 1
        self._generation = max(self._generation, map_.generation) + 1
        owners = _give(map_, sizes, self.lost, servers, takers)
        partitions = frozenset(owner.partition for owner in owners) if whole else self.lost
        self.attempt = Attempt(PartitionMap(Generation(self._generation), owners), self._life, partitions)
        return self.attempt, self._begun

    def end(self, generation: Generation, now_ms: int, *, restored: bool) -> Attempt | None:
        """The attempt of that generation has ended; it, if it was this one and nothing is lost any more."""
        attempt = self.attempt
        if attempt is None or attempt.map.generation != generation:
            return None
        self.attempt = None
        if not restored:
            self._retry_at_ms = now_ms + RETRY_MS
            return None
        self.lost = frozenset()
        return attempt

    def _takers(self, map_: PartitionMap, servers: Sequence[Server], now_ms: int) -> list[Server]:
        kept = {owner.server for owner in map_.owners if owner.partition not in self.lost}
        fresh = [server for server in servers if server.incarnation not in kept]
        if fresh or now_ms - self._since_ms < SERVER_GRACE_MS:
            return fresh
        return list(servers)

    # ---- records

    @property
    def _lost(self) -> Entry:
        return "partitions_lost", {"partitions": sorted(self.lost)}

    @property
    def _begun(self) -> Entry:
        return "recovery_begun", {"life": self._life, "generation": self._generation}

    def entries(self) -> list[Entry]:
        found = [self._begun] if self._life > 1 else []
        return [*found, self._lost] if self.lost else found

    def restore(self, kind: str, body: Body, now_ms: int) -> None:
        """Raises DamagedRecord."""
        if kind == "partitions_lost":
            self.lost = frozenset(PartitionId(number) for number in body.numbers("partitions"))
            self._since_ms = now_ms
        elif kind == "recovery_begun":
            self._life = body.number("life", least=2)
            self._generation = body.number("generation", least=2)
        else:
            raise DamagedRecord("its kind is unknown to this release")

    def restored(self) -> None:
        """The record of an attempt's end was read: nothing is lost."""
        self.lost = frozenset()


def _give(
    map_: PartitionMap,
    sizes: Sequence[int],
    lost: frozenset[PartitionId],
    servers: Sequence[Server],
    takers: Sequence[Server],
) -> tuple[PartitionOwner, ...]:
    """Each lost partition, the largest first, to the taker with the fewest bytes."""
    living = {server.incarnation: server for server in servers}
    loads: dict[Incarnation, int] = dict.fromkeys((taker.incarnation for taker in takers), 0)
    for owner in map_.owners:
        if owner.partition not in lost and owner.server in loads:
            loads[owner.server] += sizes[owner.partition]
    heap = [(load, server) for server, load in loads.items()]
    heapq.heapify(heap)
    given: dict[PartitionId, Server] = {}
    for partition in sorted(lost, key=lambda each: (-sizes[each], each)):
        load, server = heap[0]
        given[partition] = living[server]
        heapq.heapreplace(heap, (load + sizes[partition], server))
    return tuple(
        PartitionOwner(owner.partition, given[owner.partition].incarnation, given[owner.partition].address)
        if owner.partition in given
        else owner
        for owner in map_.owners
    )
