"""Ledgers that forget (rule A7), in runs in which partitions and whole jobs go back to checkpoints.

To the faults of `AsyncRun` come: checkpoints, whose partitions are cut at different moments, each with its ledger;
orders to forget that reach servers late, twice, or never; servers whose partitions begin again from the newest
checkpoint; jobs that go back as a whole to the one before. The oracle is the same: each batch counts once in each
partition.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from shardyard.checkpoints.partition_file import BlockState, PartitionState
from shardyard.domain.errors import StaleGeneration
from shardyard.domain.ids import Caller, Generation, PartitionId, Term, Token, Version
from shardyard.domain.push_names import DataShardSource, DoneDataShards, SourceKey
from shardyard_ps_server.hosting import orders
from shardyard_ps_server.hosting.hosted_job import HostedJob
from shardyard_ps_server.partition import ledger as ledgers
from shardyard_ps_server.partition.checkpoint_cuts import block_arrays, take_cut
from shardyard_ps_server.partition.partition import Partition
from tests.simulation.exactly_once import JOB, AsyncRun, Violation, incarnation_of, newest_values

SEEDS = range(120)
RED_SEEDS_MAX = 2_000


@dataclass
class Kept:
    """A checkpoint, or what there is of it."""

    done: frozenset[SourceKey]
    floor: Token
    partitions: dict[PartitionId, PartitionState] = field(default_factory=dict)


@dataclass(frozen=True)
class Order:
    """To a server, under a generation."""

    server: int
    generation: Generation
    done: DoneDataShards
    floor: Token


ToForget = Callable[["KeepingRun", Kept], tuple[frozenset[SourceKey], Token]]


class KeepingRun(AsyncRun):
    """`to_forget`: the data shards that are named to servers when a checkpoint is committed, and the floor."""

    def __init__(self, seed: int, *, to_forget: ToForget | None = None) -> None:
        self._to_forget = to_forget or (lambda _, kept: (kept.done, kept.floor))
        self._kept: list[Kept] = []
        self._draft: Kept | None = None
        self._orders: list[Order] = []
        self._life = 1
        self.forgotten = 0
        super().__init__(seed)
        self._keep_all()

    def _tick(self, *, faulty: bool) -> None:
        chance = self.rng.random()
        if chance < 0.12:
            self._go_on_with_checkpoint()
        elif chance < 0.2 and self._orders:
            self._carry_order(faulty=faulty)
        elif faulty and chance < 0.21:
            self._restore_server(self.rng.randrange(len(self.yard.stores)))
        elif faulty and chance < 0.213 and len(self._kept) > 1:
            self._restore_job()
        else:
            super()._tick(faulty=faulty)

    # ---- checkpoints

    def _go_on_with_checkpoint(self) -> None:
        if self._draft is None:
            # before any partition is cut (rule A9)
            live = [lease.token for worker in self._workers if worker.alive for lease in worker.leases]
            self._draft = Kept(frozenset(self._done), Token(min(live, default=self._last_token + 1)))
            return
        missing = [
            part.partition for part in self.yard.layout.partitions if part.partition not in self._draft.partitions
        ]
        if missing:
            number = self.rng.choice(missing)
            self._draft.partitions[number] = _cut(self._partition(number))
            return
        kept, self._draft = self._draft, None
        self._kept = [*self._kept, kept][-2:]
        shards = len(self._shards)
        closed, floor = self._to_forget(self, kept)
        done = DoneDataShards(0, shards, shards, frozenset(range(shards)) - {_index(key) for key in closed})
        self._orders += [Order(server, self.yard.generation, done, floor) for server in range(len(self.yard.stores))]

    def _keep_all(self) -> None:
        """The first checkpoint, of a job that has done nothing."""
        states = {part.partition: _cut(self._partition(part.partition)) for part in self.yard.layout.partitions}
        self._kept = [Kept(frozenset(), Token(1), states)]

    def _carry_order(self, *, faulty: bool) -> None:
        order = self.rng.choice(self._orders)
        if not (faulty and self.rng.random() < 0.3):
            self._orders.remove(order)
        if faulty and self.rng.random() < 0.2:
            return
        store = self.yard.stores[order.server]
        before = sum(store.hosted()[0].partitions[p].describe()[1] for p in self.yard.owned[order.server])
        caller = Caller(JOB, term=Term(1))
        try:
            orders.forget_sources(
                store, caller, incarnation_of(order.server), order.generation, [order.done], [], order.floor
            )
        except StaleGeneration:
            return
        self.forgotten += before - sum(
            store.hosted()[0].partitions[p].describe()[1] for p in self.yard.owned[order.server]
        )

    # ---- going back

    def _restore_server(self, server: int) -> None:
        """Its partitions are as the newest checkpoint has them: what was closed since is leased again (rule A11)."""
        self._begin_again(self._kept[-1], set(self.yard.owned[server]))
        self._reopen(self._done - self._kept[-1].done)

    def _restore_job(self) -> None:
        """All of it, to the checkpoint before the newest (rule A8)."""
        self._kept = self._kept[:-1]
        kept = self._kept[-1]
        self._begin_again(kept, {part.partition for part in self.yard.layout.partitions})
        self._reopen(self._done - kept.done)

    def _begin_again(self, kept: Kept, partitions: set[PartitionId]) -> None:
        self._draft = None
        self._life += 1
        self.yard.generation = Generation(self.yard.generation + 1)
        for server in range(len(self.yard.stores)):
            self.yard.announce(server)
        for number in sorted(partitions):
            state = kept.partitions[number]
            version = Version(self._life, state.version.number)
            self._partition(number).restore(dataclasses.replace(state, version=version))
        # whoever was declared dead is not told of the new map; the others open their leases again under it (rule A5)
        self._workers = [worker for worker in self._workers if worker.alive]
        for worker in self._workers:
            for lease in worker.leases:
                lease.unopened, lease.nexts = list(range(len(self.yard.stores))), []

    def _reopen(self, keys: set[SourceKey]) -> None:
        self._done -= keys
        self._free += sorted(keys, key=_index)

    def _partition(self, number: PartitionId) -> Partition:
        server = next(server for server, owned in enumerate(self.yard.owned) if number in owned)
        return self.yard.stores[server].hosted()[0].partitions[number]

    def judge(self) -> None:
        for server, store in enumerate(self.yard.stores):
            for partition in self.yard.owned[server]:
                self._judge_partition(partition, newest_values(store, partition))


def _index(key: SourceKey) -> int:
    assert isinstance(key.source, DataShardSource)
    return key.source.index


def _cut(partition: Partition) -> PartitionState:
    cut = take_cut(partition)
    try:
        cut.complete()
        blocks = []
        for index in range(len(partition.payload.blocks)):
            arrays = {name: array.copy() for name, array in block_arrays(partition, index, cut).items()}
            blocks.append(BlockState(index, arrays.pop("values"), arrays, int(cut.counts[index])))
        return PartitionState(cut.partition, cut.version, tuple(blocks), cut.marks, cut.floor)
    finally:
        cut.release()


def first_red(make: Callable[[int], KeepingRun]) -> Violation:
    for seed in range(RED_SEEDS_MAX):
        try:
            make(seed).run()
        except Violation as violation:
            return violation
    raise AssertionError(f"{RED_SEEDS_MAX} seeds are green")


@pytest.mark.long
def test_each_batch_counts_once_whatever_is_forgotten() -> None:
    forgotten = 0
    for seed in SEEDS:
        run = KeepingRun(seed)
        run.run()
        forgotten += run.forgotten
    assert forgotten > len(SEEDS), "next to nothing was forgotten"


@pytest.mark.long
def test_what_is_closed_since_a_checkpoint_was_begun_may_not_be_forgotten() -> None:
    def all_that_is_closed(run: KeepingRun, _: Kept) -> tuple[frozenset[SourceKey], Token]:
        live = [lease.token for worker in run._workers if worker.alive for lease in worker.leases]
        return frozenset(run._done), Token(min(live, default=run._last_token + 1))

    assert "counted 2 times" in str(first_red(lambda seed: KeepingRun(seed, to_forget=all_that_is_closed)))


def test_what_is_leased_again_may_not_be_forgotten() -> None:
    def all_below_the_floor(run: KeepingRun, kept: Kept) -> tuple[frozenset[SourceKey], Token]:
        return frozenset(run._shards), kept.floor

    assert "counted 2 times" in str(first_red(lambda seed: KeepingRun(seed, to_forget=all_below_the_floor)))


def test_without_the_floor_late_pushes_are_not_told_from_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forget = ledgers.Ledger.forget

    def forget_all(self: ledgers.Ledger, done: object, workers: object, floor: Token) -> None:
        before = self._floor
        forget(self, done, workers, Token(1 << 40))  # type: ignore[arg-type]
        self._floor = before

    monkeypatch.setattr(ledgers.Ledger, "forget", forget_all)
    assert "which was not opened" in str(first_red(KeepingRun))


@pytest.mark.long
def test_order_of_a_past_that_was_taken_back_may_not_be_carried_out(monkeypatch: pytest.MonkeyPatch) -> None:
    check = HostedJob.check_generation

    def unless_forgetting(self: HostedJob, generation: Generation) -> None:
        if not forgetting:
            check(self, generation)

    forgetting: list[bool] = []
    carry = KeepingRun._carry_order

    def carried(self: KeepingRun, *, faulty: bool) -> None:
        forgetting.append(True)
        carry(self, faulty=faulty)
        forgetting.clear()

    monkeypatch.setattr(HostedJob, "check_generation", unless_forgetting)
    monkeypatch.setattr(KeepingRun, "_carry_order", carried)
    assert "counted" in str(first_red(KeepingRun))
