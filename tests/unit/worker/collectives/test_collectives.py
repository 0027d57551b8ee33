"""Waits for collective operations."""

from __future__ import annotations

import datetime
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardyard.domain.ids import Incarnation
from shardyard.domain.replica_groups import ReplicaGroup
from shardyard_worker.collectives.collectives import Collectives
from shardyard_worker.collectives.connection import Connection
from shardyard_worker.collectives.group_store import GroupLost


class Session:
    """All members live."""

    lost_replica_generation = 0
    job_settings = SimpleNamespace(collectives="gloo")

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


@pytest.mark.parametrize(
    ("dtypes", "told"),
    [
        ([torch.float32, torch.float64], "inside each of 2 machines, then between them over gloo"),
        ([torch.float32, torch.bfloat16], "inside each of 2 machines, then between them over gloo; some over gloo"),
        ([torch.bfloat16], "over gloo"),
    ],
)
def test_way_of_tensors_that_memory_cannot_sum(dtypes: list[torch.dtype], told: str) -> None:
    found = waiting_for(LateWork())
    found._connection = Connection(object(), machines=2)
    assert found.way_of([torch.zeros(1, dtype=each) for each in dtypes]) == told


def test_operation_that_fails_ends_the_group() -> None:
    work = LateWork("Connection closed by peer")
    with pytest.raises(GroupLost, match="Connection closed by peer"):
        waiting_for(work).wait(work)
