"""Tables: rows in the server and on its disk, steps of a worker that looks rows up, and hybrid jobs.

    make bench BENCH=tables
    make bench BENCH=tables ARGS="--parts server --rows 1000000 --grown 2000000"
    make bench BENCH=tables ARGS="--peers"            what the peer of `steps` was tried with

Each part is a module of `claims/`, which says what it compares. Those that are not chosen are not in the last line.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from typing import Any

from claims import Found, table_disk, table_hybrid, table_server, table_steps
from harness.machine.memory_cgroup import NoCgroup
from harness.measuring.report import conclude, draw, options_of

PARTS = ("server", "disk", "steps", "hybrid")


def chosen(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}; there are {', '.join(PARTS)}")
    return names


def options() -> argparse.Namespace:
    parser = options_of(__doc__, pairs=5)
    parser.add_argument("--parts", type=chosen, default=list(PARTS), help=f"parted by commas (all): {', '.join(PARTS)}")
    parser.add_argument("--rows", type=int, default=10_000_000, help="rows of look-ups and updates (10,000,000)")
    parser.add_argument("--grown", type=int, default=20_000_000, help="rows to which a table grows (20,000,000)")
    parser.add_argument("--disk-rows", type=int, default=50_000_000, help="rows beyond memory (50,000,000)")
    parser.add_argument("--disk-cgroup-mib", type=int, default=2_048, help="memory of that process (2,048)")
    parser.add_argument("--disk-memory-mib", type=int, default=1_536, help="its bound for tables (1,536)")
    parser.add_argument("--disk-folder", default=tempfile.gettempdir(), help="where its file lies (the temporary one)")
    parser.add_argument("--seconds", type=float, default=4.0, help="length of a measurement of steps (4)")
    parser.add_argument("--clicks", type=int, default=table_hybrid.CLICKS, help="of a day of the recommender")
    parser.add_argument("--peers", action="store_true", help="measure what the peer was tried with, and no more")
    return parser.parse_args()


def measure(part: str, given: argparse.Namespace) -> Found | None:
    if part == "server":
        return table_server.measure(given.rows, given.grown, given.pairs)
    if part == "disk":
        try:
            return table_disk.measure(given.disk_rows, given.disk_cgroup_mib, given.disk_memory_mib, given.disk_folder)
        except NoCgroup as error:
            print(f"rows on disk are not measured: {error}", flush=True)
            return None
    if part == "steps":
        return table_steps.measure(given.pairs, given.seconds)
    return table_hybrid.measure(given.pairs, given.seconds, given.clicks)


def main() -> None:
    given = options()
    # so that processes are ended then too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if given.peers:
        table_steps.show_peers(given.seconds)
        return
    raw: dict[str, Any] = {"load_before": os.getloadavg()[0]}
    ratios: dict[str, Any] = {}
    for part in given.parts:
        print(f"---- {part}", flush=True)
        found = measure(part, given)
        if found is None:
            continue
        raw[part] = found.raw
        ratios |= found.ratios
        for figure, panels in found.panels.items():
            print(f"figure: {draw(panels, given.figures / f'{figure}.png')}")
    raw["load_after"] = os.getloadavg()[0]
    conclude("tables", raw, ratios)


if __name__ == "__main__":
    main()
