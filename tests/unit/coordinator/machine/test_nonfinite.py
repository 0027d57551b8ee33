"""Gradients that are not finite: what peers send about them. Scenarios: transcripts/not_finite.txt."""

from __future__ import annotations

import pytest

from shardyard.domain import limits
from shardyard.domain.errors import MalformedPayload, TooLarge, WorkerQuarantined
from shardyard.domain.push_names import DataShardSource
from shardyard.transport.error_codes import from_detail
from shardyard.wire import common_messages
from shardyard.wire.v1 import common_pb2 as common
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_coordinator.core.effects import NotFiniteVerdict, Reply
from shardyard_coordinator.service.rpcs import data
from tests.support.transcript_commands import do
from tests.support.transcripts import Stage

SHARD = DataShardSource(0, 0, 0)


@pytest.fixture
def stage() -> Stage:
    """A worker `a` that has leased a data shard."""
    found = Stage()
    for command in (
        "yard servers=1",
        "settings skip nonfinite=skip nonfinite_max=3 workers_expected=2 data.batches_per_data_shard=5",
        "join a settings=skip",
        "join b settings=skip",
        "run a",
        "feed a",
        "lease a",
    ):
        do(found, command)
    return found


def test_job_with_more_of_them_than_can_be_listed_fails(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardyard_coordinator.flows.work_verdicts.QUARANTINED_MAX", 1)
    assert do(stage, "not-finite a 0")[0] == "reply NotFiniteVerdict decided"
    assert do(stage, "not-finite a 1 count=2")[0].startswith("reply NotFiniteVerdict decided failure=NonFiniteGradient")


def test_failure_of_a_worker_that_is_out_names_worker_step_and_parameter(stage: Stage) -> None:
    do(stage, "not-finite a 2 count=3 in_a_row=3")
    (reply,) = stage.yard.wanted(Reply)
    assert isinstance(reply, Reply)
    assert isinstance(reply.answer, NotFiniteVerdict)
    assert isinstance(reply.answer.failure, WorkerQuarantined)
    assert reply.answer.failure.facts == {"worker": str(stage.members["a"]), "step": "42", "parameter": "w"}


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
    assert data.report_not_finite_reply(NotFiniteVerdict(decided=True)) == wire.ReportNotFiniteReply()
    assert data.report_not_finite_reply(NotFiniteVerdict(decided=False)).retry_ms > 0
    said = data.report_not_finite_reply(NotFiniteVerdict(True, WorkerQuarantined("10 in a row"))).failure
    assert isinstance(from_detail(said), WorkerQuarantined)
