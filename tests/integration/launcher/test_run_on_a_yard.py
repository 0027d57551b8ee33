"""`shardyard run --coordinator`: a script on a yard that is up."""

from __future__ import annotations

import re
import signal

import pytest

from tests.support.shells import SLEEPS, Shell, finish, read_until, shell, yard

__all__ = ["shell", "yard"]


@pytest.mark.long
def test_script_runs_on_a_running_yard_and_leaves_it_standing(yard: Shell) -> None:
    coordinator = yard.status()["coordinator"]
    before = {process.pid for process in yard.processes()}
    ended = yard.run("run", "--coordinator", coordinator, "--workers", "1", yard.script("print('there')\n"))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "there\n"
    assert {process.pid for process in yard.processes()} == before


def test_signal_stops_a_script_on_a_running_yard_and_leaves_the_yard(yard: Shell) -> None:
    coordinator = yard.status()["coordinator"]
    before = {process.pid for process in yard.processes()}
    process = yard.start("run", "--coordinator", coordinator, yard.script(SLEEPS))
    read_until(process, "ready")
    process.send_signal(signal.SIGINT)
    assert finish(process).returncode == 130
    assert {process.pid for process in yard.processes()} == before


def test_status_shows_the_members(yard: Shell) -> None:
    ended = yard.run("status", "--state", str(yard.state))
    assert ended.returncode == 0
    for role in ("server", "agent"):
        assert re.search(rf"^{role} +[\d.]+ +127\.0\.0\.1:\d+ ", ended.stdout, re.MULTILINE)


def test_agent_started_by_hand_runs_a_script_and_ends_with_it(yard: Shell) -> None:
    coordinator = yard.status()["coordinator"]
    script = yard.script("import sys\nprint('by hand', sys.argv[1:])\nsys.exit(3)\n")
    ended = yard.run("agent", "--coordinator", coordinator, "--workers", "1", "--", script, "--x", "1")
    assert ended.returncode == 3, ended.stderr
    lines = ended.stdout.splitlines()
    assert re.fullmatch(r"ready 127\.0\.0\.1:\d+", lines[0])
    assert lines[1:] == ["by hand ['--x', '1']"]


@pytest.mark.long
@pytest.mark.parametrize("role", ["server", "agent"])
def test_role_says_that_it_is_ready_and_stops_at_a_signal(yard: Shell, role: str) -> None:
    process = yard.start(role, "--coordinator", yard.status()["coordinator"])
    read_until(process, "ready 127.0.0.1:")
    process.send_signal(signal.SIGTERM)
    ended = finish(process)
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.long
def test_two_yards_never_share_a_port(yard: Shell, shell: Shell) -> None:
    port = yard.status()["coordinator"].split(":")[1]
    ended = shell.run("up", "--state", str(shell.state), "--set", f"yard.coordinator_port={port}")
    assert ended.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in ended.stderr
    direct = shell.run("coordinator", "--bind", f"127.0.0.1:{port}")
    assert direct.returncode == 1
    assert f"error: cannot listen on 127.0.0.1:{port}" in direct.stderr
    assert "Traceback" not in direct.stderr
