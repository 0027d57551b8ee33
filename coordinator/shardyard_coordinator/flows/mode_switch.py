"""How a job that runs goes on by other rules for consistency: what a person may switch it to, and what is done then.

Owns: nothing but the order of things; what is decided stands in the job's `switching` and `halting`. Invariants: a
switch that is refused has changed nothing; a job whose updates shall mean something else halts first, and goes over by
one record, when a checkpoint is committed that has all that was counted before, and nothing else (docs/ledger.md, rules
B8, B10); until then it may be taken back. Must not know: servers' calls, the clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardyard.config.settings import JobSettings
from shardyard.domain import errors, limits
from shardyard.domain.consistency import Consistency, ConsistencyMode, Durability, UpdateMode
from shardyard.domain.ids import Generation, Incarnation
from shardyard.domain.push_names import DataShardSource
from shardyard_coordinator.core.effects import Effect, JobState, LogMessage, PaceServers, Reply, SwitchTaken
from shardyard_coordinator.modes.mode_setting import SETTING, consistency_body, consistency_of, settings_of, switched
from shardyard_coordinator.placement import table_specs
from shardyard_coordinator.records import Body, DamagedRecord, Entry, require
from shardyard_coordinator.storage.checkpoint_book import Committed
from shardyard_coordinator.work import ledger_conversion
from shardyard_coordinator.work.data_ledger import DataLedger
from shardyard_coordinator.work.feeds import LeaseWait
from shardyard_coordinator.work.step_ledger import StepLedger

if TYPE_CHECKING:
    from shardyard_coordinator.machine.job import Job


class ModeSwitch:
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
            self._check_taken_back(settings)
            reply = Reply(SwitchTaken(job.id, job.settings.name, job.switching.latest, first=True))
            return [*self._give_up("as it was told"), reply]
        asked = job.switching.ask(settings)
        latest = job.switching.latest
        reply = Reply(SwitchTaken(job.id, job.settings.name, latest, first=bool(asked)))
        if not asked:
            return [reply]
        job.go_by_latest()
        told = LogMessage(f"{job.title} goes over to {latest}, as it was told")
        return [*job.records(asked), told, *self._pace(now_ms), reply]

    @property
    def may_be_taken_back(self) -> bool:
        """Whether it is to go over, and has not."""
        return self._job.halting.wanted is not None and not self._has_gone_over

    @property
    def _has_gone_over(self) -> bool:
        """Whether it is in the mode for which it has halted; its partitions may be on their way."""
        job, wanted = self._job, self._job.halting.wanted
        return wanted is not None and job.switching.latest.number >= wanted.number

    def hear(self, worker: Incarnation, halted: tuple[int, int] | None) -> list[Effect]:
        """A worker has heard of a halt: its number, and the first step to which the worker has not contributed; or, of
        one that drains, how many pushes of its own it has begun."""
        job = self._job
        if job.state.ended or halted is None:
            return []
        number, reached = halted
        halt = job.halting.halt
        if halt is not None and halt.drains and halt.number == number and reached and self.may_be_taken_back:
            return self._give_up(f"since worker {worker} takes steps outside of job.batches")
        job.halting.hear(worker, number, reached)
        return job.read_steps()

    @property
    def may_settle(self) -> bool:
        """Of a halt that is due: nothing but what has been heard of is under way."""
        job = self._job
        if not job.halting.drains:
            return True
        lost = job.departed is not None and job.departed.is_due
        return isinstance(job.feeds, DataLedger) and job.feeds.is_drained and not lost

    def settle(self, step: int) -> list[Effect]:
        """All have said so. `step`: the first of which no partition has any part, or, where the job has none yet, the
        highest version of any partition."""
        job = self._job
        if job.halting.drains:
            halted = job.halting.settle(max(step, job.step), job.keeping.book.ask())
            job.reach(job.halting.step or 0)
            told = f"{job.title} goes over to {job.halting.wanted}: all data shards that were begun are done"
            return [*job.records(halted), LogMessage(told)]
        halted = job.halting.settle(step)
        told = f"{job.title} goes over to {job.halting.wanted} before step {job.halting.step or 0:,}"
        return [*job.records(halted), LogMessage(told)]

    def tick(self, now_ms: int) -> list[Effect]:
        return [*self._go_over(now_ms), *self._pace(now_ms)]

    def note_map(self, *, restored: bool) -> None:
        """The partitions may have another map. `restored`: some of them have gone back to a checkpoint."""
        job = self._job
        if self._has_gone_over and not job.switching.is_of_before(job.deployment.generation):
            job.halting.end()
        elif restored and not self._has_gone_over:
            job.halting.reopen()

    @property
    def awaits_work(self) -> LeaseWait | None:
        """What a worker waits for that asks for a data shard, though there is nothing to wait for but the switch."""
        job = self._job
        if job.ranks is not None and job.switching.has_gone_over:
            return LeaseWait(f"partitions of {job.title} in mode {job.settings.consistency.mode.value}")
        if not job.halting.drains:
            return None
        return LeaseWait(f"{job.title} to go over to {job.halting.wanted}, for which no data shard is begun")

    @property
    def draining(self) -> str:
        """What is to be done before it goes over to steps, and by whom."""
        job = self._job
        return job.feeds.holders if job.halting.drains and isinstance(job.feeds, DataLedger) else ""

    # ---- from one kind of updates to the other

    def _give_up(self, why: str) -> list[Effect]:
        job = self._job
        given_up = job.records(job.halting.give_up())
        return [*given_up, LogMessage(f"{job.title} stays {job.settings.consistency.mode.value}, {why}")]

    def _check_taken_back(self, settings: JobSettings) -> None:
        """Raises NotReady where what is asked for is not what the job has."""
        asked, latest = settings.consistency, self._job.switching.latest
        if (asked.mode, asked.bound) == (latest.mode, latest.bound):
            return
        raise self._goes_over_already()

    def _goes_over_already(self) -> errors.NotReady:
        job = self._job
        return errors.NotReady(
            f"job {job.settings.name!r} is going over to {job.halting.wanted}",
            why="one switch at a time",
            todo=f"see `shardyard status`; or take it back: shardyard set {SETTING}={job.switching.latest.mode.value}",
        )

    def _halt(self, settings: JobSettings) -> list[Effect]:
        """It is to go over to updates that mean something else. Raises InvalidRequest, NotReady, ConfigurationError,
        TooLarge."""
        job = self._job
        wanted, before = job.switching.following(settings), job.halting.wanted
        if before is not None:
            if (before.mode, before.bound) == (wanted.mode, wanted.bound):
                return [Reply(SwitchTaken(job.id, job.settings.name, before, first=False))]
            raise self._goes_over_already()
        self._check_halt(settings)
        told = LogMessage(
            f"{job.title} goes over to {wanted}, as it was told, when its workers have said how far they are"
        )
        asked = job.records(job.halting.ask(wanted))
        return [*asked, told, Reply(SwitchTaken(job.id, job.settings.name, wanted, first=True))]

    def _check_halt(self, settings: JobSettings) -> None:
        job = self._job
        layout, wanted = job.deployment.layout, settings.consistency.mode.value
        if job.state is not JobState.RUNNING or layout is None or not len(job.feeds):
            raise errors.NotReady(
                f"{job.title} has not begun job.batches",
                why="what was counted before must have names that the other mode knows as well",
                todo="switch it while it goes through job.batches; steps without it cannot be switched",
            )
        to_steps = settings.consistency.mode.updates is UpdateMode.SYNC
        refusals = {
            "keeps logs (job.durability wal)": job.settings.durability is Durability.WAL,
            "is not written down (job.checkpoint.url)": job.keeping.book.url is None,
            "remembers what compression has not sent (error feedback)": job.keeping.keeps_feedback,
            "is told to stop": job.stopping.stop is not None,
            # a script with a loop for each epoch may stand between two
            "has gone through its data": not to_steps and job.feeds.finished,
            "takes steps outside of job.batches": to_steps
            and any(job.progress.of(each).pushed for each in job.workers),
        }
        found = next((what for what, refused in refusals.items() if refused), None)
        if found is not None:
            raise errors.InvalidRequest(
                f"{job.title} {found}, and cannot go over to {wanted} while it runs",
                why="it goes over by way of a checkpoint, where nothing is under way that has no place in it",
                todo=f"stop it, and start a job in mode {wanted} with its model (`shardyard checkpoint export`)",
            )
        table_specs.check_settings(layout.tables, settings)
        if isinstance(job.feeds, DataLedger):
            ledger_conversion.check(job.make_step_ledger(settings), job.feeds)

    def _go_over(self, now_ms: int) -> list[Effect]:
        """Once a checkpoint has all that was counted before the step that was settled, the job is in the other mode:
        from this record on, whoever dies."""
        job = self._job
        step, wanted, committed = job.halting.step, job.halting.wanted, job.keeping.book.committed
        if step is None or wanted is None or self._has_gone_over or not self._may_go_over:
            return []
        if committed is None or not self._has_all(committed, step):
            if job.step >= step:
                job.keeping.book.want()
            return []
        assert job.deployment.map is not None
        generation = job.deployment.map.generation
        gone: Entry = (
            "job_went_over",
            {"step": step, "left": generation, "number": wanted.number, **consistency_body(wanted)},
        )
        told = f"{job.title} is {wanted} from step {step:,} on: partitions go on from checkpoint {committed.number}"
        if isinstance(job.feeds, StepLedger):
            feeds, begun = self._lease_data(wanted, generation, step)
            return [*job.records([gone, *job.keeping.go_over(feeds, begun, 0, now_ms)]), LogMessage(told)]
        try:
            steps = self._take_steps(wanted, generation, step, now_ms)
        except errors.InvalidRequest as error:  # a data set was opened meanwhile
            return self._give_up(f"since {error.what}")
        records = [gone, *job.keeping.go_over(steps, (), step, now_ms)]
        assert job.ranks is not None
        return [*job.records([*records, *(each.entry for each in job.ranks.settle(now_ms))]), LogMessage(told)]

    def _has_all(self, committed: Committed, step: int) -> bool:
        """Whether a checkpoint has what was counted before that step, and nothing else."""
        if committed.url:
            return False
        drains, ticket = self._job.halting.drains, self._job.halting.ticket
        return committed.draft >= ticket if drains else committed.step == step

    @property
    def _may_go_over(self) -> bool:
        job = self._job
        running = job.state is JobState.RUNNING and job.is_whole and not job.attendance.fencing
        return running and not job.keeping.book.is_writing and job.stopping.stop is None

    def _lease_data(
        self, consistency: Consistency, generation: Generation, step: int
    ) -> tuple[DataLedger, list[tuple[DataShardSource, int]]]:
        """From synchronous partitions, whose last map is of that generation and which stand before `step`."""
        job = self._job
        assert isinstance(job.feeds, StepLedger)
        self._become(consistency, generation)
        feeds = job.make_data_ledger()
        begun = ledger_conversion.take_over_steps(feeds, job.feeds, step)
        job.deal(feeds, None, step)
        return feeds, begun

    def _take_steps(self, consistency: Consistency, generation: Generation, step: int, now_ms: int) -> StepLedger:
        """From asynchronous partitions, whose last map is of that generation; `step` is the first. Raises
        InvalidRequest, having changed nothing."""
        job = self._job
        assert isinstance(job.feeds, DataLedger)
        steps = job.make_step_ledger(settings_of(job.settings, consistency))
        ledger_conversion.take_over_data(steps, job.feeds, step)
        self._become(consistency, generation)
        ranks = job.make_ranks(now_ms)
        for worker in job.workers:
            ranks.enter(worker)
        job.deal(steps, ranks, step)
        return steps

    def _become(self, consistency: Consistency, generation: Generation) -> None:
        job = self._job
        assert job.keeping.book.committed is not None
        job.switching.go_over(consistency, generation, job.keeping.book.committed.number)
        job.go_by_latest()

    def _pace(self, now_ms: int) -> list[Effect]:
        """Has servers told what the job was switched to, where some may not know."""
        job = self._job
        map_ = job.deployment.map
        if map_ is None or not job.is_whole or not job.switching.begin(map_.generation, now_ms):
            return []
        if job.ranks is not None:  # they have heard it with their partitions: steps have no pace
            return job.end_pacing(map_.generation, job.switching.latest.number)
        return [PaceServers(job.id, map_, job.switching.latest)]

    # ---- records

    def restore(self, body: Body, now_ms: int) -> None:
        """Takes the record that it has gone over. Raises DamagedRecord."""
        job = self._job
        whole = job.deployment.map is not None and job.keeping.book.committed is not None
        require(whole, "a job goes over that has nothing to go on from")
        consistency = consistency_of(body, body.number("number", least=job.switching.latest.number + 1))
        crosses = consistency.mode.updates is not job.settings.consistency.mode.updates
        require(crosses, f"a job goes over to {consistency}")
        left = Generation(body.number("left", least=1))
        require(left == job.deployment.generation, f"partitions of generation {left} are left")
        step = body.number("step", most=limits.SEQUENCE_MAX)
        if isinstance(job.feeds, StepLedger):
            feeds, _ = self._lease_data(consistency, left, step)
            job.keeping.deal(feeds)
            return
        is_whole = consistency.mode is ConsistencyMode.SYNC and job.feeds.is_drained
        require(is_whole, f"a job goes over to {consistency} in the midst of data shards")
        try:
            job.keeping.deal(self._take_steps(consistency, left, step, now_ms))
        except errors.InvalidRequest as error:
            raise DamagedRecord(error.what) from error
