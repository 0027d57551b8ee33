"""Names of pushes, and leases on the work that names them (docs/internals/ledger.md, rules A1 to A7)."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final, NamedTuple

from shardyard.domain.ids import Incarnation, PartitionId, Rank, Token, Version

_PACKED: Final = struct.Struct("qqq").pack


@dataclass(frozen=True, slots=True, order=True)
class DataShardSource:
    """A data shard in one epoch of one feed. Its sequence counts its batches."""

    feed: int
    epoch: int
    index: int

    def __hash__(self) -> int:
        """Python's keyed hash of bytes. That of a tuple of numbers has no key, so a worker could name sources that
        collide in a ledger, and each look-up would take as long as there are sources."""
        return hash(_PACKED(self.feed, self.epoch, self.index))

    def __str__(self) -> str:
        return f"data shard {self.feed}.{self.epoch}.{self.index}"


@dataclass(frozen=True, slots=True, order=True)
class RankSource:
    """A logical rank. Its sequence is the step."""

    rank: Rank

    def __str__(self) -> str:
        return f"logical rank {self.rank}"


@dataclass(frozen=True, slots=True, order=True)
class WorkerSource:
    """A worker's incarnation, for work without leased data. Its sequence counts its pushes."""

    incarnation: Incarnation

    def __str__(self) -> str:
        return f"worker {self.incarnation}"


Source = DataShardSource | RankSource | WorkerSource


LeasedSource = DataShardSource | RankSource
"""What the coordinator leases to workers. Each lease has a token."""


ROW_LANE: Final = 1


@dataclass(frozen=True, slots=True)
class SourceKey:
    """The key of an entry in a ledger: a source and a lane (rule A1)."""

    source: Source
    lane: int = 0

    @property
    def of_rows(self) -> SourceKey:
        """The key for the rows of the same work, if they are updated before its step is applied."""
        return SourceKey(self.source, ROW_LANE)


class SourceMark(NamedTuple):
    """An entry of a ledger: the highest token so far, and the next sequence."""

    key: SourceKey
    token: Token
    next: int


@dataclass(frozen=True, slots=True)
class PushName:
    """The name of a push says which work it did. `first == last`, unless gradients were accumulated."""

    key: SourceKey
    token: Token
    first: int
    last: int

    def __str__(self) -> str:
        span = str(self.first) if self.first == self.last else f"{self.first}-{self.last}"
        return f"{self.key.source} #{span}"


NO_NAME: Final = PushName(SourceKey(WorkerSource(Incarnation(0))), Token(0), 0, 0)
"""The name of an exchange that is not a push."""


@dataclass(frozen=True, slots=True)
class Watermark:
    """The progress of a source in one partition: the next sequence that it applies, and the partition's version."""

    partition: PartitionId
    next: int
    version: Version


@dataclass(frozen=True, slots=True)
class DoneDataShards:
    """The closed data shards of a feed: all whose number (epoch * `per_epoch` + index) is below `begun`, without
    `open`."""

    feed: int
    per_epoch: int
    begun: int
    open: frozenset[int] = frozenset()

    def __contains__(self, source: DataShardSource) -> bool:
        number = source.epoch * self.per_epoch + source.index
        return source.feed == self.feed and number < self.begun and number not in self.open


@dataclass(frozen=True, slots=True)
class RankLease:
    """A lease on a logical rank. Steps before `announce_until` are announced to the coordinator before they are
    computed."""

    rank: Rank
    token: Token
    announce_until: int = 0


@dataclass(frozen=True, slots=True)
class DataLease:
    """A lease on the indices [begin, end) of the epoch's permutation. Batches before `announce_until` are announced to
    the coordinator before they are computed."""

    source: DataShardSource
    token: Token
    begin: int
    end: int
    announce_until: int = 0
