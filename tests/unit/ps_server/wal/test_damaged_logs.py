"""A damaged or missing log is refused, and the error names the file. A torn end is cut off."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from shardyard.domain.errors import (
    LogDamaged,
    StorageUnavailable,
)
from shardyard.domain.ids import Incarnation, Token
from shardyard.domain.push_names import SourceKey
from shardyard.runtime.waits import WaitRegistry
from shardyard_ps_server.values.versions import aligned_empty
from shardyard_ps_server.wal.records import (
    RECORD_HEADER_BYTES,
    SEGMENT_HEADER_BYTES,
    Mark,
    RecordKind,
    encode_mark,
)
from shardyard_ps_server.wal.replay import open_head, push_head
from shardyard_ps_server.wal.segments import END, FENCED, SYNCED
from shardyard_ps_server.wal.wal import Wal
from tests.support.servers_with_logs import (
    FIRST,
    JOB,
    SECOND,
    SHARD,
    THIRD,
    Crashed,
    Yard,
    log_of,
    order_of,
    payload_of,
    push,
    state,
)


def test_any_bit_that_flipped_is_found_and_named(crashed: Crashed) -> None:
    yard, saved, before = crashed
    files = log_of(yard)
    whole = files.segment(2).read_bytes()
    synced = (files.folder / SYNCED).read_bytes()
    rng = random.Random(1)
    places = [(files.segment(2), whole, at) for at in rng.sample(range(len(whole)), 250)]
    places += [(files.folder / SYNCED, synced, at) for at in range(len(synced))]
    for index, (path, data, at) in enumerate(places):
        flipped = bytearray(data)
        flipped[at] ^= 1 << rng.randrange(8)
        path.write_bytes(flipped)
        for name in (FENCED, END):
            (files.folder / name).unlink(missing_ok=True)
        with pytest.raises(LogDamaged, match=str(path)) as caught:
            yard.successor(saved, 2, FIRST, incarnation=Incarnation(100 + index))
        assert int(caught.value.facts["offset"]) <= at
        path.write_bytes(data)
    (files.folder / END).unlink(missing_ok=True)
    assert state(yard.successor(saved, 2, FIRST)) == before


def test_a_log_that_lost_its_durable_end_is_damaged(crashed: Crashed) -> None:
    yard, saved, _ = crashed
    path = log_of(yard).segment(2)
    whole = path.read_bytes()
    for index, length in enumerate(random.Random(2).sample(range(len(whole)), 60)):
        path.write_bytes(whole[:length])
        with pytest.raises(LogDamaged, match=str(path)):
            yard.successor(saved, 2, FIRST, incarnation=Incarnation(100 + index))


def test_a_torn_tail_is_cut_off(crashed: Crashed) -> None:
    """As kill -9 leaves it, between a write and its sync: any part of a record that nobody was told of."""
    yard, saved, before = crashed
    files = log_of(yard)
    whole = files.segment(2).read_bytes()
    record = whole[SEGMENT_HEADER_BYTES : SEGMENT_HEADER_BYTES + (len(whole) - SEGMENT_HEADER_BYTES) // 4]
    for index, tail in enumerate((record[:1], record[:RECORD_HEADER_BYTES], record[:-1], record, b"\0" * 500)):
        files.segment(2).write_bytes(whole + tail)
        (files.folder / END).unlink(missing_ok=True)
        assert state(yard.successor(saved, 2, FIRST, incarnation=Incarnation(100 + index))) == before


def test_a_missing_segment_is_named(crashed: Crashed) -> None:
    yard, saved, _ = crashed
    files = log_of(yard)
    shutil.move(files.segment(2), files.segment(1))
    with pytest.raises(LogDamaged, match="000000000002"):
        yard.successor(saved, 2, FIRST)


def test_a_segment_missing_in_the_middle_is_named(yard: Yard) -> None:
    first, saved = yard.begun()
    for number in (3, 4):
        push(first, number - 3)
        yard.save(first, number)
    log_of(yard).segment(3).unlink()
    with pytest.raises(LogDamaged, match=r"0004\.log at byte 0: it does not follow segment 2"):
        yard.successor(saved, 2, FIRST)


def test_a_segment_of_another_log_is_named(crashed: Crashed, tmp_path: Path) -> None:
    yard, saved, _ = crashed
    other = Yard(tmp_path / "other")
    second = other.first(SECOND)
    other.save(second, 2)
    shutil.copy(log_of(other, SECOND).segment(2), log_of(yard).segment(2))
    (log_of(yard).folder / SYNCED).write_bytes(encode_mark(Mark(2, SEGMENT_HEADER_BYTES)))
    with pytest.raises(LogDamaged, match="of server 5"):
        yard.successor(saved, 2, FIRST)
    other.close()


def test_a_log_that_is_elsewhere_is_said_to_be(yard: Yard, tmp_path: Path) -> None:
    _, saved = yard.begun()
    shutil.move(log_of(yard).folder, tmp_path / "away")
    with pytest.raises(StorageUnavailable, match="server 3 is not at"):
        yard.successor(saved, 2, FIRST)


def test_a_record_that_does_not_follow_is_damage(crashed: Crashed) -> None:
    """A whole record in the middle, with good checksums, that names work beyond the next."""
    yard, saved, _ = crashed
    wal = Wal(yard.logs.log(JOB, THIRD), segment=2, on_failure=yard.failures.append, wait_registry=WaitRegistry())
    first = yard._stores[0]
    order = order_of(first, 2)
    with wal.order:
        wal.append(RecordKind.OPEN, open_head([(SourceKey(SHARD), Token(1))]), aligned_empty(0))
        ticket = wal.append(RecordKind.PUSH, push_head(order), payload_of(order))
    wal.sync(ticket)
    wal.close()
    with pytest.raises(LogDamaged, match="does not fit what came before"):
        yard.successor(saved, 2, THIRD)
