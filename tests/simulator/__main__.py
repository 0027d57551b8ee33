"""`python -m tests.simulator SEED` repeats a seed; `--trace` tells what happens in it; `--seeds A:B` runs many."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time

from .parallel import mixed, run_seeds
from .yard import run_seed, simulation


def main() -> int:
    parser = argparse.ArgumentParser(prog="simulator", description=__doc__)
    parser.add_argument("seed", nargs="?", type=int)
    parser.add_argument("--seeds", metavar="A:B", help="all from A to below B")
    parser.add_argument("--list", metavar="-", help="seeds, parted by commas, from the standard input")
    parser.add_argument("--jobs", type=int, default=1, help="processes; 0: one for each core")
    parser.add_argument("--kind", default="", help="async, bounded, sync, hybrid, async-wal, sync-rows, ...")
    parser.add_argument("--mixed", action="store_true", help="four of ten seeds have jobs with a table")
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if given.list:
        seeds = [int(each) for each in sys.stdin.read().split(",") if each]
    elif given.seeds:
        first, _, last = given.seeds.partition(":")
        seeds = list(range(int(first), int(last)))
    elif given.seed is not None:
        seeds = [given.seed]
    else:
        parser.error("no seed")
    if given.jobs != 1:
        return _run_many(mixed(seeds) if given.mixed else {given.kind: seeds}, given.jobs)
    red = 0
    kinds = {seed: kind for kind, mine in mixed(seeds).items() for seed in mine} if given.mixed else {}
    with simulation(logging.INFO if given.trace else logging.ERROR):
        for seed in seeds:
            found = run_seed(seed, kinds.get(seed, given.kind), trace=print if given.trace else None)
            red += bool(found["violations"])
            print(json.dumps(found) if given.json else _told(found), flush=True)
    return 0 if given.json else min(red, 1)


def _run_many(seeds: dict[str, list[int]], jobs: int) -> int:
    """By kind."""
    begun, done, red = time.monotonic(), 0, 0
    number = sum(map(len, seeds.values()))
    every = (found for kind, mine in seeds.items() if mine for found in run_seeds(mine, kind=kind, jobs=jobs))
    for found in every:
        done += 1
        if found["violations"]:
            red += 1
            print(_told(found), flush=True)
        if sys.stderr.isatty():
            print(f"{done} of {number} seeds, {red} red", end="\r", file=sys.stderr)
    print(f"{done} seeds in {time.monotonic() - begun:.0f} s, {red} red")
    return min(red, 1)


def _told(found: dict[str, object]) -> str:
    violations, standing = found["violations"], found["standing"]
    assert isinstance(violations, list)
    line = (
        f"{found['seed']} {found['mode']} {'RED' if violations else 'ok'} {found['digest']:08x} {found['cpu_ms']} ms,"
        f" virtual {found['virtual_s']:.1f} s, {found['switches']} switches, {found['calls']} calls,"
        f" {found['starts']} starts"
    )
    if not violations:
        return line
    kind = f" --kind {found['kind']}" if found["kind"] else ""
    again = f"repeat: .venv/bin/python -m tests.simulator {found['seed']}{kind} --trace"
    return "\n".join([line, *violations[:3], str(standing), again])


if __name__ == "__main__":
    sys.exit(main())
