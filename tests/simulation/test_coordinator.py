"""The machine under random faults, held against a deliberately dumb book-keeper.

Safety first, under faults: joins, deaths, pauses (the paused wake up as zombies), clean leaves, exits reported by an
agent, leases given back, batches that kill whoever computes them, fences that come late or not at all; and, where asked
for, the coordinator's death, after which another goes on from its records. Then the faults stop, and progress is
required. A failing seed is a parameter of the test and can be run alone.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from shardyard.config.settings import ConsistencySettings, DataSettings, JobSettings
from shardyard.domain.consistency import ConsistencyMode, UpdateMode
from shardyard.domain.errors import ShardyardError, StaleIncarnation, StaleToken
from shardyard.domain.ids import Caller, Incarnation, JobId, MemberRole, Term, Token
from shardyard.domain.optimizers import OptimizerSpec
from shardyard.domain.push_names import DataLease, DataShardSource
from shardyard.domain.variables import DType, VariableSpec
from shardyard_coordinator.core import effects, events
from shardyard_coordinator.machine.machine import Machine
from shardyard_coordinator.members.membership import Registration
from shardyard_coordinator.members.progress import Report
from shardyard_coordinator.work.feeds import FeedDone, FeedOpening, FeedSpec, LeaseWait
from tests.simulation.restoring import Lockstep

SEEDS = [*range(8), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(8, 60))]
FAULT_ACTIONS = 400
HEAL_ROUNDS_MAX = 3_000
WORKERS_MAX = 4
LEASE_MS = 1_000
PARTITIONS = 3
BATCH = 10
SPEC = FeedSpec(samples=115, fingerprint="f", batch_size=BATCH, epochs=2, shuffle=True, drop_last=False)
SHARDS = [DataShardSource(0, epoch, index) for epoch in range(2) for index in range(6)]
BATCHES = [(shard, batch) for shard in SHARDS for batch in range(2)]
VARIABLES = (VariableSpec("w", DType.FLOAT32, (48,)),)
SGD = OptimizerSpec("sgd", ((0.1, 0.0, 0.0, 0.0, 0.0, 0.0),))


@dataclass
class Partition:
    """What a server keeps of a source: the highest token and the next sequence. `counted` is for the oracle."""

    server: int
    tokens: dict[DataShardSource, int] = field(default_factory=dict)
    next: dict[DataShardSource, int] = field(default_factory=dict)
    counted: dict[tuple[DataShardSource, int], int] = field(default_factory=dict)
    skipped: set[tuple[DataShardSource, int]] = field(default_factory=set)


@dataclass
class Process:
    """A training process as it sees itself; `running` is False while it is paused or dead."""

    incarnation: Incarnation
    pid: int
    running: bool = True
    dead: bool = False
    lease: DataLease | None = None
    batch: int = 0
    sent_to: int = 0
    highest: int = 0
    announce_until: int = 0
    skips: bool = False
    saw_done: bool = False


class Books:
    """The dumb oracle: everything that was ever granted, in lists, searched from end to end."""

    def __init__(self) -> None:
        self.grants: list[tuple[DataShardSource, Incarnation, Token]] = []
        self.ended: set[Token] = set()
        self.done: list[DataShardSource] = []
        self.gone: set[Incarnation] = set()
        self.fenced: set[Incarnation] = set()
        self.tokens: list[int] = []
        self.owners: dict[int, tuple[Incarnation, Token]] = {}

    def granted(self, lease: DataLease, worker: Incarnation) -> None:
        if (lease.source, worker, lease.token) in self.grants:
            assert lease.token not in self.ended, "an ended lease was handed out again"
            return
        assert lease.source not in self.done, f"{lease.source} was leased after it was done"
        for source, holder, token in self.grants:
            if source == lease.source and token not in self.ended:
                assert holder in self.gone, f"{source} was leased to {worker} while {holder} lives and holds it"
                assert holder in self.fenced, f"{source} went to {worker} before {holder} was fenced"
        self.grants.append((lease.source, worker, lease.token))
        self.fresh(lease.token)

    def fresh(self, token: int) -> None:
        assert not self.tokens or token > self.tokens[-1], f"token {token} after {self.tokens[-1]}"
        self.tokens.append(token)

    def closed(self, lease: DataLease, *, done: bool) -> None:
        if lease.token in self.ended:
            return
        self.ended.add(lease.token)
        if done:
            assert lease.source not in self.done, f"{lease.source} was done twice"
            self.done.append(lease.source)


class Yard:
    def __init__(self, seed: int, mode: UpdateMode) -> None:
        self.random = random.Random(seed)
        self.restarts = random.Random(seed)
        self.poison = set(random.Random(seed).sample(BATCHES, seed % 4))
        self.now_ms = 10_000
        self.machines = Lockstep(term=Term(3), lease_ms=LEASE_MS, now_ms=self.now_ms)
        self.books = Books()
        self.trace: list[str] = []
        self.pending: list[effects.FenceOnServers] = []
        self.processes: list[Process] = []
        self.refused: list[set[Incarnation]] = [set(), set()]
        self.partitions = [Partition(index % 2) for index in range(PARTITIONS)]
        self.settings = JobSettings(
            partitions=PARTITIONS,
            workers_expected=2,
            rank_grace_ms=500,
            consistency=ConsistencySettings(mode=ConsistencyMode(mode.value), logical_ranks=3),
            data=DataSettings(batches_per_data_shard=2),
        )
        self.job = JobId(0)
        self._next_pid = 100
        self.servers = [self._register(MemberRole.SERVER, f"s:{index}", 1) for index in range(2)]
        self.agent = self._register(MemberRole.AGENT, "a:1", 2)
        first = self.add_process()
        for event in (
            events.VariablesRegistered(self.caller(first), VARIABLES, SGD),
            events.PartitionsCreated(self.job),
            events.VariablesCommitted(self.caller(first)),
            events.PartitionsOpened(self.job),
        ):
            self.handle(event)

    # ---- the machine, its effects, the trace

    @property
    def machine(self) -> Machine:
        return self.machines.machine

    def handle(self, event: events.Event) -> object:
        """The machine's reply to an event, if it has one."""
        try:
            found = self.machines.handle(event, self.now_ms)
        except ShardyardError as error:
            self.trace.append(f"{event} ! {error.what}")
            raise
        self.trace.append(f"{event} -> {found}")
        kinds = [isinstance(effect, effects.Persist) for effect in found]
        assert kinds == sorted(kinds, reverse=True), "a record comes after another effect"
        reply: object = None
        for effect in found:
            match effect:
                case effects.Reply(answer):
                    assert reply is None
                    reply = answer
                case effects.FenceOnServers():
                    self.pending.append(effect)
                case effects.ReadLedger(_, _, (key,)):
                    assert isinstance(event, events.LeaseReturned)
                    lowest = min(partition.next.get(key.source, 0) for partition in self.partitions)  # type: ignore[call-overload]
                    return self.handle(events.LedgerRead(event, lowest))
                case effects.Persist("rank_given", body):
                    self._check_rank(body)  # type: ignore[arg-type]
                case effects.Persist("member_removed", body):
                    self.books.gone.add(body["incarnation"])  # type: ignore[arg-type]
                case _:
                    pass
        return reply

    def _check_rank(self, body: dict[str, int]) -> None:
        rank, worker = body["rank"], Incarnation(body["worker"])
        former = self.books.owners.get(rank)
        assert former is None or former[0] != worker or former[0] in self.books.gone, "given to who has it"
        if former is not None and former[0] in self.books.gone:
            assert former[0] in self.books.fenced, f"rank {rank} went on before {former[0]} was fenced"
        assert worker not in self.books.gone, f"rank {rank} was given to the dead"
        self.books.fresh(body["token"])
        self.books.owners[rank] = (worker, Token(body["token"]))

    def run_fence(self, index: int, *, reaches: bool = True) -> None:
        fence = self.pending.pop(index)
        for number in range(2):
            if reaches or number == 0:
                self.refused[number].update(fence.workers)
        self.books.fenced.update(fence.workers)
        self.handle(events.WorkersFenced(fence.job, fence.workers))

    def restart(self) -> None:
        """The coordinator dies, with the calls that were under way, and another goes on."""
        again, waiting = self.machines.restart(self.now_ms)
        self.pending = [effect for effect in again if isinstance(effect, effects.FenceOnServers)]
        assert {worker for fence in self.pending for worker in fence.workers} == waiting
        assert again == self.pending
        self.trace.append(f"restarted in term {self.machine.term}")

    # ---- members

    def _register(self, role: MemberRole, address: str, pid: int) -> Incarnation:
        registration = Registration(role, address, 1, "0", "box", pid)
        answer = self.handle(events.MemberRegistered(registration))
        assert isinstance(answer, effects.Registered)
        return answer.incarnation

    def add_process(self) -> Process:
        self._next_pid += 1
        process = Process(self._register(MemberRole.WORKER, "", self._next_pid), self._next_pid)
        answer = self.handle(events.JobJoined(process.incarnation, self.settings.name, self.settings))
        assert isinstance(answer, effects.Joined)
        assert answer.started == (self.job == 0)
        self.job = answer.job
        if isinstance(self.handle(events.FeedOpened(self.caller(process), 0, SPEC)), FeedOpening):
            self.processes.append(process)
        return process

    def caller(self, process: Process) -> Caller:
        return Caller(self.job, process.incarnation)

    def beat(self, process: Process) -> None:
        try:
            answer = self.handle(events.HeartbeatReceived(process.incarnation, Report(1, 1)))
        except StaleIncarnation:
            assert process.incarnation in self.books.gone
            process.dead = True
            return
        assert isinstance(answer, effects.HeartbeatReply)
        assert answer.job_state is effects.JobPhase.RUNNING, answer
        for lease in answer.ranks:
            assert self.books.owners[lease.rank] == (process.incarnation, lease.token)

    def advance(self, ms: int) -> None:
        """Time passes in steps, as for a coordinator that is awake; servers and agent stay alive."""
        for _ in range(0, ms, 100):
            self.now_ms += 100
            for member in (*self.servers, self.agent):
                self.handle(events.HeartbeatReceived(member, Report()))
            self.handle(events.Ticked())

    # ---- what a process does next

    def act(self, process: Process) -> None:
        """One small piece of work of a process that runs, perhaps as a zombie."""
        try:
            if process.lease is None:
                self._lease(process)
            elif process.batch == self._batches(process.lease):
                self._close(process)
            else:
                self._push(process)
        except StaleToken:
            process.lease = None
        except StaleIncarnation:
            assert process.incarnation in self.books.gone
            process.dead = True

    def _lease(self, process: Process) -> None:
        answer = self.handle(events.LeaseRequested(self.caller(process), 0))
        if isinstance(answer, DataLease):
            self.books.granted(answer, process.incarnation)
            process.lease, process.sent_to, process.announce_until = answer, 0, answer.announce_until
            starts = []
            for partition in self.partitions:
                if process.incarnation in self.refused[partition.server]:
                    raise StaleIncarnation("fenced")
                if answer.token < partition.tokens.get(answer.source, 0):
                    raise StaleToken("a higher token was there")
                partition.tokens[answer.source] = answer.token
                starts.append(partition.next.get(answer.source, 0))
            process.batch, process.highest = min(starts), max(starts)
        elif isinstance(answer, FeedDone):
            assert len(self.books.done) == self.shards, "done before all data shards are"
            process.saw_done = True
        else:
            assert isinstance(answer, LeaseWait)
            assert "data shard" in answer.waiting_for

    def _push(self, process: Process) -> None:
        """The batch, to one partition; then, when all have it, the next batch."""
        lease, partition = process.lease, self.partitions[process.sent_to]
        assert lease is not None
        if self.random.random() < 0.1:
            answer = self.handle(events.LeaseRequested(self.caller(process), 0))
            stolen = isinstance(answer, DataLease) and answer.source != lease.source
            assert not stolen, "a worker that holds a data shard was given another one"
        name = (lease.source, process.batch)
        if process.sent_to == 0:
            process.skips = not self._begin(process, lease)
            if not process.skips and name in self.poison:
                process.running, process.dead = False, True
                if self.random.random() < 0.5:
                    self.handle(events.ExitReported(self.agent, process.pid, -9))
                return
        if process.incarnation in self.refused[partition.server]:
            raise StaleIncarnation("fenced")
        if lease.token < partition.tokens[lease.source]:
            raise StaleToken("a higher token was there")
        expected = partition.next.get(lease.source, 0)
        assert process.batch <= expected, "a gap"
        if process.batch == expected:
            if process.skips:
                partition.skipped.add(name)
            else:
                partition.counted[name] = partition.counted.get(name, 0) + 1
            partition.next[lease.source] = expected + 1
        process.sent_to += 1
        if process.sent_to == PARTITIONS:
            process.sent_to, process.batch = 0, process.batch + 1

    def _begin(self, process: Process, lease: DataLease) -> bool:
        """Whether the batch is to be computed."""
        if process.batch >= process.announce_until:
            return True
        event = events.BatchBegun(
            self.caller(process), lease.source, lease.token, process.batch, max(process.highest, process.batch)
        )
        answer = self.handle(event)
        assert isinstance(answer, effects.BatchVerdict)
        assert answer.counts is not None, "no checkpoint is under way"
        assert self.handle(event) == answer, "a retry is answered alike"
        process.announce_until = answer.announce_until
        return answer.counts

    def _close(self, process: Process) -> None:
        lease = process.lease
        assert lease is not None
        event = events.LeaseReturned(self.caller(process), 0, lease.source, lease.token)
        answer = self.handle(event)
        assert isinstance(answer, effects.LeaseClosed)
        self.books.closed(lease, done=answer.done)
        process.lease = None
        if answer.done:
            try:
                again = self.handle(event)
            except StaleToken as error:
                raise AssertionError("a retry of a close was refused") from error
            assert again == effects.LeaseClosed(done=True), "a retry is answered alike"

    @property
    def shards(self) -> int:
        return len(SHARDS)

    @staticmethod
    def _batches(lease: DataLease) -> int:
        return len(range(lease.begin, lease.end, BATCH))

    # ---- chaos, then healing

    def fault(self) -> None:
        """One random event, good or bad."""
        chance = self.random.random()
        running = [each for each in self.processes if each.running and not each.dead]
        process = self.random.choice(running) if running else None
        if chance < 0.05 and len(running) < WORKERS_MAX:
            self.add_process()
        elif chance < 0.20:
            self.advance(self.random.choice((100, 300, 700)))
        elif chance < 0.26 and self.pending:
            self.run_fence(self.random.randrange(len(self.pending)), reaches=self.random.random() < 0.8)
        elif chance < 0.28:
            self._wake_one()
        elif process is None:
            self.advance(100)
        elif chance < 0.30:
            process.running = False
            process.dead = self.random.random() < 0.5
            if process.dead and self.random.random() < 0.5:
                self.handle(events.ExitReported(self.agent, process.pid, -9))
        elif chance < 0.31 and len(self.machine.jobs[0].workers) > 1:
            self._leave(process)
        elif chance < 0.33 and process.lease is not None:
            try:
                self._close(process)
            except StaleToken:
                process.lease = None
            except StaleIncarnation:
                process.dead = True
        elif chance < 0.55:
            self.beat(process)
        elif self.settings.consistency.mode is ConsistencyMode.ASYNC:
            self.act(process)

    def _wake_one(self) -> None:
        asleep = [each for each in self.processes if not each.running and not each.dead]
        if asleep:
            self.random.choice(asleep).running = True

    def _leave(self, process: Process) -> None:
        process.dead = True
        if process.incarnation in self.books.gone:
            with pytest.raises(StaleIncarnation):
                self.handle(events.MemberLeft(process.incarnation, ""))
            return
        # nothing more comes from it, so it need not be fenced before others go on
        self.books.fenced.add(process.incarnation)
        self.handle(events.MemberLeft(process.incarnation, ""))

    def heal(self) -> None:
        """No more faults. Raises AssertionError where progress is not made."""
        self.add_process()
        for _ in range(HEAL_ROUNDS_MAX):
            while self.pending:
                self.run_fence(0)
            live = [each for each in self.processes if each.running and not each.dead]
            if not live:
                live = [self.add_process()]
            for process in live:
                self.beat(process)
            for process in live:
                if (
                    not process.dead
                    and not process.saw_done
                    and self.settings.consistency.mode is ConsistencyMode.ASYNC
                ):
                    self.act(process)
            self.advance(100)
            if self._is_healed():
                return
        raise AssertionError(f"no progress in {HEAL_ROUNDS_MAX} rounds")

    def _is_healed(self) -> bool:
        live = [each for each in self.processes if each.running and not each.dead]
        if self.settings.consistency.mode is ConsistencyMode.ASYNC:
            return bool(live) and all(each.saw_done for each in live)
        owners = [owner for owner, _ in self.books.owners.values()]
        return len(owners) == 3 and all(owner in {each.incarnation for each in live} for owner in owners)


def run(seed: int, mode: UpdateMode, *, restarts: bool = False) -> Yard:
    yard = Yard(seed, mode)
    for _ in range(FAULT_ACTIONS):
        yard.fault()
        chance = yard.restarts.random() if restarts else 1.0
        if chance < 0.02:
            yard.restart()
        elif chance < 0.03:
            yard.machines.split(yard.now_ms)
    yard.heal()
    return yard


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_each_data_shard_is_done_once_whatever_happens(seed: int, restarts: bool) -> None:
    yard = run(seed, UpdateMode.ASYNC, restarts=restarts)
    assert sorted(yard.books.done) == sorted(set(yard.books.done))
    assert len(yard.books.done) == yard.shards
    condemned = {(each.source, each.sequence) for each in yard.machine.jobs[0].feeds.quarantine}
    assert yard.poison <= condemned, "a batch that kills every worker was got through"
    for partition in yard.partitions:
        assert partition.counted == dict.fromkeys(set(BATCHES) - condemned, 1), "a batch was not counted exactly once"
        assert partition.skipped == condemned, "a batch is in quarantine here and counts there"


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_each_rank_finds_one_living_owner_whatever_happens(seed: int, restarts: bool) -> None:
    yard = run(seed, UpdateMode.SYNC, restarts=restarts)
    counts = [
        sum(owner == each.incarnation for owner, _ in yard.books.owners.values())
        for each in yard.processes
        if each.running and not each.dead
    ]
    assert sum(counts) == 3


@pytest.mark.parametrize("mode", list(UpdateMode))
def test_one_seed_gives_one_trace(mode: UpdateMode) -> None:
    assert run(7, mode, restarts=True).trace == run(7, mode, restarts=True).trace
