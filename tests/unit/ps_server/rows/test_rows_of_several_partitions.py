"""A small push to several partitions of an asynchronous job: their rows change in one call."""

from __future__ import annotations

import numpy as np
import pytest

from shardyard.domain.errors import Internal, ShardyardError, TooLarge
from shardyard.runtime.failpoints import armed
from shardyard_ps_server.partition import next_version
from shardyard_ps_server.rows.partition_tables import push_rows
from tests.support.rows_in_pushes import (
    DENSE,
    IDS,
    INITIAL,
    OWNER,
    PACKED,
    PACKED_DATA,
    closed,
    look_up,
    push,
    push_order,
    server,
    state,
)

__all__ = ["closed"]


def refuse(name: str) -> None:
    raise TooLarge(f"no memory at {name}")


def test_partitions_before_one_that_refuses_have_taken_the_push_and_skip_it_when_it_comes_again() -> None:
    store, other = server(), server()
    with armed("push.before_publish", refuse, at=2), pytest.raises(TooLarge):
        push(store, push_order(0, PACKED), DENSE + PACKED_DATA)
    moved = np.flatnonzero((look_up(store) != INITIAL).all(axis=1))
    assert moved.tolist() == np.flatnonzero(OWNER == 0).tolist()
    push(store, push_order(0, PACKED), DENSE + PACKED_DATA)
    push(other, push_order(0, PACKED), DENSE + PACKED_DATA)
    assert state(store) == state(other)
    assert (look_up(store) == look_up(other)).all()


def test_all_partitions_are_torn_if_their_rows_may_be_applied_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    store = server()
    calls = []

    def fail(pushes: object) -> None:
        calls.append(len(pushes))  # type: ignore[arg-type]
        raise MemoryError

    monkeypatch.setattr(next_version, "push_rows", fail)
    with pytest.raises(MemoryError):
        push(store, push_order(0, PACKED), DENSE + PACKED_DATA)
    assert calls == [2]
    monkeypatch.setattr(next_version, "push_rows", push_rows)
    (hosted,) = store.hosted()
    assert all(isinstance(each.torn, Internal) for each in hosted.partitions.values())
    with pytest.raises(ShardyardError, match="applied in part"):
        look_up(store, ids=IDS)
