"""The domain's values: ids, names of work, layouts.

Owns: the words of docs/architecture.md as types. Invariants: all are immutable and hashable where they are keys.
Must not know: protobuf, sockets, torch.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple, NewType

from shardyard.ground.limits import BLOCK_ALIGN_BYTES, ROW_COUNT_BYTES

if TYPE_CHECKING:
    from shardyard.ground.table_settings import TableSettings


class _TermedNumber(int):
    """A number that a coordinator gave in one of its terms: term << 32 | n, shown as "term.n"."""

    __slots__ = ()

    def __str__(self) -> str:
        return f"{self >> 32}.{self & 0xFFFFFFFF}" if self >> 32 else f"{self & 0xFFFFFFFF}"

    def __repr__(self) -> str:
        return str(self)


class JobId(_TermedNumber):
    """A training run; unique over the coordinator's terms."""

    __slots__ = ()


class Incarnation(_TermedNumber):
    """A member's registration; unique over the coordinator's terms. The fence."""

    __slots__ = ()


Generation = NewType("Generation", int)
Term = NewType("Term", int)
Token = NewType("Token", int)
PartitionId = NewType("PartitionId", int)
Rank = NewType("Rank", int)


class DType(enum.Enum):
    """Element types that a variable may have. The value is numpy's (and torch's) name."""

    FLOAT32 = "float32"
    FLOAT64 = "float64"
    INT64 = "int64"
    INT32 = "int32"
    UINT8 = "uint8"
    BOOL = "bool"

    @property
    def item_bytes(self) -> int:
        return _ITEM_BYTES[self]

    @property
    def is_floating(self) -> bool:
        return self in (DType.FLOAT32, DType.FLOAT64)


_ITEM_BYTES = {
    DType.FLOAT32: 4,
    DType.FLOAT64: 8,
    DType.INT64: 8,
    DType.INT32: 4,
    DType.UINT8: 1,
    DType.BOOL: 1,
}


class VariableKind(enum.Enum):
    PARAMETER = "parameter"
    BUFFER = "buffer"


class UpdateMode(enum.Enum):
    """How servers take pushes: as contributions to a step, or each as it comes."""

    SYNC = "sync"
    ASYNC = "async"


class ConsistencyMode(enum.Enum):
    """What a gradient may be computed on (docs/consistency.md)."""

    SYNC = "sync"
    LOCAL = "local"
    HYBRID = "hybrid"
    BOUNDED = "bounded"
    ASYNC = "async"

    @property
    def updates(self) -> UpdateMode:
        """Of variables."""
        asynchronous = self in (ConsistencyMode.BOUNDED, ConsistencyMode.ASYNC)
        return UpdateMode.ASYNC if asynchronous else UpdateMode.SYNC


class Durability(enum.Enum):
    """What outlives a server (docs/reliability.md)."""

    CHECKPOINT = "checkpoint"
    """Its partitions go back to the newest checkpoint; what was acknowledged since is computed again, or told as
    lost."""
    WAL = "wal"
    """What was acknowledged is in its log, from which its partitions come back as they were."""


class BufferMode(enum.Enum):
    """Whose buffers a synchronous step sets (docs/training.md)."""

    MEAN = "mean"
    FIRST = "first"
    """Those of logical rank 0."""


class NonFinite(enum.Enum):
    """What becomes of work whose gradient is not finite (docs/training.md)."""

    ALLOW = "allow"
    SKIP = "skip"
    """It does not count, and is listed."""
    FAIL = "fail"
    """The job ends."""


class MemberRole(enum.Enum):
    SERVER = "server"
    WORKER = "worker"
    AGENT = "agent"


@dataclass(frozen=True, slots=True, order=True)
class DataShardSource:
    """A data shard of one epoch of one feed; its sequence counts its batches."""

    feed: int
    epoch: int
    index: int

    def __str__(self) -> str:
        return f"data shard {self.feed}.{self.epoch}.{self.index}"


@dataclass(frozen=True, slots=True, order=True)
class RankSource:
    """A logical rank; its sequence is the step."""

    rank: Rank

    def __str__(self) -> str:
        return f"logical rank {self.rank}"


@dataclass(frozen=True, slots=True, order=True)
class WorkerSource:
    """A worker's incarnation, for work without leased data; its sequence counts its pushes."""

    incarnation: Incarnation

    def __str__(self) -> str:
        return f"worker {self.incarnation}"


Source = DataShardSource | RankSource | WorkerSource
LeasedSource = DataShardSource | RankSource
"""What the coordinator gives to workers; each has a token."""


LANE_OF_ROWS: Final = 1


@dataclass(frozen=True, slots=True)
class SourceKey:
    """Key of a ledger: a source and a lane (rule A1)."""

    source: Source
    lane: int = 0

    @property
    def of_rows(self) -> SourceKey:
        """Of the rows of the same work, where they are updated before its step is taken."""
        return SourceKey(self.source, LANE_OF_ROWS)


class SourceMark(NamedTuple):
    """An entry of a ledger: the highest token seen, and the next sequence."""

    key: SourceKey
    token: Token
    next: int


@dataclass(frozen=True, slots=True)
class PushName:
    """The name of a push: the work that it did. `first == last` unless gradients were accumulated."""

    key: SourceKey
    token: Token
    first: int
    last: int

    def __str__(self) -> str:
        span = str(self.first) if self.first == self.last else f"{self.first}-{self.last}"
        return f"{self.key.source} #{span}"


NO_NAME: Final = PushName(SourceKey(WorkerSource(Incarnation(0))), Token(0), 0, 0)
"""Of an exchange that is no push."""


@dataclass(frozen=True, slots=True, order=True)
class Version:
    """(life, number of updates applied); each restore raises the life (rule A10)."""

    life: int
    number: int


@dataclass(frozen=True, slots=True)
class StaleRule:
    """What becomes of a gradient that was computed on an older version (docs/consistency.md). `divides_rate`: the rate
    of its update is divided by its staleness; `compensation`: DC-ASGD's lambda, 0 for none; `decay`: of the mean of
    squares by the root of which lambda is divided, 0 for a constant lambda."""

    divides_rate: bool = False
    compensation: float = 0.0
    decay: float = 0.0


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
class VariableSpec:
    """A dense tensor. `group` is the index of its parameter group, 0 for buffers."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    kind: VariableKind = VariableKind.PARAMETER
    group: int = 0

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def payload_bytes(self) -> int:
        return self.elements * self.dtype.item_bytes


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """`kind` is a key of `shardyard.ground.optimizers.KINDS`; each group has one value per setting of the kind."""

    kind: str
    groups: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class Block:
    """Elements [offset, offset + length) of a variable, at byte `position` of its partition's payload."""

    variable: int
    offset: int
    length: int
    position: int


@dataclass(frozen=True, slots=True)
class PartitionLayout:
    partition: PartitionId
    payload_bytes: int
    blocks: tuple[Block, ...]


def aligned_bytes(nbytes: int) -> int:
    """`nbytes` rounded up to a multiple of BLOCK_ALIGN_BYTES: the room that a block takes in a payload."""
    return -(-nbytes // BLOCK_ALIGN_BYTES) * BLOCK_ALIGN_BYTES


@dataclass(frozen=True, slots=True)
class JobLayout:
    """Everything a server or worker must know to cut variables into partitions' payloads."""

    variables: tuple[VariableSpec, ...]
    optimizer: OptimizerSpec
    partitions: tuple[PartitionLayout, ...]
    tables: tuple[TableSettings, ...] = ()
    """Each partition has, of each table, the ids that are its own (shardyard.ground.row_ids.partition_of)."""


@dataclass(frozen=True, slots=True)
class PartitionOwner:
    partition: PartitionId
    server: Incarnation
    address: str


@dataclass(frozen=True, slots=True)
class PartitionMap:
    """Who owns which partition; `owners[i].partition == i`."""

    generation: Generation
    owners: tuple[PartitionOwner, ...]

    def by_server(self) -> dict[Incarnation, tuple[PartitionOwner, ...]]:
        found: dict[Incarnation, list[PartitionOwner]] = {}
        for owner in self.owners:
            found.setdefault(owner.server, []).append(owner)
        return {server: tuple(owners) for server, owners in sorted(found.items())}


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sends a request that changes state."""

    job: JobId = JobId(0)
    incarnation: Incarnation = Incarnation(0)
    term: Term = Term(0)


@dataclass(frozen=True, slots=True)
class Watermark:
    """Where a source stands in one partition: the next sequence it will apply, and the partition's version."""

    partition: PartitionId
    next: int
    version: Version


@dataclass(frozen=True, slots=True)
class DoneDataShards:
    """Data shards of a feed that are closed: of those with a number (epoch * `per_epoch` + index) below `begun` all but
    `open`."""

    feed: int
    per_epoch: int
    begun: int
    open: frozenset[int] = frozenset()

    def __contains__(self, source: DataShardSource) -> bool:
        number = source.epoch * self.per_epoch + source.index
        return source.feed == self.feed and number < self.begun and number not in self.open


@dataclass(frozen=True, slots=True)
class Consistency:
    """How a job's workers wait for each other. `number` counts the job's switches, 0: as it was started; `bound`: on
    staleness, in bounded mode."""

    number: int
    mode: ConsistencyMode
    bound: int | None = None

    def __str__(self) -> str:
        return self.mode.value if self.bound is None else f"{self.mode.value}, {self.bound} steps"


@dataclass(frozen=True, slots=True)
class Stop:
    """A job ends before its data does. `worker`: who said so; None: a person. Of a synchronous job the steps before
    `step` are computed, and no others, once that is `settled`; an asynchronous one has no such step."""

    reason: str
    worker: Incarnation | None = None
    settled: bool = False
    step: int = 0


@dataclass(frozen=True, slots=True)
class Halt:
    """A synchronous job goes over to another mode before step `step`, once that is `settled`: workers compute the steps
    before it, and begin none from it on. `number` counts the halts of a job. `drains`: an asynchronous job goes over to
    steps, of which `step` is the first: data shards that were begun are done, and nothing else is pushed."""

    number: int
    settled: bool = False
    step: int = 0
    drains: bool = False


@dataclass(frozen=True, slots=True)
class RankLease:
    """`careful_below`: steps before it are announced to the coordinator before they are computed."""

    rank: Rank
    token: Token
    careful_below: int = 0


@dataclass(frozen=True, slots=True)
class DataLease:
    """Indices [begin, end) of the epoch's permutation, under a token. `careful_below`: batches before it are announced
    to the coordinator before they are computed."""

    source: DataShardSource
    token: Token
    begin: int
    end: int
    careful_below: int = 0


@dataclass(frozen=True, slots=True)
class PushPart:
    """`code_bytes`: length of each present block's code where gradients are compressed; empty where they are not."""

    partition: PartitionId
    payload_bytes: int
    absent_blocks: tuple[int, ...] = ()
    code_bytes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class WantedRows:
    """Rows of one table that are asked for. `table`: index into JobLayout.tables; `rows`: for each of `partitions` how
    many; `id_bytes`: the lengths of their ids' codes."""

    table: int
    partitions: tuple[PartitionId, ...]
    rows: tuple[int, ...]
    id_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PushedRows:
    """What a push has of one table: as WantedRows. `row_bytes`: the lengths of the gradients' codes. `counted`: it is
    said how often each id occurred. `now_ms`: as a log has it, the table's clock in each partition, if it has one."""

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


class RowCode(enum.StrEnum):
    """How rows of tables travel, as settings write it."""

    FLOAT32 = "float32"
    BF16 = "bf16"
    INT8 = "int8"


@dataclass(frozen=True, slots=True)
class LookUp:
    """What is asked of one server. `number`: in a synchronous job, the version of which rows are wanted, for at most
    `wait_ms`; None: the newest. `code`: how the rows shall come. `pin`: those that a reader's pin of
    that name holds."""

    caller: Caller
    server: Incarnation
    generation: Generation
    wanted: tuple[WantedRows, ...]
    number: int | None = None
    wait_ms: int = 0
    code: RowCode = RowCode.FLOAT32
    pin: bytes = b""


@dataclass(frozen=True, slots=True)
class Ticket:
    """What another process on this machine must know to open shared memory."""

    pid: int
    fd: int
    nbytes: int
    nonce: bytes
    region: int = 0


class Place(NamedTuple):
    """Where bytes lie in shared memory."""

    region: int
    at: int


@dataclass(frozen=True, slots=True)
class PullWish:
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
class PinWish:
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


class Stride(enum.Enum):
    """What a worker of a job with bounded staleness says of itself."""

    JOINS = "joins"
    """It begins to take steps, beside the slowest of the others."""
    STEPS = "steps"
    RESTS = "rests"
    """It takes no steps for now: nobody waits for it."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How far a worker is. `turn`: how often it has joined before; `clock`: the steps that it has taken, the push of
    this exchange included. `ahead`: so many steps later the values are used that it asks for, or rows that it keeps."""

    stride: Stride
    turn: int = 0
    clock: int = 0
    ahead: int = 0


@dataclass(frozen=True, slots=True)
class Clipping:
    """How a gradient is clipped: first each element to [-value, value], then all of it to the 2-norm `norm`. 0: not at
    all."""

    norm: float = 0.0
    value: float = 0.0


NO_CLIPPING: Final = Clipping()


class Gathered(NamedTuple):
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
class PushOrder:
    """A push as its header describes it; its payload follows in frames, or lies at `shared_at` in attached memory."""

    caller: Caller
    server: Incarnation
    generation: Generation
    name: PushName
    kind: PushKind
    parts: tuple[PushPart, ...]
    weight: float
    groups: tuple[tuple[float, ...], ...]
    pull: PullWish | None = None
    shared_at: int | None = None
    attach: Ticket | None = None
    detach: bool = False
    rest: int | None = None
    """Bytes of the payload that follow the header, where others came ahead of it."""
    pace: Pace | None = None
    bases: tuple[Version, ...] = ()
    """What each part was computed on, in the order of the parts; empty: it is not said."""
    verdict: StepVerdict | None = None
    overflow: bool = False
    """Loss scaling has found that the gradient is beyond its format."""
    rows: tuple[PushedRows, ...] = ()
    table_groups: tuple[tuple[float, ...], ...] = ()
    """The settings of each table's optimizer, where there are rows."""
    wanted: tuple[WantedRows, ...] = ()
    """Rows that the answer shall have after what is pulled; the codes of their ids follow the rows of the push."""
    expired: tuple[WantedRows, ...] = ()
    """In a log alone: what a server has decided to take out with it; the codes follow the rows, too."""
    attach_rows: Ticket | None = None
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
        wanted: tuple[WantedRows, ...] | None = None,
    ) -> PushOrder:
        """The same of other work; with these rows, where they are given."""
        return PushOrder(
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
            self.pace,
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


@dataclass(frozen=True, slots=True)
class PulledPart:
    partition: PartitionId
    version: Version


@dataclass(frozen=True, slots=True)
class Missing:
    """A part of a pull that was not there in time, and what it waits for (promise 7)."""

    partition: PartitionId
    have: Version
    want: int
    waiting_for: str


@dataclass(frozen=True, slots=True)
class PullResult:
    """The head of an exchange's answer. With `missing` set no payload follows. `places`: where the values of each part
    lie, for a shared pull. `attached` None: nothing was offered."""

    parts: tuple[PulledPart, ...] = ()
    missing: tuple[Missing, ...] = ()
    push: tuple[PartResult, ...] = field(default=())
    attached: bool | None = None
    not_attached: str = ""
    regions: tuple[Ticket, ...] = ()
    places: tuple[Place, ...] = ()
    code_bytes: tuple[int, ...] = ()
    clock: int | None = None
    """To a worker that joins: from here on it counts its steps."""
    gathered: tuple[Gathered, ...] = ()
    rows_attached: bool = False
    """Memory that was offered for rows is open."""
    rows_not_attached: str = ""
