"""A job in a notebook: cells run by a real IPython kernel, interrupted as its stop button does."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from ipykernel.kernelspec import make_ipkernel_cmd
from jupyter_client.asynchronous.client import AsyncKernelClient
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager

CELL_S = 60
INTERRUPTED_S = 5
"""From the stop button to the end of the cell. A step takes milliseconds."""

PREPARE = """
import threading, time
import torch
from torch.utils.data import TensorDataset
import shardyard as sy

before = set(threading.enumerate())
data = TensorDataset(torch.arange(64))

def begin(**settings):
    global job, counts, optimizer
    given = {"yard.servers": 2, "job.partitions": 4, "log.level": "error", "job.name": "cells"}
    job = sy.connect(settings=given | settings)
    counts = torch.nn.Parameter(torch.zeros(64, dtype=torch.float64))
    _, optimizer = job.prepare(torch.nn.ParameterList([counts]), torch.optim.SGD([counts], lr=1.0))
    return job

def step(index):
    optimizer.zero_grad()
    (-counts[index].sum()).backward()
    optimizer.step()
    job.log(counted=counts.detach().sum())

def left_behind():
    until = time.monotonic() + 5
    while (left := [t.name for t in set(threading.enumerate()) - before if t.is_alive()]) and time.monotonic() < until:
        time.sleep(0.02)
    return left
"""
ENDLESS = "for epoch, (index,) in enumerate(job.batches(data, batch_size=4, epochs=100_000)):\n    step(index)\n    "
GOING = ENDLESS + "if epoch == 3: print('going', flush=True)"


@dataclass
class Cell:
    """What came of one. `took_s`: from the stop button to its end."""

    output: str = ""
    html: str = ""
    error: str = ""
    took_s: float = 0.0


@dataclass
class Kernel:
    manager: AsyncKernelManager
    client: AsyncKernelClient

    async def run(self, code: str, *, interrupt_at: str = "") -> Cell:
        """Runs a cell; presses the stop button once it has printed `interrupt_at`."""
        cell, pressed = Cell(), 0.0
        buttons: list[asyncio.Future[None]] = []

        def hear(message: dict[str, Any]) -> None:
            nonlocal pressed
            content = message["content"]
            match message["msg_type"]:
                case "stream":
                    cell.output += content["text"]
                    if interrupt_at and interrupt_at in cell.output and not pressed:
                        pressed = time.monotonic()
                        buttons.append(asyncio.ensure_future(self.manager.interrupt_kernel()))
                case "execute_result":
                    cell.output += content["data"].get("text/plain", "")
                    cell.html += content["data"].get("text/html", "")
                case "error":
                    cell.error = f"{content['ename']}: {content['evalue']}"

        await self.client.execute_interactive(code, timeout=CELL_S, output_hook=hear, store_history=False)
        await asyncio.gather(*buttons)
        cell.took_s = time.monotonic() - pressed if pressed else 0.0
        return cell

    async def value(self, expression: str) -> Any:
        cell = await self.run(expression)
        assert not cell.error, cell
        return eval(cell.output)


@asynccontextmanager
async def running_kernel() -> AsyncIterator[Kernel]:
    manager = AsyncKernelManager()
    manager._kernel_spec = KernelSpec(argv=make_ipkernel_cmd(), interrupt_mode="signal", language="python")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SHARDYARD")}
    await manager.start_kernel(env={**kept, "OMP_NUM_THREADS": "1"})
    client = manager.client()
    client.start_channels()
    try:
        await client.wait_for_ready(timeout=CELL_S)
        kernel = Kernel(manager, client)
        assert not (await kernel.run(PREPARE)).error
        yield kernel
    finally:
        client.stop_channels()
        await manager.shutdown_kernel(now=True)
        client.context.term()


async def interrupted_loop_leaves_a_job_that_trains_on() -> None:
    async with running_kernel() as kernel:
        assert "<caption>job cells</caption>" in (await kernel.run("begin()")).html
        for _ in range(3):
            interrupted = await kernel.run(GOING, interrupt_at="going")
            assert interrupted.error.startswith("KeyboardInterrupt")
            assert interrupted.took_s < INTERRUPTED_S
        before = await kernel.value("job.pull()['0'].tolist()")
        assert all(value == round(value) for value in before)
        done = await kernel.run("for (index,) in job.batches(data, batch_size=4):\n    step(index)")
        assert not done.error
        after = await kernel.value("job.pull()['0'].tolist()")
        assert [new - old for new, old in zip(after, before, strict=True)] == [1.0] * 64
        assert "counted" in (await kernel.run("job")).html
        assert not (await kernel.run("job.close()")).error
        assert "left" in (await kernel.run("job")).html
        assert await kernel.value("left_behind()") == []


async def interrupted_with_block_ends_its_yard() -> None:
    async with running_kernel() as kernel:
        for mode in ("async", "sync"):
            block = f"with begin(**{{'job.consistency.mode': '{mode}'}}):\n    "
            interrupted = await kernel.run(block + GOING.replace("\n", "\n    "), interrupt_at="going")
            assert interrupted.error.startswith("KeyboardInterrupt")
            assert interrupted.took_s < INTERRUPTED_S
            assert await kernel.value("left_behind()") == []
            loop = "for (index,) in job.batches(data):\n        step(index)\n    print(counts.sum().item())"
            done = await kernel.run(block + loop)
            assert (done.error, done.output) == ("", "64.0\n")
            assert await kernel.value("left_behind()") == []


@pytest.mark.long
def test_interrupted_loop_leaves_a_job_that_trains_on() -> None:
    asyncio.run(interrupted_loop_leaves_a_job_that_trains_on())


@pytest.mark.long
def test_interrupted_with_block_ends_its_yard_and_another_starts_in_the_same_kernel() -> None:
    asyncio.run(interrupted_with_block_ends_its_yard())
