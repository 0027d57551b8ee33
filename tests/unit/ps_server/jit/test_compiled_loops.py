"""A job's loops are compiled when a server gets its partitions: only those that the job needs, once on a machine, while
heartbeats and other calls go on."""

from __future__ import annotations

import errno
import logging
import subprocess
import sys
import threading
from collections.abc import Collection, Iterable, Iterator
from functools import partial
from pathlib import Path

import pytest

from shardyard.domain.consistency import NO_CLIPPING, Clipping, StaleRule, UpdateMode
from shardyard.domain.errors import NotReady
from shardyard.domain.ids import JobId
from shardyard.domain.layout.layouts import JobLayout
from shardyard.domain.optimizers import OptimizerSpec, make_group
from shardyard.domain.variables import DType, VariableKind, VariableSpec
from shardyard.runtime.waits import WaitRegistry
from shardyard_ps_server.jit import cache, job_loops, optimizer_warmup
from shardyard_ps_server.jit.cache import compiler_lock, is_marked, mark
from shardyard_ps_server.jit.job_loops import JobLoops
from shardyard_ps_server.jit.optimizer_warmup import KIND, DenseLoop, every_loop, missing, needed
from tests.support.waiting import wait_until

DEADLINE_S = 30
until = partial(wait_until, deadline_s=DEADLINE_S)
JOB = JobId(7)
ASYNC = UpdateMode.ASYNC


def layout(kind: str = "adam", dtype: DType = DType.FLOAT32, **settings: float) -> JobLayout:
    return JobLayout((VariableSpec("w", dtype, (4,)),), OptimizerSpec(kind, (make_group(kind, settings),)), ())


def names(loops: Iterable[DenseLoop]) -> list[str]:
    return sorted(map(str, loops))


@pytest.fixture
def wait_registry() -> Iterator[WaitRegistry]:
    made = WaitRegistry(logger=logging.getLogger("shardyard.server"))
    yield made
    made.close()


class Compiler:
    """Instead of numba's: notes what it is given, and takes as long as it is told."""

    def __init__(self) -> None:
        self.given: list[str] = []
        self.go = threading.Event()
        self.go.set()
        self.threads: set[str] = set()

    def warm(self, loops: Collection[DenseLoop]) -> None:
        self.given += names(loops)
        self.threads.add(threading.current_thread().name)
        assert self.go.wait(DEADLINE_S)
        optimizer_warmup._loaded.update(loops)


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    made = Compiler()
    monkeypatch.setattr(cache, "folder_of", lambda _: tmp_path)
    monkeypatch.setattr(optimizer_warmup, "warm", made.warm)
    monkeypatch.setattr(optimizer_warmup, "_loaded", set())
    return made


def test_a_job_needs_the_loops_of_its_optimizer_its_dtypes_and_its_rules() -> None:
    assert names(needed(layout(), ASYNC, None, NO_CLIPPING)) == ["adam (float32)"]
    assert names(needed(layout("sgd", DType.FLOAT64), ASYNC, None, NO_CLIPPING)) == ["sgd (float64)"]
    momentum = needed(layout("sgd", momentum=0.9), ASYNC, None, NO_CLIPPING)
    assert names(momentum) == ["sgd (float32)"]
    assert momentum != needed(layout("sgd"), ASYNC, None, NO_CLIPPING)
    clipped = needed(layout(), UpdateMode.SYNC, None, Clipping(norm=1.0))
    assert names(clipped) == ["adam (float32)", "mean (float32)", "square norm (float32)"]
    compensated = needed(layout(), ASYNC, StaleRule(compensation=0.1), NO_CLIPPING)
    assert names(compensated) == ["adam (float32)", "compensation (float32)"]
    buffers = (
        VariableSpec("mean", DType.FLOAT32, (4,), VariableKind.BUFFER),
        VariableSpec("batches", DType.INT64, (), VariableKind.BUFFER),
    )
    with_buffers = JobLayout((*layout().variables, *buffers), layout().optimizer, ())
    assert names(needed(with_buffers, UpdateMode.SYNC, None, NO_CLIPPING)) == ["adam (float32)", "mean (float32)"]
    assert names(needed(with_buffers, ASYNC, None, NO_CLIPPING)) == ["adam (float32)"]


def test_what_any_job_needs_is_among_all_loops() -> None:
    for loop in every_loop():
        if loop.slots or loop.settings:
            spec = OptimizerSpec(loop.name, (loop.settings,))
            job = JobLayout((VariableSpec("w", DType(loop.dtype), (4,)),), spec, ())
            assert needed(job, ASYNC, None, NO_CLIPPING) == {loop}


def test_nothing_is_compiled_before_a_job_comes(compiler: Compiler, wait_registry: WaitRegistry) -> None:
    loops = JobLoops(wait_registry)
    loops.await_loaded(JOB)
    assert compiler.given == []
    loops.close()


def test_a_later_job_with_another_optimizer_compiles_that_alone(
    compiler: Compiler, wait_registry: WaitRegistry
) -> None:
    loops = JobLoops(wait_registry)
    for number, kind in enumerate(("adam", "adam", "lion", "adam")):
        loops.begin(JobId(number + 1), layout(kind), ASYNC, None, NO_CLIPPING)
        loops.await_loaded(JobId(number + 1))
    assert compiler.given == ["adam (float32)", "lion (float32)"]
    loops.close()


def test_a_caller_asks_again_while_loops_are_compiled_and_the_wait_is_explained(
    compiler: Compiler, wait_registry: WaitRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardyard.domain.limits.SHOW_WAIT_MS", 0)
    compiler.go.clear()
    loops = JobLoops(wait_registry)
    loops.begin(JOB, layout(), ASYNC, None, NO_CLIPPING)
    loops.begin(JOB, layout(), ASYNC, None, NO_CLIPPING)  # the same order again
    with pytest.raises(NotReady, match=r"the loops of job .* are being compiled"):
        loops.await_loaded(JOB, wait_ms=10)
    assert "to be compiled: adam (float32)" in wait_registry.waiting_for
    compiler.go.set()
    loops.await_loaded(JOB, wait_ms=None)
    loops.await_loaded(JOB)
    assert compiler.given == ["adam (float32)"]
    assert not any(thread.name in compiler.threads for thread in threading.enumerate())
    loops.close()


def test_a_wait_is_shorter_than_the_call_of_the_coordinator() -> None:
    from shardyard_coordinator.service import server_client

    assert 2 * job_loops.WAIT_MS_MAX < server_client.CALL_MS


def test_servers_that_start_together_compile_one_after_the_other(
    tmp_path: Path, compiler: Compiler, wait_registry: WaitRegistry
) -> None:
    """Each asks numba, which compiles for the first one and reads for the others."""
    compiler.go.clear()
    servers = [JobLoops(wait_registry) for _ in range(3)]
    for server in servers:
        server.begin(JOB, layout(), ASYNC, None, NO_CLIPPING)
    until(lambda: compiler.given == ["adam (float32)"])
    with pytest.raises(NotReady):
        servers[-1].await_loaded(JOB, wait_ms=50)
    assert compiler.given == ["adam (float32)"]
    compiler.go.set()
    for server in servers:
        server.await_loaded(JOB, wait_ms=None)
        server.close()
    assert compiler.given == ["adam (float32)"] * 3


def test_loops_of_a_process_that_died_are_compiled_by_another_one(
    tmp_path: Path, compiler: Compiler, wait_registry: WaitRegistry
) -> None:
    script = (
        "import sys, pathlib; from shardyard_ps_server.jit.cache import compiler_lock\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        f"with compiler_lock(folder, {KIND!r}): (folder / 'begun').touch(); input()"
    )
    loops = JobLoops(wait_registry)
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdin=subprocess.PIPE) as other:
        until((tmp_path / "begun").exists)
        loops.begin(JOB, layout(), ASYNC, None, NO_CLIPPING)
        with pytest.raises(NotReady):
            loops.await_loaded(JOB, wait_ms=100)
        assert compiler.given == []
        other.kill()
    loops.await_loaded(JOB, wait_ms=None)
    assert compiler.given == ["adam (float32)"]
    loops.close()


def test_where_a_folder_takes_no_file_each_process_compiles_and_says_so(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cache, "compiler_lock", full)
    optimizer_warmup.load(needed(layout(), ASYNC, None, NO_CLIPPING))
    assert compiler.given == ["adam (float32)"]
    assert "No space left on device" in caplog.text
    monkeypatch.setattr(cache, "folder_of", lambda _: None)
    optimizer_warmup.load(needed(layout("lion"), ASYNC, None, NO_CLIPPING))
    assert compiler.given == ["adam (float32)", "lion (float32)"]
    assert "no folder for them can be written" in caplog.text


def test_loops_that_cannot_be_compiled_do_not_keep_a_job_waiting(
    compiler: Compiler, wait_registry: WaitRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first push compiles them, and says what is wrong."""
    failed: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda arguments: failed.append(arguments.exc_type))

    def fails(_: object) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(optimizer_warmup, "warm", fails)
    loops = JobLoops(wait_registry)
    loops.begin(JOB, layout(), ASYNC, None, NO_CLIPPING)
    loops.await_loaded(JOB, wait_ms=None)
    until(lambda: failed == [RuntimeError])
    assert missing(needed(layout(), ASYNC, None, NO_CLIPPING)) != []
    loops.close()


def test_the_command_compiles_all_loops(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer_warmup.main()
    assert compiler.given == names(every_loop())
    monkeypatch.setattr(cache, "folder_of", lambda _: None)
    with pytest.raises(SystemExit, match="no folder"):
        optimizer_warmup.main()


def test_the_mark_is_of_this_source_and_this_compiler_and_of_these_loops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not is_marked(tmp_path, KIND)
    mark(tmp_path, KIND)
    assert is_marked(tmp_path, KIND)
    assert not is_marked(tmp_path, "others")
    monkeypatch.setattr(cache.llvm, "get_host_cpu_name", lambda: "another")
    assert not is_marked(tmp_path, KIND)


def test_the_lock_makes_its_folder(tmp_path: Path) -> None:
    with compiler_lock(tmp_path / "new" / "folder", KIND):
        assert (tmp_path / "new" / "folder").is_dir()
