"""The data shards of one asynchronous feed: free, leased, or done.

A feed's samples are cut into data shards of equal length, numbered through all epochs. Invariant: memory does not grow
with the number of epochs or samples. Must not know: other feeds, the quarantine, servers, time.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from shardyard.domain import limits
from shardyard.domain.errors import NotFound
from shardyard.domain.ids import Incarnation, Token
from shardyard.domain.push_names import DataLease, DataShardSource
from shardyard_coordinator.records import Body, Entry, checked_items, checked_number, require
from shardyard_coordinator.work.feeds import FeedCounts, FeedSpec

HOLDERS_NAMED_MAX: Final = 3


@dataclass(frozen=True, slots=True)
class HeldShard:
    """`first`: the batch at which the lease began, which is the lowest watermark at that time; None if it was not
    read."""

    worker: Incarnation
    token: Token
    first: int | None


@dataclass(slots=True)
class DataShards:
    """One asynchronous feed. Data shards are numbered through all epochs. Those below `begun` have been leased at least
    once, and are done unless they are held or returned. `reached`: the lowest watermark of those that were returned, if
    it is known."""

    feed: int
    spec: FeedSpec
    batches_per_data_shard: int
    per_epoch: int
    begun: int = 0
    returned: list[int] = field(default_factory=list)
    held: dict[int, HeldShard] = field(default_factory=dict)
    reached: dict[int, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return self.per_epoch * self.spec.epochs

    @property
    def done(self) -> int:
        return self.begun - len(self.returned) - len(self.held)

    @property
    def samples_done(self) -> int:
        """The samples of the data shards that are done, over all epochs."""
        whole, rest = divmod(self.begun, self.per_epoch)
        begun = whole * self.span(self.source(self.per_epoch - 1))[1]
        begun += self.span(self.source(rest - 1))[1] if rest else 0
        undone = (self.span(self.source(number)) for number in (*self.returned, *self.held))
        return begun - sum(end - begin for begin, end in undone)

    def source(self, number: int) -> DataShardSource:
        return DataShardSource(self.feed, number // self.per_epoch, number % self.per_epoch)

    def number(self, source: DataShardSource) -> int:
        if source.epoch >= self.spec.epochs or source.index >= self.per_epoch:
            raise NotFound(
                f"{source} does not exist; feed {self.feed} has {self.spec.epochs} epochs of {self.per_epoch}"
            )
        return source.epoch * self.per_epoch + source.index

    def span(self, source: DataShardSource) -> tuple[int, int]:
        """The data shard's samples, [begin, end) of the epoch's permutation."""
        length = self.batches_per_data_shard * self.spec.batch_size
        begin = source.index * length
        return begin, min(begin + length, self.spec.samples_by_batches)

    def batches(self, source: DataShardSource) -> int:
        begin, end = self.span(source)
        return -(-(end - begin) // self.spec.batch_size)

    def batch_span(self, source: DataShardSource, batch: int) -> tuple[int, int]:
        begin, end = self.span(source)
        begin += batch * self.spec.batch_size
        return begin, min(begin + self.spec.batch_size, end)

    def first_of(self, source: DataShardSource) -> int | None:
        """The batch at which the lease of a data shard began; None if that is not known, or if no worker holds it.
        Raises NotFound."""
        held = self.held.get(self.number(source))
        return None if held is None else held.first

    def place(self) -> tuple[int, int]:
        """How far a drained feed is: the whole epochs that count, and the samples that count from the start of the next
        epoch's permutation."""
        epoch, index = divmod(self.begun, self.per_epoch)
        return epoch, self.span(self.source(self.begun - 1))[1] if index else 0

    def is_done(self, source: DataShardSource) -> bool:
        number = self.number(source)
        return number < self.begun and number not in self.held and number not in self.returned

    def lease(self, number: int) -> DataLease:
        source = self.source(number)
        begin, end = self.span(source)
        return DataLease(source, self.held[number].token, begin, end)

    def held_by(self, worker: Incarnation) -> list[int]:
        """The data shards that the worker holds, in the order in which they were leased."""
        held = [(held.token, number) for number, held in self.held.items() if held.worker == worker]
        return [number for _, number in sorted(held)]

    def take(self, *, fresh: bool) -> int | None:
        """The next free data shard: a returned one first, else a fresh one if `fresh`."""
        if self.returned:
            return self.returned.pop(0)
        if self.begun == self.total or not fresh:
            return None
        self.begun += 1
        return self.begun - 1

    def hold(self, number: int, worker: Incarnation, token: Token, *, fresh: bool) -> None:
        """`fresh`: the data shard was never leased before."""
        self.held[number] = HeldShard(worker, token, 0 if fresh else self.reached.pop(number, None))

    def give_back(self, number: int, reached: int | None) -> None:
        del self.held[number]
        bisect.insort(self.returned, number)
        if reached is not None:
            self.reached = dict(sorted({**self.reached, number: reached}.items()))

    def forget_reached(self) -> None:
        """Partitions went back, so it is no longer known where leases begin."""
        self.reached.clear()
        self.held = {number: dataclasses.replace(held, first=None) for number, held in self.held.items()}

    def take_again(self, number: int) -> bool:
        """Repeats a recorded `take`. Returns whether the data shard was fresh. Raises DamagedRecord."""
        if number in self.returned:
            self.returned.remove(number)
            return False
        require(number == self.begun < self.total, f"{self.source(number)} was leased out of order")
        self.begun += 1
        return True

    def has(self, source: DataShardSource, batch: int) -> bool:
        known = source.epoch < self.spec.epochs and source.index < self.per_epoch
        return known and batch < self.batches(source)

    def reopen(self, before: DataShards | None) -> list[int]:
        """Frees and returns the data shards that were done since an earlier state. None: there was no such feed."""
        begun = 0 if before is None else before.begun
        undone = {*range(begun, self.begun), *(() if before is None else (*before.returned, *before.held))}
        again = sorted(undone - set(self.returned) - set(self.held))
        self.returned = sorted([*self.returned, *again])
        self.forget_reached()
        return again

    # ---- for people

    def counts(self, quarantined: int) -> FeedCounts:
        """`quarantined`: batches of the feed that do not count."""
        return FeedCounts(
            self.feed,
            self.spec.samples,
            self.spec.epochs,
            free=self.total - self.begun + len(self.returned),
            leased=len(self.held),
            done=self.done,
            finished=self.done == self.total,
            quarantined=quarantined,
        )

    @property
    def holders(self) -> str:
        """The data shards that are leased. The first ones are named with their workers."""
        held = sorted(self.held.items())
        named = [f"{self.source(number)} (worker {each.worker})" for number, each in held[:HOLDERS_NAMED_MAX]]
        more = len(held) - len(named)
        return ", ".join(named) + (f" and {more} more" if more else "")


# ---- records


def feed_progress(shards: DataShards, ended: Sequence[int]) -> Entry:
    """How far the feed is. `ended`: data shards whose leases have records of their own, like those that are held."""
    free = sorted([*shards.returned, *ended, *shards.held])
    reached = [list(each) for each in sorted(shards.reached.items())]
    return "feed_progress", {"feed": shards.feed, "begun": shards.begun, "free": free, "reached": reached}


def data_leased(source: DataShardSource, worker: Incarnation, token: Token, *, first: int | None) -> Entry:
    """`first`: the batch at which the lease begins; None if that was not read."""
    return "data_leased", {**_lease_body(source, worker, token), "first": first}


def data_closed(
    source: DataShardSource, worker: Incarnation, token: Token, *, done: bool, first: int | None, reached: int
) -> Entry:
    """All partitions have the batches below `reached`. Those from `first` on were computed under this lease."""
    return "data_closed", {**_lease_body(source, worker, token), "done": done, "first": first, "next": reached}


def restore_progress(shards: DataShards, body: Body) -> None:
    """Applies the record `feed_progress`. Raises DamagedRecord."""
    require(not shards.begun, f"feed {shards.feed} begins twice")
    shards.begun = body.number("begun", most=shards.total)
    shards.returned = sorted(body.numbers("free", most=shards.begun - 1))
    require(len(set(shards.returned)) == len(shards.returned), "free: a data shard is there twice")
    for each in body.items("reached"):
        number, reached = checked_items(each, "a data shard and its watermark", count=2)
        known = checked_number(number, "a data shard", most=shards.begun - 1)
        require(known in shards.returned, f"reached: data shard {known} is not free")
        shards.reached[known] = checked_number(reached, "its watermark", most=limits.SEQUENCE_MAX)


def restore_lease(shards: DataShards, body: Body) -> None:
    """Applies the record `data_leased`. Raises DamagedRecord."""
    number, worker, token = _lease_of(shards, body)
    shards.hold(number, worker, token, fresh=shards.take_again(number))
    first = None if body.is_null("first") else body.number("first", most=limits.SEQUENCE_MAX)
    shards.held[number] = HeldShard(worker, token, first)


def closed_lease(shards: DataShards, body: Body) -> tuple[int, Incarnation, Token]:
    """Reads from the record `data_closed` which lease ends. Raises DamagedRecord."""
    number, worker, token = _lease_of(shards, body)
    held = shards.held.get(number)
    matches = held is not None and (held.worker, held.token) == (worker, token)
    require(matches, f"{shards.source(number)} was closed and is not held")
    return number, worker, token


def _lease_body(source: DataShardSource, worker: Incarnation, token: Token) -> dict[str, object]:
    return {"feed": source.feed, "epoch": source.epoch, "index": source.index, "worker": worker, "token": token}


def _lease_of(shards: DataShards, body: Body) -> tuple[int, Incarnation, Token]:
    epoch = body.number("epoch", most=shards.spec.epochs - 1)
    index = body.number("index", most=shards.per_epoch - 1)
    worker, token = Incarnation(body.number("worker", least=1)), Token(body.number("token", least=1))
    return shards.number(DataShardSource(shards.feed, epoch, index)), worker, token
