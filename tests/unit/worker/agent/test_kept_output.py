"""An agent keeps what its launches print, and how they ended, and goes on with those that nobody follows."""

from __future__ import annotations

import errno
import os
import re
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardyard.domain import errors
from shardyard.transport.interfaces import Context
from shardyard.wire import methods
from shardyard.wire.v1 import agent_pb2 as wire
from shardyard_worker.agent import launch_folders
from shardyard_worker.agent import service as agent_service
from shardyard_worker.agent.launch_folders import LaunchFolder, LaunchFolders, LaunchRecord
from shardyard_worker.agent.service import AgentPlan, AgentService
from tests.support.waiting import wait_until

LOCAL = Context(peer="ipv4:127.0.0.1:999", is_active=lambda: True)
REMOTE = Context(peer="ipv4:10.1.2.3:999", is_active=lambda: True)


# ---- the agent


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "train.py"


def agent_on(state: Path) -> AgentService:
    return AgentService(
        AgentPlan("127.0.0.1:1", 1, state), incarnation=lambda: 3, report_exit=lambda pid, exit_code: None
    )


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentService]:
    made = agent_on(tmp_path)
    yield made
    made.close(grace_ms=100)


def launch(agent: AgentService, script: Path, text: str, workers: int = 1) -> int:
    script.write_text(text)
    request = wire.LaunchRequest(script=str(script), working_directory=str(script.parent), workers=workers)
    return agent.launch(request).number


def wait(agent: AgentService, number: int) -> wire.LaunchEnded:
    events = list(agent.service.handlers[methods.WATCH](wire.WatchRequest(launch=number), LOCAL))
    ending = events[-1].ended
    assert isinstance(ending, wire.LaunchEnded)
    return ending


def read(agent: AgentService, context: Context = LOCAL, **request: Any) -> Iterator[wire.ProcessOutput]:
    for lines in agent.service.handlers[methods.READ_OUTPUT](wire.ReadOutputRequest(**request), context):
        yield from lines.lines


def described(agent: AgentService, number: int, context: Context = LOCAL) -> wire.DescribedLaunch:
    reply = agent.service.handlers[methods.DESCRIBE_AGENT](wire.DescribeAgentRequest(), context)
    (found,) = [each for each in reply.launches if each.launch == number]
    assert isinstance(found, wire.DescribedLaunch)
    return found


FAILS = "import sys\nprint('one')\nprint('two', file=sys.stderr)\nraise ValueError('no')\n"


def test_output_of_a_launch_can_be_read_after_the_agent_was_replaced(agent: AgentService, script: Path) -> None:
    number = launch(agent, script, FAILS)
    wait(agent, number)
    successor = agent_on(script.parent)
    try:
        lines = list(read(successor, launch=number))
        said = described(successor, number)
    finally:
        successor.close(grace_ms=100)
    printed = [(line.standard_error, line.line) for line in lines if not line.by_agent]
    assert printed[0] == (False, "one") or printed[1] == (False, "one")
    assert (True, "two") in printed
    assert printed[-1] == (True, "ValueError: no")
    agents = [line.line for line in lines if line.by_agent]
    assert re.fullmatch(r"process 0 started with pid \d+", agents[0])
    assert agents[-1] == "the launch has failed: ValueError: no"
    assert (said.script, said.ended, said.workers, said.running) == (str(script), True, 1, 0)
    assert said.started_s <= said.ended_s <= time.time()
    assert said.ending.exit_code == 1
    assert said.ending.first_error.endswith("ValueError: no")


def test_output_is_followed_until_the_launch_has_ended(agent: AgentService, script: Path) -> None:
    go = script.parent / "go"
    number = launch(
        agent,
        script,
        f"import os, time\nprint('first', flush=True)\nwhile not os.path.exists({str(go)!r}):\n    time.sleep(0.01)\n"
        "print('last')\n",
    )
    seen: list[str] = []
    reader = threading.Thread(target=lambda: seen.extend(line.line for line in read(agent, launch=number, follow=True)))
    reader.start()
    wait_until(lambda: "first" in seen or not reader.is_alive(), "the first line")
    go.touch()
    reader.join(10)
    assert not reader.is_alive()
    assert "last" in seen


def test_reader_that_has_gone_ends_the_reading(agent: AgentService, script: Path) -> None:
    number = launch(agent, script, "import time\nprint('up', flush=True)\ntime.sleep(600)\n")
    here = threading.Event()
    here.set()
    lines = read(agent, Context(peer="in-process", is_active=here.is_set), launch=number, follow=True)
    assert next(line for line in lines if not line.by_agent).line == "up"
    here.clear()
    assert list(lines) == []


def test_launch_of_a_killed_agent_has_ended_and_nobody_knows_how(agent: AgentService, tmp_path: Path) -> None:
    folder = LaunchFolders(tmp_path).create(lambda number: LaunchRecord(number, "/train.py", (), 2, started_s=5.0))
    number = int(folder.path.name)
    folder.release()  # as the kernel does for a process that is gone
    said = described(agent, number)
    assert (said.ended, said.HasField("ending"), said.ended_s) == (True, False, 0.0)


def test_running_launch_says_who_runs_and_where_its_events_are(agent: AgentService, script: Path) -> None:
    number = launch(agent, script, "import time\nprint('up', flush=True)\ntime.sleep(600)\n")
    wait_until(lambda: described(agent, number).next_event == 2, "the first line")
    said = described(agent, number)
    assert (said.ended, said.running, len(said.pids)) == (False, 1, 1)


def test_process_that_a_launch_does_not_have_is_refused(agent: AgentService, script: Path) -> None:
    number = launch(agent, script, "print('x')\n")
    wait(agent, number)
    with pytest.raises(errors.InvalidRequest, match="has no process 1"):
        list(read(agent, launch=number, process=1))
    with pytest.raises(errors.NotFound, match="no launch 77"):
        list(read(agent, launch=77))


def test_readers_leave_room_for_other_calls(tmp_path: Path, script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_service, "STREAMS_MAX", 1)
    agent = agent_on(tmp_path)
    try:
        number = launch(agent, script, "import time\nprint('up', flush=True)\ntime.sleep(600)\n")
        first = read(agent, launch=number, follow=True)
        next(first)
        with pytest.raises(errors.NotReady, match="1 callers watch"):
            next(read(agent, launch=number))
        first.close()  # type: ignore[attr-defined]
        assert next(read(agent, launch=number))
    finally:
        agent.close(grace_ms=100)


def test_log_says_how_a_launch_ended(agent: AgentService, script: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "shardyard.agent")
    failed, well = launch(agent, script, FAILS), 0
    wait(agent, failed)
    well = launch(agent, script, "pass\n")
    wait(agent, well)
    said = [record.getMessage() for record in caplog.records]
    (error,) = [each for each in said if each.startswith(f"launch {failed} of {script} failed, after ")]
    assert "process 0 failed first:\nTraceback" in error
    assert f"its output is in {script.parent / 'launches' / str(failed)}" in error
    assert [each for each in said if each.startswith(f"launch {well} of {script} ended well, after ")]


def test_agent_that_cannot_write_its_folder_keeps_output_for_its_own_life(
    tmp_path: Path, script: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    agent = agent_on(tmp_path / "file")
    try:
        number = launch(agent, script, "print('x')\n")
        wait(agent, number)
        assert [line.line for line in read(agent, launch=number) if not line.by_agent] == ["x"]
    finally:
        agent.close(grace_ms=100)
    assert "file/launches cannot be written (Not a directory)" in caplog.text


# ---- launches that nobody follows


def unattended(agent: AgentService, script: Path, **fields: Any) -> int:
    """A script that says how often it was started, and goes on until a file is there."""
    script.write_text(
        "import os, pathlib, time\nfolder = pathlib.Path(__file__).parent\n"
        "starts = folder / 'starts'\nstarts.write_text(starts.read_text() + 'x' if starts.exists() else 'x')\n"
        "with (folder / 'runs').open('a') as runs:\n    print(os.environ['SHARDYARD_RUN_ID'], file=runs)\n"
        "print('start', len(starts.read_text()), os.environ['GREETING'], flush=True)\n"
        "while not (folder / 'go').exists():\n    time.sleep(0.01)\n"
    )
    given = {"unattended": True, "restarts_max": 2, "restarts_window_ms": 60_000} | fields
    environment = {"GREETING": "hello"}
    request = wire.LaunchRequest(
        script=str(script), working_directory=str(script.parent), environment=environment, **given
    )
    number = agent.launch(request).number
    wait_until(lambda: [line.line for line in read(agent, launch=number) if not line.by_agent] != [], "the first line")
    return number


def die(agent: AgentService, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends an agent as SIGKILL would, as far as its folder can tell: the processes are gone, the lock is free, and
    nothing was written."""
    with monkeypatch.context() as killed:
        killed.setattr(LaunchFolder, "write", lambda self, record: None)
        agent.close(grace_ms=10)


def printed(agent: AgentService, number: int) -> list[str]:
    return [line.line for line in read(agent, launch=number) if not line.by_agent]


def test_unattended_launch_goes_on_under_the_agent_that_replaces_a_killed_one(
    agent: AgentService, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under its number, with its variables and its identity; its output follows what is there."""
    number = unattended(agent, script)
    last = described(agent, number).next_event
    die(agent, monkeypatch)
    successor = agent_on(script.parent)
    try:
        with pytest.raises(errors.NotReady, match="about to be started again"):
            next(successor.service.handlers[methods.WATCH](wire.WatchRequest(launch=number), LOCAL))
        successor.resume()
        wait_until(lambda: len(printed(successor, number)) == 2, "the second start")
        said = described(successor, number)
        assert (said.ended, said.running) == (False, 1)
        assert said.next_event > last
        (script.parent / "go").touch()
        events = list(
            successor.service.handlers[methods.WATCH](wire.WatchRequest(launch=number, next_event=last), LOCAL)
        )
        assert events[0].HasField("started")
        assert events[-1].ended.exit_code == 0
        assert printed(successor, number) == ["start 1 hello", "start 2 hello"]
        first, second = (script.parent / "runs").read_text().split()
        assert first == second
        agents = [line.line for line in read(successor, launch=number) if line.by_agent]
        assert "the agent was killed; the next agent starts the launch again" in agents
    finally:
        successor.close(grace_ms=100)


def leave(agent: AgentService, elsewhere: str = "") -> list[str]:
    """The agent leaves in order. Returns the scripts that it has tried to launch elsewhere."""
    asked: list[str] = []

    def launch_elsewhere(request: wire.LaunchRequest) -> str:
        asked.append(request.environment["GREETING"])
        return elsewhere

    agent.leave(100, launch_elsewhere, threading.Event())
    agent.close(grace_ms=100)
    return asked


@pytest.mark.parametrize("elsewhere", ["", "launch 123456 of another agent"])
def test_unattended_launch_whose_agent_leaves_goes_on_elsewhere_or_under_the_next_agent(
    agent: AgentService, script: Path, elsewhere: str
) -> None:
    number = unattended(agent, script, restarts_max=0)
    assert leave(agent, elsewhere) == ["hello"]
    successor = agent_on(script.parent)
    try:
        successor.resume()
        if elsewhere:
            ending = described(successor, number).ending
            assert (ending.stopped, elsewhere in ending.first_error) == (True, True)
            return
        wait_until(lambda: len(printed(successor, number)) == 2, "the second start")
        (script.parent / "go").touch()
        assert wait(successor, number).exit_code == 0
        first, second = (script.parent / "runs").read_text().split()
        assert first == second
        agents = [line.line for line in read(successor, launch=number) if line.by_agent]
        assert "the agent has left; the next agent starts the launch again" in agents
    finally:
        successor.close(grace_ms=100)


@pytest.mark.parametrize("how", ["attended", "stopped", "in a hurry", "yard stopped"])
def test_agent_that_leaves_hands_nothing_else_over(agent: AgentService, script: Path, how: str) -> None:
    number = unattended(agent, script, unattended=how != "attended")
    if how == "stopped":
        agent.service.handlers[methods.STOP](wire.StopRequest(launch=number, grace_ms=1), LOCAL)
    if how == "in a hurry":
        hurry = threading.Event()
        hurry.set()
        agent.leave(60_000, lambda request: pytest.fail("handed over"), hurry)
        agent.close(grace_ms=100)
    else:
        assert leave(agent) == (["hello"] if how == "yard stopped" else [])
    if how == "yard stopped":
        LaunchFolders(script.parent).forgo_lost()
    successor = agent_on(script.parent)
    try:
        successor.resume()
        assert described(successor, number).ended == (how != "in a hurry")
    finally:
        successor.close(grace_ms=100)


@pytest.mark.parametrize("how", ["attended", "stopped", "ended", "agent stopped"])
def test_other_launches_are_not_started_again(
    agent: AgentService, script: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    number = unattended(agent, script, unattended=how != "attended")
    if how == "stopped":
        agent.service.handlers[methods.STOP](wire.StopRequest(launch=number, grace_ms=1), LOCAL)
    elif how == "ended":
        (script.parent / "go").touch()
    if how in ("stopped", "ended"):
        wait(agent, number)
    if how == "agent stopped":
        agent.close(grace_ms=10)
    else:
        die(agent, monkeypatch)
    successor = agent_on(script.parent)
    try:
        successor.resume()
        assert described(successor, number).ended
        assert len(printed(successor, number)) == 1
    finally:
        successor.close(grace_ms=100)


@pytest.mark.parametrize("how", ["launch", "agent"])
def test_order_to_stop_outlives_an_agent_that_is_killed_before_it_has_stopped(
    agent: AgentService, script: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    number = unattended(agent, script)
    with monkeypatch.context() as killed:
        killed.setattr(LaunchFolder, "end", lambda folder, record: folder.release())  # no end is written
        if how == "launch":
            agent.service.handlers[methods.STOP](wire.StopRequest(launch=number, grace_ms=1), LOCAL)
            killed.setattr(LaunchFolder, "write", lambda folder, record: None)
        agent.close(grace_ms=10)
    successor = agent_on(script.parent)
    try:
        successor.resume()
        assert len(printed(successor, number)) == 1
        assert described(successor, number).ended
    finally:
        successor.close(grace_ms=100)


def test_launch_is_not_started_again_more_often_than_its_processes_would_be(
    agent: AgentService, script: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    number = unattended(agent, script, restarts_max=1)
    die(agent, monkeypatch)
    for starts in (2, 2):
        successor = agent_on(script.parent)
        successor.resume()
        wait_until(lambda: len(printed(successor, number)) == starts, "the second start")  # noqa: B023
        said = described(successor, number)
        die(successor, monkeypatch)
    assert said.ended
    assert "its agent was killed, and it was restarted once within 60 s (yard.restarts_max)" in said.ending.first_error
    assert f"launch {number} is not started again" in caplog.text


def test_launch_whose_script_is_gone_has_failed(
    agent: AgentService, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = unattended(agent, script)
    die(agent, monkeypatch)
    script.unlink()
    successor = agent_on(script.parent)
    successor.resume()
    ending = described(successor, number).ending
    successor.close(grace_ms=100)
    assert (ending.exit_code, "is not a file" in ending.first_error) == (1, True)


def test_launch_is_resumed_by_one_agent_only(
    agent: AgentService, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = unattended(agent, script)
    die(agent, monkeypatch)
    both = [agent_on(script.parent) for _ in range(2)]
    try:
        for each in both:
            each.resume()
        wait_until(lambda: len(printed(both[0], number)) == 2, "the second start")
        assert described(both[0], number).running == 1
        with pytest.raises(errors.NotFound):
            both[1].service.handlers[methods.STOP](wire.StopRequest(launch=number), LOCAL)
    finally:
        for each in both:
            each.close(grace_ms=100)


def test_launch_whose_end_cannot_be_recorded_is_not_started_again(
    agent: AgentService, script: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    number = unattended(agent, script)
    with monkeypatch.context() as full:
        full.setattr(LaunchFolder, "write", refuse)
        (script.parent / "go").touch()
        wait(agent, number)
        agent.close(grace_ms=10)
    assert "its end is not kept (No space left on device)" in caplog.text
    successor = agent_on(script.parent)
    try:
        successor.resume()
        assert described(successor, number).ended
        assert len(printed(successor, number)) == 1
    finally:
        successor.close(grace_ms=100)


def test_disk_that_is_full_refuses_no_launch(
    agent: AgentService, script: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Earlier launches are known still. The folder of this one lasts as long as the agent."""
    before = launch(agent, script, "print('before')\n")
    wait(agent, before)
    with monkeypatch.context() as full:
        full.setattr(launch_folders, "tempfile", FullTempfile(script.parent / "launches"))
        number = launch(agent, script, "print('x')\n")
    wait(agent, number)
    assert printed(agent, number) == ["x"]
    assert printed(agent, before) == ["before"]
    assert described(agent, number).ended
    assert described(agent, before).ended
    assert "launches cannot be written (No space left on device)" in caplog.text


class FullTempfile:
    """The module, on a disk that takes nothing in one folder."""

    def __init__(self, full: Path) -> None:
        self._full = full

    def mkdtemp(self, **given: Any) -> str:
        if given["dir"] == self._full:
            refuse()
        return tempfile.mkdtemp(**given)

    def TemporaryDirectory(self, **given: Any) -> Any:  # noqa: N802
        return tempfile.TemporaryDirectory(**given)

    def TemporaryFile(self, **given: Any) -> Any:  # noqa: N802 - as the module has it
        return tempfile.TemporaryFile(**given)


def refuse(*given: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
