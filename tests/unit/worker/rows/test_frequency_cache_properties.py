"""The cache of rows that were read of one version, against a plain dictionary."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardyard.domain.tables.row_ids import partition_of
from shardyard_worker.rows import frequency_cache
from shardyard_worker.rows.dedup import UniqueIds
from shardyard_worker.rows.frequency_cache import FrequencyCache

DIMS = (1, 3)
IDS = st.lists(st.one_of(st.integers(-5, 12), st.integers(-(2**63), 2**63 - 1)), max_size=12, unique=True)
ASKS = st.lists(st.tuples(st.integers(0, 1), IDS), max_size=40)


def row_of(table: int, version: int, number: int) -> np.ndarray:
    """What a row is in a version."""
    return np.random.default_rng(abs(hash((table, version, number)))).standard_normal(DIMS[table]).astype(np.float32)


def rows_of(table: int, version: int, ids: np.ndarray) -> np.ndarray:
    found = [row_of(table, version, int(number)) for number in ids]
    return np.array(found, np.float32).reshape(ids.size, DIMS[table])


@settings(max_examples=300, deadline=None)
@given(st.lists(ASKS, min_size=1, max_size=4), st.integers(1, 20))
def test_a_cache_gives_what_a_dictionary_of_its_version_has_and_the_next_begins_with_the_hottest(
    versions: list[list[tuple[int, list[int]]]], rows_max: int
) -> None:
    hot, plain, asks = FrequencyCache(rows_max), [dict[int, int](), dict[int, int]()], [Counter[int](), Counter[int]()]
    for version, asked in enumerate(versions):
        for table, chosen in asked:
            ids = np.array(chosen, np.int64)
            out = np.full((ids.size, DIMS[table]), np.nan, np.float32)
            lacks, _ = hot.take(table, ids, out)
            missing = np.zeros(ids.size, np.bool_) if lacks is None else lacks
            assert missing.tolist() == [number not in plain[table] for number in chosen]
            assert (out[~missing] == rows_of(table, version, ids[~missing])).all()
            hot.put(table, ids[missing], rows_of(table, version, ids[missing]))
            for number in chosen:
                if number in plain[table] or len(plain[table]) < rows_max:
                    plain[table].setdefault(number, version)
                    asks[table][number] += 1
        assert len(hot) == sum(map(len, plain))
        hottest = hot.hottest(3)
        for table in range(2):
            expected = {number: count // 2 for number, count in asks[table].items() if count >= 2}
            given_now = {
                int(number): int(count)
                for each, counts in hottest
                if each.table == table
                for number, count in zip(each.found.ids, counts, strict=True)
            }
            assert given_now == expected
            asks[table], plain[table] = Counter(expected), dict.fromkeys(expected, version)
        for each, _ in hottest:
            owners = partition_of(each.found.ids, 3)
            assert (np.diff(owners) >= 0).all()
        hot = FrequencyCache(rows_max)
        hot.begin(hottest, [rows_of(each.table, version + 1, each.found.ids) for each, _ in hottest])


def test_rows_are_taken_while_the_hottest_are_sought(monkeypatch: pytest.MonkeyPatch) -> None:
    """That goes through all of a table, and a request waits for nobody."""
    hot, ids = FrequencyCache(100), np.arange(50, dtype=np.int64)
    hot.put(0, ids, rows_of(0, 1, ids))
    hot.take(0, ids, np.empty((50, 1), np.float32))
    real, taken = frequency_cache.unique_ids, []

    def meanwhile(*given: Any) -> UniqueIds:
        request = threading.Thread(target=lambda: taken.append(hot.take(0, ids, np.empty((50, 1), np.float32))))
        request.start()
        request.join(2)
        return real(*given)

    monkeypatch.setattr(frequency_cache, "unique_ids", meanwhile)
    ((asked, _),) = hot.hottest(3)
    assert sorted(asked.found.ids) == ids.tolist()
    assert taken == [(None, 0)]
