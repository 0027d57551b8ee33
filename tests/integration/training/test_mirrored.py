"""Replicas in every worker, whose gradients are combined by an all-reduce: job.strategy multi_worker_mirrored."""

from __future__ import annotations

import copy
import datetime
import errno
import threading
from collections.abc import Mapping
from itertools import chain, repeat
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from torch.distributed import Backend, ProcessGroupGloo, Store
from torch.utils.data import TensorDataset

import shardyard as sy
from shardyard.config import configuration
from shardyard.domain import errors
from shardyard.domain.replica_groups import TakenStep
from shardyard.runtime.failpoints import armed
from shardyard_worker.collectives.collectives import Collectives
from shardyard_worker.collectives.shared_sums import SharedSums
from shardyard_worker.exchange.optimizer_exchange import OptimizerExchange
from shardyard_worker.replicas import gradient_buckets
from shardyard_worker.replicas.gradient_buckets import GradientBuckets
from tests.support.alone import Counted, local_yard, status
from tests.support.mirrored import (
    BATCH,
    EPOCHS,
    MIRRORED,
    SAMPLES,
    SERVERS,
    Losses,
    Values,
    losses_of,
    ranks,
    side_by_side,
)
from tests.support.waiting import wait_until


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize(
    "given",
    [{}, {"job.clip.norm": 0.05}, {"job.buffers": "first"}, {"worker.same_host": "never"}],
    ids=["plain", "clipped", "buffers of rank 0", "no shared memory"],
)
def test_losses_are_those_of_parameter_servers(alone: None, workers: int, given: Mapping[str, object]) -> None:
    """Whatever number of workers computes the three ranks."""
    more = {**given, "job.consistency.logical_ranks": 3, "job.workers_expected": workers}
    wanted = losses_of({**SERVERS, **more}, workers, Losses())
    found = losses_of({**MIRRORED, **more}, workers, Losses())
    assert len(found) == len(wanted) > 8
    assert found == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("bucket_bytes", [gradient_buckets.BUCKET_BYTES, 64], ids=["one bucket", "many buckets"])
def test_bits_do_not_depend_on_the_number_of_workers(
    alone: None, monkeypatch: pytest.MonkeyPatch, bucket_bytes: int
) -> None:
    """Promise 6, with job.deterministic: three ranks are computed by one, two or three workers."""
    monkeypatch.setattr(gradient_buckets, "FIRST_BYTES", bucket_bytes)
    monkeypatch.setattr(gradient_buckets, "BUCKET_BYTES", bucket_bytes)
    given = {**MIRRORED, "job.deterministic": True, "job.consistency.logical_ranks": 3}
    found = [Values() for _ in range(3)]
    for workers, values in enumerate(found, 1):
        losses_of({**given, "job.workers_expected": workers}, workers, values)
    assert found[0].values == found[1].values == found[2].values
    servers = losses_of({**SERVERS, **ranks(3)}, 3, Losses())
    assert losses_of({**given, "job.workers_expected": 2}, 2, Losses()) == pytest.approx(servers, rel=1e-9)


@pytest.mark.long("powersgd-many buckets", "bf16-one bucket")
@pytest.mark.parametrize("bucket_bytes", [gradient_buckets.BUCKET_BYTES, 256], ids=["one bucket", "many buckets"])
@pytest.mark.parametrize(
    ("how", "within"), [("bf16", 0.05), ("fp16", 0.01), ("powersgd", 0.3)], ids=["bf16", "fp16", "powersgd"]
)
def test_compressed_all_reduce_trains_almost_the_same(
    alone: None, monkeypatch: pytest.MonkeyPatch, how: str, within: float, bucket_bytes: int
) -> None:
    monkeypatch.setattr(gradient_buckets, "FIRST_BYTES", bucket_bytes)
    monkeypatch.setattr(gradient_buckets, "BUCKET_BYTES", bucket_bytes)
    given = {**MIRRORED, **ranks(3), "worker.same_host": "never"}
    wanted = losses_of(given, 3, Losses(torch.optim.SGD))
    found = losses_of({**given, "job.all_reduce": how}, 3, Losses(torch.optim.SGD))
    assert found == pytest.approx(wanted, rel=within)
    assert found[-1] != wanted[-1]


@pytest.mark.parametrize("how", ["plain", "bf16", "powersgd"])
def test_each_wait_for_other_members_is_explained(alone: None, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setattr(gradient_buckets, "FIRST_BYTES", 64)
    explained: list[bool] = []
    wait = Collectives.wait

    def waits(collectives: Collectives, work: Any) -> None:
        explained.append(bool(collectives._session.wait_registry._waits))
        wait(collectives, work)

    monkeypatch.setattr(Collectives, "wait", waits)
    given = {**MIRRORED, **ranks(2), "worker.same_host": "never"}
    losses_of(given if how == "plain" else {**given, "job.all_reduce": how}, 2, Losses(torch.optim.SGD))
    assert len(explained) > 8
    assert all(explained)


@pytest.mark.parametrize("extended", [False, True], ids=["plain", "extended"])
def test_collectives_of_a_registered_backend(alone: None, monkeypatch: pytest.MonkeyPatch, extended: bool) -> None:
    made: list[int] = []

    def plain(store: Store, rank: int, size: int, timeout: datetime.timedelta) -> ProcessGroupGloo:
        made.append(rank)
        return ProcessGroupGloo(store, rank, size, timeout)

    def by_options(given: Any, _: object) -> ProcessGroupGloo:
        return plain(given.store, given.group_rank, given.group_size, given.timeout)

    plugin = Backend._BackendPlugin(by_options if extended else plain, extended)
    monkeypatch.setitem(Backend._plugins, "YARDTEST", plugin)
    wanted = losses_of({**MIRRORED, **ranks(2)}, 2, Losses())
    found = losses_of({**MIRRORED, **ranks(2), "job.collectives": "yardtest"}, 2, Losses())
    assert found == pytest.approx(wanted, rel=1e-9)
    assert {*made} == {0, 1}


def test_an_unknown_backend_is_an_error_before_the_first_step(alone: None) -> None:
    with local_yard({**MIRRORED, **ranks(2), "job.collectives": "nowhere"}) as (_, connect):
        jobs, both = [connect() for _ in range(2)], Barrier(2)

        def refused(at: int) -> None:
            with pytest.raises(errors.ConfigurationError, match=r"job\.collectives is 'nowhere', and this process has"):
                Losses().train(jobs[at])
            both.wait(30)  # a worker that is left alone needs no backend
            jobs[at].close()

        side_by_side(2, refused)


def test_replicas_with_compressed_gradients_have_the_same_values(alone: None) -> None:
    """What compression has kept back is each worker's own."""
    values = [Values(torch.optim.SGD) for _ in range(3)]
    given = {**MIRRORED, **ranks(3), "job.all_reduce": "powersgd", "job.powersgd_rank": 2}
    with local_yard(given) as (_, connect):
        jobs = [connect() for _ in range(3)]
        side_by_side(3, lambda at: values[at].train(jobs[at]))
    assert values[0].values == values[1].values == values[2].values


@pytest.mark.parametrize("same_host", ["auto", "never"])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_several_buckets_are_summed_in_one_order(
    alone: None, monkeypatch: pytest.MonkeyPatch, workers: int, same_host: str
) -> None:
    """Whether a worker has sent some during its backward or, since it has two ranks, has not. The sums go through
    memory of this machine, unless the job says no."""
    shared: list[torch.Tensor] = []
    begin = SharedSums.begin
    monkeypatch.setattr(SharedSums, "begin", lambda sums, tensor, hook: (shared.append(tensor), begin(sums, tensor))[1])
    monkeypatch.setattr(gradient_buckets, "FIRST_BYTES", 64)
    monkeypatch.setattr(gradient_buckets, "BUCKET_BYTES", 64)
    more = {"job.consistency.logical_ranks": 3, "job.workers_expected": workers, "worker.same_host": same_host}
    wanted = losses_of({**SERVERS, **more}, workers, Losses())
    assert losses_of({**MIRRORED, **more}, workers, Losses()) == pytest.approx(wanted, rel=1e-9)
    assert bool(shared) is (same_host == "auto" and workers > 1)


def test_accumulated_gradients_count_as_one_step(alone: None) -> None:
    wanted = losses_of({**SERVERS, **ranks(2)}, 2, Losses(torch.optim.SGD), accumulate=2)
    found = losses_of({**MIRRORED, **ranks(2)}, 2, Losses(torch.optim.SGD), accumulate=2)
    assert found == pytest.approx(wanted, rel=1e-9)


def test_each_sample_counts_once_while_workers_come_and_go(alone: None) -> None:
    """Promise 2: one leaves within the data, and another comes."""
    with local_yard({**MIRRORED, **ranks(2)}) as (yard, connect):
        first, second, third = connect(), connect(), connect()
        has_left = threading.Event()

        def stay(job: sy.Job) -> list[float]:
            counted = Counted(job, SAMPLES)
            with job:
                for (index,) in job.batches(counted.data, batch_size=BATCH, epochs=EPOCHS):
                    counted.step(index, 2.0)
                return counted.counts

        def leave(job: sy.Job) -> None:
            counted = Counted(job, SAMPLES)
            for number, (index,) in enumerate(job.batches(counted.data, batch_size=BATCH, epochs=EPOCHS)):
                if number == 3:
                    break
                counted.step(index, 2.0)
            job.close()
            has_left.set()

        def come(job: sy.Job) -> list[float]:
            has_left.wait()
            return stay(job)

        one, _, other = side_by_side(
            3,
            lambda at: (stay, leave, come)[at]((first, second, third)[at]),  # type: ignore[operator]
        )
        assert one == other == [float(EPOCHS)] * SAMPLES
        assert status(yard).step == SAMPLES * EPOCHS // (2 * BATCH)


def test_checkpoint_at_the_end_that_is_not_written_is_taken_again(alone: None, tmp_path: Path) -> None:
    """Its state was published already."""
    has_failed = threading.Event()

    def fail(name: str) -> None:
        if not has_failed.is_set():
            has_failed.set()
            raise OSError(errno.ENOSPC, name)

    given = {**MIRRORED, **ranks(2), "job.checkpoint.url": str(tmp_path), "job.checkpoint.every_s": 0}
    with local_yard(given) as (_, connect):
        jobs = [connect(), connect()]
        prepared = threading.Barrier(2)

        def train_in_the_end(at: int) -> list[float]:
            job = jobs[at]
            counted = Counted(job, SAMPLES)  # returns when the first checkpoint is written
            prepared.wait()
            with armed("storage.before_write", fail), job:
                for (index,) in job.batches(counted.data, batch_size=BATCH):
                    counted.step(index, 2.0)
                return counted.counts

        assert side_by_side(2, train_in_the_end) == [[1.0] * SAMPLES] * 2
    assert has_failed.is_set()


def test_workers_that_sum_other_gradients_do_not_train_together(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo would end both processes where they sum different sizes."""
    sums = chain(["8 torch.float32", "9 torch.float32"], repeat("8 torch.float32"))
    monkeypatch.setattr(GradientBuckets, "fingerprint", property(lambda _: next(sums)))
    with local_yard({**MIRRORED, **ranks(2)}) as (_, connect):
        jobs = [connect(), connect()]

        def train(at: int) -> str:
            try:
                with jobs[at]:
                    Losses().train(jobs[at])
            except errors.ConfigurationError as error:
                return error.what
            return ""

        first, second = side_by_side(2, train)
    assert "8 torch.float32" in first + second
    assert "" in (first, second), "the other one goes on"


def test_what_a_mirrored_job_cannot_do_is_refused_at_once(alone: None) -> None:
    with local_yard({**MIRRORED, **ranks(1)}) as (_, connect), connect() as job:
        with pytest.raises(errors.ConfigurationError, match=r"job\.register in a job with job\.strategy"):
            job.register({"w": torch.zeros(2)})
        job.scaler()
        layer = torch.nn.Linear(2, 1)
        with pytest.raises(errors.ConfigurationError, match=r"job\.scaler"):
            job.prepare(layer, torch.optim.SGD(layer.parameters(), lr=0.1))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("job.consistency.mode", "async"),
        ("job.consistency.backup_workers", 1),
        ("job.durability", "wal"),
        ("job.clip.value", 1.0),
        ("job.compression.push", "int8"),
    ],
)
def test_settings_that_do_not_fit_name_both(name: str, value: object) -> None:
    given = {"job.strategy": "multi_worker_mirrored", "job.consistency.logical_ranks": 2, name: value}
    with pytest.raises(errors.ConfigurationError, match=name.removeprefix("job.").replace(".", r"\.")) as raised:
        configuration.load(None, {}, given)
    assert "strategy" in str(raised.value)


@pytest.mark.parametrize(
    "given",
    [
        {"job.deterministic": True},
        {"job.all_reduce": "bf16", "job.deterministic": True, "job.consistency.mode": "sync"},
        {"job.strategy": "central_storage", "job.consistency.mode": "async"},
    ],
    ids=lambda given: next(iter(given)),
)
def test_other_settings_that_need_common_steps(given: Mapping[str, object]) -> None:
    with pytest.raises(errors.ConfigurationError, match=next(iter(given)).replace(".", r"\.")):
        configuration.load(None, {}, given)


def test_step_whose_mean_is_not_finite_changes_nothing_and_is_listed(alone: None) -> None:
    with local_yard({**MIRRORED, **ranks(1)}) as (yard, connect), connect() as job:
        layer = torch.nn.Linear(2, 1)
        layer, optimizer = job.prepare(layer, torch.optim.Adam(layer.parameters(), lr=0.1))
        before = layer.weight.detach().clone()
        (layer(torch.ones(1, 2)).sum() * float("inf")).backward()
        optimizer.step()
        assert torch.equal(layer.weight, before)
        assert job.step == 1
        optimizer.zero_grad()
        layer(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        assert not torch.equal(layer.weight, before)
        assert status(yard).not_finite


def test_script_that_clips_its_own_gradients_is_followed(alone: None) -> None:
    """What was sent during the backward is sent again, and from then on nothing is sent early."""

    torch.manual_seed(5)
    begun = torch.nn.Linear(4, 1).double()
    given_x = torch.randn(SAMPLES, 4, dtype=torch.float64)
    data = TensorDataset(given_x, given_x.sum(1, keepdim=True))

    def train(given: Mapping[str, object], workers: int) -> list[torch.Tensor]:
        with local_yard({**given, **ranks(workers)}) as (_, connect):
            jobs = [connect() for _ in range(workers)]

            def work(at: int) -> torch.Tensor:
                layer = copy.deepcopy(begun)
                layer, optimizer = jobs[at].prepare(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
                with jobs[at]:
                    for x, y in jobs[at].batches(data, batch_size=BATCH):
                        optimizer.zero_grad()
                        torch.nn.functional.mse_loss(layer(x), y).backward()
                        torch.nn.utils.clip_grad_norm_(layer.parameters(), 0.1)
                        optimizer.step()
                return layer.weight.detach().clone()

            return side_by_side(workers, work)

    one, other = train(MIRRORED, 2)
    assert torch.equal(one, other)
    assert torch.allclose(one, train(SERVERS, 2)[0], rtol=1e-9)


def test_state_is_published_once_for_a_checkpoint(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at every step until the next heartbeat, which says that it is not wanted any more."""
    published: list[int] = []
    real = OptimizerExchange.publish

    def publish(self: OptimizerExchange, taken: TakenStep, *given: Any) -> None:
        published.append(taken.step)
        real(self, taken, *given)

    monkeypatch.setattr(OptimizerExchange, "publish", publish)
    rarely = {"membership.heartbeat_ms": 3_000, "membership.lease_ms": 20_000}
    with local_yard({**MIRRORED, **ranks(1), **rarely}) as (_, connect), connect() as job:
        layer = torch.nn.Linear(2, 1)
        layer, optimizer = job.prepare(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
        for number in range(6):
            job._session.is_to_publish = job._session.is_to_publish or number == 2  # as a heartbeat says it
            optimizer.zero_grad()
            layer(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        assert published == [3]


def test_state_dict_is_that_of_a_torch_optimizer(alone: None) -> None:
    with local_yard({**MIRRORED, **ranks(1)}) as (_, connect), connect() as job:
        layer = torch.nn.Linear(2, 1)
        layer, optimizer = job.prepare(layer, torch.optim.AdamW(layer.parameters(), lr=0.1))
        for _ in range(3):
            optimizer.zero_grad()
            layer(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        state = optimizer.state_dict()
        assert state["state"][0]["step"] == 3
        plain = torch.optim.AdamW(layer.parameters(), lr=0.1)
        plain.load_state_dict(state)
        assert torch.equal(plain.state[layer.weight]["exp_avg"], state["state"][0]["exp_avg"])


@pytest.mark.parametrize("workers", [1, 2])
def test_replicas_in_bfloat16_with_a_scheduler_stay_equal_until_the_job_is_stopped(alone: None, workers: int) -> None:
    torch.manual_seed(5)
    begun = torch.nn.Linear(4, 1).bfloat16()
    given = torch.randn(SAMPLES, 4).bfloat16()
    data = TensorDataset(given, given.sum(1, keepdim=True))
    with local_yard({**MIRRORED, **ranks(workers)}) as (_, connect):
        jobs = [connect() for _ in range(workers)]

        def work(at: int) -> tuple[torch.Tensor, int, float]:
            layer = copy.deepcopy(begun)
            sgd = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
            scheduler = torch.optim.lr_scheduler.ExponentialLR(sgd, 0.5)
            layer, optimizer, schedule = jobs[at].prepare(layer, sgd, scheduler)
            with jobs[at] as job:
                for x, y in job.batches(data, batch_size=BATCH):
                    optimizer.zero_grad()
                    torch.nn.functional.mse_loss(layer(x), y).backward()
                    optimizer.step()
                    schedule.step()
                    if at == 0 and job.step == 3:
                        job.stop("enough")
                return layer.weight.detach().clone(), job.step, schedule.get_last_lr()[0]

        found = side_by_side(workers, work)
    weights, steps, rates = zip(*found, strict=True)
    assert all(torch.equal(each, weights[0]) for each in weights)
    assert not torch.equal(weights[0], begun.weight)
    assert len(set(steps)) == 1
    assert 3 <= steps[0] < SAMPLES // (BATCH * workers)
    assert rates == pytest.approx([0.1 * 0.5 ** steps[0]] * workers)


def test_job_does_not_stop_before_a_step_whose_gradients_are_being_summed(alone: None) -> None:
    """One of two workers has sent gradients in its backward; the other one has not begun the step."""
    torch.manual_seed(5)
    begun = torch.nn.Linear(4, 1).bfloat16()
    data = TensorDataset(torch.randn(SAMPLES, 4).bfloat16())
    with local_yard({**MIRRORED, **ranks(2)}) as (_, connect):
        jobs, has_sent = [connect(), connect()], threading.Event()

        def train(at: int) -> int:
            job = jobs[at]
            layer = copy.deepcopy(begun)
            layer, optimizer = job.prepare(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
            with job:
                for (x,) in job.batches(data, batch_size=BATCH):
                    optimizer.zero_grad()
                    if at == 0 and job.step == 3:
                        has_sent.wait()
                        job.stop("enough")
                    layer(x).sum().backward()
                    if at == 1 and job.step == 3:
                        has_sent.set()
                        wait_until(lambda: job._session.step_barrier.end is not None)
                    optimizer.step()
                return job.step

        assert side_by_side(2, train) == [4, 4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_members_that_give_and_take_nothing_take_part_in_every_copy(alone: None, dtype: torch.dtype) -> None:
    with local_yard({**MIRRORED, **ranks(1)}) as (_, connect), connect() as job:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2).to(dtype), torch.nn.BatchNorm1d(2))
        model, optimizer = job.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
        model[1](model[0](torch.ones(2, 2, dtype=dtype)).float()).sum().backward()
        optimizer.step()
        replica = job._loop.replica
        assert replica is not None
        assert [each.dtype for each in replica.nothing_packed()] == [each.dtype for each in replica.packed()]
