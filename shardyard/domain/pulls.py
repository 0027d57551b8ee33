"""Requests that read values and rows, and the answers of servers."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

from shardyard.domain.ids import Caller, Generation, Incarnation, PartitionId, Version
from shardyard.domain.limits import ID_BYTES


@dataclass(frozen=True, slots=True)
class RequestedRows:
    """Requested rows of one table. `table`: index into JobLayout.tables. `rows`: the number of rows in each of
    `partitions`. Their ids are packed: int64, one partition after the other."""

    table: int
    partitions: tuple[PartitionId, ...]
    rows: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the ids."""
        return ID_BYTES * sum(self.rows)


class RowCode(enum.StrEnum):
    """How rows of tables are encoded on the way, by the names in settings."""

    FLOAT32 = "float32"
    BF16 = "bf16"
    INT8 = "int8"


@dataclass(frozen=True, slots=True)
class LookupRequest:
    """A look-up at one server. `number`: the version whose rows are requested (synchronous jobs); the server waits for
    it for at most `wait_ms`. None: the newest version. `code`: how rows are encoded. `pin`: the name of a reader's pin,
    if its rows are requested."""

    caller: Caller
    server: Incarnation
    generation: Generation
    requested: tuple[RequestedRows, ...]
    number: int | None = None
    wait_ms: int = 0
    code: RowCode = RowCode.FLOAT32
    pin: bytes = b""


@dataclass(frozen=True, slots=True)
class ShmHandle:
    """Shared memory that another process on this machine may map. `fd`: a descriptor of this process; it travels beside
    the message, and the other process has another number for it. -1: it has not come."""

    nbytes: int
    region: int = 0
    fd: int = -1


class ShmLocation(NamedTuple):
    """A place in shared memory: region and byte."""

    region: int
    at: int


@dataclass(frozen=True, slots=True)
class PullHeader:
    """A pull from one server: the version `number` of each partition. If not `exactly`, a later version will do.

    `coding`: how the values are encoded. `shared`: the answer names places in the server's memory instead of carrying
    values. `order`: variables whose values come first, in this order. `pin`: the name of a reader's pin, if the pinned
    values are requested."""

    caller: Caller
    server: Incarnation
    generation: Generation
    partitions: tuple[PartitionId, ...]
    number: int
    exactly: bool
    wait_ms: int = 0
    coding: str = ""
    shared: bool = False
    order: tuple[int, ...] = ()
    pin: bytes = b""


@dataclass(frozen=True, slots=True)
class PinRequest:
    """A reader asks a server to keep one version of all its partitions for `lease_ms`. `number`: exactly this version
    (synchronous jobs); None: the newest of each partition. `rows`: also keep the rows of tables, for look-ups."""

    caller: Caller
    server: Incarnation
    generation: Generation
    pin: bytes
    number: int | None
    lease_ms: int
    wait_ms: int = 0
    rows: bool = False


class PulledPart(NamedTuple):
    partition: PartitionId
    version: Version


@dataclass(frozen=True, slots=True)
class NotReadyPart:
    """A partition that was not ready in time for a pull, and what it waits for (promise 7)."""

    partition: PartitionId
    have: Version
    want: int
    waiting_for: str
