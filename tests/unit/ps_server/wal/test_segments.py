"""Segments of a log, and logs as folders: when they begin, and when they are deleted or put aside."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest

from shardyard.domain.errors import (
    InvalidRequest,
    LogDamaged,
    NotReady,
    ShardyardError,
    StaleGeneration,
    StaleIncarnation,
    StorageUnavailable,
    TooLarge,
)
from shardyard.domain.ids import Caller, Generation, Incarnation, JobId, Term, Token
from shardyard.domain.push_names import PushName, SourceKey, WorkerSource
from shardyard.domain.pushes import Outcome, PushHeader, PushKind, PushPart
from shardyard.runtime import failpoints
from shardyard_ps_server.hosting import admission, orders, pushes
from shardyard_ps_server.hosting.store import Store
from shardyard_ps_server.values.versions import aligned_empty
from shardyard_ps_server.wal.segments import ASIDE_KEPT_S, END, FENCED, ID, SYNCED, LogFiles, LogRoot
from tests.support.servers_with_logs import (
    COORDINATOR,
    FIRST,
    GENERATION,
    JOB,
    NEXT,
    OWNED,
    SECOND,
    THIRD,
    WORKER,
    Yard,
    create,
    disk_full,
    leases,
    log_of,
    order_of,
    payload_of,
    push,
    send,
    state,
)


def test_segments_reach_back_to_the_oldest_checkpoint_that_is_kept(yard: Yard) -> None:
    first = yard.first()
    for number in (2, 3, 4):
        push(first, number - 2)
        yard.save(first, number)
    assert log_of(yard).numbers() == [1, 2, 3, 4]
    yard.save(first, 5, oldest=3)
    assert log_of(yard).numbers() == [3, 4, 5]


def test_logs_of_the_gone_are_deleted_once_no_checkpoint_needs_them(yard: Yard) -> None:
    _, saved = yard.begun(1)
    second = yard.successor(saved, 2, FIRST)
    yard.save(second, 3, oldest=2, logs=[FIRST])
    assert log_of(yard).folder.is_dir()
    yard.save(second, 4, oldest=3)
    assert not log_of(yard).folder.is_dir()
    assert log_of(yard, SECOND).folder.is_dir()
    orders.drop(second, JOB)
    assert not list(yard.logs.path.glob("*/*"))


def test_server_that_was_given_up_deletes_no_log_of_its_successors(yard: Yard) -> None:
    """It wakes with an order of before the others became owners, and died."""
    first, saved = yard.begun(1)
    yard.successor(saved, 2, FIRST)
    log_of(yard, SECOND).take_over(Generation(NEXT + 1))
    with contextlib.suppress(ShardyardError):
        yard.save(first, 3, oldest=2, logs=[FIRST])
    assert log_of(yard, SECOND).folder.is_dir()


def test_rule_c2_server_whose_own_log_nobody_took_over_deletes_none_of_later_owners(yard: Yard) -> None:
    """It was given up before there was a checkpoint, so values were given again, and nobody has read its log."""
    first = yard.first()
    second = yard.empty(SECOND)
    create(second, NEXT)
    orders.open_partitions(second, JOB, NEXT)
    leases(second)
    saved = yard.save(second, 2, logs=[SECOND])
    push(second, 0)
    before = state(second)
    yard.successor(saved, 2, SECOND, incarnation=THIRD, generation=Generation(NEXT + 1))
    yard.save(first, 1, logs=[FIRST])
    fourth = yard.successor(saved, 2, SECOND, incarnation=Incarnation(THIRD + 1), generation=Generation(NEXT + 2))
    assert state(fourth) == before


def test_fence_says_the_highest_generation_under_which_it_was_raised_or_nothing(yard: Yard) -> None:
    first = yard.first()
    push(first, 0)
    files = log_of(yard)
    assert files.fenced_under is None
    files.take_over(Generation(12))
    files.take_over(NEXT)
    assert files.fenced_under == 12
    for torn in (b"", b"1", b"12", b"twelve\n"):
        (files.folder / FENCED).write_bytes(torn)
        assert files.fenced_under is None
        assert files.is_fenced
    files.take_over(NEXT)
    assert files.fenced_under == NEXT


def test_a_job_that_ends_leaves_no_log(yard: Yard) -> None:
    first = yard.first()
    push(first, 0)
    orders.drop(first, JOB)
    assert not list(yard.logs.path.iterdir())


def test_servers_of_one_folder_know_each_other(tmp_path: Path) -> None:
    first, second = LogRoot(tmp_path / "a").id, LogRoot(tmp_path / "a").id
    assert first == second
    assert LogRoot(tmp_path / "b").id != first
    (tmp_path / "a" / ID).write_text("nonsense")
    with pytest.raises(LogDamaged, match="does not name"):
        _ = LogRoot(tmp_path / "a").id


def test_a_server_without_a_folder_for_logs_refuses(yard: Yard) -> None:
    store = Store()
    store.become(FIRST, Term(2))
    with pytest.raises(InvalidRequest, match=r"yard\.wal"):
        create(store)
    assert not store.hosted()
    store.close()


def test_a_log_that_cannot_be_begun_leaves_nothing(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    store = yard.empty(FIRST)

    monkeypatch.setattr("shardyard_ps_server.wal.wal.os.write", disk_full)
    with pytest.raises(StorageUnavailable, match="No space left"):
        create(store)
    assert not store.hosted()
    assert not yard.failures


def test_a_log_that_could_not_be_begun_is_begun_later(yard: Yard) -> None:
    store = yard.empty(FIRST)

    with failpoints.armed("wal.after_segment", disk_full), pytest.raises(StorageUnavailable):
        create(store)
    assert not log_of(yard).folder.exists()
    create(store)
    assert log_of(yard).numbers() == [0]


def test_numbers_that_are_given_again_begin_a_log_of_their_own(yard: Yard, caplog: pytest.LogCaptureFixture) -> None:
    """By a coordinator whose journal was lost: the other yard's log is put aside, fence and end included."""
    former = yard.first()
    push(former, 0)
    former.close()
    log_of(yard).take_over(NEXT)
    first, saved = yard.begun(2)
    assert state(yard.successor(saved, 2, FIRST)) == state(first)
    (aside,) = (each for each in log_of(yard).folder.parent.iterdir() if "of-another-yard" in each.name)
    assert {FENCED, END, SYNCED} < {each.name for each in aside.iterdir()}
    assert str(aside) in caplog.text
    assert [each.server for each in yard.logs.others(JOB, THIRD)] == [FIRST, SECOND]


def test_server_that_slept_until_its_log_was_deleted_knows_why_no_segment_can_be_begun(yard: Yard) -> None:
    first = yard.first()
    log_of(yard).take_over(NEXT)
    log_of(yard).remove()
    with pytest.raises(NotReady):
        yard.save(first, 2)
    assert [type(each) for each in yard.failures] == [StaleIncarnation]


def test_what_was_put_aside_is_deleted_after_a_week_and_nothing_else_is(yard: Yard) -> None:
    first = yard.first()
    first.close()
    os.utime(log_of(yard).folder, (0, 0))
    other = Store(logs=yard.logs)
    other.become(FIRST, Term(2))
    create(other)
    other.close()
    (aside,) = (each for each in log_of(yard).folder.parent.iterdir() if "of-another-yard" in each.name)
    for strange in ("3.of-another-yard-", "notes.txt", "3.of-another-yard-00000000x"):
        (aside.parent / strange).mkdir()
    before = {each.name for each in aside.parent.iterdir()}
    put_aside_s = aside.stat().st_mtime
    assert put_aside_s > 0, "when it was put aside counts, not when it was written"
    for each in (*aside.parent.iterdir(), yard.logs.path):
        if each != aside:
            os.utime(each, (0, 0))
    assert yard.logs.delete_aside(put_aside_s + ASIDE_KEPT_S - 1) == []
    assert yard.logs.delete_aside(put_aside_s + ASIDE_KEPT_S) == [aside]
    assert before - {each.name for each in aside.parent.iterdir()} == {aside.name}


def test_folder_of_logs_without_any_has_nothing_put_aside(tmp_path: Path) -> None:
    assert LogRoot(tmp_path / "none").delete_aside(1e12) == []


def test_log_of_a_server_that_was_gone_when_the_job_ended_is_put_aside(
    yard: Yard, caplog: pytest.LogCaptureFixture
) -> None:
    """What lives deletes its own; what was read is deleted; what nobody has read is kept for a while."""
    read, unread, living = yard.first(), yard.empty(THIRD), yard.empty(Incarnation(9))
    saved = yard.save(read, 2)
    for store in (unread, living):
        create(store)
    last = yard.successor(saved, 2, FIRST)
    read.close()
    unread.close()
    job = log_of(yard).folder.parent
    orders.drop(last, JOB)
    kept = {each.name for each in job.iterdir()}
    assert len(kept) == 2
    assert f"{Incarnation(9):x}" in kept
    (aside,) = (each for each in job.iterdir() if each.name.startswith(f"{THIRD:x}.of-an-ended-job-"))
    assert str(aside) in caplog.text
    orders.drop(living, JOB)
    assert {each.name for each in job.iterdir()} == {aside.name}
    assert yard.logs.delete_aside(aside.stat().st_mtime + ASIDE_KEPT_S) == [aside]
    assert not job.exists()


def test_log_that_is_deleted_is_locked_until_it_is_gone(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else another server would put aside what is left of it."""
    first, second = yard.first(), yard.empty(SECOND)
    create(second)
    remove, seen = LogFiles.remove, []

    def slowly(files: LogFiles) -> None:
        if files.server == FIRST:
            seen.append(log_of(yard).end_with_job())
        remove(files)

    monkeypatch.setattr(LogFiles, "remove", slowly)
    orders.drop(first, JOB)
    assert seen == [None]
    orders.drop(second, JOB)
    assert not list(yard.logs.path.glob("*/*"))


def values_of(store: Store, fill: float) -> None:
    hosted = store.hosted()[0]
    parts = tuple(PushPart(number, 128) for number in sorted(hosted.partitions))
    name = PushName(SourceKey(WorkerSource(WORKER)), Token(0), 0, 0)
    caller = Caller(JOB, WORKER)
    order = PushHeader(caller, store.incarnation, hosted.generation, name, PushKind.VALUES, parts, 0.0, ())
    payload = aligned_empty(order.payload_bytes)
    payload.view(np.float64)[:] = fill
    pushes.initialize(store, admission.admit_push(store, order), order, payload)


def test_first_values_are_given_again_to_servers_that_had_them(yard: Yard) -> None:
    """Another server has died before the first checkpoint."""
    first = yard.empty(FIRST)
    create(first, GENERATION, OWNED[:1])
    values_of(first, 1.0)
    orders.open_partitions(first, JOB, GENERATION)
    old = order_of(first, 0)
    yard.save(first, 1, oldest=0)

    before = first.hosted()[0]
    admitted = admission.admit_push(first, old)
    create(first, NEXT)
    for late in (lambda: send(first, old), lambda: pushes.push(first, admitted, old, payload_of(old))):
        with pytest.raises(StaleGeneration):
            late()
    with pytest.raises(StaleGeneration):
        create(first, GENERATION, OWNED[:1])
    with pytest.raises(NotReady, match="first values"):
        push(first, 0)
    assert {each[1:] for each in state(first).values()} == {(bytes(128), bytes(128), ())}
    values_of(first, 2.0)
    create(first, NEXT)
    orders.open_partitions(first, JOB, NEXT)
    leases(first)
    assert before is not first.hosted()[0]
    saved = yard.save(first, 2, oldest=0)
    push(first, 0)
    wanted = state(first)
    assert np.frombuffer(wanted[0][1])[0] != 2.0
    assert state(yard.successor(saved, 2, FIRST, generation=Generation(6), life=3)) == wanted
    assert not yard.failures


def test_partitions_that_cannot_begin_anew_stay_what_they_were(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    first = yard.empty(FIRST)
    create(first)
    values_of(first, 1.0)
    orders.open_partitions(first, JOB, GENERATION)
    before = state(first)

    def refuse(*_: object, **__: object) -> NoReturn:
        raise TooLarge("no memory")

    with monkeypatch.context() as patch:
        patch.setattr("shardyard_ps_server.hosting.provisioning.Partition", refuse)
        with pytest.raises(TooLarge):
            create(first, NEXT)
    assert state(first) == before
    leases(first)
    with pytest.raises(InvalidRequest, match=r"partition 0 of job 1\.1 to begin anew, which has counted work"):
        create(first, NEXT)
    assert push(first, 0) == {Outcome.APPLIED}


def test_yards_that_share_a_folder_of_logs_do_not_share_a_log(yard: Yard) -> None:
    first = yard.first()
    push(first, 0)
    other = yard.empty(FIRST)
    with pytest.raises(StorageUnavailable, match="of another yard writes the log"):
        create(other)
    assert push(first, 1) == {Outcome.APPLIED}


def test_a_run_that_begins_with_a_high_checkpoint_of_another_begins_segments_of_its_own(yard: Yard) -> None:
    """Its first checkpoint has number 1 where it keeps its own. What that one has, a source that was forgotten since
    among it, is not done again."""
    run = yard.successor(yard.save(yard.first(), 40), 40, job=JobId(JOB + 1), incarnation=SECOND)
    own = SourceKey(WorkerSource(WORKER))
    send(run, order_of(run, 0, source=own.source, token=0))
    saved = yard.save(run, 1)
    assert log_of(yard, SECOND).numbers() == [1], "the one before it is not needed"
    orders.forget_sources(run, COORDINATOR, SECOND, NEXT, [], [WORKER], Token(0))
    third = yard.successor(saved, 1, SECOND, incarnation=THIRD, life=3, generation=Generation(NEXT + 1))
    assert [each[:3] for each in state(third).values()] == [each[:3] for each in state(run).values()]


@pytest.mark.parametrize("place", ["wal.before_rotate", "wal.after_rotate"])
def test_a_segment_that_cannot_be_begun_stops_the_server_and_loses_nothing(yard: Yard, place: str) -> None:
    first, saved = yard.begun(1)
    before = state(first)

    with failpoints.armed(place, disk_full), pytest.raises(NotReady):
        yard.save(first, 3)
    assert len(yard.failures) == 1
    assert state(yard.successor(saved, 2, FIRST)) == before
