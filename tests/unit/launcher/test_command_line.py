"""The command line: what wrong use, wrong settings and failures print, and what the commands are made of."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from rich.console import Console

from shardyard.checkpoints.library import CheckpointLibrary
from shardyard.checkpoints.manifest import Manifest, PartitionEntry, PartitionFile
from shardyard.checkpoints.partition_file import BlockState, PartitionState
from shardyard.config.configuration import Flag, load
from shardyard.config.settings import JobSettings, MembershipSettings
from shardyard.domain import errors
from shardyard.domain.consistency import UpdateMode
from shardyard.domain.ids import JobId, PartitionId, Version
from shardyard.domain.optimizers import OptimizerSpec, make_group
from shardyard.domain.variables import DType, VariableSpec
from shardyard.runtime.clock import SystemClock
from shardyard.storage.storage import LocalStorage
from shardyard.transport.error_codes import to_detail
from shardyard.transport.grpc_client import GrpcNetwork
from shardyard.transport.grpc_server import GrpcServer
from shardyard.transport.interfaces import Context, Service
from shardyard.wire import methods
from shardyard.wire.v1 import common_pb2 as common
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard.wire.v1 import parameter_server_pb2 as server_wire
from shardyard_coordinator.placement.placement import plan
from shardyard_coordinator.service.journal import Journal
from shardyard_coordinator.service.service import Coordinator
from shardyard_launcher.cli import main
from shardyard_launcher.commands.roles import addresses, exit_status
from shardyard_launcher.scripts.progress import FirstStep, JobChoice, LiveDisplay, PlainDisplay, progress_line
from shardyard_launcher.scripts.script import launch_environment
from shardyard_launcher.status.as_json import to_json
from shardyard_launcher.status.as_tables import as_tables
from shardyard_launcher.status.report import LocalReport, YardReport
from shardyard_launcher.status.words import describe_size
from shardyard_launcher.terminal.options import load_given
from shardyard_launcher.yard.role_process import RoleProcess, RunningRole, tail
from shardyard_launcher.yard.state_file import YardState, forget_state, locked, read_state
from shardyard_launcher.yard.temp_folder import run_folder
from shardyard_worker.agent.error_report import ShownOutput
from tests.support.checkpoints import write_state


@pytest.fixture(autouse=True)
def _bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty working directory, and no setting from outside."""
    for name in list(os.environ):
        if name.startswith("SHARDYARD"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["frob"], "No such command 'frob'"),
        (["up", "--frob"], "No such option"),
        (["run", "--worker", "1", "script.py"], "--workers"),
        (["run", "--bogus", "script.py"], "--bogus"),
        (["agent", "--frob", "--", "script.py"], "--frob"),
        (["run"], "Missing argument"),
        (["run", "nothing.py"], "there is no script nothing.py"),
        (["server"], "the coordinator's address is missing"),
        (["agent"], "the coordinator's address is missing"),
        (["server", "--coordinator", "nowhere"], "expected HOST:PORT"),
        (["coordinator", "--bind", "7070"], "expected HOST:PORT"),
        (
            ["coordinator", "--bind", "0.0.0.0:7070", "--advertise", "0.0.0.0:7070"],
            "other processes cannot reach this one",
        ),
        (["agent", "--coordinator", "a:1", "--workers", "0"], "0 is not in the range"),
        (["up", "--set", "yard.servers=0"], "yard.servers"),
        (["up", "--set", "yard.server=1"], "did you mean"),
        (["config", "explain", "-c", "none.yaml"], "none.yaml: no such file"),
        (["supervisor", "--state", "."], "does not name this process as the supervisor"),
        (["doctor", "--coordinator", "nowhere"], "expected HOST:PORT"),
        (["checkpoint", "take", "--coordinator", "nowhere"], "expected HOST:PORT"),
        (["checkpoint", "restore", "--cancel"], "Missing argument 'JOB'"),
        (["checkpoint", "restore", "digits", "--number", "none"], "'none' is not a valid integer"),
    ],
)
def test_wrong_use_is_told_and_ends_with_2(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert "rror: " in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""


def test_status_without_a_yard_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status"]) == 1
    assert re.search(r"error: no yard is up.*\n  what to do: .*shardyard up", capsys.readouterr().err)


def test_status_of_a_coordinator_that_is_not_there_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        assert main(["status", "--coordinator", f"127.0.0.1:{port}"]) == 1
    assert f"coordinator at 127.0.0.1:{port} does not answer" in capsys.readouterr().err


# ---- checkpoints of a yard


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[str]:
    """The address of one that has a journal, and no servers."""
    journal = Journal(tmp_path / "journal")
    network = GrpcNetwork()
    serving = Coordinator(network=network, journal=journal, clock=SystemClock(), membership=MembershipSettings())
    listener = GrpcServer("127.0.0.1:0", [serving.service], threads=2)
    try:
        serving.start()
        listener.start()
        yield listener.address
    finally:
        listener.stop()
        serving.stop()
        journal.close()


@contextmanager
def serving(handlers: dict[Any, Callable[[Any, Context], Any]]) -> Iterator[str]:
    """The address of a coordinator that has only these methods."""
    service = Service("Coordinator")
    for method, handler in handlers.items():
        service.on(method, handler)
    listener = GrpcServer("127.0.0.1:0", [service], threads=1)
    listener.start()
    try:
        yield listener.address
    finally:
        listener.stop()


def write_checkpoint(url: Path, number: int) -> None:
    """Of a job named digits, which has done nothing."""
    library = CheckpointLibrary(LocalStorage(url))
    layout = plan(
        [VariableSpec("w", DType.FLOAT32, (8,))],
        OptimizerSpec("sgd", (make_group("sgd", {}),)),
        partitions=1,
        block_bytes=256,
    )
    block = BlockState(0, np.zeros(8, np.float32), {}, 0)
    state = PartitionState(PartitionId(0), Version(1, 0), (block,))
    taken = PartitionFile(write_state(library, "digits", number, state), (0,))
    entries = (PartitionEntry(state.partition, state.version, (taken,)),)
    settings = JobSettings(name="digits").model_dump(mode="json")
    ledger = {"entries": [], "closed": 0, "token": 0}
    manifest = Manifest(
        number,
        "digits",
        JobId(1),
        0,
        settings,
        UpdateMode.ASYNC,
        0,
        "2026-11-21T06:00:00+00:00",
        layout,
        entries,
        ledger,
    )
    library.commit(manifest)


def test_order_for_the_next_run_is_given_and_taken_back(
    coordinator: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "kept"
    for number in (3, 4):
        write_checkpoint(kept, number)
    restore = ["checkpoint", "restore", "digits", "--coordinator", coordinator]
    assert main([*restore, "--cancel"]) == 1
    assert "no restore was ordered for the next run of job 'digits'" in capsys.readouterr().err
    assert main([*restore, "--number", "3", "--url", str(kept)]) == 0
    assert capsys.readouterr().out == f"job digits starts its next run from checkpoint 3, step 0, in {kept}\n"
    assert main([*restore, "--cancel"]) == 0
    assert capsys.readouterr().out == "the next run of job digits starts from the beginning\n"
    assert main([*restore, "--cancel"]) == 1, "it was taken back"


def test_damaged_checkpoint_is_passed_over_and_told(
    coordinator: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "kept"
    for number in (3, 4):
        write_checkpoint(kept, number)
    next((kept / "digits" / f"{4:012d}").glob("*.safetensors")).write_bytes(b"")
    assert main(["checkpoint", "restore", "digits", "--url", str(kept), "--coordinator", coordinator]) == 0
    captured = capsys.readouterr()
    assert "from checkpoint 3" in captured.out
    assert "checkpoint 4 is damaged and is not used" in captured.err


def test_checkpoint_of_what_does_not_run_is_refused(coordinator: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "take", "digits", "--coordinator", coordinator]) == 1
    assert "no job 'digits'" in capsys.readouterr().err


@pytest.mark.parametrize("fails", [False, True])
def test_checkpoint_is_asked_for_until_it_is_there_or_was_refused(
    fails: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Asked first for the only job, then for what became of the ticket."""
    asked: list[tuple[str, int]] = []

    def take(request: wire.TakeCheckpointRequest, _: Context) -> wire.TakeCheckpointReply:
        asked.append((request.job_name, request.ticket))
        if len(asked) < 3:
            return wire.TakeCheckpointReply(job_name="digits", ticket=7)
        if fails:
            return wire.TakeCheckpointReply(failure=to_detail(errors.StorageUnavailable("no space left")))
        return wire.TakeCheckpointReply(job_name="digits", done=True, number=7, step=4_950, url="/kept")

    with serving({methods.TAKE_CHECKPOINT: take}) as address:
        assert main(["checkpoint", "take", "--coordinator", address]) == int(fails)
    assert asked == [("", 0), ("digits", 7), ("digits", 7)]
    captured = capsys.readouterr()
    if fails:
        assert "no space left" in captured.err
    else:
        assert captured.out == "checkpoint 7 of job digits, step 4,950, in /kept\n"


@pytest.mark.parametrize("state", [wire.JOB_STATE_FINISHED, wire.JOB_STATE_FAILED])
def test_stop_waits_until_the_job_has_ended(state: wire.JobState, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[tuple[str, str]] = []
    states = [wire.JOB_STATE_RUNNING, wire.JOB_STATE_FINISHING, state]

    def stop(request: wire.StopJobRequest, _: Context) -> wire.StopJobReply:
        asked.append((request.job_name, request.reason))
        return wire.StopJobReply(job_name="digits", job=7, stop=wire.Stop(reason=request.reason), first=True)

    def status(request: wire.StatusRequest, _: Context) -> wire.StatusReply:
        failure = common.ErrorDetail(what="no room") if state == wire.JOB_STATE_FAILED else None
        job = wire.JobStatus(job=7, name="digits", state=states[0], step=4_950, failure=failure)
        del states[: len(states) > 1]
        return wire.StatusReply(jobs=[wire.JobStatus(job=6, name="digits", state=wire.JOB_STATE_FAILED), job])

    with serving({methods.STOP_JOB: stop, methods.STATUS: status}) as address:
        code = main(["stop", "digits", "--reason", "tea", "--wait", "--coordinator", address])
    assert asked == [("digits", "tea")]
    captured = capsys.readouterr()
    told = "job digits is told to stop\n"
    if state == wire.JOB_STATE_FINISHED:
        assert (code, captured.out) == (0, f"{told}job digits is finished, at step 4,950\n")
    else:
        assert (code, captured.out, captured.err) == (1, told, "job digits has failed: no room\n")


def test_stop_of_a_job_that_stops_already_says_who_told_it(capsys: pytest.CaptureFixture[str]) -> None:
    reply = wire.StopJobReply(
        job_name="digits", job=7, stop=wire.Stop(reason="nan", worker=(1 << 32) + 4, settled=True, step=1_200)
    )
    with serving({methods.STOP_JOB: lambda request, _: reply}) as address:
        assert main(["stop", "--coordinator", address]) == 0
    said = "job digits was told to stop before, by worker 1.4: nan; before step 1,200\n"
    assert capsys.readouterr().out == said


def test_stop_of_what_does_not_run_is_refused(coordinator: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stop", "digits", "--coordinator", coordinator]) == 1
    assert "no job 'digits'" in capsys.readouterr().err


BOUNDED = wire.Consistency(number=2, mode=wire.CONSISTENCY_MODE_BOUNDED, staleness=3)


def test_set_waits_no_longer_for_what_somebody_has_taken_back(capsys: pytest.CaptureFixture[str]) -> None:
    standings = [wire.SwitchStatus(consistency=BOUNDED, step=0), wire.SwitchStatus()]

    def switch(_: wire.SwitchConsistencyRequest, __: Context) -> wire.SwitchConsistencyReply:
        return wire.SwitchConsistencyReply(job_name="digits", job=7, consistency=BOUNDED, first=True)

    def status(_: wire.StatusRequest, __: Context) -> wire.StatusReply:
        job = wire.JobStatus(job=7, name="digits", state=wire.JOB_STATE_RUNNING, consistency=standings.pop(0))
        return wire.StatusReply(jobs=[job])

    with serving({methods.SWITCH_CONSISTENCY: switch, methods.STATUS: status}) as address:
        code = main(["set", "consistency.mode=bounded", "--wait", "--coordinator", address])
    assert (code, standings) == (1, [])
    assert "keeps its mode: the change was cancelled" in capsys.readouterr().err


@pytest.mark.parametrize("ends", [False, True])
def test_set_waits_until_all_servers_and_workers_go_by_it(ends: bool, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[wire.SwitchConsistencyRequest] = []
    former = wire.Consistency(number=1, mode=wire.CONSISTENCY_MODE_ASYNC)
    standings = [
        wire.SwitchStatus(consistency=former, servers=True),
        wire.SwitchStatus(consistency=BOUNDED),
        wire.SwitchStatus(consistency=BOUNDED, servers=True, behind=[7]),
        wire.SwitchStatus(consistency=BOUNDED, servers=True),
    ]
    seen = 0

    def switch(request: wire.SwitchConsistencyRequest, _: Context) -> wire.SwitchConsistencyReply:
        asked.append(request)
        return wire.SwitchConsistencyReply(job_name="digits", job=7, consistency=BOUNDED, first=True)

    def status(request: wire.StatusRequest, _: Context) -> wire.StatusReply:
        nonlocal seen
        state = wire.JOB_STATE_FINISHED if ends and seen == 2 else wire.JOB_STATE_RUNNING
        job = wire.JobStatus(job=7, name="digits", state=state, consistency=standings[seen])
        seen += 1
        return wire.StatusReply(jobs=[job])

    what = ["digits", "consistency.mode=bounded", "job.consistency.staleness=3"]
    with serving({methods.SWITCH_CONSISTENCY: switch, methods.STATUS: status}) as address:
        code = main(["set", *what, "--wait", "--coordinator", address])
    assert asked == [wire.SwitchConsistencyRequest(job_name="digits", mode=wire.CONSISTENCY_MODE_BOUNDED, staleness=3)]
    captured = capsys.readouterr()
    told = "job digits changes to bounded, 3 steps\n"
    if ends:
        assert (code, seen, captured.out, captured.err) == (1, 3, told, "job digits has ended\n")
    else:
        assert (code, seen) == (0, len(standings))
        assert captured.out == f"{told}all servers and workers of job digits have changed\n"


def test_set_says_what_is_in_force_already_and_asks_for_nothing_that_was_not_given(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked: list[wire.SwitchConsistencyRequest] = []
    reply = wire.SwitchConsistencyReply(job_name="digits", job=7, consistency=BOUNDED)

    def switch(request: wire.SwitchConsistencyRequest, _: Context) -> wire.SwitchConsistencyReply:
        asked.append(request)
        return reply

    with serving({methods.SWITCH_CONSISTENCY: switch}) as address:
        assert main(["set", "consistency.staleness=3", "--coordinator", address]) == 0
    assert asked == [wire.SwitchConsistencyRequest(staleness=3)]
    assert capsys.readouterr().out == "job digits already uses bounded, 3 steps\n"


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        (["digits"], "nothing to set"),
        (["consistency.mode=async", "digits"], "'digits': expected NAME=VALUE"),
        (["a", "b", "consistency.mode=async"], "'b': expected NAME=VALUE"),
        (["consistency.steps=3"], "'consistency.steps' cannot be changed in a running job"),
        (["consistency.mode=hurried"], "shardyard set consistency.mode"),
        (["consistency.staleness=-1"], "shardyard set consistency.staleness"),
    ],
)
def test_set_refuses_what_cannot_be_set_before_it_asks_anybody(
    what: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["set", *what, "--coordinator", "127.0.0.1:1"]) == 2
    assert expected in capsys.readouterr().err


def test_set_of_what_does_not_run_is_refused(coordinator: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["set", "digits", "consistency.mode=async", "--coordinator", coordinator]) == 1
    assert "no job 'digits'" in capsys.readouterr().err


def test_port_in_use_says_what_to_do_and_starts_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["up", "--set", f"yard.coordinator_port={port}"]) == 1
        captured = capsys.readouterr()
        assert f"cannot listen on 127.0.0.1:{port}" in captured.err
        assert "--set yard.coordinator_port" in captured.err
        assert captured.out == ""
        assert not (tmp_path / ".shardyard").exists()
        (tmp_path / ".shardyard").mkdir()
        assert main(["up", "--set", f"yard.coordinator_port={port}"]) == 1
    assert capsys.readouterr().out == ""
    assert not (tmp_path / ".shardyard" / "logs").exists()


def test_down_without_a_yard_is_no_error(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["down"]) == 0
    assert "no yard is up" in capsys.readouterr().out
    assert not (tmp_path / ".shardyard").exists()


def test_purge_without_a_yard_says_what_it_deletes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / ".shardyard" / "logs").mkdir(parents=True)
    assert main(["down", "--purge"]) == 0
    assert capsys.readouterr().out == "no yard is up in .shardyard\ndeleted .shardyard with its logs and journal\n"
    assert not (tmp_path / ".shardyard").exists()


def test_config_explain_shows_where_values_come_from(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.yaml").write_text("yard:\n  servers: 5\n")
    monkeypatch.setenv("SHARDYARD__JOB__SEED", "9")
    assert main(["config", "explain", "-c", "a.yaml", "--set", "yard.workers=7"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^yard.servers +5 +a.yaml:2 ", shown, re.MULTILINE)
    assert re.search(r"^job.seed +9 +environment SHARDYARD__JOB__SEED ", shown, re.MULTILINE)
    assert re.search(r"^yard.workers +7 +flag --set yard.workers ", shown, re.MULTILINE)


def test_version_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert re.fullmatch(r"shardyard \d+\.\d+\.\d+\S*\n", capsys.readouterr().out)


def test_command_line_loads_no_role_before_it_is_needed() -> None:
    code = (
        "import sys, shardyard_launcher.cli\n"
        "heavy = {'grpc', 'torch', 'numpy', 'numba', 'pydantic', 'rich', 'google.protobuf'} & set(sys.modules)\n"
        "sys.exit(repr(heavy) if heavy else 0)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr


# ---- addresses


def test_bound_address_is_the_one_told_unless_another_is_given() -> None:
    assert addresses("127.0.0.1:0", None) == ("127.0.0.1:0", None)
    assert addresses("127.0.0.1:70", "box:71") == ("127.0.0.1:70", "box:71")
    assert addresses("127.0.0.1:70", "box:0") == ("127.0.0.1:70", "box:70")


def test_who_listens_everywhere_tells_the_name_of_the_machine() -> None:
    assert addresses("0.0.0.0:7070", None) == ("0.0.0.0:7070", f"{os.uname().nodename}:7070")
    bind, told = addresses("0.0.0.0:0", None)
    host, port = bind.split(":")
    assert host == "0.0.0.0"
    assert int(port) > 0
    assert told == f"{os.uname().nodename}:{port}"


def test_signal_becomes_an_exit_status_as_in_a_shell() -> None:
    assert [exit_status(code) for code in (0, 3, -9)] == [0, 3, 137]


# ---- what a script inherits


def test_script_on_this_machine_inherits_the_environment() -> None:
    environment = {
        "HOME": "/h",
        "SHARDYARD_COORDINATOR": "other:1",
        "SHARDYARD_AGENT": "1",
        "SHARDYARD_JOB": "mine",
        "SHARDYARD__JOB__SEED": "1",
    }
    got = launch_environment(environment, load(), config=None, sets=[("job.seed", Flag("2", "--set"))], whole=True)
    assert got == {"HOME": "/h", "SHARDYARD_JOB": "mine", "SHARDYARD__JOB__SEED": "2"}


def test_script_on_another_machine_inherits_settings_alone() -> None:
    environment = {"HOME": "/h", "SHARDYARD_JOB": "mine"}
    sets = [("job.name", Flag("his", "--set"))]
    got = launch_environment(environment, load(), config="a.yaml", sets=sets, whole=False)
    assert got == {"SHARDYARD_CONFIG": os.path.abspath("a.yaml"), "SHARDYARD__JOB__NAME": "his"}


def test_expected_workers_of_a_file_win_over_those_of_one_agent(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("job:\n  workers_expected: 8\n")
    got = launch_environment({}, load(tmp_path / "a.yaml"), config="a.yaml", sets=[], whole=False)
    assert got["SHARDYARD__JOB__WORKERS_EXPECTED"] == "8"


def test_log_format_of_a_command_is_that_of_its_training_processes() -> None:
    given = load_given(None, ("log.format=human",), {"log.format": "json"})
    assert given.loaded.settings.log.format == "json"
    got = launch_environment({}, given.loaded, config=None, sets=given.sets, whole=False)
    assert got == {"SHARDYARD__LOG__FORMAT": "json"}
    given = load_given(None, (), {"log.format": None})
    assert launch_environment({}, given.loaded, config=None, sets=given.sets, whole=False) == {}


# ---- the folder of a run


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


# ---- state files


def role(pid: int, created_s: float, log: Path) -> RoleProcess:
    return RoleProcess("server-0", "server", pid, created_s, log, "127.0.0.1:5")


def test_state_comes_back_as_it_was_written(tmp_path: Path) -> None:
    state = YardState((role(5, 1.5, tmp_path / "x.log"),))
    state.write(tmp_path)
    assert read_state(tmp_path) == state
    assert state.address_of("server") == "127.0.0.1:5"
    assert state.address_of("agent") == ""
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


# ---- progress


def yard_status(state: wire.JobState = wire.JOB_STATE_RUNNING) -> wire.StatusReply:
    return wire.StatusReply(
        term=1,
        uptime_ms=61_000,
        members=[
            wire.MemberStatus(incarnation=1, role=wire.ROLE_SERVER, address="h:1", pid=1, host="h"),
            wire.MemberStatus(incarnation=2, role=wire.ROLE_AGENT, address="h:2", pid=2, host="h"),
            wire.MemberStatus(incarnation=3, role=wire.ROLE_WORKER, pid=3, job=8, step=7, ranks=[0], host="h"),
            wire.MemberStatus(incarnation=4, role=wire.ROLE_WORKER, pid=4, job=9, waiting_for="server 1", host="h"),
        ],
        jobs=[
            wire.JobStatus(job=8, name="other", state=wire.JOB_STATE_RUNNING),
            wire.JobStatus(
                job=9,
                name="mine",
                state=state,
                mode=common.UPDATE_MODE_SYNC,
                logical_ranks=2,
                workers=1,
                step=1200,
                samples=15360,
                samples_per_s=811.6,
                metrics=[wire.Metric(name="loss", value=0.123456)],
                map=common.PartitionMap(
                    generation=1,
                    owners=[
                        common.PartitionOwner(partition=0, server=1, address="h:1"),
                        common.PartitionOwner(partition=1, server=1, address="h:1"),
                    ],
                ),
                feeds=[wire.FeedStatus(feed=0, samples=1797, epochs=2, done=3)],
            ),
        ],
    )


def test_progress_is_that_of_the_job_which_the_script_joined() -> None:
    status, choice = yard_status(), JobChoice()
    assert choice.choose(status, frozenset({99})) is None
    job = choice.choose(status, frozenset({4}))
    assert job is not None
    line = progress_line(status, job)
    assert line == "job mine: step 1,200 | 15,360 samples | 812 samples/s | loss 0.1235 | 1 worker, 1 server"
    del status.members[3]
    assert choice.choose(status, frozenset({4})) == job


def test_progress_before_the_script_has_joined_says_so() -> None:
    assert progress_line(yard_status(), None) == "waiting for the script to join a job | 1 server, 1 agent"


def test_progress_of_an_ended_job_says_how(capsys: pytest.CaptureFixture[str]) -> None:
    display = PlainDisplay(lambda: 1)
    display.progress(yard_status(), frozenset({4}))
    display.progress(yard_status(), frozenset({4}))
    display.progress(yard_status(wire.JOB_STATE_FINISHED), frozenset(), last=True)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert lines[1].endswith("| finished")


def test_the_first_step_of_the_script_is_said_once_with_its_time(capsys: pytest.CaptureFixture[str]) -> None:
    display = FirstStep(PlainDisplay(lambda: 1), began=int(time.time()) - 90)
    before = yard_status()
    before.jobs[1].step = before.jobs[1].samples = 0
    display.progress(before, frozenset({4}))
    assert "first training step" not in capsys.readouterr().out
    display.progress(yard_status(), frozenset({4}))
    said = capsys.readouterr().out.splitlines()[0]
    assert re.fullmatch(r"first training step after [\d.]+ s; with the installation, after 9\d s", said)
    display.progress(yard_status(), frozenset({4}))
    assert "first training step" not in capsys.readouterr().out


def test_output_names_its_process_where_there_are_several(capsys: pytest.CaptureFixture[str]) -> None:
    PlainDisplay(lambda: 1).output(0, False, "alone")
    PlainDisplay(lambda: 2).output(1, True, "one of two")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("alone\n", "[1] one of two\n")


def test_terminal_shows_output_above_a_line_of_progress() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100)
    with LiveDisplay(lambda: 2, console) as display:
        display.output(1, False, "[bold]not markup[/bold] \x1b[31mred\x1b[0m")
        display.progress(yard_status(), frozenset({4}))
    shown = plain(stream)
    assert "[1] [bold]not markup[/bold] red\n" in shown
    assert shown.rstrip().endswith(
        "job mine: step 1,200 | 15,360 samples | 812 samples/s | loss 0.1235 | 1 worker, 1 server"
    )


def test_progress_on_a_narrow_terminal_is_one_row_and_stays_once() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=40)
    whole = "job mine: step 1,200 | 15,360 samples | 812 samples/s | loss 0.1235 | 1 worker, 1 server"
    with LiveDisplay(lambda: 1, console) as display:
        for _ in range(3):
            display.progress(yard_status(), frozenset({4}))
        display.output(0, False, "printed")
        display.progress(yard_status(), frozenset({4}), last=True)
        rows = re.split(r"[\r\n]+", plain(stream))
        assert max(map(len, rows)) <= 40
        assert sum(row.startswith("job mine") for row in rows) == 2  # when it came, and below the output
    assert plain(stream).count(whole) == 1
    assert plain(stream).endswith(f"{whole}\n")


def plain(stream: io.StringIO) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())


# ---- the first error, told after the output

TRACEBACK = [
    "Traceback (most recent call last):",
    '  File "a.py", line 1, in <module>',
    "    f()",
    "ValueError: one",
    "two",
]


def test_traceback_that_was_shown_is_pointed_at() -> None:
    shown = ShownOutput()
    for line in ["before", *TRACEBACK, "after"]:
        shown.note(1, True, line)
    where = "  its traceback is above, in the lines that begin with [1]"
    assert shown.tell(1, "\n".join(TRACEBACK), several=True).splitlines() == ["  ValueError: one", "  two", where]
    assert shown.tell(1, "\n".join(TRACEBACK), several=False).endswith("\n  its traceback is above")


def test_traceback_that_was_not_shown_is_told_whole() -> None:
    shown = ShownOutput()
    for line in TRACEBACK:
        shown.note(0, True, line)
        shown.note(1, False, line)
        shown.note(2, True, line + " ")
    for index in (1, 2, 3):
        assert shown.tell(index, "\n".join(TRACEBACK), several=True) == "\n".join(TRACEBACK)
    assert shown.tell(0, "", several=True) == ""


# ---- status


def report() -> YardReport:
    said = server_wire.DescribeServerReply(
        server=1,
        pushes_applied=5,
        workers_attached=2,
        workers_streaming=1,
        partitions=[
            server_wire.DescribedPartition(job=9, partition=0, version=common.Version(life=1, number=41)),
            server_wire.DescribedPartition(job=9, partition=1, version=common.Version(life=1, number=40)),
            server_wire.DescribedPartition(job=8, partition=0, version=common.Version(life=1, number=99)),
        ],
    )
    return YardReport("h:7070", yard_status(), {1: said})


def test_status_says_who_has_told_a_job_to_stop_and_why() -> None:
    found = report()
    assert json.loads(to_json(found))["jobs"][1]["stop"] is None
    stop = found.status.jobs[1].stop
    stop.reason = "loss is [nan]"
    for worker, settled, step, said in (
        (0, False, 0, "told to stop by a person: loss is [nan]\n"),
        ((1 << 32) + 4, True, 1_210, "told to stop by worker 1.4: loss is [nan]; before step 1,210\n"),
    ):
        stop.worker, stop.settled, stop.step = worker, settled, step
        shown = io.StringIO()
        Console(file=shown, width=200).print(as_tables(found))
        assert said in re.sub(r" +\n", "\n", shown.getvalue())
        told = json.loads(to_json(found))["jobs"][1]["stop"]
        assert told == {"reason": "loss is [nan]", "worker": worker or None, "step": step or None}


def test_status_says_what_a_job_was_switched_to_and_who_is_behind() -> None:
    found = report()
    assert json.loads(to_json(found))["jobs"][1]["switch"] is None
    fourth, many = (1 << 32) + 4, [(1 << 32) + number for number in range(1, 11)]
    listed = ", ".join(f"1.{number}" for number in range(1, 9))
    for servers, behind, said in (
        (False, [fourth], "switched to bounded, 3 steps; not all servers have changed yet\n"),
        (True, [fourth], "switched to bounded, 3 steps; worker 1.4 has not changed yet\n"),
        (True, many, f"switched to bounded, 3 steps; workers {listed} and 2 more have not changed yet\n"),
        (True, [], "switched to bounded, 3 steps\n"),
    ):
        switch = wire.SwitchStatus(consistency=BOUNDED, servers=servers, behind=behind)
        found.status.jobs[1].consistency.CopyFrom(switch)
        shown = io.StringIO()
        Console(file=shown, width=200).print(as_tables(found))
        assert said in re.sub(r" +\n", "\n", shown.getvalue())
        told = json.loads(to_json(found))["jobs"][1]["switch"]
        assert told == {
            "number": 2,
            "mode": "bounded",
            "staleness": 3,
            "servers": servers,
            "workers_behind": behind,
            "before_step": None,
            "draining": None,
        }


def test_status_says_before_which_step_a_synchronous_job_goes_over() -> None:
    found = report()
    for step, said in (
        (0, "switched to bounded, 3 steps; 2 workers have not reported yet how far they are\n"),
        (1_210, "switched to bounded, 3 steps before step 1,210; its partitions have not changed yet\n"),
    ):
        switch = wire.SwitchStatus(consistency=BOUNDED, behind=[4, 5], step=step)
        found.status.jobs[1].consistency.CopyFrom(switch)
        shown = io.StringIO()
        Console(file=shown, width=200).print(as_tables(found))
        assert said in re.sub(r" +\n", "\n", shown.getvalue())
        assert json.loads(to_json(found))["jobs"][1]["switch"]["before_step"] == (step or None)


def test_status_says_which_data_shards_are_to_be_done_before_a_job_goes_over_to_steps() -> None:
    found = report()
    sync = wire.Consistency(number=3, mode=wire.CONSISTENCY_MODE_SYNC)
    switch = wire.SwitchStatus(consistency=sync, behind=[4], step=0, draining="data shard 0.1.2 (worker 1.4)")
    found.status.jobs[1].consistency.CopyFrom(switch)
    shown = io.StringIO()
    Console(file=shown, width=200).print(as_tables(found))
    assert "switched to sync; first must end: data shard 0.1.2 (worker 1.4)\n" in re.sub(
        r" +\n", "\n", shown.getvalue()
    )
    told = json.loads(to_json(found))["jobs"][1]["switch"]
    assert (told["draining"], told["before_step"]) == ("data shard 0.1.2 (worker 1.4)", None)


def test_status_says_that_a_job_is_hybrid() -> None:
    found, shown = report(), io.StringIO()
    job = found.status.jobs[1]
    job.ClearField("staleness")
    job.mode, job.logical_ranks, job.rows_at_once = common.UPDATE_MODE_SYNC, 4, True
    Console(file=shown, width=200).print(as_tables(found))
    assert "hybrid, 4 ranks" in shown.getvalue()
    assert json.loads(to_json(found))["jobs"][1]["mode"] == "hybrid"


def test_status_shows_what_coordinator_members_and_jobs_wait_for() -> None:
    shown, found = io.StringIO(), report()
    found.status.waiting_for = "the journal j to be written, for 7.0 s"
    found.status.members[0].waiting_for = "step 40 of partition 3, for checkpoint 12, for 6.0 s"
    found.status.jobs[1].waits.append("a server for partition 3, 4, for 5.1 s")
    local = LocalReport(1, (), {}, ("server-1 (pid 4); its log is s.log",))
    found = YardReport(found.coordinator, found.status, found.servers, local)
    Console(file=shown, width=400).print(as_tables(found))
    text = shown.getvalue()
    assert "  waits for the journal j to be written, for 7.0 s\n" in text
    assert "; waits for step 40 of partition 3, for checkpoint 12, for 6.0 s" in " ".join(text.split())
    assert "  waits for a server for partition 3, 4, for 5.1 s\n" in text
    assert "not ready yet: server-1 (pid 4); its log is s.log\n" in text
    document = json.loads(to_json(found))
    assert document["waiting_for"] == "the journal j to be written, for 7.0 s"
    assert document["members"][0]["waiting_for"].startswith("step 40")
    assert document["jobs"][1]["waits"] == ["a server for partition 3, 4, for 5.1 s"]
    assert document["local"]["unready"] == ["server-1 (pid 4); its log is s.log"]


def test_status_as_json_has_all_there_is() -> None:
    document = json.loads(to_json(report()))
    job = document["jobs"][1]
    assert document["coordinator"] == "h:7070"
    assert [member["role"] for member in document["members"]] == ["server", "agent", "worker", "worker"]
    assert document["members"][3]["waiting_for"] == "server 1"
    assert (job["name"], job["state"], job["mode"], job["step"]) == ("mine", "running", "sync", 1200)
    assert job["metrics"] == {"loss": 0.123456}
    assert [part["version"] for part in job["partitions"]] == [41, 40]
    assert job["feeds"][0]["data_shards_done"] == 3
    assert document["servers"] == [
        {
            "server": 1,
            "partitions": 3,
            "pushes_applied": 5,
            "pushes_duplicate": 0,
            "bytes_received": 0,
            "bytes_sent": 0,
            "workers_attached": 2,
            "workers_streaming": 1,
            "pins": 0,
            "memory_bytes_max": None,
        }
    ]


def test_status_shows_embedding_tables_as_servers_describe_them() -> None:
    found = report()
    job = found.status.jobs[1]
    job.tables.add(name="users", dim=16, optimizer="adagrad", rows=7)
    job.tables.add(name="words", dim=8, optimizer="adam", rows=12)
    first = found.servers[1]
    assert isinstance(first, server_wire.DescribeServerReply)
    users = {"name": "users", "rows": 1_000, "bytes": 3 << 20, "ids": 1_200, "homes": 2_000}
    first.tables.add(job=9, **users, admitted=1_100, expired=100, cold_rows=400, disk_bytes=1 << 20)
    first.tables.add(job=8, **users, admitted=50, expired=50)
    first.memory_bytes_max = 12 << 20
    second = server_wire.DescribeServerReply(server=2)
    on_disk = {"cold_rows": 100, "disk_bytes": 1 << 19, "disk_refused": "No space left on device"}
    second.tables.add(job=9, **users, admitted=1_500, expired=500, **on_disk)
    found = YardReport(
        found.coordinator, found.status, {1: first, 2: second, 3: errors.ServerUnavailable("it is away")}
    )
    text = shown_status(found)
    assert re.search(r"tables of mine \(id 9\)", text)
    assert re.search(r"users +16 +adagrad +2,000 +2,400 +6\.0 MiB +1\.5 MiB +60% full +2,600 +600\b", text)
    assert "tables take 6.0 MiB of 12.0 MiB" in text
    # what the coordinator heard last, where no server says more
    assert re.search(r"words +8 +adam +12 +- +- +- +- +- +-", text)
    said = "colder rows of users stay in memory because the disk refuses them: server 2: No space left on device"
    assert said in " ".join(text.split())
    tables = json.loads(to_json(found))["jobs"][1]["tables"]
    assert tables[0] == {
        "name": "users",
        "dim": 16,
        "optimizer": "adagrad",
        "rows": 2_000,
        "ids": 2_400,
        "bytes": 6 << 20,
        "rows_on_disk": 500,
        "disk_bytes": 3 << 19,
        "disk_refused": ["server 2: No space left on device"],
        "load": 0.6,
        "admitted": 2_600,
        "expired": 600,
        "servers": 2,
    }
    assert (tables[1]["rows"], tables[1]["servers"], tables[1]["load"]) == (12, 0, None)
    assert json.loads(to_json(found))["jobs"][0]["tables"] == []


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536, "1.5 KiB"), (5 << 30, "5.0 GiB"), (1 << 50, "1024.0 TiB")],
)
def test_sizes_are_told_in_their_unit(nbytes: int, text: str) -> None:
    assert describe_size(nbytes) == text


def test_status_tables_show_members_jobs_and_versions() -> None:
    console = Console(width=200, record=True, file=open(os.devnull, "w"))  # noqa: SIM115 - closed below
    try:
        console.print(as_tables(report()))
    finally:
        console.file.close()
    text = console.export_text()
    assert "coordinator h:7070, up 1 min 1 s" in text
    assert re.search(r"worker +4 .* mine .* waits for server 1", text)
    assert "3 partitions, 5 pushes applied, shares memory with 2 workers, streams to 1 worker" in " ".join(text.split())
    assert re.search(r"running +sync, 2 ranks +1 +1,200 +15,360 +812 +loss 0.1235", text)
    assert re.search(r"0, 1 +40 to 41", text)


def test_ended_job_shows_the_partitions_that_are_held_still() -> None:
    found = report()
    job = found.status.jobs[1]
    job.state = wire.JOB_STATE_FINISHED
    assert "partitions of mine (id 9)" in shown_status(found)
    assert "data of mine (id 9)" in shown_status(found)
    said = found.servers[1]
    assert isinstance(said, server_wire.DescribeServerReply)
    del said.partitions[:2]
    assert "partitions of" not in shown_status(found)


def shown_status(found: YardReport) -> str:
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(as_tables(found))
    return console.export_text()


def test_server_that_does_not_answer_is_part_of_the_status() -> None:
    broken = YardReport("h:7070", yard_status(), {1: errors.ServerUnavailable("server 1 at h:1 is gone")})
    document = json.loads(to_json(broken))
    assert document["servers"] == [{"server": 1, "error": "server 1 at h:1 is gone"}]
    assert document["jobs"][1]["partitions"][0]["version"] is None


def test_wait_for_a_process_is_bounded(tmp_path: Path) -> None:
    me = RunningRole(role(os.getpid(), psutil.Process().create_time(), tmp_path / "log"))
    begin = time.monotonic()
    assert not me.wait(100)
    assert 0.1 <= time.monotonic() - begin < 30
