"""A yard restarts its dead processes, and says so."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import yaml

from shardyard.config.configuration import load
from shardyard.domain import errors, limits
from shardyard.transport.grpc_client import GrpcNetwork
from shardyard_launcher.status.report import LocalReport, ask, read_local
from shardyard_launcher.yard.local_cluster import LocalCluster
from shardyard_launcher.yard.role_process import RoleProcess, RunningRole
from shardyard_launcher.yard.running_yard import RunningYard
from shardyard_launcher.yard.state_file import RoleRestart, YardState, read_state

WINDOW_MS = 60_000
SETTINGS = load(None, {}, {}).settings


def finished(tmp_path: Path, code: str) -> RunningRole:
    """A child of this process that has ended."""
    child = subprocess.Popen([sys.executable, "-c", code])
    child.wait(60)
    return RunningRole(RoleProcess("server-0", "server", child.pid, 0.0, tmp_path / "x.log"), child)


@pytest.mark.parametrize(
    ("code", "ending"),
    [
        ("raise SystemExit(3)", "ended with exit code 3"),
        ("import os; os.kill(os.getpid(), 9)", "was killed by SIGKILL"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGRTMIN + 3)", "was killed by signal 37"),
    ],
)
def test_ending_of_a_process_is_told_in_words(tmp_path: Path, code: str, ending: str) -> None:
    assert finished(tmp_path, code).ending == ending


def test_ending_of_a_process_that_another_started_is_not_known(tmp_path: Path) -> None:
    assert RunningRole(RoleProcess("server-0", "server", os.getpid(), 0.0, tmp_path / "x.log")).ending == "has ended"


def dead_yard(tmp_path: Path, *names: str) -> YardState:
    """A yard of this machine none of whose processes lives."""
    gone = finished(tmp_path, "").process.pid
    (tmp_path / "logs").mkdir(exist_ok=True)
    roles = [RoleProcess(name, name.split("-")[0], gone, 0.0, tmp_path / "logs" / f"{name}.log") for name in names]
    for process in roles:
        process.log.write_text("the last words\n")
    return YardState(tuple(roles))


def test_given_up_process_is_told_with_the_end_of_its_log(tmp_path: Path) -> None:
    settings = load(None, {}, {"yard.restarts_max": 0}).settings
    states: list[YardState] = []
    cluster = LocalCluster(settings, tmp_path, tied=True, on_change=states.append)
    cluster.adopt(dead_yard(tmp_path, "server-0"))
    cluster.check()
    (news,) = cluster.poll()
    assert "the last words" in news
    assert states[-1].given_up == {
        "server-0": "has ended and is not restarted: restarts are off (yard.restarts_max is 0)"
    }
    with pytest.raises(Exception, match="the last words"):
        cluster.check()
    assert cluster.poll() == []


def test_process_that_cannot_be_started_uses_up_its_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load(None, {}, {"yard.restarts_max": 1}).settings
    cluster = LocalCluster(settings, tmp_path, tied=True)
    cluster.adopt(dead_yard(tmp_path, "server-0"))

    def refuse(*_: object, **__: object) -> RunningRole:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shardyard_launcher.yard.local_cluster.start_role", refuse)
    monkeypatch.setattr("shardyard.runtime.restart_policy.BACKOFF_MS", 0)
    (first,) = cluster.poll()
    assert "restart 1 of 1 within 3600 s" in first
    (second,) = cluster.poll()
    assert "could not be restarted ([Errno 28] No space left on device) and is not restarted" in second


def test_state_that_cannot_be_written_lets_no_process_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[RunningRole] = []

    def start(name: str, role: str, *_: object, **__: object) -> RunningRole:
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        started.append(RunningRole(RoleProcess(name, role, child.pid, 0.0, tmp_path / "x.log"), child))
        return started[-1]

    def full(_: YardState) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shardyard_launcher.yard.local_cluster.start_role", start)
    monkeypatch.setattr("shardyard.runtime.restart_policy.BACKOFF_MS", 0)
    cluster = LocalCluster(load(None, {}, {}).settings, tmp_path, tied=True)
    cluster.adopt(dead_yard(tmp_path, "server-0"))
    cluster._on_change = full
    cluster.poll()
    (news,) = cluster.poll()
    assert "could not be restarted ([Errno 28] No space left on device)" in news
    assert [role.exit_code for role in started] == [-9]
    for role in started:
        role.release()


def test_yard_is_taken_over_with_what_was_under_way(tmp_path: Path) -> None:
    """A supervisor that died while a process was being started leaves it to the next one to see it ready."""
    log = tmp_path / "server-0.log"
    log.write_text("")
    living = RoleProcess("server-0", "server", os.getpid(), psutil.Process().create_time(), log, "127.0.0.1:5")
    states: list[YardState] = []
    cluster = LocalCluster(load(None, {}, {}).settings, tmp_path, tied=True, on_change=states.append)
    cluster.adopt(YardState((living,)))
    assert cluster.poll() == []
    assert not states[-1].processes[0].ready
    log.write_text("ready 127.0.0.1:5\n")
    (news,) = cluster.poll()
    assert "is ready at 127.0.0.1:5" in news
    assert states[-1].processes[0].ready


def test_supervisor_outlives_a_full_disk_and_writes_the_state_when_there_is_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = tmp_path / "server-0.log"
    log.write_text("")
    living = RoleProcess("server-0", "server", os.getpid(), psutil.Process().create_time(), log, "127.0.0.1:5")
    states: list[YardState] = []
    cluster = LocalCluster(load(None, {}, {}).settings, tmp_path, tied=True, on_change=states.append)
    cluster.adopt(YardState((living,)))

    def full(_: YardState) -> None:
        raise OSError(28, "No space left on device")

    cluster._on_change = full
    log.write_text("ready 127.0.0.1:5\n")
    (news,) = cluster.poll()
    assert "is ready at 127.0.0.1:5" in news
    assert cluster.poll() == []
    assert not states[-1].processes[0].ready
    assert caplog.text.count(f"the state in {tmp_path} cannot be written ([Errno 28] No space left on device)") == 1
    cluster._on_change = states.append
    assert cluster.poll() == []
    assert states[-1].processes[0].ready


def test_wait_for_a_process_that_was_started_again_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(limits, "EXPLAIN_WAIT_MS", 0)
    log = tmp_path / "server-0.log"
    log.write_text("")
    living = RoleProcess("server-0", "server", os.getpid(), psutil.Process().create_time(), log, "127.0.0.1:5")
    restart = RoleRestart("server-0", 7, "was killed by SIGKILL", 1.5, 2, 5, WINDOW_MS)
    cluster = LocalCluster(load(None, {}, {}).settings, tmp_path, tied=True)
    cluster.adopt(YardState((living,), (restart,)))
    cluster.poll()
    assert f"waiting for server-0 (pid {os.getpid()}) to be ready after restart 2; its log is {log}" in caplog.text
    log.write_text("ready 127.0.0.1:5\n")
    cluster.poll()
    caplog.clear()
    cluster.poll()
    assert caplog.text == ""


def test_a_start_that_takes_too_long_names_the_process_that_is_not_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:

    def start(name: str, role: str, *_: object, log: Path, **__: object) -> RunningRole:
        says = "print('ready 127.0.0.1:5', flush=True); input()"
        if role == "server":
            says = f"import time; time.sleep(30); {says}"
        log.parent.mkdir(exist_ok=True)
        with log.open("w") as said:
            child = subprocess.Popen([sys.executable, "-c", says], stdin=subprocess.PIPE, stdout=said)
        return RunningRole(RoleProcess(name, role, child.pid, 0.0, log), child)

    monkeypatch.setattr(limits, "EXPLAIN_WAIT_MS", 200)
    monkeypatch.setattr("shardyard_launcher.yard.local_cluster.READY_MS_MAX", 1_000)
    monkeypatch.setattr("shardyard_launcher.yard.local_cluster.start_role", start)
    monkeypatch.setattr("shardyard_launcher.yard.local_cluster.unregistered", lambda *_: [])
    monkeypatch.setattr(RunningRole, "release", lambda _: None)
    states: list[YardState] = []
    settings = load(None, {}, {"yard.servers": 1, "yard.coordinator_port": 0}).settings
    cluster = LocalCluster(settings, tmp_path, tied=True, on_change=states.append)
    try:
        with pytest.raises(errors.DeadlineExceeded, match=r"waited for server-0 \(pid \d+\) to be ready"):
            cluster.start(stop=threading.Event())
    finally:
        cluster.stop()
    assert re.search(r"waiting for server-0 \(pid \d+\)", caplog.text)
    before = next(state for state in states if any(each.role == "server" for each in state.roles))
    assert [each.ready for each in before.roles if each.role == "server"] == [False]
    before.write(tmp_path)
    assert read_state(tmp_path) == before
    assert re.search(r"server-0 \(pid \d+\)", RunningYard(SETTINGS, tmp_path, before).waited_for)


def start_that(lives: dict[str, list[str]]) -> Callable[..., RunningRole]:
    """Stands for start_role: each life of a process runs the next of its name's programs, the last one for ever."""

    def start(name: str, role: str, *_: object, log: Path, address: str = "", **__: object) -> RunningRole:
        log.parent.mkdir(exist_ok=True)
        programs = lives.get(name, [STAYS])
        program = programs.pop(0) if len(programs) > 1 else programs[0]
        with log.open("w") as said:
            child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=said)
        return RunningRole(RoleProcess(name, role, child.pid, 0.0, log, address), child)

    return start


STAYS = "print('ready 127.0.0.1:5', flush=True); input()"
IS_KILLED = "import os; os.kill(os.getpid(), 9)"
IS_KILLED_WHEN_READY = f"print('ready 127.0.0.1:5', flush=True); {IS_KILLED}"


@pytest.fixture
def starting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalCluster:
    """A yard of one server whose processes are small programs, started without pauses."""
    monkeypatch.setattr("shardyard.runtime.restart_policy.BACKOFF_MS", 0)
    monkeypatch.setattr("shardyard_launcher.yard.local_cluster.unregistered", lambda *_: "")
    monkeypatch.setattr(RunningRole, "release", lambda _: None)
    settings = load(None, {}, {"yard.servers": 1, "yard.coordinator_port": 0, "yard.restarts_max": 3}).settings
    return LocalCluster(settings, tmp_path, tied=True)


@pytest.mark.parametrize("name", ["coordinator", "server-0", "agent"])
@pytest.mark.parametrize("life", [IS_KILLED, IS_KILLED_WHEN_READY], ids=["before ready", "when ready"])
def test_process_that_is_killed_while_the_yard_starts_comes_back(
    starting: LocalCluster, monkeypatch: pytest.MonkeyPatch, name: str, life: str
) -> None:
    monkeypatch.setattr("shardyard_launcher.yard.local_cluster.start_role", start_that({name: [life, life, STAYS]}))

    def unregistered(*_: object) -> str:
        if len(starting.state.restarts) < 2:  # it is away, or not back yet
            raise errors.CoordinatorUnavailable("coordinator does not answer")
        return ""

    monkeypatch.setattr("shardyard_launcher.yard.local_cluster.unregistered", unregistered)
    try:
        starting.start(stop=threading.Event())
        starting.check()
        assert [each.name for each in starting.state.restarts] == [name, name]
        assert all(each.ready for each in starting.state.roles)
        assert sum("was killed by SIGKILL" in line for line in starting.poll()) == 2
    finally:
        starting.stop()


def test_process_that_ends_by_itself_while_the_yard_starts_shows_its_error(
    starting: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = "print('error: it is not possible', flush=True); raise SystemExit(2)"
    monkeypatch.setattr("shardyard_launcher.yard.local_cluster.start_role", start_that({"server-0": [life]}))
    with pytest.raises(errors.ServerLost, match=r"(?s)ended with exit code 2 before it was ready.*it is not possible"):
        starting.start(stop=threading.Event())


def test_end_of_a_process_is_waited_for_with_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(limits, "EXPLAIN_WAIT_MS", 0)
    me = RunningRole(RoleProcess("server-0", "server", os.getpid(), psutil.Process().create_time(), tmp_path / "x.log"))
    assert not me.wait(50)
    assert f"waiting for server-0 (pid {os.getpid()}) to end" in caplog.text


def test_status_of_a_coordinator_that_is_gone_says_what_became_of_it() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
        restart = RoleRestart("coordinator", 7, "was killed by SIGKILL", 1.5, 2, 5, WINDOW_MS)

        def refusal(local: LocalReport) -> errors.ShardyardError:
            with pytest.raises(errors.CoordinatorUnavailable) as raised:
                ask(GrpcNetwork(None), address, local)
            return raised.value

        mending = refusal(LocalReport(1, (restart,), {}))
        assert "coordinator (pid 7) was killed by SIGKILL; restart 2 of 5 within 60 s" in mending.what
        assert "ask again" in mending.todo_text
        given_up = refusal(LocalReport(1, (restart,), {"coordinator": "has ended and is not restarted"}))
        assert "it has ended and is not restarted" in given_up.what
        assert "shardyard down" in given_up.todo_text
        unwatched = refusal(LocalReport(0, (restart,), {}))
        assert "restart" not in unwatched.what


def test_compose_starts_each_role_again() -> None:
    compose = yaml.safe_load((Path(__file__).parents[3] / "docker" / "compose.yaml").read_text())
    policies = {name: service["restart"] for name, service in compose["services"].items()}
    assert policies == {"coordinator": "unless-stopped", "server": "unless-stopped", "worker": "on-failure:3"}
    # what is started first, and is healthy, before what needs it
    waits = {name: set(service.get("depends_on", ())) for name, service in compose["services"].items()}
    assert waits == {"coordinator": set(), "server": {"coordinator"}, "worker": {"coordinator", "server"}}


def test_what_compose_keeps_is_in_volumes_that_those_share_who_need_it() -> None:
    root = Path(__file__).parents[3]
    compose = yaml.safe_load((root / "docker" / "compose.yaml").read_text())
    settings = yaml.safe_load((root / "configs" / "compose.yaml").read_text())
    mounts = {
        name: {folder: volume for volume, folder, *_ in (each.split(":") for each in service.get("volumes", ()))}
        for name, service in compose["services"].items()
    }
    checkpoints = settings["job"]["checkpoint"]["url"]
    assert mounts["coordinator"][checkpoints] == mounts["server"][checkpoints]
    assert settings["yard"]["state"] in mounts["coordinator"]
    assert settings["yard"]["wal"] in mounts["server"]
    assert {volume for each in mounts.values() for volume in each.values()} == set(compose["volumes"])
    images = (root / "docker" / "Dockerfile").read_text()
    for folder in {folder for each in mounts.values() for folder in each}:
        assert re.search(rf"RUN install -d -o 10001 -g 10001[^\n]* {folder}(\s|$)", images), folder


def test_restarts_come_back_as_they_were_written(tmp_path: Path) -> None:
    restart = RoleRestart("server-0", 7, "was killed by SIGKILL", 1.5, 2, 5, WINDOW_MS)
    process = RoleProcess("server-0", "server", 8, 1.5, tmp_path / "x.log", "127.0.0.1:5", ready=False)
    state = YardState((process,), (restart,), {"agent": "has ended"})
    state.write(tmp_path)
    assert read_state(tmp_path) == state
    assert str(restart) == "server-0 (pid 7) was killed by SIGKILL; restart 2 of 5 within 60 s"


def test_yard_of_another_coordinator_is_not_shown(tmp_path: Path) -> None:
    process = RoleProcess("coordinator", "coordinator", 8, 1.5, tmp_path / "x.log", "127.0.0.1:5", ready=True)
    YardState((process,)).write(tmp_path)
    assert read_local(SETTINGS, tmp_path, "127.0.0.1:6") is None
    local = read_local(SETTINGS, tmp_path, "127.0.0.1:5")
    assert local is not None
    assert local.supervisor == 0
