"""A coordinator that is killed in mid-run and started again from its journal: nobody else is, and no step is lost."""

from __future__ import annotations

from typing import Any

import pytest

from shardyard.wire.v1 import coordinator_pb2 as wire
from tests.support.yards import Probes, RoleYard, computed, finish

SERVERS = 2
EPOCHS = 3
SYNC = {"job__consistency__mode": "sync", "job__consistency__logical_ranks": 2}


def train(yard: RoleYard, probes: Probes, mode: str, *, kills: int, **settings: Any) -> list[dict[str, Any]]:
    """Two workers, and the coordinator killed and started again while they work. What they wrote."""
    options = ("--epochs", str(EPOCHS), "--pause-ms", "30")
    settings |= {"coordinator": yard.address, "job__workers_expected": 2}
    started = [probes.start(mode, *options, **settings) for _ in range(2)]
    for script, _ in started:
        script.wait_for("computed 2")
    for kill in range(kills):
        before = [computed(script) for script, _ in started]
        yard.kill_coordinator()
        if kill == 0:
            # with the map that everyone has, and the work that was leased: who began first may be through with it
            latest = before.index(min(before))
            started[latest][0].wait_for(f"computed {before[latest] + 4}")
        yard.restart_coordinator()
    return [finish(script, out) for script, out in started]


def members_of(status: wire.StatusReply, role: wire.Role) -> list[int]:
    return [member.incarnation for member in status.members if member.role == role]


def test_training_goes_on_over_a_restart_and_counts_each_sample_once(yard: RoleYard, probes: Probes) -> None:
    before = yard.status()
    results = train(yard, probes, "count", kills=3, job__data__batches_per_data_shard=17)
    assert [result["counts"] for result in results] == [[float(EPOCHS)] * 203] * 2
    status = yard.ended()
    assert (before.term, status.term) == (1, 4)
    assert members_of(status, wire.ROLE_SERVER) == members_of(before, wire.ROLE_SERVER)
    assert [server.process.poll() for server in yard.servers] == [None] * SERVERS
    (job,) = status.jobs
    assert job.state == wire.JOB_STATE_FINISHED
    (feed,) = job.feeds
    assert (feed.free, feed.leased, feed.finished) == (0, 0, True)
    assert job.job >> 32 == 1, "the job that the first coordinator began"
    assert "continuing from" in yard.coordinator.output


@pytest.mark.long
def test_synchronous_training_gives_the_same_bits_over_a_restart(yard: RoleYard, probes: Probes) -> None:
    undisturbed = train(yard, probes, "model", kills=0, job="one", **SYNC)
    disturbed = train(yard, probes, "model", kills=1, job="two", **SYNC)
    assert yard.status().term == 2
    digests = {result["digest"] for result in (*undisturbed, *disturbed)}
    assert len(digests) == 1
    assert [result["step"] for result in disturbed] == [result["step"] for result in undisturbed]


@pytest.mark.long
def test_members_say_what_they_wait_for_while_there_is_no_coordinator(yard: RoleYard) -> None:
    yard.kill_coordinator()
    for server in yard.servers:
        server.wait_for(f"waits for the coordinator (coordinator at {yard.address} does not answer")
        server.wait_for(f"waiting for coordinator at {yard.address} to answer server 1.")
    yard.restart_coordinator()
    for server in yard.servers:
        server.wait_for("again, in term 2")
    assert len(members_of(yard.status(), wire.ROLE_SERVER)) == SERVERS


def test_second_coordinator_on_a_state_folder_is_refused_while_the_first_lives(yard: RoleYard) -> None:
    second = yard.start_coordinator("127.0.0.1:0")
    assert second.wait() != 0
    assert f"is in use by process {yard.coordinator.process.pid}" in second.output
    assert yard.status().term == 1
    yard.kill_coordinator()
    yard.restart_coordinator()
    assert yard.status().term == 2
