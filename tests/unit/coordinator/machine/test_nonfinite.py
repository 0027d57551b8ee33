"""Gradients that are not finite: which work does not count, who is out for it, and that it is never forgotten."""

from __future__ import annotations

import pytest

from shardyard.config.settings import ConsistencySettings, DataSettings, JobSettings
from shardyard.domain import limits
from shardyard.domain.consistency import ConsistencyMode, NonFinite, UpdateMode
from shardyard.domain.errors import (
    InvalidRequest,
    MalformedPayload,
    NonFiniteGradient,
    StaleIncarnation,
    StaleToken,
    TooLarge,
    WorkerQuarantined,
)
from shardyard.domain.ids import Caller, Incarnation, JobId, MemberRole, Rank, Token
from shardyard.domain.optimizers import OptimizerSpec
from shardyard.domain.push_names import DataLease, DataShardSource, RankSource, Source, WorkerSource
from shardyard.domain.variables import DType, VariableSpec
from shardyard.transport.error_codes import from_detail
from shardyard.wire import common_messages
from shardyard.wire.v1 import common_pb2 as common
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_coordinator.core import effects, events
from shardyard_coordinator.core.effects import JobPhase, NotFiniteVerdict
from shardyard_coordinator.core.job_state import JobState
from shardyard_coordinator.machine import job_views
from shardyard_coordinator.service import status
from shardyard_coordinator.service.rpcs import data
from shardyard_coordinator.work.feeds import FeedSpec
from tests.support.machine_yards import MachineYard

SPEC = FeedSpec(samples=95, fingerprint="f", batch_size=10, epochs=2, shuffle=True, drop_last=False)
VARIABLES = (VariableSpec("w", DType.FLOAT32, (48,)),)
SGD = OptimizerSpec("sgd", ((0.1, 0.0, 0.0, 0.0, 0.0, 0.0),))
SHARD = DataShardSource(0, 0, 0)
DECIDED = NotFiniteVerdict(decided=True)


class Yard(MachineYard):
    """A machine with one server, and two workers whose gradients may not be finite."""

    def __init__(
        self,
        mode: UpdateMode | ConsistencyMode = UpdateMode.ASYNC,
        policy: NonFinite = NonFinite.SKIP,
        row_max: int = 3,
        checkpoints: str | None = None,
        *,
        with_data: bool = True,
    ) -> None:
        super().__init__(checkpoints=checkpoints)
        self.settings = JobSettings(
            workers_expected=2,
            rank_grace_ms=0,
            consistency=ConsistencySettings(mode=ConsistencyMode(mode.value), logical_ranks=2),
            data=DataSettings(batches_per_data_shard=5),
            nonfinite=policy,
            nonfinite_max=row_max,
        )
        self.job_id = JobId(0)
        self.server = self.register(MemberRole.SERVER, "s:1")
        self.one, self.other = self.hire(), self.hire()
        self.open_job(self.caller(self.one), VARIABLES, SGD)
        if with_data:
            self.handle(events.FeedOpened(self.caller(self.one), 0, SPEC))
        self.counts: dict[Incarnation, int] = {}

    def handle(self, event: events.Event) -> object:
        """Servers refuse at once whom they are told to."""
        answer = super().handle(event)
        for wanted in self.effects:
            if isinstance(wanted, effects.FenceOnServers):
                self.handle(events.WorkersFenced(wanted.job, wanted.workers))
        return answer

    @property
    def the_job(self) -> JobState:
        return self.machine.jobs[0]

    def hire(self) -> Incarnation:
        worker = self.register(MemberRole.WORKER)
        self.job_id = self.join_as(worker, self.settings).job
        return worker

    def caller(self, worker: Incarnation) -> Caller:
        return Caller(self.job_id, worker)

    def lease(self, worker: Incarnation) -> DataLease:
        found = self.handle(events.LeaseRequested(self.caller(worker), 0))
        assert isinstance(found, DataLease), found
        return found

    def rank_of(self, worker: Incarnation) -> tuple[RankSource, Token]:
        lease = job_views.ranks_of(self.the_job, worker)[0]
        return RankSource(lease.rank), lease.token

    def report(
        self,
        worker: Incarnation,
        source: Source,
        token: Token,
        first: int,
        last: int | None = None,
        *,
        in_a_row: int = 1,
        count: int | None = None,
        highest: int = 0,
    ) -> NotFiniteVerdict:
        self.counts[worker] = count or self.counts.get(worker, 0) + 1
        last = first if last is None else last
        said = events.NotFiniteReported(
            self.caller(worker), source, token, first, last, "w", self.counts[worker], in_a_row, 40 + first, highest
        )
        found = self.handle(said)
        assert isinstance(found, NotFiniteVerdict), found
        return found

    def condemned(self) -> list[tuple[Source, int]]:
        return [(each.source, each.sequence) for each in self.the_job.feeds.quarantine]

    def counted(self) -> tuple[int, int]:
        return self.the_job.not_finite.count, self.the_job.not_finite.quarantined


def test_batches_whose_gradient_is_not_finite_do_not_count_and_are_listed_with_their_samples() -> None:
    yard = Yard()
    lease = yard.lease(yard.one)
    assert yard.report(yard.one, SHARD, lease.token, 1) == DECIDED
    assert yard.report(yard.one, SHARD, lease.token, 3, 4) == DECIDED, "a range that was accumulated"
    assert yard.condemned() == [(SHARD, 1), (SHARD, 3), (SHARD, 4)]
    found = status.list_quarantined(yard.machine, yard.job_id)
    assert [(each.begin, each.end, each.parameter, each.worker) for each in found.batches] == [
        (10, 20, "w", yard.one),
        (30, 40, "w", yard.one),
        (40, 50, "w", yard.one),
    ]
    shown = status.describe(yard.machine, 0)
    assert [member.not_finite for member in shown.members if member.role == wire.ROLE_WORKER] == [2, 0]
    assert (shown.jobs[0].not_finite, shown.jobs[0].workers_quarantined) == (2, 0)
    assert any(
        f"worker {yard.one}, step 41, data shard 0.0.0 #1: the gradient of 'w' is not finite; it does not count" in told
        for told in yard.told
    ), yard.told


def test_nothing_is_decided_while_a_checkpoint_may_have_copied_the_ledger_already() -> None:
    yard = Yard(checkpoints="memory://c")
    lease = yard.lease(yard.one)
    yard.handle(events.Ticked())
    draft = yard.the_job.book.draft
    assert draft is not None
    assert yard.report(yard.one, SHARD, lease.token, 1) == NotFiniteVerdict(decided=False)
    assert (yard.condemned(), yard.counted()) == ([], (0, 0))
    yard.handle(events.CheckpointTaken(yard.job_id, draft.number, draft.number, draft.step))
    assert yard.report(yard.one, SHARD, lease.token, 1, count=1) == DECIDED
    assert yard.counted() == (1, 0)


def test_synchronous_the_ranks_contribution_does_not_count_and_is_decided_at_once() -> None:
    """The checkpoint waits for the step, so the step must not wait for the checkpoint."""
    yard = Yard(UpdateMode.SYNC, checkpoints="memory://c")
    yard.handle(events.Ticked())
    source, token = yard.rank_of(yard.other)
    assert yard.report(yard.other, source, token, 3) == DECIDED
    assert yard.condemned() == [(source, 3)]
    assert job_views.ranks_of(yard.the_job, yard.other)[0].careful_below == 4


@pytest.mark.parametrize("mode", UpdateMode)
def test_work_without_a_data_set_is_counted_and_nothing_is_listed(mode: UpdateMode) -> None:
    yard = Yard(mode, with_data=False)
    source, token = yard.rank_of(yard.one) if mode is UpdateMode.SYNC else (WorkerSource(yard.one), Token(0))
    assert yard.report(yard.one, source, token, 7) == DECIDED
    assert (yard.condemned(), yard.counted()) == ([], (1, 0))


def test_worker_that_keeps_sending_them_is_out_and_others_have_its_work() -> None:
    yard = Yard()
    lease = yard.lease(yard.one)
    for batch in range(2):
        assert yard.report(yard.one, SHARD, lease.token, batch, in_a_row=batch + 1).failure is None
    failure = yard.report(yard.one, SHARD, lease.token, 2, in_a_row=3).failure
    assert isinstance(failure, WorkerQuarantined)
    assert f"3 gradients in a row of worker {yard.one} were not finite" in failure.what
    assert failure.facts == {"worker": str(yard.one), "step": "42", "parameter": "w"}
    assert yard.the_job.phase is JobPhase.RUNNING
    assert yard.the_job.workers == [yard.other]
    assert yard.counted() == (3, 1)
    with pytest.raises(WorkerQuarantined, match="is in quarantine: 3 gradients"):
        yard.beat(yard.one)
    with pytest.raises(StaleIncarnation):
        yard.lease(yard.one)
    assert yard.lease(yard.other).source == SHARD
    assert not yard.the_job.suspects.has(SHARD), "nobody has died"


def test_synchronous_the_ranks_of_a_worker_that_is_out_go_to_the_others() -> None:
    yard = Yard(UpdateMode.SYNC)
    source, token = yard.rank_of(yard.one)
    yard.report(yard.one, source, token, 0, in_a_row=3)
    assert [lease.rank for lease in job_views.ranks_of(yard.the_job, yard.other)] == [Rank(0), Rank(1)]


def test_rows_that_were_interrupted_and_a_limit_of_none_put_nobody_out() -> None:
    yard = Yard()
    lease = yard.lease(yard.one)
    for batch in range(5):
        assert yard.report(yard.one, SHARD, lease.token, batch, in_a_row=1 + batch % 2).failure is None
    patient = Yard(row_max=0)
    lease = patient.lease(patient.one)
    for batch in range(5):
        assert patient.report(patient.one, SHARD, lease.token, batch, in_a_row=batch + 1).failure is None
    assert patient.the_job.workers == [patient.one, patient.other]


def test_job_whose_workers_all_do_it_fails_and_says_so() -> None:
    yard = Yard()
    for number, worker in enumerate((yard.one, yard.other)):
        lease = yard.lease(worker)
        failure = yard.report(worker, lease.source, lease.token, number, in_a_row=3).failure
    assert isinstance(failure, NonFiniteGradient)
    assert f"3 gradients in a row of worker {yard.other} were not finite" in failure.what
    assert failure.what.endswith("and 1 workers were out before it; the loss has diverged")
    assert yard.the_job.phase is JobPhase.FAILED
    standing_ = yard.beat(yard.other)
    assert isinstance(standing_.failure, NonFiniteGradient)


def test_fatal_by_policy_names_worker_step_and_parameter() -> None:
    yard = Yard(policy=NonFinite.FAIL)
    lease = yard.lease(yard.one)
    failure = yard.report(yard.one, SHARD, lease.token, 2).failure
    assert isinstance(failure, NonFiniteGradient)
    assert failure.what == f"worker {yard.one}, step 42, data shard 0.0.0 #2: the gradient of 'w' is not finite"
    assert failure.facts == {"worker": str(yard.one), "step": "42", "parameter": "w"}
    assert yard.the_job.phase is JobPhase.FAILED
    assert isinstance(yard.beat(yard.other).failure, NonFiniteGradient)
    assert yard.condemned() == []


def test_job_with_more_of_them_than_can_be_listed_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardyard_coordinator.flows.work_verdicts.QUARANTINED_MAX", 1)
    yard = Yard()
    lease = yard.lease(yard.one)
    assert yard.report(yard.one, SHARD, lease.token, 0) == DECIDED
    assert isinstance(yard.report(yard.one, SHARD, lease.token, 1).failure, NonFiniteGradient)


def test_report_of_what_is_not_ones_own_is_refused_and_changes_nothing() -> None:
    yard = Yard()
    lease = yard.lease(yard.one)
    with pytest.raises(StaleToken):
        yard.report(yard.other, SHARD, lease.token, 0)
    with pytest.raises(InvalidRequest, match="which has 5"):
        yard.report(yard.one, SHARD, lease.token, 4, 5)
    with pytest.raises(InvalidRequest, match="by worker"):
        yard.report(yard.one, WorkerSource(yard.other), Token(0), 0)
    with pytest.raises(InvalidRequest):
        yard.report(yard.one, RankSource(Rank(0)), Token(1), 0)
    sync = Yard(UpdateMode.SYNC)
    source, token = sync.rank_of(sync.one)
    with pytest.raises(StaleToken):
        sync.report(sync.other, source, token, 0)
    with pytest.raises(InvalidRequest):
        sync.report(sync.one, source, token, 0, 1)
    allowing = Yard(policy=NonFinite.ALLOW)
    with pytest.raises(InvalidRequest, match="takes what is not finite"):
        allowing.report(allowing.one, WorkerSource(allowing.one), Token(0), 0)
    for each in (yard, sync, allowing):
        assert (each.condemned(), each.counted()) == ([], (0, 0))


@pytest.mark.parametrize("from_snapshot", [False, True], ids=["from-all-records", "from-the-snapshot"])
def test_restarted_coordinator_knows_what_does_not_count_and_who_is_out(from_snapshot: bool) -> None:
    yard = Yard()
    lease = yard.lease(yard.other)
    yard.report(yard.other, lease.source, lease.token, 0, in_a_row=2)
    other = lease.source
    lease = yard.lease(yard.one)
    yard.report(yard.one, lease.source, lease.token, 1, in_a_row=3)
    before = yard.condemned()
    yard.restart(from_snapshot=from_snapshot)
    assert yard.condemned() == before == [(other, 0), (lease.source, 1)]
    assert [(each.parameter, each.worker) for each in yard.the_job.feeds.quarantine] == [
        ("w", yard.other),
        ("w", yard.one),
    ]
    assert yard.counted() == (2, 1)
    assert yard.the_job.not_finite.of(yard.other) == 1
    with pytest.raises(WorkerQuarantined):
        yard.beat(yard.one)
    assert yard.report(yard.other, other, yard.lease(yard.other).token, 1, count=1) == DECIDED
    assert yard.counted() == (2, 1), "it had been counted"


# ---- what peers send

SAID: dict[str, object] = {"first": 2, "last": 3, "parameter": "w", "count": 5, "in_a_row": 4, "step": 9, "highest": 1}


def request(**changes: object) -> wire.ReportNotFiniteRequest:
    source = common_messages.source_to_wire(SHARD)
    return wire.ReportNotFiniteRequest(source=source, token=7, **{**SAID, **changes})  # type: ignore[arg-type]


def test_report_is_what_was_sent() -> None:
    found = data.report_not_finite_event(request())
    assert (found.source, found.token, found.first, found.last) == (SHARD, 7, 2, 3)
    assert (found.parameter, found.count, found.in_a_row, found.step, found.highest) == ("w", 5, 4, 9, 1)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"last": 1}, MalformedPayload),
        ({"count": 0, "in_a_row": 0}, MalformedPayload),
        ({"in_a_row": 0}, MalformedPayload),
        ({"in_a_row": 6}, MalformedPayload),
        ({"parameter": ""}, MalformedPayload),
        ({"parameter": "w" * (limits.VARIABLE_NAME_CHARACTERS_MAX + 1)}, TooLarge),
        ({"last": limits.SEQUENCE_MAX + 1}, TooLarge),
        ({"step": limits.SEQUENCE_MAX + 1}, TooLarge),
        ({"highest": limits.SEQUENCE_MAX + 1}, TooLarge),
        ({"source": common.Source()}, MalformedPayload),
    ],
)
def test_report_that_makes_no_sense_is_refused(changes: dict[str, object], error: type[Exception]) -> None:
    made = request(**{name: value for name, value in changes.items() if name != "source"})
    if "source" in changes:
        made.ClearField("source")
    with pytest.raises(error):
        data.report_not_finite_event(made)


def test_answer_says_whether_it_is_decided_and_who_is_out() -> None:
    assert data.report_not_finite_reply(DECIDED) == wire.ReportNotFiniteReply()
    assert data.report_not_finite_reply(NotFiniteVerdict(decided=False)).retry_ms > 0
    said = data.report_not_finite_reply(NotFiniteVerdict(True, WorkerQuarantined("10 in a row"))).failure
    assert isinstance(from_detail(said), WorkerQuarantined)


def test_a_hybrid_step_whose_rows_some_partition_has_counted_is_not_listed() -> None:
    """From before the job went back; a synchronous one has no such part of a step."""
    for mode, listed in ((ConsistencyMode.HYBRID, []), (ConsistencyMode.SYNC, [3])):
        yard = Yard(mode)
        rank, token = yard.rank_of(yard.one)
        assert yard.report(yard.one, rank, token, 3, highest=4) == DECIDED
        assert yard.report(yard.one, rank, token, 4, highest=4) == DECIDED
        assert yard.condemned() == [(rank, step) for step in [*listed, 4]]
