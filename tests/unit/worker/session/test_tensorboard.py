"""Event files, read by TensorBoard's own reader."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from shardyard.domain.errors import ConfigurationError
from shardyard_worker.session import tensorboard
from shardyard_worker.session.tensorboard import TensorBoardWriter


def read(folder: Path) -> dict[str, list[tuple[int, float]]]:
    found = EventAccumulator(str(folder)).Reload()
    return {name: [(each.step, each.value) for each in found.Scalars(name)] for name in found.Tags()["scalars"]}


def test_all_that_was_given_is_there_with_its_step(tmp_path: Path) -> None:
    files = TensorBoardWriter(tmp_path / "runs", job="digits", who="worker-1.4")
    files.take(1, {"loss": 0.5, "accuracy": torch.tensor([0.25])})
    files.take(2, {"loss": torch.tensor(0.25)})
    files.take(2_000_000_000, {"a/b c": float("nan")})
    files.close()
    files.close()
    assert files.folder.parent == tmp_path / "runs" / "digits"
    assert files.folder.name.endswith("-worker-1.4")
    found = read(files.folder)
    assert found["loss"] == [(1, 0.5), (2, 0.25)]
    assert found["accuracy"] == [(1, 0.25)]
    ((step, value),) = found["a/b c"]
    assert step == 2_000_000_000
    assert value != value


def test_tensor_is_read_with_the_next_call(tmp_path: Path) -> None:
    files = TensorBoardWriter(tmp_path, job="digits", who="worker-1.4")
    loss = torch.tensor(1.0)
    files.take(1, {"loss": loss})
    loss.fill_(3.0)  # as if a GPU had computed it only now
    files.take(2, {})
    loss.fill_(9.0)
    files.close()
    assert read(files.folder)["loss"] == [(1, 3.0)]


def test_each_run_has_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "strftime", lambda form: "20260101-000000")
    found = [TensorBoardWriter(tmp_path, job="digits", who="worker-1.4") for _ in range(3)]
    for files in found:
        files.close()
    assert [files.folder.name.removeprefix("20260101-000000-worker-") for files in found] == ["1.4", "1.4-2", "1.4-3"]


def test_missing_package_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [each for each in sys.modules if each.partition(".")[0] == "tensorboard"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'shardyard\[tensorboard\]'"):
        TensorBoardWriter(tmp_path / "runs", job="digits", who="worker-1.4")
    assert not (tmp_path / "runs").exists()


def test_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match=r"metrics\.tensorboard: cannot make .*file/digits"):
        tensorboard.TensorBoardWriter(tmp_path / "file", job="digits", who="worker-1.4")
