"""One job: who works on it, what state it is in, and the parts that it is made of.

Owns: a job's life (STARTING, RUNNING, FINISHING, FINISHED or FAILED), its parts, and the order of things when a worker
goes: fence it on the servers, then give its work to others. What has an order of its own over several parts stands
beside it, and is asked of the job: `leasing`, `counting`, `rebasing`, `handing_over`, `going_over`, `ending`.
Invariants: an ended job changes no more, but for what evaluators say of it, and its values, which stay on the servers
while they are read; no work of a lost worker is given away before WorkersFenced; the failure that ended a job is the
answer to all its requests; each change has its record in the same effects, and the records alone make the job anew (but
for records.NOT_RECORDED). Must not know: members that are not its workers, checkpoints' order, the network, what time
it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from shardyard.config.settings import JobSettings
from shardyard.domain import errors, limits
from shardyard.domain.consistency import Consistency, Durability, UpdateMode
from shardyard.domain.ids import Generation, Incarnation, JobId, PartitionId, Rank
from shardyard.domain.push_names import DataShardSource, LeasedSource, RankLease, RankSource, SourceKey
from shardyard_coordinator.core.effects import (
    Acknowledged,
    CheckpointProgress,
    DropJob,
    Effect,
    FenceOnServers,
    HeartbeatReply,
    JobState,
    JobView,
    LogMessage,
    Persist,
    ReadSteps,
    Reply,
    StopTaken,
    records_of,
)
from shardyard_coordinator.core.events import (
    CheckpointTaken,
    EvaluationReported,
    MemberLeft,
    ReaderHeard,
    VariablesRegistered,
)
from shardyard_coordinator.flows import deployment
from shardyard_coordinator.flows.checkpointing import CheckpointManager, title_of
from shardyard_coordinator.flows.deployment import Deployment, Stage
from shardyard_coordinator.flows.job_end import JobEnd, LastCheckpoint
from shardyard_coordinator.flows.leasing import Leasing
from shardyard_coordinator.flows.lost_pushes import LostPushFlow
from shardyard_coordinator.flows.mode_switch import ModeSwitch
from shardyard_coordinator.flows.readers import Readers
from shardyard_coordinator.flows.residual_flow import ResidualFlow
from shardyard_coordinator.flows.work_verdicts import WorkVerdicts
from shardyard_coordinator.members.evaluations import Evaluations
from shardyard_coordinator.members.nonfinite import NotFinite
from shardyard_coordinator.members.progress import Progress, Report
from shardyard_coordinator.members.roster import LATE_MS, Roster
from shardyard_coordinator.modes.drain import Drain
from shardyard_coordinator.modes.mode_setting import ModeSetting, settings_of
from shardyard_coordinator.modes.stopping import Stopping
from shardyard_coordinator.placement import table_specs as tables
from shardyard_coordinator.placement.placement import Server
from shardyard_coordinator.records import Body, DamagedRecord, Entry, require
from shardyard_coordinator.storage.checkpoint_book import Committed
from shardyard_coordinator.storage.restore_point import RestorePoint
from shardyard_coordinator.storage.restored_residuals import RestoredResiduals
from shardyard_coordinator.work.data_ledger import DataLedger
from shardyard_coordinator.work.departed import Departed
from shardyard_coordinator.work.feeds import FeedCounts
from shardyard_coordinator.work.losses import LostPushes, LostResiduals
from shardyard_coordinator.work.quarantine import Suspects, source_body, source_of
from shardyard_coordinator.work.ranks import RankAssignment, RankBook
from shardyard_coordinator.work.step_ledger import StepLedger
from shardyard_coordinator.work.step_times import StepTimes
from shardyard_coordinator.work.tokens import Tokens


class Job:
    """`checkpoints`: where its checkpoints are if it leaves that to the coordinator."""

    def __init__(self, job: JobId, settings: JobSettings, now_ms: int, checkpoints: str | None = None) -> None:
        self.id = job
        self.settings = settings
        self.state = JobState.STARTING
        self.failure: errors.ShardyardError | None = None
        self.attendance = Roster(now_ms)
        self.deployment = Deployment(job, settings)
        self.progress = Progress(now_ms)
        self.lost = LostPushes()
        self._step_seen = 0
        self.ranks: RankBook | None = None
        self.feeds: DataLedger | StepLedger
        self.tokens = Tokens()
        self.suspects = Suspects(settings.data.poison_deaths)
        self.not_finite = NotFinite(settings.nonfinite_max)
        self.step_times = StepTimes()
        self.residuals = LostResiduals()
        self.departed = Departed() if self._goes_back_in_part else None
        self.restored_residuals = RestoredResiduals()
        self._reads_steps = False
        self.stopping = Stopping(by_steps=settings.consistency.mode.updates is UpdateMode.SYNC)
        self.switching = ModeSetting(settings.consistency.mode, settings.consistency.bound)
        self.halting = Drain()
        self.readers = Readers()
        self.evaluations = Evaluations()
        self.last = LastCheckpoint()
        self._rows_seen: dict[Incarnation, tuple[int, ...]] = {}
        if settings.consistency.mode.updates is UpdateMode.SYNC:
            self.ranks = self.make_ranks(now_ms)
            self.feeds = self.make_step_ledger(settings)
        else:
            self.feeds = self.make_data_ledger()
        self.keeping = CheckpointManager(
            job,
            settings,
            deployment=self.deployment,
            feeds=self.feeds,
            tokens=self.tokens,
            default_url=checkpoints,
            now_ms=now_ms,
        )

    @property
    def title(self) -> str:
        return title_of(self.settings, self.id)

    @property
    def workers(self) -> list[Incarnation]:
        """The living."""
        return self.attendance.living

    def require_unfinished(self) -> None:
        """Raises what the job failed with; NotFound where it is finished."""
        if self.failure is not None:
            raise self.failure.anew()
        if self.state is JobState.FINISHED:
            raise errors.NotFound(
                f"{self.title} is finished", why="its last worker has left", todo="join again: that starts a new run"
            )

    def require_joinable(self) -> None:
        """Raises NotReady in the moment between a job's last worker and its end."""
        if self.state is JobState.FINISHING:
            raise errors.NotReady(
                f"{self.title} writes its last checkpoint", why="its workers have left", todo="join when it is finished"
            )

    # ---- what has an order of its own

    @property
    def leasing(self) -> Leasing:
        """Whose its work is."""
        return Leasing(self)

    @property
    def counting(self) -> WorkVerdicts:
        """Which work counts."""
        return WorkVerdicts(self)

    @property
    def rebasing(self) -> LostPushFlow:
        """What is found of work without leased data when partitions have gone back."""
        return LostPushFlow(self)

    @property
    def handing_over(self) -> ResidualFlow:
        """What has error feedback come to who goes on."""
        return ResidualFlow(self)

    @property
    def going_over(self) -> ModeSwitch:
        """What has it go on by other rules while it runs."""
        return ModeSwitch(self)

    @property
    def ending(self) -> JobEnd:
        """How it ends."""
        return JobEnd(self)

    # ---- workers come and go

    def join(self, worker: Incarnation, now_ms: int) -> list[Effect]:
        self.attendance.enter(worker)
        given = [] if self.ranks is None else self.ranks.join(worker, now_ms)
        return [self._persist("worker_joined", worker=worker), *self._rank_records(given)]

    def lose(self, worker: Incarnation, how: str, now_ms: int, *, died: bool = True) -> list[Effect]:
        """A worker died, or is out. Its work waits until the servers refuse what it may still send."""
        said = self.progress.of(worker)
        record = self._remove(worker, how, now_ms, died=died, residual=said.residual_norm, pushed=said.pushed)
        if self.state.ended:
            return [record]
        fence = self._fence(worker)
        return [record, *self._tell_residual(worker, said.residual_norm), *(fence or self.free((worker,), now_ms))]

    def free(
        self,
        workers: Sequence[Incarnation],
        now_ms: int,
        reached: Mapping[LeasedSource, int] = MappingProxyType({}),
    ) -> list[Effect]:
        """The lost workers are fenced: others may have their work. Those whose work is free already are passed over.
        `reached`: where that work stands, as far as it is known."""
        if self.state.ended:
            return []
        effects: list[Effect] = []
        for worker in workers:
            if worker not in self.attendance.fencing:
                continue
            held = [
                _ended(source, self.leasing.first_of(source), reached.get(source))
                for source in self.leasing.held(worker)
            ]
            freed = self._free(worker, reached)
            effects.append(self._persist("worker_freed", worker=worker, held=held))
            effects += [LogMessage(f"{self.title}: {source} of worker {worker} is free again") for source in freed]
            effects += self.records(self.deployment.remove(worker))
            if self.ranks is not None:
                effects += self._rank_records(self.ranks.release(worker, now_ms))
        return effects

    def resume(self, servers: Iterable[Incarnation]) -> list[Effect]:
        """After a restart: what may not have reached the servers, of which these live, is said to them again."""
        if self.state.ended:
            living = frozenset(servers)
            return self.ending.give_up([server for server in self.deployment.servers if server.incarnation in living])
        return self._fence(*self.attendance.fencing) if self.attendance.fencing else []

    def leave(self, left: MemberLeft, now_ms: int) -> list[Effect]:
        """A worker says goodbye; it sends nothing more. The last one ends the job, at once if as many as were expected
        have said so."""
        worker, error = left.incarnation, left.error
        residual = self.progress.of(worker).residual_norm if error else left.residual_lost
        how = f"left ({error})" if error else "left"
        record = self._remove(worker, how, now_ms, goodbye=not error, residual=residual, pushed=left.pushed)
        if self.state.ended:
            return [record]
        if error and not self.workers:
            failure = errors.WorkerFailed(
                f"its last worker, {worker}, left with an error: {error}", facts={"worker": str(worker)}
            )
            return [record, *self.fail(failure)]
        if not self.workers and self.heard_from >= self.settings.workers_expected:
            return [record, *self.ending.finish(now_ms)]
        told = self._tell_residual(worker, residual)
        return [record, *told, *self.free((worker,), now_ms), *self._fence(worker)]

    def _tell_residual(self, worker: Incarnation, norm: float) -> list[Effect]:
        if not norm:
            return []
        said = f"the residual of worker {worker} is lost, of 2-norm {norm:.3g} when it was last reported"
        return [LogMessage(f"{self.title}: {said}", warning=True)]

    def lose_server(self, server: Server, how: str, now_ms: int) -> list[Effect]:
        """A server is gone, and with it the partitions that it had, or was to have, if any."""
        lost = self.keeping.lost_with(server)
        self.readers.lose_server(server)
        if self.state.ended or not lost:
            return []
        if self.keeping.can_go_back:
            return self.keeping.lose(lost, server, how, now_ms)
        if self.keeping.can_begin_again and self.state is not JobState.FINISHING:
            self.state = JobState.STARTING
            return self.keeping.lose_values(lost, server, how, now_ms)
        numbers = ", ".join(str(owner.partition) for owner in lost)
        failure = errors.ServerLost(
            f"server {server.incarnation} at {server.address} {how}; {self.title} had "
            f"{'partition' if len(lost) == 1 else 'partitions'} {numbers} there",
            facts={"server": str(server.incarnation), "address": server.address},
        )
        return self.fail(failure, gone=server.incarnation)

    def fail(self, failure: errors.ShardyardError, gone: Incarnation | None = None) -> list[Effect]:
        return self.ending.fail(failure, gone)

    def tick(self, now_ms: int, servers: Sequence[Server]) -> list[Effect]:
        """`servers`: the living."""
        self.readers.expire(now_ms)
        if self.state.ended:
            return [*self.readers.drop_when_read(now_ms)]
        if self.state is JobState.FINISHING:
            return self.ending.tick(now_ms) or self._keep(now_ms, servers)
        if self.attendance.is_over(now_ms):
            return self.ending.finish(now_ms)
        idle_ms = self.attendance.idle_ms(now_ms)
        if not self.workers and self.stopping.stop is not None and idle_ms >= LATE_MS:
            return self.ending.finish(now_ms)
        if not self.workers and idle_ms >= self.settings.idle_ms:
            left = errors.WorkerFailed(
                f"{self.title} has had no worker for {self.settings.idle_ms / 1000:g} s; the last one, "
                f"{self.attendance.last_lost}",
                why="a job without workers is ended after job.idle_ms",
                todo="start the script again for a new run",
            )
            return self.ending.finish(now_ms, left) if self.is_whole else self.fail(left)
        given = [] if self.ranks is None else self.ranks.settle(now_ms)
        return [
            *self._rank_records(given),
            *self.read_steps(),
            *self.going_over.tick(now_ms),
            *self.deployment.reopen(now_ms),
            *self._keep(now_ms, servers),
        ]

    # ---- an end before that of the data

    def stop(self, worker: Incarnation | None, reason: str) -> list[Effect]:
        """`worker`: None, a person."""
        self.require_unfinished()
        asked = self.stopping.ask(reason, worker)
        if self.going_over.may_be_taken_back:
            asked += self.halting.give_up()  # it ends as it is
        stop = self.stopping.stop
        assert stop is not None
        by = "a person" if worker is None else f"worker {worker}"
        told = [LogMessage(f"{self.title} is told to stop by {by}{f': {reason}' if reason else ''}")] if asked else []
        return [*self.records(asked), *told, Reply(StopTaken(self.id, self.settings.name, stop, first=bool(asked)))]

    def hear_of_stop(self, worker: Incarnation, reached: int | None) -> list[Effect]:
        """A worker has heard of it. `reached`: see Report."""
        if self.state.ended or reached is None:
            return []
        self.stopping.hear(worker, reached)
        return self.read_steps()

    def read_steps(self) -> list[Effect]:
        """Before it is settled where the job stops, or goes over to another mode: nobody goes on, and the servers know
        how far those came who are gone."""
        if self._reads_steps or not self._may_settle:
            return []
        assert self.deployment.map is not None
        self._reads_steps = True
        drains, ranks = self.halting.drains, range(self.settings.logical_rank_count)
        sources = tuple(SourceKey(RankSource(Rank(rank))) for rank in ranks)
        return [ReadSteps(self.id, self.deployment.map, sources, versions=drains)]

    @property
    def _may_settle(self) -> bool:
        halts = self.halting.is_due(self.workers) and self.going_over.may_settle
        return (halts or self.stopping.is_due(self.workers)) and not self.attendance.fencing and self.is_whole

    def settle(self, generation: Generation, step: int) -> list[Effect]:
        """`step`: the first of which no partition has any part; of a job that goes over to steps, the highest version
        of any."""
        self._reads_steps = False
        if self.state.ended or not self._may_settle or generation != self.deployment.generation:
            return []
        if self.halting.is_due(self.workers):
            return self.going_over.settle(step)
        settled = self.stopping.settle(step)
        assert self.stopping.stop is not None
        return [*self.records(settled), LogMessage(f"{self.title} stops before step {self.stopping.stop.step:,}")]

    def forget_steps(self) -> list[Effect]:
        """They could not be read."""
        self._reads_steps = False
        return []

    # ---- another consistency

    @property
    def consistency(self) -> Consistency | None:
        """What workers of a job that was switched go by."""
        return self.switching.in_force if self.switching.latest.number else None

    def end_pacing(self, generation: Generation, number: int) -> list[Effect]:
        """The servers of that map go by the switch of that number."""
        if self.state.ended or not self.switching.end(generation, number):
            return []
        return [
            LogMessage(
                f"{self.title}: all servers go by {self.switching.latest}; so do its workers from their next step"
            )
        ]

    def fail_pacing(self, now_ms: int) -> list[Effect]:
        """Some server was not told the consistency mode; all are told again later."""
        self.switching.fail(now_ms)
        return []

    def hear_of_switch(self, worker: Incarnation, number: int) -> list[Effect]:
        return [] if self.state.ended else self.records(self.switching.hear(worker, number))

    def go_by_latest(self) -> None:
        """By the switch that was made last."""
        latest = self.switching.latest
        self.settings = settings_of(self.settings, latest)
        self.deployment.go_by(self.settings, latest.number)
        self.keeping.go_by(self.settings, latest.number)

    def deal(self, feeds: DataLedger | StepLedger, ranks: RankBook | None, step: int) -> None:
        """Its work is dealt by these from now on, in the mode that its settings name; it stands at that step."""
        self.feeds, self.ranks = feeds, ranks
        self.suspects = Suspects(self.settings.data.poison_deaths)
        self.stopping = Stopping(by_steps=ranks is not None)
        self.departed = Departed() if self._goes_back_in_part else None
        self.reach(step)

    def reach(self, step: int) -> None:
        """It is known to stand there."""
        self._step_seen = max(self._step_seen, step)

    def make_ranks(self, now_ms: int) -> RankBook:
        return RankBook(
            ranks=self.settings.logical_rank_count,
            grace_ms=self.settings.rank_grace_ms,
            workers_expected=self.settings.workers_expected,
            next_token=self.tokens.next,
            now_ms=now_ms,
        )

    def make_step_ledger(self, settings: JobSettings) -> StepLedger:
        """`settings`: of the job, now or once it is synchronous."""
        return StepLedger(
            logical_ranks=settings.logical_rank_count,
            local_steps=settings.consistency.local_steps or 1,
            backup_workers=settings.consistency.backup_workers,
        )

    def make_data_ledger(self) -> DataLedger:
        batches = self.settings.data.batches_per_data_shard
        return DataLedger(
            batches_per_data_shard=None if batches == "auto" else batches,
            workers_expected=self.settings.workers_expected,
            next_token=self.tokens.next,
        )

    def _keep(self, now_ms: int, servers: Sequence[Server]) -> list[Effect]:
        """Goes on with checkpoints and recovery. What partitions lack of workers that are gone is asked first."""
        due, reading = self.rebasing.is_due, self.rebasing.ask(now_ms)
        holds = due or (self.state is not JobState.FINISHING and self.handing_over.holds_checkpoints)
        # who has not gone over to a bound does not say when it has no work any more
        paced = frozenset(filter(self.switching.goes_by_latest, self.workers))
        return [
            *reading,
            *self.keeping.tick(now_ms, self.step, servers, self.attendance.gone, paced, holds=holds),
        ]

    # ---- recovery and checkpoints

    def end_recovery(self, generation: Generation, now_ms: int) -> list[Effect]:
        if self.state.ended:
            return []
        attempt, is_same_run = self.keeping.recovery.attempt, self.keeping.origin is None
        committed = self.keeping.goes_back_with(generation)
        effects = self.keeping.end_recovery(generation, now_ms)
        self.going_over.note_map(restored=bool(effects))
        if effects and attempt is not None and self.departed is not None and is_same_run:
            self.departed.restored(attempt.partitions)
        if committed is not None:
            effects += self.handing_over.go_back_with(committed, generation, is_same_run=is_same_run)
        return [*effects, *self._begin_running()]

    def fail_recovery(self, generation: Generation, failure: errors.ShardyardError, now_ms: int) -> list[Effect]:
        if self.state.ended:
            return []
        try:
            return self.keeping.fail_recovery(generation, failure, now_ms)
        except errors.ShardyardError as error:
            return self.fail(error)

    def end_checkpoint(self, taken: CheckpointTaken) -> list[Effect]:
        if self.state.ended:
            return []
        effects = self.keeping.end_checkpoint(taken)
        if effects and self.keeping.book.committed is not None:
            self.rebasing.settle(self.keeping.book.committed.gone)
        return [*effects, *self.ending.end_checkpoint()]

    def fail_checkpoint(self, draft: int, failure: errors.ShardyardError, now_ms: int) -> list[Effect]:
        if self.state.ended:
            return []
        effects = self.keeping.fail_checkpoint(draft, failure, now_ms)
        self.ending.fail_checkpoint(draft, failure)
        return effects

    def ask_checkpoint(self, ticket: int) -> list[Effect]:
        """A checkpoint that begins after `ticket` was given; 0: after now. Raises InvalidRequest where the job has
        none, NotReady where it has no values yet, and what it failed with."""
        book = self.keeping.book
        if book.url is None:
            raise errors.InvalidRequest(
                f"{self.title} is not written down", why="job.checkpoint.url is never, or there is no state folder"
            )
        found = book.outcome(ticket) if ticket else None
        if found is None:
            self.require_unfinished()
            if self.deployment.stage is not Stage.OPEN:
                raise errors.NotReady(f"{self.title} has no values yet", todo="call job.prepare first")
        standing = CheckpointProgress(self.settings.name, ticket or book.ask(), book.url)
        if isinstance(found, Committed):
            standing = replace(standing, taken=found)
        elif found is not None:
            standing = replace(standing, failure=found)
        return [Reply(standing)]

    # ---- variables

    def register_variables(self, registered: VariablesRegistered, servers: Sequence[Server]) -> list[Effect]:
        """Replies, or creates partitions: then ask again."""
        worker, variables, optimizer = registered.caller.incarnation, registered.variables, registered.optimizer
        tables.check_settings(registered.tables, self.settings)
        if self.switching.is_of_before(self.deployment.generation):
            raise errors.NotReady(
                f"{self.title} goes over to {self.switching.latest}: its partitions are being restored",
                why=self.keeping.recovery.waits_for or "that takes a moment",
            )
        effects: list[Effect] = []
        if self.keeping.origin is not None:
            self.keeping.check_fits(variables, optimizer, registered.tables)
        if not self.deployment.is_for(worker):
            self._check_begun()
        if self.deployment.stage is Stage.EMPTY:
            self.deployment.place(variables, optimizer, servers, registered.tables)
            effects += self.records([self.deployment.registered, *self.keeping.begin(servers)])
        else:
            self.deployment.check(variables, optimizer, registered.tables)
        effects += self.deployment.create()
        effects += self.records(self.deployment.admit(worker))
        if self.deployment.stage is not Stage.CREATING:
            placed = self.deployment.placed(worker)
            handed = replace(
                placed,
                feedback=self.handing_over.for_worker(worker),
                gone_back=self.restored_residuals.generation,
                consistency=self.consistency,
            )
            effects.append(Reply(handed))
        return effects

    def commit_variables(self, worker: Incarnation, generation: Generation) -> list[Effect]:
        """Replies, or opens partitions: then ask again. `generation`: of the map under which the values were given."""
        self.deployment.check_commit(worker, generation)
        effects: list[Effect] = []
        if self.deployment.commit(worker):
            effects += self.records([deployment.committed(worker)])
        effects += self.deployment.open()
        if self.deployment.stage is Stage.OPEN:
            self._check_begun()
        if self.deployment.stage is not Stage.OPENING:
            effects.append(Reply(Acknowledged()))
        return effects

    def _check_begun(self) -> None:
        """Raises NotReady where what was acknowledged now could not be brought back."""
        if not self.keeping.can_begin:
            raise errors.NotReady(
                f"{self.title} begins when its first checkpoint is written",
                why="logs say what came after a checkpoint (job.durability wal)",
            )

    def end_creation(self, generation: Generation, *, created: bool) -> list[Effect]:
        if self.state.ended:
            # a creation that overtook the DropJob would stay on its server for ever
            return [DropJob(self.id, server) for server in self.deployment.servers]
        return self.records(self.deployment.end_creation(generation, created=created))

    def end_opening(self, generation: Generation, *, opened: bool, now_ms: int) -> list[Effect]:
        if self.state.ended:
            return []
        records = self.records(self.deployment.end_opening(generation, opened=opened, now_ms=now_ms))
        if self.state is not JobState.STARTING or self.deployment.stage is not Stage.OPEN:
            return records
        return [*records, *self._begin_running()]

    def note_rows(self, server: Incarnation, rows: tuple[int, ...]) -> None:
        """How many rows a server has of each table."""
        layout = self.deployment.layout
        if layout is not None and len(rows) == len(layout.tables):
            self._rows_seen[server] = rows

    @property
    def rows(self) -> tuple[int, ...]:
        """Of each table, as the servers that have its partitions have said last."""
        layout = self.deployment.layout
        owners = {server.incarnation for server in self.deployment.servers}
        said = [rows for server, rows in sorted(self._rows_seen.items()) if server in owners]
        return tuple([sum([rows[at] for rows in said]) for at in range(0 if layout is None else len(layout.tables))])

    def _begin_running(self) -> list[Effect]:
        if self.state is not JobState.STARTING or self.deployment.stage is not Stage.OPEN:
            return []
        self.state = JobState.RUNNING
        assert self.deployment.layout is not None
        tables = f" and {len(self.deployment.layout.tables)} tables" if self.deployment.layout.tables else ""
        return [
            LogMessage(f"{self.title} runs: {len(self.deployment.layout.variables)} variables{tables} on the servers")
        ]

    def begin_with(self, origin: RestorePoint) -> list[Effect]:
        """Before anybody joins: the job goes on from a checkpoint of another run."""
        self._step_seen = origin.step
        return self.records(self.keeping.begin_with(origin))

    def go_back(self, origin: RestorePoint, now_ms: int) -> list[Effect]:
        if self.state is not JobState.RUNNING or self.deployment.stage is not Stage.OPEN:
            raise errors.NotReady(
                f"{self.title} is {self.state.value}",
                why="",
                todo="wait until it runs or has ended, then order it again",
            )
        return self.keeping.go_back(origin, now_ms, is_of_before=self.switching.is_checkpoint_of_before(origin.number))

    # ---- readers

    def hear_reader(self, heard: ReaderHeard, now_ms: int) -> list[Effect]:
        """Somebody reads the job's values, or does not any more. Raises TooLarge."""
        effects: list[Effect] = []
        if heard.leaves:
            self.readers.leave(heard.reader)
            effects = [*self.readers.drop_when_read(now_ms)]
        elif not self.state.ended or self.readers.keep_values:
            self.readers.hear(heard.reader, now_ms)
        followed = JobView(
            job=self.id,
            job_name=self.settings.name,
            state=self.state,
            failure=self.failure,
            mode=self.settings.consistency.mode.updates,
            map=self.deployment.map if self.is_whole and (not self.state.ended or self.readers.keep_values) else None,
            layout=self.deployment.layout,
            url=self.keeping.book.url,
        )
        return [*effects, Reply(followed)]

    def take_evaluation(self, reported: EvaluationReported) -> list[Effect]:
        return [*self.records(self.evaluations.report(reported.evaluation, reported.best)), Reply(Acknowledged())]

    # ---- what people and workers want to know

    def report(self, worker: Incarnation, report: Report, now_ms: int) -> None:
        if not self.state.ended:
            self.progress.take(worker, report, now_ms)

    def standing(self, worker: Incarnation) -> HeartbeatReply:
        return HeartbeatReply(
            job_state=self.state,
            failure=self.failure,
            generation=self.deployment.generation,
            ranks=self.ranks_of(worker),
            chief=self.attendance.chief == worker,
            workers=len(self.workers),
            initializer=self.deployment.initializer == worker and self.deployment.stage is Stage.CREATED,
            recovering=self.keeping.recovery.needed,
            feedback=self.handing_over.for_worker(worker),
            gone_back=self.restored_residuals.generation,
            stop=self.stopping.stop,
            checkpoint=self.keeping.book.committed,
            consistency=self.consistency,
            halt=self.halting.halt,
        )

    def ranks_of(self, worker: Incarnation) -> tuple[RankLease, ...]:
        leases = () if self.ranks is None else self.ranks.of(worker)
        return tuple(
            replace(lease, careful_below=self.counting.careful_below(RankSource(lease.rank))) for lease in leases
        )

    @property
    def samples(self) -> int:
        """Samples pushed in all. Workers report theirs with heartbeats; of those that died, the books know."""
        step = self.progress.step
        counted = (
            self.feeds.samples_done(step=step) if isinstance(self.feeds, StepLedger) else self.feeds.samples_done()
        )
        return max(self.progress.samples, counted)

    def feed_counts(self, last: int) -> tuple[FeedCounts, ...]:
        if isinstance(self.feeds, StepLedger):
            return self.feeds.counts(last, step=self.progress.step)
        return self.feeds.counts(last)

    # ---- records

    def entries(self) -> list[Entry]:
        """Records that make this job anew, in this order."""
        return [
            ("job_started", {"settings": self.settings.model_dump(mode="json")}),
            *self.attendance.entries(),
            *self.switching.entries(),
            *self.halting.entries(),
            *self.deployment.entries(),
            *([] if self.ranks is None else self.ranks.entries()),
            *self.feeds.entries(),
            *self.suspects.entries(),
            *self.not_finite.entries(),
            *self.residuals.entries(),
            *([] if self.departed is None else self.departed.entries()),
            *self.restored_residuals.entries(),
            *self.stopping.entries(),
            *self.evaluations.entries(),
            *self.keeping.entries(),
            *self.lost.entries(),
            *([("token_given", {"token": self.tokens.latest})] if self.tokens.latest else []),
            *([self.ending.finishing] if self.state is JobState.FINISHING else []),
            *([self.ending.ended] if self.state.ended else []),
        ]

    def restore(self, kind: str, body: Body, now_ms: int) -> None:
        """Takes a record of `entries`, or one of its kinds, but `job_started`. Raises DamagedRecord."""
        match kind:
            case "worker_joined" | "worker_gone" | "worker_freed" | "workers_gone":
                self._restore_workers(kind, body, now_ms)
            case "rank_given":
                require(self.ranks is not None, "a rank of an asynchronous job")
                assert self.ranks is not None
                self.ranks.restore(body, now_ms)
                self.tokens.seen(body.number("token"))
            case "token_given":
                self.tokens.seen(body.number("token"))
            case "feed_opened" | "feed_progress" | "data_leased" | "data_closed" | "feed_closed" | "batch_quarantined":
                self.feeds.restore(kind, body)
                if kind == "data_leased":
                    self.tokens.seen(body.number("token"))
                elif kind == "data_closed":
                    self.counting.settle_suspicion(
                        source_of(body), Incarnation(body.number("worker")), done=body.flag("done")
                    )
            case "steps_decided" | "contributions_dropped_before":
                require(isinstance(self.feeds, StepLedger), "verdicts on the steps of an asynchronous job")
                self.feeds.restore(kind, body)
            case "batch_begun" | "source_suspected":
                self.suspects.restore(kind, body)
            case "not_finite" | "not_finite_before" | "worker_quarantined":
                self.not_finite.restore(kind, body)
            case "residuals_lost_before":
                self.residuals.restore(body)
            case "workers_departed":
                require(self.departed is not None, "workers that are gone, of a job that does not go back in part")
                assert self.departed is not None
                self.departed.restore(body)
            case "feedback_due" | "feedback_taken" | "feedback_taken_before":
                if self.restored_residuals.restore(kind, body):
                    self.residuals.add_unknown()
            case (
                "variables_registered"
                | "worker_admitted"
                | "initializer_chosen"
                | "partitions_created"
                | "variables_committed"
                | "partitions_opened"
                | "partitions_restored_later"
            ):
                self.deployment.restore(kind, body)
                if self.deployment.stage is Stage.OPEN and self.state is JobState.STARTING:
                    self.state = JobState.RUNNING
            case (
                "checkpoint_begun"
                | "checkpoint_committed"
                | "logs_begun"
                | "partitions_lost"
                | "recovery_begun"
                | "partitions_moved"
                | "partitions_placed_again"
            ):
                is_first = self.keeping.origin is not None
                self.keeping.restore(kind, body, now_ms)
                self.going_over.note_map(restored=kind == "partitions_moved")
                if self.deployment.stage is Stage.OPEN and self.state is JobState.STARTING:
                    self.state = JobState.RUNNING
                elif self.deployment.stage is Stage.LOST:
                    self.state = JobState.STARTING
                if kind == "checkpoint_committed":
                    self.rebasing.settle([Incarnation(each) for each in body.numbers("gone")])
                elif kind == "partitions_moved" and self.departed is not None and not is_first:
                    self.departed.restored(PartitionId(each) for each in body.numbers("partitions"))
            case "pushes_lost" | "pushes_lost_before":
                self.lost.restore(kind, body)
            case "stop_asked" | "stop_settled":
                self.stopping.restore(kind, body)
            case "halt_asked" | "halt_settled" | "halt_given_up" | "halts_before":
                self.halting.restore(kind, body)
            case "job_went_over":
                self.going_over.restore(body, now_ms)
            case "consistency_switched" | "worker_gone_over":
                self.switching.restore(kind, body)
                self.go_by_latest()
            case "evaluation_reported" | "best_kept":
                self.evaluations.restore(kind, body)
            case "job_finishing" | "job_ended":
                self.ending.restore(kind, body, now_ms)
            case _:
                raise DamagedRecord("its kind is unknown to this release")

    def _restore_workers(self, kind: str, body: Body, now_ms: int) -> None:
        if kind == "workers_gone":
            self.attendance.restore(body, now_ms)
            return
        worker = Incarnation(body.number("worker", least=1))
        if kind == "worker_joined":
            require(worker not in self.workers, f"worker {worker} joins twice")
            self.attendance.enter(worker)
            if self.ranks is not None:
                self.ranks.enter(worker)
        elif kind == "worker_gone":
            require(worker in self.workers, f"worker {worker} goes and was not there")
            goodbye, died, residual = body.flag("goodbye"), body.flag("died"), body.real("residual")
            pushed = body.number("pushed", most=limits.SEQUENCE_MAX)
            self._remove(worker, body.text("how"), now_ms, goodbye=goodbye, died=died, residual=residual, pushed=pushed)
        else:
            require(worker in self.attendance.fencing, f"worker {worker} is free of its work twice")
            self._free(worker, dict(_reached(body)))
            self.deployment.forget(worker)
            if self.ranks is not None:
                self.ranks.vacate(worker, now_ms)

    # ---- within

    def _remove(
        self,
        worker: Incarnation,
        how: str,
        now_ms: int,
        *,
        goodbye: bool = False,
        died: bool = False,
        residual: float = 0.0,
        pushed: int = 0,
    ) -> Persist:
        """The worker is gone; what it has is nobody else's until `_free`. `residual`: the 2-norm of what its
        compression had not sent; `pushed`: its acknowledged pushes without leased data."""
        self.residuals.add(residual)
        if died:
            self.suspects.lose(worker, self.leasing.held(worker))
        self.suspects.leave(worker)
        if isinstance(self.feeds, StepLedger):
            self.feeds.verdicts.leave(worker)
        self.attendance.leave(worker, how, now_ms, goodbye=goodbye)
        self.progress.forget(worker)
        self.not_finite.forget(worker)
        self.switching.forget(worker)
        self.rebasing.leave(worker, pushed, died=died)
        if not self.workers:
            # who died after the others had done all there was has nothing left to do, and nobody may start it again
            is_done = goodbye or (died and self.attendance.goodbyes > 0 and self.feeds.finished)
            late_ms = 0 if self.heard_from >= self.settings.workers_expected else LATE_MS
            self.attendance.close_at(now_ms + late_ms if is_done else None)
        if self.ranks is not None:
            self.ranks.suspend(worker)
        self.deployment.suspend(worker)
        return self._persist(
            "worker_gone", worker=worker, how=how, goodbye=goodbye, died=died, residual=residual, pushed=pushed
        )

    @property
    def heard_from(self) -> int:
        """Workers that are done: nobody waits for them to come."""
        return self.attendance.goodbyes + self.not_finite.quarantined

    @property
    def _goes_back_in_part(self) -> bool:
        """Whether partitions that lost their server go back to a checkpoint, and no other does."""
        asynchronous = self.settings.consistency.mode.updates is UpdateMode.ASYNC
        return asynchronous and self.settings.durability is Durability.CHECKPOINT

    @property
    def is_whole(self) -> bool:
        """Whether all partitions have their servers."""
        return self.deployment.stage is Stage.OPEN and not self.keeping.recovery.needed

    def _free(self, worker: Incarnation, reached: Mapping[LeasedSource, int]) -> list[DataShardSource]:
        """Nobody has the worker's data now; gives what it had."""
        self.attendance.refuse(worker)
        return self.feeds.release(worker, reached) if isinstance(self.feeds, DataLedger) else []

    def _fence(self, *workers: Incarnation) -> list[Effect]:
        servers = self.deployment.servers
        held = tuple(source for worker in workers for source in self.leasing.held(worker))
        map_ = self.deployment.map if self.deployment.stage is Stage.OPEN else None
        return [FenceOnServers(self.id, servers, workers, held, map_)] if servers else []

    @property
    def step(self) -> int:
        """Where the job stands, as far as is known here."""
        return max(self.progress.step, self._step_seen)

    def _rank_records(self, given: Sequence[RankAssignment]) -> list[Effect]:
        return self.records(each.entry for each in given)

    def records(self, entries: Iterable[Entry]) -> list[Effect]:
        return [*records_of(self.id, entries)]

    def _persist(self, kind: str, **body: object) -> Persist:
        return Persist(kind, {"job": self.id, **body})


def _ended(source: LeasedSource, first: int | None, reached: int | None) -> dict[str, object]:
    """A lease that ended with its worker, for a record."""
    return {**source_body(source), "first": first, "next": reached}


def _reached(body: Body) -> Iterator[tuple[LeasedSource, int]]:
    """Where the leases of `_ended` stood, as far as that was known. Raises DamagedRecord."""
    for each in body.items("held"):
        require(isinstance(each, dict), "held: a lease that is no object")
        assert isinstance(each, dict)
        lease = Body(each)
        if not lease.is_null("next"):
            yield source_of(lease), lease.number("next", most=limits.SEQUENCE_MAX)
