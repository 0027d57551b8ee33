"""Models under torch.compile, prepared before it or after it, train as they do without, and have the same names."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch.utils.data import TensorDataset

import shardyard as sy
from shardyard.checkpoints.library import CheckpointLibrary
from shardyard.storage.storage import open_storage
from tests.support.alone import SYNC, Connect
from tests.support.yards import Probes, running_yard

DATA = TensorDataset(
    torch.randn(48, 6, generator=torch.Generator().manual_seed(1)),
    torch.randn(48, 3, generator=torch.Generator().manual_seed(2)),
)
Compile = Callable[[torch.nn.Module], torch.nn.Module]


@pytest.fixture(autouse=True)
def forgets_what_was_compiled() -> Iterator[None]:
    yield
    torch._dynamo.reset()


class Net(torch.nn.Module):
    """With a part that is compiled by itself, buffers, and a weight that is large enough to be watched."""

    def __init__(self, backend: str = "") -> None:
        super().__init__()
        inner = torch.nn.Sequential(torch.nn.Linear(6, 16, bias=False), torch.nn.BatchNorm1d(16), torch.nn.Tanh())
        self.inner = torch.compile(inner, backend=backend) if backend else inner
        self.outer = torch.nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.inner(x))


def train(job: sy.Job, model: torch.nn.Module, *, first: Compile | None = None, after: Compile | None = None) -> Any:
    """The losses. `first`: before job.prepare, `after`: after it."""
    model = model if first is None else first(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    model, moved = job.prepare(model, optimizer)
    ran = model if after is None else after(model)
    losses = []
    for x, y in job.batches(DATA, batch_size=8):
        loss = torch.nn.functional.mse_loss(ran(x), y)
        moved.zero_grad()
        loss.backward()
        moved.step()
        losses.append(float(loss.detach()))
    return losses


def compiled_by(backend: str) -> Compile:
    return lambda model: torch.compile(model, backend=backend)  # type: ignore[return-value]


@pytest.mark.long(
    "first-settings0-aot_eager", "first-settings1-aot_eager", "after-settings2-eager", "after-settings3-aot_eager"
)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("settings", [{}, SYNC, {"worker.exchange": "overlapped"}, {"worker.exchange": "delayed"}])
@pytest.mark.parametrize("where", ["first", "after"])
def test_compiled_model_trains_as_without_to_the_bit(
    connect: Connect, backend: str, settings: dict[str, Any], where: str
) -> None:
    start = Net()
    plain, model = copy.deepcopy(start), copy.deepcopy(start)
    expected = train(connect(settings=settings), plain)
    job = connect(settings=settings)
    assert train(job, model, **{where: compiled_by(backend)}) == expected
    assert set(job.pull()) == set(plain.state_dict())
    for name, value in plain.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name


@pytest.mark.long
def test_model_of_the_default_backend_trains_as_without(
    connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    start = Net()
    plain, model = copy.deepcopy(start), copy.deepcopy(start)
    expected = train(connect(), plain)
    with torch._inductor.config.patch(compile_threads=1):
        found = train(connect(), model, first=compiled_by("inductor"))
    assert found == pytest.approx(expected, rel=1e-4)
    for name, value in plain.state_dict().items():
        assert torch.allclose(value, model.state_dict()[name], rtol=1e-3, atol=1e-5), name


def test_part_that_is_compiled_has_the_names_that_it_was_written_with(connect: Connect) -> None:
    plain, parts = connect(), connect()
    train(plain, Net())
    train(parts, Net("eager"))
    assert sorted(parts.pull()) == sorted(plain.pull())
    assert not any("_orig_mod" in name for name in parts.pull())


def test_model_is_compiled_once_for_all_its_steps(connect: Connect) -> None:
    compilations = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        compilations.append(graph)
        return graph.forward

    for settings in ({}, {"worker.exchange": "overlapped"}):
        compilations.clear()
        train(connect(settings=settings), Net(), first=lambda model: torch.compile(model, backend=backend))
        assert len(compilations) == 1, settings
        torch._dynamo.reset()


def test_checkpoint_of_a_compiled_model_loads_into_a_plain_one(connect: Connect, tmp_path: Path) -> None:
    job = connect(settings={"job.checkpoint.url": str(tmp_path), "job.name": "compiled"})
    model = Net()
    train(job, model, first=compiled_by("eager"))
    job.checkpoint()
    library = CheckpointLibrary(open_storage(str(tmp_path)))
    state = {name: torch.from_numpy(array) for name, array in library.export_state(library.load("compiled", None))}
    plain = Net()
    plain.load_state_dict(state)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in plain.state_dict().items())


@pytest.mark.long
def test_promise_6_compiled_and_plain_workers_share_a_job_over_grpc(tmp_path: Path) -> None:
    settings = {"job__consistency__mode": "sync", "job__consistency__logical_ranks": 2, "job__workers_expected": 2}
    with running_yard(tmp_path / "yard") as yard, Probes(tmp_path) as probes:
        started = [
            probes.start("model", *more, "--epochs", "1", coordinator=yard.coordinator, **settings)
            for more in ([], ["--compile", "eager"])
        ]
        codes = [script.wait() for script, _ in started]
        assert codes == [0, 0], [script.output for script, _ in started]
        assert len({out.read_text().split('"digest": ')[1].split(",")[0] for _, out in started}) == 1
