"""What `shardyard doctor` finds: one line for each thing that it looks at.

Owns: the verdicts, the form of a line, the deadline of each probe. Invariants: a probe that hangs costs its deadline
and no more. An unexpected error in a probe is a finding too, and the other probes still run. Must not know: what is
probed.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from shardyard.runtime.waits import WaitRegistry

log = logging.getLogger("shardyard.doctor")


class Verdict(Enum):
    OK = "ok"
    WARNING = "warning"
    """It works, but slower or less safely than it could."""
    FAILED = "FAILED"


@dataclass(frozen=True, slots=True)
class Finding:
    """`said`: what was seen. `todo`: what to do about it; empty if nothing needs to be done."""

    probe: str
    verdict: Verdict
    said: str
    todo: str = ""

    @property
    def line(self) -> str:
        text = self.said + (f"; {self.todo}" if self.todo else "")
        return f"{self.verdict.value:<9}{self.probe:<15}{' '.join(text.split())}"


def ok(probe: str, said: str) -> Finding:
    return Finding(probe, Verdict.OK, said)


def warning(probe: str, said: str, todo: str) -> Finding:
    return Finding(probe, Verdict.WARNING, said, todo)


def failed(probe: str, said: str, todo: str) -> Finding:
    return Finding(probe, Verdict.FAILED, said, todo)


@dataclass(frozen=True, slots=True)
class Probe:
    """`run` returns what it found; it may block, raise, or never return."""

    name: str
    deadline_ms: int
    run: Callable[[], Sequence[Finding]]


def carry_out(probe: Probe) -> Sequence[Finding]:
    """What the probe found. The probe runs in its own thread, which is abandoned if it does not end in time."""
    answers: queue.SimpleQueue[Sequence[Finding]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put(probe.run())
        except Exception as error:
            log.debug("the probe %s failed", probe.name, exc_info=True)
            said = f"could not be probed: {type(error).__name__}: {error}"
            answers.put([failed(probe.name, said, "see it with --set log.level=debug, and please report it")])

    threading.Thread(target=run, name=f"probe {probe.name}", daemon=True).start()
    wait_registry = WaitRegistry(logger=log)
    try:
        with wait_registry.over(lambda: f"the probe {probe.name}, {probe.deadline_ms / 1000:g} s at most"):
            return answers.get(timeout=probe.deadline_ms / 1000)
    except queue.Empty:
        said = f"no result within {probe.deadline_ms / 1000:g} s"
        return [failed(probe.name, said, "something that it asks (name service, disk, driver) hangs")]
    finally:
        wait_registry.close()
