"""Shells in which tests run `shardyard`, and know the processes that it starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.waiting import wait_until

DEADLINE_S = 60.0
await_true = partial(wait_until, deadline_s=DEADLINE_S)
SLEEPS = "import time\nprint('ready', flush=True)\ntime.sleep(600)\n"


class Shell:
    """Runs `shardyard` in a folder of its own; knows the processes that belong to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self.state = folder / "state"
        self.environment = {
            name: text for name, text in os.environ.items() if not name.startswith(("SHARDYARD", "MAKE"))
        }
        # inherited by every process that is started here, so that they can be told from all others
        self.environment |= {"TMPDIR": str(self.temporary), "SHELL_OF_TEST": str(folder)}
        self._started: list[subprocess.Popen[str]] = []

    def script(self, text: str, name: str = "script.py") -> str:
        path = self.folder / name
        path.write_text(textwrap.dedent(text))
        return str(path)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "shardyard_launcher.cli", *arguments],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._started.append(process)
        return process

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return finish(self.start(*arguments))

    def up(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.run("up", "--state", str(self.state), "--set", "yard.coordinator_port=0", *arguments)

    def down(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.run("down", "--state", str(self.state), *arguments)

    def status(self) -> Any:
        ended = self.run("status", "--state", str(self.state), "--json")
        assert ended.returncode == 0, ended.stderr
        return json.loads(ended.stdout)

    def processes(self) -> list[psutil.Process]:
        """All living processes that descend from this shell's, the commands themselves included."""
        found = []
        for process in psutil.process_iter():
            try:
                ours = process.environ().get("SHELL_OF_TEST") == str(self.folder)
                if ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def pids_of(self, role: str) -> list[int]:
        """Of the processes that run this role."""
        lines = ((process.pid, process.cmdline()) for process in self.processes())
        return [pid for pid, line in lines if "shardyard_launcher.cli" in line and role in line]

    def pid_of(self, role: str) -> int:
        return self.pids_of(role)[0]

    def close(self) -> None:
        for process in self.processes():
            process.kill()
        for started in self._started:
            started.communicate(timeout=DEADLINE_S)


def finish(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    out, err = process.communicate(timeout=DEADLINE_S)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def read_until(process: subprocess.Popen[str], wanted: str) -> None:
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if wanted in line:
            return
    pytest.fail(f"{wanted!r} was not printed, but {seen}")


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    made = Shell(tmp_path)
    try:
        yield made
        left = [process.cmdline() for process in made.processes()]
    finally:
        made.close()
    assert left == []


@pytest.fixture(scope="module")
def yard() -> Iterator[Shell]:
    """A yard that is up, for tests that leave it as it is."""
    with tempfile.TemporaryDirectory() as folder:
        made = Shell(Path(folder))
        try:
            started = made.up()
            assert started.returncode == 0, started.stderr
            yield made
            assert made.down().returncode == 0
        finally:
            made.close()
