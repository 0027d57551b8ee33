"""Which servers' logs continue a job's checkpoints. Scenarios of jobs with logs: transcripts/logs.txt."""

from __future__ import annotations

import json

import pytest

from shardyard.domain.ids import Incarnation, PartitionId
from shardyard_coordinator.records import Body, DamagedRecord
from shardyard_coordinator.storage.log_owners import LogOwner, LogOwners

HERE = "folder-a"
FIRST, SECOND, THIRD = Incarnation(1), Incarnation(2), Incarnation(3)
P, Q = PartitionId(0), PartitionId(1)


def test_logs_needed_are_those_since_the_checkpoint() -> None:
    owners = LogOwners(keep=2)
    owners.begin({P: LogOwner(FIRST, 0, HERE), Q: LogOwner(SECOND, 0, HERE)})
    owners.commit(1)
    owners.commit(4)
    owners.move({P: LogOwner(THIRD, 4, HERE)})
    assert owners.of(P, 4) == (FIRST, THIRD)
    assert owners.of(P, 1) == (FIRST, THIRD)
    assert owners.of(Q, 4) == (SECOND,)
    owners.commit(5)
    assert owners.of(P, 5) == (THIRD,)
    assert owners.of(P, 4) == (FIRST, THIRD)
    assert (owners.oldest, owners.needed) == (4, {FIRST, SECOND, THIRD})
    owners.commit(6)
    assert (owners.oldest, owners.needed) == (5, {SECOND, THIRD})
    again = LogOwners(keep=2)
    ((_, body),) = owners.entries()
    again.restore(Body(json.loads(json.dumps(body))))
    assert again.entries() == owners.entries()
    owners.begin({P: LogOwner(FIRST, 5, HERE)})
    assert owners.of(P, 5) == (FIRST,)


@pytest.mark.parametrize("owner", [[0, 1, 0], [0, 0, 0, "a"], ["x", 1, 0, "a"], [0, 1, -1, "a"], [0, 1, 0, 7]])
def test_spoilt_owners_are_refused(owner: list[object]) -> None:
    with pytest.raises(DamagedRecord):
        LogOwners(keep=2).restore(Body({"owners": [owner], "kept": []}))
