"""What a push owes readers that hold rows of a partition: the whole of what it is about to change, or they know."""

from __future__ import annotations

import numpy as np
import pytest

from shardyard.domain.errors import VersionPassed
from shardyard_ps_server.rows.row_overlay import RowDiff, RowOverlay, put_back
from shardyard_ps_server.values.versions import VersionPin

IDS = np.arange(3, dtype=np.int64)
MANY = 1 << 20


def changed(number: int, row: int) -> RowDiff:
    """A push that changes one row, which was `number` at that version."""
    return RowDiff(number, {0: (IDS[row : row + 1], np.full((1, 1), number, np.float32))})


def read(readers: RowOverlay, wanted: VersionPin, now: float) -> list[float]:
    held = readers.find(wanted)
    assert held is not None
    out = np.full((3, 1), now, np.float32)
    put_back(held.diffs(), 0, IDS, out)
    return [float(value) for value in out[:, 0]]


def held(readers: RowOverlay, number: int, *, newest: int | None = None) -> VersionPin:
    wanted = VersionPin(number)
    assert readers.pin(wanted, number if newest is None else newest)
    return wanted


def test_a_push_of_which_nobody_holds_anything_sets_nothing_aside_and_who_comes_waits_for_its_end() -> None:
    readers = RowOverlay(MANY, keeps_last=False)
    assert not readers.wants_diff(begins=True)
    assert readers.is_unsaved
    assert not readers.wants_diff(begins=False)
    assert readers.end_update(), "somebody may have waited"
    assert not readers.is_unsaved


def test_who_comes_in_the_midst_of_a_push_that_sets_aside_reads_what_was_before_it() -> None:
    readers = RowOverlay(MANY, keeps_last=False)
    first = held(readers, 5)
    assert readers.wants_diff(begins=True)
    readers.add([changed(5, 1)], begins=True)
    second = held(readers, 5)
    assert readers.wants_diff(begins=False)
    readers.add([changed(5, 2)], begins=False)
    assert not readers.end_update()
    third = held(readers, 6)
    assert read(readers, first, 6) == read(readers, second, 6) == [6, 5, 5]
    assert read(readers, third, 6) == [6, 6, 6]


def test_a_push_whose_last_reader_leaves_in_the_midst_lets_nobody_in_until_it_has_counted() -> None:
    readers = RowOverlay(MANY, keeps_last=False)
    wanted = held(readers, 5)
    assert readers.wants_diff(begins=True)
    readers.add([changed(5, 1)], begins=True)
    readers.unpin(wanted)
    assert not readers.wants_diff(begins=False)
    assert readers.is_unsaved
    assert readers.end_update()
    assert readers.last is None
    assert not readers.nbytes
    # the next push begins anew
    held(readers, 6)
    assert readers.wants_diff(begins=True)


def test_where_there_is_no_memory_all_lose_their_versions_and_who_comes_waits() -> None:
    readers = RowOverlay(MANY, keeps_last=False)
    wanted = held(readers, 5)
    assert readers.wants_diff(begins=True)
    readers.give_up("no memory")
    assert readers.is_unsaved
    assert not readers.wants_diff(begins=False)
    with pytest.raises(VersionPassed, match="no memory"):
        read(readers, wanted, 6)


def test_the_version_before_a_step_can_be_held_and_no_earlier_one() -> None:
    readers = RowOverlay(MANY, keeps_last=True)
    assert not readers.pin(VersionPin(5), 6)
    readers.add([changed(5, 0)], begins=True)
    assert not readers.end_update()
    assert read(readers, held(readers, 5, newest=6), 6) == [5, 6, 6]
    assert read(readers, held(readers, 6, newest=6), 6) == [6, 6, 6]
    assert not readers.pin(VersionPin(4), 6)


def test_a_version_that_is_to_come_keeps_what_changes_after_it() -> None:
    readers = RowOverlay(MANY, keeps_last=True)
    wanted = held(readers, 7, newest=5)
    for number in range(5, 9):
        readers.add([changed(number, number % 3)], begins=True)
    assert read(readers, wanted, 9) == [9, 7, 8]
