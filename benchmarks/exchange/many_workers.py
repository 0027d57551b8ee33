"""Hundreds of workers on one server: what they get done together, and whether each gets its turn.

    make bench BENCH=many_workers            (with options: ARGS="--pairs 3 --seconds 2")

A push of 4 KiB and the values after it, asynchronous, over TCP, as fast as the server answers. The clients are members
of the job with heartbeats and streams of their own; a few processes send for all of them. `workers_400` is the steps
a second of 400 streams over those of 8 in the same yard; `workers_400_fair` is the p99 of their steps over the p50. At
the end every parameter tells how many pushes were counted: no more and no fewer than were answered. `kib_a_stream` is
how much the memory of servers and coordinator grows with a stream.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from harness.machine.facts import resident_kib
from harness.measuring.pairs import Figures, column, measure_pairs, ratios, spread
from harness.measuring.report import Panel, options_of, report
from harness.processes.sides import Side, shardyard_side

PROCESSES = 4
FEW, MANY = 8, 400
WARM_S = 2.0


class WrongCount(Exception):
    """The parameters do not have the pushes that were answered."""


def measure(side: Side, clients: int, seconds: float) -> Figures:
    answers = side.ask("measure", seconds=seconds, clients_=clients // PROCESSES)
    each_us = np.concatenate([answer["each_s"] for answer in answers]) * 1e6
    p50, p99 = np.percentile(each_us, [50, 99])
    return {"steps_per_s": len(each_us) / seconds, "p50_us": float(p50), "p99_us": float(p99)}


def check(side: Side) -> None:
    """Raises WrongCount unless every push was counted once."""
    pushed = sum(answer["pushes"] for answer in side.ask("count"))
    (read,) = side.ask("read", workers=1)
    if read["pushes"] != [pushed, pushed]:
        raise WrongCount(f"{pushed} pushes were answered; the parameters have {read['pushes']}")


def main() -> None:
    parser = options_of(__doc__, pairs=5)
    parser.add_argument("--seconds", type=float, default=5.0, help="length of a measurement (5)")
    options = parser.parse_args()
    arguments = ("--clients", str(MANY // PROCESSES))
    with shardyard_side("shardyard.many_workers", *arguments, workers=PROCESSES, tls=False) as side:
        measure(side, FEW, WARM_S)
        before_kib = resident_kib(side.service_pids)
        measure(side, MANY, WARM_S)
        kib_a_stream = (resident_kib(side.service_pids) - before_kib) / (MANY - FEW)
        sides = {f"{clients} streams": partial(measure, side, clients, options.seconds) for clients in (FEW, MANY)}
        raw = measure_pairs(sides, options.pairs)
        check(side)
    few, many = raw.values()
    found = {
        "workers_400": ratios(many, few, "steps_per_s"),
        "kib_a_stream": [kib_a_stream],
        "workers_400_fair": [each["p99_us"] / each["p50_us"] for each in many],
    }
    for name, results in raw.items():
        p50, p99 = spread(column(results, "p50_us")), spread(column(results, "p99_us"))
        print(f"{name}: {spread(column(results, 'steps_per_s'))} steps/s, p50 {p50} us, p99 {p99} us")
    panels = [
        Panel("steps of all streams", "steps/s", bars={name: column(r, "steps_per_s") for name, r in raw.items()}),
    ]
    report("many_workers", raw, found, panels=panels, folder=options.figures)


if __name__ == "__main__":
    main()
