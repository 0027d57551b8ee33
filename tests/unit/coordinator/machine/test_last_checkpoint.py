"""The failure of a job whose last checkpoint is not written. Further scenarios: transcripts/last_checkpoint.txt."""

from __future__ import annotations

import pytest

from shardyard.config.settings import CheckpointSettings, JobSettings
from shardyard.domain import errors
from shardyard.domain.ids import MemberRole
from shardyard.domain.optimizers import OptimizerSpec, make_group
from shardyard.domain.variables import DType, VariableSpec
from shardyard_coordinator.core import events
from shardyard_coordinator.core.effects import JobPhase, TakeCheckpoint
from shardyard_coordinator.members.progress import Report
from tests.support.machine_yards import MachineYard

FULL = errors.StorageUnavailable("no space left")


class Yard(MachineYard):
    """A machine with one job, of one worker and one server, at step 0."""

    def __init__(self, *, url: str = "/kept") -> None:
        super().__init__(lease_ms=1_000_000)
        self.register(MemberRole.SERVER, "s:1")
        settings = JobSettings(
            name="digits", idle_ms=20_000, checkpoint=CheckpointSettings(url=url, every_s=0, every_steps=10)
        )
        self.caller = self.join_as(self.register(MemberRole.WORKER), settings)
        spec = OptimizerSpec("sgd", (make_group("sgd", {"lr": 1.0}),))
        self.open_job(self.caller, (VariableSpec("v", DType.FLOAT64, (8,)),), spec)

    def advance(self, ms: int, *, refuses: bool = True) -> None:
        """Time passes. The storage refuses each checkpoint, or takes it."""
        for _ in range(0, ms, 100):
            self.now_ms += 100
            self.handle(events.Ticked())
            if self.wanted(TakeCheckpoint) and refuses:
                (taking,) = self.wanted(TakeCheckpoint)
                assert isinstance(taking, TakeCheckpoint)
                self.handle(events.CheckpointFailed(self.caller.job, taking.draft.number, FULL))
            elif self.wanted(TakeCheckpoint):
                self.complete_checkpoint()

    def end(self) -> errors.ShardyardError:
        """The worker says goodbye at step 1,017, and no checkpoint is taken. Returns the job's failure."""
        self.beat(self.caller.incarnation, Report(step=1_017))
        self.handle(events.MemberLeft(self.caller.incarnation, ""))
        self.advance(20_000)
        (job,) = self.machine.jobs
        assert job.phase is JobPhase.FAILED
        assert job.failure is not None
        return job.failure


def test_job_whose_last_checkpoint_is_refused_fails_and_says_where_it_can_go_on() -> None:
    yard = Yard()
    yard.advance(100, refuses=False)
    yard.beat(yard.caller.incarnation, Report(step=1_010))
    yard.advance(100, refuses=False)
    failure = yard.end()
    assert isinstance(failure, errors.StorageUnavailable)
    assert failure.what == (
        f"job 'digits' ({yard.caller.job}) ends without its last checkpoint, which failed at last by: no space left; "
        "what came after checkpoint 2 of step 1,010 is lost"
    )
    assert "within 20 s" in failure.why_text
    assert "`shardyard checkpoint restore digits` and start the script again" in failure.todo_text
    assert failure.facts == {"checkpoint": "2", "step": "1010"}


@pytest.mark.parametrize("short", [False, True])
def test_failure_of_a_job_without_a_last_checkpoint_is_the_same_after_a_restart(short: bool) -> None:
    yard = Yard()
    yard.advance(100, refuses=False)
    failure = yard.end()
    yard.restart(from_snapshot=short)
    (job,) = yard.machine.jobs
    assert job.phase is JobPhase.FAILED
    assert job.failure is not None
    assert job.failure.__reduce__() == failure.__reduce__()


def test_job_that_never_had_a_checkpoint_cannot_go_on() -> None:
    yard = Yard()
    yard.advance(100)
    failure = yard.end()
    assert failure.what.endswith("; it has no other, so its work is lost")
    assert failure.todo_text.endswith("start the script again for a new run")
    assert not failure.facts


def test_job_that_is_to_have_no_checkpoints_is_finished() -> None:
    yard = Yard(url="never")
    yard.handle(events.MemberLeft(yard.caller.incarnation, ""))
    (job,) = yard.machine.jobs
    assert (job.phase, job.failure) == (JobPhase.FINISHED, None)
