"""A seeded model of asynchronous training over the servers' own stores, with workers, messages and leases that fail.

Workers lease data shards and push batch after batch to every server. Each batch owns a coordinate, and SGD at rate 1
adds 1 to it, so a lost or doubled push shows as a whole number.

Faults, for the first ticks of a run: workers that die between two servers or in the middle of opening a lease; workers
that were declared dead and go on; messages lost, doubled, reordered, and delayed past the end of what they belong to;
generations that change. Then nothing fails any more, and the run must end.

Oracles: exactly once (promise 1); no write under a token once a higher one was opened there, nor by whom a server was
told is dead (promise 4); no refusal but those that tell a sender that it is behind the times; an end (promise 7).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from shardyard.domain.consistency import UpdateMode
from shardyard.domain.errors import Refused, ShardyardError
from shardyard.domain.ids import Caller, Generation, Incarnation, JobId, PartitionId, Term, Token
from shardyard.domain.layout.layouts import Block, JobLayout, PartitionLayout, aligned_bytes
from shardyard.domain.optimizers import OptimizerSpec, make_group
from shardyard.domain.push_names import DataShardSource, PushName, SourceKey
from shardyard.domain.pushes import Outcome, PushHeader, PushKind, PushPart
from shardyard.domain.variables import DType, VariableSpec
from shardyard_ps_server.checkpoint.restore import Restore
from shardyard_ps_server.hosting import admission, orders, pushes
from shardyard_ps_server.hosting.hosted_job import CreateRequest
from shardyard_ps_server.hosting.store import Store
from shardyard_ps_server.partition.reads import hold_version
from shardyard_ps_server.partition.update_rules import UpdateRules
from shardyard_ps_server.values.versions import Bytes, aligned_empty

JOB = JobId(1)
FIRST = Generation(1)
FAULTY_TICKS = 500
TICKS_MAX = 6_000
ON_THE_WAY_MAX = 40
Groups = tuple[tuple[float, ...], ...]
Gradients = dict[PartitionId, np.ndarray]
RATES: Groups = (make_group("sgd", {"lr": 1.0}),)


class Violation(AssertionError):
    """A promise was broken."""


@dataclass(frozen=True)
class Message:
    server: int
    order: PushHeader
    payload: Bytes


@dataclass
class Lease:
    """What a worker may push, as the worker sees it. It is open when `unopened` is empty."""

    key: SourceKey
    token: Token
    unopened: list[int]
    nexts: list[int] = field(default_factory=list)
    next: int = 0


@dataclass
class Worker:
    incarnation: Incarnation
    alive: bool = True
    """As the coordinator sees it: a worker that was declared dead may go on."""
    leases: list[Lease] = field(default_factory=list)


class Yard:
    """The servers of a run, and the only way to them."""

    def __init__(self, layout: JobLayout, servers: int) -> None:
        self.layout = layout
        self.generation = FIRST
        self.stores = [Store() for _ in range(servers)]
        self.owned = [
            [part.partition for part in layout.partitions if part.partition % servers == s] for s in range(servers)
        ]
        self.answers: Counter[str] = Counter()
        """Outcomes of partitions and codes of refusals, so that a test can see that faults did happen."""
        self._highest: dict[tuple[int, SourceKey], int] = {}
        self._fenced: set[tuple[int, Incarnation]] = set()
        for server, store in enumerate(self.stores):
            store.become(incarnation_of(server), Term(1))
            self.announce(server)
            orders.open_partitions(store, JOB, self.generation)

    def announce(self, server: int) -> None:
        """Tells a server the present generation. A later one comes with a checkpoint, of which these servers need
        nothing."""
        rules = UpdateRules(UpdateMode.ASYNC, 0)
        restore = Restore("" if self.generation == FIRST else "memory://checkpoints", ())
        owned = self.owned[server]
        orders.create(self.stores[server], CreateRequest(JOB, self.generation, self.layout, owned, rules, restore))

    def open(self, worker: Worker, server: int, lease: Lease) -> list[int]:
        """Rule A5 on one server: its watermarks. Raises Refused."""
        store = self.stores[server]
        hosted = admission.admit(store, self.caller(worker), incarnation_of(server), self.generation)
        ((_, marks),) = pushes.open_sources(hosted, [(lease.key, lease.token)])
        self._highest[server, lease.key] = max(lease.token, self._highest.get((server, lease.key), 0))
        return [mark.next for mark in marks]

    def fence(self, worker: Worker, server: int) -> None:
        orders.fence(self.stores[server], [worker.incarnation])
        self._fenced.add((server, worker.incarnation))

    def watermarks(self, key: SourceKey) -> list[int]:
        """Rule A6: of every partition, whoever asks."""
        found = []
        for store in self.stores:
            ((_, marks),) = pushes.read_ledger(store.hosted()[0], [(key, Token(0))])
            found += [mark.next for mark in marks]
        return found

    def deliver(self, message: Message) -> None:
        store, order = self.stores[message.server], message.order
        try:
            admitted = admission.admit_push(store, order)
            results = pushes.push(store, admitted, order, message.payload)
        except Refused as refused:
            self.answers[refused.code] += 1
            return
        except ShardyardError as error:
            raise Violation(f"{order.name} to server {message.server}: {error!r}") from error
        self.answers.update(result.outcome.value for result in results)
        if all(result.outcome is Outcome.DUPLICATE for result in results):
            return
        highest = self._highest.get((message.server, order.name.key), 0)
        if order.name.token < highest:
            raise Violation(f"{order.name} counted under token {order.name.token}, after {highest} was opened")
        if (message.server, order.caller.incarnation) in self._fenced:
            raise Violation(f"{order.name} of worker {order.caller.incarnation} counted, which was declared dead")

    def messages(self, worker: Worker, lease: Lease, gradients: Gradients, rng: random.Random) -> list[Message]:
        """A push to every server, sometimes as two that list different partitions."""
        found = []
        for server, owned in enumerate(self.owned):
            split = rng.randint(0, len(owned)) if rng.random() < 0.2 else 0
            for listed in (owned[:split], owned[split:]):
                if listed or not owned:
                    name = PushName(lease.key, lease.token, lease.next, lease.next)
                    found.append(self._message(worker, server, name, listed, gradients))
        rng.shuffle(found)
        return found

    def caller(self, worker: Worker) -> Caller:
        return Caller(JOB, worker.incarnation, Term(1))

    def _message(
        self, worker: Worker, server: int, name: PushName, listed: Sequence[PartitionId], gradients: Gradients
    ) -> Message:
        touched = [partition for partition in listed if partition in gradients]
        sizes = {partition: self.layout.partitions[partition].payload_bytes for partition in touched}
        payload = aligned_empty(sum(sizes.values()))
        payload[:] = 0
        at = 0
        for partition in touched:
            gradient = gradients[partition]
            payload[at : at + gradient.nbytes] = gradient.view(np.uint8)
            at += sizes[partition]
        order = PushHeader(
            self.caller(worker),
            incarnation_of(server),
            self.generation,
            name,
            PushKind.GRADIENT if touched else PushKind.EMPTY,
            tuple(PushPart(partition, sizes.get(partition, 0)) for partition in listed),
            1.0 if touched else 0.0,
            RATES if touched else (),
        )
        return Message(server, order, payload)


class AsyncRun:
    """Time, the network, workers that come, die, and are declared dead, and the data shards that they lease. Each is a
    source; its sequence counts batches."""

    def __init__(self, seed: int, *, progress: Callable[[Iterable[int]], int] = min) -> None:
        """`progress`: where a source stands, from its watermarks in all partitions (rule A6: the lowest)."""
        self.rng = random.Random(seed)
        self._progress = progress
        self._on_the_way: list[Message] = []
        self._workers: list[Worker] = []
        self._workers_max = self.rng.randint(1, 4)
        self._hired = 0
        self._last_token = 0
        rng = self.rng
        partitions, servers = rng.randint(1, 5), rng.randint(1, 3)
        shards, self._batches = rng.randint(2, 8), rng.randint(1, 5)
        self._free = [SourceKey(DataShardSource(0, 0, index)) for index in range(shards)]
        self._shards = list(self._free)
        self._done: set[SourceKey] = set()
        self._touched = {
            (key, batch): [PartitionId(p) for p in range(partitions) if rng.random() < 0.8]
            if rng.random() > 0.1
            else []
            for key in self._shards
            for batch in range(self._batches)
        }
        self.yard = Yard(layout_of(partitions, shards * self._batches, OptimizerSpec("sgd", RATES)), servers)

    def run(self) -> None:
        for tick in range(TICKS_MAX):
            faulty = tick < FAULTY_TICKS
            self._tick(faulty=faulty)
            if not faulty and len(self._done) == len(self._shards) and not self._on_the_way:
                break
        else:
            raise Violation(f"stuck: not done after {TICKS_MAX} ticks")
        self.judge()

    def _tick(self, *, faulty: bool) -> None:
        chance = self.rng.random()
        if sum(worker.alive for worker in self._workers) < self._workers_max and (chance < 0.1 or not self._workers):
            self._hired += 1
            self._workers.append(Worker(Incarnation(1_000 + self._hired)))
        elif chance < 0.5 and self._workers:
            self._act(self.rng.choice(self._workers), faulty=faulty)
        elif chance < 0.9 and self._on_the_way:
            self._carry(faulty=faulty)
        elif faulty and chance < 0.94 and self._workers:
            self._declare_dead(self.rng.choice(self._workers))
        elif faulty and chance < 0.95:
            self.yard.generation = Generation(self.yard.generation + 1)
            for server in range(len(self.yard.stores)):
                self.yard.announce(server)

    def _carry(self, *, faulty: bool) -> None:
        """Any message arrives next; the last ones are as old as the run."""
        place = self.rng.randrange(len(self._on_the_way))
        message = self._on_the_way[place]
        if not (faulty and self.rng.random() < 0.2):
            self._on_the_way.pop(place)
        if not (faulty and self.rng.random() < 0.15):
            self.yard.deliver(message)

    def _declare_dead(self, worker: Worker) -> None:
        """It is dead, or goes on and does not know; servers hear of it, or not."""
        if worker.alive:
            worker.alive = False
            self._free += [lease.key for lease in worker.leases]
        for server in range(len(self.yard.stores)):
            if self.rng.random() < 0.3:
                self.yard.fence(worker, server)
        if self.rng.random() < 0.4:
            self._workers.remove(worker)

    def _act(self, worker: Worker, *, faulty: bool) -> None:
        if worker.alive and not worker.leases and self._free:
            key = self._free.pop(self.rng.randrange(len(self._free)))
            self._last_token += 1
            servers = list(range(len(self.yard.stores)))
            self.rng.shuffle(servers)
            worker.leases.append(Lease(key, Token(self._last_token), servers))
            return
        if not worker.leases:
            return
        lease = self.rng.choice(worker.leases)
        try:
            if lease.unopened:
                self._open(worker, lease)
            elif lease.next >= self._batches or self.rng.random() < 0.3:
                self._look(worker, lease)
            elif len(self._on_the_way) < ON_THE_WAY_MAX:
                self._push(worker, lease, faulty=faulty)
        except Refused:
            if worker.alive:
                raise Violation(f"the rightful worker of {lease.key} was refused") from None
            worker.leases.remove(lease)

    def _open(self, worker: Worker, lease: Lease) -> None:
        lease.nexts += self.yard.open(worker, lease.unopened[-1], lease)
        lease.unopened.pop()
        if not lease.unopened:
            lease.next = self._progress(lease.nexts)

    def _look(self, worker: Worker, lease: Lease) -> None:
        """Goes on from the watermark, and closes what is done, if it is still this worker's to close."""
        lease.next = self._progress(self.yard.watermarks(lease.key))
        if lease.next >= self._batches:
            worker.leases.remove(lease)
            if worker.alive:
                self._done.add(lease.key)

    def _push(self, worker: Worker, lease: Lease, *, faulty: bool) -> None:
        own = np.zeros(len(self._touched))
        own[self._coordinate(lease.key, lease.next)] = -1
        gradients = dict.fromkeys(self._touched[lease.key, lease.next], own)
        for message in self.yard.messages(worker, lease, gradients, self.rng):
            if faulty and self.rng.random() < 0.04:
                self._declare_dead(worker)
                if worker in self._workers:
                    self._workers.remove(worker)
                return
            self._on_the_way.append(message)
        lease.next += 1

    def judge(self) -> None:
        """Raises Violation unless what the servers hold is right."""
        for key in self._shards:
            if set(self.yard.watermarks(key)) != {self._batches}:
                raise Violation(f"{key.source} is closed; watermarks {self.yard.watermarks(key)}")
        for server, store in enumerate(self.yard.stores):
            for partition in self.yard.owned[server]:
                self._judge_partition(partition, newest_values(store, partition))

    def _judge_partition(self, partition: PartitionId, values: np.ndarray) -> None:
        for (key, batch), touched in self._touched.items():
            counted = values[self._coordinate(key, batch)]
            if counted != (partition in touched):
                raise Violation(f"batch {batch} of {key.source} counted {counted:g} times in partition {partition}")

    def _coordinate(self, key: SourceKey, batch: int) -> int:
        return self._shards.index(key) * self._batches + batch


def layout_of(partitions: int, elements: int, optimizer: OptimizerSpec) -> JobLayout:
    """One variable in each partition."""
    variables = tuple(VariableSpec(f"v{p}", DType.FLOAT64, (elements,)) for p in range(partitions))
    laid = tuple(
        PartitionLayout(PartitionId(p), aligned_bytes(elements * 8), (Block(p, 0, elements, 0),))
        for p in range(partitions)
    )
    return JobLayout(variables, optimizer, laid)


def incarnation_of(server: int) -> Incarnation:
    return Incarnation(server + 1)


def newest_values(store: Store, partition: PartitionId) -> np.ndarray:
    hosted = store.hosted()[0]
    elements = hosted.layout.variables[0].elements
    found = hold_version(hosted.partitions[partition], 0, False, 0.0)
    assert isinstance(found, tuple), found
    values = found[1].view(np.float64)[:elements].copy()
    hosted.partitions[partition].release(found[1])
    return values
