"""What tests of the coordinator's service share."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from shardyard_coordinator.service.journal import Journal
from tests.support.coordinator_yards import Yard, begin


@pytest.fixture
def yard() -> Iterator[Yard]:
    """A coordinator that keeps its journal in memory. All its threads end with it."""
    before = set(threading.enumerate())
    begun = begin(Journal(None))
    yield begun
    begun.coordinator.stop()
    begun.journal.close()
    assert [each.name for each in threading.enumerate() if each not in before] == []
