"""Transfers between stages."""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import FileStore, ProcessGroupGloo

from shardyard_worker.pipeline.process_group import StageGroup
from shardyard_worker.replicas.group_store import GroupLost
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


class Members:
    """The first of two. `is_lost`: whether the coordinator says that the other one is gone."""

    place, size = 0, 2

    def __init__(self, store: Path, is_lost: Callable[[], bool]) -> None:
        self._is_lost = is_lost
        self.process_group = connect(store, 0)

    def check(self) -> None:
        if self._is_lost():
            raise GroupLost("the group lacks a member")


def stand_still(store: Path) -> None:
    """The second one, in the middle of a transfer."""
    begun = connect(store, 1).recv([torch.empty(LARGE)], 0, TAG)
    os.kill(os.getpid(), signal.SIGSTOP)
    begun.wait()


def send(store: Path, lost: Path) -> None:
    members: Any = Members(store, lost.exists)
    group = StageGroup(members, members)
    begun = group.send([torch.empty(LARGE)], 1, TAG)
    with contextlib.suppress(GroupLost):
        begun.wait()
        return
    group.end()
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


@pytest.mark.parametrize("how", ["frozen", "killed"])
def test_transfer_to_a_lost_stage_is_given_up(tmp_path: Path, fork: Callable[..., int], how: str) -> None:
    """gloo waits on, since a part of it was sent."""
    store, lost = tmp_path / "store", tmp_path / "lost"
    other = fork(stand_still, store)
    sender = fork(send, store, lost)
    os.waitpid(other, os.WUNTRACED)
    time.sleep(0.2)
    assert os.waitpid(sender, os.WNOHANG) == (0, 0), "it waits"
    if how == "frozen":
        lost.touch()
    else:
        os.kill(other, signal.SIGKILL)
    wait_until(lambda: is_gone(sender))
    assert os.waitstatus_to_exitcode(os.waitpid(sender, 0)[1]) == GIVEN_UP
