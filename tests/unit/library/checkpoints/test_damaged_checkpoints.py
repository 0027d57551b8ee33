"""Checkpoints that are damaged, and what checkpoints keep of workers' error feedback."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from shardyard.checkpoints import manifest as manifests
from shardyard.checkpoints.library import CheckpointLibrary, Finding
from shardyard.checkpoints.manifest import FileRef, PartitionEntry, PartitionFile, ResidualFile
from shardyard.domain.errors import CheckpointDamaged, CheckpointNotFound
from shardyard.storage import tensors
from shardyard.storage.storage import LocalStorage, Storage
from tests.support.checkpoint_libraries import (
    JOB,
    LAYOUT,
    REMEMBERED,
    folder,
    library,
    manifest_of,
    state,
    write_changes,
    write_whole,
)
from tests.support.checkpoints import state_pieces, write_state

__all__ = ["folder", "library"]

TIMES = (300, 1_000)
SEED = 20_260

# ---- damage


def damaged_copy(folder: CheckpointLibrary, tmp_path: Path) -> list[Path]:
    """All files of a library with an incremental checkpoint."""
    write_changes(folder, write_whole(folder, 1, feedback=True), 2, {0: (0,), 1: ()})
    assert folder.verify(JOB) == ()
    return sorted(path for path in tmp_path.rglob("*") if path.is_file())


def is_named(folder: CheckpointLibrary, file: Path, tmp_path: Path) -> bool:
    """Whether `verify` says that this file is damaged, and no other."""
    findings = folder.verify(JOB)
    path = str(file.relative_to(tmp_path / JOB))
    return {finding.path for finding in findings} == {path} and all(file.name in f.what for f in findings)


def flip_a_bit(rng: random.Random, whole: bytes) -> bytes:
    bit = rng.randrange(8 * len(whole))
    flipped = bytearray(whole)
    flipped[bit // 8] ^= 1 << bit % 8
    return bytes(flipped)


def truncate(rng: random.Random, whole: bytes) -> bytes:
    return whole[: rng.randrange(len(whole))]


@pytest.mark.long("flip_a_bit-300", "truncate-300")
@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("damage", [flip_a_bit, truncate])
def test_every_damage_is_found_and_named(
    times: int, damage: Callable[[random.Random, bytes], bytes], folder: CheckpointLibrary, tmp_path: Path
) -> None:
    files = damaged_copy(folder, tmp_path)
    rng = random.Random(SEED)
    for number in range(times):
        file = rng.choice(files)
        whole = file.read_bytes()
        file.write_bytes(damage(rng, whole))
        assert is_named(folder, file, tmp_path), (file, number)
        file.write_bytes(whole)
    assert folder.verify(JOB) == ()


def test_missing_file_is_found_and_named(folder: CheckpointLibrary, tmp_path: Path) -> None:
    for file in damaged_copy(folder, tmp_path):
        whole = file.read_bytes()
        file.unlink()
        if file.name == manifests.NAME:  # then there is no such checkpoint
            assert len(folder.numbers(JOB)) == 1
        else:
            assert is_named(folder, file, tmp_path), file
        file.write_bytes(whole)


def test_damage_of_a_shared_file_is_told_for_each_checkpoint(folder: CheckpointLibrary, tmp_path: Path) -> None:
    second = write_changes(folder, write_whole(folder, 1), 2, {0: (0,)})
    path = second.partitions[2].files[0].file.path
    (tmp_path / JOB / path).write_bytes(b"")
    what = f"{tmp_path}/{JOB}/{path} has 0 bytes; expected {second.partitions[2].files[0].file.written.nbytes}"
    assert folder.verify(JOB) == (Finding(1, path, what), Finding(2, path, what))
    assert folder.verify(JOB, 2) == (Finding(2, path, what),)


def test_verify_reads_every_byte_and_holds_no_block(folder: CheckpointLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = write_whole(folder, 1)
    read: dict[str, int] = {}
    real = LocalStorage.read

    def counting(self: Storage, path: str, begin: int, nbytes: int) -> bytes:
        read[path] = read.get(path, 0) + nbytes
        return real(self, path, begin, nbytes)  # type: ignore[arg-type]

    monkeypatch.setattr(LocalStorage, "read", counting)
    assert folder.verify(JOB) == ()
    for file in manifest.files():
        assert read[f"{JOB}/{file.path}"] == file.written.nbytes


def test_partition_file_that_is_not_of_its_partition_is_found(library: CheckpointLibrary) -> None:
    first = write_whole(library, 1)
    held = state(LAYOUT, 1, seed=2, number=20)
    written = library.storage.write(
        f"{JOB}/{manifests.partition_path(2, LAYOUT.partitions[0].partition)}", state_pieces(held)
    )
    file = FileRef(manifests.partition_path(2, LAYOUT.partitions[0].partition), written)
    blocks = tuple(range(len(LAYOUT.partitions[0].blocks)))
    entry = PartitionEntry(LAYOUT.partitions[0].partition, held.version, (PartitionFile(file, blocks),))
    library.commit(manifest_of(2, (entry, *first.partitions[1:])))
    (finding,) = library.verify(JOB)
    assert (finding.number, finding.path) == (2, file.path)
    assert "is of partition 1; expected partition 0" in finding.what


# ---- what workers' error feedback remembers


def saved(library: CheckpointLibrary, number: int = 1, **changes: np.ndarray) -> ResidualFile:
    return library.write_feedback(JOB, number, "w-1", REMEMBERED | changes)


def test_what_a_worker_remembers_comes_back_as_it_was(library: CheckpointLibrary) -> None:
    manifest = write_whole(library, 1, feedback=True)
    found = library.load_feedback(JOB, manifest.feedback[0], LAYOUT)
    assert found.keys() == REMEMBERED.keys()
    for name, values in REMEMBERED.items():
        assert found[name].dtype == values.dtype
        assert np.array_equal(found[name], values)
    assert library.has_file(JOB, manifest.feedback[0].file)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("residual.layer.weight", np.zeros((23, 7), np.float32)),
        ("residual.layer.weight", np.zeros(161)),
        ("residual.layer.weight", np.zeros(160, np.float32)),
        ("residual.other", np.zeros(161, np.float32)),
        ("residual.norm.mask", np.zeros(5, bool)),
        ("values.layer.weight", np.zeros(161, np.float32)),
        ("factor.layer.weight@0", np.zeros((65, 7), np.float32)),
        ("factor.layer.weight@0", np.zeros((2, 17), np.float32)),
        ("factor.layer.weight@0", np.zeros((2, 7))),
        ("factor.layer.weight@0", np.zeros(7, np.float32)),
        ("factor.layer.weight@1", np.ones((2, 7), np.float32)),
        ("factor.layer.weight@-1", np.ones((2, 7), np.float32)),
        ("factor.layer.weight", np.ones((2, 7), np.float32)),
        ("pushes", np.zeros(1, np.int64)),
        ("pushes", np.array(3, np.int32)),
    ],
)
def test_what_no_variable_of_the_job_can_have_is_found_before_memory_is_asked_for(
    folder: CheckpointLibrary, monkeypatch: pytest.MonkeyPatch, name: str, values: np.ndarray
) -> None:
    file = saved(folder, **{name: values})
    monkeypatch.setattr(tensors.Tensor, "of", lambda *_: pytest.fail("an array was read"))
    with pytest.raises(CheckpointDamaged, match="which no variable of the job can have"):
        folder.load_feedback(JOB, file, LAYOUT)


def test_another_workers_file_and_another_format_are_found(folder: CheckpointLibrary) -> None:
    file = saved(folder)
    with pytest.raises(CheckpointDamaged, match="is of worker 'w-1'; expected 'w-2'"):
        folder.load_feedback(JOB, ResidualFile("w-2", file.file), LAYOUT)
    held = write_state(folder, JOB, 1, state(LAYOUT, 0, seed=1, number=1))
    with pytest.raises(CheckpointDamaged, match="expected 'shardyard-feedback'"):
        folder.load_feedback(JOB, ResidualFile("w-1", held), LAYOUT)


def test_damage_of_what_a_worker_remembers_is_found_and_named(folder: CheckpointLibrary, tmp_path: Path) -> None:
    manifest = write_whole(folder, 1, feedback=True)
    (remembered,) = manifest.feedback
    path = tmp_path / JOB / remembered.file.path
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(CheckpointDamaged, match="SHA-256"):
        folder.load_feedback(JOB, remembered, LAYOUT)
    assert [finding.path for finding in folder.verify(JOB)] == [remembered.file.path]
    path.write_bytes(whole[:-4])
    with pytest.raises(CheckpointDamaged, match="bytes; expected"):
        folder.load_feedback(JOB, remembered, LAYOUT)
    assert not folder.has_file(JOB, remembered.file)
    path.unlink()
    with pytest.raises(CheckpointNotFound):
        folder.load_feedback(JOB, remembered, LAYOUT)
    assert not folder.has_file(JOB, remembered.file)


def test_prune_deletes_what_workers_remembered_and_what_came_too_late(library: CheckpointLibrary) -> None:
    for number in (1, 2, 3):
        write_whole(library, number, feedback=True)
    saved(library, 4)  # of one that is given up
    write_whole(library, 5, feedback=True)
    library.write_feedback(JOB, 3, "w-2", REMEMBERED)  # committed without it
    assert library.prune(JOB, 2).checkpoints == (1, 2)
    for number in (1, 2, 4):
        assert library.storage.list_files(f"{JOB}/{manifests.folder_name(number)}") == {}
    names = library.storage.list_files(f"{JOB}/{manifests.folder_name(3)}")
    assert "worker-w-1.safetensors" in names
    assert "worker-w-2.safetensors" not in names
    assert library.verify(JOB) == ()
    library.write_feedback(JOB, 2, "w-1", REMEMBERED)  # its folder was gone already
    library.prune(JOB, 2)
    assert library.storage.list_files(f"{JOB}/{manifests.folder_name(2)}") == {}
