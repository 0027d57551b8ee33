"""Tables of a server into a checkpoint and back: of the moment of blocks and ledger, in chains, whole or not at all."""

from __future__ import annotations

import dataclasses
import json
import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from shardyard.checkpoints.library import CheckpointLibrary, Finding
from shardyard.checkpoints.manifest import FileRef, Manifest, PartitionEntry, TableEntry, decode, encode
from shardyard.checkpoints.rows_file import Cells, Entries, Removed, RowsFileKey
from shardyard.domain import limits
from shardyard.domain.consistency import UpdateMode
from shardyard.domain.errors import (
    CheckpointDamaged,
    CheckpointNotFound,
    InvalidRequest,
    NotReady,
    ShardyardError,
    StorageUnavailable,
    TooLarge,
)
from shardyard.domain.ids import Caller, Generation, Incarnation, JobId, PartitionId, Term
from shardyard.domain.layout.layouts import JobLayout
from shardyard.domain.optimizers import OptimizerSpec, make_group
from shardyard.domain.tables.row_ids import partition_of
from shardyard.domain.tables.table_settings import Admission, AdmissionSettings, ExpirySettings, TableSettings
from shardyard.domain.variables import DType, VariableSpec
from shardyard.storage.json_reader import JsonNode, canonical, document_of
from shardyard.storage.storage import Buffer, LocalStorage, Written
from shardyard_coordinator.placement.placement import plan
from shardyard_launcher.commands.checkpoint import checkpoint
from shardyard_ps_server.checkpoint import table_saver
from shardyard_ps_server.checkpoint.restore import Restore
from shardyard_ps_server.checkpoint.saver import Saved, SaveRequest
from shardyard_ps_server.hosting import orders
from shardyard_ps_server.hosting.hosted_job import CreateRequest
from shardyard_ps_server.hosting.store import Store
from shardyard_ps_server.partition.checkpoint_cuts import take_cut
from shardyard_ps_server.partition.partition import Partition
from shardyard_ps_server.partition.update_rules import UpdateRules
from shardyard_ps_server.tables import cuts, disk_tier
from shardyard_ps_server.tables.memory.budget import Budget
from shardyard_ps_server.tables.table import Table
from tests.support.checkpoints import load_partition

JOB, HERE, GENERATION, NEXT = JobId(1), Incarnation(3), Generation(4), Generation(5)
COORDINATOR = Caller(JOB, term=Term(2))
USERS = TableSettings("users", 4, "adam", seed=3, rows_max=1 << 16, expiry=ExpirySettings(age_steps=40_000))
WORDS = TableSettings(
    "words.in", 3, "rowwise_adagrad", rows_max=1 << 16,
    admission=AdmissionSettings(Admission.ESTIMATE, threshold=2, cells=1 << 12), expiry=ExpirySettings(age_ms=10**9),
)  # fmt: skip
DENSE = plan(
    [VariableSpec("w", DType.FLOAT32, (32,))],
    OptimizerSpec("sgd", (make_group("sgd", {"lr": 1.0}),)),
    partitions=2,
    block_bytes=64,
)
LAYOUT = dataclasses.replace(DENSE, tables=(USERS, WORDS))
OWNED = [part.partition for part in LAYOUT.partitions]
IDS = np.unique(np.random.default_rng(5).integers(-(2**63), 2**63 - 1, 3_000))
MADE: list[Store] = []
BUDGETS: list[Budget | None] = []


@pytest.fixture(autouse=True, params=[False, True], ids=["in memory", "on disk"])
def _where_rows_lie(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(disk_tier, "ROWS_LEAST", 50)
    BUDGETS.append(Budget(1, lambda: os.memfd_create("rows")) if request.param else None)
    yield
    BUDGETS.pop()


@pytest.fixture(autouse=True)
def _stores_end() -> Iterator[None]:
    yield
    while MADE:
        MADE.pop().close()


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_saver, "FILE_BYTES", 20_000)
    monkeypatch.setattr(cuts, "CHUNK_ENTRIES", 100)


def server(restore: Restore | None = None, layout: JobLayout = LAYOUT) -> Store:
    store = Store(budget=BUDGETS[-1])
    MADE.append(store)
    store.become(HERE, Term(2))
    if restore is None:
        orders.create(store, CreateRequest(JOB, GENERATION, layout, OWNED, UpdateRules(UpdateMode.ASYNC, 1)))
        orders.open_partitions(store, JOB, GENERATION)
    else:
        orders.create(store, CreateRequest(JOB, GENERATION, layout, OWNED, UpdateRules(UpdateMode.ASYNC, 1), restore))
    return store


def partitions(store: Store) -> list[Partition]:
    hosted = store.hosted()[0]
    return [hosted.partitions[number] for number in OWNED]


def train(store: Store, step: int, ids: np.ndarray = IDS) -> None:
    """An update of all tables, the same wherever it comes after the same ones."""
    where = partition_of(ids, len(OWNED))
    for partition in partitions(store):
        own = ids[where == partition.id]
        for name, table in partition.tables.items():
            gradients = np.random.default_rng((step, partition.id, len(name))).standard_normal(
                (own.size, table.settings.dim)
            )
            table.push(own, gradients.astype(np.float32), step, now_ms=max(table.state.now_ms, 70_000 * step))


def rows(table: Table) -> dict[int, tuple[bytes | None, int, int]]:
    found = {}
    for chunk in table.cuts.items():
        for i, number in enumerate(chunk.ids.tolist()):
            row = chunk.records[i].tobytes() if i < len(chunk.records) else None
            found[number] = row, int(chunk.frequencies[i]), int(chunk.steps[i])
    return found


def contents(store: Store) -> list[object]:
    """All that tables are, as values that can be compared bit by bit."""
    return [
        (
            partition.id,
            name,
            table.state.updates,
            table.state.now_ms,
            table.rows,
            table.state.entries,
            rows(table),
            cells(table),
        )
        for partition in partitions(store)
        for name, table in partition.tables.items()
        for state in (table.state,)
    ]


def cells(table: Table) -> bytes | None:
    return None if table.state.filter is None else table.state.filter._cells.tobytes()


Entered = list[PartitionEntry]


def save(store: Store, folder: Path, number: int, base: int = 0, step: int | None = None) -> Entered:
    """What the manifest would say."""
    order = SaveRequest(number, step, base, 0)
    saved = orders.save(store, COORDINATOR, HERE, store.hosted()[0].generation, order, str(folder))
    return [entry_of(folder, each) for each in saved]


FORMER: dict[tuple[Path, PartitionId], PartitionEntry] = {}


def entry_of(folder: Path, saved: Saved) -> PartitionEntry:
    """The blocks that it lacks are in the one before."""
    if saved.file.blocks:
        found = PartitionEntry(saved.partition, saved.version, (saved.file,), saved.tables)
    else:
        former = FORMER[folder, saved.partition]
        found = former.incremental(saved.version, saved.file.file, (), saved.tables)
    FORMER[folder, saved.partition] = found
    return found


def entries(saved: Sequence[PartitionEntry], life: int = 2) -> tuple[PartitionEntry, ...]:
    return tuple(dataclasses.replace(each, version=dataclasses.replace(each.version, life=life)) for each in saved)


def restored(folder: Path, saved: Sequence[PartitionEntry], layout: JobLayout = LAYOUT) -> Store:
    return server(restore=Restore(str(folder), entries(saved)), layout=layout)


def new_files(saved: Sequence[PartitionEntry], number: int) -> list[FileRef]:
    return [file for each in saved for table in each.tables for file in table.files if file.number == number]


def increments(saved: Sequence[PartitionEntry]) -> list[int]:
    return [len(table.increments) for each in saved for table in each.tables]


# ---- there and back


@pytest.mark.usefixtures("small_files")
def test_restored_tables_are_as_they_were_and_go_on_with_the_same_bits(tmp_path: Path) -> None:
    store = server()
    train(store, 1)
    train(store, 50_000, IDS[::2])
    then = contents(store)
    saved = save(store, tmp_path, 1)
    assert all(len(table.base) > 1 for each in saved for table in each.tables)
    train(store, 50_001, IDS[::3])
    after = contents(store)
    other = restored(tmp_path, saved)
    assert contents(other) == then
    train(other, 50_001, IDS[::3])
    assert contents(other) == after


def test_a_job_that_goes_back_in_place_has_its_tables_of_then(tmp_path: Path) -> None:
    store = server()
    train(store, 1)
    then = contents(store)
    saved = save(store, tmp_path, 1)
    train(store, 2, IDS[:100])
    partitions(store)[0].tables["users"].remove(IDS[:50])
    orders.create(
        store,
        CreateRequest(
            JOB, NEXT, LAYOUT, OWNED, UpdateRules(UpdateMode.ASYNC, 1), Restore(str(tmp_path), entries(saved))
        ),
    )
    assert contents(store) == then
    again = save(store, tmp_path, 2, base=1)
    assert len(new_files(again, 2)) >= 4, "what was restored is not what the server last wrote"
    assert contents(restored(tmp_path, again)) == then


def test_a_partition_that_was_given_up_keeps_no_rows(tmp_path: Path) -> None:
    store = server()
    train(store, 1)
    gone = partitions(store)[1]
    orders.create(store, CreateRequest(JOB, NEXT, LAYOUT, OWNED[:1], UpdateRules(UpdateMode.ASYNC, 1)))
    assert gone.tables == {}
    assert [each.partition for each in save(store, tmp_path, 1)] == [0]


def test_a_partition_takes_no_other_tables_than_its_own(tmp_path: Path) -> None:
    store = server()
    partition = partitions(store)[0]
    library = CheckpointLibrary(LocalStorage(tmp_path))
    manifest = commit(library, store, 1)
    state = load_partition(library, manifest, OWNED[0])
    before = partition.tables
    with pytest.raises(CheckpointDamaged, match=r"expected \['users', 'words.in'\]"):
        partition.restore(state, {})
    assert partition.tables is before


# ---- chains


@pytest.mark.usefixtures("small_files")
def test_a_checkpoint_after_another_has_only_what_changed(tmp_path: Path) -> None:
    store = server()
    train(store, 1)
    train(store, 2)
    first = save(store, tmp_path, 1)
    train(store, 3, IDS[:40])
    for partition in partitions(store):
        partition.tables["users"].remove(IDS[20:60])
    then = contents(store)
    second = save(store, tmp_path, 2, base=1)
    train(store, 4, IDS[20:30])
    assert 0 < sum(file.written.nbytes for file in new_files(second, 2)) < 25_000
    assert second[0].tables[0].base == first[0].tables[0].base
    assert contents(restored(tmp_path, second)) == then
    third = save(store, tmp_path, 3, base=2)
    assert contents(restored(tmp_path, third)) == contents(store)


def test_a_checkpoint_that_follows_no_known_one_is_whole(tmp_path: Path) -> None:
    store = server()
    train(store, 1)
    save(store, tmp_path, 5)
    assert increments(save(store, tmp_path, 6, base=4)) == [0] * 4
    assert increments(save(store, tmp_path, 7)) == [0] * 4
    train(store, 2, IDS[:5])
    assert increments(save(store, tmp_path, 8, base=7)) == [1, 2, 1, 2]


def test_checkpoints_that_were_never_committed_stay_links_for_a_while(tmp_path: Path) -> None:
    store = server()
    train(store, 1)
    save(store, tmp_path, 1)
    for number in range(2, 2 + table_saver.UNCOMMITTED_MAX + 1):
        train(store, number, IDS[number : number + 1])
        found = save(store, tmp_path, number, base=1)
        assert sum(increments(found)) > 0
        assert contents(restored(tmp_path, found)) == contents(store)
    assert increments(save(store, tmp_path, number + 1, base=1)) == [0] * 4
    assert increments(save(store, tmp_path, number + 2, base=1)) == [0] * 4, "checkpoint 1 is of another chain"


def test_a_chain_ends_when_its_increments_are_half_of_its_base(tmp_path: Path) -> None:
    store = server()
    train(store, 1)
    found, sizes = save(store, tmp_path, 1), []
    for number in range(2, 9):
        train(store, number, IDS[: IDS.size // 5])
        found = save(store, tmp_path, number, base=number - 1)
        users = found[0].tables[0]
        sizes.append((len(users.base), len(users.increments)))
        assert sum(f.written.nbytes for f in users.increments) < 0.75 * sum(f.written.nbytes for f in users.base)
    assert sizes[:4] == [(1, 1), (1, 2), (1, 3), (1, 0)]


def test_a_chain_has_so_many_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_saver, "CHAIN_CUTS_MAX", 3)
    store = server()
    train(store, 1)
    train(store, 2)
    found = [increments(save(store, tmp_path, number, base=number - 1)) for number in range(1, 6)]
    # the filter is written anew each time; nothing else has changed
    assert found == [[0] * 4, [0, 1, 0, 1], [0, 1, 0, 1], [0] * 4, [0, 1, 0, 1]]


def test_increments_of_a_zipf_load_are_a_tenth_of_the_table_at_most(tmp_path: Path) -> None:
    layout = dataclasses.replace(DENSE, tables=(TableSettings("clicks", 16, "adagrad", rows_max=1 << 18),))
    store = server(layout=layout)
    rng = np.random.default_rng(0)
    train(store, 1, np.arange(120_000))
    whole = sum(file.written.nbytes for file in new_files(save(store, tmp_path, 1), 1))
    for number in range(2, 5):
        for _ in range(5):
            train(store, number, np.unique(rng.zipf(1.1, 4_096).clip(max=119_999)))
        found = save(store, tmp_path, number, base=number - 1)
        assert 0 < 10 * sum(file.written.nbytes for file in new_files(found, number)) <= whole


# ---- one moment


def test_a_cut_waits_for_nobody_who_reads_a_whole_table_but_says_so(tmp_path: Path) -> None:
    store = server()
    train(store, 1)
    reader = partitions(store)[0].tables["words.in"].cuts.items()
    next(reader)
    with pytest.raises(NotReady, match="a cut of this table"):
        save(store, tmp_path, 1)
    reader.close()
    assert contents(restored(tmp_path, save(store, tmp_path, 1))) == contents(store)


# ---- cuts that are given up


class Refusing(LocalStorage):
    def __init__(self, root: Path, after: int) -> None:
        super().__init__(root)
        self.left = after

    def write(self, path: str, pieces: Iterable[Buffer]) -> Written:
        self.left -= 1
        if self.left < 0:
            raise StorageUnavailable("no room")
        return super().write(path, pieces)


@pytest.mark.usefixtures("small_files")
@pytest.mark.parametrize("after", [0, 2, 5])
def test_what_was_given_up_is_let_go_and_breaks_the_chain_where_it_was_read(tmp_path: Path, after: int) -> None:
    store = server()
    train(store, 1)
    save(store, tmp_path, 1)
    train(store, 2)
    saver = store.hosted()[0].saver
    with pytest.raises(StorageUnavailable):
        saver.save(partitions(store), SaveRequest(2, None, 1, 0), Refusing(tmp_path, after))
    for partition in partitions(store):
        for table in partition.tables.values():
            assert table.state.memory.log_rows.nbytes < 1_000
            assert table.state.filter is None or table.state.filter._cut is None
    train(store, 3, IDS[:9])
    third = save(store, tmp_path, 3, base=1)
    assert contents(restored(tmp_path, third)) == contents(store)
    assert increments(third)[0] == 0, "of the first table something had been read"


def test_a_cut_of_which_nothing_was_read_leaves_the_chain_as_it_was(tmp_path: Path) -> None:
    """A synchronous job names steps for a checkpoint that one of its partitions may have passed."""
    store = server()
    train(store, 1)
    save(store, tmp_path, 1)
    for partition in partitions(store):
        partition.tables["users"].remove(IDS[:10])
        cut = take_cut(partition, {name: table.cuts.generation for name, table in partition.tables.items()})
        partition.tables["users"].remove(IDS[10:20])
        train(store, 2, IDS[100:110])
        cut.release()
    second = save(store, tmp_path, 2, base=1)
    assert [n > 0 for n in increments(second)] == [True] * 4
    assert sum(file.written.nbytes for file in new_files(second, 2)) < 30_000
    assert contents(restored(tmp_path, second)) == contents(store)


def test_an_order_that_comes_again_writes_nothing(tmp_path: Path) -> None:
    store = server()
    train(store, 1)
    found = save(store, tmp_path, 1)
    train(store, 2)
    assert save(store, tmp_path, 1) == found
    assert len(list((tmp_path / "000000000001").iterdir())) == 2 + 2 * (1 + 2)


# ---- the library


def commit(library: CheckpointLibrary, store: Store, number: int, base: int = 0) -> Manifest:
    folder = Path(library.storage.url) / "job"
    found = save(store, folder, number, base=base)
    manifest = Manifest(
        number, "job", JOB, 3, {}, UpdateMode.ASYNC, 9, "2026-11-21T06:00:00+00:00", LAYOUT, tuple(found), {}
    )
    library.commit(manifest)
    return manifest


def chain(tmp_path: Path, links: int) -> tuple[CheckpointLibrary, Store]:
    library, store = CheckpointLibrary(LocalStorage(tmp_path)), server()
    for number in range(1, links + 1):
        train(store, number, IDS if number == 1 else IDS[number * 10 :][:10])
        commit(library, store, number, base=number - 1)
    return library, store


def test_prune_keeps_what_a_chain_needs(tmp_path: Path) -> None:
    library, store = chain(tmp_path, 5)
    pruned = library.prune("job", 2)
    assert pruned.checkpoints == (1, 2, 3)
    assert library.verify("job") == ()
    assert list((tmp_path / "job" / "000000000001").glob("rows-*"))
    manifest = library.load("job")
    states = [load_partition(library, manifest, number) for number in OWNED]
    fresh = server()
    for partition, state in zip(partitions(fresh), states, strict=True):
        partition.restore(state)
    assert contents(fresh) == contents(store)


def test_a_manifest_comes_back_with_its_tables(tmp_path: Path) -> None:
    library, _ = chain(tmp_path, 2)
    manifest = library.load("job")
    assert manifest.layout == LAYOUT
    assert decode(encode(manifest), "it") == manifest
    assert sum(entry.tables[0].rows for entry in manifest.partitions) == IDS.size


def test_a_table_that_was_committed_is_read_newest_first(tmp_path: Path) -> None:
    library, store = chain(tmp_path, 3)
    for partition in partitions(store):
        partition.tables["users"].remove(IDS[:30])
    commit(library, store, 4, base=3)
    found: dict[int, bytes] = {}
    for state in library.tables(library.load("job"), 0):
        for ids, values in state.rows():
            assert not found.keys() & set(ids.tolist())
            found.update(zip(ids.tolist(), [row.tobytes() for row in values], strict=True))
    out = np.empty((IDS.size, 4), np.float32)
    for partition in partitions(store):
        own = partition_of(IDS, 2) == partition.id
        block = np.empty((int(own.sum()), 4), np.float32)
        partition.tables["users"].look_up(IDS[own], block)
        out[own] = block
    assert found == {int(number): out[i].tobytes() for i, number in enumerate(IDS) if i >= 30}


@pytest.mark.usefixtures("small_files")
def test_each_flipped_bit_and_each_truncation_is_found_and_named(tmp_path: Path) -> None:
    library, _ = chain(tmp_path, 2)
    manifest, chance = library.load("job"), random.Random(7)
    states = [state for table in range(2) for state in library.tables(manifest, table)]
    files = [(state, file) for state in states for file in state.entry.files]
    assert {type(state.read(file)) for state, file in files} >= {Entries, Cells}
    for number in range(400):
        state, file = chance.choice(files)
        path = tmp_path / "job" / file.path
        whole = path.read_bytes()
        at = chance.randrange(len(whole))
        spoilt = bytearray(whole[:at] if number % 4 == 3 else whole)
        if number % 4 != 3:
            spoilt[at] ^= 1 << chance.randrange(8)
        path.write_bytes(spoilt)
        with pytest.raises(CheckpointDamaged, match=file.path):
            list(state.parts())
        if number % 40 == 0:
            findings = library.verify("job", 2)
            assert [finding.path for finding in findings] == [file.path]
            assert all(isinstance(finding, Finding) and file.path in finding.what for finding in findings)
        path.write_bytes(whole)
    assert library.verify("job") == ()


def test_a_file_that_is_gone_is_found_and_named(tmp_path: Path) -> None:
    library, _ = chain(tmp_path, 2)
    manifest = library.load("job")
    gone = manifest.partitions[1].tables[0].increments[0]
    (tmp_path / "job" / gone.path).unlink()
    assert [finding.path for finding in library.verify("job", 2)] == [gone.path]
    with pytest.raises(CheckpointNotFound, match=gone.path):
        list(library.tables(manifest, 0)[1].parts())
    with pytest.raises(CheckpointNotFound, match=gone.path):
        library.commit(dataclasses.replace(manifest, number=3))


# ---- files that are whole, and wrong


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
    store = server()
    train(store, 1)
    save(store, tmp_path, 1)
    train(store, 9, np.concatenate([IDS[:3], np.arange(50)]))
    good = save(store, tmp_path, 2, base=1)
    wrong = [
        dataclasses.replace(each, tables=(LIES[lie](each.tables[0]), *each.tables[1:])) if each.partition else each
        for each in good
    ]
    before = contents(store)
    with pytest.raises(CheckpointDamaged):
        orders.create(
            store,
            CreateRequest(
                JOB, NEXT, LAYOUT, OWNED, UpdateRules(UpdateMode.ASYNC, 1), Restore(str(tmp_path), entries(wrong))
            ),
        )
    assert contents(store) == before
    assert contents(restored(tmp_path, good)) == before


def test_a_filter_that_is_not_whole_is_damaged(tmp_path: Path) -> None:
    library, _ = chain(tmp_path, 1)
    state = library.tables(library.load("job"), 1)[0]
    files = [file for file in state.entry.base if not isinstance(state.read(file), Cells)]
    for entry in (dataclasses.replace(state.entry, base=tuple(files)), TableEntry(0, 0, 0)):
        with pytest.raises(CheckpointDamaged, match="a filter of 0 cells"):
            list(dataclasses.replace(state, entry=entry).parts())


# ---- the manifest, and messages

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
    store = server()
    train(store, 1)
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


# ---- commands


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


def test_a_server_reads_a_checkpoint_within_its_bound(small_files: None, tmp_path: Path) -> None:
    store = server()
    for step in (1, 2):
        train(store, step)
    again = restored(tmp_path, save(store, tmp_path, 1))
    assert contents(again) == contents(store)
    for partition in partitions(again):
        for table in partition.tables.values():
            assert (table.use().cold_rows > 0.5 * table.rows) == (BUDGETS[-1] is not None)
