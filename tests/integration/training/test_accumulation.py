"""Gradients of several batches in one push: each sample counts once, and the step is that of one large batch."""

from __future__ import annotations

import hashlib
import itertools
import logging
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import shardyard as sy
from shardyard.domain import errors
from shardyard.domain.epochs import EpochPlan, order
from shardyard.domain.push_names import DataLease
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_worker.data import feed
from shardyard_worker.data.async_feed import AsyncFeed
from shardyard_worker.exchange.server_stream import ServerStream
from tests.support.alone import SYNC, SYNC_2, Connect, Counted
from tests.support.yards import Probes, RoleYard, finish

pytestmark = pytest.mark.usefixtures("alone")

STREAMS = {"worker.same_host": "never"}


@pytest.mark.parametrize("samples", [1, 7, 24, 25, 47])
@pytest.mark.parametrize("accumulate", [2, 3])
def test_promise_2_each_sample_counts_once_synchronous(connect: Connect, samples: int, accumulate: int) -> None:
    counted = Counted(connect(settings=SYNC), samples)
    counted.optimizer.zero_grad()
    steps = 0
    for (index,) in counted.job.batches(counted.data, batch_size=4, epochs=3, accumulate=accumulate):
        counted.compute(index)
        if counted.job.step_due:
            counted.optimizer.step()
            counted.optimizer.zero_grad()
            steps += 1
    assert counted.counts == [3.0] * samples
    assert steps == counted.job.step == 3 * -(-samples // (4 * accumulate))


@pytest.mark.parametrize("samples", [7, 24, 25, 50])
def test_a_contribution_weighs_as_much_as_all_its_batches(connect: Connect, samples: int) -> None:
    counted = Counted(connect(settings=SYNC_2), samples)
    counted.optimizer.zero_grad()
    shares: list[list[list[int]]] = []
    fresh: list[int] = []
    for (index,) in counted.job.batches(counted.data, batch_size=3, accumulate=2):
        if len(shares) == counted.job.step:
            shares.append([])
        counted.compute(index)
        fresh += index.tolist()
        if counted.job.step_due:
            shares[counted.job.step].append(fresh)
            fresh = []
            counted.optimizer.step()
            counted.optimizer.zero_grad()
    expected = [0.0] * samples
    for step in shares:
        for share in step:
            for sample in share:
                expected[sample] += len(share) / sum(map(len, step))
    assert counted.counts == [round(value, 9) for value in expected]


@pytest.mark.parametrize("per_shard", [1, 6, 7])
@pytest.mark.parametrize("samples", [24, 25, 46])
def test_promise_2_each_sample_counts_once_asynchronous(connect: Connect, samples: int, per_shard: int) -> None:
    """A data shard is made of whole accumulated pushes; what is left at an epoch's end is one shorter push."""
    counted = Counted(connect(settings={"job.data.batches_per_data_shard": per_shard}), samples)
    counted.optimizer.zero_grad()
    for (index,) in counted.job.batches(counted.data, batch_size=4, epochs=2, accumulate=3):
        counted.compute(index)
        if counted.job.step_due:
            counted.optimizer.step()
            counted.optimizer.zero_grad()
    assert counted.counts == [2.0] * samples
    assert counted.job.step == 2 * -(-samples // 12)


@pytest.mark.parametrize("quarantined", [1, 2, 5])
def test_promise_2_batches_before_one_in_quarantine_count(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, quarantined: int
) -> None:
    """No push may be left for them, so a step is due before each batch that may be put into quarantine (rule A13)."""
    found = AsyncFeed._lease

    def lease_with_suspects(self: AsyncFeed) -> DataLease | None:
        lease = found(self)
        return lease and replace(lease, announce_until=quarantined + 1)

    def begins(_: AsyncFeed, source: Any, token: Any, sequence: int, **__: Any) -> tuple[bool, int]:
        return sequence != quarantined, quarantined + 1

    monkeypatch.setattr(AsyncFeed, "_lease", lease_with_suspects)
    monkeypatch.setattr(AsyncFeed, "_begins", begins)
    counted, seen = Counted(connect(settings={"job.data.batches_per_data_shard": 6}), 12), list[int]()
    counted.optimizer.zero_grad()
    due = []
    for (index,) in counted.job.batches(counted.data, batch_size=2, accumulate=3):
        counted.compute(index)
        seen += index.tolist()
        due.append(counted.job.step_due)
        if counted.job.step_due:
            counted.optimizer.step()
            counted.optimizer.zero_grad()
    assert len(seen) == 10
    assert counted.counts == [float(sample in seen) for sample in range(12)]
    # each batch alone as far as the one in quarantine, then as accumulated
    assert due == [*[True] * quarantined, *((number + 1) % 3 == 0 for number in range(quarantined + 1, 6))]


def test_a_script_that_counts_its_batches_needs_no_more(connect: Connect, caplog: pytest.LogCaptureFixture) -> None:
    """Also where the last step of an epoch has fewer samples than others."""
    counted = Counted(connect(settings=SYNC), 27)
    counted.optimizer.zero_grad()
    with caplog.at_level("WARNING"):
        for number, (index,) in enumerate(counted.job.batches(counted.data, batch_size=4, epochs=2, accumulate=4)):
            counted.compute(index)
            if (number + 1) % 4 == 0:
                counted.optimizer.step()
                counted.optimizer.zero_grad()
    assert counted.counts == [2.0] * 27
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_last_step_with_fewer_samples_than_batches_is_told_at_once(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    counted = Counted(connect(settings=SYNC), 18)
    with caplog.at_level("WARNING"):
        next(counted.job.batches(counted.data, batch_size=4, accumulate=4))
    assert "2 samples for one of the ranks, and so fewer than 4 batches" in caplog.text


def test_a_synchronous_step_before_the_last_of_its_batches_is_refused(connect: Connect) -> None:
    counted = Counted(connect(settings=SYNC), 16)
    batches = counted.job.batches(counted.data, batch_size=2, accumulate=4)
    for left in (3, 2, 1):
        (index,) = next(batches)
        assert not counted.job.step_due
        with pytest.raises(errors.InvalidRequest, match=f"{left} batches before the last one of logical rank 0 #0"):
            counted.step(index)
    next(batches)
    assert counted.job.step_due
    counted.optimizer.step()
    with pytest.raises(errors.InvalidRequest, match="twice for one batch"):
        counted.optimizer.step()


def test_batches_without_a_step_at_the_end_do_not_count_and_are_warned_of(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    counted = Counted(connect(settings=SYNC), 12)
    with caplog.at_level("WARNING"):
        for (index,) in counted.job.batches(counted.data, batch_size=2, accumulate=3):
            counted.optimizer.zero_grad()
            counted.compute(index)
    assert counted.counts == [0.0] * 12
    assert "no optimizer.step() after a batch: logical rank 0 #0 is counted as an empty push" in caplog.text


@pytest.mark.parametrize("other", [1, 3])
def test_workers_agree_on_what_is_accumulated(connect: Connect, other: int) -> None:
    counted = Counted(connect(settings=SYNC), 12)
    counted.job.batches(counted.data, batch_size=2, accumulate=2)
    counted.job._loop.feeds_opened = 0
    with pytest.raises(errors.FeedConflict, match=f"accumulate: expected 2, got {other}"):
        counted.job.batches(counted.data, batch_size=2, accumulate=other)


def test_nothing_is_accumulated_less_than_once(connect: Connect) -> None:
    counted = Counted(connect(settings=SYNC), 12)
    with pytest.raises(errors.InvalidRequest, match="accumulate 0"):
        counted.job.batches(counted.data, accumulate=0)


# ---- real processes


def expected_counts(mode: str) -> list[float]:
    if mode == "async":
        return [2.0] * 203
    units = EpochPlan(203, 4, 2, drop_last=False, accumulate=3)
    expected = [0.0] * 203
    for epoch, index in itertools.product(range(2), range(units.per_epoch)):
        chosen = order(seed=0, feed=0, epoch=epoch, samples=203, shuffle=True).tolist()
        shares = [chosen[slice(*units.span(index, rank))] for rank in range(2)]
        for share in shares:
            for sample in share:
                expected[sample] += len(share) / sum(map(len, shares))
    return [round(value, 9) for value in expected]


@pytest.mark.long
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_promise_2_a_worker_that_is_killed_between_accumulated_batches(
    yard: RoleYard, probes: Probes, mode: str
) -> None:
    settings: dict[str, Any] = {"coordinator": yard.address, "job__consistency__mode": mode}
    settings |= {"job__consistency__logical_ranks": 2, "job__rank_grace_ms": 100, "job__workers_expected": 2}
    settings |= {"job__data__batches_per_data_shard": 6}
    options = ("--accumulate", "3", "--epochs", "2", "--pause-ms", "20")
    started = [probes.start("count", *options, **settings) for _ in range(2)]
    started[0][0].wait_for("computed 8")
    started[0][0].kill()
    result = finish(*started[1])
    assert [round(value, 9) for value in result["counts"]] == expected_counts(mode)
    (job,) = yard.ended().jobs
    assert (job.state, job.samples) == (wire.JOB_STATE_FINISHED, 2 * 203)


# ---- equal to one large batch


def train(connect: Connect, batch_size: int, accumulate: int, **settings: Any) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    data = TensorDataset(torch.randn(96, 6, generator=generator), torch.randn(96, 2, generator=generator))
    job = connect(settings=SYNC_2 | settings)
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    model, optimizer = job.prepare(model, torch.optim.Adam(model.parameters(), lr=0.01))
    optimizer.zero_grad()
    for x, y in job.batches(data, batch_size=batch_size, epochs=2, accumulate=accumulate):
        (torch.nn.functional.mse_loss(model(x), y) / accumulate).backward()
        if job.step_due:
            optimizer.step()
            optimizer.zero_grad()
    assert job.step == 8
    values = job.pull()
    job.close()
    return values


@pytest.mark.parametrize("settings", [{}, STREAMS, STREAMS | {"worker.exchange": "overlapped"}])
def test_accumulated_batches_are_as_one_large_one(connect: Connect, settings: dict[str, Any]) -> None:
    large, small = train(connect, 12, 1, **settings), train(connect, 3, 4, **settings)
    assert large.keys() == small.keys()
    for name, value in large.items():
        torch.testing.assert_close(small[name], value, rtol=1e-5, atol=1e-6)


def digest(values: dict[str, torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(values[name].numpy().tobytes() for name in sorted(values))).hexdigest()


def test_promise_6_bits_do_not_depend_on_how_accumulated_gradients_travel(connect: Connect) -> None:
    ways = [{"yard.servers": 1}, STREAMS, STREAMS | {"worker.exchange": "overlapped"}]
    assert len({digest(train(connect, 3, 4, **way)) for way in ways}) == 1


# ---- seeds

GOLDEN = [0.351171, 0.385935, 0.631896, 0.929989, 0.429932, 0.112068, 0.066262, 0.149533]
"""What (3, 0, 0, 0), ... have given since the first release."""


def test_seeds_of_single_batches_are_what_they_were(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[tuple[int, ...]] = []
    seed_everything = feed.seed_everything
    monkeypatch.setattr(feed, "seed_everything", lambda *key: (keys.append(key), seed_everything(*key)))
    counted = Counted(connect(settings=SYNC_2 | {"job.seed": 3}), 8)
    drawn: list[float] = []
    for (index,) in counted.job.batches(counted.data, batch_size=2):
        drawn += [float(torch.rand(())), float(np.random.random())]
        counted.step(index)
    assert keys == [(3, 0, 0, 0), (3, 0, 1, 0), (3, 0, 0, 1), (3, 0, 1, 1)]
    assert [round(value, 6) for value in drawn] == GOLDEN, drawn


def test_each_accumulated_batch_has_seeds_of_its_own(connect: Connect) -> None:
    counted = Counted(connect(settings=SYNC), 24)
    drawn = []
    for (index,) in counted.job.batches(counted.data, batch_size=2, accumulate=3):
        drawn.append(float(torch.rand(())))
        counted.compute(index)
        if counted.job.step_due:
            counted.optimizer.step()
    assert len(drawn) == len(set(drawn)) == 12


# ---- sending while backward computes


def sent_ahead(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of what is sent ahead of a push, as it is sent."""
    sent: list[int] = []
    send_early = ServerStream.send_early

    def counting(line: ServerStream, at: int, piece: memoryview) -> None:
        sent.append(len(piece))
        send_early(line, at, piece)

    monkeypatch.setattr(ServerStream, "send_early", counting)
    return sent


AHEAD = STREAMS | {"worker.exchange": "overlapped", "yard.servers": 1}


@pytest.mark.parametrize("settings", [{}, SYNC])
def test_gradients_of_accumulated_batches_travel_once(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    sent = sent_ahead(monkeypatch)
    job = connect(settings=AHEAD | {"job.data.batches_per_data_shard": 12} | settings)
    model = torch.nn.Linear(8, 4)
    model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer.zero_grad()
    for (x,) in job.batches(TensorDataset(torch.ones(24, 8)), batch_size=2, accumulate=3):
        model(x).sum().backward()
        if job.step_due:
            optimizer.step()
            optimizer.zero_grad()
    assert job.step == 4
    # nothing goes ahead of a stream's first exchange
    assert len(sent) in (2 * 3, 2 * 4)


def test_no_sync_holds_gradients_back(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = sent_ahead(monkeypatch)
    job = connect(settings=AHEAD)
    model = torch.nn.Linear(8, 4)
    model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    before = model.weight.detach().clone()
    for _ in range(4):
        optimizer.zero_grad()
        with job.no_sync():
            model(torch.ones(1, 8)).sum().backward()
            with job.no_sync():
                model(torch.ones(1, 8)).sum().backward()
            model(torch.ones(1, 8)).sum().backward()
            job._loop.trainer.router._overlap.drain()
            assert not sent
        model(torch.ones(1, 8)).sum().backward()
        job._loop.trainer.router._overlap.drain()
        assert len(sent) == 2
        optimizer.step()
        sent.clear()
    torch.testing.assert_close(model.weight.detach(), before - 16)


def test_a_step_within_no_sync_pushes_all(connect: Connect) -> None:
    job = connect(settings=AHEAD)
    model = torch.nn.Linear(8, 4)
    model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    before = model.weight.detach().clone()
    with job.no_sync():
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
    assert torch.equal(model.weight, before - 1)


def test_no_sync_without_overlap_changes_nothing(connect: Connect) -> None:
    job = connect()
    with pytest.raises(errors.InvalidRequest, match="no variables yet"), job.no_sync():
        pass
    model = torch.nn.Linear(8, 4)
    model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    before = model.weight.detach().clone()
    with job.no_sync():
        model(torch.ones(1, 8)).sum().backward()
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    assert torch.equal(model.weight, before - 2)
    assert isinstance(job, sy.Job)
