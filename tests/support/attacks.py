"""The attacks of the benchmarks (benchmarks/harness/attacks), for tests."""

from __future__ import annotations

import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from harness.attacks import attacks, http2  # noqa: E402

sys.path.remove(str(BENCHMARKS))

__all__ = ["attacks", "http2"]
