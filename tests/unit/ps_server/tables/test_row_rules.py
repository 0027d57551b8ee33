"""The rules for rows: a row that is pushed at every step has the bits of a dense variable, and torch's values; one that
is not pushed stays as it is."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shardyard.domain.errors import InvalidRequest, UnsupportedOptimizer
from shardyard.domain.tables.initial_values import InitialKind, InitialValues
from shardyard.domain.tables.row_optimizers import KINDS, make_group
from shardyard.domain.tables.table_settings import TableSettings
from shardyard_ps_server.tables.table import Table
from shardyard_ps_server.values import optimizers
from tests.support.dense_rules import take_step

ROWS, DIM, STEPS = 37, 19, 60
IDS = np.arange(ROWS, dtype=np.int64) * 1_000_003 - 9
CASES: list[tuple[str, dict[str, float]]] = [
    ("sgd", {"lr": 0.05}),
    ("sgd", {"lr": 0.05, "weight_decay": 0.03, "maximize": 1}),
    ("sgd", {"lr": 0.05, "momentum": 0.9, "dampening": 0.4}),
    ("sgd", {"lr": 0.05, "momentum": 0.8, "nesterov": 1, "weight_decay": 0.03}),
    ("adagrad", {"lr": 0.1, "lr_decay": 0.05, "weight_decay": 0.02}),
    ("adagrad", {"lr": 0.1, "initial_accumulator_value": 0.3, "eps": 1e-2, "maximize": 1}),
    ("adam", {"lr": 0.01, "weight_decay": 0.1}),
    ("adam", {"lr": 0.01, "beta1": 0.3, "beta2": 0.9, "amsgrad": 1}),
    ("adamw", {"lr": 0.01, "weight_decay": 0.3}),
    ("adamw", {"lr": 0.01, "weight_decay": 0.3, "amsgrad": 1, "maximize": 1}),
    ("ftrl", {"lr": 0.5, "beta": 0.5, "l1": 0.05, "l2": 0.2}),
]


def make(kind: str, given: dict[str, float], **more: float) -> Table:
    group = make_group(kind, given)
    return Table(TableSettings("t", DIM, kind, group, 3, InitialValues(InitialKind.NORMAL, 0.5), rows_max=4_096))


def values_of(table: Table, ids: np.ndarray = IDS) -> np.ndarray:
    out = np.empty((ids.size, DIM), np.float32)
    table.look_up(ids, out)
    return out


def gradients(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((STEPS, ROWS, DIM)).astype(np.float32)


@pytest.mark.parametrize(("kind", "given"), CASES)
def test_rows_that_are_always_pushed_have_the_bits_of_a_dense_variable(kind: str, given: dict[str, float]) -> None:
    table, dense, group = make(kind, given), optimizers.make(kind), make_group(kind, given)
    w = values_of(table).ravel()
    state = [np.full_like(w, slot.initial) for slot in dense.slots(group)]
    for step, g in enumerate(gradients(), start=1):
        after = np.empty_like(w)
        take_step(dense, group, step, w, g.ravel(), after, state)
        w = after
        table.push(IDS, g, step)
    assert values_of(table).tobytes() == w.tobytes()
    (chunk,) = table.cuts.items()
    order = np.argsort(chunk.ids)
    kept = chunk.state[order].reshape(ROWS, len(state), DIM)
    for number, expected in enumerate(state):
        assert kept[np.argsort(np.argsort(IDS)), number].tobytes() == expected.tobytes()


TORCH = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


@pytest.mark.parametrize(("kind", "given"), [case for case in CASES if case[0] in TORCH])
def test_rows_that_are_always_pushed_follow_torch(kind: str, given: dict[str, float]) -> None:
    table = make(kind, given)
    parameter = torch.nn.Parameter(torch.from_numpy(values_of(table)))
    flags = {name: bool(value) for name, value in given.items() if name in ("nesterov", "amsgrad", "maximize")}
    betas = {"betas": (given.get("beta1", 0.9), given.get("beta2", 0.999))} if kind.startswith("adam") else {}
    rest = {name: value for name, value in given.items() if name not in flags and not name.startswith("beta")}
    theirs = TORCH[kind]([parameter], **rest, **flags, **betas)
    for step, g in enumerate(gradients(), start=1):
        parameter.grad = torch.from_numpy(g)
        theirs.step()
        table.push(IDS, g, step)
    np.testing.assert_allclose(values_of(table), parameter.detach().numpy(), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("kind", "given", "theirs"),
    [
        ("sgd", {"lr": 0.05}, lambda p: torch.optim.SGD([p], lr=0.05)),
        ("adagrad", {"lr": 0.1, "eps": 1e-3}, lambda p: torch.optim.Adagrad([p], lr=0.1, eps=1e-3)),
        ("sparse_adam", {"lr": 0.02, "eps": 1e-2}, lambda p: torch.optim.SparseAdam([p], lr=0.02, eps=1e-2)),
    ],
)
def test_rows_that_are_pushed_now_and_then_follow_torchs_sparse_gradients(
    kind: str, given: dict[str, float], theirs: object
) -> None:
    table = make(kind, given)
    parameter = torch.nn.Parameter(torch.from_numpy(values_of(table)))
    optimizer = theirs(parameter)  # type: ignore[operator]
    rng = np.random.default_rng(5)
    for step, g in enumerate(gradients(), start=1):
        chosen = np.flatnonzero(rng.random(ROWS) < 0.3)
        parameter.grad = torch.sparse_coo_tensor(
            torch.from_numpy(chosen)[None], torch.from_numpy(g[chosen]), (ROWS, DIM), check_invariants=True
        )
        optimizer.step()
        table.push(IDS[chosen], g[chosen], step)
    np.testing.assert_allclose(values_of(table), parameter.detach().numpy(), rtol=2e-5, atol=2e-6)


def test_row_wise_adagrad_divides_by_the_root_of_the_mean_squares() -> None:
    given = {"lr": 0.1, "initial_accumulator_value": 0.2, "eps": 1e-4, "weight_decay": 0.01}
    table = make("rowwise_adagrad", given)
    w, total = values_of(table).astype(np.float64), np.full((ROWS, 1), 0.2)
    for step, g in enumerate(gradients(), start=1):
        x = g + 0.01 * w
        total += (x * x).mean(axis=1, keepdims=True)
        w -= 0.1 * x / (np.sqrt(total) + 1e-4)
        table.push(IDS, g, step)
    np.testing.assert_allclose(values_of(table), w, rtol=2e-5, atol=2e-6)
    (chunk,) = table.cuts.items()
    assert chunk.state.shape == (ROWS, 1)


def test_rates_are_those_of_the_call() -> None:
    table = make("sgd", {"lr": 1.0})
    before = values_of(table)
    ones = np.ones((ROWS, DIM), np.float32)
    table.push(IDS, ones, 1, group=make_group("sgd", {"lr": 0.25}))
    assert (values_of(table) == before - np.float32(0.25)).all()
    with pytest.raises(InvalidRequest, match="momentum was 0"):
        table.push(IDS, ones, 2, group=make_group("sgd", {"lr": 0.25, "momentum": 0.9}))
    with pytest.raises(InvalidRequest, match="lr is -1"):
        table.push(IDS, ones, 2, group=make_group("sgd", {"lr": -1.0}))
    assert (values_of(table) == before - np.float32(0.25)).all()


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_row_that_is_not_pushed_stays_as_it_is(kind: str) -> None:
    table = make(kind, {"weight_decay": 0.1} if kind not in ("ftrl",) else {})
    table.push(IDS, gradients()[0], 1)
    before = values_of(table)
    table.push(IDS[:5], gradients()[1, :5], 2)
    after = values_of(table)
    assert (after[5:] == before[5:]).all()
    assert (after[:5] != before[:5]).any(axis=1).all()


def test_rows_of_another_kind_are_refused() -> None:
    with pytest.raises(UnsupportedOptimizer, match="lamb"):
        TableSettings("t", DIM, "lamb")
