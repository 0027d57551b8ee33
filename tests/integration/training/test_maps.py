"""A worker goes on when partitions have moved to another server, or were restored from a checkpoint, in mid-run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import shardyard as sy
from shardyard.checkpoints.manifest import PartitionEntry
from shardyard.domain.consistency import UpdateMode
from shardyard.domain.ids import Caller, Generation, Incarnation, Version
from shardyard.domain.layout.layouts import PartitionMap, PartitionOwner
from shardyard_launcher.yard.in_process import LocalYard
from shardyard_ps_server.checkpoint.restore import Restore
from shardyard_ps_server.checkpoint.saver import SaveRequest
from shardyard_ps_server.hosting import orders
from shardyard_ps_server.hosting.hosted_job import CreateRequest
from shardyard_ps_server.partition.update_rules import UpdateRules
from shardyard_worker.data.sync_feed import SyncFeed
from shardyard_worker.training import grad_hooks
from tests.support.alone import SYNC_2, Connect, Counted, local_yard

SAMPLES, BATCH = 96, 4
WAYS: dict[str, dict[str, object]] = {
    "shared": {},
    "streams": {"worker.same_host": "never"},
    "view": {"worker.exchange": "overlapped"},
    "overlap": {"worker.same_host": "never", "worker.exchange": "overlapped"},
    "delayed": {"worker.exchange": "delayed"},
    "delayed over streams": {"worker.same_host": "never", "worker.exchange": "delayed"},
}


class Yard:
    """Two servers, of which the second dies: what it had goes to the first, as a checkpoint has it."""

    def __init__(self, yard: LocalYard, folder: Path) -> None:
        self._yard = yard
        self._folder = folder
        self._entries: list[PartitionEntry] = []
        self._number = 1_000  # beyond those of the coordinator, of which none is written twice

    @property
    def _job(self):  # type: ignore[no-untyped-def]
        (job,) = self._yard._coordinator._mailbox._machine.jobs
        return job

    @property
    def _map(self) -> PartitionMap:
        map_ = self._job.deployment.map
        assert map_ is not None
        return map_

    def save(self, *, step: int | None = None) -> None:
        self._entries = []
        self._number += 1
        for server in self._yard._servers:
            incarnation = server.store.incarnation
            order = SaveRequest(self._number, step, 0, 0)
            caller = Caller(self._job.id)
            for saved in orders.save(server.store, caller, incarnation, self._map.generation, order, str(self._folder)):
                version = Version(2, saved.version.number)
                self._entries.append(PartitionEntry(saved.partition, version, (saved.file,)))

    def lose(self, *, whole: bool = False) -> None:
        """`whole`: the whole job goes back to the checkpoint."""
        living, dead = self._yard._servers
        job, map_ = self._job, self._map
        lost = [owner.partition for owner in map_.by_server()[dead.store.incarnation]]
        address = map_.by_server()[living.store.incarnation][0].address
        self._yard.network.leave(map_.by_server()[dead.store.incarnation][0].address)
        generation = Generation(map_.generation + 1)
        entries = tuple(entry for entry in self._entries if whole or entry.partition in lost)
        orders.create(
            living.store,
            CreateRequest(
                job.id,
                generation,
                job.deployment.layout,
                [owner.partition for owner in map_.owners],
                UpdateRules(
                    UpdateMode.SYNC if job.ranks is not None else UpdateMode.ASYNC, job.settings.logical_rank_count
                ),
                Restore(str(self._folder), entries, job=job.id),
            ),
        )
        owners = [PartitionOwner(o.partition, Incarnation(living.store.incarnation), address) for o in map_.owners]
        job.deployment.map = dataclasses.replace(map_, generation=generation, owners=tuple(owners))


@contextmanager
def yard_of(folder: Path, settings: dict[str, object]) -> Iterator[tuple[Yard, sy.Job]]:
    given = {"yard.servers": 2, "job.partitions": 4, "job.block_bytes": 64, "log.level": "error"} | settings
    with local_yard(given) as (yard, connect), connect() as job:
        yield Yard(yard, folder), job


@pytest.fixture(autouse=True)
def watched(monkeypatch: pytest.MonkeyPatch, alone: None) -> None:
    monkeypatch.setattr(grad_hooks, "WATCHED_BYTES_MIN", 0)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.02),
    "adamax": lambda groups: torch.optim.Adamax(groups, lr=0.02, weight_decay=0.1),
    "nadam": lambda groups: torch.optim.NAdam(groups, lr=0.02, weight_decay=0.1),
    "radam": lambda groups: torch.optim.RAdam(groups, lr=0.02, betas=(0.9, 0.9)),
    "lamb": lambda groups: sy.optim.LAMB(groups, lr=0.02),
    "lion": lambda groups: sy.optim.Lion(groups, lr=0.02, weight_decay=0.1),
    "ftrl": lambda groups: sy.optim.FTRL(groups, lr=0.1, l1=0.01, l2=0.01),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizers_state_and_counts_come_back_with_their_partitions(tmp_path: Path, kind: str) -> None:
    model, plain = (torch.nn.Sequential(torch.nn.Linear(5, 9), torch.nn.Tanh(), torch.nn.Linear(9, 3)) for _ in "ab")
    plain.load_state_dict(model.state_dict())
    theirs = OPTIMIZERS[kind](plain.parameters())
    generator = torch.Generator().manual_seed(6)
    with yard_of(tmp_path, {}) as (yard, job):
        model, optimizer = job.prepare(model, OPTIMIZERS[kind](model.parameters()))
        for step in range(20):
            if step == 9:
                yard.save()
                yard.lose()
            for index, (mine, other) in enumerate(zip(model.parameters(), plain.parameters(), strict=True)):
                if index == 1 and step % 2:  # so that its updates are others in number
                    mine.grad = other.grad = None
                    continue
                gradient = torch.randn(mine.shape, generator=generator)
                mine.grad, other.grad = gradient, gradient.clone()
            optimizer.step()
            theirs.step()
        for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert float((mine - other).detach().norm() / other.detach().norm()) <= 1e-6


@pytest.mark.parametrize("way", WAYS)
def test_promise_2_each_sample_counts_once_though_partitions_go_back(tmp_path: Path, way: str) -> None:
    """The data shard is gone through again from the lowest watermark; the living server skips what it has."""
    settings = WAYS[way] | {"job.data.batches_per_data_shard": 1_000}
    with yard_of(tmp_path, settings) as (yard, job):
        counted = Counted(job, SAMPLES)
        for number, (index,) in enumerate(job.batches(counted.data, batch_size=BATCH, epochs=1)):
            counted.step(index)
            if number == 5:
                yard.save()
            if number == 11:
                yard.lose()
        assert counted.counts == [1.0] * SAMPLES


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("codec", ["none", "bf16"])
def test_promise_1_push_is_sent_again_to_the_new_owner_and_counts_once(tmp_path: Path, way: str, codec: str) -> None:
    settings = WAYS[way] | {"job.data.batches_per_data_shard": 1_000, "job.compression.push": codec}
    with yard_of(tmp_path, settings) as (yard, job):
        counted = Counted(job, SAMPLES)
        computed = 0
        for number, (index,) in enumerate(job.batches(counted.data, batch_size=BATCH, epochs=1)):
            if number == 3:
                yard.save()
                yard.lose()
            counted.step(index)
            computed += 1
        assert counted.counts == [1.0] * SAMPLES
        assert computed == SAMPLES // BATCH  # nothing was lost, and nothing computed again


def test_pushes_without_leased_data_that_a_restore_has_taken_back_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody computes them again: they are lost, exactly these, and those that follow count."""
    with yard_of(tmp_path, {}) as (yard, job):
        job.register({name: torch.zeros(8) for name in "abcd"}, lr=1.0)
        ones = {name: torch.ones(8) for name in "abcd"}
        job.push(ones)
        yard.save()
        job.push(ones)
        yard.lose()
        with caplog.at_level("WARNING", logger="shardyard.worker"):
            for _ in range(2):
                job.push(ones)
        (told,) = [each for each in caplog.messages if "are lost, since" in each]
        assert "#1 to #1 in partition 1" in told
        assert sorted(float(values[0]) for values in job.pull().values()) == [-4, -4, -3, -3]


def train(job: sy.Job, at: Callable[[int], None]) -> tuple[dict[str, torch.Tensor], int]:
    """Values at the end, and the number of batches computed."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
    data = torch.utils.data.TensorDataset(torch.randn(64, 16), torch.randn(64, 1))
    model, optimizer = job.prepare(model, torch.optim.Adam(model.parameters(), lr=0.05))
    batches = 0
    for x, y in job.batches(data, batch_size=4, epochs=2):
        loss = torch.nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        at(job.step)
        batches += 1
    return {name: value.clone() for name, value in job.pull().items()}, batches


@pytest.mark.parametrize("way", ["shared", "streams", "view"])
def test_promise_6_job_that_goes_back_to_a_step_ends_at_the_same_bits(
    connect: Connect, tmp_path: Path, way: str
) -> None:
    expected, batches = train(connect(settings=SYNC_2), lambda step: None)
    done: list[str] = []

    with yard_of(tmp_path, SYNC_2 | WAYS[way]) as (yard, job):

        def disturb(step: int) -> None:
            if step == 5 and not done:
                yard.save(step=5)
                done.append("saved")
            if step == 9 and done == ["saved"]:
                yard.lose(whole=True)
                done.append("lost")

        found, more = train(job, disturb)
    assert done == ["saved", "lost"]
    assert more > batches
    assert_equal(found, expected)


def test_promise_6_job_that_goes_back_after_its_last_step_takes_it_again(
    connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While its worker waits for a checkpoint that has all of it."""
    expected, batches = train(connect(settings=SYNC_2), lambda step: None)
    asked: list[bool] = []

    with yard_of(tmp_path, SYNC_2) as (yard, job):
        close = SyncFeed._close

        def lose_first(feed: SyncFeed) -> bool:
            if not asked:
                yard.lose(whole=True)
            asked.append(close(feed))
            return asked[-1]

        monkeypatch.setattr(SyncFeed, "_close", lose_first)
        found, more = train(job, lambda step: yard.save(step=5) if step == 5 and not asked else None)
    assert asked[0] is False
    assert more > batches
    assert_equal(found, expected)


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name
