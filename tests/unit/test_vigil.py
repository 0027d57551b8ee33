"""Waits of a thread that blocks are explained by another one while they last (promise 7)."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from shardyard.domain import limits
from shardyard.runtime import waits
from shardyard.runtime.waits import WaitRegistry

DEADLINE_S = 10.0


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(limits, "EXPLAIN_WAIT_MS", 50)
    monkeypatch.setattr(waits, "_VIGIL_MS", 10)
    caplog.set_level(logging.INFO)


@pytest.fixture
def vigil() -> Iterator[WaitRegistry]:
    found = WaitRegistry()
    yield found
    found.close()


def wait_until(condition: Callable[[], bool]) -> None:
    pause, give_up = threading.Event(), time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < give_up
        pause.wait(0.005)


def vigils() -> int:
    return sum(thread.name == "vigil" for thread in threading.enumerate())


def test_wait_that_lasts_is_explained_while_it_lasts(vigil: WaitRegistry, caplog: pytest.LogCaptureFixture) -> None:
    with vigil.over(lambda: "server 3 to apply push 41"):
        wait_until(lambda: "waiting for server 3 to apply push 41, for" in caplog.text)
    assert "the wait is over after" in caplog.text


def test_explanation_is_asked_anew_for_each_line(vigil: WaitRegistry, caplog: pytest.LogCaptureFixture) -> None:
    who = ["server 1"]
    with vigil.over(lambda: who[0]):
        wait_until(lambda: "waiting for server 1" in caplog.text)
        who[0] = "server 2"
        wait_until(lambda: "waiting for server 2" in caplog.text)


def test_short_waits_say_nothing(
    vigil: WaitRegistry, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "EXPLAIN_WAIT_MS", 5_000)
    for number in range(20):
        with vigil.over(lambda n=number: f"push {n}"):  # type: ignore[misc]
            threading.Event().wait(0.002)
    assert caplog.text == ""


def test_nothing_is_said_between_two_waits(vigil: WaitRegistry, caplog: pytest.LogCaptureFixture) -> None:
    with vigil.over(lambda: "one"):
        pass
    threading.Event().wait(0.15)
    assert caplog.text == ""
    with vigil.over(lambda: "two"):
        wait_until(lambda: "waiting for two" in caplog.text)
    assert "waiting for one" not in caplog.text


def test_wait_that_was_given_up_says_why(vigil: WaitRegistry, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        with vigil.over(lambda: "a key"):
            wait_until(lambda: "waiting for a key" in caplog.text)
            raise KeyError("gone")

    with pytest.raises(KeyError):
        fail()
    assert "the wait was given up (KeyError) after" in caplog.text


def test_waits_of_several_threads_are_all_explained(vigil: WaitRegistry, caplog: pytest.LogCaptureFixture) -> None:
    done = threading.Event()

    def wait(what: str) -> None:
        with vigil.over(lambda: what):
            done.wait(DEADLINE_S)

    threads = [threading.Thread(target=wait, args=(f"server {number}",)) for number in range(3)]
    with vigil.over(lambda: "all of them"):
        for thread in threads:
            thread.start()
        wait_until(lambda: all(f"waiting for server {number}, for" in caplog.text for number in range(3)))
        wait_until(lambda: "waiting for all of them, for" in caplog.text)
        assert vigils() == 1
        done.set()
        for thread in threads:
            thread.join(DEADLINE_S)
    assert len([text for text in caplog.messages if "the wait is over after" in text]) == 4


def test_what_is_waited_for_is_shown_the_longest_first_and_no_more_than_fits(
    vigil: WaitRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SHOW_WAIT_MS", 30)
    with vigil.over(lambda: "the first"):
        assert vigil.waiting_for == ""
        wait_until(lambda: vigil.waiting_for.startswith("the first, for 0."))
        with vigil.over(lambda: "the second" + 2_000 * "!"):
            assert "second" not in vigil.waiting_for
            wait_until(lambda: "; the second!" in vigil.waiting_for)
            assert len(vigil.waiting_for) == limits.WAITS_CHARACTERS_MAX
    assert vigil.waiting_for == ""


def test_thread_ends_by_itself_where_nothing_is_waited_for_and_is_there_again_for_the_next_wait(
    vigil: WaitRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(3):
        with vigil.over(lambda n=number: f"wait {n}"):  # type: ignore[misc]
            wait_until(lambda n=number: f"waiting for wait {n}, for" in caplog.text)  # type: ignore[misc]
        wait_until(lambda: vigils() == 0)


def test_one_thread_for_all_waits_and_none_after_the_end() -> None:
    before = vigils()
    vigil = WaitRegistry()
    assert vigils() == before
    for _ in range(5):
        with vigil.over(lambda: "it"):
            assert vigils() == before + 1
    vigil.close()
    vigil.close()
    wait_until(lambda: vigils() == before)
    with vigil.over(lambda: "it is closed, but may be used"):
        pass
    wait_until(lambda: vigils() == before)


def test_closing_during_a_wait_does_not_disturb_it() -> None:
    vigil = WaitRegistry()
    with vigil.over(lambda: "it"):
        vigil.close()
    wait_until(lambda: vigils() == 0)
