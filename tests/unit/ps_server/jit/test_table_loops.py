"""Loops of tables are compiled in another process, once, while the server goes on; and here where that cannot be."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest

from shardyard.domain.errors import NotReady
from shardyard.runtime.waits import WaitRegistry
from shardyard_ps_server.jit import table_warmup
from shardyard_ps_server.jit.cache import is_marked, mark
from shardyard_ps_server.jit.table_warmup import KIND, TableLoops, folder_of_loops
from tests.support.waiting import wait_until

DEADLINE_S = 30
until = partial(wait_until, deadline_s=DEADLINE_S)


class World:
    """A compiler that is a script, and a process that reads what it has made."""

    def __init__(self, folder: Path, script: str) -> None:
        self.folder = folder
        self.loads = 0
        self.wait_registry = WaitRegistry(logger=logging.getLogger("shardyard.server"))
        self.loops = TableLoops(
            self.wait_registry,
            self.load,
            lambda: self.loads > 0,
            lambda: folder,
            [sys.executable, "-c", script, str(folder)],
        )

    def load(self) -> None:
        self.loads += 1

    def runs(self) -> int:
        return len(list(self.folder.glob("run-*")))

    def close(self) -> None:
        self.loops.close()
        self.wait_registry.close()


RUNS = """
import os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
(folder / f"run-{os.getpid()}").touch()
"""
WAITS = (
    RUNS
    + """
while not (folder / "go").exists():
    time.sleep(0.01)
"""
)


def test_another_process_compiles_and_this_one_reads(tmp_path: Path) -> None:
    world = World(tmp_path, RUNS)
    world.loops.load("the tables of job 1.1")
    world.loops.load("the tables of job 1.2")
    assert (world.runs(), world.loads) == (1, 1)
    world.close()


def test_loops_that_are_on_disk_need_no_process(tmp_path: Path) -> None:
    mark(tmp_path, KIND)
    world = World(tmp_path, RUNS)
    world.loops.load("the tables of job 1.1")
    assert (world.runs(), world.loads) == (0, 1)
    world.close()


def test_all_wait_for_one_process_and_say_so(tmp_path: Path) -> None:
    world = World(tmp_path, WAITS)
    others = [threading.Thread(target=world.loops.load, args=[f"the tables of job 1.{n}"]) for n in range(3)]
    for other in others:
        other.start()
    until(lambda: world.runs() == 1)
    until(lambda: all(f"loops for the tables of job 1.{n} to be" in world.wait_registry.waiting_for for n in range(3)))
    assert world.loads == 0
    (tmp_path / "go").touch()
    for other in others:
        other.join(DEADLINE_S)
    assert (world.runs(), world.loads) == (1, 1)
    world.close()


@pytest.mark.parametrize("script", ["import sys; sys.exit('no room')", "import os; os.kill(os.getpid(), 9)"])
def test_where_the_process_fails_loops_are_compiled_here(
    tmp_path: Path, script: str, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(tmp_path, script)
    world.loops.load("the tables of job 1.1")
    assert world.loads == 1
    (said,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert said.startswith("loops of tables are compiled here: another process ended by")
    assert ("no room" in said) == ("no room" in script)
    world.close()


def test_where_no_process_can_be_started_loops_are_compiled_here(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(tmp_path, "")
    world.loops._command = [str(tmp_path / "absent")]
    world.loops.load("the tables of job 1.1")
    assert world.loads == 1
    assert "no process can be started" in caplog.text
    world.close()


def test_where_no_folder_can_be_written_loops_are_compiled_here(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(tmp_path, RUNS)
    world.loops._folder = lambda: None
    world.loops.load("the tables of job 1.1")
    assert (world.runs(), world.loads) == (0, 1)
    assert "no folder for them can be written (NUMBA_CACHE_DIR)" in caplog.text
    world.close()


def test_a_server_that_ends_leaves_no_process_and_compiles_nothing(tmp_path: Path) -> None:
    world, refusals = World(tmp_path, WAITS), []

    def load() -> None:
        with pytest.raises(NotReady) as refused:
            world.loops.load("the tables of job 1.1")
        refusals.append(refused.value)

    loading = threading.Thread(target=load)
    loading.start()
    until(lambda: world.runs() == 1)
    (pid,) = [int(path.name.removeprefix("run-")) for path in tmp_path.glob("run-*")]
    world.close()
    loading.join(DEADLINE_S)
    (tmp_path / "go").touch()  # where it was not ended
    assert len(refusals) == 1
    assert world.loads == 0
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(NotReady):
        world.loops.load("the tables of job 1.1")
    assert world.runs() == 1


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends it")
def test_the_process_ends_with_the_one_that_started_it(tmp_path: Path) -> None:
    script = (
        "import sys; from shardyard_ps_server.jit import table_warmup; table_warmup._end_with(int(sys.argv[2]))"
        f"\n{RUNS}time.sleep(600)"
    )
    parent = (
        "import subprocess, sys, os, time;"
        "subprocess.Popen([sys.executable, '-c', sys.argv[1], sys.argv[2], str(os.getpid())]); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", parent, script, str(tmp_path)]) as started:
        try:
            until(lambda: any(tmp_path.glob("run-*")))
        finally:
            started.send_signal(signal.SIGKILL)
    (pid,) = [int(path.name.removeprefix("run-")) for path in tmp_path.glob("run-*")]
    until(lambda: not Path(f"/proc/{pid}/cmdline").exists() or not Path(f"/proc/{pid}/cmdline").read_bytes())


def test_the_command_compiles_once_for_all_who_ask_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process itself, with a compiler that counts."""
    compiled: list[int] = []
    monkeypatch.setattr(table_warmup, "folder_of_loops", lambda: tmp_path / "new")
    monkeypatch.setattr(table_warmup.partition_tables, "warm", lambda: compiled.append(1))
    askers = [threading.Thread(target=table_warmup.main, args=[[]]) for _ in range(4)]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join(DEADLINE_S)
    assert compiled == [1]
    assert is_marked(tmp_path / "new", KIND)


def test_loops_lie_where_numba_keeps_them() -> None:
    folder = folder_of_loops()
    assert folder is None or folder.is_absolute()
