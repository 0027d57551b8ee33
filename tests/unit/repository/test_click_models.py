"""The recommender's models, held against their papers' formulas, written down term by term."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import shardyard as sy

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "recommender"
sys.path.insert(0, str(EXAMPLE))

import clicks  # noqa: E402
import models  # noqa: E402

sys.path.remove(str(EXAMPLE))

DIM = 4


@pytest.fixture
def batch() -> clicks.Clicks:
    torch.manual_seed(3)
    return clicks.World(seed=2, items=30).day(0, 6)


def given(batch: clicks.Clicks) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.from_numpy(batch.numbers), torch.from_numpy(batch.ids)


def test_dlrm_sees_the_numbers_and_the_products_of_all_pairs(batch: clicks.Clicks) -> None:
    model = models.DLRM(DIM, rate=0.1)
    numbers, ids = given(batch)
    model.rows.table.put(torch.unique(ids), torch.randn(len(torch.unique(ids)), DIM))
    dense, rows = model.bottom(numbers), model.rows(ids)
    assert (dense >= 0).all()
    for sample, found in enumerate(model(numbers, ids)):
        vectors = [dense[sample], *rows[sample]]
        products = [vectors[i] @ vectors[j] for i in range(len(vectors)) for j in range(i)]
        expected = model.top(torch.cat([dense[sample], torch.stack(products)]))[0]
        torch.testing.assert_close(found, expected)


def test_deepfm_adds_single_weights_products_of_all_pairs_and_layers(batch: clicks.Clicks) -> None:
    model = models.DeepFM(DIM, rate=0.1, widths=(8, 8))
    numbers, ids = given(batch)
    met = torch.unique(ids)
    for module in model.rows.features.children():
        module.table.put(met, torch.randn(len(met), module.dim))
    rows = model.rows({"weight": ids, "vector": ids})
    for sample, found in enumerate(model(numbers, ids)):
        single = model.weights(numbers[sample])[0] + rows["weight"][sample].sum()
        vectors = [*(numbers[sample].unsqueeze(1) * model.vectors), *rows["vector"][sample]]
        pairs = sum(vectors[i] @ vectors[j] for i in range(len(vectors)) for j in range(i))
        torch.testing.assert_close(found, single + pairs + model.deep(torch.cat(vectors))[0])


@pytest.mark.parametrize("name", models.MODELS)
def test_all_rows_of_a_batch_are_trained_and_none_by_a_test(name: str, batch: clicks.Clicks) -> None:
    model = models.MODELS[name](DIM, 0.1)
    optimizers = [sy.tables.Optimizer(model), torch.optim.Adam(model.parameters())]
    numbers, ids = given(batch)
    labels = torch.from_numpy(batch.labels)
    for _ in range(2):  # a row of weights that is zero, and those that it is multiplied with, learn one after the other
        for optimizer in optimizers:
            optimizer.zero_grad()
        torch.nn.functional.binary_cross_entropy_with_logits(model(numbers, ids), labels).backward()
        assert all(parameter.grad is not None for parameter in model.parameters() if parameter.numel())
        for optimizer in optimizers:
            optimizer.step()
    found = [len(table) for table in sy.tables.tables_of(model).values()]
    assert found == [len(torch.unique(ids))] * len(found)
    with torch.no_grad():
        model(numbers, ids + 1)
    assert [len(table) for table in sy.tables.tables_of(model).values()] == found
