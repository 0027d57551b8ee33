"""Consistency: what each mode promises, and what it costs. The claims of docs/guides/consistency.md, measured.

    make bench BENCH=consistency
    make bench BENCH=consistency ARGS="--claims sync_bits,backup_p99 --pairs 2"

A pair is a seed; the seeds measured are those from FIRST_SEED on. Each claim is a module of `claims/`, which says
what it compares; what is not chosen is not in the last line. A figure explains a mode: it is drawn where all claims
that have a part in it were measured. Everything runs on one machine, whose two cores give no real parallelism, so
that workers sleep in each step: what is compared is who waits for whom.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from claims import Found, backup, bits, bounded, cost, diloco, stale
from harness.measuring.report import Panel, conclude, draw, options_of

SEEDS = 10
FIRST_SEED = 10
Measure = Callable[[Sequence[int]], Found]
CLAIMS: dict[str, Measure] = {
    "sync_bits": bits.measure,
    "bounded_time": bounded.measure,
    "staleness_max": bounded.measure,
    "backup_p99": backup.measure,
    "delay_compensation": stale.measure,
    "diloco_loss": diloco.measure,
    "backup_cost": cost.measure,
}
FIGURES: dict[str, tuple[Measure, ...]] = {
    "sync": (bounded.measure, bits.measure),
    "backup": (backup.measure, cost.measure),
    "bounded": (bounded.measure,),
    "async": (bounded.measure, stale.measure),
    "local": (diloco.measure,),
}
"""Of each mode: the claims whose panels its figure has, in their order."""


def chosen(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in CLAIMS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}; there are {', '.join(CLAIMS)}")
    return names


def main() -> None:
    parser = options_of(__doc__, pairs=SEEDS)
    parser.add_argument(
        "--claims", type=chosen, default=list(CLAIMS), help=f"parted by commas (all): {', '.join(CLAIMS)}"
    )
    options = parser.parse_args()
    # so that processes are ended then too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    torch.set_num_threads(1)
    seeds = range(FIRST_SEED, FIRST_SEED + options.pairs)
    found: dict[Measure, Found] = {}
    for name in options.claims:
        measure = CLAIMS[name]
        if measure not in found:
            print(f"---- {name}", flush=True)
            found[measure] = measure(seeds)
    for mode, parts in FIGURES.items():
        if all(part in found for part in parts):
            panels: list[Panel] = [panel for part in parts for panel in found[part].panels[mode]]
            print(f"figure: {draw(panels, options.figures / f'consistency-{mode}.png')}")
    raw: dict[str, Any] = {measure.__module__.rpartition(".")[2]: each.raw for measure, each in found.items()}
    conclude("consistency", raw, {name: values for each in found.values() for name, values in each.ratios.items()})


if __name__ == "__main__":
    main()
