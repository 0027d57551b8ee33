"""What is done between two pushes, and by whom."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError

import pytest

from shardyard_worker.compression.push_boundary import PushBoundary

DEADLINE_S = 10.0


def test_what_is_wanted_between_pushes_is_done_at_once() -> None:
    between = PushBoundary()
    assert between.when_free(lambda: 3).result(timeout=DEADLINE_S) == 3
    between.begin()
    between.end()
    assert between.when_free(threading.get_ident).result(timeout=DEADLINE_S) == threading.get_ident()


def test_what_is_wanted_in_the_midst_of_a_push_is_done_when_it_has_ended_in_order() -> None:
    between, done = PushBoundary(), list[str]()
    between.begin()
    first = between.when_free(lambda: done.append("first"))
    between.when_free(lambda: done.append("second"))
    with between.held():
        assert not first.done()
    between.end()
    assert done == ["first", "second"]


def test_push_that_was_never_ended_is_over_when_the_next_begins() -> None:
    between, done = PushBoundary(), list[str]()
    between.begin()
    between.when_free(lambda: done.append("between"))
    between.begin()
    done.append("the next")
    assert done == ["between", "the next"]
    assert not between.when_free(lambda: None).done(), "the next one is under way"


def test_push_that_begins_waits_for_what_is_being_done() -> None:
    between, order = PushBoundary(), list[str]()
    begun, release = threading.Event(), threading.Event()

    def copy() -> None:
        begun.set()
        assert release.wait(DEADLINE_S)
        order.append("copied")

    other = threading.Thread(target=between.when_free, args=(copy,))
    other.start()
    assert begun.wait(DEADLINE_S)
    threading.Timer(0.05, release.set).start()
    between.begin()
    order.append("pushed")
    other.join()
    assert order == ["copied", "pushed"]


def test_what_fails_is_told_to_who_wanted_it_and_not_to_who_trains() -> None:
    between = PushBoundary()
    between.begin()
    wanted = between.when_free(lambda: 1 // 0)
    between.end()
    with pytest.raises(ZeroDivisionError):
        wanted.result(timeout=DEADLINE_S)


def test_nothing_is_done_once_the_worker_has_left() -> None:
    between = PushBoundary()
    between.begin()
    waiting = between.when_free(lambda: 1)
    between.close()
    between.end()
    for wanted in (waiting, between.when_free(lambda: 2)):
        with pytest.raises(CancelledError):
            wanted.result(timeout=DEADLINE_S)
