"""A worker that is told to leave: what it has pushed counts, what it has not is computed by others, who go on at once.

The oracle: each sample adds 1 to a value of its own, and the batches that all workers have computed are counted.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardyard.wire import methods
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_worker.session.departure import TOGETHER_S
from tests.support.identities import coordinator_at
from tests.support.waiting import wait_until
from tests.support.yards import Probes, RoleYard, Script, computed, finish

BATCH = 4
SAMPLES, EPOCHS = 400, 2
SOON_S = 15.0
"""For the end of an interpreter too, on a machine that is busy."""
DRAINED = 128 + signal.SIGTERM
MODES: dict[str, dict[str, object]] = {
    "async": {"job__data__batches_per_data_shard": 25},
    "bounded": {"job__consistency__mode": "bounded", "job__consistency__staleness": 2},
    "sync": {"job__consistency__mode": "sync", "job__consistency__logical_ranks": 2},
}
Started = list[tuple[Script, Path]]


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[RoleYard]:
    started = RoleYard(tmp_path)  # a death would be noticed after 4 s, and ranks are told with a heartbeat
    yield started
    started.stop()


@pytest.fixture
def probes(tmp_path: Path) -> Iterator[Probes]:
    with Probes(tmp_path) as started:
        yield started


def launch(probes: Probes, yard: RoleYard, mode: str, *options: str, workers: int) -> tuple[Script, Path]:
    given = ("--samples", str(SAMPLES), "--epochs", str(EPOCHS), "--pause-ms", "20", "--ranks", "2", *options)
    expected = {"job__workers_expected": workers, "job__rank_grace_ms": 60_000}
    return probes.start("count", *given, coordinator=yard.address, **expected | MODES[mode])


def start(probes: Probes, yard: RoleYard, mode: str, *options: str, workers: int = 2) -> Started:
    started = [launch(probes, yard, mode, *options, workers=workers) for _ in range(workers)]
    for script, _ in started:
        script.wait_for("computed 10")
    return started


def assert_each_batch_was_computed_once(started: Started, result: dict[str, Any]) -> None:
    assert result["counts"] == [float(EPOCHS)] * SAMPLES
    assert sum(computed(script) for script, _ in started) == SAMPLES * EPOCHS // BATCH


def assert_left_in_order(yard: RoleYard, times: int = 1) -> None:
    said = [line for line in yard.coordinator.lines if " worker " in line]
    assert sum("left in order" in line for line in said) == times, said
    assert not any("WARNING" in line for line in said if " worker 1." in line), said


@pytest.mark.long("async")
@pytest.mark.parametrize("mode", MODES)
def test_the_others_go_on_within_a_second_and_no_batch_is_computed_twice(
    probes: Probes, yard: RoleYard, mode: str
) -> None:
    started = start(probes, yard, mode)
    (leaver, _), (stayer, out) = started
    leaver.process.terminate()
    leaver.wait_for("has left in order")  # the end of its interpreter may take longer than the rest of the data
    left, before = time.monotonic(), computed(stayer)
    wait_until(lambda: computed(stayer) > before + 1)
    assert time.monotonic() - left < 1
    assert leaver.wait(timeout_s=SOON_S) == DRAINED, leaver.output
    assert_each_batch_was_computed_once(started, finish(stayer, out))
    assert_left_in_order(yard)


@pytest.mark.long("sync")
@pytest.mark.parametrize("mode", ["bounded", "sync"])
def test_worker_that_waits_for_others_leaves_at_once(probes: Probes, yard: RoleYard, mode: str, tmp_path: Path) -> None:
    go_on = tmp_path / "go on"
    started = [
        launch(probes, yard, mode, *options, workers=2) for options in ((), ("--hold-at", "9", "--hold", str(go_on)))
    ]
    (leaver, _), (stayer, out) = started
    stayer.wait_for("computed 9")
    wait_until(lambda: any(member.waiting_for for member in yard.status().members))
    leaver.process.terminate()
    assert leaver.wait(timeout_s=SOON_S) == DRAINED, leaver.output
    go_on.touch()
    assert_each_batch_was_computed_once(started, finish(stayer, out))
    assert_left_in_order(yard)


@pytest.mark.long
def test_signals_that_come_together_are_one(probes: Probes, yard: RoleYard) -> None:
    started = start(probes, yard, "async", "--pause-ms", "60")
    (leaver, _), (stayer, out) = started
    for _ in range(3):
        leaver.process.terminate()
    assert leaver.wait(timeout_s=SOON_S) == DRAINED, leaver.output
    assert_each_batch_was_computed_once(started, finish(stayer, out))


@pytest.mark.long
def test_signal_that_comes_later_ends_it_at_once(tmp_path: Path, probes: Probes, yard: RoleYard) -> None:
    started = start(probes, yard, "async", "--hold-at", "11", "--hold", str(tmp_path / "never"), workers=1)
    started += start(probes, yard, "async", workers=1)
    (leaver, _), (stayer, out) = started
    leaver.wait_for("computed 11")
    leaver.process.terminate()
    leaver.wait_for("SIGTERM again ends it at once")
    begun = time.monotonic()

    def has_ended() -> bool:
        leaver.process.terminate()
        return leaver.process.poll() is not None

    wait_until(has_ended)
    assert time.monotonic() - begun < TOGETHER_S + 2
    assert leaver.wait() == DRAINED
    result = finish(stayer, out)
    assert result["counts"] == [float(EPOCHS)] * SAMPLES


@pytest.mark.long
def test_last_worker_leaves_the_job_to_one_that_comes_later(probes: Probes, yard: RoleYard) -> None:
    started = start(probes, yard, "async", workers=1)
    started[0][0].process.terminate()
    assert started[0][0].wait(timeout_s=SOON_S) == DRAINED
    (job,) = yard.status().jobs
    assert job.state == wire.JOB_STATE_RUNNING
    started += start(probes, yard, "async", workers=1)
    assert_each_batch_was_computed_once(started, finish(*started[1]))


@pytest.mark.long
def test_worker_leaves_while_the_coordinator_is_away(probes: Probes, yard: RoleYard) -> None:
    started = start(probes, yard, "async")
    (leaver, _), (stayer, out) = started
    yard.kill_coordinator()
    leaver.process.terminate()
    wait_until(lambda: "leaves in order" in leaver.output)
    yard.restart_coordinator()
    assert leaver.wait(timeout_s=SOON_S) == DRAINED, leaver.output
    assert_each_batch_was_computed_once(started, finish(stayer, out))
    assert_left_in_order(yard)


def test_script_that_hangs_ends_at_the_deadline_as_by_kill_9(tmp_path: Path, probes: Probes) -> None:
    yard = RoleYard(tmp_path, drain_s=1)
    try:
        started = start(probes, yard, "async", "--hold-at", "11", "--hold", str(tmp_path / "never"), workers=1)
        started += start(probes, yard, "async", workers=1)
        (leaver, _), (stayer, out) = started
        leaver.wait_for("computed 11")
        leaver.process.terminate()
        assert leaver.wait(timeout_s=SOON_S) == -signal.SIGKILL
        assert "has not left in order within 1 s" in leaver.output
        result = finish(stayer, out)
        assert result["counts"] == [float(EPOCHS)] * SAMPLES
    finally:
        yard.stop()


def test_person_lets_a_worker_leave(probes: Probes, yard: RoleYard) -> None:
    started = start(probes, yard, "async")
    drained = min(member.incarnation for member in yard.status().members if member.role == wire.ROLE_WORKER)
    peer = coordinator_at(yard.address)
    peer.call(methods.DRAIN, wire.DrainRequest(member=f"1.{drained & 0xFFFF}"), timeout_ms=5_000)
    peer.close()
    codes = {script.wait(): (script, out) for script, out in started}
    assert set(codes) == {0, DRAINED}
    assert_each_batch_was_computed_once(started, finish(*codes[0]))


@pytest.mark.long("async")
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_loop_of_ones_own_ends_at_should_stop(probes: Probes, yard: RoleYard, mode: str) -> None:
    given = ("--samples", "6400", "--pause-ms", "20")
    ranks = 2 if mode == "sync" else 1
    script, _ = probes.start("loader", *given, coordinator=yard.address, **MODES[mode])
    script.wait_for("computed 10")
    script.process.terminate()
    assert script.wait(timeout_s=SOON_S) == DRAINED, script.output
    (job,) = yard.status().jobs
    assert job.state == wire.JOB_STATE_RUNNING
    assert job.step == computed(script) // ranks, "no step returned by ending the script"


def test_loop_of_ones_own_that_does_not_ask_ends_after_one_more_step(probes: Probes, yard: RoleYard) -> None:
    script, _ = probes.start("own", "--samples", "10000", "--pause-ms", "20", coordinator=yard.address)
    script.wait_for("computed 10")
    script.process.terminate()
    assert script.wait(timeout_s=SOON_S) == DRAINED, script.output
    (job,) = yard.status().jobs
    assert job.step == computed(script) + 1, "the last push counts, but did not return"


def test_handler_of_the_script_stays_and_can_ask_for_the_drain(probes: Probes, yard: RoleYard) -> None:
    script, _ = probes.start("own", "--samples", "10000", "--pause-ms", "20", "--own-handler", coordinator=yard.address)
    script.wait_for("computed 10")
    script.process.terminate()
    assert script.wait(timeout_s=SOON_S) == DRAINED, script.output
    assert "the script's own handler" in script.lines
