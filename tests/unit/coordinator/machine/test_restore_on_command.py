"""Jobs that begin with a checkpoint, or go back to one, because somebody ordered it: the machine's side."""

from __future__ import annotations

import dataclasses

import pytest

from shardyard.config.settings import CheckpointSettings, ConsistencySettings, JobSettings
from shardyard.domain.consistency import ConsistencyMode, UpdateMode
from shardyard.domain.errors import (
    CheckpointDamaged,
    ConfigurationError,
    InvalidRequest,
    NotFound,
    NotReady,
    VariableConflict,
)
from shardyard.domain.ids import Caller, Generation, JobId, MemberRole, PartitionId, Token
from shardyard.domain.optimizers import OptimizerSpec
from shardyard.domain.push_names import DataLease
from shardyard.domain.variables import DType, VariableSpec
from shardyard_coordinator.core import effects, events
from shardyard_coordinator.core.effects import JobPhase
from shardyard_coordinator.placement.placement import plan
from shardyard_coordinator.storage.restore_point import RestorePoint
from shardyard_coordinator.work.feeds import FeedOpening, FeedSpec
from shardyard_coordinator.work.step_ledger import StepLedger
from tests.support.machine_yards import MachineYard

LEASE_MS = 1_000_000
VARIABLES = (VariableSpec("w", DType.FLOAT32, (48,)), VariableSpec("b", DType.FLOAT32, (8,)))
SGD = OptimizerSpec("sgd", ((0.1, 0.0, 0.0, 0.0, 0.0, 0.0),))
SETTINGS = JobSettings(partitions=2, checkpoint=CheckpointSettings(every_s=0))
FEED = FeedSpec(100, "f", 10, 1, shuffle=False, drop_last=False)
GEOMETRY = {"batches_per_data_shard": 2, "units": 5, "first_step": 0}
# of five data shards the first is closed, the second leased, the third given back
LEDGER = {
    "entries": [
        [
            "feed_opened",
            {"feed": 0, **dataclasses.asdict(FEED), "batches_per_data_shard": 2, "units": 5, "first_step": 0},
        ],
        ["feed_progress", {"feed": 0, "begun": 3, "free": [1, 2], "reached": []}],
        ["data_leased", {"feed": 0, "epoch": 0, "index": 1, "worker": 8, "token": 40, "first": 0}],
    ],
    "closed": 1,
    "token": 44,
}
ORIGIN = RestorePoint(
    "default",
    "elsewhere",
    7,
    JobId((1 << 32) + 5),
    60,
    UpdateMode.ASYNC,
    1,
    99,
    plan(VARIABLES, SGD, partitions=2, block_bytes=256),
    LEDGER,
    Token(44),
    Token(40),
    1_700_000_000,
)


class Yard(MachineYard):
    def __init__(self) -> None:
        super().__init__(lease_ms=LEASE_MS, checkpoints="here")
        self.servers = [self.register(MemberRole.SERVER, f"s:{index}") for index in range(3)]

    def join(self, settings: JobSettings = SETTINGS) -> Caller:
        return self.join_as(self.register(MemberRole.WORKER), settings)

    def order(self, origin: RestorePoint = ORIGIN) -> bool:
        answer = self.handle(events.RestoreOrdered(origin))
        assert isinstance(answer, effects.RestorePlanned)
        return answer.running

    def tick(self) -> effects.RestorePartitions | None:
        """What is to be restored."""
        found = None
        for _ in range(2):
            self.now_ms += 1_000
            self.handle(events.Ticked())
            found = next((each for each in self.effects if isinstance(each, effects.RestorePartitions)), found)
        return found

    def restored(self, wanted: effects.RestorePartitions | None) -> None:
        assert wanted is not None
        self.handle(events.PartitionsRestored(wanted.spec.job, wanted.map.generation))

    @property
    def state(self) -> JobPhase:
        return self.machine.jobs[-1].phase


@pytest.fixture(params=["", "all", "snapshot"])
def restarts(request: pytest.FixtureRequest) -> str:
    """Whether, and from what, another coordinator goes on at each step."""
    return str(request.param)


def perhaps(yard: Yard, restarts: str) -> None:
    if restarts:
        yard.restart(from_snapshot=restarts == "snapshot")


def test_next_run_begins_with_the_checkpoint_and_leases_what_it_lacks(restarts: str) -> None:
    yard = Yard()
    assert not yard.order()
    perhaps(yard, restarts)
    worker = yard.join()
    assert worker.job > ORIGIN.job, "no number that the former run's members know"
    perhaps(yard, restarts)
    with pytest.raises(NotReady, match="begins with checkpoint 7 of step 60"):
        yard.handle(events.VariablesRegistered(worker, VARIABLES, SGD))
    wanted = yard.tick()
    assert wanted is not None
    perhaps(yard, restarts)
    if restarts:
        wanted = yard.tick()
        assert wanted is not None
    assert (wanted.url, wanted.bases[0].number, wanted.spec.settings.seed) == ("elsewhere", 7, 99)
    assert wanted.partitions == {PartitionId(0), PartitionId(1)}
    assert {owner.server for owner in wanted.map.owners} <= set(yard.servers)
    yard.restored(wanted)
    perhaps(yard, restarts)
    assert yard.state is JobPhase.RUNNING
    placed = yard.handle(events.VariablesRegistered(worker, VARIABLES, SGD))
    assert isinstance(placed, effects.VariablesPlaced)
    assert not placed.initializer
    opening = yard.handle(events.FeedOpened(worker, 0, FEED))
    assert opening == FeedOpening(2, 5, 0, done=False)
    lease = yard.handle(events.LeaseRequested(worker, 0))
    assert isinstance(lease, DataLease)
    assert (lease.source.index, lease.token) == (1, 45), "the first that is not closed, under a token of its own"
    with pytest.raises(NotFound, match="no restore was ordered"):
        yard.handle(events.RestoreCancelled("default"))


def test_run_that_could_not_begin_leaves_the_order_to_the_next(restarts: str) -> None:
    yard = Yard()
    yard.order()
    yard.join()
    wanted = yard.tick()
    assert wanted is not None
    damaged = CheckpointDamaged("some bytes have changed")
    yard.handle(events.RestoreFailed(wanted.spec.job, wanted.map.generation, damaged))
    assert yard.state is JobPhase.FAILED
    perhaps(yard, restarts)
    yard.order(dataclasses.replace(ORIGIN, number=6))
    yard.join()
    again = yard.tick()
    assert again is not None
    assert again.bases[0].number == 6


def test_server_that_dies_while_a_run_begins_is_made_up_for() -> None:
    yard = Yard()
    yard.order()
    yard.join()
    wanted = yard.tick()
    assert wanted is not None
    gone = wanted.map.owners[0].server
    yard.handle(events.MemberLeft(gone, ""))
    yard.restored(wanted)
    assert yard.state is JobPhase.STARTING, "that attempt was given up"
    again = yard.tick()
    assert again is not None
    assert gone not in {owner.server for owner in again.map.owners}
    assert again.life > wanted.life
    yard.restored(again)
    assert yard.state is JobPhase.RUNNING


def test_variables_that_do_not_fit_are_explained() -> None:
    yard = Yard()
    yard.order()
    worker = yard.join()
    other = (VARIABLES[0], VariableSpec("b", DType.FLOAT32, (9,)))
    with pytest.raises(VariableConflict, match=r"as checkpoint 7 of step 60, with which it is to begin, has it"):
        yard.handle(events.VariablesRegistered(worker, other, SGD))


def test_settings_that_disagree_are_refused_and_those_that_need_not_be_said_are_taken() -> None:
    sync = dataclasses.replace(
        ORIGIN, mode=UpdateMode.SYNC, logical_ranks=3, data_ledger={"entries": [], "closed": 0, "token": 0}
    )
    yard = Yard()
    yard.order(sync)
    worker = yard.register(MemberRole.WORKER)
    with pytest.raises(ConfigurationError, match=r"which is sync; job\.consistency\.mode is async"):
        yard.handle(events.JobJoined(worker, "default", SETTINGS))
    four = SETTINGS.model_copy(update={"consistency": ConsistencySettings(mode=ConsistencyMode.SYNC, logical_ranks=4)})
    with pytest.raises(ConfigurationError, match="which has 3 logical ranks"):
        yard.handle(events.JobJoined(worker, "default", four))
    auto = SETTINGS.model_copy(update={"consistency": ConsistencySettings(mode=ConsistencyMode.SYNC)})
    answer = yard.handle(events.JobJoined(worker, "default", auto))
    assert isinstance(answer, effects.Joined)
    assert (answer.logical_ranks, answer.settings.seed) == (3, 99)
    assert min(lease.token for lease in answer.ranks) > ORIGIN.token


def test_run_with_backup_workers_is_gone_on_with_by_one_that_makes_up_for_what_was_dropped() -> None:
    sync = ConsistencySettings(mode=ConsistencyMode.SYNC)
    decided = ["steps_decided", {"first": 59, "left_out": [[2]], "dropped": []}]
    origin = dataclasses.replace(
        ORIGIN,
        mode=UpdateMode.SYNC,
        logical_ranks=3,
        data_ledger={"entries": [decided], "closed": 0, "token": 0},
    )
    yard = Yard()
    yard.order(origin)
    worker = yard.register(MemberRole.WORKER)
    for backup_workers, said in (0, "of a run with backup workers"), (3, "which has 3 logical ranks"):
        given = SETTINGS.model_copy(
            update={"consistency": sync.model_copy(update={"backup_workers": backup_workers, "logical_ranks": "auto"})}
        )
        with pytest.raises(ConfigurationError, match=said):
            yard.handle(events.JobJoined(worker, "default", given))
    one = SETTINGS.model_copy(update={"consistency": sync.model_copy(update={"backup_workers": 1})})
    answer = yard.handle(events.JobJoined(worker, "default", one))
    assert isinstance(answer, effects.Joined)
    feeds = yard.machine.jobs[-1].feeds
    assert isinstance(feeds, StepLedger)
    assert (feeds.verdicts.decided, feeds.verdicts.members(59)) == (60, (0, 1))
    yard.restart(from_snapshot=True)
    again = yard.machine.jobs[-1].feeds
    assert isinstance(again, StepLedger)
    assert again.entries() == feeds.entries()


def test_order_can_be_taken_back() -> None:
    yard = Yard()
    yard.order()
    yard.handle(events.RestoreCancelled("default"))
    yard.restart(from_snapshot=False)
    worker = yard.join()
    yard.handle(events.VariablesRegistered(worker, VARIABLES, SGD))
    assert any(isinstance(each, effects.CreatePartitions) for each in yard.effects)


# ---- a job that runs


def running() -> tuple[Yard, Caller, RestorePoint]:
    """With a checkpoint 1 of step 0, which is the origin."""
    yard = Yard()
    worker = yard.join()
    for event in (
        events.VariablesRegistered(worker, VARIABLES, SGD),
        events.PartitionsCreated(worker.job),
        events.VariablesCommitted(worker),
        events.PartitionsOpened(worker.job),
        events.FeedOpened(worker, 0, FEED),
        events.Ticked(),
    ):
        yard.handle(event)
    (taking,) = [each for each in yard.effects if isinstance(each, effects.TakeCheckpoint)]
    yard.handle(events.CheckpointTaken(worker.job, 1, 1, 0))
    layout = yard.machine.jobs[0].deployment.layout
    assert layout is not None
    ledger = taking.draft.data_ledger
    return (
        yard,
        worker,
        dataclasses.replace(ORIGIN, url="here", number=1, job=worker.job, step=0, layout=layout, data_ledger=ledger),
    )


def close(yard: Yard, worker: Caller) -> DataLease:
    lease = yard.handle(events.LeaseRequested(worker, 0))
    assert isinstance(lease, DataLease)
    returned = events.LeaseReturned(worker, 0, lease.source, lease.token)
    yard.handle(returned)
    yard.handle(events.LedgerRead(returned, 99))
    return lease


def test_job_that_runs_goes_back_as_a_whole_under_a_new_generation(restarts: str) -> None:
    yard, worker, origin = running()
    first = close(yard, worker)
    assert yard.order(origin)
    perhaps(yard, restarts)
    wanted = yard.tick()
    assert wanted is not None
    assert (wanted.url, wanted.bases[0].number, len(wanted.partitions)) == ("here", 1, 2)
    assert wanted.map.generation > Generation(1)
    yard.restored(wanted)
    perhaps(yard, restarts)
    again = yard.handle(events.LeaseRequested(worker, 0))
    assert isinstance(again, DataLease)
    assert again.source == first.source, "closed since the checkpoint, so open again"
    assert again.token > first.token


def test_what_the_job_went_back_from_does_not_stay_the_newest() -> None:
    yard, _, origin = running()
    yard.order(origin)
    yard.restored(yard.tick())
    yard.handle(events.Ticked())
    (taking,) = [each for each in yard.effects if isinstance(each, effects.TakeCheckpoint)]
    assert (taking.base, taking.draft.number) == (1, 2)


def test_job_does_not_go_back_over_data_that_its_scripts_have_left_behind() -> None:
    yard, worker, origin = running()
    for _ in range(10):
        yard.handle(events.Ticked())
    per_feed = yard.machine.jobs[0].feeds.feed(0).total  # type: ignore[union-attr]
    for _ in range(per_feed):
        close(yard, worker)
    with pytest.raises(InvalidRequest, match="has gone through data set 0"):
        yard.order(origin)


def test_job_does_not_go_back_to_another_runs_checkpoint_nor_while_one_is_written() -> None:
    yard, worker, origin = running()
    with pytest.raises(InvalidRequest, match="is of another run"):
        yard.order(dataclasses.replace(origin, job=ORIGIN.job))
    yard.handle(events.CheckpointRequested(worker, "", 0))
    yard.handle(events.Ticked())
    with pytest.raises(NotReady, match="is being written or restored"):
        yard.order(origin)
    yard.handle(events.MemberLeft(yard.machine.jobs[0].deployment.servers[0].incarnation, ""))
    yard.restored(yard.tick())
    with pytest.raises(NotReady, match="is being written or restored"):  # what was broken off may still be at it
        yard.order(origin)
