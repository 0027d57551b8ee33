"""Rows that a worker keeps for its next steps: how old they are, what they lack, and what they save.

Rows count, or double with each step, in whole numbers, so that a push that is lacking in what was read shows.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import shardyard as sy
from shardyard.domain import errors
from shardyard.runtime.failpoints import armed
from shardyard_worker.rows import row_prefetch
from tests.integration.consistency.test_hybrid import HYBRID, HYBRID_2, adds_one, counter
from tests.integration.tables.test_look_ahead import (
    DEADLINE_S,
    NEVER,
    SPREAD,
    STEPS,
    Model,
    assert_rows,
    backward,
    batches,
    begin,
    look_ups,
    optimizer_of,
    yard,
)
from tests.support.alone import SYNC, Connect
from tests.support.yards import RoleYard, assert_each_sample_counts_once_in_its_row

pytestmark = pytest.mark.usefixtures("alone")

__all__ = ["look_ups"]  # a fixture

CACHED = {"worker.cached_rows_bytes": 1 << 20, "worker.cached_rows_steps": 4}
LACKING = CACHED | {"worker.cached_rows_own": "lacking"}
BOUNDED = {"job.consistency.mode": "bounded"}


# ---- rows have all that this worker has pushed


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"worker.exchange": "delayed", "worker.same_host": "never"},
        BOUNDED | {"job.consistency.staleness": 5},
        {"worker.cached_rows_bytes": 500},
        {"job.compression.rows_push": "bf16"},
        {"worker.cached_rows_steps": 1_000, "job.clip.value": 3.0},
    ],
)
def test_a_model_learns_the_same_with_rows_that_are_kept(
    connect: Connect, look_ups: list[int], given: dict[str, Any], ahead: bool
) -> None:
    """One worker, so that rows that have all its pushes are those of the servers. With a window too: each row is met
    again after two steps at the soonest."""
    found, looked_up, spread = [], [], list(batches())
    if "worker.exchange" in given:
        spread = [(ids + 100 * (at % 3), more + 100 * (at % 3)) for at, (ids, more) in enumerate(spread)]
    for settings in (CACHED | given, {key: value for key, value in given.items() if "cached" not in key}):
        look_ups.clear()
        job = connect(settings=NEVER | settings)
        model = Model()
        model, optimizer = job.prepare(model, optimizer_of(model))
        for batch in job.look_ahead(spread, model.asked) if ahead else spread:
            optimizer.zero_grad()
            backward(model.look_up(batch))
            optimizer.step()
        job.pull()  # until all has counted
        found.append(model.state_dict())
        looked_up.append(sum(look_ups))
    assert_rows(*found)
    if not ahead and given == {}:
        assert looked_up[0] < looked_up[1] / 2


def test_a_model_that_learns_by_another_optimizer_reads_what_it_pushes_anew(
    connect: Connect, look_ups: list[int]
) -> None:
    found = []
    for settings in (CACHED, {}):
        look_ups.clear()
        job = connect(settings=NEVER | settings)
        model = sy.Embedding(2, optimizer=sy.tables.Adagrad(lr=0.5), initial=sy.tables.zeros())
        model, optimizer = job.prepare(model, optimizer_of(model))
        seen = []
        for _ in range(4):
            rows = model(torch.tensor([5, 6, 7]))
            optimizer.zero_grad()
            (rows[:1] - 1).square().sum().backward()
            optimizer.step()
            seen.append(rows.tolist())
        found.append((seen, list(look_ups)))
    assert found[0][0] == found[1][0]
    # a row that was looked up and not used has a gradient too: zeros
    assert found[0][1] == [3] * 4


def test_rows_that_get_no_gradient_are_read_once_in_so_many_steps(connect: Connect, look_ups: list[int]) -> None:
    _, model, optimizer = begin(connect, NEVER | CACHED, torch.nn.ModuleDict({"read": counter(), "pushed": counter()}))
    for _ in range(11):
        with torch.no_grad():
            model["read"](torch.arange(3))
        look_ups.append(-1)
        adds_one(model["pushed"], optimizer, torch.tensor([1]))
    read = [count for count, after in zip(look_ups, [*look_ups[1:], 0], strict=True) if count == 3]
    assert len(read) == 3  # at 0, 5 and 10


# ---- rows that lack own pushes


@pytest.mark.parametrize("ahead", [False, True])
def test_rows_that_may_lack_own_pushes_are_those_of_so_many_steps_before(connect: Connect, ahead: bool) -> None:
    job, model, optimizer = begin(connect, NEVER | LACKING | {"worker.cached_rows_steps": 2}, counter())
    given = [torch.tensor([5, 6])] * 9
    seen = [
        adds_one(model, optimizer, each).tolist()
        for each in (job.look_ahead(given, lambda ids: {model: ids}) if ahead else given)
    ]
    assert seen == [[step - step % 3] * 2 for step in range(9)]
    job._loop.report_rows(job._loop.rows)
    metrics = job._metrics.latest
    cached = {name: value for name, value in metrics.items() if name.startswith("cached")}
    assert cached == {"cached_rows_hits": 12, "cached_rows_misses": 6, "cached_rows_age": 2}


def test_what_came_ahead_in_part_is_completed_from_what_is_kept(
    connect: Connect, look_ups: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no more is asked for than lacks: the rest would not fit."""
    monkeypatch.setattr(row_prefetch, "ROWS_ALONG_BYTES_MAX", 200)
    job, model, optimizer = begin(connect, NEVER | LACKING | {"worker.cached_rows_steps": 100}, counter())
    given = [torch.cat([torch.arange(20), torch.tensor([100 + step])]) for step in range(6)]
    seen = [adds_one(model, optimizer, each).tolist() for each in job.look_ahead(given, lambda ids: {model: ids})]
    assert seen == [[0] * 21] * 6
    assert look_ups == [21]  # those of the first batch: from the second on one row comes along
    rows = job._loop.rows
    assert rows is not None
    assert (rows.looked_up, rows.came_ahead) == (6 * 21, 5 * 21)
    assert model(torch.tensor([1, 100, 2_000])).flatten().tolist() == [0, 0, 0]  # as they were read
    job._loop.need_trainer().cache.clear()  # type: ignore[union-attr]
    assert model(torch.tensor([1, 100, 2_000])).flatten().tolist() == [6, 1, 0]


def test_a_push_that_another_worker_had_made_leaves_nothing_of_it_in_what_is_kept(connect: Connect) -> None:
    """The answer was lost, and the second try is a duplicate: whose gradient has counted is not known."""
    job, model, optimizer = begin(connect, NEVER | CACHED, counter())
    ids = torch.tensor([5])

    def lose(name: str) -> None:
        raise errors.ServerUnavailable("the answer is lost")

    cache = job._loop.need_trainer().cache
    assert cache is not None
    cleared = cache.cleared
    with armed("push.before_reply", lose, at=3):
        seen = [int(adds_one(model, optimizer, ids)[0]) for _ in range(6)]
    assert seen == list(range(6))
    assert cache.cleared == cleared + 1


# ---- what others push


def test_a_row_lacks_what_others_have_pushed_for_so_many_steps() -> None:
    given = NEVER | CACHED | {"worker.cached_rows_steps": 3}
    with yard(**given) as begin, begin() as one, begin() as other:
        ids, jobs = torch.tensor([5]), [one, other]
        models = []
        for job in jobs:
            table = sy.tables.Table(1, name="t", optimizer=sy.tables.SGD(lr=1.0), initial=sy.tables.zeros())
            model = torch.nn.ModuleDict({"t": sy.Embedding(1, table=table)})
            models.append(job.prepare(model, optimizer_of(model)))
        seen = []
        for _ in range(9):
            adds_one(models[1][0]["t"], models[1][1], ids)
            with torch.no_grad():
                seen.append(int(models[0][0]["t"](ids)))
            adds_one(models[0][0]["t"], models[0][1], torch.tensor([77]))
        assert seen == [1 + step - step % 4 for step in range(9)]


@pytest.mark.parametrize(
    ("staleness", "window", "steps", "ahead"), [(3, 0, 2, False), (3, 0, 3, True), (3, 1, 2, False), (2, 1, 1, True)]
)
def test_promise_5_holds_for_rows_that_are_kept(staleness: int, window: int, steps: int, ahead: bool) -> None:
    """Each worker counts its steps in rows of its own, of all partitions, and looks at those of the others."""
    workers, samples, per_shard = 3, 120, 4
    places = torch.arange(workers * 8).reshape(workers, 8) * SPREAD
    joined = threading.Barrier(workers)
    lacks: list[tuple[int, int]] = []
    hits = []

    def train(place: int) -> int:
        with connect() as job:
            table = sy.tables.Table(1, name="t", optimizer=sy.tables.SGD(lr=1.0), initial=sy.tables.zeros())
            model = sy.Embedding(1, table=table)
            model, optimizer = job.prepare(model, optimizer_of(model))
            taken = 0
            data = TensorDataset(torch.arange(samples))
            more: dict[str, Any] = {"look_ahead": lambda _: {model: places}} if ahead else {}
            for _ in job.batches(data, batch_size=1, **more):
                if taken == 0:
                    joined.wait(DEADLINE_S)
                with torch.no_grad():
                    there = model(places).amin(1).flatten()
                others = [other for other in range(workers) if other != place]
                lacks.append((int(there.sum()), max(taken - int(there[other]) for other in others)))
                optimizer.zero_grad()
                (-model(places[place])).sum().backward()
                optimizer.step()
                taken += 1
            cache = job._loop.need_trainer().cache
            assert cache is not None
            assert cache.counts.age <= steps
            hits.append(cache.counts.hits)
            return taken

    cached = CACHED | {"worker.cached_rows_steps": steps}
    bounded = BOUNDED | {"job.consistency.staleness": staleness, "worker.exchange": ("blocking", "delayed")[window]}
    given = bounded | {"job.data.batches_per_data_shard": per_shard} | cached | NEVER
    with yard(**given) as connect, ThreadPoolExecutor(workers) as threads:
        runs = [threads.submit(train, place) for place in range(workers)]
        assert sum(run.result(DEADLINE_S) for run in runs) == samples
    busy = samples - workers * per_shard - workers * (staleness + 1)
    seen = [lack for total, lack in lacks if total < busy]
    assert len(seen) > samples / 4
    assert max(seen) <= staleness
    assert min(hits) > 0


# ---- hybrid


@pytest.mark.parametrize("ranks", [HYBRID, HYBRID_2])
def test_rows_of_a_hybrid_job_are_kept_for_steps_of_the_job(connect: Connect, ranks: dict[str, Any]) -> None:
    """A row that is read by somebody else's pushes alone: none, so it is read at the first step, and again when it is
    too old; one that is pushed with each step lacks what it lacks without a cache."""
    job, model, optimizer = begin(connect, NEVER | ranks | CACHED, counter())
    ids = torch.tensor([5])
    seen = []
    data = TensorDataset(torch.zeros(STEPS * (2 if ranks is HYBRID_2 else 1)))
    for _ in job.batches(data, batch_size=1, look_ahead=lambda _: {model: ids}):
        seen.append((job.step, float(adds_one(model, optimizer, ids)[0])))
    assert len(seen) == len(data)
    for step, value in seen:
        assert step <= value <= step + 1
    cache = job._loop.need_trainer().cache
    assert cache is not None
    assert cache.counts.hits == 0


def test_rows_of_a_hybrid_job_that_may_lack_own_pushes_are_read_once_in_so_many_steps(connect: Connect) -> None:
    job, model, optimizer = begin(connect, NEVER | HYBRID | LACKING, counter())
    ids = torch.tensor([5])
    seen = [
        (step, int(adds_one(model, optimizer, each)[0]))
        for step, each in enumerate(job.look_ahead([ids] * 20, lambda ids: {model: ids}))
    ]
    for step, value in seen:
        assert step - 4 <= value <= step
    cache = job._loop.need_trainer().cache
    assert cache is not None
    assert cache.counts.age == 4
    assert cache.counts.hits > 10


# ---- where it is dropped, and refused


def test_nothing_is_kept_where_the_job_may_have_gone_back(connect: Connect, look_ups: list[int]) -> None:
    job, model, optimizer = begin(connect, NEVER | LACKING | {"worker.cached_rows_steps": 1_000}, counter())
    ids = torch.tensor([5])
    for _ in range(4):
        assert int(adds_one(model, optimizer, ids)[0]) == 0
    assert look_ups == [1]
    job._loop.need_trainer().follow_map()
    assert int(model(ids)) == 4
    assert look_ups == [1, 1]


def test_what_was_kept_when_it_was_asked_for_ahead_is_not_used_where_the_job_has_gone_back(connect: Connect) -> None:
    job, model, optimizer = begin(connect, NEVER | LACKING | {"worker.cached_rows_steps": 1_000}, counter())
    training, ids = job._loop.need_trainer(), torch.tensor([5])
    ship = training.pushes.build

    def moves(*given: Any) -> Any:
        """Between asking for rows and their arrival."""
        shipment = ship(*given)
        if len(seen) == 3:
            cache = training.cache
            assert cache is not None
            cache.clear()
        return shipment

    training.pushes.build = moves  # type: ignore[method-assign]
    seen: list[int] = []
    for each in job.look_ahead([ids] * 6, lambda ids: {model: ids}):
        rows = model(each)
        seen.append(int(rows))
        optimizer.zero_grad()
        (-rows).sum().backward()
        optimizer.step()
    assert seen == [0, 0, 0, 3, 3, 3]


def test_a_worker_that_has_no_work_keeps_nothing() -> None:
    with yard(**(NEVER | CACHED)) as connect, connect() as job:
        model = counter()
        model, optimizer = job.prepare(model, optimizer_of(model))
        for (index,) in job.batches(TensorDataset(torch.arange(6)), batch_size=2):
            adds_one(model, optimizer, index)
        cache = job._loop.need_trainer().cache
        assert cache is not None
        assert len(cache) == 0


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (SYNC, "exactly its version"),
        ({"job.consistency.staleness_scaling": "inverse"}, "staleness_scaling inverse"),
        (BOUNDED | {"job.consistency.staleness": 3}, "at most 3"),
        (BOUNDED | {"job.consistency.staleness": 4, "worker.exchange": "delayed"}, "at most 3"),
        (BOUNDED | {"job.consistency.staleness": 0}, "cached_rows_bytes to 0"),
    ],
)
def test_rows_are_not_kept_where_they_would_break_a_promise(connect: Connect, given: dict[str, Any], says: str) -> None:
    job = connect(settings=NEVER | CACHED | given)
    model = counter()
    with pytest.raises(errors.ConfigurationError, match=says):
        job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_job_without_tables_has_nothing_to_keep(connect: Connect) -> None:
    job = connect(settings=NEVER | SYNC | CACHED)
    layer = torch.nn.Linear(1, 1)
    job.prepare(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
    assert job._loop.need_trainer().cache is None


# ---- processes


@pytest.mark.long
@pytest.mark.parametrize("died", ["nobody", "worker", "server"])
def test_promise_1_and_2_hold_with_rows_that_are_kept_over_grpc(tmp_path: Path, died: str) -> None:
    begun = RoleYard(tmp_path)
    try:
        assert_each_sample_counts_once_in_its_row(
            tmp_path,
            begun,
            died,
            job__data__batches_per_data_shard=5,
            worker__cached_rows_bytes=1 << 20,
            worker__cached_rows_own="lacking",
        )
    finally:
        begun.stop()
