"""The report of a benchmark: its ratios as text, a figure for docs/performance/README.md, and one JSON object.

matplotlib is imported when a figure is drawn.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from harness.machine.facts import machine_facts
from harness.measuring.pairs import significant, spread

FIGURES = Path(__file__).resolve().parents[3] / "docs" / "performance"
COLUMNS = 2
SPAN_COLORS = ("#3b6ea5", "#d9dfe8", "#d08c60")
OURS = "shardyard"
"""What the names of our bars begin with; they are drawn in another colour than the peers'."""


class Span(NamedTuple):
    """An activity from one time to another."""

    what: str
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart of a figure. Bars: values of each name, drawn as median, extent and points. Lines: values by x. Marks:
    x (logarithmic), y, and the lower and upper end of y's interval, by name. Spans: who did what when, by name; `unit`
    is what the axis of time says."""

    title: str
    unit: str
    bars: Mapping[str, Sequence[float]] | None = None
    lines: Mapping[str, Mapping[float, float]] | None = None
    marks: Mapping[str, tuple[float, float, float, float]] | None = None
    spans: Mapping[str, Sequence[Span]] | None = None
    x: str = ""


def options_of(documentation: str | None, *, pairs: int) -> argparse.ArgumentParser:
    """The options that all benchmarks have."""
    parser = argparse.ArgumentParser(description=documentation, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=pairs, help=f"pairs of measurements ({pairs})")
    parser.add_argument("--figures", type=Path, default=FIGURES, help="folder for the PNG (docs/performance)")
    return parser


def result(benchmark: str, raw: Mapping[str, Any], ratios: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """The JSON object of a run. `ratios` have a value for each pair."""
    return {
        "benchmark": benchmark,
        "machine": machine_facts(),
        "raw": _significant(raw),
        "ratios": {name: spread(values).as_json() for name, values in ratios.items()},
    }


def _significant(values: Any) -> Any:
    if isinstance(values, Mapping):
        return {name: _significant(value) for name, value in values.items()}
    if isinstance(values, list | tuple):
        return [_significant(value) for value in values]
    return significant(values) if isinstance(values, float) else values


def report(
    benchmark: str,
    raw: Mapping[str, Any],
    ratios: Mapping[str, Sequence[float]],
    *,
    panels: Sequence[Panel],
    folder: Path = FIGURES,
) -> None:
    """Prints everything, the JSON object last, and draws the figure."""
    path = draw(panels, folder / f"{benchmark}.png")
    print(f"figure: {path}")
    conclude(benchmark, raw, ratios)


def conclude(benchmark: str, raw: Mapping[str, Any], ratios: Mapping[str, Sequence[float]]) -> None:
    """Prints everything, the JSON object last."""
    for name, values in ratios.items():
        print(f"{name}: {spread(values)}")
    print(json.dumps(result(benchmark, raw, ratios)), flush=True)


def draw(panels: Sequence[Panel], path: Path) -> Path:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    columns = min(len(panels), COLUMNS)
    rows = -(-len(panels) // columns)
    size = (5.6 * columns, 3.2 * rows)
    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, panel in zip(axes.flat, panels, strict=False):
        axis.set_title(panel.title, fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
        if panel.bars is not None:
            _draw_bars(axis, panel.bars, panel.unit)
        for name, points in (panel.lines or {}).items():
            axis.plot(list(points), list(points.values()), marker="o", label=name)
        if panel.lines is not None:
            axis.set_xlabel(panel.x)
            axis.set_ylabel(panel.unit)
            axis.set_ylim(bottom=0)
            axis.legend(fontsize=8, frameon=False)
        if panel.marks is not None:
            _draw_marks(axis, panel.marks)
            axis.set_xlabel(panel.x)
            axis.set_ylabel(panel.unit)
        if panel.spans is not None:
            _draw_spans(axis, panel.spans)
            axis.set_xlabel(panel.unit)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def _draw_bars(axis: Any, bars: Mapping[str, Sequence[float]], unit: str) -> None:
    for place, (name, values) in enumerate(reversed(list(bars.items()))):
        found = spread(values)
        axis.barh(place, found.median, height=0.6, color="#3b6ea5" if name.startswith(OURS) else "#b8c4d6")
        axis.plot(values, [place] * len(values), ".", color="black", markersize=4)
        axis.text(found.max, place, f"   {significant(found.median):g}", va="center", fontsize=8)
    axis.set_yticks(range(len(bars)), list(reversed(list(bars))), fontsize=8)
    axis.set_xlabel(unit)
    axis.locator_params(axis="x", nbins=5)
    axis.set_xlim(0, 1.2 * max(max(values) for values in bars.values()))


def _draw_spans(axis: Any, spans: Mapping[str, Sequence[Span]]) -> None:
    kinds = sorted({span.what for each in spans.values() for span in each})
    for place, each in enumerate(reversed(list(spans.values()))):
        for what, color in zip(kinds, SPAN_COLORS, strict=False):
            found = [(span.begin_s, span.end_s - span.begin_s) for span in each if span.what == what]
            label = what if place == 0 else None
            axis.broken_barh(found, (place - 0.35, 0.7), color=color, edgecolor="white", linewidth=0.5, label=label)
    axis.set_yticks(range(len(spans)), list(reversed(list(spans))), fontsize=8)
    axis.legend(fontsize=7, frameon=False, loc="lower center", bbox_to_anchor=(0.5, -0.42), ncols=len(kinds))


def _draw_marks(axis: Any, marks: Mapping[str, tuple[float, float, float, float]]) -> None:
    axis.set_xscale("log")
    axis.axhline(0, color="#cccccc", linewidth=1)
    for name, (x, y, low, high) in marks.items():
        axis.errorbar(x, y, yerr=[[y - low], [high - y]], fmt="o", color="#3b6ea5", capsize=3)
        axis.annotate(name, (x, y), xytext=(5, 5), textcoords="offset points", fontsize=8)
    axis.margins(x=0.2)
