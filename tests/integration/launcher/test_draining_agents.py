"""An agent that is told to leave: its processes leave in order, and its launch goes on elsewhere."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardyard.wire import methods
from shardyard.wire.v1 import coordinator_pb2 as wire
from tests.support.identities import coordinator_at
from tests.support.waiting import wait_until
from tests.support.yards import ROLE, RoleYard, Script

LEFT = 128 + signal.SIGTERM
SOON_S = 20.0
BATCHES = 240
COUNTED = """
import sys
import torch
from torch.utils.data import TensorDataset
import shardyard as sy
import time

with sy.connect() as job:
    counts = torch.nn.Parameter(torch.zeros(480, dtype=torch.float64))
    _, optimizer = job.prepare(torch.nn.ParameterList([counts]), torch.optim.SGD([counts], lr=1.0))
    for (index,) in job.batches(TensorDataset(torch.arange(480)), batch_size=4, epochs=2):
        time.sleep(0.03)
        optimizer.zero_grad()
        (-counts[index].sum()).backward()
        optimizer.step()
        print("computed", flush=True)
    print("counts are right", job.pull()["0"].eq(2.0).all().item())
"""

LOOPS = """
import time
import torch
import shardyard as sy

job = sy.connect()
job.register({"w": torch.zeros(2)}, lr=0.1)
print("loops", flush=True)
while not job.should_stop:
    job.push({"w": torch.ones(2)})
    time.sleep(0.01)
"""
HANGS = """
import signal, time

signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("hangs", flush=True)
time.sleep(600)
"""


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[RoleYard]:
    started = RoleYard(tmp_path, lease_ms=20_000)
    yield started
    started.stop()


@pytest.fixture
def start(tmp_path: Path, yard: RoleYard) -> Iterator[Starter]:
    made = Starter(tmp_path, yard)
    yield made
    made.close()


class Starter:
    """Starts agents and launchers, and ends them."""

    def __init__(self, folder: Path, yard: RoleYard) -> None:
        self.folder, self.yard = folder, yard
        self.script = folder / "count.py"
        self.script.write_text(COUNTED)
        self._scripts: list[Script] = []

    def _start(self, *arguments: str) -> Script:
        self._scripts.append(Script([*ROLE, *arguments], {"SHARDYARD__WORKER__THREADS": "1"}))
        return self._scripts[-1]

    def agent(self, *arguments: str, bind: str = "127.0.0.1:0", again: Script | None = None) -> Script:
        """`again`: an agent that has ended, and whose state folder this one has."""
        place = len(self._scripts) if again is None else self._scripts.index(again)
        state = self.folder / f"agent-{place}"
        own = ("--coordinator", self.yard.address, "--bind", bind, "--workers", "1", "--state", str(state))
        agent = self._start("agent", *own, *arguments)
        agent.wait_for("ready ")
        return agent

    def run(self, *options: str) -> Script:
        return self._start("run", "--coordinator", self.yard.address, "--workers", "2", *options, str(self.script))

    def close(self) -> None:
        for script in self._scripts:
            script.kill()


def address_of(agent: Script) -> str:
    return next(line for line in agent.lines if line.startswith("ready ")).split()[1]


def launch_of(agent: Script) -> str:
    found = re.search(r"launch (\d{6}): ", agent.output)
    assert found is not None, agent.output
    return found[1]


def computed(launcher: Script) -> int:
    return sum(line.endswith("computed") for line in launcher.lines)


def assert_each_batch_counted_once(launcher: Script) -> None:
    assert launcher.wait() == 0, launcher.output
    assert any("counts are right True" in line for line in launcher.lines), launcher.output
    assert computed(launcher) == BATCHES


def test_launch_goes_on_on_another_agent(yard: RoleYard, start: Starter) -> None:
    first, second = start.agent(), start.agent()
    launcher = start.run()
    wait_until(lambda: computed(launcher) > 20, deadline_s=60)
    leaving, other = (first, second) if "launch " in first.output else (second, first)
    heard = len(yard.coordinator.lines)
    leaving.process.terminate()
    assert leaving.wait(timeout_s=SOON_S) == 0, leaving.output
    assert_each_batch_counted_once(launcher)
    assert any(f"the script is launched on the agent at {address_of(other)}" in line for line in launcher.lines)
    said = [line for line in yard.coordinator.lines[heard:] if re.search(r"(worker|agent) 1\.", line)]
    assert sum("left in order" in line for line in said) >= 2, said
    assert not any("WARNING" in line for line in said), said


@pytest.mark.long
@pytest.mark.parametrize("where", ["another agent", "the next agent"])
def test_launch_that_nobody_watches_goes_on(yard: RoleYard, start: Starter, where: str) -> None:
    """On another agent, or under the one that is started in the place of the one that leaves."""
    leaving = start.agent()
    launcher = start.run("--detach")
    assert launcher.wait() == 0, launcher.output
    wait_until(lambda: any(job.step > 10 for job in yard.status().jobs), deadline_s=60)
    other = start.agent() if where == "another agent" else None
    leaving.process.terminate()
    assert leaving.wait(timeout_s=SOON_S) == 0, leaving.output
    if other is None:
        assert "goes on when an agent is started with the state folder of this one" in leaving.output
        other = start.agent(again=leaving)
    else:
        assert f"goes on as launch {launch_of(other)} of the agent at {address_of(other)}" in leaving.output
    other.wait_for("ended well", timeout_s=60)
    (job,) = yard.status().jobs
    assert job.state == wire.JOB_STATE_FINISHED
    assert job.samples == 4 * BATCHES, "each batch was computed once"


@pytest.mark.long
def test_launch_waits_for_an_agent(yard: RoleYard, start: Starter) -> None:
    leaving = start.agent()
    launcher = start.run()
    wait_until(lambda: computed(launcher) > 20, deadline_s=60)
    (agent,) = [member for member in yard.status().members if member.role == wire.ROLE_AGENT]
    peer = coordinator_at(yard.address)
    peer.call(methods.DRAIN, wire.DrainRequest(member=agent.address), timeout_ms=5_000)
    peer.close()
    assert leaving.wait(timeout_s=SOON_S) == 0, leaving.output
    launcher.wait_for("leaves the yard")
    start.agent()
    assert_each_batch_counted_once(launcher)


@pytest.mark.long
def test_agent_with_a_script_of_its_own_ends_with_the_code_of_a_process_that_leaves(
    yard: RoleYard, start: Starter
) -> None:
    agent = start.agent("--", str(start.script))
    wait_until(lambda: computed(agent) > 20, deadline_s=60)
    agent.process.terminate()
    assert agent.wait(timeout_s=SOON_S) == LEFT, agent.output
    assert "has left in order" in agent.output
    (job,) = yard.status().jobs
    assert job.state == wire.JOB_STATE_RUNNING


@pytest.mark.long
def test_script_without_a_with_block_is_not_done_either(yard: RoleYard, start: Starter) -> None:
    start.script.write_text(LOOPS)
    agent = start.agent("--", str(start.script))
    agent.wait_for("loops")
    agent.process.terminate()
    assert agent.wait(timeout_s=SOON_S) == LEFT, agent.output
    assert "has left in order" in agent.output
    assert "leaves before its work is done" not in agent.output
    (job,) = yard.status().jobs
    assert job.state == wire.JOB_STATE_RUNNING


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_second_signal_ends_an_agent_and_what_it_runs_at_once(
    yard: RoleYard, start: Starter, number: signal.Signals
) -> None:
    start.script.write_text(HANGS)
    agent = start.agent("--", str(start.script))
    agent.wait_for("hangs")
    agent.process.send_signal(number)
    agent.wait_for("another signal ends it at once")
    begun = time.monotonic()
    agent.process.send_signal(number)
    assert agent.wait(timeout_s=SOON_S) == 128 + number, agent.output
    assert time.monotonic() - begun < 5
    assert not [member for member in yard.status().members if member.role == wire.ROLE_AGENT]
