"""Which servers' logs continue a job's checkpoints (rule C2 of docs/internals/ledger.md).

Owns: for each partition, the servers that have owned it, with the checkpoint from which each began and the folder of
its log, back to the oldest checkpoint that is kept. Invariant: all that a partition has acknowledged since any of these
checkpoints is in the logs of `of`, in this order. Must not know: what a log contains, which servers live.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from shardyard.checkpoints.manifest import CHECKPOINT_NUMBER_MAX
from shardyard.domain.ids import Incarnation, PartitionId
from shardyard_coordinator.records import Body, Entry, checked_items, checked_number, checked_text, require

OWNERS_MAX: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class LogOwner:
    """The owner of a partition from checkpoint `since` on; 0: from first values on. `logs`: the folder of its log."""

    server: Incarnation
    since: int
    logs: str


Owners = Mapping[PartitionId, LogOwner]


class LogOwners:
    """For a job whose durability is wal. `keep`: how many checkpoints are kept."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._kept: list[int] = []
        self._owners: dict[PartitionId, list[LogOwner]] = {}

    def of(self, partition: PartitionId, base: int) -> tuple[Incarnation, ...]:
        """The servers whose logs are needed after checkpoint `base`."""
        return tuple(owner.server for owner in self._since(partition, base))

    def log_folder(self, partition: PartitionId, base: int) -> str:
        """The folder of the logs that are needed after checkpoint `base`, if `reaches`."""
        return self._since(partition, base)[-1].logs

    @property
    def kept(self) -> tuple[int, ...]:
        """The job's checkpoints that may exist, ascending."""
        return tuple(self._kept)

    @property
    def oldest(self) -> int:
        """The oldest checkpoint that may be restored."""
        return self._kept[0] if self._kept else 0

    @property
    def needed(self) -> frozenset[Incarnation]:
        """The servers whose logs are needed, including the living ones."""
        return frozenset(owner.server for owners in self._owners.values() for owner in owners)

    def begin(self, owners: Owners) -> Entry:
        """Sets a job's first owners, or those of a job that has gone back as a whole."""
        self._owners = {partition: [owner] for partition, owner in sorted(owners.items())}
        return self._begun

    def move(self, owners: Owners) -> Entry:
        """Partitions have other owners, which have read the logs of the earlier owners."""
        for partition, owner in sorted(owners.items()):
            self._owners[partition].append(owner)
        return self._begun

    def continue_from(self, number: int, owners: Mapping[PartitionId, LogOwner]) -> Entry:
        """Partitions have other owners, which have begun with checkpoint `number` and not read the logs of the earlier
        owners: these have nothing after that checkpoint."""
        return self.move({partition: replace(owner, since=number - 1) for partition, owner in owners.items()})

    def reaches(self, partition: PartitionId, base: int) -> bool:
        """Whether a server that can read the log of the last owner can read all logs after checkpoint `base`."""
        return len({owner.logs for owner in self._since(partition, base)}) == 1

    def commit(self, number: int) -> None:
        """A checkpoint exists, and the oldest one may no longer exist."""
        self._kept = [*self._kept, number][-self._keep :]
        self._owners = {partition: self._since(partition, self.oldest) for partition in self._owners}

    def _since(self, partition: PartitionId, base: int) -> list[LogOwner]:
        owners = self._owners[partition]
        begun_before = [index for index, owner in enumerate(owners) if owner.since < base]
        return owners[max(begun_before, default=0) :]

    # ---- records

    @property
    def _begun(self) -> Entry:
        owners = [
            [partition, owner.server, owner.since, owner.logs]
            for partition, each in sorted(self._owners.items())
            for owner in each
        ]
        return "logs_begun", {"owners": owners, "kept": list(self._kept)}

    def entries(self) -> list[Entry]:
        return [self._begun] if self._owners else []

    def restore(self, body: Body) -> None:
        """Applies the record of all owners. Raises DamagedRecord."""
        self._kept = body.numbers("kept", most=CHECKPOINT_NUMBER_MAX)
        self._owners = {}
        for partition, owner in _owners_of(body.items("owners")):
            self._owners.setdefault(partition, []).append(owner)


def _owners_of(items: Iterable[object]) -> Iterable[tuple[PartitionId, LogOwner]]:
    for count, item in enumerate(items):
        require(count < OWNERS_MAX, f"more than {OWNERS_MAX} owners of partitions")
        partition, server, since, logs = checked_items(item, "an owner", count=4)
        yield (
            PartitionId(checked_number(partition, "a partition")),
            LogOwner(
                Incarnation(checked_number(server, "a server", least=1)),
                checked_number(since, "a checkpoint"),
                checked_text(logs, "a folder of logs"),
            ),
        )
