"""A yard whose job is switched to another consistency mode while it runs, and workers that count samples.

The learning rate is 1, so each element of each variable is the number of times that its sample counted.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

import shardyard as sy
from shardyard.config import configuration
from shardyard.domain.consistency import UpdateMode
from shardyard.wire import methods
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_launcher.yard.in_process import COORDINATOR, LocalYard
from shardyard_worker.consistency.asynchronous import AsyncStrategy
from shardyard_worker.job import connect as worker
from tests.support.yards import ROLE, Probes, RoleYard, finish, wait_for_any

SAMPLES = 160
DATA = TensorDataset(torch.arange(SAMPLES))
DEADLINE_S = 60.0
SETTINGS = {
    "yard.servers": 2,
    "job.partitions": 4,
    "job.block_bytes": 64,
    "job.data.batches_per_data_shard": 8,
    "membership.heartbeat_ms": 200,
    "log.level": "error",
}
SYNC, ASYNC, BOUNDED = wire.CONSISTENCY_MODE_SYNC, wire.CONSISTENCY_MODE_ASYNC, wire.CONSISTENCY_MODE_BOUNDED
EPOCHS, RANKS = 3, 2
"""Of the tests in which processes die."""

Seen = list[tuple[UpdateMode, int]]
"""The mode and the step of a worker after each batch."""


def two_workers(folder: Path, mode: str) -> dict[str, object]:
    """Settings of a job that can be switched between steps and asynchronous updates."""
    return {
        "job.consistency.mode": mode,
        "job.consistency.logical_ranks": 2,
        "job.workers_expected": 2,
        "job.checkpoint.url": str(folder),
    }


def until(is_so: Callable[[], object], tell: Callable[[], object] = str) -> None:
    """Waits. `tell` gives the message if it takes too long."""
    deadline = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline, tell()
        time.sleep(0.01)


def errors_of(runs: Sequence[Future[set[float]]]) -> Callable[[], object]:
    return lambda: [run.exception() for run in runs if run.done()]


class Yard:
    def __init__(self, made: LocalYard, settings: sy.Settings) -> None:
        self._made = made
        self._settings = settings
        self._peer = made.network.connect(COORDINATOR, name="coordinator")

    def connect(self) -> sy.Job:
        return worker.connect(self._settings, network=self._made.network)

    def switch(self, mode: wire.ConsistencyMode, staleness: int | None = None) -> wire.SwitchConsistencyReply:
        request = wire.SwitchConsistencyRequest(mode=mode, staleness=staleness)
        return self._peer.call(methods.SWITCH_CONSISTENCY, request, timeout_ms=5_000)

    def job_status(self) -> wire.JobStatus:
        (job,) = self._peer.call(methods.STATUS, wire.StatusRequest(), timeout_ms=5_000).jobs
        return job

    def members(self) -> list[wire.MemberStatus]:
        return list(self._peer.call(methods.STATUS, wire.StatusRequest(), timeout_ms=5_000).members)

    def change_mode(self, mode: wire.ConsistencyMode, staleness: int | None = None) -> None:
        """Switches, and waits until all servers use the new mode and the workers have been told."""
        assert self.switch(mode, staleness).first
        until(lambda: self.job_status().consistency.servers, self.job_status)


@contextmanager
def yard(**given: object) -> Iterator[Yard]:
    settings = configuration.load(None, {}, SETTINGS | given).settings
    made = LocalYard(settings)
    try:
        yield Yard(made, settings.model_copy(update={"coordinator": COORDINATOR}))
    finally:
        made.close()


class Counting:
    """A worker that adds 1 to the element of each sample of a batch, in variables of several partitions. With `tables`
    it does so in the rows of a table too."""

    def __init__(self, job: sy.Job, *, tables: bool = False) -> None:
        self.job = job
        self.values = torch.nn.ParameterList(torch.zeros(SAMPLES) for _ in range(4))
        model = torch.nn.ModuleList([self.values])
        self.rows: sy.Embedding | None = None
        if tables:
            optimizer = sy.tables.SGD(lr=1.0)
            self.rows = sy.Embedding(
                1, table=sy.tables.Table(1, name="seen", optimizer=optimizer, initial=sy.tables.zeros())
            )
            model.append(self.rows)
        _, self.optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))

    def step(self, chosen: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.add(chosen)
        self.optimizer.step()

    def add(self, chosen: torch.Tensor) -> None:
        """A step takes the mean over the logical ranks, so each rank multiplies its gradient by their number."""
        ranks = self.job._session.logical_ranks if self.job.mode is UpdateMode.SYNC else 1
        losses = [-ranks * values[chosen].sum() for values in self.values]
        torch.autograd.backward(losses if self.rows is None else [*losses, -ranks * self.rows(chosen).sum()])

    @property
    def counts(self) -> set[float]:
        found = list(self.job.pull().values())
        if self.rows is not None:
            with torch.no_grad():
                found.append(self.rows(torch.arange(SAMPLES)).flatten())
        return set(torch.cat(found).tolist())

    def goes_by(self, staleness: int | None) -> bool:
        strategy = self.job._loop.strategy
        assert isinstance(strategy, AsyncStrategy)
        return strategy.clock.bound == staleness


def train(here: Yard, seen: Seen, *, epochs: int, tables: bool, accumulate: int) -> set[float]:
    """Runs a worker to its end. Returns the numbers that it has counted."""
    with here.connect() as job:
        counting = Counting(job, tables=tables)
        counting.optimizer.zero_grad()
        for (chosen,) in job.batches(DATA, batch_size=1, epochs=epochs, accumulate=accumulate):
            counting.add(chosen)
            if job.step_due:
                counting.optimizer.step()
                counting.optimizer.zero_grad()
            assert job.mode is UpdateMode.ASYNC or job._loop.trainer is None or job._loop.trainer.cache is None
            seen.append((job.mode, job.step))
            time.sleep(0.005)
        return counting.counts


def modes_of_switched_workers(
    settings: dict[str, object],
    workers: int,
    mode: wire.ConsistencyMode,
    staleness: int | None = None,
    *,
    tables: bool,
    accumulate: int,
) -> list[list[UpdateMode]]:
    """Trains for 3 epochs, and switches the job to `mode` meanwhile. Each sample must count once an epoch, and the
    steps of a worker must ascend. Returns the update modes of each worker, in their order."""
    seen: list[Seen] = [[] for _ in range(workers)]
    with yard(**settings) as here, ThreadPoolExecutor(workers) as threads:
        runs = [threads.submit(train, here, each, epochs=3, tables=tables, accumulate=accumulate) for each in seen]
        until(lambda: len(seen[0]) + len(seen[1]) >= SAMPLES // 3, errors_of(runs))
        here.change_mode(mode, staleness)
        assert [run.result(DEADLINE_S) for run in runs] == [{3.0}] * workers
    assert all([step for _, step in each] == sorted(step for _, step in each) for each in seen)
    return [[found for found, _ in itertools.groupby(each, key=lambda one: one[0])] for each in seen]


def until_told(job: sy.Job, number: int) -> None:
    until(lambda: job._session.consistency.number >= number, lambda: job._session.consistency)


def set_(yard: RoleYard, *what: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *ROLE, "set", *what, "--coordinator", yard.address]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def switch_while_some_die(
    yard: RoleYard,
    probes: Probes,
    when: str,
    settings: dict[str, object],
    *what: str,
    told: str,
    has_switched: Callable[[wire.JobStatus], bool],
) -> wire.Consistency:
    """Three workers count. `shardyard set` is called with `what` and must print `told`. Then a worker, a server and the
    coordinator are killed: before the job has switched, or, if `when` is "after", right after. Each sample must count
    once an epoch. Returns the consistency at the end."""

    def await_switch() -> None:
        until(lambda: has_switched(yard.status().jobs[0]), yard.status)

    options = ("--epochs", str(EPOCHS), "--pause-ms", "60", "--samples", str(SAMPLES), "--ranks", str(RANKS))
    given = {
        "coordinator": yard.address,
        "job__workers_expected": 3,
        "job__consistency__logical_ranks": RANKS,
        "job__rank_grace_ms": 500,
        **settings,
    }
    started = [probes.start("count", *options, **given) for _ in range(3)]  # type: ignore[arg-type]
    wait_for_any([script for script, _ in started], "computed 2")  # in a synchronous job who comes third has no rank
    answer = set_(yard, *what)
    assert (answer.returncode, answer.stdout) == (0, told), answer.stderr
    if when == "after":
        await_switch()
    started.pop()[0].kill()
    yard.kill_server(1)
    yard.kill_coordinator()
    yard.restart_coordinator()
    yard.restart_server(1)
    await_switch()
    results = [finish(script, out) for script, out in started]
    assert [result["counts"] for result in results] == [[float(EPOCHS)] * SAMPLES] * 2
    (job,) = yard.ended().jobs
    assert job.state == wire.JOB_STATE_FINISHED
    return job.consistency.consistency
