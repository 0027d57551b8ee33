"""The cost of backup workers for a step with no slow worker: one request to the coordinator, and a durable record.

WORKERS workers, each with one logical rank, take steps on the small network of the digits, which compute almost
nothing; with one backup worker and without. They run in a yard inside this process, whose coordinator has no journal
and whose workers are threads, and in a yard of processes, over gRPC and with the journal on a disk. A pair is a seed.
Steps a second are those of the job, when the first worker has their values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

from claims import Found
from claims.backup import step_times_s
from claims.yard import Trained, Yard, yard
from harness.measuring.pairs import Figures, column, measure_pairs, ratios, significant, spread
from harness.measuring.report import Panel
from shardyard.config import configuration
from shardyard_launcher.yard.in_process import COORDINATOR, LocalYard
from shardyard_worker.job import connect as joined
from sides.shardyard.consistency import Worker

WORKERS = 4
BATCH = 4
EPOCHS = 6
LR = 0.05
SYNC: dict[str, object] = {
    "job.consistency.mode": "sync",
    "job.consistency.logical_ranks": WORKERS,
    "job.workers_expected": WORKERS,
}
SIDES: dict[str, dict[str, object]] = {"without": SYNC, "with": SYNC | {"job.consistency.backup_workers": 1}}
Train = Callable[[int, Mapping[str, object]], Trained]


def over_grpc(made: Yard, seed: int, settings: Mapping[str, object]) -> Trained:
    return made.train("digits", settings=settings, seed=seed, lr=LR, batch=BATCH, epochs=EPOCHS, drop_last=True)


@contextmanager
def inside() -> Iterator[Train]:
    """Trains in a yard inside this process, with a thread for each worker."""
    own = configuration.load(None, {}, {"yard.servers": 2, "log.level": "error"}).settings
    made = LocalYard(own)

    def connect(*, job: str, settings: Mapping[str, object]) -> Any:
        given = configuration.load(None, {}, {"job.name": job, **settings}).settings
        return joined.connect(given.model_copy(update={"coordinator": COORDINATOR}), network=made.network)

    def train(seed: int, settings: Mapping[str, object]) -> Trained:
        name = f"inside-{seed}-{'job.consistency.backup_workers' in settings}"

        def take_part(number: int) -> Mapping[str, Any]:
            worker = Worker(number, {}, connect)
            answer = worker.digits(name, seed, LR, BATCH, EPOCHS, settings, drop_last=True)
            worker.leave()
            return answer

        with ThreadPoolExecutor(WORKERS) as pool:
            return Trained(list(pool.map(take_part, range(WORKERS))), 0)

    try:
        yield train
    finally:
        made.close()


def rate(train: Train, seeds: Iterator[int], settings: Mapping[str, object]) -> Figures:
    times_s = step_times_s(train(next(seeds), settings))
    return {"steps_per_s": len(times_s) / sum(times_s)}


def compare(train: Train, seeds: Sequence[int]) -> dict[str, list[Figures]]:
    sides: dict[str, Callable[[], Figures]] = {
        name: partial(rate, train, iter(seeds), settings) for name, settings in SIDES.items()
    }
    return measure_pairs(sides, len(seeds))


def measure(seeds: Sequence[int]) -> Found:
    with inside() as train:
        raw = {f"in process, {name}": of for name, of in compare(train, seeds).items()}
    with yard(workers=WORKERS) as made:
        raw |= {f"gRPC, {name}": of for name, of in compare(partial(over_grpc, made), seeds).items()}
    for name, of in raw.items():
        rates = spread(column(of, "steps_per_s"))
        print(f"{name} a backup worker: {rates} steps/s, {significant(1e3 / rates.median):g} ms a step", flush=True)
    found = {
        f"backup_cost_{name}": ratios(raw[f"{where}, without"], raw[f"{where}, with"], "steps_per_s")
        for name, where in (("in_process", "in process"), ("grpc", "gRPC"))
    }
    bars = {f"shardyard {name}": column(of, "steps_per_s") for name, of in raw.items()}
    panel = Panel(f"{WORKERS} ranks, nobody slow, without and with a backup worker", "steps/s", bars=bars)
    return Found(raw, found, {"backup": [panel]})
