"""PushedTableRows of tables in synchronous steps (docs/internals/ledger.md, rules B1 to B3, B6): summed over the ranks
that count, once an id, and readable as of two versions."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardyard.checkpoints.manifest import PartitionEntry
from shardyard.domain.consistency import Clipping, UpdateMode
from shardyard.domain.errors import (
    Internal,
    InvalidRequest,
    NotFound,
    NotReady,
    RateMismatch,
    TableFull,
    TooLarge,
)
from shardyard.domain.ids import Caller, Generation, Rank, Term, Token, Version
from shardyard.domain.optimizers import make_group
from shardyard.domain.push_names import PushName, RankSource, SourceKey
from shardyard.domain.pushes import Outcome, PushHeader, PushKind, StepVerdict
from shardyard.runtime.failpoints import armed
from shardyard_ps_server.checkpoint.restore import Restore
from shardyard_ps_server.checkpoint.saver import SaveRequest
from shardyard_ps_server.hosting import orders, pushes
from shardyard_ps_server.hosting.hosted_job import CreateRequest
from shardyard_ps_server.partition import next_version, reads
from shardyard_ps_server.partition.partition import Partition
from shardyard_ps_server.partition.reads import read_table
from shardyard_ps_server.partition.sync_step import gathered_part, take_verdict
from shardyard_ps_server.partition.update_rules import UpdateRules
from shardyard_ps_server.rows import partition_tables, row_sums
from tests.support.rows_in_pushes import GENERATION, HERE, JOB, RATE, WORKER, closed
from tests.support.rows_in_steps import (
    HALF,
    IDS,
    INITIAL,
    LAYOUT,
    PARTITION,
    current,
    full,
    judge,
    moved,
    only,
    partition_of,
    push,
    read,
    server,
    work,
)

__all__ = ["closed"]

# ---- sums


ADAGRAD = make_group("adagrad", {"lr": 1.0})


def test_ranks_that_disagree_on_a_tables_rate_are_refused() -> None:
    partition = partition_of(3)
    push(partition, 0, 0, work({1: 1.0}))
    push(partition, 1, 0, work())
    with pytest.raises(RateMismatch, match=r"in table 1, not .* of logical rank 0"):
        push(partition, 2, 0, work({2: 1.0}, groups=(RATE, HALF)))
    assert push(partition, 2, 0, work({2: 3.0})) is Outcome.APPLIED
    assert moved(partition) == pytest.approx({1: -1 / 3, 2: -1.0})


def test_rates_of_a_step_are_those_that_came_with_its_rows() -> None:
    partition = partition_of(2)
    push(partition, 0, 0, work())
    push(partition, 1, 0, work({1: 4.0}, groups=(HALF, RATE)))
    assert moved(partition) == pytest.approx({1: -1.0})


def test_rows_of_a_step_may_be_more_than_one_push_can_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition_tables, "ROWS_PER_PART_MAX", 3)
    partition = partition_of(2)
    push(partition, 0, 0, work({0: 2.0, 1: 2.0, 2: 2.0}))
    push(partition, 1, 0, work({2: 2.0, 3: 2.0, 4: 4.0}))
    assert moved(partition) == pytest.approx({0: -1.0, 1: -1.0, 2: -2.0, 3: -1.0, 4: -2.0})
    assert moved(partition, 0) == {}


# ---- room


def test_room_is_made_sure_of_when_rows_are_recorded_not_when_the_step_is_taken() -> None:
    partition = partition_of(3, full(5))
    push(partition, 0, 0, work({0: 3.0, 1: 3.0}))
    push(partition, 1, 0, work({1: 3.0, 2: 3.0, 3: 3.0}))
    for refused in ({4: 3.0, 5: 3.0}, {0: 1.0, 5: 1.0, 6: 1.0}):
        with pytest.raises(TableFull, match="at most 5 are kept"):
            push(partition, 2, 0, work(refused))
        assert partition.describe()[0].number == 0
        assert moved(partition) == {}
    assert push(partition, 2, 0, work({0: 3.0, 4: 3.0})) is Outcome.APPLIED
    assert moved(partition) == pytest.approx({0: -2.0, 1: -2.0, 2: -1.0, 3: -1.0, 4: -1.0})
    with pytest.raises(TableFull):
        push(partition, 0, 1, work({7: 1.0}))
    assert push(partition, 0, 1, work({0: 1.0, 4: 1.0})) is Outcome.RECORDED


def test_a_rank_alone_that_is_too_large_is_not_recorded() -> None:
    partition = partition_of(2, full(2))
    with pytest.raises(TableFull):
        push(partition, 0, 0, work({0: 1.0, 1: 1.0, 2: 1.0}))
    assert push(partition, 0, 0, work({0: 1.0, 1: 1.0})) is Outcome.RECORDED


@pytest.mark.parametrize("place", ["mean_of", "set_aside"])
def test_a_step_for_which_memory_is_refused_has_changed_nothing(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    partition = partition_of(2)
    push(partition, 0, 0, work({0: 1.0}, dense=1.0))

    def refuse(*_: object, **__: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        if place == "mean_of":
            patch.setattr(row_sums.np, "empty_like", refuse)
            patch.setattr(row_sums.np, "unique", refuse)
        else:
            patch.setattr(partition_tables.np, "empty", refuse)
        with pytest.raises(TooLarge):
            push(partition, 1, 0, work({1: 1.0}, dense=1.0))
    assert partition.describe()[0].number == 0
    assert partition.torn is None
    assert push(partition, 1, 0, work({1: 1.0}, dense=1.0)) is Outcome.APPLIED
    assert moved(partition) == pytest.approx({0: -0.5, 1: -0.5})


# ---- two versions


def test_rule_b3_rows_are_read_as_the_last_two_versions_have_them() -> None:
    partition = partition_of(1)
    push(partition, 0, 0, work({0: 1.0, 1: 1.0}))
    push(partition, 0, 1, work({1: 2.0, 2: 4.0}))
    assert moved(partition, 1) == pytest.approx({0: -1.0, 1: -1.0})
    assert moved(partition, 2) == moved(partition) == pytest.approx({0: -1.0, 1: -3.0, 2: -4.0})
    with pytest.raises(NotFound, match="version 0 of partition 0, whose newest is 2") as passed:
        read(partition, 0)
    assert passed.value.facts["newest"] == "2"


def test_rows_of_which_nothing_was_pushed_are_the_same_in_both_versions() -> None:
    partition = partition_of(1)
    push(partition, 0, 0, work({0: 1.0}))
    push(partition, 0, 1, work())
    assert moved(partition, 1) == moved(partition, 2) == pytest.approx({0: -1.0})
    with pytest.raises(NotFound):
        read(partition, 0)
    push(partition, 0, 2, work({0: 1.0}))
    assert moved(partition, 2) == pytest.approx({0: -1.0})


def test_what_is_kept_of_the_version_before_is_one_steps_rows() -> None:
    partition = partition_of(2)
    for step in range(20):
        push(partition, 0, step, work({0: 1.0, 1: 1.0, step % 10 + 2: 1.0}))
        push(partition, 1, step, work({0: 1.0, 1: 1.0}))
        assert partition.overlay.last is not None
        assert partition.overlay.last.number == step
        assert sum(ids.size for ids, _ in partition.overlay.last.rows.values()) == 3


@pytest.mark.parametrize("clipping", [Clipping(), Clipping(norm=1.0)])
def test_a_look_up_sees_one_version_however_far_an_update_is(
    monkeypatch: pytest.MonkeyPatch, clipping: Clipping
) -> None:
    partition = partition_of(1, clipping=clipping)
    push(partition, 0, 0, work({0: 0.5}))
    judge(partition, 0)
    seen: list[tuple[dict[int, float], dict[int, float]]] = []
    real = next_version.push_rows

    def look() -> None:
        seen.append((moved(partition), moved(partition, 1)))
        with pytest.raises(NotReady):
            read(partition, 2)

    def and_after(pushes: Any) -> None:
        real(pushes)
        look()  # rows are changed, the version is not there

    monkeypatch.setattr(next_version, "push_rows", and_after)
    with armed("rows.before_update", lambda _: look()):
        push(partition, 0, 1, work({0: 0.5, 1: 0.5}))
        judge(partition, 1)
    before = {0: pytest.approx(seen[0][0][0])}
    assert seen == [(before, before)] * 2
    assert moved(partition).keys() == {0, 1}
    assert moved(partition, 1) == before


def test_a_look_up_waits_for_a_version_as_a_pull_does() -> None:
    partition = partition_of(2)
    push(partition, 0, 0, work({0: 2.0}))
    with pytest.raises(NotReady, match="version 1 of partition 0, which is at version 0 and waits for logical rank 1"):
        read(partition, 1)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(read, partition, 1, wait_s=30)
        push(partition, 1, 0, work({1: 2.0}))
        found = waiting.result(30)
    assert (found - INITIAL)[[0, 1], 0].tolist() == pytest.approx([-1.0, -1.0])


def test_a_look_up_of_what_waits_for_a_verdict_is_answered_at_once() -> None:
    partition = partition_of(1, clipping=Clipping(norm=1.0))
    push(partition, 0, 0, work({0: 2.0}))
    begin = threading.Event()
    with pytest.raises(NotReady, match="the verdict on step 0"):
        read(partition, 1, wait_s=600)
    assert not begin.is_set()


def test_a_reader_that_is_overtaken_by_two_steps_is_told_or_reads_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    partition = partition_of(1)
    push(partition, 0, 0, work({0: 1.0}))
    real = reads.read_rows
    steps = iter(range(1, 100))

    def overtaken(given: Any) -> None:
        real(given)
        if len(overtakes) < 2:
            overtakes.append(1)
            push(partition, 0, next(steps), work({0: 1.0}))
            push(partition, 0, next(steps), work({1: 1.0}))

    overtakes: list[int] = []
    monkeypatch.setattr(reads, "read_rows", overtaken)
    with pytest.raises(NotFound, match="version 1 of partition 0, whose newest is"):
        read(partition, 1)
    overtakes.clear()
    found = read(partition)
    assert len(overtakes) == 2
    assert (found - INITIAL)[[0, 1], 0].tolist() == pytest.approx([-4.0, -3.0])


def test_an_asynchronous_partition_has_no_versions_of_rows() -> None:
    partition = Partition(LAYOUT, PARTITION, UpdateRules(UpdateMode.ASYNC, 0))
    partition.open()
    read(partition)
    with pytest.raises(InvalidRequest, match="whose rows are updated as they come"):
        read(partition, 0)
    assert partition.overlay.last is None


def test_all_rows_are_read_between_two_updates() -> None:
    partition = partition_of(1)
    push(partition, 0, 0, work({0: 1.0}))
    asked: list[Future[Any]] = []
    with ThreadPoolExecutor(1) as pool:

        def ask(_: str) -> None:  # while the update has the turn
            asked.append(pool.submit(lambda: list(read_table(partition, 0))))
            with pytest.raises(TimeoutError):
                asked[0].result(0.3)

        with armed("rows.before_update", ask):
            push(partition, 0, 1, work({0: 1.0, 1: 1.0}))
        (chunk,) = asked[0].result(30)
    assert sorted(chunk.ids.tolist()) == IDS[:2].tolist()


# ---- verdicts


def test_squares_of_rows_belong_to_the_norm_and_rows_are_scaled() -> None:
    partition = partition_of(2, clipping=Clipping(norm=1.0))
    push(partition, 0, 0, work({0: 4.0}, dense=1.0))
    push(partition, 1, 0, work({1: 8.0}, dense=1.0))
    told = gathered_part(partition, 0)
    assert told is not None
    assert told.square_norm == 16 * 1.0 + 2 * (2.0**2 + 4.0**2)
    assert moved(partition) == {}
    take_verdict([partition], StepVerdict(0, told.square_norm), current)
    scale = np.float32(1.0 / (told.square_norm**0.5 + 1e-6))
    assert moved(partition) == pytest.approx({0: -2.0 * scale, 1: -4.0 * scale})
    assert moved(partition, 0) == {}
    values = partition.versions.values.view(np.float32)
    assert values.tolist() == pytest.approx([-float(scale)] * 16)


def test_a_norm_below_the_limit_leaves_rows_as_they_are() -> None:
    partition = partition_of(1, clipping=Clipping(norm=100.0))
    push(partition, 0, 0, work({0: 4.0}))
    judge(partition, 0)
    assert moved(partition) == pytest.approx({0: -4.0})


def test_rows_of_a_rank_that_came_late_change_nothing() -> None:
    partition = partition_of(3, backup_workers=1)
    push(partition, 0, 0, work({0: 2.0}))
    push(partition, 2, 0, work({1: 2.0}))
    take_verdict([partition], StepVerdict(0, None, (Rank(0), Rank(1))), current)
    assert moved(partition) == {}
    assert push(partition, 2, 0, work({2: 2.0})) is Outcome.DROPPED
    assert push(partition, 1, 0, work({3: 4.0})) is Outcome.APPLIED
    assert moved(partition) == pytest.approx({0: -1.0, 3: -2.0})
    assert push(partition, 2, 0, work({2: 2.0})) is Outcome.DROPPED
    assert moved(partition) == pytest.approx({0: -1.0, 3: -2.0})


def test_a_torn_step_is_never_half_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    partition = partition_of(1)

    def refuse(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(next_version, "push_rows", refuse)
    with pytest.raises(MemoryError):
        push(partition, 0, 0, work({0: 1.0}, dense=1.0))
    assert partition.describe()[0].number == 0
    assert isinstance(partition.torn, Internal)
    for ask in (lambda: read(partition), lambda: push(partition, 0, 0, work({0: 1.0}))):
        with pytest.raises(Internal, match="rows of update 1 of partition 0"):
            ask()


def test_a_step_that_a_verdict_tears_stops_the_server() -> None:
    told: list[Any] = []
    store = server(on_failure=told.append, clipping=Clipping(norm=1.0))
    partition = only(store)
    for rank in range(2):
        push(partition, rank, 0, work({0: 1.0}))
    gathered = gathered_part(partition, 0)
    assert gathered is not None

    def fail(name: str) -> None:
        raise MemoryError(name)

    name = PushName(SourceKey(RankSource(Rank(0))), Token(1), 0, 0)
    order = PushHeader(Caller(JOB, WORKER), HERE, GENERATION, name, PushKind.NOTHING, (), 0.0, ())
    with armed("rows.before_update", fail, at=1), pytest.raises(MemoryError):
        pushes.take_verdict(store, store.hosted()[0], order, StepVerdict(0, gathered.square_norm))
    assert [type(each) for each in told] == [Internal]


# ---- checkpoints


def steps(partition: Partition, begin: int, end: int) -> None:
    for step in range(begin, end):
        for rank in range(2):
            push(partition, rank, step, work({step: 2.0, step + rank: 4.0}))


def test_rule_b7_a_checkpoint_of_a_step_has_its_rows_and_comes_back_to_the_bit(tmp_path: Path) -> None:
    store = server()
    partition = only(store)
    steps(partition, 0, 3)
    with ThreadPoolExecutor(1) as pool:
        order = SaveRequest(1, 5, 0, 30_000)
        saving = pool.submit(orders.save, store, Caller(JOB, term=Term(1)), HERE, GENERATION, order, str(tmp_path))
        until = time.monotonic() + 30
        while partition.named_cut is None:
            assert time.monotonic() < until
        steps(partition, 3, 5)
        then = read(partition)
        push(partition, 0, 5, work({0: 64.0}))
        push(partition, 1, 5, work({15: 64.0}))
        (saved,) = saving.result(30)
    assert saved.version.number == 5
    assert read(partition).tobytes() != then.tobytes()
    version = Version(2, 5)
    entry = PartitionEntry(saved.partition, version, (saved.file,), saved.tables)
    other = only(server(Restore(str(tmp_path), (entry,))))
    assert other.describe()[0] == version
    assert read(other).tobytes() == read(other, 5).tobytes() == then.tobytes()
    with pytest.raises(NotFound):
        read(other, 4)
    for rank, place in ((0, 0), (1, 15)):
        push(other, rank, 5, work({place: 64.0}))
    assert read(other).tobytes() == read(partition).tobytes()
    assert read(other, 5).tobytes() == then.tobytes()


def test_what_was_set_aside_is_nobodys_after_a_restore(tmp_path: Path) -> None:
    store = server()
    partition = only(store)
    steps(partition, 0, 2)
    (saved,) = orders.save(store, Caller(JOB, term=Term(1)), HERE, GENERATION, SaveRequest(1, 2, 0, 0), str(tmp_path))
    then = read(partition)
    steps(partition, 2, 4)
    assert partition.overlay.last is not None
    entry = PartitionEntry(saved.partition, Version(2, 2), (saved.file,), saved.tables)
    orders.create(
        store,
        CreateRequest(
            JOB,
            Generation(5),
            LAYOUT,
            [PARTITION],
            UpdateRules(UpdateMode.SYNC, 2),
            Restore(str(tmp_path), (entry,), job=JOB),
        ),
    )
    assert only(store).overlay.last is None
    assert read(only(store)).tobytes() == then.tobytes()
    with pytest.raises(NotFound):
        read(only(store), 1)
