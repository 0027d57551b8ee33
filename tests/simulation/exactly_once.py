"""Seeded models of training over the servers' own stores, with workers, messages and leases that fail.

`AsyncRun`: workers lease data shards and push batch after batch to every server. Each batch owns a coordinate, and SGD
at rate 1 adds 1 to it, so a lost or doubled push shows as a whole number. `SyncRun`: workers compute logical ranks from
pulled values; the last bits must be those of a run without faults.

Faults, for the first ticks of a run: workers that die between two servers or in the middle of opening a lease; workers
that were declared dead and go on; messages lost, doubled, reordered, and delayed past the end of what they belong to;
generations that change. Then nothing fails any more, and the run must end.

Oracles: exactly once (promise 1); no write under a token once a higher one was opened there, nor by whom a server was
told is dead (promise 4); no refusal but those that tell a sender that it is behind the times; the same bits
(promise 6); an end (promise 7).
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from shardyard.domain.consistency import UpdateMode
from shardyard.domain.errors import NotFound, Refused, ShardyardError
from shardyard.domain.ids import Caller, Generation, Incarnation, JobId, PartitionId, Rank, Term, Token
from shardyard.domain.layout.layouts import Block, JobLayout, PartitionLayout, aligned_bytes
from shardyard.domain.optimizers import OptimizerSpec, make_group
from shardyard.domain.pulls import PullHeader
from shardyard.domain.push_names import DataShardSource, PushName, RankSource, SourceKey
from shardyard.domain.pushes import Outcome, PushHeader, PushKind, PushPart
from shardyard.domain.variables import DType, VariableSpec
from shardyard_ps_server.hosting import admission, orders, pulls, pushes
from shardyard_ps_server.hosting.hosted_job import CreateRequest
from shardyard_ps_server.hosting.store import Store
from shardyard_ps_server.partition.reads import hold_version
from shardyard_ps_server.partition.update_rules import UpdateRules
from shardyard_ps_server.values.versions import Bytes, aligned_empty

JOB = JobId(1)
FAULTY_TICKS = 500
TICKS_MAX = 6_000
ON_THE_WAY_MAX = 40
Groups = tuple[tuple[float, ...], ...]


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


@dataclass(frozen=True)
class Work:
    """One batch, or one rank's step: a gradient for each partition that it touches, none for a named empty push."""

    gradients: dict[PartitionId, np.ndarray]
    weight: float
    groups: Groups


class Yard:
    """The servers of a run, and the only way to them."""

    def __init__(self, layout: JobLayout, servers: int, mode: UpdateMode, ranks: int) -> None:
        self.layout = layout
        self.generation = Generation(1)
        self.stores = [Store() for _ in range(servers)]
        self.owned = [
            [part.partition for part in layout.partitions if part.partition % servers == s] for s in range(servers)
        ]
        self._create = (layout, mode, ranks)
        self.answers: Counter[str] = Counter()
        """Outcomes of partitions and codes of refusals, so that a test can see that faults did happen."""
        self._highest: dict[tuple[int, SourceKey], int] = {}
        self._fenced: set[tuple[int, Incarnation]] = set()
        for server, store in enumerate(self.stores):
            store.become(incarnation_of(server), Term(1))
            self.announce(server)
            orders.open_partitions(store, JOB, self.generation)

    def announce(self, server: int) -> None:
        """Tells a server the present generation."""
        layout, mode, ranks = self._create
        orders.create(
            self.stores[server],
            CreateRequest(JOB, self.generation, layout, self.owned[server], UpdateRules(mode, ranks)),
        )

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
            hosted = admission.admit_push(store, order)
            results = pushes.push(store, hosted, order, message.payload)
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

    def pull(self, worker: Worker, number: int) -> list[np.ndarray] | None:
        """Exactly that version of all partitions, None where it is not there yet. Raises NotFound, Refused."""
        found: dict[PartitionId, np.ndarray] = {}
        for server, store in enumerate(self.stores):
            owned = tuple(self.owned[server])
            wish = PullHeader(self.caller(worker), incarnation_of(server), self.generation, owned, number, exactly=True)
            result, held = pulls.hold(admission.admit_pull(store, wish), wish)
            if result.missing:
                return None
            for part, (_, buffer) in zip(result.parts, held.buffers, strict=True):
                found[part.partition] = self._read(buffer)
            held.release()
        return [found[part.partition] for part in self.layout.partitions]

    def messages(self, worker: Worker, lease: Lease, sequence: int, work: Work, rng: random.Random) -> list[Message]:
        """A push to every server, sometimes as two that list different partitions."""
        found = []
        for server, owned in enumerate(self.owned):
            split = rng.randint(0, len(owned)) if rng.random() < 0.2 else 0
            for listed in (owned[:split], owned[split:]):
                if listed or not owned:
                    name = PushName(lease.key, lease.token, sequence, sequence)
                    found.append(self._message(worker, server, name, listed, work))
        rng.shuffle(found)
        return found

    def caller(self, worker: Worker) -> Caller:
        return Caller(JOB, worker.incarnation, Term(1))

    def _message(
        self, worker: Worker, server: int, name: PushName, listed: Sequence[PartitionId], work: Work
    ) -> Message:
        touched = [partition for partition in listed if partition in work.gradients]
        sizes = {partition: self.layout.partitions[partition].payload_bytes for partition in touched}
        payload = aligned_empty(sum(sizes.values()))
        payload[:] = 0
        at = 0
        for partition in touched:
            gradient = work.gradients[partition]
            payload[at : at + gradient.nbytes] = gradient.view(np.uint8)
            at += sizes[partition]
        order = PushHeader(
            self.caller(worker),
            incarnation_of(server),
            self.generation,
            name,
            PushKind.GRADIENT if touched else PushKind.EMPTY,
            tuple(PushPart(partition, sizes.get(partition, 0)) for partition in listed),
            work.weight if touched else 0.0,
            work.groups if touched else (),
        )
        return Message(server, order, payload)

    def _read(self, buffer: Bytes) -> np.ndarray:
        return buffer[: self.layout.variables[0].payload_bytes].view(np.float64).copy()


class Run(ABC):
    """What both modes share: time, the network, workers that come, die, and are declared dead."""

    def __init__(self, seed: int, *, progress: Callable[[Iterable[int]], int] = min) -> None:
        """`progress`: where a source stands, from its watermarks in all partitions (rule A6: the lowest)."""
        self.rng = random.Random(seed)
        self._progress = progress
        self._on_the_way: list[Message] = []
        self._workers: list[Worker] = []
        self._workers_max = self.rng.randint(1, 4)
        self._hired = 0
        self._last_token = 0
        self.yard = self.make_yard()

    @abstractmethod
    def make_yard(self) -> Yard: ...

    @abstractmethod
    def next_source(self, worker: Worker) -> SourceKey | None:
        """Something for the worker to lease."""

    @abstractmethod
    def give_back(self, key: SourceKey) -> None: ...

    @abstractmethod
    def close(self, key: SourceKey) -> None: ...

    @abstractmethod
    def length(self) -> int:
        """Number of sequences of a source."""

    @abstractmethod
    def work(self, worker: Worker, lease: Lease) -> Work | None:
        """What the lease's next sequence means; None where it cannot be computed yet."""

    @abstractmethod
    def finished(self) -> bool: ...

    @abstractmethod
    def judge(self) -> None:
        """Raises Violation unless what the servers hold is right."""

    def run(self) -> None:
        for tick in range(TICKS_MAX):
            faulty = tick < FAULTY_TICKS
            self._tick(faulty=faulty)
            if not faulty and self.finished() and not self._on_the_way:
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
            for lease in worker.leases:
                self.give_back(lease.key)
        for server in range(len(self.yard.stores)):
            if self.rng.random() < 0.3:
                self.yard.fence(worker, server)
        if self.rng.random() < 0.4:
            self._workers.remove(worker)

    def _act(self, worker: Worker, *, faulty: bool) -> None:
        if worker.alive and (not worker.leases or self.rng.random() < 0.2):
            key = self.next_source(worker)
            if key is not None:
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
            elif lease.next >= self.length() or self.rng.random() < 0.3:
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
        if lease.next >= self.length():
            worker.leases.remove(lease)
            if worker.alive:
                self.close(lease.key)

    def _push(self, worker: Worker, lease: Lease, *, faulty: bool) -> None:
        work = self.work(worker, lease)
        if work is None:
            return
        for message in self.yard.messages(worker, lease, lease.next, work, self.rng):
            if faulty and self.rng.random() < 0.04:
                self._declare_dead(worker)
                if worker in self._workers:
                    self._workers.remove(worker)
                return
            self._on_the_way.append(message)
        lease.next += 1


class AsyncRun(Run):
    """Leased data shards, each a source; its sequence counts batches."""

    def make_yard(self) -> Yard:
        rng = self.rng
        partitions, servers = rng.randint(1, 5), rng.randint(1, 3)
        shards, self._batches = rng.randint(2, 8), rng.randint(1, 5)
        self._free = [SourceKey(DataShardSource(0, 0, index)) for index in range(shards)]
        self._shards = list(self._free)
        self._done: set[SourceKey] = set()
        self._rates: Groups = (make_group("sgd", {"lr": 1.0}),)
        self._touched = {
            (key, batch): [PartitionId(p) for p in range(partitions) if rng.random() < 0.8]
            if rng.random() > 0.1
            else []
            for key in self._shards
            for batch in range(self._batches)
        }
        layout = layout_of(partitions, shards * self._batches, OptimizerSpec("sgd", self._rates))
        return Yard(layout, servers, UpdateMode.ASYNC, 0)

    def next_source(self, worker: Worker) -> SourceKey | None:
        if worker.leases or not self._free:
            return None
        return self._free.pop(self.rng.randrange(len(self._free)))

    def give_back(self, key: SourceKey) -> None:
        self._free.append(key)

    def close(self, key: SourceKey) -> None:
        self._done.add(key)

    def length(self) -> int:
        return self._batches

    def work(self, worker: Worker, lease: Lease) -> Work:
        own = np.zeros(len(self._touched))
        own[self._coordinate(lease.key, lease.next)] = -1
        touched = self._touched[lease.key, lease.next]
        return Work(dict.fromkeys(touched, own), 1.0, self._rates)

    def finished(self) -> bool:
        return len(self._done) == len(self._shards)

    def judge(self) -> None:
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


class SyncRun(Run):
    """Logical ranks, each a source; its sequence is the step. Any worker may compute any rank."""

    def make_yard(self) -> Yard:
        rng = self.rng
        partitions, servers = rng.randint(1, 4), rng.randint(1, 3)
        self._ranks, self._steps = rng.randint(1, 4), rng.randint(2, 9)
        self._kind = rng.choice(["sgd", "adam"])
        self._free = [SourceKey(RankSource(Rank(rank))) for rank in range(self._ranks)]
        self._all = list(self._free)
        self._numbers = rng.randrange(1 << 32)
        self._empty = {(key, s) for key in self._all for s in range(self._steps) if rng.random() < 0.1}
        layout = layout_of(partitions, 5, OptimizerSpec(self._kind, self._rates(0)))
        self._layout = layout
        return Yard(layout, servers, UpdateMode.SYNC, self._ranks)

    def next_source(self, worker: Worker) -> SourceKey | None:
        return self._free.pop(self.rng.randrange(len(self._free))) if self._free else None

    def give_back(self, key: SourceKey) -> None:
        self._free.append(key)

    def close(self, key: SourceKey) -> None:
        """Nothing: a rank is done when the last step is taken everywhere."""

    def length(self) -> int:
        return self._steps

    def work(self, worker: Worker, lease: Lease) -> Work | None:
        try:
            values = self.yard.pull(worker, lease.next)
        except NotFound as gone:
            if worker.alive and min(self.yard.watermarks(lease.key)) == lease.next:
                raise Violation(f"{lease.key.source} of step {lease.next} cannot be computed again: {gone}") from gone
            lease.next = min(self.yard.watermarks(lease.key))
            return None
        return None if values is None else self._compute(lease.key, lease.next, values)

    def finished(self) -> bool:
        return all(set(self.yard.watermarks(key)) == {self._steps} for key in self._all)

    def judge(self) -> None:
        expected = self._undisturbed()
        for server, store in enumerate(self.yard.stores):
            for partition in self.yard.owned[server]:
                if newest_values(store, partition).tobytes() != expected[partition].tobytes():
                    raise Violation(f"partition {partition} has other bits than in a run without faults")

    def _undisturbed(self) -> list[np.ndarray]:
        """One server, one worker, rank after rank."""
        yard, worker = Yard(self._layout, 1, UpdateMode.SYNC, self._ranks), Worker(Incarnation(1_000))
        leases = [Lease(key, Token(1), []) for key in self._all]
        for lease in leases:
            yard.open(worker, 0, lease)
        for step in range(self._steps):
            values = yard.pull(worker, step)
            assert values is not None
            for lease in leases:
                work = self._compute(lease.key, step, values)
                for message in yard.messages(worker, lease, step, work, random.Random(0)):
                    yard.deliver(message)
        found = yard.pull(worker, self._steps)
        assert found is not None
        return found

    def _compute(self, key: SourceKey, step: int, values: Sequence[np.ndarray]) -> Work:
        """A gradient that depends on every bit of every partition, the rank and the step."""
        if (key, step) in self._empty:
            return Work({}, 0.0, ())
        numbers = np.random.default_rng([self._numbers, self._all.index(key), step])
        total = float(np.concatenate(values).sum())
        gradients = {
            PartitionId(p): np.sin(total + own) + numbers.standard_normal(own.size) for p, own in enumerate(values)
        }
        return Work(gradients, float(numbers.integers(1, 9)), self._rates(step))

    def _rates(self, step: int) -> Groups:
        return (make_group(self._kind, {"lr": 0.1 / (1 + step)}),)


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
