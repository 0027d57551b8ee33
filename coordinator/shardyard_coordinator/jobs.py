"""One job: who works on it, what state it is in, whose the work is.

Owns: a job's life (STARTING, RUNNING, FINISHED or FAILED), its living workers, and the order of things when one goes:
fence it on the servers, then give its work to others. Invariants: an ended job changes no more; no work of a lost
worker is given away before WorkersFenced; the failure that ended a job is the answer to all its requests.
Must not know: members that are not its workers, the network, what time it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from shardyard.ground import errors
from shardyard.ground.types import (
    Incarnation,
    JobId,
    OptimizerSpec,
    RankLease,
    RankSource,
    SourceKey,
    Token,
    UpdateMode,
    VariableSpec,
)
from shardyard.runtime.settings import JobSettings
from shardyard_coordinator.data_ledger import DataLedger, FeedCounts, FeedSpec, StepLedger
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
    Standing,
    Tell,
)
from shardyard_coordinator.events import LeaseReturned
from shardyard_coordinator.placement import Server
from shardyard_coordinator.progress import Progress, Report
from shardyard_coordinator.ranks import RankBook, RankGiven

FENCED_MAX: Final = 1_024
"""So many fenced workers are named to servers again and again, the latest."""
LATE_MS: Final = 10_000
"""A job that is left by its last worker stays open for so long if fewer workers than expected have said goodbye: one
that starts late, or is restarted, finds its work done, where it would else begin the whole run anew."""


class Job:
    def __init__(self, job: JobId, settings: JobSettings, now_ms: int) -> None:
        self.id = job
        self.settings = settings
        self.state = JobState.STARTING
        self.failure: errors.ShardyardError | None = None
        self.workers: list[Incarnation] = []
        self.fenced: list[Incarnation] = []
        self.deployment = Deployment(job, settings)
        self.progress = Progress(now_ms)
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
        self.workers = sorted([*self.workers, worker])
        self._finish_at_ms = None
        given = [] if self.ranks is None else self.ranks.join(worker, now_ms)
        return [self._persist("worker_joined", worker=worker), *self._rank_records(given)]

    def lose(self, worker: Incarnation, how: str, now_ms: int) -> list[Effect]:
        """A worker died. Its work waits until the servers refuse what it may still send."""
        self._remove(worker, how, now_ms)
        if self.state.ended:
            return []
        if self.ranks is not None:
            self.ranks.suspend(worker)
        self.deployment.suspend(worker)
        fence = self._fence(worker)
        return fence or self.free((worker,), now_ms)

    def free(self, workers: Sequence[Incarnation], now_ms: int) -> list[Effect]:
        """The lost workers are fenced: others may have their work."""
        if self.state.ended:
            return []
        effects: list[Effect] = []
        for worker in workers:
            self.deployment.remove(worker)
            if isinstance(self.feeds, DataLedger):
                freed = self.feeds.release(worker)
                effects += [Tell(f"{self.title}: {source} of worker {worker} is free again") for source in freed]
            if self.ranks is not None:
                effects += self._rank_records(self.ranks.release(worker, now_ms))
        return effects

    def leave(self, worker: Incarnation, error: str, now_ms: int) -> list[Effect]:
        """A worker says goodbye; it sends nothing more. The last one ends the job, at once if as many as were expected
        have said so."""
        was_chief = self.chief == worker
        self._remove(worker, f"left ({error})" if error else "left", now_ms)
        if self.state.ended:
            return []
        if not error:
            self._goodbyes += 1
            self._chief_is_done = self._chief_is_done or was_chief
        if self.workers:
            return [*self.free((worker,), now_ms), *self._fence(worker)]
        if error:
            return self.fail(
                errors.WorkerFailed(
                    f"its last worker, {worker}, left with an error: {error}",
                    facts={"worker": str(worker)},
                )
            )
        if self._goodbyes >= self.settings.workers_expected:
            return self._end(JobState.FINISHED)
        self._finish_at_ms = now_ms + LATE_MS
        return [*self.free((worker,), now_ms), *self._fence(worker)]

    def lose_server(self, server: Server, how: str) -> list[Effect]:
        """A server is gone, and with it the partitions that it had, if any."""
        lost = [] if self.deployment.map is None else self.deployment.map.by_server().get(server.incarnation, ())
        if self.state.ended or not lost:
            return []
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

    def tick(self, now_ms: int) -> list[Effect]:
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
        return [*self._rank_records(given), *self.deployment.reopen(now_ms)]

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
            assert self.deployment.map is not None
            effects.append(
                self._persist(
                    "variables_registered",
                    worker=worker,
                    variables=[[v.name, v.dtype.value, list(v.shape), v.kind.value, v.group] for v in variables],
                    optimizer=[optimizer.kind, [list(group) for group in optimizer.groups]],
                    owners=[[owner.server, owner.address] for owner in self.deployment.map.owners],
                )
            )
        else:
            self.deployment.check(variables, optimizer)
        effects += self.deployment.create()
        self.deployment.admit(worker)
        return effects if self.deployment.stage is Stage.CREATING else [Reply(self.deployment.placed(worker))]

    def commit_variables(self, worker: Incarnation) -> list[Effect]:
        """Replies, or opens partitions: then ask again."""
        self.deployment.check_commit(worker)
        effects: list[Effect] = []
        if self.deployment.commit(worker):
            effects.append(self._persist("variables_committed", worker=worker))
        effects += self.deployment.open()
        return effects if self.deployment.stage is Stage.OPENING else [Reply(Done())]

    def end_creation(self, *, created: bool) -> list[Effect]:
        if self.state.ended:
            # a creation that overtook the DropJob would stay on its server for ever
            return [DropJob(self.id, server) for server in self.deployment.servers]
        self.deployment.end_creation(created=created)
        return []

    def end_opening(self, *, opened: bool, now_ms: int) -> list[Effect]:
        self.deployment.end_opening(opened=opened, now_ms=now_ms)
        if self.state is not JobState.STARTING or self.deployment.stage is not Stage.OPEN:
            return []
        self.state = JobState.RUNNING
        assert self.deployment.layout is not None
        return [Tell(f"{self.title} runs: {len(self.deployment.layout.variables)} variables on the servers")]

    # ---- data

    def open_feed(self, feed: int, spec: FeedSpec) -> list[Effect]:
        known = len(self.feeds)
        opening = self.feeds.open(feed, spec)
        effects: list[Effect] = [Reply(opening)]
        if len(self.feeds) > known:
            effects.append(
                self._persist(
                    "feed_opened",
                    feed=feed,
                    samples=spec.samples,
                    fingerprint=spec.fingerprint,
                    batch_size=spec.batch_size,
                    epochs=spec.epochs,
                    shuffle=spec.shuffle,
                    drop_last=spec.drop_last,
                    batches_per_data_shard=opening.batches_per_data_shard,
                )
            )
        return effects

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
        effects: list[Effect] = [Reply(answer)]
        if self._token > before:
            effects.append(self._persist("data_leased", worker=worker, token=self._token, feed=feed))
        return effects

    def return_lease(self, returned: LeaseReturned) -> list[Effect]:
        """Replies, or reads the servers' ledgers."""
        if self._is_closed(returned):
            return [Reply(LeaseClosed(done=True))]
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
            done = self.feeds.close(returned.feed, next_sequence=next_sequence)
            closed: list[Effect] = [self._persist("feed_closed", feed=returned.feed)] if done else []
            return [*closed, Reply(LeaseClosed(done))]
        assert source is not None
        done = self.feeds.close(source, worker, returned.token, next_sequence=next_sequence)
        record = self._persist(
            "data_closed", feed=source.feed, epoch=source.epoch, index=source.index, token=returned.token, done=done
        )
        return [record, Reply(LeaseClosed(done))]

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

    # ---- within

    def _next_token(self) -> Token:
        self._token += 1
        return Token(self._token)

    def _remove(self, worker: Incarnation, how: str, now_ms: int) -> None:
        self.workers = [each for each in self.workers if each != worker]
        self.progress.forget(worker)
        self._last_lost = f"worker {worker}, {how}"
        if not self.workers:
            self._idle_since_ms = now_ms

    def _fence(self, worker: Incarnation) -> list[Effect]:
        self.fenced = [*self.fenced, worker][-FENCED_MAX:]
        servers = self.deployment.servers
        return [FenceOnServers(self.id, servers, (worker,))] if servers else []

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
        record = self._persist("job_ended", state=state.value, failure=self.failure.what if self.failure else "")
        return [record, Tell(said, warning=self.failure is not None), *drops]

    def _rank_records(self, given: Sequence[RankGiven]) -> list[Effect]:
        return [self._persist("rank_given", rank=each.rank, worker=each.worker, token=each.token) for each in given]

    def _persist(self, kind: str, **body: object) -> Persist:
        return Persist(kind, {"job": self.id, **body})
