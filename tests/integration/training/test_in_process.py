"""A whole yard in this process: what a script sees of a job, held against plain torch.

The oracle of most tests is the same training written with torch alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import shardyard as sy
from shardyard.domain import errors
from shardyard_worker.training import grad_hooks as gradients
from tests.support.alone import SYNC, SYNC_2, Connect

pytestmark = pytest.mark.usefixtures("alone")


BOUNDS = {torch.float32: 1e-6, torch.float64: 1e-12}

MakeModel = Callable[[], torch.nn.Module]
MakeOptimizer = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


def assert_close(mine: torch.Tensor, theirs: torch.Tensor, name: str) -> None:
    if not theirs.is_floating_point() or theirs.numel() == 0:
        assert torch.equal(mine, theirs), name
        return
    difference = float((mine - theirs).norm() / theirs.norm().clamp_min(1e-30))
    assert difference <= BOUNDS[theirs.dtype], (name, difference)


def assert_same_models(mine: torch.nn.Module, theirs: torch.nn.Module) -> None:
    expected = theirs.state_dict()
    assert expected
    for name, tensor in mine.state_dict().items():
        assert_close(tensor, expected[name], name)


# ---- training equals torch


class Mixed(torch.nn.Module):
    """What models have: tied weights, BatchNorm, a convolution with its channels last, a scalar, nothing at all, a part
    that some steps do not use, a part that is frozen at first, a part beyond a block's size, a buffer that is put anew.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 4, 2, bias=False).to(memory_format=torch.channels_last)
        self.norm = torch.nn.BatchNorm2d(4)
        self.wide = torch.nn.Linear(4, 70)
        self.encode = torch.nn.Linear(70, 6, bias=False)
        self.decode = torch.nn.Linear(6, 70, bias=False)
        self.decode.weight = torch.nn.Parameter(self.encode.weight.detach().t().contiguous())
        self.tied = torch.nn.Linear(70, 6, bias=False)
        self.tied.weight = self.encode.weight
        self.rarely = torch.nn.Linear(70, 3)
        self.late = torch.nn.Linear(70, 3).requires_grad_(False)
        self.scale = torch.nn.Parameter(torch.tensor(1.5))
        self.nothing = torch.nn.Parameter(torch.zeros(0, 5))
        self.register_buffer("centre", torch.zeros(3))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor, *, rarely: bool) -> torch.Tensor:
        hidden = self.norm(self.conv(x)).relu().mean((2, 3))
        hidden = self.wide(hidden).tanh()
        hidden = hidden + self.decode(self.encode(hidden)) + 0.1 * self.decode(self.tied(hidden).tanh())
        out = self.late(hidden) * self.scale + self.nothing.sum()
        if rarely:
            out = out + self.rarely(hidden)
        if self.training:
            self.centre = self.centre * 0.9 + 0.1 * out.detach().mean(0)
        return out - self.centre

    def groups(self) -> list[dict[str, Any]]:
        first = [p for name, p in self.named_parameters() if name.startswith(("conv", "wide", "scale", "nothing"))]
        second = [p for p in self.parameters() if all(p is not other for other in first)]
        return [{"params": first}, {"params": second, "lr": 0.004, "weight_decay": 0.02}]


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.02, momentum=0.9, nesterov=True),
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.01, amsgrad=True),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.95)),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.02, lr_decay=0.01),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=0.003, momentum=0.5, centered=True, alpha=0.9),
    "adamax": lambda groups: torch.optim.Adamax(groups, lr=0.01),
    "nadam": lambda groups: torch.optim.NAdam(groups, lr=0.01, decoupled_weight_decay=True),
    "radam": lambda groups: torch.optim.RAdam(groups, lr=0.01, betas=(0.9, 0.95)),
    "lamb": lambda groups: sy.optim.LAMB(groups, lr=0.01),
    "lion": lambda groups: sy.optim.Lion(groups, lr=0.003),
    "ftrl": lambda groups: sy.optim.FTRL([_penalized(group) for group in groups], lr=0.02),
}


def _penalized(group: dict[str, Any]) -> dict[str, Any]:
    """What a weight decay is to the others."""
    decay = group.pop("weight_decay", 0.0)
    return group | {"l1": decay, "l2": decay}


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def batches_of(dtype: torch.dtype, steps: int = 60) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(4)
    for step in range(steps):
        x = torch.randn(8, 3, 5, 5, generator=generator, dtype=torch.float64)
        y = torch.randn(8, 3, generator=generator, dtype=torch.float64)
        yield step, x.to(dtype), y.to(dtype)


def compute(model: Mixed, optimizer: torch.optim.Optimizer, step: int, x: torch.Tensor, y: torch.Tensor) -> None:
    if step == 20:
        model.late.requires_grad_(True)
    optimizer.zero_grad(set_to_none=step % 5 != 0)
    (model(x, rarely=step % 3 == 1) - y).square().mean().backward()


@pytest.mark.long(*(f"async-{kind}" for kind in OPTIMIZERS), "sync-adamw", "sync-sgd")
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("settings", [{}, SYNC], ids=["async", "sync"])
def test_promise_6_training_equals_torch(connect: Connect, kind: str, settings: dict[str, Any]) -> None:
    job = connect(settings={"job.block_bytes": 64, "job.partitions": 5} | settings)
    model, plain = Mixed().double(), Mixed().double()
    plain.load_state_dict(model.state_dict())
    model, optimizer = job.prepare(model, OPTIMIZERS[kind](model.groups()))
    theirs = OPTIMIZERS[kind](plain.groups())
    assert not model.conv.weight.is_contiguous()
    for step, x, y in batches_of(torch.float64):
        for each, its in ((model, optimizer), (plain, theirs)):
            compute(each, its, step, x, y)
            with default_dtype(torch.float64):  # in which NAdam has the product of its momenta
                its.step()
    assert_same_models(model, plain)
    assert job.step == 60


@pytest.mark.long("adamw", "rmsprop", "ftrl", "lion")
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_promise_6_updates_equal_torchs_in_single_precision(connect: Connect, kind: str) -> None:
    # given the same gradients, since training multiplies differences in the last bit
    model, plain = Mixed(), Mixed()
    plain.load_state_dict(model.state_dict())
    model, optimizer = connect(settings={"job.block_bytes": 64}).prepare(model, OPTIMIZERS[kind](model.groups()))
    theirs = OPTIMIZERS[kind](plain.groups())
    for step, x, y in batches_of(torch.float32):
        compute(plain, theirs, step, x, y)
        for mine, parameter in zip(model.parameters(), plain.parameters(), strict=True):
            mine.grad = None if parameter.grad is None else parameter.grad.clone()
        for name, buffer in plain.named_buffers():
            model.get_buffer(name).copy_(buffer)
        theirs.step()
        optimizer.step()
    assert_same_models(model, plain)


def mlp() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


def clone_of(model: torch.nn.Module) -> torch.nn.Module:
    copy = mlp()
    copy.load_state_dict(model.state_dict())
    return copy


def test_two_logical_ranks_are_the_mean_of_two_batches(connect: Connect) -> None:
    job = connect(settings=SYNC_2)
    model = mlp()
    plain = clone_of(model)
    model, optimizer = job.prepare(model, torch.optim.Adam(model.parameters(), lr=0.01))
    theirs = torch.optim.Adam(plain.parameters(), lr=0.01)
    data = TensorDataset(torch.randn(48, 4), torch.randn(48, 2))
    seen = []
    for x, y in job.batches(data, batch_size=4, epochs=3):
        seen.append((x, y))
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
    for (x0, y0), (x1, y1) in zip(seen[::2], seen[1::2], strict=True):
        theirs.zero_grad()
        ((plain(x0) - y0).square().mean() / 2 + (plain(x1) - y1).square().mean() / 2).backward()
        theirs.step()
    assert job.step == 18
    assert_same_models(model, plain)


class Summing(torch.nn.Module):
    """A buffer that is put anew at each call, and one that is updated in place."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.register_buffer("total", torch.zeros(1))
        self.register_buffer("calls", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total = self.total + x.sum()
        self.calls += 1
        return self.weight * x.sum()


def test_buffers_of_two_logical_ranks_start_at_the_step_and_are_averaged(connect: Connect) -> None:
    job = connect(settings=SYNC_2)
    model, optimizer = job.prepare(model := Summing(), torch.optim.SGD(model.parameters(), lr=1.0))
    found = []
    for (x,) in job.batches(TensorDataset(torch.tensor([1.0, 3.0, 10.0, 20.0])), batch_size=1, shuffle=False):
        found.append((model.total.item(), model.calls.item()))
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()
    assert found == [(0, 0), (0, 0), (2, 1), (2, 1)]
    assert (model.total.item(), model.calls.item()) == (17, 2)
    assert model.state_dict()["total"].item() == job.pull()["total"].item() == 17


def test_a_gradient_that_one_logical_rank_lacks_counts_as_zero_there(connect: Connect) -> None:
    job = connect(settings=SYNC_2)
    job.register({"a": torch.zeros(1), "b": torch.zeros(1), "c": torch.zeros(1)}, lr=1.0)
    job.push({"a": torch.ones(1), "b": torch.ones(1)})
    job.push({"b": torch.ones(1)}, samples=3)
    assert {name: value.item() for name, value in job.pull().items()} == {"a": -0.25, "b": -1.0, "c": 0.0}


def test_all_workers_begin_with_the_values_of_the_seed(connect: Connect) -> None:
    values = []
    for _ in range(2):
        torch.manual_seed(len(values))
        connect(settings={"job.seed": 12})
        values.append(mlp().state_dict())
    assert all(torch.equal(values[0][name], values[1][name]) for name in values[0])


@pytest.mark.parametrize("calls", [0, 1, 3])
def test_a_scheduler_given_to_prepare_follows_the_steps_of_the_job(connect: Connect, calls: int) -> None:
    job = connect(settings=SYNC_2)
    model = mlp()
    plain = clone_of(model)
    make: list[Any] = []
    for each in (model, plain):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.5)
        make.append((optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, optimizer, schedule = job.prepare(model, *make[0])
        x = torch.randn(12, 4)
        for batch in job.batches(TensorDataset(x), batch_size=2, epochs=2, shuffle=False):
            optimizer.zero_grad()
            model(batch[0]).square().mean().backward()
            optimizer.step()
            for _ in range(calls):
                schedule.step()
    theirs, scheduler = make[1]
    for step in range(6):
        theirs.zero_grad()
        plain(x[step % 3 * 4 :][:4]).square().mean().backward()
        theirs.step()
        scheduler.step()
    assert_same_models(model, plain)


def test_ranks_that_disagree_on_the_rate_are_an_error(connect: Connect) -> None:
    job = connect(settings=SYNC_2)
    model = mlp()
    model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    batches = job.batches(TensorDataset(torch.randn(16, 4)), batch_size=4)
    model(next(batches)[0]).sum().backward()
    optimizer.step()
    scheduler.step()
    model(next(batches)[0]).sum().backward()
    with pytest.raises(errors.RateMismatch, match="parameter group 0") as caught:
        optimizer.step()
    assert "job.prepare" in caught.value.todo_text


def test_momentum_of_nadam_that_changes_in_a_running_job_is_refused(connect: Connect) -> None:
    model, optimizer = connect().prepare(model := mlp(), torch.optim.NAdam(model.parameters()))
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.step()
    before = [parameter.clone() for parameter in model.parameters()]
    optimizer.param_groups[0]["betas"] = (0.8, 0.999)
    with pytest.raises(errors.InvalidRequest, match=r"beta1 was 0\.9 when the job began and is 0\.8 now"):
        optimizer.step()
    assert all(torch.equal(mine, kept) for mine, kept in zip(model.parameters(), before, strict=True))


def test_a_scheduler_that_is_refused_leaves_the_job_free(connect: Connect) -> None:
    job = connect()
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(errors.UnsupportedOptimizer):
        job.prepare(model, optimizer, torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))
    job.prepare(model, optimizer)


# ---- variables without a model


@pytest.mark.parametrize("settings", [{}, SYNC])
def test_variables_are_pushed_and_pulled_by_name(connect: Connect, settings: dict[str, Any]) -> None:
    job = connect(settings=settings)
    first = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.float64)}
    job.register(first, optimizer="sgd", lr=0.5)
    pulled = job.pull()
    assert {name: torch.equal(value, first[name]) for name, value in pulled.items()} == {"a": True, "b": True}
    pulled["a"].zero_()
    assert torch.equal(job.pull()["a"], first["a"])
    job.push({"a": torch.ones(2, 3)})
    assert torch.equal(job.pull(["a"])["a"], first["a"] - 0.5)
    assert list(job.pull(["b"])) == ["b"]
    job.push({"b": torch.ones(4, dtype=torch.float64)}, lr=2.0)
    assert job.pull()["b"].tolist() == [-1.0] * 4
    assert job.step == 2


@pytest.mark.parametrize("settings", [{}, SYNC])
def test_variables_that_are_not_pushed_are_left_alone(connect: Connect, settings: dict[str, Any]) -> None:
    job = connect(settings=settings)
    job.register({"a": torch.ones(3), "b": torch.ones(3)}, optimizer="adamw", lr=0.1, weight_decay=0.5)
    plain = {name: torch.nn.Parameter(torch.ones(3)) for name in "ab"}
    theirs = torch.optim.AdamW(plain.values(), lr=0.1, weight_decay=0.5)
    generator = torch.Generator().manual_seed(1)
    for step in range(8):
        gradients = {name: torch.randn(3, generator=generator) for name in ("a" if step % 3 else "ab")}
        for name, parameter in plain.items():
            parameter.grad = gradients.get(name)
        theirs.step()
        job.push(gradients)
    for name, value in job.pull().items():
        assert_close(value, plain[name].detach(), name)


def test_what_does_not_fit_is_refused_and_changes_nothing(connect: Connect) -> None:
    job = connect()
    job.register({"a": torch.ones(3), "b": torch.ones(2)}, lr=1.0)
    good = torch.ones(2)
    refused: list[tuple[Any, type[Exception], dict[str, Any]]] = [
        ({"b": good, "c": torch.ones(3)}, errors.UnknownVariable, {}),
        ({"b": good, "a": torch.ones(4)}, errors.ShapeMismatch, {}),
        ({"b": good, "a": torch.ones(3).double()}, errors.DTypeMismatch, {}),
        ({"b": good, "a": [1.0, 2.0, 3.0]}, errors.DTypeMismatch, {}),
        ({"b": good, "a": torch.ones(3).to_sparse()}, errors.UnsupportedModel, {}),
        ({"b": good}, errors.InvalidRequest, {"lr": -1.0}),
        ({"b": good}, errors.InvalidRequest, {"rate": 1.0}),
        ({"b": good}, errors.InvalidRequest, {"momentum": 0.9}),
        ({"b": good}, errors.InvalidRequest, {"samples": -1.0}),
    ]
    for given, error, settings in refused:
        with pytest.raises(error):
            job.push(given, **settings)
    with pytest.raises(errors.UnknownVariable, match=r"'c'.*a, b"):
        job.pull(["c"])
    assert job.step == 0
    job.push({"b": good})
    assert [value.tolist() for value in job.pull().values()] == [[1.0] * 3, [0.0] * 2]


def test_an_optimizer_that_does_not_exist_is_refused_with_the_alternatives(connect: Connect) -> None:
    job = connect()
    with pytest.raises(errors.UnsupportedOptimizer, match="'lars'") as caught:
        job.register({"a": torch.ones(3)}, optimizer="lars")
    assert "adagrad, adam, adamax, adamw, ftrl, lamb, lion, nadam, radam, rmsprop, sgd" in caught.value.todo_text
    with pytest.raises(errors.InvalidRequest, match="momentum"):
        job.register({"a": torch.ones(3)}, optimizer="adam", momentum=0.9)
    job.register({"a": torch.ones(3)}, optimizer="sgd", momentum=0.9)


# ---- what cannot be moved to servers


def lazy() -> torch.nn.Module:
    return torch.nn.LazyLinear(3)


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: torch.nn.Linear(2, 2, dtype=torch.complex64), "'weight'.*complex64"),
        (lambda: torch.nn.Linear(2, 2, device="meta"), "'weight' has no values"),
        (lazy, "'weight' has no values"),
    ],
)
def test_a_model_that_servers_cannot_hold_is_refused_by_name(connect: Connect, make: MakeModel, names: str) -> None:
    job = connect()
    model = make()
    with pytest.raises(errors.UnsupportedModel, match=names) as caught:
        job.prepare(model, torch.optim.SGD(model.parameters()))
    assert "float32" in caught.value.todo_text or "before job.prepare" in caught.value.todo_text
    job.prepare(model := mlp(), torch.optim.SGD(model.parameters()))


def test_sparse_gradients_are_refused_by_name(connect: Connect) -> None:
    job = connect()
    model, optimizer = job.prepare(
        model := torch.nn.Embedding(4, 2, sparse=True), torch.optim.SGD(model.parameters(), lr=1.0)
    )
    before = job.pull()["weight"]
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(errors.UnsupportedModel, match=r"'weight'.*sparse") as caught:
        optimizer.step()
    assert "sparse=False" in caught.value.todo_text
    assert torch.equal(job.pull()["weight"], before)


def test_parameters_that_are_in_no_module_are_trained(connect: Connect) -> None:
    job = connect()
    model, loose = mlp(), torch.nn.Parameter(torch.ones(2))
    _, optimizer = job.prepare(model, torch.optim.SGD([*model.parameters(), loose], lr=0.5))
    (model(torch.ones(1, 4)) * loose).sum().backward()
    optimizer.step()
    assert loose.grad is not None
    assert torch.allclose(loose.detach(), 1 - 0.5 * loose.grad)


def test_small_gradients_are_copied_when_they_are_pushed_and_large_ones_lie_there(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradients, "WATCHED_BYTES_MIN", 16)
    small, large = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(4))
    job = connect()
    _, optimizer = job.prepare(torch.nn.ParameterList([small, large]), torch.optim.SGD([small, large], lr=1.0))
    (small.sum() + large.sum()).backward()
    assert job._loop.trainer is not None
    assert large.grad is job._loop.trainer.link.buffers.view(1)
    assert small.grad is not job._loop.trainer.link.buffers.view(0)
    with torch.no_grad():
        for parameter in (small, large):
            assert parameter.grad is not None
            parameter.grad *= 2
    optimizer.step()
    assert [small.tolist(), large.tolist()] == [[-2.0] * 3, [-2.0] * 4]


def test_a_second_model_is_refused_with_the_way_to_train_two(connect: Connect) -> None:
    job = connect()
    job.prepare(model := mlp(), torch.optim.SGD(model.parameters()))
    for again in (lambda: job.prepare(model, torch.optim.SGD(model.parameters())), lambda: job.register({})):
        with pytest.raises(errors.InvalidRequest, match="second") as caught:
            again()
        assert "ModuleList" in caught.value.todo_text


def test_a_group_added_to_the_old_optimizer_is_refused_at_the_next_step(connect: Connect) -> None:
    job = connect()
    original = torch.optim.SGD((model := mlp()).parameters(), lr=0.1)
    _, optimizer = job.prepare(model, original)
    original.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(errors.InvalidRequest, match="parameter groups"):
        optimizer.step()
