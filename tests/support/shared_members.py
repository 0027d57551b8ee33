"""Members of a group that share memory, each in a process of its own."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, Pipe
from typing import Any

from shardyard_worker.collectives.group_store import GroupLost
from shardyard_worker.collectives.shared_members import Offer, OfferedMemory, SharedMembers

MOMENT_S = 30.0
Run = Callable[[SharedMembers], object]


class Processes:
    """What each runs. `nbytes`: of a member's memory."""

    def __init__(self, runs: Sequence[Run], nbytes: int, check: Callable[[], None]) -> None:
        self._pipes: list[Connection] = []
        self.pids: list[int] = []
        for run in runs:
            ours, theirs = Pipe()
            pid = os.fork()
            if not pid:
                code = 1
                try:
                    theirs.send(self._take_part(theirs, run, nbytes, check))
                    theirs.recv()
                    code = 0
                finally:
                    os._exit(code)
            theirs.close()
            self._pipes.append(ours)
            self.pids.append(pid)
        offers = [pipe.recv() for pipe in self._pipes]
        for pipe in self._pipes:
            pipe.send(offers)
        assert all(pipe.recv() for pipe in self._pipes), "all have joined, before one leaves"
        for pipe in self._pipes:
            pipe.send(True)

    @staticmethod
    def _take_part(pipe: Connection, run: Run, nbytes: int, check: Callable[[], None]) -> object:
        memory = OfferedMemory(nbytes)
        pipe.send(str(memory.offer))
        members = memory.join([offer for offer in map(Offer.of, pipe.recv()) if offer is not None], check)
        pipe.send(True)
        pipe.recv()
        try:
            return run(members)
        except GroupLost as error:
            return str(error)
        finally:
            members.leave()

    def result(self, place: int) -> Any:
        assert self._pipes[place].poll(MOMENT_S), f"member {place} says nothing"
        return self._pipes[place].recv()

    def results(self) -> list[Any]:
        return [self.result(place) for place in range(len(self.pids))]

    def end(self) -> None:
        for pipe, pid in zip(self._pipes, self.pids, strict=True):
            pipe.close()
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


@contextmanager
def processes() -> Iterator[Callable[..., Processes]]:
    """Starts what it is given, and ends it."""
    started: list[Processes] = []

    def start(*runs: Run, nbytes: int, check: Callable[[], None] = lambda: None) -> Processes:
        started.append(Processes(runs, nbytes, check))
        return started[-1]

    try:
        yield start
    finally:
        for each in started:
            each.end()
