"""Modules over tables: what they refuse, how they train in a plain loop, what is saved, and that nothing is silent."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import shardyard as sy
from shardyard.domain.errors import DTypeMismatch, InvalidRequest, ShapeMismatch, TooLarge, VariableConflict
from shardyard_worker.embedding import modules as module
from shardyard_worker.embedding.table import RowsNeeded, Table
from shardyard_worker.rows.dedup import UniqueIds, unique_ids

DIM = 4
IDS = torch.tensor([5, -7, 5, (1 << 63) - 1])


def trained(model: torch.nn.Module) -> sy.tables.Optimizer:
    return sy.tables.Optimizer(model)


# ---- what is refused


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bool, torch.uint8, torch.int16])
def test_ids_of_another_dtype_are_refused(dtype: torch.dtype) -> None:
    for each in (sy.Embedding(DIM), sy.EmbeddingBag(DIM)):
        with pytest.raises(DTypeMismatch, match="expected int64 or int32"):
            each(torch.ones(2, 3).to(dtype))


def test_ids_of_32_bits_are_the_same_ids() -> None:
    table = sy.Embedding(DIM)
    torch.testing.assert_close(table(torch.tensor([3, -3], dtype=torch.int32)), table(torch.tensor([3, -3])))


@pytest.mark.parametrize("ids", [[1, 2], None, 3, "12", np.arange(3)])
def test_ids_that_are_no_tensor_are_refused(ids: object) -> None:
    for each in (sy.Embedding(DIM), sy.EmbeddingBag(DIM)):
        with pytest.raises((InvalidRequest, TypeError)):
            each(ids)


def test_sparse_ids_are_refused() -> None:
    with pytest.raises(DTypeMismatch, match="strided"):
        sy.Embedding(DIM)(torch.tensor([[1, 0]]).to_sparse())


@pytest.mark.parametrize(
    ("offsets", "include_last"),
    [
        *(([1, 2], False), ([0, 5], False), ([0, 3, 2], False), ([-1], False), ([], False)),
        *(([0, 3], True), ([0, 5], True), ([1, 4], True), ([], True), ([0, 3, 2, 4], True)),
    ],
)
def test_offsets_out_of_range_are_refused(offsets: list[int], include_last: bool) -> None:
    bag = sy.EmbeddingBag(DIM, include_last_offset=include_last)
    with pytest.raises(InvalidRequest, match="offsets"):
        bag(torch.arange(4), torch.tensor(offsets, dtype=torch.int64))


@pytest.mark.parametrize(
    ("kind", "ids", "offsets", "weights"),
    [
        (InvalidRequest, torch.arange(4), None, None),
        (InvalidRequest, torch.ones(2, 2, dtype=torch.int64), torch.tensor([0]), None),
        (ShapeMismatch, torch.ones(2, 2, 2, dtype=torch.int64), None, None),
        (ShapeMismatch, torch.tensor(3), torch.tensor([0]), None),
        (DTypeMismatch, torch.arange(4), torch.tensor([0.0]), None),
        (DTypeMismatch, torch.arange(4), torch.tensor([[0]]), None),
        (ShapeMismatch, torch.arange(4), torch.tensor([0]), torch.ones(3)),
        (DTypeMismatch, torch.arange(4), torch.tensor([0]), torch.arange(4)),
    ],
)
def test_bags_that_make_no_sense_are_refused(
    kind: type[Exception], ids: torch.Tensor, offsets: torch.Tensor | None, weights: torch.Tensor | None
) -> None:
    with pytest.raises(kind):
        sy.EmbeddingBag(DIM, "sum")(ids, offsets, weights)


@pytest.mark.parametrize("mode", ["mean", "max"])
def test_weights_are_for_sums(mode: str) -> None:
    with pytest.raises(InvalidRequest, match="per_sample_weights"):
        sy.EmbeddingBag(DIM, mode)(torch.arange(4), torch.tensor([0]), torch.ones(4))


def test_more_ids_than_one_look_up_takes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_UP_IDS_MAX", 3)
    sy.Embedding(DIM)(torch.arange(3))
    with pytest.raises(TooLarge, match="4 ids in one look-up"):
        sy.Embedding(DIM)(torch.arange(4))


@pytest.mark.parametrize("dim", [0, -1, 2.0, True, "4"])
def test_table_has_a_dim(dim: object) -> None:
    with pytest.raises(InvalidRequest, match="at least 1"):
        sy.Embedding(dim)  # type: ignore[arg-type]


def test_table_has_limits() -> None:
    with pytest.raises(TooLarge, match="at most 65536"):
        sy.Embedding(1 << 20)
    with pytest.raises(TooLarge, match="name"):
        sy.Embedding(4, table="x" * 1_000)
    with pytest.raises(DTypeMismatch, match="real numbers"):
        sy.Embedding(4, dtype=torch.int64)


def test_mode_and_padding_are_checked() -> None:
    with pytest.raises(InvalidRequest, match="one of sum, mean, max"):
        sy.EmbeddingBag(DIM, "median")
    with pytest.raises(InvalidRequest, match="64 bits"):
        sy.Embedding(DIM, padding_idx=1 << 63)


def test_shared_table_has_one_dim_and_its_own_settings() -> None:
    table = sy.tables.Table(DIM, name="users")
    with pytest.raises(ShapeMismatch, match="'users' of dim 4"):
        sy.EmbeddingBag(DIM + 1, table=table)
    with pytest.raises(InvalidRequest, match=r"give them to the sy\.tables\.Table"):
        sy.Embedding(DIM, table=table, optimizer=sy.tables.SGD())


@pytest.mark.parametrize(
    "settings",
    [
        lambda: sy.tables.SGD(lr=-1.0),
        lambda: sy.tables.SGD(lr=float("nan")),
        lambda: sy.tables.SGD(nesterov=True),
        lambda: sy.tables.Adam(betas=(0.9, 1.0)),
        lambda: sy.tables.Adagrad(eps=-1e-9),
        lambda: sy.tables.FTRL(lr=0.0),
        lambda: sy.tables.uniform(-1.0),
        lambda: sy.tables.normal(float("inf")),
    ],
)
def test_settings_out_of_range_are_refused(settings: object) -> None:
    with pytest.raises(InvalidRequest):
        settings()  # type: ignore[operator]


@pytest.mark.parametrize("features", [{"a.b": 4}, {"": 4}, {"a": torch.nn.Embedding(3, 4)}, {3: 4}])
def test_collection_of_something_else_is_refused(features: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match="feature"):
        sy.EmbeddingCollection(features)  # type: ignore[arg-type]


def test_feature_that_is_not_known_is_refused() -> None:
    collection = sy.EmbeddingCollection({"a": 4, "b": sy.Embedding(4)})
    with pytest.raises(InvalidRequest, match="no feature 'c'; there are a, b"):
        collection({"c": torch.arange(3)})
    with pytest.raises(InvalidRequest, match="has no bags"):
        collection({"b": (torch.arange(3), torch.tensor([0]))})


def test_look_up_that_is_refused_has_asked_nobody() -> None:
    collection = sy.EmbeddingCollection({"a": 4, "b": 4})
    calls = counted(collection)
    with pytest.raises(InvalidRequest):
        collection({"a": (torch.arange(3), torch.tensor([0])), "b": torch.arange(3)})
    assert calls == []


# ---- looking up


def counted(model: torch.nn.Module) -> list[list[RowsNeeded]]:
    """Lets all tables of the model have one source, whose calls are listed."""
    calls = []

    class Source:
        def once(self, table: Table, ids: np.ndarray) -> UniqueIds:
            return unique_ids(ids, 3)

        def fetch(self, wanted: list[RowsNeeded]) -> list[np.ndarray]:
            calls.append(list(wanted))
            return [each.table.rows.look_up(each.found.ids) for each in wanted]

    source = Source()
    for table in sy.tables.tables_of(model).values():
        table.source = source
    return calls


def test_collection_fetches_each_id_of_all_features_once_and_all_tables_in_one_call() -> None:
    shared = sy.tables.Table(DIM, name="shared")
    collection = sy.EmbeddingCollection(
        {"type": sy.Embedding(DIM, table=shared), "items": sy.EmbeddingBag(DIM, table=shared), "c": 2}
    )
    alone = collection({"type": torch.tensor([1, 9, 1])})["type"]
    calls = counted(collection)
    found = collection(
        {
            "type": torch.tensor([1, 9, 1]),
            "items": (torch.tensor([9, 4]), torch.tensor([0])),
            "c": (torch.tensor([1, 1]), torch.tensor([0, 1])),
        }
    )
    assert list(found) == ["type", "items", "c"]
    (call,) = calls
    assert [(each.table, sorted(each.found.ids.tolist())) for each in call] == [
        (shared, [1, 4, 9]),
        (collection.features.get_submodule("c").table, [1]),
    ]
    assert all(each.found.starts.size == 4 for each in call)
    torch.testing.assert_close(found["type"], alone)
    assert found["items"].shape == (1, DIM)


def test_output_has_the_device_and_dtype_of_the_model() -> None:
    model = sy.Embedding(DIM, dtype=torch.float64)
    assert model(IDS).dtype is torch.float64
    assert model.to(torch.bfloat16)(IDS).dtype is torch.bfloat16
    optimizer = trained(model)
    model(IDS).float().sum().backward()
    optimizer.step()
    assert len(model.table) == 3


def test_seed_of_torch_gives_the_same_rows() -> None:
    torch.manual_seed(5)
    first, second = sy.Embedding(DIM)(IDS), sy.Embedding(DIM)(IDS)
    torch.manual_seed(5)
    torch.testing.assert_close(sy.Embedding(DIM)(IDS), first, rtol=0, atol=0)
    assert (first != second).any()


@pytest.mark.parametrize(
    ("initial", "std", "largest"),
    [(None, 0.125 / 3**0.5, 0.125), (sy.tables.uniform(0.5), 0.5 / 3**0.5, 0.5), (sy.tables.normal(2.0), 2.0, 20.0)],
)
def test_rows_begin_as_they_were_told(initial: object, std: float, largest: float) -> None:
    rows = sy.Embedding(64, initial=initial)(torch.arange(500)).detach()  # type: ignore[arg-type]
    assert abs(float(rows.std()) - std) < 0.02 * std
    assert float(rows.abs().max()) <= largest
    assert not sy.Embedding(4, initial=sy.tables.zeros())(IDS).any()


# ---- training


def test_gradients_that_nobody_takes_are_an_error_and_no_silence() -> None:
    model = sy.Embedding(DIM, table="words")
    with pytest.raises(InvalidRequest, match=r"'words'.*nobody would take.*sy\.tables\.Optimizer"):
        model(IDS).sum().backward()


def test_table_that_does_not_learn_needs_nobody() -> None:
    model = torch.nn.Sequential(sy.Embedding(DIM), torch.nn.Linear(DIM, 1))
    model[0].requires_grad_(False)
    model(IDS).sum().backward()
    assert model[1].weight.grad is not None
    model.requires_grad_(True)
    with torch.no_grad():
        assert not model[0](IDS).requires_grad


SETTINGS = [
    (sy.tables.SGD(lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
    (
        sy.tables.Adagrad(lr=0.1, lr_decay=0.1, initial_accumulator_value=0.5, eps=1e-6),
        lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.5, eps=1e-6),
    ),
    (
        sy.tables.SparseAdam(lr=0.1, betas=(0.8, 0.9), eps=1e-3),
        lambda p: torch.optim.SparseAdam(p, lr=0.1, betas=(0.8, 0.9), eps=1e-3),
    ),
]
DENSE_SETTINGS = [
    (
        sy.tables.SGD(lr=0.1, momentum=0.9, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    ),
    (
        sy.tables.SGD(lr=0.1, momentum=0.9, nesterov=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    ),
    (sy.tables.Adagrad(lr=0.1, weight_decay=0.1), lambda p: torch.optim.Adagrad(p, lr=0.1, weight_decay=0.1)),
    (
        sy.tables.Adam(lr=0.1, weight_decay=0.1, eps=1e-2),
        lambda p: torch.optim.Adam(list(p), lr=0.1, weight_decay=0.1, eps=1e-2),
    ),
    (sy.tables.AdamW(lr=0.1, weight_decay=0.3), lambda p: torch.optim.AdamW(list(p), lr=0.1, weight_decay=0.3)),
    (sy.tables.FTRL(lr=0.3, beta=0.5, l1=0.01, l2=0.1), lambda p: sy.optim.FTRL(p, lr=0.3, beta=0.5, l1=0.01, l2=0.1)),
]


def same_training(settings: sy.tables.RowOptimizer, make: object, *, sparse: bool) -> None:
    """Ours beside torch's, of the same rows, for some steps. Sparse: only some ids have a gradient at each."""
    count = 12
    ids = torch.arange(count) * 1_000_003 - 5_000_000
    ours = sy.EmbeddingBag(DIM, "sum", optimizer=settings)
    theirs = torch.nn.EmbeddingBag(count, DIM, mode="sum", sparse=sparse)
    ours.table.put(ids, theirs.weight)
    optimizer, other = trained(ours), make(theirs.parameters())  # type: ignore[operator]
    random = torch.Generator().manual_seed(3)
    for step in range(6):
        few = torch.randint(0, count // 2 + step, (20,), generator=random)
        numbers = few if sparse else torch.cat([few, torch.arange(count)])
        above = torch.randn(2, DIM, generator=random)
        for bags, each, stepped in ((ours, ids[numbers], optimizer), (theirs, numbers, other)):
            bags(each, torch.tensor([0, 7])).backward(above)
            stepped.step()
            stepped.zero_grad()
    expected = theirs.weight.detach().numpy()
    np.testing.assert_allclose(ours.table.rows.everything().rows, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("settings", "make"), SETTINGS)
def test_rows_are_trained_as_torch_trains_sparse_ones(settings: sy.tables.RowOptimizer, make: object) -> None:
    same_training(settings, make, sparse=True)


@pytest.mark.parametrize(("settings", "make"), DENSE_SETTINGS)
def test_rows_that_all_have_gradients_are_trained_as_dense_ones(settings: sy.tables.RowOptimizer, make: object) -> None:
    same_training(settings, make, sparse=False)


def test_row_wise_adagrad_divides_a_row_by_one_root() -> None:
    model = sy.Embedding(2, optimizer=sy.tables.RowWiseAdagrad(lr=0.5, eps=0.0, initial_accumulator_value=2.0))
    model.table.put(torch.tensor([7]), torch.tensor([[1.0, 1.0]]))
    optimizer = trained(model)
    for _ in range(2):
        model(torch.tensor([7])).backward(torch.tensor([[3.0, 1.0]]))
        optimizer.step()
        optimizer.zero_grad()
    expected = 1 - 0.5 * np.array([3.0, 1.0]) * (1 / np.sqrt(2 + 5) + 1 / np.sqrt(2 + 10))
    np.testing.assert_allclose(model.table.rows.everything().rows, [expected], atol=1e-6)
    assert optimizer.state_dict()["rows"]["table"]["sum"].tolist() == [[12.0]]


@pytest.mark.parametrize("settings", [sy.tables.SGD(momentum=0.9, weight_decay=0.1), sy.tables.AdamW(weight_decay=0.1)])
def test_row_without_a_gradient_stays_as_it_is(settings: sy.tables.RowOptimizer) -> None:
    model = sy.Embedding(DIM, optimizer=settings)
    optimizer = trained(model)
    for ids in ([1, 2], [2], [2]):
        optimizer.zero_grad()
        model(torch.tensor(ids)).sum().backward()
        optimizer.step()
        if len(ids) == 2:
            before = model(torch.tensor([1, 2])).detach()
    after = model(torch.tensor([1, 2])).detach()
    torch.testing.assert_close(after[0], before[0], rtol=0, atol=0)
    assert (after[1] != before[1]).any()


def test_gradients_of_several_backwards_add_up_until_they_are_forgotten() -> None:
    model = sy.Embedding(DIM, optimizer=sy.tables.SGD(lr=1.0), initial=sy.tables.zeros())
    optimizer = trained(model)
    model(torch.tensor([1])).sum().backward()
    optimizer.zero_grad()
    loss = model(torch.tensor([1, 2])).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    model(torch.tensor([2])).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert model(torch.tensor([1, 2]))[:, 0].tolist() == [-2.0, -3.0]
    optimizer.step()
    assert model(torch.tensor([1, 2]))[:, 0].tolist() == [-2.0, -3.0]


def test_learning_rates_follow_a_scheduler_of_torch() -> None:
    model = sy.Embedding(DIM, optimizer=sy.tables.SGD(lr=1.0), initial=sy.tables.zeros())
    optimizer = trained(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.tensor([1])).sum().backward()
        optimizer.step()
        scheduler.step()
    assert model(torch.tensor([1]))[0, 0].item() == -1.75


def test_model_learns_beside_ordinary_layers() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(sy.EmbeddingBag(8, "mean", optimizer=sy.tables.Adagrad(lr=0.3)), torch.nn.Linear(8, 1))
    dense, rows = torch.optim.Adam(model.parameters(), lr=0.02), trained(model)
    random = torch.Generator().manual_seed(1)
    for _ in range(150):
        ids = torch.randint(-50, 50, (64, 3), generator=random)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(ids)[:, 0], (ids.sum(dim=1) > 0).float())
        dense.zero_grad()
        rows.zero_grad()
        loss.backward()
        dense.step()
        rows.step()
    assert loss.item() < 0.3
    assert 90 <= len(model[0].table) <= 100


def test_setting_that_became_wrong_is_refused_and_nothing_is_changed() -> None:
    model = sy.EmbeddingCollection({"a": 4, "b": 4})
    optimizer = trained(model)
    found = model({"a": torch.tensor([[1]]), "b": torch.tensor([[1]])})
    (found["a"].sum() + found["b"].sum()).backward()
    optimizer.param_groups[1]["lr"] = -1.0
    with pytest.raises(InvalidRequest, match="lr"):
        optimizer.step()
    assert not any(map(len, sy.tables.tables_of(model).values()))
    optimizer.param_groups[1]["lr"] = 1.0
    optimizer.step()
    assert all(map(len, sy.tables.tables_of(model).values()))


def test_model_without_tables_has_nothing_to_train_here() -> None:
    with pytest.raises(InvalidRequest, match="without tables"):
        sy.tables.Optimizer(torch.nn.Linear(2, 2))


def test_forwards_without_a_backward_leave_nothing_behind() -> None:
    model = sy.Embedding(DIM)
    trained(model)
    made = model(IDS)
    gone = weakref.ref(made.grad_fn.next_functions[0][0])
    del made
    gc.collect()
    assert gone() is None
    assert model.table.gradients.take() is None


# ---- names


def test_tables_have_the_names_given_or_the_path_of_their_first_module() -> None:
    shared = sy.tables.Table(DIM)
    model = torch.nn.ModuleDict(
        {
            "user": sy.Embedding(DIM, table=shared),
            "friend": sy.EmbeddingBag(DIM, table=shared),
            "ad": sy.Embedding(2, table="ads"),
        }
    )
    assert {name: table.dim for name, table in sy.tables.tables_of(model).items()} == {"user": DIM, "ads": 2}
    assert list(sy.tables.tables_of(model["ad"])) == ["ads"]
    assert list(sy.tables.tables_of(sy.Embedding(3))) == ["table"]


def test_two_tables_of_one_name_are_a_conflict() -> None:
    model = torch.nn.ModuleList([sy.Embedding(3, table="words"), sy.Embedding(4, table="words")])
    with pytest.raises(VariableConflict, match="two tables called 'words', of dims 3 and 4"):
        sy.tables.Optimizer(model)


# ---- saving


def stepped(model: torch.nn.Module, optimizer: sy.tables.Optimizer, ids: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(ids).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize(
    "settings", [sy.tables.Adam(lr=0.1), sy.tables.FTRL(), sy.tables.RowWiseAdagrad(), sy.tables.SGD(momentum=0.5)]
)
def test_saved_and_loaded_training_goes_on_with_the_same_bits(settings: sy.tables.RowOptimizer) -> None:
    def made() -> tuple[torch.nn.Module, sy.tables.Optimizer]:
        model = sy.Embedding(DIM, optimizer=settings)
        return model, trained(model)

    model, optimizer = made()
    model.table.put(torch.tensor([70, 71]), torch.ones(2, DIM))
    for ids in ([3, 1, 3], [2, 70], [-9]):
        stepped(model, optimizer, torch.tensor(ids))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other, its = made()
    other.load_state_dict(saved["model"])
    its.load_state_dict(saved["optimizer"])
    for each, of_each in ((model, optimizer), (other, its)):
        for ids in ([3, -9, 4], [1, 5, 71]):
            stepped(each, of_each, torch.tensor(ids))
    every = torch.tensor([3, 1, 2, 70, 71, -9, 4, 5, 6, 1 << 40])
    assert model(every).detach().numpy().tobytes() == other(every).detach().numpy().tobytes()
    assert set(saved["model"]) == {"table.ids", "table.rows", "table.seed"}
    assert saved["model"]["table.ids"].tolist() == [-9, 1, 2, 3, 70, 71]


def test_rows_that_are_loaded_replace_all_others_and_keep_their_state() -> None:
    model = sy.Embedding(DIM, optimizer=sy.tables.Adagrad(lr=0.1))
    optimizer = trained(model)
    stepped(model, optimizer, torch.tensor([1, 2]))
    saved = copy.deepcopy(model.state_dict())
    sums = optimizer.state_dict()["rows"]["table"]["sum"]
    stepped(model, optimizer, torch.tensor([3]))
    assert len(model.table) == 3
    model.load_state_dict(saved)
    assert model.table.rows.everything().ids.tolist() == [1, 2]
    torch.testing.assert_close(optimizer.state_dict()["rows"]["table"]["sum"], sums)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"table.rows": torch.zeros(2, DIM + 1)}, "rows of shape"),
        ({"table.rows": torch.zeros(3, DIM)}, "rows of shape"),
        ({"table.rows": torch.full((2, DIM), torch.nan)}, "not finite"),
        ({"table.ids": torch.tensor([4, 4])}, "two rows for id 4"),
        ({"table.ids": torch.tensor([4.0, 5.0])}, "no ids, rows and seed"),
        ({"table.seed": torch.tensor([1, 2])}, "no ids, rows and seed"),
        ({"table.more": torch.tensor([1])}, "Unexpected"),
        ({"table.ids": None}, "Missing"),
    ],
)
def test_state_that_is_no_tables_is_refused_and_nothing_is_changed(
    change: dict[str, torch.Tensor | None], said: str
) -> None:
    model = sy.Embedding(DIM)
    model.table.put(torch.tensor([1, 2]), torch.ones(2, DIM))
    before = copy.deepcopy(model.state_dict())
    state = {name: value for name, value in {**before, **change}.items() if value is not None}
    with pytest.raises(RuntimeError, match=said):
        model.load_state_dict(state)
    if "table.more" not in change:
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, before[name])


def test_state_of_rows_that_are_not_here_is_refused() -> None:
    model, other = sy.Embedding(DIM, optimizer=sy.tables.Adam()), sy.Embedding(DIM, optimizer=sy.tables.Adam())
    optimizer, its = trained(model), trained(other)
    stepped(model, optimizer, torch.tensor([1]))
    with pytest.raises(InvalidRequest, match="load the model's state_dict first"):
        its.load_state_dict(optimizer.state_dict())
    other.load_state_dict(model.state_dict())
    saved = optimizer.state_dict()
    saved["rows"]["table"]["exp_avg"] = torch.zeros(1, DIM + 1)
    with pytest.raises(ShapeMismatch, match="exp_avg"):
        its.load_state_dict(saved)
    with pytest.raises(InvalidRequest, match="state of the tables"):
        its.load_state_dict(torch.optim.SGD(model.parameters(), lr=0.1).state_dict())


def test_shared_table_is_shared_in_a_copy_too_and_nobody_trains_that() -> None:
    table = sy.tables.Table(DIM)
    model = torch.nn.ModuleList([sy.Embedding(DIM, table=table), sy.EmbeddingBag(DIM, table=table)])
    optimizer = trained(model)
    model[0](IDS).sum().backward()
    optimizer.step()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin[0].table is twin[1].table
        assert twin[0].table is not table
        torch.testing.assert_close(twin[0](IDS), model[0](IDS), rtol=0, atol=0)
        with pytest.raises(InvalidRequest, match="nobody would take"):
            twin[0](IDS).sum().backward()
    model[0](IDS).sum().backward()


@pytest.mark.parametrize(
    "settings",
    [sy.tables.FTRL(), sy.tables.Adagrad(initial_accumulator_value=0.3), sy.tables.SGD(momentum=0.9)],
)
def test_row_that_a_step_makes_is_trained_as_one_that_was_there(settings: sy.tables.RowOptimizer) -> None:
    ids, models = torch.arange(40), []
    for there in (False, True):
        table = sy.tables.Table(DIM, seed=1, optimizer=settings)
        model = sy.Embedding(DIM, table=table)
        if there:
            table.put(ids, model(ids))
        optimizer = trained(model)
        for begin in (0, 10, 0):
            stepped(model, optimizer, ids[begin:])
        models.append(model)
    torch.testing.assert_close(models[0](ids), models[1](ids), rtol=0, atol=0)


def test_compiled_model_looks_up_and_trains_as_a_plain_one() -> None:
    model = torch.nn.Sequential(sy.EmbeddingBag(DIM, "sum"), torch.nn.Linear(DIM, 2))
    compiled = torch.compile(model, backend="eager")
    optimizer, ids = trained(compiled), torch.arange(6).view(2, 3)
    torch.testing.assert_close(compiled(ids), model(ids), rtol=0, atol=0)
    compiled(ids).sum().backward()
    optimizer.step()
    assert len(model[0].table) == 6
    torch.testing.assert_close(compiled(ids), model(ids), rtol=0, atol=0)
    assert list(sy.tables.tables_of(compiled)) == ["0"]


@pytest.mark.parametrize(
    ("made", "given"),
    [
        (lambda: sy.Embedding(DIM, dtype=torch.float64), (torch.ones(2, 3, dtype=torch.int64),)),
        (lambda: sy.EmbeddingBag(DIM), (torch.ones(2, 3, dtype=torch.int64),)),
        (lambda: sy.EmbeddingBag(DIM), (torch.arange(5), torch.tensor([0, 2, 2]))),
        (lambda: sy.EmbeddingBag(DIM, include_last_offset=True), (torch.arange(5), torch.tensor([0, 2, 5]))),
    ],
    ids=["embedding", "bags", "offsets", "last offset"],
)
def test_look_up_without_data_has_the_shape_of_one_with_data(made: Any, given: tuple[torch.Tensor, ...]) -> None:
    """As a pipeline finds the shapes of its activations."""
    lookup = made()
    trained(lookup)
    wanted = lookup(*given)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        found = lookup(*map(mode.from_tensor, given))
        without = lookup.requires_grad_(False)(*map(mode.from_tensor, given))
    assert (found.shape, found.dtype, found.requires_grad) == (wanted.shape, wanted.dtype, wanted.requires_grad)
    assert found.requires_grad
    assert not without.requires_grad
