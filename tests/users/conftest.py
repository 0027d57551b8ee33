"""Fixtures of the users' scripts: a yard of processes, and a process from which scripts are forked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.yards import RoleYard, preloaded_scripts


@pytest.fixture(scope="session", autouse=True)
def preloaded() -> Iterator[None]:
    with preloaded_scripts():
        yield


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[RoleYard]:
    begun = RoleYard(tmp_path)
    yield begun
    begun.stop()
