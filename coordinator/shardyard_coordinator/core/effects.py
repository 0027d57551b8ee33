"""What the machine wants done: one frozen value per effect, imperative; and its answers to requests.

Invariant: of the effects of one event, all `Persist` come first. A request's effects have exactly one `Reply`, unless
they have `CreatePartitions` or `OpenPartitions` (ask again once these are done), or `ReadLedger`, `ReadWatermarks` or
`SkipLostPushes` (what these bring brings the reply, or the next of them). Must not know: how an effect is carried out.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from shardyard.config.settings import JobSettings
from shardyard.domain.consistency import (
    NO_CLIPPING,
    Clipping,
    Consistency,
    Durability,
    StaleRule,
    Stop,
    SwitchPoint,
    UpdateMode,
)
from shardyard.domain.errors import ShardyardError
from shardyard.domain.ids import Generation, Incarnation, JobId, PartitionId, Rank, Token
from shardyard.domain.layout.layouts import JobLayout, PartitionMap
from shardyard.domain.push_names import DataLease, DataShardSource, DoneDataShards, LeasedSource, RankLease, SourceKey
from shardyard_coordinator.placement.placement import Server
from shardyard_coordinator.records import Entry
from shardyard_coordinator.storage.checkpoint_book import Committed, Draft, Subject
from shardyard_coordinator.storage.restored_residuals import NEVER, RestoredResidual
from shardyard_coordinator.work.feeds import FeedDone, FeedOpening, LeaseWait
from shardyard_coordinator.work.losses import LostRange
from shardyard_coordinator.work.straggler_verdicts import MissedBatch


class JobPhase(enum.Enum):
    """STARTING waits for variables and first values; FINISHING has no worker any more, and waits for its last
    checkpoint; FINISHED and FAILED are ends."""

    STARTING = "starting"
    RUNNING = "running"
    FINISHING = "finishing"
    FINISHED = "finished"
    FAILED = "failed"

    @property
    def ended(self) -> bool:
        return self in (JobPhase.FINISHED, JobPhase.FAILED)


# ---- effects


@dataclass(frozen=True, slots=True)
class Persist:
    """Write a record to the journal. `body` is made of what JSON knows."""

    kind: str
    body: Mapping[str, object]


def records_of(job: JobId, entries: Iterable[Entry]) -> list[Persist]:
    """A job's records."""
    return [Persist(kind, {"job": job, **body}) for kind, body in entries]


@dataclass(frozen=True, slots=True)
class LogMessage:
    """Say it to the people who read the log."""

    text: str
    warning: bool = False


@dataclass(frozen=True, slots=True)
class CreatePartitions:
    """Then PartitionsCreated, once all servers of the job answered, or PartitionsRefused."""

    job: JobId
    server: Server
    generation: Generation
    layout: JobLayout
    partitions: tuple[PartitionId, ...]
    mode: UpdateMode
    logical_ranks: int
    durability: Durability
    staleness: int | None
    stale: StaleRule | None
    clipping: Clipping = NO_CLIPPING
    backup_workers: int = 0
    switches: int = 0
    rows_at_once: bool = False


@dataclass(frozen=True, slots=True)
class OpenPartitions:
    """Then PartitionsOpened, once all servers of the job answered, or OpeningFailed."""

    job: JobId
    server: Server
    generation: Generation


@dataclass(frozen=True, slots=True)
class FenceOnServers:
    """Then WorkersFenced, whichever servers answered. `map`: where the books of what the workers held are; None where
    nobody needs to know."""

    job: JobId
    servers: tuple[Server, ...]
    workers: tuple[Incarnation, ...]
    held: tuple[LeasedSource, ...] = ()
    map: PartitionMap | None = None


@dataclass(frozen=True, slots=True)
class ReadLedger:
    """Then LedgerRead, if all servers answered."""

    job: JobId
    map: PartitionMap
    sources: tuple[SourceKey, ...]


@dataclass(frozen=True, slots=True)
class ReadWatermarks:
    """Then WatermarksRead, if all servers answered."""

    job: JobId
    map: PartitionMap
    worker: Incarnation


@dataclass(frozen=True, slots=True)
class ReadDeparted:
    """Then DepartedRead or DepartedUnread. `workers`: that are gone."""

    job: JobId
    map: PartitionMap
    workers: tuple[Incarnation, ...]


@dataclass(frozen=True, slots=True)
class ReadSteps:
    """Then StepsRead or StepsUnread. `sources`: all logical ranks of a job that stops, or goes over to another mode;
    `versions`: what is read is no step, but the highest version of any partition."""

    job: JobId
    map: PartitionMap
    sources: tuple[SourceKey, ...]
    versions: bool = False


@dataclass(frozen=True, slots=True)
class PaceServers:
    """Then ServersPaced, once all servers of the map answered, or ServersUnpaced. `consistency`: what values wait for
    from here on."""

    job: JobId
    map: PartitionMap
    consistency: Consistency


@dataclass(frozen=True, slots=True)
class SkipLostPushes:
    """Then LostPushesSkipped, if all servers answered."""

    job: JobId
    map: PartitionMap
    worker: Incarnation
    next: int
    lost: tuple[LostRange, ...]


@dataclass(frozen=True, slots=True)
class TakeCheckpoint:
    """Then CheckpointTaken or CheckpointFailed. `base`: the number of the newest committed one, 0 without any. With
    logs, `oldest` is the oldest one that may be restored, and `logs` are the servers whose logs that needs. `keepers`
    are the workers with error feedback."""

    subject: Subject
    map: PartitionMap
    draft: Draft
    url: str
    base: int
    keep: int
    oldest: int = 0
    logs: frozenset[Incarnation] = frozenset()
    keepers: tuple[Incarnation, ...] = ()


@dataclass(frozen=True, slots=True)
class Base:
    """A checkpoint, and for each partition the servers whose logs say what came after it."""

    number: int
    logs: Mapping[PartitionId, tuple[Incarnation, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ForgetSources:
    """Nothing follows: a server that was not reached forgets after the next checkpoint."""

    job: JobId
    map: PartitionMap
    done: tuple[DoneDataShards, ...]
    workers: tuple[Incarnation, ...]
    floor: Token


@dataclass(frozen=True, slots=True)
class RestorePartitions:
    """Then PartitionsRestored or RestoreFailed. `bases`: the checkpoint, and older ones that, with longer logs, say the
    same; `working`: the workers that have work; `begun`: data shards of which all partitions have counted the batches
    before a number as steps, when the job was synchronous; `step`: before which all logical ranks stand, of a job that
    was asynchronous then; else 0."""

    subject: Subject
    map: PartitionMap
    url: str
    bases: tuple[Base, ...]
    life: int
    partitions: frozenset[PartitionId]
    working: tuple[Incarnation, ...] = ()
    begun: tuple[tuple[DataShardSource, int], ...] = ()
    step: int = 0


@dataclass(frozen=True, slots=True)
class DropJob:
    job: JobId
    server: Server


@dataclass(frozen=True, slots=True)
class ForgetServer:
    """The server is gone; close what is open to it."""

    server: Incarnation


# ---- answers


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """It was done; there is nothing more to say."""


@dataclass(frozen=True, slots=True)
class Registered:
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class HeartbeatReply:
    """What a heartbeat brings back. `job_state` is None for a member without a job. `feedback`: what the worker's error
    feedback shall take up; `gone_back`: the generation with which the job has last gone back as a whole;
    `checkpoint`: the newest; `consistency`: what a job that was switched goes by; `halt`: of a job that goes over from
    synchronous to asynchronous updates."""

    job_state: JobPhase | None = None
    failure: ShardyardError | None = None
    generation: Generation | None = None
    ranks: tuple[RankLease, ...] = ()
    chief: bool = False
    workers: int = 0
    fenced: tuple[Incarnation, ...] = ()
    initializer: bool = False
    recovering: bool = False
    feedback: tuple[RestoredResidual, ...] = ()
    gone_back: Generation = NEVER
    stop: Stop | None = None
    checkpoint: Committed | None = None
    consistency: Consistency | None = None
    halt: SwitchPoint | None = None


@dataclass(frozen=True, slots=True)
class Joined:
    job: JobId
    settings: JobSettings
    started: bool
    ranks: tuple[RankLease, ...]
    logical_ranks: int
    chief: bool
    stop: Stop | None = None
    checkpoint: Committed | None = None
    consistency: Consistency | None = None
    halt: SwitchPoint | None = None


@dataclass(frozen=True, slots=True)
class VariablesPlaced:
    """A job's variables lie so. `initializer`: the asking worker sends the first values; `feedback`, `gone_back`: as in
    HeartbeatReply; `consistency`: of a job that was switched, what its partitions go by."""

    layout: JobLayout
    map: PartitionMap
    initializer: bool
    feedback: tuple[RestoredResidual, ...] = ()
    gone_back: Generation = NEVER
    consistency: Consistency | None = None


@dataclass(frozen=True, slots=True)
class LeaseClosed:
    done: bool


@dataclass(frozen=True, slots=True)
class BatchVerdict:
    """Whether a batch that was announced is to be computed; None: that is not decided yet. `careful_below`: sequences
    of this source before it are announced."""

    counts: bool | None
    careful_below: int


@dataclass(frozen=True, slots=True)
class NotFiniteVerdict:
    """`decided`: the work is to be pushed empty, unless `failure` says why the worker is out."""

    decided: bool
    failure: ShardyardError | None = None


@dataclass(frozen=True, slots=True)
class Rebased:
    """The worker's own source goes on; what it lost."""

    lost: tuple[LostRange, ...]


@dataclass(frozen=True, slots=True)
class FeedbackVerdict:
    """Whether the worker takes up what it has read."""

    taken: bool


@dataclass(frozen=True, slots=True)
class CheckpointProgress:
    """What became of a checkpoint that was asked for: `taken`, `failure`, or neither yet."""

    job_name: str
    ticket: int
    url: str
    taken: Committed | None = None
    failure: ShardyardError | None = None


@dataclass(frozen=True, slots=True)
class StepDecision:
    """Who counts in a step; None where that is not decided yet, nobody where it is not known any more. `left_ms`: for
    one who came late, how long the version behind the next step is worth waiting for (StepTimes). `again_ms`: where it
    is not decided, since others are waited for, how soon it is."""

    members: tuple[Rank, ...] | None
    left_ms: int = 0
    again_ms: int = 0


@dataclass(frozen=True, slots=True)
class MakeupBatches:
    """What each rank makes up for at a step, if it has anything. `end`: the step after the feed's last, where that is
    known."""

    batches: Mapping[Rank, MissedBatch]
    end: int | None


@dataclass(frozen=True, slots=True)
class StopTaken:
    """The stop that is in force. `first`: it is the one that was asked for."""

    job: JobId
    job_name: str
    stop: Stop
    first: bool


@dataclass(frozen=True, slots=True)
class SwitchTaken:
    """What a job goes over to, or by. `first`: it did not before."""

    job: JobId
    job_name: str
    consistency: Consistency
    first: bool


@dataclass(frozen=True, slots=True)
class JobView:
    """Where a job stands, for who reads its values. `map`: None where there are none to be read, yet or any more;
    `url`: of its checkpoints, None where it has none."""

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
    """`running`: the job goes back now; else the next run begins with the checkpoint."""

    running: bool


Answer = (
    Acknowledged
    | JobView
    | RestorePlanned
    | CheckpointProgress
    | StopTaken
    | SwitchTaken
    | StepDecision
    | MakeupBatches
    | FeedbackVerdict
    | Rebased
    | Registered
    | HeartbeatReply
    | Joined
    | VariablesPlaced
    | FeedOpening
    | DataLease
    | LeaseWait
    | FeedDone
    | LeaseClosed
    | BatchVerdict
    | NotFiniteVerdict
)


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to the request that the event was."""

    answer: Answer


Effect = (
    Persist
    | LogMessage
    | CreatePartitions
    | OpenPartitions
    | FenceOnServers
    | ReadLedger
    | ReadWatermarks
    | ReadDeparted
    | ReadSteps
    | PaceServers
    | SkipLostPushes
    | TakeCheckpoint
    | ForgetSources
    | RestorePartitions
    | DropJob
    | ForgetServer
    | Reply
)
