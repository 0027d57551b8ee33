"""Synchronous steps give the same bits, whichever workers compute their logical ranks and hold their partitions.

A small network learns the digits with SGD and momentum, in steps of RANKS logical ranks. The expected values, to the
last bit, come from one process without Shardyard: plain torch computes the ranks of a step one after the other, takes
the mean of their gradients in the order of the ranks, weighted by samples, and updates with elementary operations
(torch.optim.SGD rounds once where it multiplies and adds, which changes the last bit). They are compared with yards
inside this process, whose worker computes all ranks, and with yards of processes with 1, 2 and 4 workers; each with 1,
2 and 4 servers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F  # noqa: N812

from claims import Found
from claims.yard import yard
from harness.measuring.report import Panel
from harness.workloads import digits
from sides.shardyard.consistency import Worker

RANKS = 4
BATCH = 16
EPOCHS = 2
LR = 0.1
MOMENTUM = 0.9
COUNTS = (1, 2, 4)
"""Of servers, and of workers."""
SETTINGS: dict[str, object] = {
    "job.consistency.mode": "sync",
    "job.consistency.logical_ranks": RANKS,
    "job.partitions": 8,
    "job.block_bytes": 4096,
}
TRAINING = {"lr": LR, "momentum": MOMENTUM, "batch": BATCH, "epochs": EPOCHS, "shuffle": False}


def plain(seed: int) -> str:
    """The result of one process without Shardyard. `digits.split` shuffles, so samples are taken in their order."""
    images, labels = digits.load()
    learned, _ = digits.split(seed)
    model = digits.make_small_network(seed)
    parameters = list(model.parameters())
    velocities: list[torch.Tensor] = []
    for _ in range(EPOCHS):
        for step in learned.split(RANKS * BATCH):
            ranks = step.split(BATCH)
            means: list[torch.Tensor] = []
            for rank in ranks:
                loss = F.cross_entropy(model(images[rank]), labels[rank])
                parts = [gradient * (len(rank) / len(step)) for gradient in torch.autograd.grad(loss, parameters)]
                means = [mean + part for mean, part in zip(means, parts, strict=True)] if means else parts
            pairs = zip(velocities, means, strict=True)
            velocities = [MOMENTUM * velocity + mean for velocity, mean in pairs] if velocities else means
            with torch.no_grad():
                for parameter, velocity in zip(parameters, velocities, strict=True):
                    parameter.sub_(LR * velocity)
    return digits.digest_of(model)


def inside(seed: int, servers: int) -> str:
    """Trains in a yard inside this process."""
    worker = Worker(0, {"yard.servers": servers})
    found = worker.digits(f"bits-{servers}-{seed}", seed, settings=SETTINGS, **TRAINING)
    worker.leave()
    return str(found["digest"])


def over_grpc(seeds: Sequence[int], servers: int) -> dict[str, list[str]]:
    """By number of workers: the digests by seed. A digest is worker 0's, if all workers have the same."""
    found: dict[str, list[str]] = {}
    with yard(workers=max(COUNTS), servers=servers) as made:
        for workers in COUNTS:
            name = f"gRPC, {servers} servers, {workers} workers"
            found[name] = []
            for seed in seeds:
                trained = made.train("digits", workers=workers, settings=SETTINGS, seed=seed, **TRAINING)
                digests = {answer["digest"] for answer in trained.answers}
                found[name].append(digests.pop() if len(digests) == 1 else "the workers differ")
            print(f"{name}: {len(seeds)} seeds", flush=True)
    return found


def equal(wanted: Sequence[str], found: Mapping[str, Sequence[str]]) -> list[float]:
    """1 for each seed whose digests all are as expected, otherwise 0."""
    return [float(all(each[index] == digest for each in found.values())) for index, digest in enumerate(wanted)]


def measure(seeds: Sequence[int]) -> Found:
    wanted = [plain(seed) for seed in seeds]
    found = {f"in process, {servers} servers": [inside(seed, servers) for seed in seeds] for servers in COUNTS}
    for servers in COUNTS:
        found |= over_grpc(seeds, servers)
    shares = {
        f"shardyard {name}": [float(sum(a == b for a, b in zip(wanted, each, strict=True)))]
        for name, each in found.items()
    }
    for name, (number,) in shares.items():
        print(f"{name}: {number:.0f} of {len(seeds)} seeds have the bits of plain torch", flush=True)
    panel = Panel("the same bits as plain torch in one process", f"of {len(seeds)} seeds", bars=shares)
    return Found({"plain": wanted, **found}, {"sync_bits": equal(wanted, found)}, {"sync": [panel]})
