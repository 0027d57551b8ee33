"""The best version of a job: what is kept, what is found after a crash at any moment, what is refused."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch

from shardyard.checkpoints import best as bests
from shardyard.checkpoints.best import BestFolder, BestManifest
from shardyard.domain.errors import CheckpointDamaged, CheckpointNotFound, InvalidRequest, StorageUnavailable
from shardyard.domain.ids import JobId
from shardyard.runtime import failpoints
from shardyard.storage.json_reader import seal
from shardyard.storage.storage import Written, open_storage
from shardyard.storage.tensors import Array
from shardyard_launcher.cli import main

JOB = JobId(1 << 32 | 2)
WRITTEN = Written(9, "0" * 64)


def values(fill: float) -> dict[str, Array]:
    return {
        "layer.weight": np.full((3, 5), fill, np.float32),
        "layer.count": np.full((), int(fill), np.int64),
        "nothing": np.zeros((0, 4), np.float64),
    }


def keep(folder: BestFolder, value: float, step: int = 7, mode: str = "max") -> None:
    folder.keep(job=JOB, metric="accuracy", mode=mode, value=value, step=step, values=values(step))


@pytest.fixture(params=["folder", "memory://best-{}"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> BestFolder:
    url = str(tmp_path / "kept") if request.param == "folder" else request.param.format(tmp_path.name)
    return BestFolder(open_storage(url), "digits")


def load_kept(folder: BestFolder) -> BestManifest:
    found = folder.load()
    assert found is not None
    return found


def test_nothing_is_kept_at_first(folder: BestFolder) -> None:
    assert folder.load() is None


def test_what_was_kept_comes_back_to_the_bit(folder: BestFolder) -> None:
    keep(folder, 0.1 + 0.2, step=12)
    found = load_kept(folder)
    assert (found.job, found.metric, found.mode, found.value, found.step) == (JOB, "accuracy", "max", 0.1 + 0.2, 12)
    read = folder.read(found)
    assert read.keys() == values(12).keys()
    for name, array in values(12).items():
        assert (read[name].dtype, read[name].shape) == (array.dtype, array.shape)
        assert read[name].tobytes() == array.tobytes()


def test_former_best_is_deleted_after_the_new_one_is_there(folder: BestFolder) -> None:
    for step in range(3):
        keep(folder, float(step), step)
    assert len(folder.storage.list_files("digits/best")) == 2
    found = load_kept(folder)
    assert found.step == 2


@pytest.mark.parametrize(
    ("mode", "value", "beaten"),
    [("max", 0.6, True), ("max", 0.5, False), ("max", 0.4, False), ("min", 0.4, True), ("min", 0.5, False)],
)
def test_only_what_is_better_beats_it(mode: str, value: float, beaten: bool) -> None:
    held = BestManifest(JOB, "loss", mode, 0.5, 1, "", "", Written(0, ""))
    assert held.is_beaten_by(value) is beaten
    assert not held.is_beaten_by(float("nan"))


def test_file_is_one_that_safetensors_reads(tmp_path: Path) -> None:
    folder = BestFolder(open_storage(str(tmp_path)), "digits")
    keep(folder, 0.5, step=3)
    found = load_kept(folder)
    loaded = safetensors.numpy.load_file(tmp_path / "digits" / "best" / found.path)
    assert (loaded["layer.weight"] == 3).all()


# ---- crashes, damage


@pytest.mark.parametrize(
    "place", ["storage.before_write", "storage.before_fsync", "storage.before_rename", "storage.before_fsync_folder"]
)
@pytest.mark.parametrize("at", [1, 2])
def test_one_that_could_not_be_kept_leaves_the_former_one_or_is_there_whole(
    tmp_path: Path, place: str, at: int
) -> None:
    folder = BestFolder(open_storage(str(tmp_path)), "digits")
    keep(folder, 0.5, step=3)

    def refuse(_: str) -> None:
        raise OSError(28, "no space left")

    with failpoints.armed(place, refuse, at=at), pytest.raises(StorageUnavailable):
        keep(folder, 0.75, step=4)
    found = load_kept(folder)
    read = folder.read(found)
    assert (read["layer.weight"] == found.step).all()
    keep(folder, 0.8, step=5)
    assert len(list((tmp_path / "digits" / "best").iterdir())) == 2


def test_crash_before_the_former_one_was_deleted_leaves_the_new_one(tmp_path: Path) -> None:
    folder = BestFolder(open_storage(str(tmp_path)), "digits")
    keep(folder, 0.5, step=3)

    def refuse(_: str) -> None:
        raise OSError(5, "broken")

    with failpoints.armed("storage.before_delete", refuse), pytest.raises(StorageUnavailable):
        keep(folder, 0.75, step=4)
    found = load_kept(folder)
    assert found.step == 4
    keep(folder, 0.8, step=5)
    assert len(list((tmp_path / "digits" / "best").iterdir())) == 2


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [truncated, flipped, Path.unlink])
def test_torn_values_are_damaged(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    folder = BestFolder(open_storage(str(tmp_path)), "digits")
    keep(folder, 0.5)
    found = load_kept(folder)
    damage(tmp_path / "digits" / "best" / found.path)
    with pytest.raises((CheckpointDamaged, CheckpointNotFound)):
        folder.read(found)
    if damage is not flipped:  # which only the digest shows
        with pytest.raises(CheckpointDamaged):
            folder.load()


def test_any_bit_of_the_manifest_that_changed_is_found(tmp_path: Path) -> None:
    folder = BestFolder(open_storage(str(tmp_path)), "digits")
    keep(folder, 0.5)
    path = tmp_path / "digits" / "best" / bests.NAME
    text = path.read_bytes()
    assert folder.load() is not None
    for at in range(len(text) - 1):
        path.write_bytes(text[:at] + bytes([text[at] ^ 1]) + text[at + 1 :])
        with pytest.raises(CheckpointDamaged):
            folder.load()
    for end in range(0, len(text) - 1, 7):
        path.write_bytes(text[:end])
        with pytest.raises(CheckpointDamaged):
            folder.load()


@pytest.mark.parametrize(
    "changed",
    [
        {"metric": ""},
        {"metric": 3},
        {"mode": "most"},
        {"value": 1},
        {"value": "0.5"},
        {"step": -1},
        {"created": "yesterday"},
        {"created": "2026-01-01T00:00:00"},
        {"path": "../step-000000000007-0123456789abcdef.safetensors"},
        {"nbytes": -1},
        {"sha256": "0"},
        {"format": "other"},
        {"version": 2},
        {"more": 1},
    ],
)
def test_manifest_that_says_what_cannot_be_is_damaged(changed: dict[str, object]) -> None:
    held = BestManifest(
        JOB, "loss", "min", 0.5, 7, "2026-01-01T00:00:00+00:00", f"step-{7:012d}-{0:016x}.safetensors", WRITTEN
    )
    assert bests.decode(bests.encode(held), "here") == held
    document = json.loads(bests.encode(held))["best"] | changed
    text = seal("best", document)
    with pytest.raises(CheckpointDamaged, match="here"):
        bests.decode(text, "here")


def test_what_cannot_be_written_down_is_refused(tmp_path: Path) -> None:
    folder = BestFolder(open_storage(str(tmp_path)), "digits")
    for value, metric, mode in ((float("nan"), "loss", "max"), (0.5, "", "max"), (0.5, "loss", "most")):
        with pytest.raises(InvalidRequest):
            folder.keep(job=JOB, metric=metric, mode=mode, value=value, step=1, values={})
    with pytest.raises(InvalidRequest, match="no job's name"):
        BestFolder(open_storage(str(tmp_path)), "../digits")
    assert list(tmp_path.iterdir()) == []


# ---- the command


def test_best_is_listed_and_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = BestFolder(open_storage(str(tmp_path / "kept")), "digits")
    keep(folder, 0.75, step=1350)
    assert main(["checkpoint", "list", "--url", str(tmp_path / "kept")]) == 0
    assert "best of job digits: accuracy 0.75 (max) of step 1,350" in capsys.readouterr().out
    assert main(["checkpoint", "list", "--url", str(tmp_path / "kept"), "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)["best"]
    assert (entry["job"], entry["metric"], entry["value"], entry["step"]) == ("digits", "accuracy", 0.75, 1350)
    assert main(["checkpoint", "export", "--url", str(tmp_path / "kept"), "--best", "best.pt"]) == 0
    assert "3 variables of the best of job digits, step 1350: accuracy 0.75" in capsys.readouterr().out
    loaded = torch.load(tmp_path / "best.pt", weights_only=True)
    assert {name: tuple(tensor.shape) for name, tensor in loaded.items()} == {
        "layer.weight": (3, 5),
        "layer.count": (),
        "nothing": (0, 4),
    }
    assert (loaded["layer.weight"] == 1350).all()
    given = ["--format", "safetensors", "--best", "best.safetensors"]
    assert main(["checkpoint", "export", "--url", str(tmp_path / "kept"), *given]) == 0
    assert (safetensors.numpy.load_file(tmp_path / "best.safetensors")["layer.weight"] == 1350).all()


def test_best_is_exported_without_being_in_memory_whole(tmp_path: Path) -> None:
    folder = BestFolder(open_storage(str(tmp_path / "kept")), "digits")
    elements, count = 1 << 20, 10  # 4 MiB each
    kept = {f"layer.{index}": np.full(elements, index, np.float32) for index in range(count)}
    folder.keep(job=JOB, metric="accuracy", mode="max", value=0.75, step=1, values=kept)
    given = ["--format", "safetensors", "--best", "best.safetensors"]
    tracemalloc.start()
    try:
        assert main(["checkpoint", "export", "--url", str(tmp_path / "kept"), *given]) == 0
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < count * elements * 4 / 2
    loaded = safetensors.numpy.load_file(tmp_path / "best.safetensors")
    assert loaded.keys() == kept.keys()
    assert all((loaded[name] == array).all() for name, array in kept.items())


def test_best_that_is_damaged_within_a_variable_leaves_no_file_in_either_format(tmp_path: Path) -> None:
    folder = BestFolder(open_storage(str(tmp_path / "kept")), "digits")
    keep(folder, 0.75)
    found = load_kept(folder)
    flipped(tmp_path / "kept" / "digits" / "best" / found.path)
    for form in ("torch", "safetensors"):
        given = ["--format", form, "--best", f"best.{form}"]
        assert main(["checkpoint", "export", "--url", str(tmp_path / "kept"), *given]) == 1
        assert not list(tmp_path.glob("*best.*"))


def test_damaged_best_is_shown_and_never_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = BestFolder(open_storage(str(tmp_path / "kept")), "digits")
    keep(folder, 0.75)
    found = load_kept(folder)
    flipped(tmp_path / "kept" / "digits" / "best" / found.path)
    assert main(["checkpoint", "export", "--url", str(tmp_path / "kept"), "--best", "best.pt"]) == 1
    assert not (tmp_path / "best.pt").exists()
    (tmp_path / "kept" / "digits" / "best" / found.path).unlink()
    assert main(["checkpoint", "list", "--url", str(tmp_path / "kept")]) == 0
    assert "best of job digits: damaged" in capsys.readouterr().out


def test_nothing_kept_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "kept" / "digits").mkdir(parents=True)
    assert main(["checkpoint", "export", "--url", str(tmp_path / "kept"), "--best", "best.pt"]) == 1
    assert "no best version is kept" in capsys.readouterr().err
    assert main(["checkpoint", "export", "--url", str(tmp_path / "kept"), "--best", "--number", "3", "b.pt"]) == 1
