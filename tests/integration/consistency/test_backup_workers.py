"""Backup workers: steps are taken without their latest ranks, and each sample counts once all the same."""

from __future__ import annotations

import argparse
import importlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import shardyard as sy
from shardyard.config import configuration
from shardyard.runtime.failpoints import EXIT_CODE
from shardyard.wire import methods
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_coordinator.work import straggler_verdicts
from shardyard_coordinator.work.step_times import StepTimes
from shardyard_launcher.commands import audit
from shardyard_launcher.yard.in_process import COORDINATOR, LocalYard
from shardyard_worker.consistency.backup_workers import StepVerdicts
from shardyard_worker.job import connect as worker
from tests.support.identities import network_to
from tests.support.yards import Probes, RoleYard, Script, computed, finish

DEADLINE_S = 90.0
RANKS = 3
BACKUP = {
    "job.consistency.mode": "sync",
    "job.consistency.logical_ranks": RANKS,
    "job.consistency.backup_workers": 1,
    "job.workers_expected": RANKS,
    "job.partitions": 5,
    "job.block_bytes": 64,
    "log.level": "error",
}


def status(yard: LocalYard) -> wire.StatusReply:
    peer = yard.network.connect(COORDINATOR, name="coordinator")
    return peer.call(methods.STATUS, wire.StatusRequest(), timeout_ms=5_000)


PLACES = 256


def counting(job: sy.Job, samples: int) -> tuple[torch.nn.Parameter, Any]:
    """Values for each sample, to one of which each step adds 1 where the sample counts, whatever its share of the
    mean. Which one is drawn with the batch's seed: a batch that is made up for in the next epoch may share its step
    with that epoch's batch of the same sample, and a value counts once a step."""
    values = torch.nn.Parameter(torch.zeros(samples, PLACES, dtype=torch.float64))
    optimizer = torch.optim.RMSprop([values], lr=1.0, alpha=0.0, eps=1e-12)
    _, optimizer = job.prepare(torch.nn.ParameterList([values]), optimizer)
    return values, optimizer


def count(job: sy.Job, samples: int, epochs: int, pause_s: float, feeds: int = 1) -> list[float]:
    """Goes through all samples, each batch after a pause; how often each has counted."""
    values, optimizer = counting(job, samples)
    for _ in range(feeds):
        for (index,) in job.batches(TensorDataset(torch.arange(samples)), batch_size=4, epochs=epochs):
            time.sleep(pause_s)
            optimizer.zero_grad()
            (-values[index, torch.randint(PLACES, ())].sum()).backward()
            optimizer.step()
    return counted(job)


def counted(job: sy.Job) -> list[float]:
    """How often each sample has."""
    return [round(value, 6) for value in job.pull()["0"].sum(1).tolist()]


def together(
    settings: dict[str, Any], work: Callable[[sy.Job, int], Any], workers: int = RANKS
) -> tuple[list[Any], wire.JobStatus]:
    """Each worker a thread, in a yard within this process; what they return, and the job's status before they leave."""
    loaded = configuration.load(None, {}, BACKUP | settings).settings
    yard = LocalYard(loaded)
    joined, done = threading.Barrier(workers), threading.Barrier(workers)
    shown: list[wire.JobStatus] = []

    def run(number: int) -> Any:
        inside = loaded.model_copy(update={"coordinator": COORDINATOR})
        with worker.connect(inside, network=yard.network) as job:
            joined.wait(DEADLINE_S)
            found = work(job, number)
            done.wait(DEADLINE_S)
            if number == 0:
                shown.extend(status(yard).jobs)
            done.wait(DEADLINE_S)
            return found

    try:
        with ThreadPoolExecutor(workers) as threads:
            runs = [threads.submit(run, number) for number in range(workers)]
            found = [each.result(DEADLINE_S) for each in runs]
    finally:
        yard.close()
    (job,) = shown
    return found, job


@pytest.mark.long("clipped")
@pytest.mark.parametrize(
    "more",
    [{}, {"worker.same_host": "never", "yard.servers": 1}, {"job.clip.norm": 0.5}, {"worker.exchange": "overlapped"}],
    ids=["shared", "streams", "clipped", "prefetch"],
)
def test_promise_2_each_sample_counts_once_an_epoch_with_a_slow_worker(more: dict[str, Any]) -> None:
    slow = 2

    def work(job: sy.Job, number: int) -> list[float]:
        return count(job, samples=101, epochs=2, pause_s=0.2 if number == slow else 0.002)

    found, job = together(more, work)
    assert found == [[2.0] * 101] * RANKS
    assert job.dropped > 5
    assert job.samples == 202


def test_promise_2_one_data_set_follows_the_other_behind_what_is_made_up() -> None:
    def work(job: sy.Job, number: int) -> list[float]:
        return count(job, samples=50, epochs=1, pause_s=0.03 if number == 1 else 0.0, feeds=3)

    found, job = together({}, work)
    assert found == [[3.0] * 50] * RANKS
    assert job.dropped
    assert [feed.finished for feed in job.feeds] == [True] * 3
    assert job.samples == 150


def test_rule_b5_a_batch_that_is_made_up_for_is_the_same_batch() -> None:
    """With its samples, its epoch's order and its seed. One worker has all ranks, and drops its own last one."""

    def work(job: sy.Job, _: int) -> dict[tuple[int, ...], list[float]]:
        values, optimizer = counting(job, 50)
        seen: dict[tuple[int, ...], list[float]] = {}
        for (index,) in job.batches(TensorDataset(torch.arange(50)), batch_size=4, epochs=2):
            seen.setdefault(tuple(index.tolist()), []).append(float(torch.rand(1)))
            optimizer.zero_grad()
            (-values[index, torch.randint(PLACES, ())].sum()).backward()
            optimizer.step()
        assert counted(job) == [2.0] * 50
        return seen

    alone = {"job.workers_expected": 1, "job.consistency.backup_patience": 0}
    (late,), job = together(alone, work, workers=1)
    (plain,), planned = together(alone | {"job.consistency.backup_workers": 0}, work, workers=1)
    assert {batch: sorted(seen) for batch, seen in late.items()} == {b: sorted(seen) for b, seen in plain.items()}
    assert job.dropped > 5
    assert job.feeds[0].done > planned.feeds[0].done


# ---- the same verdicts, the same bits

PROBE: Any = importlib.import_module("tests.support.scripts.probe")
MODEL = {"job.partitions": 4, "job.block_bytes": configuration.load(None, {}, {}).settings.job.block_bytes}
Verdicts = dict[int, tuple[int, ...]]


def begin(yard: RoleYard, probes: Probes, computed: int = 2, **settings: Any) -> list[tuple[Script, Path]]:
    """Three workers of a synchronous job, the last of them slow, with a checkpoint every few steps, once each has
    computed so many batches."""
    settings |= {
        "coordinator": yard.address,
        "job__workers_expected": RANKS,
        "job__checkpoint__every_steps": 5,
        "job__consistency__mode": "sync",
        "job__consistency__logical_ranks": RANKS,
        "job__consistency__backup_workers": 1,
    }
    started = []
    for pause_ms in ("15", "25", "120"):
        started.append(probes.start("model", "--samples", "180", "--epochs", "3", "--pause-ms", pause_ms, **settings))
    for script, _ in started:
        if computed:
            script.wait_for(f"computed {computed}")
    return started


def verdicts_of(yard: RoleYard, job: str) -> Verdicts:
    """Who was left out in each step, as the audit has it."""
    found: Verdicts = {}
    for entry in audit.ask(network_to(yard.address), yard.address, job):
        if entry["event"] == "steps_decided":
            (left_out,) = entry["left_out"]
            assert entry["first"] not in found
            found[entry["first"]] = tuple(left_out)
    assert sorted(found) == list(range(len(found)))
    return found


def undisturbed(monkeypatch: pytest.MonkeyPatch, verdicts: Verdicts) -> list[str]:
    """The digests of a run in which nobody dies, and the same ranks come late."""

    def due(self: straggler_verdicts.StepVerdicts, step: int, working: object) -> tuple[int, ...] | None:
        told, present = self._present
        wanted = verdicts[step]
        there = step == told == self.decided and present >= set(range(RANKS)) - set(wanted)
        return wanted if there else None

    monkeypatch.setattr(straggler_verdicts.StepVerdicts, "due", due)
    options = argparse.Namespace(mode="model", samples=180, epochs=3, pause_ms=0, compile="", stop_at=0, hold_at=0)

    def work(job: sy.Job, _: int) -> str:
        return str(PROBE.train_model(job, options)["digest"])

    # one worker for all ranks: torch's generators are the process's
    found, _ = together(MODEL | {"job.workers_expected": 1}, work, workers=1)
    return found


@pytest.mark.long("checkpoint")
@pytest.mark.parametrize("durability", ["checkpoint", "wal"])
def test_promise_6_bits_are_those_of_the_verdicts_when_a_server_dies(
    yard: RoleYard, probes: Probes, monkeypatch: pytest.MonkeyPatch, durability: str
) -> None:
    started = begin(yard, probes, job="two", job__durability=durability)
    yard.coordinator.wait_for("job 'two' (1.1): checkpoint ")
    first = started[0][0]
    first.wait_for(f"computed {computed(first) + 2}")
    yard.kill_server(0)
    yard.restart_server(0)
    results = [finish(*each) for each in started]
    verdicts = verdicts_of(yard, "two")
    assert sum(map(bool, verdicts.values())) > 3, "somebody came late"
    assert {result["step"] for result in results} == {len(verdicts)}
    assert {result["digest"] for result in results} == {*undisturbed(monkeypatch, verdicts)}


@pytest.mark.long
def test_promise_6_bits_are_those_of_the_verdicts_when_a_worker_dies(
    yard: RoleYard, probes: Probes, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = begin(yard, probes, job="two", job__rank_grace_ms=200, membership__lease_ms=2_000)
    (first, out), (victim, _), slow = started
    victim.kill()
    results = [finish(first, out), finish(*slow)]
    verdicts = verdicts_of(yard, "two")
    assert {result["step"] for result in results} == {len(verdicts)}
    assert {result["digest"] for result in results} == {*undisturbed(monkeypatch, verdicts)}


@pytest.mark.long
def test_promise_6_bits_are_those_of_the_verdicts_when_the_coordinator_dies_before_it_tells_one(
    yard: RoleYard, probes: Probes, monkeypatch: pytest.MonkeyPatch
) -> None:
    yard.kill_coordinator()
    yard.restart_coordinator("reply.decidestep=exit@60")
    started = begin(yard, probes, computed=0, job="two")
    assert yard.coordinator.process.wait(60) == EXIT_CODE
    yard.coordinator.kill()
    yard.restart_coordinator()
    results = [finish(*each) for each in started]
    verdicts = verdicts_of(yard, "two")
    assert {result["step"] for result in results} == {len(verdicts)}
    assert {result["digest"] for result in results} == {*undisturbed(monkeypatch, verdicts)}


# ---- who comes late


@pytest.mark.parametrize("left_ms", [60_000, 0], ids=["worth waiting", "not worth it"])
def test_who_comes_late_in_the_midst_of_a_step_is_in_time_for_the_next(
    monkeypatch: pytest.MonkeyPatch, left_ms: int
) -> None:
    """Two are in the midst of step 3, and stay there until the third, who comes late with step 0, has chosen."""
    late, under_way = 2, 3
    begin, there, chosen = threading.Barrier(RANKS), threading.Semaphore(0), threading.Event()
    monkeypatch.setattr(StepTimes, "left_ms", lambda *_: 0 if chosen.is_set() else left_ms)
    real = StepVerdicts.left_ms

    def asked(self: StepVerdicts, step: int) -> int:
        found = real(self, step)
        if found:
            chosen.set()
        return found

    monkeypatch.setattr(StepVerdicts, "left_ms", asked)

    def work(job: sy.Job, number: int) -> list[int]:
        values, optimizer = counting(job, 60)
        begun = []
        for (index,) in job.batches(TensorDataset(torch.arange(60)), batch_size=4):
            begun.append(job.step)
            if len(begun) == 1:
                begin.wait(DEADLINE_S)
            if number != late and job.step == under_way:
                there.release()
                assert chosen.wait(DEADLINE_S)
            elif number == late and len(begun) == 1:
                assert there.acquire(timeout=DEADLINE_S)
                assert there.acquire(timeout=DEADLINE_S)
            elif number == late:
                chosen.set()
            optimizer.zero_grad()
            (-values[index, torch.randint(PLACES, ())].sum()).backward()
            optimizer.step()
        assert counted(job) == [1.0] * 60
        return begun

    found, _ = together({}, work)
    assert found[late][0] == 0
    if left_ms:
        assert found[late][1] > under_way
    else:
        assert found[late][1] == under_way
