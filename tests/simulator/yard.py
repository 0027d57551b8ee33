"""One run of the simulator: a seed makes a yard, which trains while faults happen. Then no more faults happen, the job
must end in time, and the result is judged.

The processes are those that ship: `serve` of the coordinator and of the server, and a training script over
`shardyard.connect`'s job. gRPC's network and listener are replaced by simulated ones. A process that dies is started
again at its place, as the launcher and the agents do.

How a result is judged:

- Asynchronous jobs. SGD has rate 1, and each sample of each epoch owns a coordinate in every partition, to which its
  batch adds 1. A lost or doubled push shows as a whole number.
- Synchronous jobs. The gradient depends on every bit of all values, so the last bits must equal those of a run without
  faults.
- Rows of tables: as values, in the same pushes. Where a synchronous job updates rows as they come (hybrid), rows count,
  and nothing depends on them. A look-up of rows that count never finds one that has counted twice.
- A server counts nothing from a process that it was told to refuse, or under a token that was overtaken.
- What took effect by a log is what its successors read of the log.
- The checkpoint of the end is undamaged, and has the same values.
- There is no error, except those that people see when peers die.
- No worker gets values beyond the bound on staleness.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import logging
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import greenlet
import numpy as np
import torch
from torch.utils.data import TensorDataset

from shardyard.checkpoints.library import CheckpointLibrary
from shardyard.config.settings import (
    CheckpointSettings,
    ClipSettings,
    ConsistencySettings,
    DataSettings,
    JobSettings,
    MembershipSettings,
    Settings,
    WorkerSettings,
    YardSettings,
)
from shardyard.domain import errors
from shardyard.domain.consistency import NO_CLIPPING, Clipping, ConsistencyMode, Durability
from shardyard.domain.ids import Generation, Incarnation, JobId, Token
from shardyard.domain.orders import order
from shardyard.domain.push_names import DataShardSource, PushName
from shardyard.domain.pushes import Outcome
from shardyard.storage.storage import LocalStorage
from shardyard.wire import methods
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_coordinator.service import process as coordinator_process
from shardyard_coordinator.service.journal import Journal
from shardyard_ps_server.hosting import orders, pushes
from shardyard_ps_server.hosting.store import Store
from shardyard_ps_server.partition.ledger import Ledger
from shardyard_ps_server.service import process as server_process
from shardyard_ps_server.wal.records import Mark, decode_mark
from shardyard_ps_server.wal.segments import END, LogFiles
from shardyard_ps_server.wal.wal import Wal
from shardyard_worker.job import connect as worker_job
from shardyard_worker.training.variables import StepInput

from .disk import Disk, SimulatedOs
from .network import SimulatedNetwork, Weather, Wires
from .paces import Paces, watch_paces
from .parallel import SHM, folder_name
from .rows import ALL, SHARED, SHARED_COUNTED, Lives, Rows, counted, spread
from .rows import NAME as ROWS
from .substitutes import Event, installed
from .world import EPOCH_S, MS, SECOND, Process, Stuck, Task, World, current

COORDINATOR = "coordinator:7000"
JOB = "simulated"
PATIENCE = 90 * SECOND
"""How long a yard in which nothing fails any more may take to end."""
STARTS_MAX = 60
ROWS_IN_MEMORY = 2
"""Rows of each table that servers keep in memory if they have no memory for rows. A table has a few dozen rows."""
TO_STEPS = -1
SWITCH_TRIES = 20
STOP_CHANCE = 0.1
"""That a worker stops the job after a batch, in jobs that are to be stopped."""
BACKUP_CHANCE = 0.25
"""That a synchronous job has backup workers, if the seed decides everything."""
CLIP_CHANCE = 0.4
"""That a kind of synchronous work clips by norm."""
SYNC_WORKS = 16
"""Kinds of synchronous work. Each kind is done once without faults, for comparison."""
WRONGS = ("nan", "overflow")
SYNC_ELEMENTS = 5
"""Elements of each variable of a synchronous job."""

EXPECTED = (
    errors.Unavailable,
    errors.StaleIncarnation,
    errors.CoordinatorLost,
    errors.ServerLost,
    errors.NotReady,
)
"""Errors by which a process may end while other processes die."""


@dataclass(frozen=True)
class Plan:
    """What a seed decides in advance."""

    seed: int
    mode: str
    durability: str
    servers: int
    workers: int
    partitions: int
    ranks: int
    samples: int
    batch: int
    epochs: int
    feeds: int
    per_shard: int
    optimizer: str
    window: int
    every_s: int
    compute: int
    """The longest time of a batch, in microseconds."""
    drops: bool
    calm_at: int
    faults: tuple[tuple[int, str], ...]
    weather: Weather
    preempt: float
    staleness: int | None
    """The staleness bound of a bounded job; None: no bound."""
    stops: bool
    """Whether workers stop the job after some batch."""
    clipping: Clipping
    """For synchronous jobs. With a norm, each step waits for a verdict."""
    wrong: str = ""
    """What is wrong with the gradients of some batches: "nan", or "overflow" under loss scaling."""
    backups: int = 0
    """For synchronous jobs: how many ranks a step may leave out. The bits depend on which ranks were late, so samples
    are counted instead."""
    switches: tuple[tuple[int, int | None], ...] = ()
    """When a person switches the job, and to which staleness bound. None: asynchronous; TO_STEPS: synchronous."""
    lag: int = 0
    """How much longer than the others the first worker takes for a batch, at most, in microseconds."""
    rows: str = ""
    """The optimizer of the job's table, if it has one (rows.OPTIMIZERS)."""
    lives: Lives = ALL
    """Which ids have a row."""
    shares_rows: bool = False
    """For asynchronous jobs: samples share rows, and each push has one sample."""
    cold: bool = False
    """Whether servers have no memory for rows, so that all rows go to files."""
    hybrid: bool = False
    """For synchronous jobs: rows are updated as they come."""
    looks_ahead: bool = False
    """Whether the script announces which rows it will look up."""

    @property
    def counts(self) -> bool:
        """Whether values say how often each sample of each epoch has counted."""
        return self.mode == "async" or bool(self.backups) or bool(self.switches)

    @property
    def takes_steps(self) -> bool:
        """Whether the job switches to synchronous updates at some time."""
        return any(target == TO_STEPS for _, target in self.switches)

    @property
    def rows_count(self) -> bool:
        """Whether rows say how often each sample of each epoch has counted."""
        return bool(self.rows) and (self.counts or self.hybrid)

    @property
    def coordinates(self) -> int:
        """One for each sample of each epoch."""
        return self.samples * self.epochs * self.feeds

    @property
    def row_coordinates(self) -> int:
        """The coordinates that have rows. The last one counts all pushes of a hybrid job."""
        return self.coordinates + 1

    @property
    def undisturbed(self) -> Plan:
        """The same work with one worker, one server and no faults."""
        return replace(
            self,
            seed=0,
            durability="checkpoint",
            servers=1,
            workers=1,
            every_s=3_600,
            compute=0,
            calm_at=0,
            faults=(),
            weather=Weather(),
            preempt=0.0,
            window=0,
            per_shard=1,
            staleness=None,
            stops=False,
            switches=(),
            lag=0,
            looks_ahead=False,
            cold=False,
        )


FAULTS = (
    ("kill worker", 4),
    ("kill server", 4),
    ("kill coordinator", 4),
    ("freeze worker", 3),
    ("freeze server", 3),
    ("freeze coordinator", 2),
    ("dead link", 4),
    ("bad disk", 2),
    ("power failure", 1),
)


def make_plan(seed: int, kind: str = "") -> Plan:
    """`kind`: words joined by "-"; what it does not say, the seed decides. Tables, switches and laggards are only there
    if `kind` says so.

    - "async", "bounded", "sync" or "hybrid", then "wal" or "checkpoint"; or "coordinator": only the coordinator dies.
    - "stop": workers stop the job. "nan", "overflow": Plan.wrong.
    - "rows": the job has a table; hybrid jobs always do. "cold": servers have no memory for rows. "lives", for
      asynchronous jobs: ids get their rows late or lose them, and some servers are cold.
    - "clip", after "sync": the job clips by norm. "backup": it has backup workers.
    - "switch": a person switches the job; a synchronous one to asynchronous updates first. "over": back and forth
      between synchronous and asynchronous updates.
    - "lag", after "async" or "bounded": one worker is far slower than the others, and a server is killed.
    """
    rng = random.Random(f"plan {seed}")
    mode, durability = rng.choice(("async", "sync")), rng.choice(("checkpoint", "checkpoint", "wal"))
    words = kind.split("-")
    others = ("stop", "clip", "backup", "switch", "over", "lag", "rows", "lives", "cold", *WRONGS)
    given = [word for word in words if word not in others] or [""]
    mode, durability = given[0] or mode, given[1] if len(given) > 1 else durability
    lonely = mode == "coordinator"  # only the coordinator dies
    bounded, hybrid = mode == "bounded", mode == "hybrid"
    mode = "async" if lonely or bounded else "sync" if hybrid else mode
    weather = Weather(
        lost=rng.choice((0.0, 0.0, 0.003, 0.01, 0.03)),
        slow=rng.choice((0.0, 0.01, 0.05)),
        twice=rng.choice((0.0, 0.02, 0.1)),
        slow_max=rng.choice((20 * MS, 300 * MS, 3 * SECOND)),
    )
    names, weights = [name for name, _ in FAULTS], [weight for _, weight in FAULTS]
    span = rng.choice((3 * SECOND, 8 * SECOND))
    kinds = rng.choices(names, weights, k=rng.choice((1, 2, 3, 4, 6)))
    if rng.random() < 0.15 or lonely:
        kinds = [kinds[0] if not lonely else "kill coordinator"] * len(kinds)
        weather = Weather()
    faults = sorted((rng.randrange(span), kind) for kind in kinds)
    work = random.Random(f"work {seed % SYNC_WORKS}")
    sync = mode == "sync"
    clip = random.Random(f"clip {seed % SYNC_WORKS}")
    clips = sync and not hybrid and (clip.random() < CLIP_CHANCE or "clip" in kind.split("-"))
    clipping = Clipping(clip.choice((0.5, 2.0, 3.0)), clip.choice((0.0, 0.0, 0.7)))
    plan = Plan(
        seed=seed,
        mode=mode,
        durability=durability,
        servers=rng.choice((1, 2, 2, 3)),
        workers=rng.choice((1, 2, 2, 3)),
        partitions=work.choice((2, 3, 4)) if sync else rng.choice((2, 3, 4)),
        ranks=work.choice((1, 2, 3)),
        samples=work.choice((12, 19)) if sync else rng.choice((12, 18, 30)),
        batch=2 if sync else rng.choice((1, 2)),
        epochs=work.choice((1, 2)) if sync else rng.choice((1, 2)),
        feeds=work.choice((1, 1, 2)) if sync else rng.choice((1, 1, 2)),
        per_shard=rng.choice((2, 3, 5)),
        optimizer=work.choice(("adam", "momentum", "sgd")) if sync else "sgd",
        window=0 if sync else rng.choice((0, 0, 1)),
        every_s=rng.choice((1, 1, 2, 5)),
        compute=rng.choice((50 * MS, 300 * MS, 1 * SECOND)),
        drops=not sync and rng.random() < 0.3,
        calm_at=span + rng.randrange(4 * SECOND),
        faults=tuple(faults),
        weather=weather,
        preempt=rng.choice((0.0, 0.02, 0.1)),
        staleness=None,
        stops="stop" in words,
        clipping=clipping if clips else NO_CLIPPING,
    )
    late = random.Random(f"backup {seed}")
    if sync and ("backup" in words or (not kind and late.random() < BACKUP_CHANCE)):
        ranks = late.choice((2, 3, 3, 4))
        clipping = clipping if late.random() < 0.3 and clips else NO_CLIPPING
        plan = replace(plan, ranks=ranks, backups=late.randrange(1, ranks), clipping=clipping, optimizer="lion")
        return replace(plan, rows="signs" if "rows" in words else "")
    wrong = random.Random(f"wrong {seed % SYNC_WORKS if sync else seed}").choice(("", "", "", *WRONGS))
    plan = replace(plan, wrong=next((word for word in words if word in WRONGS), "" if plan.drops else wrong))
    if bounded or (not sync and not kind and rng.random() < 0.25):
        plan = replace(plan, staleness=max(plan.window, rng.choice((0, 1, 3))))
    if hybrid or "rows" in words:
        plan = replace(_with_rows(plan, hybrid=hybrid), cold="cold" in words)
    if "lives" in words:
        plan = _with_lives(plan)
    if "lag" in words:
        plan = _with_laggard(plan)
    if "over" in words:
        return _with_steps(plan)
    if "switch" in words:
        switching = random.Random(f"switch {seed}")
        times = sorted(switching.randrange(plan.calm_at) for _ in range(switching.choice((1, 2, 3, 4))))
        if sync:
            plan = replace(plan, optimizer="lion", clipping=NO_CLIPPING, wrong="")
        return replace(plan, switches=tuple((at, switching.choice((None, 0, 1, 3))) for at in times))
    return plan


def _with_steps(plan: Plan) -> Plan:
    rng = random.Random(f"over {plan.seed}")
    times = sorted(rng.randrange(plan.calm_at) for _ in range(rng.choice((1, 2, 4, 6))))
    first = TO_STEPS if plan.mode == "async" else rng.choice((None, 0, 1))
    targets = [first, *(rng.choice((None, 0, 3, TO_STEPS, TO_STEPS, TO_STEPS)) for _ in times[1:])]
    return replace(
        plan,
        optimizer="lion",
        clipping=NO_CLIPPING,
        wrong="",
        drops=False,
        batch=rng.choice((1, 2)),
        switches=tuple(zip(times, targets, strict=True)),
    )


def _with_rows(plan: Plan, *, hybrid: bool) -> Plan:
    rng, work = random.Random(f"rows {plan.seed}"), random.Random(f"rows {plan.seed % SYNC_WORKS}")
    rng.choice((0, 1, 2))  # keeps the plans of seeds as they are; its result is not used
    looks_ahead = rng.random() < 0.6
    if plan.mode == "sync" and not hybrid:
        age = random.Random(f"age {plan.seed % SYNC_WORKS}").choice((0, 1, 2))
        return replace(plan, rows=work.choice(("sgd", "adagrad", "adam")), lives=Lives(age))
    return replace(plan, rows="sgd", hybrid=hybrid, looks_ahead=looks_ahead)


def _with_lives(plan: Plan) -> Plan:
    rng = random.Random(f"lives {plan.seed}")
    lives = rng.choice(
        (
            Lives(admitted=rng.choice((2, 3)), estimated=rng.random() < 0.5),
            Lives(admitted=rng.choice((2, 3))),
            Lives(age=rng.choice((1, 4))),
            Lives(age=rng.choice((2, 6)), admitted=2),
        )
    )
    cold = plan.cold or rng.random() < 0.5
    return replace(plan, lives=lives, shares_rows=True, cold=cold, batch=1, drops=False, wrong="")


def _with_laggard(plan: Plan) -> Plan:
    """A plan in which the job would continue without its slowest worker, if only the killed server knew that worker."""
    rng = random.Random(f"lag {plan.seed}")
    return replace(
        plan,
        servers=rng.choice((1, 1, 2)),
        workers=rng.choice((2, 2, 3)),
        samples=30,
        epochs=1,
        feeds=1,
        compute=50 * MS,
        lag=rng.choice((2, 4)) * SECOND,
        faults=tuple(sorted((*plan.faults, (rng.randrange(plan.calm_at), "kill server")))),
    )


@dataclass
class Ending:
    """How a run ended. `violations`: which rules were broken."""

    plan: Plan
    violations: list[str] = field(default_factory=list)
    digest: int = 0
    virtual_s: float = 0.0
    switches: int = 0
    calls: int = 0
    starts: int = 0
    values: dict[str, bytes] = field(default_factory=dict)
    versions: dict[int, dict[str, bytes]] = field(default_factory=dict)
    """For synchronous jobs: the values at each step that was computed."""
    pushes: dict[int, int] = field(default_factory=dict)
    """Yard.pushes."""
    standing: str = ""
    happened: list[str] = field(default_factory=list)

    @property
    def red(self) -> bool:
        return bool(self.violations)


class Yard:
    def __init__(self, plan: Plan, folder: Path, trace: Callable[[str], None] | None = None) -> None:
        self.plan = plan
        self.world = World(plan.seed, preempt=plan.preempt, trace=trace)
        self.wires = Wires(self.world)
        self.world.unnoted = str(folder).encode()
        self.wires.weather = plan.weather
        self.state = folder / "state"
        self.disk = Disk(self.world, folder / "disk")
        self.checkpoints = self.disk.root / "checkpoints"
        self.places: dict[str, Process] = {}
        self.starts = 0
        self.finished: dict[str, dict[str, bytes]] = {}
        self.happened: list[str] = []
        self.unfinished: dict[object, None] = {}
        """Jobs that began and have not ended."""
        self.jobs_finished = 0
        self._goodbyes = 0
        self.versions: dict[int, dict[str, bytes]] = {}
        self.pushes: dict[int, int] = {}
        """For hybrid jobs, by step: the least number of pushes in the rows on which the step was computed."""
        self.pushes_before: dict[int, int] = {}
        """By step: how many pushes the steps before it have."""
        self.left_out: dict[object, set[int]] = {}
        """By run of the job: the coordinates whose batches the coordinator has put into quarantine."""
        self.stops: dict[object, int | None] = {}
        """By run of the job: the step before which it stops."""
        self.has_checkpoint = False
        """Whether a checkpoint was ever committed."""
        self.paces = Paces(self.world.violations.append)
        self.effective: dict[Path, Mark] = {}
        """By the folder of a log: the end of the last record that has taken effect."""
        self._mains: dict[str, Callable[[], None]] = {"coordinator": self._coordinator}
        for index in range(plan.servers):
            self._mains[f"server-{index}"] = functools.partial(self._server, f"server-{index}:7000")
        for index in range(plan.workers):
            self._mains[f"worker-{index}"] = self._worker
        self._person: Process | None = None
        self.settings = self._settings()

    def _settings(self) -> Settings:
        plan = self.plan
        sync = plan.mode == "sync"
        return Settings(
            coordinator=COORDINATOR,
            yard=YardSettings(
                wal=str(self.disk.root / "wal"),
                memory_bytes_max=int(plan.cold),
                cold=str(self.disk.root.parent / "cold"),
            ),
            job=JobSettings(
                name=JOB,
                durability=Durability(plan.durability),
                seed=7,
                partitions=plan.partitions,
                consistency=ConsistencySettings(
                    mode=self._mode(),
                    logical_ranks=plan.ranks if sync or plan.takes_steps else "auto",
                    staleness=plan.staleness or 0,
                    backup_workers=plan.backups,
                ),
                clip=ClipSettings(norm=plan.clipping.norm, value=plan.clipping.value),
                workers_expected=plan.workers,
                rank_grace_ms=500,
                idle_ms=15_000,
                data=DataSettings(batches_per_data_shard=plan.per_shard, poison_deaths=0),
                nonfinite_max=0,
                checkpoint=CheckpointSettings(url=str(self.checkpoints), every_s=plan.every_s, keep=2),
            ),
            worker=WorkerSettings(
                device="cpu",
                threads=0,
                same_host="never",
                rpc_deadline_ms=1_500,
                retry_budget_ms=8_000,
                exchange="delayed" if plan.window else "blocking",
            ),
            membership=MembershipSettings(heartbeat_ms=400, lease_ms=2_000, coordinator_grace_ms=20_000),
        )

    def _mode(self) -> ConsistencyMode:
        if self.plan.hybrid:
            return ConsistencyMode.HYBRID
        return ConsistencyMode(self.plan.mode if self.plan.staleness is None else "bounded")

    # ---- processes

    def start(self, place: str) -> None:
        process = self.world.process(place)
        self.places[place] = process
        self.starts += 1
        if self.starts > STARTS_MAX:
            self.world.violations.append(f"processes were started {self.starts} times")
        process.spawn(functools.partial(self._main, process, place), "main")
        self.world.say(f"{process} starts")
        process.at_end[functools.partial(self._ended, process, place)] = None

    def _main(self, process: Process, place: str) -> None:
        how = "exited"
        try:
            self._mains[place]()
        except EXPECTED as error:
            how = f"failed: {error.code}: {error.what}"
        except errors.StorageUnavailable as error:
            how = f"failed: {error.code}: {error.what}"
            if not self.disk.has_refused:
                self.world.violations.append(f"{process} ended by {how}")
        except errors.ShardyardError as error:
            how = f"failed: {error.code}: {error.what}"
            self.world.violations.append(f"{process} ended by {how}")
        process.kill(how)
        self.world.park()

    def _ended(self, process: Process, place: str) -> None:
        self.world.say(f"{process} has ended: {process.exit}")
        if place in self.finished or (place.startswith("worker") and self.jobs_finished):
            return
        wait = self.world.rng.randrange(50 * MS, 1_500 * MS)
        self.world.call(wait, lambda: self.start(place) if self.places[place] is process else None)

    def _coordinator(self) -> None:
        stop = Event()
        coordinator_process.serve(
            bind=COORDINATOR,
            advertise=None,
            settings=self.settings,
            state=self.state,
            stop=stop,  # type: ignore[arg-type]
            ready=lambda _: None,
        )

    def _server(self, address: str) -> None:
        server_process.serve(
            coordinator=COORDINATOR,
            bind=address,
            advertise=None,
            settings=self.settings,
            stop=Event(),  # type: ignore[arg-type]
            ready=lambda _: None,
        )

    def _worker(self) -> None:
        plan = self.plan
        names = [f"v{p}" for p in range(plan.partitions)]
        size = plan.coordinates if plan.counts else SYNC_ELEMENTS
        with worker_job.connect(self.settings) as job:
            firsts = torch.zeros(size, dtype=torch.float64)
            rows = Rows(plan.rows, plan.row_coordinates, plan.partitions, plan.lives) if plan.rows else None
            if rows is not None:  # job.prepare does this for the tables of a model
                job._loop.begin = functools.partial(job._loop.begin, tables=rows.tables)  # type: ignore[method-assign]
            job.register(dict.fromkeys(names, firsts), **self._optimizer())
            dataset = TensorDataset(torch.arange(plan.samples))
            ahead = functools.partial(self._ahead, rows) if rows is not None and plan.looks_ahead else None
            for _ in range(plan.feeds):
                batches = job.batches(dataset, batch_size=plan.batch, epochs=plan.epochs, look_ahead=ahead)
                # otherwise a loop that ends by an error is closed when its traceback is collected
                with contextlib.closing(batches):
                    if plan.mode == "async" and not plan.takes_steps:
                        self._train_async(job, names, size, rows, batches)
                    elif plan.counts:
                        self._train_counting(job, names, size, rows, batches)
                    else:
                        self._train_sync(job, names, rows, batches)
            values = {name: value.numpy().tobytes() for name, value in job.pull().items()}
            if rows is not None:
                values[ROWS] = rows.everything()
            self.finished[current().process.host] = values
            self.world.say(f"{current().process} has finished")

    def _optimizer(self) -> dict[str, Any]:
        match self.plan.optimizer:
            case "momentum":
                return {"optimizer": "sgd", "lr": 0.1, "momentum": 0.5}
            case "adam":
                return {"optimizer": "adam", "lr": 0.1}
            case "lion":  # each step adds 1 where a sample counts, whatever its share of the mean
                return {"optimizer": "lion", "lr": 1.0, "beta1": 0.0, "beta2": 0.0}
            case _ if self.plan.mode == "sync":
                return {"optimizer": "sgd", "lr": 0.1}
        return {"optimizer": "sgd", "lr": 1.0}

    def _ahead(self, rows: Rows, batch: Any) -> dict[torch.nn.Module, torch.Tensor]:
        """The rows of a later batch. Its epoch is not known, so the rows of all epochs."""
        (chosen,), plan = batch, self.plan
        places = torch.arange(0, plan.coordinates, plan.samples)
        ids = self._row_ids(rows, (chosen[:, None] + places).flatten())
        return rows.announced(np.concatenate([ids, rows.last]) if plan.hybrid else ids)

    def _row_ids(self, rows: Rows, coordinates: torch.Tensor) -> Any:
        """The ids that the samples at these coordinates look up, if rows count."""
        if self.plan.shares_rows:
            return np.concatenate([rows.ids(coordinates % SHARED_COUNTED), rows.last])
        return rows.ids(coordinates)

    def _count_in_rows(self, rows: Rows, coordinates: torch.Tensor) -> None:
        ids = self._row_ids(rows, coordinates)
        self._check_counts(rows.look_up(ids))
        rows.add(ids, -1.0)

    def _check_counts(self, found: Any) -> None:
        """Checks that no row has counted twice."""
        most = self.plan.coordinates if self.plan.shares_rows else 1
        if not np.isin(found, np.arange(most + 1)).all():
            self.world.violations.append(f"{current().process} has looked up {found.tolist()}")

    def _judge_pushes(self, step: int, pushes: int) -> None:
        """Checks a step of a hybrid job that has counted. `pushes`: how many pushes are in the rows on which it was
        computed, in the partition that has fewest. All pushes of the steps before must be there."""
        least = self.pushes_before.get(step, 0)
        if pushes < least:
            self.world.violations.append(
                f"{current().process} has computed step {step} on rows with {pushes} pushes, and not {least}"
            )

    def _train_async(self, job: Any, names: list[str], size: int, rows: Rows | None, batches: Iterable[Any]) -> None:
        plan, world = self.plan, self.world
        gradient = torch.zeros(size, dtype=torch.float64)
        for (chosen,) in batches:
            name = job._loop.feed.work.name
            source = name.key.source
            coordinates = chosen + self._place(source.feed, source.epoch)
            if name.first == name.last:
                gradient = torch.zeros(size, dtype=torch.float64)
            gradient[coordinates] -= 1.0
            if rows is not None:
                if name.first == name.last:
                    rows.clear()
                self._count_in_rows(rows, coordinates)
            if plan.wrong == "nan" and self._is_wrong(source, name.last):
                gradient[chosen[0]] = float("nan")
            if plan.compute:
                world.pause(world.rng.randrange(plan.compute))
            if plan.lag and current().process.host == "worker-0":
                world.pause(world.rng.randrange(plan.lag))
            batches_there = self._batches_of(source)
            left = batches_there - 1 - name.last
            dropped = self._drops(source)
            if left == 0 and dropped:
                continue
            overflows = plan.wrong == "overflow" and name.first == name.last and self._is_wrong(source, name.last)
            # what is accumulated before a data shard's last batch does not count if that batch is in quarantine,
            # even if only because of the batch before it
            alone = overflows or (plan.wrong == "overflow" and self._is_wrong(source, name.last + 1))
            if plan.wrong == "nan" and left == 1:
                alone = self._is_wrong(source, name.last) or self._is_wrong(source, name.last + 1)
            alone = alone or plan.shares_rows
            if left == 0 or (left == 1 and dropped) or alone or world.rng.random() > 0.2:
                self._push(job, dict.fromkeys(names, gradient), rows, overflow=overflows)
                gradient = torch.zeros(size, dtype=torch.float64)
            self._stop_by_chance(job)

    def _train_sync(self, job: Any, names: list[str], rows: Rows | None, batches: Iterable[Any]) -> None:
        world = self.world
        for (chosen,) in batches:
            coordinates = self._planned(job, chosen)
            # from torch's own generator, which the feed has seeded (rule B5). All simulated processes share it, so this
            # task draws before it pauses
            noise = {key: torch.randn(SYNC_ELEMENTS, dtype=torch.float64) for key in names}
            generation = job._loop.trainer.router.generation
            values = job.pull()
            self.versions[job.step] = {name: value.numpy().tobytes() for name, value in values.items()}
            total = float(torch.cat([values[key] for key in names]).sum()) + float(chosen.sum())
            step, pushes = job._loop.feed.work.name.first, None
            if rows is not None and self.plan.hybrid:
                pushes = self._count_pushes(rows, coordinates)
                self.pushes[step] = min(pushes, self.pushes.get(step, pushes))
            elif rows is not None:
                total += self._look_at_rows(rows, coordinates, total)
            sent = {key: torch.sin(total + values[key]) + noise[key] for key in names}
            if self.plan.compute:
                world.pause(world.rng.randrange(self.plan.compute))
            wrong = (job.step + int(chosen[0])) % 4 == 1 and self.plan.wrong
            if wrong == "nan":
                sent[names[-1]][0] = float("nan")
            self._push(job, sent, rows, overflow=wrong == "overflow")
            if (
                pushes is not None and job._loop.trainer.router.generation == generation
            ):  # otherwise the step may not have counted
                self._judge_pushes(step, pushes)
            self._stop_by_chance(job)

    def _count_pushes(self, rows: Rows, coordinates: torch.Tensor) -> int:
        """Looks rows up and adds gradients, where rows are updated as they come. Returns how many pushes the rows have,
        in the partition that has fewest."""
        rows.clear()
        ids = np.concatenate([rows.ids(coordinates), rows.last])
        found = rows.look_up(ids)
        self._check_counts(found[: -self.plan.partitions])
        rows.add(ids, float(-self.plan.ranks))
        return int(found[-self.plan.partitions :].min())

    def _look_at_rows(self, rows: Rows, coordinates: torch.Tensor, total: float) -> float:
        """Looks rows up and adds gradients. Returns a number on which the gradients of variables depend."""
        rows.clear()
        ids = rows.ids(coordinates % SHARED)
        found = rows.look_up(ids)
        rows.add(ids, np.sin(found + np.float32(total)))
        return float(found.sum(dtype=np.float64))

    def _planned(self, job: Any, chosen: torch.Tensor) -> torch.Tensor:
        """The coordinates of a batch, in a job that takes steps at some time. In a synchronous job a batch may make up
        for a dropped one."""
        feed, name = job._loop.feed, job._loop.feed.work.name
        if isinstance(name.key.source, DataShardSource):
            return chosen + self._place(feed._number, name.key.source.epoch)
        planned = feed._makeup.batch(name.key.source.rank, name.first)
        epoch, _, _ = feed._plan.span(planned.step, planned.rank)
        return chosen + self._place(feed._number, epoch)

    def _push(self, job: Any, gradients: dict[str, torch.Tensor], rows: Rows | None, *, overflow: bool) -> None:
        """Pushes gradients. Those of an overflow are sent, too, so that it shows if they count."""
        if rows is None and not overflow:
            job.push(gradients)
            return
        settings = job._loop.settings()
        sent = [gradients[variable.spec.name] for variable in job._loop.trainer.variables]
        taken = None if rows is None else rows.take()
        job._loop.contribute(StepInput(sent, 1.0, settings, overflow=overflow, rows=None if overflow else taken))

    def _is_wrong(self, source: DataShardSource, batch: int) -> bool:
        return (source.feed + source.epoch + source.index + batch) % 4 == 1 and batch < self._batches_of(source)

    def _train_counting(self, job: Any, names: list[str], size: int, rows: Rows | None, batches: Iterable[Any]) -> None:
        """Trains a job in which a sample always adds the same, whatever its share of a step."""
        world = self.world
        gradient = torch.zeros(size, dtype=torch.float64)
        for (chosen,) in batches:
            name = job._loop.feed.work.name
            coordinates = self._planned(job, chosen)
            if name.first == name.last:
                gradient = torch.zeros(size, dtype=torch.float64)
            gradient[coordinates] = -1.0
            if rows is not None:
                rows.clear()
                self._count_in_rows(rows, coordinates)
            if self.plan.compute:
                world.pause(world.rng.randrange(self.plan.compute))
            if self._accumulates(name):
                continue
            self._push(job, dict.fromkeys(names, gradient), rows, overflow=False)
            self._stop_by_chance(job)

    def _accumulates(self, name: PushName) -> bool:
        """Whether a batch of a data shard is pushed together with the next one. Partitions that go back then count
        another number of updates than the others."""
        source = name.key.source
        if not (self.plan.takes_steps and isinstance(source, DataShardSource)):
            return False
        return name.last < self._batches_of(source) - 1 and self.world.rng.random() < 0.3

    def _stop_by_chance(self, job: Any) -> None:
        if self.plan.stops and self.world.rng.random() < STOP_CHANCE:
            job.stop("by chance")

    def _batches_of(self, source: DataShardSource) -> int:
        total = -(-self.plan.samples // self.plan.batch)
        return min(self.plan.per_shard, total - source.index * self.plan.per_shard)

    def _place(self, feed: int, epoch: int) -> int:
        """The first coordinate of an epoch."""
        return (feed * self.plan.epochs + epoch) * self.plan.samples

    def _drops(self, source: DataShardSource) -> bool:
        return self.plan.drops and source.index % 3 == 1

    # ---- the person who switches the job

    def _switch(self) -> None:
        """A person on another machine asks for each switch, and asks again after each refusal, SWITCH_TRIES times."""
        network = SimulatedNetwork(self.wires, current().process)
        for at, bound in self.plan.switches:
            self.world.pause(max(0, at - self.world.now))
            if bound == TO_STEPS:
                request = wire.SwitchConsistencyRequest(job_name=JOB, mode=wire.CONSISTENCY_MODE_SYNC)
            else:
                mode = wire.CONSISTENCY_MODE_ASYNC if bound is None else wire.CONSISTENCY_MODE_BOUNDED
                request = wire.SwitchConsistencyRequest(job_name=JOB, mode=mode, staleness=bound)
            for _ in range(SWITCH_TRIES):
                peer = network.connect(COORDINATOR, name="coordinator", unavailable=errors.CoordinatorUnavailable)
                try:
                    peer.call(methods.SWITCH_CONSISTENCY, request, timeout_ms=1_000)
                    break
                except (*EXPECTED, errors.NotFound, errors.InvalidRequest) as error:
                    self.world.say(f"no switch to {bound} now: {error.what}")
                finally:
                    peer.close()
                self.world.pause(300 * MS)

    # ---- faults

    def schedule(self) -> None:
        if self.plan.switches:
            self._person = self.world.process("person-0")
            self._person.spawn(self._switch, "main")
        for at, kind in self.plan.faults:
            self.world.call(at, functools.partial(self._fault, kind))
        self.world.call(self.plan.calm_at, self._calm)

    def _fault(self, kind: str) -> None:
        world, rng = self.world, self.world.rng
        what, _, role = kind.partition(" ")
        alive = [p for p in self.places.values() if p.alive and p.host.startswith(role)]
        self.happened.append(kind)
        match what:
            case "kill" if alive:
                victim = rng.choice(alive)
                world.say(f"FAULT kill {victim}")
                victim.kill("killed")
            case "freeze" if alive:
                victim = rng.choice(alive)
                span = rng.choice((rng.randrange(600 * MS), rng.randrange(8 * SECOND)))
                world.say(f"FAULT freeze {victim} for {span / SECOND:.3f} s")
                victim.freeze()
                world.call(span, victim.thaw)
            case "dead":
                hosts = list(self._mains)
                one = rng.choice(hosts)
                ways = {(one, other) for other in hosts} | {(other, one) for other in hosts}
                if rng.random() < 0.5:
                    other = rng.choice([host for host in hosts if host != one])
                    ways = {(one, other)}
                world.say(f"FAULT dead links {sorted(ways)}")
                span = rng.randrange(4 * SECOND)
                for way in sorted(ways):
                    self.wires.kill_link(*way)
                    world.call(span, functools.partial(self.wires.mend_link, *way))
            case "bad":
                world.say("FAULT the disk refuses now and then")
                self.disk.refusing = rng.choice((0.05, 0.5))
                world.call(rng.randrange(4 * SECOND), functools.partial(setattr, self.disk, "refusing", 0.0))
            case "power":
                world.say("FAULT power failure")
                for process in [p for p in self.places.values() if p.alive]:
                    process.kill("power failure")
                self.disk.fail_power()

    def _calm(self) -> None:
        self.world.say("CALM")
        self.world.calm = True
        self.disk.refusing = 0.0
        for way in sorted(self.wires.dead_links):
            self.wires.mend_link(*way)
        for process in self.places.values():
            if process.alive and process.frozen:
                process.thaw()

    # ---- the end

    def done(self) -> bool:
        if self.world.violations:
            return True
        if not self.jobs_finished or self.unfinished:
            return False
        return all(not p.alive for place, p in self.places.items() if place.startswith("worker"))

    def note(self, kind: str, body: Any) -> None:
        """The coordinator has written this record."""
        if kind == "job_started":
            self.unfinished[body["job"]] = None
            self.stops[body["job"]] = None
            self.left_out[body["job"]] = set()
        elif kind == "batch_quarantined" and self.plan.mode == "async":
            source = DataShardSource(body["feed"], body["epoch"], body["index"])
            self.left_out[body["job"]].update(self._coordinates(source, body["sequence"]))
            self.happened.append("not finite")
        elif kind == "job_ended":
            self.unfinished.pop(body["job"], None)
            code = "" if body["failure"] is None else body["failure"]["code"]
            # the coordinator does not know that a script is done if its process was killed before it said goodbye
            unheard = code == "WorkerFailed" and bool(self.finished) and not self._goodbyes
            # a job has no checkpoint to go back to if the disk has refused all of them
            lost = code == "ServerLost" and not self.has_checkpoint and len(self.finished) == self.plan.workers
            if code == "ServerLost" and self.plan.durability == "wal" and not lost:
                self.world.violations.append(f"a job with logs ended by a server: {body['failure']['what']}")
            self.jobs_finished += body["state"] == "finished" or unheard or lost
        elif kind == "consistency_switched":
            self.paces.switched(JobId(body["job"]), body["number"])
            self.happened.append("switch")
        elif kind == "job_switched":
            self.paces.switched(JobId(body["job"]), body["number"])
            self.happened.append("went over to steps" if body["mode"] == "sync" else "went over")
        elif kind == "worker_switched":
            self.happened.append("gone over")
        elif kind == "stop_settled":
            self.stops[body["job"]] = body["step"]
            self.happened.append("stop")
        elif kind == "worker_gone":
            self._goodbyes += body["goodbye"]
            self.paces.goes(Incarnation(body["worker"]))
        elif kind == "checkpoint_committed":
            self.has_checkpoint = True

    def run(self, *, judged: bool) -> Ending:
        world = self.world
        standing = ""
        try:
            for place in self._mains:
                world.call(world.rng.randrange(300 * MS), functools.partial(self.start, place))
            self.schedule()
            world.run(self.done, limit=self.plan.calm_at + PATIENCE)
        except Stuck as stuck:
            standing = world.standing()
            world.violations.append(f"{stuck}: the yard is not done")
        if judged and not world.violations:
            self._judge()
        outcome = Ending(
            self.plan,
            list(world.violations),
            world.digest,
            world.now / SECOND,
            world.switches,
            self.wires.calls,
            self.starts,
            next(iter(self.finished.values()), {}),
            self.versions,
            self.pushes,
            standing,
            self.happened,
        )
        for process in [*self.places.values(), *([] if self._person is None else [self._person])]:
            if process.alive:
                process.kill("the end")
        return outcome

    def _judge(self) -> None:
        wanted = self._wanted()
        if {kind for _, kind in self.plan.faults} == {"kill coordinator"} and self.plan.weather == Weather():
            kills = len(self.plan.faults)
            if self.starts > len(self._mains) + kills:
                self.world.violations.append(f"{kills} ends of the coordinator cost others their lives")
        for host, values in sorted(self.finished.items()):
            self._compare(host, values, wanted)
        library = CheckpointLibrary(LocalStorage(self.checkpoints))
        findings = library.verify(JOB)
        if findings:
            self.world.violations.append(f"the checkpoints are damaged: {findings[:3]}")
            return
        if not library.numbers(JOB):
            return  # a job whose first checkpoint could not be written does not wait for it
        manifest = library.load(JOB)
        state = dict(library.export_state(manifest))
        saved = {name: np.asarray(array).tobytes() for name, array in state.items()}
        if self.plan.rows:
            ids, rows = (np.asarray(state[f"{ROWS}.{what}"]) for what in ("ids", "rows"))
            saved[ROWS] = spread(ids, rows, self.plan.row_coordinates, self.plan.partitions)
        self._compare(f"checkpoint {manifest.number}", saved, wanted)

    def _compare(self, whose: str, values: dict[str, bytes], wanted: dict[str, bytes]) -> None:
        if self.plan.counts and any(step is not None for step in self.stops.values()):
            self._look_at_counts(whose, values)
            return
        if self.plan.stops and not self.plan.counts:
            wanted = self._wanted_at({name: values[name] for name in wanted})
        if self.plan.wrong == "nan" and self.plan.mode == "async":
            wanted = self._without_left_out({name: values[name] for name in wanted}, wanted)
        if self.plan.lives.age and self.plan.shares_rows:
            wanted = wanted | {ROWS: self._with_those_that_went(values[ROWS], wanted[ROWS])}
        for name in sorted(wanted):
            if values[name] != wanted[name]:
                got = np.frombuffer(values[name], np.float64)
                want = np.frombuffer(wanted[name], np.float64)
                bad = [(i, float(got[i]), float(want[i])) for i in np.flatnonzero(got != want)[:4]]
                self.world.violations.append(f"{whose}: {name} has (place, got, wanted) {bad}")

    def _with_those_that_went(self, values: bytes, wanted: bytes) -> bytes:
        """The wanted values of rows that may expire and be created again: whatever they have, between 0 and what they
        would have without expiry. The last rows are in each push, and never expire."""
        found = np.frombuffer(values).reshape(self.plan.row_coordinates, -1)
        least = np.zeros_like(found)
        most = np.frombuffer(wanted).reshape(found.shape)
        least[-1] = most[-1]
        return np.clip(np.round(found), least, most).tobytes()

    def _without_left_out(self, values: dict[str, bytes], wanted: dict[str, bytes]) -> dict[str, bytes]:
        """The wanted values without what the coordinator lists as not finite. Of several runs, the one that fits the
        values."""
        ends = []
        for left_out in self.left_out.values():
            arrays = {name: np.frombuffer(array, np.float64).copy() for name, array in wanted.items()}
            for name, array in arrays.items():
                size = self.plan.row_coordinates if name == ROWS else self.plan.coordinates
                array.reshape(size, -1)[sorted(left_out)] = 0.0
            ends.append({name: array.tobytes() for name, array in arrays.items()})
        return values if values in ends else ends[-1]

    def _coordinates(self, source: DataShardSource, batch: int) -> list[int]:
        """The coordinates of a batch's samples."""
        plan = self.plan
        indices = order(seed=7, feed=source.feed, epoch=source.epoch, samples=plan.samples, shuffle=True)
        at = (source.index * plan.per_shard + batch) * plan.batch
        return (indices[at : at + plan.batch] + self._place(source.feed, source.epoch)).tolist()

    def _wanted_at(self, values: dict[str, bytes]) -> dict[str, bytes]:
        """The wanted values of a synchronous job that was stopped. Of several runs, the one that fits the values."""
        undisturbed = _undisturbed(self.plan.undisturbed)
        ends = [
            undisturbed.versions.get(-1 if step is None else step, undisturbed.values) for step in self.stops.values()
        ]
        found = [end for end in ends if all(values[name] == end[name] for name in end)]
        return (found or ends)[-1]

    def _look_at_counts(self, whose: str, values: dict[str, bytes]) -> None:
        """Checks that a stopped job has counted no sample twice."""
        for name in sorted(self._wanted()):
            counts = np.frombuffer(values[name], np.float64)
            if not np.isin(counts, (0.0, 1.0)).all():
                self.world.violations.append(f"{whose}: {name} has counted {sorted(set(counts.tolist()))}")

    def _wanted(self) -> dict[str, bytes]:
        plan = self.plan
        if not plan.counts:
            undisturbed = _undisturbed(plan.undisturbed).values
            if not plan.rows_count or plan.wrong:
                return undisturbed
            pushes = np.frombuffer(undisturbed[ROWS], np.float64)[-1]
            return undisturbed | {ROWS: counted(np.append(np.ones(plan.coordinates), pushes), plan.partitions)}
        counts = np.ones(plan.coordinates)
        for feed, epoch in itertools.product(range(plan.feeds), range(plan.epochs)):
            for shard in range(-(-plan.samples // (plan.batch * plan.per_shard))):
                source = DataShardSource(feed, epoch, shard)
                if self._drops(source):
                    counts[self._coordinates(source, self._batches_of(source) - 1)] = 0.0
                for batch in range(self._batches_of(source) if plan.wrong == "overflow" else 0):
                    if self._is_wrong(source, batch):
                        counts[self._coordinates(source, batch)] = 0.0
        wanted = {f"v{p}": counts.tobytes() for p in range(plan.partitions)}
        if not plan.rows:
            return wanted
        in_rows = np.append(counts, 0.0)
        if plan.shares_rows:
            pushes = np.bincount(np.arange(plan.coordinates) % SHARED_COUNTED, minlength=plan.row_coordinates)
            pushes[-1] = plan.coordinates
            in_rows = np.maximum(pushes - (plan.lives.admitted - 1.0), 0.0)
        return wanted | {ROWS: counted(in_rows, plan.partitions)}


@functools.cache
def _undisturbed(plan: Plan) -> Ending:
    found = run_plan(plan, judged=False)
    assert not found.red, found.violations
    return found


def prepare(plan: Plan) -> None:
    """Does the work without faults with which a run is compared, if that is needed and was not done before."""
    if not plan.counts:
        _undisturbed(plan.undisturbed)


# ---- in one process


class _Listener:
    def __init__(self, bind: str, services: Any, *, threads: int = 64) -> None:
        self.address = bind
        self.port = int(bind.rpartition(":")[2])
        self._services = services

    def start(self) -> None:
        _yard().wires.listen(self.address, self._services)

    def set_ready(self, *, ready: bool) -> None:
        """Does nothing: readiness is not simulated."""

    def stop(self, grace_ms: int = 500) -> None:
        _yard().wires.leave(self.address)


class SimulatedJournal(Journal):
    """The journal that ships, on its own file. Its process may die before and after each write."""

    def __init__(self, folder: Path | None, **_: object) -> None:
        super().__init__(folder, wall_clock=lambda: float(EPOCH_S))
        self._process = current().process
        self._process.at_end[self.close] = None

    def append(self, entries: Any) -> None:
        world = self._process.world
        world.pause(world.rng.randrange(2 * MS))
        super().append(entries)
        for kind, body in entries:
            _yard().note(kind, body)
        world.pause(world.rng.randrange(2 * MS))

    def close(self) -> None:
        self._process.at_end.pop(self.close, None)
        super().close()


_running: list[Yard] = []


def _yard() -> Yard:
    return _running[-1]


def _network() -> SimulatedNetwork:
    return SimulatedNetwork(_yard().wires, current().process)


class _Watch(logging.Handler):
    """Reports a traceback in a log as a violation."""

    def emit(self, record: logging.LogRecord) -> None:
        if _running and _yard().world.trace is not None:
            task = greenlet.getcurrent()
            who = task.process if isinstance(task, Task) else "-"
            _yard().world.say(f"{who} {record.name.removeprefix('shardyard.')}: {record.getMessage()}")
        if record.exc_info and _running and not _yard().world.over:
            self.format(record)
            text = logging.Formatter().formatException(record.exc_info)  # type: ignore[arg-type]
            _yard().world.violations.append(f"{record.getMessage()}: {text}")


def _watch_ledgers() -> Callable[[], None]:
    """Watches that servers count nothing under an overtaken token, and nothing from a fenced worker."""
    real_open, real_advance, real_restore = Ledger.open, Ledger.advance, Ledger.restore
    real_fence, real_push, real_become = orders.fence, pushes.push, Store.become

    def open_(self: Any, key: Any, token: Token) -> int:
        found = real_open(self, key, token)
        seen = self.__dict__.setdefault("seen", {})
        seen[key] = max(token, seen.get(key, 0))
        return found

    def advance(self: Any, name: Any) -> None:
        real_advance(self, name)
        if name.token < self.__dict__.get("seen", {}).get(name.key, 0):
            _yard().world.violations.append(f"{name} was counted under token {name.token}, which had been overtaken")

    def restore(self: Any, marks: Any, floor: Any) -> None:
        self.__dict__.pop("seen", None)
        real_restore(self, marks, floor)

    def become(self: Any, incarnation: Any, term: Any) -> None:
        self.__dict__["told"] = set()
        real_become(self, incarnation, term)

    def fence(store: Any, incarnations: Any) -> None:
        real_fence(store, incarnations)
        store.__dict__.setdefault("told", set()).update(Incarnation(each) for each in incarnations)

    def push(store: Any, hosted: Any, push_order: Any, *payloads: Any) -> Any:
        told = push_order.caller.incarnation in store.__dict__.get("told", ())
        results = real_push(store, hosted, push_order, *payloads)
        if told and any(result.outcome not in (Outcome.DUPLICATE, Outcome.DROPPED) for result in results):
            _yard().world.violations.append(f"{push_order.name} of a fenced worker was counted")
        return results

    Ledger.open, Ledger.advance, Ledger.restore = open_, advance, restore  # type: ignore[method-assign]
    orders.fence, pushes.push, Store.become = fence, push, become  # type: ignore[method-assign]

    def undo() -> None:
        Ledger.open, Ledger.advance, Ledger.restore = real_open, real_advance, real_restore  # type: ignore[method-assign]
        orders.fence, pushes.push, Store.become = real_fence, real_push, real_become  # type: ignore[method-assign]

    return undo


def _watch_logs() -> Callable[[], None]:
    """Watches that successors read of a log all that took effect by it (rule C2)."""
    real_append, real_end_turn, real_take_over = Wal.append, Wal._end_turn, LogFiles.take_over

    def check(folder: Path, end: Mark) -> None:
        effective = _yard().effective.get(folder, end)
        if effective > end:
            _yard().world.violations.append(f"{folder.name} has acknowledged {effective}; its log is read to {end}")

    def append(self: Any, *given: Any) -> int:
        ticket = real_append(self, *given)
        self.__dict__.setdefault("ends", {})[ticket] = Mark(self._segment, self._offset)
        return ticket

    def end_turn(self: Any, ticket: int) -> None:
        real_end_turn(self, ticket)
        folder, mark = self._files.folder, self.__dict__.get("ends", {}).pop(ticket, None)
        if mark is not None:
            _yard().effective[folder] = max(mark, _yard().effective.get(folder, mark))
            if (end := folder / END).exists():
                check(folder, decode_mark(end.read_bytes(), end))

    def take_over(self: Any, generation: Generation) -> Mark:
        end = real_take_over(self, generation)
        check(self.folder, end)
        return end

    Wal.append, Wal._end_turn, LogFiles.take_over = append, end_turn, take_over  # type: ignore[method-assign]

    def undo() -> None:
        Wal.append, Wal._end_turn, LogFiles.take_over = real_append, real_end_turn, real_take_over  # type: ignore[method-assign]

    return undo


@contextlib.contextmanager
def simulation(level: int = logging.ERROR) -> Iterator[None]:
    """Simulates clock, threads, network and disk within the block. `run_plan` runs in it. Not reentrant. `level`: which
    log messages a trace has."""
    from shardyard.transport.grpc_client import GrpcNetwork
    from shardyard.transport.grpc_server import GrpcServer
    from shardyard.transport.malloc import tune_malloc
    from shardyard_ps_server.jit import optimizer_warmup
    from shardyard_ps_server.rows import partition_tables
    from shardyard_ps_server.tables import disk_tier

    optimizer_warmup.warm(optimizer_warmup.every_loop(("float64",)))
    partition_tables.warm()
    os_ = SimulatedOs()
    more = {
        id(GrpcNetwork): _network,
        id(GrpcServer): _Listener,
        id(Journal): SimulatedJournal,
        id(tune_malloc): lambda: True,
    }
    watch, root = _Watch(level), logging.getLogger("shardyard")
    former, propagates = root.level, root.propagate
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    undo = _watch_ledgers(), _watch_logs(), watch_paces(lambda: _yard().paces)
    rows_least, disk_tier.ROWS_LEAST = disk_tier.ROWS_LEAST, ROWS_IN_MEMORY  # type: ignore[misc]
    root.addHandler(watch)
    root.setLevel(level)
    root.propagate = False
    _os.append(os_)
    gc.collect()
    gc.freeze()  # so that a collection looks only at what a run leaves
    try:
        with installed(os_, more):
            yield
    finally:
        _os.pop()
        gc.unfreeze()
        root.setLevel(former)
        root.propagate = propagates
        root.removeHandler(watch)
        for each in undo:
            each()
        disk_tier.ROWS_LEAST = rows_least  # type: ignore[misc]
        torch.set_num_threads(threads)


_os: list[SimulatedOs] = []
PREFIX = folder_name(os.getpid())


def run_plan(plan: Plan, *, trace: Callable[[str], None] | None = None, judged: bool = True) -> Ending:
    """One run, within `simulation`."""
    os_ = _os[-1]
    if judged:
        prepare(plan)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=SHM if SHM.is_dir() else None))
    was = gc.isenabled()
    gc.disable()  # finalizers would run in whichever task is running
    yard = Yard(plan, folder, trace)
    if judged and plan.hybrid:
        yard.pushes_before = _undisturbed(plan.undisturbed).pushes
    _running.append(yard)
    former, os_.disk = os_.disk, yard.disk
    try:
        with yard.disk.in_place():
            found = yard.run(judged=judged)
            yard.world.close()
        return found
    finally:
        os_.disk = former
        _running.pop()
        shutil.rmtree(folder, ignore_errors=True)
        del yard
        gc.collect()
        if was:
            gc.enable()
