"""`shardyard checkpoint export` writes a model with tables under the names of its `state_dict()`."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch

import shardyard as sy
from shardyard_launcher.cli import main
from tests.support.alone import Connect


def made() -> torch.nn.ModuleDict:
    topics = sy.tables.Table(4, name="topics")
    return torch.nn.ModuleDict(
        {
            "user": sy.Embedding(4),
            "side": torch.nn.ModuleList([sy.EmbeddingBag(4, table="tags"), sy.Embedding(4, table=topics)]),
            "top": torch.nn.Linear(4, 1),
        }
    )


@pytest.mark.parametrize("form", ["torch", "safetensors"])
@pytest.mark.parametrize("compiled", [False, True])
def test_an_exported_model_is_loaded_as_a_whole(connect: Connect, tmp_path: Path, form: str, compiled: bool) -> None:
    job = connect(settings={"job.checkpoint.url": str(tmp_path / "kept"), "job.name": "shop"})
    model = made()
    given = torch.compile(model, backend="eager") if compiled else model
    _, optimizer = job.prepare(given, torch.optim.SGD(model["top"].parameters(), lr=0.1))
    ids = torch.tensor([3, -7, 1 << 40])
    side = model["side"]
    assert isinstance(side, torch.nn.ModuleList)
    for _ in range(2):
        optimizer.zero_grad()
        (model["user"](ids) + side[0](ids[:, None]) + side[1](ids)).square().sum().backward()
        optimizer.step()
    job.checkpoint()
    expected = model.state_dict()
    job.close()
    out = tmp_path / f"model.{form}"
    given_url = ["--url", str(tmp_path / "kept"), "--job", "shop"]
    assert main(["checkpoint", "export", *given_url, "--format", form, str(out)]) == 0
    found = torch.load(out, weights_only=True) if form == "torch" else safetensors.torch.load_file(out)
    assert found.keys() == expected.keys()
    assert {"user.table.ids", "side.0.table.rows", "side.1.table.seed"} < found.keys()
    other = made()
    other.load_state_dict(found)
    for name, tensor in other.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    assert torch.equal(other["user"](ids), expected["user.table.rows"][torch.tensor([1, 0, 2])])
