"""The fork server of a launch: what it imports, and how its processes start and end."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shardyard.runtime.waits import WaitRegistry
from shardyard.wire.v1 import agent_pb2 as wire
from shardyard_worker.agent.environment import LaunchOrder
from shardyard_worker.agent.fork_server import LIBRARY, TORCH, modules_to_import
from shardyard_worker.agent.launch import RunningLaunch
from shardyard_worker.agent.launch_folders import LaunchFolders, LaunchRecord
from shardyard_worker.agent.supervision import LEFT_IN_ORDER
from tests.support.waiting import is_gone, wait_until

SLEEPS = "import time; print('ready', flush=True); time.sleep(60)"


class Launched:
    """A launch of a script, without an agent's service."""

    def __init__(self, folder: Path, script: str, *, workers: int = 1, restarts_max: int = 5) -> None:
        path = folder / "train.py"
        path.write_text(script)
        LaunchFolders(folder).forgo_lost()
        (folder / "launches").mkdir(exist_ok=True)
        order = LaunchOrder(
            path, ("one", "two"), folder, dict(os.environ), workers, restarts_max, 60_000, 1, (), "nowhere:1", 7, "run"
        )

        def describe(number: int) -> LaunchRecord:
            return LaunchRecord(number, str(path), order.arguments, workers, started_s=time.time())

        made = LaunchFolders(folder).create(describe)
        self.launch = RunningLaunch(
            describe(int(made.path.name)), made, order, report_exit=lambda *_: None, wait_registry=WaitRegistry()
        )
        self.launch.start()

    @property
    def events(self) -> list[wire.LaunchEvent]:
        return self.launch.events.after(0, wait_ms=0)

    @property
    def lines(self) -> list[str]:
        return [event.output.line for event in self.events if event.HasField("output")]

    @property
    def started(self) -> list[int]:
        return [event.started.pid for event in self.events if event.HasField("started")]

    def ended(self) -> wire.LaunchEnded:
        wait_until(lambda: self.launch.is_over, "the end of the launch", deadline_s=20)
        (found,) = [event.ended for event in self.events if event.HasField("ended")]
        return found

    def fork_server(self) -> int:
        """The parent of the processes."""
        wait_until(lambda: self.lines.count("ready") == self.launch.order.workers, "processes that run", deadline_s=20)
        return int(Path(f"/proc/{self.launch.pids[0]}/stat").read_text().rpartition(")")[2].split()[1])


Launch = Callable[..., Launched]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    made: list[Launched] = []

    def begin(script: str, **options: int) -> Launched:
        made.append(Launched(tmp_path, script, **options))
        return made[-1]

    yield begin
    for each in made:
        each.launch.stop(0)
        wait_until(lambda each=each: each.launch.is_over, "the end of the launch", deadline_s=20)  # type: ignore[misc]


@pytest.fixture
def imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Gives processes another package torch, with this source."""

    def write(source: str) -> None:
        package = tmp_path / "packages" / "torch"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(source)
        given = os.environ.get("PYTHONPATH", "")
        monkeypatch.setenv("PYTHONPATH", f"{package.parent}{os.pathsep}{given}")

    return write


@pytest.mark.parametrize(
    ("script", "wanted"),
    [
        ("import os", ()),
        ("import torch", TORCH),
        ("from torch.nn import Linear", TORCH),
        ("import torch, shardyard as sy", LIBRARY),
        ("def main():\n    import shardyard.data\n", LIBRARY),
        ("import torchvision", ()),
        ("from . import torch", ()),
        ("import torch as", ()),
        ("import torch\0", ()),
    ],
)
def test_what_is_imported_before_the_first_fork_follows_from_the_script(
    tmp_path: Path, script: str, wanted: tuple[str, ...]
) -> None:
    path = tmp_path / "train.py"
    path.write_text(script)
    assert modules_to_import(path) == wanted


def test_a_script_that_is_not_there_imports_nothing(tmp_path: Path) -> None:
    assert modules_to_import(tmp_path / "train.py") == ()


def test_a_process_finds_what_a_started_program_would(launch: Launch) -> None:
    script = """
import os, sys
index = os.environ["SHARDYARD_LOCAL_INDEX"]
print(index, __name__, sys.argv[1:], os.getsid(0) == os.getpid(), os.environ["SHARDYARD_PID"] == str(os.getpid()))
"""
    begun = launch(script, workers=2)
    assert begun.ended() == wire.LaunchEnded()
    assert sorted(begun.lines) == [f"{index} __main__ ['one', 'two'] True True" for index in range(2)]


def test_processes_draw_different_random_numbers(launch: Launch, imported: Callable[[str], None]) -> None:
    imported("import numpy.random, random")
    begun = launch("import torch, random, numpy; print(random.random(), numpy.random.rand())", workers=2)
    assert begun.ended() == wire.LaunchEnded()
    (one, other) = (line.split() for line in begun.lines)
    assert one[0] != other[0]
    assert one[1] != other[1]


def test_an_exit_code_and_a_signal_are_told_apart(launch: Launch) -> None:
    assert launch("import sys; sys.exit(3)").ended().exit_code == 3
    killed = launch("import os; os.kill(os.getpid(), 9)", restarts_max=0).ended()
    assert killed.exit_code == -signal.SIGKILL


def test_a_launch_that_is_stopped_at_once_starts_nothing(launch: Launch) -> None:
    begun = launch("import shardyard\n" + SLEEPS, workers=2)
    begun.launch.stop(1_000)
    ended = begun.ended()
    assert (ended.exit_code, ended.stopped, begun.started) == (-signal.SIGTERM, True, [])


def test_an_agent_that_leaves_at_once_has_left_work_undone(launch: Launch) -> None:
    begun = launch("import shardyard\n" + SLEEPS, workers=2)
    begun.launch.stop(1_000, agent_leaves=True)
    ended = begun.ended()
    assert (ended.exit_code, ended.agent_leaves, begun.started) == (LEFT_IN_ORDER, True, [])


def test_processes_of_a_fork_server_that_was_killed_are_started_again(launch: Launch) -> None:
    begun = launch(SLEEPS, workers=2)
    server = begun.fork_server()
    first = begun.launch.pids
    os.kill(server, signal.SIGKILL)
    wait_until(lambda: begun.lines.count("ready") == 4, "two processes again", deadline_s=20)
    assert begun.started[2:] == begun.launch.pids
    assert all(map(is_gone, first))
    exits = [event.exited for event in begun.events if event.HasField("exited")]
    assert [(each.exit_code, each.will_restart) for each in exits] == [(-signal.SIGKILL, True)] * 2
    begun.launch.stop(1_000)
    assert begun.ended().stopped


def test_a_fork_server_that_dies_while_it_imports_counts_as_the_death_of_each_process(
    launch: Launch, imported: Callable[[str], None]
) -> None:
    imported("import os; os.kill(os.getpid(), 9)")
    ended = launch("import torch", restarts_max=1).ended()
    assert ended.exit_code == -signal.SIGKILL
    assert "process 0 is not started again" in ended.first_error


def test_an_import_takes_place_once_and_what_it_prints_is_shown(
    launch: Launch, imported: Callable[[str], None]
) -> None:
    imported("print('torch was imported')")
    begun = launch("import torch", workers=2)
    assert begun.ended() == wire.LaunchEnded()
    assert begun.lines == ["torch was imported"]


def test_an_import_that_fails_is_the_error_of_the_script(launch: Launch, imported: Callable[[str], None]) -> None:
    imported("raise RuntimeError('no torch here')")
    ended = launch("import torch", workers=2).ended()
    assert ended.exit_code == 1
    assert "no torch here" in ended.first_error


def test_a_group_that_a_process_leaves_is_gone_with_the_launch(launch: Launch) -> None:
    script = """
import subprocess, sys
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]).pid)
"""
    begun = launch(script)
    assert begun.ended() == wire.LaunchEnded()
    (pid,) = map(int, begun.lines)
    wait_until(lambda: is_gone(pid), "the child of a process that has ended", deadline_s=20)
