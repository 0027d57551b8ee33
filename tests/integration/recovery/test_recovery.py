"""Servers that die in mid-run: the job goes on from its checkpoint, each sample counts once, the bits are the same."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from shardyard.wire.v1 import coordinator_pb2 as wire
from tests.support.waiting import wait_until
from tests.support.yards import Probes, RoleYard, Script, computed, finish

EPOCHS = 3
SYNC = {"job__consistency__mode": "sync", "job__consistency__logical_ranks": 2}


def begin(yard: RoleYard, probes: Probes, mode: str, **settings: Any) -> list[tuple[Script, Path]]:
    """Two workers, with a checkpoint every few steps."""
    options = ("--epochs", str(EPOCHS), "--pause-ms", "30")
    settings |= {"coordinator": yard.address, "job__workers_expected": 2, "job__checkpoint__every_steps": 7}
    started = [probes.start(mode, *options, **settings) for _ in range(2)]
    for script, _ in started:
        script.wait_for("computed 4")
    return started


def wait_for_more(started: list[tuple[Script, Path]]) -> None:
    """Batches that are computed, or the end of the data."""
    before = [computed(script) for script, _ in started]
    for (script, _), count in zip(started, before, strict=True):
        script.wait_for(f"computed {count + 3}", or_end=True)


@pytest.mark.long("True-wal")
@pytest.mark.parametrize("durability", ["checkpoint", "wal"])
@pytest.mark.parametrize("returns", [True, False])
def test_promise_1_and_2_hold_when_servers_die(yard: RoleYard, probes: Probes, returns: bool, durability: str) -> None:
    """The partitions go to the server that is started again, or to the other one."""
    started = begin(
        yard, probes, "count", job__data__batches_per_data_shard=5, job__partitions=4, job__durability=durability
    )
    yard.coordinator.wait_for("checkpoint 2 of step")
    for index in (0, 1) if returns else (1,):
        yard.kill_server(index)
        if returns:
            yard.restart_server(index)
        wait_for_more(started)
    results = [finish(script, out) for script, out in started]
    assert [result["counts"] for result in results] == [[float(EPOCHS)] * 203] * 2
    (job,) = yard.ended().jobs
    assert job.state == wire.JOB_STATE_FINISHED
    told = "with all that was acknowledged" if durability == "wal" else "are restored, of step"
    assert told in yard.coordinator.output
    wait_until(lambda: not list((yard.state / "wal").glob("*/*")), "the servers to delete their logs")


@pytest.mark.long("checkpoint-the job goes back to checkpoint")
@pytest.mark.parametrize(
    ("durability", "told"),
    [("checkpoint", "the job goes back to checkpoint"), ("wal", "its log is read from checkpoint")],
)
def test_promise_6_synchronous_bits_are_the_same_when_a_server_dies(
    yard: RoleYard, probes: Probes, durability: str, told: str
) -> None:
    undisturbed = [finish(script, out) for script, out in begin(yard, probes, "model", job="one", **SYNC)]
    started = begin(yard, probes, "model", job="two", job__durability=durability, **SYNC)
    yard.coordinator.wait_for("job 'two' (1.2): checkpoint ")  # without one it would end
    yard.kill_server(0)
    yard.restart_server(0)
    disturbed = [finish(script, out) for script, out in started]
    assert told in yard.coordinator.output
    digests = {result["digest"] for result in (*undisturbed, *disturbed)}
    assert len(digests) == 1
    assert [result["step"] for result in disturbed] == [result["step"] for result in undisturbed]


@pytest.mark.long("wal")
@pytest.mark.parametrize("durability", ["checkpoint", "wal"])
def test_all_servers_and_the_coordinator_dead_at_once(yard: RoleYard, probes: Probes, durability: str) -> None:
    started = begin(
        yard, probes, "count", job__data__batches_per_data_shard=5, job__partitions=4, job__durability=durability
    )
    yard.coordinator.wait_for("checkpoint 2 of step")
    yard.kill_coordinator()
    for index in range(2):
        yard.kill_server(index)
    yard.restart_coordinator()
    for index in range(2):
        yard.restart_server(index)
    results = [finish(script, out) for script, out in started]
    assert [result["counts"] for result in results] == [[float(EPOCHS)] * 203] * 2


LOST = re.compile(r"#(\d+)(?: to #(\d+))? in partition ([\d, ]+)")


def lost_by_partition(yard: RoleYard) -> dict[int, set[tuple[str, int]]]:
    """The pushes, by worker and sequence, that the coordinator has said to be lost."""
    found: dict[int, set[tuple[str, int]]] = {}
    for line in yard.coordinator.lines:
        said, _, ranges = line.partition("are lost: ")
        worker = re.search(r"pushes of worker ([\d.]+)", said)
        if worker is not None:
            for first, last, partitions in LOST.findall(ranges):
                for partition in partitions.split(","):
                    pushes = {(worker[1], sequence) for sequence in range(int(first), int(last or first) + 1)}
                    found.setdefault(int(partition), set()).update(pushes)
    return found


@pytest.mark.long
@pytest.mark.parametrize("window", [0, 1])
def test_lost_pushes_without_leased_data_are_told_exactly(yard: RoleYard, probes: Probes, window: int) -> None:
    script, out = probes.start(
        "own",
        *("--samples", "120", "--pause-ms", "20"),
        coordinator=yard.address,
        job__checkpoint__every_steps=30,
        worker__exchange=("blocking", "delayed")[window],
    )
    yard.coordinator.wait_for("checkpoint 2 of step")
    script.wait_for(f"computed {computed(script) + 8}")
    yard.kill_server(1)
    yard.restart_server(1)
    result = finish(script, out)
    lost = lost_by_partition(yard)
    assert lost
    counts = sorted(value[0] for value in result["values"].values())
    assert counts == sorted(120.0 - len(lost.get(partition, ())) for partition in range(4))
    count = len(set().union(*lost.values()))
    assert yard.status().jobs[0].lost_pushes == count
    yard.kill_coordinator()
    yard.restart_coordinator()
    assert yard.status().jobs[0].lost_pushes == count


@pytest.mark.long
def test_lost_pushes_of_a_worker_that_has_left_are_told_exactly(yard: RoleYard, probes: Probes) -> None:
    given: dict[str, Any] = {
        "coordinator": yard.address,
        "job__checkpoint__every_steps": 10_000,
        "job__workers_expected": 2,
    }
    stays, out = probes.start("own", "--samples", "300", "--pause-ms", "30", **given)
    yard.coordinator.wait_for("checkpoint 1 of step")
    finish(*probes.start("own", "--samples", "12", **given))
    yard.coordinator.wait_for(" left")
    yard.kill_server(1)
    yard.restart_server(1)
    result = finish(stays, out)
    lost = lost_by_partition(yard)
    pushes = set().union(*lost.values())
    assert len({worker for worker, _ in pushes}) == 2, "of the one that had left too"
    counts = sorted(value[0] for value in result["values"].values())
    assert counts == sorted(312.0 - len(lost.get(partition, ())) for partition in range(4))
    assert yard.status().jobs[0].lost_pushes == len(pushes)
