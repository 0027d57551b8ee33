"""What an agent takes and refuses, and the small parts that carry a launch's output."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardyard.domain import errors, limits
from shardyard.transport.in_process import InProcessNetwork
from shardyard.transport.interfaces import Context
from shardyard.wire import methods
from shardyard.wire.v1 import agent_pb2 as wire
from shardyard_worker.agent import launch_folders
from shardyard_worker.agent import service as agent_service
from shardyard_worker.agent.event_log import EventLog
from shardyard_worker.agent.launch import read_error_file
from shardyard_worker.agent.pipes import LineSplitter
from shardyard_worker.agent.service import AgentPlan, AgentService

REMOTE = Context(peer="ipv4:10.1.2.3:999", is_active=lambda: True)
LOCAL = Context(peer="ipv4:127.0.0.1:999", is_active=lambda: True)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text("print('ran')\n")
    return path


@pytest.fixture
def service(tmp_path: Path) -> Iterator[AgentService]:
    made = AgentService(
        AgentPlan("127.0.0.1:1", 1, tmp_path), incarnation=lambda: 3, report_exit=lambda pid, code: None
    )
    yield made
    made.close(grace_ms=100)


def ask(service: AgentService, request: wire.LaunchRequest, context: Context = LOCAL) -> wire.LaunchReply:
    reply = service.service.handlers[methods.LAUNCH](request, context)
    assert isinstance(reply, wire.LaunchReply)
    return reply


def good(script: Path) -> wire.LaunchRequest:
    return wire.LaunchRequest(script=str(script), working_directory=str(script.parent))


def describe(service: AgentService) -> wire.DescribeAgentReply:
    reply = service.service.handlers[methods.DESCRIBE_AGENT](wire.DescribeAgentRequest(), REMOTE)
    assert isinstance(reply, wire.DescribeAgentReply)
    return reply


def changed(script: Path, fields: dict[str, object]) -> wire.LaunchRequest:
    request = good(script)
    request.MergeFrom(wire.LaunchRequest(**fields))  # type: ignore[arg-type]
    return request


@pytest.mark.parametrize(
    ("fields", "error", "said"),
    [
        ({"script": "train.py"}, errors.InvalidRequest, "absolute path"),
        ({"script": "/nowhere/train.py"}, errors.InvalidRequest, "not a file"),
        ({"script": "/tmp"}, errors.InvalidRequest, "not a file"),
        ({"script": "/" + "x" * limits.TEXT_CHARACTERS_MAX}, errors.TooLarge, "characters"),
        ({"script": "/a\0b"}, errors.MalformedPayload, "cannot be shown"),
        ({"working_directory": "here"}, errors.InvalidRequest, "absolute path"),
        ({"working_directory": "/nowhere"}, errors.InvalidRequest, "not a folder"),
        ({"workers": limits.LAUNCH_WORKERS_MAX + 1}, errors.TooLarge, "workers"),
        ({"restarts_max": 1_001}, errors.TooLarge, "restarts"),
        ({"restarts_max": 1}, errors.InvalidRequest, "restarts without a time"),
        ({"arguments": ["a\0"]}, errors.InvalidRequest, "zero character"),
        ({"arguments": ["x"] * 4_097}, errors.TooLarge, "4097 arguments"),
        ({"arguments": ["x" * limits.MIB, "y"]}, errors.TooLarge, "characters"),
        ({"environment": {"A=B": "1"}}, errors.InvalidRequest, "A=B"),
        ({"environment": {"": "1"}}, errors.InvalidRequest, "name of an environment variable"),
        ({"environment": {"A": "\0"}}, errors.InvalidRequest, "zero character"),
        ({"environment": {"A": "x" * limits.MIB}}, errors.TooLarge, "environment"),
    ],
)
def test_bad_launch_is_refused_and_starts_nothing(
    service: AgentService, script: Path, fields: dict[str, object], error: type[errors.ShardyardError], said: str
) -> None:
    with pytest.raises(error, match=said):
        ask(service, changed(script, fields))
    assert list(describe(service).launches) == []


def test_launch_nobody_knows_is_not_found(service: AgentService) -> None:
    with pytest.raises(errors.NotFound, match="launch 77"):
        service.service.handlers[methods.STOP](wire.StopRequest(launch=77), LOCAL)
    with pytest.raises(errors.NotFound, match="launch 77"):
        list(service.service.handlers[methods.WATCH](wire.WatchRequest(launch=77), LOCAL))


def test_closed_agent_launches_nothing(service: AgentService, script: Path) -> None:
    service.close(grace_ms=1)
    with pytest.raises(errors.NotReady):
        ask(service, good(script))


def test_agent_bounds_the_launches_it_runs(
    service: AgentService, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script.write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setattr(agent_service, "LAUNCHES_RUNNING_MAX", 2)
    ask(service, good(script))
    ask(service, good(script))
    with pytest.raises(errors.NotReady, match="runs 2 launches"):
        ask(service, good(script))


def test_agent_forgets_old_launches(service: AgentService, script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_folders, "ENDED_MAX", 2)
    numbers = []
    for _ in range(4):
        numbers.append(ask(service, good(script)).launch)
        list(service.service.handlers[methods.WATCH](wire.WatchRequest(launch=numbers[-1]), LOCAL))
    assert sorted(launch.launch for launch in describe(service).launches) == sorted(numbers[-2:])


def test_watcher_that_has_gone_ends_the_watch(service: AgentService, script: Path) -> None:
    script.write_text("import time\nprint('up', flush=True)\ntime.sleep(600)\n")
    launch = ask(service, good(script)).launch
    here = threading.Event()
    here.set()
    watch = service.service.handlers[methods.WATCH](
        wire.WatchRequest(launch=launch), Context(peer="in-process", is_active=here.is_set)
    )
    seen = [next(watch), next(watch)]
    assert [event.number for event in seen] == [0, 1]
    assert seen[1].output.line == "up"
    here.clear()
    assert list(watch) == []


def test_watch_goes_on_where_it_broke_off(service: AgentService, script: Path) -> None:
    network = InProcessNetwork()
    network.listen("agent:1", [service.service])
    peer = network.connect("agent:1", name="agent")
    launch = peer.call(methods.LAUNCH, good(script), timeout_ms=1_000).launch
    whole = list(peer.receive(methods.WATCH, wire.WatchRequest(launch=launch), timeout_ms=10_000))
    kinds = [event.WhichOneof("event") for event in whole]
    assert kinds == ["started", "output", "exited", "ended"]
    rest = list(peer.receive(methods.WATCH, wire.WatchRequest(launch=launch, next_event=2), timeout_ms=10_000))
    assert rest == whole[2:]
    past = list(peer.receive(methods.WATCH, wire.WatchRequest(launch=launch, next_event=99), timeout_ms=10_000))
    assert past == []


# ---- events


def output(line: str) -> wire.LaunchEvent:
    return wire.LaunchEvent(output=wire.ProcessOutput(line=line))


def ending() -> wire.LaunchEvent:
    return wire.LaunchEvent(ended=wire.LaunchEnded())


def numbers(log: EventLog) -> list[int]:
    return [event.number for event in log.after(0, wait_ms=0)]


def test_log_numbers_events_from_zero() -> None:
    log = EventLog()
    given = [wire.LaunchEvent(started=wire.ProcessStarted(pid=1)), output("x")]
    for event in given:
        log.append(event)
    assert numbers(log) == [0, 1]
    assert log.after(0, wait_ms=0) == given
    assert log.after(1, wait_ms=0) == given[1:]
    assert log.after(2, wait_ms=0) == []


def test_log_drops_the_oldest_beyond_its_bounds() -> None:
    log = EventLog(events_max=3, characters_max=10)
    for number in range(6):
        log.append(output(str(number)))
    assert numbers(log) == [3, 4, 5]
    log.append(output("x" * 9))
    assert numbers(log) == [5, 6]
    log.append(ending())
    log.append(output("y" * 50))
    assert numbers(log) == [8]
    assert log.ended


def test_waiting_watcher_gets_the_next_event() -> None:
    log = EventLog()
    got: list[list[wire.LaunchEvent]] = []
    waiter = threading.Thread(target=lambda: got.append(log.after(0, wait_ms=20_000)))
    waiter.start()
    log.append(ending())
    waiter.join(10)
    assert got == [[ending()]]


# ---- lines


def test_lines_survive_any_cut_between_reads() -> None:
    data = "één\r\nzwei\n\ndrei\rvier".encode()
    for cut in range(len(data) + 1):
        splitter = LineSplitter()
        lines = splitter.feed(data[:cut]) + splitter.feed(data[cut:]) + splitter.finish()
        assert lines == ["één", "zwei", "", "drei", "vier"], cut


def test_long_line_comes_in_pieces_and_is_not_kept_whole() -> None:
    splitter = LineSplitter(characters_max=10)
    assert splitter.feed(b"x" * 25) == ["x" * 10, "x" * 10, "x" * 5]
    assert splitter.feed(b"end\n") == ["end"]
    assert splitter.feed(b"y" * 11 + b"\nz") == ["y" * 10, "y"]
    assert splitter.finish() == ["z"]


def test_bytes_that_are_no_text_are_replaced() -> None:
    assert LineSplitter().feed(b"a\xff\n") == ["a\ufffd"]


# ---- error files

WRITTEN = {"time": 5, "type": "ValueError", "message": "m", "traceback": "t", "new_process_helps": False}


def test_error_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "e.json"
    path.write_text(json.dumps(WRITTEN | {"new_process_helps": True}))
    error = read_error_file(path)
    assert error is not None
    assert (error.time_s, error.kind, error.message, error.traceback) == (5.0, "ValueError", "m", "t")
    assert error.new_process_helps


def test_lone_surrogate_in_an_error_file_can_be_sent(tmp_path: Path) -> None:
    path = tmp_path / "e.json"
    path.write_text(json.dumps(WRITTEN | {"traceback": "a\udc80b"}))
    error = read_error_file(path)
    assert error is not None
    event = wire.LaunchEvent(ended=wire.LaunchEnded(first_error=error.traceback))
    assert wire.LaunchEvent.FromString(event.SerializeToString()).ended.first_error == "a?b"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b'{"time": "x"}', b"\xff", b"null"])
def test_spoiled_error_file_is_no_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "e.json"
    path.write_bytes(content)
    assert read_error_file(path) is None


def test_absent_error_file_is_no_error(tmp_path: Path) -> None:
    assert read_error_file(tmp_path / "none") is None


def test_agent_loads_no_torch_and_no_training_code() -> None:
    import subprocess
    import sys

    code = (
        "import sys, shardyard_worker.agent.process\n"
        "bad = [m for m in sys.modules if m == 'torch' or (m.startswith('shardyard_worker.') and 'agent' not in m)]\n"
        "sys.exit(repr(bad) if bad else 0)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False, env=dict(os.environ)
    )
    assert ended.returncode == 0, ended.stderr
