"""Whatever happens to a machine, its records make it anew: random events of every kind, wrong ones among them, held
against machines from all its records and from its snapshot, at many points.
"""

from __future__ import annotations

import random

import pytest

from shardyard.config.settings import ConsistencySettings, DataSettings, JobSettings
from shardyard.domain.consistency import ConsistencyMode, UpdateMode
from shardyard.domain.errors import ShardyardError
from shardyard.domain.ids import Caller, Generation, Incarnation, JobId, MemberRole, Rank, RunName, Term, Token
from shardyard.domain.push_names import DataLease, LeasedSource, RankSource, WorkerSource
from shardyard_coordinator.core import effects, events
from shardyard_coordinator.machine import job_views
from shardyard_coordinator.members.membership import Registration
from shardyard_coordinator.members.progress import Report
from shardyard_coordinator.placement.placement import Server, plan
from shardyard_coordinator.work.step_ledger import StepLedger
from tests.simulation.restoring import FEEDS, SGD, VARIABLES, Lockstep

RED_ONCE = (36, 51)
"""36: a recovery waited for a server's restart, and the machine from records waited for as long again. 51: a snapshot
had the workers whose gradients were not finite in another order than the machine."""
RED_ONCE_TOO = (52, 61, 117, 124)
"""The same."""
SEEDS = [
    *range(2),
    *RED_ONCE,
    *(pytest.param(seed, marks=pytest.mark.long) for seed in (*range(2, 24), *RED_ONCE_TOO)),
]
NAMED_OF_EIGHT = 2
"""In these of eight seeds processes join as runs of several launches."""
EVENTS = 500
EVENTS_A_CUT = 25
SETTINGS = {
    name: JobSettings(
        name=name,
        partitions=3,
        workers_expected=2,
        rank_grace_ms=300,
        idle_ms=2_000,
        consistency=ConsistencySettings(mode=ConsistencyMode(mode.value), logical_ranks=3),
        data=DataSettings(batches_per_data_shard=2, poison_deaths=2),
        nonfinite_max=3,
    )
    for name, mode in (("a", UpdateMode.ASYNC), ("s", UpdateMode.SYNC))
}
_S = SETTINGS["s"]
SETTINGS["b"] = _S.model_copy(
    update={"name": "b", "consistency": _S.consistency.model_copy(update={"backup_workers": 1})}
)
SERVER = Server(Incarnation(1), "s:1")
SPEC = effects.JobSpec(JobId(1), SETTINGS["a"], plan(VARIABLES, SGD, partitions=3, block_bytes=256))
ALL_KINDS = {
    "batch_begun",
    "batch_quarantined",
    "consistency_switched",
    "data_closed",
    "data_leased",
    "feed_closed",
    "feed_opened",
    "initializer_chosen",
    "job_ended",
    "job_forgotten",
    "job_started",
    "member_registered",
    "member_removed",
    "not_finite",
    "partitions_created",
    "partitions_lost",
    "partitions_opened",
    "partitions_placed_again",
    "rank_given",
    "recovery_begun",
    "steps_decided",
    "stop_asked",
    "stop_settled",
    "variables_committed",
    "variables_registered",
    "worker_admitted",
    "worker_freed",
    "worker_gone",
    "run_joined",
    "worker_joined",
    "worker_quarantined",
    "worker_switched",
}
SNAPSHOT_KINDS = {
    "contributions_dropped_before",
    "feed_progress",
    "member_former",
    "not_finite_before",
    "source_suspected",
    "token_given",
    "workers_departed",
    "workers_gone",
}


class Fuzz:
    """Events by chance, with what is needed to make most of them fit."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.switching = random.Random(f"switching {seed}")
        self.naming = random.Random(f"naming {seed}") if seed % 8 == NAMED_OF_EIGHT else None
        self.orders: list[effects.PaceServers] = []
        self.now_ms = 1_000
        self.machines = Lockstep(term=Term(2), lease_ms=1_000, now_ms=self.now_ms)
        self.kinds: set[str] = set()
        self.members: dict[Incarnation, MemberRole] = {}
        self.jobs: dict[Incarnation, JobId] = {}
        self.leases: dict[Incarnation, DataLease] = {}
        self.fences: list[effects.FenceOnServers] = []
        self.reads: list[effects.ReadSteps] = []
        if seed % 2:
            for settings in SETTINGS.values():
                self._run_job(settings)
        if seed % 4 == 3:
            self._die_at_one_batch()

    def _run_job(self, settings: JobSettings) -> None:
        """A job with variables, feeds and two workers; by chance alone few come so far."""
        if not self.members:
            self._register(MemberRole.SERVER)
            self._register(MemberRole.AGENT)
        worker, _ = self._hire(settings), self._hire(settings)
        caller = Caller(self.jobs[worker], worker)
        for event in (
            events.VariablesRegistered(caller, VARIABLES, SGD),
            events.PartitionsCreated(caller.job),
            events.VariablesRegistered(caller, VARIABLES, SGD),
            events.VariablesCommitted(caller),
            events.PartitionsOpened(caller.job),
            *(events.FeedOpened(caller, feed, spec) for feed, spec in enumerate(FEEDS)),
        ):
            self.handle(event)

    def _hire(self, settings: JobSettings) -> Incarnation:
        worker = self._register(MemberRole.WORKER)
        answer = self.handle(events.JobJoined(worker, settings.name, settings, RunName(settings.name)))
        assert isinstance(answer, effects.Joined)
        self.jobs[worker] = answer.job
        return worker

    def _die_at_one_batch(self) -> None:
        """One worker after the other, until the batch is condemned."""
        agent = next(each for each, role in self.members.items() if role is MemberRole.AGENT)
        for _ in range(3):
            worker = self._hire(SETTINGS["a"])
            caller = Caller(self.jobs[worker], worker)
            lease = self.handle(events.LeaseRequested(caller, 1))
            assert isinstance(lease, DataLease)
            self.handle(events.BatchBegun(caller, lease.source, lease.token, 1, 0))
            pid = next(each.registration.pid for each in self.machines.machine.members if each.incarnation == worker)
            self.handle(events.ExitReported(agent, pid, -9))
            while self.fences:
                fence = self.fences.pop()
                self.handle(events.WorkersFenced(fence.job, fence.workers))

    def handle(self, event: events.Event) -> object:
        try:
            found = self.machines.handle(event, self.now_ms)
        except ShardyardError as error:
            return error
        self.kinds |= {effect.kind for effect in found if isinstance(effect, effects.Persist)}
        self.fences += [effect for effect in found if isinstance(effect, effects.FenceOnServers)]
        reply: object = next((effect.answer for effect in found if isinstance(effect, effects.Reply)), None)
        for effect in found:
            if isinstance(effect, effects.ReadSteps):
                self.reads.append(effect)
            elif isinstance(effect, effects.PaceServers):
                self.orders.append(effect)
        if any(isinstance(effect, effects.ReadLedger) for effect in found):
            assert isinstance(event, events.LeaseReturned)
            reply = self.handle(events.LedgerRead(event, self.random.choice((0, 1, 2, 2, 40))))
        return reply

    def _switch(self) -> None:
        """A person switches a job, servers have taken that, or have not, workers go over."""
        modes = (None, ConsistencyMode.ASYNC, ConsistencyMode.BOUNDED, ConsistencyMode.BOUNDED, ConsistencyMode.SYNC)
        name, bound = self.switching.choice(("a", "a", "s", "")), self.switching.choice((None, None, 0, 3))
        self.handle(events.SwitchRequested(name, self.switching.choice(modes), bound))
        if self.orders and self.switching.random() < 0.7:
            order = self.orders.pop(self.switching.randrange(len(self.orders)))
            told = events.ServersPaced(order.job, order.map.generation, order.consistency.number)
            self.handle(told if self.switching.random() < 0.7 else events.NotAnswered(order.job, order))
        for member in sorted(self.members):
            if self.switching.random() < 0.3:
                self.handle(events.HeartbeatReceived(member, Report(switches=self.switching.randrange(4))))

    def step(self) -> None:
        if self.switching.random() < 0.03:
            self._switch()
        chance = self.random.random()
        if chance < 0.08:
            self._register_someone()
        elif chance < 0.25:
            self._pass_time()
        elif chance < 0.31:
            self._end_of_someone()
        elif chance < 0.36 and self.fences:
            fence = self.fences.pop(self.random.randrange(len(self.fences)))
            self.handle(events.WorkersFenced(fence.job, fence.workers))
        elif chance < 0.38 and self.reads:
            read = self.reads.pop()
            lost = self.random.random() < 0.2
            answer = events.StepsRead(read.job, read.map.generation, self.random.randrange(9))
            self.handle(events.NotAnswered(read.job, read) if lost else answer)
        elif chance < 0.45:
            self._join()
        elif chance < 0.455 and self.jobs:
            self._stop(self.random.choice(sorted(self.jobs)))
        elif chance < 0.49 and self.jobs:
            self._be_careful(self.random.choice(sorted(self.jobs)))
        elif self.jobs:
            self._work(self.random.choice(sorted(self.jobs)))

    def _register_someone(self) -> None:
        roles = [MemberRole.WORKER, MemberRole.WORKER, MemberRole.AGENT]
        if self.random.random() < 0.1 or MemberRole.SERVER not in self.members.values():
            roles = [MemberRole.SERVER]
        self._register(self.random.choice(roles))

    def _register(self, role: MemberRole) -> Incarnation:
        address = "" if role is MemberRole.WORKER else f"{role.value}:{self.random.randrange(3)}"
        agent = Incarnation(9) if role is MemberRole.WORKER else None
        registration = Registration(role, address, 1, "0", "box", self.random.randrange(5), agent, 1)
        answer = self.handle(events.MemberRegistered(registration))
        assert isinstance(answer, effects.Registered)
        self.members[answer.incarnation] = role
        return answer.incarnation

    def _pass_time(self) -> None:
        self.now_ms += self.random.choice((0, 50, 200, 200, 400))
        silent = self.random.random() < 0.1
        for member in sorted(self.members):
            if not silent or self.random.random() < 0.7:
                reached = self.random.choice((None, self.random.randrange(9)))
                step, samples = self.random.randrange(9), self.random.randrange(99)
                report = Report(step, samples, (("loss", 0.5),), stop_reached=reached)
                self.handle(events.HeartbeatReceived(member, report))
        if silent:
            self.now_ms += 450
            self.handle(events.Ticked())
            self.now_ms += 450
        self.handle(events.Ticked())

    def _end_of_someone(self) -> None:
        member = self.random.choice(sorted(self.members)) if self.members else Incarnation(5)
        if self.members.get(member) is MemberRole.SERVER and self.random.random() < 0.8:
            return
        if self.random.random() < 0.5:
            self.handle(events.ExitReported(member, self.random.randrange(5), -9))
        else:
            self.handle(events.MemberLeft(member, self.random.choice(("", "", "ValueError: é"))))

    def _join(self) -> None:
        workers = [each for each, role in sorted(self.members.items()) if role is MemberRole.WORKER]
        if workers:
            worker, settings = self.random.choice(workers), self.random.choice(list(SETTINGS.values()))
            answer = self.handle(events.JobJoined(worker, settings.name, settings, self._run_of_someone()))
            if isinstance(answer, effects.Joined):
                self.jobs[worker] = answer.job

    def _run_of_someone(self) -> RunName | None:
        """A run of one of a few launches (rule A17), or of none."""
        if self.naming is None or self.naming.random() < 0.3:
            return None
        return RunName(f"launch {self.naming.randrange(4)}", self.naming.choice((1, 1, 2)))

    def _work(self, worker: Incarnation) -> None:
        job = self.jobs[worker]
        caller, feed = Caller(job, worker), self.random.choice((0, 0, 1))
        if any(each.id == job and each.settings.name == "b" for each in self.machines.machine.jobs):
            self._be_late(caller, feed)
        lease = self.leases.get(worker)
        event = self.random.choice(
            (
                events.VariablesRegistered(caller, VARIABLES[: self.random.choice((1, 2, 2, 2))], SGD),
                events.PartitionsCreated(job),
                events.NotAnswered(job, effects.CreatePartitions(SPEC, SERVER, Generation(1), ())),
                events.VariablesCommitted(caller),
                events.PartitionsOpened(job),
                events.NotAnswered(job, effects.OpenPartitions(job, SERVER, Generation(1))),
                events.FeedOpened(caller, feed, FEEDS[feed]),
                events.LeaseRequested(caller, feed),
                events.LeaseRequested(caller, feed),
                events.LeaseReturned(caller, feed, None, 0)
                if lease is None
                else events.LeaseReturned(caller, lease.source.feed, lease.source, lease.token),
            )
        )
        answer = self.handle(event)
        if isinstance(answer, DataLease):
            self.leases[worker] = answer

    def _be_late(self, caller: Caller, feed: int) -> None:
        """Some ranks have contributed to the next step, or to one that is decided; or what is made up is asked for."""
        decided = [
            job.feeds.verdicts.decided
            for job in self.machines.machine.jobs
            if job.id == caller.job and isinstance(job.feeds, StepLedger)
        ]
        step = max(0, sum(decided) + self.random.choice((0, 0, 0, 0, -1, 1)))
        ranks = tuple(rank for rank in (Rank(0), Rank(1), Rank(2), Rank(3)) if self.random.random() < 0.6)
        self.handle(events.StepReported(caller, step, ranks[:2]))
        self.handle(events.StepReported(caller, step, ranks[2:] or ranks))
        self.handle(events.MakeupRequested(caller, feed, step))

    def _stop(self, worker: Incarnation) -> None:
        """Told by a worker, or a person."""
        caller = self.random.choice((Caller(self.jobs[worker], worker), None))
        name = "" if caller else self.random.choice([*SETTINGS, "none", ""])
        self.handle(events.StopRequested(caller, name, self.random.choice(("", "loss is n\u00e4n"))))

    def _be_careful(self, worker: Incarnation) -> None:
        """Announces work at which others have died, and dies of it, or not."""
        caller = Caller(self.jobs[worker], worker)
        job = next((job for job in self.machines.machine.jobs if job.id == caller.job), None)
        lease = self.leases.get(worker)
        announced: list[tuple[LeasedSource, Token]] = [] if lease is None else [(lease.source, lease.token)]
        announced += (
            [] if job is None else [(RankSource(each.rank), each.token) for each in job_views.ranks_of(job, worker)]
        )
        if self.random.random() < 0.3:
            self._report_not_finite(caller, announced)
        for source, token in announced:
            sequence, highest = self.random.choice((0, 0, 1, 3)), self.random.choice((0, 0, 0, 9))
            self.handle(events.BatchBegun(caller, source, token, sequence, highest))
        agents = [each for each, role in sorted(self.members.items()) if role is MemberRole.AGENT]
        dying = 0.4 if job is not None and any(job.suspects.has(source) for source, _ in announced) else 0.1
        if agents and self.leases.get(worker) is not None and self.random.random() < dying:
            pids = [each.registration.pid for each in self.machines.machine.members if each.incarnation == worker]
            for pid in pids:
                self.handle(events.ExitReported(agents[-1], pid, -9))

    def _report_not_finite(self, caller: Caller, announced: list[tuple[LeasedSource, Token]]) -> None:
        source, token = self.random.choice([*announced, (WorkerSource(caller.incarnation), Token(0))])
        first, highest = self.random.choice((0, 0, 1)), self.random.choice((0, 0, 1))
        last = first + self.random.choice((0, 0, 1))
        count = self.random.choice((1, 2, 3))
        self.handle(events.NotFiniteReported(caller, source, token, first, last, "w", count, count, 7, highest))

    def run(self) -> None:
        for number in range(1, EVENTS + 1):
            self.step()
            if number % EVENTS_A_CUT == 0:
                self.machines.split(self.now_ms)
        self.machines.check(self.now_ms)


@pytest.mark.parametrize("seed", SEEDS)
def test_machines_from_records_are_equal_and_go_on_alike(seed: int) -> None:
    Fuzz(seed).run()


@pytest.mark.long
def test_the_events_by_chance_write_records_of_every_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardyard_coordinator.machine.job_directory.JOBS_ENDED_MAX", 2)
    written: set[str] = set()
    for seed in range(12):
        fuzz = Fuzz(seed)
        fuzz.run()
        written |= fuzz.kinds | {each.kind for each in fuzz.machines.persisted}
    assert written == ALL_KINDS | SNAPSHOT_KINDS
