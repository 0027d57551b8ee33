"""Means of paired differences, and how far they can be trusted."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from scipy import stats


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and its 95% confidence interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:+.2f} (95%: {self.low:+.2f} to {self.high:+.2f})"


def paired(first: Sequence[float], second: Sequence[float]) -> Interval:
    """The interval of `first` - `second`, pair by pair, by Student's t. A single pair has no interval."""
    differences = [a - b for a, b in zip(first, second, strict=True)]
    mean, pairs = statistics.mean(differences), len(differences)
    if pairs < 2:
        return Interval(mean, -math.inf, math.inf)
    half = float(stats.t.ppf(0.975, pairs - 1)) * statistics.stdev(differences) / math.sqrt(pairs)
    return Interval(mean, mean - half, mean + half)
