"""A yard of servers with logs, and one whose server has stopped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.servers_with_logs import (
    Crashed,
    Yard,
    state,
    yard_of,
)


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[Yard]:
    with yard_of(tmp_path) as made:
        yield made


@pytest.fixture
def crashed(yard: Yard) -> Crashed:
    first, saved = yard.begun(4)
    return yard, saved, state(first)
