"""Callers that do harm, to the server and the coordinator of a yard of real processes at once. Meanwhile ada's worker
and its heartbeats are answered, and afterwards both processes have what they had before."""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
import torch

from shardyard.domain.limits import MIB
from shardyard.security.identity import Role
from shardyard.transport.grpc_client import GrpcPeer
from shardyard.transport.grpc_server import VITAL_THREADS
from shardyard.wire import methods
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_ps_server.service.process import THREADS
from tests.support.attacks import attacks
from tests.support.closed_yards import Job, Yard
from tests.support.waiting import wait_until

ATTACKS, Steps, Victim, carry_out = attacks.ATTACKS, attacks.Steps, attacks.Victim, attacks.carry_out
SERVICES = {"server": "ParameterServer", "coordinator": "Coordinator"}
ATTACK_S = 1.0
ANSWER_S_MAX = 5.0
"""What an exchange or a heartbeat may take meanwhile, on a machine that has other work too."""
FEW_FILES = 256
FILES_MORE_MAX = 4
OTHER_THREADS_MAX = 32
GROWTH_BYTES_MAX = 48 * MIB
"""What the memory of a process may grow by, from the end of one attack to the end of the same attack again."""
CLOSED_S_MAX = 20.0


class Use(NamedTuple):
    files: int
    threads: int
    memory_bytes: int


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Yard]:
    """It starts as on a machine where a process may have few files, unless it asks for more."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    # the limit is this process's too, which has files of the tests before
    resource.setrlimit(resource.RLIMIT_NOFILE, (FEW_FILES + psutil.Process().num_fds(), limits[1]))
    try:
        begun = Yard(tmp_path_factory.mktemp("yard") / "state")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    yield begun
    begun.cluster.stop()


@pytest.fixture(scope="module")
def job(yard: Yard) -> Iterator[Job]:
    begun = Job(yard, {"worker.same_host": "never"})
    yield begun
    begun.close()


@pytest.fixture(scope="module")
def heart(yard: Yard, job: Job) -> Iterator[GrpcPeer]:
    peer = yard.coordinator(job.network)
    exchange_and_beat(job, peer)
    yield peer
    peer.close()


@pytest.fixture(scope="module")
def victims(yard: Yard) -> list[Victim]:
    """As eve sees them, who has a worker's certificate."""
    credentials = yard.network(Role.WORKER, "eve").credentials
    assert credentials is not None
    return [Victim(yard.cluster.state.address_of(role), SERVICES[role], credentials.folder) for role in SERVICES]


def use_of(yard: Yard) -> dict[str, Use]:
    found = {}
    for process in yard.cluster.state.processes:
        if process.role in SERVICES:
            asked = psutil.Process(process.pid)
            found[process.role] = Use(asked.num_fds(), asked.num_threads(), asked.memory_info().rss)
    return found


@contextmanager
def under(attack: Callable[[Victim], Steps], victims: list[Victim]) -> Iterator[None]:
    stop = threading.Event()
    with ThreadPoolExecutor(len(victims), thread_name_prefix="attacker") as threads:
        running = [threads.submit(carry_out, attack, victim, stop) for victim in victims]
        try:
            yield
        finally:
            stop.set()
        for each in running:
            each.result()


def arrive(yard: Yard, job: Job) -> None:
    """A process that connects anew is answered by both."""
    for name, address in (("coordinator", yard.cluster.coordinator), ("server 1", yard.server)):
        peer = job.network.connect(address, name=name)
        method = methods.STATUS if name == "coordinator" else methods.DESCRIBE_SERVER
        peer.call(method, method.request.decode(b""), timeout_ms=int(ANSWER_S_MAX * 1_000))
        peer.close()


def exchange_and_beat(job: Job, heart: GrpcPeer) -> float:
    """The seconds that the slower of the two has taken."""
    begun = time.monotonic()
    job.inner.push({"w": torch.ones(20)})
    job.values = job.values - 0.5
    between = time.monotonic()
    heart.call(methods.HEARTBEAT, wire.HeartbeatRequest(caller=job.caller), timeout_ms=10_000)
    return max(between - begun, time.monotonic() - between)


@pytest.mark.parametrize("name", list(ATTACKS))
def test_attack_harms_nobody_and_leaves_nothing(
    name: str, yard: Yard, job: Job, heart: GrpcPeer, victims: list[Victim]
) -> None:
    before, processes = use_of(yard), [process.pid for process in yard.cluster.state.processes]
    after = []
    for _ in range(2):
        with under(ATTACKS[name], victims):
            until, slowest = time.monotonic() + ATTACK_S, 0.0
            while time.monotonic() < until:
                slowest = max(slowest, exchange_and_beat(job, heart))
            arrive(yard, job)
        assert slowest < ANSWER_S_MAX
        after.append(use_of(yard))

    def is_closed() -> bool:
        return all(use.files <= before[role].files + FILES_MORE_MAX for role, use in use_of(yard).items())

    wait_until(is_closed, "the connections of the attacker to be closed", deadline_s=CLOSED_S_MAX)
    for role, use in use_of(yard).items():
        assert use.threads <= THREADS + VITAL_THREADS + OTHER_THREADS_MAX
        assert use.memory_bytes - after[0][role].memory_bytes < GROWTH_BYTES_MAX, role
    job.check()
    assert yard.cluster.poll() == []
    assert [process.pid for process in yard.cluster.state.processes] == processes
    for process in yard.cluster.state.processes:
        assert "Traceback" not in Path(process.log).read_text()
