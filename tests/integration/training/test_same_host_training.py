"""The same training over shared memory and over streams: the same bits, also with views; and nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardyard.config import configuration
from shardyard.config.settings import Settings
from shardyard.domain import limits
from shardyard.domain.errors import NotShareable
from shardyard.transport.shared_memory import SharedMemory
from shardyard.wire import methods
from shardyard.wire.v1 import parameter_server_pb2 as wire
from shardyard_launcher.yard.in_process import COORDINATOR, LocalYard
from shardyard_ps_server.values import shm_regions
from shardyard_worker.exchange.buffers import buffer_layout
from shardyard_worker.job import connect as worker
from tests.support.alone import SYNC, Connect
from tests.support.yards import Probes, finish, running_yard

SYNC_RUN = {"job__consistency__mode": "sync", "job__consistency__logical_ranks": 2, "job__workers_expected": 1}


def shared_lines(job: worker.Job) -> list[bool]:
    """For each server, whether payloads lie in shared memory."""
    assert job._loop.trainer is not None
    return [line.shared for line in job._loop.trainer.router._streams.values()]


# ---- processes


@pytest.mark.long
def test_promise_6_bits_do_not_depend_on_the_transport(tmp_path: Path) -> None:
    """A network with buffers and a schedule; two servers, one, shared memory or not, copies or views."""
    found = {}
    for servers in (1, 2):
        with running_yard(tmp_path / f"yard-{servers}", servers=servers) as yard, Probes(tmp_path) as probes:
            for transport in (
                {"same_host": "never"},
                {"same_host": "auto"},
                {"same_host": "auto", "exchange": "overlapped"},
            ):
                settings = {f"worker__{name}": value for name, value in transport.items()}
                name = "-".join((str(servers), *transport.values()))
                given = SYNC_RUN | settings | {"coordinator": yard.coordinator, "job": name}
                found[name] = probes.run("model", "--samples", "64", **given)
    assert len(found) == 6
    assert len({run["digest"] for run in found.values()}) == 1, found
    assert len({run["step"] for run in found.values()}) == 1


@pytest.mark.long
@pytest.mark.parametrize("victim", ["server", "worker"])
def test_killed_process_leaves_nothing_in_dev_shm(
    tmp_path: Path, victim: str, shared_memory: Callable[[], frozenset[str]]
) -> None:
    before = shared_memory()
    with running_yard(tmp_path / "yard", servers=1) as yard, Probes(tmp_path) as probes:
        # with a checkpoint the job would wait for another server
        given = {"job__checkpoint__url": "never"} if victim == "server" else {}
        script, out = probes.start("count", "--pause-ms", "5", "--epochs", "50", coordinator=yard.coordinator, **given)
        script.wait_for("computed 3")
        server = next(process.pid for process in yard.state.processes if process.name.startswith("server"))
        # they do share memory
        assert memory_of(server) > 0
        assert memory_of(script.process.pid) > 0
        if victim == "server":
            os.kill(server, signal.SIGKILL)
            assert script.wait() != 0
        else:
            script.kill()
            other, out = probes.start("count", "--epochs", "1", coordinator=yard.coordinator, job="next")
            finish(other, out)
        assert shared_memory() <= before
    assert shared_memory() <= before


def memory_of(pid: int) -> int:
    """How many memfds of ours a process has open."""
    found = 0
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            found += os.readlink(f"/proc/{pid}/fd/{fd}").startswith("/memfd:shardyard")
    return found


# ---- inside one process


class Model(torch.nn.Module):
    """A weight over several pages, a small bias, a frozen parameter, and one that gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(60, 50, dtype=torch.float64)
        self.frozen = torch.nn.Parameter(torch.arange(2_000.0), requires_grad=False)
        self.unused = torch.nn.Parameter(torch.arange(1_500.0))
        self.last = torch.nn.Linear(50, 1, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(torch.tanh(self.first(x)))
        return found


def prepared(connect: Connect, **settings: Any) -> tuple[worker.Job, Model, torch.optim.Optimizer]:
    torch.manual_seed(5)
    job = connect(**settings)
    model = Model()
    model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
    return job, model, optimizer


def step(model: Model, optimizer: torch.optim.Optimizer, number: int) -> None:
    x = torch.sin(torch.arange(4 * 60, dtype=torch.float64).reshape(4, 60) + number)
    optimizer.zero_grad(set_to_none=bool(number % 2))
    model(x).square().sum().backward()
    optimizer.step()


def state(model: Model) -> dict[str, np.ndarray[Any, Any]]:
    return {name: tensor.detach().clone().numpy() for name, tensor in model.state_dict().items()}


def assert_equal(found: dict[str, np.ndarray[Any, Any]], expected: dict[str, np.ndarray[Any, Any]]) -> None:
    assert found.keys() == expected.keys()
    for name, array in found.items():
        assert array.tobytes() == expected[name].tobytes(), name


WAYS = {
    "streams": {"worker.same_host": "never"},
    "copies": {"worker.same_host": "auto"},
    "views": {"worker.same_host": "auto", "worker.exchange": "overlapped"},
    "views over streams": {"worker.same_host": "never", "worker.exchange": "overlapped"},
}


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_frozen_and_unused_parameters_stay_and_all_ways_give_the_same_bits(connect: Connect, mode: str) -> None:
    begin = state(Model())
    found = {}
    for way, given in WAYS.items():
        job, model, optimizer = prepared(connect, **given, **(SYNC if mode == "sync" else {}))
        for number in range(12):
            step(model, optimizer, number)
        assert shared_lines(job) == [given["worker.same_host"] == "auto"] * 2
        found[way] = state(model)
        job.close()
    for way in WAYS:
        assert_equal(found[way], found["streams"])
        assert found[way]["frozen"].tobytes() == begin["frozen"].tobytes()
        assert found[way]["unused"].tobytes() == begin["unused"].tobytes()
        assert found[way]["first.weight"].tobytes() != begin["first.weight"].tobytes()


def change_data(parameter: torch.nn.Parameter) -> None:
    parameter.data.add_(100.0)


def change_without_gradient(parameter: torch.nn.Parameter) -> None:
    with torch.no_grad():
        parameter.add_(100.0)


def change_by_numpy(parameter: torch.nn.Parameter) -> None:
    array = parameter.detach().numpy()
    array[...] = array + 100.0


def change_one(parameter: torch.nn.Parameter) -> None:
    parameter.data.view(-1)[-1] = 100.0


CHANGES = [change_data, change_without_gradient, change_by_numpy, change_one]


@pytest.mark.parametrize("change", CHANGES)
def test_change_in_place_lasts_until_the_next_pull_and_no_longer(
    connect: Connect, change: Callable[[torch.nn.Parameter], None]
) -> None:
    """Gradients are computed with it; the servers never hear of it; and the places of versions come again."""
    seen: dict[str, list[dict[str, np.ndarray[Any, Any]]]] = {}
    for way, given in WAYS.items():
        job, model, optimizer = prepared(connect, **given)
        seen[way] = []
        for number in range(12):
            if number % 3:
                for parameter in model.parameters():
                    before = parameter.detach().clone()
                    change(parameter)
                    assert not torch.equal(parameter.detach(), before)
                seen[way].append(state(model))
            if number % 3 == 2:
                pull_into(job)
                assert_equal(state(model), {name: value.numpy() for name, value in job.pull().items()})
                seen[way].append(state(model))
            step(model, optimizer, number)
            seen[way].append(state(model))
        assert_equal(state(model), {name: value.numpy() for name, value in job.pull().items()})
        job.close()
    for way, states in seen.items():
        for found, expected in zip(states, seen["streams"], strict=True):
            assert_equal(found, expected)
        assert len(states) == 24, way


def pull_into(job: worker.Job) -> None:
    """The newest values into the model."""
    assert job._loop.trainer is not None
    job._loop.trainer.pull_newest()


@pytest.mark.parametrize("way", ["copies", "views"])
def test_change_in_place_is_not_seen_again_after_the_stream_was_reopened(connect: Connect, way: str) -> None:
    """Places that were known before come again in memory that is attached anew."""
    job, model, optimizer = prepared(connect, **WAYS[way])
    _, calm, calm_optimizer = prepared(connect, **WAYS["streams"])
    assert job._loop.trainer is not None
    for number in range(16):
        step(model, optimizer, number)
        step(calm, calm_optimizer, number)
        assert_equal(state(model), state(calm))
        change_data(model.first.weight)
        pull_into(job)
        if number % 4 == 3:
            for line in job._loop.trainer.router._streams.values():
                line.cancel()
            change_data(model.first.weight)
            pull_into(job)
        assert_equal(state(model), state(calm))
        assert shared_lines(job) == [True, True]


def test_view_keeps_its_values_while_others_push(connect: Connect) -> None:
    given = {"log.level": "error", "yard.servers": 2, "job.partitions": 4}
    with yard_of(configuration.load(None, {}, given).settings) as (yard, inside):
        mine = inside.model_copy(update={"worker": inside.worker.model_copy(update={"exchange": "overlapped"})})
        with worker.connect(mine, network=yard.network) as one, worker.connect(inside, network=yard.network) as two:
            first, second = Model(), Model()
            first.load_state_dict(second.state_dict())
            first, optimizer = one.prepare(first, torch.optim.SGD(first.parameters(), lr=0.05))
            second, other_optimizer = two.prepare(second, torch.optim.SGD(second.parameters(), lr=0.05))
            assert shared_lines(one) == [True, True]
            for number in range(6):
                step(first, optimizer, number)
                seen = state(first)
                for more in range(5):
                    step(second, other_optimizer, more)
                assert_equal(state(first), seen)


@contextmanager
def yard_of(settings: Settings) -> Iterator[tuple[LocalYard, Settings]]:
    yard = LocalYard(settings)
    try:
        yield yard, settings.model_copy(update={"coordinator": COORDINATOR})
    finally:
        yard.close()


@pytest.mark.parametrize("way", WAYS)
def test_more_workers_than_streams_train_all_the_same(
    connect: Connect, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that has more streams than threads ends those beyond after each exchange."""
    monkeypatch.setattr(limits, "EXCHANGE_STREAMS_MAX", 0)
    job, model, optimizer = prepared(connect, **WAYS[way] | {"membership.coordinator_grace_ms": 2_000})
    _, calm, calm_optimizer = prepared(connect, **WAYS["streams"])
    for number in range(3):
        step(model, optimizer, number)
        step(calm, calm_optimizer, number)
    assert_equal(state(model), state(calm))
    job.close()


@pytest.mark.parametrize("which", ["server", "worker"])
def test_one_side_that_cannot_share_makes_both_use_streams(
    connect: Connect, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Forbidden(SharedMemory):
        def __init__(self, *_: object, **__: object) -> None:
            self._fd = -1
            raise NotShareable("a container forbids it")

    monkeypatch.setattr(shm_regions if which == "server" else buffer_layout, "SharedMemory", Forbidden)
    job, model, optimizer = prepared(connect, **WAYS["views"])
    for number in range(3):
        step(model, optimizer, number)
    assert shared_lines(job) == [False, False]


def test_status_says_who_shares_memory() -> None:
    settings = configuration.load(None, {}, {"log.level": "error", "yard.servers": 1}).settings
    with yard_of(settings) as (yard, inside):
        streaming = inside.model_copy(update={"worker": inside.worker.model_copy(update={"same_host": "never"})})
        peer = yard.network.connect("in-process:server-0", name="server")

        def counted() -> tuple[int, int]:
            said = peer.call(methods.DESCRIBE_SERVER, wire.DescribeServerRequest(), timeout_ms=5_000)
            return said.workers_attached, said.workers_streaming

        with (
            worker.connect(inside, network=yard.network) as one,
            worker.connect(streaming, network=yard.network) as two,
        ):
            for job in (one, two):
                job.register({"a": torch.zeros(3)})
            assert counted() == (1, 1)
        assert counted() == (0, 0)
