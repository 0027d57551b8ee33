"""Pushes as their headers describe them, and the reply to an exchange."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NamedTuple

from shardyard.domain.consistency import SspReport
from shardyard.domain.ids import Caller, Generation, Incarnation, PartitionId, Rank, Version
from shardyard.domain.limits import ROW_COUNT_BYTES
from shardyard.domain.pulls import NotReadyPart, PulledPart, PullHeader, RequestedRows, ShmHandle, ShmLocation
from shardyard.domain.push_names import PushName


class PushKind(enum.Enum):
    GRADIENT = "gradient"
    EMPTY = "empty"
    VALUES = "values"
    NOTHING = "nothing"
    """No push: an exchange that only pulls or attaches."""


class Outcome(enum.Enum):
    APPLIED = "applied"
    RECORDED = "recorded"
    DUPLICATE = "duplicate"
    DROPPED = "dropped"
    """It came late: the step's verdict counts others (backup workers)."""


@dataclass(frozen=True, slots=True)
class PushPart:
    """`code_bytes`: length of each present block's code where gradients are compressed; empty where they are not."""

    partition: PartitionId
    payload_bytes: int
    absent_blocks: tuple[int, ...] = ()
    code_bytes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PushedRows:
    """What a push has of one table: as RequestedRows. `row_bytes`: the lengths of the gradients' codes. `counted`: it
    is said how often each id occurred. `now_ms`: as a log has it, the table's clock in each partition, if it has
    one."""

    table: int
    partitions: tuple[PartitionId, ...]
    rows: tuple[int, ...]
    id_bytes: tuple[int, ...]
    row_bytes: tuple[int, ...]
    counted: bool = False
    now_ms: tuple[int, ...] = ()

    @property
    def payload_bytes(self) -> int:
        counts = ROW_COUNT_BYTES * sum(self.rows) if self.counted else 0
        return sum(self.id_bytes) + sum(self.row_bytes) + counts


class GatheredPart(NamedTuple):
    """A partition has all contributions to a step. `square_norm`: the sum of the squares of its part of the mean
    gradient."""

    partition: PartitionId
    step: int
    square_norm: float


class StepVerdict(NamedTuple):
    """What is decided about a synchronous step before any partition takes it. `square_norm`: the sum over all
    partitions, in the order of their numbers; None where nothing depends on it. `members`: the logical ranks that
    count, ascending; empty where all do."""

    step: int
    square_norm: float | None = None
    members: tuple[Rank, ...] = ()


@dataclass(frozen=True, slots=True)
class PushHeader:
    """A push as its header describes it; its payload follows in frames, or lies at `shared_at` in attached memory."""

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
    """Bytes of the payload that follow the header, where others came ahead of it."""
    ssp_report: SspReport | None = None
    bases: tuple[Version, ...] = ()
    """What each part was computed on, in the order of the parts; empty: it is not said."""
    verdict: StepVerdict | None = None
    overflow: bool = False
    """Loss scaling has found that the gradient is beyond its format."""
    rows: tuple[PushedRows, ...] = ()
    table_groups: tuple[tuple[float, ...], ...] = ()
    """The settings of each table's optimizer, where there are rows."""
    wanted: tuple[RequestedRows, ...] = ()
    """Rows that the answer shall have after what is pulled; the codes of their ids follow the rows of the push."""
    expired: tuple[RequestedRows, ...] = ()
    """In a log alone: what a server has decided to take out with it; the codes follow the rows, too."""
    attach_rows: ShmHandle | None = None
    rows_at: int | None = None
    """Where in the memory attached for rows those of the push lie, and the ids of those wanted after them; None: they
    follow the payload."""
    wanted_at: int | None = None
    """Where in that memory the rows wanted shall be put; None: they follow the values."""

    @property
    def payload_bytes(self) -> int:
        """Of the parts."""
        return sum([part.payload_bytes for part in self.parts])

    @property
    def rows_bytes(self) -> int:
        """Of what follows them."""
        return sum([each.payload_bytes for each in self.rows])

    @property
    def wanted_bytes(self) -> int:
        """Of the ids that follow those."""
        return sum([sum(each.id_bytes) for each in self.wanted])

    @property
    def expired_bytes(self) -> int:
        """Of the ids that follow the rows in a log."""
        return sum([sum(each.id_bytes) for each in self.expired])

    def renamed(
        self,
        name: PushName,
        bases: tuple[Version, ...] = (),
        rows: tuple[PushedRows, ...] | None = None,
        wanted: tuple[RequestedRows, ...] | None = None,
    ) -> PushHeader:
        """The same of other work; with these rows, where they are given."""
        return PushHeader(
            self.caller,
            self.server,
            self.generation,
            name,
            self.kind,
            self.parts,
            self.weight,
            self.groups,
            self.pull,
            self.shared_at,
            self.attach,
            self.detach,
            self.rest,
            self.ssp_report,
            bases,
            self.verdict,
            self.overflow,
            self.rows if rows is None else rows,
            self.table_groups,
            self.wanted if wanted is None else wanted,
            self.expired,
            self.attach_rows,
            self.rows_at,
            self.wanted_at,
        )


@dataclass(frozen=True, slots=True)
class PartResult:
    """What became of one partition's part of a push."""

    partition: PartitionId
    outcome: Outcome
    next: int
    version: Version


@dataclass(slots=True)
class ExchangeReply:
    """The head of an exchange's answer, filled in while the exchange goes on. With `missing` set no payload follows.
    `places`: where the values of each part lie, for a shared pull. `attached` None: nothing was offered."""

    parts: tuple[PulledPart, ...] = ()
    missing: tuple[NotReadyPart, ...] = ()
    push: tuple[PartResult, ...] = field(default=())
    attached: bool | None = None
    not_attached: str = ""
    regions: tuple[ShmHandle, ...] = ()
    places: tuple[ShmLocation, ...] = ()
    code_bytes: tuple[int, ...] = ()
    clock: int | None = None
    """To a worker that joins: from here on it counts its steps."""
    gathered: tuple[GatheredPart, ...] = ()
    rows_attached: bool = False
    """Memory that was offered for rows is open."""
    rows_not_attached: str = ""
