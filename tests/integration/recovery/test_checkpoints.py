"""Checkpoints in yards of processes: the last one, those on command, and a storage that refuses."""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from shardyard.checkpoints.library import CheckpointLibrary
from shardyard.checkpoints.manifest import Manifest
from shardyard.runtime.failpoints import EXIT_CODE
from shardyard.storage.storage import open_storage
from shardyard.wire import methods
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard.wire.v1 import parameter_server_pb2 as server_wire
from tests.support.identities import network_to
from tests.support.yards import SCRIPTS, Probes, RoleYard, Script, finish

SELDOM = {"job__checkpoint__every_s": 0}


def shardyard(*arguments: str) -> Script:
    return Script(["-P", "-m", "shardyard_launcher.cli", *arguments], {})


def sources(yard: RoleYard) -> int:
    """The largest number of sources that a partition remembers."""
    found = 0
    for member in yard.status().members:
        if member.role == wire.ROLE_SERVER:
            peer = network_to(yard.address).connect(member.address, name="server")
            try:
                said = peer.call(methods.DESCRIBE_SERVER, server_wire.DescribeServerRequest(), timeout_ms=10_000)
            finally:
                peer.close()
            found = max([found, *(partition.sources for partition in said.partitions)])
    return found


def manifest(url: Path | str, number: int | None = None) -> Manifest:
    return CheckpointLibrary(open_storage(str(url))).load("probe", number)


def values(url: Path | str, number: int | None = None) -> set[float]:
    library = CheckpointLibrary(open_storage(str(url)))
    return {float(array.min()) for _, array in library.export_state(library.load("probe", number))}


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_newest_checkpoint_of_a_finished_job_has_everything(yard: RoleYard, probes: Probes, mode: str) -> None:
    probes.run("own", "--samples", "30", coordinator=yard.address, job__consistency__mode=mode, **SELDOM)
    (job,) = yard.ended().jobs
    assert job.state == wire.JOB_STATE_FINISHED
    url = yard.state / "checkpoints"
    assert values(url) == {30.0}
    assert manifest(url).step == 30


def test_job_alone_in_a_process_has_its_last_checkpoint_too(probes: Probes, tmp_path: Path) -> None:
    url = tmp_path / "kept"
    probes.run("own", "--samples", "20", job__checkpoint__url=url, **SELDOM)
    assert values(url) == {20.0}


@pytest.mark.long
def test_run_waits_for_the_last_checkpoint(tmp_path: Path) -> None:
    url, script = tmp_path / "kept", SCRIPTS / "probe.py"
    settings = ("--set", f"job.checkpoint.url={url}", "--set", "job.checkpoint.every_s=0", "--set", "job.name=probe")
    settings += ("--set", "yard.workers=1")
    ran = shardyard("run", *settings, str(script), "own", str(tmp_path / "out.json"), "--samples", "20")
    assert ran.wait() == 0, ran.output
    assert values(url) == {20.0}


@pytest.mark.long("1-async", "0-sync")
@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.parametrize("window", [0, 1])
def test_script_takes_a_checkpoint_of_all_that_it_has_pushed(
    yard: RoleYard, probes: Probes, mode: str, window: int
) -> None:
    options = ("--samples", "30", "--checkpoint-at", "15")
    settings = {"job__consistency__mode": mode, "worker__exchange": ("blocking", "delayed")[window]} | SELDOM
    script, out = probes.start("own", *options, coordinator=yard.address, **settings)
    finish(script, out)
    (line,) = [line for line in script.lines if line.startswith("took checkpoint ")]
    url = yard.state / "checkpoints"
    assert values(url, int(line.rpartition(" ")[2])) == {14.0}


def test_checkpoint_is_taken_by_command(yard: RoleYard, probes: Probes) -> None:
    script, out = probes.start("own", "--samples", "200", "--pause-ms", "20", coordinator=yard.address, **SELDOM)
    script.wait_for("computed 10")
    taken = shardyard("checkpoint", "take", "--coordinator", yard.address)
    assert taken.wait() == 0, taken.output
    said = re.fullmatch(r"checkpoint (\d+) of job probe, step \d+, in (.+)", taken.output)
    assert said is not None, taken.output
    assert min(values(said[2], int(said[1]))) >= 10.0
    finish(script, out)
    other = shardyard("checkpoint", "take", "other", "--coordinator", yard.address)
    assert other.wait() == 1
    assert "no job 'other'" in other.output


@pytest.fixture
def refused(tmp_path: Path) -> Path:
    """Where no checkpoint can be written."""
    (tmp_path / "file").write_text("no folder")
    return tmp_path / "file" / "kept"


@pytest.mark.long
def test_run_ends_with_the_failure_of_a_job_without_its_last_checkpoint(refused: Path, tmp_path: Path) -> None:
    settings = ("--set", f"job.checkpoint.url={refused}", "--set", "job.idle_ms=3000", "--set", "yard.workers=1")
    script = (str(SCRIPTS / "probe.py"), "own", str(tmp_path / "out.json"), "--samples", "20")
    ran = shardyard("run", *settings, *script)
    assert ran.wait() == 1, ran.output
    assert "ends without its last checkpoint, which failed at last by: " in ran.output
    assert "start the script again for a new run" in ran.output


@pytest.mark.long
def test_job_alone_in_a_process_ends_with_the_failure_too(probes: Probes, refused: Path) -> None:
    settings: dict[str, Any] = {"job__checkpoint__url": refused, "job__idle_ms": 3_000, **SELDOM}
    script, _ = probes.start("own", "--samples", "20", **settings)
    assert script.wait() == 1
    assert "StorageUnavailable: job 'probe' (1.1) ends without its last checkpoint" in script.output


@pytest.mark.long
def test_storage_that_refuses_is_told_to_script_and_command_and_the_job_fails(
    yard: RoleYard, probes: Probes, refused: Path
) -> None:
    url, options = refused, ("--samples", "100", "--pause-ms", "20")
    given: dict[str, Any] = {"coordinator": yard.address, "job__checkpoint__url": url, "job__idle_ms": 3_000, **SELDOM}
    script, out = probes.start("own", *options, **given)
    script.wait_for("computed 5")
    taken = shardyard("checkpoint", "take", "probe", "--coordinator", yard.address)
    assert taken.wait() == 1
    assert str(url) in taken.output
    finish(script, out)
    (job,) = yard.ended().jobs
    assert job.state == wire.JOB_STATE_FAILED
    assert job.failure.code == "StorageUnavailable"
    late = "ends without its last checkpoint, which failed at last by: "
    assert late in job.failure.what
    assert late in yard.coordinator.output
    told = shardyard("status", "--coordinator", yard.address)
    assert told.wait() == 0
    assert "failed: StorageUnavailable: job 'probe' (1.1) ends without its last checkpoint" in told.output
    failing, _ = probes.start("own", *options, "--checkpoint-at", "5", **given)
    assert failing.wait() == 1
    assert "StorageUnavailable" in failing.output


@pytest.mark.long
def test_job_that_failed_without_its_last_checkpoint_goes_on_from_the_newest(
    yard: RoleYard, probes: Probes, tmp_path: Path
) -> None:
    url, away = tmp_path / "kept", tmp_path / "away"
    given: dict[str, Any] = {"coordinator": yard.address, "job__checkpoint__url": url, "job__idle_ms": 3_000, **SELDOM}
    script, out = probes.start("own", "--samples", "40", "--pause-ms", "20", "--checkpoint-at", "10", **given)
    script.wait_for("took checkpoint ")
    url.rename(away)
    url.write_text("no folder")
    finish(script, out)
    (job,) = yard.ended().jobs
    newest = job.checkpoint.number
    assert job.state == wire.JOB_STATE_FAILED
    assert f"what came after checkpoint {newest} of step {job.checkpoint.step} is lost" in job.failure.what
    url.unlink()
    away.rename(url)
    before = values(url, newest)
    ordered = shardyard("checkpoint", "restore", "probe", "--coordinator", yard.address)
    assert ordered.wait() == 0, ordered.output
    assert f"job probe starts its next run from checkpoint {newest}, " in ordered.output
    probes.run("own", "--samples", "40", **given)
    (*_, job) = yard.ended().jobs
    assert job.state == wire.JOB_STATE_FINISHED
    assert values(url) == {value + 40.0 for value in before}


@pytest.mark.long
def test_ledgers_of_a_long_job_do_not_grow(yard: RoleYard, probes: Probes) -> None:
    """800 data shards of one batch each; the coordinator dies half way."""
    settings = {"job__data__batches_per_data_shard": 1, "job__checkpoint__every_steps": 20}
    options = ("--samples", "400", "--epochs", "8", "--pause-ms", "5")
    script, out = probes.start("count", *options, coordinator=yard.address, **settings)
    script.wait_for("computed 400", timeout_s=100)
    yard.kill_coordinator()
    yard.restart_coordinator()
    most = 0
    while script.process.poll() is None:
        most = max(most, sources(yard))
        time.sleep(0.05)
    result = finish(script, out)
    assert result["counts"] == [8.0] * 400
    assert 0 < most < 400
    newest = manifest(yard.state / "checkpoints", None)
    assert newest.token_floor > 400


# ---- restored on command


@pytest.mark.long
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_run_of_a_yard_that_lost_its_journal_begins_with_a_checkpoint_on_another_number_of_servers(
    probes: Probes, tmp_path: Path, mode: str
) -> None:
    """Every sample counts once, over both yards."""
    kept = tmp_path / "kept"
    settings: dict[str, object] = {
        "job__consistency__mode": mode,
        "job__checkpoint__url": kept,
        "job__checkpoint__every_steps": 10,
        "job__data__batches_per_data_shard": 3,
    }
    options = ("--samples", "203", "--epochs", "3", "--pause-ms", "20")
    first = RoleYard(tmp_path / "first", servers=2)
    try:
        script, _ = probes.start("count", *options, coordinator=first.address, job__seed=5, **settings)
        first.coordinator.wait_for("checkpoint 3 of step")
        script.kill()
    finally:
        first.stop()
    second = RoleYard(tmp_path / "second", servers=1)
    try:
        order = ("checkpoint", "restore", "probe", "--url", str(kept), "--coordinator", second.address)
        refused = shardyard(*order)
        assert refused.wait() != 0
        assert "is not signed by this yard" in refused.output
        ordered = shardyard(*order, "--trust")
        assert ordered.wait() == 0, ordered.output
        assert re.fullmatch(r"job probe starts its next run from checkpoint \d+, step \d+, in .+", ordered.output)
        second.kill_coordinator()
        second.restart_coordinator()
        other, _ = probes.start("own", coordinator=second.address, **settings)
        assert other.wait() == 1
        assert "VariableConflict" in other.output
        assert "with which it is to begin" in other.output
        script, out = probes.start("count", *options, coordinator=second.address, **settings)
        result = finish(script, out)
        assert result["counts"] == [3.0] * 203
        assert 0 < result["computed"] < 153, "what the checkpoint has is not computed again"
        (*_, job) = second.ended().jobs
        assert job.state == wire.JOB_STATE_FINISHED
        assert len({owner.server for owner in job.map.owners}) == 1
        again, out = probes.start("count", *options, coordinator=second.address, **settings)
        assert finish(again, out)["computed"] == 153, "an order is for one run"
    finally:
        second.stop()


LOGS: dict[str, object] = {
    "job__durability": "wal",
    "job__checkpoint__every_steps": 10,
    "job__checkpoint__keep": 100,
    "job__data__batches_per_data_shard": 3,
}
COUNT = ("--samples", "203", "--epochs", "3", "--pause-ms", "20")


def finish_without_a_server(yard: RoleYard, script: Script, out: Path, title: str) -> None:
    """A run that began with checkpoint 5: one of its servers dies, after its first checkpoint. Every sample counts
    once."""
    yard.coordinator.wait_for(f"{title}: checkpoint ")
    script.wait_for("computed 4")
    yard.kill_server(1)
    yard.restart_server(1)
    result = finish(script, out)
    assert result["counts"] == [3.0] * 203
    assert 0 < result["computed"] < 153, "what the checkpoint has is not computed again"
    assert f"{title}: partitions" in yard.coordinator.output
    assert "with all that was acknowledged" in yard.coordinator.output


@pytest.mark.long
@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_next_run_of_a_job_with_logs_begins_with_a_checkpoint(
    yard: RoleYard, probes: Probes, tmp_path: Path, mode: str, elsewhere: bool
) -> None:
    """`elsewhere`: it writes its own where there are none, from number 1 on."""
    settings = LOGS | {"job__consistency__mode": mode, "job__checkpoint__url": tmp_path / "kept"}
    script, out = probes.start("count", *COUNT, coordinator=yard.address, **settings)
    assert finish(script, out)["counts"] == [3.0] * 203
    where = ("--number", "5", "--url", str(tmp_path / "kept"), "--coordinator", yard.address)
    ordered = shardyard("checkpoint", "restore", "probe", *where)
    assert ordered.wait() == 0, ordered.output
    if elsewhere:
        settings["job__checkpoint__url"] = tmp_path / "other"
    again, out = probes.start("count", *COUNT, coordinator=yard.address, **settings)
    finish_without_a_server(yard, again, out, "job 'probe' (1.2)")


@pytest.mark.long
@pytest.mark.parametrize(
    ("origin", "dying", "mode"),
    [
        ("values", "server", "sync"),
        ("values", "both", "async"),
        ("checkpoint", "both", "sync"),
    ],
)
def test_job_with_logs_begins_again_if_processes_die_before_its_first_checkpoint(
    yard: RoleYard, probes: Probes, tmp_path: Path, origin: str, dying: str, mode: str
) -> None:
    """A server at the beginning of that checkpoint, the coordinator at its end, or both at its beginning."""
    settings = LOGS | {"job__consistency__mode": mode, "job__checkpoint__url": tmp_path / "kept"}
    if origin == "checkpoint":
        script, out = probes.start("count", *COUNT, coordinator=yard.address, **settings)
        assert finish(script, out)["counts"] == [3.0] * 203
        where = ("--number", "5", "--url", str(tmp_path / "kept"), "--coordinator", yard.address)
        ordered = shardyard("checkpoint", "restore", "probe", *where)
        assert ordered.wait() == 0, ordered.output
    if dying == "coordinator":
        yard.kill_coordinator()
        yard.restart_coordinator("checkpoint.before_manifest=exit@1")
    else:
        yard.kill_server(1)
        yard.restart_server(1, "wal.before_rotate=exit@1")
    script, out = probes.start("count", *COUNT, coordinator=yard.address, **settings)
    dead = yard.coordinator if dying == "coordinator" else yard.servers[1]
    assert dead.wait() == EXIT_CODE, dead.output
    assert "computed 1" not in script.lines, "nobody works before that checkpoint"
    if dying == "both":
        yard.kill_coordinator()
    if dying != "server":
        yard.restart_coordinator()
    if dying != "coordinator":
        yard.restart_server(1)
    result = finish(script, out)
    assert result["counts"] == [3.0] * 203
    assert (result["computed"] < 153) is (origin == "checkpoint")
    *_, job = yard.ended().jobs
    assert job.state == wire.JOB_STATE_FINISHED
    told = {"values": "first values are given again", "checkpoint": "the job goes back to checkpoint 5"}[origin]
    assert (told in yard.coordinator.output) is (dying != "coordinator")
    if origin == "checkpoint":
        again, out = probes.start("count", *COUNT, coordinator=yard.address, **settings)
        assert finish(again, out)["computed"] == 153, "an order is for one run"


@pytest.mark.long
def test_yard_that_lost_its_journal_and_has_logs_of_before_begins_with_a_checkpoint(
    probes: Probes, tmp_path: Path
) -> None:
    """It gives the numbers of jobs and servers again, under which there are logs."""
    settings = LOGS | {"job__checkpoint__url": tmp_path / "kept"}
    first = RoleYard(tmp_path / "first")
    try:
        script, _ = probes.start("count", *COUNT, coordinator=first.address, **settings)
        first.coordinator.wait_for("checkpoint 6 of step")
        script.kill()
    finally:
        first.stop()
    shutil.copytree(first.state / "wal", tmp_path / "second" / "state" / "wal")
    second = RoleYard(tmp_path / "second")
    try:
        other = probes.run("own", "--samples", "20", coordinator=second.address, job="other", job__durability="wal")
        assert {each for values in other["values"].values() for each in values} == {20.0}
        where = ("--number", "5", "--url", str(tmp_path / "kept"), "--coordinator", second.address, "--trust")
        ordered = shardyard("checkpoint", "restore", "probe", *where)
        assert ordered.wait() == 0, ordered.output
        again, out = probes.start("count", *COUNT, coordinator=second.address, **settings)
        finish_without_a_server(second, again, out, "job 'probe' (1.2)")
        assert any("a log of another yard" in server.output for server in second.servers)
    finally:
        second.stop()


@pytest.mark.long("async")
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_job_that_runs_goes_back_as_a_whole(yard: RoleYard, probes: Probes, mode: str) -> None:
    settings = {
        "job__consistency__mode": mode,
        "job__checkpoint__every_steps": 10,
        "job__checkpoint__keep": 100,
        "job__data__batches_per_data_shard": 3,
    }
    options = ("--samples", "203", "--epochs", "3", "--pause-ms", "30")
    script, out = probes.start("count", *options, coordinator=yard.address, **settings)
    yard.coordinator.wait_for("checkpoint 4 of step")
    back = shardyard("checkpoint", "restore", "probe", "--number", "2", "--coordinator", yard.address)
    assert back.wait() == 0, back.output
    assert "job probe goes back to checkpoint 2" in back.output
    result = finish(script, out)
    assert result["counts"] == [3.0] * 203
    assert result["computed"] > 153
    assert "goes back to checkpoint 2" in yard.coordinator.output
    assert yard.ended().jobs[0].state == wire.JOB_STATE_FINISHED
