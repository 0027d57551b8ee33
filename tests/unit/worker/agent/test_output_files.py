"""The files in which an agent keeps what its launches print: their form, their bounds, and how they are read."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from shardyard.domain import limits
from shardyard.wire.v1 import agent_pb2 as wire
from shardyard_worker.agent import output_files
from shardyard_worker.agent.kept_output import KeptOutput
from shardyard_worker.agent.output_files import OutputFile, OutputReader, read_output


def texts(folder: Path, index: int = 0, *, tail: int | None = None) -> list[str]:
    batches = read_output(folder, [index], tail=tail, running=None, pause_s=0.0)
    return [line.text for batch in batches for line in batch]


def test_line_comes_back_with_its_time_and_stream(tmp_path: Path) -> None:
    file = OutputFile(tmp_path, 3)
    file.add("out", "step 1 \x1b[31mred", 1_700_000_000.25)
    file.add("err", "", 1_700_000_000.5)
    file.add("agt", "é \ud800", 1_700_000_001.0)
    assert file.flush() is None
    file.close()
    first = (tmp_path / "3.log").read_text().splitlines()[0]
    assert first == "2023-11-14T22:13:20.250000Z out step 1 \x1b[31mred"
    reader = OutputReader(tmp_path, 3)
    found = reader.read()
    reader.close()
    assert [(line.index, line.time_s, line.kind, line.text) for line in found] == [
        (3, 1_700_000_000.25, "out", "step 1 \x1b[31mred"),
        (3, 1_700_000_000.5, "err", ""),
        (3, 1_700_000_001.0, "agt", "é ?"),
    ]


def test_output_has_two_files_of_bounded_size_and_the_newest_lines_are_there(tmp_path: Path) -> None:
    file = OutputFile(tmp_path, 0, bytes_max=1_000)
    for number in range(500):
        file.add("out", f"line {number}", 0.0)
        file.flush()
    file.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.log", "0.log.former"]
    assert all(path.stat().st_size <= 1_000 for path in tmp_path.iterdir())
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in tmp_path.iterdir())
    found = texts(tmp_path)
    assert found == [f"line {number}" for number in range(500 - len(found), 500)]
    assert len(found) > 25
    assert texts(tmp_path, tail=3) == ["line 497", "line 498", "line 499"]
    assert texts(tmp_path, tail=0) == []


def test_reader_misses_no_line_of_files_that_are_rotated_while_it_reads(tmp_path: Path) -> None:
    file = OutputFile(tmp_path, 0, bytes_max=700)
    reader = OutputReader(tmp_path, 0)
    found: list[str] = []
    for number in range(300):
        file.add("out", f"line {number}", 0.0)
        file.flush()
        if number % 7 == 0:  # less than two files are written between two looks
            found += [line.text for line in reader.read_all()]
    file.close()
    found += [line.text for line in reader.read_all()]
    reader.close()
    assert found == [f"line {number}" for number in range(300)]


def test_reader_that_is_too_slow_goes_on_with_the_oldest_lines_kept(tmp_path: Path) -> None:
    file = OutputFile(tmp_path, 0, bytes_max=700)
    reader = OutputReader(tmp_path, 0)
    file.add("out", "first", 0.0)
    file.flush()
    assert [line.text for line in reader.read()] == ["first"]
    for number in range(300):
        file.add("out", f"line {number}", 0.0)
        file.flush()
    file.close()
    found = [line.text for line in reader.read_all()]
    reader.close()
    kept = texts(tmp_path)
    assert found[-len(kept) :] == kept
    assert found[0] == "line 0"  # of the file that it held open


def test_lines_of_several_processes_come_in_the_order_of_their_times(tmp_path: Path) -> None:
    for index in range(3):
        file = OutputFile(tmp_path, index)
        for number in range(4):
            file.add("out", f"{index}.{number}", 3.0 * number + index)
        file.flush()
        file.close()
    batches = read_output(tmp_path, [0, 1, 2], tail=5, running=None, pause_s=0.0)
    assert [line.text for batch in batches for line in batch] == ["1.2", "2.2", "0.3", "1.3", "2.3"]


def test_damaged_line_is_shown_as_it_is_and_an_endless_one_is_cut(tmp_path: Path) -> None:
    (tmp_path / "0.log").write_bytes(b"half a li\n\xff\xfe x y\n" + b"x" * (2 * output_files.LINE_BYTES_MAX) + b"\n")
    found = texts(tmp_path)
    assert found[:2] == ["half a li", "\ufffd\ufffd x y"]
    assert max(map(len, found)) == limits.OUTPUT_LINE_CHARACTERS_MAX


def test_full_disk_costs_lines_and_says_how_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line of which the disk took a part does not run into the next one."""
    file = OutputFile(tmp_path, 0)
    file.add("out", "before", 0.0)
    assert file.flush() is None
    with monkeypatch.context() as full:
        full.setattr(os, "write", FullDisk(room=10))
        for _ in range(3):
            file.add("out", "lost", 0.0)
            refused = file.flush()
            assert refused is not None
            assert refused.errno == errno.ENOSPC
    file.add("out", "after", 0.0)
    assert file.flush() is None
    file.close()
    found = texts(tmp_path)
    assert found[0] == "before"
    assert found[-2:] == ["the disk refused 3 lines, which are missing here", "after"]


class FullDisk:
    def __init__(self, room: int) -> None:
        self._room = room
        self._write = os.write

    def __call__(self, descriptor: int, data: Any) -> int:
        if not self._room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = self._write(descriptor, bytes(data)[: self._room])
        self._room -= written
        return written


def test_refused_output_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept = KeptOutput(7, tmp_path, 1)
    with monkeypatch.context() as full:
        full.setattr(os, "write", FullDisk(room=0))
        for _ in range(3):
            kept.add(wire.LaunchEvent(output=wire.ProcessOutput(line="x")))
            kept.flush()
    kept.close()
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("launch 7: output is not kept (No space left on device); the launch goes on")


def test_output_goes_on_in_the_file_of_the_agent_before(tmp_path: Path) -> None:
    for text in ("first", "second"):
        file = OutputFile(tmp_path, 0)
        file.add("out", text, 0.0)
        file.flush()
        file.close()
    assert texts(tmp_path) == ["first", "second"]
    assert [path.name for path in tmp_path.iterdir()] == ["0.log"]
