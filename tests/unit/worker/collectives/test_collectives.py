"""Waits for collective operations."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from shardyard.domain.ids import Incarnation
from shardyard.domain.replica_groups import ReplicaGroup
from shardyard_worker.collectives.collectives import Collectives
from shardyard_worker.collectives.group_store import GroupLost


class Session:
    """All members live."""

    lost_replica_generation = 0

    def check(self) -> None:
        """Nothing is wrong."""


class LateWork:
    """An operation that ends after the first slice is over, and before the caller looks."""

    def __init__(self, failure: str = "") -> None:
        self._failure = failure
        self._is_completed = False

    def is_completed(self) -> bool:
        return self._is_completed

    def wait(self, _: datetime.timedelta | None = None) -> None:
        was_completed, self._is_completed = self._is_completed, True
        if not was_completed:
            raise RuntimeError("Operation timed out!")
        if self._failure:
            raise RuntimeError(self._failure)


def waiting_for(work: LateWork) -> Collectives:
    session: Any = Session()
    found = Collectives(session, ReplicaGroup(1, (Incarnation(7),)), 0, "nothing")
    found.begin(lambda: work)
    return found


def test_operation_that_ends_just_after_a_slice_has_not_failed() -> None:
    work = LateWork()
    waiting_for(work).wait(work)


def test_failure_is_seen_before_the_operation_is_waited_for() -> None:
    work = LateWork("Connection closed by peer")
    collectives = waiting_for(work)
    collectives.check_begun()
    with pytest.raises(RuntimeError, match="timed out"):
        work.wait()
    with pytest.raises(GroupLost, match="Connection closed by peer"):
        collectives.check_begun()


def test_operation_that_fails_ends_the_group() -> None:
    work = LateWork("Connection closed by peer")
    with pytest.raises(GroupLost, match="Connection closed by peer"):
        waiting_for(work).wait(work)
