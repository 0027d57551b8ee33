"""What gRPC takes by itself: messages there and back over loopback, with no work at either end.

    make bench BENCH=echo            (with options: ARGS="--pairs 3")

Messages of the sizes of the other benchmarks: 4 KiB (latency), 400 KB (the gradient of the perceptron), and 64 MiB in
pieces of 1 MiB (push_pull). Over one stream of gRPC in Python with the classes that the product uses, and over a plain
TCP socket that reads into one buffer. A round trip ends when all bytes have come back. What is measured here is a lower
bound for each exchange over streams.
"""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

from harness.measuring.pairs import Figures, column, measure_pairs, ratios
from harness.measuring.report import Panel, options_of, report
from harness.processes.programs import Programs
from harness.workloads.echoes import ECHO, message
from shardyard.domain.limits import FRAME_BYTES
from shardyard.runtime.malloc import tune_malloc
from shardyard.transport.grpc_client import GrpcNetwork
from shardyard.transport.interfaces import Stream

SIZES = {"4k": (1, 4_096, 300), "400k": (1, 400_000, 150), "64m": (64, FRAME_BYTES, 6)}
"""How many messages, of how many bytes, and the round trips in a measurement."""
DEADLINE_MS = 60_000


class CutOff(Exception):
    """The other end has closed the connection."""


def over_grpc(stream: Stream, messages: Sequence[bytes]) -> None:
    stream.send(messages)
    for _ in messages:
        assert stream.receive(timeout_ms=DEADLINE_MS) is not None


def over_socket(connection: socket.socket, sent: bytes, buffer: bytearray) -> None:
    connection.sendall(sent)
    at = 0
    while at < len(sent):
        got = connection.recv_into(memoryview(buffer)[at:])
        if not got:
            raise CutOff("in the midst of a message")
        at += got


def measure(trip: Callable[[], None], trips: int) -> Figures:
    taken = []
    for _ in range(trips):
        begin = time.perf_counter()
        trip()
        taken.append(time.perf_counter() - begin)
    return {"round_trip_us": statistics.median(taken) * 1e6}


def main() -> None:
    options = options_of(__doc__, pairs=7).parse_args()
    tune_malloc()
    raw, found, panels = {}, {}, []
    with Programs() as programs:
        program = programs.start("shardyard.echo")
        programs.await_ready()
        addresses = program.ask("addresses")
        stream = GrpcNetwork(None).connect(addresses["grpc"], name="echo").open(ECHO, timeout_ms=DEADLINE_MS)
        with socket.create_connection(("127.0.0.1", addresses["socket"])) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for name, (count, nbytes, trips) in SIZES.items():
                messages = [message(count, nbytes)] * count
                sent = b"".join(messages)
                sides: dict[str, Callable[[], Figures]] = {
                    "shardyard, gRPC": partial(measure, partial(over_grpc, stream, messages), trips),
                    "socket": partial(measure, partial(over_socket, connection, sent, bytearray(len(sent))), trips),
                }
                raw[name] = measured = measure_pairs(sides, options.pairs)
                ours, plain = measured.values()
                found[f"echo_{name}"] = ratios(plain, ours, "round_trip_us")
                bars = {side: column(figures, "round_trip_us") for side, figures in measured.items()}
                panels.append(Panel(f"{name} there and back", "us", bars))
        stream.cancel()
    report("echo", raw, found, panels=panels, folder=options.figures)


if __name__ == "__main__":
    main()
