"""How far a job is: from its workers' reports, and from the servers' ledgers.

Owns: each worker's last report, and the job's step, samples and rate. Invariants: step and samples never fall, even
when workers leave. Memory is bounded. Must not know: what a step is worth, the clock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import Final

from shardyard.domain.ids import Incarnation

RATE_WINDOW_MS: Final = 5_000
RATE_SLOT_MS: Final = 100
"""Reports closer together than this share a point of the window."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a worker reports with a heartbeat. `samples`: all that it has pushed. `residual_norm`: the 2-norm of what
    its compression has not sent yet, some pushes ago. `pushed`: its acknowledged pushes without leased data.
    `switches`: the number of the mode switch that it follows. `stop_reached`: the worker knows of a stop, and
    contributes to no step from this one on until the stop's step is fixed. `switch_reached`: the same for a switch: its
    number, and such a step. `needs_servers`: what in its script needs variables on the servers. `sums`: in which
    way its gradients are summed with those of others."""

    step: int = 0
    samples: int = 0
    metrics: tuple[tuple[str, float], ...] = ()
    waiting_for: str = ""
    residual_norm: float = 0.0
    pushed: int = 0
    stop_reached: int | None = None
    switches: int = 0
    switch_reached: tuple[int, int] | None = None
    needs_servers: str = ""
    sums: str = ""


class Progress:
    def __init__(self, now_ms: int) -> None:
        self.step = 0
        self.metrics: tuple[tuple[str, float], ...] = ()
        self._reports: dict[Incarnation, Report] = {}
        self._samples_of_departed = 0
        self._seen = 0
        """Samples that came between two reports of a worker. What a first report has may have taken any time."""
        self._points: deque[tuple[int, int]] = deque([(now_ms, 0)])

    @property
    def samples(self) -> int:
        return self._samples_of_departed + sum(report.samples for report in self._reports.values())

    def reach(self, step: int) -> None:
        """The job has reached that step, as servers or records show."""
        self.step = max(self.step, step)

    def take(self, worker: Incarnation, report: Report, now_ms: int) -> None:
        before, is_first = self.of(worker), worker not in self._reports
        samples = max(report.samples, before.samples)
        if report.samples < before.samples or report.pushed < before.pushed:
            report = replace(report, samples=samples, pushed=max(report.pushed, before.pushed))
        self._reports[worker] = report
        self._seen += 0 if is_first else samples - before.samples
        self.reach(report.step)
        self.metrics = report.metrics or self.metrics
        if not self._seen:
            # the time before the first sample is not part of the rate
            self._points = deque([(now_ms, 0)])
        if now_ms - self._points[-1][0] >= RATE_SLOT_MS:
            self._points.append((now_ms, self._seen))
        while len(self._points) > 2 and now_ms - self._points[1][0] >= RATE_WINDOW_MS:
            self._points.popleft()

    def restore(self, *, step: int, samples: int, metrics: tuple[tuple[str, float], ...]) -> None:
        """Restores how far an ended job came, over all its workers."""
        self.step, self._samples_of_departed, self.metrics = step, samples, metrics

    def forget(self, worker: Incarnation) -> None:
        """The worker departed. What it pushed stays counted."""
        self._samples_of_departed += self.of(worker).samples
        self._reports.pop(worker, None)

    def of(self, worker: Incarnation) -> Report:
        return self._reports.get(worker, Report())

    def samples_per_s(self, now_ms: int) -> float | None:
        """The mean over about the last RATE_WINDOW_MS; 0 if nothing was reported for that long. None: nothing was seen
        yet."""
        if not self._seen:
            return None
        since_ms, samples_then = self._points[0]
        for at_ms, samples in self._points:
            if now_ms - at_ms < RATE_WINDOW_MS:
                break
            since_ms, samples_then = at_ms, samples
        if now_ms <= since_ms:
            return 0.0
        return (self._seen - samples_then) * 1000 / (now_ms - since_ms)
