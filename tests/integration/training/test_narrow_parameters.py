"""Parameters in bfloat16 and float16, whose masters the servers hold, and buffers of such models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from tests.support.alone import SYNC, SYNC_2, Connect
from tests.support.mixed_precision import INF, Noting, assert_close, data, mlp, twin, yard_of

pytestmark = pytest.mark.usefixtures("alone")

# ---- narrow parameters

NARROW = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


class Normed(torch.nn.Module):
    """With statistics, which `model.bfloat16()` makes narrow too, and channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.norm = torch.nn.BatchNorm2d(5)
        self.head = torch.nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.conv(x)).relu().mean((2, 3)))


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"worker.exchange": "overlapped"},
        {"worker.same_host": "never"},
        {"worker.exchange": "overlapped", "worker.same_host": "never"},
        {"job.block_bytes": 64},
        SYNC,
    ],
    ids=["plain", "view", "streams", "overlapped", "blocks", "sync"],
)
@NARROW
def test_narrow_models_train_as_with_torch_and_float32_masters(
    connect: Connect, dtype: torch.dtype, given: dict[str, Any]
) -> None:
    job = connect(settings=given)
    model = Normed().to(dtype)
    plain = Normed().to(dtype)
    plain.load_state_dict(model.state_dict())
    masters = [torch.nn.Parameter(parameter.detach().float()) for parameter in plain.parameters()]
    theirs = torch.optim.Adam(masters, lr=0.01)
    model, optimizer = job.prepare(model, torch.optim.Adam(model.parameters(), lr=0.01))
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    generator = torch.Generator().manual_seed(2)
    for _ in range(12):
        x = torch.randn(4, 3, 6, 6, generator=generator).to(dtype)
        y = torch.randn(4, 3, generator=generator)
        for each in (model, plain):
            each.zero_grad()
            (each(x).float() - y).square().mean().backward()
        for master, parameter in zip(masters, plain.parameters(), strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
        theirs.step()
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, plain.parameters(), strict=True):
                parameter.copy_(master)
        # halves to even on both sides; where the masters differ in their last bit a rounding may fall elsewhere
        for (name, mine), parameter in zip(model.named_parameters(), plain.parameters(), strict=True):
            step = torch.finfo(dtype).eps
            assert torch.allclose(mine.float(), parameter.float(), rtol=2 * step, atol=1e-6), name
            with torch.no_grad():
                parameter.copy_(mine)
        for mine, buffer in zip(model.buffers(), plain.buffers(), strict=True):
            assert torch.allclose(mine.float(), buffer.float(), rtol=2 * torch.finfo(dtype).eps)
            buffer.copy_(mine)


@NARROW
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_masters_are_those_of_a_float32_model_given_the_same_gradients_to_the_bit(
    connect: Connect, dtype: torch.dtype, mode: str
) -> None:
    settings = {"job.consistency.mode": mode, "job.consistency.logical_ranks": 1}
    narrow, wide = connect(settings=settings), connect(settings=settings)
    first = torch.randn(37, generator=torch.Generator().manual_seed(1)).to(dtype)
    narrow.register({"a": first}, optimizer="adam", lr=2.0**-9)
    wide.register({"a": first.float()}, optimizer="adam", lr=2.0**-9)
    moved = 0
    for step in range(40):
        gradient = torch.randn(37, generator=torch.Generator().manual_seed(step)).to(dtype)
        before = narrow.pull()["a"]
        narrow.push({"a": gradient})
        wide.push({"a": gradient.float()})
        assert torch.equal(narrow.pull()["a"], wide.pull()["a"].to(dtype)), step
        moved += int((narrow.pull()["a"] != before).sum())
    assert 0 < moved < 37 * 40, "steps smaller than a rounding are not lost"


def test_a_worker_in_float32_and_one_in_bfloat16_share_a_job() -> None:
    with yard_of() as join:
        one, other = join(), join()
        one.register({"a": torch.ones(4, dtype=torch.bfloat16)}, lr=2.0**-12)
        other.register({"a": torch.ones(4)}, lr=2.0**-12)
        one.push({"a": torch.ones(4, dtype=torch.bfloat16)})
        assert one.pull()["a"].tolist() == [1.0] * 4
        assert other.pull()["a"].tolist() == [1.0 - 2.0**-12] * 4, "the master"
        other.push({"a": torch.ones(4)})
        assert other.pull()["a"].tolist() == [1.0 - 2.0**-11] * 4


@NARROW
@pytest.mark.parametrize("codec", ["topk:0.5", "bf16", "powersgd:1"])
def test_narrow_gradients_are_compressed_as_wide_ones(connect: Connect, dtype: torch.dtype, codec: str) -> None:
    settings = {"job.compression.push": codec, "job.compression.whole_elements_max": 0}
    narrow, wide = connect(settings=settings), connect(settings=settings)
    narrow.register({"a": torch.zeros(8, 6, dtype=dtype)}, lr=1.0)
    wide.register({"a": torch.zeros(8, 6)}, lr=1.0)
    for step in range(4):
        gradient = torch.randn(8, 6, generator=torch.Generator().manual_seed(step)).to(dtype)
        narrow.push({"a": gradient})
        wide.push({"a": gradient.float()})
    assert torch.equal(narrow.pull()["a"], wide.pull()["a"].to(dtype))


def test_scaled_losses_of_a_float16_model_are_unscaled_in_float32(connect: Connect) -> None:
    """Its gradients, unscaled in their own format, would be zeros."""
    job = connect()
    scaler = job.scaler(init_scale=1024.0)
    model = torch.nn.Linear(4, 1, bias=False).half()
    torch.nn.init.ones_(model.weight)
    model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=2.0**16))
    scaler.scale(model(torch.full((1, 4), 2.0**-13, dtype=torch.float16)).sum() * 2.0**-13).backward()
    scaler.step(optimizer)
    scaler.update()
    assert model.weight.tolist() == [[1.0 - 2.0**-10] * 4]
    scaler.scale(model(torch.full((1, 4), 2.0**15, dtype=torch.float16)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert model.weight.tolist() == [[1.0 - 2.0**-10] * 4]
    assert scaler.get_scale() == 512.0


def test_bfloat16_by_autocast_needs_no_scaler(connect: Connect) -> None:
    job = connect()
    model = mlp()
    plain = twin(model)
    model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    for x, y in data(8):
        for each, its in ((model, optimizer), (plain, theirs)):
            its.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                out = each(x)
            (out.float() - y).square().mean().backward()
            its.step()
    assert_close(model, plain)


# ---- buffers


def test_buffers_of_the_first_rank_by_setting(connect: Connect) -> None:
    job = connect(settings=SYNC_2 | {"job.buffers": "first"})
    model, optimizer = job.prepare(model := Noting(), torch.optim.SGD(model.parameters(), lr=1.0))
    seen = []
    for (x,) in job.batches(TensorDataset(torch.tensor([1.0, 3.0, 10.0, 20.0])), batch_size=1, shuffle=False):
        seen.append(model.calls.item())
        optimizer.zero_grad()
        model.calls += x  # so that ranks differ
        model(torch.ones(2) * x).backward()
        optimizer.step()
    assert seen == [0, 0, 2, 2]
    assert model.calls.item() == 13, "1 + 1, then 10 + 1"
    assert model.weight[0].item() == (1 + 3) / 2 + (10 + 20) / 2, "gradients are the mean all the same"


def test_the_scale_is_that_of_all_ranks_whosever_buffers_count(connect: Connect) -> None:
    job = connect(settings=SYNC_2 | {"job.buffers": "first"})
    scaler = job.scaler(init_scale=8.0)
    model, optimizer = job.prepare(model := Noting(), torch.optim.SGD(model.parameters(), lr=1.0))
    for at, (x,) in enumerate(job.batches(TensorDataset(torch.ones(4, 2)), batch_size=1, shuffle=False)):
        scaler.scale(model(x) * (INF if at == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scaler.get_scale() == 4.0
