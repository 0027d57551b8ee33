"""Training on a GPU: copies beside the computation, pinned buffers, codes made there. `make test-gpu`."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import shardyard as sy
from shardyard.codecs.dense import topk
from shardyard.codecs.dense.decoding import decode
from shardyard.codecs.dense.encoding import encode, encode_feedback
from shardyard.config.settings import CompressionSettings
from shardyard.domain.compression import parse_codec, sent_count
from shardyard.domain.ids import Generation, Incarnation, PartitionId
from shardyard.domain.layout.layouts import Block, JobLayout, PartitionLayout
from shardyard.domain.optimizers import OptimizerSpec
from shardyard.domain.variables import DType, VariableSpec
from shardyard_coordinator.placement.placement import Server, assign, plan
from shardyard_worker.compression import device_codecs
from shardyard_worker.compression.error_feedback import ErrorFeedback
from shardyard_worker.exchange.buffers import device_copies
from shardyard_worker.exchange.buffers.device_copies import CudaEngine, DeviceCopies, copies_for, tensor_of
from shardyard_worker.exchange.buffers.flat_buffers import FlatBuffers

pytestmark = pytest.mark.gpu

SGD = OptimizerSpec("sgd", ((0.1, 0.0, 0.0, 0.0, 0.0, 0.0),))
SERVER = Incarnation(1)
LONG_CYCLES = 400_000_000
"""Some tenths of a second."""
SYNC = {"job.consistency.mode": "sync", "job.consistency.logical_ranks": 1}
LOCAL = SYNC | {"job.consistency.mode": "local", "job.consistency.steps": 4}


# --- training


class Network(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 16, 2)
        self.norm = torch.nn.BatchNorm2d(16)
        self.wide = torch.nn.Linear(16, 3_000)
        self.deep = torch.nn.Linear(3_000, 100)
        self.rarely = torch.nn.Linear(100, 5, bias=False)
        self.out = torch.nn.Linear(100, 5)

    def forward(self, x: torch.Tensor, *, rarely: bool) -> torch.Tensor:
        hidden = self.deep(self.wide(self.norm(self.conv(x)).relu().mean((2, 3))).tanh()).tanh()
        return self.out(hidden) + (self.rarely(hidden) if rarely else 0)


@pytest.fixture
def connect() -> Iterator[Callable[..., sy.Job]]:
    jobs: list[sy.Job] = []

    def start(where: str, given: dict[str, Any]) -> sy.Job:
        settings = {"yard.servers": 2, "log.level": "error", "worker.device": where} | given
        jobs.append(sy.connect(settings=settings))
        return jobs[-1]

    yield start
    for job in jobs:
        job.close()


def batches(where: torch.device) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    for step in range(20):
        x, y = torch.randn(32, 3, 5, 5, generator=generator), torch.randn(32, 5, generator=generator)
        yield step, x.to(where), y.to(where)


def train(job: sy.Job, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """In double precision, so that what differs is not how devices round."""
    torch.manual_seed(3)
    model = Network().to(dtype).to(job.device)
    model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
    for step, x, y in batches(job.device):
        optimizer.zero_grad(set_to_none=step % 4 != 3)
        for _ in range(1 + step % 2):
            (model(x.to(dtype), rarely=step % 3 == 1) - y.to(dtype)).square().mean().backward()
        if step % 5 == 2:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if step % 5 == 3:
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.data.mul_(0.25)
        optimizer.step()
        assert all(p.device == job.device for p in model.parameters())
        assert all(p.grad is None or p.grad.device == job.device for p in model.parameters())
    return {name: value.cpu().clone() for name, value in model.state_dict().items()}


RUNS: dict[str, dict[str, Any]] = {
    "overlap": {"worker.exchange": "overlapped", "worker.same_host": "never"},
    "window": {"worker.exchange": "delayed"},
    "async": {},
    "sync": SYNC,
    "local": LOCAL,
    "local int8": LOCAL | {"job.compression.push": "int8"},
    "small blocks": SYNC | {"job.block_bytes": 65_536},
    "streams": SYNC | {"worker.same_host": "never"},
    "view": SYNC | {"worker.exchange": "overlapped"},
    "bf16": SYNC | {"job.compression.push": "bf16", "job.compression.pull": "bf16"},
    "int8": SYNC | {"job.compression.push": "int8+zstd", "job.compression.pull": "delta"},
    "topk": SYNC | {"job.compression.push": "topk:0.05", "job.compression.momentum": 0.9},
    "powersgd": SYNC | {"job.compression.push": "powersgd:2"},
}


@pytest.mark.parametrize("name", ["async", "overlap", "sync", "bf16", "topk"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_models_have_float32_masters_whose_roundings_they_hold(
    connect: Callable[..., sy.Job], name: str, dtype: torch.dtype
) -> None:
    job, plain = connect("cuda", RUNS[name]), connect("cpu", RUNS[name])
    for each in (job, plain):
        each.register({"a": torch.ones(777, device=each.device, dtype=dtype)}, lr=2.0**-9)
    for step in range(30):
        gradient = torch.randn(777, generator=torch.Generator().manual_seed(step)).to(dtype)
        for each in (job, plain):
            each.push({"a": gradient.to(each.device)})
        assert torch.equal(job.pull()["a"].cpu(), plain.pull()["a"]), step


@pytest.mark.parametrize("given", [{}, SYNC], ids=["async", "sync"])
def test_scaled_losses_under_autocast_equal_torchs(connect: Callable[..., sy.Job], given: dict[str, Any]) -> None:
    job = connect("cuda", given)
    scaler, its = (
        job.scaler(init_scale=2.0**24, growth_interval=4),
        torch.amp.GradScaler("cuda", 2.0**24, growth_interval=4),
    )
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 8)).to(job.device)
    plain = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 8)).to(job.device)
    plain.load_state_dict(model.state_dict())
    model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    theirs = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    scales = []
    for step in range(40):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step)).to(job.device)
        for each, by, scaled in ((model, optimizer, scaler), (plain, theirs, its)):
            by.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = each(x).square().mean()
            scaled.scale(loss).backward()
            scaled.step(by)
            scaled.update()
        assert scaler.get_scale() == its.get_scale(), step
        scales.append(its.get_scale())
    assert any(after < before for before, after in itertools.pairwise(scales)), "nothing has overflowed"
    for mine, parameter in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(mine, parameter, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["async", "overlap", "sync", "topk"])
def test_what_is_not_finite_on_the_device_does_not_count(connect: Callable[..., sy.Job], name: str) -> None:
    job = connect("cuda", RUNS[name])
    job.register({"a": torch.zeros(500, 300, device=job.device), "b": torch.zeros(0, 2, device=job.device)}, lr=1.0)
    for bad in (float("nan"), float("inf"), -float("inf")):
        gradient = torch.ones(500, 300, device=job.device)
        gradient[499, 299] = bad
        job.push({"a": gradient})
        assert not job.pull()["a"].any()
    job.push({"a": torch.ones(500, 300, device=job.device)})
    assert job.pull()["a"].any()


@pytest.mark.parametrize("name", RUNS)
def test_training_equals_that_on_the_cpu(connect: Callable[..., sy.Job], name: str) -> None:
    found = {}
    for where in ("cpu", "cuda"):
        job = connect(where, RUNS[name])
        found[where] = train(job)
        feedback = job._loop.trainer.pushes.feedback  # type: ignore[union-attr]
        assert (feedback is not None) == ("job.compression.push" in RUNS[name])
        assert feedback is None or (feedback._copies is not None) == (where == "cuda")
        job.close()
    # where codes round, the last bits of a gradient may choose another level
    close = 5e-3 if "job.compression.push" in RUNS[name] else 1e-9
    for key, value in found["cuda"].items():
        theirs = found["cpu"][key]
        difference = float((value.double() - theirs.double()).norm() / theirs.double().norm().clamp_min(1e-12))
        assert difference <= close, (key, difference)


def test_autocast_and_scaler_train_as_with_torch_alone(connect: Callable[..., sy.Job], cuda: torch.device) -> None:
    """`GradScaler.unscale_` changes gradients after backward without torch counting it."""

    def run(prepare: Callable[..., Any]) -> dict[str, torch.Tensor]:
        torch.manual_seed(3)
        model = Network().to(cuda)
        model, optimizer = prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
        for step, x, y in batches(cuda):
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = (model(x, rarely=True) - y).square().mean()
            scaler.scale(loss).backward()
            if step % 2:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        return {name: value.cpu() for name, value in model.state_dict().items()}

    mine = run(connect("cuda", SYNC).prepare)
    theirs = run(lambda model, optimizer: (model, optimizer))
    for name, value in mine.items():
        torch.testing.assert_close(value, theirs[name], rtol=2e-2, atol=2e-3, msg=name)


def test_buffers_are_pinned(connect: Callable[..., sy.Job]) -> None:
    job = connect("cuda", SYNC | {"worker.same_host": "never"})
    train(job)
    by_server = job._loop.trainer.link.buffers._by_server.values()  # type: ignore[union-attr]
    memory = [each for owner in by_server for each in (owner.gradients, *owner.stream_buffers) if each.size]
    assert memory
    assert all(tensor_of(each).is_pinned() for each in memory)
    job.close()
    assert not any(tensor_of(each).is_pinned() for each in memory)


# --- copies


def made_buffers(copies: DeviceCopies) -> FlatBuffers:
    layout = plan((VariableSpec("w", DType.FLOAT32, (1_000, 1_000)),), SGD, partitions=1, block_bytes=1 << 23)
    map_ = assign([part.payload_bytes for part in layout.partitions], [Server(SERVER, "h:1")], generation=Generation(1))
    return FlatBuffers(layout, map_, copies=copies)


@pytest.fixture
def copies(cuda: torch.device) -> Iterator[DeviceCopies]:
    made = copies_for([torch.zeros(1, device=cuda)])
    assert made is not None
    yield made
    made.close()


def sent(buffers: FlatBuffers) -> torch.Tensor:
    view = buffers.view(0)
    assert view is not None
    return view


def test_taking_and_bringing_wait_for_nothing(copies: DeviceCopies, cuda: torch.device) -> None:
    buffers = made_buffers(copies)
    np.frombuffer(buffers.values.stream_buffer(SERVER), np.float32)[:1_000_000] = 5.0
    buffers.values.note_streamed(SERVER)
    buffers.values.flip()
    gradient, target = torch.zeros(1_000, 1_000, device=cuda), torch.zeros(1_000, 1_000, device=cuda)
    for cycles in (1, LONG_CYCLES):  # a kernel's first call loads it, and may wait for the device
        torch.cuda.synchronize()
        start = time.perf_counter()
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
        gradient.fill_(3.0)
        begun = buffers.take(0, gradient)
        buffers.values.load({0: target})
        doubled = target * 2
        launched_s = time.perf_counter() - start
        assert begun is not None
        begun()
        done_s = time.perf_counter() - start
    assert launched_s < 0.05 < done_s
    assert set(sent(buffers).unique().tolist()) == {3.0}
    assert doubled.unique().tolist() == [10.0]


CHANGES: dict[str, Callable[[torch.nn.Parameter], object]] = {
    "nothing": lambda p: None,
    "in place": lambda p: p.grad.mul_(0.5),  # type: ignore[union-attr]
    "by .data": lambda p: p.grad.data.mul_(0.5),  # type: ignore[union-attr]
    "clipped": lambda p: torch.nn.utils.clip_grad_norm_([p], 0.1),
    "unscaled": lambda p: torch._amp_foreach_non_finite_check_and_unscale_(
        [p.grad], torch.zeros(1, device=p.device), torch.full((1,), 2.0**-16, device=p.device)
    ),
    "another": lambda p: setattr(p, "grad", torch.full_like(p, 5.0)),
    "accumulated": lambda p: (p * 4.0).sum().backward(),
}


@pytest.mark.parametrize("late", [False, True], ids=["copied before", "copied after"])
@pytest.mark.parametrize("change", CHANGES)
def test_gradient_is_pushed_as_it_is_when_it_is_pushed(
    copies: DeviceCopies, cuda: torch.device, change: str, late: bool
) -> None:
    buffers = made_buffers(copies)
    parameter = torch.nn.Parameter(torch.zeros(1_000, 1_000, device=cuda))
    parameter.register_post_accumulate_grad_hook(lambda p: buffers.take(0, p.grad) and None)
    if late:
        copies._known(cuda).out.launch(lambda: torch.cuda._sleep(LONG_CYCLES))  # type: ignore[no-untyped-call]
    (parameter * 3.0).sum().backward()
    if not late:
        torch.cuda.synchronize()
    CHANGES[change](parameter)
    buffers.fill([parameter.grad])
    assert parameter.grad is not None
    assert torch.equal(sent(buffers), parameter.grad.cpu())


def test_memory_of_a_gradient_is_not_used_anew_while_it_is_copied(copies: DeviceCopies, cuda: torch.device) -> None:
    buffers = made_buffers(copies)
    gradient = torch.full((1_000, 1_000), 3.0, device=cuda)
    copies._known(cuda).out.launch(lambda: torch.cuda._sleep(LONG_CYCLES))  # type: ignore[no-untyped-call]
    begun = buffers.take(0, gradient)
    del gradient
    others = [torch.full((1_000, 1_000), 9.0, device=cuda) for _ in range(4)]
    assert begun is not None
    begun()
    assert sent(buffers).unique().tolist() == [3.0]
    del others


def test_refused_pinning_leaves_no_error_behind(cuda: torch.device) -> None:
    engine = CudaEngine(cuda)
    assert "cudaHostRegister" in engine.pin(0, 4_096, read_only=False)
    assert torch.ones(3, device=cuda).sum().item() == 3
    memory = np.zeros(1 << 20, np.uint8)
    engine.unpin(memory.ctypes.data)
    assert torch.ones(3, device=cuda).sum().item() == 3


def test_gradients_of_many_sizes_and_orders_are_copied(copies: DeviceCopies, cuda: torch.device) -> None:
    buffers = made_buffers(copies)
    for gradient in (
        torch.randn(1_000, 1_000, device=cuda).t(),
        torch.randn(1_000, 2_000, device=cuda)[:, ::2],
        torch.randn(1_000, 1, device=cuda).expand(1_000, 1_000),
    ):
        buffers.take(0, gradient)
        buffers.fill([gradient])
        assert torch.equal(sent(buffers), gradient.cpu())


# --- codes


def gradients(n: int, dtype: str, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (1e-3 * rng.standard_normal(n) * np.exp(rng.standard_normal(n))).astype(dtype)


KEY = 0xDEADBEEFCAFEBABE
dtypes = pytest.mark.parametrize("dtype", ["float32", "float64"])
sizes = pytest.mark.parametrize("n", [1, 7, 1_000, 1_025, 262_144])


def run(copies: DeviceCopies, cuda: torch.device, encoding: device_codecs.Encoding[Any]) -> Any:
    with copies.beside([cuda]):
        (made,) = device_codecs.run([encoding], copies.to_host)
    return made


@dtypes
@sizes
@pytest.mark.parametrize("scale", [1.0, 1e-35, 1e38])
@pytest.mark.parametrize("text", ["none", "bf16", "fp16", "qsgd", "qsgd:1", "qsgd:127:16", "randomk:0.05:unbiased"])
def test_same_bytes_without_feedback(
    copies: DeviceCopies, cuda: torch.device, text: str, scale: float, n: int, dtype: str
) -> None:
    values, codec = gradients(n, dtype) * np.asarray(scale, dtype), parse_codec(text)
    made = run(copies, cuda, device_codecs.encode(codec, torch.from_numpy(values).to(cuda), KEY))
    assert bytes(made) == bytes(encode(codec, values, KEY))


@dtypes
@sizes
@pytest.mark.parametrize("text", ["int8", "int8:16", "onebit", "onebit:16", "randomk:0.05"])
def test_same_bytes_with_feedback(copies: DeviceCopies, cuda: torch.device, text: str, n: int, dtype: str) -> None:
    values, before, codec = gradients(n, dtype), gradients(n, dtype, 1), parse_codec(text)
    after = np.empty_like(values)
    expected = encode_feedback(codec, values, before, after, KEY)
    there, kept = torch.from_numpy(values).to(cuda), torch.from_numpy(before).to(cuda)
    code, left = run(copies, cuda, device_codecs.encode_feedback(codec, there, kept, KEY))
    assert bytes(code) == bytes(expected)
    np.testing.assert_array_equal(left.cpu().numpy(), after)


@dtypes
@sizes
@pytest.mark.parametrize("values_as", ["fp32", "fp16", "int8"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("density", [0.001, 0.25])
def test_same_largest(
    copies: DeviceCopies, cuda: torch.device, density: float, momentum: float, values_as: str, n: int, dtype: str
) -> None:
    g, u, v = (gradients(n, dtype, seed) for seed in range(3))
    host_u = u if momentum else u[:0]
    after = np.empty_like(host_u), np.empty_like(v)
    count = sent_count(n, density)
    expected = topk.encode_momentum(g, (host_u, v), after, count, KEY, values_as, 0.7, momentum)
    there = [torch.from_numpy(each).to(cuda) for each in (g, u, v)]
    before = (there[1] if momentum else None, there[2])
    encoding = device_codecs.encode_largest(there[0], before, count, KEY, values_as, 0.7, momentum)
    code, (left_u, left_v) = run(copies, cuda, encoding)
    assert expected is not None
    assert bytes(code) == bytes(expected)
    np.testing.assert_array_equal(left_v.cpu().numpy(), after[1])
    assert left_u is None or np.array_equal(left_u.cpu().numpy(), after[0])


@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize(
    "rules", ["none", "bf16", "int8", "onebit", "topk:0.01", "topk:0.01:fp16", "randomk:0.05", "powersgd:2"]
)
def test_feedback_on_the_device_is_the_hosts(cuda: torch.device, rules: str, precision: str) -> None:
    """Also where products may be rounded to 19 bits (TF32): what is sent and what is left still add up."""
    specs = (VariableSpec("w", DType.FLOAT32, (500, 400)), VariableSpec("b", DType.FLOAT32, (500,)))
    blocks = (Block(0, 0, 120_000, 0), Block(0, 120_000, 80_000, 0), Block(1, 0, 500, 0))
    layout = JobLayout(specs, SGD, (PartitionLayout(PartitionId(0), 0, blocks),))
    settings = CompressionSettings(push=rules)
    copies = copies_for([torch.zeros(1, device=cuda)])
    assert copies is not None
    host = ErrorFeedback(settings, layout, seed=3, worker=1)
    there = ErrorFeedback(settings, layout, seed=3, worker=1, devices=[cuda, cuda], copies=copies)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        total, received = np.zeros(200_500), np.zeros(200_500)
        for step in range(5):
            given = [gradients(200_000, "float32", step), gradients(500, "float32", step + 100)]
            if step == 2 and rules != "none":
                given[0][5] = np.inf
            cut = [(block, given[block.variable][block.offset : block.offset + block.length]) for block in blocks]
            theirs = [bytes(code) for code in host.encode([(b, torch.from_numpy(each.copy())) for b, each in cut])]
            mine = there.encode([(block, torch.from_numpy(each.copy()).to(cuda)) for block, each in cut])
            assert [len(code) for code in mine] == [len(code) for code in theirs]
            if "powersgd" not in rules:
                assert [bytes(code) for code in mine] == theirs
            if step != 2:
                total += np.concatenate(given)
            for (block, each), code in zip(cut, mine, strict=True):
                out = np.empty_like(each)
                decode(code, out)
                if step != 2:
                    received[200_000 * block.variable + block.offset :][: block.length] += out
            if step == 2:  # the block with the infinity starts anew
                total[:], received[:] = 0, 0
                there.load_state_dict({})
                host.load_state_dict({})
        if rules not in ("none", "bf16"):
            left = there.residuals()
            received[:200_000] += left[0]
            np.testing.assert_allclose(received, total, atol=1e-5)
            there.undo()
            assert there.state_dict().keys() == host.state_dict().keys()
    finally:
        torch.set_float32_matmul_precision(before)
        copies.close()


def test_deterministic_algorithms_may_be_asked_for(copies: DeviceCopies, cuda: torch.device) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        values = torch.from_numpy(gradients(10_000, "float32")).to(cuda)
        for text in ("bf16", "fp16", "qsgd"):
            run(copies, cuda, device_codecs.encode(parse_codec(text), values, KEY))
        for text in ("int8", "onebit", "randomk:0.05"):
            run(copies, cuda, device_codecs.encode_feedback(parse_codec(text), values, values, KEY))
        run(copies, cuda, device_codecs.encode_largest(values, (values, values), 100, KEY, "int8", 1.0, 0.9))
        buffers = made_buffers(copies)
        gradient = torch.ones(1_000, 1_000, device=cuda)
        buffers.take(0, gradient)
        buffers.fill([gradient])
    finally:
        torch.use_deterministic_algorithms(False)


def test_early_copies_are_for_gradients_of_some_size(copies: DeviceCopies, cuda: torch.device) -> None:
    buffers = made_buffers(copies)
    assert device_copies.EARLY_BYTES_MIN <= 4_000_000
    assert buffers.take(0, torch.zeros(1_000, 1_000, device=cuda)) is not None
