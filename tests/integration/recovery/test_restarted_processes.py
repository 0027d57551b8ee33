"""Training processes that their agent starts again: each sample counts once, and no job is trained twice."""

from __future__ import annotations

import os
import signal
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shardyard.wire.v1 import coordinator_pb2 as wire
from tests.support.waiting import wait_until
from tests.support.yards import ROLE, RoleYard, Script

LEASE_MS = 2_000
SAMPLES = 400
COUNTS = """
    import os, time
    import torch
    import shardyard as sy

    class Counts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(400))

    def train(samples):
        with sy.connect() as job:
            model = Counts()
            model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
            data = torch.utils.data.TensorDataset(torch.arange(samples))
            for (indices,) in job.batches(data, batch_size=2, epochs=1):
                optimizer.zero_grad()
                (-model.weight[indices]).sum().backward()  # adds 1 for each sample
                optimizer.step()
                print("step", flush=True)
                time.sleep(0.02)
            print("counted", model.weight.sum().item(), flush=True)

    """
ONCE = "train(400)"


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
        path.write_text(textwrap.dedent(COUNTS) + textwrap.dedent(text))
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
def launches(yard: RoleYard, tmp_path: Path) -> Iterator[Callable[[str], Launch]]:
    made: list[Launch] = []

    def launch(text: str) -> Launch:
        made.append(Launch(yard, tmp_path, text))
        return made[-1]

    try:
        yield launch
    finally:
        for each in made:
            each.agent.kill()


def counted(launch: Launch) -> list[str]:
    return [line[4:] for line in launch.agent.lines if line[4:].startswith("counted ")]


def test_worker_that_stands_still_longer_than_its_lease_is_started_again(launches: Callable[[str], Launch]) -> None:
    launch = launches(ONCE)
    frozen = launch.trains()[0]
    os.kill(frozen, signal.SIGSTOP)
    launch.yard.coordinator.wait_for("was silent for")
    os.kill(frozen, signal.SIGCONT)
    assert launch.agent.wait() == 0, launch.agent.output
    assert any(f"(pid {frozen}) ended with StaleIncarnation; it is" in line for line in launch.agent.lines)
    assert counted(launch) == ["counted 400.0"] * 2
    (job,) = launch.yard.ended().jobs
    assert (job.state, job.samples) == (wire.JOB_STATE_FINISHED, SAMPLES)


@pytest.mark.long
def test_worker_that_is_started_again_waits_for_a_coordinator_that_is_away(
    launches: Callable[[str], Launch],
) -> None:
    launch = launches(ONCE)
    killed = launch.trains()[0]
    launch.yard.kill_coordinator()
    os.kill(killed, signal.SIGKILL)

    def explained() -> int:
        return sum("to register this worker" in line for line in launch.agent.lines)

    wait_until(lambda: explained() >= 3, "the new process to have waited for 11 s", deadline_s=60)
    launch.yard.restart_coordinator()
    assert launch.agent.wait() == 0, launch.agent.output
    assert counted(launch) == ["counted 400.0"] * 2
    (job,) = launch.yard.ended().jobs
    assert (job.state, job.samples) == (wire.JOB_STATE_FINISHED, SAMPLES)


@pytest.mark.long
def test_worker_that_is_killed_after_its_run_does_not_train_again(launches: Callable[[str], Launch]) -> None:
    launch = launches(
        """
    train(40)
    if os.environ["SHARDYARD_LOCAL_INDEX"] == "0":
        print("left", os.getpid(), flush=True)
        time.sleep(600)
    """
    )
    launch.agent.wait_for("[0] left", timeout_s=120)
    launch.agent.wait_for("[1] counted")
    launch.yard.ended()
    pid = next(line for line in launch.agent.lines if "left" in line).split()[-1]
    os.kill(int(pid), signal.SIGKILL)
    assert launch.agent.wait() == 0, launch.agent.output
    assert "is finished, at step 20: nothing is left to do, and this process ends" in launch.agent.output
    (job,) = launch.yard.ended().jobs
    assert job.samples == 40
    assert len(job.runs) == 1


@pytest.mark.long
def test_script_that_trains_twice_has_two_jobs(launches: Callable[[str], Launch]) -> None:
    launch = launches("train(40); train(20)")
    assert launch.agent.wait(timeout_s=150) == 0, launch.agent.output
    assert sorted(counted(launch)) == ["counted 20.0"] * 2 + ["counted 40.0"] * 2
    assert [(job.state, job.samples) for job in launch.yard.ended().jobs] == [
        (wire.JOB_STATE_FINISHED, 40),
        (wire.JOB_STATE_FINISHED, 20),
    ]
