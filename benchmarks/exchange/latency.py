"""4 KiB pushed and pulled in one step: how long it takes, for one caller and for eight at the same time.

    make bench BENCH=latency            (with options: ARGS="--pairs 3 --seconds 1")
    make bench BENCH=latency ARGS="--peers"            what the peer was tried with

One parameter of 1,024 float32, SGD on the server; callers are processes. Against a torch.distributed.rpc server that
does the same, with its default transport, and then both over TCP, without TLS. The numbers are checked: with one caller
after each step, with eight after each measurement. `worker_calls` is the number of Python functions that a worker calls
in a step, as sys.setprofile counts them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np

from harness.measuring.pairs import Figures, column, measure_pairs, ratios, spread
from harness.measuring.report import Panel, options_of, report
from harness.processes.sides import Side, peer_side, shardyard_side

SHAPE = ("--tensors", "1", "--elements", "1024")
RUNS = {"latency_4k": (1, "default"), "latency_4k_8_callers": (8, "default"), "latency_4k_tcp": (1, "tcp")}
"""How many callers, and over which transport of the peer."""
WARM_S = 1.0
TRIED = {
    f"{transport}, {threads} rpc threads": ["--transport", transport, "--rpc-threads", threads]
    for transport in ("default", "tcp")
    for threads in ("2", "16")
}


def measure(side: Side, seconds: float) -> Figures:
    answers = side.ask("measure", seconds=seconds)
    check(side)
    each_us = np.concatenate([answer["each_s"] for answer in answers]) * 1e6
    p50, p99 = np.percentile(each_us, [50, 99])
    rate = sum(answer["rounds"] / answer["seconds"] for answer in answers)
    return {"p50_us": float(p50), "p99_us": float(p99), "steps_per_s": rate}


def check(side: Side) -> None:
    """Checks that the parameters are the result of all callers' gradients: no push lost, none applied twice."""
    if len(side.workers) == 1:
        side.ask("check")
        return
    counts = np.sum([answer["counts"] for answer in side.ask("counted")], axis=0)
    side.ask("check", workers=1, counts=counts.tolist())


def run(callers: int, transport: str, pairs: int, seconds: float) -> tuple[dict[str, list[Figures]], int]:
    """Measures the peer and Shardyard. Returns the worker's calls in a step, too."""
    is_tcp = transport == "tcp"
    given: dict[str, Any] = {"settings": {"worker.same_host": "never" if is_tcp else "auto"}, "tls": not is_tcp}
    with ExitStack() as stack:
        ours = stack.enter_context(shardyard_side("shardyard.rounds", *SHAPE, workers=callers, **given))
        peer = stack.enter_context(
            peer_side("torch_peers.rounds_rpc", *SHAPE, "--transport", transport, workers=callers)
        )
        sides: dict[str, Callable[[], Figures]] = {}
        for name, side in (("torch.rpc", peer), ("shardyard", ours)):
            measure(side, WARM_S)
            sides[name] = partial(measure, side, seconds)
        measured = measure_pairs(sides, pairs)
        return measured, ours.ask("calls", workers=1)[0]["calls"]


def show_peers(seconds: float, repeats: int = 3) -> None:
    for name, arguments in TRIED.items():
        with peer_side("torch_peers.rounds_rpc", *SHAPE, *arguments, workers=1) as side:
            measure(side, WARM_S)
            print(f"torch.rpc, {name}: {spread(column([measure(side, seconds) for _ in range(repeats)], 'p50_us'))} us")


def main() -> None:
    parser = options_of(__doc__, pairs=9)
    parser.add_argument("--seconds", type=float, default=2.0, help="length of a measurement (2)")
    parser.add_argument("--peers", action="store_true", help="measure what the peer was tried with, and no more")
    options = parser.parse_args()
    if options.peers:
        show_peers(options.seconds)
        return
    raw: dict[str, list[Figures]] = {}
    found: dict[str, list[float]] = {}
    panels: list[Panel] = []
    for name, (callers, transport) in RUNS.items():
        measured, calls = run(callers, transport, options.pairs, options.seconds)
        theirs, ours = measured.values()
        found |= {name: ratios(theirs, ours, "p50_us"), f"{name}_p99": ratios(theirs, ours, "p99_us")}
        if transport == "default" and callers == 1:
            found["worker_calls"] = [calls]
        for side, results in measured.items():
            p50, p99 = spread(column(results, "p50_us")), spread(column(results, "p99_us"))
            print(f"{name}, {side}: p50 {p50} us, p99 {p99} us", flush=True)
            raw[f"{name}, {side}"] = results
        panels += [
            Panel(f"{name}: {figure[:3]}", "us", bars={side: column(r, figure) for side, r in measured.items()})
            for figure in ("p50_us", "p99_us")
        ]
    report("latency", raw, found, panels=panels, folder=options.figures)


if __name__ == "__main__":
    main()
