"""A link of its own between this network namespace and a new one: a pair of virtual interfaces, on request of a fixed
rate in both directions.

Owns: the namespace and the interfaces. Invariants: both are gone when the block is left; their names are unique to this
process, their addresses lie in the range kept for benchmarks (RFC 2544). Unless told otherwise each segment is a packet
of its own there, so the interfaces' counters count all headers. Must not know: what runs on it.
"""

from __future__ import annotations

import ipaddress
import itertools
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

RANGE = ipaddress.ip_network("198.18.0.0/15")
BURST = "64kb"
BURST_OF_LARGE = "512kb"
QUEUE = "50ms"
INSIDE = "link0"
"""The name of the interface in the new namespace."""
COMMAND_S_MAX = 20
_numbers = itertools.count()


class LinkUnavailable(Exception):
    """This machine cannot make namespaces; the text says why."""


@dataclass(frozen=True, slots=True)
class Link:
    """`interface` and `address` are this end's; a command behind `prefix` runs at the other end."""

    interface: str
    address: str
    prefix: tuple[str, ...]


@contextmanager
def link(mbit_s: int | None = None, *, segments: bool = True) -> Iterator[Link]:
    """`segments`: each segment is a packet of its own, which costs processor time. Needs root, iproute2 and a kernel
    with veth (and tbf). Raises LinkUnavailable."""
    name = f"sy{os.getpid()}n{next(_numbers)}"
    hosts = RANGE.num_addresses // 4
    here, there = list(ipaddress.ip_network((int(RANGE[0]) + 4 * (os.getpid() % hosts), 30)).hosts())
    made = f"ip -n {name} link set"
    commands = [
        f"ip netns add {name}",
        f"ip link add {name} type veth peer name {INSIDE} netns {name}",
        f"ip address add {here}/30 dev {name}",
        f"ip -n {name} address add {there}/30 dev {INSIDE}",
        *([f"ip link set {name} gso_max_segs 1", f"{made} {INSIDE} gso_max_segs 1"] if segments else []),
        f"{made} lo up",
        f"{made} {INSIDE} up",
        f"ip link set {name} up",
    ]
    if mbit_s is not None:
        shape = f"root tbf rate {mbit_s}mbit burst {BURST if segments else BURST_OF_LARGE} latency {QUEUE}"
        commands += [f"tc qdisc add dev {name} {shape}", f"tc -n {name} qdisc add dev {INSIDE} {shape}"]
    try:
        for command in commands:
            _run(command)
        yield Link(name, str(here), ("nsenter", f"--net=/run/netns/{name}"))
    finally:
        for command in (f"ip link delete {name}", f"ip netns delete {name}"):
            with suppress(LinkUnavailable):
                _run(command)


def _run(command: str) -> None:
    try:
        done = subprocess.run(command.split(), capture_output=True, text=True, timeout=COMMAND_S_MAX, check=False)
    except OSError as error:
        raise LinkUnavailable(f"{command}: {error.strerror}") from error
    if done.returncode:
        raise LinkUnavailable(f"{command}: {done.stderr.strip()}")
