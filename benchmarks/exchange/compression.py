"""Compression: time and bytes of each codec, accuracy, bytes on the wire, and training over slow links.

    make bench BENCH=compression            (with options: ARGS="--seeds 2 --parts codecs accuracy")

codecs: 16 MiB of float32 encoded and decoded. accuracy: a network of a million parameters learns the digits, each seed
once with float32 and once with each codec, from the same start and with the same batches; every seed holds out one half
of the images. bytes: the same training in a yard of processes, its worker behind a link of its own, where all that its
connections to the servers send is counted. links: seconds until 97% of what is held out is right, over 50 and 200
Mbit/s.

A ratio of bytes is 0 where the mean over the seeds of what the codec loses is above 0.3 points.
"""

from __future__ import annotations

import argparse
import math
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from harness.machine.connections import Moved
from harness.machine.link import INSIDE, LinkUnavailable, link
from harness.measuring.intervals import Interval, paired
from harness.measuring.pairs import Figures, column, ratios, spread
from harness.measuring.report import Panel, options_of, report
from harness.processes.programs import Program, Programs
from harness.processes.sides import shardyard_side
from harness.workloads import digits
from harness.workloads.codecs import measure_pull, measure_push
from shardyard.transport.grpc_client import GrpcNetwork
from shardyard.transport.interfaces import Peer
from shardyard.wire import methods
from shardyard.wire.v1 import parameter_server_pb2 as wire

PUSH_CODECS = (
    "none",
    "bf16",
    "fp16",
    "int8",
    "int8+zstd",
    "qsgd",
    "qsgd:1+zstd",
    "onebit",
    "topk:0.001",
    "topk:0.001:int8",
    "randomk:0.01",
    "powersgd:2",
    "powersgd:4",
)
PULL_CODECS = ("bf16", "int8", "delta")
WHOLE = "float32"
WARMUP_STEPS = 80
CODINGS: dict[str, dict[str, object]] = {
    WHOLE: {},
    "topk": {
        "job.compression.push": "topk:0.001",
        "job.compression.momentum": digits.MOMENTUM,
        "job.compression.warmup_steps": WARMUP_STEPS,
    },
    "powersgd": {"job.compression.push": "powersgd:2"},
    "int8": {"job.compression.push": "int8"},
    "onebit": {"job.compression.push": "onebit"},
}
"""What is judged, after what it is judged against."""
CODED_PULL: dict[str, object] = {"job.compression.pull": "delta"}
PULL_ALONE = "float32, delta pulled"
LOST_POINTS_MAX = 0.3
WINDOW_STEPS = 40
TARGET_PERCENT = 97.0
LOOK_STEPS = 5
RATES_MBIT_S = (50, 200)
PARTS = ("codecs", "accuracy", "bytes", "links")
PROGRAM = "shardyard.digits"
LOOPS = 2
"""Seeds trained at the same time."""
TRAIN_S_MAX = 600.0


class NotTheSame(Exception):
    """The same training gave different parameters over the wire and in one process."""


# ---- codecs


def measure_codecs(rounds: int) -> dict[str, list[Figures]]:
    found = {f"push {text}": measure_push(text, rounds) for text in PUSH_CODECS}
    found |= {f"pull {text}": measure_pull(text, rounds) for text in PULL_CODECS}
    for name, results in found.items():
        encode_ms, decode_ms = (spread(column(results, figure)).median for figure in ("encode_ms", "decode_ms"))
        made_bytes, times = results[-1]["bytes"], results[-1]["times_smaller"]
        print(
            f"16 MiB, {name:20}{encode_ms:8.1f} ms to encode{decode_ms:8.1f} ms to decode{made_bytes:12,.0f} bytes"
            f"{times:9.1f} times smaller",
            flush=True,
        )
    return found


def codecs_panels(found: Mapping[str, Sequence[Figures]]) -> list[Panel]:
    both = {name: [each["encode_ms"] + each["decode_ms"] for each in results] for name, results in found.items()}
    return [Panel("16 MiB of float32, one core", "ms to encode and decode", bars=both)]


# ---- accuracy


@dataclass(frozen=True, slots=True)
class Trained:
    accuracy_percent: float
    loss: float
    """Mean of the last steps."""
    digest: str


def train_whole(program: Program, seed: int, coding: Mapping[str, object]) -> Trained:
    program.ask("open", seed=seed, settings=coding)
    program.ask("train", steps=digits.STEPS - WINDOW_STEPS, timeout_s=TRAIN_S_MAX)
    loss = program.ask("train", steps=WINDOW_STEPS, timeout_s=TRAIN_S_MAX)["loss"]
    accuracy, digest = program.ask("evaluate")["accuracy_percent"], program.ask("digest")["digest"]
    program.ask("close")
    return Trained(accuracy, loss, digest)


def measure_accuracy(seeds: int) -> dict[str, list[Trained]]:
    """Measures each coding by seed. Each process is a yard with its worker; two of them run at a time."""
    with Programs() as programs:
        started = [programs.start(PROGRAM) for _ in range(min(LOOPS, seeds))]
        programs.await_ready()

        def train(index: int) -> dict[int, dict[str, Trained]]:
            return {seed: _train_seed(started[index], seed) for seed in range(index, seeds, len(started))}

        with ThreadPoolExecutor(len(started)) as pool:
            by_seed = {seed: found for part in pool.map(train, range(len(started))) for seed, found in part.items()}
    return {name: [by_seed[seed][name] for seed in range(seeds)] for name in CODINGS}


def _train_seed(program: Program, seed: int) -> dict[str, Trained]:
    found = {name: train_whole(program, seed, coding) for name, coding in CODINGS.items()}
    shown = ", ".join(f"{name} {each.accuracy_percent:.2f}%" for name, each in found.items())
    print(f"seed {seed}: {shown}", flush=True)
    return found


def differences(found: Mapping[str, Sequence[Trained]]) -> dict[str, Interval]:
    """In points against float32; below 0 if accuracy is lost."""
    accuracy = {name: [each.accuracy_percent for each in results] for name, results in found.items()}
    return {name: paired(values, accuracy[WHOLE]) for name, values in accuracy.items() if name != WHOLE}


def judged(values: Sequence[float], difference: Interval) -> list[float]:
    """Zeros if more accuracy is lost than allowed."""
    return list(values) if -difference.mean <= LOST_POINTS_MAX else [0.0] * len(values)


# ---- bytes


@dataclass(frozen=True, slots=True)
class Count:
    """Since the start: what the worker has moved to the servers and to the coordinator, what its interface has sent,
    and the payload that the servers have taken."""

    servers: Moved
    coordinator: Moved
    interface_bytes: int
    codes_bytes: int

    def __sub__(self, other: Count) -> Count:
        return Count(
            self.servers - other.servers,
            self.coordinator - other.coordinator,
            self.interface_bytes - other.interface_bytes,
            self.codes_bytes - other.codes_bytes,
        )

    def per_step(self, steps: int) -> Figures:
        """`push_bytes` is what is judged: packets with payload, with all headers. Acknowledgements of what was pulled
        are packets without payload, and belong to the other direction."""
        moved = self.servers
        figures = {
            "push_bytes": moved.data_bytes,
            "codes_bytes": self.codes_bytes,
            "messages_bytes": moved.payload_bytes - self.codes_bytes,
            "packet_headers_bytes": moved.data_bytes - moved.payload_bytes,
            "acknowledgements_bytes": moved.bare_bytes,
            "again_bytes": moved.again_bytes,
            "interface_bytes": self.interface_bytes,
            "coordinator_bytes": self.coordinator.wire_bytes,
            "pulled_bytes": moved.received_bytes,
        }
        return {name: value / steps for name, value in figures.items()}


class Watched:
    """A worker behind a link, and its servers."""

    def __init__(self, worker: Program, servers: Mapping[str, Peer], coordinator: str) -> None:
        self.worker = worker
        self._servers = servers
        self._coordinator = coordinator

    def count(self) -> Count:
        said = self.worker.ask("count", interface=INSIDE)
        moved = {address: Moved(**each) for address, each in said["moved"].items()}
        asked = wire.DescribeServerRequest()
        described = [peer.call(methods.DESCRIBE_SERVER, asked, timeout_ms=5_000) for peer in self._servers.values()]
        return Count(
            sum((moved.get(address, Moved()) for address in self._servers), Moved()),
            moved.get(self._coordinator, Moved()),
            said["interface_bytes"],
            sum(each.bytes_received for each in described),
        )


@contextmanager
def behind_link(mbit_s: int | None = None) -> Iterator[Watched]:
    """Uses streams, since servers and worker are in fact on one machine."""
    with link(mbit_s) as made:
        settings = {"worker.same_host": "never"}
        place = {"bind": made.address, "prefixes": [made.prefix]}
        with shardyard_side(PROGRAM, workers=1, settings=settings, **place, tls=False) as side:
            network = GrpcNetwork(None)
            servers = {address: network.connect(address, name=f"server {address}") for address in side.servers}
            try:
                yield Watched(side.workers[0], servers, side.coordinator)
            finally:
                for peer in servers.values():
                    peer.close()


def measure_bytes(known: Mapping[str, Trained]) -> dict[str, dict[str, list[Figures]]]:
    """Of the training of seed 0: bytes a step in parts of it after the warm-up (`after`), and over all of it (`whole`).

    `known`: what the same training has given in one process; it must give the same here, to the last bit.
    """
    found: dict[str, dict[str, list[Figures]]] = {}
    with behind_link() as watched:
        for name, coding in CODINGS.items():
            watched.worker.ask("open", seed=0, settings=coding)
            counts = [watched.count()]
            for _ in range(digits.STEPS // WINDOW_STEPS):
                watched.worker.ask("train", steps=WINDOW_STEPS, timeout_s=TRAIN_S_MAX)
                counts.append(watched.count())
            digest = watched.worker.ask("digest")["digest"]
            watched.worker.ask("close")
            if name in known and known[name].digest != digest:
                raise NotTheSame(f"{name}: other parameters after {digits.STEPS} steps over the link than in a process")
            first = math.ceil(WARMUP_STEPS / WINDOW_STEPS)
            after = [
                (late - early).per_step(WINDOW_STEPS)
                for early, late in zip(counts[first:], counts[first + 1 :], strict=False)
            ]
            whole = (counts[-1] - counts[0]).per_step(digits.STEPS)
            found[name] = {"after": after, "whole": [whole]}
            _tell_bytes(name, after, whole)
    return found


def _tell_bytes(name: str, after: Sequence[Figures], whole: Figures) -> None:
    shown = ", ".join(
        f"{figure[:-6].replace('_', ' ')} {spread(column(after, figure)).median:,.0f}" for figure in whole
    )
    print(f"{name}, bytes a step: {shown}; whole run {whole['push_bytes']:,.0f}", flush=True)


# ---- links


def link_codings() -> dict[str, dict[str, object]]:
    """All codings but float32 also pull coded values, since the pulls would be most of the bytes."""
    coded = {name: coding | CODED_PULL for name, coding in CODINGS.items() if name != WHOLE}
    return {WHOLE: CODINGS[WHOLE], PULL_ALONE: CODED_PULL} | coded


def measure_link(mbit_s: int) -> dict[str, Figures]:
    """Seconds of training, looking not counted, until what is held out is right by the target; of seed 0."""
    found = {}
    with behind_link(mbit_s) as watched:
        for name, coding in link_codings().items():
            found[name] = reach(watched.worker, coding)
            shown = ", ".join(f"{figure} {value:.4g}" for figure, value in found[name].items())
            print(f"{mbit_s} Mbit/s, {name}: {shown}", flush=True)
    return found


def reach(worker: Program, coding: Mapping[str, object]) -> Figures:
    worker.ask("open", seed=0, settings=coding)
    seconds, steps, accuracy = 0.0, 0, 0.0
    while accuracy < TARGET_PERCENT and steps < digits.STEPS:
        done = worker.ask("train", steps=LOOK_STEPS, timeout_s=TRAIN_S_MAX)
        seconds += done["seconds"]
        steps += done["steps"]
        accuracy = worker.ask("evaluate")["accuracy_percent"]
    worker.ask("close", timeout_s=TRAIN_S_MAX)
    return {"seconds": seconds, "steps": steps, "step_ms": 1e3 * seconds / steps, "accuracy_percent": accuracy}


def speedups(found: Mapping[str, Figures]) -> dict[str, float]:
    """float32's seconds over each coding's; 0 if it did not reach the target."""
    whole = found[WHOLE]["seconds"]
    return {
        name: whole / each["seconds"] if each["accuracy_percent"] >= TARGET_PERCENT else 0.0
        for name, each in found.items()
        if name != WHOLE
    }


def _word(name: str) -> str:
    return name.replace(", ", "_").replace(" ", "_")


# ---- all of it


def options() -> argparse.Namespace:
    parser = options_of(__doc__, pairs=7)
    parser.add_argument("--seeds", type=int, default=10, help="seeds for the accuracy (10)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what is measured (all)")
    parser.add_argument("--rates", nargs="*", type=int, default=RATES_MBIT_S, help="of the links, Mbit/s (50 200)")
    given = parser.parse_args()
    if given.seeds < 2:
        parser.error(f"--seeds {given.seeds}: expected at least 2, since an interval is told")
    return given


def main() -> None:
    given = options()
    # so that links and processes are taken down then too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    raw: dict[str, Any] = {}
    found: dict[str, list[float]] = {}
    panels: list[Panel] = []
    trained: dict[str, list[Trained]] = {}
    lost: dict[str, Interval] = {}
    if "codecs" in given.parts:
        raw["codecs"] = measured = measure_codecs(given.pairs)
        panels += codecs_panels(measured)
    if "accuracy" in given.parts:
        trained = measure_accuracy(given.seeds)
        lost = differences(trained)
        raw["accuracy_percent"] = {name: [each.accuracy_percent for each in of] for name, of in trained.items()}
        raw["loss"] = {name: [each.loss for each in of] for name, of in trained.items()}
        raw["difference_points"] = {name: [each.mean, each.low, each.high] for name, each in lost.items()}
        for name, each in lost.items():
            print(f"{name}: {each} points of accuracy against float32, {given.seeds} seeds", flush=True)
    try:
        if "bytes" in given.parts:
            raw["bytes_per_step"] = measured = measure_bytes({name: of[0] for name, of in trained.items()})
            found |= bytes_ratios(measured, lost)
            panels += bytes_panels(measured, lost)
        if "links" in given.parts:
            raw["links"] = {}
            for mbit_s in given.rates:
                raw["links"][mbit_s] = reached = measure_link(mbit_s)
                found |= {f"link_{mbit_s}_{_word(name)}": [value] for name, value in speedups(reached).items()}
                bars = {f"shardyard {name}": [each["seconds"]] for name, each in reached.items()}
                panels.append(Panel(f"{mbit_s} Mbit/s, until 97% of the digits", "s", bars=bars))
    except LinkUnavailable as error:
        print(f"left out, since a link cannot be made here (it needs root): {error}", flush=True)
        raw["left_out"] = str(error)
    report("compression", raw, found, panels=panels, folder=given.figures)


def bytes_ratios(
    measured: Mapping[str, Mapping[str, Sequence[Figures]]], lost: Mapping[str, Interval]
) -> dict[str, list[float]]:
    """float32's bytes over each coding's; without `_bytes` where the accuracy was not measured."""
    found: dict[str, list[float]] = {}
    for name in measured:
        if name == WHOLE:
            continue
        after, whole, interface = (
            ratios(measured[WHOLE][part], measured[name][part], figure)
            for part, figure in (("after", "push_bytes"), ("whole", "push_bytes"), ("after", "interface_bytes"))
        )
        if name in lost:
            found[f"{name}_bytes"] = judged(after, lost[name])
        found[f"{name}_unjudged"] = after
        found[f"{name}_whole_run"] = whole
        found[f"{name}_interface"] = interface
    return found


def bytes_panels(measured: Mapping[str, Mapping[str, Sequence[Figures]]], lost: Mapping[str, Interval]) -> list[Panel]:
    after = {name: column(each["after"], "push_bytes") for name, each in measured.items()}
    if not lost:
        return [Panel("Pushed in a step, all framing", "bytes", bars=after)]
    marks = {name: (spread(after[name]).median, each.mean, each.low, each.high) for name, each in lost.items()}
    marks = {WHOLE: (spread(after[WHOLE]).median, 0.0, 0.0, 0.0)} | marks
    return [Panel("Accuracy against float32", "points", marks=marks, x="bytes pushed in a step, all framing")]


if __name__ == "__main__":
    main()
