"""A yard on a machine without compiled loops: it is up at once, compiles what its jobs need, and waits for a compiler
that takes longer than a call and longer than a lease."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardyard_coordinator.service.server_client import CALL_MS

SCRIPT = """
import sys, torch, shardyard as sy
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
with sy.connect(job=sys.argv[1]) as job:
    model = torch.nn.Linear(4, 1)
    model, optimizer = job.prepare(model, getattr(torch.optim, sys.argv[1])(model.parameters(), lr=0.01))
    for x, y in job.batches(data, batch_size=8, epochs=1):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    print(f"{job.step} steps", flush=True)
"""
FOLDER = "from shardyard_ps_server.jit import cache; from shardyard_ps_server.values import kernels\n"
FOLDER += "print(cache.folder_of(kernels.mean))"
DEADLINE_S = 100
LEASE = ("--set", "membership.lease_ms=3000", "--set", "membership.heartbeat_ms=500")


class Machine:
    """A state folder and an empty folder for compiled loops."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.state = folder, folder / "state"
        self.environment = {**os.environ, "NUMBA_CACHE_DIR": str(folder / "loops")}
        self.script = folder / "train.py"
        self.script.write_text(SCRIPT)
        self.yard = ("--state", str(self.state), "--set", "yard.coordinator_port=0", "--set", "yard.workers=1", *LEASE)

    def start(self, *command: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, *command],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *command: str) -> str:
        process = self.start(*command)
        said, _ = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, said
        return said

    def shardyard(self, *arguments: str) -> str:
        return self.run("-m", "shardyard_launcher.cli", *arguments)

    def waits_of_servers(self) -> dict[int, str]:
        """What each server waits for, by its incarnation, as the status says it."""
        status = json.loads(self.shardyard("status", "--state", str(self.state), "--json"))
        servers = [member for member in status["members"] if member["role"] == "server"]
        return {member["incarnation"]: member["waiting_for"] for member in servers}

    def compiled(self) -> set[str]:
        """The names of the optimizers' loops on disk."""
        found = {path.name.split("-")[0].removeprefix("kernels.") for path in self.folder.rglob("kernels.*.nbi")}
        return {name for name in found if not name.startswith("_")} - {"locate"}


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path)
    yield made
    made.shardyard("down", "--state", str(made.state))


@pytest.mark.long
def test_a_job_compiles_its_own_loops_and_a_later_job_with_another_optimizer_those(machine: Machine) -> None:
    """tests/unit/ps_server/jit/test_compiled_loops.py has the promise with a compiler that notes what it is given."""
    said = machine.shardyard("up", *machine.yard, str(machine.script), "SGD")
    assert "8 steps" in said
    assert machine.compiled() == {"sgd"}
    assert "8 steps" in machine.shardyard("up", *machine.yard, str(machine.script), "Adagrad")
    assert machine.compiled() == {"sgd", "adagrad"}


@pytest.mark.long
def test_a_compiler_may_take_longer_than_a_call_and_a_lease(machine: Machine) -> None:
    """tests/unit/ps_server/jit/test_compiled_loops.py has the promise with a compiler that is held for a moment."""
    folder = Path(machine.run("-c", FOLDER).strip())
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "optimizer_loops.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # as a compiler of another process does
        training = machine.start("-m", "shardyard_launcher.cli", "up", *machine.yard, str(machine.script), "SGD")
        while not (logs := list((machine.state / "logs").glob("server-*.log"))) or not all(
            "ready" in log.read_text() for log in logs
        ):
            assert training.poll() is None
            time.sleep(0.1)
        while not any("loops of job" in each for each in machine.waits_of_servers().values()):
            assert training.poll() is None
        time.sleep(1.5 * CALL_MS / 1000)  # longer than the deadline of the call that opens the job
        assert training.poll() is None
        waits = machine.waits_of_servers()
    assert len(waits) == 2
    assert any("loops of job" in each for each in waits.values()), waits
    said, _ = training.communicate(timeout=DEADLINE_S)
    assert training.returncode == 0, said
    assert "8 steps" in said
    assert machine.waits_of_servers().keys() == waits.keys()
