"""The claims of docs/consistency.md: each measures its own runs, over seeds, and gives ratios and panels of figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.report import Panel


@dataclass(frozen=True, slots=True)
class Found:
    """What a claim has measured."""

    raw: Mapping[str, Any]
    ratios: Mapping[str, Sequence[float]]
    """By the names of claims; a value for each seed, or one over all seeds."""
    panels: Mapping[str, Sequence[Panel]] = field(default_factory=dict)
    """By the mode that they explain."""
