"""How a model is cut into the stages of a pipeline: they compute what the model computes, and have its parameters."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

import shardyard as sy
from shardyard.domain.errors import UnsupportedModel
from shardyard_worker.pipeline.cut import Stage, cut_model, plan_of


def linears(*widths: int) -> torch.nn.Sequential:
    return torch.nn.Sequential(*(torch.nn.Linear(a, b) for a, b in pairwise(widths)))


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.inner = torch.nn.LayerNorm(width), torch.nn.Linear(width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = hidden + self.inner(self.norm(hidden))
        return result


class Skipping(torch.nn.Module):
    """An input and a value are needed two stages later, and one argument is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block(4) for _ in range(3))
        self.scale = torch.nn.Parameter(torch.full((4,), 0.5))
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x: torch.Tensor, gate: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
        first = self.blocks[0](x)
        hidden = self.blocks[1](first) if mask is None else first
        return self.blocks[2](hidden + first) * self.scale + self.shift, gate


def run(stages: list[Stage], *inputs: torch.Tensor) -> Any:
    values: Any = inputs
    for stage in stages:
        values = stage.module(*values)
    return values


@pytest.mark.parametrize("count", [1, 2, 3])
def test_stages_one_after_the_other_are_the_model(count: int) -> None:
    model = Skipping()
    stages = cut_model(model, count)
    x, gate = torch.randn(5, 4), torch.randn(5)
    found, wanted = run(stages, x, gate), model(x, gate)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    own = [parameter for stage in stages for parameter in stage.module.parameters()]
    assert {*own} == {*model.parameters()}
    assert len(own) == len([*model.parameters()])


def test_largest_stage_is_as_small_as_possible() -> None:
    stages = cut_model(linears(8, 2, 2, 2, 2), 2)
    assert [stage.calls for stage in stages] == [("0",), ("1", "2", "3")]
    assert [stage.elements for stage in stages] == [18, 18]
    assert plan_of(stages).splitlines()[2].split() == ["1", "1", "..", "3", "18", "72"]


def test_stages_begin_at_the_modules_that_are_named() -> None:
    stages = cut_model(Skipping(), 3, ("blocks.0.inner", "blocks.2"))
    assert [stage.calls for stage in stages] == [("blocks.0.norm",), ("blocks.0.inner", "blocks.1"), ("blocks.2",)]


def test_modules_are_opened_if_there_are_too_few() -> None:
    model = torch.nn.Sequential(Block(4), Block(4))
    assert [stage.calls for stage in cut_model(model, 4)] == [("0.norm",), ("0.inner",), ("1.norm",), ("1.inner",)]


class Branching(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.a(x) if x.sum() > 0 else self.b(x)
        return result


def tied() -> torch.nn.Module:
    model = linears(2, 2, 2)
    model[1].weight = model[0].weight
    return model


@pytest.mark.parametrize(
    ("model", "count", "begins", "message"),
    [
        (linears(2, 2), 2, (), "a model of 1 parts"),
        (Branching(), 2, (), "a forward of Branching that cannot be traced"),
        (tied(), 2, (), r"parameter '0\.weight' of stage 0, which stage 1 uses too"),
        (linears(2, 2, 2), 2, ("nothing",), r"module 'nothing'.*name some of 0, 1"),
        (linears(2, 2, 2, 2), 3, ("2", "1"), "not the order in which the model calls them"),
        (linears(2, 2, 2), 2, ("0",), "not the order"),
        (linears(2, 2, 2), 2, ("0", "1"), "2 modules in job.pipeline.cut for 2 stages"),
    ],
    ids=["too few", "branches", "tied", "unknown", "wrong order", "first", "too many"],
)
def test_model_that_cannot_be_cut_is_refused(
    model: torch.nn.Module, count: int, begins: tuple[str, ...], message: str
) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        cut_model(model, count, begins)


def test_look_ups_are_not_opened() -> None:
    """Their ids are not there when the forward is traced."""
    model = torch.nn.Sequential(sy.Embedding(4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    assert [stage.calls for stage in cut_model(model, 2)] == [("0", "1"), ("2",)]
    with pytest.raises(UnsupportedModel, match="a model of 3 parts"):
        cut_model(model, 4)
