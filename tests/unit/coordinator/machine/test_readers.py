"""Evaluators, from the coordinator's side: a job that has ended keeps its values for them, nothing else waits, and what
they say stays."""

from __future__ import annotations

import pytest

from shardyard.config.settings import JobSettings
from shardyard.domain import errors, limits
from shardyard.domain.ids import JobId, MemberRole
from shardyard.domain.optimizers import OptimizerSpec
from shardyard.domain.variables import DType, VariableSpec
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_coordinator.core import effects, events
from shardyard_coordinator.core.effects import JobState, JobView
from shardyard_coordinator.flows.readers import END_MS, SILENT_MS
from shardyard_coordinator.machine.machine import JOBS_ENDED_MAX
from shardyard_coordinator.members.evaluations import Best, Evaluation
from shardyard_coordinator.service.rpcs import jobs
from shardyard_coordinator.service.status import describe
from tests.support.machine_yards import MachineYard

VARIABLES = (VariableSpec("w", DType.FLOAT32, (48,)),)
SGD = OptimizerSpec("sgd", ((0.1, 0.0, 0.0, 0.0, 0.0, 0.0),))
READER, OTHER = bytes(16), bytes(15) + b"1"
FOUND = Evaluation(7, (("accuracy", 0.5), ("loss", 1.25)), 1_700)
KEPT = Best("accuracy", False, 0.5, 7, "/data/digits/best", 1_700)
KEPT_MESSAGE = wire.KeptBest(metric="accuracy", value=0.5, step=7, url="/data/digits/best", reported_s=1_700)


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

    def report(self, found: Evaluation = FOUND, best: Best | None = None) -> None:
        self.handle(events.EvaluationReported(self.worker.job, found, best))

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


# ---- who follows what


def test_reader_is_told_where_the_job_stands_and_who_has_its_values() -> None:
    yard = Yard()
    found = yard.follow(name="digits")
    assert (found.job, found.job_name, found.state) == (yard.worker.job, "digits", JobState.RUNNING)
    assert found.map is not None
    assert found.layout is not None
    assert yard.follow(job=found.job) == found
    assert yard.follow() == found
    assert yard.standing.readers == 1


def test_job_without_values_has_no_map() -> None:
    yard = Yard()
    yard.join_as(yard.register(MemberRole.WORKER), JobSettings(name="other", partitions=2))
    assert yard.follow(name="other").map is None


def test_job_that_is_not_there_yet_is_not_found() -> None:
    yard = Yard()
    with pytest.raises(errors.NotFound):
        yard.follow(name="other")
    with pytest.raises(errors.NotFound, match="unknown to this coordinator"):
        yard.follow(job=JobId(99))
    yard.leave()
    with pytest.raises(errors.NotFound, match="has ended"):
        yard.follow(name="digits")
    assert yard.follow(job=yard.worker.job).state is JobState.FINISHED


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


# ---- the end


def test_finished_job_is_dropped_at_once_where_nobody_reads_it() -> None:
    yard = Yard()
    yard.follow()
    yard.follow(leaves=True)
    yard.leave()
    assert len(yard.drops) == 2


def test_values_of_a_finished_job_stay_until_all_readers_have_left() -> None:
    yard = Yard()
    yard.follow()
    yard.follow(OTHER)
    yard.leave()
    assert yard.drops == []
    found = yard.follow(job=yard.worker.job)
    assert (found.state, found.map is not None) == (JobState.FINISHED, True)
    yard.follow(job=yard.worker.job, leaves=True)
    assert yard.drops == []
    yard.follow(OTHER, job=yard.worker.job, leaves=True)
    assert len(yard.drops) == 2
    assert yard.follow(job=yard.worker.job).map is None
    assert yard.standing.readers == 0


def test_reader_that_has_died_keeps_the_values_for_a_moment_only() -> None:
    yard = Yard()
    yard.follow()
    yard.leave()
    drops = [each for each in yard.advance(SILENT_MS) if isinstance(each, effects.DropJob)]
    assert len(drops) == 2
    assert yard.advance(1_000) == []


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


def test_failed_job_is_dropped_at_once() -> None:
    yard = Yard()
    yard.follow()
    yard.leave(error="ValueError: no")
    assert len(yard.drops) == 2


def test_server_that_dies_after_the_end_is_not_told_to_drop() -> None:
    yard = Yard()
    job = yard.worker.job
    yard.follow()
    yard.leave()
    yard.handle(events.MemberLeft(yard.servers[0], ""))
    yard.handle(events.ReaderHeard(job, "", READER, True))
    (drop,) = yard.drops
    assert isinstance(drop, effects.DropJob)
    assert drop.server.incarnation == yard.servers[1]


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


@pytest.mark.parametrize("ended", [False, True], ids=["ends-after-it", "ended-before-it"])
def test_restarted_coordinator_waits_for_readers_that_it_has_forgotten(short: bool, ended: bool) -> None:
    yard = Yard()
    job = yard.worker.job
    yard.follow()
    if ended:
        yard.leave()
    again = yard.restart(from_snapshot=short)
    assert not [each for each in again if isinstance(each, effects.DropJob)]
    if not ended:
        yard.leave()
        assert yard.drops == []
    assert yard.standing.readers == 0
    found = yard.follow(job=job)
    assert (found.state, found.map is not None) == (JobState.FINISHED, True)
    assert yard.advance(SILENT_MS - 100) == []
    yard.follow(job=job, leaves=True)
    drops = [*yard.drops, *yard.advance(200)]
    assert len([each for each in drops if isinstance(each, effects.DropJob)]) == 2


def test_restarted_coordinator_has_servers_drop_what_nobody_reads(short: bool) -> None:
    yard = Yard()
    yard.follow()
    yard.leave()
    yard.restart(from_snapshot=short)
    drops = [each for each in yard.advance(SILENT_MS) if isinstance(each, effects.DropJob)]
    assert len(drops) == 2


# ---- what they say


def test_latest_report_and_the_best_are_shown() -> None:
    yard = Yard()
    yard.report(best=KEPT)
    later = Evaluation(9, (("accuracy", 0.25),), 1_800)
    yard.report(later)
    evaluations = yard.machine.jobs[-1].evaluations
    assert (evaluations.latest, evaluations.best) == (later, KEPT)
    shown = yard.standing
    assert (shown.evaluation.step, shown.evaluation.reported_s) == (9, 1_800)
    assert [(each.name, each.value) for each in shown.evaluation.metrics] == [("accuracy", 0.25)]
    assert shown.best == KEPT_MESSAGE


def test_report_and_best_survive_a_restart(short: bool) -> None:
    yard = Yard()
    yard.report(best=KEPT)
    yard.report(Evaluation(9, (), 1_800))
    before = yard.standing
    yard.restart(from_snapshot=short)
    assert (yard.standing.evaluation, yard.standing.best) == (before.evaluation, before.best)
    assert yard.standing.best == KEPT_MESSAGE


def test_job_that_has_ended_is_still_evaluated(short: bool) -> None:
    yard = Yard()
    yard.leave()
    yard.report(best=KEPT)
    yard.restart(from_snapshot=short)
    job = yard.machine.jobs[-1]
    assert job.state is JobState.FINISHED
    assert (job.evaluations.latest, job.evaluations.best) == (FOUND, KEPT)


def test_report_about_no_job_is_refused() -> None:
    with pytest.raises(errors.NotFound):
        Yard().handle(events.EvaluationReported(JobId(99), FOUND, None))


# ---- the door


def test_reports_that_cannot_be_written_down_are_refused() -> None:
    bad = float("nan")
    for request, refused in (
        (wire.ReportEvaluationRequest(job=1, metrics=[wire.Metric(name="loss", value=bad)]), errors.InvalidRequest),
        (wire.ReportEvaluationRequest(job=1, best=wire.KeptBest(metric="loss", value=bad)), errors.InvalidRequest),
        (wire.ReportEvaluationRequest(job=1, step=limits.SEQUENCE_MAX + 1), errors.TooLarge),
        (wire.ReportEvaluationRequest(job=1, metrics=[wire.Metric(name="n" * 129)]), errors.TooLarge),
        (wire.ReportEvaluationRequest(job=1, metrics=[wire.Metric()] * (limits.METRICS_MAX + 1)), errors.TooLarge),
    ):
        with pytest.raises(refused):
            jobs.report_evaluation_event(request, 5)
    with pytest.raises(errors.MalformedPayload):
        jobs.follow_job_event(wire.FollowJobRequest(job=1, reader=b"short"))


def test_time_of_a_report_is_the_coordinators() -> None:
    request = wire.ReportEvaluationRequest(job=1, step=3, best=wire.KeptBest(metric="loss", reported_s=9))
    found = jobs.report_evaluation_event(request, 1_700)
    assert found.evaluation.reported_s == 1_700
    assert found.best is not None
    assert found.best.reported_s == 1_700
