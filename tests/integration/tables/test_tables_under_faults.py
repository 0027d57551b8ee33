"""Tables of a job: rows count once, what is refused, and jobs over processes."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import shardyard as sy
from shardyard.domain import errors
from shardyard.runtime.failpoints import armed
from tests.support.alone import Connect, status
from tests.support.job_tables import (
    DIM,
    NEVER,
    Model,
    Yard,
    assert_same,
    batches,
    begin,
    dense,
    train,
    trained_alone,
    yard,
)
from tests.support.yards import Probes, RoleYard, finish

__all__ = ["yard"]

pytestmark = pytest.mark.usefixtures("alone")

# ---- counted once


def test_a_push_whose_answer_is_lost_counts_once(connect: Connect) -> None:
    alone = trained_alone(6)
    _, model, optimizer = begin(connect, NEVER, Model())
    lost = []

    def lose(name: str) -> None:
        lost.append(name)
        raise errors.ServerUnavailable("the answer is lost")

    with armed("push.before_reply", lose, at=3):
        train(model, [optimizer], 6)
    assert lost
    assert_same(model.state_dict(), alone.state_dict())


def test_each_sample_counts_once_in_its_row(connect: Connect) -> None:
    job = connect(settings=NEVER)
    model = sy.Embedding(1, optimizer=sy.tables.SGD(lr=1.0), initial=sy.tables.zeros())
    model, optimizer = job.prepare(model, dense(model))
    for (index,) in job.batches(TensorDataset(torch.arange(50)), batch_size=4, epochs=2, accumulate=3):
        model(index * 1_000_003).sum().backward()
        if job.step_due:
            optimizer.step()
            optimizer.zero_grad()
    assert (model(torch.arange(50) * 1_000_003) == -2).all()
    assert len(model.table) == 50


def test_work_that_is_not_finite_changes_no_row(connect: Connect) -> None:
    _, model, optimizer = begin(connect, NEVER, Model())
    train(model, [optimizer], 2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for bad in (float("nan"), float("inf")):
        optimizer.zero_grad()
        (model(*next(batches(1))) * bad).sum().backward()
        model.top.weight.grad = None
        optimizer.step()
        assert_same(model.state_dict(), before)


def test_workers_push_rows_at_the_same_time(yard: Yard) -> None:
    ids = torch.arange(64) * 7_919

    def work(job: sy.Job) -> None:
        with job:
            model = sy.Embedding(
                2, table=sy.tables.Table(2, name="t", optimizer=sy.tables.SGD(lr=1.0), initial=sy.tables.zeros())
            )
            model, optimizer = job.prepare(model, dense(model))
            for _ in range(20):
                optimizer.zero_grad()
                model(ids).sum().backward()
                optimizer.step()
            done.wait()
            found.append(model(ids).detach())

    done, found = threading.Barrier(2), []
    threads = [threading.Thread(target=work, args=(yard.connect(),)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all((rows == -40).all() for rows in found)
    assert len(found) == 2


# ---- refused


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"job.consistency.mode": "local"}, "job.consistency.mode local"),
        ({"job.consistency.delay_compensation": 0.1}, "cannot be compensated.*staleness_scaling works"),
    ],
)
def test_jobs_that_cannot_have_tables_say_so(connect: Connect, settings: dict[str, Any], text: str) -> None:
    job = connect(settings=NEVER | settings)
    model = Model()
    with pytest.raises(errors.ConfigurationError, match=text):
        job.prepare(model, dense(model))


def test_ftrl_rows_whose_rate_falls_with_staleness_are_refused(connect: Connect) -> None:
    job = connect(settings=NEVER | {"job.consistency.staleness_scaling": "inverse"})
    model = Model(sy.tables.FTRL())
    with pytest.raises(errors.ConfigurationError, match="'users' has the optimizer ftrl"):
        job.prepare(model, dense(model))


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (lambda: sy.Embedding(3, table="t"), "of dim 4.*got 't' of dim 3"),
        (lambda: sy.Embedding(4, table="u"), "got 'u'"),
        (lambda: sy.Embedding(4, table="t", optimizer=sy.tables.Adam()), "adam"),
        (lambda: sy.Embedding(4, table="t", initial=sy.tables.normal(1.0)), "normal 1"),
        (lambda: sy.Embedding(4, table="t", admission=sy.tables.AdmitAfter(3)), "threshold=3"),
        (lambda: sy.Embedding(4, table="t", expiry=sy.tables.Expiry(rows_kept=9)), "rows_kept=9"),
        (lambda: torch.nn.ModuleList([sy.Embedding(4, table="t"), sy.Embedding(4, table="u")]), "'u' is on one side"),
    ],
)
def test_a_worker_with_another_table_is_refused(yard: Yard, other: Any, text: str) -> None:
    with yard.connect() as first, yard.connect() as second:
        model = sy.Embedding(4, table="t")
        first.prepare(model, dense(model))
        model = other()
        with pytest.raises(errors.VariableConflict, match=text):
            second.prepare(model, dense(model))


def test_status_shows_tables(yard: Yard) -> None:
    with yard.connect() as job:
        model = Model()
        model, optimizer = job.prepare(model, dense(model))
        train(model, [optimizer], 1)
        tables = {table.name: (table.dim, table.optimizer) for table in status(yard.here).tables}
    assert tables == {"users": (DIM, "sgd"), "words": (2, "sgd")}


# ---- processes


@pytest.mark.long("True")
@pytest.mark.parametrize("killed", [False, True])
def test_rows_count_once_over_grpc_also_when_a_worker_is_killed(tmp_path: Path, killed: bool) -> None:
    without = {"job__checkpoint__url": "never"}
    yard = RoleYard(tmp_path)
    try:
        with Probes(tmp_path) as probes:
            started = [
                probes.start("rows", "--samples", "240", "--pause-ms", "20", coordinator=yard.address, **without)
                for _ in range(2)
            ]
            if killed:
                started[0][0].wait_for("computed 5")
                started.pop(0)[0].kill()
            found = [finish(*each) for each in started]
        for each in found:
            assert set(each["totals"]) == {2.0}
            assert each["rows"] == 240
    finally:
        yard.stop()
