"""The numbers of docs/internals/one-step.md are those of the code."""

from __future__ import annotations

import os
import re
import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[3] / "docs"


def test_worked_example_has_the_numbers_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in [name for name in os.environ if name.startswith("SHARDYARD")]:
        monkeypatch.delenv(variable)
    (shown,) = re.findall(r"^```text\n(.*?)^```", (DOCS / "internals/one-step.md").read_text(), re.M | re.S)
    one_step = runpy.run_path(str(DOCS / "one_step.py"))["one_step"]
    assert shown.splitlines() == list(one_step())
