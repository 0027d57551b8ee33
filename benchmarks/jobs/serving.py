"""Requests that a serving client answers from a job that trains, with its cache of hot rows and without one.

    make bench BENCH=serving            (with options: ARGS="--pairs 3 --seconds 2 --ids 256")

A yard of processes, one worker that trains a table of a million rows of dim 64 on batches of 4,096 Zipf(1.1) ids
(asynchronous, Adagrad), and a client in a process of its own that looks up batches of so many such ids, one after the
other, each of one version that is at most --staleness-ms old. Measured pair by pair are nobody, the client
without a cache, and with one: answers a second, the share of rows that were there, and steps a second of the worker.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from functools import partial

from harness.measuring.pairs import Figures, column, measure_pairs, ratios
from harness.measuring.report import Panel, options_of, report
from harness.processes.programs import Program, Programs
from harness.processes.sides import shardyard_side
from harness.workloads.rows import Task

NOBODY, PLAIN, CACHED = "nobody is served", "shardyard, rows looked up", "shardyard, hot rows cached"
ANSWER_S_MAX = 120
WARM_S = 1.0


def measure(worker: Program, client: Program, seconds: float, staleness_ms: int, cached_rows: int | None) -> Figures:
    """`cached_rows` None: no client asks."""
    if cached_rows is None:
        trained = worker.ask("train", seconds=seconds, timeout_s=ANSWER_S_MAX)
        return {"train_steps_per_s": trained["steps"] / trained["seconds"]}
    worker.send("train", seconds=seconds + 2 * WARM_S)
    served = client.ask(
        "serve", seconds=seconds, staleness_ms=staleness_ms, cached_rows=cached_rows, timeout_s=ANSWER_S_MAX
    )
    trained = worker.receive(ANSWER_S_MAX)
    return {**served, "train_steps_per_s": trained["steps"] / trained["seconds"]}


def run(pairs: int, seconds: float, ids: int, staleness_ms: int, cached_rows: int) -> dict[str, list[Figures]]:
    task, settings = Task(), {"job.name": "rows", "job.partitions": 1}
    with (
        shardyard_side("shardyard.rows", *task.arguments(), workers=1, settings=settings) as side,
        Programs() as programs,
    ):
        environment = {"SHARDYARD_COORDINATOR": side.coordinator}
        asked = Task(ids=ids).arguments()
        client = programs.start(
            "shardyard.serving", *asked, "--settings", json.dumps({"log.level": "error"}), environment=environment
        )
        programs.await_ready()
        (worker,) = side.workers
        worker.ask("train", seconds=WARM_S)
        sides: dict[str, Callable[[], Figures]] = {
            name: partial(measure, worker, client, seconds, staleness_ms, cached)
            for name, cached in ((NOBODY, None), (PLAIN, 0), (CACHED, cached_rows))
        }
        found = measure_pairs(sides, pairs)
        client.end()
        client.stop()
        return found


def main() -> None:
    parser = options_of(__doc__, pairs=7)
    parser.add_argument("--seconds", type=float, default=5.0, help="of a measurement (5)")
    parser.add_argument("--ids", type=int, default=1_024, help="of a request (1024)")
    parser.add_argument("--staleness-ms", type=int, default=1_000, help="how old an answer's version may be (1000)")
    parser.add_argument("--cached-rows", type=int, default=100_000, help="in the client (100000)")
    given = parser.parse_args()
    # so that processes are ended then too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    measured = run(given.pairs, given.seconds, given.ids, given.staleness_ms, given.cached_rows)
    found = {
        "serving_cache": ratios(measured[CACHED], measured[PLAIN], "answers_per_s"),
        "serving_slowdown": ratios(measured[NOBODY], measured[PLAIN], "train_steps_per_s"),
        "serving_slowdown_cached": ratios(measured[NOBODY], measured[CACHED], "train_steps_per_s"),
    }
    bars = {name: column(measured[name], "answers_per_s") for name in (PLAIN, CACHED)}
    panels = [Panel(f"answers of {given.ids} Zipf(1.1) ids", "answers/s", bars)]
    report("serving", {"serving": measured}, found, panels=panels, folder=given.figures)


if __name__ == "__main__":
    main()
