"""Pairs: all sides measured in one go, one after the other, again and again, in alternating order.

Owns: the order, medians with minimum and maximum, the ratio of each pair. Must not know: what is measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

Figures = dict[str, float]
"""What one measurement of one side gave: figures by name, units last in the name."""


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of some values, the smallest and the largest."""

    median: float
    min: float
    max: float

    def as_json(self) -> dict[str, float]:
        return {name: significant(value) for name, value in asdict(self).items()}

    def __str__(self) -> str:
        return f"{significant(self.median):g} ({significant(self.min):g} to {significant(self.max):g})"


def significant(value: float) -> float:
    """Rounds to four digits, more than the precision of any of these measurements."""
    return float(f"{value:.4g}")


def spread(values: Iterable[float]) -> Spread:
    found = list(values)
    if not found:
        raise ValueError("no values to take a median of")
    return Spread(statistics.median(found), min(found), max(found))


def order(names: Sequence[str], pair: int) -> list[str]:
    """A B, then B A, then A B: over all pairs, the order favours no side."""
    return list(names) if pair % 2 == 0 else list(reversed(names))


def measure_pairs(
    sides: Mapping[str, Callable[[], Figures]], pairs: int, *, told: Callable[[str], None] = print
) -> dict[str, list[Figures]]:
    """Each side's figures, pair by pair. `told` gets a line for each measurement."""
    results: dict[str, list[Figures]] = {name: [] for name in sides}
    for pair in range(pairs):
        for name in order(list(sides), pair):
            figures = sides[name]()
            results[name].append(figures)
            shown = ", ".join(f"{key} {significant(value):g}" for key, value in figures.items())
            told(f"pair {pair + 1}/{pairs} {name}: {shown}")
    return results


def ratios(over: Sequence[Figures], under: Sequence[Figures], figure: str) -> list[float]:
    """The first side's figure over the second's, for each pair."""
    return [a[figure] / b[figure] for a, b in zip(over, under, strict=True)]


def column(results: Sequence[Figures], figure: str) -> list[float]:
    return [each[figure] for each in results]
