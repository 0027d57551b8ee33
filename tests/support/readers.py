"""A yard inside the test's own process, with readers of a job beside the workers that train it.

The fixture `alone` goes with it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import shardyard as sy
from shardyard.config import configuration
from shardyard.wire import methods
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard.wire.v1 import parameter_server_pb2 as server_wire
from shardyard_launcher.yard.in_process import COORDINATOR, LocalYard
from shardyard_worker.job import connect as worker
from shardyard_worker.reader import evaluator
from shardyard_worker.reader.evaluator import Run
from tests.support.alone import status

DEADLINE_S = 30.0
GIVEN = {"yard.servers": 2, "job.partitions": 4, "job.block_bytes": 64, "log.level": "error"}


class Yard:
    """`connect` returns jobs, `follow` evaluators. At the end of the block all of them are closed."""

    def __init__(self, **given: object) -> None:
        settings = configuration.load(None, {}, GIVEN | {"membership.heartbeat_ms": 50} | given).settings
        self.local = LocalYard(settings)
        self.network = self.local.network
        self._inside = settings.model_copy(update={"coordinator": COORDINATOR})
        self._closing: list[Callable[[], None]] = []

    def connect(self) -> sy.Job:
        job = worker.connect(self._inside, network=self.network)
        self._closing.append(job.close)
        return job

    def follow(self, name: str = "") -> Run:
        run = evaluator.follow(self._inside, name=name, network=self.network)
        self._closing.append(run.close)
        return run

    def status(self) -> wire.JobStatus:
        return status(self.local)

    def servers(self) -> list[server_wire.DescribeServerReply]:
        request = server_wire.DescribeServerRequest()
        peers = [self.network.connect(f"in-process:server-{index}", name="server") for index in range(2)]
        return [peer.call(methods.DESCRIBE_SERVER, request, timeout_ms=5_000) for peer in peers]

    @property
    def pins(self) -> int:
        return sum(server.pins for server in self.servers())

    def close(self) -> None:
        for close in self._closing:
            close()
        self.local.close()


@contextmanager
def yard(**given: object) -> Iterator[Yard]:
    made = Yard(**given)
    try:
        yield made
    finally:
        made.close()


def eventually(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < until
        threading.Event().wait(0.01)


class TrainingThread:
    """A thread that trains, step after step, from `begin` to `end`."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._failed: list[BaseException] = []
        self._thread = threading.Thread(target=self._run)

    def step(self) -> None:
        raise NotImplementedError

    def begin(self) -> None:
        self._thread.start()

    def end(self) -> None:
        self._stop.set()
        self._thread.join(DEADLINE_S)
        assert not self._failed, self._failed

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self.step()
        except BaseException as error:  # noqa: BLE001 - told by `end`
            self._failed.append(error)
