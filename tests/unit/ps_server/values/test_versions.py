"""A partition's versions: which buffers may be read, and which written (docs/internals/ledger.md, rule B3)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shardyard.domain.errors import TooLarge
from shardyard.domain.ids import Version
from shardyard.domain.limits import BLOCK_ALIGN_BYTES
from shardyard_ps_server.values.versions import KEPT, Bytes, Versions, aligned_empty

NBYTES = 128


def blank(versions: Versions) -> Bytes:
    idle = versions.take_idle()
    return versions.allocate() if idle is None else idle


def publish(versions: Versions, fill: int) -> Bytes:
    buffer = blank(versions)
    buffer[:] = fill
    versions.publish(buffer)
    return buffer


def test_first_version_is_number_zero_of_life_one_and_all_zero() -> None:
    versions = Versions(NBYTES)
    assert versions.newest == Version(1, 0)
    assert versions.values.tobytes() == bytes(NBYTES)


def test_rule_b3_last_two_versions_are_kept_and_older_ones_are_gone() -> None:
    versions = Versions(NBYTES)
    for fill in range(1, 6):
        publish(versions, fill)
    assert versions.newest == Version(1, 5)
    newest, former = versions.find(5), versions.find(4)
    assert newest is versions.values
    assert former is not None
    assert newest is not None
    assert set(newest) == {5}
    assert set(former) == {4}
    assert versions.find(3) is None
    assert versions.find(6) is None


def test_rule_b3_version_that_is_kept_is_not_written_by_the_next() -> None:
    versions = Versions(NBYTES)
    publish(versions, 1)
    publish(versions, 2)
    blank(versions)[:] = 99
    former = versions.find(1)
    assert former is not None
    assert set(former) == {1}
    assert set(versions.values) == {2}


def test_buffer_that_is_held_is_never_handed_out() -> None:
    versions = Versions(NBYTES)
    held = publish(versions, 1)
    versions.hold(held)
    for fill in range(2, 12):
        assert publish(versions, fill) is not held
    assert set(held) == {1}


def test_buffer_held_twice_stays_until_both_have_released_it() -> None:
    versions = Versions(NBYTES)
    held = publish(versions, 1)
    versions.hold(held)
    versions.hold(held)
    for fill in (2, 3, 4):
        publish(versions, fill)
    versions.release(held)
    assert all(publish(versions, fill) is not held for fill in (5, 6, 7))
    versions.release(held)
    assert any(publish(versions, fill) is held for fill in (8, 9, 10))


def test_version_released_while_it_is_kept_is_still_kept() -> None:
    versions = Versions(NBYTES)
    held = publish(versions, 1)
    versions.hold(held)
    versions.release(held)
    assert blank(versions) is not held
    assert versions.find(1) is held


def test_without_readers_one_buffer_more_than_kept_is_enough() -> None:
    versions = Versions(NBYTES)
    buffers = [versions.values, *(publish(versions, fill) for fill in range(20))]
    assert len({id(buffer) for buffer in buffers}) == KEPT + 1


@pytest.mark.parametrize("nbytes", [1, 63, 64, 1000])
def test_buffers_are_aligned_and_of_the_length_asked_for(nbytes: int) -> None:
    assert aligned_empty(0).size == 0
    for _ in range(8):
        buffer = aligned_empty(nbytes)
        assert buffer.size == nbytes
        assert buffer.ctypes.data % BLOCK_ALIGN_BYTES == 0


def test_memory_that_is_not_there_is_refused_in_words() -> None:
    with pytest.raises(TooLarge, match=f"{1 << 62} bytes, for which this server has no memory"):
        aligned_empty(1 << 62)


class Readers(RuleBasedStateMachine):
    """Readers come and go while versions are made; each buffer's bytes are a number of its own. A version may have the
    buffer of the one before, and the newest version may get another."""

    READERS_MAX = 4

    def __init__(self) -> None:
        super().__init__()
        self.versions = Versions(NBYTES)
        self.number = self.fill = 0
        self.fills = {0: 0}
        self.held: list[tuple[int, Bytes]] = []
        self.seen: dict[int, Bytes] = {id(self.versions.values): self.versions.values}

    def _blank(self) -> Bytes:
        buffer = blank(self.versions)
        assert all(buffer is not held for _, held in self.held)
        self.seen[id(buffer)] = buffer
        self.fill += 1
        buffer.view(np.int64)[:] = self.fill
        return buffer

    def _publish(self, buffer: Bytes) -> None:
        self.number += 1
        assert self.versions.publish(buffer) == Version(1, self.number)

    @rule()
    def make_a_version(self) -> None:
        self._publish(self._blank())
        self.fills[self.number] = self.fill

    @rule()
    def make_a_version_of_the_same_values(self) -> None:
        self._publish(self.versions.values)
        self.fills[self.number] = self.fills[self.number - 1]

    @rule()
    def replace_the_newest(self) -> None:
        self.versions.replace(self._blank())
        self.fills[self.number] = self.fill

    @precondition(lambda self: len(self.held) < self.READERS_MAX)
    @rule(back=st.integers(0, KEPT))
    def begin_to_read(self, back: int) -> None:
        number = self.number - back
        buffer = self.versions.find(number)
        assert (buffer is not None) == (back < KEPT and number >= 0)
        if buffer is not None:
            self.versions.hold(buffer)
            self.held.append((self.fills[number], buffer))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def end_reading(self, data: st.DataObject) -> None:
        _, buffer = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.versions.release(buffer)

    @invariant()
    def what_is_read_or_kept_has_its_own_bytes(self) -> None:
        for fill, buffer in self.held:
            assert set(buffer.view(np.int64)) == {fill}
        for number in range(max(0, self.number - KEPT + 1), self.number + 1):
            kept = self.versions.find(number)
            assert kept is not None
            assert set(kept.view(np.int64)) == {self.fills[number]}

    @invariant()
    def buffers_are_bounded_by_the_readers(self) -> None:
        assert len(self.seen) <= KEPT + 1 + self.READERS_MAX


Readers.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.filter_too_much]
)
TestReaders = Readers.TestCase
