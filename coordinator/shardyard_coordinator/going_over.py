"""How a job that runs goes on by other rules for consistency: what a person may switch it to, and what is done then.

Owns: nothing but the order of things; what is decided stands in the job's `switching` and `halting`. Invariants: a
switch that is refused has changed nothing; a job whose updates shall mean something else halts first, and goes over by
one record, when a checkpoint is committed that has all that was counted before (docs/ledger.md, rule B8); until then it
may be taken back. Must not know: servers' calls, the clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardyard.ground import errors, limits
from shardyard.ground.types import (
    Consistency,
    ConsistencyMode,
    DataShardSource,
    Durability,
    Generation,
    Incarnation,
    UpdateMode,
)
from shardyard.runtime.settings import JobSettings
from shardyard_coordinator import tables
from shardyard_coordinator.data_ledger import DataLedger, StepLedger
from shardyard_coordinator.effects import Effect, JobState, PaceServers, Reply, SwitchTaken, Tell
from shardyard_coordinator.records import Body, Entry, require
from shardyard_coordinator.switching import SETTING, consistency_body, consistency_of, switched

if TYPE_CHECKING:
    from shardyard_coordinator.jobs import Job


class GoingOver:
    """Of one job, which it is asked of anew each time."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def switch(self, mode: ConsistencyMode | None, staleness: int | None, now_ms: int) -> list[Effect]:
        """A person wants the job to go on under another mode, or bound. Raises InvalidRequest, NotReady,
        ConfigurationError, and what the job failed with."""
        job = self._job
        job.require_unfinished()
        job.require_joinable()
        settings = switched(job.settings, mode, staleness)
        if settings.consistency.mode.updates is not job.settings.consistency.mode.updates:
            return self._halt(settings)
        if self.may_be_taken_back:
            given_up = job.records(job.halting.give_up())
            told = Tell(f"{job.title} stays {settings.consistency.mode.value}, as it was told")
            return [*given_up, told, Reply(SwitchTaken(job.id, job.settings.name, job.switching.latest, first=True))]
        asked = job.switching.ask(settings)
        latest = job.switching.latest
        reply = Reply(SwitchTaken(job.id, job.settings.name, latest, first=bool(asked)))
        if not asked:
            return [reply]
        job.go_by_latest()
        told = Tell(f"{job.title} goes over to {latest}, as it was told")
        return [*job.records(asked), told, *self._pace(now_ms), reply]

    @property
    def may_be_taken_back(self) -> bool:
        """Whether it is to go over, and has not."""
        job = self._job
        return job.halting.wanted is not None and not job.switching.is_of_before(job.deployment.generation)

    def hear(self, worker: Incarnation, halted: tuple[int, int] | None) -> list[Effect]:
        """A worker has heard of a halt: its number, and the first step to which the worker has not contributed."""
        job = self._job
        if job.state.ended or halted is None:
            return []
        job.halting.hear(worker, *halted)
        return job.read_steps()

    def settle(self, step: int) -> list[Effect]:
        """All have said so. `step`: the first of which no partition has any part."""
        job = self._job
        halted = job.records(job.halting.settle(step))
        told = f"{job.title} goes over to {job.halting.wanted} before step {job.halting.step or 0:,}"
        return [*halted, Tell(told)]

    def tick(self, now_ms: int) -> list[Effect]:
        return [*self._go_over(now_ms), *self._pace(now_ms)]

    def note_map(self) -> None:
        """The partitions have another map."""
        job = self._job
        if job.ranks is None and not job.switching.is_of_before(job.deployment.generation):
            job.halting.end()

    # ---- from one kind of updates to the other

    def _halt(self, settings: JobSettings) -> list[Effect]:
        """It is to go over to asynchronous updates. Raises InvalidRequest, NotReady, ConfigurationError, TooLarge."""
        job = self._job
        wanted, before = job.switching.following(settings), job.halting.wanted
        if before is not None:
            if (before.mode, before.bound) == (wanted.mode, wanted.bound):
                return [Reply(SwitchTaken(job.id, job.settings.name, before, first=False))]
            raise errors.NotReady(
                f"job {job.settings.name!r} is going over to {before}",
                why="one switch at a time",
                todo=f"see `shardyard status`; or take it back: shardyard set {SETTING}=sync",
            )
        self._check_halt(settings)
        told = Tell(f"{job.title} goes over to {wanted}, as it was told, when its workers have said how far they are")
        asked = job.records(job.halting.ask(wanted))
        return [*asked, told, Reply(SwitchTaken(job.id, job.settings.name, wanted, first=True))]

    def _check_halt(self, settings: JobSettings) -> None:
        job = self._job
        layout, wanted = job.deployment.layout, settings.consistency.mode.value
        if job.state is not JobState.RUNNING or layout is None or not len(job.feeds):
            raise errors.NotReady(
                f"{job.title} has not begun job.batches",
                why="who goes over to data shards must know what was counted as steps",
                todo="switch it while it goes through job.batches; steps without it cannot be switched",
            )
        refusals = {
            "keeps logs (job.durability wal)": job.settings.durability is Durability.WAL,
            "is not written down (job.checkpoint.url)": job.keeping.book.url is None,
            "remembers what compression has not sent (error feedback)": job.keeping.keeps_feedback,
            "is told to stop": job.stopping.stop is not None,
            "has gone through its data": job.feeds.finished,
        }
        found = next((what for what, refused in refusals.items() if refused), None)
        if found is not None:
            raise errors.InvalidRequest(
                f"{job.title} {found}, and cannot go over to {wanted} while it runs",
                why="it goes over by way of a checkpoint, between two steps",
                todo=f"stop it, and start a job in mode {wanted} with its model (`shardyard checkpoint export`)",
            )
        tables.check_settings(layout.tables, settings)

    def _go_over(self, now_ms: int) -> list[Effect]:
        """Once all steps before the one that was settled are in a checkpoint, the job is asynchronous: from this
        record on, whoever dies."""
        job = self._job
        step, wanted, committed = job.halting.step, job.halting.wanted, job.keeping.book.committed
        if step is None or wanted is None or job.ranks is None or not self._may_go_over:
            return []
        if committed is None or committed.step != step or committed.url:
            if job.step >= step:
                job.keeping.book.want()
            return []
        assert job.deployment.map is not None
        generation = job.deployment.map.generation
        gone: Entry = (
            "job_went_over",
            {"step": step, "left": generation, "number": wanted.number, **consistency_body(wanted)},
        )
        feeds, begun = self._lease_data(wanted, generation, step)
        told = f"{job.title} is {wanted} from step {step:,} on: partitions go on from checkpoint {committed.number}"
        return [*job.records([gone, *job.keeping.go_over(feeds, begun, now_ms)]), Tell(told)]

    @property
    def _may_go_over(self) -> bool:
        job = self._job
        running = job.state is JobState.RUNNING and job.is_whole and not job.fencing
        return running and not job.keeping.book.is_writing and job.stopping.stop is None

    def _lease_data(
        self, consistency: Consistency, generation: Generation, step: int
    ) -> tuple[DataLedger, list[tuple[DataShardSource, int]]]:
        """From synchronous partitions, whose last map is of that generation and which stand before `step`."""
        job = self._job
        assert isinstance(job.feeds, StepLedger)
        job.switching.go_over(consistency, generation)
        job.go_by_latest()
        feeds = job.make_data_ledger()
        begun = feeds.take_over(job.feeds, step)
        job.deal(feeds, None, step)
        return feeds, begun

    def _pace(self, now_ms: int) -> list[Effect]:
        """Has servers told what the job was switched to, where some may not know."""
        job = self._job
        map_ = job.deployment.map
        if map_ is None or not job.is_whole or not job.switching.begin(map_.generation, now_ms):
            return []
        return [PaceServers(job.id, map_, job.switching.latest)]

    # ---- records

    def restore(self, body: Body) -> None:
        """Takes the record that it has gone over. Raises DamagedRecord."""
        job = self._job
        require(
            isinstance(job.feeds, StepLedger) and job.deployment.map is not None, "a job goes over that has no steps"
        )
        consistency = consistency_of(body, body.number("number", least=job.switching.latest.number + 1))
        require(consistency.mode.updates is UpdateMode.ASYNC, f"a job goes over to {consistency}")
        left = Generation(body.number("left", least=1))
        require(left == job.deployment.generation, f"partitions of generation {left} are left")
        feeds, _ = self._lease_data(consistency, left, body.number("step", most=limits.SEQUENCE_MAX))
        job.keeping.deal(feeds)
