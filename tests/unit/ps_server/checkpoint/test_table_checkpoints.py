"""Tables of a server into a checkpoint and back: of the moment of blocks and ledger, in chains, whole or not at all."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from shardyard.checkpoints.library import CheckpointLibrary, Finding
from shardyard.checkpoints.manifest import decode, encode
from shardyard.checkpoints.rows_file import Cells, Entries
from shardyard.domain.consistency import UpdateMode
from shardyard.domain.errors import (
    CheckpointDamaged,
    CheckpointNotFound,
    NotReady,
    StorageUnavailable,
)
from shardyard.domain.tables.row_ids import partition_of
from shardyard.domain.tables.table_settings import TableSettings
from shardyard.storage.storage import Buffer, LocalStorage, Written
from shardyard_ps_server.checkpoint import table_saver
from shardyard_ps_server.checkpoint.restore import Restore
from shardyard_ps_server.checkpoint.saver import SaveRequest
from shardyard_ps_server.hosting import orders
from shardyard_ps_server.hosting.hosted_job import CreateRequest
from shardyard_ps_server.partition.checkpoint_cuts import take_cut
from shardyard_ps_server.partition.update_rules import UpdateRules
from tests.support.checkpoints import load_partition
from tests.support.table_checkpoints import (
    BUDGETS,
    DENSE,
    IDS,
    JOB,
    LAYOUT,
    NEXT,
    OWNED,
    chain,
    commit,
    contents,
    go_back,
    increments,
    new_files,
    partitions,
    restored,
    save,
    server,
    small_files,
    stores_end,
    train,
    trained,
    where_rows_lie,
)

__all__ = ["small_files", "stores_end", "where_rows_lie"]


@pytest.mark.usefixtures("small_files")
def test_restored_tables_are_as_they_were_and_go_on_with_the_same_bits(tmp_path: Path) -> None:
    store = trained()
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
    store = trained()
    then = contents(store)
    saved = save(store, tmp_path, 1)
    train(store, 2, IDS[:100])
    partitions(store)[0].tables["users"].remove(IDS[:50])
    go_back(store, tmp_path, saved)
    assert contents(store) == then
    again = save(store, tmp_path, 2, base=1)
    assert len(new_files(again, 2)) >= 4, "what was restored is not what the server last wrote"
    assert contents(restored(tmp_path, again)) == then


def test_a_partition_that_was_given_up_keeps_no_rows(tmp_path: Path) -> None:
    store = trained()
    gone = partitions(store)[1]
    rules, restore = UpdateRules(UpdateMode.ASYNC, 1), Restore(str(tmp_path), ())
    orders.create(store, CreateRequest(JOB, NEXT, LAYOUT, OWNED[:1], rules, restore))
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


@pytest.mark.usefixtures("small_files")
def test_a_checkpoint_after_another_has_only_what_changed(tmp_path: Path) -> None:
    store = trained(2)
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
    store = trained()
    save(store, tmp_path, 5)
    assert increments(save(store, tmp_path, 6, base=4)) == [0] * 4
    assert increments(save(store, tmp_path, 7)) == [0] * 4
    train(store, 2, IDS[:5])
    assert increments(save(store, tmp_path, 8, base=7)) == [1, 2, 1, 2]


def test_checkpoints_that_were_never_committed_stay_links_for_a_while(tmp_path: Path) -> None:
    store = trained()
    save(store, tmp_path, 1)
    for number in range(2, 2 + table_saver.UNCOMMITTED_MAX + 1):
        train(store, number, IDS[number : number + 1])
        found = save(store, tmp_path, number, base=1)
        assert sum(increments(found)) > 0
        assert contents(restored(tmp_path, found)) == contents(store)
    assert increments(save(store, tmp_path, number + 1, base=1)) == [0] * 4
    assert increments(save(store, tmp_path, number + 2, base=1)) == [0] * 4, "checkpoint 1 is of another chain"


def test_a_chain_ends_when_its_increments_are_half_of_its_base(tmp_path: Path) -> None:
    store = trained()
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
    store = trained(2)
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


def test_a_cut_waits_for_nobody_who_reads_a_whole_table_but_says_so(tmp_path: Path) -> None:
    store = trained()
    reader = partitions(store)[0].tables["words.in"].cuts.items()
    next(reader)
    with pytest.raises(NotReady, match="a cut of this table"):
        save(store, tmp_path, 1)
    reader.close()
    assert contents(restored(tmp_path, save(store, tmp_path, 1))) == contents(store)


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
    store = trained()
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
    store = trained()
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
    store = trained()
    found = save(store, tmp_path, 1)
    train(store, 2)
    assert save(store, tmp_path, 1) == found
    assert len(list((tmp_path / "000000000001").iterdir())) == 2 + 2 * (1 + 2)


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


@pytest.mark.usefixtures("small_files")
def test_a_server_reads_a_checkpoint_within_its_bound(tmp_path: Path) -> None:
    store = server()
    for step in (1, 2):
        train(store, step)
    again = restored(tmp_path, save(store, tmp_path, 1))
    assert contents(again) == contents(store)
    for partition in partitions(again):
        for table in partition.tables.values():
            assert (table.use().cold_rows > 0.5 * table.rows) == (BUDGETS[-1] is not None)
