"""The audit that the journal keeps: what is in it, for how long, and how it is read."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardyard.config.settings import JobSettings
from shardyard.domain.errors import ConfigurationError, MalformedPayload, NotFound, TooLarge
from shardyard.domain.push_names import DataShardSource, SourceKey
from shardyard.wire import methods
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_coordinator.records import Entry
from shardyard_coordinator.service import journal as module
from shardyard_coordinator.service.audit import Audited, Page, audited
from shardyard_coordinator.service.journal import FILE, Journal, reading_audit
from tests.support.coordinator_yards import ASYNC, Yard, sync_settings
from tests.support.waiting import wait_until


def find_audited_job(folder: Path, job: str) -> int:
    with reading_audit(folder) as audit:
        return audit.find_job(job)


def read_audit(folder: Path, job: int, after: int) -> Page:
    with reading_audit(folder) as audit:
        return audit.read(job, after)


def started(job: int, name: str = "ads") -> Entry:
    return "job_started", {"job": job, "settings": JobSettings(name=name).model_dump(mode="json")}


def leased(job: int, index: int = 0) -> Entry:
    return "data_leased", {"job": job, "feed": 0, "epoch": 0, "index": index, "worker": 7, "token": 1, "first": 0}


def all_of(journal: Journal, job: int) -> list[Audited]:
    found, after, more = [], 0, True
    while more:
        page = journal.audit.read(job, after)
        found += page.entries
        after, more = page.reached, page.more
    return found


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    opened = Journal(tmp_path, wall_clock=lambda: 12.5)
    yield opened
    opened.close()


def test_entries_are_written_with_the_records_and_outlive_a_snapshot(journal: Journal, tmp_path: Path) -> None:
    journal.append([started(1), leased(1)])
    journal.replace([started(1)])
    journal.append([("job_ended", {"job": 1, "state": "finished"})])
    found = all_of(journal, 1)
    assert [(each.number, each.kind) for each in found] == [(1, "job_started"), (2, "data_leased"), (3, "job_ended")]
    assert {(each.job, each.term, each.time) for each in found} == {(1, 1, 12.5)}
    assert found[1].body == {"feed": 0, "epoch": 0, "index": 0, "worker": 7, "token": 1, "first": 0}
    assert len(journal.records()) == 2


def test_neither_or_both_are_written(journal: Journal) -> None:
    journal.append([started(1)])
    with pytest.raises(TypeError):
        journal.append([leased(1), ("data_leased", {"job": 1, "bad": object()})])
    assert (len(journal.records()), len(all_of(journal, 1))) == (1, 1)


def test_large_values_and_what_says_nothing_are_left_out() -> None:
    assert audited("variables_registered", {"job": 1}) is None
    assert audited("batch_begun", {"job": 1}) is None
    committed = audited("checkpoint_committed", {"job": 1, "number": 3, "step": 9, "data_ledger": {"entries": []}})
    assert committed == (1, ("checkpoint_committed", {"number": 3, "step": 9}))
    job, (kind, body) = audited(*started(4)) or (0, ("", {}))
    assert (job, kind, body["name"], "checkpoint" in body) == (4, "job_started", "ads", False)
    assert audited("member_removed", {"incarnation": 5, "how": "left"}) == (
        0,
        ("member_removed", {"incarnation": 5, "how": "left"}),
    )


def test_job_has_its_own_entries_and_those_of_the_yard_while_it_ran(journal: Journal) -> None:
    gone: Entry = ("member_removed", {"incarnation": 5, "how": "left", "role": "server", "address": "s:1"})
    journal.append([gone, started(1), leased(1), started(2, "other"), leased(2), gone])
    journal.append([("job_ended", {"job": 1, "state": "finished"}), gone])
    journal.append([leased(2, 1)])
    assert [(each.number, each.kind) for each in all_of(journal, 1)] == [
        (2, "job_started"),
        (3, "data_leased"),
        (6, "member_removed"),
        (7, "job_ended"),
    ]
    assert [each.number for each in all_of(journal, 2)] == [4, 5, 6, 8, 9]


def test_job_is_found_by_id_and_the_latest_by_name(journal: Journal) -> None:
    journal.append([started((1 << 32) + 1), started((1 << 32) + 2), started((1 << 32) + 3, "other")])
    assert journal.audit.find_job("ads") == (1 << 32) + 2
    assert journal.audit.find_job("1.1") == (1 << 32) + 1
    with pytest.raises(NotFound, match=r"no job 'nothing'.*ads, other"):
        journal.audit.find_job("nothing")


def test_old_entries_go_when_there_are_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AUDIT_SLACK", 4)
    journal = Journal(tmp_path, audit_max=10)
    journal.append([started(1)])
    for index in range(40):
        journal.append([leased(1, index)])
    found = all_of(journal, 1)
    assert 10 <= len(found) <= 14
    assert [each.number for each in found] == list(range(found[0].number, 42))
    page = journal.audit.read(1, 0)
    assert page.lost == found[0].number - 1
    assert journal.audit.find_job("ads") == 1
    journal.close()


def test_long_audit_is_read_page_by_page(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAGE_ENTRIES_MAX", 7)
    monkeypatch.setattr(module, "PAGE_BYTES_MAX", 200)
    journal.append([started(1), *(leased(1 + index % 2, index) for index in range(60))])
    assert [each.number for each in all_of(journal, 1)] == [1, *range(2, 62, 2)]
    assert all(len(journal.audit.read(1, after).entries) <= 4 for after in range(60))


def test_folder_of_a_coordinator_that_does_not_run_is_read_and_not_changed(journal: Journal, tmp_path: Path) -> None:
    journal.append([started(1), leased(1)])
    expected = all_of(journal, 1)
    assert find_audited_job(tmp_path, "ads") == 1
    assert list(read_audit(tmp_path, 1, 0).entries) == expected, "also while its coordinator runs"
    journal.close()
    before = (tmp_path / FILE).read_bytes()
    assert list(read_audit(tmp_path, 1, 0).entries) == expected
    assert (tmp_path / FILE).read_bytes() == before
    with pytest.raises(NotFound, match="no journal of a coordinator"):
        find_audited_job(tmp_path / "elsewhere", "ads")


def test_damaged_entry_is_refused_and_named(journal: Journal, tmp_path: Path) -> None:
    journal.append([started(1), leased(1)])
    journal._database.execute("""UPDATE audit SET body = replace(body, '"token":1', '"token":2') WHERE number = 2""")
    for read in (lambda: journal.audit.read(1, 0), lambda: read_audit(tmp_path, 1, 0)):
        with pytest.raises(ConfigurationError, match="entry 2 of the audit has a wrong checksum"):
            read()


@pytest.mark.parametrize("version", [1, module.FORMAT + 1])
def test_journal_of_another_format_is_refused(journal: Journal, tmp_path: Path, version: int) -> None:
    journal._database.execute(f"PRAGMA user_version = {version}")
    with pytest.raises(ConfigurationError, match=f"it is of format {version}"):
        read_audit(tmp_path, 1, 0)


def test_file_that_is_no_journal_is_refused(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"no journal at all" * 100)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        find_audited_job(tmp_path, "ads")
    (tmp_path / FILE).unlink()
    sqlite3.connect(tmp_path / FILE).close()
    with pytest.raises(ConfigurationError, match="cannot be read"):
        find_audited_job(tmp_path, "ads")


# ---- of a coordinator


def ask(yard: Yard, job: str, after: int = 0) -> wire.ReadAuditReply:
    return yard.peer().call(methods.READ_AUDIT, wire.ReadAuditRequest(job=job, after=after), timeout_ms=1_000)


def bodies(yard: Yard, event: str) -> list[dict[str, object]]:
    return [json.loads(each.body_json) for each in ask(yard, "default").entries if each.event == event]


def test_leases_are_told_with_the_batches_that_they_computed(yard: Yard) -> None:
    first, second = yard.run_job(ASYNC, workers=2)
    first.open_feed(samples=30)
    lease = first.lease().lease
    source = SourceKey(DataShardSource(0, 0, 0))
    for fake in yard.servers.values():
        fake.next_of[source] = 1
    yard.kill(first, [second])
    wait_until(lambda: bodies(yard, "worker_freed") != [], "the dead worker's work to be free")
    (freed,) = bodies(yard, "worker_freed")
    held = {"feed": 0, "epoch": 0, "index": 0, "first": 0, "next": 1}
    assert (freed["worker"], freed["held"]) == (first.incarnation, [held])
    again = second.lease().lease
    assert again.data_shard == lease.data_shard
    second.close(again)
    assert [(each["worker"], each["token"], each["first"]) for each in bodies(yard, "data_leased")] == [
        (first.incarnation, 1, 0),
        (second.incarnation, 2, 1),
    ]
    (closed,) = bodies(yard, "data_closed")
    assert (closed["worker"], closed["first"], closed["next"], closed["done"]) == (second.incarnation, 1, 1, True)


def test_where_a_lost_worker_was_is_not_told_if_a_server_may_still_hear_it(yard: Yard) -> None:
    first, second = yard.run_job(ASYNC, workers=2)
    first.open_feed(samples=30)
    first.lease()
    next(iter(yard.servers.values())).refuse["fence"] = NotFound("no such job")
    yard.kill(first, [second])
    wait_until(lambda: bodies(yard, "worker_freed") != [], "the dead worker's work to be free")
    (freed,) = bodies(yard, "worker_freed")
    assert [each["next"] for each in freed["held"]] == [None]  # type: ignore[attr-defined]
    second.lease()
    assert [each["first"] for each in bodies(yard, "data_leased")] == [0, None]


def test_ranks_are_told(yard: Yard) -> None:
    first, second = yard.run_job(sync_settings(2), workers=2)
    given = {(each["rank"], each["worker"]) for each in bodies(yard, "rank_given")}
    assert given == {(0, first.incarnation), (1, first.incarnation), (1, second.incarnation)}


def test_wrong_requests_are_refused(yard: Yard) -> None:
    with pytest.raises(NotFound):
        ask(yard, "default")
    with pytest.raises((TooLarge, MalformedPayload)):
        ask(yard, "x" * 1_000)
    yard.run_job(ASYNC)
    with pytest.raises(TooLarge):
        ask(yard, "default", after=1 << 63)
