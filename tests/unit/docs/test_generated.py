"""The committed parts of pages that docs/generated.py writes are what the code says."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[3] / "docs"
fresh = runpy.run_path(str(DOCS / "generated.py"))["fresh"]
PAGES = [page for page in sorted(DOCS.rglob("*.md")) if "<!-- generated: " in page.read_text()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_generated_part_is_fresh(page: Path) -> None:
    assert page.read_text() == fresh(page.read_text()), "run .venv/bin/python docs/generated.py"
