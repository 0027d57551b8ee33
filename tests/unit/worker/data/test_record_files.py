"""Data sets over lists of files: which record is which sample, indices that are kept, files that changed."""

from __future__ import annotations

import os
import pickle
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import shardyard
from shardyard.domain.errors import ConfigurationError, InvalidRequest, StorageUnavailable
from shardyard_worker.data.dataset import Reader
from shardyard_worker.data.sources import file_sources
from shardyard_worker.data.sources import record_files as module
from shardyard_worker.data.sources.record_files import FixedRecords, FramedRecords, TextLines

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that records straddle the pieces that a file is scanned in."""
    monkeypatch.setattr(file_sources, "PIECE_BYTES", 16)


@pytest.fixture
def memory() -> Iterator[str]:
    yield "memory://data"
    files = fsspec.filesystem("memory")
    if files.exists("/data"):
        files.rm("/data", recursive=True)


def write(folder: Path, **contents: bytes) -> list[Path]:
    found = []
    for name, content in contents.items():
        (folder / name).write_bytes(content)
        found.append(folder / name)
    return found


def all_of(dataset: Any) -> list[Any]:
    return [dataset[index] for index in range(len(dataset))]


# ---- kinds


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        (b"", []),
        (b"a", ["a"]),
        (b"a\n", ["a"]),
        (b"\n", [""]),
        (b"\n\nb", ["", "", "b"]),
        (b"a\r\nb\r\n", ["a", "b"]),
        (b"x" * 40 + b"\n" + b"y" * 15 + b"\n" + b"z", ["x" * 40, "y" * 15, "z"]),
        ("grün\nblau\n".encode(), ["grün", "blau"]),
    ],
)
def test_lines_of_a_file(tmp_path: Path, content: bytes, lines: list[str]) -> None:
    dataset = TextLines(write(tmp_path, one=content, two=b"last\n"), index=None)
    assert all_of(dataset) == [*lines, "last"]
    assert len(dataset) == len(lines) + 1


def test_lines_are_decoded_by_the_function_that_is_given(tmp_path: Path) -> None:
    dataset = TextLines(write(tmp_path, one=b"1,2\n3,4\n"), decode=lambda line: sum(map(int, line.split(b","))))
    assert all_of(dataset) == [3, 7]


def test_samples_are_records_of_all_files_whatever_the_order_asked(tmp_path: Path) -> None:
    names = [f"f{number}" for number in range(5)]
    paths = write(tmp_path, **{name: b"".join(b"%s.%d\n" % (name.encode(), i) for i in range(7)) for name in names})
    dataset = TextLines(paths, index=None)
    expected = [f"{name}.{i}" for name in names for i in range(7)]
    order = list(range(35))
    random.Random(3).shuffle(order)
    assert dataset.__getitems__(order) == [expected[index] for index in order]
    assert dataset.__getitems__([4, 4, 34, 0]) == ["f0.4", "f0.4", "f4.6", "f0.0"]
    assert dataset.__getitems__([]) == []
    for index in (-1, 35):
        with pytest.raises(IndexError):
            dataset[index]


def test_fixed_records(tmp_path: Path) -> None:
    values = np.arange(12, dtype=np.float32)
    paths = write(tmp_path, one=b"HEAD" + values[:9].tobytes(), two=b"HEAD" + values[9:].tobytes(), three=b"HEAD")
    dataset = FixedRecords(
        paths, record_bytes=12, header_bytes=4, decode=lambda record: np.frombuffer(record, np.float32).copy()
    )
    assert [sample.tolist() for sample in all_of(dataset)] == values.reshape(4, 3).tolist()


def test_fixed_records_of_a_torn_file_are_refused(tmp_path: Path) -> None:
    paths = write(tmp_path, one=b"x" * 11)
    with pytest.raises(InvalidRequest, match="one has 11 bytes, which is no whole number of records of 4"):
        FixedRecords(paths, record_bytes=4)
    with pytest.raises(InvalidRequest, match="after 12"):
        FixedRecords(paths, record_bytes=1, header_bytes=12)
    for wrong in ({"record_bytes": 0}, {"record_bytes": 4, "header_bytes": -1}, {"record_bytes": 1 << 31}):
        with pytest.raises(InvalidRequest, match="expected 1 to"):
            FixedRecords(paths, **wrong)


def test_framed_records_come_back(tmp_path: Path) -> None:
    records = [b"", b"a", b"b" * 15, b"c" * 16, b"d" * 100, b"", b"e\n"]
    assert FramedRecords.write(tmp_path / "one", records) == 7
    FramedRecords.write(tmp_path / "none", [])
    assert all_of(FramedRecords([tmp_path / "one", tmp_path / "none"], index=None)) == records


@pytest.mark.parametrize("cut", [1, 3, 4, 8])
def test_torn_framed_file_is_refused_with_the_offset(tmp_path: Path, cut: int) -> None:
    FramedRecords.write(tmp_path / "one", [b"abcd", b"efgh"])
    whole = (tmp_path / "one").read_bytes()
    if cut == 8:
        assert len(FramedRecords(write(tmp_path, one=whole[:-cut]), index=None)) == 1
        return
    with pytest.raises(InvalidRequest, match="at byte 8") as caught:
        FramedRecords(write(tmp_path, one=whole[:-cut]), index=None)
    assert caught.value.facts["offset"] == "8"


def test_length_that_no_record_has_is_refused_before_it_is_believed(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="4294967295 bytes at byte 0"):
        FramedRecords(write(tmp_path, one=b"\xff\xff\xff\xff" + b"x" * 40), index=None)


# ---- indices


def test_index_is_kept_and_used_the_next_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = write(tmp_path, one=b"a\nbb\nccc\n")
    first = TextLines(paths, index=tmp_path / "index")
    monkeypatch.setattr(TextLines, "_scan", lambda *_: pytest.fail("scanned again"))
    again = TextLines(paths, index=tmp_path / "index")
    assert all_of(again) == all_of(first) == ["a", "bb", "ccc"]
    assert [each.suffix for each in (tmp_path / "index").iterdir()] == [".index"], "and no temporary file is left"


def test_default_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    TextLines(write(tmp_path, one=b"a\n"))
    assert len(list((tmp_path / "cache" / "shardyard" / "index").iterdir())) == 1


def test_index_of_a_file_that_has_changed_is_made_anew(tmp_path: Path) -> None:
    paths = write(tmp_path, one=b"aa\nbb\n")
    TextLines(paths, index=tmp_path / "index")
    write(tmp_path, one=b"a\nbbb\n")
    os.utime(paths[0], ns=(1, 1))
    assert all_of(TextLines(paths, index=tmp_path / "index")) == ["a", "bbb"]


def test_each_kind_has_an_index_of_its_own(tmp_path: Path) -> None:
    FramedRecords.write(tmp_path / "one", [b"ab\ncd"])
    assert all_of(FramedRecords([tmp_path / "one"], index=tmp_path / "index")) == [b"ab\ncd"]
    assert len(TextLines([tmp_path / "one"], index=tmp_path / "index", decode=bytes)) == 2


def test_damaged_index_is_made_anew(tmp_path: Path) -> None:
    paths = write(tmp_path, one=b"".join(b"%d\n" % number for number in range(50)))
    expected = all_of(TextLines(paths, index=tmp_path / "index"))
    (index,) = (tmp_path / "index").iterdir()
    whole = index.read_bytes()
    generator = random.Random(5)
    damaged = [whole[: generator.randrange(len(whole))] for _ in range(40)]
    for _ in range(60):
        at = generator.randrange(len(whole))
        damaged.append(whole[:at] + bytes([whole[at] ^ (1 << generator.randrange(8))]) + whole[at + 1 :])
    for content in (*damaged, b"", b"[]" + b" " * module.HEAD_BYTES):
        index.write_bytes(content)
        assert all_of(TextLines(paths, index=tmp_path / "index")) == expected


def test_index_that_cannot_be_kept_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "index").write_bytes(b"a file, where a folder is wanted")
    assert all_of(TextLines(write(tmp_path, one=b"a\nb\n"), index=tmp_path / "index")) == ["a", "b"]
    assert "is not kept in" in caplog.text


# ---- files


def test_file_that_changed_is_refused_and_never_read_in_part(tmp_path: Path) -> None:
    paths = write(tmp_path, one=b"aa\nbb\n", two=b"cc\n")
    dataset = TextLines(paths, index=None)
    write(tmp_path, one=b"aaaa\nb\n")
    os.utime(paths[0], ns=(1, 1))
    with pytest.raises(InvalidRequest, match="one has changed since it was indexed"):
        dataset[0]
    assert dataset[2] == "cc"
    os.truncate(paths[1], 1)
    with pytest.raises(InvalidRequest, match="two has changed since it was indexed: it has 1 bytes, and had 3"):
        dataset[2]


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StorageUnavailable, match=r"cannot read .*nothing"):
        TextLines([tmp_path / "nothing"])
    with pytest.raises(InvalidRequest, match="is not a file"):
        TextLines([tmp_path])
    with pytest.raises(InvalidRequest, match="a data set of 0 files"):
        TextLines([])
    with pytest.raises(ConfigurationError, match="nothing here can open"):
        TextLines(["nosuchthing://x/y"])


def test_nothing_stays_open(tmp_path: Path) -> None:
    dataset = TextLines(write(tmp_path, **{f"f{number}": b"%d\n" % number for number in range(9)}), index=tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    assert dataset.__getitems__(list(range(9))) == [str(number) for number in range(9)]
    assert len(os.listdir("/proc/self/fd")) == before


def test_urls_are_read_through_fsspec(memory: str, tmp_path: Path) -> None:
    urls = [f"{memory}/{name}" for name in ("one", "two")]
    for url, content in zip(urls, (b"a\nbb\n", b"ccc\n"), strict=True):
        with fsspec.open(url, "wb") as file:
            file.write(content)
    dataset = TextLines([*urls, f"file://{write(tmp_path, three=b'd')[0]}"], index=tmp_path / "index")
    assert dataset.__getitems__([3, 2, 1, 0]) == ["d", "ccc", "bb", "a"]
    with fsspec.open(urls[0], "wb") as file:
        file.write(b"a\n")
    with pytest.raises(InvalidRequest, match="has changed since it was indexed"):
        dataset.__getitems__([0, 1])
    fsspec.filesystem("memory").rm("/data/two")
    with pytest.raises(StorageUnavailable):
        dataset[2]


def test_loader_processes_read_it_too(tmp_path: Path) -> None:
    dataset = TextLines(write(tmp_path, one=b"".join(b"%d\n" % number for number in range(20))), decode=int, index=None)
    assert dataset[0] == 0
    loader = DataLoader(dataset, batch_size=4, num_workers=2)
    assert torch.cat(list(loader)).tolist() == list(range(20))
    copy = pickle.loads(pickle.dumps(dataset))
    assert copy[7] == 7


# ---- in a job


def test_fingerprint_is_of_names_below_the_common_folder_lengths_and_records(tmp_path: Path) -> None:
    def made(folder: str, **contents: bytes) -> str:
        (tmp_path / folder).mkdir()
        return Reader(TextLines(write(tmp_path / folder, **contents), index=None), CPU).fingerprint()

    first = made("a", one=b"a\nb\n", two=b"c\n")
    assert made("b", one=b"x\ny\n", two=b"z\n") == first, "the folder may lie elsewhere"
    others = [
        made("c", one=b"a\nb\n"),
        made("d", two=b"c\n", one=b"a\nb\n"),
        made("e", one=b"a\nb\n", three=b"c\n"),
        made("f", one=b"a\nb\n", two=b"cc\n"),
        made("g", one=b"a\nb\n\n", two=b"\n"),
        made("h", one=b"abb\n", two=b"\n\n"),
    ]
    assert len({first, *others}) == 7


def test_names_at_the_front_door_are_these() -> None:
    assert (shardyard.TextLines, shardyard.FixedRecords, shardyard.FramedRecords) == (
        TextLines,
        FixedRecords,
        FramedRecords,
    )
