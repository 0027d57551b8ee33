"""Fixtures of the users' scripts: a yard of processes, and a process from which scripts are forked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.preloaded import Preloaded
from tests.support.yards import RoleYard, Script


@pytest.fixture(scope="module", autouse=True)
def preloaded() -> Iterator[None]:
    Script.preloaded = Preloaded()
    yield
    Script.preloaded.close()
    Script.preloaded = None


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[RoleYard]:
    begun = RoleYard(tmp_path)
    yield begun
    begun.stop()
