"""Datasets by index: order, batches, fingerprint; and the generators that must not be disturbed."""

from __future__ import annotations

import random
from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset

from shardyard.domain.epochs import order
from shardyard.domain.errors import UnseekableDataset
from shardyard_worker.data.dataset import Reader
from shardyard_worker.data.loader_processes import LoaderSettings
from shardyard_worker.data.seeding import seed_everything, undisturbed

CPU = torch.device("cpu")
Pair = namedtuple("Pair", ["x", "y"])


class Samples(Dataset[Any]):
    """Samples of any kind, made by a function of the index."""

    def __init__(self, make: Any, length: int = 10) -> None:
        self.make, self.length, self.read = make, length, list[int]()

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        return self.make(index)

    def __len__(self) -> int:
        return self.length


class Many(Samples):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        assert all(type(index) is int for index in indices)
        return [self.make(index) * 10 for index in indices]


def fetch(dataset: Any, *indices: int, collate: Any = None) -> Any:
    return Reader(dataset, CPU, LoaderSettings(collate)).fetch(np.array(indices, dtype=np.int64))


# ---- order


def test_the_order_is_a_permutation_of_all_samples() -> None:
    found = order(seed=3, feed=1, epoch=2, samples=1000, shuffle=True)
    assert found.dtype == np.int64
    assert sorted(found) == list(range(1000))


def test_the_order_depends_on_seed_feed_and_epoch_alone() -> None:
    def key(seed: int, feed: int, epoch: int) -> tuple[int, ...]:
        return tuple(order(seed=seed, feed=feed, epoch=epoch, samples=50, shuffle=True).tolist())

    first = key(1, 0, 0)
    torch.manual_seed(99)
    np.random.seed(99)
    random.seed(99)
    assert key(1, 0, 0) == first
    assert len({key(1, 0, 0), key(2, 0, 0), key(1, 1, 0), key(1, 0, 1), key(0, 1, 0), key(0, 0, 1)}) == 6


def test_the_order_is_the_same_for_ever() -> None:
    # other releases must read a journal's data shards alike
    assert order(seed=7, feed=0, epoch=1, samples=8, shuffle=True).tolist() == [2, 3, 4, 1, 0, 6, 7, 5]


def test_without_shuffling_the_order_is_that_of_the_dataset() -> None:
    assert order(seed=7, feed=0, epoch=1, samples=5, shuffle=False).tolist() == [0, 1, 2, 3, 4]


# ---- batches


def test_a_tensor_dataset_gives_what_a_data_loader_gives() -> None:
    dataset = TensorDataset(torch.arange(20).reshape(10, 2), torch.arange(10))
    x, y = fetch(dataset, 7, 2)
    assert x.tolist() == [[14, 15], [4, 5]]
    assert y.tolist() == [7, 2]
    assert isinstance(fetch(dataset, 1), list)


def test_a_plain_dataset_is_collated_as_by_a_data_loader() -> None:
    x, y = fetch(Samples(lambda i: (np.float32(i), i)), 3, 5)
    assert torch.equal(x, torch.tensor([3.0, 5.0]))
    assert torch.equal(y, torch.tensor([3, 5]))


def test_getitems_is_used_where_there_is_one() -> None:
    assert fetch(Many(lambda i: i), 3, 5).tolist() == [30, 50]


def test_subsets_and_concatenations_are_read() -> None:
    dataset = TensorDataset(torch.arange(10))
    assert fetch(Subset(dataset, [4, 6, 8]), 2, 0)[0].tolist() == [8, 4]
    assert fetch(ConcatDataset([dataset, dataset]), 11)[0].tolist() == [1]


@pytest.mark.parametrize("dataset", [TensorDataset(torch.arange(10)), Samples(lambda i: (torch.tensor(i),))])
def test_a_collate_function_of_ones_own_gets_the_samples(dataset: Any) -> None:
    batch = fetch(dataset, 4, 1, collate=lambda samples: {"sum": sum(sample[0] for sample in samples)})
    assert batch == {"sum": torch.tensor(5)}


def test_structures_stay_as_they_are() -> None:
    batch = fetch(Samples(lambda i: {"pair": Pair(torch.tensor(i), f"s{i}"), "more": [i, (i,)]}), 1, 2)
    assert type(batch["pair"]) is Pair
    assert batch["pair"].x.tolist() == [1, 2]
    assert list(batch["pair"].y) == ["s1", "s2"]
    assert batch["more"][0].tolist() == [1, 2]


def test_tensors_go_to_the_device_wherever_they_are() -> None:
    meta = torch.device("meta")
    reader = Reader(Samples(lambda i: {"a": torch.ones(2), "b": Pair(torch.ones(1), [torch.ones(1)])}), meta)
    batch = reader.fetch(np.array([0, 1]))
    assert {batch["a"].device, batch["b"].x.device, batch["b"].y[0].device} == {meta}


class Endless(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


class Lengthless(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


class Unreadable(Dataset[int]):
    def __len__(self) -> int:
        return 3


class EndlessWithIndex(Endless):
    def __getitem__(self, index: int) -> int:
        return index

    def __len__(self) -> int:
        return 3


@pytest.mark.parametrize(
    "dataset",
    [
        Endless(),
        EndlessWithIndex(),
        Lengthless(),
        Unreadable(),
        iter([1, 2]),
        (each for each in range(3)),
        {1, 2},
        {0: "a", 1: "b"},
        range(3).__iter__(),
    ],
)
def test_what_cannot_be_read_by_index_is_refused(dataset: Any) -> None:
    with pytest.raises(UnseekableDataset, match=type(dataset).__name__) as caught:
        Reader(dataset, CPU)
    assert "map-style" in caught.value.todo_text


# ---- fingerprint


def mark(dataset: Any) -> str:
    return Reader(dataset, CPU).fingerprint()


def test_equal_datasets_have_equal_fingerprints() -> None:
    assert mark(TensorDataset(torch.arange(9.0))) == mark(TensorDataset(torch.arange(9.0)))
    assert mark(Samples(lambda i: torch.rand(3))) == mark(Samples(lambda i: torch.rand(3)))


def test_length_structure_and_content_show_in_the_fingerprint() -> None:
    changed = torch.arange(9.0)
    changed[-1] = 0
    datasets: list[Any] = [
        TensorDataset(torch.arange(9.0)),
        TensorDataset(torch.arange(10.0)),
        TensorDataset(torch.arange(9)),
        TensorDataset(torch.arange(9.0), torch.arange(9)),
        TensorDataset(changed),
        TensorDataset(torch.arange(18.0).reshape(9, 2)),
        Samples(lambda i: torch.zeros(3)),
        Samples(lambda i: torch.zeros(4)),
        Samples(lambda i: torch.zeros(3, dtype=torch.float64)),
        Samples(lambda i: np.zeros(3)),
        Samples(lambda i: {"a": 1}),
        Samples(lambda i: {"b": 1}),
        Samples(lambda i: (1, 2)),
        Samples(lambda i: (1, "2")),
        Samples(lambda i: (1, 2), length=11),
    ]
    assert len({mark(dataset) for dataset in datasets}) == len(datasets)


def test_the_fingerprint_of_any_tensor_can_be_taken() -> None:
    kinds: list[torch.Tensor] = [
        torch.zeros(3, dtype=torch.bool),
        torch.zeros(3, dtype=torch.bfloat16),
        torch.zeros(3, dtype=torch.complex64),
        torch.zeros(3, 0),
        torch.zeros(3, 2, requires_grad=True),
        torch.arange(12).reshape(3, 4).t()[:3],
    ]
    assert len({mark(TensorDataset(tensor)) for tensor in kinds}) == len(kinds)


def test_the_fingerprint_disturbs_no_generator() -> None:
    def noisy(index: int) -> Any:
        return torch.rand(2) * random.random() * np.random.rand()

    def draw() -> tuple[float, float, float]:
        return torch.rand(1).item(), random.random(), np.random.rand()

    seed_everything(5)
    expected = draw()
    seed_everything(5)
    mark(Samples(noisy))
    assert draw() == expected


def test_the_fingerprint_of_an_empty_dataset_reads_nothing() -> None:
    dataset = Samples(lambda i: i, length=0)
    mark(dataset)
    assert dataset.read == []


# ---- randomness


def test_all_generators_follow_the_key() -> None:
    def draw(*key: int) -> tuple[float, float, float]:
        seed_everything(*key)
        return torch.rand(1).item(), random.random(), np.random.rand()

    first = draw(1, 2, 3)
    assert draw(1, 2, 3) == first
    for other in (draw(1, 2, 4), draw(1, 3, 2), draw((1 << 63) - 1, 2, 3)):
        assert all(mine != theirs for mine, theirs in zip(first, other, strict=True))


def test_generators_stand_where_they_stood_also_after_an_error() -> None:
    seed_everything(5)
    expected = torch.rand(1).item(), random.random(), np.random.rand()
    seed_everything(5)

    def disturb() -> None:
        with undisturbed():
            torch.rand(3), random.random(), np.random.rand()
            raise ValueError

    with pytest.raises(ValueError):
        disturb()
    assert (torch.rand(1).item(), random.random(), np.random.rand()) == expected
