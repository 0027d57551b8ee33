"""What a worker of a synchronous job has not sent when it leaves: whether somebody goes on who takes it up, that it is
given once, and is in each checkpoint once. The machine's side."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

from shardyard.checkpoints.manifest import FileRef, ResidualFile, feedback_path, left_name, worker_name
from shardyard.config.settings import CheckpointSettings, ConsistencySettings, JobSettings
from shardyard.domain.consistency import ConsistencyMode, Durability
from shardyard.domain.errors import ConfigurationError, InvalidRequest, MalformedPayload, NotFound, TooLarge
from shardyard.domain.ids import Caller, Generation, JobId, Term, Token
from shardyard.domain.limits import JOB_BYTES_MAX
from shardyard.storage.storage import Written
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_coordinator.core import effects, events
from shardyard_coordinator.core.effects import HandoverVerdict
from shardyard_coordinator.machine.machine import Machine
from shardyard_coordinator.members.progress import Report
from shardyard_coordinator.service import door
from shardyard_coordinator.service.status import describe
from shardyard_coordinator.storage import residual_handover
from shardyard_coordinator.storage.residual_handover import HOLD_MS, NEVER, Fate
from shardyard_coordinator.work.feeds import FeedSpec

sys.path.insert(0, str(Path(__file__).parents[1] / "simulation"))

from restoring import numbered, renew, state_of

sys.path.insert(0, str(Path(__file__).parent))

import test_coordinator_handovers as handing
import test_restore_on_command as orders
from test_coordinator_handovers import VARIABLES, commit, die, file_of, lose, restore, take, told
from test_restore_on_command import Yard, perhaps, restarts

__all__ = ["restarts"]

SYNC = handing.SETTINGS.model_copy(
    update={
        "consistency": ConsistencySettings(mode=ConsistencyMode.SYNC, logical_ranks=2),
        "workers_expected": 3,
        "rank_grace_ms": 0,
    }
)
FEED = FeedSpec(samples=40, fingerprint="f", batch_size=10, epochs=1, shuffle=True, drop_last=False)
STEPS = 2
NORM = 3.0


def left_of(worker: Caller, number: int = 9) -> ResidualFile:
    name = left_name(worker.incarnation)
    return ResidualFile(name, FileRef(feedback_path(number, name), Written(1_000, "cd" * 32)))


def run(yard: Yard, workers: int, settings: JobSettings = SYNC) -> list[Caller]:
    """A job that runs, with a first checkpoint, in which nobody remembers anything; its workers, all of them ready."""
    callers = handing.run(yard, workers, settings)
    if settings.checkpoint.url != "never":
        commit(yard, [])
    for worker in callers:
        yard.handle(events.VariablesRegistered(worker, VARIABLES, orders.SGD))
    return callers


def ask(yard: Yard, worker: Caller, file: ResidualFile | None = None, gone_back: Generation = NEVER) -> HandoverVerdict:
    verdict = yard.handle(events.HandoverRequested(worker, gone_back, file, NORM if file else 0.0))
    assert isinstance(verdict, HandoverVerdict)
    return verdict


def hand_over(yard: Yard, worker: Caller, number: int = 9, gone_back: Generation = NEVER) -> ResidualFile:
    assert ask(yard, worker, gone_back=gone_back) == HandoverVerdict(Fate.WRITE, "here")
    file = left_of(worker, number)
    assert ask(yard, worker, file, gone_back) == HandoverVerdict(Fate.HANDED_OVER)
    return file


def leave(yard: Yard, worker: Caller, error: str = "", residual_lost: float = 0.0) -> None:
    yard.handle(events.MemberLeft(worker.incarnation, error, 0, residual_lost))


def begins(yard: Yard, ms: int = 1_000) -> effects.TakeCheckpoint | None:
    """The checkpoint that is begun when so much time has passed."""
    yard.now_ms += ms
    yard.handle(events.Ticked())
    return next((each for each in yard.effects if isinstance(each, effects.TakeCheckpoint)), None)


def begin_checkpoint(yard: Yard, worker: Caller, ms: int = 1_000) -> effects.TakeCheckpoint:
    yard.handle(events.CheckpointRequested(worker, "", 0))
    taking = begins(yard, ms)
    assert taking is not None
    return taking


def lost(yard: Yard) -> tuple[int, float]:
    (job,) = describe(yard.machine, yard.now_ms).jobs
    return job.residuals_lost, job.residual_lost_norm


def dropped(yard: Yard) -> list[ResidualFile]:
    return [each.file for each in yard.effects if isinstance(each, effects.DropFeedback)]


# ---- to whom it goes


def test_what_a_worker_that_leaves_has_not_sent_goes_to_the_first_that_goes_on_and_to_nobody_else(
    restarts: str,
) -> None:
    yard = Yard()
    first, second, third = run(yard, 3)
    name = left_name(first.incarnation)
    file = hand_over(yard, first)
    perhaps(yard, restarts)
    assert ask(yard, first, file) == HandoverVerdict(Fate.HANDED_OVER), "the answer may have been lost"
    assert [told(yard, each) for each in (first, second, third)] == [[], [(name, False)], []]
    leave(yard, first)
    perhaps(yard, restarts)
    assert take(yard, second, name, NEVER)
    assert dropped(yard) == [file]
    perhaps(yard, restarts)
    assert take(yard, second, name, NEVER), "the answer may have been lost"
    assert not take(yard, third, name, NEVER)
    assert [told(yard, each) for each in (second, third)] == [[], []]
    assert lost(yard) == (0, 0.0)


def test_next_one_takes_it_where_the_first_has_died_or_leaves_too(restarts: str) -> None:
    yard = Yard()
    first, second, third, fourth = run(yard, 4)
    name = left_name(first.incarnation)
    hand_over(yard, first)
    leave(yard, first)
    yard.kill(second.incarnation)
    perhaps(yard, restarts)
    assert told(yard, third) == [(name, False)]
    other = left_name(third.incarnation)
    hand_over(yard, third)
    perhaps(yard, restarts)
    assert told(yard, third) == [], "it leaves"
    assert told(yard, fourth) == [(name, False), (other, False)]
    assert take(yard, fourth, name, NEVER)
    assert take(yard, fourth, other, NEVER)


def test_worker_that_has_read_it_takes_it_up_and_hands_over_all_when_it_leaves_itself(restarts: str) -> None:
    yard = Yard()
    first, second, _ = run(yard, 3)
    hand_over(yard, first)
    assert ask(yard, second).fate is Fate.WRITE
    assert take(yard, second, left_name(first.incarnation), NEVER), "it had it in hand when it began to leave"
    perhaps(yard, restarts)
    assert ask(yard, second, left_of(second)).fate is Fate.HANDED_OVER


def test_late_joiner_takes_it_if_nobody_else_is_there(restarts: str) -> None:
    yard = Yard()
    (only,) = run(yard, 1)
    hand_over(yard, only)
    leave(yard, only)
    perhaps(yard, restarts)
    late = yard.join(SYNC)
    assert told(yard, late) == [(left_name(only.incarnation), False)]


# ---- whether anybody goes on


def test_nobody_goes_on_where_all_data_is_done(restarts: str) -> None:
    yard = Yard()
    first, second = run(yard, 2)
    yard.handle(events.FeedOpened(first, 0, FEED))
    yard.handle(events.HeartbeatReceived(first.incarnation, Report(step=STEPS, residual_norm=NORM)))
    assert ask(yard, first).fate is Fate.WRITE, "the other may have steps to take: it is not known to be done"
    yard.handle(events.LedgerRead(events.LeaseReturned(first, 0, None, Token(0)), STEPS))
    perhaps(yard, restarts)
    for worker in (first, second):
        assert ask(yard, worker) == HandoverVerdict(Fate.UNWANTED)
        assert ask(yard, worker, left_of(worker)) == HandoverVerdict(Fate.UNWANTED)
        leave(yard, worker)
    assert lost(yard) == (0, 0.0), "as where no worker goes on"
    assert not [each for each in yard.persisted if each.kind == "feedback_handed_over"]


def test_nobody_goes_on_behind_the_step_at_which_the_job_was_told_to_stop(restarts: str) -> None:
    yard = Yard()
    first, second = run(yard, 2)
    job = yard.machine.jobs[0]
    yard.handle(events.StopRequested(first, "", "good enough"))
    for worker in (first, second):
        yard.handle(events.HeartbeatReceived(worker.incarnation, Report(step=5, reached=6)))
    assert job.deployment.map is not None
    yard.handle(events.StepsRead(job.id, job.deployment.map.generation, 6))
    perhaps(yard, restarts)
    assert ask(yard, first).fate is Fate.WRITE, "there is a step to take"
    yard.handle(events.HeartbeatReceived(second.incarnation, Report(step=6)))
    assert ask(yard, first).fate is Fate.UNWANTED


def test_steps_without_data_that_follow_are_somebodys(restarts: str) -> None:
    yard = Yard()
    first, second = run(yard, 2)
    yard.handle(events.FeedOpened(first, 0, FEED))
    yard.handle(events.LedgerRead(events.LeaseReturned(first, 0, None, Token(0)), STEPS))
    perhaps(yard, restarts)
    yard.handle(events.HeartbeatReceived(second.incarnation, Report(step=STEPS + 1)))
    assert ask(yard, first).fate is Fate.WRITE


def test_last_one_of_a_job_that_ends_with_it_keeps_what_it_has() -> None:
    yard = Yard()
    first, second = run(yard, 2, SYNC.model_copy(update={"workers_expected": 2}))
    hand_over(yard, first)
    assert ask(yard, second).fate is Fate.UNWANTED, "the other one leaves: its goodbye and this one's end the job"


# ---- checkpoints


def test_while_a_checkpoint_is_taken_a_worker_that_leaves_waits_and_nothing_changes_hands(restarts: str) -> None:
    yard = Yard()
    first, second, third = run(yard, 3)
    file = hand_over(yard, first)
    taking = begin_checkpoint(yard, second, ms=HOLD_MS)
    assert taking.left == (file,)
    assert ask(yard, third) == HandoverVerdict(Fate.WAIT, "here")
    assert ask(yard, third, left_of(third)).fate is Fate.WAIT
    assert told(yard, second) == []
    assert not take(yard, second, left_name(first.incarnation), NEVER)
    number = taking.draft.number
    yard.handle(events.CheckpointTaken(second.job, number, number, 0, feedback=(file,)))
    perhaps(yard, restarts)
    assert ask(yard, third).fate is Fate.WRITE
    assert take(yard, second, left_name(first.incarnation), NEVER)


def test_no_checkpoint_is_begun_before_it_is_taken_up_but_after_a_while() -> None:
    yard = Yard()
    first, second, _ = run(yard, 3)
    yard.handle(events.CheckpointRequested(second, "", 0))
    assert ask(yard, first).fate is Fate.WRITE
    assert begins(yard, HOLD_MS - 1) is None, "it writes"
    file = left_of(first)
    assert ask(yard, first, file).fate is Fate.HANDED_OVER
    assert begins(yard, HOLD_MS - 1) is None, "somebody reads"
    taking = begins(yard, 1)
    assert taking is not None
    assert taking.left == (file,)


def test_checkpoint_is_begun_as_soon_as_it_is_taken_up_and_lacks_nothing(restarts: str) -> None:
    yard = Yard()
    first, second, _ = run(yard, 3)
    hand_over(yard, first)
    yard.handle(events.CheckpointRequested(second, "", 0))
    assert begins(yard) is None
    assert take(yard, second, left_name(first.incarnation), NEVER)
    perhaps(yard, restarts)
    taking = begin_checkpoint(yard, second)
    assert taking.left == ()
    assert second.incarnation in taking.keepers


def test_worker_that_dies_while_it_writes_holds_no_checkpoint_up() -> None:
    yard = Yard()
    first, second, _ = run(yard, 3)
    assert ask(yard, first).fate is Fate.WRITE
    yard.kill(first.incarnation)
    assert begin_checkpoint(yard, second).left == ()


def test_file_that_may_have_been_pruned_meanwhile_is_written_again() -> None:
    yard = Yard()
    first, second, _ = run(yard, 3)
    assert ask(yard, first).fate is Fate.WRITE
    yard.restart()
    taking = begin_checkpoint(yard, second)
    number = taking.draft.number
    yard.handle(events.CheckpointTaken(second.job, number, number, 0))
    assert ask(yard, first, left_of(first, number)) == HandoverVerdict(Fate.WRITE, "here")
    assert ask(yard, first, left_of(first, number + 1)) == HandoverVerdict(Fate.HANDED_OVER)


@pytest.mark.parametrize("step", [0, 5])
def test_last_checkpoint_has_what_nobody_has_taken_up(step: int) -> None:
    """Also where nothing else has changed since the one before."""
    yard = Yard()
    (only,) = run(yard, 1)
    yard.handle(events.HeartbeatReceived(only.incarnation, Report(step=step)))
    file = hand_over(yard, only)
    leave(yard, only)
    taking = None
    for _ in range(20):
        taking = taking or begins(yard)
    assert taking is not None
    assert taking.left == (file,)
    number = taking.draft.number
    yard.handle(events.CheckpointTaken(only.job, number, number, step, feedback=(file,)))
    assert yard.state is effects.JobState.FINISHED
    assert any(f"nobody has taken up what workers {file.worker} had not sent" in each for each in yard.told)


def test_no_further_checkpoint_is_taken_at_the_end_where_the_last_one_has_it_already() -> None:
    yard = Yard()
    first, second = run(yard, 2, SYNC.model_copy(update={"workers_expected": 2}))
    file = hand_over(yard, first)
    leave(yard, first)
    number = begin_checkpoint(yard, second, ms=HOLD_MS).draft.number
    yard.handle(events.CheckpointTaken(first.job, number, number, 0, feedback=(file,)))
    leave(yard, second)
    assert yard.state is effects.JobState.FINISHED


# ---- a job that goes back


def test_going_back_makes_void_what_was_handed_over_since_and_gives_what_the_checkpoint_has(restarts: str) -> None:
    yard = Yard()
    first, second, third = run(yard, 3)
    file = hand_over(yard, first)
    taking = begin_checkpoint(yard, second, ms=HOLD_MS)
    number = taking.draft.number
    mine = file_of(second.incarnation, number)
    yard.handle(events.CheckpointTaken(second.job, number, number, 0, feedback=(mine, file)))
    assert take(yard, second, left_name(first.incarnation), NEVER)
    leave(yard, first)
    hand_over(yard, third, number + 1)
    leave(yard, third)
    perhaps(yard, restarts)
    lose(yard, servers=1)
    generation = restore(yard)
    perhaps(yard, restarts)
    assert told(yard, second) == [
        (worker_name(second.incarnation), True),
        (left_name(first.incarnation), False),
    ], "also what it had taken up since; nothing of who left since"
    assert not take(yard, second, left_name(third.incarnation), generation)
    assert take(yard, second, left_name(first.incarnation), generation)
    assert lost(yard) == (0, 0.0)


def test_worker_that_has_not_followed_a_job_that_goes_back_has_nothing_to_hand_over(restarts: str) -> None:
    yard = Yard()
    first, second, _ = run(yard, 3)
    for server in yard.machine.jobs[-1].deployment.servers[:1]:
        yard.handle(events.MemberLeft(server.incarnation, ""))
    assert ask(yard, first).fate is Fate.VOID, "it will go back"
    generation = restore(yard)
    perhaps(yard, restarts)
    assert ask(yard, first).fate is Fate.VOID, "it has gone back"
    assert ask(yard, first, left_of(first)).fate is Fate.VOID
    hand_over(yard, second, gone_back=generation)


def test_job_that_comes_back_by_logs_hands_over_all_the_same() -> None:
    yard = Yard()
    first, second, _ = run(yard, 3, SYNC.model_copy(update={"durability": Durability.WAL}))
    file = hand_over(yard, first)
    lose(yard, servers=1)
    assert ask(yard, second).fate is Fate.WRITE, "nothing that was acknowledged is taken back"
    yard.restored(yard.tick())
    assert [each.file for each in yard.machine.jobs[-1].handovers.left] == [file]
    assert ask(yard, second, left_of(second)).fate is Fate.HANDED_OVER


# ---- what is lost


def test_what_was_handed_over_is_not_lost_with_its_worker_whatever_it_said_before(restarts: str) -> None:
    yard = Yard()
    first, second, third = run(yard, 3)
    for worker in (first, second):
        yard.handle(events.HeartbeatReceived(worker.incarnation, Report(residual_norm=12.0)))
        hand_over(yard, worker)
    perhaps(yard, restarts)
    yard.handle(events.HeartbeatReceived(first.incarnation, Report(residual_norm=12.0)))
    yard.kill(first.incarnation)
    leave(yard, second, "ValueError: at the end")
    gone = [each.body for each in yard.persisted if each.kind == "worker_gone"]
    assert all(each["residual"] == 0.0 for each in gone)
    assert lost(yard) == (0, 0.0)
    assert [name for name, _ in told(yard, third)] == [left_name(each.incarnation) for each in (first, second)]


def test_what_could_not_be_handed_over_is_told_with_the_goodbye_and_counted(restarts: str) -> None:
    yard = Yard()
    first, *_ = run(yard, 3)
    assert ask(yard, first).fate is Fate.WRITE
    leave(yard, first, residual_lost=NORM)
    assert [each.body["residual"] for each in yard.persisted if each.kind == "worker_gone"] == [NORM]
    assert any("took along what compression had not sent yet, of 2-norm 3" in each for each in yard.told)
    perhaps(yard, restarts)
    assert lost(yard) == (1, NORM)


def test_what_cannot_be_taken_up_is_lost_with_the_norm_that_it_had(restarts: str) -> None:
    yard = Yard()
    first, second, _ = run(yard, 3)
    hand_over(yard, first)
    assert take(yard, second, left_name(first.incarnation), NEVER, "its SHA-256 is wrong")
    perhaps(yard, restarts)
    assert lost(yard) == (1, NORM)
    assert told(yard, second) == []


def test_ended_job_leaves_no_file_behind_and_tells_of_it() -> None:
    yard = Yard()
    first, second = run(yard, 2)
    file = hand_over(yard, first)
    leave(yard, first)
    die(yard, second)
    assert yard.state is effects.JobState.FAILED
    assert dropped(yard) == [file]
    assert any(f"nobody has taken up what workers {file.worker} had not sent" in each for each in yard.told)


def test_file_is_left_alone_while_a_manifest_may_be_written_that_names_it() -> None:
    yard = Yard()
    first, second = run(yard, 2)
    hand_over(yard, first)
    begin_checkpoint(yard, second, ms=HOLD_MS)
    leave(yard, first)
    die(yard, second)
    assert dropped(yard) == []


def test_only_so_much_is_kept_for_who_may_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residual_handover, "LEFT_MAX", 2)
    yard = Yard()
    callers = run(yard, 5)
    for worker in callers[:2]:
        hand_over(yard, worker)
    assert ask(yard, callers[2]).fate is Fate.WRITE
    with pytest.raises(TooLarge, match="no more is taken"):
        ask(yard, callers[2], left_of(callers[2]))
    for worker in callers[:2]:
        assert take(yard, callers[3], left_name(worker.incarnation), NEVER)
    hand_over(yard, callers[2])
    assert take(yard, callers[3], left_name(callers[2].incarnation), NEVER)
    assert len(yard.machine.jobs[-1].handovers._taken) == 2


# ---- what is refused


def test_job_without_a_storage_or_of_the_other_kind_hands_over_nothing() -> None:
    yard = Yard()
    first, *_ = run(yard, 3, SYNC.model_copy(update={"checkpoint": CheckpointSettings(url="never")}))
    with pytest.raises(InvalidRequest, match="has no storage"):
        ask(yard, first)
    other = Yard()
    first, *_ = handing.run(other, 2)
    with pytest.raises(InvalidRequest, match="its last push"):
        ask(other, first)
    with pytest.raises(NotFound):
        ask(other, Caller(JobId(77), first.incarnation))


def test_records_of_all_of_it_make_the_same_machine() -> None:
    yard = Yard()
    first, second, third, fourth = run(yard, 4)
    for worker in (first, second):
        hand_over(yard, worker)
    ask(yard, third)
    assert take(yard, fourth, left_name(first.incarnation), NEVER, "its SHA-256 is wrong")
    leave(yard, first)
    leave(yard, third, residual_lost=NORM)
    renew(yard.machine, yard.now_ms)
    for written in (yard.persisted, yard.machine.snapshot()):
        again = Machine.restore(
            numbered(written), term=Term(1), lease_ms=yard.lease_ms, now_ms=yard.now_ms, checkpoints="here"
        )
        assert state_of(again) == state_of(yard.machine)
        assert again.snapshot() == yard.machine.snapshot()


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("feedback_handed_over", {"worker": 0}),
        ("feedback_handed_over", {"worker": 77}),
        ("feedback_handed_over", {"norm": "much"}),
        ("feedback_handed_over", {"feedback": []}),
        ("feedback_handed_over", {"url": None}),
        ("feedback_taken", {"of": "100000004"}),
        ("feedback_taken_before", {"taken": [["7", 0]]}),
        ("feedback_taken_before", {"taken": [["7"]]}),
    ],
)
def test_record_that_cannot_be_is_refused(kind: str, change: dict[str, object]) -> None:
    yard = Yard()
    first, second, _ = run(yard, 3)
    hand_over(yard, first)
    if kind != "feedback_handed_over":
        take(yard, second, left_name(first.incarnation), NEVER)
    if kind == "feedback_taken_before":
        yard.persisted = yard.machine.snapshot()
    assert any(each.kind == kind for each in yard.persisted)
    yard.persisted = [
        effects.Persist(each.kind, {**each.body, **change}) if each.kind == kind else each for each in yard.persisted
    ]
    with pytest.raises(ConfigurationError, match="cannot be taken"):
        yard.restart(from_snapshot=False)


def test_record_that_is_there_twice_is_refused() -> None:
    yard = Yard()
    first, *_ = run(yard, 3)
    hand_over(yard, first)
    yard.persisted += [each for each in yard.persisted if each.kind == "feedback_handed_over"]
    with pytest.raises(ConfigurationError, match="hands over twice"):
        yard.restart(from_snapshot=False)


def test_what_a_worker_says_is_checked() -> None:
    caller = {"job": 1, "incarnation": 2}
    said = {"caller": caller, "gone_back": 5, "number": 9, "length": 1_000, "sha256": b"\xcd" * 32, "norm": 3.0}
    asked = door.hand_over_asked(wire.HandOverFeedbackRequest(**said))
    worker = Caller(JobId(1), asked.caller.incarnation)
    assert asked == events.HandoverRequested(worker, Generation(5), left_of(worker), 3.0)
    assert asked.file is not None
    assert asked.file.file.path == "000000000009/worker-2-left.safetensors"
    assert door.hand_over_asked(wire.HandOverFeedbackRequest(caller=caller, length=7)).file is None
    for change in ({"number": 10**12}, {"length": JOB_BYTES_MAX + 1}):
        with pytest.raises(TooLarge):
            door.hand_over_asked(wire.HandOverFeedbackRequest(**said | change))
    for change in ({"sha256": b"abc"}, {"norm": math.nan}, {"norm": -1.0}, {"norm": math.inf}):
        with pytest.raises(MalformedPayload):
            door.hand_over_asked(wire.HandOverFeedbackRequest(**said | change))
    with pytest.raises(MalformedPayload, match="residual of 2-norm"):
        door.left(wire.LeaveRequest(residual_lost=math.nan))
    assert door.left(wire.LeaveRequest(residual_lost=2.5)).residual_lost == 2.5


def test_each_fate_has_its_number() -> None:
    found = {door.hand_over_reply(HandoverVerdict(fate, "there")).fate for fate in Fate}
    assert found == set(wire.FeedbackFate.values()) - {wire.FEEDBACK_FATE_UNSPECIFIED}
    assert door.hand_over_reply(HandoverVerdict(Fate.WRITE, "there")).url == "there"


def test_wait_for_somebody_to_take_it_up_is_shown() -> None:
    yard = Yard()
    (only,) = run(yard, 1)
    hand_over(yard, only)
    for _ in range(3):
        begins(yard)
    assert any(f"a worker to take up what worker {only.incarnation} had not sent" in each for each in yard.job().waits)
