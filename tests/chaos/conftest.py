"""The modules beside this file, and the yards of the integration tests, can be imported by tests under chaos."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "integration"))
sys.path.insert(0, str(Path(__file__).parent))
from places import Place
from preloaded import Preloaded


@pytest.fixture(scope="session")
def preloaded() -> Iterator[None]:
    Place.preloaded = Preloaded()
    yield
    Place.preloaded.close()
    Place.preloaded = None
