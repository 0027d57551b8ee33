"""Processes of a job with an embedding table die: each sample's row counts it once an epoch, and a synchronous job has
the bits of one to which nothing happens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import wait_until
from tests.support.yards import Probes, RoleYard, Script, computed, finish

SAMPLES, EPOCHS = 203, 3
SYNC = {"job__consistency__mode": "sync", "job__consistency__logical_ranks": 2}
HYBRID = SYNC | {"job__consistency__mode": "hybrid"}
MIRRORED = {"job__strategy": "multi_worker_mirrored", "job__consistency__logical_ranks": 2}
MODES = pytest.mark.parametrize("mode", [{}, SYNC, HYBRID], ids=["async", "sync", "hybrid"])
ALL_MODES = pytest.mark.parametrize("mode", [{}, SYNC, HYBRID, MIRRORED], ids=["async", "sync", "hybrid", "mirrored"])


def begin(
    yard: RoleYard, probes: Probes, script: str = "rows", *more: str, every_steps: int = 7, **settings: Any
) -> list[tuple[Script, Path]]:
    """Two workers, with a checkpoint every few steps, once there is one; with 0 there is none but the first."""
    settings |= {"coordinator": yard.address, "job__workers_expected": 2, "job__checkpoint__every_steps": every_steps}
    settings |= {"job__data__batches_per_data_shard": 5, "job__checkpoint__every_s": 3_600 if not every_steps else 60}
    options = ("--samples", str(SAMPLES), "--epochs", str(EPOCHS), "--pause-ms", "30", *more)
    started = [probes.start(script, *options, **settings) for _ in range(2)]
    if every_steps:
        yard.coordinator.wait_for("checkpoint 2 of step")
    for each, _ in started:
        each.wait_for("computed 9", or_end=True)
    return started


def assert_counted(started: list[tuple[Script, Path]]) -> None:
    for result in [finish(script, out) for script, out in started]:
        assert result["totals"] == [float(EPOCHS)] * SAMPLES


@pytest.mark.long("True-sync", "True-mirrored")
@ALL_MODES
@pytest.mark.parametrize("returns", [True, False])
def test_promise_1_and_2_hold_for_rows_when_a_server_dies(
    yard: RoleYard, probes: Probes, returns: bool, mode: dict[str, object]
) -> None:
    started = begin(yard, probes, **mode)
    yard.kill_server(1)
    if returns:
        yard.restart_server(1)
    assert_counted(started)
    assert "are restored, of step" in yard.coordinator.output


@pytest.mark.long("checkpoint-and-log-async")
@MODES
@pytest.mark.parametrize(
    ("returns", "every_steps"), [(True, 7), (False, 0)], ids=["checkpoint-and-log", "log-alone-elsewhere"]
)
def test_promise_3_rows_come_back_from_the_log_of_a_server_that_died(
    yard: RoleYard, probes: Probes, returns: bool, every_steps: int, mode: dict[str, object]
) -> None:
    started = begin(yard, probes, every_steps=every_steps, job__durability="wal", **mode)
    yard.kill_server(1)
    if returns:
        yard.restart_server(1)
    assert_counted(started)
    assert "with all that was acknowledged" in yard.coordinator.output
    # a job's logs end with it: the coordinator tells its servers after the workers
    wait_until(lambda: not list((yard.state / "wal").glob("*/*")))


@pytest.mark.long
def test_promise_3_rows_that_tell_ages_in_seconds_come_back_from_a_log(yard: RoleYard, probes: Probes) -> None:
    started = begin(yard, probes, "rows", "--age-seconds", "3600", every_steps=0, job__durability="wal")
    yard.kill_server(1)
    yard.restart_server(1)
    assert_counted(started)
    assert "with all that was acknowledged" in yard.coordinator.output


@pytest.mark.long
def test_promise_3_rows_come_back_from_logs_when_all_servers_die_at_once(yard: RoleYard, probes: Probes) -> None:
    started = begin(yard, probes, every_steps=0, job__durability="wal", job__compression__rows_push="bf16")
    for index in range(2):
        yard.kill_server(index)
    for index in range(2):
        yard.restart_server(index)
    assert_counted(started)


@pytest.mark.long("mirrored")
@ALL_MODES
def test_promise_2_holds_for_rows_when_a_worker_dies(yard: RoleYard, probes: Probes, mode: dict[str, object]) -> None:
    (killed, _), other = begin(yard, probes, **mode)
    killed.kill()
    assert_counted([other])


@pytest.mark.long
def test_promise_1_and_2_hold_for_rows_when_all_services_die_at_once(yard: RoleYard, probes: Probes) -> None:
    started = begin(yard, probes)
    yard.kill_coordinator()
    for index in range(2):
        yard.kill_server(index)
    yard.restart_coordinator()
    for index in range(2):
        yard.restart_server(index)
    assert_counted(started)


@pytest.mark.long
@pytest.mark.parametrize(
    "clip", [{}, {"job__clip__norm": 0.3, "job__durability": "wal"}], ids=["plain", "clipped-with-logs"]
)
def test_promise_6_rows_have_the_same_bits_when_a_server_and_a_worker_die(
    yard: RoleYard, probes: Probes, clip: dict[str, object]
) -> None:
    undisturbed = [finish(*each) for each in begin(yard, probes, "words", job="one", **SYNC, **clip)]
    options = ("--samples", str(SAMPLES), "--epochs", str(EPOCHS))
    unlogged = clip | {"job__durability": "checkpoint", "job__checkpoint__url": "never"}
    undisturbed.append(probes.run("words", *options, job="alone", **SYNC, **unlogged))
    (survivor, out), (victim, _) = begin(yard, probes, "words", "--look-ahead", job="two", **SYNC, **clip)
    yard.coordinator.wait_for("job 'two' (1.2): checkpoint ")
    yard.kill_server(0)
    yard.restart_server(0)
    survivor.wait_for(f"computed {computed(survivor) + 3}")
    victim.kill()
    disturbed = finish(survivor, out)
    assert {result["digest"] for result in undisturbed} == {disturbed["digest"]}
    assert disturbed["step"] == undisturbed[0]["step"]
    assert (undisturbed[0]["hits"], disturbed["hits"] > 0) == (0, True)
    told = "with all that was acknowledged" if "job__durability" in clip else "are restored, of step"
    assert told in yard.coordinator.output
