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
    monkeypatch.setattr(waits, "_CHECK_MS", 10)
    caplog.set_level(logging.INFO)


@pytest.fixture
def wait_registry() -> Iterator[WaitRegistry]:
    found = WaitRegistry()
    yield found
    found.close()


def wait_until(condition: Callable[[], bool]) -> None:
    pause, give_up = threading.Event(), time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < give_up
        pause.wait(0.005)


def wait_registries() -> int:
    return sum(thread.name == "wait_registry" for thread in threading.enumerate())


def test_wait_that_lasts_is_explained_while_it_lasts(
    wait_registry: WaitRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    with wait_registry.over(lambda: "server 3 to apply push 41"):
        wait_until(lambda: "waiting for server 3 to apply push 41, for" in caplog.text)
    assert "the wait is over after" in caplog.text


def test_explanation_is_asked_anew_for_each_line(wait_registry: WaitRegistry, caplog: pytest.LogCaptureFixture) -> None:
    who = ["server 1"]
    with wait_registry.over(lambda: who[0]):
        wait_until(lambda: "waiting for server 1" in caplog.text)
        who[0] = "server 2"
        wait_until(lambda: "waiting for server 2" in caplog.text)


def test_short_waits_say_nothing(
    wait_registry: WaitRegistry, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "EXPLAIN_WAIT_MS", 5_000)
    for number in range(20):
        with wait_registry.over(lambda n=number: f"push {n}"):  # type: ignore[misc]
            threading.Event().wait(0.002)
    assert caplog.text == ""


def test_nothing_is_said_between_two_waits(wait_registry: WaitRegistry, caplog: pytest.LogCaptureFixture) -> None:
    with wait_registry.over(lambda: "one"):
        pass
    threading.Event().wait(0.15)
    assert caplog.text == ""
    with wait_registry.over(lambda: "two"):
        wait_until(lambda: "waiting for two" in caplog.text)
    assert "waiting for one" not in caplog.text


def test_wait_that_was_given_up_says_why(wait_registry: WaitRegistry, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        with wait_registry.over(lambda: "a key"):
            wait_until(lambda: "waiting for a key" in caplog.text)
            raise KeyError("gone")

    with pytest.raises(KeyError):
        fail()
    assert "the wait was given up (KeyError) after" in caplog.text


def test_waits_of_several_threads_are_all_explained(
    wait_registry: WaitRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    done = threading.Event()

    def wait(what: str) -> None:
        with wait_registry.over(lambda: what):
            done.wait(DEADLINE_S)

    threads = [threading.Thread(target=wait, args=(f"server {number}",)) for number in range(3)]
    with wait_registry.over(lambda: "all of them"):
        for thread in threads:
            thread.start()
        wait_until(lambda: all(f"waiting for server {number}, for" in caplog.text for number in range(3)))
        wait_until(lambda: "waiting for all of them, for" in caplog.text)
        assert wait_registries() == 1
        done.set()
        for thread in threads:
            thread.join(DEADLINE_S)
    assert len([text for text in caplog.messages if "the wait is over after" in text]) == 4


def test_what_is_waited_for_is_shown_the_longest_first_and_no_more_than_fits(
    wait_registry: WaitRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SHOW_WAIT_MS", 30)
    with wait_registry.over(lambda: "the first"):
        assert wait_registry.waiting_for == ""
        wait_until(lambda: wait_registry.waiting_for.startswith("the first, for 0."))
        with wait_registry.over(lambda: "the second" + 2_000 * "!"):
            assert "second" not in wait_registry.waiting_for
            wait_until(lambda: "; the second!" in wait_registry.waiting_for)
            assert len(wait_registry.waiting_for) == limits.WAITS_CHARACTERS_MAX
    assert wait_registry.waiting_for == ""


def test_thread_ends_by_itself_where_nothing_is_waited_for_and_is_there_again_for_the_next_wait(
    wait_registry: WaitRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(3):
        with wait_registry.over(lambda n=number: f"wait {n}"):  # type: ignore[misc]
            wait_until(lambda n=number: f"waiting for wait {n}, for" in caplog.text)  # type: ignore[misc]
        wait_until(lambda: wait_registries() == 0)


def test_one_thread_for_all_waits_and_none_after_the_end() -> None:
    before = wait_registries()
    wait_registry = WaitRegistry()
    assert wait_registries() == before
    for _ in range(5):
        with wait_registry.over(lambda: "it"):
            assert wait_registries() == before + 1
    wait_registry.close()
    wait_registry.close()
    wait_until(lambda: wait_registries() == before)
    with wait_registry.over(lambda: "it is closed, but may be used"):
        pass
    wait_until(lambda: wait_registries() == before)


def test_closing_during_a_wait_does_not_disturb_it() -> None:
    wait_registry = WaitRegistry()
    with wait_registry.over(lambda: "it"):
        wait_registry.close()
    wait_until(lambda: wait_registries() == 0)
