"""Training processes that their agent starts again: each sample counts once, and no job is trained twice."""

from __future__ import annotations

import os
import signal
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardyard.wire.v1 import coordinator_pb2 as wire
from tests.support.waiting import wait_until
from tests.support.yards import ROLE, RoleYard, Script

LEASE_MS = 2_000
SAMPLES = 400
COUNTS = f"""
    import os, time
    import torch
    import shardyard as sy

    class Counts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros({SAMPLES}))

    with sy.connect() as job:
        model = Counts()
        model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        data = torch.utils.data.TensorDataset(torch.arange({SAMPLES}))
        for (indices,) in job.batches(data, batch_size=2, epochs=1):
            optimizer.zero_grad()
            (-model.weight[indices]).sum().backward()  # adds 1 for each sample
            optimizer.step()
            print("step", flush=True)
            time.sleep(0.02)
        print("counted", sorted(set(model.weight.tolist())), flush=True)
    """


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[RoleYard]:
    made = RoleYard(tmp_path / "yard", lease_ms=LEASE_MS)
    try:
        yield made
    finally:
        made.stop()


class Launch:
    """An agent that runs a script in two processes, and ends with it."""

    def __init__(self, yard: RoleYard, folder: Path, text: str, **environment: str) -> None:
        self.yard = yard
        path = folder / "train.py"
        path.write_text(textwrap.dedent(text))
        own = ["--coordinator", yard.address, "--workers", "2"]
        self.agent = Script([*ROLE, "agent", *own, "--", str(path)], environment)

    def workers(self) -> list[int]:
        """The ids of the processes that have joined a job."""
        members = self.yard.status().members
        return [each.pid for each in members if each.role == wire.ROLE_WORKER and each.job]

    def trains(self) -> list[int]:
        """Waits until both processes train. Returns their ids."""
        for index in range(2):
            self.agent.wait_for(f"[{index}] step", timeout_s=120)
        return self.workers()


@pytest.fixture
def launch(yard: RoleYard, tmp_path: Path) -> Iterator[Launch]:
    made = Launch(yard, tmp_path, COUNTS)
    try:
        yield made
    finally:
        made.agent.kill()


def test_worker_that_stands_still_longer_than_its_lease_is_started_again(launch: Launch) -> None:
    frozen = launch.trains()[0]
    os.kill(frozen, signal.SIGSTOP)
    launch.yard.coordinator.wait_for("was silent for")
    os.kill(frozen, signal.SIGCONT)
    assert launch.agent.wait() == 0, launch.agent.output
    assert any(f"process 0 (pid {frozen}) ended with StaleIncarnation; it is" in line for line in launch.agent.lines)
    assert [line[4:] for line in launch.agent.lines if "counted" in line] == ["counted [1.0]"] * 2
    (job,) = launch.yard.ended().jobs
    assert (job.state, job.samples) == (wire.JOB_STATE_FINISHED, SAMPLES)
    wait_until(lambda: launch.workers() == [], "no worker to be left", deadline_s=10)
