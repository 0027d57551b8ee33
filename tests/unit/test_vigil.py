"""Waits of a thread that blocks are explained by another one while they last (promise 7)."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from shardyard.ground import limits
from shardyard.runtime import waiting
from shardyard.runtime.waiting import Vigil

DEADLINE_S = 10.0


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(limits, "EXPLAIN_WAIT_MS", 50)
    monkeypatch.setattr(waiting, "_VIGIL_MS", 10)
    caplog.set_level(logging.INFO)


@pytest.fixture
def vigil() -> Iterator[Vigil]:
    found = Vigil()
    yield found
    found.close()


def wait_until(condition: Callable[[], bool]) -> None:
    pause, give_up = threading.Event(), time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < give_up
        pause.wait(0.005)


def vigils() -> int:
    return sum(thread.name == "vigil" for thread in threading.enumerate())


def test_wait_that_lasts_is_explained_while_it_lasts(vigil: Vigil, caplog: pytest.LogCaptureFixture) -> None:
    with vigil.over(lambda: "server 3 to apply push 41"):
        wait_until(lambda: "waiting for server 3 to apply push 41, for" in caplog.text)
    assert "the wait is over after" in caplog.text


def test_explanation_is_asked_anew_for_each_line(vigil: Vigil, caplog: pytest.LogCaptureFixture) -> None:
    who = ["server 1"]
    with vigil.over(lambda: who[0]):
        wait_until(lambda: "waiting for server 1" in caplog.text)
        who[0] = "server 2"
        wait_until(lambda: "waiting for server 2" in caplog.text)


def test_short_waits_say_nothing(
    vigil: Vigil, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "EXPLAIN_WAIT_MS", 5_000)
    for number in range(20):
        with vigil.over(lambda n=number: f"push {n}"):  # type: ignore[misc]
            threading.Event().wait(0.002)
    assert caplog.text == ""


def test_nothing_is_said_between_two_waits(vigil: Vigil, caplog: pytest.LogCaptureFixture) -> None:
    with vigil.over(lambda: "one"):
        pass
    threading.Event().wait(0.15)
    assert caplog.text == ""
    with vigil.over(lambda: "two"):
        wait_until(lambda: "waiting for two" in caplog.text)
    assert "waiting for one" not in caplog.text


def test_wait_that_was_given_up_says_why(vigil: Vigil, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        with vigil.over(lambda: "a key"):
            wait_until(lambda: "waiting for a key" in caplog.text)
            raise KeyError("gone")

    with pytest.raises(KeyError):
        fail()
    assert "the wait was given up (KeyError) after" in caplog.text


def test_one_thread_for_all_waits_and_none_after_the_end() -> None:
    before = vigils()
    vigil = Vigil()
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
    vigil = Vigil()
    with vigil.over(lambda: "it"):
        vigil.close()
    wait_until(lambda: vigils() == 0)
