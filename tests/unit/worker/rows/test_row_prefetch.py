"""Rows that came ahead: which of them a forward takes, and which it lacks."""

from __future__ import annotations

import numpy as np
import pytest

from shardyard.domain.ids import PartitionId
from shardyard_worker.rows import row_prefetch
from shardyard_worker.rows.dedup import unique_ids
from shardyard_worker.rows.row_prefetch import RowPrefetch, RowQuery, part_of

PARTITIONS, DIM = 4, 2
OWNED = tuple(PartitionId(p) for p in range(PARTITIONS))


def come(ids: np.ndarray) -> RowPrefetch:
    """All of them, from two servers; a row is its id, twice."""
    found = unique_ids(ids, PARTITIONS)
    made = RowPrefetch([RowQuery(7, unique_ids(ids[:1], PARTITIONS), DIM), RowQuery(3, found, DIM)])
    for owned in OWNED[:1], OWNED[1:]:
        question = made.question(owned)
        if question is None:
            continue
        sent = [
            np.repeat(each.found.ids[begin:end, None], DIM, 1).astype(np.float32).tobytes()
            for each, begin, end in [(made._asked[look_up], begin, end) for look_up, begin, end in question.answers]
        ]
        data = memoryview(b"".join(sent))
        at = 0
        for place in made.places(question):
            place[:] = data[at : at + len(place)]
            at += len(place)
        assert at == len(data)
    return made


@pytest.mark.parametrize("seed", range(8))
def test_rows_that_came_are_taken_and_the_others_are_told(seed: int) -> None:
    random = np.random.default_rng(seed)
    there = random.integers(-40, 40, 30)
    ahead = come(there)
    for wanted in (there, there[: seed + 1], random.integers(-60, 60, 25), np.arange(100, 140), np.arange(0)):
        found = unique_ids(wanted, PARTITIONS)
        rows, lacking = ahead.take(3, found, DIM)
        lacks = np.zeros(found.ids.size, np.bool_) if lacking is None else lacking
        assert (lacks == ~np.isin(found.ids, there)).all()
        assert rows.shape == (found.ids.size, DIM)
        assert (rows[~lacks] == found.ids[~lacks, None]).all()


def test_of_another_table_none_has_come() -> None:
    found = unique_ids(np.arange(9), PARTITIONS)
    rows, lacking = come(np.arange(9)).take(4, found, 5)
    assert rows.shape == (9, 5)
    assert lacking is not None
    assert lacking.all()


def test_a_part_of_distinct_ids_stands_by_partition() -> None:
    found = unique_ids(np.arange(50), PARTITIONS)
    chosen = found.ids % 3 == 0
    part, expected = part_of(found, chosen), unique_ids(np.arange(0, 50, 3), PARTITIONS)
    assert (part.ids == expected.ids).all()
    assert (part.starts == expected.starts).all()


def test_what_one_answer_has_no_room_for_is_not_asked_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [RowQuery(0, unique_ids(np.arange(5), 1), 4), RowQuery(1, unique_ids(np.arange(3), 1), 8)]
    monkeypatch.setattr(row_prefetch, "ROWS_ALONG_BYTES_MAX", 5 * 16 + 3 * 32)
    assert RowPrefetch.fit(asked)
    monkeypatch.setattr(row_prefetch, "ROWS_ALONG_BYTES_MAX", 5 * 16 + 3 * 32 - 1)
    assert not RowPrefetch.fit(asked)
