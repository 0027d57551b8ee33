"""A table as an ordinary torch.nn.Embedding: the same scores without Shardyard."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch

import shardyard as sy
from shardyard.domain import errors

IDS = torch.tensor([5, -(1 << 63), (1 << 63) - 1, 0, -3])
ITEMS = torch.tensor([5, 12, (1 << 63) - 1, 7, -3])
KNOWN = torch.tensor([[0, 5, -3], [(1 << 63) - 1, -(1 << 63), 5]])


class Scores(torch.nn.Module):
    """Two towers: users and items by id, and what the user has seen, as a bag."""

    def __init__(self, user: torch.nn.Module, item: torch.nn.Module, seen: torch.nn.Module) -> None:
        super().__init__()
        self.user, self.item, self.seen = user, item, seen

    def forward(self, user: torch.Tensor, item: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        return ((self.user(user) + self.seen(seen)) * self.item(item)).sum(-1)


def trained() -> Scores:
    torch.manual_seed(3)
    items = sy.tables.Table(4, name="items", initial=sy.tables.normal(1.0))
    users = sy.Embedding(4, initial=sy.tables.normal(1.0))
    model = Scores(users, sy.Embedding(4, table=items), sy.EmbeddingBag(4, "sum", table=items, padding_idx=0))
    optimizer = sy.tables.Optimizer(model)
    for _ in range(3):
        optimizer.zero_grad()
        model(IDS, ITEMS, ITEMS[:, None]).square().sum().backward()
        optimizer.step()
    return model


def plain(user: sy.tables.Table, item: sy.tables.Table) -> Scores:
    """As docs/guides/embeddings.md does it."""
    index, items = sy.tables.to_embedding(item)
    bag = torch.nn.EmbeddingBag.from_pretrained(items.weight, mode="sum")  # type: ignore[no-untyped-call]
    return Scores(
        torch.nn.Sequential(*sy.tables.to_embedding(user)),
        torch.nn.Sequential(index, items),
        torch.nn.Sequential(index, bag),
    )


def test_scores_are_those_of_the_table() -> None:
    model = trained()
    assert isinstance(model.user, sy.Embedding)
    assert isinstance(model.item, sy.Embedding)
    frozen = plain(model.user.table, model.item.table)
    seen = torch.tensor([[5, 0], [-3, 0], [5, -3], [0, 0], [-3, -3]])  # 0 pads, and has no row
    for user, item in ((IDS, ITEMS), (IDS.flip(0), ITEMS[torch.randperm(5)])):
        torch.testing.assert_close(frozen(user, item, seen), model(user, item, seen))


@pytest.mark.parametrize("ending", ["safetensors", "parquet"])
def test_a_file_and_a_state_dict_give_the_same(tmp_path: Path, ending: str) -> None:
    table = trained().user.table  # type: ignore[union-attr]
    assert isinstance(table, sy.tables.Table)
    table.export(tmp_path / f"users.{ending}")
    index, embedding = sy.tables.to_embedding(tmp_path / f"users.{ending}")
    state = table.state_dict()
    other, same = sy.tables.to_embedding((state["ids"].flip(0), state["rows"].flip(0)))
    assert torch.equal(index.ids, other.ids)
    assert torch.equal(embedding.weight, same.weight)
    assert embedding.weight.shape == (len(table) + 1, 4)
    assert not embedding.weight.requires_grad


def test_ids_without_a_row_have_the_row_for_unknown_ids() -> None:
    table = sy.tables.Table(2)
    empty = torch.nn.Sequential(*sy.tables.to_embedding(table))
    assert empty(torch.tensor([[7], [-1]])).tolist() == [[[0.0, 0.0]], [[0.0, 0.0]]]
    table.put(torch.tensor([3, -9]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    index, embedding = sy.tables.to_embedding(table, unknown=torch.tensor([0.5, 0.5]), freeze=False)
    assert embedding.weight.requires_grad
    assert index(torch.tensor([[3, 4], [-9, -10]], dtype=torch.int32)).tolist() == [[1, 2], [0, 2]]
    assert embedding(index(torch.tensor([10**12]))).tolist() == [[0.5, 0.5]]


def test_both_are_saved_and_traced_by_torch_alone() -> None:
    table = sy.tables.Table(2)
    table.put(IDS, torch.arange(10.0).reshape(5, 2))
    model = torch.nn.Sequential(*sy.tables.to_embedding(table))
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    again = torch.nn.Sequential(*sy.tables.to_embedding((torch.arange(5), torch.zeros(5, 2))))
    again.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(again(KNOWN), model(KNOWN))
    exported = torch.export.export(model, (KNOWN,)).module()
    assert torch.equal(exported(KNOWN.flip(0)), model(KNOWN.flip(0)))


@pytest.mark.parametrize(
    ("ids", "rows", "unknown", "kind"),
    [
        (torch.zeros(2), torch.zeros(2, 3), None, errors.DTypeMismatch),
        (torch.arange(2), torch.zeros(3, 3), None, errors.ShapeMismatch),
        (torch.arange(2), torch.zeros(2), None, errors.ShapeMismatch),
        (torch.arange(2), torch.zeros(2, 3), torch.zeros(2), errors.ShapeMismatch),
    ],
)
def test_what_is_no_table_is_refused(
    ids: torch.Tensor, rows: torch.Tensor, unknown: torch.Tensor | None, kind: type[Exception]
) -> None:
    with pytest.raises(kind):
        sy.tables.to_embedding((ids, rows), unknown=unknown)
