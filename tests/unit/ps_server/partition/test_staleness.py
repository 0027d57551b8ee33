"""What is known of stale gradients: how old they are, what is kept for whom, what is counted. Without arithmetic."""

from __future__ import annotations

import numpy as np
import pytest

from shardyard.domain.consistency import StaleRule
from shardyard.domain.errors import InvalidRequest
from shardyard.domain.ids import Incarnation, PartitionId, Version
from shardyard.domain.optimizers import KINDS, make_group
from shardyard.domain.tables.row_optimizers import KINDS as ROW_KINDS
from shardyard.domain.tables.row_optimizers import make_group as row_group
from shardyard_ps_server.partition.staleness import GIVEN_KEPT, Base, Staleness, Tally
from shardyard_ps_server.values.versions import Bytes

ANNA, BOB = Incarnation(10), Incarnation(11)


class Buffers:
    """Counts who holds what."""

    def __init__(self) -> None:
        self.held: list[int] = []

    def hold(self, buffer: Bytes) -> None:
        self.held.append(int(buffer[0]))

    def release(self, buffer: Bytes) -> None:
        self.held.remove(int(buffer[0]))


def version(number: int) -> Bytes:
    return np.array([number], np.uint8)


def made(*, compensation: float = 1.0, logged: bool = False, kind: str = "sgd") -> tuple[Staleness, Buffers]:
    buffers = Buffers()
    rule = StaleRule(divides_rate=True, compensation=compensation)
    return Staleness(rule, PartitionId(3), kind, buffers, logged=logged), buffers


def base(number: int, *, life: int = 1, worker: Incarnation = ANNA) -> Base:
    return Base(worker, Version(life, number))


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize(("staleness", "divisor"), [(0, 1), (1, 1), (2, 2), (7, 7)])
def test_rate_of_every_group_is_divided_by_the_staleness_and_nothing_else_changes(
    kind: str, staleness: int, divisor: int
) -> None:
    stale, _ = made(kind=kind)
    groups = (make_group(kind, {"lr": 0.7}), make_group(kind, {"lr": 0.3}))
    expected = tuple(make_group(kind, {"lr": rate / divisor}) for rate in (0.7, 0.3))
    assert stale.groups(groups, staleness) == expected


@pytest.mark.parametrize("kind", sorted(set(ROW_KINDS) - {"ftrl"}))
def test_rate_of_every_table_is_divided_by_the_staleness(kind: str) -> None:
    stale = Staleness(
        StaleRule(divides_rate=True), PartitionId(0), "sgd", Buffers(), logged=True, row_kinds=["sgd", kind]
    )
    groups = (row_group("sgd", {"lr": 0.5}), row_group(kind, {"lr": 0.7}))
    assert stale.row_groups(groups, 4) == (row_group("sgd", {"lr": 0.5 / 4}), row_group(kind, {"lr": 0.7 / 4}))
    assert stale.row_groups(groups, 1) is groups
    assert stale.row_groups((), 4) == (), "a push without rows"


def test_rates_stay_where_only_the_compensation_is_asked_for() -> None:
    stale = Staleness(StaleRule(compensation=0.1), PartitionId(0), "sgd", Buffers(), logged=False)
    groups = (make_group("sgd", {"lr": 0.7}),)
    assert stale.groups(groups, 9) is groups


def test_staleness_is_what_was_applied_since() -> None:
    stale, _ = made()
    assert [stale.staleness(base(number), Version(1, 7)) for number in (7, 6, 0)] == [0, 1, 7]
    assert stale.staleness(None, Version(1, 7)) == 0


def test_of_an_earlier_life_only_what_the_present_one_has_counts() -> None:
    stale, _ = made()
    stale.restored(Version(2, 100))
    now = Version(2, 105)
    assert stale.staleness(base(90), now) == 15
    assert stale.staleness(base(100), now) == 5
    assert stale.staleness(base(130), now) == 5, "30 of its updates are lost, and count for nobody"
    assert stale.staleness(base(103, life=2), now) == 2


def test_with_logs_numbers_mean_the_same_in_each_life() -> None:
    stale, _ = made(compensation=0, logged=True)
    stale.restored(Version(2, 100))  # from where the log is replayed
    assert stale.staleness(base(103), Version(2, 105)) == 2
    assert stale.staleness(base(130), Version(2, 105)) == 0


@pytest.mark.parametrize("lie", [base(8, life=2), base(1, life=3)])
def test_version_that_there_was_never_is_refused(lie: Base) -> None:
    stale, _ = made()
    newest = Version(2, 7)
    for good in (None, base(7, life=2), base(900)):
        stale.check(good, newest)
    with pytest.raises(InvalidRequest, match=r"partition 3 .*it is at version 7 in life 2"):
        stale.check(lie, newest)


def test_what_a_worker_was_given_is_kept_until_it_has_gone_on() -> None:
    stale, buffers = made()
    stale.keep(ANNA, Version(1, 1), version(1))
    stale.keep(ANNA, Version(1, 1), version(1))  # asked again
    stale.keep(BOB, Version(1, 1), version(1))
    stale.keep(ANNA, Version(1, 4), version(4))
    assert buffers.held == [1, 1, 4]
    stale.passed(base(1))
    assert buffers.held == [1, 1, 4], "a window computes on a version twice"
    assert stale.find(base(1)) is not None
    stale.passed(base(4))
    assert buffers.held == [1, 4]
    assert stale.find(base(1)) is None
    assert stale.find(base(1, worker=BOB)) is not None
    assert stale.find(base(4, life=2)) is None
    assert stale.find(None) is None


def test_no_worker_has_more_kept_than_the_limit_however_often_it_asks() -> None:
    stale, buffers = made()
    for number in range(20):
        stale.keep(ANNA, Version(1, number), version(number))
    assert buffers.held == list(range(20 - GIVEN_KEPT, 20))


@pytest.mark.parametrize("how", ["gone", "restored", "all"])
def test_nothing_stays_kept_for_who_is_gone_nor_of_another_life(how: str) -> None:
    stale, buffers = made()
    for worker in (ANNA, BOB):
        stale.keep(worker, Version(1, 1), version(1))
    if how == "gone":
        stale.forget(ANNA)
        stale.forget(ANNA)
        assert buffers.held == [1]
        stale.forget(BOB)
    elif how == "restored":
        stale.restored(Version(2, 1))
    else:
        stale.forget()
    assert buffers.held == []


def test_without_compensation_nothing_is_kept() -> None:
    stale, buffers = made(compensation=0)
    stale.keep(ANNA, Version(1, 1), version(1))
    assert buffers.held == []


def test_what_is_counted() -> None:
    stale, _ = made()
    stale.count(base(1), 3, compensated=True)
    stale.count(base(1), 5, compensated=False)
    stale.count(None, 0, compensated=True)
    assert stale.tally == Tally(gradients=2, total=8, most=5, uncompensated=1)
    scaled, _ = made(compensation=0)
    scaled.count(base(1), 5, compensated=False)
    assert scaled.tally == Tally(gradients=1, total=5, most=5, uncompensated=0)
