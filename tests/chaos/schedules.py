"""Schedules of faults, drawn from a seed: what goes wrong, with whom, when, for how long.

Owns: the kinds of faults and how a schedule is dealt. Invariants: a schedule is a function of its seed alone; any DECK
in a row of faults has each kind once, so a few seeds in a row have all of them. Pure. Must not know: processes.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from shardyard.domain.pipelines import PipelineSchedule
from shardyard.domain.replica_groups import Strategy

COORDINATOR = "coordinator"
AGENT = "agent"

PUSH_PLACES = ("push.before_apply", "push.before_publish", "push.after_partition", "push.before_reply")
LOG_PLACES = (
    "wal.before_write",
    "wal.before_sync",
    "wal.after_sync",
    "wal.before_apply",
    "wal.before_rotate",
    "wal.after_rotate",
)
TAKE_OVER_PLACES = ("wal.before_fence", "wal.after_fence", "wal.before_end", "wal.after_end")
SAVE_PLACES = (
    "storage.before_write",
    "storage.before_fsync",
    "storage.before_rename",
    "storage.after_rename",
    "storage.after_fsync_folder",
)
DECIDE_PLACES = ("journal.before_append", "journal.before_commit", "journal.after_append")
COMMIT_PLACES = (
    "checkpoint.before_manifest",
    "storage.before_rename",
    "storage.after_rename",
    "checkpoint.after_manifest",
    "storage.before_delete",
)
RESUME_PLACES = ("journal.in_replace", "journal.before_append")
FAULTS = 3
TABLES_SHARE = 0.6
"""Of the jobs."""
LEASE_S = 1.5
"""What members' leases are set to."""


@dataclass(frozen=True)
class Kill:
    """kill -9, of all at once; each is started again after `down_s`."""

    places: tuple[str, ...]
    down_s: float

    def __str__(self) -> str:
        return f"kill -9 of {', '.join(self.places)}, down for {self.down_s:.1f} s"


@dataclass(frozen=True)
class Stop:
    """SIGSTOP, and SIGCONT after `for_s`, which is longer than the lease."""

    place: str
    for_s: float

    def __str__(self) -> str:
        return f"SIGSTOP of {self.place} for {self.for_s:.1f} s"


@dataclass(frozen=True)
class Leave:
    """SIGTERM of a worker, which leaves in order; another one comes in its place `back_s` after it has ended."""

    place: str
    back_s: float

    def __str__(self) -> str:
        return f"{self.place} leaves, back after {self.back_s:.1f} s"


@dataclass(frozen=True)
class Crash:
    """kill -9, and again, of the process that is started then, at its passing number `passing` of `failpoint`."""

    place: str
    failpoint: str
    passing: int

    def __str__(self) -> str:
        return f"kill -9 of {self.place}, and again at {self.failpoint}@{self.passing}"


@dataclass(frozen=True)
class Cut:
    """The link is cut when `nbytes` more bytes have come over it: of replies, or of requests."""

    link: str
    replies: bool
    nbytes: int

    def __str__(self) -> str:
        return f"{self.link} cut after {self.nbytes} bytes of {'replies' if self.replies else 'requests'}"


@dataclass(frozen=True)
class Sever:
    """A worker's connections to other workers are cut."""

    place: str

    def __str__(self) -> str:
        return f"{self.place} cut off from other workers"


@dataclass(frozen=True)
class Hold:
    """Nothing comes over the link for `for_s`: of requests, of replies, or of both. Then all of it does, or, with
    `resets`, the connections are gone."""

    link: str
    requests: bool
    replies: bool
    for_s: float
    resets: bool

    def __str__(self) -> str:
        ways = [name for name, held in (("requests", self.requests), ("replies", self.replies)) if held]
        end = "then reset" if self.resets else "then let go"
        return f"{self.link} holds {' and '.join(ways)} for {self.for_s:.1f} s, {end}"


@dataclass(frozen=True)
class Slow:
    """Each piece that comes over the link is late."""

    link: str
    delay_ms: int
    for_s: float

    def __str__(self) -> str:
        return f"{self.link} slower by {self.delay_ms} ms for {self.for_s:.1f} s"


@dataclass(frozen=True)
class Full:
    """The disk of "checkpoints", "journal" or "wal" is full for `for_s`."""

    disk: str
    for_s: float

    def __str__(self) -> str:
        return f"disk of {self.disk} full for {self.for_s:.1f} s"


Fault = Kill | Stop | Leave | Crash | Cut | Sever | Hold | Slow | Full


@dataclass(frozen=True)
class Timed:
    """A fault when so much of the job is done: 0 to 1."""

    at: float
    fault: Fault

    def __str__(self) -> str:
        return f"at {self.at:.0%}: {self.fault}"


@dataclass(frozen=True)
class Plan:
    """The job and its yard. `wal`: job.durability. `workers` are started by hand, one more by the agent. `jumping`:
    whose wall clocks jump. `tables`: the model has embedding tables, whose rows a synchronous job in `hybrid` mode
    updates as they come; `looks_ahead`: the script says which rows it will look up; `forgetful`: one of the tables
    admits ids late, and its rows expire. `parts`: how many workers have a part of the model each; `replicas`: how many
    times, side by side; `schedule`: of a pipeline; `pushes`: what workers have parts of is on the servers.
    `two_machines`: workers with an even process id share memory, and so do the others."""

    sync: bool
    wal: bool
    servers: int
    workers: int
    partitions: int
    logical_ranks: int
    batches_per_data_shard: int
    every_steps: int
    same_host: bool
    window: int
    overlap: bool
    jumping: tuple[str, ...]
    tables: bool = False
    hybrid: bool = False
    looks_ahead: bool = False
    forgetful: bool = False
    strategy: Strategy = Strategy.PARAMETER_SERVER
    parts: int = 1
    replicas: int = 1
    schedule: PipelineSchedule = PipelineSchedule.ONE_F_ONE_B
    pushes: bool = False
    two_machines: bool = False

    @property
    def has_bits(self) -> bool:
        """Whether the bits at the end are those of the same job, run undisturbed by one process."""
        return self.sync and not self.hybrid and not self.has_values

    @property
    def is_plain(self) -> bool:
        """Whether the model has no BatchNorm and Dropout. Several workers compute parts of a batch: they normalize over
        these, and draw random numbers of their own."""
        return self.strategy is Strategy.PIPELINE or (self.strategy is Strategy.SHARDED and self.pushes)

    @property
    def has_values(self) -> bool:
        """Whether the values at the end are those, up to rounding: the order of the workers' sums depends on how many
        there were."""
        return self.sync and self.strategy.uses_groups

    @property
    def workers_expected(self) -> int:
        return self.parts * self.replicas if self.parts > 1 else self.workers + 1

    @property
    def server_names(self) -> tuple[str, ...]:
        return tuple(f"server-{number}" for number in range(self.servers))

    @property
    def worker_names(self) -> tuple[str, ...]:
        return tuple(f"worker-{number}" for number in range(self.workers))

    @property
    def members(self) -> tuple[str, ...]:
        """All but the coordinator."""
        return (*self.server_names, AGENT, *self.worker_names)

    def __str__(self) -> str:
        own = "" if self.strategy is Strategy.PARAMETER_SERVER else self.strategy.value
        how = (
            f"{'hybrid' if self.hybrid else own or 'sync'}, {self.logical_ranks} ranks"
            if self.sync
            else f"async {own}".strip() + f", {self.batches_per_data_shard} batches a shard"
        )
        more = [
            name
            for name, chosen in (
                ("logs", self.wal),
                ("shared memory", self.same_host),
                ("window", self.window > 0),
                ("overlap", self.overlap),
                ("tables", self.tables),
                ("look-ahead", self.looks_ahead),
                ("rows that go", self.forgetful),
                (f"{self.schedule.value} in {self.parts} stages", self.strategy is Strategy.PIPELINE),
                ("pushes to servers", self.pushes),
                (f"{self.replicas} replicas side by side", self.replicas > 1),
                ("two machines", self.two_machines),
                (f"clocks of {', '.join(self.jumping)} jump", bool(self.jumping)),
            )
            if chosen
        ]
        base = f"{how}, {self.servers} servers, {self.partitions} partitions, {self.workers} + 1 workers"
        return ", ".join([base, f"a checkpoint every {self.every_steps} steps", *more])


@dataclass(frozen=True)
class Schedule:
    seed: int
    plan: Plan
    faults: tuple[Timed, ...]

    def __str__(self) -> str:
        return "\n  ".join([f"seed {self.seed}: {self.plan}", *map(str, self.faults)])


def _down(chance: random.Random) -> float:
    """Sometimes for longer than partitions wait for their server."""
    return chance.choice((0.0, 0.3, 1.0, 4.0))


def _past_lease(chance: random.Random) -> float:
    return LEASE_S * chance.uniform(1.3, 2.2)


def _server(plan: Plan, chance: random.Random) -> str:
    return chance.choice(plan.server_names)


def _worker(plan: Plan, chance: random.Random) -> str:
    return chance.choice(plan.worker_names)


def _uplink(plan: Plan, chance: random.Random) -> str:
    return "up-" + chance.choice(plan.members)


def _link(plan: Plan, chance: random.Random) -> str:
    return chance.choice((_server, _server, _uplink))(plan, chance)


def _hold(link: str, chance: random.Random, for_s: float) -> Hold:
    requests, replies = chance.choice(((True, True), (False, True), (False, True), (True, False)))
    return Hold(link, requests, replies, for_s, chance.random() < 0.5)


def _in_push(plan: Plan, chance: random.Random) -> str:
    return chance.choice(PUSH_PLACES + LOG_PLACES if plan.wal else PUSH_PLACES)


def _take_over(plan: Plan, chance: random.Random) -> Crash:
    """Of a server that has just been given partitions, or of one that takes pushes."""
    if plan.wal:
        return Crash(_server(plan, chance), chance.choice(TAKE_OVER_PLACES), chance.randint(1, 3))
    return Crash(_server(plan, chance), chance.choice(PUSH_PLACES), chance.randint(1, 8))


Draw = Callable[[Plan, random.Random], Fault]
DECK: tuple[tuple[str, Draw], ...] = (
    ("kill server", lambda p, c: Kill((_server(p, c),), _down(c))),
    ("stop worker", lambda p, c: Stop(_worker(p, c), _past_lease(c))),
    ("cut", lambda p, c: Cut(_link(p, c), c.random() < 0.7, c.randint(1, 20_000))),
    ("kill coordinator", lambda p, c: Kill((COORDINATOR,), _down(c))),
    ("stop server", lambda p, c: Stop(_server(p, c), _past_lease(c))),
    ("crash in push", lambda p, c: Crash(_server(p, c), _in_push(p, c), c.randint(1, 60))),
    ("kill worker", lambda p, c: Kill((_worker(p, c),), _down(c))),
    ("hold server", lambda p, c: _hold(_server(p, c), c, c.uniform(0.3, 4.0))),
    ("crash in decision", lambda p, c: Crash(COORDINATOR, c.choice(DECIDE_PLACES), c.randint(1, 25))),
    ("stop coordinator", lambda p, c: Stop(COORDINATOR, _past_lease(c))),
    ("crash in save", lambda p, c: Crash(_server(p, c), c.choice(SAVE_PLACES), c.randint(1, 12))),
    ("kill agent", lambda p, c: Kill((AGENT,), _down(c))),
    ("full checkpoints", lambda p, c: Full("checkpoints", c.uniform(1.0, 4.0))),
    ("cut off", lambda p, c: _hold("up-" + c.choice((_server, _worker))(p, c), c, _past_lease(c))),
    ("kill yard", lambda p, c: Kill((COORDINATOR, *p.server_names), c.choice((0.0, 1.0)))),
    ("full log", lambda p, c: Full("wal" if p.wal else "checkpoints", c.uniform(0.5, 2.0))),
    ("stop agent", lambda p, c: Stop(AGENT, _past_lease(c))),
    ("crash in commit", lambda p, c: Crash(COORDINATOR, c.choice(COMMIT_PLACES), c.randint(1, 3))),
    ("slow", lambda p, c: Slow(_link(p, c), c.choice((20, 100, 300)), c.uniform(0.5, 3.0))),
    ("crash in take-over", _take_over),
    ("full journal", lambda p, c: Full("journal", c.uniform(0.5, 2.0))),
    ("kill servers", lambda p, c: Kill(tuple(c.sample(p.server_names, 2)), _down(c))),
    ("crash at resume", lambda p, c: Crash(COORDINATOR, c.choice(RESUME_PLACES), c.randint(1, 2))),
    ("kill all", lambda p, c: Kill((COORDINATOR, *p.members), c.choice((0.0, 1.0)))),
)
"""Each kind of fault, with its name."""
MEMBER_DECK: tuple[tuple[str, Draw], ...] = (
    ("kill worker", lambda p, c: Kill((_worker(p, c),), _down(c))),
    ("stop worker", lambda p, c: Stop(_worker(p, c), _past_lease(c))),
    ("kill agent", lambda p, c: Kill((AGENT,), _down(c))),
    ("cut off worker", lambda p, c: _hold("up-" + _worker(p, c), c, _past_lease(c))),
    ("kill workers", lambda p, c: Kill((AGENT, *p.worker_names), c.choice((0.0, 1.0)))),
    ("stop agent", lambda p, c: Stop(AGENT, _past_lease(c))),
)
"""What befalls the members of a replica group. A schedule of replicas has two of these beside the others."""
COMING_AND_GOING: tuple[tuple[str, Draw], ...] = (
    ("leave worker", lambda p, c: Leave(_worker(p, c), _down(c))),
    ("sever worker", lambda p, c: Sever(_worker(p, c))),
)
"""A schedule of each of these strategies has both too, if its workers have connections to each other."""
STRATEGIES = (Strategy.SHARDED, Strategy.PIPELINE, Strategy.TENSOR, Strategy.MIRRORED, Strategy.CENTRAL_STORAGE)
"""Of seeds in a row. The next faults are dealt when each has had a turn, so in 40 seeds each meets every kind."""
PARTS = {Strategy.PIPELINE: (2, 2, 3), Strategy.TENSOR: (2,), Strategy.SHARDED: (2,)}


def dealt(turn: int) -> tuple[str, ...]:
    """The kinds of a schedule's faults."""
    first = turn * FAULTS + turn * FAULTS // len(DECK)  # others come together in the next round
    return tuple(DECK[(first + number) % len(DECK)][0] for number in range(FAULTS))


def strategy_of(seed: int) -> Strategy:
    return STRATEGIES[seed % len(STRATEGIES)]


def draw(seed: int, strategy: Strategy = Strategy.PARAMETER_SERVER) -> Schedule:
    plan = _plan(seed)
    chance = random.Random(f"{seed} faults")
    turn = seed // len(STRATEGIES) if strategy in STRATEGIES else seed
    names = list(dealt(turn))
    if strategy is not Strategy.PARAMETER_SERVER:
        plan = _with_strategy(plan, strategy, random.Random(f"{seed} strategy"))
        names += [MEMBER_DECK[(2 * turn + number) % len(MEMBER_DECK)][0] for number in range(2)]
    if strategy in STRATEGIES:
        names += [name for name, _ in COMING_AND_GOING[: 1 + strategy.uses_groups]]
    if strategy.uses_groups and plan.same_host:
        plan = replace(plan, two_machines=random.Random(f"{seed} machines").random() < 0.5)
    kinds = dict((*DECK, *MEMBER_DECK, *COMING_AND_GOING))
    chance.shuffle(names)
    width = 0.65 / len(names)
    faults = tuple(
        Timed(0.1 + width * (number + chance.random()), kinds[name](plan, chance)) for number, name in enumerate(names)
    )
    return Schedule(seed, plan, faults)


def _with_strategy(plan: Plan, strategy: Strategy, chance: random.Random) -> Plan:
    """What such a job can be. If it has more workers than logical ranks, or than parts of the model, one waits."""
    unused = {"window": 0, "hybrid": False, "looks_ahead": False}
    plan = replace(plan, sync=True, strategy=strategy, **unused)
    if strategy is Strategy.CENTRAL_STORAGE:
        return replace(plan, servers=2, same_host=True, jumping=())
    logs = plan.wal
    plan = replace(plan, wal=False, overlap=False, tables=False)
    if not strategy.is_spread:
        return plan
    parts = min(chance.choice(PARTS[strategy]), plan.workers + 1)
    schedules = [each for each in PipelineSchedule if parts == 2 or not each.is_looped]
    plan = replace(plan, parts=parts, schedule=chance.choice(schedules))
    if plan.parts == 2 and random.Random(f"{plan} replicas").random() < 0.5:
        plan = replace(plan, replicas=2, workers=3)
    ranks = replace(plan, logical_ranks=plan.replicas)
    if random.Random(f"{ranks} servers").random() < 0.5:
        waits = random.Random(f"{ranks} waits").random() < 0.5
        return replace(ranks, pushes=True, wal=logs, sync=waits)
    if strategy is Strategy.SHARDED:
        return replace(plan, logical_ranks=4) if plan.replicas > 1 else replace(plan, parts=1)
    return ranks


def _plan(seed: int) -> Plan:
    chance = random.Random(f"{seed} plan")
    sync = bool((seed + seed // 8) % 2)
    servers = chance.choice((3, 3, 4))
    workers = chance.choice((1, 2))
    plan = Plan(
        sync=sync,
        wal=random.Random(f"{seed} durability").random() < 0.5,
        servers=servers,
        workers=workers,
        partitions=chance.choice((8, 8, 11)),
        logical_ranks=chance.choice((2, 4)),
        batches_per_data_shard=chance.choice((2, 3, 7)),
        every_steps=chance.choice((4, 8, 20)),
        same_host=chance.random() < 0.5,
        window=0 if sync else chance.choice((0, 0, 1)),
        overlap=False,
        jumping=(),
    )
    model = random.Random(f"{seed} model")
    tables = model.random() < TABLES_SHARE
    hybrid = tables and sync and model.random() < 0.5
    return Plan(
        **{
            **vars(plan),
            "overlap": not plan.window and chance.random() < 0.3,
            "jumping": tuple(sorted(chance.sample((COORDINATOR, *plan.members), 2))) if chance.random() < 0.5 else (),
            "tables": tables,
            "hybrid": hybrid,
            "looks_ahead": tables and (hybrid or not sync) and model.random() < 0.5,
        }
    )
