"""The folders, state files, processes and logs of a yard."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from shardyard.domain import errors
from shardyard_launcher.yard.role_process import RoleProcess, RunningRole, tail
from shardyard_launcher.yard.state_file import YardState, forget_state, locked, read_state
from shardyard_launcher.yard.temp_folder import run_folder


def test_folder_of_a_killed_run_is_removed_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    abandoned, unmarked, file = (tmp_path / f"shardyard-run-{name}" for name in ("a", "b", "c"))
    abandoned.mkdir()
    (abandoned / "run.lock").touch()
    unmarked.mkdir()
    file.touch()
    with run_folder() as first:
        with run_folder() as second:
            assert set(tmp_path.iterdir()) == {first, second, unmarked, file}
        assert first.is_dir()
    assert set(tmp_path.iterdir()) == {unmarked, file}


def role(pid: int, created_s: float, log: Path) -> RoleProcess:
    return RoleProcess("server-0", "server", pid, created_s, log, "127.0.0.1:5")


def test_state_comes_back_as_it_was_written(tmp_path: Path) -> None:
    state = YardState((role(5, 1.5, tmp_path / "x.log"),))
    state.write(tmp_path)
    assert read_state(tmp_path) == state
    assert state.address_of("server") == "127.0.0.1:5"
    assert state.agent == ""
    forget_state(tmp_path)
    assert read_state(tmp_path) is None


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 2}', '{"format": 1}', '{"format":1,"processes":[{}]}'])
def test_spoiled_state_file_is_told(tmp_path: Path, content: str) -> None:
    (tmp_path / "yard.json").write_text(content)
    with pytest.raises(errors.ConfigurationError, match=r"yard\.json"):
        read_state(tmp_path)


def test_two_starts_from_one_folder_exclude_each_other(tmp_path: Path) -> None:
    with locked(tmp_path):
        with pytest.raises(errors.NotReady, match="is running in"), locked(tmp_path):
            pass
    with locked(tmp_path):
        pass


def test_state_folder_that_is_a_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "yard").write_text("")
    refused = pytest.raises(errors.ConfigurationError, match=r"yard cannot hold the state of a yard")
    with refused, locked(tmp_path / "yard"):
        pass


def test_process_with_a_recycled_pid_is_left_alone(tmp_path: Path) -> None:
    stranger = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        created_s = psutil.Process(stranger.pid).create_time()
        ours = RunningRole(role(stranger.pid, created_s, tmp_path / "log"))
        assert ours.alive
        old = RunningRole(role(stranger.pid, created_s - 60, tmp_path / "log"))
        assert not old.alive
        old.signal(signal.SIGKILL)
        assert old.wait(0)
        # had it been signalled, its answer would not come
        assert ours.alive
        stranger.communicate(b"\n", timeout=20)
        assert stranger.returncode == 0
        assert not ours.alive
    finally:
        stranger.kill()
        stranger.wait()


def test_tail_of_a_log_is_its_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text("".join(f"line {number}\n" for number in range(10_000)))
    assert tail(log).splitlines() == [f"  line {number}" for number in range(9_980, 10_000)]
    log.write_text("")
    assert "nothing" in tail(log)
    assert "cannot be read" in tail(tmp_path / "none.log")


def test_wait_for_a_process_is_bounded(tmp_path: Path) -> None:
    me = RunningRole(role(os.getpid(), psutil.Process().create_time(), tmp_path / "log"))
    begin = time.monotonic()
    assert not me.wait(100)
    assert 0.1 <= time.monotonic() - begin < 30
