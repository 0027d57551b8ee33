"""The folders of an agent's launches: their numbers and records, and which of them are deleted."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from shardyard_worker.agent import launch_folders
from shardyard_worker.agent.launch_folders import Ending, LaunchFolder, LaunchFolders, LaunchRecord


def record(number: int, **changed: Any) -> LaunchRecord:
    given: dict[str, Any] = {"script": "/train.py", "arguments": ("--lr", "1"), "workers": 2, "started_s": 5.0}
    return LaunchRecord(number, **(given | changed))


def folders_in(state: Path) -> LaunchFolders:
    made = LaunchFolders(state)
    made.prepare()
    return made


def ended(folder: LaunchFolder, time_s: float) -> LaunchFolder:
    folder.end(record(int(folder.path.name), ended=Ending(time_s, 0, 0, "")))
    os.utime(folder.path, (time_s, time_s))
    return folder


def test_record_of_a_launch_outlives_its_agent(tmp_path: Path) -> None:
    folder = folders_in(tmp_path).create(record)
    number = int(folder.path.name)
    assert launch_folders.NUMBER_MIN <= number <= launch_folders.NUMBER_MAX
    found = LaunchFolders(tmp_path).find(number)
    assert found is not None
    assert found.runs
    assert found.record() == record(number)
    over = record(number, ended=Ending(9.5, 3, 1, "ValueError: \udc80"))
    folder.end(over)
    assert not found.runs
    assert found.record() == over


def test_folders_are_for_their_user_only(tmp_path: Path) -> None:
    folder = folders_in(tmp_path).create(record)
    paths = [folder.path.parent, folder.path, *folder.path.iterdir()]
    assert [stat.S_IMODE(path.stat().st_mode) for path in paths] == [0o700, 0o700, 0o600, 0o600]
    folder.release()


def test_number_that_is_taken_is_not_given_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by another agent on the same folder either."""
    monkeypatch.setattr(launch_folders, "NUMBER_MAX", launch_folders.NUMBER_MIN + 2)
    made = [folders_in(tmp_path).create(record) for _ in range(3)]
    assert len({folder.path for folder in made}) == 3
    for folder in made:
        found = folder.record()
        assert found is not None
        assert str(found.number) == folder.path.name
        folder.release()


def test_oldest_ended_launches_are_deleted_and_no_running_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_folders, "ENDED_MAX", 3)
    folders = folders_in(tmp_path)
    running = folders.create(record)
    os.utime(running.path, (1.0, 1.0))
    old = [ended(folders.create(record), 100.0 + number) for number in range(4)]
    newest = folders.create(record)
    assert {path.name for path in (tmp_path / "launches").iterdir()} == {
        each.path.name for each in (running, *old[2:], newest)
    }
    for folder in (running, newest):
        folder.release()


def test_ended_launches_that_printed_much_are_deleted_sooner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_folders, "ENDED_BYTES_MAX", 5_000)
    folders = folders_in(tmp_path)
    for number in range(4):
        folder = folders.create(record)
        (folder.path / "0.log").write_bytes(b"x" * 4_000)
        ended(folder, 100.0 + number)
    folders.create(record).release()
    assert [int(folder.path.name) for folder, _ in folders.records()[:1]] != []
    assert len(list((tmp_path / "launches").iterdir())) == 2


def test_what_a_killed_agent_has_begun_goes(tmp_path: Path) -> None:
    folders = folders_in(tmp_path)
    fresh, stale = (tmp_path / "launches" / f".new-{name}" for name in ("fresh", "stale"))
    for path in (fresh, stale):
        path.mkdir()
    os.utime(stale, (1.0, 1.0))
    folders.create(record).release()
    assert (fresh.exists(), stale.exists()) == (True, False)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"number": 1}', b"null", b'{"number": "x"}'])
def test_damaged_record_is_no_launch(tmp_path: Path, content: bytes) -> None:
    folders = folders_in(tmp_path)
    path = tmp_path / "launches" / "123456"
    path.mkdir()
    (path / "launch.json").write_bytes(content)
    assert LaunchFolder(path).record() is None
    assert folders.records() == []
