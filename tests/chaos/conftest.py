"""The modules beside this file, and the yards of the integration tests, can be imported by tests under chaos."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "integration")]
