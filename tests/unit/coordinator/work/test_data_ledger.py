"""Feeds: data shards leased, given back, done; ranges of steps."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from shardyard.domain.errors import FeedConflict, InvalidRequest, NotFound, StaleToken, TooLarge
from shardyard.domain.ids import Incarnation, Token
from shardyard.domain.limits import SAMPLES_MAX
from shardyard.domain.push_names import DataLease, DataShardSource
from shardyard_coordinator.work.data_ledger import DataLedger
from shardyard_coordinator.work.feeds import FeedDone, FeedSpec, LeaseWait
from shardyard_coordinator.work.step_ledger import StepLedger

A, B = Incarnation(11), Incarnation(12)
SPEC = FeedSpec(samples=100, fingerprint="f", batch_size=10, epochs=2, shuffle=True, drop_last=False)


def ledger(batches: int | None = 5, workers: int = 1) -> DataLedger:
    numbers = itertools.count(1)
    return DataLedger(batches_per_data_shard=batches, workers_expected=workers, next_token=lambda: Token(next(numbers)))


def leased(books: DataLedger, worker: Incarnation, feed: int = 0) -> DataLease:
    found = books.lease(feed, worker)
    assert isinstance(found, DataLease), found
    return found


def done(books: DataLedger, lease: DataLease, worker: Incarnation, next_sequence: int = 5) -> bool:
    return books.close(lease.source, worker, lease.token, next_sequence=next_sequence)


def spec(**changes: object) -> FeedSpec:
    return dataclasses.replace(SPEC, **changes)  # type: ignore[arg-type]


def test_data_shards_are_leased_in_order_through_the_epochs() -> None:
    books = ledger()
    opening = books.open(0, SPEC)
    assert (opening.batches_per_data_shard, opening.units_per_epoch, opening.done) == (5, 2, False)
    found = []
    for _ in range(4):
        lease = leased(books, A)
        found.append((lease.source.epoch, lease.source.index, lease.begin, lease.end))
        assert done(books, lease, A)
    assert found == [(0, 0, 0, 50), (0, 1, 50, 100), (1, 0, 0, 50), (1, 1, 50, 100)]
    assert books.lease(0, A) == FeedDone()
    assert books.open(0, SPEC).done


def test_next_epoch_begins_while_others_hold_the_former() -> None:
    books = ledger()
    books.open(0, SPEC)
    leased(books, A)
    done(books, leased(books, B), B)
    assert leased(books, B).source == DataShardSource(0, 1, 0)


def test_worker_that_asks_again_gets_the_same_lease() -> None:
    books = ledger()
    books.open(0, SPEC)
    assert leased(books, A) == leased(books, A)


def test_worker_that_names_its_leases_gets_another_one() -> None:
    books = ledger()
    books.open(0, spec())
    first = leased(books, A)
    second = books.lease(0, A, known=[first.token])
    assert isinstance(second, DataLease)
    assert second.source.index == first.source.index + 1
    assert books.lease(0, A, known=[first.token]) == second, "the answer was lost"
    assert leased(books, A) == first
    assert books.held(A) == [first.source, second.source]
    assert done(books, first, A)
    assert leased(books, A) == second


def test_all_data_shards_of_the_dead_are_free() -> None:
    books = ledger()
    books.open(0, spec())
    first = leased(books, A)
    second = books.lease(0, A, known=[first.token])
    assert isinstance(second, DataLease)
    assert books.release(A) == [first.source, second.source]
    assert [leased(books, B).source] == [first.source]


def test_data_shards_of_the_dead_come_first_and_under_a_higher_token() -> None:
    books = ledger()
    books.open(0, SPEC)
    first = leased(books, A)
    done(books, leased(books, B), B)
    assert books.release(A) == [first.source]
    again = leased(books, B)
    assert again.source == first.source
    assert again.token > first.token
    with pytest.raises(StaleToken, match=r"does not hold data shard 0\.0\.0 under token 1; worker 12 under token 3"):
        done(books, first, A)


def test_given_back_data_shards_keep_the_order_of_epochs() -> None:
    books = ledger()
    books.open(0, SPEC)
    held = [leased(books, Incarnation(number)) for number in (1, 2, 3)]
    for number in (1, 3, 2):
        books.release(Incarnation(number))
    assert [leased(books, Incarnation(9 + turn)).source for turn in range(3)] == [each.source for each in held]


def test_unfinished_data_shard_is_free_again() -> None:
    books = ledger()
    books.open(0, SPEC)
    lease = leased(books, A)
    assert not done(books, lease, A, next_sequence=4)
    assert leased(books, B).source == lease.source


def test_close_asked_again_is_answered_alike() -> None:
    books = ledger()
    books.open(0, SPEC)
    lease = leased(books, A)
    assert done(books, lease, A)
    assert done(books, lease, A, next_sequence=0)
    with pytest.raises(StaleToken, match="nobody does"):
        books.close(lease.source, A, Token(lease.token + 1), next_sequence=5)


def test_wait_names_who_holds_what() -> None:
    books = ledger(batches=1)
    books.open(0, spec(samples=50, epochs=1))
    for number in range(1, 6):
        leased(books, Incarnation(number))
    answer = books.lease(0, A)
    assert isinstance(answer, LeaseWait)
    expected = "data shard 0.0.0 (worker 1), data shard 0.0.1 (worker 2), data shard 0.0.2 (worker 3) and 2 more"
    assert answer.waiting_for == expected


def test_last_data_shard_has_what_is_left() -> None:
    books = ledger()
    books.open(0, spec(samples=73, epochs=1))
    done(books, leased(books, A), A)
    lease = leased(books, A)
    assert (lease.begin, lease.end) == (50, 73)
    assert not done(books, lease, A, next_sequence=2)
    lease = leased(books, A)
    assert done(books, lease, A, next_sequence=3), "73 - 50 samples are 3 batches of 10"


def test_drop_last_drops_the_last_batch_of_the_epoch_only() -> None:
    books = ledger()
    books.open(0, spec(samples=73, epochs=1, drop_last=True))
    assert (leased(books, A).end, leased(books, B).end) == (50, 70)


@pytest.mark.parametrize(
    ("samples", "workers", "expected"),
    [(100, 1, 2), (100, 100, 1), (100_000_000, 1, 64), (5, 1, 1)],
)
def test_size_of_a_data_shard_is_chosen_for_the_workers_expected(samples: int, workers: int, expected: int) -> None:
    books = ledger(batches=None, workers=workers)
    assert books.open(0, spec(samples=samples)).batches_per_data_shard == expected


def test_feed_of_astronomic_size_costs_nothing() -> None:
    books = ledger()
    books.open(0, spec(samples=SAMPLES_MAX, epochs=1_000_000))
    assert leased(books, A).source == DataShardSource(0, 0, 0)
    (counts,) = books.counts(4)
    assert (counts.leased, counts.done, counts.finished) == (1, 0, False)


@pytest.mark.parametrize(
    "changes",
    [{"samples": 99}, {"fingerprint": "g"}, {"batch_size": 9}, {"epochs": 3}, {"shuffle": False}, {"drop_last": True}],
)
def test_feed_opened_in_another_way_is_refused_and_says_how(changes: dict[str, object]) -> None:
    (name,) = changes
    said = "its samples differ" if name == "fingerprint" else f"{name}: expected"
    for books in (ledger(), StepLedger(logical_ranks=2)):
        books.open(0, SPEC)
        with pytest.raises(FeedConflict, match=said) as caught:
            books.open(0, spec(**changes))
        assert caught.value.facts == {"differs": name}


def test_feeds_are_opened_in_order() -> None:
    for books in (ledger(), StepLedger(logical_ranks=2)):
        with pytest.raises(FeedConflict, match="expected feed 0"):
            books.open(1, SPEC)


def test_an_opening_says_whether_there_is_a_later_feed() -> None:
    books = ledger()
    assert not books.open(0, SPEC).has_later
    assert not books.open(1, SPEC).has_later
    assert books.open(0, SPEC).has_later


@pytest.mark.parametrize("changes", [{"samples": 0}, {"batch_size": 0}, {"epochs": 0}])
def test_empty_feed_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match="at least 1"):
        ledger().open(0, spec(**changes))


def test_feed_beyond_the_limits_is_refused() -> None:
    with pytest.raises(TooLarge):
        ledger().open(0, spec(samples=SAMPLES_MAX + 1))


def test_feed_that_drop_last_leaves_empty_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="fewer than one batch of 10"):
        ledger().open(0, spec(samples=9, drop_last=True))
    with pytest.raises(InvalidRequest, match="fewer than one step of 3 logical ranks of 30"):
        StepLedger(logical_ranks=3).open(0, spec(samples=29, drop_last=True))


def test_unknown_feed_or_data_shard_is_not_found() -> None:
    books = ledger()
    with pytest.raises(NotFound):
        books.lease(0, A)
    books.open(0, SPEC)
    with pytest.raises(NotFound, match="2 epochs of 2"):
        books.close(DataShardSource(0, 2, 0), A, Token(1), next_sequence=0)


def test_each_feed_is_leased_by_itself() -> None:
    books = ledger()
    books.open(0, SPEC)
    books.open(1, SPEC)
    first, second = leased(books, A, feed=0), leased(books, A, feed=1)
    assert (first.source.feed, second.source.feed) == (0, 1)
    assert len(books.release(A)) == 2


def test_synchronous_feeds_follow_one_another() -> None:
    books = StepLedger(logical_ranks=3)
    first = books.open(0, SPEC)
    assert (first.first_step, first.units_per_epoch, first.done) == (0, 4, False)
    second = books.open(1, spec(drop_last=True))
    assert (second.first_step, second.units_per_epoch) == (8, 3)


def test_synchronous_feed_is_done_when_all_partitions_have_its_last_step() -> None:
    books = StepLedger(logical_ranks=3)
    books.open(0, SPEC)
    assert not books.feed(0).close(7)
    assert books.feed(0).close(8)
    assert books.feed(0).close(0), "done stays done"
    assert books.open(0, SPEC).done


def test_samples_of_done_data_shards_are_counted_whoever_reported_them() -> None:
    books = ledger(batches=3)
    books.open(0, spec(samples=95))
    counts = []
    while not isinstance(books.lease(0, A), FeedDone):
        lease = leased(books, A)
        done(books, lease, A, next_sequence=books.open(0, spec(samples=95)).batches_per_data_shard)
        counts.append(books.samples_done())
    assert counts == [30, 60, 90, 95, 125, 155, 185, 190]
    held = ledger(batches=3)
    held.open(0, spec(samples=95))
    leased(held, A)
    assert held.samples_done() == 0


def test_samples_of_dropped_batches_are_not_counted() -> None:
    books = ledger(batches=3)
    books.open(0, spec(samples=95, epochs=1, drop_last=True))
    for _ in range(3):
        done(books, leased(books, A), A, next_sequence=3)
    assert books.samples_done() == 90


def test_samples_of_steps_are_counted_by_the_step() -> None:
    books = StepLedger(logical_ranks=2)
    books.open(0, spec(samples=95))
    books.open(1, spec(samples=40, epochs=1))
    assert [books.samples_done(step=step) for step in (0, 1, 4, 5, 6, 10, 11, 12)] == [
        0,
        20,
        80,
        95,
        115,
        190,
        210,
        230,
    ]
