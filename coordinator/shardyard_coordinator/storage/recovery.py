"""Partitions that lost their server: which servers take them, and under which generation and life.

Owns: the lost partitions, and the attempt to restore them. Partitions whose server leaves in order are lost too, but
the newest checkpoint has all of their state: they are `sealed` in it (rule C9). Invariants: each attempt has its own
generation and life, higher than all before, so that what an abandoned attempt has left on a server is never taken for
the job's (rule A10). Partitions that were not lost stay where they are. Must not know: how servers are called, what
checkpoints contain, what time it is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Final

from shardyard.domain.ids import Generation, Incarnation, PartitionId
from shardyard.domain.layout.layouts import PartitionMap, PartitionOwner
from shardyard_coordinator.placement.placement import Server, staying
from shardyard_coordinator.records import Body, DamagedRecord, Entry

SERVER_GRACE_MS: Final = 3_000
"""How long lost partitions wait for a server that is started again, or is new, before the others take them."""
RETRY_MS: Final = 1_000


@dataclass(frozen=True, slots=True)
class Attempt:
    """A map under which `partitions` are restored from a checkpoint, in a new life. `logs`: the folder of each owner's
    logs. `sealed`: those of the partitions of which the checkpoint has all."""

    map: PartitionMap
    life: int
    partitions: frozenset[PartitionId]
    logs: Mapping[Incarnation, str]
    sealed: frozenset[PartitionId]

    @property
    def goes_back(self) -> bool:
        """Whether any partition may lack what it has acknowledged."""
        return bool(self.partitions - self.sealed)


@dataclass(frozen=True, slots=True)
class Restored:
    """What a recovery has brought back: how many partitions, as a checkpoint has them, either with what the logs have
    after it (`logs`) or with that many data shards leased again. `created_s`: when the checkpoint was written, in
    seconds since 1970."""

    checkpoint: int
    step: int
    created_s: int
    partitions: int
    leased_again: int
    logs: bool


class Recovery:
    def __init__(self) -> None:
        self._life = 1
        self._generation = 1
        self._since_ms = 0
        self._retry_at_ms = 0
        self.lost: frozenset[PartitionId] = frozenset()
        self.sealed: frozenset[PartitionId] = frozenset()
        """Those of the lost partitions of which the newest checkpoint has everything."""
        self.waits_for = ""
        """What an attempt waits for, if it waits for anything but time."""
        self.attempt: Attempt | None = None

    @property
    def needed(self) -> bool:
        return bool(self.lost)

    @property
    def goes_back(self) -> bool:
        """Whether any lost partition may lack what it has acknowledged."""
        return bool(self.lost - self.sealed)

    def lose(
        self, partitions: Collection[PartitionId], now_ms: int, *, at_once: bool = False, sealed: bool = False
    ) -> Entry:
        """The partitions lost their server. An attempt under way is given up, because it may need that server.
        `at_once`: they do not wait for their server's restart. `sealed`: the newest checkpoint has all of them."""
        if not self.lost:
            self._since_ms = now_ms - (SERVER_GRACE_MS if at_once else 0)
        self.lost |= frozenset(partitions)
        if sealed:
            self.sealed |= frozenset(partitions)
        self.attempt = None
        return self._lost

    def begin(
        self,
        map_: PartitionMap,
        sizes: Sequence[int],
        servers: Sequence[Server],
        *,
        whole: bool,
        now_ms: int,
        folders: Mapping[PartitionId, str] | None = None,
    ) -> tuple[Attempt, Entry] | None:
        """Begins an attempt if it is time for one. `sizes`: of all partitions, in bytes. `servers`: the living ones.
        `whole`: all partitions go back to the checkpoint, including those that are not lost. `folders`: where
        the logs of partitions are that are restored from logs; their next owners must reach them."""
        if not self.lost or self.attempt is not None or now_ms < self._retry_at_ms:
            return None
        needed = folders or {}
        kept = {owner.server for owner in map_.owners if owner.partition not in self.lost}
        able = staying(servers) or _leaving_later(servers, kept)
        takers = {
            partition: self._takers(
                [each for each in able if partition not in needed or each.logs == needed[partition]],
                kept,
                now_ms,
                at_once=partition in self.sealed,
            )
            for partition in sorted(self.lost)
        }
        self.waits_for = _unreached(takers, needed)
        if self.waits_for:
            return None
        self._life += 1
        self._generation = max(self._generation, map_.generation) + 1
        owners = _give(map_, sizes, self.lost, servers, takers)
        partitions = frozenset(owner.partition for owner in owners) if whole else self.lost
        logs = {server.incarnation: server.logs for server in servers}
        map_ = PartitionMap(Generation(self._generation), owners)
        self.attempt = Attempt(map_, self._life, partitions, logs, self.sealed)
        return self.attempt, self._begun

    def end(self, generation: Generation, now_ms: int, *, restored: bool) -> Attempt | None:
        """The attempt of that generation has ended. Returns it if it was the current one and nothing is lost any
        more."""
        attempt = self.attempt
        if attempt is None or attempt.map.generation != generation:
            return None
        self.attempt = None
        if not restored:
            self._retry_at_ms = now_ms + RETRY_MS
            return None
        self.restored()
        return attempt

    def _takers(self, servers: Sequence[Server], kept: Set[Incarnation], now_ms: int, *, at_once: bool) -> list[Server]:
        fresh = [server for server in servers if server.incarnation not in kept]
        if at_once:
            return list(servers)
        if fresh or now_ms - self._since_ms < SERVER_GRACE_MS:
            return fresh
        return list(servers)

    # ---- records

    @property
    def _lost(self) -> Entry:
        return "partitions_lost", {"partitions": sorted(self.lost), "sealed": sorted(self.sealed)}

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
            self.sealed = frozenset(PartitionId(number) for number in body.numbers("sealed"))
            self._since_ms = now_ms
        elif kind == "recovery_begun":
            self._life = body.number("life", least=2)
            self._generation = body.number("generation", least=2)
        else:
            raise DamagedRecord("its kind is unknown to this release")

    def restored(self) -> None:
        """All partitions have servers."""
        self.lost = self.sealed = frozenset()


def _leaving_later(servers: Sequence[Server], kept: Set[Incarnation]) -> list[Server]:
    """Servers that leave, but not before the partitions that they have kept have moved. With these, training goes on
    until another server comes."""
    return [server for server in servers if server.incarnation in kept and not server.hurries]


def _unreached(takers: Mapping[PartitionId, Sequence[Server]], folders: Mapping[PartitionId, str]) -> str:
    """What the partitions without a taker wait for."""
    waiting = sorted(partition for partition, found in takers.items() if not found)
    if not waiting:
        return ""
    numbers = ", ".join(map(str, waiting[:8])) + (f" and {len(waiting) - 8} more" if len(waiting) > 8 else "")
    folder = folders.get(waiting[0])
    where = f" that reaches the logs in folder {folder}," if folder is not None else ""
    return f"a server{where} for partition {numbers}"


def _give(
    map_: PartitionMap,
    sizes: Sequence[int],
    lost: frozenset[PartitionId],
    servers: Sequence[Server],
    takers: Mapping[PartitionId, Sequence[Server]],
) -> tuple[PartitionOwner, ...]:
    """Gives each lost partition, the largest first, to the one of its takers with the fewest bytes."""
    living = {server.incarnation: server for server in servers}
    loads = dict.fromkeys(sorted({taker.incarnation for found in takers.values() for taker in found}), 0)
    for owner in map_.owners:
        if owner.partition not in lost and owner.server in loads:
            loads[owner.server] += sizes[owner.partition]
    given: dict[PartitionId, Server] = {}
    for partition in sorted(lost, key=lambda each: (-sizes[each], each)):
        _, server = min((loads[taker.incarnation], taker.incarnation) for taker in takers[partition])
        given[partition] = living[server]
        loads[server] += sizes[partition]
    return tuple(
        PartitionOwner(owner.partition, given[owner.partition].incarnation, given[owner.partition].address)
        if owner.partition in given
        else owner
        for owner in map_.owners
    )
