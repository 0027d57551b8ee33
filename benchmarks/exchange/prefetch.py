"""Values that arrive while the forward computes: steps a second over a link, overlapped and blocking.

    make bench BENCH=prefetch            (with options: ARGS="--pairs 3 --rates 200")

A network of a million parameters learns the digits in a yard of processes whose worker is behind a link of its own
(two network namespaces, tc tbf), of 200 and 1000 Mbit/s. Both sides train from the same start, with the same batches,
pair by pair, and must end at the same parameters, to the last bit. One has `worker.exchange: overlapped`, the other
`blocking`.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from functools import partial

from harness.machine.link import link
from harness.measuring.pairs import Figures, column, measure_pairs, ratios
from harness.measuring.report import Panel, options_of, report
from harness.processes.programs import Program
from harness.processes.sides import shardyard_side

RATES_MBIT_S = (200, 1000)
PROGRAM = "shardyard.digits"
SIDES = {"blocking": "values, then forward", "overlapped": "shardyard prefetch"}
TRAIN_S_MAX = 600


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
        place = {"bind": made.address, "prefix": made.prefix}
        with shardyard_side(PROGRAM, workers=1, settings={"worker.same_host": "never"}, **place) as side:
            (worker,) = side.workers
            sides: dict[str, Callable[[], Figures]] = {
                name: partial(measure, worker, exchange, steps, digests) for exchange, name in SIDES.items()
            }
            return measure_pairs(sides, pairs)


def main() -> None:
    parser = options_of(__doc__, pairs=7)
    parser.add_argument("--steps", type=int, default=40, help="steps in a measurement (40)")
    parser.add_argument("--rates", nargs="+", type=int, default=RATES_MBIT_S, help="of the links, Mbit/s (200 1000)")
    given = parser.parse_args()
    # so that links and processes are taken down then too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    raw, found, panels = {}, {}, []
    for mbit_s in given.rates:
        raw[str(mbit_s)] = measured = run(mbit_s, given.pairs, given.steps)
        before, after = (measured[name] for name in SIDES.values())
        found[f"prefetch_{mbit_s}_mbit"] = ratios(after, before, "steps_per_s")
        bars = {name: column(figures, "steps_per_s") for name, figures in measured.items()}
        panels.append(Panel(f"digits over {mbit_s} Mbit/s", "steps/s", bars))
    report("prefetch", raw, found, panels=panels)


if __name__ == "__main__":
    main()
