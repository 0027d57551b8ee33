"""A job that is switched by `shardyard set` between steps and asynchronous updates, either way, while a worker, a
server and the coordinator are killed, before it goes over and right after: each sample counts once an epoch."""

from __future__ import annotations

import pytest

from shardyard.wire.v1 import common_pb2 as common
from shardyard.wire.v1 import coordinator_pb2 as wire
from tests.support.switches import BOUNDED, SYNC, switch_while_some_die
from tests.support.yards import Probes, RoleYard

FROM_SYNC = {"job__consistency__mode": "sync", "job__data__batches_per_data_shard": 5}
# what is left of an epoch has equal shares in each step
FROM_BOUNDED = {
    "job__consistency__mode": "bounded",
    "job__consistency__staleness": 3,
    "job__data__batches_per_data_shard": 4,
}


@pytest.mark.long
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("settings", "given", "told", "mode", "found"),
    [
        (
            FROM_SYNC,
            ["consistency.mode=bounded", "consistency.staleness=2"],
            "job probe changes to bounded, 2 steps\n",
            common.UPDATE_MODE_ASYNC,
            wire.Consistency(number=1, mode=BOUNDED, staleness=2),
        ),
        (
            FROM_BOUNDED,
            ["consistency.mode=sync"],
            "job probe changes to sync\n",
            common.UPDATE_MODE_SYNC,
            wire.Consistency(number=1, mode=SYNC),
        ),
    ],
    ids=["from-sync", "to-sync"],
)
def test_promises_1_and_2_hold_for_a_job_whose_processes_die_while_it_goes_over(
    yard: RoleYard,
    probes: Probes,
    when: str,
    settings: dict[str, object],
    given: list[str],
    told: str,
    mode: int,
    found: wire.Consistency,
) -> None:
    assert found == switch_while_some_die(
        yard, probes, when, settings, *given, told=told, has_switched=lambda job: job.mode == mode
    )


def strategies(before: str, after: str) -> tuple[dict[str, object], str, str]:
    return {"job__strategy": before, "job__consistency__mode": "sync"}, f"strategy={after}", after


@pytest.mark.long
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("settings", "given", "strategy"),
    [
        strategies("parameter_server", "multi_worker_mirrored"),
        strategies("multi_worker_mirrored", "parameter_server"),
    ],
    ids=["to-replicas", "to-servers"],
)
def test_promises_1_and_2_hold_for_a_job_whose_processes_die_while_it_changes_its_strategy(
    yard: RoleYard, probes: Probes, when: str, settings: dict[str, object], given: str, strategy: str
) -> None:
    def has_switched(job: wire.JobStatus) -> bool:
        return job.consistency.consistency.strategy == strategy and not job.consistency.HasField("step")

    told = f"job probe changes to sync, {strategy}\n"
    found = switch_while_some_die(yard, probes, when, settings, given, told=told, has_switched=has_switched)
    assert found == wire.Consistency(number=1, mode=SYNC, strategy=strategy)
