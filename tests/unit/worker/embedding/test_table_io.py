"""Files of ids and rows: both forms, what other programs make of them, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.numpy
import torch

import shardyard as sy
from shardyard.checkpoints import row_exports
from shardyard.domain.errors import (
    CheckpointDamaged,
    CheckpointNotFound,
    ConfigurationError,
    DTypeMismatch,
    InvalidRequest,
    ShapeMismatch,
    ShardyardError,
    StorageUnavailable,
)
from shardyard_worker.embedding import table_io

DIM = 3
IDS = np.array([-(1 << 63), -2, 0, 7, (1 << 63) - 1])
ROWS = np.random.default_rng(0).standard_normal((5, DIM)).astype(np.float32)
FORMS = ["rows.parquet", "rows.safetensors"]


def filled() -> sy.tables.Table:
    table = sy.tables.Table(DIM)
    order = np.random.default_rng(1).permutation(IDS.size)
    table.put(torch.from_numpy(IDS[order]), torch.from_numpy(ROWS[order]))
    return table


def holds(table: sy.tables.Table, ids: np.ndarray, rows: np.ndarray) -> None:
    every = table.rows.everything()
    assert every.ids.tolist() == ids.tolist()
    np.testing.assert_array_equal(every.rows, rows)


@pytest.mark.parametrize("name", FORMS)
def test_rows_come_back_from_a_file(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_exports, "ROW_GROUP_ROWS", 2)
    filled().export(tmp_path / "folder" / name)
    table = sy.tables.Table(DIM)
    table.put(torch.tensor([0, 1]), torch.ones(2, DIM))
    table.load(str(tmp_path / "folder" / name))
    holds(table, np.insert(IDS, 3, 1), np.insert(ROWS, 3, 1.0, axis=0))
    assert [path.name for path in (tmp_path / "folder").iterdir()] == [name]


@pytest.mark.parametrize("name", FORMS)
def test_table_without_rows_has_a_file_too(name: str, tmp_path: Path) -> None:
    sy.tables.Table(DIM).export(tmp_path / name)
    table = filled()
    table.load(tmp_path / name)
    holds(table, IDS, ROWS)


@pytest.mark.parametrize("name", FORMS)
def test_file_is_written_over_as_a_whole(name: str, tmp_path: Path) -> None:
    sy.tables.Table(DIM).export(tmp_path / name)
    filled().export(tmp_path / name)
    table = sy.tables.Table(DIM)
    table.load(tmp_path / name)
    holds(table, IDS, ROWS)


def test_other_programs_read_the_files(tmp_path: Path) -> None:
    filled().export(tmp_path / "rows.safetensors")
    filled().export(tmp_path / "rows.parquet")
    found = safetensors.numpy.load_file(tmp_path / "rows.safetensors")
    np.testing.assert_array_equal(found["ids"], IDS)
    np.testing.assert_array_equal(found["rows"], ROWS)
    table = pq.read_table(tmp_path / "rows.parquet")
    assert table.schema.equals(pa.schema([("id", pa.int64()), ("row", pa.list_(pa.float32(), DIM))]))
    assert table.column("id").to_pylist() == IDS.tolist()
    np.testing.assert_array_equal(np.array(table.column("row").to_pylist(), np.float32), ROWS)


def test_files_of_other_programs_are_read(tmp_path: Path) -> None:
    order = np.random.default_rng(2).permutation(IDS.size)
    safetensors.numpy.save_file({"ids": IDS[order], "rows": ROWS[order]}, tmp_path / "rows.safetensors")
    rows = pa.FixedSizeListArray.from_arrays(pa.array(ROWS[order].reshape(-1)), DIM)
    more = pa.table({"word": list("abcde"), "row": rows, "id": IDS[order]})
    pq.write_table(more, tmp_path / "rows.parquet", row_group_size=2)
    for name in FORMS:
        table = sy.tables.Table(DIM)
        table.load(tmp_path / name)
        holds(table, IDS, ROWS)


def test_ordinary_embedding_becomes_rows_0_to_n() -> None:
    plain = torch.nn.Embedding(4, DIM)
    for source in (plain, plain.weight, torch.nn.EmbeddingBag.from_pretrained(plain.weight.detach())):
        model = sy.Embedding(DIM)
        model.table.load(source)
        torch.testing.assert_close(model(torch.tensor([[3, 0]])), plain(torch.tensor([[3, 0]])), rtol=0, atol=0)
        assert len(model.table) == 4


def parquet(path: Path, ids: pa.Array, rows: pa.Array) -> None:
    pq.write_table(pa.table({"id": ids, "row": rows}), path)


def lists(values: np.ndarray, dim: int) -> pa.Array:
    return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), dim)


WRONG_PARQUET = {
    "ids of 32 bits": lambda path: parquet(path, pa.array([1], pa.int32()), lists(ROWS[:1], DIM)),
    "rows of doubles": lambda path: parquet(path, pa.array([1]), lists(ROWS[:1].astype(float), DIM)),
    "lists of any length": lambda path: parquet(path, pa.array([1]), pa.array([[1.0]], pa.list_(pa.float32()))),
    "no rows": lambda path: pq.write_table(pa.table({"id": [1]}), path),
    "no id": lambda path: parquet(path, pa.array([1, None]), lists(ROWS[:2], DIM)),
    "a null element": lambda path: parquet(
        path, pa.array([1]), pa.FixedSizeListArray.from_arrays(pa.array([1.0, None, 2.0], pa.float32()), DIM)
    ),
    "a null row": lambda path: parquet(path, pa.array([1]), pa.array([None], pa.list_(pa.float32(), DIM))),
    "an id twice": lambda path: parquet(path, pa.array([1, 1]), lists(ROWS[:2], DIM)),
    "no Parquet": lambda path: path.write_bytes(b"PAR1 no PAR1"),
    "nothing": lambda path: path.write_bytes(b""),
}


@pytest.mark.parametrize("what", WRONG_PARQUET)
def test_parquet_of_something_else_is_refused_and_nothing_is_changed(what: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    WRONG_PARQUET[what](path)
    table = filled()
    with pytest.raises(CheckpointDamaged, match=r"rows\.parquet"):
        table.load(path)
    holds(table, IDS, ROWS)


@pytest.mark.parametrize(
    "tensors",
    [
        {"ids": IDS},
        {"rows": ROWS},
        {"ids": IDS.astype(np.int32), "rows": ROWS},
        {"ids": IDS, "rows": ROWS.astype(np.float64)},
        {"ids": IDS[:4], "rows": ROWS},
        {"ids": IDS, "rows": ROWS[:, 0].copy()},
        {"ids": IDS[[0, 0]], "rows": ROWS[:2]},
    ],
)
def test_safetensors_of_something_else_are_refused_and_nothing_is_changed(
    tensors: dict[str, np.ndarray], tmp_path: Path
) -> None:
    safetensors.numpy.save_file(tensors, tmp_path / "rows.safetensors")
    table = filled()
    with pytest.raises(CheckpointDamaged, match=r"rows\.safetensors"):
        table.load(tmp_path / "rows.safetensors")
    holds(table, IDS, ROWS)


@pytest.mark.parametrize("name", FORMS)
def test_rows_of_another_dim_or_not_finite_are_refused_and_nothing_is_changed(name: str, tmp_path: Path) -> None:
    table = sy.tables.Table(DIM + 1, name="words")
    filled().export(tmp_path / name)
    with pytest.raises(ShapeMismatch, match="'words'"):
        table.load(tmp_path / name)
    rows = ROWS.copy()
    rows[3, 1] = np.inf
    table_io.write(tmp_path / name, DIM, lambda: iter([(IDS, rows)]))
    table = filled()
    with pytest.raises(InvalidRequest, match=r"1 rows .* not finite, the first of them that of id 7"):
        table.load(tmp_path / name)
    holds(table, IDS, ROWS)


def test_rows_that_are_put_are_checked() -> None:
    table = filled()
    for kind, ids, rows in (
        (DTypeMismatch, torch.tensor([1.0]), torch.ones(1, DIM)),
        (DTypeMismatch, torch.tensor([1]), torch.ones(1, DIM, dtype=torch.int64)),
        (ShapeMismatch, torch.tensor([1]), torch.ones(2, DIM)),
        (ShapeMismatch, torch.tensor([[1]]), torch.ones(1, DIM)),
        (InvalidRequest, torch.tensor([1, 1]), torch.ones(2, DIM)),
        (InvalidRequest, torch.tensor([1]), torch.full((1, DIM), torch.nan)),
    ):
        with pytest.raises(kind):
            table.put(ids, rows)
    holds(table, IDS, ROWS)


def test_other_endings_and_files_that_are_not_there_are_refused(tmp_path: Path) -> None:
    table = filled()
    for call in (table.export, table.load):
        with pytest.raises(InvalidRequest, match=r"end with \.parquet or \.safetensors"):
            call(tmp_path / "rows.csv")
        with pytest.raises(InvalidRequest, match="letters, digits"):
            call(tmp_path / "my rows.parquet")
    for name in FORMS:
        with pytest.raises(CheckpointNotFound, match=name):
            table.load(tmp_path / name)
        (tmp_path / "file").write_bytes(b"")
        with pytest.raises(StorageUnavailable):
            table.export(tmp_path / "file" / name)


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigurationError, match=r"shardyard\[tables\]"):
        filled().export(tmp_path / "rows.parquet")
    filled().export(tmp_path / "rows.safetensors")


@pytest.mark.parametrize("name", FORMS)
def test_file_with_bytes_changed_is_refused_or_read_and_never_breaks(name: str, tmp_path: Path) -> None:
    path, dice = tmp_path / name, Random(5)
    filled().export(path)
    whole, refused = path.read_bytes(), 0
    for _ in range(300):
        data = bytearray(whole)
        for _time in range(dice.choice((1, 1, 3))):
            data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        path.write_bytes(bytes(data[: dice.randrange(len(data))] if dice.random() < 0.2 else data))
        table = sy.tables.Table(DIM)
        try:
            table.load(path)
        except ShardyardError:
            refused += 1
            assert len(table) == 0
    assert 50 < refused < 300
