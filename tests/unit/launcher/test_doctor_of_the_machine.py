"""What `shardyard doctor` finds on this machine, and the command itself."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from shardyard.domain import errors
from shardyard.runtime import machine_memory
from shardyard.transport import shared_memory
from shardyard.transport.interfaces import Service
from shardyard_launcher.cli import main
from shardyard_launcher.probes import machine
from shardyard_launcher.probes.findings import Finding, Probe, Verdict, carry_out, failed, ok
from shardyard_launcher.yard.role_process import RoleProcess
from shardyard_launcher.yard.state_file import YardState
from tests.support.doctors import coordinator, free_address, impatient, member, serving

__all__ = ["impatient"]

# ---- this machine


def only(found: Sequence[Finding]) -> Finding:
    (finding,) = found
    return finding


def test_disk_that_can_be_written_is_fine_and_nothing_stays(tmp_path: Path) -> None:
    found = only(machine.disk(tmp_path / "not" / "yet"))
    assert found.verdict in (Verdict.OK, Verdict.WARNING)
    assert f"{tmp_path}, where {tmp_path}/not/yet would be made, can be written" in found.said
    assert "fsync of 4 KiB in" in found.said
    assert list(tmp_path.iterdir()) == []


def test_disk_without_room_and_a_slow_one_are_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "FSYNC_MS_MAX", -1.0)
    slow = only(machine.disk(tmp_path))
    assert slow.verdict is Verdict.WARNING
    assert "is slow" in slow.todo
    monkeypatch.setattr(machine, "FREE_BYTES_MIN", 1 << 60)
    full = only(machine.disk(tmp_path))
    assert full.verdict is Verdict.WARNING
    assert "free some" in full.todo


def test_state_folder_that_is_a_file_fails(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("")
    found = only(machine.disk(tmp_path / "state"))
    assert found.verdict is Verdict.FAILED
    assert "is not a folder" in found.said


def test_folder_that_cannot_be_written_fails() -> None:
    found = only(machine.disk(Path("/proc")))
    assert found.verdict is Verdict.FAILED
    assert "the state folder /proc cannot be written" in found.said
    assert "yard.state" in found.todo


def test_shared_memory_works_or_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    assert only(machine.shared_memory()).verdict is Verdict.OK

    def refuse(_: object) -> None:
        raise errors.NotShareable("the memory cannot be mapped: Permission denied")

    monkeypatch.setattr(shared_memory, "attach", refuse)
    found = only(machine.shared_memory())
    assert found.verdict is Verdict.WARNING
    assert "Permission denied" in found.said
    monkeypatch.setattr(shared_memory, "available", lambda: False)
    assert only(machine.shared_memory()).verdict is Verdict.WARNING


def test_little_memory_is_warned_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(machine_memory, "_CGROUP", limit)
    monkeypatch.setattr(machine, "MEMORY_BYTES_MIN", 1 << 26)
    limit.write_text("max\n")
    assert "limited" not in only(machine.memory()).said
    limit.write_text(f"{1 << 25}\n")
    found = only(machine.memory())
    assert found.verdict is Verdict.WARNING
    assert "limited to 32 MiB for this container" in found.said


def test_few_open_files_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (machine.FILES_MIN - 1, hard))
    try:
        found = only(machine.open_files())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert found.verdict is Verdict.WARNING
    assert "1,023 may be open" in found.said
    monkeypatch.setattr(machine, "FILES_MIN", 1)
    assert only(machine.open_files()).verdict is Verdict.OK


def test_library_of_another_kind_or_release_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    for tried, verdict in ((True, Verdict.OK), (False, Verdict.WARNING)):
        monkeypatch.setattr(machine, "TRIED", tried)
        assert only(machine.grpcio()).verdict is verdict
    for tuned, verdict in ((True, Verdict.OK), (False, Verdict.WARNING)):
        monkeypatch.setattr(machine, "tune_malloc", lambda tuned=tuned: tuned)
        assert only(machine.malloc()).verdict is verdict


@pytest.mark.parametrize(
    ("source", "verdicts", "said"),
    [
        ("__version__ = '2.9'", [Verdict.OK, Verdict.OK], "built without CUDA"),
        ("__version__ = '2.9'; built = '13.0'", [Verdict.OK, Verdict.OK], "finds no device"),
        ("__version__ = '2.9'; built = '13.0'; names = ['H200']", [Verdict.OK, Verdict.OK], "13.0: H200"),
        ("raise ImportError('libcudart.so.13: no such file')", [Verdict.FAILED], "libcudart.so.13: no such file"),
        ("import os; os.abort()", [Verdict.FAILED], "cannot be imported"),
        (None, [Verdict.WARNING], "not installed"),
    ],
)
def test_torch_is_looked_at_in_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str | None, verdicts: list[Verdict], said: str
) -> None:
    if source is None:
        monkeypatch.setattr(machine.importlib.util, "find_spec", lambda _: None)
    else:
        devices = (
            "built, names = None, []\n"
            f"{source}\n"
            "class version: cuda = built\n"
            "class cuda:\n"
            "    is_available = staticmethod(lambda: bool(names))\n"
            "    device_count = staticmethod(lambda: len(names))\n"
            "    get_device_name = staticmethod(lambda index: names[index])\n"
        )
        (tmp_path / "torch.py").write_text(devices)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = machine.torch()
    assert [each.verdict for each in found] == verdicts
    assert said in found[-1].said


# ---- the command


def test_probe_that_hangs_costs_its_deadline_and_no_more() -> None:
    end = threading.Event()

    def hang() -> list[Finding]:
        end.wait()
        return []

    try:
        found = only(carry_out(Probe("disk", 50, hang)))
    finally:
        end.set()
    assert found.verdict is Verdict.FAILED
    assert "no result within 0.05 s" in found.said


def test_probe_that_fails_is_a_finding() -> None:
    def fail() -> list[Finding]:
        raise ZeroDivisionError("never thought of")

    found = only(carry_out(Probe("disk", 5_000, fail)))
    assert found.verdict is Verdict.FAILED
    assert "ZeroDivisionError: never thought of" in found.said


def test_finding_is_one_line_whatever_it_says() -> None:
    assert failed("tcp", "a\nb", "c").line == "FAILED   tcp            a b; c"
    assert ok("tcp", "fine").line == "ok       tcp            fine"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torch, which is slow."""
    monkeypatch.setattr(machine, "torch", lambda: [ok("torch", "2.9")])


@pytest.mark.usefixtures("quick")
def test_doctor_prints_a_line_for_each_finding_and_fails_where_something_does(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("warning  name")
    assert [line[9:24].strip() for line in lines[1:]] == [
        "disk",
        "shared memory",
        "memory",
        "open files",
        "malloc",
        "grpcio",
        "torch",
    ]
    assert main(["doctor", "--coordinator", free_address()]) == 1
    assert capsys.readouterr().out.splitlines()[1].startswith("FAILED   tcp")


@pytest.mark.usefixtures("quick")
def test_doctor_finds_the_yard_that_is_up_and_prints_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with serving(Service("ParameterServer")) as server, serving(coordinator(member(server))) as address:
        process = RoleProcess("coordinator", "coordinator", os.getpid(), 0.0, tmp_path / "x.log", address, ready=True)
        (tmp_path / ".shardyard").mkdir()
        YardState((process,)).write(tmp_path / ".shardyard")
        assert main(["doctor", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["failed"] == 0
    by_probe = {entry["probe"]: entry for entry in document["findings"]}
    assert address.split(":")[1] in by_probe["tcp"]["said"]
    assert by_probe["members"] == {
        "probe": "members",
        "verdict": "ok",
        "said": "the one address can be reached from here",
        "todo": "",
    }


HANGS = """
import sys, threading
from shardyard_launcher.probes import machine as machine_probes
from shardyard_launcher.probes import network as network_probes
from shardyard_launcher.probes.findings import Probe
machine_probes.probes = lambda state: [Probe("disk", 100, threading.Event().wait)]
from shardyard_launcher.cli import main
sys.exit(main(["doctor"]))
"""


def test_command_ends_though_a_probe_never_does() -> None:
    ended = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (1, "")
    assert "no result within 0.1 s" in ended.stdout
