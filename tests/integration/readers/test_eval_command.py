"""`shardyard eval --follow`, beside real processes that are killed: what it reads is a whole step, what it kept stays,
training does not notice."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
import torch

from shardyard.checkpoints.best import BestFolder, BestManifest
from shardyard.domain.ids import JobId
from shardyard.storage.storage import open_storage
from shardyard.wire.v1 import coordinator_pb2 as wire
from tests.support.yards import ROLE, SCRIPTS, RoleYard, Script

ROOT = Path(__file__).parents[3]


class Training:
    """A job that is trained until the end of a block, or until `end`."""

    def __init__(self, yard: RoleYard, folder: Path, *, mode: str = "sync") -> None:
        self._end = folder / "end"
        settings = {
            "SHARDYARD_COORDINATOR": yard.address,
            "SHARDYARD_JOB": "probe",
            "SHARDYARD__JOB__PARTITIONS": "4",
            "SHARDYARD__JOB__CONSISTENCY__MODE": mode,
        }
        self.script = Script([str(SCRIPTS / "pushes.py"), str(self._end)], settings)

    def end(self) -> int:
        """In good order. Its last step."""
        self._end.touch()
        assert self.script.wait() == 0, self.script.output
        (step,) = re.findall(r"^pushed \d+, step (\d+)$", self.script.output, re.MULTILINE)
        return int(step)

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *_: object) -> None:
        self.script.kill()


class Evaluator:
    """`shardyard eval --follow` with the script for tests, ended at the end of a block."""

    def __init__(self, yard: RoleYard, *arguments: str, options: tuple[str, ...] = ()) -> None:
        given = ["--coordinator", yard.address, "--job", "probe", *options]
        script = [str(SCRIPTS / "evaluate.py"), *arguments]
        self.script = Script([*ROLE, "eval", "--follow", *given, *script], {})

    def __enter__(self) -> Script:
        return self.script

    def __exit__(self, *_: object) -> None:
        self.script.kill()


def evaluated(script: Script) -> list[tuple[int, str]]:
    found = [re.fullmatch(r"evaluated (\d+): \[(.*)\]", line) for line in script.lines]
    return [(int(match[1]), match[2]) for match in found if match]


def await_evaluated(script: Script, more: int = 3) -> None:
    """Until so many more versions were."""
    wanted = len(evaluated(script)) + more
    until = time.monotonic() + 60
    while len(evaluated(script)) < wanted:
        assert time.monotonic() < until, script.output
        assert script.process.poll() is None, script.output
        time.sleep(0.02)


def best_of(yard: RoleYard) -> BestManifest:
    found = BestFolder(open_storage(str(yard.state / "checkpoints")), "probe").load()
    assert found is not None
    return found


def job_of(yard: RoleYard) -> wire.JobStatus:
    (job,) = yard.status().jobs
    return job


def assert_whole(script: Script) -> None:
    for step, values in evaluated(script):
        assert values == f"{float(step)}", script.output


@pytest.mark.long
def test_evaluator_that_is_killed_is_started_again_and_training_goes_on(yard: RoleYard, tmp_path: Path) -> None:
    """It begins before the job does, ends with it, after its last step; what was kept is not lost."""
    with Evaluator(yard, str(tmp_path / "died")) as script, Training(yard, tmp_path) as training:
        script.wait_for("was ended by signal 9; it is restarted (1 of 3)")
        await_evaluated(script)
        last = training.end()
        assert script.wait() == 0, script.output
    assert_whole(script)
    assert evaluated(script)[-1][0] == last
    job = job_of(yard)
    assert job.state == wire.JOB_STATE_FINISHED
    assert (job.evaluation.step, job.best.step) == (last, last)
    until = time.monotonic() + 60
    while job_of(yard).readers:  # the one that was killed has not said goodbye
        assert time.monotonic() < until
        time.sleep(0.05)
    found = best_of(yard)
    assert (found.step, found.value, found.job) == (last, last, JobId(job.job))


@pytest.mark.long
def test_coordinator_that_is_killed_is_waited_for_and_keeps_what_was_reported(yard: RoleYard, tmp_path: Path) -> None:
    with Training(yard, tmp_path) as training, Evaluator(yard) as script:
        await_evaluated(script)
        until = time.monotonic() + 60
        while not job_of(yard).HasField("best"):
            assert time.monotonic() < until
            time.sleep(0.02)
        before = job_of(yard).best
        yard.kill_coordinator()
        await_evaluated(script)  # servers are there
        yard.restart_coordinator()
        assert job_of(yard).best.step >= before.step
        last = training.end()
        assert script.wait() == 0, script.output
    assert_whole(script)
    assert evaluated(script)[-1][0] == last
    assert job_of(yard).best.step == last


@pytest.mark.long
def test_server_that_is_killed_while_it_is_read_is_waited_for(yard: RoleYard, tmp_path: Path) -> None:
    with Training(yard, tmp_path) as training, Evaluator(yard) as script:
        await_evaluated(script)
        yard.kill_server(0)
        yard.restart_server(0)
        await_evaluated(script)
        last = training.end()
        assert script.wait() == 0, script.output
    assert_whole(script)
    assert evaluated(script)[-1][0] == last


def test_script_that_always_dies_is_given_up(yard: RoleYard, tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("raise SystemExit(7)\n")
    options = ["--coordinator", yard.address, "--set", "evaluator.restarts_max=1"]
    with Training(yard, tmp_path):
        script = Script([*ROLE, "eval", "--follow", *options, str(broken)], {})
        assert script.wait() == 7, script.output
    assert any("is restarted (1 of 1)" in line for line in script.lines)
    assert any("is not restarted (evaluator.restarts_max is 1" in line for line in script.lines)


@pytest.mark.long
def test_digits_are_evaluated_while_they_are_trained(yard: RoleYard, tmp_path: Path) -> None:
    digits, kept = ROOT / "examples" / "digits", tmp_path / "kept"
    environment = {"SHARDYARD_COORDINATOR": yard.address, "SHARDYARD__METRICS__TENSORBOARD": str(tmp_path / "runs")}
    training = Script([str(digits / "train.py"), "--epochs", "10000"], environment)
    options = ["--coordinator", yard.address, "--every", "0", "--into", str(kept)]
    script = Script([*ROLE, "eval", "--follow", *options, str(digits / "evaluate.py")], environment)
    try:
        until = time.monotonic() + 80
        while len(accuracies(script)) < 3 or max(accuracies(script)) < 0.9:
            assert time.monotonic() < until, script.output
            time.sleep(0.05)
        assert Script([*ROLE, "stop", "digits", "--coordinator", yard.address], {}).wait() == 0
        assert training.wait() == 0, training.output
        assert script.wait() == 0, script.output
    finally:
        training.kill()
        script.kill()
    found = BestFolder(open_storage(str(kept)), "digits").load()
    assert found is not None
    assert found.value == pytest.approx(max(accuracies(script)), abs=1e-5)
    assert list((tmp_path / "runs" / "digits").glob("*-evaluator-*"))
    export = [*ROLE, "checkpoint", "export", "--url", str(kept), "--best", str(tmp_path / "best.pt")]
    assert Script(export, {}).wait() == 0
    state = torch.load(tmp_path / "best.pt", weights_only=True)
    assert state["9.weight"].shape == (10, 512)


def accuracies(script: Script) -> list[float]:
    found = [re.match(r"step .*accuracy ([\d.]+)", line) for line in script.lines]
    return [float(match[1]) for match in found if match]
