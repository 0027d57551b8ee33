"""The claims about consistency and tables. Each module measures one and returns ratios and panels of figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.measuring.report import Panel


@dataclass(frozen=True, slots=True)
class Found:
    """The measurements of one claim."""

    raw: Mapping[str, Any]
    ratios: Mapping[str, Sequence[float]]
    """By claim: a value for each seed or pair, or one over all."""
    panels: Mapping[str, Sequence[Panel]] = field(default_factory=dict)
    """By figure."""
