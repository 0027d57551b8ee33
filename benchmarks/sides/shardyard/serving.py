"""A client that serves the job `rows`: on request it looks up batches of Zipf ids for a while."""

from __future__ import annotations

import time
from typing import Any

import torch

import shardyard as sy
from harness.processes.answers import Conversation, worker_parser
from harness.workloads.rows import Task

TABLE = "table"


def serve(settings: dict[str, Any], task: Task, seconds: float, **given: int) -> dict[str, Any]:
    """Returns how many requests it answered, one after the other, and their `served.counts`."""
    batches = task.batches()
    with sy.follow(job="rows", settings=settings) as run, run.serve(**given) as served:
        for ids in batches:
            served.look_up({TABLE: ids})
        before, cpu_s, begun = served.counts, time.process_time(), time.perf_counter()
        answered = 0
        while time.perf_counter() < begun + seconds:
            served.look_up({TABLE: batches[answered % len(batches)]})
            answered += 1
        passed_s, counts = time.perf_counter() - begun, served.counts
        rows, hits = counts.rows - before.rows, counts.hits - before.hits
        return {
            "answers_per_s": answered / passed_s,
            "ids_per_s": answered * task.ids / passed_s,
            "hit_share": hits / rows,
            "versions_per_s": (counts.versions - before.versions) / passed_s,
            "cpu_ms": 1e3 * (time.process_time() - cpu_s) / answered,
        }


def main() -> None:
    conversation = Conversation()
    parser = worker_parser()
    Task.add_options(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    task = Task.of(options)

    def answer(seconds: float, staleness_ms: int, cached_rows: int) -> dict[str, Any]:
        return serve(options.settings, task, seconds, staleness_ms=staleness_ms, cached_rows=cached_rows)

    conversation.answer({"serve": answer})


if __name__ == "__main__":
    main()
