"""The state of one job in one dataclass: its settings, its phase, and all its parts.

The functions of `flows` and `machine` change it; it decides nothing itself. Invariants: each change has its record
among the same effects, and the records alone rebuild the state (except for what tests/simulation/not_recorded.py
lists). A job that has ended no longer changes, except for evaluations and for readers of its last values. Must not
know: other jobs, members that are not its workers, the network, the clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from shardyard.config.settings import JobSettings
from shardyard.domain import errors
from shardyard.domain.consistency import Consistency, Durability, UpdateMode
from shardyard.domain.ids import Incarnation, JobId, RunName
from shardyard.domain.push_names import DataShardSource, LeasedSource, RankSource
from shardyard_coordinator.core.effects import Effect, JobPhase, records_of
from shardyard_coordinator.members.evaluations import Evaluations
from shardyard_coordinator.members.nonfinite import NotFinite
from shardyard_coordinator.members.progress import Progress
from shardyard_coordinator.members.readers import Readers
from shardyard_coordinator.members.roster import Roster
from shardyard_coordinator.members.runs import Runs
from shardyard_coordinator.modes.mode_setting import ModeSetting, settings_of
from shardyard_coordinator.modes.pending_switch import PendingSwitch
from shardyard_coordinator.modes.stopping import Stopping
from shardyard_coordinator.placement.deployment import Deployment, Stage
from shardyard_coordinator.records import Entry
from shardyard_coordinator.storage.checkpoint_book import CheckpointBook, url_of
from shardyard_coordinator.storage.checkpoint_residuals import CheckpointResiduals
from shardyard_coordinator.storage.log_owners import LogOwners
from shardyard_coordinator.storage.recovery import Recovery, Restored
from shardyard_coordinator.storage.restore_point import RestorePoint
from shardyard_coordinator.work.data_ledger import DataLedger
from shardyard_coordinator.work.losses import Departed, LostPushes, LostResiduals
from shardyard_coordinator.work.quarantine import Suspects
from shardyard_coordinator.work.ranks import RankBook
from shardyard_coordinator.work.replica_book import ReplicaBook
from shardyard_coordinator.work.step_ledger import StepLedger
from shardyard_coordinator.work.step_times import StepTimes
from shardyard_coordinator.work.tokens import Tokens


@dataclass(slots=True)
class LastCheckpoint:
    """The checkpoint with which a job ends. `failure`: the error that the job ends with once the checkpoint is
    written; None if it ends well. `ticket`: of that checkpoint, 0 before it is requested. `failed_attempt`: why its
    last attempt failed, as the end of a sentence."""

    failure: errors.ShardyardError | None = None
    ticket: int = 0
    failed_attempt: str = ""


@dataclass
class JobState:
    """`restored`: what the latest recovery brought back. `origin`: the checkpoint with which the job is to begin; None
    once it has begun, or if it begins with first values. A job with logs has begun once it has a checkpoint of its own;
    until then it can only begin again.
    `reads_steps`: a read of the ledgers is under way. `departing`: what it waits for, while a
    server leaves it. `missing`: the servers for which its partitions wait. `rows_seen`: by server, the rows of
    each table. `replicas`: the groups of a mirrored job. `owner`: whose it is; empty: of nobody in particular."""

    id: JobId
    settings: JobSettings
    roster: Roster
    progress: Progress
    tokens: Tokens
    ranks: RankBook | None
    feeds: DataLedger | StepLedger
    suspects: Suspects
    not_finite: NotFinite
    departed: Departed | None
    stopping: Stopping
    mode: ModeSetting
    book: CheckpointBook
    log_owners: LogOwners | None
    replicas: ReplicaBook | None = None
    owner: str = ""
    phase: JobPhase = JobPhase.STARTING
    failure: errors.ShardyardError | None = None
    deployment: Deployment = field(default_factory=Deployment)
    step_times: StepTimes = field(default_factory=StepTimes)
    lost_pushes: LostPushes = field(default_factory=LostPushes)
    lost_residuals: LostResiduals = field(default_factory=LostResiduals)
    pending_switch: PendingSwitch = field(default_factory=PendingSwitch)
    recovery: Recovery = field(default_factory=Recovery)
    restored: Restored | None = None
    origin: RestorePoint | None = None
    checkpoint_residuals: CheckpointResiduals = field(default_factory=CheckpointResiduals)
    runs: Runs = field(default_factory=Runs)
    readers: Readers = field(default_factory=Readers)
    evaluations: Evaluations = field(default_factory=Evaluations)
    last_checkpoint: LastCheckpoint = field(default_factory=LastCheckpoint)
    reads_steps: bool = False
    departing: str = ""
    missing: str = ""
    rows_seen: dict[Incarnation, tuple[int, ...]] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """How messages name the job."""
        return f"job {self.settings.name!r} ({self.id})"

    @property
    def workers(self) -> list[Incarnation]:
        """The living workers."""
        return self.roster.living

    @property
    def updates(self) -> UpdateMode:
        return self.settings.consistency.mode.updates

    @property
    def consistency(self) -> Consistency | None:
        """What the workers of a job that was switched follow."""
        return self.mode.in_force if self.mode.latest.number else None

    @property
    def workers_done(self) -> int:
        """Workers that are done. The job does not wait for them to come back."""
        return self.roster.goodbyes + self.not_finite.quarantined

    @property
    def is_whole(self) -> bool:
        """Whether every partition has its server."""
        return self.deployment.stage is Stage.OPEN and not self.recovery.needed

    @property
    def may_acknowledge(self) -> bool:
        """Whether work may be acknowledged. A job first needs a checkpoint, to which it can go back. With logs it needs
        one of its own, which its logs follow; without, it may have none, or begin before it (`book.waived`)."""
        if self.log_owners is None:
            return self.book.committed is not None or self.book.waived or not self.book.enabled
        return self.book.committed is not None and self.origin is None

    @property
    def replays_logs(self) -> bool:
        """Whether lost partitions are restored from the newest checkpoint and the logs after it."""
        return self.log_owners is not None and self.origin is None

    @property
    def goes_back_whole(self) -> bool:
        """Whether all partitions go back to a checkpoint when one is lost. A synchronous job does, unless logs bring
        its step back; so does a job that is beginning."""
        return (self.updates is UpdateMode.SYNC and self.log_owners is None) or self.origin is not None

    @property
    def has_tables(self) -> bool:
        return self.deployment.layout is not None and bool(self.deployment.layout.tables)

    @property
    def has_error_feedback(self) -> bool:
        """Whether the job's workers have residuals."""
        layout = self.deployment.layout
        return layout is not None and self.settings.compression.push_rules.keep_feedback(layout.variables)

    def needs_servers(self, worker: Incarnation) -> str:
        """What in the worker's script needs variables on the servers; empty if nothing does."""
        return self.progress.of(worker).needs_servers

    def held(self, worker: Incarnation) -> Sequence[LeasedSource]:
        """The work that the worker holds under a lease."""
        if isinstance(self.feeds, DataLedger):
            return self.feeds.held(worker)
        assert self.ranks is not None
        return [RankSource(lease.rank) for lease in self.ranks.of(worker)]

    def first_of(self, source: LeasedSource) -> int | None:
        """The batch at which the lease of a data shard began, if it is known."""
        if not isinstance(self.feeds, DataLedger) or not isinstance(source, DataShardSource):
            return None
        return self.feeds.feed(source.feed).first_of(source)

    def require_unfinished(self) -> None:
        """Raises the job's failure, or NotFound if the job is finished."""
        if self.failure is not None:
            raise self.failure.anew()
        if self.phase is JobPhase.FINISHED:
            raise errors.NotFound(
                f"{self.title} is finished", why="its last worker has left", todo="join again: that starts a new run"
            )

    def require_in_run(self, run: RunName) -> None:
        """Raises the job's failure, or RunFinished: for a process of the run that comes after the job's end."""
        if self.failure is not None:
            raise self.failure.anew()
        if self.phase is JobPhase.FINISHED:
            stop = self.stopping.stop
            how = f"was stopped ({stop.reason})" if stop is not None and stop.reason else "is finished"
            raise errors.RunFinished(f"{self.title} of run {run} {how}, at step {self.progress.step:,}")

    def require_joinable(self) -> None:
        """Raises NotReady between the time when a job's last worker leaves and the job's end."""
        if self.phase is JobPhase.FINISHING:
            raise errors.NotReady(
                f"{self.title} writes its last checkpoint", why="its workers have left", todo="join when it is finished"
            )

    def records(self, entries: Iterable[Entry]) -> list[Effect]:
        return [*records_of(self.id, entries)]

    def apply_mode(self) -> None:
        """Sets the settings by the latest mode switch."""
        self.settings = settings_of(self.settings, self.mode.latest)

    def deal_by(self, feeds: DataLedger | StepLedger, ranks: RankBook | None, step: int) -> None:
        """Deals the job's work with these ledgers from now on, in the mode of its settings, starting at that step."""
        self.feeds, self.ranks = feeds, ranks
        self.suspects = Suspects(self.settings.data.poison_deaths)
        self.stopping = Stopping(by_steps=ranks is not None)
        self.departed = _departed(self.settings)
        self.progress.reach(step)


def new_job(number: JobId, settings: JobSettings, now_ms: int, default_url: str | None = None) -> JobState:
    """`default_url`: where its checkpoints are stored if its settings leave that to the coordinator."""
    consistency, tokens = settings.consistency, Tokens()
    sync = consistency.mode.updates is UpdateMode.SYNC
    return JobState(
        id=number,
        settings=settings,
        roster=Roster(now_ms),
        progress=Progress(now_ms),
        tokens=tokens,
        ranks=new_ranks(settings, tokens, now_ms) if sync else None,
        feeds=new_step_ledger(settings) if sync else new_data_ledger(settings, tokens),
        suspects=Suspects(settings.data.poison_deaths),
        not_finite=NotFinite(settings.nonfinite_max),
        departed=_departed(settings),
        stopping=Stopping(by_steps=sync),
        mode=ModeSetting(consistency.mode, consistency.bound),
        book=CheckpointBook(settings.checkpoint, url_of(settings.checkpoint, default_url), now_ms),
        log_owners=LogOwners(settings.checkpoint.keep) if settings.durability is Durability.WAL else None,
        replicas=new_replicas(settings),
    )


def new_replicas(settings: JobSettings) -> ReplicaBook | None:
    """None if no workers compute together."""
    if not settings.strategy.uses_groups:
        return None
    return ReplicaBook(
        members_max=settings.logical_rank_count * settings.workers_per_rank,
        workers_expected=settings.workers_expected,
        grace_ms=settings.rank_grace_ms,
        replica_size=settings.workers_per_replica,
        has_replicas=settings.has_replicas,
    )


def new_ranks(settings: JobSettings, tokens: Tokens, now_ms: int) -> RankBook:
    return RankBook(
        ranks=settings.logical_rank_count,
        grace_ms=settings.rank_grace_ms,
        workers_expected=settings.workers_expected,
        next_token=tokens.next,
        now_ms=now_ms,
    )


def new_step_ledger(settings: JobSettings) -> StepLedger:
    return StepLedger(
        logical_ranks=settings.logical_rank_count,
        local_steps=settings.consistency.local_steps or 1,
        backup_workers=settings.consistency.backup_workers,
    )


def new_data_ledger(settings: JobSettings, tokens: Tokens) -> DataLedger:
    batches = settings.data.batches_per_data_shard
    return DataLedger(
        batches_per_data_shard=None if batches == "auto" else batches,
        workers_expected=settings.workers_expected,
        next_token=tokens.next,
    )


def _departed(settings: JobSettings) -> Departed | None:
    """Only for jobs in which lost partitions go back to a checkpoint and the other partitions do not."""
    asynchronous = settings.consistency.mode.updates is UpdateMode.ASYNC
    return Departed() if asynchronous and settings.durability is Durability.CHECKPOINT else None
