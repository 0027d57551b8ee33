"""The coordinator's journal on disk and in memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shardyard.ground.errors import ConfigurationError
from shardyard_coordinator.journal import FILE, TERMS_KEPT, Journal


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


def test_records_of_old_terms_are_dropped(tmp_path: Path) -> None:
    for _ in range(TERMS_KEPT + 3):
        journal = Journal(tmp_path)
        journal.append([("r", {})])
        kept = [each.term for each in journal.records()]
        journal.close()
    assert kept == list(range(4, TERMS_KEPT + 4))


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
