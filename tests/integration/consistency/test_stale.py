"""Stale gradients of real jobs: two workers in a scripted order, so that each gradient's staleness is known; what the
servers make of it is what the formulas say, over streams, shared memory and views, with a window and without."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import shardyard as sy
from shardyard_launcher.status.as_json import to_json
from shardyard_launcher.status.report import ask
from shardyard_launcher.yard.in_process import LocalYard
from tests.support.alone import local_yard
from tests.support.identities import network_to
from tests.support.yards import running_yard

pytestmark = pytest.mark.usefixtures("alone")

DEADLINE_S = 30.0
LR, STRENGTH, LENGTH = 0.25, 0.5, 24
STALE = {
    "yard.servers": 2,
    "job.partitions": 3,
    "job.block_bytes": 64,
    "job.checkpoint.url": "never",
    "job.consistency.staleness_scaling": "inverse",
    "job.consistency.delay_compensation": STRENGTH,
    "log.level": "error",
}
TRANSPORTS = [
    {"worker.same_host": "never"},
    {"worker.same_host": "auto"},
    {"worker.exchange": "overlapped"},
    {"worker.exchange": "delayed"},
    {"job.consistency.delay_compensation_decay": 0.75},
    {"worker.same_host": "never", "worker.exchange": "overlapped"},
    {"job.consistency.mode": "bounded", "job.consistency.staleness": 9},
]


class Stepper:
    """A worker with data of its own: the gradient of each step is its parameter minus a goal."""

    def __init__(self, job: sy.Job, goal: float) -> None:
        self.job = job
        self.goal = torch.linspace(goal, 2 * goal, LENGTH, dtype=torch.float64)
        self.model = torch.nn.Linear(LENGTH, 1, bias=False, dtype=torch.float64)
        torch.nn.init.zeros_(self.model.weight)
        self.model, self.optimizer = job.prepare(self.model, torch.optim.SGD(self.model.parameters(), lr=LR))

    @property
    def held(self) -> torch.Tensor:
        return self.model.weight.detach().flatten().clone()

    def compute(self) -> None:
        self.optimizer.zero_grad()
        ((self.model.weight.flatten() - self.goal).square().sum() / 2).backward()

    def step(self) -> None:
        self.optimizer.step()


class Reference:
    """The same in plain torch: what each worker computes on is told."""

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.squares = torch.zeros(LENGTH, dtype=torch.float64)
        self.versions = [torch.zeros(LENGTH, dtype=torch.float64)]
        self.staleness: list[int] = []

    def apply(self, goal: torch.Tensor, base: int) -> None:
        now, then = self.versions[-1], self.versions[base]
        staleness = len(self.versions) - 1 - base
        gradient = then - goal
        strength = torch.full_like(gradient, STRENGTH)
        if self.decay:
            self.squares = self.decay * self.squares + (1 - self.decay) * gradient * gradient
            # rounded as IEEE 754 has it; torch's own root, of MKL, is not on processors with AVX-512
            strength = strength / torch.from_numpy(np.sqrt((self.squares + 1e-7).numpy()))
        if staleness:
            gradient = gradient + strength * gradient * gradient * (now - then)
        self.versions.append(now - LR / max(1, staleness) * gradient)
        self.staleness.append(staleness)


ORDER = "aabaababbbbaab"
"""Who steps; each has computed its gradient just after its step before."""


def applied(job: sy.Job) -> None:
    """Until the push that is under way, if one is, has been applied."""
    flight = job._loop.strategy._flight  # type: ignore[union-attr]
    if flight is not None:
        flight.answer.result(DEADLINE_S)


def lateness(coordinator: str) -> dict[str, float]:
    """As the servers say it, once all of them have answered the coordinator."""
    give_up = time.monotonic() + DEADLINE_S
    while True:
        (job,) = json.loads(to_json(ask(network_to(coordinator), coordinator)))["jobs"]
        found: dict[str, float] | None = job["lateness"]
        if found is not None:
            return found
        assert time.monotonic() < give_up
        time.sleep(0.05)


@pytest.mark.long("{'worker.exchange': 'delayed'}")
@pytest.mark.parametrize("given", TRANSPORTS, ids=str)
def test_two_workers_in_a_known_order_get_what_the_formulas_say(tmp_path: Path, given: dict[str, object]) -> None:
    reference = Reference(float(str(given.get("job.consistency.delay_compensation_decay", 0))))
    window = given.get("worker.exchange") == "delayed"
    with running_yard(tmp_path / "yard", settings=STALE | given) as yard:
        here = STALE | given | {"coordinator": yard.coordinator}
        with sy.connect(settings=here) as first, sy.connect(settings=here) as second:
            steppers = {"a": Stepper(first, 1.0), "b": Stepper(second, -0.5)}
            computed_on, coming = dict.fromkeys(steppers, 0), dict.fromkeys(steppers, 0)
            for each in steppers.values():
                each.compute()
            for who in ORDER:
                stepper = steppers[who]
                stepper.step()
                applied(stepper.job)
                reference.apply(stepper.goal, computed_on[who])
                newest = len(reference.versions) - 1
                computed_on[who] = coming[who] if window else newest
                coming[who] = newest
                stepper.compute()
                torch.testing.assert_close(stepper.held, reference.versions[computed_on[who]], rtol=0, atol=0)
            final = first.pull()["weight"].flatten()
            torch.testing.assert_close(final, reference.versions[-1], rtol=0, atol=0)
            said = lateness(yard.coordinator)
    assert said["most"] == max(reference.staleness) >= 3
    assert said["mean"] == pytest.approx(sum(reference.staleness) / len(ORDER))
    assert (said["gradients"], said["uncompensated"]) == (3 * len(ORDER), 0)


def kept(yard: LocalYard) -> set[int]:
    """Workers for whom a server keeps what they compute on."""
    return {
        worker
        for server in yard._servers
        for hosted in server.store.hosted()
        for partition in hosted.partitions.values()
        if partition.stale is not None
        for worker in partition.stale._kept
    }


@pytest.mark.parametrize("how", ["leaves", "dies"])
def test_nothing_is_kept_for_a_worker_that_is_gone(how: str) -> None:
    impatient = {"membership.heartbeat_ms": 50, "membership.lease_ms": 1_500}
    with local_yard(STALE | impatient) as (yard, connect):
        jobs = [connect() for _ in range(3)]
        for place, job in enumerate(jobs):
            stepper = Stepper(job, 1.0 + place)
            stepper.compute()
            stepper.step()
        there = {job._session.caller.incarnation for job in jobs}
        assert kept(yard) == there
        for job in jobs[:2]:
            there.remove(job._session.caller.incarnation)
            if how == "leaves":
                job.close()
            else:
                job._session._membership.stop()  # silent from now on
            until = time.monotonic() + DEADLINE_S
            while kept(yard) != there:
                assert time.monotonic() < until, (kept(yard), there)
                time.sleep(0.02)
        for job in reversed(jobs):
            with contextlib.suppress(sy.errors.ShardyardError):
                job.close()
