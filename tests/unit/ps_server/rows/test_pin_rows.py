"""What a push owes readers that hold rows of a partition: the whole of what it is about to change, or they know."""

from __future__ import annotations

import numpy as np
import pytest

from shardyard.domain.errors import VersionPassed
from shardyard_ps_server.rows.pin_rows import PinRows
from shardyard_ps_server.rows.pinned_rows import put_back
from shardyard_ps_server.rows.previous_rows import PreviousRows
from shardyard_ps_server.values.versions import VersionPin

IDS = np.arange(3, dtype=np.int64)
MANY = 1 << 20


def changed(number: int, row: int) -> PreviousRows:
    """A push that changes one row, which was `number` at that version."""
    return PreviousRows(number, {0: (IDS[row : row + 1], np.full((1, 1), number, np.float32))})


def read(readers: PinRows, wanted: VersionPin, now: float) -> list[float]:
    held = readers.find(wanted)
    assert held is not None
    out = np.full((3, 1), now, np.float32)
    put_back(held.parts(), 0, IDS, out)
    return [float(value) for value in out[:, 0]]


def held(readers: PinRows, number: int, *, newest: int | None = None, former: PreviousRows | None = None) -> VersionPin:
    wanted = VersionPin(number)
    assert readers.hold(wanted, number if newest is None else newest, former)
    return wanted


def test_a_push_of_which_nobody_holds_anything_sets_nothing_aside_and_who_comes_waits_for_its_end() -> None:
    readers = PinRows(MANY)
    assert not readers.want_former(begins=True)
    assert readers.come_too_late
    assert not readers.want_former(begins=False)
    assert readers.end_push(), "somebody may have waited"
    assert not readers.come_too_late


def test_who_comes_in_the_midst_of_a_push_that_sets_aside_reads_what_was_before_it() -> None:
    readers = PinRows(MANY)
    first = held(readers, 5)
    assert readers.want_former(begins=True)
    readers.keep_under_way([changed(5, 1)])
    second = held(readers, 5)
    assert readers.want_former(begins=False)
    readers.keep_under_way([changed(5, 2)])
    assert not readers.end_push()
    third = held(readers, 6)
    assert read(readers, first, 6) == read(readers, second, 6) == [6, 5, 5]
    assert read(readers, third, 6) == [6, 6, 6]


def test_a_push_whose_last_reader_leaves_in_the_midst_lets_nobody_in_until_it_has_counted() -> None:
    readers = PinRows(MANY)
    wanted = held(readers, 5)
    assert readers.want_former(begins=True)
    readers.keep_under_way([changed(5, 1)])
    readers.let_go(wanted)
    assert not readers.want_former(begins=False)
    assert readers.come_too_late
    assert readers.end_push()
    assert not readers
    # the next push begins anew
    held(readers, 6)
    assert readers.want_former(begins=True)


def test_where_there_is_no_memory_all_lose_their_versions_and_who_comes_waits() -> None:
    readers = PinRows(MANY)
    wanted = held(readers, 5)
    assert readers.want_former(begins=True)
    readers.give_up("no memory")
    assert readers.come_too_late
    assert not readers.want_former(begins=False)
    with pytest.raises(VersionPassed, match="no memory"):
        read(readers, wanted, 6)


def test_the_version_before_a_step_can_be_held_and_no_earlier_one() -> None:
    readers = PinRows(MANY)
    former = changed(5, 0)
    assert read(readers, held(readers, 5, newest=6, former=former), 6) == [5, 6, 6]
    assert read(readers, held(readers, 6, newest=6, former=former), 6) == [6, 6, 6]
    assert not readers.hold(VersionPin(4), 6, former)
    assert not readers.hold(VersionPin(5), 6, None)


def test_a_version_that_is_to_come_keeps_what_changes_after_it() -> None:
    readers = PinRows(MANY)
    wanted = held(readers, 7, newest=5)
    for number in range(5, 9):
        readers.keep([changed(number, number % 3)])
    assert read(readers, wanted, 9) == [9, 7, 8]
