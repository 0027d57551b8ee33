"""Rows that a worker keeps for its next steps: what is read from the servers with them and without, and what it does
to the loss.

    make bench BENCH=cached_rows         (with options: ARGS="--pairs 1")

One worker and two servers in this process; batches of 256 times 8 ids, drawn by Zipf's law (exponent 1.1) from 200,000,
and a label that depends on them; a table of dim 32 and a linear layer. Each side learns from the same start on the same
batches. `read_mib` are the values that servers have sent, `loss` is that of the last fifth of the steps. A ratio is
what a side that keeps rows has read, or lost, over the one that keeps none. What is read depends on the seed alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

import shardyard as sy
from harness.measuring.pairs import Figures, column, measure_pairs, ratios
from harness.measuring.report import Panel, options_of, report
from shardyard.config import configuration
from shardyard.wire import methods
from shardyard.wire.v1 import parameter_server_pb2 as wire
from shardyard_launcher.yard.in_process import COORDINATOR, LocalYard
from shardyard_worker.job import connect as worker

BATCH, FEATURES, IDS, DIM = 256, 8, 200_000, 32
MIB = 1 << 20
KEPT_BYTES = 64 * MIB
ASK_MS = 5_000
SETTINGS = {"yard.servers": 2, "job.partitions": 8, "job.checkpoint.url": "never", "log.level": "error"}


@dataclass(frozen=True)
class Side:
    """`steps`: for which rows are kept; 0: none are. `own`: worker.cached_rows_own."""

    optimizer: str
    steps: int = 0
    own: str = "included"

    @property
    def settings(self) -> dict[str, object]:
        if not self.steps:
            return {}
        return {
            "worker.cached_rows_bytes": KEPT_BYTES,
            "worker.cached_rows_steps": self.steps,
            "worker.cached_rows_own": self.own,
        }

    @property
    def rule(self) -> sy.tables.SGD | sy.tables.Adagrad:
        return sy.tables.SGD(lr=2.0) if self.optimizer == "sgd" else sy.tables.Adagrad(lr=0.05)


SIDES = {
    "adagrad": Side("adagrad"),
    "adagrad_included_4": Side("adagrad", 4),
    "adagrad_lacking_4": Side("adagrad", 4, "lacking"),
    "adagrad_lacking_10": Side("adagrad", 10, "lacking"),
    "sgd": Side("sgd"),
    "sgd_included_4": Side("sgd", 4),
}
"""Each is held against the one of its optimizer that keeps nothing."""


def drawn(steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids, shape (steps, BATCH, FEATURES), int64, and labels of 0 or 1, shape (steps, BATCH), float32."""
    rng = np.random.default_rng(7)
    chances = 1 / np.arange(1, IDS + 1) ** 1.1
    ranks = rng.choice(IDS, (steps, BATCH, FEATURES), p=chances / chances.sum())
    ids = rng.permutation(IDS)[ranks]
    weights = rng.standard_normal(IDS)
    likely = 1 / (1 + np.exp(-weights[ids].sum(2) / 2))
    return torch.from_numpy(ids), torch.from_numpy((likely > rng.random((steps, BATCH))).astype(np.float32))


@contextmanager
def yard(side: Side) -> Iterator[tuple[sy.Job, Callable[[], int]]]:
    """Yields a job, and a function that returns the bytes that its servers have sent."""
    settings = configuration.load(None, {}, SETTINGS | side.settings).settings
    made = LocalYard(settings)

    def sent() -> int:
        addresses = [f"in-process:server-{index}" for index in range(settings.yard.servers)]
        peers = [made.network.connect(address, name=address) for address in addresses]
        asked = wire.DescribeServerRequest()
        return sum(each.call(methods.DESCRIBE_SERVER, asked, timeout_ms=ASK_MS).bytes_sent for each in peers)

    try:
        given = settings.model_copy(update={"coordinator": COORDINATOR})
        with worker.connect(given, network=made.network) as job:
            yield job, sent
    finally:
        made.close()


def measure(side: Side, ids: torch.Tensor, labels: torch.Tensor) -> Figures:
    with yard(side) as (job, sent):
        torch.manual_seed(0)
        bag = sy.EmbeddingBag(DIM, "sum", optimizer=side.rule, initial=sy.tables.normal(0.01))
        top = torch.nn.Linear(DIM, 1)
        _, optimizer = job.prepare(torch.nn.ModuleList([bag, top]), torch.optim.SGD(top.parameters(), lr=0.1))
        losses, before, begun_s = [], sent(), time.process_time()
        for each, wanted in zip(ids, labels, strict=True):
            loss = torch.nn.functional.binary_cross_entropy_with_logits(top(bag(each)).squeeze(1), wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        cpu_s = time.process_time() - begun_s
        last = losses[-max(1, len(losses) // 5) :]
        return {"read_mib": (sent() - before) / MIB, "loss": sum(last) / len(last), "cpu_s": cpu_s}


def main() -> None:
    parser = options_of(__doc__, pairs=3)
    parser.add_argument("--steps", type=int, default=100, help="of each side (100)")
    given = parser.parse_args()
    torch.set_num_threads(1)
    ids, labels = drawn(given.steps)
    sides: dict[str, Callable[[], Figures]] = {
        name: partial(measure, side, ids, labels) for name, side in SIDES.items()
    }
    raw = measure_pairs(sides, given.pairs)
    found = {
        f"{name}_{figure}": ratios(raw[name], raw[side.optimizer], f"{figure}{unit}")
        for name, side in SIDES.items()
        for figure, unit in (("read", "_mib"), ("loss", ""), ("cpu", "_s"))
        if side.steps
    }
    columns = {figure: {name: column(each, figure) for name, each in raw.items()} for figure in ("read_mib", "loss")}
    panels = [Panel("values that servers have sent", "MiB", columns["read_mib"])]
    panels.append(Panel("loss at the end", "", columns["loss"]))
    report("cached_rows", raw, found, panels=panels, folder=given.figures)


if __name__ == "__main__":
    main()
