"""A script on agents that die, come back late, or are replaced: one launch goes on over all of them."""

from __future__ import annotations

import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shardyard.config.settings import MembershipSettings, Settings, YardSettings
from shardyard.domain import errors
from shardyard.transport.grpc_client import GrpcNetwork
from shardyard.transport.grpc_server import GrpcServer
from shardyard.transport.interfaces import Context, Service
from shardyard.wire import methods
from shardyard.wire.v1 import agent_pb2 as agent_wire
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_launcher.scripts import script as script_module
from shardyard_launcher.scripts.script import Script, ScriptRun
from shardyard_launcher.terminal.options import StopSignals
from shardyard_worker.agent.service import AgentPlan, AgentService
from tests.support.waiting import is_gone, wait_until

GRACE_MS = 1_500
ENDS_AT_GO = """
    import os, sys, time
    open("begun", "a").write("x")
    while not os.path.exists("go"):
        time.sleep(0.01)
    print("done")
"""


class Agent:
    """An agent at an address. `enrolled`: whether it has registered with the coordinator."""

    def __init__(self, folder: Path, address: str = "127.0.0.1:0", *, enrolled: bool = True) -> None:
        self.enrolled = enrolled
        self._service = AgentService(
            AgentPlan("127.0.0.1:9", 1, folder),
            incarnation=lambda: int(self.enrolled),
            report_exit=lambda pid, code: None,
        )
        self.launches = 0
        launch = self._service.service.handlers[methods.LAUNCH]

        def counted(request: agent_wire.LaunchRequest, context: Context) -> agent_wire.LaunchReply:
            self.launches += 1
            reply = launch(request, context)
            assert isinstance(reply, agent_wire.LaunchReply)
            return reply

        service = Service("Agent")
        service.on(methods.LAUNCH, counted)
        service.on(methods.WATCH, self._service.service.handlers[methods.WATCH])  # type: ignore[arg-type]
        service.on(methods.STOP, self._service.service.handlers[methods.STOP])  # type: ignore[arg-type]
        self._listener = GrpcServer(address, [service], None, threads=8)
        self.address = self._listener.address
        self._listener.start()

    def end(self) -> None:
        self._listener.stop()
        self._service.close(grace_ms=0)


class FollowedRun:
    """A ScriptRun that a thread follows, as `shardyard run` does."""

    def __init__(self, coordinator: str, agent: str, script: Path, **yard: int) -> None:
        settings = Settings(
            membership=MembershipSettings(coordinator_grace_ms=GRACE_MS),
            yard=YardSettings.model_validate(yard),
        )
        self.notes: list[str] = []
        self.lines: list[str] = []
        self.signals = StopSignals()
        self.ended: agent_wire.LaunchEnded | None = None
        self.error: errors.ShardyardError | None = None
        wanted = Script(script, (), {}, workers=1, restarts_max=0, restarts_window_ms=60_000)
        self._run = ScriptRun(GrpcNetwork(None), coordinator, agent, wanted, settings)
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def join(self) -> FollowedRun:
        self._thread.join(30)
        assert not self._thread.is_alive(), (self.notes, self.lines)
        return self

    def _follow(self) -> None:
        try:
            self.ended = self._run.follow(self, signals=self.signals, check=list)
        except errors.ShardyardError as error:
            self.error = error
        finally:
            self._run.close()

    def output(self, index: int, standard_error: bool, line: str) -> None:
        self.lines.append(line)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def progress(self, status: wire.StatusReply, pids: frozenset[int], *, last: bool = False) -> None:
        """Nothing is shown."""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(script_module, "SILENT_MS", 200)
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(ENDS_AT_GO))
    return path


@pytest.fixture
def members() -> list[wire.MemberStatus]:
    """What the coordinator knows; a test fills it."""
    return []


@pytest.fixture
def coordinator(members: list[wire.MemberStatus]) -> Iterator[str]:
    service = Service("Coordinator")
    service.on(methods.STATUS, lambda request, context: wire.StatusReply(members=members))
    listener = GrpcServer("127.0.0.1:0", [service], None, threads=2)
    listener.start()
    yield listener.address
    listener.stop()


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Callable[..., Agent]]:
    made: list[Agent] = []

    def start(address: str = "127.0.0.1:0", *, enrolled: bool = True) -> Agent:
        made.append(Agent(tmp_path, address, enrolled=enrolled))
        return made[-1]

    yield start
    for agent in made:
        agent.end()


def begun(script: Path) -> int:
    """How many processes of the script have begun."""
    file = script.with_name("begun")
    return len(file.read_text()) if file.exists() else 0


def test_launch_waits_for_an_agent_that_is_being_restarted(
    script: Path, coordinator: str, agents: Callable[..., Agent]
) -> None:
    first = agents()
    run = FollowedRun(coordinator, first.address, script)
    wait_until(lambda: begun(script) == 1, "the script to begin")
    first.end()
    wait_until(lambda: any("waiting for it, at most 1.5 s" in note for note in run.notes), "the silence to be said")
    second = agents(first.address)
    wait_until(lambda: begun(script) == 2, "the script to be launched again")
    script.with_name("go").touch()
    run.join()
    assert run.error is None
    assert run.ended is not None
    assert run.ended.exit_code == 0
    assert run.lines == ["done"]
    assert second.launches == 1
    assert any(
        note.endswith("died, and the script's processes with it; the script is launched again") for note in run.notes
    )


def test_launch_begins_when_the_agent_has_enrolled(
    script: Path, coordinator: str, agents: Callable[..., Agent]
) -> None:
    script.with_name("go").touch()
    agent = agents(enrolled=False)
    run = FollowedRun(coordinator, agent.address, script)
    wait_until(lambda: any("has not registered yet" in note for note in run.notes), "the wait to be said")
    agent.enrolled = True
    assert run.join().ended is not None
    assert begun(script) == 1


def test_launch_that_finds_no_agent_again_ends_with_an_error_that_says_how_long_it_waited(
    script: Path, coordinator: str, agents: Callable[..., Agent]
) -> None:
    agent = agents()
    run = FollowedRun(coordinator, agent.address, script)
    wait_until(lambda: begun(script) == 1, "the script to begin")
    agent.end()
    begin = time.monotonic()
    error = run.join().error
    assert GRACE_MS / 1000 - 0.5 < time.monotonic() - begin < 10
    assert isinstance(error, errors.Unavailable)
    assert "did not answer for 2 s" in error.what
    assert "membership.coordinator_grace_ms" in str(error)


def test_launch_goes_on_at_the_agent_that_has_taken_the_place_of_its_own(
    script: Path, coordinator: str, members: list[wire.MemberStatus], agents: Callable[..., Agent]
) -> None:
    first, second = agents(), agents()
    members.append(wire.MemberStatus(role=wire.ROLE_AGENT, address=first.address, incarnation=1))
    members.append(wire.MemberStatus(role=wire.ROLE_AGENT, address=second.address, incarnation=2))
    run = FollowedRun(coordinator, first.address, script)
    wait_until(lambda: begun(script) == 1, "the script to begin")
    first.end()
    del members[0]
    wait_until(lambda: begun(script) == 2, "the script to be launched again")
    script.with_name("go").touch()
    assert run.join().ended is not None
    assert second.launches == 1


def test_agent_that_dies_again_and_again_is_given_up(
    script: Path, coordinator: str, agents: Callable[..., Agent]
) -> None:
    agent = agents()
    run = FollowedRun(coordinator, agent.address, script, restarts_max=1)
    for lives in (1, 2):
        wait_until(lambda lives=lives: begun(script) == lives, "the script to begin")  # type: ignore[misc]
        agent.end()
        agent = agents(agent.address)
    error = run.join().error
    assert isinstance(error, errors.Unavailable)
    assert "not launched again: it was restarted once within 3600 s (yard.restarts_max)" in error.what
    assert begun(script) == 2


def test_request_that_is_sent_again_launches_once(script: Path, agents: Callable[..., Agent]) -> None:
    plan = AgentPlan("127.0.0.1:9", 1, script.parent)
    service = AgentService(plan, incarnation=lambda: 1, report_exit=lambda pid, code: None)
    request = agent_wire.LaunchRequest(script=str(script), working_directory=str(script.parent), key=7)
    try:
        first = service.launch(request)
        assert service.launch(request) is first
        assert (
            service.launch(agent_wire.LaunchRequest(script=request.script, working_directory="/", key=8)) is not first
        )
    finally:
        service.close(grace_ms=0)


def test_second_signal_kills_a_script_at_once(
    script: Path, agents: Callable[..., Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script_module, "GRACE_MS", 60_000)
    script.write_text(
        "import os, signal, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: os.write(1, b'told\\n'))\n"
        "print(os.getpid(), flush=True)\n"
        "time.sleep(600)\n"
        "time.sleep(600)\n"
    )
    agent = agents()
    run = FollowedRun("127.0.0.1:9", agent.address, script)
    wait_until(lambda: len(run.lines) == 1, "the script to begin")
    run.signals.stop.set()
    wait_until(lambda: run.lines[1:] == ["told"], "the script to be told to end")
    assert not is_gone(int(run.lines[0]))
    run.signals.hurry.set()
    run.join()
    assert is_gone(int(run.lines[0]))
