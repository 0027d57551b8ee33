"""Loops are compiled once on a machine, whoever starts at the same time, dies, or is told to stop; a server says so."""

from __future__ import annotations

import errno
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shardyard.runtime.waits import WaitRegistry
from shardyard_ps_server.jit import cache, optimizer_warmup
from shardyard_ps_server.jit.cache import is_marked, mark, once
from shardyard_ps_server.jit.optimizer_warmup import COMPILES, COMPILES_ALWAYS, KIND, load_optimizer_loops

DEADLINE_S = 30


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.01)


@pytest.fixture
def wait_registry() -> Iterator[WaitRegistry]:
    made = WaitRegistry(logger=logging.getLogger("shardyard.server"))
    yield made
    made.close()


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each time that a compiler ran, or read what there was: whether it had to compile."""
    found: list[bool] = []
    monkeypatch.setattr(cache, "folder_of", lambda _: tmp_path)
    monkeypatch.setattr(optimizer_warmup, "_warm", lambda: found.append(not is_marked(tmp_path, KIND)))
    return found


def test_the_mark_is_of_this_source_and_this_compiler_and_of_these_loops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not is_marked(tmp_path, KIND)
    mark(tmp_path, KIND)
    assert is_marked(tmp_path, KIND)
    assert not is_marked(tmp_path, "others")
    monkeypatch.setattr(cache.llvm, "get_host_cpu_name", lambda: "another")
    assert not is_marked(tmp_path, KIND)


def test_servers_that_start_together_compile_once_and_all_say_why_they_take_long(
    tmp_path: Path, compiled: list[bool], wait_registry: WaitRegistry
) -> None:
    told: list[str] = []
    servers = [
        threading.Thread(target=load_optimizer_loops, args=[wait_registry, told.append, threading.Event()])
        for _ in range(4)
    ]
    for server in servers:
        server.start()
    for server in servers:
        server.join(DEADLINE_S)
    assert sum(compiled) == 1
    assert len(compiled) == 5  # and each reads what is there
    assert told == [COMPILES] * len(told)
    load_optimizer_loops(wait_registry, lambda what: pytest.fail(what), threading.Event())
    assert (sum(compiled), len(compiled)) == (1, 6)


def test_loops_of_a_process_that_died_are_compiled_by_another_one(
    tmp_path: Path, compiled: list[bool], wait_registry: WaitRegistry
) -> None:
    script = (
        "import sys, pathlib, threading; from shardyard_ps_server.jit.cache import once\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        f"once(folder, {KIND!r}, lambda: ((folder / 'begun').touch(), input()), threading.Event())"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdin=subprocess.PIPE) as other:
        until((tmp_path / "begun").exists)
        told = threading.Event()
        server = threading.Thread(
            target=load_optimizer_loops, args=[wait_registry, lambda _: told.set(), threading.Event()]
        )
        server.start()
        assert told.wait(DEADLINE_S)
        until(lambda: f"loops of optimizers to be compiled to {tmp_path}" in wait_registry.waiting_for)
        assert compiled == []
        other.kill()
    server.join(DEADLINE_S)
    assert compiled == [True, False]


def test_who_is_told_to_stop_while_another_one_compiles_waits_for_nothing(
    tmp_path: Path, compiled: list[bool], wait_registry: WaitRegistry
) -> None:
    begun, free, stop = threading.Event(), threading.Event(), threading.Event()

    def compiles() -> None:
        begun.set()
        assert free.wait(DEADLINE_S)

    other = threading.Thread(target=once, args=[tmp_path, KIND, compiles, threading.Event()])
    other.start()
    assert begun.wait(DEADLINE_S)
    server = threading.Thread(target=load_optimizer_loops, args=[wait_registry, lambda _: stop.set(), stop])
    server.start()
    server.join(DEADLINE_S)
    assert not server.is_alive()
    assert compiled == []
    free.set()
    other.join(DEADLINE_S)


def test_where_a_folder_takes_no_file_each_process_compiles_and_says_so(
    tmp_path: Path,
    compiled: list[bool],
    wait_registry: WaitRegistry,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cache, "once", full)
    load_optimizer_loops(wait_registry, lambda _: None, threading.Event())
    assert compiled == [True]
    assert "No space left on device" in caplog.text
    told: list[str] = []
    monkeypatch.setattr(cache, "folder_of", lambda _: None)
    load_optimizer_loops(wait_registry, told.append, threading.Event())
    assert compiled == [True, True]
    assert told == [COMPILES_ALWAYS]


def test_the_command_compiles_to_disk(tmp_path: Path, compiled: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer_warmup.main()
    optimizer_warmup.main()
    assert compiled == [True]
    monkeypatch.setattr(cache, "folder_of", lambda _: None)
    with pytest.raises(SystemExit, match="no folder"):
        optimizer_warmup.main()
