"""What a seed decides about a run: the work, the yard, and the faults."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from shardyard.domain.consistency import NO_CLIPPING, Clipping
from shardyard.domain.epochs import order
from shardyard.domain.push_names import DataShardSource

from .network import Weather
from .rows import ALL, Lives
from .world import MS, SECOND

TO_STEPS = -1
DRAINS = ("leave worker", "drain worker")
"""Faults that tell a worker to leave: by a signal, or as `shardyard drain` does."""
BACKUP_CHANCE = 0.25
"""That a synchronous job has backup workers, if the seed decides everything."""
CLIP_CHANCE = 0.4
"""That a kind of synchronous work clips by norm."""
SYNC_WORKS = 16
"""Kinds of synchronous work. Each kind is done once without faults, for comparison."""
WRONGS = ("nan", "overflow")


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
    local_steps: int = 0
    """For synchronous jobs in local mode: the steps of a round."""
    looks_ahead: bool = False
    """Whether the script announces which rows it will look up."""
    thief: bool = False
    """Whether processes have certificates, and a thief has one of them."""
    pulls_ahead: int | None = None
    """How many lists of `job.sampler` a loader pulls ahead of the batch that it delivers. None: job.batches."""

    @property
    def drains_workers(self) -> bool:
        """Whether workers are told to leave."""
        return any(kind in DRAINS for _, kind in self.faults)

    @property
    def counts(self) -> bool:
        """Whether values say how often each sample of each epoch has counted."""
        return self.mode == "async" or bool(self.backups or self.switches) or self.pulls_ahead is not None

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
            thief=False,
        )

    def batches_of(self, source: DataShardSource) -> int:
        total = -(-self.samples // self.batch)
        return min(self.per_shard, total - source.index * self.per_shard)

    def first_coordinate(self, feed: int, epoch: int) -> int:
        """The first coordinate of an epoch."""
        return (feed * self.epochs + epoch) * self.samples

    def drops_last_of(self, source: DataShardSource) -> bool:
        return self.drops and source.index % 3 == 1

    def is_wrong(self, source: DataShardSource, batch: int) -> bool:
        return (source.feed + source.epoch + source.index + batch) % 4 == 1 and batch < self.batches_of(source)

    def coordinates_of(self, source: DataShardSource, batch: int) -> list[int]:
        """The coordinates of a batch's samples."""
        indices = order(seed=7, feed=source.feed, epoch=source.epoch, samples=self.samples, shuffle=True)
        at = (source.index * self.per_shard + batch) * self.batch
        return (indices[at : at + self.batch] + self.first_coordinate(source.feed, source.epoch)).tolist()


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

    - "async", "bounded", "sync", "local" or "hybrid", then "wal" or "checkpoint"; or "coordinator": only that one
      dies.
    - "stop": workers stop the job. "nan", "overflow": Plan.wrong.
    - "rows": the job has a table; hybrid jobs always do. "cold": servers have no memory for rows. "lives", for
      asynchronous jobs: ids get their rows late or lose them, and some servers are cold.
    - "clip", after "sync": the job clips by norm. "backup": it has backup workers.
    - "switch": a person switches the job; a synchronous one to asynchronous updates first. "over": back and forth
      between synchronous and asynchronous updates.
    - "leave": servers leave in order, most of them while others are there; each comes back as a new one.
    - "drain": workers leave in order, most of them while others are there; each comes back as a new one.
    - "full": the disk of the coordinator's journal is full for a while, once or more often.
    - "sampler": a loader pulls ahead from job.sampler.
    - "stolen": processes have certificates, and a thief has that of a worker, until it is revoked.
    - "lag", after "async" or "bounded": one worker is far slower than the others, and a server is killed.
    """
    rng = random.Random(f"plan {seed}")
    mode, durability = rng.choice(("async", "sync")), rng.choice(("checkpoint", "checkpoint", "wal"))
    words = kind.split("-")
    others = (
        "stop",
        "clip",
        "backup",
        "switch",
        "over",
        "full",
        "leave",
        "drain",
        "lag",
        "rows",
        "lives",
        "cold",
        "sampler",
        "stolen",
        *WRONGS,
    )
    given = [word for word in words if word not in others] or [""]
    mode, durability = given[0] or mode, given[1] if len(given) > 1 else durability
    lonely = mode == "coordinator"  # only the coordinator dies
    bounded, hybrid, local = mode == "bounded", mode == "hybrid", mode == "local"
    mode = "async" if lonely or bounded else "sync" if hybrid or local else mode
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
    clips = sync and not hybrid and not local and (clip.random() < CLIP_CHANCE or "clip" in kind.split("-"))
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
    if local:
        steps = random.Random(f"local {seed % SYNC_WORKS}").choice((1, 2, 3))
        plan = replace(plan, local_steps=steps)
        return _with_drained_workers(plan) if "drain" in words else plan
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
    if "leave" in words:
        plan = _with_departures(plan)
    if "drain" in words:
        plan = _with_drained_workers(plan)
    if "full" in words:
        plan = _with_full_journal(plan)
    if "sampler" in words:
        plan = _with_sampler(plan)
    if "stolen" in words:
        plan = _with_thief(plan)
    if "over" in words:
        return _with_steps(plan)
    if "switch" in words:
        switching = random.Random(f"switch {seed}")
        times = sorted(switching.randrange(plan.calm_at) for _ in range(switching.choice((1, 2, 3, 4))))
        if sync:
            plan = replace(plan, optimizer="lion", clipping=NO_CLIPPING, wrong="")
        return replace(plan, switches=tuple((at, switching.choice((None, 0, 1, 3))) for at in times))
    return plan


def _with_sampler(plan: Plan) -> Plan:
    """Each pass over the loader is a feed of one epoch. Values count samples, so steps add the same for each."""
    rng = random.Random(f"sampler {plan.seed}")
    optimizer = "lion" if plan.mode == "sync" else plan.optimizer
    plan = replace(plan, epochs=1, wrong="", drops=False, clipping=NO_CLIPPING, optimizer=optimizer)
    return replace(plan, pulls_ahead=rng.choice((0, 1, 3)), feeds=rng.choice((1, 2, 3)))


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


def _with_departures(plan: Plan) -> Plan:
    rng = random.Random(f"leave {plan.seed}")
    times = [rng.randrange(plan.calm_at) for _ in range(rng.choice((1, 2, 3, 5)))]
    faults = plan.faults if rng.random() < 0.5 else ()
    return replace(
        plan,
        servers=rng.choice((1, 2, 2, 3)),
        faults=tuple(sorted((*faults, *((at, "leave server") for at in times)))),
    )


def _with_drained_workers(plan: Plan) -> Plan:
    """Asynchronous workers mostly have a push in flight, which may be slow, when they are told to leave."""
    rng = random.Random(f"drain {plan.seed}")
    if plan.mode == "async":
        window = rng.choice((0, 1, 1))
        weather = replace(plan.weather, slow=rng.choice((0.0, 0.05, 0.2)), slow_max=300 * MS)
        staleness = None if plan.staleness is None else max(window, plan.staleness)
        plan = replace(plan, window=window, staleness=staleness, weather=weather, samples=30)
    times = [rng.randrange(plan.calm_at) for _ in range(rng.choice((1, 2, 3, 5)))]
    faults = plan.faults if rng.random() < 0.5 else ()
    return replace(
        plan,
        workers=rng.choice((1, 2, 2, 3)),
        faults=tuple(sorted((*faults, *((at, rng.choice(DRAINS)) for at in times)))),
    )


def _with_full_journal(plan: Plan) -> Plan:
    """A plan in which other faults happen while the coordinator can write nothing down."""
    rng = random.Random(f"full {plan.seed}")
    times = [rng.randrange(plan.calm_at) for _ in range(rng.choice((1, 2, 3)))]
    return replace(plan, faults=tuple(sorted((*plan.faults, *((at, "full journal") for at in times)))))


def _with_thief(plan: Plan) -> Plan:
    """A plan with workers whose certificates are not stolen. In half of the seeds nothing else happens."""
    rng = random.Random(f"stolen {plan.seed}")
    faults = plan.faults if rng.random() < 0.5 else ()
    return replace(plan, thief=True, workers=rng.choice((2, 2, 3)), faults=faults)


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
