"""What evaluators report about a job's versions, and the best version that they keep.

Owns: the latest report of a job, and its best version. Invariant: both are restored from the records. Must not know:
how an evaluator judges a version, where files are.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace

from shardyard.domain import limits
from shardyard_coordinator.records import (
    Body,
    Entry,
    checked_float,
    checked_items,
    checked_text,
    require,
)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The metrics of one step, all finite. `reported_s`: seconds since 1970."""

    step: int
    metrics: tuple[tuple[str, float], ...]
    reported_s: int


@dataclass(frozen=True, slots=True)
class Best:
    """The version that is kept in the folder at `url`. `lowest`: a lower metric is better."""

    metric: str
    lowest: bool
    value: float
    step: int
    url: str
    reported_s: int


class Evaluations:
    def __init__(self) -> None:
        self.latest: Evaluation | None = None
        self.best: Best | None = None

    def report(self, evaluation: Evaluation, best: Best | None) -> list[Entry]:
        """Returns the records; none if the same was reported before. `best`: that version has been kept."""
        if self._has(evaluation) and (best is None or self._keeps(best)):
            return []
        self.latest = evaluation
        self.best = best or self.best
        return [("evaluation_reported", asdict(evaluation)), *([] if best is None else [("best_kept", asdict(best))])]

    def _has(self, evaluation: Evaluation) -> bool:
        latest = self.latest
        return latest is not None and evaluation == replace(latest, reported_s=evaluation.reported_s)

    def _keeps(self, best: Best) -> bool:
        return self.best is not None and best == replace(self.best, reported_s=best.reported_s)

    def entries(self) -> list[Entry]:
        return [
            *([] if self.latest is None else [("evaluation_reported", asdict(self.latest))]),
            *([] if self.best is None else [("best_kept", asdict(self.best))]),
        ]

    def restore(self, kind: str, body: Body) -> None:
        """Raises DamagedRecord."""
        if kind == "evaluation_reported":
            pairs = [checked_items(each, "a metric", count=2) for each in body.items("metrics")]
            metrics = tuple((checked_text(name, "a metric"), _finite(value)) for name, value in pairs)
            self.latest = Evaluation(_step(body), metrics, body.number("reported_s"))
            return
        self.best = Best(
            body.text("metric"),
            body.flag("lowest"),
            _finite(body.real("value")),
            _step(body),
            body.text("url"),
            body.number("reported_s"),
        )


def _step(body: Body) -> int:
    return body.number("step", most=limits.SEQUENCE_MAX)


def _finite(value: object) -> float:
    found = checked_float(value, "a metric")
    require(math.isfinite(found), f"a metric that is {found}")
    return found
