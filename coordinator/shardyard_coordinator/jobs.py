"""One job: who works on it, what state it is in, whose the work is.

Owns: a job's life (STARTING, RUNNING, FINISHED or FAILED), its living workers, and the order of things when one goes:
fence it on the servers, then give its work to others. Invariants: an ended job changes no more; no work of a lost
worker is given away before WorkersFenced; the failure that ended a job is the answer to all its requests; each change
has its record in the same effects, and the records alone make the job anew (but for records.NOT_RECORDED).
Must not know: members that are not its workers, the network, what time it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from shardyard.ground import errors
from shardyard.ground.types import (
    DataLease,
    DataShardSource,
    Generation,
    Incarnation,
    JobId,
    OptimizerSpec,
    PartitionMap,
    RankLease,
    RankSource,
    SourceKey,
    Token,
    UpdateMode,
    VariableSpec,
)
from shardyard.runtime.settings import JobSettings
from shardyard_coordinator import data_ledger, deployment
from shardyard_coordinator.checkpoints import CheckpointBook, Subject, url_of
from shardyard_coordinator.data_ledger import DataLedger, FeedCounts, FeedDone, FeedSpec, LeaseWait, StepLedger
from shardyard_coordinator.deployment import Deployment, Stage
from shardyard_coordinator.effects import (
    Done,
    DropJob,
    Effect,
    FenceOnServers,
    JobState,
    LeaseClosed,
    Persist,
    ReadLedger,
    Reply,
    RestorePartitions,
    Standing,
    TakeCheckpoint,
    Tell,
)
from shardyard_coordinator.events import CheckpointTaken, LeaseReturned
from shardyard_coordinator.placement import Server
from shardyard_coordinator.progress import Progress, Report
from shardyard_coordinator.ranks import RankBook, RankGiven
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
from shardyard_coordinator.recovery import Recovery

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
        self.recovery = Recovery()
        self._step_seen = 0
        self.checkpoints = CheckpointBook(settings.checkpoint, url_of(settings.checkpoint, checkpoints), now_ms)
        self.ranks: RankBook | None = None
        self.feeds: DataLedger | StepLedger
        self._token = 0
        self._idle_since_ms = now_ms
        self._last_lost = ""
        self._goodbyes = 0
        self._chief_is_done = False
        self._finish_at_ms: int | None = None
        if settings.consistency.mode is UpdateMode.SYNC:
            self.ranks = RankBook(
                ranks=settings.logical_rank_count,
                grace_ms=settings.rank_grace_ms,
                workers_expected=settings.workers_expected,
                next_token=self._next_token,
                now_ms=now_ms,
            )
            self.feeds = StepLedger(logical_ranks=settings.logical_rank_count)
        else:
            batches = settings.data.batches_per_data_shard
            self.feeds = DataLedger(
                batches_per_data_shard=None if batches == "auto" else batches,
                workers_expected=settings.workers_expected,
                next_token=self._next_token,
            )

    @property
    def title(self) -> str:
        return f"job {self.settings.name!r} ({self.id})"

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

    # ---- workers come and go

    def join(self, worker: Incarnation, now_ms: int) -> list[Effect]:
        self._enter(worker)
        given = [] if self.ranks is None else self.ranks.join(worker, now_ms)
        return [self._persist("worker_joined", worker=worker), *self._rank_records(given)]

    def lose(self, worker: Incarnation, how: str, now_ms: int) -> list[Effect]:
        """A worker died. Its work waits until the servers refuse what it may still send."""
        record = self._remove(worker, how, now_ms, goodbye=False)
        if self.state.ended:
            return [record]
        fence = self._fence(worker)
        return [record, *(fence or self.free((worker,), now_ms))]

    def free(self, workers: Sequence[Incarnation], now_ms: int) -> list[Effect]:
        """The lost workers are fenced: others may have their work. Those whose work is free already are passed over."""
        if self.state.ended:
            return []
        effects: list[Effect] = []
        for worker in workers:
            if worker not in self.fencing:
                continue
            freed = self._free(worker)
            effects.append(self._persist("worker_freed", worker=worker))
            effects += [Tell(f"{self.title}: {source} of worker {worker} is free again") for source in freed]
            effects += self._records(self.deployment.remove(worker))
            if self.ranks is not None:
                effects += self._rank_records(self.ranks.release(worker, now_ms))
        return effects

    def resume(self, servers: Iterable[Incarnation]) -> list[Effect]:
        """After a restart: what may not have reached the servers, of which these live, is said to them again."""
        if self.state.ended:
            living = frozenset(servers)
            return [DropJob(self.id, server) for server in self.deployment.servers if server.incarnation in living]
        return [FenceOnServers(self.id, self.deployment.servers, tuple(self.fencing))] if self.fencing else []

    def leave(self, worker: Incarnation, error: str, now_ms: int) -> list[Effect]:
        """A worker says goodbye; it sends nothing more. The last one ends the job, at once if as many as were expected
        have said so."""
        record = self._remove(worker, f"left ({error})" if error else "left", now_ms, goodbye=not error)
        if self.state.ended:
            return [record]
        if error and not self.workers:
            failure = errors.WorkerFailed(
                f"its last worker, {worker}, left with an error: {error}", facts={"worker": str(worker)}
            )
            return [record, *self.fail(failure)]
        if not self.workers and self._goodbyes >= self.settings.workers_expected:
            return [record, *self._end(JobState.FINISHED)]
        return [record, *self.free((worker,), now_ms), *self._fence(worker)]

    def lose_server(self, server: Server, how: str, now_ms: int) -> list[Effect]:
        """A server is gone, and with it the partitions that it had, or was to have, if any."""
        maps = [self.deployment.map, None if self.recovery.attempt is None else self.recovery.attempt.map]
        found = {
            owner.partition: owner for each in maps if each for owner in each.by_server().get(server.incarnation, ())
        }
        lost = [found[partition] for partition in sorted(found)]
        if self.state.ended or not lost:
            return []
        committed = self.checkpoints.committed
        if self.deployment.stage is Stage.OPEN and committed is not None:
            self.checkpoints.abandon()
            record = self.recovery.lose([owner.partition for owner in lost], now_ms)
            what = "the job goes back" if self.ranks is not None else "its partitions go back"
            told = f"{self.title}: server {server.incarnation} {how}; {what} to checkpoint {committed.number}"
            return [*self._records([record]), Tell(f"{told} of step {committed.step:,}", warning=True)]
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
        if self.state.ended:
            return []
        if self._finish_at_ms is not None and now_ms >= self._finish_at_ms:
            return self._end(JobState.FINISHED)
        if not self.workers and now_ms - self._idle_since_ms >= self.settings.idle_ms:
            return self.fail(
                errors.WorkerFailed(
                    f"{self.title} has had no worker for {self.settings.idle_ms / 1000:g} s; the last one, "
                    f"{self._last_lost}",
                    why="a job without workers is ended after job.idle_ms",
                    todo="start the script again for a new run",
                )
            )
        given = [] if self.ranks is None else self.ranks.settle(now_ms)
        if self.recovery.needed:
            return [*self._rank_records(given), *self._recover(servers, now_ms)]
        return [*self._rank_records(given), *self.deployment.reopen(now_ms), *self._begin_checkpoint(now_ms)]

    # ---- recovery

    def _recover(self, servers: Sequence[Server], now_ms: int) -> list[Effect]:
        """Begins to restore lost partitions, where there is a server for them."""
        deployed, checkpoints = self.deployment, self.checkpoints
        assert deployed.layout is not None
        assert deployed.map is not None
        assert checkpoints.committed is not None
        assert checkpoints.url is not None
        sizes = [part.payload_bytes for part in deployed.layout.partitions]
        begun = self.recovery.begin(deployed.map, sizes, servers, whole=self.ranks is not None, now_ms=now_ms)
        if begun is None:
            return []
        attempt, record = begun
        number = checkpoints.committed.number
        restore = RestorePartitions(
            self._subject, attempt.map, checkpoints.url, number, attempt.life, attempt.partitions
        )
        return [*self._records([record]), restore]

    def end_recovery(self, generation: Generation, now_ms: int) -> list[Effect]:
        """All partitions have servers again: the map is the job's."""
        attempt = self.recovery.end(generation, now_ms, restored=True)
        if attempt is None or self.state.ended:
            return []
        self._go_back(attempt.map)
        assert self.checkpoints.committed is not None
        partitions = ", ".join(map(str, sorted(attempt.partitions)[:8]))
        return [
            *self._records([self.deployment.moved]),
            Tell(f"{self.title}: partitions {partitions} are restored, of step {self.checkpoints.committed.step:,}"),
        ]

    def fail_recovery(self, generation: Generation, failure: errors.ShardyardError, now_ms: int) -> list[Effect]:
        current = self.recovery.attempt
        if current is None or current.map.generation != generation or self.state.ended:
            return []
        self.recovery.end(generation, now_ms, restored=False)
        if isinstance(failure, errors.CheckpointDamaged | errors.CheckpointNotFound):
            return self.fail(failure)
        return [Tell(f"{self.title}: its partitions are not restored yet: {failure.what}", warning=True)]

    def _go_back(self, map_: PartitionMap) -> None:
        """Under a new map, with what the newest checkpoint has: work that was closed since is open again (rule A11)."""
        assert self.checkpoints.committed is not None
        self.deployment.map = map_
        self.feeds.reopen(self.checkpoints.committed.data_ledger)

    # ---- checkpoints

    def end_checkpoint(self, taken: CheckpointTaken) -> list[Effect]:
        record = self.checkpoints.commit(taken.draft, taken.step, taken.number)
        if record is None or self.state.ended:
            return []
        return [*self._records([record]), Tell(f"{self.title}: checkpoint {taken.number} of step {taken.step:,}")]

    def fail_checkpoint(self, draft: int, why: str, now_ms: int) -> list[Effect]:
        if not self.checkpoints.fail(draft, now_ms) or self.state.ended:
            return []
        return [Tell(f"{self.title}: checkpoint {draft} was not taken: {why}", warning=True)]

    def _begin_checkpoint(self, now_ms: int) -> list[Effect]:
        deployed = self.deployment
        if deployed.stage is not Stage.OPEN or not self.checkpoints.is_due(now_ms, self._step):
            return []
        assert deployed.layout is not None
        assert deployed.map is not None
        assert self.checkpoints.url is not None
        # before any partition is cut (rule A9)
        entries = [[kind, body] for kind, body in self.feeds.entries()]
        ledger = {"entries": entries, "closed": self.feeds.closed, "token": self._token}
        draft, record = self.checkpoints.begin(now_ms, self._step, ledger, Token(0))
        keep, base = self.settings.checkpoint.keep, self.checkpoints.base
        return [
            *self._records([record]),
            TakeCheckpoint(self._subject, deployed.map, draft, self.checkpoints.url, base, keep),
        ]

    @property
    def _subject(self) -> Subject:
        assert self.deployment.layout is not None
        return Subject(
            job=self.id,
            name=self.settings.name,
            seed=self.settings.seed,
            settings=self.settings.model_dump(mode="json"),
            mode=self.settings.consistency.mode,
            logical_ranks=self.settings.logical_rank_count,
            layout=self.deployment.layout,
        )

    # ---- variables

    def register_variables(
        self,
        worker: Incarnation,
        variables: tuple[VariableSpec, ...],
        optimizer: OptimizerSpec,
        servers: Sequence[Server],
    ) -> list[Effect]:
        """Replies, or creates partitions: then ask again."""
        effects: list[Effect] = []
        if self.deployment.stage is Stage.EMPTY:
            self.deployment.place(variables, optimizer, servers)
            effects += self._records([self.deployment.registered])
        else:
            self.deployment.check(variables, optimizer)
        effects += self.deployment.create()
        effects += self._records(self.deployment.admit(worker))
        if self.deployment.stage is not Stage.CREATING:
            effects.append(Reply(self.deployment.placed(worker)))
        return effects

    def commit_variables(self, worker: Incarnation) -> list[Effect]:
        """Replies, or opens partitions: then ask again."""
        self.deployment.check_commit(worker)
        effects: list[Effect] = []
        if self.deployment.commit(worker):
            effects += self._records([deployment.committed(worker)])
        effects += self.deployment.open()
        if self.deployment.stage is not Stage.OPENING:
            effects.append(Reply(Done()))
        return effects

    def end_creation(self, *, created: bool) -> list[Effect]:
        if self.state.ended:
            # a creation that overtook the DropJob would stay on its server for ever
            return [DropJob(self.id, server) for server in self.deployment.servers]
        return self._records(self.deployment.end_creation(created=created))

    def end_opening(self, *, opened: bool, now_ms: int) -> list[Effect]:
        if self.state.ended:
            return []
        records = self._records(self.deployment.end_opening(opened=opened, now_ms=now_ms))
        if self.state is not JobState.STARTING or self.deployment.stage is not Stage.OPEN:
            return records
        self.state = JobState.RUNNING
        assert self.deployment.layout is not None
        return [*records, Tell(f"{self.title} runs: {len(self.deployment.layout.variables)} variables on the servers")]

    # ---- data

    def open_feed(self, feed: int, spec: FeedSpec) -> list[Effect]:
        known = len(self.feeds)
        opening = self.feeds.open(feed, spec)
        opened = [data_ledger.feed_opened(feed, spec, opening)] if len(self.feeds) > known else []
        return [*self._records(opened), Reply(opening)]

    def lease(self, worker: Incarnation, feed: int) -> list[Effect]:
        if self.state is not JobState.RUNNING:
            raise errors.NotReady(
                f"{self.title} has no variables on the servers yet, so no work can be counted",
                todo="call job.prepare before job.batches; then it is only a moment",
            )
        if isinstance(self.feeds, StepLedger):
            raise errors.InvalidRequest(
                f"{self.title} is synchronous: it leases logical ranks, not data shards",
                todo="ask for no lease; the job's ranks come with heartbeats",
            )
        before = self._token
        answer = self.feeds.lease(feed, worker)
        if isinstance(answer, FeedDone) and not self._is_kept:
            # were it lost now, nobody would be there to compute it again (rule A11)
            self.checkpoints.want()
            answer = LeaseWait("a checkpoint that has all of this data")
        leased: list[Entry] = []
        if self._token > before:
            assert isinstance(answer, DataLease), answer
            leased.append(data_ledger.data_leased(answer.source, worker, answer.token))
        return [*self._records(leased), Reply(answer)]

    def return_lease(self, returned: LeaseReturned) -> list[Effect]:
        """Replies, or reads the servers' ledgers."""
        if self._is_closed(returned):
            return [Reply(LeaseClosed(done=self._is_kept_to(returned.feed)))]
        if self.deployment.map is None or self.deployment.stage is not Stage.OPEN:
            raise errors.NotReady(f"{self.title} has no variables on the servers yet, so no work is counted")
        keys: tuple[SourceKey, ...]
        if returned.data_shard is not None:
            keys = (SourceKey(returned.data_shard),)
        else:
            assert self.ranks is not None
            keys = tuple(SourceKey(RankSource(rank)) for rank in self.ranks.all)
        return [ReadLedger(self.id, self.deployment.map, keys)]

    def close_lease(self, returned: LeaseReturned, next_sequence: int) -> list[Effect]:
        source, worker = returned.data_shard, returned.caller.incarnation
        if isinstance(self.feeds, StepLedger):
            known = self.feeds.is_closed(returned.feed)
            done = self.feeds.close(returned.feed, next_sequence=next_sequence)
            self._step_seen = max(self._step_seen, next_sequence)
            closed = [data_ledger.feed_closed(returned.feed)] if done and not known else []
            return [*self._records(closed), Reply(LeaseClosed(done and self._is_kept_to(returned.feed)))]
        assert source is not None
        if self.feeds.is_closed(source, worker, returned.token):
            return [Reply(LeaseClosed(done=True))]
        done = self.feeds.close(source, worker, returned.token, next_sequence=next_sequence)
        record = data_ledger.data_closed(source, worker, returned.token, done=done)
        return [*self._records([record]), Reply(LeaseClosed(done))]

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
            recovering=self.recovery.needed,
        )

    def ranks_of(self, worker: Incarnation) -> tuple[RankLease, ...]:
        return () if self.ranks is None else self.ranks.of(worker)

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
            *self.deployment.entries(),
            *([] if self.ranks is None else self.ranks.entries()),
            *self.feeds.entries(),
            *self.checkpoints.entries(),
            *self.recovery.entries(),
            *([("token_given", {"token": self._token})] if self._token else []),
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
                self._token = max(self._token, body.number("token"))
            case "token_given":
                self._token = max(self._token, body.number("token"))
            case "feed_opened" | "feed_progress" | "data_leased" | "data_closed" | "feed_closed":
                self.feeds.restore(kind, body)
                if kind == "data_leased":
                    self._token = max(self._token, body.number("token"))
            case (
                "variables_registered"
                | "worker_admitted"
                | "initializer_chosen"
                | "partitions_created"
                | "variables_committed"
                | "partitions_opened"
            ):
                self.deployment.restore(kind, body)
                if self.deployment.stage is Stage.OPEN and not self.state.ended:
                    self.state = JobState.RUNNING
            case "checkpoint_begun" | "checkpoint_committed":
                self.checkpoints.restore(kind, body)
            case "partitions_lost" | "recovery_begun":
                self.recovery.restore(kind, body, now_ms)
            case "partitions_moved":
                require(self.checkpoints.committed is not None, "partitions are restored without a checkpoint")
                self.deployment.restore(kind, body)
                assert self.deployment.map is not None
                self.recovery.restored()
                self._go_back(self.deployment.map)
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
            self._remove(worker, body.text("how"), now_ms, goodbye=body.flag("goodbye"))
        else:
            require(worker in self.fencing, f"worker {worker} is free of its work twice")
            self._free(worker)
            self.deployment.forget(worker)
            if self.ranks is not None:
                self.ranks.vacate(worker, now_ms)

    @property
    def _ended(self) -> Entry:
        failure, progress = self.failure, self.progress
        said = failure and {
            "code": failure.code,
            "what": failure.what,
            "why": failure.why_text,
            "todo": failure.todo_text,
            "facts": failure.facts,
        }
        return "job_ended", {
            "state": self.state.value,
            "failure": said,
            "step": progress.step,
            "samples": progress.samples,
            "metrics": [[name, value] for name, value in progress.metrics],
        }

    def _restore_end(self, body: Body) -> None:
        ends = {state.value: state for state in JobState if state.ended}
        state = body.text("state")
        require(state in ends, f"state: expected one of {', '.join(ends)}, got {state!r}")
        self.state = ends[state]
        require(body.is_null("failure") == (self.state is JobState.FINISHED), "a failure where the job is finished")
        if self.state is JobState.FAILED:
            said = body.part("failure")
            code, what, why, todo = (said.text(name) for name in ("code", "what", "why", "todo"))
            self.failure = errors.rebuild(code, what, why, todo, said.texts("facts"))
        metrics = [checked_items(each, "a metric", count=2) for each in body.items("metrics")]
        self.progress.restore(
            step=body.number("step"),
            samples=body.number("samples", most=SUM_MAX),
            metrics=tuple(
                (checked_text(name, "a metric"), checked_float(value, "a metric")) for name, value in metrics
            ),
        )

    # ---- within

    def _next_token(self) -> Token:
        self._token += 1
        return Token(self._token)

    def _enter(self, worker: Incarnation) -> None:
        self.workers = sorted([*self.workers, worker])
        self._finish_at_ms = None

    def _remove(self, worker: Incarnation, how: str, now_ms: int, *, goodbye: bool) -> Persist:
        """The worker is gone; what it has is nobody else's until `_free`."""
        if goodbye:
            self._goodbyes += 1
            self._chief_is_done = self._chief_is_done or self.chief == worker
        self.workers = [each for each in self.workers if each != worker]
        self.progress.forget(worker)
        self._last_lost = f"worker {worker}, {how}"
        if not self.workers:
            self._idle_since_ms = now_ms
            self._finish_at_ms = now_ms + LATE_MS if goodbye else None
        if self.ranks is not None:
            self.ranks.suspend(worker)
        self.deployment.suspend(worker)
        self.fenced = [*self.fenced, worker][-FENCED_MAX:]
        self.fencing = [*self.fencing, worker]
        return self._persist("worker_gone", worker=worker, how=how, goodbye=goodbye)

    def _free(self, worker: Incarnation) -> list[DataShardSource]:
        """Nobody has the worker's data now; gives what it had."""
        self.fencing = [each for each in self.fencing if each != worker]
        return self.feeds.release(worker) if isinstance(self.feeds, DataLedger) else []

    def _fence(self, worker: Incarnation) -> list[Effect]:
        servers = self.deployment.servers
        return [FenceOnServers(self.id, servers, (worker,))] if servers else []

    @property
    def _step(self) -> int:
        """Where the job stands, as far as is known here."""
        return max(self.progress.step, self._step_seen)

    @property
    def _is_kept(self) -> bool:
        """Whether the newest checkpoint has all data that is closed. A job that has none could not go back to it."""
        committed = self.checkpoints.committed
        return committed is None or committed.data_ledger.get("closed") == self.feeds.closed

    def _is_kept_to(self, feed: int) -> bool:
        """Whether the newest checkpoint of a synchronous job has all steps of a feed; another one is wanted else."""
        committed = self.checkpoints.committed
        if not isinstance(self.feeds, StepLedger) or committed is None or committed.step >= self.feeds.end(feed):
            return True
        self.checkpoints.want()
        return False

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
        said = f"{self.title} has ended: {self.failure.what}" if self.failure else f"{self.title} is finished"
        drops = [DropJob(self.id, server) for server in self.deployment.servers if server.incarnation != gone]
        return [*self._records([self._ended]), Tell(said, warning=self.failure is not None), *drops]

    def _rank_records(self, given: Sequence[RankGiven]) -> list[Effect]:
        return self._records(each.entry for each in given)

    def _records(self, entries: Iterable[Entry]) -> list[Effect]:
        return [self._persist(kind, **body) for kind, body in entries]

    def _persist(self, kind: str, **body: object) -> Persist:
        return Persist(kind, {"job": self.id, **body})
