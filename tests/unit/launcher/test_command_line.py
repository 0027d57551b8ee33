"""The command line: what wrong use prints, what commands without a yard do, and addresses."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from shardyard_launcher.cli import main
from shardyard_launcher.commands.roles import addresses, exit_status


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
