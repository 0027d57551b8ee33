"""Hybrid jobs: variables take synchronous steps, rows of tables are updated as they come, and rows that come along with
a step lack no push of the steps before."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import shardyard as sy
from shardyard.domain import errors
from shardyard.runtime.failpoints import armed
from shardyard_ps_server.hosting import lookups
from shardyard_worker.exchange.row_reads import RowReads
from tests.integration.tables.test_look_ahead import SPREAD, Drawn, Model, optimizer_of
from tests.integration.tables.test_sync_tables import DEADLINE_S, NEVER, SETTINGS, digest, learn, together
from tests.support.alone import SYNC, Connect
from tests.support.yards import RoleYard, assert_each_sample_counts_once_in_its_row

pytestmark = pytest.mark.usefixtures("alone")

HYBRID = {"job.consistency.mode": "hybrid", "job.consistency.logical_ranks": 1}
HYBRID_2 = HYBRID | {"job.consistency.logical_ranks": 2}
STEPS = 9


@pytest.fixture
def look_ups(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """For each call to the servers for rows alone, who has made it."""
    seen: list[threading.Thread] = []
    look_up = RowReads.look_up

    def counted(router: RowReads, *given: Any) -> None:
        seen.append(threading.current_thread())
        look_up(router, *given)

    monkeypatch.setattr(RowReads, "look_up", counted)
    return seen


def counter(**more: Any) -> sy.Embedding:
    return sy.Embedding(1, optimizer=sy.tables.SGD(lr=1.0), initial=sy.tables.zeros(), **more)


def adds_one(model: sy.Embedding, optimizer: Any, ids: torch.Tensor) -> torch.Tensor:
    """To the row of each id, shared among the logical ranks. What it read."""
    rows = model(ids)
    optimizer.zero_grad()
    (-rows).sum().backward()
    optimizer.step()
    return rows.detach().flatten()


# ---- variables are synchronous


@pytest.mark.parametrize("given", [{}, {"worker.same_host": "never"}])
def test_one_logical_rank_gives_the_bits_of_a_synchronous_job(connect: Connect, given: dict[str, Any]) -> None:
    found = []
    for mode in (HYBRID, SYNC):
        with connect(settings=NEVER | mode | given) as job:
            found.append(learn(job))
    assert found[0] == found[1]


def test_all_workers_hold_the_same_variables_after_each_step() -> None:
    def work(job: sy.Job, _: int) -> list[dict[str, bytes]]:
        model = Model()
        layers = torch.nn.ModuleDict({"rows": model, "top": torch.nn.Linear(8, 1)})
        layers, optimizer = job.prepare(layers, torch.optim.SGD(layers.parameters(), lr=0.25))
        seen = []
        index = TensorDataset(torch.arange(48))
        for (chosen,) in job.batches(index, batch_size=3, look_ahead=lambda b: {model.author: b[0] * SPREAD}):
            rows = model.author(chosen * SPREAD)
            optimizer.zero_grad()
            layers["top"](torch.cat([rows, torch.ones(len(chosen), 5)], 1)).square().mean().backward()
            optimizer.step()
            seen.append(digest(layers["top"]))
        return seen

    given = {"job.consistency.mode": "hybrid", "job.consistency.logical_ranks": 2, "yard.servers": 2}
    one, other = together(given, 2, work)
    assert len(one) == 8
    assert one == other


# ---- rows come ahead


@pytest.mark.parametrize("given", [{}, {"worker.same_host": "never"}, {"job.compression.pull": "bf16"}])
def test_rows_come_with_the_values_and_lack_nothing(
    connect: Connect, look_ups: list[threading.Thread], given: dict[str, Any]
) -> None:
    job = connect(settings=NEVER | HYBRID | given)
    model = counter()
    model, optimizer = job.prepare(model, optimizer_of(model))
    ids = torch.tensor([5, 7])
    seen = [
        int(adds_one(model, optimizer, each)[0]) for each in job.look_ahead([ids] * STEPS, lambda ids: {model: ids})
    ]
    assert seen == list(range(STEPS))
    assert len(look_ups) == 1  # that of the first batch
    assert job._metrics.latest == {"look_ahead_hits": (STEPS - 1) / STEPS}


def test_an_id_that_was_not_announced_is_looked_up_with_the_forward(connect: Connect) -> None:
    job = connect(settings=NEVER | HYBRID)
    model = counter()
    model, optimizer = job.prepare(model, optimizer_of(model))
    ids = torch.tensor([5])
    for step, each in enumerate(job.look_ahead([ids] * STEPS, lambda ids: {model: ids + 1})):
        assert int(adds_one(model, optimizer, each)[0]) == step


def test_a_push_whose_answer_is_lost_counts_once(connect: Connect) -> None:
    job = connect(settings=NEVER | HYBRID)
    model = counter()
    model, optimizer = job.prepare(model, optimizer_of(model))

    def lose(name: str) -> None:
        raise errors.ServerUnavailable("the answer is lost")

    ids = torch.arange(6) * SPREAD
    with armed("push.before_reply", lose, at=3):
        for each in job.look_ahead([ids] * STEPS, lambda ids: {model: ids}):
            adds_one(model, optimizer, each)
    assert model(ids).flatten().tolist() == [STEPS] * 6


@pytest.mark.parametrize("accumulate", [1, 3])
def test_batches_and_randomness_are_the_same_with_look_ahead_and_without(
    connect: Connect, look_ups: list[threading.Thread], accumulate: int
) -> None:
    """Of a worker with two logical ranks."""
    found, calls = [], []
    for ahead in (False, True):
        job = connect(settings=NEVER | HYBRID_2)
        model = counter()
        model, optimizer = job.prepare(model, optimizer_of(model))
        seen = []
        look_ups.clear()
        more: dict[str, Any] = {"look_ahead": lambda batch, model=model: {model: batch[0]}} if ahead else {}
        for index, drawn in job.batches(Drawn(50), batch_size=4, epochs=2, accumulate=accumulate, **more):
            (-model(index) * (2 if accumulate == 1 else 1)).sum().backward()
            seen.append((index, drawn, torch.rand(2), random.random(), np.random.random()))
            if job.step_due:
                optimizer.step()
                optimizer.zero_grad()
        found.append(seen)
        calls.append(len([each for each in look_ups if each is threading.current_thread()]))
        assert (model(torch.arange(50) * SPREAD) == (2 if accumulate == 1 else 1)).all()
        job.close()
    assert calls[0] == len(found[0])
    assert calls[1] < calls[0] / 2
    for before, after in zip(*found, strict=True):
        for one, other in zip(before, after, strict=True):
            assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))


def test_a_sample_that_cannot_be_read_is_told_in_its_turn(connect: Connect) -> None:
    job = connect(settings=NEVER | HYBRID)
    model = counter()
    model, optimizer = job.prepare(model, optimizer_of(model))
    data = Drawn(12, fails_at=8)
    given = job.batches(data, batch_size=4, shuffle=False, look_ahead=lambda batch: {model: batch[0]})
    for _ in range(2):
        adds_one(model, optimizer, next(given)[0])
    with pytest.raises(LookupError, match="no sample 8"):
        next(given)
    assert model(torch.arange(12) * SPREAD).flatten().tolist() == [1.0] * 8 + [0.0] * 4


# ---- the bound


def test_promise_5_rows_lack_no_push_of_the_steps_before() -> None:
    """Each of three workers counts its steps in rows of its own, of all partitions, and looks at those of others."""
    workers, steps = 3, 40
    places = torch.arange(workers * 8).reshape(workers, 8) * SPREAD
    lacks: list[int] = []

    def train(job: sy.Job, _: int) -> int:
        model = torch.nn.ModuleDict({"counts": counter(table="t"), "beside": torch.nn.Linear(3, 2)})
        model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
        place = job._session.ranks[0].rank
        data = TensorDataset(torch.arange(workers * steps))
        asked = lambda _: {model["counts"]: places}  # noqa: E731
        for step, _ in enumerate(job.batches(data, batch_size=1, look_ahead=asked)):
            rows = model["counts"](places)
            there = rows.detach().mul(workers).round().flatten(1)
            lacks.append(int(step - there.min()))
            # somebody else's push of this very step may be there, and none of later ones
            assert there.max() <= step + 1
            optimizer.zero_grad()
            (-rows[place]).sum().backward()
            optimizer.step()
        return job.step

    given = {"job.consistency.mode": "hybrid", "job.consistency.logical_ranks": workers, "yard.servers": 2}
    assert together(given, workers, train) == [steps] * workers
    assert max(lacks) <= 0
    assert len(lacks) == workers * steps


def test_a_hybrid_job_asks_for_no_version_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int | None] = []
    real = lookups.look_up_rows

    def watched(of_partitions: Sequence[Any], number: int | None, until: float) -> None:
        asked.append(number)
        real(of_partitions, number, until)

    monkeypatch.setattr(lookups, "look_up_rows", watched)
    together({"yard.servers": 2, "job.consistency.mode": "hybrid"}, 2)
    assert set(asked) == {None}
    asked.clear()
    together({"yard.servers": 2, "job.consistency.mode": "sync"}, 2)
    assert None not in asked
    assert asked


# ---- counted once


@pytest.mark.parametrize("workers", [1, 3])
def test_promise_2_each_sample_counts_once_in_its_row(workers: int) -> None:
    """In whole numbers: a logical rank's part of a step is a quarter."""
    done = threading.Barrier(workers)

    def train(job: sy.Job, _: int) -> list[float]:
        model = counter(table="t")
        model, optimizer = job.prepare(model, optimizer_of(model))
        data = TensorDataset(torch.arange(61))
        for (index,) in job.batches(data, batch_size=2, epochs=4, look_ahead=lambda batch: {model: batch[0]}):
            adds_one(model, optimizer, index)
        done.wait(DEADLINE_S)
        return [float(value) for value in model(torch.arange(61)).detach().flatten()]

    given = {"job.consistency.mode": "hybrid", "yard.servers": 2}
    assert SETTINGS["job.consistency.logical_ranks"] == 4
    assert together(given, workers, train) == [[1.0] * 61] * workers


def test_work_that_is_not_finite_changes_no_row(connect: Connect) -> None:
    job = connect(settings=NEVER | HYBRID_2)
    model = counter()
    model, optimizer = job.prepare(model, optimizer_of(model))
    for factors in ((1.0, float("nan")), (float("inf"), float("nan")), (1.0, 1.0)):
        for factor in factors:
            optimizer.zero_grad()
            (model(torch.tensor([1])) * factor).sum().backward()
            optimizer.step()
    assert job.step == 3
    assert model(torch.tensor([1])).item() == -1.5  # a rank's part is a half, whatever became of the other


# ---- processes


@pytest.mark.long("server-wal")
@pytest.mark.parametrize("durability", ["checkpoint", "wal"])
@pytest.mark.parametrize("died", ["nobody", "worker", "server"])
def test_promise_1_and_2_hold_for_rows_that_come_ahead_over_grpc(
    tmp_path: Path, yard: RoleYard, died: str, durability: str
) -> None:
    settings = {
        "job__consistency__mode": "hybrid",
        "job__consistency__logical_ranks": 2,
        "job__durability": durability,
    }
    assert_each_sample_counts_once_in_its_row(tmp_path, yard, died, **settings)


def test_threads_that_compute_two_ranks_each_agree() -> None:
    """Rows that came ahead for one rank of a worker are there for the other too."""
    given = {"job.consistency.mode": "hybrid", "yard.servers": 2}

    def train(job: sy.Job, _: int) -> tuple[int, float]:
        model = counter(table="t")
        model, optimizer = job.prepare(model, optimizer_of(model))
        for batch in job.batches(TensorDataset(torch.arange(160)), batch_size=4, look_ahead=lambda b: {model: b[0]}):
            adds_one(model, optimizer, batch[0])
        return job.step, job._metrics.latest.get("look_ahead_hits", 0.0)

    for steps, hits in together(given, 2, train):
        assert steps == 10
        assert hits > 0.7
