"""Replicas on two machines, two on each, against DistributedDataParallel over gloo: steps a second of all four.

Part of `strategies`. The second machine is a network namespace with a host name of its own, behind a link of MBIT_S in
both directions, and workers share memory with those of their own machine only. Checked as in `training`, within what
fp16 changes if gradients are sent so. Needs root.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

from exchange.training import PEERS, Trainers
from harness.machine.link import INSIDE, Link, link
from harness.measuring.pairs import Figures, measure_pairs
from harness.processes.sides import peer_side, shardyard_side

OURS = "multi_worker_mirrored"
WORKERS = 4
MBIT_S = 1_000
MACHINES = ("first", "second")
FP16_EPS = 2.0**-10


def run(task: str, pairs: int, seconds: float, same_host: str, all_reduce: str = "whole") -> dict[str, list[Figures]]:
    """`all_reduce`: whole or fp16. Raises NumbersDiffer, LinkUnavailable."""
    peer, program, _, arguments = PEERS[task, "sync"]
    is_narrow = all_reduce != "whole"
    arguments = [*arguments, *(["--hook", all_reduce] if is_narrow else [])]
    with link(MBIT_S, segments=False) as made, ExitStack() as stack:
        settings = {"job.strategy": OURS, "worker.same_host": same_host, "job.all_reduce": all_reduce}
        both = {
            peer: peer_side(program, "--task", task, *arguments, workers=WORKERS, servers=0, prefixes=_prefixes(made)),
            OURS: shardyard_side(
                *("shardyard.training", "--task", task, "--machines", *MACHINES),
                workers=WORKERS,
                settings=settings,
                bind=made.address,
                prefixes=_prefixes(made),
            ),
        }
        sent, lossy = (f" in {all_reduce}", FP16_EPS) if is_narrow else ("", 0.0)
        trainers = {
            f"{name}, sync, machines {task}{sent}": Trainers(stack.enter_context(side), task, "sync", name, lossy)
            for name, side in both.items()
        }
        results = measure_pairs({name: partial(each.measure, seconds) for name, each in trainers.items()}, pairs)
        for each in trainers.values():
            each.check_falls()
        return results


def _prefixes(made: Link) -> Sequence[Sequence[str]]:
    """What each worker is started behind."""
    interface = "env", f"GLOO_SOCKET_IFNAME={made.interface}"
    rename = f'echo {MACHINES[1]} > /proc/sys/kernel/hostname; exec "$@"'
    there = *made.prefix, "unshare", "--uts", "sh", "-c", rename, "-", "env", f"GLOO_SOCKET_IFNAME={INSIDE}"
    return (interface, interface, there, there)
