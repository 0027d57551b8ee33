"""The end by a signal: it must come through whatever the main thread does, also many times at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from shardyard_launcher.terminal.options import StopSignals

MEETS_A_WAIT = """
import os, signal
from shardyard_launcher.terminal.options import StopSignals

with StopSignals() as signals:
    # as Event.wait and Event.set hold it, for a moment
    with signals.stop._cond:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
    assert signals.stop.wait(20)
    assert signals.exit_code == 143
print("done")
"""


def test_signal_that_meets_the_wait_for_it_locks_nothing_up() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", MEETS_A_WAIT], capture_output=True, text=True, timeout=40, check=False
    )
    assert (ended.stdout, ended.returncode) == ("done\n", 0), ended.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_first_signal_decides_the_exit_code_and_all_is_as_before_after_it(number: signal.Signals) -> None:
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    with StopSignals() as signals:
        assert signals.exit_code is None
        os.kill(os.getpid(), number)
        assert signals.stop.wait(20)
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.exit_code == 128 + number
    assert {each: signal.getsignal(each) for each in before} == before
    assert signal.set_wakeup_fd(-1) == -1
    assert not [thread for thread in threading.enumerate() if thread.name == "stop-signals"]
