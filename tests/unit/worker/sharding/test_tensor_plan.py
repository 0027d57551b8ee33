"""Which layers are cut over the members of a tensor-parallel group."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch.nn import functional

from shardyard.domain.errors import UnsupportedModel
from shardyard_worker.sharding.tensor_plan import TensorPlan, plan_for


def chain(*widths: int) -> torch.nn.Sequential:
    layers: list[torch.nn.Module] = []
    for a, b in pairwise(widths):
        layers += [torch.nn.Linear(a, b), torch.nn.GELU()]
    return torch.nn.Sequential(*layers[:-1])


class Gated(torch.nn.Module):
    """As in Llama: a layer that multiplies another one's outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = torch.nn.Linear(4, 8), torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)
        self.norm = torch.nn.LayerNorm(4)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        normed = self.norm(hidden)
        result: torch.Tensor = hidden + self.down(functional.silu(self.gate(normed)) * self.up(normed))
        return result


class Read(torch.nn.Module):
    """Its hidden values are read beside the second layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.up(x))
        result: torch.Tensor = self.down(hidden) + hidden.sum()
        return result


def found(model: torch.nn.Module, size: int = 2) -> TensorPlan:
    return plan_for(model, size, (), ())


def test_chains_are_found() -> None:
    assert found(chain(4, 8, 4)) == TensorPlan(("0",), ("2",))
    assert found(chain(4, 8, 8, 8, 4)) == TensorPlan(("0", "4"), ("2", "6"))
    assert found(torch.nn.Sequential(chain(4, 8, 4), torch.nn.LayerNorm(4), chain(4, 8, 4))) == TensorPlan(
        ("0.0", "2.0"), ("0.2", "2.2")
    )


def test_gate_is_cut_with_what_it_multiplies() -> None:
    assert found(Gated()) == TensorPlan(("gate", "up"), ("down",))


def test_layers_are_left_whole_that_the_size_does_not_divide() -> None:
    assert found(torch.nn.Sequential(chain(4, 6, 4), torch.nn.LayerNorm(4), chain(4, 8, 4)), 4).colwise == ("2.0",)


def test_plan_has_the_layers_that_are_named() -> None:
    model = torch.nn.ModuleDict({"a": Gated(), "b": Gated()})
    plan = plan_for(model, 2, ("*.gate", "a.up"), ("?.down",))
    assert plan == TensorPlan(("a.gate", "b.gate", "a.up"), ("a.down", "b.down"))
    assert plan.table(model, 2).splitlines()[1:3] == [
        "a.gate  colwise  8 x 4  4 x 4",
        "b.gate  colwise  8 x 4  4 x 4",
    ]


def tied() -> torch.nn.Module:
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(8, 4), "head": torch.nn.Linear(4, 8, bias=False)})
    model["head"].weight = model["embed"].weight
    return model


@pytest.mark.parametrize(
    ("model", "colwise", "rowwise", "message"),
    [
        (torch.nn.Linear(2, 2), "", "", "a model without two linear layers"),
        (chain(4, 7, 4), "", "", "a model without two linear layers that can be cut for 2 workers"),
        (Read(), "", "", "a model without two linear layers"),
        (Gated(), "nothing", "down", r"'nothing' in job\.tensor\.colwise.*name some of gate, up, down"),
        (Gated(), "norm", "", "module 'norm' in job.tensor.colwise, a LayerNorm"),
        (Gated(), "up", "up", "layer 'up', which is in job.tensor.colwise and"),
        (chain(4, 7, 4), "0", "", "layer '0' with 7 outputs for 2 workers"),
        (chain(4, 7, 4), "", "2", "layer '2' with 7 inputs for 2 workers"),
        (tied(), "head", "", r"parameter 'embed\.weight' of a layer that is cut, which is 'head\.weight' too"),
    ],
    ids=["one layer", "odd", "read", "unknown", "norm", "both", "outputs", "inputs", "tied"],
)
def test_plan_that_cannot_be_is_refused(model: torch.nn.Module, colwise: str, rowwise: str, message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        plan_for(model, 2, colwise.split(), rowwise.split())
