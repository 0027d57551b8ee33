"""An evaluator of the job `steps`: on request it reads versions for a while, and computes on each if asked to."""

from __future__ import annotations

import time
from typing import Any

import torch

import shardyard as sy
from harness.processes.answers import Conversation, worker_parser

MATRIX = 256


def read(settings: dict[str, Any], seconds: float, every_s: float, compute_ms: float) -> dict[str, Any]:
    """Follows the job for a time. Returns how many versions it read, and its CPU seconds by purpose."""
    until = time.monotonic() + seconds
    count, computing_s, begun_s = 0, 0.0, time.process_time()
    matrix = torch.ones(MATRIX, MATRIX)
    with sy.follow(job="steps", settings=settings) as run:
        for _ in run.snapshots(every_s=every_s):
            count += 1
            before_s, due = time.process_time(), time.monotonic() + compute_ms / 1000
            while time.monotonic() < due:
                matrix @ matrix
            computing_s += time.process_time() - before_s
            if time.monotonic() + every_s > until:
                break
    left = until - time.monotonic()
    if left > 0:
        time.sleep(left)
    return {"versions": count, "cpu_s": time.process_time() - begun_s, "computing_cpu_s": computing_s}


def main() -> None:
    conversation = Conversation()
    parser = worker_parser()
    options = parser.parse_args()
    torch.set_num_threads(1)

    def answer(seconds: float, every_s: float, compute_ms: float) -> dict[str, Any]:
        return read(options.settings, seconds, every_s, compute_ms)

    conversation.answer({"read": answer})


if __name__ == "__main__":
    main()
