"""A sample that kills whoever reads it: the job goes on without its batch, and says which samples do not count."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardyard.domain.epochs import order
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_launcher.commands import quarantine
from shardyard_launcher.status.report import ask
from shardyard_launcher.yard.local_cluster import LocalCluster
from tests.support.identities import network_to
from tests.support.yards import SCRIPTS, Script, running_yard

SAMPLES, BATCH, POISON = 99, 4, 41
DEADLINE_S = 110.0
WORKERS = 2
LEASE = {"membership.heartbeat_ms": 200, "membership.lease_ms": 4_000}


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[LocalCluster]:
    with running_yard(tmp_path / "yard", settings=LEASE) as cluster:
        yield cluster


class Crew:
    """Workers of one job; for each that was killed another is started."""

    def __init__(self, yard: LocalCluster, folder: Path, settings: dict[str, object]) -> None:
        self._folder = folder
        self._environment = {
            "SHARDYARD_COORDINATOR": yard.coordinator,
            "SHARDYARD__JOB__PARTITIONS": "4",
            "SHARDYARD__JOB__WORKERS_EXPECTED": str(WORKERS),
            **{f"SHARDYARD__{key.upper()}": str(value) for key, value in settings.items()},
        }
        self._started = 0
        self.killed = 0

    def _start(self) -> tuple[Script, Path]:
        self._started += 1
        out = self._folder / f"{self._started}.json"
        return Script([str(SCRIPTS / "poison.py"), str(out)], self._environment), out

    def run(self) -> list[dict[str, Any]]:
        """What those that came to the end have written."""
        until = time.monotonic() + DEADLINE_S
        running = [self._start() for _ in range(WORKERS)]
        found = []
        try:
            while running:
                assert time.monotonic() < until, running[0][0].output
                for each in list(running):
                    script, out = each
                    code = script.process.poll()
                    if code is None:
                        continue
                    running.remove(each)
                    script.kill()
                    if code == 0:
                        found.append(json.loads(out.read_text()))
                        continue
                    assert code == -9, script.output
                    self.killed += 1
                    running.append(self._start())
                time.sleep(0.02)
        finally:
            for script, _ in running:
                script.kill()
        return found


def listed(yard: LocalCluster) -> list[dict[str, Any]]:
    ((name, reply),) = quarantine.ask(network_to(yard.coordinator), yard.coordinator, None)
    return quarantine.described(name, reply)


def status(yard: LocalCluster) -> wire.JobStatus:
    (job,) = ask(network_to(yard.coordinator), yard.coordinator).status.jobs
    return job


@pytest.mark.long
def test_promise_2_all_samples_but_the_batch_that_kills_count_once(yard: LocalCluster, tmp_path: Path) -> None:
    crew = Crew(yard, tmp_path, {"job__data__batches_per_data_shard": 5})
    results = crew.run()
    assert crew.killed == 3
    (batch,) = listed(yard)
    where = order(seed=0, feed=0, epoch=0, samples=SAMPLES, shuffle=True).tolist().index(POISON)
    begin = where // BATCH * BATCH
    assert (batch["positions"], batch["deaths"]) == ([begin, begin + BATCH], 3)
    assert batch["data_shard"] * 5 + batch["batch"] == begin // BATCH
    assert POISON in batch["indices"]
    assert len(results) == WORKERS
    expected = [0.0 if index in batch["indices"] else 1.0 for index in range(SAMPLES)]
    assert [result["counts"] for result in results] == [expected] * WORKERS
    job = status(yard)
    assert (job.state, job.samples) == (wire.JOB_STATE_FINISHED, SAMPLES - BATCH)
    assert [feed.quarantined for feed in job.feeds] == [1]


@pytest.mark.long
def test_synchronous_steps_go_on_without_the_contribution_that_kills(yard: LocalCluster, tmp_path: Path) -> None:
    sync = {"job__consistency__mode": "sync", "job__consistency__logical_ranks": 2, "job__rank_grace_ms": 100}
    crew = Crew(yard, tmp_path, sync)
    results = crew.run()
    # a joining worker may be given the rank before the last one is known to be dead
    assert 3 <= crew.killed <= 5
    (batch,) = listed(yard)
    where = order(seed=0, feed=0, epoch=0, samples=SAMPLES, shuffle=True).tolist().index(POISON)
    assert (batch["step"], batch["rank"]) == (where // (2 * BATCH), where // BATCH % 2)
    assert POISON in batch["indices"]
    counts = results[0]["counts"]
    assert [index for index, count in enumerate(counts) if not count] == sorted(batch["indices"])
    sums = 12 * BATCH + 3  # of each step: the mean over the ranks that count of their sums, whose samples are as many
    assert sum(counts) == pytest.approx(sums), "a sample was lost, or counted twice"
    assert [result["counts"] for result in results] == [counts] * WORKERS


@pytest.mark.long
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_worker_whose_gradients_are_never_finite_is_out_and_the_other_ends_the_job(
    yard: LocalCluster, tmp_path: Path, mode: str
) -> None:
    """The sample that kills is none of these."""
    environment = {
        "SHARDYARD_COORDINATOR": yard.coordinator,
        "SHARDYARD__JOB__PARTITIONS": "4",
        "SHARDYARD__JOB__WORKERS_EXPECTED": "2",
        "SHARDYARD__JOB__NONFINITE_MAX": "3",
        "SHARDYARD__JOB__CONSISTENCY__MODE": mode,
        "SHARDYARD__JOB__DATA__BATCHES_PER_DATA_SHARD": "5",
        "SHARDYARD__JOB__RANK_GRACE_MS": "100",
    }
    meeting = tmp_path / "meeting"
    meeting.mkdir()
    script, out = str(SCRIPTS / "poison.py"), str(tmp_path / "out.json")
    arguments = [script, out, "--samples", "160", "--poison", "-1", "--meet", str(meeting)]
    bad, good = Script([*arguments, "--factor", "nan"], environment), Script(arguments, environment)
    try:
        assert bad.wait() == 1, bad.output
        assert good.wait() == 0, good.output
    finally:
        bad.kill()
        good.kill()
    assert "WorkerQuarantined: 3 gradients in a row" in bad.output
    counts = json.loads((tmp_path / "out.json").read_text())["counts"]
    gone = sorted(index for each in listed(yard) for index in each["indices"])
    assert len(gone) == 3 * BATCH
    assert [index for index, count in enumerate(counts) if not count] == gone
    if mode == "async":
        assert set(counts) == {0.0, 1.0}
    job = status(yard)
    assert (job.state, job.not_finite, job.workers_quarantined) == (wire.JOB_STATE_FINISHED, 3, 1)
    assert job.samples == 160 - len(gone)
