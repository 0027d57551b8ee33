"""What TLS and the door of a service cost: a yard with its certificates, beside one with security.tls false.

    make bench BENCH=security            (with options: ARGS="--pairs 3")

`tls_push_pull`: 64 MiB pushed and pulled over streams (TCP on loopback), in rounds a second. `tls_latency`: steps of
4 KiB over streams, by their p50. `tls_same_host`: the same steps over the local socket, which has nothing to encrypt.
Each is the figure with TLS over the one without, so 1 is no cost. `authorisation_us`: what the door of a service takes
for one call, in microseconds; a stream is looked at once, when it opens. The numbers are checked.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np

from harness.measuring.pairs import Figures, column, measure_pairs, ratios, spread
from harness.measuring.report import Panel, options_of, report
from harness.processes.sides import Side, shardyard_side
from shardyard.security.authority import Authority, make_credentials
from shardyard.security.door import Door
from shardyard.security.identity import Role
from shardyard.wire import methods

LARGE = ("--tensors", "16", "--elements", str(1 << 20))
SMALL = ("--tensors", "1", "--elements", "1024")
SIDES = {"TLS": True, "without TLS": False}
WARM_ROUNDS = 6
WARM_S = 1.0
DOOR_CALLS = 20_000


def measure_rounds(side: Side, rounds: int) -> Figures:
    measured = side.measure("measure", rounds=rounds)
    side.ask("check")
    cpu_s = measured.total("cpu_s") + measured.service_cpu_s
    return {"rounds_per_s": rounds / measured.total("exchange_s"), "cpu_s_per_round": cpu_s / rounds}


def measure_steps(side: Side, seconds: float) -> Figures:
    (answer,) = side.ask("measure", seconds=seconds)
    side.ask("check")
    p50, p99 = np.percentile(np.array(answer["each_s"]) * 1e6, [50, 99])
    return {"p50_us": float(p50), "p99_us": float(p99)}


def run(
    shape: tuple[str, ...], same_host: str, measure: Callable[[Side], Figures], pairs: int
) -> dict[str, list[Figures]]:
    with ExitStack() as stack:
        measured: dict[str, Callable[[], Figures]] = {}
        for name, tls in SIDES.items():
            settings = {"worker.same_host": same_host}
            side = stack.enter_context(
                shardyard_side("shardyard.rounds", *shape, workers=1, settings=settings, tls=tls)
            )
            measure(side)
            measured[name] = partial(measure, side)
        return measure_pairs(measured, pairs)


def measure_door(repeats: int) -> list[float]:
    """Microseconds of a look at a caller that is known, as the second call of a connection is."""
    with tempfile.TemporaryDirectory() as folder:
        authority = Authority(Path(folder))
        pem = make_credentials(authority, Role.WORKER, "w", 3_600)
    names = [f"spiffe://{authority.yard}/worker/w".encode(), b"worker.shardyard"]
    connection = {"x509_pem_cert": [pem.certificate], "x509_subject_alternative_name": names}
    door, found = Door(), []
    for _ in range(repeats):
        begun = time.perf_counter()
        for _ in range(DOOR_CALLS):
            door.admit(methods.PUSH_PULL, connection)
        found.append((time.perf_counter() - begun) / DOOR_CALLS * 1e6)
    return found


def main() -> None:
    parser = options_of(__doc__, pairs=9)
    parser.add_argument("--rounds", type=int, default=20, help="rounds of 64 MiB in a measurement (20)")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of a measurement of small steps (2)")
    options = parser.parse_args()
    large = run(LARGE, "never", partial(measure_rounds, rounds=options.rounds), options.pairs)
    small = run(SMALL, "never", partial(measure_steps, seconds=options.seconds), options.pairs)
    local = run(SMALL, "auto", partial(measure_steps, seconds=options.seconds), options.pairs)
    found = {
        "tls_push_pull": ratios(large["TLS"], large["without TLS"], "rounds_per_s"),
        "tls_push_pull_cpu": ratios(large["TLS"], large["without TLS"], "cpu_s_per_round"),
        "tls_latency": ratios(small["without TLS"], small["TLS"], "p50_us"),
        "tls_same_host": ratios(local["without TLS"], local["TLS"], "p50_us"),
        "authorisation_us": measure_door(options.pairs),
    }
    raw = {
        f"{what}, {name}": results
        for what, measured in (("64 MiB", large), ("4 KiB", small), ("4 KiB, same host", local))
        for name, results in measured.items()
    }
    for name, results in raw.items():
        print(f"{name}: {', '.join(f'{key} {spread(column(results, key))}' for key in results[0])}", flush=True)
    panels = [
        Panel("64 MiB pushed and pulled", "rounds/s", bars={n: column(r, "rounds_per_s") for n, r in large.items()}),
        Panel("4 KiB over streams, p50", "us", bars={n: column(r, "p50_us") for n, r in small.items()}),
        Panel("4 KiB on the same host, p50", "us", bars={n: column(r, "p50_us") for n, r in local.items()}),
    ]
    report("security", raw, found, panels=panels, folder=options.figures)


if __name__ == "__main__":
    main()
