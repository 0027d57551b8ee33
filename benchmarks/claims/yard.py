"""A yard of processes that trains one job after the other, each with its own settings, rates and delays.

Owns: the names of jobs, and what the servers are asked during a job. Must not know: claims.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any

from harness.machine.delays import Delays
from harness.measuring.report import Span
from harness.processes.sides import Side, shardyard_side
from shardyard.transport.grpc_client import GrpcNetwork
from shardyard.transport.interfaces import Peer
from shardyard.wire import methods
from shardyard.wire.v1 import coordinator_pb2 as coordinator_wire
from shardyard.wire.v1 import parameter_server_pb2 as server_wire

PROGRAM = "shardyard.consistency"
TRAIN_S_MAX = 300.0
ASK_MS = 5_000

Step = Sequence[float]
"""Its number, when it began, when its gradient was there, when it was over."""


@dataclass(frozen=True, slots=True)
class Trained:
    """The workers' answers by number, and the most steps that were missing from values of a bounded job."""

    answers: Sequence[Mapping[str, Any]]
    staleness: int

    @property
    def steps(self) -> list[list[Step]]:
        """The steps of each worker."""
        return [answer["steps"] for answer in self.answers]

    @property
    def begun_s(self) -> float:
        """The begin of the first step of any worker."""
        return min(steps[0][1] for steps in self.steps if steps)


class Yard:
    def __init__(self, side: Side) -> None:
        self._side = side
        self._names = count()

    def train(
        self,
        do: str,
        *,
        settings: Mapping[str, object],
        workers: int | None = None,
        delays: Delays | None = None,
        **arguments: Any,
    ) -> Trained:
        """Runs one whole job."""
        count_ = len(self._side.workers[:workers])
        name = f"claim-{next(self._names)}"
        given = {"job.workers_expected": count_, **settings}
        if delays is not None:
            arguments["delays"] = asdict(delays)
        answers = self._side.ask(do, workers=workers, timeout_s=TRAIN_S_MAX, job=name, settings=given, **arguments)
        is_bounded = given["job.consistency.mode"] == "bounded"
        found = Trained(answers, self._staleness(name) if is_bounded else 0)
        self._side.ask("leave", workers=workers)
        return found

    def _staleness(self, name: str) -> int:
        """Opens connections for this call alone, so that this process serves none while workers train."""
        network = GrpcNetwork(None)
        with ExitStack() as stack:

            def connected(address: str) -> Peer:
                peer = network.connect(address, name=address)
                stack.callback(peer.close)
                return peer

            request = coordinator_wire.StatusRequest()
            status = connected(self._side.coordinator).call(methods.STATUS, request, timeout_ms=ASK_MS)
            (job,) = [each.job for each in status.jobs if each.name == name]
            asked = server_wire.DescribeServerRequest()
            servers = [connected(address) for address in self._side.servers]
            described = [each.call(methods.DESCRIBE_SERVER, asked, timeout_ms=ASK_MS) for each in servers]
        return max((found.most for reply in described for found in reply.staleness if found.job == job), default=0)


@contextmanager
def yard(*, workers: int, servers: int = 2, settings: Mapping[str, object] | None = None) -> Iterator[Yard]:
    with shardyard_side(PROGRAM, workers=workers, servers=servers, settings=settings, tls=False) as side:
        yield Yard(side)


def timeline(trained: Trained, *, begin: int, seconds: float) -> dict[str, list[Span]]:
    """Returns the workers' steps of a period that starts when the first of them begins step `begin`."""
    first_s = min(step[1] for steps in trained.steps for step in steps[begin:])
    return {
        f"worker {worker}": [
            span
            for _, begun, computed, over in steps
            if begun < first_s + seconds and over > first_s
            for span in (
                Span("computes", max(begun - first_s, 0.0), min(computed - first_s, seconds)),
                Span("exchanges, waits", max(computed - first_s, 0.0), min(over - first_s, seconds)),
            )
            if span.end_s > span.begin_s
        ]
        for worker, steps in enumerate(trained.steps)
    }
