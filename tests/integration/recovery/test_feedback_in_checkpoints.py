"""What compression has not sent yet is in checkpoints, and is taken up again when the whole job goes back to one.

The oracle: each sample adds whole numbers to a matrix, at a rate of 1. What the servers have, and what no worker has
sent, is the sum over all samples, each as often as there are epochs, to the bit: a hundredth of a gradient is sent at a
time, so what was not sent is most of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardyard.checkpoints.library import CheckpointLibrary
from shardyard.checkpoints.manifest import Manifest
from shardyard.storage.storage import open_storage
from tests.support.scripts.probe import whole_numbers
from tests.support.yards import ROLE, Probes, RoleYard, Script, finish

SAMPLES, EPOCHS, HOLD_AT = 160, 2, 6
CODED = {"job__compression__push": "topk:0.01", "job__compression__whole_elements_max": 0}
SYNC = {"job__consistency__mode": "sync", "job__consistency__logical_ranks": 2}


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[RoleYard]:
    begun = RoleYard(tmp_path, servers=1)
    yield begun
    begun.stop()


def command(*arguments: str) -> list[str]:
    script = Script([*ROLE, *arguments], {})
    assert script.wait() == 0, script.output
    return script.lines


def begin(yard: RoleYard, probes: Probes, hold: Path, **settings: Any) -> list[tuple[Script, Path]]:
    """Two workers, which stop after some batches until there is a file."""
    options = ("--samples", str(SAMPLES), "--epochs", str(EPOCHS), "--hold-at", str(HOLD_AT), "--hold", str(hold))
    options += ("--pause-ms", "20")
    settings |= CODED | {"coordinator": yard.address, "job__workers_expected": 2}
    return [probes.start("sums", *options, **settings) for _ in range(2)]


def take(yard: RoleYard, started: list[tuple[Script, Path]]) -> int:
    """A checkpoint while all workers stand still; its number."""
    for script, _ in started:
        script.wait_for(f"computed {HOLD_AT}")
    lines = command("checkpoint", "take", "probe", "--coordinator", yard.address)
    return next(int(word) for line in lines for word in line.replace(",", " ").split() if word.isdecimal())


def kill_server_after_checkpoint(yard: RoleYard, started: list[tuple[Script, Path]], hold: Path) -> None:
    """Takes a checkpoint, lets the workers compute four more batches, and kills the server."""
    take(yard, started)
    hold.touch()
    for script, _ in started:
        script.wait_for(f"computed {HOLD_AT + 4}")
    yard.kill_server(0)


def newest(folder: Path) -> tuple[CheckpointLibrary, Manifest]:
    library = CheckpointLibrary(open_storage(str(folder)))
    return library, library.load("probe")


def sums_in(folder: Path) -> np.ndarray[Any, Any]:
    """What the servers had at the last checkpoint."""
    library, manifest = newest(folder)
    ((_, values),) = library.export_state(manifest)
    return values


def went_back(script: Script) -> bool:
    return any("the residual is as it was at the checkpoint" in line for line in script.lines)


EXPECTED = EPOCHS * whole_numbers(SAMPLES).sum(0).numpy()


@pytest.mark.long
def test_next_run_takes_up_what_the_workers_of_the_last_one_had_not_sent(probes: Probes, tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    first = RoleYard(tmp_path / "first")
    try:
        started = begin(first, probes, tmp_path / "never")
        number = take(first, started)
    finally:
        for script, _ in started:
            script.kill()
        first.stop()
    kept = tmp_path / "first" / "state" / "checkpoints"
    library, manifest = newest(kept)
    assert manifest.number == number
    assert len(manifest.feedback) == 2
    remembered = [library.load_feedback("probe", file, manifest.layout)["residual.0"] for file in manifest.feedback]
    assert all(np.count_nonzero(each) > 300 for each in remembered)
    assert library.verify("probe") == ()
    second = RoleYard(tmp_path / "second")
    try:
        command("checkpoint", "restore", "probe", "--url", str(kept), "--trust", "--coordinator", second.address)
        (tmp_path / "at once").touch()
        for script, out in begin(second, probes, tmp_path / "at once"):
            finish(script, out)
        second.ended()
        assert "of workers" not in second.coordinator.output
    finally:
        second.stop()
    assert np.array_equal(sums_in(tmp_path / "second" / "state" / "checkpoints"), EXPECTED)


@pytest.mark.long
def test_workers_of_a_job_that_goes_back_as_a_whole_take_up_their_own(
    yard: RoleYard, probes: Probes, tmp_path: Path
) -> None:
    hold = tmp_path / "go on"
    started = begin(yard, probes, hold, job__partitions=4)
    kill_server_after_checkpoint(yard, started, hold)
    yard.restart_server(0)
    for script, out in started:
        finish(script, out)
        assert went_back(script)
    yard.ended()
    assert np.array_equal(sums_in(yard.state / "checkpoints"), EXPECTED)


@pytest.mark.long
def test_what_a_worker_had_not_sent_that_dies_with_the_server_is_taken_up_by_the_other(
    yard: RoleYard, probes: Probes, tmp_path: Path
) -> None:
    """With the new map, or, where that death is noticed later, with a heartbeat."""
    hold = tmp_path / "go on"
    started = begin(yard, probes, hold)
    kill_server_after_checkpoint(yard, started, hold)
    started[1][0].kill()
    yard.restart_server(0)
    finish(*started[0])
    assert any("adds the residual of worker" in line for line in started[0][0].lines)
    yard.ended()
    assert np.array_equal(sums_in(yard.state / "checkpoints"), EXPECTED)


@pytest.mark.long
def test_synchronous_job_that_goes_back_loses_nothing_of_what_was_not_sent(
    yard: RoleYard, probes: Probes, tmp_path: Path
) -> None:
    """Values are of the mean of two ranks, and gradients are subtracted. Nothing is pushed when a worker leaves."""
    hold = tmp_path / "go on"
    started = begin(yard, probes, hold, **SYNC)
    kill_server_after_checkpoint(yard, started, hold)
    yard.restart_server(0)
    results = [finish(script, out) for script, out in started]
    assert all(went_back(script) for script, _ in started)
    residuals = [np.array(result["residual"], np.float32).reshape(20, 30) for result in results]
    assert results[0]["sums"] == results[1]["sums"]
    assert np.array_equal(np.array(results[0]["sums"], np.float32) - sum(residuals) / 2, EXPECTED / 2)
