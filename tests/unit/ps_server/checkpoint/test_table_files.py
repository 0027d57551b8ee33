"""Files of tables, and what manifests, messages and commands say of them: damaged ones are refused."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from click.testing import CliRunner

import shardyard as sy
from shardyard.checkpoints import layout as layouts
from shardyard.checkpoints import rows_file
from shardyard.checkpoints.convert import entry_from_wire, entry_to_wire, tables_from_wire, tables_to_wire
from shardyard.checkpoints.manifest import FileRef, TableEntry, encode
from shardyard.checkpoints.rows_file import Cells, Entries, Removed, RowsFileKey
from shardyard.domain import limits
from shardyard.domain.errors import (
    CheckpointDamaged,
    InvalidRequest,
    ShardyardError,
    TooLarge,
)
from shardyard.domain.ids import PartitionId
from shardyard.domain.layout.layouts import JobLayout
from shardyard.domain.tables.row_ids import partition_of
from shardyard.storage.json_reader import JsonNode, canonical, document_of
from shardyard.storage.storage import LocalStorage, Written
from shardyard_launcher.commands.checkpoint import checkpoint
from shardyard_ps_server.hosting.store import Store
from tests.support.table_checkpoints import (
    IDS,
    LAYOUT,
    USERS,
    chain,
    contents,
    entries,
    go_back,
    partitions,
    restored,
    rows,
    save,
    small_files,
    stores_end,
    train,
    trained,
    where_rows_lie,
)

__all__ = ["small_files", "stores_end", "where_rows_lie"]


def place(table: int = 0, partition: int = 0, *, base: bool = True) -> RowsFileKey:
    return RowsFileKey(LAYOUT, PartitionId(partition), table, base)


OWN = IDS[partition_of(IDS, 2) == 0][:6]


def some_entries(**changed: np.ndarray) -> Entries:
    found = Entries(
        OWN, np.ones((4, 4), np.float32), np.zeros((4, 8), np.float32), np.full(6, 3, np.int64), np.full(6, 9, np.int64)
    )
    return dataclasses.replace(found, **changed)


def test_parts_come_back_as_they_were(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    written = storage.write("f", rows_file.pieces(place(), some_entries()))
    found = rows_file.read(storage, "f", written, place())
    assert isinstance(found, Entries)
    for field in dataclasses.fields(Entries):
        mine, theirs = getattr(found, field.name), getattr(some_entries(), field.name)
        assert (mine.dtype, mine.tobytes()) == (theirs.dtype, theirs.tobytes())
    written = storage.write("f", rows_file.pieces(place(base=False), Removed(OWN)))
    found = rows_file.read(storage, "f", written, place(base=False))
    assert isinstance(found, Removed)
    assert found.ids.tolist() == OWN.tolist()


STRANGER = IDS[partition_of(IDS, 2) == 1][:1]
WRONG: dict[str, tuple[str, rows_file.Part, RowsFileKey, RowsFileKey]] = {
    "an id of another partition": (
        "cannot have", some_entries(ids=np.concatenate([OWN[:5], STRANGER])), place(), place(),
    ),
    "an id that comes twice": ("twice", some_entries(ids=np.repeat(OWN[:3], 2)), place(), place()),
    "an id that is removed twice": ("twice", Removed(np.repeat(OWN[:1], 2)), place(), place()),
    "a frequency of 0": ("frequencies", some_entries(frequencies=np.zeros(6, np.int64)), place(), place()),
    "a step before the first": ("steps", some_entries(steps=np.full(6, -1, np.int64)), place(), place()),
    "more rows than ids": ("5 rows for 4 ids", some_entries(
        ids=OWN[:4], values=np.ones((5, 4), np.float32), state=np.zeros((5, 8), np.float32),
        frequencies=np.ones(4, np.int64), steps=np.ones(4, np.int64)), place(), place()),
    "another table": ("table", some_entries(), place(), place(1)),
    "another partition": ("partition", some_entries(), place(), place(0, 1)),
    "an increment for a base": ("base", some_entries(), place(base=False), place()),
    "rows of another length": ("values", some_entries(values=np.ones((4, 3), np.float32)), place(), place()),
    "state of other rows": ("exp_avg", some_entries(state=np.zeros((3, 8), np.float32)), place(), place()),
    "a filter where there is none": ("cells", Cells(0, np.zeros(64, np.uint8)), place(), place()),
    "a filter beyond the end": ("cells", Cells(4_050, np.zeros(64, np.uint8)), place(1), place(1)),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_a_file_that_fits_its_digest_and_not_its_table_is_damaged(tmp_path: Path, wrong: str) -> None:
    message, part, written_as, read_as = WRONG[wrong]
    storage = LocalStorage(tmp_path)
    written = storage.write("f", rows_file.pieces(written_as, part))
    with pytest.raises(CheckpointDamaged, match=f"(?s)f .*{message}"):
        rows_file.read(storage, "f", written, read_as)


def test_a_file_beyond_the_limit_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(CheckpointDamaged, match="at most"):
        rows_file.read(LocalStorage(tmp_path), "f", Written(limits.ROWS_FILE_BYTES_MAX + 1, "0" * 64), place())


LIES: dict[str, Callable[[TableEntry], TableEntry]] = {
    "another number of rows": lambda entry: dataclasses.replace(entry, rows=entry.rows - 1),
    "another number of ids": lambda entry: dataclasses.replace(entry, ids=entry.ids + 1),
    "without an increment": lambda entry: dataclasses.replace(entry, increments=entry.increments[:-1]),
    "fewer updates than rows say": lambda entry: dataclasses.replace(entry, updates=1),
}


@pytest.mark.parametrize("lie", LIES)
def test_files_that_do_not_make_the_table_are_damaged_and_nothing_is_restored(tmp_path: Path, lie: str) -> None:
    store = trained()
    save(store, tmp_path, 1)
    train(store, 9, np.concatenate([IDS[:3], np.arange(50)]))
    good = save(store, tmp_path, 2, base=1)
    wrong = [
        dataclasses.replace(each, tables=(LIES[lie](each.tables[0]), *each.tables[1:])) if each.partition else each
        for each in good
    ]
    before = contents(store)
    with pytest.raises(CheckpointDamaged):
        go_back(store, tmp_path, wrong)
    assert contents(store) == before
    assert contents(restored(tmp_path, good)) == before


def test_a_filter_that_is_not_whole_is_damaged(tmp_path: Path) -> None:
    library, _ = chain(tmp_path, 1)
    state = library.tables(library.load("job"), 1)[0]
    files = [file for file in state.entry.base if not isinstance(state.read(file), Cells)]
    for entry in (dataclasses.replace(state.entry, base=tuple(files)), TableEntry(0, 0, 0)):
        with pytest.raises(CheckpointDamaged, match="a filter of 0 cells"):
            list(dataclasses.replace(state, entry=entry).parts())


BROKEN: dict[str, Callable[[dict[str, object]], object]] = {
    "no name": lambda d: d.update(name=""),
    "a dim of 0": lambda d: d.update(dim=0),
    "an optimizer that rows do not have": lambda d: d.update(optimizer="lion"),
    "settings of another optimizer": lambda d: d.update(group=[0.1]),
    "a setting out of its range": lambda d: d.update(group=[-1.0, *d["group"][1:]]),  # type: ignore[index]
    "an admission that is none": lambda d: d["admission"].update(kind="some"),  # type: ignore[attr-defined]
    "a filter of odd size": lambda d: d["admission"].update(cells=100),  # type: ignore[attr-defined]
    "zeros that are a number": lambda d: d["admission"].update(zeros=1),  # type: ignore[attr-defined]
    "an expiry without a reason": lambda d: d["expiry"].pop("age_steps"),  # type: ignore[attr-defined]
    "an age that is no number": lambda d: d["expiry"].update(age_steps="9"),  # type: ignore[attr-defined]
    "initial values without end": lambda d: d["initial"].update(scale=1e39),  # type: ignore[attr-defined]
    "a name that nobody knows": lambda d: d.update(more=1),
}


def layout_with(tables: list[object]) -> JobLayout:
    """The layout of a document whose tables are these."""
    document = layouts.to_document(LAYOUT) | {"tables": tables}
    return layouts.from_document(JsonNode.parse(canonical(document), "file", at=0))


@pytest.mark.parametrize("what", BROKEN)
def test_settings_that_cannot_be_are_damaged(what: str) -> None:
    found = document_of(USERS)
    BROKEN[what](found)
    with pytest.raises(CheckpointDamaged, match="file"):
        layout_with([found])


def test_a_table_that_comes_twice_is_damaged() -> None:
    found = document_of(USERS)
    for wrong in ([found, found], []):
        with pytest.raises(CheckpointDamaged, match="file"):
            layout_with(wrong)


def some_ref(name: str, nbytes: int = 9) -> FileRef:
    return FileRef(name, Written(nbytes, "ab" * 32))


@pytest.mark.parametrize(
    "tables",
    [
        (),
        (TableEntry(1, 2, 2),),
        (TableEntry(1, 2, 1), TableEntry(1, 0, 0)),
        (TableEntry(1, 2, 2, (some_ref("000000000001/rows-0001-0000-3-1-000000.safetensors"),)), TableEntry(0, 0, 0)),
        (TableEntry(1, 2, 2, (some_ref("000000000001/rows-0000-0001-3-1-000000.safetensors"),)), TableEntry(0, 0, 0)),
        (TableEntry(1, 2, 2, (some_ref("000000000009/rows-0000-0000-3-1-000000.safetensors"),)), TableEntry(0, 0, 0)),
        (
            TableEntry(1, 2, 2, 2 * (some_ref("000000000001/rows-0000-0000-3-1-000000.safetensors"),)),
            TableEntry(0, 0, 0),
        ),
        (
            TableEntry(1, 2, 2, (some_ref("000000000001/rows-0000-0000-3-1-000000.safetensors", 1 << 40),)),
            TableEntry(0, 0, 0),
        ),
    ],
)
def test_a_manifest_that_could_not_be_restored_from_is_refused(tmp_path: Path, tables: tuple[TableEntry, ...]) -> None:
    library, _ = chain(tmp_path, 1)
    manifest = library.load("job")
    first = dataclasses.replace(manifest.partitions[0], tables=tables)
    wrong = dataclasses.replace(manifest, partitions=(first, *manifest.partitions[1:]))
    with pytest.raises(InvalidRequest):
        encode(wrong)


def test_files_of_tables_come_back_from_messages(tmp_path: Path) -> None:
    store = trained()
    save(store, tmp_path, 1)
    train(store, 2, IDS[:9])
    found = entries(save(store, tmp_path, 2, base=1))
    for entry in found:
        assert entry_from_wire(entry_to_wire(entry)) == entry
        assert tables_from_wire(tables_to_wire(entry.tables)) == entry.tables


def test_messages_beyond_the_limits_are_refused() -> None:
    large = TableEntry(1, 1, 1, (some_ref("000000000001/rows-0000-0000-3-1-000000.safetensors", 1 << 30),))
    for wrong in ([TableEntry(0, 0, 0)] * (limits.TABLES_MAX + 1), [large]):
        with pytest.raises(TooLarge):
            tables_from_wire(tables_to_wire(wrong))
    outside = TableEntry(1, 1, 1, (some_ref("../rows-0000-0000-3-1-000000.safetensors"),))
    with pytest.raises(ShardyardError):
        tables_from_wire(tables_to_wire([outside]))


NAMES = ("ids", "rows", "seed")


def rows_of(store: Store, table: str) -> dict[int, bytes]:
    found = {}
    for partition in partitions(store):
        dim = partition.tables[table].settings.dim
        for number, (row, _, _) in rows(partition.tables[table]).items():
            if row is not None:
                found[number] = row[: 4 * dim]
    return found


def run(*words: object) -> str:
    result = CliRunner().invoke(checkpoint, [str(word) for word in words], standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result.output


@pytest.mark.parametrize("form", ["torch", "safetensors"])
def test_an_exported_model_has_its_tables(tmp_path: Path, form: str) -> None:
    _, store = chain(tmp_path / "all", 3)
    out = tmp_path / "model"
    said = run("export", "--url", tmp_path / "all", "--format", form, out)
    assert "1 variables and 2 tables of checkpoint 3" in said
    found = torch.load(out, weights_only=True) if form == "torch" else safetensors.torch.load_file(out)
    assert sorted(found) == [
        "users.ids",
        "users.rows",
        "users.seed",
        "w",
        "words.in.ids",
        "words.in.rows",
        "words.in.seed",
    ]
    assert int(found["users.seed"]) == USERS.seed
    for table in ("users", "words.in"):
        ids = found[f"{table}.ids"].tolist()
        assert ids == sorted(ids)
        exported = [row.numpy().tobytes() for row in found[f"{table}.rows"]]
        assert dict(zip(ids, exported, strict=True)) == rows_of(store, table)


def test_an_exported_model_is_what_a_module_takes(tmp_path: Path) -> None:
    _, store = chain(tmp_path / "all", 2)
    run("export", "--url", tmp_path / "all", tmp_path / "model.pt")
    found = torch.load(tmp_path / "model.pt", weights_only=True)
    table = sy.tables.Table(4, name="users", seed=0)
    table.load_state_dict({name: found[f"users.{name}"] for name in NAMES})
    assert len(table) == IDS.size
    mine = table.rows.look_up(IDS[:9])
    assert [row.tobytes() for row in mine] == [rows_of(store, "users")[int(number)] for number in IDS[:9]]


@pytest.mark.usefixtures("small_files")
@pytest.mark.parametrize("ending", ["parquet", "safetensors"])
def test_one_table_is_exported_as_tables_load_it(tmp_path: Path, ending: str) -> None:
    _, store = chain(tmp_path / "all", 3)
    out = tmp_path / f"users.{ending}"
    assert f"{IDS.size:,} rows of 4 values of table users of checkpoint 3" in run(
        "export", "--url", tmp_path / "all", "--table", "users", out
    )
    table = sy.tables.Table(4, name="users", seed=0)
    table.load(out)
    expected = rows_of(store, "users")
    assert [row.tobytes() for row in table.rows.look_up(IDS)] == [expected[int(number)] for number in IDS]


def test_tables_that_are_not_there_and_other_endings_are_refused(tmp_path: Path) -> None:
    chain(tmp_path / "all", 1)
    for words, message in (
        (["--table", "items", tmp_path / "x.parquet"], "has users, words.in"),
        (["--table", "users", tmp_path / "x.csv"], "ends with"),
        (["--table", "users", "--best", tmp_path / "x.parquet"], "--best"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            run("export", "--url", tmp_path / "all", *words)
    assert not list(tmp_path.glob("x.*"))


def test_list_shows_rows_and_bytes_of_tables(tmp_path: Path) -> None:
    library, _ = chain(tmp_path / "all", 2)
    (first, second) = json.loads(run("list", "--url", tmp_path / "all", "--json"))["checkpoints"]
    assert [table["name"] for table in first["tables"]] == ["users", "words.in"]
    assert first["tables"][0]["rows"] == IDS.size
    entries = [entry.tables[0] for entry in library.load("job").partitions]
    assert second["tables"][0]["bytes"] == sum(entry.nbytes for entry in entries) > first["tables"][0]["bytes"]
    assert f"users {IDS.size:,}, words.in " in run("list", "--url", tmp_path / "all")
