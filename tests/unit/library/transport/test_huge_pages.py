"""Mappings whose addresses fit huge pages, and what is left of them."""

from __future__ import annotations

import gc
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shardyard.transport import huge_pages as module
from shardyard.transport.huge_pages import HUGE_BYTES, HugePageMapping

PAGE = mmap.PAGESIZE
READ, WRITE = mmap.PROT_READ, mmap.PROT_READ | mmap.PROT_WRITE


@pytest.fixture
def file() -> Iterator[int]:
    fd = os.memfd_create("mapped")
    os.ftruncate(fd, 4 * HUGE_BYTES)
    yield fd
    os.close(fd)


def mapped() -> str:
    """What of the test's file is mapped into this process, with the reserved ranges that no file has."""
    gc.collect()
    lines = Path("/proc/self/maps").read_text().splitlines()
    return "\n".join(line for line in lines if "memfd:mapped" in line or line.split()[1].startswith("---p 0"))


def huge_bytes(address: int) -> int:
    """Bytes in huge pages of the mapping at an address."""
    found = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.split("-")[0] == f"{address:x}":
            found = True
        if found and line.startswith("ShmemPmdMapped:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"nothing is mapped at {address:x}")


@pytest.mark.long("4097", "4198400")
@pytest.mark.parametrize("nbytes", [1, PAGE, PAGE + 1, HUGE_BYTES, 2 * HUGE_BYTES + PAGE])
def test_address_fits_and_nothing_is_left(file: int, nbytes: int) -> None:
    before = mapped()
    found = HugePageMapping(file, nbytes, flags=mmap.MAP_SHARED, protection=WRITE)
    assert (found.address % HUGE_BYTES, len(found.bytes), found.bytes.ctypes.data) == (0, nbytes, found.address)
    assert mapped().count("memfd:mapped") == 1
    found.bytes[-1] = 7
    assert os.pread(file, 1, nbytes - 1) == b"\x07"
    values = found.bytes[:1]
    del found
    assert mapped().count("memfd:mapped") == 1  # an array still lies there
    assert values[0] in (0, 7)
    del values
    assert mapped() == before


def test_what_may_only_be_read_cannot_be_written(file: int) -> None:
    found = HugePageMapping(file, PAGE, flags=mmap.MAP_SHARED, protection=READ)
    with pytest.raises(ValueError, match="read-only"):
        found.bytes[0] = 1


def test_private_mapping_keeps_its_writes_to_itself(file: int) -> None:
    found = HugePageMapping(file, PAGE, flags=mmap.MAP_PRIVATE, protection=WRITE)
    found.bytes[0] = 1
    assert os.pread(file, 1, 0) == b"\x00"


def test_file_that_cannot_be_mapped_leaves_nothing() -> None:
    before = mapped()
    with pytest.raises(OSError, match="Bad file descriptor"):
        HugePageMapping(-1, PAGE, flags=mmap.MAP_SHARED, protection=WRITE)
    assert mapped() == before


def test_advice_that_is_no_advice_is_an_error(file: int) -> None:
    found = HugePageMapping(file, PAGE, flags=mmap.MAP_SHARED, protection=WRITE)
    with pytest.raises(OSError, match="Invalid argument"):
        found.madvise(99_999, 0, PAGE)


def test_whole_huge_pages_of_a_range_are_made_and_hold_what_they_held(file: int) -> None:
    found = HugePageMapping(file, 4 * HUGE_BYTES, flags=mmap.MAP_SHARED, protection=WRITE)
    pattern = np.arange(len(found.bytes) // 8)
    found.bytes.view(np.int64)[:] = pattern
    made = found.collapse(PAGE, 3 * HUGE_BYTES)
    assert huge_bytes(found.address) == (2 * HUGE_BYTES if made else 0)
    assert np.array_equal(found.bytes.view(np.int64), pattern)


def test_range_without_a_whole_huge_page_has_none(file: int) -> None:
    found = HugePageMapping(file, 4 * HUGE_BYTES, flags=mmap.MAP_SHARED, protection=WRITE)
    found.bytes[:] = 1
    assert not found.collapse(PAGE, 2 * HUGE_BYTES - PAGE - 1)
    assert not found.collapse(0, 0)
    assert huge_bytes(found.address) == 0


def test_kernel_that_makes_no_huge_pages_does_without(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MADV_COLLAPSE", 99_999)
    found = HugePageMapping(file, HUGE_BYTES, flags=mmap.MAP_SHARED, protection=WRITE)
    found.bytes[:] = 5
    assert not found.collapse(0, HUGE_BYTES)
    assert set(found.bytes) == {5}
