"""What happens to the machine: one frozen value per event, in the past tense.

Invariant: each event is well-formed; shardyard_coordinator.service.rpcs has checked it. The machine decides whether it
is valid now. Must not know: messages, threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from shardyard.checkpoints.manifest import ResidualFile
from shardyard.config.settings import JobSettings
from shardyard.domain.consistency import ConsistencyMode
from shardyard.domain.errors import ShardyardError
from shardyard.domain.ids import Caller, Generation, Incarnation, JobId, PartitionId, Rank, RunName, Token
from shardyard.domain.optimizers import OptimizerSpec
from shardyard.domain.push_names import DataShardSource, LeasedSource, PushName, Source, SourceKey
from shardyard.domain.replica_groups import Strategy
from shardyard.domain.tables.table_settings import TableSettings
from shardyard.domain.variables import VariableSpec
from shardyard_coordinator.core.effects import Effect
from shardyard_coordinator.members.evaluations import Best, Evaluation
from shardyard_coordinator.members.membership import Registration
from shardyard_coordinator.members.progress import Report
from shardyard_coordinator.records import Entry
from shardyard_coordinator.storage.restore_point import RestorePoint
from shardyard_coordinator.work.feeds import FeedSpec
from shardyard_coordinator.work.losses import LostRange


class Event:
    __slots__ = ()


# ---- members

FIRST_MAP: Final = Generation(1)


@dataclass(frozen=True, slots=True)
class MemberRegistered(Event):
    registration: Registration


@dataclass(frozen=True, slots=True)
class HeartbeatReceived(Event):
    """`logs`: by job, how many bytes a server has logged since the last checkpoint was begun. `rows`: by job, how many
    rows it has of each table."""

    incarnation: Incarnation
    report: Report
    logs: tuple[tuple[JobId, int], ...] = ()
    rows: tuple[tuple[JobId, tuple[int, ...]], ...] = ()


@dataclass(frozen=True, slots=True)
class MemberLeft(Event):
    """`error`: type and message of the error that ended a worker's script, or empty. `pushed`: the worker's
    acknowledged pushes without leased data. `residual_lost`: the 2-norm of the residual that is lost with it.
    `drained`: it leaves because it drains, so its script is not done."""

    incarnation: Incarnation
    error: str
    pushed: int = 0
    residual_lost: float = 0.0
    drained: bool = False


@dataclass(frozen=True, slots=True)
class DrainRequested(Event):
    """`caller`: the member that leaves in order; None if a person names it. `name`: its number or its address."""

    caller: Incarnation | None
    name: str = ""


@dataclass(frozen=True, slots=True)
class ExitReported(Event):
    """An agent saw a training process exit."""

    agent: Incarnation
    pid: int
    exit_code: int


@dataclass(frozen=True, slots=True)
class Ticked(Event):
    """Time has passed."""


# ---- jobs, asked by a worker


@dataclass(frozen=True, slots=True)
class JobJoined(Event):
    incarnation: Incarnation
    name: str
    settings: JobSettings
    run: RunName | None = None
    owner: str = ""


@dataclass(frozen=True, slots=True)
class VariablesRegistered(Event):
    caller: Caller
    variables: tuple[VariableSpec, ...]
    optimizer: OptimizerSpec
    tables: tuple[TableSettings, ...] = ()
    places: tuple[int, ...] = ()
    """For each variable, the place in a replica of the worker that pushes its gradients. Empty: any worker pushes
    all."""


@dataclass(frozen=True, slots=True)
class VariablesCommitted(Event):
    """The initializer has sent the first values to all servers, under the map of that generation."""

    caller: Caller
    generation: Generation = FIRST_MAP


@dataclass(frozen=True, slots=True)
class FeedOpened(Event):
    caller: Caller
    feed: int
    spec: FeedSpec


@dataclass(frozen=True, slots=True)
class LeaseRequested(Event):
    """`known`: the tokens of the leases of this feed that the worker knows it holds."""

    caller: Caller
    feed: int
    known: tuple[Token, ...] = ()


@dataclass(frozen=True, slots=True)
class LeaseReturned(Event):
    """A worker is at the end of a data shard, or of a synchronous feed if it names no data shard. The servers know
    whether it is done."""

    caller: Caller
    feed: int
    data_shard: DataShardSource | None
    token: Token


@dataclass(frozen=True, slots=True)
class ReplicaGroupAsked(Event):
    """A worker has left replica group `left` (0: none), and waits for the next one. `step`: that of its replica; None:
    it has none."""

    caller: Caller
    left: int
    step: int | None


@dataclass(frozen=True, slots=True)
class ReplicasPublished(Event):
    """All servers have the state of that step of the replicas of a group."""

    caller: Caller
    generation: int
    step: int


@dataclass(frozen=True, slots=True)
class BatchBegun(Event):
    """A worker is about to compute a batch of its data shard, or a step of its logical rank. `highest`: the highest
    next sequence of the source over all partitions."""

    caller: Caller
    source: LeasedSource
    token: Token
    sequence: int
    highest: int


@dataclass(frozen=True, slots=True)
class NotFiniteReported(Event):
    """A worker has computed a gradient that is not finite, and has not pushed it. The report names the parameter and
    the step of the job. `count`: how many the worker has reported, including this one. `in_a_row`: how many of the
    latest were consecutive. `highest`: the highest next sequence of the source over all partitions."""

    caller: Caller
    source: Source
    token: Token
    first: int
    last: int
    parameter: str
    count: int
    in_a_row: int
    step: int
    highest: int = 0

    @property
    def work(self) -> str:
        return str(PushName(SourceKey(self.source), self.token, self.first, self.last))

    @property
    def title(self) -> str:
        worker = self.caller.incarnation
        return f"worker {worker}, step {self.step:,}, {self.work}: the gradient of {self.parameter!r} is not finite"

    @property
    def facts(self) -> dict[str, str]:
        return {"worker": str(self.caller.incarnation), "step": str(self.step), "parameter": self.parameter}

    @property
    def entry(self) -> Entry:
        return "not_finite", {
            "worker": self.caller.incarnation,
            "step": self.step,
            "work": self.work,
            "parameter": self.parameter,
            "count": self.count,
            "in_a_row": self.in_a_row,
        }


@dataclass(frozen=True, slots=True)
class RebaseRequested(Event):
    """The next sequence of a worker's own source is not the same in every partition. `next`: where the worker
    continues."""

    caller: Caller
    next: int


@dataclass(frozen=True, slots=True)
class CheckpointRequested(Event):
    """`caller`: the worker that asks for its job; None for a person. `job_name`: empty for the only job."""

    caller: Caller | None
    job_name: str
    ticket: int


@dataclass(frozen=True, slots=True)
class StepReported(Event):
    """A worker was told that all partitions have these ranks' contributions to a step. It asks which ranks count."""

    caller: Caller
    step: int
    ranks: tuple[Rank, ...]


@dataclass(frozen=True, slots=True)
class MakeupRequested(Event):
    """A worker is at a step after the planned ones of a feed."""

    caller: Caller
    feed: int
    step: int


@dataclass(frozen=True, slots=True)
class StopRequested(Event):
    """`caller`: the worker that asks for its job; None for a person. `job_name`: empty for the only job."""

    caller: Caller | None
    job_name: str
    reason: str


@dataclass(frozen=True, slots=True)
class SwitchRequested(Event):
    """A person asks for another consistency mode, staleness bound or strategy. None: unchanged."""

    job_name: str
    mode: ConsistencyMode | None
    staleness: int | None
    strategy: Strategy | None = None


@dataclass(frozen=True, slots=True)
class FeedbackRead(Event):
    """A worker has read the residual of the worker of that name. `failure`: why it could not read it, or why it does
    not fit."""

    caller: Caller
    generation: Generation
    worker: str
    failure: str


@dataclass(frozen=True, slots=True)
class RestoreOrdered(Event):
    """A person wants the jobs of that name to continue from a checkpoint. The checkpoint was verified."""

    origin: RestorePoint


@dataclass(frozen=True, slots=True)
class RestoreCancelled(Event):
    """A person cancels the order to begin with a checkpoint. `owner`: whose orders; empty: everybody's."""

    job_name: str
    owner: str = ""


@dataclass(frozen=True, slots=True)
class ReaderHeard(Event):
    """A reader follows a job. `reader`: a random name of its own. `job`: None for the unfinished job of that name.
    `job_name`: empty for the only job that runs. `leaves`: it stops reading."""

    job: JobId | None
    job_name: str
    reader: bytes
    leaves: bool


@dataclass(frozen=True, slots=True)
class EvaluationReported(Event):
    """An evaluator reports a version. `best`: set if it keeps that version as the best one."""

    job: JobId
    evaluation: Evaluation
    best: Best | None


# ---- what became of effects


@dataclass(frozen=True, slots=True)
class NotAnswered(Event):
    """Some server did not answer the calls of this effect. They are made again later."""

    job: JobId
    effect: Effect


@dataclass(frozen=True, slots=True)
class PartitionsCreated(Event):
    """Every server has created its partitions, under the map of that generation."""

    job: JobId
    generation: Generation = FIRST_MAP


@dataclass(frozen=True, slots=True)
class PartitionsOpened(Event):
    """Every server serves its partitions, under the map of that generation."""

    job: JobId
    generation: Generation = FIRST_MAP


@dataclass(frozen=True, slots=True)
class CheckpointTaken(Event):
    """The checkpoint that was begun as `draft` is committed as number `number`, with its step. `created_s`: seconds
    since 1970, for people; 0: unknown. `feedback`: the workers' residuals at that time."""

    job: JobId
    draft: int
    number: int
    step: int
    created_s: int = 0
    feedback: tuple[ResidualFile, ...] = ()


@dataclass(frozen=True, slots=True)
class CheckpointFailed(Event):
    """Nothing was committed. Another checkpoint is begun later."""

    job: JobId
    draft: int
    failure: ShardyardError


@dataclass(frozen=True, slots=True)
class MapEvent(Event):
    """The result of calls to all servers of a job's map. `generation`: of that map."""

    job: JobId
    generation: Generation


@dataclass(frozen=True, slots=True)
class PartitionsRestored(MapEvent):
    """All servers of the map have restored their partitions."""


@dataclass(frozen=True, slots=True)
class RestoreFailed(MapEvent):
    failure: ShardyardError


@dataclass(frozen=True, slots=True)
class WorkersFenced(Event):
    """Every server that answers in time now refuses the workers, so their work may go to others. `reached`: the lowest
    final next sequence, over all partitions, of each source that they held, as far as it is known."""

    job: JobId
    workers: tuple[Incarnation, ...]
    reached: tuple[tuple[LeasedSource, int], ...] = ()


@dataclass(frozen=True, slots=True)
class LedgerRead(Event):
    """The lowest next sequence, over all partitions, of the source that a LeaseReturned named. `generation`: of the map
    under which it was read."""

    returned: LeaseReturned
    next_sequence: int
    generation: Generation = FIRST_MAP


@dataclass(frozen=True, slots=True)
class WatermarksRead(Event):
    """The next sequence of a worker's own source in each partition, under the map of that generation."""

    asked: RebaseRequested
    generation: Generation
    nexts: tuple[tuple[PartitionId, int], ...]


@dataclass(frozen=True, slots=True)
class DepartedRead(MapEvent):
    """The next sequence in each partition of the own sources of departed workers, under that map."""

    found: tuple[tuple[Incarnation, tuple[tuple[PartitionId, int], ...]], ...]


@dataclass(frozen=True, slots=True)
class StepsRead(MapEvent):
    """The highest next step over all logical ranks and partitions."""

    step: int


@dataclass(frozen=True, slots=True)
class ServersPaced(MapEvent):
    """All servers of the map follow the job's mode switch of that number."""

    number: int


@dataclass(frozen=True, slots=True)
class LostPushesSkipped(Event):
    """All servers continue the source at the requested sequence."""

    asked: RebaseRequested
    lost: tuple[LostRange, ...]
