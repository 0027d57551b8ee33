"""`shardyard run`: a yard for one script, and what it leaves behind."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest

from tests.support.shells import (
    DEADLINE_S,
    SLEEPS,
    Shell,
    await_true,
    finish,
    read_until,
    shell,
)

__all__ = ["shell"]

STOP_WITHIN_S = 10.0
"""What the README promises for a yard that breaks under a script."""


def test_run_starts_everything_around_a_script_and_stops_it_all(shell: Shell) -> None:
    script = shell.script(
        """
        import os, sys
        print("arguments", sys.argv[1:])
        print("coordinator", os.environ["SHARDYARD_COORDINATOR"])
        print("workers", os.environ["SHARDYARD_WORKERS"])
        """
    )
    ended = shell.run("run", "--workers", "3", script, "--epochs", "2")
    assert ended.returncode == 0, ended.stderr
    for index in range(3):
        assert f"[{index}] arguments ['--epochs', '2']" in ended.stdout
        assert f"[{index}] workers 3" in ended.stdout
    assert re.search(r"coordinator 127\.0\.0\.1:\d+", ended.stdout)
    assert shell.processes() == []
    assert list(shell.temporary.iterdir()) == []


def test_run_of_a_script_that_raises_shows_its_traceback_and_fails(shell: Shell) -> None:
    script = shell.script("def deep():\n    raise ValueError('boom')\n\ndeep()\n")
    ended = shell.run("run", script)
    assert ended.returncode == 1
    output, report = ended.stderr.split("error: ")
    assert re.search(r"^\[\d\] .*in deep$", output, re.MULTILINE)
    assert "script.py failed" in report
    assert re.search(r"\n  ValueError: boom\n  its traceback is above, in the lines that begin with \[\d\]$", report)
    assert shell.processes() == []
    assert list(shell.temporary.iterdir()) == []


@pytest.mark.long
def test_run_ends_with_the_exit_code_of_the_script(shell: Shell) -> None:
    assert shell.run("run", "--workers", "1", shell.script("raise SystemExit(9)\n")).returncode == 9


@pytest.mark.long
def test_run_of_a_script_that_is_killed_ends_as_a_shell_would(shell: Shell) -> None:
    script = shell.script("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    ended = shell.run("run", "--set", "yard.restarts_max=1", "--workers", "1", script)
    assert ended.returncode == 128 + signal.SIGKILL
    assert "the agent starts it again" in ended.stderr
    assert "was killed by SIGKILL" in ended.stderr
    assert "is not started again: it was restarted once within 3600 s (yard.restarts_max)" in ended.stderr


@pytest.mark.long
@pytest.mark.parametrize("role", ["server", "coordinator", "agent"])
def test_yard_that_breaks_under_a_script_is_named_and_all_is_stopped(shell: Shell, role: str) -> None:
    process = shell.start("run", "--set", "yard.restarts_max=0", shell.script(SLEEPS))
    read_until(process, "ready")
    victim = shell.pid_of(role)
    os.kill(victim, signal.SIGKILL)
    begin = time.monotonic()
    ended = finish(process)
    assert time.monotonic() - begin < STOP_WITHIN_S
    assert ended.returncode == 1
    said = rf"error: {role}\S* \(pid {victim}\) was killed by SIGKILL and is not restarted: .*; the end of .*\.log:"
    assert re.search(said, ended.stderr)
    assert shell.processes() == []
    if role != "agent":
        assert list(shell.temporary.iterdir()) == []


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_stops_a_run_cleanly(shell: Shell, number: signal.Signals) -> None:
    process = shell.start("run", shell.script(SLEEPS))
    read_until(process, "ready")
    process.send_signal(number)
    ended = finish(process)
    assert ended.returncode == 128 + number
    assert "Traceback" not in ended.stderr
    assert shell.processes() == []
    assert list(shell.temporary.iterdir()) == []


@pytest.mark.long
def test_signal_while_a_yard_starts_stops_it_cleanly(shell: Shell) -> None:
    process = shell.start("run", shell.script(SLEEPS))
    await_true(lambda: len(shell.processes()) > 1, "the first process of the yard")
    process.send_signal(signal.SIGINT)
    ended = finish(process)
    assert ended.returncode == 130
    assert "Traceback" not in ended.stderr
    assert shell.processes() == []


@pytest.mark.long
def test_killed_run_leaves_no_process(shell: Shell) -> None:
    process = shell.start("run", shell.script(SLEEPS))
    read_until(process, "ready")
    process.kill()
    process.wait(DEADLINE_S)
    await_true(lambda: shell.processes() == [], "the processes of a killed run")
