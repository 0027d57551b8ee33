"""Exchanges beside the computation: steps a second over a network, overlapped and blocking.

    make bench BENCH=prefetch            (with options: ARGS="--pairs 3 --parts digits --rates 200")

A network of a million parameters learns the digits in a yard of processes whose worker is behind a link of its own
(two network namespaces, tc tbf), of 200 and 1000 Mbit/s. Both sides train from the same start, with the same batches,
pair by pair, and must end at the same parameters, to the last bit. One has `worker.exchange: overlapped`, the other
`blocking`.

The part `25m` trains a network of 25 million parameters synchronously, with two workers, over TCP: on loopback, where
the processor moves the bytes, and behind one link of 2 and of 4 Gbit/s, where the network takes the time. `hidden_...`
is the share of the exchange that the computation hides: what a step gains by `overlapped`, of what it takes longer
than forward and backward alone.
"""

from __future__ import annotations

import os
import signal
import statistics
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

from harness.machine.link import link
from harness.measuring.pairs import Figures, column, measure_pairs, ratios
from harness.measuring.report import Panel, options_of, report
from harness.processes.programs import Program
from harness.processes.sides import shardyard_side

RATES_MBIT_S = (200, 1000)
PARTS = ("digits", "25m")
PROGRAM = "shardyard.digits"
SIDES = {"blocking": "values, then forward", "overlapped": "shardyard prefetch"}
TRAIN_S_MAX = 600
WORKERS = 2
LARGE_RATES_MBIT_S = (None, 4000, 2000)
LARGE_STEPS = 6
ONE_THREAD = "OMP_NUM_THREADS"


class NotTheSame(Exception):
    """The two sides trained to different parameters."""


def measure(worker: Program, exchange: str, steps: int, digests: set[str]) -> Figures:
    worker.ask("open", seed=0, settings={"worker.exchange": exchange})
    done = worker.ask("train", steps=steps, timeout_s=TRAIN_S_MAX)
    digests.add(worker.ask("digest")["digest"])
    worker.ask("close", timeout_s=TRAIN_S_MAX)
    if len(digests) > 1:
        raise NotTheSame(f"worker.exchange {exchange}: other parameters after {steps} steps")
    return {"steps_per_s": done["steps"] / done["seconds"]}


def run(mbit_s: int, pairs: int, steps: int) -> dict[str, list[Figures]]:
    digests: set[str] = set()
    with link(mbit_s) as made:
        place = {"bind": made.address, "prefixes": [made.prefix]}
        with shardyard_side(PROGRAM, workers=1, settings={"worker.same_host": "never"}, **place, tls=False) as side:
            (worker,) = side.workers
            sides: dict[str, Callable[[], Figures]] = {
                name: partial(measure, worker, exchange, steps, digests) for exchange, name in SIDES.items()
            }
            return measure_pairs(sides, pairs)


def measure_large(exchange: str, place: dict[str, Any], steps: int) -> Figures:
    settings = {"worker.same_host": "never", "worker.exchange": exchange, "job.consistency.mode": "sync"}
    with shardyard_side(
        "shardyard.training", "--task", "25m", workers=WORKERS, settings=settings, **place, tls=False
    ) as side:
        side.ask("train", steps=2)
        found = {"step_ms": _step_ms(side.ask("train", steps=steps))}
        if exchange == "blocking":  # with the other, backward sends
            found["compute_ms"] = _step_ms(side.ask("compute", steps=steps))
    return found


def _step_ms(answers: list[dict[str, Any]]) -> float:
    return statistics.mean([1e3 * each["seconds"] / each["steps"] for each in answers])


def run_large(mbit_s: int | None, pairs: int) -> dict[str, list[Figures]]:
    with link(mbit_s, segments=False) if mbit_s else nullcontext() as made:
        place = {"bind": made.address, "prefixes": [made.prefix]} if made else {}
        sides: dict[str, Callable[[], Figures]] = {
            f"shardyard {exchange}": partial(measure_large, exchange, place, LARGE_STEPS) for exchange in SIDES
        }
        return measure_pairs(sides, pairs)


def hidden(blocking: Figures, overlapped: Figures) -> float:
    """The share of the exchange that the computation hides."""
    return (blocking["step_ms"] - overlapped["step_ms"]) / (blocking["step_ms"] - blocking["compute_ms"])


def main() -> None:
    parser = options_of(__doc__, pairs=7)
    parser.add_argument("--steps", type=int, default=40, help="steps in a measurement (40)")
    parser.add_argument("--rates", nargs="+", type=int, default=RATES_MBIT_S, help="of the links, Mbit/s (200 1000)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure (all)")
    given = parser.parse_args()
    os.environ[ONE_THREAD] = "1"
    # so that links and processes are taken down then too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    raw, found, panels = {}, {}, []
    for mbit_s in given.rates if "digits" in given.parts else ():
        raw[str(mbit_s)] = measured = run(mbit_s, given.pairs, given.steps)
        before, after = (measured[name] for name in SIDES.values())
        found[f"prefetch_{mbit_s}_mbit"] = ratios(after, before, "steps_per_s")
        bars = {name: column(figures, "steps_per_s") for name, figures in measured.items()}
        panels.append(Panel(f"digits over {mbit_s} Mbit/s", "steps/s", bars))
    for rate in LARGE_RATES_MBIT_S if "25m" in given.parts else ():
        name = f"{rate}_mbit" if rate else "loopback"
        raw[f"25m_{name}"] = measured = run_large(rate, given.pairs)
        before, after = measured.values()
        found[f"overlap_25m_{name}"] = ratios(before, after, "step_ms")
        found[f"hidden_25m_{name}"] = [hidden(*each) for each in zip(before, after, strict=True)]
        bars = {side: column(figures, "step_ms") for side, figures in measured.items()}
        panels.append(Panel(f"25M parameters, two workers, {name.replace('_', ' ')}", "ms a step", bars))
    report("prefetch", raw, found, panels=panels, folder=given.figures)


if __name__ == "__main__":
    main()
