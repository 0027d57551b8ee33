"""What workers' error feedback remembered at the checkpoint to which a job goes back: whose it is, and that it is given
once. The machine's side."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from shardyard.checkpoints.manifest import FileRef, ResidualFile, feedback_path, worker_name
from shardyard.config.settings import (
    CheckpointSettings,
    CompressionSettings,
    ConsistencySettings,
    JobSettings,
)
from shardyard.domain.consistency import ConsistencyMode, Durability
from shardyard.domain.errors import ConfigurationError, MalformedPayload, TooLarge
from shardyard.domain.ids import Caller, Generation, Incarnation, MemberRole, Term
from shardyard.domain.limits import JOB_BYTES_MAX
from shardyard.domain.variables import VariableSpec
from shardyard.storage.storage import Written
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_coordinator.core import effects, events
from shardyard_coordinator.members.progress import Report
from shardyard_coordinator.placement.placement import plan
from shardyard_coordinator.service.residual_collection import ResidualReport, ResidualRequest, Stage
from shardyard_coordinator.service.rpcs import checkpoints, members
from shardyard_coordinator.storage.checkpoint_residuals import CheckpointResidual
from tests.support import restoring_yards as orders
from tests.support.restoring_yards import Yard

VARIABLES = (VariableSpec("w", orders.VARIABLES[0].dtype, (8, 16)), VariableSpec("b", orders.VARIABLES[0].dtype, (8,)))
CODED = CompressionSettings(push="topk:0.01", whole_elements_max=0)
SETTINGS = JobSettings(partitions=2, compression=CODED, checkpoint=CheckpointSettings(every_s=0))
ORIGIN = dataclasses.replace(orders.ORIGIN, layout=plan(VARIABLES, orders.SGD, partitions=2, block_bytes=256))


@pytest.fixture(params=["", "all", "snapshot"])
def restarts(request: pytest.FixtureRequest) -> str:
    """Whether, and from what, another coordinator goes on at each step."""
    return str(request.param)


def perhaps(yard: Yard, restarts: str) -> None:
    if restarts:
        yard.restart(from_snapshot=restarts == "snapshot")


def file_of(worker: Incarnation | str, number: int = 1) -> ResidualFile:
    name = worker if isinstance(worker, str) else worker_name(worker)
    return ResidualFile(name, FileRef(feedback_path(number, name), Written(1_000, "ab" * 32)))


def run(yard: Yard, workers: int, settings: JobSettings = SETTINGS) -> list[Caller]:
    """A job that runs, with a first checkpoint; its workers."""
    callers = [yard.join(settings) for _ in range(workers)]
    first = callers[0]
    for event in (
        events.VariablesRegistered(first, VARIABLES, orders.SGD),
        events.PartitionsCreated(first.job),
        events.VariablesRegistered(first, VARIABLES, orders.SGD),
        events.VariablesCommitted(first),
        events.PartitionsOpened(first.job),
        events.Ticked(),
    ):
        yard.handle(event)
    return callers


def commit(yard: Yard, remembered: Sequence[ResidualFile]) -> effects.TakeCheckpoint:
    """The checkpoint that is under way has what these workers remember."""
    (taking,) = [each for each in yard.effects if isinstance(each, effects.TakeCheckpoint)]
    number = taking.draft.number
    yard.handle(events.CheckpointTaken(taking.spec.job, number, number, 0, feedback=tuple(remembered)))
    return taking


def lose(yard: Yard, *, servers: int) -> None:
    """Servers die, and what was lost is restored."""
    for server in yard.machine.jobs[-1].deployment.servers[:servers]:
        yard.handle(events.MemberLeft(server.incarnation, ""))


def restore(yard: Yard) -> Generation:
    wanted = yard.tick()
    assert wanted is not None
    yard.restored(wanted)
    return wanted.map.generation


def die(yard: Yard, worker: Caller) -> None:
    yard.handle(events.MemberLeft(worker.incarnation, "E: no"))


def told(yard: Yard, worker: Caller) -> list[tuple[str, bool]]:
    """Whose a worker is told to take up, and whether that is its own; the same by both ways."""
    placed = yard.handle(events.VariablesRegistered(worker, VARIABLES, orders.SGD))
    assert isinstance(placed, effects.VariablesPlaced)
    beat = yard.handle(events.HeartbeatReceived(worker.incarnation, Report()))
    assert isinstance(beat, effects.HeartbeatReply)
    assert (beat.feedback, beat.restored_generation) == (placed.feedback, placed.restored_generation)
    return [(each.file.worker, each.own) for each in beat.feedback]


def take(yard: Yard, worker: Caller, whose: Caller | str, generation: Generation, failure: str = "") -> bool:
    name = whose if isinstance(whose, str) else worker_name(whose.incarnation)
    verdict = yard.handle(events.FeedbackRead(worker, generation, name, failure))
    assert isinstance(verdict, effects.FeedbackVerdict)
    return verdict.taken


# ---- who is asked


def test_workers_are_asked_for_what_they_remember_where_the_job_keeps_such_state() -> None:
    yard = Yard()
    first, second = run(yard, 2)
    assert commit(yard, []).keepers == (first.incarnation,), "the other one has no variables yet"
    yard.handle(events.VariablesRegistered(second, VARIABLES, orders.SGD))
    yard.handle(events.CheckpointRequested(first, "", 0))
    yard.handle(events.Ticked())
    assert commit(yard, []).keepers == (first.incarnation, second.incarnation)
    plain = Yard()
    run(plain, 2, SETTINGS.model_copy(update={"compression": CompressionSettings(push="bf16")}))
    assert commit(plain, []).keepers == ()


# ---- to whom it goes


def test_job_that_goes_back_as_a_whole_gives_each_worker_its_own_and_what_is_of_the_gone_to_the_first(
    restarts: str,
) -> None:
    yard = Yard()
    first, second, third = run(yard, 3)
    commit(yard, [file_of(each.incarnation) for each in (first, second, third)])
    for each in (second, third):
        yard.handle(events.VariablesRegistered(each, VARIABLES, orders.SGD))
    perhaps(yard, restarts)
    die(yard, second)
    lose(yard, servers=3)
    perhaps(yard, restarts)
    for index in range(3):
        yard.register(MemberRole.SERVER, f"n:{index}")
    generation = restore(yard)
    perhaps(yard, restarts)
    mine, theirs, gone = (worker_name(each.incarnation) for each in (first, third, second))
    assert told(yard, first) == [(mine, True), (gone, False)]
    assert told(yard, third) == [(theirs, True)]
    assert not take(yard, third, first, generation), "its own"
    assert take(yard, first, first, generation)
    assert take(yard, first, second, generation)
    perhaps(yard, restarts)
    assert told(yard, first) == []
    assert told(yard, third) == [(theirs, True)]
    assert not take(yard, third, second, generation), "it is the first one's"
    assert take(yard, first, second, generation), "the answer may have been lost"
    assert take(yard, third, third, generation)
    assert yard.machine.jobs[-1].lost_residuals.count == 0


def test_next_run_gives_all_to_its_first_worker_whatever_the_numbers_of_the_former(restarts: str) -> None:
    yard = Yard()
    names = ["200000001" if restarts else "100000004", "7"]
    origin = dataclasses.replace(ORIGIN, feedback=tuple(file_of(each, 7) for each in names))
    yard.order(origin)
    perhaps(yard, restarts)
    worker, late = yard.join(SETTINGS), yard.join(SETTINGS)
    assert worker_name(worker.incarnation) == names[0], "as that of a worker of another yard's run"
    generation = restore(yard)
    perhaps(yard, restarts)
    assert told(yard, worker) == [(names[0], False), (names[1], False)]
    handed = yard.handle(events.HeartbeatReceived(worker.incarnation, Report()))
    assert isinstance(handed, effects.HeartbeatReply)
    assert handed.feedback[0] == CheckpointResidual(generation, False, "elsewhere", origin.feedback[0])
    assert told(yard, late) == []
    assert take(yard, worker, names[0], generation)
    die(yard, worker)
    perhaps(yard, restarts)
    assert told(yard, late) == [(names[1], False)], "that was not taken up by who has died"
    assert take(yard, late, names[1], generation)
    assert not take(yard, late, names[0], generation), "it went with the other one"


def test_no_checkpoint_is_begun_before_somebody_is_there_to_take_up_what_it_would_lack() -> None:
    yard = Yard()
    yard.order(dataclasses.replace(ORIGIN, feedback=(file_of("7", 7),)))
    worker = yard.join(SETTINGS)
    restore(yard)
    for _ in range(3):
        yard.handle(events.Ticked())
        assert not [each for each in yard.effects if isinstance(each, effects.TakeCheckpoint)]
    yard.handle(events.VariablesRegistered(worker, VARIABLES, orders.SGD))
    yard.handle(events.Ticked())
    (taking,) = [each for each in yard.effects if isinstance(each, effects.TakeCheckpoint)]
    assert taking.keepers == (worker.incarnation,)


def test_going_back_in_part_or_by_logs_changes_nothing_for_workers() -> None:
    yard = Yard()
    (worker,) = run(yard, 1)
    commit(yard, [file_of(worker.incarnation)])
    lose(yard, servers=1)
    restore(yard)
    assert told(yard, worker) == []
    assert yard.machine.jobs[-1].checkpoint_residuals.entries() == []
    logs = Yard()
    (worker,) = run(logs, 1, SETTINGS.model_copy(update={"durability": Durability.WAL}))
    commit(logs, [file_of(worker.incarnation)])
    lose(logs, servers=3)
    logs.register(MemberRole.SERVER, "n:0")
    restore(logs)
    assert told(logs, worker) == []


def test_synchronous_job_that_goes_back_as_a_whole_hands_over_all_the_same() -> None:
    yard = Yard()
    sync = ConsistencySettings(mode=ConsistencyMode.SYNC, logical_ranks=1)
    (worker,) = run(yard, 1, SETTINGS.model_copy(update={"consistency": sync}))
    commit(yard, [file_of(worker.incarnation)])
    lose(yard, servers=1)
    restore(yard)
    assert told(yard, worker) == [(worker_name(worker.incarnation), True)]


def test_job_that_goes_back_to_where_nobody_remembered_anything_says_so(restarts: str) -> None:
    yard = Yard()
    (worker,) = run(yard, 1)
    commit(yard, [])
    lose(yard, servers=3)
    yard.register(MemberRole.SERVER, "n:0")
    generation = restore(yard)
    perhaps(yard, restarts)
    answer = yard.handle(events.HeartbeatReceived(worker.incarnation, Report()))
    assert isinstance(answer, effects.HeartbeatReply)
    assert (answer.feedback, answer.restored_generation) == ((), generation)
    plain = Yard()
    (worker,) = run(plain, 1, orders.SETTINGS)
    commit(plain, [])
    lose(plain, servers=3)
    plain.register(MemberRole.SERVER, "n:0")
    restore(plain)
    answer = plain.handle(events.HeartbeatReceived(worker.incarnation, Report()))
    assert isinstance(answer, effects.HeartbeatReply)
    assert answer.restored_generation == 0, "not a byte more"


def test_going_back_again_begins_anew_with_what_that_checkpoint_says(restarts: str) -> None:
    yard = Yard()
    (worker,) = run(yard, 1)
    commit(yard, [file_of(worker.incarnation)])
    for index in range(2):
        lose(yard, servers=3)
        yard.register(MemberRole.SERVER, f"n:{index}")
        generation = restore(yard)
        perhaps(yard, restarts)
        assert told(yard, worker) == [(worker_name(worker.incarnation), True)]
        assert not take(yard, worker, worker, Generation(generation - 1)), "of a past that was given up"
        assert take(yard, worker, worker, generation)


# ---- what is lost


def test_what_cannot_be_taken_up_is_lost_and_told_and_counted(restarts: str) -> None:
    yard = Yard()
    (worker,) = run(yard, 1)
    commit(yard, [file_of(worker.incarnation)])
    lose(yard, servers=3)
    yard.register(MemberRole.SERVER, "n:0")
    generation = restore(yard)
    assert take(yard, worker, worker, generation, "its SHA-256 is wrong")
    (warning,) = [each.text for each in yard.effects if isinstance(each, effects.LogMessage) and each.warning]
    assert warning.endswith("could not take it over: its SHA-256 is wrong")
    perhaps(yard, restarts)
    assert yard.machine.jobs[-1].lost_residuals.count == 1
    assert told(yard, worker) == []


def test_end_of_a_job_tells_of_what_nobody_has_taken_up() -> None:
    yard = Yard()
    (worker,) = run(yard, 1)
    commit(yard, [file_of(worker.incarnation)])
    lose(yard, servers=3)
    yard.register(MemberRole.SERVER, "n:0")
    restore(yard)
    die(yard, worker)
    assert any("no worker has taken over the residuals of workers 100000004" in str(each) for each in yard.effects)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("feedback_due", {"generation": 0}),
        ("feedback_due", {"feedback": [["7", "p", 3]]}),
        ("feedback_taken", {"of": "nobody"}),
        ("feedback_taken_before", {"taken": [["7", 0]]}),
        ("feedback_taken_before", {"taken": [["7"]]}),
        ("checkpoint_committed", {"feedback": [["7", "p", -3, ""]]}),
    ],
)
def test_record_that_cannot_be_is_refused(kind: str, change: dict[str, object]) -> None:
    yard = Yard()
    (worker,) = run(yard, 1)
    commit(yard, [file_of(worker.incarnation)])
    lose(yard, servers=3)
    yard.register(MemberRole.SERVER, "n:0")
    take(yard, worker, worker, restore(yard))
    if kind == "feedback_taken_before":
        yard.persisted = yard.machine.snapshot()
    assert any(each.kind == kind for each in yard.persisted)
    yard.persisted = [
        effects.Persist(each.kind, {**each.body, **change}) if each.kind == kind else each for each in yard.persisted
    ]
    with pytest.raises(ConfigurationError, match="cannot be taken"):
        yard.restart(from_snapshot=False)


# ---- the door


def test_what_a_worker_says_is_checked() -> None:
    caller = {"job": 1, "incarnation": 2}
    said = wire.ReportResidualRequest(caller=caller, number=3, stage=3, length=9, sha256=b"\xab" * 32)
    assert checkpoints.residual_report(said)[1] == ResidualReport(Stage.ENDED, written=Written(9, "ab" * 32))
    assert checkpoints.residual_report(wire.ReportResidualRequest(stage=1, length=9))[1] == ResidualReport(Stage.READY)
    assert checkpoints.residual_report(wire.ReportResidualRequest(stage=2, length=9))[1] == ResidualReport(Stage.COPIED)
    assert checkpoints.residual_report(wire.ReportResidualRequest(stage=3, failure="full"))[1].failure == "full"
    assert checkpoints.residual_report(wire.ReportResidualRequest(stage=3))[1] == ResidualReport(Stage.ENDED)
    for stage in (0, 4):
        with pytest.raises(MalformedPayload, match=f"at stage {stage}"):
            checkpoints.residual_report(wire.ReportResidualRequest(stage=stage))
    with pytest.raises(MalformedPayload, match="digest of 3 bytes"):
        checkpoints.residual_report(wire.ReportResidualRequest(stage=3, length=9, sha256=b"abc"))
    with pytest.raises(TooLarge):
        checkpoints.residual_report(wire.ReportResidualRequest(stage=3, length=JOB_BYTES_MAX + 1, sha256=b"a" * 32))
    for request in (wire.TakeUpResidualRequest(worker="7" * 600), wire.TakeUpResidualRequest(failure="x" * 10**6)):
        with pytest.raises(TooLarge):
            checkpoints.take_up_residual_event(request)


def test_heartbeat_brings_what_to_save_and_what_to_take_up() -> None:
    handed = CheckpointResidual(Generation(4), True, "here", file_of("7"))
    standing = effects.HeartbeatReply(feedback=(handed,), restored_generation=Generation(4))
    reply = members.heartbeat_reply(standing, Term(1), ResidualRequest(12, "there"))
    assert (reply.save_residual.number, reply.save_residual.url, reply.restored_generation) == (12, "there", 4)
    (found,) = reply.feedback
    assert (found.generation, found.worker, found.own, found.url) == (4, "7", True, "here")
    assert (found.path, found.length, found.sha256) == (feedback_path(1, "7"), 1_000, b"\xab" * 32)
    plain = members.heartbeat_reply(effects.HeartbeatReply(), Term(1))
    assert plain.SerializeToString() == wire.HeartbeatReply(term=1).SerializeToString()
