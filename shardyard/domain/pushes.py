"""The header of a push, and the reply to an exchange."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NamedTuple

from shardyard.domain.consistency import SspReport
from shardyard.domain.ids import Caller, Generation, Incarnation, PartitionId, Rank, Version
from shardyard.domain.limits import ID_BYTES, ROW_COUNT_BYTES
from shardyard.domain.pulls import NotReadyPart, PulledPart, PullHeader, RequestedRows, ShmHandle, ShmLocation
from shardyard.domain.push_names import PushName


class PushKind(enum.Enum):
    GRADIENT = "gradient"
    EMPTY = "empty"
    VALUES = "values"
    NOTHING = "nothing"
    """Not a push: the exchange only pulls, or attaches memory."""


class Outcome(enum.Enum):
    APPLIED = "applied"
    RECORDED = "recorded"
    DUPLICATE = "duplicate"
    DROPPED = "dropped"
    """It came too late: the verdict on the step counts other ranks (backup workers)."""


@dataclass(frozen=True, slots=True)
class PushPart:
    """A push's part for one partition. `code_bytes`: the length of the code of each block that is present, if gradients
    are compressed; otherwise empty."""

    partition: PartitionId
    payload_bytes: int
    absent_blocks: tuple[int, ...] = ()
    code_bytes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PushedRows:
    """The rows of one table in a push. `rows`: their number in each of `partitions`. `counted`: the push also says how
    often each id occurred. `now_ms`: only in a log, the table's clock in each partition, if it has one.

    Packed, without `id_bytes`: all ids (int64), then all counts, then all gradients (float32), whose bytes are the only
    entry of `row_bytes`. Coded: for each partition the code of its ids, its counts, and the code of its gradients;
    `id_bytes` and `row_bytes` are the lengths of the codes."""

    table: int
    partitions: tuple[PartitionId, ...]
    rows: tuple[int, ...]
    id_bytes: tuple[int, ...]
    row_bytes: tuple[int, ...]
    counted: bool = False
    now_ms: tuple[int, ...] = ()

    @property
    def payload_bytes(self) -> int:
        rows = sum(self.rows)
        ids = sum(self.id_bytes) if self.id_bytes else ID_BYTES * rows
        return ids + (ROW_COUNT_BYTES * rows if self.counted else 0) + sum(self.row_bytes)


class GatheredPart(NamedTuple):
    """A partition that has all contributions to a step. `square_norm`: the sum of the squares of its part of the mean
    gradient."""

    partition: PartitionId
    step: int
    square_norm: float


class StepVerdict(NamedTuple):
    """The decision about a synchronous step, before any partition applies it. `square_norm`: the sum over all
    partitions, in the order of their numbers; None if nothing depends on it. `members`: the logical ranks that count,
    ascending; empty if all count."""

    step: int
    square_norm: float | None = None
    members: tuple[Rank, ...] = ()


@dataclass(slots=True)
class PushHeader:
    """The header of a push. The payload follows in frames, or lies at `shared_at` in attached memory."""

    caller: Caller
    server: Incarnation
    generation: Generation
    name: PushName
    kind: PushKind
    parts: tuple[PushPart, ...]
    weight: float
    groups: tuple[tuple[float, ...], ...]
    pull: PullHeader | None = None
    shared_at: int | None = None
    attach: ShmHandle | None = None
    detach: bool = False
    rest: int | None = None
    """How many bytes of the payload follow the header, if others came before it."""
    ssp_report: SspReport | None = None
    bases: tuple[Version, ...] = ()
    """The version that each part was computed on, in the order of the parts; empty: unknown."""
    verdict: StepVerdict | None = None
    overflow: bool = False
    """Loss scaling found an overflow in the gradient."""
    rows: tuple[PushedRows, ...] = ()
    table_groups: tuple[tuple[float, ...], ...] = ()
    """The settings of the optimizer of each table, if there are rows."""
    requested: tuple[RequestedRows, ...] = ()
    """Requested rows: the answer has them after the pulled values. Their ids follow the rows of the push."""
    expired: tuple[RequestedRows, ...] = ()
    """Only in a log: the rows that the server removes with this push. Their ids follow the rows."""
    attach_rows: ShmHandle | None = None
    rows_at: int | None = None
    """Where the rows of the push lie in the memory attached for rows; the ids of requested rows follow them. None: both
    follow the payload."""
    requested_at: int | None = None
    """Where the server puts the requested rows in that memory. None: they follow the values."""

    @property
    def payload_bytes(self) -> int:
        """Bytes of the parts."""
        nbytes = 0
        for part in self.parts:
            nbytes += part.payload_bytes
        return nbytes

    @property
    def rows_bytes(self) -> int:
        """Bytes of the rows, which follow the parts."""
        return sum([each.payload_bytes for each in self.rows])

    @property
    def requested_bytes(self) -> int:
        """Bytes of the ids of requested rows, which follow the rows."""
        return sum([each.nbytes for each in self.requested])

    @property
    def expired_bytes(self) -> int:
        """Bytes of the ids of expired rows, which follow the rows in a log."""
        return sum([each.nbytes for each in self.expired])


class PartResult(NamedTuple):
    """What a partition did with its part of a push."""

    partition: PartitionId
    outcome: Outcome
    next: int
    version: Version


@dataclass(slots=True)
class ExchangeReply:
    """The header of the answer to an exchange, filled in during the exchange. If there are `missing` parts, no payload
    follows. `places`: where the values of each part lie, for a shared pull. `attached`: whether offered memory was
    attached; None: none was offered."""

    parts: tuple[PulledPart, ...] = ()
    missing: tuple[NotReadyPart, ...] = ()
    push: tuple[PartResult, ...] = field(default=())
    attached: bool | None = None
    not_attached: str = ""
    regions: tuple[ShmHandle, ...] = ()
    places: tuple[ShmLocation, ...] = ()
    code_bytes: tuple[int, ...] = ()
    clock: int | None = None
    """For a worker that joins: the number from which it counts its steps."""
    gathered: tuple[GatheredPart, ...] = ()
    rows_attached: bool = False
    """The memory that was offered for rows is attached."""
    rows_not_attached: str = ""
