"""Ids of a batch, each once: their order, their places, and sums whose bits are those of a plain loop."""

from __future__ import annotations

import numpy as np
import pytest

from shardyard.domain.errors import TooLarge
from shardyard_worker.rows import dedup as module
from shardyard_worker.rows.dedup import IdNumbering, sum_rows, unique_ids

LAST, FIRST = (1 << 63) - 1, -(1 << 63)


def ids_of(*ids: int) -> np.ndarray:
    return np.array(ids, np.int64)


def test_batch_that_is_not_contiguous_or_not_writable_is_the_same_batch() -> None:
    batch = np.arange(40, dtype=np.int64) % 11
    expected = unique_ids(batch[::2].copy())
    locked = batch.copy()
    locked.flags.writeable = False
    for each in (batch[::2], locked[::2]):
        found = unique_ids(each)
        np.testing.assert_array_equal(found.ids, expected.ids)
        np.testing.assert_array_equal(found.places, expected.places)


def test_more_different_ids_than_expected_are_numbered_on() -> None:
    ids = np.random.default_rng(1).permutation(200_000).astype(np.int64)
    numbers = IdNumbering()
    assert numbers.add(ids[:3]).tolist() == [0, 1, 2]
    np.testing.assert_array_equal(numbers.add(ids), np.arange(ids.size))
    np.testing.assert_array_equal(numbers.add(ids[::-1]), np.arange(ids.size)[::-1])
    np.testing.assert_array_equal(numbers.ids, ids)
    assert len(numbers) == ids.size


def test_more_ids_than_there_are_numbers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "NUMBERS_MAX", 40)
    numbers = IdNumbering()
    numbers.add(np.arange(40))
    with pytest.raises(TooLarge, match="more than 40 different ids"):
        numbers.add(ids_of(40))
    assert numbers.find(ids_of(39, 40)).tolist() == [39, -1]


def test_nobody_can_know_where_an_id_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len({int(IdNumbering()._seed) for _ in range(8)}) == 8
    for seed in (b"\0" * 8, b"\xff" * 8):
        monkeypatch.setattr(module.os, "urandom", lambda _, seed=seed: seed)
        found = unique_ids(ids_of(3, 1, 3, 2), 2)
        assert found.ids[found.places].tolist() == [3, 1, 3, 2]


def test_sums_are_taken_in_the_order_of_the_occurrences() -> None:
    rng = np.random.default_rng(2)
    gradients = (rng.standard_normal((500, 9)) * np.exp(5 * rng.standard_normal((500, 1)))).astype(np.float32)
    places = rng.integers(0, 20, 500)
    expected = np.zeros((21, 9), np.float32)
    for gradient, place in zip(gradients, places, strict=True):
        expected[place] += gradient
    assert sum_rows(gradients, places, 21).tobytes() == expected.tobytes()
    backwards = sum_rows(gradients[::-1].copy(), places[::-1].copy(), 21)
    assert backwards.tobytes() != expected.tobytes(), "the order makes no difference here"
