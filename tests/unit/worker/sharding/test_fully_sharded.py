"""Which modules of a sharded model are gathered one by one."""

from __future__ import annotations

import pytest
import torch

import shardyard as sy
from shardyard.domain.errors import UnsupportedModel
from shardyard_worker.sharding.fully_sharded import plan_of, units_of


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(5, 4)
        block = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
        self.blocks = torch.nn.ModuleList([block, torch.nn.Linear(4, 4), torch.nn.Dropout()])
        self.head = torch.nn.Linear(4, 5, bias=False)


def test_layers_are_units() -> None:
    model = Model()
    assert units_of(model, ()) == ("blocks.0", "blocks.1")
    assert units_of(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()), ()) == ("0",)
    assert [line.split()[-2:] for line in plan_of(model, units_of(model, ())).splitlines()[1:]] == [
        ["20", "80"],
        ["20", "80"],
        ["40", "160"],
    ]


def test_units_are_those_that_are_named() -> None:
    assert units_of(Model(), ("blocks.*.0", "head")) == ("blocks.0.0", "head")
    assert units_of(Model(), ("*",)) == ("embed", "head"), "a star stands for one part of a name"


def test_tables_are_gathered_with_nothing() -> None:
    """Whatever the dtype of their rows."""
    table = sy.tables.Table(2, dtype=torch.float32)
    model = torch.nn.Sequential(sy.Embedding(2, table=table), torch.nn.Linear(2, 2).double())
    assert units_of(model, ()) == ("1",)
    with pytest.raises(UnsupportedModel, match="the name of Embedding"):
        units_of(model, ("0",))


def test_parameters_that_modules_share_are_gathered_with_the_whole_model() -> None:
    model = Model()
    model.blocks[1].weight = model.head.weight = torch.nn.Parameter(torch.zeros(4, 4))
    assert units_of(model, ()) == ("blocks.0",)


def coarse() -> torch.nn.Module:
    model = Model()
    model.head.bfloat16()
    return model


@pytest.mark.parametrize(
    ("model", "patterns", "message"),
    [
        (Model(), ("nothing.*",), r"'nothing\.\*' in job\.sharded\.modules, the name of no module"),
        (Model(), ("blocks",), "'blocks' in job.sharded.modules, the name of ModuleList"),
        (coarse(), (), r"parameters of torch\.bfloat16 and torch\.float32"),
    ],
    ids=["unknown", "no forward", "dtypes"],
)
def test_model_that_cannot_be_sharded_is_refused(
    model: torch.nn.Module, patterns: tuple[str, ...], message: str
) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        units_of(model, patterns)
