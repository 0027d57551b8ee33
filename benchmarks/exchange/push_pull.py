"""Rounds of 64 MiB of float32: 16 gradients pushed, SGD on the server, the new parameters pulled; one worker.

    make bench BENCH=push_pull            (with options: ARGS="--pairs 3")
    make bench BENCH=push_pull ARGS="--peers"            what the peer was tried with

A round begins when different gradients have been written into the model's `.grad`s and ends when its parameters hold
the new values; rounds do not overlap. (Ratios named `_with_writing` count the writing too.) Ours over the same-host
path, with parameters copied out and as views, and over streams, without TLS, since the peer has none. Against a
torch.distributed.rpc server that does the same, with its default transport and forced to TCP. The peer is used in its
fastest form: 16 concurrent calls, one a tensor. It copies what it gets into its parameters, as we do; our views are
measured against its parameters rebound to what it got (`parameter.data = value`). Each round's numbers are checked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from harness.measuring.pairs import Figures, column, measure_pairs, ratios, spread
from harness.measuring.report import Panel, options_of, report
from harness.processes.sides import Side, peer_side, shardyard_side

TENSORS = 16
ELEMENTS = 1 << 20
PAYLOAD_BYTES = TENSORS * ELEMENTS * 4
SHAPE = ("--tensors", str(TENSORS), "--elements", str(ELEMENTS))
WARM_ROUNDS = 6

OURS: dict[str, dict[str, object]] = {
    "shardyard same host": {"worker.same_host": "auto"},
    "shardyard same host, view": {"worker.same_host": "auto", "worker.exchange": "overlapped"},
    "shardyard streams": {"worker.same_host": "never"},
}
PEERS: dict[str, list[str]] = {
    "torch.rpc": ["--calls", "split"],
    "torch.rpc rebound": ["--calls", "split", "--take", "rebind"],
    "torch.rpc TCP": ["--calls", "split", "--transport", "tcp"],
}
COMPARISONS = (
    ("torch.rpc", "torch.rpc rebound", "shardyard same host", "shardyard same host, view"),
    ("torch.rpc TCP", "shardyard streams"),
)
"""Measured together. The second moves its bytes over the loopback interface, the first does not."""
TUNED_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 32)}
TRIED: dict[str, tuple[list[str], dict[str, str]]] = {
    "one call with 16 tensors": ([], {}),
    "one call, 2 torch threads": (["--torch-threads", "2"], {}),
    "one call, 2 rpc threads": (["--rpc-threads", "2"], {}),
    "one call, parameters rebound": (["--take", "rebind"], {}),
    "one call, malloc tuned": ([], TUNED_MALLOC),
    "16 calls": (["--calls", "split"], {}),
    "16 calls, 2 torch threads": (["--calls", "split", "--torch-threads", "2"], {}),
    "16 calls, 4 rpc threads": (["--calls", "split", "--rpc-threads", "4"], {}),
    "16 calls, parameters rebound": (["--calls", "split", "--take", "rebind"], {}),
    "16 calls, malloc tuned": (["--calls", "split"], TUNED_MALLOC),
}


class WrongPath(Exception):
    """A side did not use the transport that it is named after."""


def measure(side: Side, name: str, rounds: int) -> Figures:
    """Rounds a second, and CPU seconds per GB pushed and pulled. The numbers are checked after each measurement too."""
    measured = side.measure("measure", rounds=rounds)
    side.ask("check")
    payload_bytes = 2 * PAYLOAD_BYTES * rounds
    check_path(name, measured.loopback_bytes / payload_bytes)
    return {
        "rounds_per_s": rounds / measured.total("seconds"),
        "exchanges_per_s": rounds / measured.total("exchange_s"),
        "cpu_s_per_gb": (measured.total("cpu_s") + measured.service_cpu_s) / (payload_bytes / 1e9),
        "loopback_share": measured.loopback_bytes / payload_bytes,
    }


def check_path(name: str, loopback_share: float) -> None:
    """Raises WrongPath when the bytes did not go where they should: the same-host path falls back in silence."""
    streams = "streams" in name or "TCP" in name
    if streams != (loopback_share > 0.5):
        raise WrongPath(f"{name}: {loopback_share:.2f} of the payload went over the loopback interface")


def run(names: Sequence[str], pairs: int, rounds: int) -> dict[str, list[Figures]]:
    with ExitStack() as stack:
        sides: dict[str, Callable[[], Figures]] = {}
        for name in names:
            if name in OURS:
                given: dict[str, Any] = {"settings": OURS[name], "tls": "streams" not in name}
                side = stack.enter_context(shardyard_side("shardyard.rounds", *SHAPE, workers=1, **given))
            else:
                side = stack.enter_context(peer_side("torch_peers.rounds_rpc", *SHAPE, *PEERS[name], workers=1))
            side.ask("measure", rounds=WARM_ROUNDS)
            side.ask("check")
            sides[name] = partial(measure, side, name, rounds)
        return measure_pairs(sides, pairs)


def show_peers(rounds: int, repeats: int = 3) -> None:
    for transport in ("default", "tcp"):
        for name, (arguments, environment) in TRIED.items():
            options = [*SHAPE, *arguments, "--transport", transport]
            with peer_side("torch_peers.rounds_rpc", *options, workers=1, environment=environment) as side:
                side.ask("measure", rounds=WARM_ROUNDS)
                label = "torch.rpc TCP" if transport == "tcp" else "torch.rpc"
                found = [measure(side, label, rounds) for _ in range(repeats)]
                print(f"{label}, {name}: {spread(column(found, 'rounds_per_s'))} rounds/s", flush=True)


def main() -> None:
    parser = options_of(__doc__, pairs=9)
    parser.add_argument("--rounds", type=int, default=20, help="rounds in a measurement (20)")
    parser.add_argument("--peers", action="store_true", help="measure what the peer was tried with, and no more")
    options = parser.parse_args()
    if options.peers:
        show_peers(options.rounds)
        return
    raw: dict[str, list[Figures]] = {}
    for names in COMPARISONS:
        raw |= run(names, options.pairs, options.rounds)
    found: dict[str, list[float]] = {}
    for ratio, ours, peer in (
        ("push_pull_same_host", "shardyard same host", "torch.rpc"),
        ("push_pull_same_host_view", "shardyard same host, view", "torch.rpc rebound"),
        ("push_pull_tcp", "shardyard streams", "torch.rpc TCP"),
    ):
        found[ratio] = ratios(raw[ours], raw[peer], "exchanges_per_s")
        found[f"{ratio}_with_writing"] = ratios(raw[ours], raw[peer], "rounds_per_s")
    found["cpu_s_per_gb"] = column(raw["shardyard streams"], "cpu_s_per_gb")
    for name, results in raw.items():
        print(f"{name}: {spread(column(results, 'rounds_per_s'))} rounds/s", flush=True)
    finish(raw, found, options.figures)


def finish(raw: Mapping[str, Sequence[Figures]], found: Mapping[str, Sequence[float]], folder: Path) -> None:
    rounds = {name: column(results, "rounds_per_s") for name, results in raw.items()}
    cpu = {name: column(results, "cpu_s_per_gb") for name, results in raw.items()}
    panels = [
        Panel("64 MiB pushed and pulled", "rounds/s", bars=rounds),
        Panel("CPU of both ends", "s per GB pushed and pulled", bars=cpu),
    ]
    report("push_pull", raw, found, panels=panels, folder=folder)


if __name__ == "__main__":
    main()
