"""A cut model that computes something else than the whole one is refused."""

from __future__ import annotations

import pytest
import torch

from shardyard.domain.errors import UnsupportedModel
from shardyard_worker.sharding.output_check import check_outputs


class Heads(torch.nn.Module):
    """Adds up the largest element of each head. `width`: of a head; None: that follows from the number of heads."""

    def __init__(self, features: int, heads: int = -1, width: int = -1) -> None:
        super().__init__()
        self.project = torch.nn.Linear(6, features, bias=False)
        torch.nn.init.ones_(self.project.weight)
        self.dropout = torch.nn.Dropout(0.5)
        self._heads, self._width = heads, width

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, str]:
        heads = self.dropout(self.project(x)).unflatten(1, (self._heads, self._width))
        return heads.amax(2).sum(1), "beside"


X = (torch.arange(12.0).reshape(2, 6),)


def test_model_that_computes_the_same_passes_whatever_it_drops() -> None:
    check_outputs(Heads(8, width=4), Heads(8, width=4), X)


@pytest.mark.parametrize(
    ("cut", "message"),
    [
        (Heads(4, heads=2), "computes something else"),
        (Heads(4, width=8), "a forward that fails with a part of its layers"),
    ],
    ids=["fewer outputs", "half a head"],
)
def test_model_that_does_not_is_refused(cut: torch.nn.Module, message: str) -> None:
    whole = Heads(8, heads=4) if message.startswith("computes") else Heads(8, width=8)
    with pytest.raises(UnsupportedModel, match=message):
        check_outputs(whole, cut, X)


def test_the_models_go_on_as_they_were() -> None:
    whole, cut = Heads(8, width=4), Heads(8, width=4)
    cut.dropout.eval()
    state = torch.get_rng_state()
    check_outputs(whole, cut, X)
    assert (whole.training, cut.training, cut.dropout.training) == (True, True, False)
    assert torch.equal(torch.get_rng_state(), state)
