"""Jobs and members together: what the transcripts (tests/unit/coordinator/transcripts) do not show."""

from __future__ import annotations

import pytest

from shardyard.config.settings import ConsistencySettings, JobSettings
from shardyard.domain.consistency import ConsistencyMode
from shardyard.domain.errors import (
    InvalidRequest,
    ShardyardError,
    VariableConflict,
)
from shardyard.domain.ids import Caller, Generation, Incarnation, JobId, MemberRole
from shardyard.domain.optimizers import OptimizerSpec, make_group
from shardyard.domain.variables import DType, VariableSpec
from shardyard_coordinator.core import effects, events
from shardyard_coordinator.machine.job_directory import JOBS_ENDED_MAX
from shardyard_coordinator.members.progress import Report
from shardyard_coordinator.placement.placement import Server
from shardyard_coordinator.service.status import describe
from shardyard_coordinator.work.feeds import FeedSpec
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


@pytest.fixture
def yard() -> Yard:
    return Yard()


@pytest.mark.parametrize(("kind", "pieces"), [("lamb", [48]), ("adam", [16, 16, 16])])
def test_variables_are_whole_where_the_optimizer_needs_their_norms(yard: Yard, kind: str, pieces: list[int]) -> None:
    caller = yard.join(SETTINGS.model_copy(update={"block_bytes": 64}))
    spec = OptimizerSpec(kind, (make_group(kind, {}),))
    yard.handle(events.VariablesRegistered(caller, VARIABLES, spec))
    (creation, *_) = yard.wanted(effects.CreatePartitions)
    blocks = [block for part in creation.spec.layout.partitions for block in part.blocks]  # type: ignore[union-attr]
    assert [block.length for block in blocks if block.variable == 0] == pieces


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


def test_exit_is_believed_from_an_agent_only(yard: Yard) -> None:
    caller = yard.join()
    with pytest.raises(InvalidRequest, match="is for agents only"):
        yard.handle(events.ExitReported(caller.incarnation, 1, 0))


def test_ended_jobs_are_bounded(yard: Yard) -> None:
    for _ in range(JOBS_ENDED_MAX + 5):
        yard.handle(events.MemberLeft(yard.join().incarnation, ""))
    yard.join()
    assert len(describe(yard.machine, 0).jobs) == JOBS_ENDED_MAX + 1


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
        events.NotAnswered(JobId(5), effects.OpenPartitions(JobId(5), Server(Incarnation(1), "s:1"), Generation(1))),
        events.WorkersFenced(JobId(5), (Incarnation(3),)),
    ):
        assert yard.machine.handle(event, 0) == []


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


def test_rate_is_unknown_until_two_reports_of_a_worker_differ(yard: Yard) -> None:
    caller = yard.join()
    assert not yard.job().HasField("samples_per_s")
    # as the first report to a coordinator that was started again
    yard.now_ms += 1_000
    yard.beat(caller.incarnation, Report(step=900, samples=90_000))
    assert yard.job().samples == 90_000
    assert not yard.job().HasField("samples_per_s")
    yard.now_ms += 1_000
    yard.beat(caller.incarnation, Report(step=901, samples=90_100))
    assert yard.job().samples_per_s == pytest.approx(100)
