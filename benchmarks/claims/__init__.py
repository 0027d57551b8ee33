"""What is claimed of consistency and of tables: each measures its own runs, and gives ratios and panels of figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.measuring.report import Panel


@dataclass(frozen=True, slots=True)
class Found:
    """What a claim has measured."""

    raw: Mapping[str, Any]
    ratios: Mapping[str, Sequence[float]]
    """By the names of claims; a value for each seed or pair, or one over all."""
    panels: Mapping[str, Sequence[Panel]] = field(default_factory=dict)
    """By the figure that they are a part of."""
