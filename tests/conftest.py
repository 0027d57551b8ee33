"""No test leaves anything behind: no process, thread, open file, connection, listening port, or file in /dev/shm."""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import os
import re
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from hypothesis import settings

from shardyard.runtime.log import PROCESS, ShardyardHandler

# where the user's processes find the certificates of yards; not the developer's own
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="shardyard-tests-")
atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)

# a busy machine is no fault
settings.register_profile("shardyard", deadline=None)
settings.load_profile("shardyard")

# a shell ignores these for what it starts in the background, and processes inherit that; many tests send them
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

SETTLE_S = 5.0
TCP_ESTABLISHED, TCP_LISTEN = 1, 10  # linux/include/net/tcp_states.h
LONG = "long"
NUMBER = re.compile(r"\d+")
# grpc's own, which live as long as it likes; loader threads of torch
NOT_OURS = ("_channel_spin", "channel_spin", "_ping_thread", "pin_memory", "_poll_connectivity", "asyncio_")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A test that is `long` for all but some of its variants is not, for those."""
    named, met = set(), set()
    for item in items:
        for mark in [each for each in item.own_markers if each.name == LONG]:
            variant = item.name.partition("[")[2].removesuffix("]")
            function = item.nodeid.partition("[")[0]
            named |= {f"{function}[{name}]" for name in mark.args}
            if variant in mark.args:
                met.add(item.nodeid)
                item.own_markers.remove(mark)
    if config.option.markexpr and named - met:
        raise pytest.UsageError(f"no such variants: {', '.join(sorted(named - met))}")


def pytest_collection_finish() -> None:
    """No collection of garbage looks at the thousands of tests and what they have imported."""
    gc.collect()
    gc.freeze()


@dataclass(frozen=True)
class Belongings:
    """What this process has that a test may have left behind."""

    threads: frozenset[threading.Thread]
    children: frozenset[int]
    listening: frozenset[int]
    connections: int
    files: frozenset[str]
    shared_memory: frozenset[str]

    def without(self, other: Belongings) -> list[str]:
        return [
            *(f"thread {thread.name}" for thread in self.threads - other.threads),
            *(f"process {pid}" for pid in self.children - other.children),
            *(f"listening port {port}" for port in self.listening - other.listening),
            *(f"open file {path}" for path in self.files - other.files),
            *(
                [f"{self.connections} connections, not {other.connections}"]
                if self.connections > other.connections
                else []
            ),
            *(f"/dev/shm/{name}" for name in self.shared_memory - other.shared_memory),
        ]


def descendants() -> frozenset[int]:
    """Processes that this one has started, and those that they have. Where the kernel tells, not by a look at all
    processes there are, which every test would take twice."""
    if not Path(f"/proc/self/task/{os.getpid()}/children").exists():
        return frozenset(child.pid for child in psutil.Process().children(recursive=True))
    found: set[int] = set()
    unasked = [os.getpid()]
    while unasked:
        # one that has ended meanwhile has none
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for task in list(Path(f"/proc/{unasked.pop()}/task").iterdir()):
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    children = [int(word) for word in (task / "children").read_text().split()]
                    unasked += children
                    found.update(children)
    return frozenset(found)


def names_in_shared_memory() -> frozenset[str]:
    """In /dev/shm, but for what carries the number of a living process that is none of ours: of tests that run at the
    same time, as torch and the simulator name them."""
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return frozenset()
    found_there = os.listdir(folder)
    if not found_there:
        return frozenset()
    ours = {os.getpid(), *descendants()}
    names = ((name, NUMBER.search(name)) for name in found_there)
    return frozenset(
        name for name, found in names if not found or int(found[0]) in ours or not psutil.pid_exists(int(found[0]))
    )


@pytest.fixture
def shared_memory() -> Callable[[], frozenset[str]]:
    return names_in_shared_memory


def sockets() -> tuple[frozenset[int], int]:
    """The ports on which this process listens, and how many connections it has. The kernel is asked for each socket:
    its table of all connections takes 10 ms to read."""
    listening: set[int] = set()
    connections = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as each:
                if each.family not in (socket.AF_INET, socket.AF_INET6) or each.type != socket.SOCK_STREAM:
                    continue
                state = each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
                connections += state == TCP_ESTABLISHED
                if state == TCP_LISTEN:
                    listening.add(each.getsockname()[1])
    return frozenset(listening), connections


def look() -> Belongings:
    listening, connections = sockets()
    return Belongings(
        frozenset(t for t in threading.enumerate() if t.is_alive() and not any(name in t.name for name in NOT_OURS)),
        descendants(),
        listening,
        connections,
        frozenset(each.path for each in psutil.Process().open_files()),
        names_in_shared_memory(),
    )


def wait_until_clean(before: Belongings) -> list[str]:
    """What is there beyond `before`, after a while for it to go."""
    until = time.monotonic() + SETTLE_S
    while left := look().without(before):
        if time.monotonic() > until:
            return left
        time.sleep(0.02)
    return []


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    before = look()
    yield
    left = wait_until_clean(before)
    assert not left, f"the test left behind: {', '.join(left)}"


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    """Takes back what a test did to this process's log. A command sets it up, for a stream that ends with the test; a
    session binds its role, job and step, which every later line of the process would carry."""
    root = logging.getLogger()
    level, fields = root.level, PROCESS.fields
    yield
    root.setLevel(level)
    PROCESS.clear()
    PROCESS.bind(fields)
    for handler in list(root.handlers):
        if isinstance(handler, ShardyardHandler):
            root.removeHandler(handler)


@pytest.fixture(scope="session", autouse=True)
def session_leaves_nothing_behind() -> Iterator[None]:
    before = look()
    yield
    left = wait_until_clean(before)
    assert not left, f"the tests left behind: {', '.join(left)}"
