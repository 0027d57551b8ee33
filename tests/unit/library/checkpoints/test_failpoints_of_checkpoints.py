"""Failpoints: what arms a place, and that nothing happens at one that is not armed."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest

from shardyard.domain.errors import ConfigurationError
from shardyard.runtime import failpoints
from shardyard.runtime.failpoints import EXIT_CODE, action_of, arm, armed, failpoint


@pytest.fixture(autouse=True)
def _bare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failpoints, "_armed", [])


def test_place_that_is_not_armed_does_nothing() -> None:
    failpoint("a.place")
    with armed("another.place", action_of("error")):
        failpoint("a.place")


def test_armed_place_acts_while_the_block_lasts() -> None:
    seen: list[str] = []
    with armed("a.place", seen.append):
        failpoint("a.place")
        failpoint("a.place")
        failpoint("b.place")
    failpoint("a.place")
    assert seen == ["a.place", "a.place"]


def test_star_is_every_place() -> None:
    seen: list[str] = []
    with armed("*", seen.append):
        failpoint("a")
        failpoint("b")
    assert seen == ["a", "b"]


def test_one_passing_alone_is_counted_for_each_arming() -> None:
    first: list[str] = []
    second: list[str] = []
    with armed("a", first.append, at=2):
        failpoint("a")
        assert first == []
        with armed("a", second.append, at=2):
            failpoint("a")
            assert (first, second) == (["a"], [])
            failpoint("a")
    assert (first, second) == (["a"], ["a"])


def test_place_is_disarmed_when_it_raises() -> None:
    with pytest.raises(OSError), armed("a", action_of("error")):
        failpoint("a")
    failpoint("a")


@pytest.mark.parametrize(("text", "number"), [("error", errno.EIO), ("error:ENOSPC", errno.ENOSPC)])
def test_error_is_the_systems_own_and_names_the_place(text: str, number: int) -> None:
    with pytest.raises(OSError, match=r"failpoint a\.place") as raised, armed("a.place", action_of(text)):
        failpoint("a.place")
    assert raised.value.errno == number
    assert os.strerror(number) in str(raised.value)


def test_sleep_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(failpoints.time, "sleep", slept.append)
    with armed("a", action_of("sleep:1500")):
        failpoint("a")
    assert slept == [1.5]


def run(text: str, code: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "SHARDYARD_FAILPOINTS": "a.b=exit@1"}  # which arms nothing
    code = f"import sys; from shardyard.runtime.failpoints import arm, failpoint; arm(sys.argv[1])\n{code}"
    return subprocess.run(
        [sys.executable, "-c", code, text], env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def test_places_of_a_process_are_armed_by_a_text() -> None:
    code = "import atexit\natexit.register(print, 'never')\nfor n in range(5): print(n, flush=True); failpoint('a.b')"
    done = run("other=error, a.b=exit@3,a.b=sleep:1", code)
    assert (done.returncode, done.stdout) == (EXIT_CODE, "0\n1\n2\n")
    done = run("", "failpoint('a.b')\nprint('on')")
    assert (done.returncode, done.stdout) == (0, "on\n")


@pytest.mark.parametrize(
    "text",
    ["a", "a=", "=exit", "a=frob", "a=exit:1", "a=error:EFROB", "a=sleep", "a=sleep:x", "a=sleep:600001", "a=exit@0",
     "a=exit@x", "A b=exit"],
)  # fmt: skip
def test_wrong_text_is_told(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"--failpoints has .*expected"):
        arm(f"fine=error,{text}")
    failpoint("fine")
