"""Rows of a synchronous job that expire, rows that are asked for over the wire, and the parts of both."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardyard.checkpoints.manifest import PartitionEntry
from shardyard.config import configuration
from shardyard.domain.consistency import Clipping, UpdateMode
from shardyard.domain.errors import (
    ConfigurationError,
    InvalidRequest,
    TooLarge,
)
from shardyard.domain.ids import Caller, Term, Version
from shardyard.domain.layout.layouts import JobLayout
from shardyard.domain.pulls import LookupRequest
from shardyard.domain.tables.table_settings import Admission, AdmissionSettings, ExpirySettings, TableSettings
from shardyard.wire import table_messages as wire_tables
from shardyard_coordinator.placement.table_specs import check_settings
from shardyard_ps_server.checkpoint.restore import Restore
from shardyard_ps_server.checkpoint.saver import SaveRequest
from shardyard_ps_server.hosting import orders
from shardyard_ps_server.hosting.hosted_job import CreateRequest
from shardyard_ps_server.partition.partition import Partition
from shardyard_ps_server.partition.reads import look_up_pinned, look_up_rows, pin_version, read_table
from shardyard_ps_server.partition.update_rules import UpdateRules
from shardyard_ps_server.rows import partition_tables, row_sums
from shardyard_ps_server.rows.partition_tables import RowsToRead
from shardyard_ps_server.rows.pushed_rows import PushedTableRows
from shardyard_ps_server.rows.row_overlay import RowDiff
from shardyard_ps_server.tables import checks, expiry
from tests.support.rows_in_pushes import GENERATION, HERE, JOB, closed, made
from tests.support.rows_in_steps import (
    EMPTY,
    EXPIRING,
    IDS,
    IN_SECONDS,
    INITIAL,
    LAYOUT,
    NARROW,
    PARTITION,
    WIDE,
    asked,
    judge,
    moved,
    only,
    partition_of,
    push,
    server,
    work,
)

__all__ = ["closed"]

# ---- what expires


def expiring(**reasons: Any) -> JobLayout:
    return dataclasses.replace(LAYOUT, tables=(dataclasses.replace(WIDE, expiry=ExpirySettings(**reasons)), NARROW))


def rows_of(partition: Partition) -> dict[int, tuple[bytes, int, int]]:
    return {
        number: (chunk.records[i].tobytes(), int(chunk.frequencies[i]), int(chunk.steps[i]))
        for chunk in read_table(partition, 0)
        for i, number in enumerate(chunk.ids.tolist())
    }


@pytest.mark.parametrize("clipping", [Clipping(), Clipping(norm=1_000.0)])
def test_rule_b3_a_row_expires_with_its_step_and_is_there_in_the_version_before(clipping: Clipping) -> None:
    partition = partition_of(1, expiring(age_steps=5), clipping=clipping)
    for step in range(6):
        push(partition, 0, step, work({0 if step == 0 else 1: 1.0}))
        judge(partition, step)
    assert partition.tables["wide"].rows == 2
    push(partition, 0, 6, work({1: 1.0}))
    judge(partition, 6)
    assert partition.tables["wide"].rows == 1
    assert moved(partition, 6) == pytest.approx({0: -1.0, 1: -5.0})
    assert moved(partition, 7) == moved(partition) == pytest.approx({1: -6.0})
    push(partition, 0, 7, work({0: 1.0}))
    judge(partition, 7)
    assert moved(partition) == pytest.approx({0: -1.0, 1: -6.0})


def test_rows_expire_with_steps_that_change_none() -> None:
    """Else it would depend on the number of partitions which rows have gone."""
    partition = partition_of(1, expiring(age_steps=5))
    push(partition, 0, 0, work({0: 1.0, 1: 1.0}))
    for step in range(1, 6):
        push(partition, 0, step, EMPTY if step % 2 else work())
    assert partition.tables["wide"].rows == 2
    push(partition, 0, 6, EMPTY)
    assert (partition.tables["wide"].rows, moved(partition)) == (0, {})
    assert moved(partition, 6) == pytest.approx({0: -1.0, 1: -1.0})


def test_a_row_that_is_pushed_with_the_step_stays() -> None:
    partition = partition_of(1, expiring(age_steps=5))
    push(partition, 0, 0, work({0: 1.0, 1: 1.0}))
    for step in range(1, 6):
        push(partition, 0, step, work())
    push(partition, 0, 6, work({0: 1.0}))
    assert moved(partition) == pytest.approx({0: -2.0})


def test_a_sweep_comes_sixteen_times_in_an_age_and_else_every_64_steps() -> None:
    assert [ExpirySettings(age_steps=age).sweep_steps for age in (1, 16, 31, 32, 1_600)] == [1, 1, 1, 2, 100]
    assert ExpirySettings(frequency_min=2, grace_steps=320).sweep_steps == 20
    assert ExpirySettings(rows_kept=9).sweep_steps == 64
    partition = partition_of(1, expiring(age_steps=64))
    push(partition, 0, 0, work({0: 1.0}))
    for step in range(1, 67):
        push(partition, 0, step, work({1: 1.0}))
        assert moved(partition).keys() == {0, 1}, step
    assert partition.describe()[0].number == 67
    push(partition, 0, 67, work({1: 1.0}))  # makes version 68, a multiple of 4; the row has been due since 66
    assert moved(partition).keys() == {1}


@pytest.mark.parametrize("reasons", [{"age_steps": 4}, {"rows_kept": 5}, {"frequency_min": 30, "grace_steps": 8}])
def test_rule_b7_the_same_rows_expire_after_a_restore_and_whoever_comes_first(
    tmp_path: Path, reasons: dict[str, int]
) -> None:
    layout = expiring(**reasons)
    work_of = np.random.default_rng(5).zipf(1.5, (150, 2, 3)) % IDS.size

    def train(partition: Partition, begin: int, end: int, order: tuple[int, int]) -> None:
        for step in range(begin, end):
            for rank in order:
                push(partition, rank, step, work({int(place): 1.0 + rank for place in work_of[step, rank]}))

    straight = partition_of(2, layout)
    train(straight, 0, 150, (0, 1))
    assert straight.tables["wide"].use().expired > 0
    store = server(layout=layout)
    train(only(store), 0, 61, (1, 0))
    (saved,) = orders.save(store, Caller(JOB, term=Term(1)), HERE, GENERATION, SaveRequest(1, 61, 0, 0), str(tmp_path))
    entry = PartitionEntry(saved.partition, Version(2, 61), (saved.file,), saved.tables)
    again = only(server(Restore(str(tmp_path), (entry,)), layout=layout))
    train(again, 61, 150, (1, 0))
    assert rows_of(again) == rows_of(straight)


@pytest.mark.parametrize("clipping", [Clipping(), Clipping(norm=1_000.0)])
def test_a_sweep_for_which_memory_is_refused_has_changed_nothing(
    monkeypatch: pytest.MonkeyPatch, clipping: Clipping
) -> None:
    partition = partition_of(1, expiring(age_steps=5), clipping=clipping)
    push(partition, 0, 0, work({0: 1.0}))
    judge(partition, 0)

    def refuse(*_: object, **__: object) -> None:
        raise MemoryError

    def take_step() -> None:
        push(partition, 0, 1, work({1: 1.0}))
        judge(partition, 1)

    with monkeypatch.context() as patch:
        patch.setattr(expiry.np, "unique", refuse)
        with pytest.raises(TooLarge, match="a sweep of 'wide'"):
            take_step()
    assert (partition.describe()[0].number, partition.torn) == (1, None)
    take_step()
    assert moved(partition) == pytest.approx({0: -1.0, 1: -1.0})


def test_more_rows_expire_than_a_table_takes_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    partition = partition_of(1, expiring(age_steps=5))
    push(partition, 0, 0, work(dict.fromkeys(range(7), 1.0)))
    monkeypatch.setattr(partition_tables, "ROWS_PER_PART_MAX", 2)
    monkeypatch.setattr(checks, "BATCH_IDS_MAX", 2)
    for step in range(1, 7):
        push(partition, 0, step, work({7: 1.0}))
    assert partition.tables["wide"].rows == 1
    for place in range(0, 16, 2):
        out = np.empty((2, 2), np.float32)
        look_up_rows([(partition, [RowsToRead(0, IDS[place : place + 2], out)])], 6)
        moved_by = (out - INITIAL[place : place + 2])[:, 0]
        assert moved_by.tolist() == pytest.approx([-5.0 if at == 7 else -1.0 * (at < 7) for at in (place, place + 1)])


def test_ids_without_a_row_are_not_set_aside() -> None:
    layout = dataclasses.replace(
        LAYOUT,
        tables=(
            dataclasses.replace(
                WIDE, admission=AdmissionSettings(Admission.COUNT, 2), expiry=ExpirySettings(age_steps=5)
            ),
            NARROW,
        ),
    )
    partition = partition_of(1, layout)
    push(partition, 0, 0, work({0: 1.0, 1: 1.0}))
    push(partition, 0, 1, work({0: 1.0}))
    for step in range(2, 8):
        push(partition, 0, step, work({2: 1.0}))
    assert partition.tables["wide"].use().expired == 2
    assert partition.overlay.last is not None
    assert partition.overlay.last.rows[0][0].tolist() == IDS[[0, 2]].tolist()


def test_a_reader_that_holds_a_version_has_the_rows_that_expired_since() -> None:
    partition = partition_of(1, expiring(age_steps=5))
    push(partition, 0, 0, work({0: 1.0, 1: 1.0}))
    wanted = pin_version(partition, None, rows=True)
    for step in range(1, 9):
        push(partition, 0, step, work({1: 1.0}))
    assert moved(partition) == pytest.approx({1: -9.0})
    out = np.empty((IDS.size, 2), np.float32)
    look_up_pinned(partition, [RowsToRead(0, IDS, out)], wanted)
    assert (out - INITIAL)[:3, 0].tolist() == pytest.approx([-1.0, -1.0, 0.0])


# ---- asked over the wire


@pytest.mark.parametrize("given", [asked(), asked(number=0), asked(number=7, wait_ms=1_000)])
def test_a_look_up_says_its_version_on_the_wire(given: LookupRequest) -> None:
    assert wire_tables.look_up_from_header(wire_tables.look_up_to_header(given)) == given


def test_a_look_up_that_waits_too_long_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="a look-up waits 1001 ms; at most 1000"):
        wire_tables.look_up_from_header(wire_tables.look_up_to_header(asked(number=1, wait_ms=1_001)))


def test_rows_that_expire_by_seconds_are_refused_in_a_synchronous_job() -> None:
    store = made()
    layout = dataclasses.replace(LAYOUT, tables=(WIDE, IN_SECONDS))
    with pytest.raises(InvalidRequest, match="which is synchronous, with rows that expire by seconds"):
        orders.create(store, CreateRequest(JOB, GENERATION, layout, [PARTITION], UpdateRules(UpdateMode.SYNC, 2)))
    assert not store.hosted()


@pytest.mark.parametrize(
    ("mode", "tables", "text"),
    [
        ("sync", (WIDE, NARROW), ""),
        ("async", (WIDE, EXPIRING), ""),
        ("async", (WIDE, IN_SECONDS), ""),
        ("sync", (WIDE, EXPIRING), ""),
        ("sync", (WIDE, IN_SECONDS), "whose rows expire by seconds, in a job with job.consistency.mode sync"),
        ("local", (WIDE,), "in a job with job.consistency.mode local"),
        ("local", (), ""),
    ],
)
def test_the_coordinator_refuses_tables_that_a_job_cannot_have(
    mode: str, tables: tuple[TableSettings, ...], text: str
) -> None:
    given = configuration.load(None, {}, {"job.consistency.mode": mode}).settings.job
    if not text:
        check_settings(tables, given)
        return
    with pytest.raises(ConfigurationError, match=text):
        check_settings(tables, given)


# ---- the parts


def test_a_lone_rank_is_taken_as_it_is_and_shares_are_rounded_to_the_rows_dtype() -> None:
    ids, values = np.array([3, 9]), np.array([[1.0], [3.0]], np.float32)
    given = [[PushedTableRows(0, ids, values)]]
    (alone,) = row_sums.mean_of(given, [1.0])
    assert alone.values is values
    (third,) = row_sums.mean_of(given, [1 / 3])
    assert third.values.tobytes() == (values * np.float32(1 / 3)).tobytes()
    assert third.counts is None


def test_counts_of_ranks_are_added() -> None:
    values = np.ones((2, 1), np.float32)
    counts = np.array([5, 7])
    first, second = PushedTableRows(0, np.array([1, 2]), values, counts), PushedTableRows(0, np.array([2, 4]), values)
    (found,) = row_sums.mean_of([[first], [second]], [0.5, 0.5])
    assert found.ids.tolist() == [1, 2, 4]
    assert found.counts is not None
    assert found.counts.tolist() == [5, 8, 1]


def test_a_scale_of_one_changes_nothing_and_another_all() -> None:
    mean = [PushedTableRows(0, np.array([1]), np.array([[3.0, -4.0]], np.float32))]
    assert row_sums.scaled(mean, 1.0) is mean
    assert row_sums.scaled(mean, 0.5)[0].values.tolist() == [[1.5, -2.0]]
    assert row_sums.square_norm(mean) == 25.0


FORMER: dict[str, tuple[list[int], Callable[[], list[float]]]] = {
    "none of them": ([1, 2], lambda: [10.0, 20.0]),
    "all": ([4, 6], lambda: [-4.0, -6.0]),
    "some, and beyond the last": ([3, 4, 5, 6, 7], lambda: [10.0, -4.0, 30.0, -6.0, 50.0]),
}


@pytest.mark.parametrize("case", FORMER.values(), ids=FORMER.keys())
def test_former_rows_are_put_back_where_they_are_known(case: tuple[list[int], Callable[[], list[float]]]) -> None:
    ids, expected = case
    former = RowDiff(3, {0: (np.array([4, 6]), np.array([[-4.0], [-6.0]], np.float32))})
    out = np.array([[10.0 * (at + 1)] for at in range(len(ids))], np.float32)
    other = out.copy()
    former.put_back(0, np.array(ids, np.int64), out)
    former.put_back(1, np.array(ids, np.int64), other)
    assert out[:, 0].tolist() == expected()
    assert other[:, 0].tolist() == [10.0 * (at + 1) for at in range(len(ids))]
