"""A worker that takes steps on leased data until it is told to end, and records when each one was acknowledged.

Each sample's gradient adds 1 to every parameter, so every parameter equals the number of counted samples.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import torch
from torch.utils.data import TensorDataset

import shardyard as sy
from harness.processes.answers import Conversation, worker_parser

SAMPLES = 100_000_000
BATCHES_PER_DATA_SHARD = 20
TENSORS = 16


class WrongCount(Exception):
    """The parameters do not equal the acknowledged samples."""


class Steps:
    """Takes steps in a thread, which alone uses the job."""

    def __init__(self, settings: dict[str, Any], nbytes: int) -> None:
        self._settings = settings
        self._elements = nbytes // 4 // TENSORS
        self._times: list[float] = []
        self._taken = 0
        self._stop = threading.Event()
        self._ready = threading.Event()
        self._failure = ""
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self._ready.wait()

    def took(self) -> dict[str, Any]:
        """When steps were acknowledged since this was asked last, by the clock that all processes share
        (CLOCK_MONOTONIC), in seconds."""
        found = self._times[self._taken :]
        self._taken += len(found)
        return {"times": found, "failure": self._failure}

    def finish(self) -> dict[str, Any]:
        self._stop.set()
        self._thread.join()
        return {"failure": self._failure, "steps": len(self._times)}

    def _run(self) -> None:
        try:
            self._train()
        except Exception as error:  # noqa: BLE001  told to the benchmark, which ends with it
            self._failure = f"{type(error).__name__}: {error}"
        finally:
            self._ready.set()

    def _train(self) -> None:
        settings = {"job.data.batches_per_data_shard": BATCHES_PER_DATA_SHARD, **self._settings}
        with sy.connect(job="steps", settings=settings) as job:
            counts = [torch.nn.Parameter(torch.zeros(self._elements)) for _ in range(TENSORS)]
            _, optimizer = job.prepare(torch.nn.ParameterList(counts), torch.optim.SGD(counts, lr=1.0))
            acknowledged: set[int] = set()
            last: int | None = None
            data = TensorDataset(torch.arange(SAMPLES))
            for (sample,) in job.batches(data, batch_size=1, shuffle=False):
                optimizer.zero_grad()
                torch.autograd.backward([-count.sum() for count in counts])
                optimizer.step()
                self._times.append(time.monotonic())
                shard, is_fresh = int(sample) // BATCHES_PER_DATA_SHARD, int(sample) not in acknowledged
                acknowledged.add(int(sample))
                self._ready.set()
                if self._stop.is_set():
                    last = shard if last is None else last
                    # data shards that were taken back are leased before fresh ones
                    if is_fresh and shard != last:
                        break
            for count in counts:
                low, high = (float(value) for value in count.detach().aminmax())
                if not low == high == len(acknowledged):
                    raise WrongCount(f"parameters from {low:g} to {high:g} after {len(acknowledged)} samples")


def main() -> None:
    conversation = Conversation()
    parser = worker_parser()
    parser.add_argument("--bytes", type=int, required=True)
    options = parser.parse_args()
    steps = Steps(options.settings, options.bytes)
    conversation.answer({"took": steps.took, "finish": steps.finish})
    steps.finish()


if __name__ == "__main__":
    main()
