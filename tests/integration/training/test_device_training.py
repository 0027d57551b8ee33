"""Whole training over the copies of a GPU, whose work an engine of the CPU does; and autocast."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import shardyard as sy
from shardyard_worker.exchange.buffers import device_copies
from shardyard_worker.training import trainer
from tests.support.alone import SYNC, SYNC_2, Connect


class LateLane:
    """Does its work when the host waits for it, or when what it leads would have to. As with a stream of CUDA, a thread
    that waits also waits for the work that another thread has begun."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []
        self.working = threading.Lock()

    def follow(self) -> None: ...

    def launch(self, work: Callable[[], None]) -> None:
        self.waiting.append(work)

    def inside(self) -> AbstractContextManager[None]:
        return nullcontext()

    def keep(self, tensor: torch.Tensor) -> None: ...

    def mark(self) -> LateLane:
        return self

    def lead(self, event: LateLane) -> None:
        event.synchronize()

    def synchronize(self) -> None:
        with self.working:
            waiting, self.waiting = self.waiting, []
            for work in waiting:
                work()


class LateEngine:
    pinned: ClassVar[dict[int, bool]] = {}
    """By address, whether it is only read."""

    def lane(self) -> LateLane:
        return LateLane()

    def pin(self, address: int, nbytes: int, *, read_only: bool) -> str:
        assert address not in self.pinned
        self.pinned[address] = read_only
        return ""

    def unpin(self, address: int) -> None:
        del self.pinned[address]

    def host(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    LateEngine.pinned.clear()

    def choose(chosen: bool) -> None:
        find = (lambda where: LateEngine()) if chosen else device_copies.engine_of
        monkeypatch.setattr(trainer, "copies_for", lambda parameters: device_copies.copies_for(parameters, find))
        monkeypatch.setattr(device_copies, "EARLY_BYTES_MIN", 0)

    return choose


class Network(torch.nn.Module):
    """Blocks cut and whole, a BatchNorm's buffers, channels last, a part that is not always used."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
        self.norm = torch.nn.BatchNorm2d(4)
        self.wide = torch.nn.Linear(4, 300)
        self.rarely = torch.nn.Linear(300, 5, bias=False)
        self.out = torch.nn.Linear(300, 5)

    def forward(self, x: torch.Tensor, *, rarely: bool) -> torch.Tensor:
        hidden = self.wide(self.norm(self.conv(x)).relu().mean((2, 3))).tanh()
        return self.out(hidden) + (self.rarely(hidden) if rarely else 0)


def train(
    connect: Connect, given: dict[str, Any], *, cast: bool = False, dtype: torch.dtype = torch.float32
) -> tuple[dict[str, torch.Tensor], sy.Job]:
    settings = {"job.block_bytes": 1_024, "job.partitions": 4, "job.compression.whole_elements_max": 64} | given
    job = connect(settings=settings)
    torch.manual_seed(3)
    model = Network().to(dtype)
    model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
    generator = torch.Generator().manual_seed(5)
    for step in range(12):
        x, y = torch.randn(8, 3, 5, 5, generator=generator), torch.randn(8, 5, generator=generator)
        optimizer.zero_grad(set_to_none=step % 4 != 3)
        for _ in range(1 + step % 2):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=cast):
                loss = (model(x.to(dtype), rarely=step % 3 == 1) - y).square().mean()
            loss.backward()
        if step % 5 == 2:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if step % 5 == 3:
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.data.mul_(0.25)
        optimizer.step()
        assert all(p.grad is None or p.grad.dtype is dtype for p in model.parameters())
    return {name: value.clone() for name, value in model.state_dict().items()}, job


RUNS: dict[str, dict[str, Any]] = {
    "overlap": {"worker.exchange": "overlapped", "worker.same_host": "never"},
    "window": {"worker.exchange": "delayed"},
    "async": {},
    "sync": SYNC,
    "two ranks": SYNC_2,
    "streams": SYNC | {"worker.same_host": "never"},
    "view": SYNC | {"worker.exchange": "overlapped"},
    "bf16": SYNC | {"job.compression.push": "bf16", "job.compression.pull": "bf16"},
    "int8": SYNC | {"job.compression.push": "int8:64+zstd", "job.compression.pull": "delta:64"},
    "topk": SYNC | {"job.compression.push": "topk:0.05", "job.compression.momentum": 0.9},
    "rules": {"job.compression.push": "out*=onebit:64 *=qsgd"},
}


@pytest.mark.long("int8")
@pytest.mark.parametrize("given", RUNS.values(), ids=RUNS)
def test_training_through_a_device_is_the_same_to_the_bit(
    connect: Connect, on_device: Callable[[bool], None], given: dict[str, Any]
) -> None:
    found = {}
    for chosen in (False, True):
        on_device(chosen)
        found[chosen], job = train(connect, given)
        assert job._loop.trainer is not None
        compresses = "job.compression.push" in given
        feedback = job._loop.trainer.pushes.feedback
        assert (feedback is not None) == compresses
        assert feedback is None or (feedback._copies is not None) == chosen
        assert bool(LateEngine.pinned) == chosen
        shared = any(line.shared for line in job._loop.trainer.router._streams.values())
        assert any(LateEngine.pinned.values()) == (chosen and shared)
        job.close()
        assert not LateEngine.pinned
    for name, value in found[True].items():
        assert torch.equal(value, found[False][name]), name


@pytest.mark.parametrize("name", ["async", "overlap", "sync", "bf16", "topk", "rules"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_models_are_the_same_through_a_device_too(
    connect: Connect, on_device: Callable[[bool], None], name: str, dtype: torch.dtype
) -> None:
    found = {}
    for chosen in (False, True):
        on_device(chosen)
        found[chosen], job = train(connect, RUNS[name], dtype=dtype)
        job.close()
    for each, value in found[True].items():
        assert torch.equal(value, found[False][each]), each


def test_reopened_stream_pins_the_server_memory_anew(connect: Connect, on_device: Callable[[bool], None]) -> None:
    on_device(True)
    job = connect(settings=SYNC | {"job.partitions": 1})
    values = torch.nn.Parameter(torch.zeros(1_000, 3))
    _, optimizer = job.prepare(torch.nn.ParameterList([values]), torch.optim.SGD([values], lr=1.0))
    pinned = []
    for step in range(9):
        optimizer.zero_grad()
        values.sum().backward()
        optimizer.step()
        assert values.unique().tolist() == [-1.0 - step]
        pinned.append(len(LateEngine.pinned))
        if step % 3 == 2:
            assert job._loop.trainer is not None
            for line in job._loop.trainer.router._streams.values():
                assert line.shared
                line.cancel()
    assert len(set(pinned[2::3])) == 1, pinned


@pytest.mark.long
def test_low_rank_through_a_device_is_close(connect: Connect, on_device: Callable[[bool], None]) -> None:
    found = {}
    for chosen in (False, True):
        on_device(chosen)
        found[chosen], job = train(connect, SYNC | {"job.compression.push": "powersgd:2"})
        job.close()
    for name, value in found[True].items():
        torch.testing.assert_close(value, found[False][name], rtol=1e-3, atol=1e-3)


def test_compression_state_moves_between_host_and_device(connect: Connect, on_device: Callable[[bool], None]) -> None:
    given = SYNC | {"job.compression.push": "topk:0.05"}
    on_device(True)
    _, job = train(connect, given)
    state = job.compression_state()
    assert any(value.any() for name, value in state.items() if name.startswith("residual"))
    job.close()
    on_device(False)
    _, other = train(connect, given)
    other.load_compression_state(state)
    taken = other.compression_state()
    assert taken.keys() == state.keys()
    assert all(torch.equal(value, taken[name]) for name, value in state.items())


def test_last_residual_is_pushed_by_a_worker_that_leaves(
    connect: Connect, on_device: Callable[[bool], None], caplog: pytest.LogCaptureFixture
) -> None:
    on_device(True)
    with caplog.at_level("INFO", "shardyard.worker"):
        _, job = train(connect, {"job.compression.push": "topk:0.01", "log.level": "info"})
        job.close()
    assert any("has not sent yet" in record.message for record in caplog.records)


@pytest.mark.parametrize("chosen", [False, True], ids=["cpu", "device"])
def test_autocast_trains_in_single_precision(connect: Connect, on_device: Callable[[bool], None], chosen: bool) -> None:
    """Parameters and gradients are float32, whatever the forward pass is computed in: as torch alone does it."""
    on_device(chosen)
    found, job = train(connect, SYNC, cast=True)
    job.close()
    assert all(value.dtype in (torch.float32, torch.int64) for value in found.values())

    plain = PlainJob()
    expected, _ = train(lambda settings: plain, {}, cast=True)  # type: ignore[arg-type]
    for name, value in found.items():
        np.testing.assert_allclose(value.numpy(), expected[name].numpy(), rtol=2e-5, atol=2e-6, err_msg=name)


class PlainJob:
    """Torch alone."""

    def prepare(self, model: Network, optimizer: torch.optim.Optimizer) -> tuple[Network, torch.optim.Optimizer]:
        return model, optimizer
