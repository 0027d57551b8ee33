"""Streams read by index: each sample in its place, in any process, and clear words where that cannot be."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import shardyard as sy
from shardyard.domain.errors import InvalidRequest, UnseekableDataset
from shardyard_worker.data.dataset import Reader

CPU = torch.device("cpu")


class Lines(IterableDataset[int]):
    """Numbers in a file, read through one descriptor, as streams do. Counts how often it was begun, and its samples."""

    def __init__(self, path: Path, count: int) -> None:
        path.write_text("".join(f"{number * number}\n" for number in range(count)))
        self.path = path
        self.begun = self.given = 0

    def __iter__(self) -> Iterator[int]:
        self.begun += 1
        with self.path.open(buffering=1) as file:
            for line in file:
                self.given += 1
                yield int(line)


def test_reading_on_goes_through_the_stream_once(tmp_path: Path) -> None:
    lines = Lines(tmp_path / "lines", 20)
    data = sy.StreamDataset(lines, samples=20)
    assert [data[index] for index in (0, 3, 4, 19)] == [0, 9, 16, 361]
    assert lines.begun == 1
    assert [data[index] for index in (2, 3)] == [4, 9]
    assert lines.begun == 2


def test_sample_that_was_just_read_is_read_again(tmp_path: Path) -> None:
    data = sy.StreamDataset(Lines(tmp_path / "lines", 5), samples=5)
    assert [data[1], data[1], data[0]] == [1, 1, 0]


def test_index_outside_of_the_stream_is_none_of_its_samples(tmp_path: Path) -> None:
    data = sy.StreamDataset(Lines(tmp_path / "lines", 5), samples=4)
    for index in (-1, 4):
        with pytest.raises(IndexError):
            data[index]
    assert list(data) == [0, 1, 4, 9]  # type: ignore[call-overload]


def test_length_comes_from_the_stream_if_it_has_one() -> None:
    assert len(sy.StreamDataset(["a", "b"])) == 2
    assert len(sy.StreamDataset(["a", "b"], samples=1)) == 1
    with pytest.raises(UnseekableDataset, match="has no length") as caught:
        sy.StreamDataset(Endless())
    assert "samples=N" in caught.value.todo_text
    with pytest.raises(InvalidRequest, match="-1 samples"):
        sy.StreamDataset(["a"], samples=-1)


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        number = 0
        while True:
            yield number
            number += 1


def test_stream_that_can_be_read_only_once_is_refused() -> None:
    with pytest.raises(UnseekableDataset, match="generator can be iterated over only once"):
        sy.StreamDataset((each for each in range(3)), samples=3)


def test_stream_that_ends_early_says_where(tmp_path: Path) -> None:
    data = sy.StreamDataset(Lines(tmp_path / "lines", 3), samples=5)
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="Lines ended after 3 samples; it should have 5"):
            data[4]
    assert data[2] == 4


class Parts(IterableDataset[int]):
    """Gives each process of a DataLoader a part."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        return iter(range(0, 8, 1) if info is None else range(info.id, 8, info.num_workers))


def test_stream_that_cuts_itself_into_parts_says_so() -> None:
    data = sy.StreamDataset(Parts(), samples=8)
    assert [int(each) for each in DataLoader(data, batch_size=None)] == list(range(8))
    delivered: Any = iter(DataLoader(data, batch_size=None, num_workers=2))
    with pytest.raises(InvalidRequest, match="must give the whole"):
        list(delivered)
    delivered._shutdown_workers()


def test_copies_in_other_processes_read_by_themselves(tmp_path: Path) -> None:
    """Also those that are made while a file is open, whose place in it they would share."""
    data = sy.StreamDataset(Lines(tmp_path / "lines", 2_000), samples=2_000)
    assert data[3] == 9
    loader = DataLoader(data, batch_size=10, num_workers=2, multiprocessing_context="fork")
    assert [int(each) for batch in loader for each in batch] == [n * n for n in range(2_000)]
    assert data[1_999] == 1_999 * 1_999
    assert pickle.loads(pickle.dumps(data))[4] == 16


def test_reader_knows_that_samples_come_in_order(tmp_path: Path) -> None:
    lines = Lines(tmp_path / "lines", 100)
    reader = Reader(sy.StreamDataset(lines, samples=100), CPU)
    assert reader.in_order
    assert not Reader(torch.utils.data.TensorDataset(torch.zeros(3)), CPU).in_order
    assert len(reader.fingerprint()) == 32
    assert (lines.begun, lines.given) == (1, 1)  # and not to the end


@pytest.mark.parametrize("by", ["batches", "sampler"])
def test_shuffling_a_stream_by_index_is_refused(by: str) -> None:
    data = sy.StreamDataset([torch.zeros(1)] * 4)
    with sy.connect() as job:
        model = torch.nn.Linear(1, 1)
        job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(InvalidRequest, match="StreamDataset with shuffle=True") as caught:
            job.batches(data) if by == "batches" else job.sampler(data)
        assert "shuffle=False" in caught.value.todo_text


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("by", ["batches", "processes", "sampler"])
def test_each_sample_of_a_stream_counts_once_an_epoch(tmp_path: Path, by: str, mode: str) -> None:
    data = sy.StreamDataset(Lines(tmp_path / "lines", 9), samples=9)
    seen: list[int] = []
    with sy.connect(settings={"job.consistency.mode": mode}) as job:
        model = torch.nn.Linear(1, 1)
        model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))

        def learn(batch: torch.Tensor) -> None:
            seen.extend(int(each) for each in batch)
            optimizer.zero_grad()
            model(batch.float().view(-1, 1)).mean().backward()
            optimizer.step()

        if by == "sampler":
            loader = DataLoader(data, batch_sampler=job.sampler(data, batch_size=2, shuffle=False))
            for _ in range(2):
                for batch in loader:
                    learn(batch)
        else:
            workers = 2 if by == "processes" else 0
            for batch in job.batches(data, batch_size=2, epochs=2, shuffle=False, num_workers=workers):
                learn(batch)
    assert sorted(seen) == sorted([n * n for n in range(9)] * 2)
