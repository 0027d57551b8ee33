"""Where versions stand: buffers in memory that others can read and nobody else can write, or private ones."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from shardyard.domain.errors import NotShareable, TooLarge
from shardyard.domain.limits import BLOCK_ALIGN_BYTES
from shardyard.domain.pulls import ShmHandle, ShmLocation
from shardyard.transport.shared_memory import AttachedMemory, SharedMemory, attach
from shardyard_ps_server.values import shm_regions as module
from shardyard_ps_server.values.shm_regions import VERSIONS_PER_REGION, ShmRegions
from shardyard_ps_server.values.versions import Bytes

PAGE = mmap.PAGESIZE


@contextmanager
def closing_all(tickets: tuple[ShmHandle, ...]) -> Iterator[tuple[ShmHandle, ...]]:
    yield tickets
    for ticket in tickets:
        os.close(ticket.fd)


def taken(regions: ShmRegions, nbytes: int) -> tuple[Bytes, ShmLocation]:
    buffer, place = regions.take(nbytes)
    assert place is not None
    return buffer, place


def test_buffer_is_found_at_its_place_by_who_attaches() -> None:
    regions = ShmRegions(3 * PAGE)
    for number in range(1, 6):
        buffer, place = taken(regions, PAGE + 100)
        assert buffer.shape == (PAGE + 100,)
        buffer[:] = number
        with closing_all(regions.tickets()) as tickets:
            found = attach(tickets[place.region]).bytes[place.at : place.at + len(buffer)]
        assert set(found) == {number}
    regions.close()


def test_buffers_begin_at_a_page_and_never_overlap() -> None:
    regions, sizes = ShmRegions(4 * PAGE), [64, PAGE, PAGE + 1, 3 * PAGE, 64]
    spans = []
    for nbytes in sizes * 4:
        buffer, place = taken(regions, nbytes)
        assert place.at % PAGE == 0
        assert buffer.ctypes.data % PAGE == 0
        assert buffer.ctypes.data % BLOCK_ALIGN_BYTES == 0
        spans.append((place.region, place.at, place.at + nbytes))
    for (region, _, end), (next_region, begin, _) in zip(sorted(spans), sorted(spans)[1:], strict=False):
        assert region != next_region or end <= begin
    with closing_all(regions.tickets()) as tickets:
        for region, _, end in spans:
            assert end <= tickets[region].nbytes
    regions.close()


def test_full_region_is_followed_by_another_which_is_told_on() -> None:
    regions = ShmRegions(PAGE)
    for number in range(2 * VERSIONS_PER_REGION + 1):
        _, place = taken(regions, PAGE)
        assert place == ShmLocation(number // VERSIONS_PER_REGION, number % VERSIONS_PER_REGION * PAGE)
    for known in (0, 1):
        with closing_all(regions.tickets(known=known)) as tickets:
            assert [ticket.region for ticket in tickets] == [0, 1, 2][known:]
    assert regions.tickets(known=3) == ()
    regions.close()


def test_buffer_larger_than_a_region_gets_one_of_its_own() -> None:
    regions = ShmRegions(PAGE)
    nbytes = 2 * VERSIONS_PER_REGION * PAGE
    buffer, place = taken(regions, nbytes)
    assert len(buffer) == nbytes
    assert place.at == 0
    regions.close()


def test_nobody_else_can_write_to_a_region() -> None:
    regions = ShmRegions(PAGE)
    taken(regions, PAGE)
    with closing_all(regions.tickets()) as (ticket,), pytest.raises(PermissionError):
        mmap.mmap(ticket.fd, ticket.nbytes)
    regions.close()


def test_partition_without_values_needs_no_place() -> None:
    regions = ShmRegions(PAGE)
    buffer, place = regions.take(0)
    assert len(buffer) == 0
    assert place is None
    assert regions.tickets() == ()


def test_closed_regions_cannot_be_attached_and_what_was_taken_can_be_used() -> None:
    regions = ShmRegions(PAGE)
    buffer, _ = taken(regions, PAGE)
    with closing_all(regions.tickets()) as tickets:
        attached: AttachedMemory = attach(tickets[0])
    regions.close()
    buffer[:] = 5
    assert set(attached.bytes[:PAGE]) == {5}
    with pytest.raises(NotShareable, match="not shared any more"):
        regions.tickets()


def test_without_shared_memory_buffers_are_private(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SharedMemory", lambda *_, **__: pytest.fail("memory was shared"))
    regions = ShmRegions(PAGE, shareable=False)
    buffer, place = regions.take(PAGE)
    assert (len(buffer), place, regions.tickets()) == (PAGE, None, ())


def test_where_the_system_forbids_it_buffers_are_private_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def forbidden(nbytes: int, **_: object) -> SharedMemory:
        asked.append(nbytes)
        raise NotShareable("a container forbids it")

    regions = ShmRegions(PAGE)
    monkeypatch.setattr(module, "SharedMemory", forbidden)
    for _ in range(3):
        buffer, place = regions.take(PAGE)
        buffer[:] = 1
        assert place is None
    assert len(asked) == 1
    assert regions.tickets() == ()


def test_pages_that_are_not_there_are_refused_and_their_place_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    regions = ShmRegions(PAGE)
    with monkeypatch.context() as patch:

        def full(*_: object) -> None:
            raise TooLarge("no memory")

        patch.setattr(SharedMemory, "populate", full)
        with pytest.raises(TooLarge):
            regions.take(PAGE)
    assert taken(regions, PAGE)[1] == ShmLocation(0, 0)
    regions.close()


def test_threads_that_take_at_once_get_memory_of_their_own() -> None:
    regions, found, barrier = ShmRegions(PAGE), [], threading.Barrier(4)

    def take(number: int) -> None:
        barrier.wait(10)
        for _ in range(20):
            buffer, place = taken(regions, PAGE)
            buffer[:] = number
            found.append((number, place, buffer))

    threads = [threading.Thread(target=take, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len({place for _, place, _ in found}) == len(found) == 80
    assert all(np.all(buffer == number) for number, _, buffer in found)
    regions.close()
