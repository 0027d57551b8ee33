"""The library of checkpoints: committed whole or not at all, shared between checkpoints, pruned, exported, checked."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from shardyard.checkpoints import manifest as manifests
from shardyard.checkpoints.library import CheckpointLibrary, Variables
from shardyard.checkpoints.partition_file import BlockState, PartitionState
from shardyard.domain.errors import CheckpointDamaged, CheckpointNotFound, InvalidRequest, StorageUnavailable
from shardyard.domain.ids import Version
from shardyard.runtime import failpoints
from shardyard.storage.storage import LocalStorage
from tests.support.checkpoint_libraries import JOB, LAYOUT, folder, library, state, write_changes, write_whole
from tests.support.checkpoints import load_partition, write_state

__all__ = ["folder", "library"]


def equal(left: PartitionState, right: PartitionState) -> bool:
    same = (left.partition, left.version, left.marks, left.floor) == (
        right.partition,
        right.version,
        right.marks,
        right.floor,
    )
    return same and len(left.blocks) == len(right.blocks) and all(map(_equal_block, left.blocks, right.blocks))


def _equal_block(left: BlockState, right: BlockState) -> bool:
    return (
        (left.index, left.count, list(left.slots)) == (right.index, right.count, list(right.slots))
        and left.values.dtype == right.values.dtype
        and np.array_equal(left.values, right.values)
        and all(np.array_equal(left.slots[name], right.slots[name]) for name in left.slots)
    )


# ---- commit, load


def test_committed_checkpoint_comes_back_as_it_was(library: CheckpointLibrary) -> None:
    manifest = write_whole(library, 1, feedback=True)
    assert library.jobs() == (JOB,)
    assert library.numbers(JOB) == (1,)
    assert library.load(JOB) == library.load(JOB, 1) == manifest
    for part in LAYOUT.partitions:
        held = state(LAYOUT, part.partition, seed=1, number=10)
        assert equal(load_partition(library, manifest, part.partition), held)
    assert library.verify(JOB) == ()


def test_checkpoint_without_a_manifest_is_none(library: CheckpointLibrary) -> None:
    with pytest.raises(CheckpointNotFound, match=f"no checkpoint of job '{JOB}'"):
        library.load(JOB)
    write_state(library, JOB, 1, state(LAYOUT, 0, seed=1, number=1))
    assert library.numbers(JOB) == ()
    assert library.list_checkpoints(JOB) == ()
    with pytest.raises(CheckpointNotFound):
        library.load(JOB, 1)
    with pytest.raises(CheckpointNotFound):
        library.verify(JOB, 1)


def test_number_of_a_broken_off_checkpoint_is_not_taken_again(library: CheckpointLibrary) -> None:
    assert library.next_number(JOB) == 1
    write_state(library, JOB, 6, state(LAYOUT, 0, seed=1, number=1))
    assert library.next_number(JOB) == 7


def test_commit_is_refused_for_a_number_that_is_not_above_all(library: CheckpointLibrary) -> None:
    manifest = write_whole(library, 2)
    for number in (1, 2):
        with pytest.raises(InvalidRequest, match=f"checkpoint {number} of job '{JOB}', whose newest is 2"):
            library.commit(replace(manifest, number=number))
    assert library.load(JOB) == manifest


@pytest.mark.parametrize("change", ["missing", "shorter"])
def test_commit_is_refused_unless_every_file_is_there(change: str, folder: CheckpointLibrary, tmp_path: Path) -> None:
    first = write_whole(folder, 1)
    file = tmp_path / JOB / first.partitions[1].files[0].file.path
    file.unlink() if change == "missing" else file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointNotFound if change == "missing" else CheckpointDamaged, match=file.name):
        write_changes(folder, first, 2, {0: (0,)})
    assert folder.numbers(JOB) == (1,)


def test_manifest_is_written_last(folder: CheckpointLibrary, tmp_path: Path) -> None:
    with failpoints.armed("storage.before_rename", failpoints.action_of("error:ENOSPC"), at=4):
        with pytest.raises(StorageUnavailable, match=r"manifest\.json: No space left on device"):
            write_whole(folder, 1)
    assert folder.numbers(JOB) == ()
    assert sorted(path.name for path in (tmp_path / JOB / "000000000001").iterdir()) == [
        f"partition-000{index}-0.safetensors" for index in range(3)
    ]


def test_disk_that_is_full_leaves_the_newest_checkpoint_as_it_was(folder: CheckpointLibrary, tmp_path: Path) -> None:
    first = write_whole(folder, 1)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with failpoints.armed("storage.before_write", failpoints.action_of("error:ENOSPC"), at=3):
        with pytest.raises(StorageUnavailable, match=r"partition-0000-0\.safetensors: No space left on device"):
            write_state(folder, JOB, 2, state(LAYOUT, 0, seed=2, number=2))
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert folder.load(JOB) == first


def killed_at(passing: int, work: Callable[[], object]) -> bool:
    """Does the work in a process that dies at the place that it passes as number `passing`; whether there is one."""
    child = os.fork()
    if child == 0:
        with failpoints.armed("*", failpoints.action_of("exit"), at=passing):
            work()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, failpoints.EXIT_CODE), code
    return code != 0


def test_process_killed_anywhere_leaves_whole_checkpoints(tmp_path: Path) -> None:
    whole: list[bool] = []
    for passing in range(1, 1_000):
        folder = CheckpointLibrary(LocalStorage(tmp_path / str(passing)))
        first = write_whole(folder, 1)
        if not killed_at(passing, partial(write_changes, folder, first, 2, {0: (0,), 1: ()})):
            break
        assert folder.verify(JOB) == ()
        whole.append(folder.numbers(JOB) == (1, 2))
        assert whole[-1] or folder.load(JOB) == first
        third = write_changes(folder, folder.load(JOB), folder.next_number(JOB), {2: (0,)})
        folder.prune(JOB, 2)
        assert folder.verify(JOB) == ()
        assert folder.load(JOB) == third
        # nothing is left but what is needed
        needed = {
            file.path for listed in folder.list_checkpoints(JOB) if listed.manifest for file in listed.manifest.files()
        }
        found = {str(path.relative_to(tmp_path / str(passing) / JOB)) for path in tmp_path.glob(f"{passing}/*/*/*")}
        assert {path for path in found if not path.endswith(manifests.NAME)} == needed
    # both files and the manifest, each with some writes, a sync, a rename and the sync of its folder
    assert len(whole) > 30
    assert whole == sorted(whole)
    assert whole[-1]


def test_manifest_of_another_place_is_not_believed(folder: CheckpointLibrary, tmp_path: Path) -> None:
    write_whole(folder, 1)
    (tmp_path / JOB / "000000000001").rename(tmp_path / JOB / "000000000002")
    with pytest.raises(CheckpointDamaged, match="is that of checkpoint 1"):
        folder.load(JOB)
    (tmp_path / JOB).rename(tmp_path / "other")
    with pytest.raises(CheckpointDamaged, match=f"job '{JOB}'"):
        folder.load("other")


@pytest.mark.parametrize("job", ["", "..", "a/b", "-x", "x" * 129])
def test_name_that_no_job_can_have_is_refused(job: str, library: CheckpointLibrary) -> None:
    with pytest.raises(InvalidRequest, match="no job's name"):
        library.load(job)


# ---- incremental


def test_unchanged_blocks_come_from_earlier_checkpoints(library: CheckpointLibrary) -> None:
    first = write_whole(library, 1)
    second = write_changes(library, first, 2, {0: (1,), 1: ()})
    third = write_changes(library, second, 3, {0: (0,)})
    assert [file.file.number for file in third.partitions[0].files] == [3, 2, 1]
    assert [file.file.number for file in third.partitions[1].files] == [2, 1]
    assert third.partitions[2] == first.partitions[2]
    found = load_partition(library, third, third.partitions[0].partition)
    assert found.version == Version(1, 30)
    for block in found.blocks:
        number = {0: 3, 1: 2}.get(block.index, 1)
        wanted = state(LAYOUT, 0, seed=number, number=10 * number, blocks=(block.index,)).blocks[0]
        assert _equal_block(block, wanted)
    assert load_partition(library, third, third.partitions[1].partition).version == Version(1, 20)
    assert library.verify(JOB) == ()


def test_file_of_which_nothing_is_taken_any_more_is_left_out(library: CheckpointLibrary) -> None:
    first = write_whole(library, 1)
    blocks = tuple(range(len(LAYOUT.partitions[0].blocks)))
    second = write_changes(library, first, 2, {0: blocks})
    assert [file.file.number for file in second.partitions[0].files] == [2]


def test_partition_of_another_version_than_the_manifest_says_is_found(library: CheckpointLibrary) -> None:
    first = write_whole(library, 1)
    entry = first.partitions[1]
    library.commit(
        replace(
            first,
            number=2,
            partitions=(first.partitions[0], replace(entry, version=Version(1, 11)), first.partitions[2]),
        )
    )
    with pytest.raises(CheckpointDamaged, match=r"partition-0001.* version 10 of partition 1, .*; expected version 11"):
        load_partition(library, library.load(JOB), entry.partition)
    (finding,) = library.verify(JOB)
    assert (finding.number, finding.path) == (2, entry.files[0].file.path)


# ---- prune


def test_prune_keeps_the_newest_and_what_they_need(folder: CheckpointLibrary, tmp_path: Path) -> None:
    first = write_whole(folder, 1)
    second = write_changes(folder, first, 2, {0: (0,)})
    third = write_changes(folder, second, 3, {0: (0,), 1: (0,)})
    write_changes(folder, third, 4, {2: tuple(range(len(LAYOUT.partitions[2].blocks)))})
    write_state(folder, JOB, 5, state(LAYOUT, 0, seed=5, number=5))  # one that is being written
    pruned = folder.prune(JOB, 2)
    assert pruned.checkpoints == (1, 2)
    assert folder.numbers(JOB) == (3, 4)
    assert folder.verify(JOB) == ()
    # 3 and 4 take partitions of 1, but nothing of 2
    assert folder.storage.list_folders(JOB) == tuple(manifests.folder_name(number) for number in (1, 3, 4, 5))
    assert list(folder.storage.list_files(f"{JOB}/{manifests.folder_name(1)}")) == [
        f"partition-000{index}-0.safetensors" for index in range(3)
    ]
    assert list(folder.storage.list_files(f"{JOB}/{manifests.folder_name(5)}")) == ["partition-0000-0.safetensors"]
    assert folder.prune(JOB, 2).files == 0


def test_prune_deletes_what_was_begun_and_never_finished(library: CheckpointLibrary) -> None:
    write_whole(library, 1)
    write_state(library, JOB, 2, state(LAYOUT, 0, seed=2, number=2))
    write_whole(library, 3)
    pruned = library.prune(JOB, 2)
    assert (pruned.checkpoints, pruned.files) == ((), 1)
    assert pruned.nbytes > 0
    assert library.storage.list_folders(JOB) == (manifests.folder_name(1), manifests.folder_name(3))
    assert library.verify(JOB) == ()


def test_prune_deletes_temporary_files_and_leaves_what_is_not_ours(folder: CheckpointLibrary, tmp_path: Path) -> None:
    write_whole(folder, 1)
    place = tmp_path / JOB / manifests.folder_name(1)
    (place / ".manifest.json.77.abc.tmp").write_bytes(b"half")
    (place / "notes.txt").write_bytes(b"mine")
    (tmp_path / JOB / manifests.folder_name(2) / "mine").mkdir(parents=True)
    (tmp_path / JOB / manifests.folder_name(2) / "mine" / "notes.txt").write_bytes(b"mine")
    for number in (2, 3, 4):
        write_whole(folder, number)
    folder.prune(JOB, 2)
    assert [path.name for path in place.iterdir()] == ["notes.txt"]
    assert [path.name for path in tmp_path.glob(f"{JOB}/{manifests.folder_name(2)}/*/*")] == ["notes.txt"]


def test_prune_keeps_those_that_are_named_beside_the_newest(library: CheckpointLibrary) -> None:
    for number in (1, 2, 3, 4, 5):
        write_whole(library, number)
    assert library.prune(JOB, 2, also=[2, 77]).checkpoints == (1, 3)
    assert library.numbers(JOB) == (2, 4, 5)
    assert library.verify(JOB) == ()


def test_prune_keeps_what_the_run_before_has_learned(library: CheckpointLibrary) -> None:
    """Runs that end at their first values, or go on, do not delete it."""
    for number, step in ((1, 7), (2, 9)):
        write_whole(library, number, run=1, step=step)
    for number, run in ((3, 2), (4, 3), (5, 4), (6, 4)):
        write_whole(library, number, run=run, step=0)
    assert library.prune(JOB, 2).checkpoints == (1, 3, 4)
    assert library.numbers(JOB) == (2, 5, 6)
    write_whole(library, 7, run=4, step=8)
    write_whole(library, 8, run=5, step=0)
    write_whole(library, 9, run=5, step=0)
    assert library.prune(JOB, 2).checkpoints == (2, 5, 6)
    assert library.numbers(JOB) == (7, 8, 9)
    assert library.verify(JOB) == ()


def test_prune_to_fewer_than_two_is_refused(library: CheckpointLibrary) -> None:
    with pytest.raises(InvalidRequest, match="cannot prune to 1 checkpoints"):
        library.prune(JOB, 1)


def test_prune_deletes_nothing_where_nobody_knows_what_is_needed(folder: CheckpointLibrary, tmp_path: Path) -> None:
    for number in (1, 2, 3, 4):
        write_whole(folder, number)
    manifest = tmp_path / JOB / manifests.folder_name(3) / manifests.NAME
    manifest.write_bytes(manifest.read_bytes()[:-9])
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointDamaged, match=manifests.folder_name(3)):
        folder.prune(JOB, 2)
    assert sorted(tmp_path.rglob("*")) == before


def test_prune_that_is_killed_in_between_goes_on_next_time(folder: CheckpointLibrary) -> None:
    for number in (1, 2, 3, 4):
        write_whole(folder, number)
    failures = 0
    for at in range(1, 20):
        try:
            with failpoints.armed("storage.before_delete", failpoints.action_of("error"), at=2):
                folder.prune(JOB, 2)
            break
        except StorageUnavailable:
            failures += 1
            assert folder.numbers(JOB)[-2:] == (3, 4), at
            assert all(finding.number < 3 for finding in folder.verify(JOB))
    assert failures >= 3
    folder.prune(JOB, 2)
    assert folder.storage.list_folders(JOB) == (manifests.folder_name(3), manifests.folder_name(4))


# ---- export


def test_variables_are_put_together_from_their_blocks(library: CheckpointLibrary) -> None:
    first = write_whole(library, 1)
    manifest = write_changes(library, first, 2, {0: (0,), 2: (0,)})
    exported = dict(library.export_state(manifest))
    assert list(exported) == [spec.name for spec in LAYOUT.variables]
    for spec in LAYOUT.variables:
        assert exported[spec.name].shape == spec.shape
        assert exported[spec.name].dtype.name == spec.dtype.value
    for part in LAYOUT.partitions:
        for held in load_partition(library, manifest, part.partition).blocks:
            block = part.blocks[held.index]
            flat = exported[LAYOUT.variables[block.variable].name].reshape(-1)
            assert np.array_equal(flat[block.offset : block.offset + block.length], held.values)


def test_damaged_file_is_not_exported(folder: CheckpointLibrary, tmp_path: Path) -> None:
    manifest = write_whole(folder, 1)
    file = tmp_path / JOB / manifest.partitions[0].files[0].file.path
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    index = LAYOUT.partitions[0].blocks[0].variable
    with pytest.raises(CheckpointDamaged, match=file.name):
        Variables(folder.storage, manifest).read(index)
