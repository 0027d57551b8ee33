"""Requests that read values and rows, and what a server answers."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

from shardyard.domain.ids import Caller, Generation, Incarnation, PartitionId, Version


@dataclass(frozen=True, slots=True)
class RequestedRows:
    """Rows of one table that are asked for. `table`: index into JobLayout.tables; `rows`: for each of `partitions` how
    many; `id_bytes`: the lengths of their ids' codes."""

    table: int
    partitions: tuple[PartitionId, ...]
    rows: tuple[int, ...]
    id_bytes: tuple[int, ...]


class RowCode(enum.StrEnum):
    """How rows of tables travel, as settings write it."""

    FLOAT32 = "float32"
    BF16 = "bf16"
    INT8 = "int8"


@dataclass(frozen=True, slots=True)
class LookupRequest:
    """What is asked of one server. `number`: in a synchronous job, the version of which rows are wanted, for at most
    `wait_ms`; None: the newest. `code`: how the rows shall come. `pin`: those that a reader's pin of
    that name holds."""

    caller: Caller
    server: Incarnation
    generation: Generation
    wanted: tuple[RequestedRows, ...]
    number: int | None = None
    wait_ms: int = 0
    code: RowCode = RowCode.FLOAT32
    pin: bytes = b""


@dataclass(frozen=True, slots=True)
class ShmHandle:
    """What another process on this machine must know to open shared memory."""

    pid: int
    fd: int
    nbytes: int
    nonce: bytes
    region: int = 0


class ShmLocation(NamedTuple):
    """Where bytes lie in shared memory."""

    region: int
    at: int


@dataclass(frozen=True, slots=True)
class PullHeader:
    """What a pull asks of one server: the version `number` of each partition, or with `exactly` False that or a later
    one. `coding`: how the values shall be coded; `shared`: places in the server's memory instead of bytes; `order`:
    variables whose values shall come first, in this order; `pin`: what a reader's pin of that name holds."""

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
    """What a reader asks of one server: that a version of all its partitions stays for `lease_ms`; `number`: exactly
    that version (sync), None: the newest of each; `rows`: those of tables too, to be
    looked up."""

    caller: Caller
    server: Incarnation
    generation: Generation
    pin: bytes
    number: int | None
    lease_ms: int
    wait_ms: int = 0
    rows: bool = False


@dataclass(frozen=True, slots=True)
class PulledPart:
    partition: PartitionId
    version: Version


@dataclass(frozen=True, slots=True)
class NotReadyPart:
    """A part of a pull that was not there in time, and what it waits for (promise 7)."""

    partition: PartitionId
    have: Version
    want: int
    waiting_for: str
