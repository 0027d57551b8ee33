"""`shardyard down`: what it saves before the yard ends, and what it deletes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from shardyard.config.configuration import load
from shardyard.domain import errors
from shardyard.transport.error_codes import to_detail
from shardyard.transport.interfaces import Context
from shardyard.wire import methods
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_launcher.checkpoints import save
from shardyard_launcher.checkpoints.save import save_jobs
from shardyard_launcher.cli import main
from shardyard_launcher.yard.role_process import RoleProcess
from shardyard_launcher.yard.running_yard import RunningYard
from shardyard_launcher.yard.state_file import YardState
from tests.support.launcher_replies import serving

CHECKPOINTS = Path(".shardyard") / "coordinator" / "checkpoints"
Take = Callable[[wire.TakeCheckpointRequest, Context], wire.TakeCheckpointReply]


def job(name: str, state: wire.JobState = wire.JOB_STATE_RUNNING, **fields: object) -> wire.JobStatus:
    return wire.JobStatus(job=len(name), name=name, state=state, **fields)  # type: ignore[arg-type]


def yard_at(address: str, folder: Path, *, pid: int | None = None) -> RunningYard:
    """A yard without a supervisor, of which this process (or `pid`) is the coordinator."""
    created_s = psutil.Process().create_time()
    process = RoleProcess("coordinator", "coordinator", pid or os.getpid(), created_s, folder / "log", address, True)
    return RunningYard(load(None, os.environ, {}).settings, folder, YardState((process,)))


def saved(folder: Path, jobs: list[wire.JobStatus], take: Take, doomed: Path | None = None) -> list[str]:
    with serving({methods.STATUS: lambda _, __: wire.StatusReply(jobs=jobs), methods.TAKE_CHECKPOINT: take}) as address:
        return list(save_jobs(yard_at(address, folder), threading.Event(), doomed))


def taken(request: wire.TakeCheckpointRequest, _: Context) -> wire.TakeCheckpointReply:
    if not request.ticket:
        return wire.TakeCheckpointReply(job_name=request.job_name, ticket=7, url="/kept")
    return wire.TakeCheckpointReply(job_name=request.job_name, done=True, number=12, step=5_210, url="/kept")


def refused(request: wire.TakeCheckpointRequest, _: Context) -> wire.TakeCheckpointReply:
    return wire.TakeCheckpointReply(failure=to_detail(errors.StorageUnavailable("no space left")))


def test_checkpoint_of_each_job_that_runs_is_written_before_the_yard_ends(tmp_path: Path) -> None:
    jobs = [job("old", wire.JOB_STATE_FINISHED), job("words"), job("digits", wire.JOB_STATE_FINISHING)]
    assert saved(tmp_path, jobs, taken) == [
        "taking a checkpoint of jobs digits, words first; --now does not",
        "job words: checkpoint 12 of step 5,210 is in /kept",
        "job digits: checkpoint 12 of step 5,210 is in /kept",
    ]


def test_yard_without_running_jobs_has_nothing_to_save(tmp_path: Path) -> None:
    assert saved(tmp_path, [job("old", wire.JOB_STATE_FINISHED)], taken) == []


def test_job_whose_checkpoint_fails_says_from_where_it_goes_on(tmp_path: Path) -> None:
    has = job("digits", checkpoint=wire.CheckpointStatus(number=11, step=4_950))
    assert saved(tmp_path, [has], refused)[1:] == [
        "job digits: no checkpoint was taken: no space left; it goes on from checkpoint 11 of step 4,950"
    ]
    assert saved(tmp_path, [job("digits")], refused)[1:] == [
        "job digits: no checkpoint was taken: no space left; it has none, and begins anew"
    ]


def test_checkpoint_that_is_not_written_in_time_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save, "SAVE_MS_MAX", 300)
    began = time.monotonic()
    lines = saved(tmp_path, [job("digits")], lambda request, _: wire.TakeCheckpointReply(job_name="digits", ticket=1))
    assert "it was not there after" in lines[-1]
    assert time.monotonic() - began < 5


def test_broken_yard_is_ended_without_waiting(tmp_path: Path) -> None:
    (line,) = save_jobs(yard_at("127.0.0.1:1", tmp_path, pid=2**22 + 1), threading.Event())
    assert line.startswith("no checkpoint is taken, since the yard is not whole")


def test_coordinator_that_does_not_answer_keeps_no_yard_up(tmp_path: Path) -> None:
    (line,) = save_jobs(yard_at("127.0.0.1:1", tmp_path), threading.Event())
    assert line.startswith("no checkpoint is taken: coordinator at 127.0.0.1:1 does not answer")


def test_checkpoint_that_is_deleted_afterwards_is_not_waited_for(tmp_path: Path) -> None:
    asked: list[int] = []

    def take(request: wire.TakeCheckpointRequest, _: Context) -> wire.TakeCheckpointReply:
        asked.append(request.ticket)
        return wire.TakeCheckpointReply(job_name="digits", ticket=7, url="/kept/digits")

    lines = saved(tmp_path, [job("digits")], take, Path("/kept"))
    assert lines[1:] == ["job digits: no checkpoint is taken, since its checkpoints are deleted"]
    assert asked == [0]


# ---- what is deleted


def checkpoint_of(name: str) -> Path:
    folder = CHECKPOINTS / name / "000000000001"
    folder.mkdir(parents=True)
    (folder / "partition-0000-1.safetensors").write_bytes(b"x" * 2_048)
    return folder


def journal() -> Path:
    path = CHECKPOINTS.parent / "journal.db"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("records")
    return path


def test_purge_keeps_checkpoints_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    kept, gone = checkpoint_of("digits"), journal()
    (Path(".shardyard") / "logs").mkdir()
    assert main(["down", "--purge"]) == 0
    assert kept.is_dir()
    assert list(CHECKPOINTS.parent.iterdir()) == [CHECKPOINTS]
    assert not gone.exists()
    out = capsys.readouterr().out
    assert "deleted the logs and journal in .shardyard; checkpoints stay in" in out
    assert "  job digits: 0 checkpoints; 2.0 KiB\n" in out


def test_purge_of_checkpoints_lists_them_and_refuses_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    kept, also = checkpoint_of("digits"), journal()
    assert main(["down", "--purge-checkpoints"]) == 1
    captured = capsys.readouterr()
    assert "job digits: 0 checkpoints; 2.0 KiB" in captured.out
    assert "there is no terminal to ask at" in captured.err
    assert kept.is_dir()
    assert also.exists()


def test_purge_of_checkpoints_with_yes_deletes_all(capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint_of("digits")
    assert main(["down", "--purge-checkpoints", "--yes"]) == 0
    assert not Path(".shardyard").exists()
    assert "deleted .shardyard with its logs, journal and checkpoints" in capsys.readouterr().out


@pytest.mark.parametrize("answer", ["n", "y"])
def test_person_decides_whether_checkpoints_are_deleted(answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = checkpoint_of("digits")
    monkeypatch.setattr("sys.stdin", Typed(answer))
    assert main(["down", "--purge-checkpoints"]) == (0 if answer == "y" else 1)
    assert kept.is_dir() == (answer == "n")


class Typed:
    """A terminal at which somebody types one line."""

    def __init__(self, line: str) -> None:
        self._line = line

    def isatty(self) -> bool:
        return True

    def readline(self) -> str:
        return f"{self._line}\n"
