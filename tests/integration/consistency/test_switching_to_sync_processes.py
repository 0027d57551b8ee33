"""An asynchronous job that is switched to steps by `shardyard set` while a worker, a server and the coordinator are
killed, before it goes over and right after: each sample counts once an epoch."""

from __future__ import annotations

import pytest

from shardyard.wire.v1 import common_pb2 as common
from shardyard.wire.v1 import coordinator_pb2 as wire
from tests.support.switches import SYNC, switch_while_some_die
from tests.support.yards import Probes, RoleYard


@pytest.mark.long
@pytest.mark.parametrize("when", ["before", "after"])
def test_promises_1_and_2_hold_for_a_job_whose_processes_die_while_it_goes_over_to_steps(
    yard: RoleYard, probes: Probes, when: str
) -> None:
    settings: dict[str, object] = {
        "job__consistency__mode": "bounded",
        "job__consistency__staleness": 3,
        "job__data__batches_per_data_shard": 4,  # what is left of an epoch has equal shares in each step
    }
    found = switch_while_some_die(
        yard,
        probes,
        when,
        settings,
        "consistency.mode=sync",
        told="job probe changes to sync\n",
        mode=common.UPDATE_MODE_SYNC,
    )
    assert found == wire.Consistency(number=1, mode=SYNC)
