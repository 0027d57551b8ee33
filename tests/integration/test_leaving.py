"""A worker leaves a synchronous job while others go on: what compression had not sent is theirs.

The oracle: gradients are whole numbers, at a rate of 1. What the servers have, and what workers remember, is the sum of
the gradients of all steps, to the bit: a hundredth of a gradient is sent at a time, so what was not sent is most of it.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from alone import SYNC, status
from torch.utils.data import TensorDataset
from yards import ROLE, Probes, RoleYard, Script, finish

import shardyard as sy
from shardyard.checkpoints.library import CheckpointLibrary
from shardyard.checkpoints.manifest import Manifest, left_name
from shardyard.config import configuration
from shardyard.config.settings import Settings
from shardyard.domain import errors
from shardyard.domain.ids import Incarnation
from shardyard.storage.storage import open_storage
from shardyard.wire import methods
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_coordinator.storage import residual_handover
from shardyard_launcher.yard.in_process import COORDINATOR, LocalYard
from shardyard_worker.compression.residual_state import ResidualCheckpointer
from shardyard_worker.job import job as worker

sys.path.insert(0, str(Path(__file__).parent / "scripts"))

from probe import whole_numbers

HEARTBEAT_MS = 20
QUICK = {"membership.heartbeat_ms": HEARTBEAT_MS, "membership.lease_ms": 600_000, "log.level": "error"}
CODED = {"job.compression.push": "topk:0.01", "job.compression.whole_elements_max": 0}
SHAPE = (20, 30)
GRADIENT = whole_numbers(1)[0]
DEADLINE_S = 10.0


class Yard:
    """In this process. Of its workers one has the one logical rank; the others stand by."""

    def __init__(self, folder: Path, given: dict[str, object]) -> None:
        kept = {"job.checkpoint.url": str(folder), "job.checkpoint.every_s": 0, "job.workers_expected": 9}
        settings = configuration.load(None, {}, QUICK | SYNC | CODED | kept | {"job.partitions": 3} | given).settings
        self.inside: Settings = settings.model_copy(update={"coordinator": COORDINATOR})
        self.local = LocalYard(settings)
        self.library = CheckpointLibrary(open_storage(str(folder)))
        self.jobs: list[sy.Job] = []

    def connect(self) -> sy.Job:
        job = worker.connect(self.inside, network=self.local.network)
        self.jobs.append(job)
        job.register({"w": torch.zeros(SHAPE)}, optimizer="sgd", lr=1.0)
        return job

    def train(self, job: sy.Job, steps: int) -> None:
        """So many that count: what is computed on standby is dropped."""
        progress = job._session.progress
        wanted = progress.samples + steps
        while progress.samples < wanted:
            job.push({"w": -GRADIENT})

    def ask(self, method: Any, request: Any) -> Any:
        peer = self.local.network.connect(COORDINATOR, name="coordinator", unavailable=errors.CoordinatorUnavailable)
        return peer.call(method, request, timeout_ms=5_000)

    @property
    def files(self) -> list[str]:
        """Of what workers have left."""
        return [name for name in self.all_files if "-left" in name]

    @property
    def all_files(self) -> list[str]:
        storage = self.library.storage
        return [name for number in storage.list_folders("default") for name in storage.list_files(f"default/{number}")]


@pytest.fixture
def yards(tmp_path: Path, alone: None) -> Iterator[Callable[..., Yard]]:
    made: list[Yard] = []

    def start(**given: object) -> Yard:
        made.append(Yard(tmp_path, given))
        return made[-1]

    yield start
    for yard in made:
        for job in yard.jobs:
            job.close("the end")
        yard.local.close()


def sum_of(job: sy.Job) -> np.ndarray[Any, Any]:
    """Of the gradients of all steps, whoever took them."""
    total: np.ndarray[Any, Any] = job.step * GRADIENT.numpy()
    return total


def residual(job: sy.Job) -> np.ndarray[Any, Any]:
    return job.compression_state()["residual.w"].reshape(SHAPE).numpy()


def has(job: sy.Job) -> np.ndarray[Any, Any]:
    """What the servers and this worker have together. Gradients are subtracted."""
    had: np.ndarray[Any, Any] = job.pull()["w"].numpy() - residual(job)
    return had


def wait_until(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.005)


def no_checkpoint_is_under_way(yard: Yard) -> None:
    """The first is there, and no other is due: while one is taken nothing changes hands."""
    wait_until(lambda: bool(yard.library.numbers("default")))


def takes_up(job: sy.Job) -> None:
    """Until it has; the servers and this worker then have the sum."""
    wait_until(lambda: bool(np.array_equal(has(job), sum_of(job))))


@contextmanager
def deaf_to_what_is_handed_over() -> Iterator[None]:
    """Workers take up nothing, as if they had died while they read."""
    shipped = ResidualCheckpointer._add
    ResidualCheckpointer._add = lambda self, handed: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        ResidualCheckpointer._add = shipped  # type: ignore[method-assign]


# ---- in one process


def test_who_goes_on_sends_what_the_one_that_left_had_not(yards: Callable[..., Yard]) -> None:
    yard = yards()
    first, second = yard.connect(), yard.connect()
    yard.train(first, 5)
    assert np.count_nonzero(residual(first)) > 500
    first.close()
    yard.train(second, 1)
    takes_up(second)
    yard.train(second, 30)
    assert np.array_equal(has(second), sum_of(second))
    wait_until(lambda: yard.files == [])
    assert status(yard.local).residuals_lost == 0


def test_hand_over_goes_on_from_one_to_the_next(yards: Callable[..., Yard]) -> None:
    yard = yards()
    jobs = [yard.connect() for _ in range(4)]
    for former, later in itertools.pairwise(jobs):
        yard.train(former, 4)
        former.close()
        yard.train(later, 1)
        takes_up(later)
    yard.train(jobs[-1], 1)
    assert np.array_equal(has(jobs[-1]), sum_of(jobs[-1]))


def test_late_joiner_takes_up_what_the_only_worker_had_not_sent(yards: Callable[..., Yard]) -> None:
    yard = yards()
    first = yard.connect()
    yard.train(first, 5)
    no_checkpoint_is_under_way(yard)
    first.close()
    late = yard.connect()
    assert np.array_equal(has(late), sum_of(late))
    yard.train(late, 3)
    assert np.array_equal(has(late), sum_of(late))


def test_promise_1_what_a_heartbeat_names_while_it_is_taken_up_is_taken_up_once(
    yards: Callable[..., Yard], monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = ResidualCheckpointer._read
    readers: list[str] = []

    def read(self: ResidualCheckpointer, handed: wire.HandOver) -> Any:
        readers.append(threading.current_thread().name)
        time.sleep(20 * HEARTBEAT_MS / 1000)
        return shipped(self, handed)

    yard = yards()
    first = yard.connect()
    yard.train(first, 5)
    no_checkpoint_is_under_way(yard)
    first.close()
    monkeypatch.setattr(ResidualCheckpointer, "_read", read)
    late = yard.connect()
    yard.train(late, 1)
    assert np.array_equal(has(late), sum_of(late))
    assert len(readers) == 1


@pytest.mark.parametrize("how", ["dies", "leaves", "leaves by an error"])
def test_next_one_takes_it_up_where_the_first_goes_before_it_has(
    yards: Callable[..., Yard], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    yard = yards()
    registered = wire.RegisterRequest(role=wire.ROLE_AGENT, address="a:1", protocol=1)
    agent = yard.ask(methods.REGISTER, registered).incarnation

    def goes(job: sy.Job) -> None:
        assert not residual(job).any()
        if how == "dies":
            exited = wire.ReportExitRequest(caller={"incarnation": agent}, pid=os.getpid(), exit_code=-9)
            yard.ask(methods.REPORT_EXIT, exited)
        else:
            job.close("" if how == "leaves" else "ValueError: no")

    first = yard.connect()
    with monkeypatch.context() as environment:
        environment.setenv("SHARDYARD_AGENT", str(agent))
        second = yard.connect()
    third = yard.connect()
    yard.train(first, 5)
    with deaf_to_what_is_handed_over():
        first.close()
        goes(second)
    yard.train(third, 1)
    takes_up(third)
    yard.train(third, 6)
    assert np.array_equal(has(third), sum_of(third))
    assert status(yard.local).residuals_lost == 0


def test_checkpoint_has_what_nobody_has_taken_up_yet_and_a_job_that_goes_back_gives_it_again(
    yards: Callable[..., Yard], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(residual_handover, "HOLD_MS", 0)
    yard = yards()
    first, second = yard.connect(), yard.connect()
    yard.train(first, 5)
    with deaf_to_what_is_handed_over():
        first.close()
        yard.train(second, 3)
        number = second.checkpoint()
    manifest = yard.library.load("default", number)
    assert_whole(yard.library, manifest)
    names = [left_name(first._session.caller.incarnation), f"{second._session.caller.incarnation:x}"]
    assert sorted(each.worker for each in manifest.feedback) == sorted(names)
    at_checkpoint = second.step
    takes_up(second)
    yard.train(second, 4)
    yard.ask(methods.RESTORE_CHECKPOINT, wire.RestoreCheckpointRequest(job_name="default", number=number))
    wait_until(lambda: second._session.generation > 1)
    yard.train(second, 2)
    assert at_checkpoint < second.step < at_checkpoint + 4
    takes_up(second)
    number = second.checkpoint()
    assert_whole(yard.library, yard.library.load("default", number))
    assert yard.library.verify("default") == ()


def assert_whole(library: CheckpointLibrary, manifest: Manifest) -> None:
    """What servers and workers have in a checkpoint is the sum of the gradients of its steps."""
    ((name, values),) = library.export_state(manifest)
    kept = [library.load_feedback("default", each, manifest.layout)[f"residual.{name}"] for each in manifest.feedback]
    assert np.array_equal(values - sum(each.reshape(SHAPE) for each in kept), manifest.step * GRADIENT.numpy())


def test_what_is_taken_up_is_in_the_next_checkpoint_once(yards: Callable[..., Yard]) -> None:
    yard = yards()
    first, second = yard.connect(), yard.connect()
    yard.train(first, 5)
    first.close()
    manifest = yard.library.load("default", second.checkpoint())
    assert [each.worker for each in manifest.feedback] == [f"{second._session.caller.incarnation:x}"]
    assert_whole(yard.library, manifest)
    assert yard.files == []


def test_nothing_is_written_at_the_end_of_the_data(
    yards: Callable[..., Yard], caplog: pytest.LogCaptureFixture
) -> None:
    yard = yards()
    data = TensorDataset(whole_numbers(12))
    jobs = [yard.connect(), yard.connect()]

    def train(job: sy.Job) -> None:
        for (added,) in job.batches(data, batch_size=4):
            job.push({"w": -added.sum(0)})

    threads = [threading.Thread(target=train, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with caplog.at_level(logging.WARNING, "shardyard.worker"):
        for job in jobs:
            job.close()
    told = [each.getMessage() for each in caplog.records if "nobody goes on" in each.getMessage()]
    assert len(told) == 1, "the other one never had the rank, and had nothing to send"
    assert yard.files == []
    assert status(yard.local).residuals_lost == 0


@pytest.mark.parametrize("why", ["no storage", "refused"])
def test_worker_that_can_write_nowhere_leaves_all_the_same(
    yards: Callable[..., Yard], why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    yard = yards(**({"job.checkpoint.url": "never"} if why == "no storage" else {}))
    first, second = yard.connect(), yard.connect()
    yard.train(first, 5)
    if why == "refused":
        wait_until(lambda: bool(yard.library.numbers("default")))
        taken = [
            (tmp_path / "default" / f"{number:012d}")
            for number in range(100)
            if number >= yard.library.next_number("default")
        ]
        taken[0].write_text("in the way")
    norm = float(np.linalg.norm(residual(first)))
    with caplog.at_level(logging.WARNING, "shardyard.worker"):
        first.close()
    assert any("is lost with this worker" in each.getMessage() for each in caplog.records)
    found = status(yard.local)
    assert found.residuals_lost == 1
    assert found.residual_lost_norm == pytest.approx(norm, rel=1e-5)
    yard.train(second, 2)
    assert not np.array_equal(has(second), sum_of(second))


# ---- processes of their own


SAMPLES, EPOCHS, HOLD_AT = 160, 2, 6
EXPECTED = EPOCHS * whole_numbers(SAMPLES).sum(0).numpy()


@pytest.fixture
def roles(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RoleYard]:
    """`request.param`: the lease in ms, where a test says it."""
    begun = RoleYard(tmp_path, servers=1, lease_ms=getattr(request, "param", 0))
    yield begun
    begun.stop()


def start(roles: RoleYard, probes: Probes, *options: str, workers: int) -> tuple[Script, Path]:
    """One of so many workers; two have a logical rank."""
    given = {name.replace(".", "__"): value for name, value in (SYNC | CODED).items()}
    given |= {"job__consistency__logical_ranks": 2, "job__workers_expected": workers, "coordinator": roles.address}
    options += ("--samples", str(SAMPLES), "--epochs", str(EPOCHS), "--hold-at", str(HOLD_AT))
    return probes.start("sums", *options, **given)


def whole(found: Any) -> np.ndarray[Any, Any]:
    return np.array(found, np.float32).reshape(SHAPE)


def left_on(roles: RoleYard) -> list[Path]:
    return sorted((roles.state / "checkpoints").rglob("*-left.safetensors"))


def command(*arguments: str) -> list[str]:
    script = Script([*ROLE, *arguments], {})
    assert script.wait() == 0, script.output
    return script.lines


@pytest.mark.long
@pytest.mark.parametrize("roles", [60_000], indirect=True)
def test_hand_over_outlives_the_coordinator_and_checkpoint_commands_leave_it_alone(
    roles: RoleYard, probes: Probes, tmp_path: Path
) -> None:
    """Values are of the mean of two ranks, and gradients are subtracted."""
    go, on = tmp_path / "go", tmp_path / "on"
    leaver, out = start(roles, probes, "--hold", str(go), "--leave-at", str(HOLD_AT), workers=2)
    other, other_out = start(roles, probes, "--hold", str(on), workers=2)
    for script in (leaver, other):
        script.wait_for(f"computed {HOLD_AT}")
    other.process.send_signal(signal.SIGSTOP)
    go.touch()
    gone = finish(leaver, out)
    assert np.count_nonzero(whole(gone["residual"])) > 300
    (file,) = left_on(roles)
    roles.kill_coordinator()
    url = str(roles.state / "checkpoints")
    for name in (("list",), ("verify",), ("prune", "--keep", "2")):
        command("checkpoint", *name, "--url", url)
    assert left_on(roles) == [file]
    roles.restart_coordinator()
    other.process.send_signal(signal.SIGCONT)
    on.touch()
    result = finish(other, other_out)
    assert any("takes up what worker" in line for line in other.lines)
    status = roles.ended()
    assert status.jobs[0].residuals_lost == 0
    assert np.array_equal(whole(result["sums"]) * 2 - whole(result["residual"]), EXPECTED)
    assert left_on(roles) == []
    assert command("checkpoint", "verify", "--url", url)


@pytest.mark.long
def test_worker_that_is_killed_before_it_has_taken_it_up_leaves_it_to_the_next(
    roles: RoleYard, probes: Probes, tmp_path: Path
) -> None:
    go, never = tmp_path / "go", tmp_path / "never"
    leaver, out = start(roles, probes, "--hold", str(go), "--leave-at", str(HOLD_AT), workers=2)
    taker, taker_out = start(roles, probes, "--hold", str(never), workers=2)
    for script in (leaver, taker):
        script.wait_for(f"computed {HOLD_AT}")
    third, third_out = start(roles, probes, "--hold", str(go), workers=2)
    third.wait_for("joined job")
    taker.process.send_signal(signal.SIGSTOP)
    go.touch()
    finish(leaver, out)
    taker.kill()
    result = finish(third, third_out)
    assert any("takes up what worker" in line for line in third.lines)
    roles.ended()
    killed = whole(json.loads(Path(f"{taker_out}.held").read_text()))
    assert np.array_equal(whole(result["sums"]) * 2 - whole(result["residual"]) - killed, EXPECTED)
    told = [json.loads(line) for line in command("audit", "probe", "--coordinator", roles.address) if line[:1] == "{"]
    handed = [each for each in told if each["event"] in ("feedback_handed_over", "feedback_taken")]
    assert [each["event"] for each in handed] == ["feedback_handed_over", "feedback_taken"]
    term, _, number = handed[0]["worker"].partition(".")
    assert handed[1]["of"] == left_name(Incarnation((int(term) << 32) + int(number)))
    residuals = {each["worker"]: each["residual"] for each in told if each["event"] == "worker_gone"}
    assert residuals[handed[0]["worker"]] == 0.0
