"""The coordinator's journal on disk and in memory."""

from __future__ import annotations

import os
import random
import resource
import shutil
import sqlite3
from pathlib import Path

import pytest

from shardyard.domain.errors import ConfigurationError, StorageUnavailable
from shardyard_coordinator.records import Record
from shardyard_coordinator.service.journal import FILE, FORMAT, LOCK, ROOM_BYTES, TERMS_KEPT, Journal

WAL = FILE + "-wal"
FLIPS = 1_000
SQLITE_FREE_PAGES_AT = 36
TRUNCATIONS = 100
APPENDED_MAX = 500


def test_records_are_there_when_the_journal_is_opened_again(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "state", wall_clock=lambda: 12.5)
    journal.append([("one", {"a": 1}), ("two", {"b": [1, 2]})])
    journal.close()
    again = Journal(tmp_path / "state")
    records = again.records()
    again.close()
    assert [(each.number, each.term, each.time, each.kind, each.body) for each in records] == [
        (1, 1, 12.5, "one", {"a": 1}),
        (2, 1, 12.5, "two", {"b": [1, 2]}),
    ]


def test_each_opening_has_a_higher_term(tmp_path: Path) -> None:
    terms = []
    for _ in range(3):
        journal = Journal(tmp_path)
        terms.append(journal.term)
        journal.close()
    assert terms == [1, 2, 3]


def test_second_coordinator_on_one_journal_is_refused_and_told_who_has_it(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    try:
        with pytest.raises(ConfigurationError, match=f"in use by process {os.getpid()}.*another folder") as caught:
            Journal(tmp_path)
        assert caught.value.facts == {"pid": str(os.getpid())}
    finally:
        journal.close()
    Journal(tmp_path).close()


def test_failed_append_leaves_no_record(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    with pytest.raises(TypeError):
        journal.append([("good", {}), ("bad", {"x": object()})])
    journal.append([("next", {})])
    assert [each.kind for each in journal.records()] == ["next"]
    journal.close()


def append_until_refused(journal: Journal) -> int:
    body = {"job": 1, "feed": 0, "epoch": 0, "index": 9, "worker": 1 << 32, "token": 77, "first": 0}
    for number in range(APPENDED_MAX):
        try:
            journal.append([("data_leased", body)])
        except sqlite3.Error:
            return number
    return APPENDED_MAX


@pytest.mark.parametrize("with_room", [False, True])
def test_journal_takes_records_while_its_files_cannot_grow(tmp_path: Path, with_room: bool) -> None:
    journal = Journal(tmp_path)
    if with_room:
        journal.make_room()
        assert journal.room_bytes() >= ROOM_BYTES
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    written = max((tmp_path / name).stat().st_size for name in (FILE, WAL))
    resource.setrlimit(resource.RLIMIT_FSIZE, (written, unlimited[1]))
    try:
        taken = append_until_refused(journal)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert taken == APPENDED_MAX if with_room else taken < 100
    journal.close()
    again = Journal(tmp_path)
    assert len(again.records()) == taken
    again.close()


def test_log_stays_short_on_a_small_disk_after_a_killed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Journal, "free_bytes", lambda journal: 2 << 20)
    first = Journal(tmp_path / "first")
    first.make_room()
    # as after kill -9: SQLite has not removed the log
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    first.close()
    journal = Journal(tmp_path / "second")
    journal.make_room()
    log = tmp_path / "second" / WAL
    size = log.stat().st_size
    for _ in range(200):
        journal.append([("data_leased", {})])
    assert log.stat().st_size <= size
    journal.close()


def test_full_disk_at_the_opening_is_no_damage(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append([("one", {})])
    journal.close()
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, unlimited[1]))
    try:
        with pytest.raises(StorageUnavailable, match=r"bytes free on its disk.*leave the file where it is") as caught:
            Journal(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert caught.value.facts == {"file": str(tmp_path / FILE)}
    again = Journal(tmp_path)
    assert [each.kind for each in again.records()] == ["one"]
    again.close()


def test_room_is_made_again_when_half_of_it_is_used_up(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.make_room()
    size = (tmp_path / FILE).stat().st_size
    journal.append([("r", {"text": "x" * (ROOM_BYTES // 16)})])
    journal.make_room()
    assert journal.room_bytes() < ROOM_BYTES
    journal.append([("r", {"text": "x" * (ROOM_BYTES // 4)})])
    journal.make_room()
    assert journal.room_bytes() >= ROOM_BYTES
    assert (tmp_path / FILE).stat().st_size < size + ROOM_BYTES
    assert len(journal.records()) == 2
    journal.close()


def test_room_is_a_small_part_of_a_small_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path)
    monkeypatch.setattr(journal, "free_bytes", lambda: ROOM_BYTES)
    journal.make_room()
    assert ROOM_BYTES // 16 <= journal.room_bytes() < ROOM_BYTES // 8
    journal.close()


def test_terms_that_are_long_past_are_forgotten(tmp_path: Path) -> None:
    for _ in range(TERMS_KEPT + 3):
        Journal(tmp_path).close()
    database = sqlite3.connect(tmp_path / FILE)
    assert database.execute("SELECT COUNT(*) FROM terms").fetchone() == (TERMS_KEPT,)
    database.close()
    journal = Journal(tmp_path)
    assert journal.term == TERMS_KEPT + 4
    journal.close()


def test_records_of_all_terms_are_kept(tmp_path: Path) -> None:
    for _ in range(TERMS_KEPT + 3):
        journal = Journal(tmp_path)
        journal.append([("r", {})])
        kept = [each.term for each in journal.records()]
        journal.close()
    assert kept == list(range(1, TERMS_KEPT + 4))


def test_replaced_records_are_gone_and_numbers_go_on(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append([("one", {}), ("two", {}), ("three", {})])
    journal.replace([("short", {"x": 1})])
    journal.append([("next", {})])
    journal.close()
    journal = Journal(tmp_path)
    assert [(each.number, each.kind) for each in journal.records()] == [(4, "short"), (5, "next")]
    journal.replace([])
    assert journal.records() == ()
    journal.append([("last", {})])
    assert [(each.number, each.kind) for each in journal.records()] == [(6, "last")]
    journal.close()


def test_replacing_that_fails_leaves_the_records_that_were_there(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append([("one", {}), ("two", {})])
    with pytest.raises(TypeError):
        journal.replace([("good", {}), ("bad", {"x": object()})])
    assert [each.kind for each in journal.records()] == ["one", "two"]
    journal.close()


def test_replacing_is_one_transaction(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append([("one", {}), ("two", {})])
    seen: list[str] = []
    journal._database.set_trace_callback(seen.append)
    journal.replace([("a", {}), ("b", {})])
    journal._database.set_trace_callback(None)
    words = [statement.split()[0] for statement in seen]
    assert (words[0], words[-1], words.count("COMMIT")) == ("BEGIN", "COMMIT", 1)
    journal.close()


@pytest.mark.parametrize("version", [0, FORMAT + 1])
def test_journal_of_another_format_is_refused(tmp_path: Path, version: int) -> None:
    journal = Journal(tmp_path)
    journal.append([("one", {})])
    journal._database.execute(f"PRAGMA user_version = {version}")
    journal.close()
    with pytest.raises(ConfigurationError, match=f"{FILE} cannot be read: it is of format {version}.*{FORMAT}"):
        Journal(tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("UPDATE records SET body = '{\"a\":2}' WHERE number = 2", "record 2 .*checksum is wrong"),
        ("UPDATE records SET kind = 'twp' WHERE number = 2", "record 2 .*checksum is wrong"),
        ("UPDATE records SET body = CAST(x'7bff' AS TEXT) WHERE number = 2", "record 2 .*checksum is wrong"),
        ("UPDATE records SET term = 0 WHERE number = 3", "record 3 .*checksum is wrong"),
        ("DELETE FROM records WHERE number = 1", "record 1 .*it is missing"),
        ("DELETE FROM records WHERE number = 2", "record 2 .*it is missing"),
        ("DELETE FROM records WHERE number = 3", "record 3 .*it is missing"),
        ("UPDATE records SET number = 9 WHERE number = 3", "record 3 .*it is missing"),
        ("DELETE FROM kept", "cannot be read"),
    ],
)
def test_damaged_record_is_named_with_file_and_number(tmp_path: Path, change: str, said: str) -> None:
    journal = Journal(tmp_path)
    journal.append([("one", {"a": 1}), ("two", {"a": 1}), ("three", {"a": 1})])
    journal._database.execute(change)
    journal.close()
    journal = Journal(tmp_path)
    with pytest.raises(ConfigurationError, match=said) as caught:
        journal.records()
    assert caught.value.facts["file"] == str(tmp_path / FILE)
    journal.close()


def test_entry_of_a_term_that_was_changed_is_refused(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal._database.execute("UPDATE terms SET term = 7")
    journal.close()
    with pytest.raises(ConfigurationError, match="the entry of term 7 has a wrong checksum"):
        Journal(tmp_path)


def test_journal_that_was_moved_away_begins_anew_in_a_higher_term(tmp_path: Path) -> None:
    for _ in range(3):
        journal = Journal(tmp_path)
        journal.append([("one", {})])
        journal.close()
    (tmp_path / FILE).unlink()
    journal = Journal(tmp_path)
    assert journal.term == 4
    assert journal.records() == ()
    journal.close()
    Journal(tmp_path).close()


def in_use(folder: Path) -> Journal:
    """A journal with records in the file, and some in SQLite's log, as a killed process leaves them."""
    journal = Journal(folder)
    journal.append([(f"kind {number}", {"number": number, "text": "x" * 40}) for number in range(60)])
    journal.close()
    journal = Journal(folder)
    for number in range(60, 80):
        journal.append([(f"kind {number}", {"number": number})])
    return journal


def copied(folder: Path, to: Path, *names: str) -> Path:
    shutil.rmtree(to, ignore_errors=True)
    to.mkdir()
    for name in names:
        shutil.copyfile(folder / name, to / name)
    return to


def read(folder: Path) -> tuple[int, tuple[Record, ...]]:
    journal = Journal(folder)
    try:
        return journal.term, journal.records()
    finally:
        journal.close()


def is_refused(folder: Path, wanted: tuple[int, tuple[Record, ...]]) -> bool:
    """False where all is there, since what was damaged does not matter; nothing between is allowed."""
    try:
        found = read(folder)
    except ConfigurationError as refusal:
        error = refusal
    else:
        assert found == wanted
        return False
    assert str(folder / FILE) in error.what
    return True


def test_killed_coordinators_journal_is_read_to_its_last_record(tmp_path: Path) -> None:
    journal = in_use(tmp_path / "a")
    killed = copied(tmp_path / "a", tmp_path / "b", FILE, WAL, LOCK)
    assert read(killed) == (3, journal.records())
    journal.close()


@pytest.mark.parametrize("name", [FILE, WAL])
def test_flipped_bits_are_found_or_do_no_harm(tmp_path: Path, name: str) -> None:
    journal = in_use(tmp_path / "a")
    wanted = (3, journal.records())
    generator = random.Random(5)
    refused = 0
    for _ in range(FLIPS):
        damaged = copied(tmp_path / "a", tmp_path / "b", FILE, WAL, LOCK)
        data = bytearray((damaged / name).read_bytes())
        bit = generator.randrange(8 * len(data))
        data[bit // 8] ^= 1 << bit % 8
        (damaged / name).write_bytes(data)
        refused += is_refused(damaged, wanted)
    journal.close()
    assert refused > FLIPS // 10


@pytest.mark.parametrize("name", [FILE, WAL])
def test_truncated_files_are_found(tmp_path: Path, name: str) -> None:
    journal = in_use(tmp_path / "a")
    wanted = (3, journal.records())
    generator = random.Random(6)
    whole = (tmp_path / "a" / name).stat().st_size
    refused = 0
    for length in (0, *(generator.randrange(whole) for _ in range(TRUNCATIONS))):
        damaged = copied(tmp_path / "a", tmp_path / "b", FILE, WAL, LOCK)
        os.truncate(damaged / name, length)
        refused += is_refused(damaged, wanted)
    journal.close()
    assert refused > TRUNCATIONS // 2


def test_journal_that_lost_its_first_log_is_not_taken_for_a_new_one(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "a")
    journal.append([("one", {})])
    with pytest.raises(ConfigurationError, match="its last record is 0; record 1 had been written"):
        read(copied(tmp_path / "a", tmp_path / "b", FILE, LOCK))
    journal.close()


def test_file_whose_structure_is_damaged_is_refused_at_once(tmp_path: Path) -> None:
    Journal(tmp_path).close()
    with (tmp_path / FILE).open("r+b") as file:
        file.seek(SQLITE_FREE_PAGES_AT)
        file.write(b"\0\0\0\5")
    with pytest.raises(ConfigurationError, match=f"{FILE} cannot be read: .*free"):
        Journal(tmp_path)


def test_file_whose_damage_makes_sqlite_quote_what_is_no_text_is_refused(tmp_path: Path) -> None:
    Journal(tmp_path).close()
    data = bytearray((tmp_path / FILE).read_bytes())
    begin = data.index(b"CREATE TABLE terms")
    data[begin : begin + 12] = b"CREATE TAB\xd4E"
    (tmp_path / FILE).write_bytes(data)
    with pytest.raises(ConfigurationError, match=f"journal {tmp_path / FILE}"):
        Journal(tmp_path)
    data[begin : begin + 12] = b"CREATE TABLE"
    (tmp_path / FILE).write_bytes(data)
    Journal(tmp_path).close()


def test_journal_that_lost_its_log_is_refused(tmp_path: Path) -> None:
    journal = in_use(tmp_path / "a")
    with pytest.raises(ConfigurationError, match="its last record is 60; record 80 had been written"):
        read(copied(tmp_path / "a", tmp_path / "b", FILE, LOCK))
    journal.close()


def test_damaged_journal_is_an_error_that_says_which_file(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"this is no database, and long enough to be looked at" * 100)
    with pytest.raises(ConfigurationError, match=f"cannot open the journal .*{FILE}.*move the file away"):
        Journal(tmp_path)
    (tmp_path / FILE).unlink()
    Journal(tmp_path).close()


def test_lives_in_memory_differ_by_the_time_of_day() -> None:
    early, late = Journal(None, wall_clock=lambda: 1_000.0), Journal(None, wall_clock=lambda: 1_001.9)
    assert (early.term, late.term) == (1_000, 1_001)
    early.append([("r", {"n": 1})])
    assert [each.body for each in early.records()] == [{"n": 1}]
    early.close()
    late.close()
