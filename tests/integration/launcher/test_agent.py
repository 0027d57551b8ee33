"""The agent with real processes of tiny scripts: what they are given, what becomes of them and of their errors."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from shardyard.transport.grpc_client import GrpcNetwork, GrpcPeer
from shardyard.transport.grpc_server import GrpcServer
from shardyard.wire import methods
from shardyard.wire.v1 import agent_pb2 as wire
from shardyard_worker.agent.service import AgentPlan, AgentService
from tests.support.waiting import is_gone, wait_until

pytestmark = pytest.mark.usefixtures("in_a_folder_of_its_own")

DEADLINE_S = 30.0
await_true = partial(wait_until, deadline_s=DEADLINE_S)


@contextlib.contextmanager
def killed_at_last(pids: list[int]) -> Iterator[None]:
    """Leaves none of these processes behind, which exist now, if what is to end them does not."""
    processes = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    try:
        yield
    finally:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


class Bench:
    """An agent that serves over gRPC, and the scripts it is given."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.exits: list[tuple[int, int]] = []
        self.service = AgentService(
            AgentPlan("127.0.0.1:9", 2, folder, threads=3),
            incarnation=lambda: 42,
            report_exit=lambda pid, code: self.exits.append((pid, code)),
        )
        self.listener = GrpcServer("127.0.0.1:0", [self.service.service], None, threads=8)
        self.listener.start()
        self.peer: GrpcPeer = GrpcNetwork(None).connect(self.listener.address, name="agent")

    def script(self, text: str) -> Path:
        path = self.folder / "script.py"
        path.write_text(textwrap.dedent(text))
        return path

    def launch(self, text: str, *arguments: str, workers: int = 1, restarts_max: int = 0) -> int:
        request = wire.LaunchRequest(
            script=str(self.script(text)),
            arguments=arguments,
            working_directory=str(self.folder),
            environment={"GIVEN": "by the launcher"},
            workers=workers,
            restarts_max=restarts_max,
            restarts_window_ms=60_000,
        )
        return self.peer.call(methods.LAUNCH, request, timeout_ms=10_000).launch

    def watch(self, launch: int) -> Iterator[wire.LaunchEvent]:
        return self.peer.receive(methods.WATCH, wire.WatchRequest(launch=launch), timeout_ms=int(DEADLINE_S * 1000))

    def run(self, text: str, *arguments: str, workers: int = 1) -> Ended:
        return Ended(list(self.watch(self.launch(text, *arguments, workers=workers))))

    def close(self) -> None:
        self.service.close(grace_ms=100)
        self.peer.close()
        self.listener.stop()


class Ended:
    """The events of a launch that has ended."""

    def __init__(self, events: list[wire.LaunchEvent]) -> None:
        self.events = events
        assert events[-1].HasField("ended"), events
        self.exit_code = events[-1].ended.exit_code
        self.first_error_index = events[-1].ended.first_error_index
        self.first_error = events[-1].ended.first_error

    def lines(self, index: int = 0, *, standard_error: bool = False) -> list[str]:
        outputs = [event.output for event in self.events if event.HasField("output")]
        return [o.line for o in outputs if o.local_index == index and o.standard_error is standard_error]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("launch-")]


# ---- what a script sees


def test_script_runs_as_under_python(bench: Bench) -> None:
    (bench.folder / "beside.py").write_text("here = 'imported from beside the script'\n")
    ended = bench.run(
        """
        from __future__ import annotations
        import os, sys, beside
        print(sys.argv)
        print(__name__, __file__, sys.modules["__main__"].__dict__ is globals(), __spec__)
        print(beside.here)
        print(sys.path[0], os.getcwd())
        print("to standard error", file=sys.stderr)
        """,
        "--flag",
        "a b",
    )
    script = str(bench.folder / "script.py")
    assert ended.exit_code == 0
    assert ended.lines() == [
        str([script, "--flag", "a b"]),
        f"__main__ {script} True None",
        "imported from beside the script",
        f"{bench.folder} {bench.folder}",
    ]
    assert ended.lines(standard_error=True) == ["to standard error"]


def test_each_process_is_told_its_place(bench: Bench) -> None:
    ended = bench.run(
        """
        import os
        for name in ("GIVEN", "SHARDYARD_COORDINATOR", "SHARDYARD_AGENT", "SHARDYARD_LOCAL_INDEX", "SHARDYARD_WORKERS",
                     "OMP_NUM_THREADS"):
            print(os.environ[name])
        print(os.getsid(0) == os.getpid())
        """,
        workers=2,
    )
    for index in (0, 1):
        assert ended.lines(index) == ["by the launcher", "127.0.0.1:9", "42", str(index), "2", "3", "True"]


def test_script_may_use_multiprocessing(bench: Bench) -> None:
    ended = bench.run(
        """
        import multiprocessing

        class Doubler:
            def __call__(self, number):
                return 2 * number

        if __name__ == "__main__":
            for method in ("spawn", "fork"):
                with multiprocessing.get_context(method).Pool(1) as pool:
                    print(pool.map(Doubler(), [1, 2]))
        """
    )
    assert ended.exit_code == 0, ended.lines(standard_error=True)
    assert ended.lines() == ["[2, 4]", "[2, 4]"]


@pytest.mark.parametrize(
    ("statement", "code", "said"),
    [
        ("sys.exit()", 0, ""),
        ("sys.exit(5)", 5, "ended with exit code 5"),
        ("sys.exit('wrong file')", 1, "wrong file"),
        ("raise SystemExit(3)", 3, "exit code 3"),
    ],
)
def test_exit_code_of_the_script_is_its_own(bench: Bench, statement: str, code: int, said: str) -> None:
    ended = bench.run(f"import sys\n{statement}\n")
    assert ended.exit_code == code
    assert said in ended.first_error


# ---- errors


def test_uncaught_error_is_told_with_the_traceback_that_python_prints(bench: Bench) -> None:
    text = """
        def inner():
            raise ValueError("boom")

        inner()
        """
    ended = bench.run(text)
    plain = subprocess.run(
        [sys.executable, str(bench.script(text))], capture_output=True, text=True, check=False, timeout=60
    )
    assert ended.exit_code == plain.returncode == 1
    assert ended.first_error == plain.stderr.rstrip()
    assert "\n".join(ended.lines(standard_error=True)) == plain.stderr.rstrip()


def test_script_that_does_not_compile_is_told(bench: Bench) -> None:
    ended = bench.run("print('x'\n")
    assert ended.exit_code == 1
    assert re.search(r"script\.py.*SyntaxError", ended.first_error, re.DOTALL)
    assert "bootstrap" not in ended.first_error


def test_error_that_came_first_is_told_though_its_process_ends_last(bench: Bench) -> None:
    ended = bench.run(
        """
        import atexit, os, time

        mine = os.environ["SHARDYARD_ERROR_FILE"]
        if os.environ["SHARDYARD_LOCAL_INDEX"] == "1":
            atexit.register(time.sleep, 600)
            raise ValueError("the cause")
        other = mine.replace("error-0-", "error-1-")
        assert other != mine
        while not os.path.exists(other):
            time.sleep(0.01)
        raise KeyError("the consequence")
        """,
        workers=2,
    )
    exited = [event.exited for event in ended.events if event.HasField("exited")]
    assert [exit_.local_index for exit_ in exited] == [0, 1]
    assert ended.first_error_index == 1
    assert "ValueError: the cause" in ended.first_error


def test_others_are_stopped_when_one_fails(bench: Bench) -> None:
    ended = bench.run(
        """
        import os, sys, time
        if os.environ["SHARDYARD_LOCAL_INDEX"] == "2":
            sys.exit(4)
        time.sleep(600)
        """,
        workers=3,
    )
    assert ended.exit_code == 4
    assert ended.first_error_index == 2
    assert sorted(code for _, code in bench.exits) == [-15, -15, 4]


def test_error_that_cannot_be_printed_is_told_all_the_same(bench: Bench) -> None:
    ended = bench.run(
        """
        class Mute(Exception):
            def __str__(self):
                raise RuntimeError("no words")

        raise Mute
        """
    )
    assert ended.exit_code == 1
    assert "Mute" in ended.first_error


# ---- restarts and ends


def test_process_killed_by_a_signal_is_started_again(bench: Bench) -> None:
    launch = bench.launch(
        """
        import os, sys, time
        if os.path.exists("second"):
            sys.exit(0)
        open("second", "w").close()
        print("ready", flush=True)
        time.sleep(600)
        """,
        restarts_max=1,
    )
    pids = []
    events = []
    for event in bench.watch(launch):
        events.append(event)
        if event.HasField("started"):
            pids.append(event.started.pid)
        if event.HasField("output"):
            os.kill(pids[0], signal.SIGKILL)
    ended = Ended(events)
    assert ended.exit_code == 0
    assert [event.started.restarts for event in events if event.HasField("started")] == [0, 1]
    exited = [(e.exited.pid, e.exited.exit_code, e.exited.will_restart) for e in events if e.HasField("exited")]
    assert exited == [(pids[0], -9, True), (pids[1], 0, False)]
    assert bench.exits == [(pids[0], -9), (pids[1], 0)]


LOSES_THE_YARD = """
    import os, sys
    from shardyard.domain import errors
    if os.path.exists("second"):
        sys.exit(0)
    open("second", "w").close()
    raise errors.{error}("worker 1.2 was silent for 6.0 s")
    """


@pytest.mark.long("StaleIncarnation")
@pytest.mark.parametrize("error", ["StaleIncarnation", "CoordinatorUnavailable"])
def test_process_that_lost_the_yard_is_started_again(bench: Bench, error: str) -> None:
    ended = Ended([*bench.watch(bench.launch(LOSES_THE_YARD.format(error=error), restarts_max=1))])
    assert ended.exit_code == 0
    exited = [event.exited for event in ended.events if event.HasField("exited")]
    assert [(each.exit_code, each.will_restart) for each in exited] == [(1, True), (0, False)]
    assert exited[0].ending == f"ended with {error}"


def test_process_of_a_job_that_failed_is_not_started_again(bench: Bench) -> None:
    ended = Ended([*bench.watch(bench.launch(LOSES_THE_YARD.format(error="ServerLost"), restarts_max=1))])
    assert ended.exit_code == 1
    assert "ServerLost: worker 1.2 was silent" in ended.first_error


def test_stop_ends_a_script_in_order(bench: Bench) -> None:
    launch = bench.launch(
        """
        import os, signal, sys, time
        def leave(number, frame):
            os.write(1, b"leaving\\n")  # the signal may come inside of print, which cannot be called again there
            sys.exit(0)
        signal.signal(signal.SIGTERM, leave)
        print("ready", flush=True)
        time.sleep(600)
        """
    )
    ended = stop_when_ready(bench, launch, grace_ms=20_000)
    assert ended.lines() == ["ready", "leaving"]
    assert ended.exit_code == -15
    assert [code for _, code in bench.exits] == [0]


def test_script_that_ignores_the_stop_is_killed(bench: Bench) -> None:
    launch = bench.launch(
        """
        import signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("ready", flush=True)
        time.sleep(600)
        """
    )
    stop_when_ready(bench, launch, grace_ms=50)
    assert [code for _, code in bench.exits] == [-9]


def stop_when_ready(bench: Bench, launch: int, *, grace_ms: int) -> Ended:
    events = []
    for event in bench.watch(launch):
        events.append(event)
        if event.HasField("output") and event.output.line == "ready":
            bench.peer.call(methods.STOP, wire.StopRequest(launch=launch, grace_ms=grace_ms), timeout_ms=5_000)
    return Ended(events)


def test_children_that_a_process_leaves_behind_end_with_it(bench: Bench) -> None:
    ended = bench.run(
        """
        import subprocess, sys
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print(child.pid)
        """
    )
    assert ended.exit_code == 0
    pid = int(ended.lines()[0])
    with killed_at_last([pid]):
        await_true(lambda: is_gone(pid), "the child of a process that has ended")


def test_stranger_that_holds_the_output_does_not_hold_up_the_end(bench: Bench) -> None:
    ended = bench.run(
        """
        import subprocess, sys
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        print(child.pid)
        """
    )
    pid = int(ended.lines()[0])
    with killed_at_last([pid]):
        assert ended.exit_code == 0
        # a session of its own is a way out that we leave open
        assert not is_gone(pid)


@pytest.mark.long
def test_much_output_comes_whole_and_in_order(bench: Bench) -> None:
    ended = bench.run("for i in range(20_000): print(i)\n")
    assert ended.lines() == [str(number) for number in range(20_000)]


def test_closing_the_agent_ends_its_processes(bench: Bench) -> None:
    launch = bench.launch("import time\nprint('ready', flush=True)\ntime.sleep(600)\n", workers=2)
    events = bench.watch(launch)
    pids = [next(event.started.pid for event in events if event.HasField("started")) for _ in range(2)]
    bench.service.close(grace_ms=100)
    assert all(map(is_gone, pids))


def test_nothing_is_left_of_an_ended_launch(bench: Bench) -> None:
    bench.run("pass\n", workers=2)
    bench.run("raise ValueError\n", workers=2)
    await_true(lambda: threads_of_launches() == 0, "the threads of ended launches")
    open_before = psutil.Process().num_fds()
    for _ in range(3):
        bench.run("raise ValueError\n", workers=2)
    await_true(lambda: threads_of_launches() == 0, "the threads of ended launches")
    assert psutil.Process().num_fds() <= open_before


def threads_of_launches() -> int:
    return sum(thread.name.startswith("launch-") for thread in threading.enumerate())


def test_killed_agent_leaves_no_training_process(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)\n")
    agent = subprocess.Popen(
        [sys.executable, "-c", KILLED_AGENT, str(tmp_path / "script.py")],
        env={**os.environ, "TMPDIR": str(tmp_path)},  # it cannot tidy up after itself
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert agent.stdout is not None
        pids = [int(agent.stdout.readline()) for _ in range(2)]
        with killed_at_last(pids):
            assert not any(map(is_gone, pids))
            agent.kill()
            agent.wait(DEADLINE_S)
            await_true(lambda: all(map(is_gone, pids)), "the processes of a killed agent")
    finally:
        agent.kill()
        agent.wait(DEADLINE_S)
        assert agent.stdout is not None
        agent.stdout.close()


KILLED_AGENT = """
import sys
from pathlib import Path
from shardyard.wire.v1 import agent_pb2 as wire
from shardyard_worker.agent.service import AgentPlan, AgentService
plan = AgentPlan("127.0.0.1:9", 2, Path(sys.argv[1]).parent)
service = AgentService(plan, incarnation=lambda: 1, report_exit=lambda pid, code: None)
launch = service.launch(wire.LaunchRequest(script=sys.argv[1], working_directory="/"))
wanted = 0
while True:
    for event in launch.events.after(wanted, wait_ms=60_000):
        wanted = event.number + 1
        if event.HasField("output"):
            print(event.output.line, flush=True)
"""
