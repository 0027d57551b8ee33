"""Replicas of the variables in every worker, and rows of tables on the servers (docs/internals/ledger.md, rule D6)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import shardyard as sy
from shardyard.domain import errors
from shardyard_worker.consistency import step_versions
from shardyard_worker.exchange.requests import PullSpec
from shardyard_worker.exchange.server_group import ServerGroup
from tests.support.alone import local_yard
from tests.support.mirrored import MIRRORED, SERVERS, ranks, side_by_side

SAMPLES, BATCH, EPOCHS, IDS, DIM = 60, 3, 5, 40, 4


class Clicks(torch.nn.Module):
    """A table, and a small network in float64 above it."""

    def __init__(self, optimizer: sy.tables.RowOptimizer) -> None:
        super().__init__()
        self.rows = sy.Embedding(DIM, table=sy.tables.Table(DIM, name="ids", optimizer=optimizer, seed=5))
        self.dense = torch.nn.Sequential(torch.nn.Linear(2 * DIM, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.dense(self.rows(ids).double().flatten(1))


class Run:
    """What one worker has at its end. `losses`: of its ranks, added up by step."""

    def __init__(self) -> None:
        self.losses: dict[int, float] = {}
        self.rows = torch.zeros(0)
        self.came_ahead = 0


class Script:
    """`before_step`: called with the model and the ids of each batch."""

    looks_ahead = False
    row_optimizer: sy.tables.RowOptimizer = sy.tables.Adam(0.02)

    def __init__(self, before_step: Callable[[Clicks, torch.Tensor], None] = lambda *_: None) -> None:
        self._before_step = before_step
        torch.manual_seed(3)
        self._dense = Clicks(self.row_optimizer).dense
        ids = torch.randint(0, IDS, (SAMPLES, 2))
        self._data = TensorDataset(ids, (ids.sum(1, keepdim=True) % 7).double())

    def train(self, job: sy.Job) -> Run:
        model, run = Clicks(self.row_optimizer), Run()
        model.dense.load_state_dict(copy.deepcopy(self._dense.state_dict()))
        model, optimizer = job.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.02))
        with job:
            ahead = (lambda batch: {model.rows: batch[0]}) if self.looks_ahead else None
            for ids, y in job.batches(self._data, batch_size=BATCH, epochs=EPOCHS, look_ahead=ahead):
                loss = torch.nn.functional.mse_loss(model(ids), y)
                run.losses[job.step] = run.losses.get(job.step, 0.0) + loss.item()
                loss.backward()
                self._before_step(model, ids)
                optimizer.step()
                optimizer.zero_grad()
            run.came_ahead = model.rows.table.source.came_ahead  # type: ignore[attr-defined]
            run.rows = model.rows(torch.arange(IDS)).detach()
        return run


class ScriptOfTrainSteps(Script):
    """Takes its steps by job.train_step. What SGD does to rows depends on the size of their gradients."""

    looks_ahead = True
    row_optimizer = sy.tables.SGD(0.05)

    def train(self, job: sy.Job) -> Run:
        model, run = Clicks(self.row_optimizer), Run()
        model.dense.load_state_dict(copy.deepcopy(self._dense.state_dict()))
        job.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.02), loss=torch.nn.functional.mse_loss)
        with job:
            batches = job.batches(
                self._data, batch_size=8, epochs=EPOCHS, look_ahead=lambda batch: {model.rows: batch[0]}
            )
            for ids, y in batches:
                step = job.step
                run.losses[step] = run.losses.get(step, 0.0) + job.train_step(ids, y).item()
            run.came_ahead = model.rows.table.source.came_ahead  # type: ignore[attr-defined]
            run.rows = model.rows(torch.arange(IDS)).detach()
        return run


class ScriptThatLooksAhead(Script):
    """Announces the ids of its next batches."""

    looks_ahead = True


def runs_of(given: Mapping[str, object], workers: int, script: Script) -> tuple[list[float], list[torch.Tensor]]:
    """The losses by step, and the rows that each worker reads at the end. With look-ahead most rows have come ahead."""
    with local_yard(given) as (_, connect):
        jobs = [connect() for _ in range(workers)]
        found: list[Run] = side_by_side(workers, lambda at: script.train(jobs[at]))
    assert all((each.came_ahead > 2 * SAMPLES) is script.looks_ahead for each in found)
    steps = sorted({step for each in found for step in each.losses})
    return [sum(each.losses.get(step, 0.0) for each in found) for step in steps], [each.rows for each in found]


@pytest.mark.parametrize("kind", [Script, ScriptThatLooksAhead])
@pytest.mark.parametrize("workers", [1, 2])
def test_losses_and_rows_are_those_of_parameter_servers(alone: None, workers: int, kind: type[Script]) -> None:
    script, more = kind(), {"job.consistency.logical_ranks": 2, "job.workers_expected": workers}
    wanted, wanted_rows = runs_of({**SERVERS, **more}, workers, script)
    found, rows = runs_of({**MIRRORED, **more}, workers, script)
    assert len(found) == len(wanted) == EPOCHS * SAMPLES // (2 * BATCH) == 50
    assert found == pytest.approx(wanted, rel=1e-5)
    assert found[-1] < found[0]
    for each in (*rows, *wanted_rows):
        torch.testing.assert_close(each, wanted_rows[0], rtol=1e-5, atol=1e-7)


def test_worker_with_all_shards_pushes_the_rows_of_each_rank(alone: None) -> None:
    """The last step of an epoch has ranks of different sizes."""
    script, more = ScriptOfTrainSteps(), {"job.consistency.logical_ranks": 2, "job.workers_expected": 1}
    wanted, wanted_rows = runs_of({**SERVERS, **more}, 1, script)
    found, rows = runs_of({**MIRRORED, **more, "job.strategy": "sharded"}, 1, script)
    assert len(found) == len(wanted) == 4 * EPOCHS
    assert found == pytest.approx(wanted, rel=1e-5)
    torch.testing.assert_close(rows[0], wanted_rows[0], rtol=1e-5, atol=1e-7)


def test_step_waits_for_rows_that_come_late(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The servers answer at once, so that the first replica of a step asks again for the rows of the other."""
    asked: list[int] = []
    pull_rows = ServerGroup.pull_rows

    def counted(self: ServerGroup, rows: PullSpec, ahead: Any) -> Any:
        asked.append(rows.number)
        return pull_rows(self, rows, ahead)

    monkeypatch.setattr(ServerGroup, "pull_rows", counted)
    monkeypatch.setattr(step_versions, "SLICE_MS", 0)
    script = ScriptThatLooksAhead()
    wanted, wanted_rows = runs_of({**SERVERS, **ranks(2)}, 2, script)
    assert not asked
    found, rows = runs_of({**MIRRORED, **ranks(2)}, 2, script)
    assert len(set(asked)) > 5
    assert found == pytest.approx(wanted, rel=1e-5)
    torch.testing.assert_close(rows[0], wanted_rows[0], rtol=1e-5, atol=1e-7)


def test_model_of_a_table_alone_is_trained(alone: None) -> None:
    def train(given: Mapping[str, object]) -> torch.Tensor:
        with local_yard({**given, **ranks(1)}) as (_, connect), connect() as job:
            table = sy.tables.Table(2, name="alone", optimizer=sy.tables.SGD(lr=0.5), seed=3)
            model = sy.Embedding(2, table=table)
            model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.arange(4)).square().sum().backward()
                optimizer.step()
            return model(torch.arange(4)).detach()

    assert torch.equal(train(MIRRORED), train(SERVERS))


@pytest.mark.parametrize("place", ["rows", "variables"])
def test_rank_whose_gradient_is_not_finite_counts_in_neither_part(alone: None, place: str) -> None:
    """The other rank's rows and variables count, as on parameter servers."""

    def spoil(model: Clicks, ids: torch.Tensor) -> None:
        if ids[0, 0] % 4:
            return
        if place == "variables":
            next(model.dense.parameters()).grad.fill_(float("inf"))  # type: ignore[union-attr]
        for each in model.rows.table.gradients.tensors() if place == "rows" else ():
            each.fill_(float("nan"))

    wanted, wanted_rows = runs_of({**SERVERS, **ranks(2)}, 2, Script(spoil))
    found, rows = runs_of({**MIRRORED, **ranks(2)}, 2, Script(spoil))
    assert found == pytest.approx(wanted, rel=1e-5)
    torch.testing.assert_close(rows[0], wanted_rows[0], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("strategy", ["multi_worker_mirrored", "sharded"])
def test_tables_with_a_clipped_norm_are_refused_at_once(alone: None, strategy: str) -> None:
    given = {**MIRRORED, **ranks(1), "job.strategy": strategy, "job.clip.norm": 1.0}
    with local_yard(given) as (_, connect), connect() as job:
        model = Clicks(Script.row_optimizer)
        with pytest.raises(errors.ConfigurationError, match=r"embedding table 'ids' in a job with job\.clip\.norm"):
            job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_model_of_a_table_alone_has_no_shards(alone: None) -> None:
    with local_yard({**MIRRORED, **ranks(1), "job.strategy": "sharded"}) as (_, connect), connect() as job:
        model = sy.Embedding(2)
        with pytest.raises(errors.UnsupportedModel, match="a model of tables alone in a job"):
            job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5), loss=torch.nn.functional.mse_loss)
