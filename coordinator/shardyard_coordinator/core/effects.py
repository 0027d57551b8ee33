"""What the machine wants done, one frozen value per effect, and its answers to requests.

Invariant: among the effects of one event, all `Persist` come first. The effects of a request have exactly one `Reply`.
There are two exceptions. With `CreatePartitions` or `OpenPartitions`, the caller asks again once these are done. With
`ReadLedger`, `ReadWatermarks` or `SkipLostPushes`, the reply comes with the event that follows them, or with a later
one. Must not know: how an effect is carried out.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from shardyard.config.settings import JobSettings
from shardyard.domain.consistency import Consistency, Stop, SwitchPoint, UpdateMode
from shardyard.domain.errors import ShardyardError
from shardyard.domain.ids import Generation, Incarnation, JobId, PartitionId, Rank, Token
from shardyard.domain.layout.layouts import JobLayout, PartitionMap
from shardyard.domain.push_names import DataShardSource, DoneDataShards, LeasedSource, RankLease, SourceKey
from shardyard.domain.replica_groups import ReplicaGroup
from shardyard_coordinator.placement.placement import Server
from shardyard_coordinator.records import Entry
from shardyard_coordinator.storage.checkpoint_book import Committed, Draft
from shardyard_coordinator.storage.checkpoint_residuals import NEVER, CheckpointResidual
from shardyard_coordinator.work.losses import LostRange
from shardyard_coordinator.work.straggler_verdicts import MissedBatch


class JobPhase(enum.Enum):
    """STARTING waits for variables and first values. FINISHING has no workers left and waits for its last checkpoint.
    FINISHED and FAILED are final."""

    STARTING = "starting"
    RUNNING = "running"
    FINISHING = "finishing"
    FINISHED = "finished"
    FAILED = "failed"

    @property
    def ended(self) -> bool:
        return self in (JobPhase.FINISHED, JobPhase.FAILED)


# ---- effects


class Effect:
    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Persist(Effect):
    """Write a record to the journal. `body` holds only JSON types."""

    kind: str
    body: Mapping[str, object]


def records_of(job: JobId, entries: Iterable[Entry]) -> list[Persist]:
    return [Persist(kind, {"job": job, **body}) for kind, body in entries]


@dataclass(frozen=True, slots=True)
class LogMessage(Effect):
    """Write a message to the log."""

    text: str
    warning: bool = False


@dataclass(frozen=True, slots=True)
class JobSpec:
    """What servers and checkpoints are told about a job. `switches`: the number of the job's latest mode switch."""

    job: JobId
    settings: JobSettings
    layout: JobLayout
    switches: int = 0

    @property
    def mode(self) -> UpdateMode:
        return self.settings.consistency.mode.updates

    def folder(self, url: str) -> str:
        """The folder of the job's checkpoints below `url`."""
        return f"{url.rstrip('/')}/{self.settings.name}"


@dataclass(frozen=True, slots=True)
class CreatePartitions(Effect):
    """Followed by PartitionsCreated once all servers of the job have answered, or by NotAnswered."""

    spec: JobSpec
    server: Server
    generation: Generation
    partitions: tuple[PartitionId, ...]


@dataclass(frozen=True, slots=True)
class OpenPartitions(Effect):
    """Followed by PartitionsOpened once all servers of the job have answered, or by NotAnswered."""

    job: JobId
    server: Server
    generation: Generation


@dataclass(frozen=True, slots=True)
class FenceOnServers(Effect):
    """Followed by WorkersFenced, whichever servers answered. `map`: the partitions whose ledgers have what the workers
    held; None if these are not read."""

    job: JobId
    servers: tuple[Server, ...]
    workers: tuple[Incarnation, ...]
    held: tuple[LeasedSource, ...] = ()
    map: PartitionMap | None = None


@dataclass(frozen=True, slots=True)
class MapEffect(Effect):
    """A call to all servers of a job's map."""

    job: JobId
    map: PartitionMap


@dataclass(frozen=True, slots=True)
class ReadLedger(MapEffect):
    """Followed by LedgerRead if all servers answered."""

    sources: tuple[SourceKey, ...]


@dataclass(frozen=True, slots=True)
class ReadWatermarks(MapEffect):
    """Followed by WatermarksRead if all servers answered."""

    worker: Incarnation


@dataclass(frozen=True, slots=True)
class ReadDeparted(MapEffect):
    """Followed by DepartedRead or NotAnswered. `workers`: departed workers."""

    workers: tuple[Incarnation, ...]


@dataclass(frozen=True, slots=True)
class ReadSteps(MapEffect):
    """Followed by StepsRead or NotAnswered. `sources`: all logical ranks of a job that stops or changes its mode.
    `versions`: read the highest version of any partition instead of a step."""

    sources: tuple[SourceKey, ...]
    versions: bool = False


@dataclass(frozen=True, slots=True)
class PaceServers(MapEffect):
    """Followed by ServersPaced once all servers of the map have answered, or by NotAnswered. `consistency`: the mode
    and the bound that the servers follow from now on."""

    consistency: Consistency


@dataclass(frozen=True, slots=True)
class SkipLostPushes(MapEffect):
    """Followed by LostPushesSkipped if all servers answered."""

    worker: Incarnation
    next: int
    lost: tuple[LostRange, ...]


@dataclass(frozen=True, slots=True)
class TakeCheckpoint(Effect):
    """Followed by CheckpointTaken or CheckpointFailed. `base`: the number of the newest committed checkpoint, 0 if
    there is none; `trusted`: as in `Base`. With logs, `oldest` is the oldest checkpoint that may be restored, and
    `logs` are the servers whose logs it needs. `keepers`: the workers with error feedback."""

    spec: JobSpec
    map: PartitionMap
    draft: Draft
    url: str
    base: int
    keep: int
    oldest: int = 0
    logs: frozenset[Incarnation] = frozenset()
    keepers: tuple[Incarnation, ...] = ()
    trusted: str = ""


@dataclass(frozen=True, slots=True)
class Base:
    """A checkpoint, and for each partition the servers whose logs have what came after it. `trusted`: the digest of its
    manifest, if it counts without the yard's signature."""

    number: int
    logs: Mapping[PartitionId, tuple[Incarnation, ...]] = field(default_factory=dict)
    trusted: str = ""


@dataclass(frozen=True, slots=True)
class ForgetSources(MapEffect):
    """No event follows. A server that was not reached forgets the sources after the next checkpoint."""

    done: tuple[DoneDataShards, ...]
    workers: tuple[Incarnation, ...]
    floor: Token


@dataclass(frozen=True, slots=True)
class RestorePartitions(Effect):
    """Servers read these partitions from a checkpoint, under a new map. Followed by PartitionsRestored or
    RestoreFailed. `bases`: the checkpoint, and older ones that lead to the same state with longer logs. `life`: of the
    versions that follow. `leasing`: the workers that hold a lease; only for these a bounded worker waits. The last two
    are for a checkpoint that was written before the job changed its kind of updates. `begun_in_steps`: the data shards
    of which steps have counted some batches, with the number of the next batch. `first_step`: the step that all logical
    ranks compute next; 0 if the job had steps before."""

    spec: JobSpec
    map: PartitionMap
    url: str
    bases: tuple[Base, ...]
    life: int
    partitions: frozenset[PartitionId]
    leasing: tuple[Incarnation, ...] = ()
    begun_in_steps: tuple[tuple[DataShardSource, int], ...] = ()
    first_step: int = 0


@dataclass(frozen=True, slots=True)
class DropJob(Effect):
    job: JobId
    server: Server


@dataclass(frozen=True, slots=True)
class ForgetServer(Effect):
    """The server left or died. Close the connections to it."""

    server: Incarnation


# ---- answers


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """The request was carried out. There is nothing more to report."""


@dataclass(frozen=True, slots=True)
class PublishedAnswer:
    """`waits`: members take no step before the partitions are cut for a checkpoint; the worker asks again."""

    waits: bool


@dataclass(frozen=True, slots=True)
class ReplicaGroupAnswer:
    """`group`: the newest, if the worker is in it; None: the worker waits for the next one, and `waiting_for` says what
    that waits for."""

    group: ReplicaGroup | None
    waiting_for: str = ""


@dataclass(frozen=True, slots=True)
class Left:
    """A member has left. `residual_lost`: whether a worker's residual counts as lost."""

    residual_lost: bool = False


@dataclass(frozen=True, slots=True)
class Registered:
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class Draining:
    """A member leaves in order. `left_ms`: the time that is left; `empty`: it is a server without partitions of
    unfinished jobs."""

    left_ms: int
    empty: bool = False


@dataclass(frozen=True, slots=True)
class DrainTaken:
    """`title`: how messages name the member. `first`: this request began the drain.
    `empty`: as in Draining."""

    member: Incarnation
    title: str
    left_ms: int
    first: bool
    empty: bool = False


@dataclass(frozen=True, slots=True)
class HeartbeatReply:
    """The answer to a heartbeat. `job_state` is None for a member without a job. `feedback`: the residuals that the
    worker takes over. `restored_generation`: the generation with which the whole job last went back to a checkpoint.
    `checkpoint`: the newest one. `world_size`: as in Joined. `consistency`: set for a job that was switched.
    `switch_point`: set while the job changes between synchronous and asynchronous updates. `replica_generation`: the
    worker leaves replica groups of a lower generation. `publish`: replicas give the servers their state.
    `lost_replica_generation`: the newest group, if it lacks a member."""

    job_state: JobPhase | None = None
    failure: ShardyardError | None = None
    generation: Generation | None = None
    ranks: tuple[RankLease, ...] = ()
    chief: bool = False
    workers: int = 0
    world_size: int = 1
    fenced: tuple[Incarnation, ...] = ()
    initializer: bool = False
    recovering: bool = False
    feedback: tuple[CheckpointResidual, ...] = ()
    restored_generation: Generation = NEVER
    stop: Stop | None = None
    checkpoint: Committed | None = None
    consistency: Consistency | None = None
    switch_point: SwitchPoint | None = None
    drain: Draining | None = None
    replica_generation: int = 0
    publish: bool = False
    lost_replica_generation: int = 0


@dataclass(frozen=True, slots=True)
class Joined:
    """`number`: the worker's number among the job's living workers. `world_size`: above all those numbers, and at least
    the number of workers expected."""

    job: JobId
    settings: JobSettings
    started: bool
    ranks: tuple[RankLease, ...]
    logical_ranks: int
    chief: bool
    number: int = 0
    world_size: int = 1
    stop: Stop | None = None
    checkpoint: Committed | None = None
    consistency: Consistency | None = None
    switch_point: SwitchPoint | None = None


@dataclass(frozen=True, slots=True)
class VariablesPlaced:
    """Where a job's variables are. `initializer`: the asking worker sends the first values. `feedback`,
    `restored_generation`: as in HeartbeatReply. `consistency`: the mode of the partitions, if the job was switched."""

    layout: JobLayout
    map: PartitionMap
    initializer: bool
    feedback: tuple[CheckpointResidual, ...] = ()
    restored_generation: Generation = NEVER
    consistency: Consistency | None = None


@dataclass(frozen=True, slots=True)
class LeaseClosed:
    done: bool


@dataclass(frozen=True, slots=True)
class BatchVerdict:
    """Whether an announced batch is to be computed; None: not decided yet. `announce_until`: the worker announces this
    source's batches with lower sequences."""

    counts: bool | None
    announce_until: int


@dataclass(frozen=True, slots=True)
class NotFiniteVerdict:
    """`decided`: the work is pushed empty, unless `failure` says why the worker is excluded."""

    decided: bool
    failure: ShardyardError | None = None


@dataclass(frozen=True, slots=True)
class Rebased:
    """Where the worker's own source continues, and what it lost."""

    lost: tuple[LostRange, ...]


@dataclass(frozen=True, slots=True)
class FeedbackVerdict:
    """Whether the worker takes over the residual that it has read."""

    taken: bool


@dataclass(frozen=True, slots=True)
class CheckpointProgress:
    """The state of a requested checkpoint: `taken`, `failure`, or neither yet."""

    job_name: str
    ticket: int
    url: str
    taken: Committed | None = None
    failure: ShardyardError | None = None


@dataclass(frozen=True, slots=True)
class StepDecision:
    """Which ranks count in a step. None: not decided yet. Empty: not known any more. `left_ms`: how long a late worker
    should wait for the version that follows the step (StepTimes). `again_ms`: while others are waited for, how soon the
    step is decided."""

    members: tuple[Rank, ...] | None
    left_ms: int = 0
    again_ms: int = 0


@dataclass(frozen=True, slots=True)
class MakeupBatches:
    """What each rank makes up for at a step, if anything. `end`: the step after the feed's last, if that is known."""

    batches: Mapping[Rank, MissedBatch]
    end: int | None


@dataclass(frozen=True, slots=True)
class StopTaken:
    """The stop that is in force. `first`: this request caused it."""

    job: JobId
    job_name: str
    stop: Stop
    first: bool


@dataclass(frozen=True, slots=True)
class SwitchTaken:
    """What the job changes to, or already follows. `first`: this request caused the change."""

    job: JobId
    job_name: str
    consistency: Consistency
    first: bool


@dataclass(frozen=True, slots=True)
class JobView:
    """The state of a job, for its readers. `map`: None if there are no values to read, yet or any more. `url`: of its
    checkpoints, None if it has none."""

    job: JobId
    job_name: str
    state: JobPhase
    failure: ShardyardError | None
    mode: UpdateMode
    map: PartitionMap | None
    layout: JobLayout | None
    url: str | None


@dataclass(frozen=True, slots=True)
class RestorePlanned:
    """`running`: the job goes back now. Otherwise the next run begins with the checkpoint."""

    running: bool


@dataclass(frozen=True, slots=True)
class Reply(Effect):
    """The answer to the request of the event: one of the answers above, or FeedOpening, DataLease, LeaseWait, FeedDone
    of other modules."""

    answer: object
