"""Who has which logical rank, as workers come and go."""

from __future__ import annotations

import itertools

from shardyard.domain.ids import Incarnation, Token
from shardyard_coordinator.work.ranks import RankBook

A, B, C, D = (Incarnation(number) for number in (11, 12, 13, 14))


def book(ranks: int, expected: int, grace_ms: int = 2_000) -> RankBook:
    numbers = itertools.count(1)
    return RankBook(
        ranks=ranks,
        grace_ms=grace_ms,
        workers_expected=expected,
        next_token=lambda: Token(next(numbers)),
        now_ms=0,
    )


def owners(ranks: RankBook) -> list[Incarnation | None]:
    return [ranks.owner(rank) for rank in ranks.all]


def test_joining_worker_gets_one_unowned_rank_at_once() -> None:
    ranks = book(ranks=3, expected=3)
    ranks.join(A, 0)
    assert owners(ranks) == [A, None, None]
    ranks.join(B, 10)
    assert owners(ranks) == [A, B, None]


def test_all_ranks_are_spread_once_the_expected_workers_are_there() -> None:
    ranks = book(ranks=4, expected=2)
    ranks.join(A, 0)
    ranks.join(B, 0)
    assert owners(ranks) == [A, B, A, B]


def test_missing_workers_are_waited_for_no_longer_than_the_grace_time() -> None:
    ranks = book(ranks=2, expected=2)
    ranks.join(A, 0)
    assert ranks.assign_vacant(1_999) == []
    assert len(ranks.assign_vacant(2_000)) == 1
    assert owners(ranks) == [A, A]


def test_ranks_of_the_dead_wait_for_a_new_worker() -> None:
    ranks = book(ranks=2, expected=2)
    ranks.join(A, 0)
    ranks.join(B, 0)
    ranks.release(A, 100)
    assert owners(ranks) == [None, B]
    ranks.join(C, 200)
    assert owners(ranks) == [C, B]


def test_after_the_grace_time_the_living_take_them_fewest_first() -> None:
    ranks = book(ranks=6, expected=3)
    for worker in (A, B, C):
        ranks.join(worker, 0)
    ranks.release(A, 100)
    assert ranks.assign_vacant(2_099) == []
    ranks.assign_vacant(2_100)
    assert owners(ranks) == [B, B, C, C, B, C]


def test_ranks_of_the_dead_are_spread_at_once_while_enough_live() -> None:
    ranks = book(ranks=2, expected=2)
    for worker in (A, B, C):
        ranks.join(worker, 0)
    assert ranks.of(C) == (), "more workers than ranks: standby"
    ranks.release(A, 100)
    assert owners(ranks) == [C, B]


def test_worker_on_standby_does_not_wait_for_the_grace_time() -> None:
    ranks = book(ranks=2, expected=4)
    for worker in (A, B, C):
        ranks.join(worker, 0)
    ranks.release(B, 100)
    assert owners(ranks) == [A, C]


def test_suspended_worker_keeps_what_it_has_and_gets_no_more() -> None:
    ranks = book(ranks=2, expected=1)
    ranks.join(A, 0)
    ranks.suspend(A)
    assert ranks.assign_vacant(100_000) == []
    assert owners(ranks) == [A, A]
    ranks.join(B, 0)
    assert owners(ranks) == [A, A], "what is the dead worker's waits until it is fenced"
    ranks.release(A, 1)
    assert owners(ranks) == [B, B]


def test_joining_worker_evens_out_with_the_one_that_has_most() -> None:
    ranks = book(ranks=4, expected=1)
    ranks.join(A, 0)
    assert owners(ranks) == [A, A, A, A]
    ranks.join(B, 0)
    assert owners(ranks) == [A, A, B, B]


def test_no_rank_moves_where_it_would_not_help() -> None:
    ranks = book(ranks=2, expected=2)
    ranks.join(A, 0)
    ranks.join(B, 0)
    before = [ranks.of(worker) for worker in (A, B)]
    assert ranks.join(C, 0) == []
    assert ranks.assign_vacant(100_000) == []
    assert [ranks.of(worker) for worker in (A, B)] == before


def test_each_change_of_owner_takes_a_fresh_token() -> None:
    ranks = book(ranks=2, expected=1)
    given = ranks.join(A, 0) + ranks.join(B, 0) + ranks.release(A, 0)
    tokens = [each.token for each in given]
    assert tokens == sorted(set(tokens))
    assert ranks.of(B)[0].token in tokens


def test_ranks_of_a_worker_that_leaves_in_order_go_to_the_others_at_once() -> None:
    ranks = book(ranks=2, expected=2)
    ranks.join(A, 0)
    ranks.join(B, 0)
    ranks.release(A, 100, is_awaited=False)
    assert owners(ranks) == [B, B]
