"""Servers that leave in order: their partitions go to others, and nothing that was acknowledged is lost or computed
again (promise 3, rule C9)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardyard_launcher.cli import main
from tests.support.waiting import wait_until
from tests.support.yards import Probes, RoleYard, Script, computed, finish

SAMPLES, EPOCHS = 203, 3
SYNC: dict[str, Any] = {"job__consistency__mode": "sync", "job__consistency__logical_ranks": 2}
MOVED = "with all that was acknowledged"


def begin(yard: RoleYard, probes: Probes, mode: str, *options: str, **settings: Any) -> list[Any]:
    """Two workers. Only the first checkpoint is taken without need."""
    given = {"coordinator": yard.address, "job__workers_expected": 2, "job__checkpoint__every_s": 0} | settings
    all_options = ("--epochs", str(EPOCHS), "--pause-ms", "20", *options)
    started = [probes.start(mode, *all_options, **given) for _ in range(2)]
    for script, _ in started:
        script.wait_for("computed 4")
    return started


def wait_for_steps(scripts: list[Script], steps: int = 3) -> None:
    for script, count in [(script, computed(script)) for script in scripts]:
        script.wait_for(f"computed {count + steps}", or_end=True)


def own(yard: RoleYard, probes: Probes, **settings: Any) -> Any:
    """A worker whose pushes are not leased, so that none could be computed again."""
    given: dict[str, Any] = {"coordinator": yard.address, "job__checkpoint__every_s": 0} | settings
    started = probes.start("own", "--samples", "150", "--pause-ms", "60", **given)
    started[0].wait_for("computed 20")
    return started


def assert_no_push_is_lost(yard: RoleYard, started: Any) -> None:
    result = finish(*started)
    assert {value for values in result["values"].values() for value in values} == {150.0}
    assert yard.ended().jobs[0].lost_pushes == 0
    assert MOVED in yard.coordinator.output
    assert "go back" not in yard.coordinator.output


@pytest.mark.long("wal")
@pytest.mark.parametrize("durability", ["checkpoint", "wal"])
def test_promise_3_no_push_is_lost_when_a_server_leaves_in_order(
    yard: RoleYard, probes: Probes, durability: str
) -> None:
    started = own(yard, probes, job__durability=durability)
    yard.end_server(1)
    wait_for_steps([started[0]])
    assert yard.servers[1].wait() == 0, yard.servers[1].output
    assert {owner.server for owner in yard.status().jobs[0].map.owners} == {yard.status().members[0].incarnation}
    assert_no_push_is_lost(yard, started)


@pytest.mark.long
def test_a_server_leaves_when_a_person_says_so(
    yard: RoleYard, probes: Probes, capsys: pytest.CaptureFixture[str]
) -> None:
    started = own(yard, probes)
    owner = yard.status().jobs[0].map.owners[0]
    assert main(["drain", owner.address, "--wait", "--coordinator", yard.address]) == 0
    assert "has left" in capsys.readouterr().out
    assert [server.wait() for server in yard.servers if owner.address in server.output] == [0]
    assert_no_push_is_lost(yard, started)


def test_each_sample_counts_once_and_none_is_leased_again(yard: RoleYard, probes: Probes) -> None:
    """One server leaves, another one comes, then the other one leaves."""
    started = begin(yard, probes, "count", "--pause-ms", "100", job__data__batches_per_data_shard=5, job__partitions=4)
    scripts = [script for script, _ in started]
    yard.end_server(1)
    wait_for_steps(scripts)
    yard.servers[1].wait()
    yard.servers[1] = yard.start_server("127.0.0.1:0")
    yard.servers[1].wait_for("ready ")
    yard.end_server(0)
    wait_for_steps(scripts)
    results = [finish(*each) for each in started]
    assert [result["counts"] for result in results] == [[float(EPOCHS)] * SAMPLES] * 2
    # batches of 4 in data shards of 5: nothing was computed twice
    assert sum(result["computed"] for result in results) == EPOCHS * 51
    assert yard.coordinator.output.count(MOVED) == 2


@pytest.mark.long("checkpoint")
@pytest.mark.parametrize("durability", ["checkpoint", "wal"])
def test_promise_6_synchronous_bits_are_the_same_when_servers_leave_in_order(
    yard: RoleYard, probes: Probes, durability: str
) -> None:
    undisturbed = [finish(*each) for each in begin(yard, probes, "model", job="one", **SYNC)]
    started = begin(yard, probes, "model", job="two", job__durability=durability, **SYNC)
    yard.end_server(0)
    wait_for_steps([script for script, _ in started])
    disturbed = [finish(*each) for each in started]
    assert MOVED in yard.coordinator.output
    assert "goes back" not in yard.coordinator.output
    assert len({result["digest"] for result in (*undisturbed, *disturbed)}) == 1
    assert [result["step"] for result in disturbed] == [result["step"] for result in undisturbed]


@pytest.mark.long
def test_rows_of_tables_move_with_their_server(yard: RoleYard, probes: Probes) -> None:
    started = begin(yard, probes, "rows", "--samples", str(SAMPLES), "--look-ahead")
    yard.end_server(1)
    wait_for_steps([script for script, _ in started])
    for each in started:
        assert finish(*each)["totals"] == [float(EPOCHS)] * SAMPLES
    assert MOVED in yard.coordinator.output


@pytest.mark.long
def test_without_another_server_the_partitions_wait_in_the_checkpoint(brief: RoleYard, probes: Probes) -> None:
    """Both servers leave. Half of their time they wait for another one; then a checkpoint has everything. The
    partitions wait for both new servers."""
    started = own(brief, probes)
    for index in range(2):
        brief.end_server(index)
    wait_until(lambda: waits_for_another(brief))
    wait_for_steps([started[0]])  # training goes on meanwhile
    for index in range(2):
        assert brief.servers[index].wait() == 0
    brief.servers[0] = brief.start_server("127.0.0.1:0")
    brief.servers[0].wait_for("ready ")
    wait_until(lambda: any("1 more of 2 servers" in wait for wait in brief.status().jobs[0].waits))
    brief.servers[1] = brief.start_server("127.0.0.1:0")
    wait_for_steps([started[0]])
    owned = Counter(owner.server for owner in brief.status().jobs[0].map.owners)
    assert sorted(owned.values()) == [2, 2]
    assert_no_push_is_lost(brief, started)


@pytest.mark.long
def test_a_second_signal_ends_a_server_at_once(yard: RoleYard, probes: Probes) -> None:
    script, _ = own(yard, probes)
    for index in range(2):
        yard.end_server(index)
    wait_until(lambda: waits_for_another(yard))
    yard.end_server(1)
    assert yard.servers[1].wait(timeout_s=10) == 0
    script.kill()


@pytest.mark.long
def test_a_server_killed_while_it_leaves_has_died(yard: RoleYard, probes: Probes) -> None:
    """The checkpoint that seals its partitions is not committed. Each sample counts once all the same."""
    yard.servers[1].kill()
    yard.restart_server(1, failpoints="storage.before_rename=exit@2")  # the first one is of the first checkpoint
    started = begin(yard, probes, "count", job__data__batches_per_data_shard=5, job__partitions=2)
    yard.end_server(1)
    assert yard.servers[1].wait() not in (0, None)
    results = [finish(*each) for each in started]
    assert [result["counts"] for result in results] == [[float(EPOCHS)] * SAMPLES] * 2
    assert MOVED not in yard.coordinator.output
    assert "go back" in yard.coordinator.output


def waits_for_another(yard: RoleYard) -> bool:
    return any("another server for the partitions" in wait for wait in yard.status().jobs[0].waits)


@pytest.fixture
def brief(tmp_path: Path) -> Iterator[RoleYard]:
    """A yard whose members have little time to leave."""
    begun = RoleYard(tmp_path, drain_s=4, servers_expected=2)
    yield begun
    begun.stop()
