"""Memory of tables: which of it may come in huge pages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shardyard_ps_server.tables.memory import HUGE_BYTES, reserve
from shardyard_ps_server.tables.stripes import BUCKET_BYTES, fitted, length_of

ADVISED = " hg"


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
