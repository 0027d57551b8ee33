"""What the first worker of an asynchronous replica tells the others: the work that they compute next.

Owns: the message as numbers, of one size. Must not know: how it travels, who leases data.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

import torch

from shardyard.domain.ids import Token
from shardyard.domain.push_names import DataLease, DataShardSource, PushName, SourceKey


class Told(enum.IntEnum):
    BATCH = 0
    """A batch is computed now."""
    EMPTY = 1
    """Work does not count: it is pushed empty."""
    ANSWERED = 2
    """All pushes are answered: each worker says that its own are."""
    WAITS = 3
    """There is no data shard to lease for now."""
    ENDS = 4
    """There are no more batches."""


@dataclass(frozen=True)
class WorkMessage:
    """With BATCH and EMPTY: the work's `lease`, and the batches from `first` to `last` that its push names. With BATCH:
    the `samples` of the work so far, and whether it is `due`."""

    told: Told
    lease: DataLease | None = None
    first: int = 0
    last: int = 0
    samples: int = 0
    due: bool = False

    @property
    def name(self) -> PushName:
        assert self.lease is not None
        return PushName(SourceKey(self.lease.source), self.lease.token, self.first, self.last)

    def numbers(self) -> torch.Tensor:
        lease = self.lease or _NO_LEASE
        source = lease.source
        of_lease = source.feed, source.epoch, source.index, lease.token, lease.begin, lease.end, lease.announce_until
        of_work = self.first, self.last, self.samples, int(self.due)
        return torch.tensor([self.told, *of_lease, *of_work], dtype=torch.int64)

    @staticmethod
    def of(numbers: torch.Tensor) -> WorkMessage:
        told, of, epoch, index, token, begin, end, until, first, last, samples, due = numbers.tolist()
        if told not in (Told.BATCH, Told.EMPTY):
            return WorkMessage(Told(told))
        lease = DataLease(DataShardSource(of, epoch, index), Token(token), begin, end, until)
        return WorkMessage(Told(told), lease, first, last, samples, bool(due))


_NO_LEASE: Final = DataLease(DataShardSource(0, 0, 0), Token(0), 0, 0)
NUMBERS: Final = 12
"""Of a message."""
