"""One job: who works on it, what state it is in, whose the work is.

Owns: a job's life (STARTING, RUNNING, FINISHING, FINISHED or FAILED), its living workers, and the order of things when
one goes: fence it on the servers, then give its work to others. Invariants: an ended job changes no more, but for what
evaluators say of it, and its values, which stay on the servers while they are read; no work of a
lost worker is given away before WorkersFenced; the failure that ended a job is the answer to all its requests; each
change has its record in the same effects, and the records alone make the job anew (but for records.NOT_RECORDED).
Must not know: members that are not its workers, checkpoints' order, the network, what time it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from shardyard.checkpoints.manifest import left_name
from shardyard.ground import errors, limits
from shardyard.ground.types import (
    Consistency,
    DataLease,
    DataShardSource,
    Durability,
    Generation,
    Incarnation,
    JobId,
    LeasedSource,
    NonFinite,
    PartitionId,
    Rank,
    RankLease,
    RankSource,
    Source,
    SourceKey,
    Token,
    UpdateMode,
    WorkerSource,
)
from shardyard.runtime.settings import JobSettings
from shardyard_coordinator import backups, data_ledger, deployment, losses, step_ledger, tables
from shardyard_coordinator.checkpoints import Committed
from shardyard_coordinator.data_ledger import DataLedger
from shardyard_coordinator.departed import Departed, Nexts
from shardyard_coordinator.deployment import Deployment, Stage
from shardyard_coordinator.effects import (
    BatchVerdict,
    CheckpointStanding,
    Done,
    DropFeedback,
    DropJob,
    Effect,
    FeedbackVerdict,
    FenceOnServers,
    Followed,
    HandOverVerdict,
    JobState,
    LeaseClosed,
    MadeUp,
    NotFiniteVerdict,
    PassOver,
    Persist,
    ReadDeparted,
    ReadLedger,
    ReadSteps,
    ReadWatermarks,
    Rebased,
    Reply,
    Standing,
    StepDecision,
    StopTaken,
    Tell,
    records_of,
)
from shardyard_coordinator.evaluations import Evaluations
from shardyard_coordinator.events import (
    BatchBegun,
    CheckpointTaken,
    EvaluationReported,
    FeedbackRead,
    HandOverAsked,
    LeaseReturned,
    MemberLeft,
    NotFiniteReported,
    ReaderHeard,
    RebaseAsked,
    VariablesRegistered,
    WatermarksRead,
)
from shardyard_coordinator.feeds import FeedCounts, FeedDone, FeedSpec, LeaseWait, feed_opened
from shardyard_coordinator.going_over import GoingOver
from shardyard_coordinator.halting import Halting
from shardyard_coordinator.handovers import Fate, HandOver, HandOvers, Left
from shardyard_coordinator.losses import LostPushes, LostRange, LostResiduals
from shardyard_coordinator.nonfinite import NotFinite
from shardyard_coordinator.origins import Origin
from shardyard_coordinator.placement import Server
from shardyard_coordinator.progress import Progress, Report
from shardyard_coordinator.quarantine import QUARANTINED_MAX, Condemned, Suspects, source_body, source_of
from shardyard_coordinator.ranks import RankBook, RankGiven
from shardyard_coordinator.readers import Readers
from shardyard_coordinator.records import (
    SUM_MAX,
    Body,
    DamagedRecord,
    Entry,
    checked_float,
    checked_items,
    checked_text,
    require,
)
from shardyard_coordinator.safekeeping import Safekeeping, title_of
from shardyard_coordinator.step_ledger import StepLedger
from shardyard_coordinator.stopping import Stopping
from shardyard_coordinator.switching import Switching, settings_of
from shardyard_coordinator.tokens import Tokens

FENCED_MAX: Final = 1_024
"""So many fenced workers are named to servers again and again, the latest."""
LATE_MS: Final = 10_000
"""A job that is left by its last worker stays open for so long if fewer workers than expected have said goodbye: one
that starts late, or is restarted, finds its work done, where it would else begin the whole run anew."""


class Job:
    """`checkpoints`: where its checkpoints are if it leaves that to the coordinator."""

    def __init__(self, job: JobId, settings: JobSettings, now_ms: int, checkpoints: str | None = None) -> None:
        self.id = job
        self.settings = settings
        self.state = JobState.STARTING
        self.failure: errors.ShardyardError | None = None
        self.workers: list[Incarnation] = []
        self.fenced: list[Incarnation] = []
        self.fencing: list[Incarnation] = []
        self.deployment = Deployment(job, settings)
        self.progress = Progress(now_ms)
        self.lost = LostPushes()
        self._step_seen = 0
        self.ranks: RankBook | None = None
        self.feeds: DataLedger | StepLedger
        self.tokens = Tokens()
        self.suspects = Suspects(settings.data.poison_deaths)
        self.not_finite = NotFinite(settings.nonfinite_max)
        self.residuals = LostResiduals()
        self.departed = Departed() if self._goes_back_in_part else None
        self.handovers = HandOvers()
        self._reads_steps = False
        self.stopping = Stopping(by_steps=settings.consistency.mode.updates is UpdateMode.SYNC)
        self.switching = Switching(settings.consistency.mode, settings.consistency.bound)
        self.halting = Halting()
        self.readers = Readers()
        self.evaluations = Evaluations()
        self._kept_for_readers: list[DropJob] = []
        self._idle_since_ms = now_ms
        self._last_lost = ""
        self._goodbyes = 0
        self._chief_is_done = False
        self._finish_at_ms: int | None = None
        self._ends_with: errors.ShardyardError | None = None
        self._last_ticket = 0
        self._rows_seen: dict[Incarnation, tuple[int, ...]] = {}
        self.last_failure = ""
        """Of its last checkpoint, for behind what is said of it."""
        if settings.consistency.mode.updates is UpdateMode.SYNC:
            self.ranks = self.make_ranks(now_ms)
            self.feeds = self.make_step_ledger(settings)
        else:
            self.feeds = self.make_data_ledger()
        self.keeping = Safekeeping(
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
    def chief(self) -> Incarnation | None:
        """The living worker that came first; nobody once a chief has said goodbye, since what a chief does at the end
        of a script is done then."""
        return self.workers[0] if self.workers and not self._chief_is_done else None

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

    # ---- workers come and go

    def join(self, worker: Incarnation, now_ms: int) -> list[Effect]:
        self._enter(worker)
        given = [] if self.ranks is None else self.ranks.join(worker, now_ms)
        return [self._persist("worker_joined", worker=worker), *self._rank_records(given)]

    def lose(self, worker: Incarnation, how: str, now_ms: int, *, died: bool = True) -> list[Effect]:
        """A worker died, or is out. Its work waits until the servers refuse what it may still send."""
        said = self.progress.of(worker)
        residual = 0.0 if self.handovers.has_from(worker) else said.residual_norm
        record = self._remove(worker, how, now_ms, died=died, residual=residual, pushed=said.pushed)
        if self.state.ended:
            return [record]
        fence = self._fence(worker)
        return [record, *self._tell_residual(worker, residual), *(fence or self.free((worker,), now_ms))]

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
            if worker not in self.fencing:
                continue
            held = [_ended(source, self._first_of(source), reached.get(source)) for source in self._held(worker)]
            freed = self._free(worker, reached)
            effects.append(self._persist("worker_freed", worker=worker, held=held))
            effects += [Tell(f"{self.title}: {source} of worker {worker} is free again") for source in freed]
            effects += self.records(self.deployment.remove(worker))
            if self.ranks is not None:
                effects += self._rank_records(self.ranks.release(worker, now_ms))
        return effects

    def resume(self, servers: Iterable[Incarnation]) -> list[Effect]:
        """After a restart: what may not have reached the servers, of which these live, is said to them again."""
        if self.state.ended:
            living = frozenset(servers)
            return self._give_up([server for server in self.deployment.servers if server.incarnation in living])
        return self._fence(*self.fencing) if self.fencing else []

    def leave(self, left: MemberLeft, now_ms: int) -> list[Effect]:
        """A worker says goodbye; it sends nothing more. The last one ends the job, at once if as many as were expected
        have said so."""
        worker, error = left.incarnation, left.error
        residual = self.progress.of(worker).residual_norm if error else left.residual_lost
        residual = 0.0 if self.handovers.has_from(worker) else residual
        how = f"left ({error})" if error else "left"
        record = self._remove(worker, how, now_ms, goodbye=not error, residual=residual, pushed=left.pushed)
        if self.state.ended:
            return [record]
        if error and not self.workers:
            failure = errors.WorkerFailed(
                f"its last worker, {worker}, left with an error: {error}", facts={"worker": str(worker)}
            )
            return [record, *self.fail(failure)]
        if not self.workers and self._heard_from >= self.settings.workers_expected:
            return [record, *self._finish(now_ms)]
        told = self._tell_residual(worker, residual)
        return [record, *told, *self.free((worker,), now_ms), *self._fence(worker)]

    def _tell_residual(self, worker: Incarnation, norm: float) -> list[Effect]:
        if not norm:
            return []
        what = f"what compression had not sent yet, of 2-norm {norm:.3g} when it was last heard of"
        return [Tell(f"{self.title}: worker {worker} took along {what}", warning=True)]

    def lose_server(self, server: Server, how: str, now_ms: int) -> list[Effect]:
        """A server is gone, and with it the partitions that it had, or was to have, if any."""
        lost = self.keeping.lost_with(server)
        self._kept_for_readers = [each for each in self._kept_for_readers if each.server != server]
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
        self.failure = failure
        return self._end(JobState.FAILED, gone)

    def tick(self, now_ms: int, servers: Sequence[Server]) -> list[Effect]:
        """`servers`: the living."""
        self.readers.expire(now_ms)
        if self.state.ended:
            return self._drop_when_read(now_ms)
        if self.state is JobState.FINISHING:
            if now_ms - self._idle_since_ms >= self.settings.idle_ms:
                late = f"it was not written within {self.settings.idle_ms / 1000:g} s{self.last_failure}"
                return self._end_without(late)
            self._last_ticket = self._last_ticket or self.keeping.ask_for_the_last(self.step)
            return self._keep(now_ms, servers)
        if self._finish_at_ms is not None and now_ms >= self._finish_at_ms:
            return self._finish(now_ms)
        idle_ms = now_ms - self._idle_since_ms
        if not self.workers and self.stopping.stop is not None and idle_ms >= LATE_MS:
            return self._finish(now_ms)
        if not self.workers and idle_ms >= self.settings.idle_ms:
            left = errors.WorkerFailed(
                f"{self.title} has had no worker for {self.settings.idle_ms / 1000:g} s; the last one, "
                f"{self._last_lost}",
                why="a job without workers is ended after job.idle_ms",
                todo="start the script again for a new run",
            )
            return self._finish(now_ms, left) if self.is_whole else self.fail(left)
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
        told = [Tell(f"{self.title} is told to stop by {by}{f': {reason}' if reason else ''}")] if asked else []
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
        return (halts or self.stopping.is_due(self.workers)) and not self.fencing and self.is_whole

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
        return [*self.records(settled), Tell(f"{self.title} stops before step {self.stopping.stop.step:,}")]

    def forget_steps(self) -> None:
        """They could not be read."""
        self._reads_steps = False

    # ---- another consistency

    @property
    def going_over(self) -> GoingOver:
        """What has it go on by other rules while it runs."""
        return GoingOver(self)

    @property
    def consistency(self) -> Consistency | None:
        """What workers of a job that was switched go by."""
        return self.switching.in_force if self.switching.latest.number else None

    def end_pacing(self, generation: Generation, number: int) -> list[Effect]:
        """The servers of that map go by the switch of that number."""
        if self.state.ended or not self.switching.end(generation, number):
            return []
        return [
            Tell(f"{self.title}: all servers go by {self.switching.latest}; so do its workers from their next step")
        ]

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
        reading: list[Effect] = []
        due = self.departed is not None and self.departed.is_due and self.is_whole
        if due and self.departed is not None and self.deployment.map is not None:
            workers = self.departed.ask(now_ms)
            reading = [ReadDeparted(self.id, self.deployment.map, workers)] if workers else []
        waits = self._waits_to_hand_over or self.handovers.holds(now_ms, self.deployment.workers)
        holds = due or (self.state is not JobState.FINISHING and waits)
        left = tuple(each.file for each in self.handovers.left)
        # who has not gone over to a bound does not say when it has no work any more
        paced = frozenset(filter(self.switching.goes_by_latest, self.workers))
        return [*reading, *self.keeping.tick(now_ms, self.step, servers, self._gone, paced, holds=holds, left=left)]

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
            effects += self._go_back_with(committed, generation, is_same_run=is_same_run)
        return [*effects, *self._begin_running()]

    def _go_back_with(self, committed: Committed, generation: Generation, *, is_same_run: bool) -> list[Effect]:
        """All partitions are as the checkpoint has them, and so shall be what workers have not sent."""
        if not committed.feedback and not self.keeping.keeps_feedback:
            return []
        record = self.handovers.go_back(committed, committed.url, generation, is_same_run=is_same_run)
        told = f"{self.title}: what {len(committed.feedback)} workers had not sent at checkpoint {committed.number}"
        tell = [Tell(f"{told} is handed over")] if committed.feedback else []
        return [*self.records([record]), *tell]

    def handed_to(self, worker: Incarnation) -> tuple[HandOver, ...]:
        """What the worker's error feedback shall take up."""
        return self.handovers.told_to(worker, self.workers, self.deployment.workers, frozen=self._is_frozen)

    def take_feedback(self, read: FeedbackRead) -> list[Effect]:
        worker, lost = read.caller.incarnation, bool(read.failure)
        claim = self.handovers.take(
            worker, self.workers, read.generation, read.worker, lost=lost, frozen=self._is_frozen
        )
        effects: list[Effect] = [] if claim.record is None else self.records([claim.record])
        if claim.lost is not None:
            self.residuals.add_lost(claim.lost)
            what = f"what worker {read.worker} had not sent is lost: worker {worker} could not take it up"
            effects.append(Tell(f"{self.title}: {what}: {read.failure}", warning=True))
        return [
            *effects,
            *self._drop([claim.left] if claim.left is not None else []),
            Reply(FeedbackVerdict(claim.taken)),
        ]

    def hand_over_feedback(self, asked: HandOverAsked, now_ms: int) -> list[Effect]:
        """A worker leaves whose steps have no room for what it has not sent. Raises InvalidRequest where nobody could
        read it, TooLarge."""
        worker, url = asked.caller.incarnation, self.keeping.book.url
        if self.ranks is None:
            raise errors.InvalidRequest(
                f"{self.title} is asynchronous: what a worker has not sent when it leaves is its last push"
            )
        fate = self._fate_of(asked)
        if fate not in (Fate.WAIT, Fate.WRITE):
            return [Reply(HandOverVerdict(fate))]
        if url is None:
            raise errors.InvalidRequest(
                f"{self.title} has no storage", why="job.checkpoint.url is never, or there is no state folder"
            )
        # what is older than the newest checkpoint, and not in it, was pruned
        if fate is Fate.WAIT or asked.file is None or asked.file.file.number <= self.keeping.book.base:
            if fate is Fate.WRITE:
                self.handovers.begin_leaving(worker, now_ms)
            return [Reply(HandOverVerdict(fate, url))]
        record = self.handovers.hand_over(Left(worker, url, asked.file, asked.norm), now_ms)
        told = f"{self.title}: worker {worker} leaves; what it has not sent (2-norm {asked.norm:.3g}) is handed over"
        return [*self.records([record]), Tell(told), Reply(HandOverVerdict(Fate.HANDED_OVER))]

    def _fate_of(self, asked: HandOverAsked) -> Fate:
        worker, keeping = asked.caller.incarnation, self.keeping
        if self.handovers.has_from(worker):
            return Fate.HANDED_OVER
        goes_back = keeping.recovery.needed and keeping.trails is None
        if asked.gone_back != self.handovers.generation or goes_back:
            return Fate.VOID
        if not self._goes_on_without(worker):
            return Fate.UNWANTED
        if self._is_frozen or left_name(worker) in self.handovers.due:
            return Fate.WAIT
        return Fate.WRITE

    def _goes_on_without(self, worker: Incarnation) -> bool:
        """Whether there is, or may come, a worker that takes further steps when this one has left."""
        if self.state is not JobState.RUNNING or self._is_through or self.stopping.is_over(self.step):
            return False
        if any(each != worker and not self.handovers.is_leaving(each) for each in self.workers):
            return True
        return self._heard_from + len(self.workers) < self.settings.workers_expected

    @property
    def _is_through(self) -> bool:
        """Whether all data of a synchronous job is done, and nobody has taken steps without any since."""
        feeds = self.feeds
        return isinstance(feeds, StepLedger) and feeds.finished and self.step <= feeds.end(len(feeds) - 1)

    @property
    def _is_frozen(self) -> bool:
        """Whether a checkpoint is being taken: nothing that was left may change hands between its files."""
        return self.keeping.book.draft is not None

    def _drop(self, unneeded: Iterable[Left]) -> list[Effect]:
        """Files that nobody reads any more; while a manifest may be written that names them, they are left alone."""
        if self.keeping.book.is_writing:
            return []
        return [DropFeedback(each.url, self.settings.name, each.file) for each in unneeded]

    @property
    def _waits_to_hand_over(self) -> bool:
        """Whether there is something to be taken up, and nobody to do so yet: nobody trains either, and a checkpoint
        would lack it. But for one for which workers wait."""
        return bool(self.handovers.due) and not self.deployment.workers and self.keeping.can_begin

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
            self._settle_departed(self.keeping.book.committed.gone)
        if self._last_ticket and isinstance(self.keeping.book.outcome(self._last_ticket), Committed):
            return [*effects, *self._conclude()]
        return effects

    def fail_checkpoint(self, draft: int, failure: errors.ShardyardError, now_ms: int) -> list[Effect]:
        if self.state.ended:
            return []
        effects = self.keeping.fail_checkpoint(draft, failure, now_ms)
        if self._last_ticket and draft >= self._last_ticket:
            self.last_failure = f", which failed at last by: {failure.what}"
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
        standing = CheckpointStanding(self.settings.name, ticket or book.ask(), book.url)
        if isinstance(found, Committed):
            standing = replace(standing, taken=found)
        elif found is not None:
            standing = replace(standing, failure=found)
        return [Reply(standing)]

    def _finish(self, now_ms: int, failure: errors.ShardyardError | None = None) -> list[Effect]:
        """All workers have said goodbye, or, which is the failure that the job ends with, none has come for long: what
        the newest checkpoint lacks is written down before the job ends."""
        self._ends_with = failure
        committed = self.keeping.book.committed
        kept = () if committed is None else committed.feedback
        if self.keeping.is_whole_at(self.step) and all(each.file in kept for each in self.handovers.left):
            return self._conclude()
        self.state = JobState.FINISHING
        self._idle_since_ms = now_ms
        self._last_ticket = self.keeping.ask_for_the_last(self.step)
        done = "is done" if failure is None else "has no workers any more"
        told = Tell(f"{self.title} {done}; its last checkpoint is written")
        return [*self.free(tuple(self.fencing), now_ms), *self.records([self._finishing]), told]

    def _end_without(self, why: str) -> list[Effect]:
        told = f"{self.title} ends without its last checkpoint: {why}; what came after the newest one is lost"
        return [Tell(told, warning=True), *self._conclude()]

    def _conclude(self) -> list[Effect]:
        failure, self._ends_with = self._ends_with, None
        return self._end(JobState.FINISHED) if failure is None else self.fail(failure)

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
                feedback=self.handed_to(worker),
                gone_back=self.handovers.generation,
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
            effects.append(Reply(Done()))
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
        return [Tell(f"{self.title} runs: {len(self.deployment.layout.variables)} variables{tables} on the servers")]

    def begin_with(self, origin: Origin) -> list[Effect]:
        """Before anybody joins: the job goes on from a checkpoint of another run."""
        self._step_seen = origin.step
        return self.records(self.keeping.begin_with(origin))

    def go_back(self, origin: Origin, now_ms: int) -> list[Effect]:
        if self.state is not JobState.RUNNING or self.deployment.stage is not Stage.OPEN:
            raise errors.NotReady(
                f"{self.title} is {self.state.value}",
                why="",
                todo="wait until it runs or has ended, then order it again",
            )
        return self.keeping.go_back(origin, now_ms, is_of_before=self.switching.is_checkpoint_of_before(origin.number))

    # ---- data

    def open_feed(self, feed: int, spec: FeedSpec) -> list[Effect]:
        known = len(self.feeds)
        stop = self.stopping.stop
        if isinstance(self.feeds, StepLedger) and stop is not None and stop.settled:
            never = self.feeds.never(feed, spec)
            if never is not None:
                return [Reply(never)]
        opening = self.feeds.open(feed, spec)
        if opening.done and not self.keeping.has_all_steps_of(feed):
            # as to those who were here before (rule A11)
            opening = replace(opening, done=False)
        opened = [feed_opened(feed, spec, opening)] if len(self.feeds) > known else []
        return [*self.records(opened), Reply(opening)]

    def lease(self, worker: Incarnation, feed: int) -> list[Effect]:
        if self.state is not JobState.RUNNING:
            raise errors.NotReady(
                f"{self.title} has no variables on the servers yet, so no work can be counted",
                todo="call job.prepare before job.batches; then it is only a moment",
            )
        awaits = self.going_over.awaits_work
        if isinstance(self.feeds, StepLedger):
            if awaits is not None and not self.switching.goes_by_latest(worker):
                return [Reply(awaits)]
            raise errors.InvalidRequest(
                f"{self.title} is synchronous: it leases logical ranks, not data shards",
                todo="ask for no lease; the job's ranks come with heartbeats",
            )
        before = self.tokens.latest
        answer = self.feeds.lease(feed, worker, fresh=awaits is None)
        if isinstance(answer, LeaseWait):
            answer = awaits or answer
        if isinstance(answer, FeedDone) and not self.keeping.has_all_data:
            # were it lost now, nobody would be there to compute it again (rule A11)
            self.keeping.book.want()
            answer = LeaseWait("a checkpoint that has all of this data")
        leased: list[Entry] = []
        if self.tokens.latest > before:
            assert isinstance(answer, DataLease), answer
            first = self._first_of(answer.source)
            leased.append(data_ledger.data_leased(answer.source, worker, answer.token, first=first))
        if isinstance(answer, DataLease):
            answer = replace(answer, careful_below=self._careful_below(answer.source))
        return [*self.records(leased), Reply(answer)]

    def begin_batch(self, begun: BatchBegun) -> list[Effect]:
        """Rule A13. A batch that some partition has counted was computed once, and is never condemned."""
        source, sequence, worker = begun.source, begun.sequence, begun.caller.incarnation
        self._check_begin(begun)
        if self.feeds.quarantine.has(source, sequence) or self._is_over_for(source, sequence):
            return [Reply(BatchVerdict(False, self._careful_below(source)))]
        told: list[Effect] = []
        entry: Entry | None
        if begun.highest > sequence or self.feeds.quarantine.full or not self.suspects.condemns(source, sequence):
            entry = self.suspects.begin(worker, source, sequence)
        elif self.keeping.book.draft is not None:
            # it may have copied the data ledger already, and cut partitions later than this (rule A9)
            return [Reply(BatchVerdict(None, self._careful_below(source)))]
        else:
            condemned = Condemned(source, sequence, self.suspects.deaths(source, sequence))
            self.feeds.quarantine.add(condemned)
            entry = condemned.entry
            what = "step" if self.ranks is not None else "batch"
            why = f"{condemned.deaths} workers have died at it"
            told.append(Tell(f"{self.title}: {what} {sequence} of {source} is in quarantine: {why}", warning=True))
        counts = not told
        return [
            *self.records([] if entry is None else [entry]),
            *told,
            Reply(BatchVerdict(counts, self._careful_below(source))),
        ]

    def _is_over_for(self, source: LeasedSource, step: int) -> bool:
        """Whether a rank's contribution to a step came too late: the samples count at another step, and are not
        condemned under this name."""
        if not isinstance(self.feeds, StepLedger) or not isinstance(source, RankSource):
            return False
        return source.rank in self.feeds.verdicts.left_out(step)

    def _check_begin(self, begun: BatchBegun) -> None:
        """Raises StaleToken, NotFound or InvalidRequest unless the worker has this to compute."""
        source, worker, token = begun.source, begun.caller.incarnation, begun.token
        if isinstance(self.feeds, DataLedger):
            self._check_former(source)
            self.feeds.check_begin(source, worker, token, begun.sequence)
            return
        self._check_former(source)
        self.feeds.check_begin(source, begun.sequence)
        self._check_rank(source, worker, token)

    def _check_former(self, source: Source) -> None:
        """Raises StaleToken for work of a kind that the job does not have any more."""
        of_before = RankSource if self.ranks is None else DataShardSource | WorkerSource
        if isinstance(source, of_before) and self.switching.has_gone_over:
            raise errors.StaleToken(f"{source} of {self.title}, which has gone over to {self.switching.latest}")

    def _check_rank(self, source: LeasedSource, worker: Incarnation, token: Token) -> None:
        """Raises StaleToken unless the logical rank is the worker's."""
        assert self.ranks is not None
        if not any(RankSource(lease.rank) == source and lease.token == token for lease in self.ranks.of(worker)):
            raise errors.StaleToken(
                f"worker {worker} does not have {source} under token {token}", facts={"token": str(token)}
            )

    def report_not_finite(self, said: NotFiniteReported) -> list[Effect]:
        """A gradient is not finite: its work does not count from now on, whoever computes it (rule A4). The answer is
        the last effect; where it says WorkerQuarantined, the worker is to be lost. Raises StaleToken, StraddlingRange,
        NotFound, InvalidRequest."""
        policy, worker = self.settings.nonfinite, said.caller.incarnation
        if policy is NonFinite.ALLOW:
            raise errors.InvalidRequest(f"{said.work} of {self.title}, which takes what is not finite")
        of_data = self._check_reported(said)
        parts = isinstance(of_data, DataShardSource) or self.settings.consistency.rows_at_once
        counted = of_data is not None and parts and said.first < said.highest
        if counted and said.highest <= said.last:
            raise errors.StraddlingRange(
                f"{said.work}, of which partitions have counted what is before #{said.highest}"
            )
        sequences = range(said.first, said.last + 1) if of_data is not None and not counted else ()
        quarantine = self.feeds.quarantine
        fresh = [
            Condemned(of_data, sequence, parameter=said.parameter, worker=worker)
            for sequence in sequences
            if of_data is not None and not quarantine.has(of_data, sequence)
        ]
        if policy is NonFinite.FAIL or len(quarantine) + len(fresh) > QUARANTINED_MAX:
            return self._fail_by_not_finite(said, said.title)
        if fresh and self.ranks is None and self.keeping.book.draft is not None:
            # as with a batch that kills: a checkpoint may have copied the data ledger already (rule A9)
            return [Reply(NotFiniteVerdict(decided=False))]
        for condemned in fresh:
            quarantine.add(condemned)
        effects = self.records([each.entry for each in fresh])
        if not self.not_finite.take(worker, said.count, said.in_a_row):
            return [*effects, Reply(NotFiniteVerdict(decided=True))]
        effects += self.records([said.entry])
        effects.append(Tell(f"{self.title}: {said.title}; it does not count", warning=True))
        if not self.not_finite.expels(worker):
            return [*effects, Reply(NotFiniteVerdict(decided=True))]
        row = f"{said.in_a_row} gradients in a row of worker {worker} were not finite; the last: {said.title}"
        if self.workers == [worker]:
            before = self.not_finite.quarantined
            others = f", and {before} workers were out before it" if before else ""
            return [*effects, *self._fail_by_not_finite(said, f"{row}{others}; the loss has diverged")]
        self.not_finite.quarantine()
        out: Entry = ("worker_quarantined", {"worker": worker, "step": said.step, "parameter": said.parameter})
        failure = errors.WorkerQuarantined(row, facts=said.facts)
        return [*effects, *self.records([out]), Reply(NotFiniteVerdict(decided=True, failure=failure))]

    def _fail_by_not_finite(self, said: NotFiniteReported, what: str) -> list[Effect]:
        failure = errors.NonFiniteGradient(what, facts=said.facts)
        return [*self.fail(failure), Reply(NotFiniteVerdict(decided=True, failure=failure))]

    def _check_reported(self, said: NotFiniteReported) -> LeasedSource | None:
        """The source, where its work is that of a data set. Raises StaleToken, NotFound or InvalidRequest unless the
        worker has it to compute."""
        source, worker = said.source, said.caller.incarnation
        self._check_former(source)
        if isinstance(self.feeds, DataLedger) and not isinstance(source, WorkerSource):
            self.feeds.check_begin(source, worker, said.token, said.last)
            return source
        if isinstance(self.feeds, StepLedger) and isinstance(source, RankSource) and said.first == said.last:
            self._check_rank(source, worker, said.token)
            return source if self.feeds.has_step(said.first) else None
        if self.ranks is not None or source != WorkerSource(worker):
            raise errors.InvalidRequest(f"{said.work} by worker {worker} in {self.title}")
        return None

    def _careful_below(self, source: LeasedSource) -> int:
        """Sequences of the source before this one are announced."""
        return limits.SEQUENCE_MAX if self.suspects.has(source) else self.feeds.quarantine.end(source)

    def return_lease(self, returned: LeaseReturned) -> list[Effect]:
        """Replies, or reads the servers' ledgers."""
        if self._is_of_before(returned):
            return [Reply(LeaseClosed(done=returned.data_shard is not None))]
        if self._is_closed(returned):
            return [Reply(LeaseClosed(done=self.keeping.has_all_steps_of(returned.feed)))]
        if self.deployment.map is None or self.deployment.stage is not Stage.OPEN:
            raise errors.NotReady(f"{self.title} has no variables on the servers yet, so no work is counted")
        keys: tuple[SourceKey, ...]
        if returned.data_shard is not None:
            keys = (SourceKey(returned.data_shard),)
        else:
            assert self.ranks is not None
            keys = tuple(SourceKey(RankSource(rank)) for rank in self.ranks.all)
        return [ReadLedger(self.id, self.deployment.map, keys)]

    def close_lease(self, returned: LeaseReturned, next_sequence: int, generation: Generation) -> list[Effect]:
        """Replies; asks again where partitions have gone back since the ledgers were read."""
        if generation != self.deployment.generation or self._is_of_before(returned):
            return self.return_lease(returned)
        source, worker = returned.data_shard, returned.caller.incarnation
        if isinstance(self.feeds, StepLedger):
            known = self.feeds.is_closed(returned.feed)
            done = self.feeds.close(returned.feed, next_sequence=next_sequence)
            self._step_seen = max(self._step_seen, next_sequence)
            closed = []
            if done and not known:
                closed.append(step_ledger.feed_closed(returned.feed, self.feeds.end(returned.feed)))
            return [*self.records(closed), Reply(LeaseClosed(self._is_kept(returned.feed, next_sequence, done=done)))]
        assert source is not None
        if self.feeds.is_closed(source, worker, returned.token):
            return [Reply(LeaseClosed(done=True))]
        first = self._first_of(source)
        done = self.feeds.close(source, worker, returned.token, next_sequence=next_sequence)
        record = data_ledger.data_closed(source, worker, returned.token, done=done, first=first, reached=next_sequence)
        self._settle_suspicion(source, worker, done=done)
        return [*self.records([record]), Reply(LeaseClosed(done))]

    def decide_step(self, step: int, ranks: tuple[Rank, ...]) -> list[Effect]:
        """Rule B6: the verdict who counts in a step, as soon as enough ranks have contributed; written down before
        anybody hears of it."""
        feeds, book = self._steps, self.ranks
        assert book is not None
        if ranks and ranks[-1] >= len(book.all):
            raise errors.InvalidRequest(f"logical rank {ranks[-1]} of {self.title}, which has {len(book.all)}")
        feeds.verdicts.tell(step, ranks)
        left_out = feeds.due(step)
        records: list[Effect] = []
        if left_out is not None:
            late = feeds.decide(step, left_out)
            owners = [book.owner(rank) or Incarnation(0) for rank in late]
            dropped = [(owner, owners.count(owner)) for owner in sorted(set(owners))]
            feeds.verdicts.drop(dropped)
            records += self.records([backups.steps_decided(step, [left_out], dropped)])
        return [*records, Reply(StepDecision(feeds.verdicts.members(step)))]

    def read_make_up(self, feed: int, step: int) -> list[Effect]:
        """Raises NotFound, InvalidRequest, NotReady."""
        return [Reply(MadeUp(*self._steps.made_up(feed, step)))]

    @property
    def _steps(self) -> StepLedger:
        """Raises InvalidRequest where the job has no backup workers."""
        if not isinstance(self.feeds, StepLedger) or not self.settings.consistency.backup_workers:
            raise errors.InvalidRequest(f"{self.title} has no backup workers: each step is of all its ranks")
        return self.feeds

    @property
    def dropped(self) -> int:
        """Contributions that came late, in all."""
        return self.feeds.verdicts.dropped if isinstance(self.feeds, StepLedger) else 0

    def dropped_by(self, worker: Incarnation) -> int:
        return self.feeds.verdicts.dropped_by(worker) if isinstance(self.feeds, StepLedger) else 0

    def verdicts_before(self, step: int) -> list[Entry]:
        """For a checkpoint of that step."""
        return self.feeds.verdicts.entries(before=step) if isinstance(self.feeds, StepLedger) else []

    def _is_kept(self, feed: int, step: int, *, done: bool) -> bool:
        """Whether a synchronous job that stands at `step` has all that it shall have of a feed in a checkpoint."""
        if done:
            return self.keeping.has_all_steps_of(feed)
        stop = self.stopping.stop
        return stop is not None and self.stopping.is_over(step) and self.keeping.has_steps_before(stop.step)

    # ---- work without leased data

    def rebase(self, asked: RebaseAsked) -> list[Effect]:
        """Reads what each partition has of a worker's own source."""
        if self.ranks is not None:
            raise errors.InvalidRequest(f"{self.title} is synchronous: its workers have no sources of their own")
        if self.state is not JobState.RUNNING or self.keeping.recovery.needed:
            raise errors.NotReady(f"{self.title} has partitions that are not there yet")
        assert self.deployment.map is not None
        return [ReadWatermarks(self.id, self.deployment.map, asked.caller.incarnation)]

    def declare_lost(self, read: WatermarksRead) -> list[Effect]:
        """What partitions lack before the sequence that the worker goes on with is lost: written down first, then
        passed over, so that it is never passed over in silence (rule A11)."""
        worker, next_sequence = read.asked.caller.incarnation, read.asked.next
        if self.keeping.recovery.needed or read.generation != self.deployment.generation:
            raise errors.NotReady(f"{self.title} has restored partitions while they were asked")
        lost = tuple(LostRange(partition, found, next_sequence - 1) for partition, found in read.nexts)
        lost = tuple(each for each in lost if each.first <= each.last)
        if not lost:
            return [Reply(Rebased(()))]
        self.lost.add(worker, lost)
        assert self.deployment.map is not None
        return [
            *self.records([losses.pushes_lost(worker, lost)]),
            Tell(f"{self.title}: pushes of worker {worker} are lost: {losses.described(lost)}", warning=True),
            PassOver(self.id, self.deployment.map, worker, next_sequence, lost),
        ]

    def declare_lost_of_departed(
        self, generation: Generation, found: Mapping[Incarnation, Nexts], now_ms: int
    ) -> list[Effect]:
        """What partitions that were restored lack of workers that are gone: there is nobody to pass it over for."""
        if self.state.ended or self.departed is None:
            return []
        if not self.is_whole or generation != self.deployment.generation:
            return self.fail_departed(now_ms)
        effects: list[Effect] = []
        for worker, lost in self.departed.answer(found).items():
            before = self.lost.count
            self.lost.add(worker, lost)
            effects += self.records([losses.pushes_lost(worker, lost)])
            if self.lost.count > before:
                said = f"pushes of worker {worker}, which is gone, are lost: {losses.described(lost)}"
                effects.append(Tell(f"{self.title}: {said}", warning=True))
        return effects

    def fail_departed(self, now_ms: int) -> list[Effect]:
        if self.departed is not None:
            self.departed.fail(now_ms)
        return []

    # ---- readers

    @property
    def is_read(self) -> bool:
        """Whether its values stay on the servers though it is finished."""
        return bool(self._kept_for_readers)

    def hear_reader(self, heard: ReaderHeard, now_ms: int) -> list[Effect]:
        """Somebody reads the job's values, or does not any more. Raises TooLarge."""
        effects: list[Effect] = []
        if heard.leaves:
            self.readers.leave(heard.reader)
            effects = self._drop_when_read(now_ms)
        elif not self.state.ended or self.is_read:
            self.readers.hear(heard.reader, now_ms)
        followed = Followed(
            job=self.id,
            job_name=self.settings.name,
            state=self.state,
            failure=self.failure,
            mode=self.settings.consistency.mode.updates,
            map=self.deployment.map if self.is_whole and (not self.state.ended or self.is_read) else None,
            layout=self.deployment.layout,
            url=self.keeping.book.url,
        )
        return [*effects, Reply(followed)]

    def take_evaluation(self, reported: EvaluationReported) -> list[Effect]:
        return [*self.records(self.evaluations.report(reported.evaluation, reported.best)), Reply(Done())]

    def _give_up(self, servers: Sequence[Server]) -> list[Effect]:
        """These have nothing to do for the job any more, unless somebody reads its last values."""
        drops = [DropJob(self.id, server) for server in servers]
        if self.state is JobState.FINISHED and self.readers.may_be_there:
            self._kept_for_readers, drops = drops, []
        return [*drops]

    def _drop_when_read(self, now_ms: int) -> list[Effect]:
        if not self._kept_for_readers:
            return []
        self.readers.end(now_ms)
        self.readers.expire(now_ms)
        return [] if self.readers.may_be_there else self.drop_kept()

    def drop_kept(self) -> list[Effect]:
        """Nobody reads the values any more."""
        drops, self._kept_for_readers = self._kept_for_readers, []
        return [*drops]

    # ---- what people and workers want to know

    def report(self, worker: Incarnation, report: Report, now_ms: int) -> None:
        if not self.state.ended:
            self.progress.take(worker, report, now_ms)

    def standing(self, worker: Incarnation) -> Standing:
        return Standing(
            job_state=self.state,
            failure=self.failure,
            generation=self.deployment.generation,
            ranks=self.ranks_of(worker),
            chief=self.chief == worker,
            workers=len(self.workers),
            initializer=self.deployment.initializer == worker and self.deployment.stage is Stage.CREATED,
            recovering=self.keeping.recovery.needed,
            feedback=self.handed_to(worker),
            gone_back=self.handovers.generation,
            stop=self.stopping.stop,
            checkpoint=self.keeping.book.committed,
            consistency=self.consistency,
            halt=self.halting.halt,
        )

    def ranks_of(self, worker: Incarnation) -> tuple[RankLease, ...]:
        leases = () if self.ranks is None else self.ranks.of(worker)
        return tuple(replace(lease, careful_below=self._careful_below(RankSource(lease.rank))) for lease in leases)

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
        gone: Entry = (
            "workers_gone",
            {
                "goodbyes": self._goodbyes,
                "chief_is_done": self._chief_is_done,
                "last_lost": self._last_lost,
                "fenced": self.fenced,
                "fencing": self.fencing,
                "finishes": self._finish_at_ms is not None,
            },
        )
        return [
            ("job_started", {"settings": self.settings.model_dump(mode="json")}),
            *(("worker_joined", {"worker": worker}) for worker in self.workers),
            *([gone] if self._last_lost else []),
            *self.switching.entries(),
            *self.halting.entries(),
            *self.deployment.entries(),
            *([] if self.ranks is None else self.ranks.entries()),
            *self.feeds.entries(),
            *self.suspects.entries(),
            *self.not_finite.entries(),
            *self.residuals.entries(),
            *([] if self.departed is None else self.departed.entries()),
            *self.handovers.entries(),
            *self.stopping.entries(),
            *self.evaluations.entries(),
            *self.keeping.entries(),
            *self.lost.entries(),
            *([("token_given", {"token": self.tokens.latest})] if self.tokens.latest else []),
            *([self._finishing] if self.state is JobState.FINISHING else []),
            *([self._ended] if self.state.ended else []),
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
                    self._settle_suspicion(source_of(body), Incarnation(body.number("worker")), done=body.flag("done"))
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
            case "feedback_due" | "feedback_handed_over" | "feedback_taken" | "feedback_taken_before":
                lost = self.handovers.restore(kind, body, now_ms)
                if lost is not None:
                    self.residuals.add_lost(lost)
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
                    self._settle_departed([Incarnation(each) for each in body.numbers("gone")])
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
            case "job_finishing":
                require(not self.state.ended, "the job has ended before")
                self.state = JobState.FINISHING
                self._idle_since_ms = now_ms
                self._ends_with = _failure_of(body)
            case "job_ended":
                self._restore_end(body)
            case _:
                raise DamagedRecord("its kind is unknown to this release")

    def _restore_workers(self, kind: str, body: Body, now_ms: int) -> None:
        if kind == "workers_gone":
            self._goodbyes, self._chief_is_done = body.number("goodbyes"), body.flag("chief_is_done")
            self._last_lost = body.text("last_lost")
            self.fenced = [Incarnation(each) for each in body.numbers("fenced")][-FENCED_MAX:]
            self.fencing = [Incarnation(each) for each in body.numbers("fencing")]
            self._finish_at_ms = now_ms + LATE_MS if body.flag("finishes") else None
            return
        worker = Incarnation(body.number("worker", least=1))
        if kind == "worker_joined":
            require(worker not in self.workers, f"worker {worker} joins twice")
            self._enter(worker)
            if self.ranks is not None:
                self.ranks.enter(worker)
        elif kind == "worker_gone":
            require(worker in self.workers, f"worker {worker} goes and was not there")
            goodbye, died, residual = body.flag("goodbye"), body.flag("died"), body.real("residual")
            pushed = body.number("pushed", most=limits.SEQUENCE_MAX)
            self._remove(worker, body.text("how"), now_ms, goodbye=goodbye, died=died, residual=residual, pushed=pushed)
        else:
            require(worker in self.fencing, f"worker {worker} is free of its work twice")
            self._free(worker, dict(_reached(body)))
            self.deployment.forget(worker)
            if self.ranks is not None:
                self.ranks.vacate(worker, now_ms)

    @property
    def _finishing(self) -> Entry:
        return "job_finishing", {"failure": _failure_body(self._ends_with)}

    @property
    def _ended(self) -> Entry:
        progress = self.progress
        return "job_ended", {
            "state": self.state.value,
            "failure": _failure_body(self.failure),
            "step": progress.step,
            "samples": progress.samples,
            "metrics": [[name, value] for name, value in progress.metrics],
        }

    def _restore_end(self, body: Body) -> None:
        ends = {state.value: state for state in JobState if state.ended}
        state = body.text("state")
        require(state in ends, f"state: expected one of {', '.join(ends)}, got {state!r}")
        self.state = ends[state]
        self.keeping.origin = None
        self.failure, self._ends_with = _failure_of(body), None
        require((self.failure is None) == (self.state is JobState.FINISHED), "a failure where the job is finished")
        metrics = [checked_items(each, "a metric", count=2) for each in body.items("metrics")]
        self.progress.restore(
            step=body.number("step"),
            samples=body.number("samples", most=SUM_MAX),
            metrics=tuple(
                (checked_text(name, "a metric"), checked_float(value, "a metric")) for name, value in metrics
            ),
        )

    # ---- within

    def _enter(self, worker: Incarnation) -> None:
        self.workers = sorted([*self.workers, worker])
        self._finish_at_ms = None

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
            self.suspects.lose(worker, self._held(worker))
        self.suspects.leave(worker)
        if isinstance(self.feeds, StepLedger):
            self.feeds.verdicts.leave(worker)
        self.handovers.forget(worker)
        if goodbye:
            self._goodbyes += 1
            self._chief_is_done = self._chief_is_done or self.chief == worker
        self.workers = [each for each in self.workers if each != worker]
        self.progress.forget(worker)
        self.not_finite.forget(worker)
        self.switching.forget(worker)
        if self.departed is None or (not pushed and not died):
            self.lost.forget(worker)
        else:
            for given_up in self.departed.add(worker, pushed):
                self.lost.forget(given_up)
        self._last_lost = f"worker {worker}, {how}"
        if not self.workers:
            self._idle_since_ms = now_ms
            # who died after the others had done all there was has nothing left to do, and nobody may start it again
            is_done = goodbye or (died and self._goodbyes > 0 and self.feeds.finished)
            late_ms = 0 if self._heard_from >= self.settings.workers_expected else LATE_MS
            self._finish_at_ms = now_ms + late_ms if is_done else None
        if self.ranks is not None:
            self.ranks.suspend(worker)
        self.deployment.suspend(worker)
        self.fenced = [*self.fenced, worker][-FENCED_MAX:]
        self.fencing = [*self.fencing, worker]
        return self._persist(
            "worker_gone", worker=worker, how=how, goodbye=goodbye, died=died, residual=residual, pushed=pushed
        )

    @property
    def _heard_from(self) -> int:
        """Workers that are done: nobody waits for them to come."""
        return self._goodbyes + self.not_finite.quarantined

    def _settle_departed(self, gone: Iterable[Incarnation]) -> None:
        if self.departed is not None:
            for worker in self.departed.settle(gone):
                self.lost.forget(worker)

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
        self.fencing = [each for each in self.fencing if each != worker]
        return self.feeds.release(worker, reached) if isinstance(self.feeds, DataLedger) else []

    def _held(self, worker: Incarnation) -> Sequence[LeasedSource]:
        """What the worker has to compute."""
        if isinstance(self.feeds, DataLedger):
            return self.feeds.held(worker)
        assert self.ranks is not None
        return [RankSource(lease.rank) for lease in self.ranks.of(worker)]

    def _first_of(self, source: LeasedSource) -> int | None:
        """The batch at which the lease of a data shard began, if that is known."""
        if not isinstance(self.feeds, DataLedger) or not isinstance(source, DataShardSource):
            return None
        return self.feeds.first_of(source)

    def _settle_suspicion(self, source: LeasedSource, worker: Incarnation, *, done: bool) -> None:
        """The worker's lease is closed."""
        self.suspects.leave(worker)
        if done:
            self.suspects.clear(source)

    def _fence(self, *workers: Incarnation) -> list[Effect]:
        servers = self.deployment.servers
        held = tuple(source for worker in workers for source in self._held(worker))
        map_ = self.deployment.map if self.deployment.stage is Stage.OPEN else None
        return [FenceOnServers(self.id, servers, workers, held, map_)] if servers else []

    @property
    def _gone(self) -> tuple[Incarnation, ...]:
        """Workers that have left, or that the servers refuse."""
        return tuple(worker for worker in self.fenced if worker not in self.fencing)

    @property
    def step(self) -> int:
        """Where the job stands, as far as is known here."""
        return max(self.progress.step, self._step_seen)

    def _is_of_before(self, returned: LeaseReturned) -> bool:
        """Of somebody who does not know yet that there are no steps, or, as all that were begun are done, no data
        shards."""
        return self.switching.has_gone_over and (returned.data_shard is None) is (self.ranks is None)

    def _is_closed(self, returned: LeaseReturned) -> bool:
        source = returned.data_shard
        if isinstance(self.feeds, StepLedger):
            if source is not None:
                raise errors.InvalidRequest(f"{source} in {self.title}, which is synchronous and has no data shards")
            return self.feeds.is_closed(returned.feed)
        if source is None or source.feed != returned.feed:
            raise errors.InvalidRequest(
                f"the lease to close is of {source or 'no data shard'} and of feed {returned.feed}; "
                "expected a data shard of that feed"
            )
        return self.feeds.is_closed(source, returned.caller.incarnation, returned.token)

    def _end(self, state: JobState, gone: Incarnation | None = None) -> list[Effect]:
        self.state = state
        self.keeping.origin = None
        said = f"{self.title} has ended: {self.failure.what}" if self.failure else f"{self.title} is finished"
        untaken = [*self.handovers.due, *(each.file.worker for each in self.handovers.left)]
        if untaken:
            said += f"; nobody has taken up what workers {', '.join(untaken[:8])} had not sent"
        drops: list[Effect] = [*self._drop(self.handovers.left)]
        drops += self._give_up([server for server in self.deployment.servers if server.incarnation != gone])
        return [*self.records([self._ended]), Tell(said, warning=self.failure is not None), *drops]

    def _rank_records(self, given: Sequence[RankGiven]) -> list[Effect]:
        return self.records(each.entry for each in given)

    def records(self, entries: Iterable[Entry]) -> list[Effect]:
        return [*records_of(self.id, entries)]

    def _persist(self, kind: str, **body: object) -> Persist:
        return Persist(kind, {"job": self.id, **body})


def _failure_body(failure: errors.ShardyardError | None) -> dict[str, object] | None:
    if failure is None:
        return None
    return {
        "code": failure.code,
        "what": failure.what,
        "why": failure.why_text,
        "todo": failure.todo_text,
        "facts": failure.facts,
    }


def _failure_of(body: Body) -> errors.ShardyardError | None:
    """Raises DamagedRecord."""
    if body.is_null("failure"):
        return None
    said = body.part("failure")
    code, what, why, todo = (said.text(name) for name in ("code", "what", "why", "todo"))
    return errors.rebuild(code, what, why, todo, said.texts("facts"))


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
