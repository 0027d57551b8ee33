"""Jobs and members together: events in, effects out."""

from __future__ import annotations

import dataclasses

import pytest

from shardyard.config.settings import ConsistencySettings, JobSettings
from shardyard.domain.consistency import ConsistencyMode
from shardyard.domain.errors import (
    InvalidRequest,
    NotFound,
    NotReady,
    ServerLost,
    ShardyardError,
    StaleIncarnation,
    VariableConflict,
    WorkerFailed,
)
from shardyard.domain.ids import Caller, Incarnation, JobId, MemberRole, Token
from shardyard.domain.optimizers import OptimizerSpec, make_group
from shardyard.domain.push_names import DataLease, RankSource
from shardyard.domain.variables import DType, VariableSpec
from shardyard_coordinator.core import effects, events
from shardyard_coordinator.core.effects import JobState
from shardyard_coordinator.flows.deployment import OPEN_RETRY_MS
from shardyard_coordinator.machine.machine import JOBS_ENDED_MAX
from shardyard_coordinator.members.progress import Report
from shardyard_coordinator.members.roster import LATE_MS
from shardyard_coordinator.service.status import describe
from shardyard_coordinator.work.feeds import FeedOpening, FeedSpec
from tests.support.machine_yards import MachineYard

LEASE_MS = 1_000
VARIABLES = (VariableSpec("w", DType.FLOAT32, (48,)), VariableSpec("b", DType.FLOAT32, (3,)))
SGD = OptimizerSpec("sgd", ((0.1, 0.0, 0.0, 0.0, 0.0, 0.0),))
SETTINGS = JobSettings(partitions=3, idle_ms=5_000)
SYNC = SETTINGS.model_copy(
    update={
        "consistency": ConsistencySettings(mode=ConsistencyMode.SYNC),
        "workers_expected": 2,
        "rank_grace_ms": 0,
    }
)

FEED = FeedSpec(samples=100, fingerprint="f", batch_size=10, epochs=1, shuffle=True, drop_last=False)


class Yard(MachineYard):
    """With two servers, or as many as are said."""

    def __init__(self, servers: int = 2) -> None:
        super().__init__(lease_ms=LEASE_MS)
        self.servers = [self.register(MemberRole.SERVER, f"s:{index}") for index in range(servers)]

    def join(self, settings: JobSettings = SETTINGS, pid: int | None = None) -> Caller:
        return self.join_as(self.register(MemberRole.WORKER, pid=pid), settings)

    def variables(self, caller: Caller) -> object:
        return self.handle(events.VariablesRegistered(caller, VARIABLES, SGD))

    def run(self, caller: Caller) -> None:
        """From joined to RUNNING."""
        self.open_job(caller, VARIABLES, SGD)

    def advance(self, ms: int, *alive: Incarnation) -> list[effects.Effect]:
        """Time passes in small steps while some members beat; gives all effects of the ticks."""
        found: list[effects.Effect] = []
        for _ in range(0, ms, 100):
            self.now_ms += 100
            for member in alive:
                self.beat(member)
            found += self.machine.handle(events.Ticked(), self.now_ms)
        self.effects = found
        return found


@pytest.fixture
def yard() -> Yard:
    return Yard()


# ---- jobs begin


def test_second_worker_joins_the_job_and_its_settings(yard: Yard) -> None:
    first = yard.join()
    worker = yard.register(MemberRole.WORKER)
    answer = yard.handle(events.JobJoined(worker, "default", SETTINGS.model_copy(update={"seed": 99})))
    assert isinstance(answer, effects.Joined)
    assert (answer.job, answer.started, answer.chief, answer.settings.seed) == (first.job, False, False, 0)


def test_joining_again_is_answered_alike(yard: Yard) -> None:
    caller = yard.join()
    again = yard.handle(events.JobJoined(caller.incarnation, "default", SETTINGS))
    assert isinstance(again, effects.Joined)
    assert (again.job, again.chief) == (caller.job, True)
    with pytest.raises(InvalidRequest, match="is in another one, 'default'"):
        yard.handle(events.JobJoined(caller.incarnation, "b", SETTINGS.model_copy(update={"name": "b"})))


def test_jobs_of_two_names_are_apart(yard: Yard) -> None:
    one, two = yard.join(), yard.join(SETTINGS.model_copy(update={"name": "other"}))
    assert one.job != two.job
    with pytest.raises(NotFound, match="asks about job"):
        yard.handle(events.LeaseRequested(dataclasses.replace(one, job=two.job), 0))


def test_server_cannot_join(yard: Yard) -> None:
    with pytest.raises(InvalidRequest, match="is for workers only"):
        yard.handle(events.JobJoined(yard.servers[0], "default", SETTINGS))


# ---- variables


def test_variables_wait_for_a_server() -> None:
    yard = Yard(servers=0)
    caller = yard.join()
    with pytest.raises(NotReady, match="no server has registered yet"):
        yard.variables(caller)
    yard.register(MemberRole.SERVER, "s:0")
    yard.variables(caller)
    assert len(yard.wanted(effects.CreatePartitions)) == 1


def test_layout_is_shown_only_when_all_servers_have_their_partitions(yard: Yard) -> None:
    first, second = yard.join(), yard.join()
    assert yard.variables(first) is None
    creations = yard.wanted(effects.CreatePartitions)
    assert sorted(p for each in creations for p in each.partitions) == [0, 1, 2]  # type: ignore[union-attr]
    assert isinstance(yard.effects[0], effects.Persist)
    with pytest.raises(NotReady, match="being given their partitions"):
        yard.variables(second)
    yard.handle(events.PartitionsCreated(first.job))
    for caller, initializer in ((first, True), (second, False)):
        placed = yard.variables(caller)
        assert isinstance(placed, effects.VariablesPlaced)
        assert placed.initializer is initializer


@pytest.mark.parametrize(("kind", "pieces"), [("lamb", [48]), ("adam", [16, 16, 16])])
def test_variables_are_whole_where_the_optimizer_needs_their_norms(yard: Yard, kind: str, pieces: list[int]) -> None:
    caller = yard.join(SETTINGS.model_copy(update={"block_bytes": 64}))
    spec = OptimizerSpec(kind, (make_group(kind, {}),))
    yard.handle(events.VariablesRegistered(caller, VARIABLES, spec))
    (creation, *_) = yard.wanted(effects.CreatePartitions)
    blocks = [block for part in creation.layout.partitions for block in part.blocks]  # type: ignore[union-attr]
    assert [block.length for block in blocks if block.variable == 0] == pieces


def test_refused_partitions_are_created_again(yard: Yard) -> None:
    caller = yard.join()
    yard.variables(caller)
    yard.handle(events.PartitionsRefused(caller.job))
    assert yard.variables(caller) is None
    assert len(yard.wanted(effects.CreatePartitions)) == 2


@pytest.mark.parametrize(
    ("variables", "optimizer", "said"),
    [
        ((VARIABLES[0],), SGD, "'b' is on one side only"),
        ((VARIABLES[0], VariableSpec("b", DType.FLOAT32, (4,))), SGD, r"variable 1 differs.*'b' float32\[3\]"),
        (VARIABLES, OptimizerSpec("adagrad", SGD.groups), "optimizer is 'sgd'"),
        (VARIABLES, OptimizerSpec("sgd", (*SGD.groups, *SGD.groups)), "1 parameter groups"),
        (VARIABLES, OptimizerSpec("sgd", ((0.2, 0.0, 0.0, 0.0, 0.0, 0.0),)), r"setting lr of parameter group 0.*0\.1"),
    ],
)
def test_other_variables_are_refused(
    yard: Yard, variables: tuple[VariableSpec, ...], optimizer: OptimizerSpec, said: str
) -> None:
    first, second = yard.join(), yard.join()
    yard.run(first)
    with pytest.raises(VariableConflict, match=said):
        yard.handle(events.VariablesRegistered(second, variables, optimizer))


def test_only_the_initializer_commits(yard: Yard) -> None:
    first, second = yard.join(), yard.join()
    yard.variables(first)
    yard.handle(events.PartitionsCreated(first.job))
    yard.variables(second)
    with pytest.raises(InvalidRequest, match="only the worker that was told"):
        yard.handle(events.VariablesCommitted(second))
    assert yard.handle(events.VariablesCommitted(first)) is None
    assert len(yard.wanted(effects.OpenPartitions)) == 2
    yard.handle(events.PartitionsOpened(first.job))
    assert yard.handle(events.VariablesCommitted(first)) == effects.Acknowledged()
    assert yard.beat(second.incarnation).job_state is JobState.RUNNING


def test_another_worker_initializes_when_the_first_dies_and_only_after_the_fence(yard: Yard) -> None:
    first, second = yard.join(), yard.join()
    yard.variables(first)
    yard.handle(events.PartitionsCreated(first.job))
    yard.variables(second)
    yard.advance(LEASE_MS, second.incarnation, *yard.servers)
    (fence,) = yard.wanted(effects.FenceOnServers)
    assert fence.workers == (first.incarnation,)  # type: ignore[union-attr]
    assert not yard.beat(second.incarnation).initializer
    yard.handle(events.WorkersFenced(first.job, (first.incarnation,)))
    assert yard.beat(second.incarnation).initializer
    yard.handle(events.VariablesCommitted(second))
    assert not yard.beat(second.incarnation).initializer


def test_committed_values_are_opened_even_if_the_initializer_dies(yard: Yard) -> None:
    first, second = yard.join(), yard.join()
    yard.variables(first)
    yard.handle(events.PartitionsCreated(first.job))
    yard.variables(second)
    yard.handle(events.VariablesCommitted(first))
    yard.handle(events.OpeningFailed(first.job))
    found = yard.advance(OPEN_RETRY_MS + LEASE_MS, second.incarnation, *yard.servers)
    assert len([each for each in found if isinstance(each, effects.OpenPartitions)]) == 2
    assert not yard.beat(second.incarnation).initializer
    yard.handle(events.PartitionsOpened(first.job))
    assert yard.machine.jobs[-1].state is JobState.RUNNING


# ---- members go


def test_lost_server_fails_its_jobs_with_its_name(yard: Yard) -> None:
    caller = yard.join()
    yard.run(caller)
    yard.advance(LEASE_MS, caller.incarnation, yard.servers[0])
    assert [each.server.incarnation for each in yard.wanted(effects.DropJob)] == [yard.servers[0]]  # type: ignore[union-attr]
    assert yard.wanted(effects.ForgetServer) == [effects.ForgetServer(yard.servers[1])]
    standing = yard.beat(caller.incarnation)
    assert standing.job_state is JobState.FAILED
    assert isinstance(standing.failure, ServerLost)
    assert standing.failure.facts == {"server": str(yard.servers[1]), "address": "s:1"}
    with pytest.raises(ServerLost, match="at s:1 was silent for"):
        yard.handle(events.LeaseRequested(caller, 0))
    assert yard.join().job != caller.job, "a new run of the name begins"


def test_server_without_partitions_may_go(yard: Yard) -> None:
    caller = yard.join()
    yard.run(caller)
    late = yard.register(MemberRole.SERVER, "s:9")
    yard.handle(events.MemberLeft(late, ""))
    assert yard.beat(caller.incarnation).job_state is JobState.RUNNING


def test_new_process_at_a_servers_address_replaces_the_old_one(yard: Yard) -> None:
    caller = yard.join()
    yard.run(caller)
    yard.register(MemberRole.SERVER, "s:0")
    with pytest.raises(StaleIncarnation, match="replaced by a new process"):
        yard.beat(yard.servers[0])
    failure = yard.beat(caller.incarnation).failure
    assert failure is not None
    assert "replaced" in failure.what


def test_partitions_created_after_the_job_failed_are_dropped(yard: Yard) -> None:
    caller = yard.join()
    yard.variables(caller)
    yard.handle(events.MemberLeft(yard.servers[0], ""))
    yard.handle(events.PartitionsCreated(caller.job))
    assert len(yard.wanted(effects.DropJob)) == 2


def test_work_of_a_lost_worker_waits_for_the_fence(yard: Yard) -> None:
    first, second = yard.join(pid=41), yard.join()
    yard.run(first)
    yard.handle(events.FeedOpened(first, 0, dataclasses.replace(FEED, samples=10)))
    lease = yard.handle(events.LeaseRequested(first, 0))
    assert isinstance(lease, DataLease)
    agent = yard.register(MemberRole.AGENT, "a:0")
    yard.handle(events.ExitReported(agent, 41, -9))
    assert len(yard.wanted(effects.FenceOnServers)) == 1
    assert not isinstance(yard.handle(events.LeaseRequested(second, 0)), DataLease)
    assert yard.beat(yard.servers[0]).fenced == (first.incarnation,)
    yard.handle(events.WorkersFenced(first.job, (first.incarnation,)))
    again = yard.handle(events.LeaseRequested(second, 0))
    assert isinstance(again, DataLease)
    assert (again.source, again.token > lease.token) == (lease.source, True)
    with pytest.raises(StaleIncarnation, match="was ended by signal 9"):
        yard.handle(events.LeaseRequested(first, 0))


def test_exit_is_believed_from_an_agent_only(yard: Yard) -> None:
    caller = yard.join()
    with pytest.raises(InvalidRequest, match="is for agents only"):
        yard.handle(events.ExitReported(caller.incarnation, 1, 0))


def test_chief_is_the_living_worker_that_came_first(yard: Yard) -> None:
    first, second, third = yard.join(), yard.join(), yard.join()
    assert [yard.beat(each.incarnation).chief for each in (first, second, third)] == [True, False, False]
    yard.handle(events.MemberLeft(first.incarnation, "ValueError: spoilt"))
    standing = yard.beat(second.incarnation)
    assert (standing.chief, standing.workers) == (True, 2)


def test_chief_that_says_goodbye_has_no_successor(yard: Yard) -> None:
    first, second = yard.join(), yard.join()
    yard.handle(events.MemberLeft(first.incarnation, ""))
    assert not yard.beat(second.incarnation).chief


def test_last_worker_that_leaves_ends_the_job(yard: Yard) -> None:
    caller = yard.join()
    yard.run(caller)
    yard.handle(events.MemberLeft(caller.incarnation, ""))
    assert len(yard.wanted(effects.DropJob)) == 2
    assert yard.machine.jobs[-1].state is JobState.FINISHED


def test_last_worker_that_leaves_by_an_error_fails_the_job(yard: Yard) -> None:
    first, second = yard.join(), yard.join()
    yard.run(first)
    yard.handle(events.MemberLeft(first.incarnation, "ValueError: x"))
    assert yard.machine.jobs[-1].state is JobState.RUNNING
    yard.handle(events.MemberLeft(second.incarnation, "ValueError: y"))
    job = yard.machine.jobs[-1]
    assert job.state is JobState.FAILED
    assert isinstance(job.failure, WorkerFailed)
    assert "ValueError: y" in job.failure.what


def test_worker_that_comes_late_finds_the_work_done(yard: Yard) -> None:
    settings = SETTINGS.model_copy(update={"workers_expected": 2})
    first = yard.join(settings)
    yard.run(first)
    yard.handle(events.MemberLeft(first.incarnation, ""))
    yard.advance(LATE_MS // 3, *yard.servers)
    late = yard.join(settings)
    assert late.job == first.job
    yard.handle(events.MemberLeft(late.incarnation, ""))
    assert yard.machine.jobs[-1].state is JobState.FINISHED


def test_job_that_nobody_joins_any_more_is_finished_after_a_while(yard: Yard) -> None:
    settings = SETTINGS.model_copy(update={"workers_expected": 2, "idle_ms": 600_000})
    first = yard.join(settings)
    yard.run(first)
    yard.handle(events.MemberLeft(first.incarnation, ""))
    yard.advance(LATE_MS - 100, *yard.servers)
    assert yard.machine.jobs[-1].state is JobState.RUNNING
    yard.advance(100, *yard.servers)
    assert yard.machine.jobs[-1].state is JobState.FINISHED


def finish_data(yard: Yard, caller: Caller) -> None:
    """The worker computes all of a data set."""
    yard.handle(events.FeedOpened(caller, 0, FEED))
    while isinstance(lease := yard.handle(events.LeaseRequested(caller, 0)), DataLease):
        returned = events.LeaseReturned(caller, 0, lease.source, lease.token)
        yard.handle(returned)
        (read,) = yard.wanted(effects.ReadLedger)
        assert isinstance(read, effects.ReadLedger)
        yard.handle(events.LedgerRead(returned, FEED.samples, read.map.generation))


@pytest.mark.parametrize("goodbyes", [1, 2])
def test_job_whose_last_worker_died_when_all_was_done_is_finished(yard: Yard, goodbyes: int) -> None:
    settings = SETTINGS.model_copy(update={"workers_expected": 2, "idle_ms": 600_000})
    workers = [yard.join(settings) for _ in range(goodbyes)]
    yard.join(settings)
    yard.run(workers[0])
    finish_data(yard, workers[0])
    for worker in workers:
        yard.handle(events.MemberLeft(worker.incarnation, ""))
    assert yard.job().workers == 1
    yard.advance(LEASE_MS + 200, *yard.servers)
    assert yard.job().workers == 0
    assert yard.machine.jobs[-1].state is (JobState.FINISHED if goodbyes == 2 else JobState.RUNNING)
    yard.advance(LATE_MS, *yard.servers)
    assert yard.machine.jobs[-1].state is JobState.FINISHED


def test_job_whose_last_worker_died_before_all_was_done_waits_for_another(yard: Yard) -> None:
    settings = SETTINGS.model_copy(update={"workers_expected": 2, "idle_ms": 600_000})
    early, _ = yard.join(settings), yard.join(settings)
    yard.run(early)
    yard.handle(events.FeedOpened(early, 0, FEED))
    yard.handle(events.MemberLeft(early.incarnation, ""))
    yard.advance(LEASE_MS + LATE_MS, *yard.servers)
    assert yard.machine.jobs[-1].state is JobState.RUNNING


def test_job_whose_workers_all_died_fails_after_its_idle_time(yard: Yard) -> None:
    caller = yard.join()
    yard.run(caller)
    yard.advance(LEASE_MS + SETTINGS.idle_ms - 200, *yard.servers)
    assert yard.machine.jobs[-1].state is JobState.RUNNING
    yard.advance(300, *yard.servers)
    job = yard.machine.jobs[-1]
    assert job.state is JobState.FAILED
    assert job.failure is not None
    assert f"worker {caller.incarnation}, was silent" in job.failure.what


def test_sleep_of_the_coordinator_kills_nobody(yard: Yard) -> None:
    caller = yard.join()
    yard.now_ms += 60_000
    yard.handle(events.Ticked())
    assert yard.beat(caller.incarnation).job_state is JobState.STARTING


def test_ended_jobs_are_bounded(yard: Yard) -> None:
    for _ in range(JOBS_ENDED_MAX + 5):
        yard.handle(events.MemberLeft(yard.join().incarnation, ""))
    yard.join()
    assert len(describe(yard.machine, 0).jobs) == JOBS_ENDED_MAX + 1


# ---- work


def test_lease_waits_for_first_values(yard: Yard) -> None:
    caller = yard.join()
    yard.handle(events.FeedOpened(caller, 0, FEED))
    with pytest.raises(NotReady, match="no variables on the servers yet"):
        yard.handle(events.LeaseRequested(caller, 0))


def test_synchronous_job_leases_ranks_and_closes_feeds_by_all_ranks(yard: Yard) -> None:
    first, second = yard.join(SYNC), yard.join(SYNC)
    yard.run(first)
    assert [lease.rank for each in (first, second) for lease in yard.beat(each.incarnation).ranks] == [0, 1]
    opening = yard.handle(events.FeedOpened(first, 0, FEED))
    assert isinstance(opening, FeedOpening)
    assert (opening.units_per_epoch, opening.first_step) == (5, 0)
    with pytest.raises(InvalidRequest, match="leases logical ranks"):
        yard.handle(events.LeaseRequested(first, 0))
    returned = events.LeaseReturned(first, 0, None, Token(0))
    yard.handle(returned)
    (read,) = yard.wanted(effects.ReadLedger)
    assert [key.source for key in read.sources] == [RankSource(0), RankSource(1)]  # type: ignore[union-attr, arg-type]
    assert yard.handle(events.LedgerRead(returned, 4)) == effects.LeaseClosed(done=False)
    assert yard.handle(events.LedgerRead(returned, 5)) == effects.LeaseClosed(done=True)
    assert yard.handle(returned) == effects.LeaseClosed(done=True)


def test_asynchronous_job_closes_data_shards_only(yard: Yard) -> None:
    caller = yard.join()
    yard.run(caller)
    yard.handle(events.FeedOpened(caller, 0, FEED))
    with pytest.raises(InvalidRequest, match="no data shard"):
        yard.handle(events.LeaseReturned(caller, 0, None, Token(0)))


def test_refused_event_changes_nothing(yard: Yard) -> None:
    caller = yard.join()
    yard.run(caller)
    before = describe(yard.machine, 0)
    for event in (
        events.LeaseRequested(caller, 7),
        events.LeaseRequested(Caller(caller.job, Incarnation(5)), 0),
        events.FeedOpened(caller, 3, FEED),
        events.JobJoined(caller.incarnation, "x", SETTINGS),
        events.VariablesRegistered(caller, VARIABLES[:1], SGD),
    ):
        with pytest.raises(ShardyardError):
            yard.handle(event)
    assert describe(yard.machine, 0) == before


def test_effects_of_a_job_that_is_forgotten_do_nothing(yard: Yard) -> None:
    for event in (
        events.PartitionsCreated(JobId(5)),
        events.OpeningFailed(JobId(5)),
        events.WorkersFenced(JobId(5), (Incarnation(3),)),
    ):
        assert yard.machine.handle(event, 0) == []


# ---- progress


def test_progress_outlives_the_workers_that_made_it(yard: Yard) -> None:
    first, second = yard.join(), yard.join()
    yard.beat(first.incarnation, Report(step=7, samples=700, metrics=(("loss", 0.5),)))
    yard.beat(second.incarnation, Report(step=5, samples=500))
    yard.handle(events.MemberLeft(first.incarnation, ""))
    job = yard.job()
    assert (job.step, job.samples) == (7, 1_200)
    assert [(each.name, each.value) for each in job.metrics] == [("loss", 0.5)]


def test_rate_is_that_of_the_last_seconds(yard: Yard) -> None:
    caller = yard.join()
    samples = 0
    for second in range(1, 21):
        yard.now_ms = second * 1_000
        samples += 1_000 if second <= 10 else 200
        yard.beat(caller.incarnation, Report(step=second, samples=samples))
    assert yard.job().samples_per_s == pytest.approx(200)
    yard.now_ms += 10_000
    assert yard.job().samples_per_s == 0
