"""One command's connection to a coordinator. Each call has a deadline, and says what it waits for if it takes long."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Final, Self, TypeVar

from shardyard.domain.errors import CoordinatorUnavailable
from shardyard.runtime.waits import ExplainedWait, WaitRegistry
from shardyard.transport.enrolment import Renewal
from shardyard.transport.interfaces import Network
from shardyard.wire import methods
from shardyard.wire.method import Method
from shardyard.wire.v1 import coordinator_pb2 as wire

TIMEOUT_MS: Final = 10_000
ASK_AGAIN_S: Final = 0.1

Sent = TypeVar("Sent")
Answered = TypeVar("Answered")


class CoordinatorClient:
    """For a `with` block. Calls raise CoordinatorUnavailable, and what the coordinator answers."""

    def __init__(self, address: str, network: Network) -> None:
        self.address = address
        self.peer = network.connect(address, name="coordinator", unavailable=CoordinatorUnavailable)
        self._renewal = Renewal(self.peer)
        self._wait_registry = WaitRegistry()

    def call(
        self, method: Method[Sent, Answered], request: Sent, what: str, *, timeout_ms: int = TIMEOUT_MS
    ) -> Answered:
        """`what`: what the coordinator is asked to do, such as "to stop the job"."""
        with self._wait_registry.over(lambda: f"the {self.peer.name} {what}"):
            return self.peer.call(method, request, timeout_ms=timeout_ms)

    def status(self, *, timeout_ms: int = TIMEOUT_MS) -> wire.StatusReply:
        """Renews the caller's certificate too, if it is time."""
        reply = self.call(methods.STATUS, wire.StatusRequest(), "to report its state", timeout_ms=timeout_ms)
        self._renewal.look(reply.authorities)
        return reply

    def watch(self, job: int, waiting_for: Callable[[], str]) -> Iterator[wire.JobStatus | None]:
        """The job's status, again and again; None if the coordinator does not know the job."""
        with ExplainedWait(waiting_for) as wait:
            while True:
                yield next((each for each in self.status().jobs if each.job == job), None)
                wait.tick()
                time.sleep(ASK_AGAIN_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *ended: object) -> None:
        self._wait_registry.close()
        self.peer.close()
