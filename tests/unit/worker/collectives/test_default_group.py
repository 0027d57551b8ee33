"""Transfers between stages, and collectives of FSDP2, with a member that is lost."""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import FileStore, ProcessGroupGloo

from shardyard_worker.collectives.collectives import Collectives
from shardyard_worker.collectives.connection import Connection
from shardyard_worker.collectives.default_group import CollectiveGroup, DefaultGroup
from shardyard_worker.collectives.group_store import GroupLost
from shardyard_worker.collectives.messages import SENDS_MAX
from shardyard_worker.pipeline.process_group import StageGroup
from tests.support.waiting import is_gone, wait_until

LARGE = 10_000_000
"""Elements, more than connections take while nobody reads."""
TAG = 5
GIVEN_UP = 3


def connect(store: Path, place: int) -> Any:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = datetime.timedelta(seconds=60)
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return ProcessGroupGloo(FileStore(str(store), 2), place, 2, options)


class Members(Collectives):
    """The first of two. `is_lost`: whether the coordinator says that the other one is gone."""

    def __init__(self, store: Path, is_lost: Callable[[], bool]) -> None:
        self.place, self.size, self._sums, self.shared_messages = 0, 2, None, None
        self._is_lost = is_lost
        self._connection = Connection(connect(store, 0))
        self._pending = []

    def check(self) -> None:
        if self._is_lost():
            raise GroupLost("the group lacks a member")


def of_stages(members: Collectives, *, receives: bool) -> None:
    group, tensor = StageGroup(members, members), torch.empty(LARGE)
    try:
        if receives:
            group.recv([tensor], 1, TAG).wait()
        for _ in range(SENDS_MAX + 1):
            group.send([tensor], 1, TAG).wait()
    finally:
        group.end()


def of_collectives(begin: Callable[[], object], members: Collectives) -> None:
    group = DefaultGroup(CollectiveGroup(members), members)
    try:
        begin()
    finally:
        group.end()


TRANSFERS: dict[str, Callable[[Collectives], None]] = {
    "sent": partial(of_stages, receives=False),
    "received": partial(of_stages, receives=True),
    "gather": partial(of_collectives, lambda: dist.all_gather_into_tensor(torch.empty(2 * LARGE), torch.zeros(LARGE))),
    "cut": partial(of_collectives, lambda: dist.reduce_scatter_tensor(torch.empty(LARGE), torch.zeros(2 * LARGE))),
}


def stand_still(store: Path, name: str) -> None:
    """The second one, in the middle of a transfer."""
    gloo, tensors = connect(store, 1), [torch.empty(LARGE)]
    if name == "sent":
        begun = gloo.recv(tensors, 0, TAG)
    else:
        begun = gloo.send(tensors, 0, TAG) if name == "received" else gloo.allreduce([torch.zeros(1)])
    os.kill(os.getpid(), signal.SIGSTOP)
    begun.wait()


def transfer(store: Path, lost: Path, name: str) -> None:
    with contextlib.suppress(GroupLost):
        TRANSFERS[name](Members(store, lost.exists))
        return
    os._exit(GIVEN_UP)


@pytest.fixture
def fork() -> Iterator[Callable[..., int]]:
    """Runs a function in a process of its own; a transfer that was given up stays until its process ends."""
    started = []

    def start(run: Callable[..., None], *given: object) -> int:
        pid = os.fork()
        if not pid:
            try:
                run(*given)
            finally:
                os._exit(0)
        started.append(pid)
        return pid

    yield start
    for pid in started:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("sent", "frozen"),
        ("sent", "killed"),
        ("received", "frozen"),
        ("received", "killed"),
        ("gather", "frozen"),
        ("cut", "frozen"),
    ],
)
def test_transfer_to_a_lost_member_is_given_up(tmp_path: Path, fork: Callable[..., int], name: str, how: str) -> None:
    """gloo waits on, since a part of it was sent."""
    store, lost = tmp_path / "store", tmp_path / "lost"
    other = fork(stand_still, store, name)
    sender = fork(transfer, store, lost, name)
    os.waitpid(other, os.WUNTRACED)
    time.sleep(0.2)
    assert os.waitpid(sender, os.WNOHANG) == (0, 0), "it waits"
    if how == "frozen":
        lost.touch()
    else:
        os.kill(other, signal.SIGKILL)
    wait_until(lambda: is_gone(sender))
    assert os.waitstatus_to_exitcode(os.waitpid(sender, 0)[1]) == GIVEN_UP
