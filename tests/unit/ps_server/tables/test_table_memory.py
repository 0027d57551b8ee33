"""Memory of tables: which of it may come in huge pages, and when."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shardyard.domain.tables.row_optimizers import make_group
from shardyard.domain.tables.table_settings import TableSettings
from shardyard_ps_server.tables.memory.address_space import HUGE_BYTES, Pages, populate, reserve
from shardyard_ps_server.tables.stripes import BUCKET_BYTES, Stripes, fitted, length_of
from shardyard_ps_server.tables.table import Table

ADVISED = " hg"
POPULATES = tuple(map(int, os.uname().release.split(".")[:2])) >= (5, 14)
"""Whether the system knows how; else pages come when they are touched."""
PAGE = 4_096


def mappings() -> Iterator[tuple[int, int, bool]]:
    """Of this process: (begin, end, whether it was advised to be in huge pages)."""
    begin = end = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split(" ", 1)[0]
        if not first.endswith(":"):
            begin, end = (int(each, 16) for each in first.split("-"))
        elif first == "VmFlags:":
            yield begin, end, ADVISED in line


def advised(array: np.ndarray) -> int:
    """Bytes of it that were advised to be in huge pages, from its end backwards."""
    begin, end = array.ctypes.data, array.ctypes.data + array.nbytes
    found = [(max(first, begin), min(last, end), huge) for first, last, huge in mappings() if first < end <= last]
    assert len(found) == 1
    first, last, huge = found[0]
    return last - first if huge else 0


@pytest.mark.parametrize("homes", [130_000, 140_000, 257_993, 333_000])
def test_stripes_that_fill_their_huge_pages_lie_in_them_to_the_last(homes: int) -> None:
    nbytes = length_of(fitted(homes)) * BUCKET_BYTES
    assert -nbytes % HUGE_BYTES < HUGE_BYTES // 4
    room = reserve(nbytes, np.uint64, small_bytes=0)
    assert room.ctypes.data % HUGE_BYTES == 0
    assert advised(room) == nbytes
    room[:] = 1
    assert int(room.sum()) == room.size


@pytest.mark.parametrize(
    ("nbytes", "small_bytes", "expected"),
    [
        (HUGE_BYTES // 2, 0, 0),
        (HUGE_BYTES + 4_096, HUGE_BYTES, 0),
        (3 * HUGE_BYTES, HUGE_BYTES, 2 * HUGE_BYTES),
        (3 * HUGE_BYTES - 64, HUGE_BYTES, 2 * HUGE_BYTES - 64),
    ],
)
def test_what_is_small_or_would_leave_most_of_a_huge_page_empty_comes_in_small_pages(
    nbytes: int, small_bytes: int, expected: int
) -> None:
    room = reserve(nbytes, np.uint8, small_bytes=small_bytes)
    assert advised(room) == expected
    room[:] = 7
    assert int(room.min()) == 7


def resident(array: np.ndarray, begin: int, end: int) -> int:
    """How many of its pages between two bytes are there."""
    with open("/proc/self/pagemap", "rb") as pages:
        pages.seek((array.ctypes.data + begin) // PAGE * 8)
        entries = np.frombuffer(pages.read((end - begin) // PAGE * 8), np.uint64)
    return int((entries >> np.uint64(63)).sum())


def test_pages_that_are_asked_for_are_there_and_keep_what_they_hold() -> None:
    room = reserve(8 * HUGE_BYTES, np.uint8)
    room[: 3 * HUGE_BYTES] = 7
    begin, end = 2 * HUGE_BYTES + 5 * PAGE, 6 * HUGE_BYTES - 3 * PAGE
    populate(room, begin, end)
    if POPULATES:
        assert resident(room, begin, end) == (end - begin) // PAGE
    assert resident(room, 6 * HUGE_BYTES, 8 * HUGE_BYTES) == 0
    assert int(room[: 3 * HUGE_BYTES].min()) == 7
    assert int(room[3 * HUGE_BYTES :].max()) == 0


def test_pages_come_before_rows_a_huge_page_at_least_and_no_further_than_there_are_rows() -> None:
    rows = reserve(4 * HUGE_BYTES, np.float32).reshape(-1, 64)
    whole, in_a_huge_page = rows.reshape(-1).view(np.uint8), HUGE_BYTES // 256
    pages = Pages(rows)
    pages.make_ready(in_a_huge_page)
    assert resident(whole, 0, whole.nbytes) == 0, "the first come one by one"
    pages.make_ready(in_a_huge_page + 1)
    if POPULATES:
        assert resident(whole, 0, whole.nbytes) == HUGE_BYTES // PAGE
    pages.make_ready(10 * in_a_huge_page)
    if POPULATES:
        assert resident(whole, 0, whole.nbytes) == 3 * HUGE_BYTES // PAGE


def test_rows_of_a_push_have_their_pages_before_a_stripe_is_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table(TableSettings("t", 64, "sgd", make_group("sgd", {"lr": 0.1}), 1, rows_max=1 << 20))
    slab = table.state.memory.slab.reshape(-1).view(np.uint8)
    row_bytes = 64 * 4
    ids = np.arange(60_000, dtype=np.int64)
    table.push(ids[:20_000], np.zeros((20_000, 64), np.float32), 1)
    table.push(ids[20_000:20_001], np.zeros((1, 64), np.float32), 2)
    there = resident(slab, HUGE_BYTES, 1 << 26)
    assert there * PAGE >= 20_001 * row_bytes - HUGE_BYTES - PAGE
    assert there * PAGE <= 20_001 * row_bytes + HUGE_BYTES  # no more than a huge page that nobody has asked for
    found: list[int] = []
    real = Stripes.make_room

    def make_room(stripes: Stripes, stripe: int) -> None:
        found.append(resident(slab, HUGE_BYTES, 1 << 26))
        real(stripes, stripe)

    monkeypatch.setattr(Stripes, "make_room", make_room)
    table.push(ids[20_000:], np.zeros((40_000, 64), np.float32), 3)
    assert not POPULATES or found[0] * PAGE >= 60_000 * row_bytes - HUGE_BYTES - PAGE
