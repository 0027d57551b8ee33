"""The modules that `make up` imports once after an installation are there."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

MAKEFILE = Path(__file__).parents[3] / "Makefile"


def test_modules_that_are_imported_after_an_installation_exist() -> None:
    (given,) = re.findall(r"^IMPORTS := ((?:.*\\\n)*.*)$", MAKEFILE.read_text(encoding="utf-8"), re.MULTILINE)
    modules = [name.strip() for name in given.replace("\\\n", "").split(",")]
    assert len(modules) > 5
    assert [name for name in modules if find_spec(name) is None] == []
