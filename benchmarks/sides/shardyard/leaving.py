"""A worker that takes steps on leased data until it is told to end, or to leave (SIGTERM), and records them.

The main thread trains, since a signal reaches it there. Each sample's gradient adds 1 to every parameter.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

import torch
from torch.utils.data import TensorDataset

import shardyard as sy
from harness.processes.answers import Conversation, worker_parser

SAMPLES = 10_000_000
BATCHES_PER_DATA_SHARD = 50
STEP_S = 0.01
ELEMENTS = 1_024


class Steps:
    """What the conversation's thread tells of the steps that the main thread takes."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.samples: list[int] = []
        self.left_s = 0.0
        self.ends = threading.Event()
        self.values: tuple[float, float, int] = (0.0, 0.0, 0)
        self._told = 0

    def took(self) -> dict[str, Any]:
        """When steps were acknowledged since this was asked last, by the clock that all processes share
        (CLOCK_MONOTONIC), in seconds, with their samples; and when this worker has left."""
        times = self.times[self._told :]
        samples = self.samples[self._told : self._told + len(times)]
        self._told += len(times)
        return {"times": times, "samples": samples, "left_s": self.left_s}

    def finish(self) -> dict[str, Any]:
        self.ends.set()
        while not self.left_s:
            time.sleep(0.01)
        low, high, step = self.values
        return {**self.took(), "low": low, "high": high, "step": step}


def train(settings: dict[str, Any], steps: Steps, talk: threading.Thread) -> None:
    """`talk`: the conversation, which begins after the first step."""
    settings = {"job.data.batches_per_data_shard": BATCHES_PER_DATA_SHARD, **settings}
    with sy.connect(job="leaving", settings=settings) as job:
        count = torch.nn.Parameter(torch.zeros(ELEMENTS, dtype=torch.float64))
        _, optimizer = job.prepare(torch.nn.ParameterList([count]), torch.optim.SGD([count], lr=1.0))
        for (sample,) in job.batches(TensorDataset(torch.arange(SAMPLES)), batch_size=1, shuffle=False):
            time.sleep(STEP_S)
            optimizer.zero_grad()
            (-count.sum()).backward()
            optimizer.step()
            steps.samples.append(int(sample))
            steps.times.append(time.monotonic())
            if len(steps.times) == 1:
                talk.start()
            if steps.ends.is_set():
                break
        low, high = (float(value) for value in job.pull()["0"].aminmax())
        steps.values = low, high, job.step


def main() -> None:
    conversation = Conversation()
    options = worker_parser().parse_args()
    steps = Steps()
    handlers = {"took": steps.took, "finish": steps.finish}
    talk = threading.Thread(target=conversation.answer, args=(handlers,))
    with contextlib.suppress(SystemExit):  # it was told to leave
        train(options.settings, steps, talk)
    steps.left_s = time.monotonic()
    talk.join()


if __name__ == "__main__":
    main()
