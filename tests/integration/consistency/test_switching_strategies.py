"""A job that switches between parameter servers and replicas while it runs (docs/internals/ledger.md, rule D9): losses,
optimizer state and samples are those of a job that does not switch."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import shardyard as sy
from shardyard.domain import errors
from shardyard.domain.replica_groups import Strategy
from shardyard.wire import methods
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_launcher.yard.in_process import COORDINATOR, LocalYard
from tests.support.alone import local_yard, status
from tests.support.switches import DATA, Counting
from tests.support.switches import SAMPLES as SAMPLES_COUNTED
from tests.support.waiting import wait_until

SERVERS, MIRRORED = Strategy.PARAMETER_SERVER, Strategy.MULTI_WORKER_MIRRORED
WORKERS, SAMPLES, BATCH, EPOCHS = 2, 96, 3, 3
STEPS = SAMPLES * EPOCHS // (WORKERS * BATCH)
EVERY = 8
"""A job is switched after so many steps under a strategy."""
ONE = {"job.workers_expected": 1, "job.consistency.logical_ranks": 1}
SETTINGS: Mapping[str, object] = {
    "job.consistency.mode": "sync",
    "job.workers_expected": WORKERS,
    "job.consistency.logical_ranks": WORKERS,
    "job.partitions": 4,
    "job.block_bytes": 64,
    "yard.servers": 2,
    "membership.heartbeat_ms": 20,
    "job.rank_grace_ms": 5_000,
}


def side_by_side(work: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(WORKERS) as pool:
        return list(pool.map(work, range(WORKERS)))


def switch(yard: LocalYard, strategy: str, mode: int = 0) -> wire.SwitchConsistencyReply:
    peer = yard.network.connect(COORDINATOR, name="coordinator")
    request = wire.SwitchConsistencyRequest(strategy=strategy, mode=mode)  # type: ignore[arg-type]
    return peer.call(methods.SWITCH_CONSISTENCY, request, timeout_ms=5_000)


class Switches:
    """Orders another strategy whenever a job has taken `EVERY` steps under the present one, until it has had them
    all."""

    def __init__(self, yard: LocalYard, *strategies: Strategy) -> None:
        self._yard, self._left = yard, list(strategies)
        self._since = 0

    @property
    def is_done(self) -> bool:
        return len(self._left) == 1

    def after_step(self, job: sy.Job) -> None:
        now = job._session.job_settings.strategy
        if len(self._left) > 1 and now is self._left[0]:
            self._since = self._since or job.step
            if job.step - self._since >= EVERY:
                assert switch(self._yard, self._left[1].value).first
                del self._left[0]
                self._since = 0


def _copied(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: each.clone() for name, each in model.state_dict().items()}


class Training:
    """A small network in float64, with BatchNorm. `state` is the optimizer's at the end."""

    def __init__(self, optimizer: Callable[..., torch.optim.Optimizer]) -> None:
        torch.manual_seed(3)
        self._model = torch.nn.Sequential(
            # a bias before BatchNorm has a gradient of rounding errors only
            torch.nn.Linear(4, 8, bias=False),
            torch.nn.BatchNorm1d(8),
            torch.nn.Tanh(),
            torch.nn.Linear(8, 1),
        ).double()
        x = torch.randn(SAMPLES, 4, dtype=torch.float64)
        self._data = TensorDataset(x, x.sum(1, keepdim=True).sin())
        self._optimizer = optimizer
        self.strategies: list[Strategy] = []
        self.state: dict[str, Any] = {}
        self.values: list[torch.Tensor] = []

    def run(self, yard: LocalYard, connect: Callable[[], sy.Job], *strategies: Strategy) -> list[float]:
        """The losses of all steps, of all ranks together."""
        jobs, switches = [connect() for _ in range(WORKERS)], Switches(yard, *strategies)
        found = side_by_side(lambda at: self._train(jobs[at], None if at else switches))
        return [sum(each[step] for each in found) for step in range(STEPS)]

    def _train(self, job: sy.Job, switches: Switches | None) -> dict[int, float]:
        model = copy.deepcopy(self._model)
        model, optimizer = job.prepare(model, self._optimizer(model.parameters()))
        losses: dict[int, float] = {}
        before, values = job._session.regime, _copied(model)
        with job:
            for x, y in job.batches(self._data, batch_size=BATCH, epochs=EPOCHS):
                if job._session.regime != before:
                    assert [name for name, each in _copied(model).items() if not torch.equal(each, values[name])] == []
                loss = torch.nn.functional.mse_loss(model(x), y)
                losses[job.step] = loss.item()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                before, values = job._session.regime, _copied(model)
                if switches is not None:
                    self.strategies.append(job._session.job_settings.strategy)
                    switches.after_step(job)
            if switches is not None:
                self.state = optimizer.state_dict()
                self.values = [each.clone() for each in model.state_dict().values()]
        return losses


@pytest.mark.parametrize(
    ("optimizer", "strategies"),
    [
        (lambda given: torch.optim.Adam(given, lr=0.02), (SERVERS, MIRRORED, SERVERS)),
        (lambda given: torch.optim.SGD(given, lr=0.02, momentum=0.9), (Strategy.MIRRORED, SERVERS, MIRRORED)),
    ],
    ids=["Adam", "momentum"],
)
def test_losses_and_state_are_those_of_a_job_that_does_not_switch(
    alone: None, tmp_path: Path, optimizer: Callable[..., torch.optim.Optimizer], strategies: tuple[Strategy, ...]
) -> None:
    """At a switch the values are the same bits."""
    still, there_and_back = Training(optimizer), Training(optimizer)
    with local_yard({**SETTINGS, "job.checkpoint.url": str(tmp_path / "a")}) as (yard, connect):
        wanted = still.run(yard, connect)
    given = {**SETTINGS, "job.checkpoint.url": str(tmp_path / "b"), "job.strategy": strategies[0].value}
    with local_yard(given) as (yard, connect):
        found = there_and_back.run(yard, connect, *strategies)
    assert tuple(each for each, _ in itertools.groupby(there_and_back.strategies)) == strategies
    assert found == pytest.approx(wanted, rel=1e-9)
    torch.testing.assert_close(there_and_back.values, still.values, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(there_and_back.state["state"], still.state["state"], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("tables", [False, True], ids=["variables", "rows of tables"])
def test_each_sample_counts_once_an_epoch(alone: None, tmp_path: Path, tables: bool) -> None:
    given = {**SETTINGS, "job.checkpoint.url": str(tmp_path), "job.workers_expected": WORKERS}
    with local_yard(given) as (yard, connect):
        jobs, switches = [connect() for _ in range(WORKERS)], Switches(yard, SERVERS, MIRRORED, SERVERS, MIRRORED)

        def train(at: int) -> set[float]:
            with jobs[at] as job:
                counting = Counting(job, tables=tables)
                for (chosen,) in job.batches(DATA, batch_size=2, epochs=3):
                    counting.step(chosen)
                    if not at:
                        switches.after_step(job)
                return counting.counts

        assert side_by_side(train) == [{3.0}] * WORKERS
        found = status(yard)
    assert switches.is_done
    assert (found.samples, found.consistency.consistency.number) == (3 * SAMPLES_COUNTED, 3)


def test_job_whose_script_needs_servers_is_not_switched(alone: None, tmp_path: Path) -> None:
    given = {**SETTINGS, **ONE, "job.checkpoint.url": str(tmp_path)}
    with local_yard(given) as (yard, connect), connect() as job:
        job.register({"w": torch.zeros(SAMPLES)}, lr=1.0)
        for (chosen,) in job.batches(TensorDataset(torch.arange(SAMPLES)), batch_size=BATCH):
            gradient = torch.zeros(SAMPLES)
            gradient[chosen] = -1.0
            job.push({"w": gradient})
            if job.step == 3:
                wait_until(lambda: _is_refused(yard, "has job.register, and cannot switch"))
        assert job.pull()["w"].tolist() == [1.0] * SAMPLES


def _is_refused(yard: LocalYard, why: str) -> bool:
    with pytest.raises(errors.ShardyardError) as refused:
        switch(yard, MIRRORED.value)
    return isinstance(refused.value, errors.InvalidRequest) and why in str(refused.value)
