"""Batches that other processes read: which they are, their random numbers, and what ends the processes."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from shardyard.domain.errors import InvalidRequest
from shardyard_worker.data.dataset import Reader
from shardyard_worker.data.loader_processes import LoaderSettings, Reading
from shardyard_worker.data.seeding import seed_everything, undisturbed

CPU = torch.device("cpu")


class Drawn(Dataset[Any]):
    """A sample is its index, the process that read it, and three random numbers."""

    def __init__(self, fails_at: int = -1) -> None:
        self.fails_at = fails_at

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        if index == self.fails_at:
            raise ValueError(f"no sample {index}")
        numbers = [float(torch.rand(1)), float(np.random.rand()), random.random()]
        return index, os.getpid(), torch.tensor(numbers, dtype=torch.float64)


class Plan:
    """Batches of two samples, named by their first."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.begun: list[int] = []

    def read(self, first: int, expected: Sequence[int]) -> Any:
        def begin() -> Iterator[Reading]:
            self.begun.append(first)
            return iter([Reading((7, each), [each, each + 1]) for each in expected])

        with undisturbed():
            seed_everything(7, first)
            return self.reader.read((7, first), np.array([first, first + 1]), begin).take(), float(torch.rand(1))


@pytest.fixture
def planned() -> Iterator[Callable[..., Plan]]:
    readers: list[Reader] = []

    def make(dataset: Dataset[Any] | None = None, **settings: Any) -> Plan:
        readers.append(Reader(dataset or Drawn(), CPU, LoaderSettings(**{"num_workers": 2} | settings)))
        return Plan(readers[-1])

    yield make
    for reader in readers:
        reader.close()


def test_batches_come_as_asked_from_other_processes(planned: Callable[..., Plan]) -> None:
    plan = planned()
    found = [plan.read(first, range(0, 20, 2))[0] for first in range(0, 20, 2)]
    assert [indices.tolist() for indices, _, _ in found] == [[first, first + 1] for first in range(0, 20, 2)]
    readers = {int(pid) for _, pids, _ in found for pid in pids}
    assert len(readers) == 2
    assert os.getpid() not in readers
    assert plan.begun == [0]


def test_random_numbers_are_those_of_reading_in_this_process(planned: Callable[..., Plan]) -> None:
    there, here = planned(), planned(num_workers=0)
    for first in (0, 2, 4):
        (_, _, numbers), after = there.read(first, [0, 2, 4])
        (_, _, expected), expected_after = here.read(first, [])
        assert torch.equal(numbers, expected)
        assert after == expected_after  # what the model draws next


def test_reading_draws_no_number_of_this_process(planned: Callable[..., Plan]) -> None:
    plan = planned()
    torch.manual_seed(3)
    expected = torch.get_rng_state()
    plan.reader.read((7, 0), np.array([0, 1]), lambda: iter([Reading((7, 0), [0, 1])]))
    assert torch.equal(torch.get_rng_state(), expected)


def test_another_batch_than_expected_begins_again_in_the_same_processes(planned: Callable[..., Plan]) -> None:
    plan = planned(num_workers=1)
    (_, before, _), _ = plan.read(0, range(0, 20, 2))
    (indices, after, _), _ = plan.read(30, [30, 32])
    assert indices.tolist() == [30, 31]
    assert plan.read(32, [])[0][0].tolist() == [32, 33]
    assert plan.read(34, [34])[0][0].tolist() == [34, 35]
    assert plan.begun == [0, 30, 34]
    assert set(after.tolist()) == set(before.tolist())


def test_an_error_of_reading_is_raised_in_its_turn(planned: Callable[..., Plan]) -> None:
    plan = planned(Drawn(fails_at=3))
    assert plan.read(0, [0, 2, 4])[0][0].tolist() == [0, 1]
    with pytest.raises(ValueError, match="no sample 3"):
        plan.read(2, [])
    assert plan.read(4, [])[0][0].tolist() == [4, 5]


def test_closed_processes_start_again(planned: Callable[..., Plan]) -> None:
    plan = planned(num_workers=1)
    (_, before, _), _ = plan.read(0, [0, 2])
    plan.reader.close()
    (_, after, _), _ = plan.read(2, [2])
    assert set(after.tolist()).isdisjoint(before.tolist())


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"num_workers": -1}, "num_workers -1"),
        ({"num_workers": 1, "prefetch_factor": 0}, "prefetch_factor 0"),
        ({"prefetch_factor": 2}, "without num_workers"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidRequest, match=told):
        Reader(Drawn(), CPU, LoaderSettings(**settings))
