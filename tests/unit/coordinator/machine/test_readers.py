"""Evaluators, from the coordinator's side: what tests/unit/coordinator/transcripts/readers.txt does not show."""

from __future__ import annotations

import pytest

from shardyard.config.settings import JobSettings
from shardyard.domain import errors, limits
from shardyard.domain.ids import JobId, MemberRole
from shardyard.domain.optimizers import OptimizerSpec
from shardyard.domain.variables import DType, VariableSpec
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_coordinator.core import effects, events
from shardyard_coordinator.core.effects import JobPhase, JobView
from shardyard_coordinator.machine.job_directory import JOBS_ENDED_MAX
from shardyard_coordinator.members.evaluations import Evaluation
from shardyard_coordinator.members.readers import END_MS, SILENT_MS
from shardyard_coordinator.service.rpcs import jobs
from shardyard_coordinator.service.status import describe
from tests.support.machine_yards import MachineYard

VARIABLES = (VariableSpec("w", DType.FLOAT32, (48,)),)
SGD = OptimizerSpec("sgd", ((0.1, 0.0, 0.0, 0.0, 0.0, 0.0),))
READER, OTHER = bytes(16), bytes(15) + b"1"
FOUND = Evaluation(7, (("accuracy", 0.5), ("loss", 1.25)), 1_700)


class Yard(MachineYard):
    """One job that runs, without checkpoints."""

    def __init__(self, name: str = "digits") -> None:
        super().__init__(lease_ms=1_000)
        self.servers = [self.register(MemberRole.SERVER, f"s:{index}") for index in range(2)]
        self.begin(name)

    def begin(self, name: str) -> None:
        self.worker = self.join_as(self.register(MemberRole.WORKER), JobSettings(name=name, partitions=2))
        self.open_job(self.worker, VARIABLES, SGD)

    def follow(
        self, reader: bytes = READER, *, job: JobId | None = None, name: str = "", leaves: bool = False
    ) -> JobView:
        answer = self.handle(events.ReaderHeard(job, name, reader, leaves))
        assert isinstance(answer, JobView)
        return answer

    def leave(self, error: str = "") -> None:
        self.handle(events.MemberLeft(self.worker.incarnation, error))

    def advance(self, ms: int) -> list[effects.Effect]:
        """Time passes, and all members beat; all effects of the ticks."""
        found: list[effects.Effect] = []
        for _ in range(0, ms, 100):
            self.now_ms += 100
            for member in self.machine.members:
                self.beat(member.incarnation)
            self.handle(events.Ticked())
            found += self.effects
        return found

    @property
    def drops(self) -> list[effects.Effect]:
        return self.wanted(effects.DropJob)

    @property
    def standing(self) -> wire.JobStatus:
        return describe(self.machine, self.now_ms).jobs[-1]


def test_job_that_is_not_there_yet_is_not_found() -> None:
    yard = Yard()
    with pytest.raises(errors.NotFound):
        yard.follow(name="other")
    with pytest.raises(errors.NotFound, match="unknown to this coordinator"):
        yard.follow(job=JobId(99))
    yard.leave()
    with pytest.raises(errors.NotFound, match="has ended"):
        yard.follow(name="digits")
    assert yard.follow(job=yard.worker.job).state is JobPhase.FINISHED


def test_readers_are_no_members_and_change_nothing() -> None:
    yard = Yard()
    before = len(yard.machine.members)
    yard.follow()
    assert len(yard.machine.members) == before
    assert not yard.wanted(effects.Persist)


def test_silent_reader_is_forgotten_and_readers_are_bounded() -> None:
    yard = Yard()
    for number in range(limits.READERS_MAX):
        yard.follow(number.to_bytes(16, "big"))
    with pytest.raises(errors.TooLarge, match="readers follow the job"):
        yard.follow(bytes(15) + b"\xff")
    yard.advance(SILENT_MS)
    assert yard.standing.readers == 0
    yard.follow(bytes(15) + b"\xff")


def test_reader_that_never_ends_keeps_the_values_for_so_long_only() -> None:
    yard = Yard()
    job = yard.worker.job
    yard.follow()
    yard.leave()
    drops: list[effects.Effect] = []
    for _ in range(0, END_MS + 1_000, 1_000):
        yard.follow(job=job)
        drops += [each for each in yard.advance(1_000) if isinstance(each, effects.DropJob)]
    assert len(drops) == 2


def test_job_that_is_forgotten_is_dropped_though_it_is_read() -> None:
    yard = Yard()
    yard.follow()
    first = yard.worker.job
    yard.leave()
    dropped: list[JobId] = []
    for _ in range(JOBS_ENDED_MAX):
        yard.begin("another")
        yard.leave()
        dropped += [each.job for each in yard.drops if isinstance(each, effects.DropJob)]
    assert dropped.count(first) == 2


def test_report_about_no_job_is_refused() -> None:
    with pytest.raises(errors.NotFound):
        Yard().handle(events.EvaluationReported(JobId(99), FOUND, None))


def test_reports_that_cannot_be_written_down_are_refused() -> None:
    bad = float("nan")
    for request, refused in (
        (wire.ReportEvaluationRequest(job=1, metrics=[wire.Metric(name="loss", value=bad)]), errors.InvalidRequest),
        (wire.ReportEvaluationRequest(job=1, best=wire.BestModel(metric="loss", value=bad)), errors.InvalidRequest),
        (wire.ReportEvaluationRequest(job=1, step=limits.SEQUENCE_MAX + 1), errors.TooLarge),
        (wire.ReportEvaluationRequest(job=1, metrics=[wire.Metric(name="n" * 129)]), errors.TooLarge),
        (wire.ReportEvaluationRequest(job=1, metrics=[wire.Metric()] * (limits.METRICS_MAX + 1)), errors.TooLarge),
    ):
        with pytest.raises(refused):
            jobs.report_evaluation_event(request, 5)
    with pytest.raises(errors.MalformedPayload):
        jobs.follow_job_event(wire.FollowJobRequest(job=1, reader=b"short"))


def test_time_of_a_report_is_the_coordinators() -> None:
    request = wire.ReportEvaluationRequest(job=1, step=3, best=wire.BestModel(metric="loss", reported_s=9))
    found = jobs.report_evaluation_event(request, 1_700)
    assert found.evaluation.reported_s == 1_700
    assert found.best is not None
    assert found.best.reported_s == 1_700
