"""A synchronous job that is switched by `shardyard set` while a worker, a server and the coordinator are killed, before
it goes over and right after: each sample counts once an epoch."""

from __future__ import annotations

import pytest

from shardyard.wire.v1 import common_pb2 as common
from shardyard.wire.v1 import coordinator_pb2 as wire
from tests.support.switches import BOUNDED, switch_while_some_die
from tests.support.yards import Probes, RoleYard


@pytest.mark.long
@pytest.mark.parametrize("when", ["before", "after"])
def test_promises_1_and_2_hold_for_a_job_whose_processes_die_while_it_goes_over(
    yard: RoleYard, probes: Probes, when: str
) -> None:
    settings: dict[str, object] = {"job__consistency__mode": "sync", "job__data__batches_per_data_shard": 5}
    found = switch_while_some_die(
        yard,
        probes,
        when,
        settings,
        "consistency.mode=bounded",
        "consistency.staleness=2",
        told="job probe changes to bounded, 2 steps\n",
        mode=common.UPDATE_MODE_ASYNC,
    )
    assert found == wire.Consistency(number=1, mode=BOUNDED, staleness=2)
