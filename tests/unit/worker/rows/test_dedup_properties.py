"""Whatever ids: each once, in order, and numbers as a dictionary would give them."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shardyard.domain.tables.row_ids import partition_of
from shardyard_worker.rows.dedup import IdNumbering, unique_ids

IDS = st.one_of(st.integers(-(1 << 63), (1 << 63) - 1), st.integers(-5, 5), st.integers(0, 300).map(lambda i: i << 40))


@settings(max_examples=400, deadline=None)
@given(st.lists(IDS, max_size=300), st.integers(1, 9))
def test_distinct_ids_are_those_of_a_set_by_partition_and_ascending(batch: list[int], partitions: int) -> None:
    ids = np.array(batch, np.int64)
    found = unique_ids(ids, partitions)
    owners = partition_of(ids, partitions).tolist()
    assert found.ids.tolist() == [id_ for _, id_ in sorted(set(zip(owners, batch, strict=True)))]
    assert found.ids[found.places].tolist() == batch
    assert found.starts.tolist() == [
        sum(owner < partition for owner, _ in set(zip(owners, batch, strict=True)))
        for partition in range(partitions + 1)
    ]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.lists(IDS, max_size=60)), max_size=8))
def test_numbers_are_those_of_a_dictionary(steps: list[tuple[bool, list[int]]]) -> None:
    numbers, plain = IdNumbering(), {}
    for add, batch in steps:
        ids = np.array(batch, np.int64)
        if add:
            expected = [plain.setdefault(id_, len(plain)) for id_ in batch]
            assert numbers.add(ids).tolist() == expected
        else:
            assert numbers.find(ids).tolist() == [plain.get(id_, -1) for id_ in batch]
        assert numbers.ids.tolist() == list(plain)
