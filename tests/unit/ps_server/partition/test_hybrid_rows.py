"""Rows of hybrid jobs (docs/internals/ledger.md, rule A1): updated when a contribution is recorded, before its step is
taken, and counted in a lane of their own, so that a partition that has gone back counts no row twice."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardyard.checkpoints.manifest import PartitionEntry
from shardyard.config import configuration
from shardyard.domain.consistency import NO_CLIPPING, Clipping, Durability, UpdateMode
from shardyard.domain.errors import ConfigurationError, Internal, InvalidRequest, TableFull, TooLarge
from shardyard.domain.ids import Caller, JobId, Rank, Term, Token, Version
from shardyard.domain.push_names import PushName, RankSource, SourceKey, SourceMark
from shardyard.domain.pushes import Outcome
from shardyard.domain.tables.table_settings import ExpirySettings, TableSettings
from shardyard.runtime.failpoints import armed
from shardyard_coordinator.placement.table_specs import check_settings
from shardyard_ps_server.checkpoint.restore import Restore
from shardyard_ps_server.checkpoint.saver import SaveRequest
from shardyard_ps_server.hosting import orders, pushes
from shardyard_ps_server.hosting.hosted_job import CreateRequest
from shardyard_ps_server.hosting.store import Store
from shardyard_ps_server.partition.ledger import Ledger
from shardyard_ps_server.partition.partition import Partition
from shardyard_ps_server.partition.reads import read_table
from shardyard_ps_server.partition.update_rules import UpdateRules
from shardyard_ps_server.rows import row_sums
from tests.support.rows_in_pushes import GENERATION, HERE, JOB, RATE, closed, made
from tests.support.rows_in_steps import (
    EMPTY,
    EXPIRING,
    LAYOUT,
    NARROW,
    PARTITION,
    WIDE,
    full,
    moved,
    only,
    partition_of,
    push,
    read,
    work,
)
from tests.support.rows_in_steps import server as server_of

__all__ = ["closed"]


def hybrid(ranks: int = 2, layout: Any = LAYOUT, **more: Any) -> Partition:
    return partition_of(ranks, layout, rows_at_once=True, **more)


def server(*given: Any, **more: Any) -> Store:
    return server_of(*given, **({"rows_at_once": True} | more))


def dense(partition: Partition) -> float:
    return float(partition.versions.values.view(np.float32)[0])


# ---- updated as they come


def test_rows_are_updated_when_they_come_and_variables_with_the_step() -> None:
    partition = hybrid()
    assert push(partition, 1, 0, work({1: 2.0, 3: 8.0}, dense=2.0)) is Outcome.RECORDED
    assert moved(partition) == pytest.approx({1: -1.0, 3: -4.0})
    assert (dense(partition), partition.describe()[0].number) == (0.0, 0)
    assert push(partition, 0, 0, work({1: 4.0}, dense=4.0)) is Outcome.APPLIED
    assert moved(partition) == pytest.approx({1: -3.0, 3: -4.0})
    assert (dense(partition), partition.describe()[0].number) == (-3.0, 1)


def test_each_push_is_an_update_of_its_own_by_the_ranks_part_whatever_samples_it_has() -> None:
    partition = hybrid(4)
    for rank, weight in enumerate((1.0, 5.0, 100.0)):
        push(partition, rank, 0, work({2: 4.0}, weight=weight))
    push(partition, 3, 0, EMPTY)
    assert moved(partition) == pytest.approx({2: -3.0})
    (chunk,) = read_table(partition, 0)
    assert chunk.frequencies.tolist() == [3]


def test_one_rank_alone_gives_the_bits_of_a_synchronous_step() -> None:
    found = []
    for partition in (hybrid(1), partition_of(1)):
        for step in range(3):
            push(partition, 0, step, work({0: 0.3, step: 0.7}, dense=0.1))
        found.append(read(partition).tobytes())
    assert found[0] == found[1]


def test_rows_of_a_rank_are_as_old_as_its_record_says() -> None:
    aging = dataclasses.replace(NARROW, expiry=ExpirySettings(age_ms=60_000))
    partition = hybrid(layout=dataclasses.replace(LAYOUT, tables=(WIDE, aging)), durability=Durability.WAL)
    given = work({1: 2.0}, table=1)
    timed = given._replace(rows=[each._replace(now_ms=77_000) for each in given.rows])
    assert push(partition, 0, 0, timed) is Outcome.RECORDED
    assert partition.tables["narrow"].state.now_ms == 77_000


def test_ranks_may_have_rows_at_different_rates() -> None:
    partition = hybrid()
    push(partition, 0, 0, work({0: 2.0}))
    push(partition, 1, 0, work({1: 2.0}, groups=((0.5, *RATE[1:]), RATE)))
    assert moved(partition) == pytest.approx({0: -1.0, 1: -0.5})


def test_elements_of_each_push_are_clipped_by_value() -> None:
    partition = hybrid(clipping=Clipping(value=1.0))
    push(partition, 0, 0, work({0: 4.0, 1: -0.5}, dense=4.0))
    push(partition, 1, 0, work({0: 4.0}, dense=4.0))
    assert moved(partition) == pytest.approx({0: -1.0, 1: 0.25})
    assert dense(partition) == -1.0


def test_where_a_scaled_loss_overflows_the_rows_of_other_ranks_count() -> None:
    partition = hybrid()
    push(partition, 0, 0, work({0: 2.0}, dense=2.0))
    push(partition, 1, 0, work(dense=2.0)._replace(overflow=True))
    assert moved(partition) == pytest.approx({0: -1.0})
    assert (dense(partition), partition.describe()[0].number) == (0.0, 1)


def test_rows_are_read_as_they_are_and_have_no_versions() -> None:
    partition = hybrid()
    push(partition, 0, 0, work({0: 2.0}))
    with pytest.raises(InvalidRequest, match="version 0 of partition 0, whose rows are updated as they come"):
        read(partition, 0)
    push(partition, 1, 0, work({0: 2.0}))
    assert partition.overlay.last is None
    assert moved(partition) == pytest.approx({0: -2.0})


def test_rows_expire() -> None:
    layout = dataclasses.replace(LAYOUT, tables=(WIDE, dataclasses.replace(EXPIRING, rows_max=1 << 12)))
    partition = hybrid(2, layout)
    for step in range(12):
        for rank in range(2):
            push(partition, rank, step, work({0: 2.0} if step == 0 else {1: 2.0, 2: 2.0}, table=1))
    (chunk,) = read_table(partition, 1)
    assert chunk.ids.size == 2


# ---- what is refused has changed nothing


def test_rows_for_which_there_is_no_room_are_refused_with_their_contribution() -> None:
    partition = hybrid(2, full(3))
    push(partition, 0, 0, work({0: 2.0, 1: 2.0}))
    with pytest.raises(TableFull):
        push(partition, 1, 0, work({2: 2.0, 3: 2.0}, dense=1.0))
    assert moved(partition) == pytest.approx({0: -1.0, 1: -1.0})
    assert push(partition, 1, 0, work({0: 2.0, 2: 2.0})) is Outcome.APPLIED
    assert moved(partition) == pytest.approx({0: -2.0, 1: -1.0, 2: -1.0})


@pytest.mark.parametrize("rank", [0, 1])
def test_memory_that_is_refused_leaves_all_as_it_was(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    partition = hybrid()
    if rank:
        push(partition, 0, 0, work({0: 2.0}, dense=2.0))
    before = moved(partition)

    def refuse(*_: object, **__: object) -> None:
        raise TooLarge("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(row_sums, "scaled", refuse)
        with pytest.raises(TooLarge):
            push(partition, rank, 0, work({1: 2.0}, dense=2.0))
    assert (moved(partition), partition.describe()[0].number) == (before, 0)
    assert partition.torn is None
    push(partition, rank, 0, work({1: 2.0}, dense=2.0))
    assert moved(partition) == pytest.approx(before | {1: -1.0})


def test_rows_that_are_torn_are_not_part_of_a_contribution() -> None:
    partition = hybrid()

    def refuse(_: str) -> None:
        raise MemoryError

    with armed("rows.before_update", refuse, at=1), pytest.raises(MemoryError):
        push(partition, 0, 0, work({0: 1.0}, dense=1.0))
    assert isinstance(partition.torn, Internal)
    assert partition.ledger.next(SourceKey(RankSource(Rank(0)))) == 0
    with pytest.raises(Internal):
        push(partition, 0, 0, work({0: 1.0}))


# ---- the lane of rows


def key(rank: int) -> SourceKey:
    return SourceKey(RankSource(Rank(rank)))


def test_rule_a1_the_ledger_has_a_lane_for_rows() -> None:
    ledger = Ledger(PARTITION)
    ledger.open(key(0), Token(1))
    first, second = (PushName(key(0), Token(1), step, step) for step in (4, 5))
    assert ledger.counts_rows(first)
    ledger.advance_rows(first)
    assert not ledger.counts_rows(first)
    assert ledger.counts_rows(second)
    assert ledger.next(key(0)) == 0
    assert SourceMark(key(0).of_rows, Token(0), 5) in ledger.marks()
    other = Ledger(PARTITION)
    other.restore(ledger.marks(), ledger.floor)
    assert not other.counts_rows(first)
    assert other.counts_rows(second)


def saved_in_the_midst_of_step_1(tmp_path: Path) -> Restore:
    """Rank 0 has contributed to it, and its rows have counted; rank 1 has not."""
    store = server()
    partition = only(store)
    for rank in range(2):
        push(partition, rank, 0, work({0: 2.0}, dense=2.0))
    push(partition, 0, 1, work({1: 2.0}, dense=4.0))
    (saved,) = orders.save(store, Caller(JOB, term=Term(1)), HERE, GENERATION, SaveRequest(1, 1, 0, 0), str(tmp_path))
    push(partition, 1, 1, work({0: 64.0}))  # never happened
    assert saved.version.number == 1
    return Restore(
        str(tmp_path), (PartitionEntry(saved.partition, Version(2, 1), (saved.file,), saved.tables),), job=JOB
    )


@pytest.mark.parametrize("rows_at_once", [True, False], ids=["hybrid", "sync"])
def test_rule_a1_rows_that_a_checkpoint_has_do_not_count_again_and_their_contribution_does(
    tmp_path: Path, rows_at_once: bool
) -> None:
    """The next run may be synchronous."""
    partition = only(server(saved_in_the_midst_of_step_1(tmp_path), rows_at_once=rows_at_once))
    assert moved(partition) == pytest.approx({0: -2.0, 1: -1.0})
    assert push(partition, 0, 1, work({1: 2.0, 2: 50.0}, dense=4.0)) is Outcome.RECORDED
    assert push(partition, 1, 1, work({0: 2.0}, dense=4.0)) is Outcome.APPLIED
    assert moved(partition) == pytest.approx({0: -3.0, 1: -1.0})
    assert dense(partition) == -6.0
    for rank in range(2):
        push(partition, rank, 2, work({1: 2.0}))
    assert moved(partition) == pytest.approx({0: -3.0, 1: -3.0})


def test_rule_b7_marks_of_a_checkpoint_end_with_its_step_but_for_rows(tmp_path: Path) -> None:
    partition = only(server(saved_in_the_midst_of_step_1(tmp_path)))
    marks = {mark.key: mark.next for mark in partition.ledger.marks()}
    assert marks == {key(0): 1, key(1): 1, key(0).of_rows: 2, key(1).of_rows: 1}


def test_work_that_does_not_count_may_count_with_its_rows_when_it_is_computed_again() -> None:
    partition = hybrid()
    push(partition, 0, 0, EMPTY)
    push(partition, 1, 0, work()._replace(overflow=True))
    assert {mark.key for mark in partition.ledger.marks()} == {key(0), key(1)}
    push(partition, 0, 1, work())
    push(partition, 1, 1, work({0: 2.0}))
    marks = {mark.key: mark.next for mark in partition.ledger.marks()}
    assert marks == {key(0): 2, key(1): 2, key(0).of_rows: 2, key(1).of_rows: 2}


def test_rows_that_have_counted_need_no_room(tmp_path: Path) -> None:
    partition = only(server(saved_in_the_midst_of_step_1(tmp_path)))
    table = partition.tables["wide"]
    table.settings = dataclasses.replace(table.settings, rows_max=2)
    assert push(partition, 0, 1, work({3: 2.0, 4: 2.0})) is Outcome.RECORDED


def test_who_takes_over_a_rank_is_told_what_of_its_rows_has_counted(tmp_path: Path) -> None:
    store = server(saved_in_the_midst_of_step_1(tmp_path))
    leased = [(each, Token(2)) for rank in range(2) for each in (key(rank), key(rank).of_rows)]
    found = {each: mark.next for each, (mark,) in pushes.open_sources(store.hosted()[0], leased)}
    assert found == {key(0): 1, key(0).of_rows: 2, key(1): 1, key(1).of_rows: 1}


def test_a_synchronous_job_has_no_lane_of_rows() -> None:
    store = server(rows_at_once=False)
    with pytest.raises(InvalidRequest, match="logical rank 0, lane 1, to be opened"):
        pushes.open_sources(store.hosted()[0], [(key(0).of_rows, Token(1))])


# ---- what cannot be


@pytest.mark.parametrize(
    ("mode", "given", "text"),
    [
        (UpdateMode.ASYNC, {}, "which is async with 0 backup workers, to be updated before"),
        (UpdateMode.SYNC, {"backup_workers": 1}, "which is sync with 1 backup workers, to be updated before"),
        (UpdateMode.SYNC, {"clipping": Clipping(norm=1.0)}, "to be clipped by norm"),
    ],
)
def test_what_rows_that_are_updated_early_cannot_be_part_of_is_refused(
    mode: UpdateMode, given: dict[str, Any], text: str
) -> None:
    store = made()
    with pytest.raises(InvalidRequest, match=text):
        orders.create(
            store, CreateRequest(JOB, GENERATION, LAYOUT, [PARTITION], UpdateRules(mode, 2, rows_at_once=True, **given))
        )
    assert not store.hosted()


def test_another_rule_for_rows_is_another_job() -> None:
    store = server()
    with pytest.raises(InvalidRequest, match="backup workers or rows"):
        orders.create(store, CreateRequest(JOB, GENERATION, LAYOUT, [PARTITION], UpdateRules(UpdateMode.SYNC, 2)))
    orders.create(
        store,
        CreateRequest(
            JOB,
            GENERATION,
            LAYOUT,
            [PARTITION],
            UpdateRules(UpdateMode.SYNC, 2, clipping=NO_CLIPPING, rows_at_once=True),
        ),
    )


@pytest.mark.parametrize(
    ("tables", "given", "text"),
    [
        ((WIDE, EXPIRING), {}, ""),
        ((WIDE,), {"job.clip.value": 1.0}, ""),
        ((), {"job.clip.norm": 1.0}, ""),
        ((WIDE,), {"job.clip.norm": 1.0}, "in a job with job.clip.norm 1 and job.consistency.mode hybrid"),
        (
            (dataclasses.replace(NARROW, expiry=ExpirySettings(age_ms=5)),),
            {"job.durability": "wal"},
            "",
        ),
    ],
)
def test_the_coordinator_refuses_tables_that_a_hybrid_job_cannot_have(
    tables: tuple[TableSettings, ...], given: dict[str, Any], text: str
) -> None:
    settings = configuration.load(None, {}, {"job.consistency.mode": "hybrid"} | given).settings.job
    if not text:
        check_settings(tables, settings)
        return
    with pytest.raises(ConfigurationError, match=text):
        check_settings(tables, settings)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"backup_workers": 1, "logical_ranks": 3}, "expected backup workers only in"),
        ({"staleness_scaling": "inverse"}, "mode async or bounded with staleness_scaling"),
        ({"delay_compensation": 1.0}, "mode async or bounded with delay_compensation"),
    ],
)
def test_settings_that_do_not_fit_hybrid_mode_are_refused(given: dict[str, Any], text: str) -> None:
    said = {f"job.consistency.{name}": value for name, value in given.items()}
    with pytest.raises(ConfigurationError, match=text):
        configuration.load(None, {}, {"job.consistency.mode": "hybrid"} | said)


def test_the_job_of_another_number_is_not_meant(tmp_path: Path) -> None:
    """Ranks mean the same work in the next run, whose job has another number."""
    restore = dataclasses.replace(saved_in_the_midst_of_step_1(tmp_path), job=JobId(77))
    partition = only(server(restore))
    push(partition, 0, 1, work({1: 64.0}))
    assert moved(partition) == pytest.approx({0: -2.0, 1: -1.0})
