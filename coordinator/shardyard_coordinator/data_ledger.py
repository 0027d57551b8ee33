"""Which samples are whose, and which are done (promise 2; rules A1, A6).

Owns: a job's feeds. Asynchronous (`DataLedger`): data shards, each free, leased under a token, or done. Synchronous
(`StepLedger`): each feed is a range of steps, with backup workers also of those that make up for what was dropped.
Both: the batches in quarantine, which do not count. Invariants: a data shard is leased to one worker at a time; tokens
only grow; a data shard is done only when the servers' watermarks said so, and stays done; memory does not grow with the
number of epochs or samples, but with that of dropped batches until they are made up for. Must not know: servers,
members, time.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from shardyard.ground import limits
from shardyard.ground.errors import FeedConflict, InvalidRequest, NotFound, NotReady, StaleToken, TooLarge
from shardyard.ground.types import (
    DataLease,
    DataShardSource,
    DoneDataShards,
    Incarnation,
    LeasedSource,
    Rank,
    RankSource,
    Token,
)
from shardyard.ground.units import Course, Units
from shardyard_coordinator.backups import Batch, MakeUp, StepVerdicts
from shardyard_coordinator.quarantine import Condemned, Quarantine
from shardyard_coordinator.records import (
    SUM_MAX,
    Body,
    DamagedRecord,
    Entry,
    checked_items,
    checked_number,
    checked_text,
    require,
)

DATA_SHARDS_PER_WORKER_MIN: Final = 4
"""Data shards of an epoch for each expected worker, where the coordinator chooses: so many that the end of an epoch is
not spent waiting for one worker."""
BATCHES_PER_DATA_SHARD_AUTO_MAX: Final = 64
HOLDERS_NAMED_MAX: Final = 3


@dataclass(frozen=True, slots=True)
class FeedSpec:
    """How a data set is read. `batch_size` is per worker (asynchronous) or per logical rank (synchronous); so many
    batches make a step are `accumulate`."""

    samples: int
    fingerprint: str
    batch_size: int
    epochs: int
    shuffle: bool
    drop_last: bool
    accumulate: int = 1

    def check(self) -> None:
        """Raises InvalidRequest or TooLarge."""
        for name, value, value_max in (
            ("samples", self.samples, limits.SAMPLES_MAX),
            ("batch_size", self.batch_size, limits.BATCH_SIZE_MAX),
            ("accumulate", self.accumulate, limits.ACCUMULATE_MAX),
            ("epochs", self.epochs, limits.EPOCHS_MAX),
        ):
            if value < 1:
                raise InvalidRequest(f"a feed with {name} {value}; expected at least 1", todo="check job.batches' call")
            if value > value_max:
                raise TooLarge(f"a feed with {name} {value}; at most {value_max} are taken")

    def units(self, samples_per_unit: int, what: str) -> int:
        """Batches, or steps, of an epoch. Raises InvalidRequest where drop_last leaves none."""
        full, rest = divmod(self.samples, samples_per_unit)
        if self.drop_last and not full:
            raise InvalidRequest(
                f"{self.samples} samples are fewer than one {what} of {samples_per_unit}, and drop_last drops it",
                todo="choose a smaller batch_size, or drop_last=False",
            )
        return full if self.drop_last or not rest else full + 1

    @property
    def samples_by_batches(self) -> int:
        """Those of an epoch that count where it is dealt by batches."""
        return min(self.units(self.batch_size, "batch") * self.batch_size, self.samples)

    def cut(self, logical_ranks: int, local_steps: int) -> Units:
        """Into steps, or rounds, of a synchronous job."""
        return Units(
            self.samples, self.batch_size, logical_ranks, self.drop_last, self.accumulate, local_steps=local_steps
        )


@dataclass(frozen=True, slots=True)
class FeedOpening:
    """What a worker must know to read a feed. `units_per_epoch`: data shards, or steps. `begun`: what had counted of it
    when the job became synchronous, epochs and samples of the next one."""

    batches_per_data_shard: int
    units_per_epoch: int
    first_step: int
    done: bool
    begun: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class LeaseWait:
    """All that is left is held by others."""

    waiting_for: str


@dataclass(frozen=True, slots=True)
class FeedDone:
    """Every sample of every epoch has been counted."""


@dataclass(frozen=True, slots=True)
class FeedCounts:
    """Units of all epochs by state."""

    feed: int
    samples: int
    epochs: int
    free: int
    leased: int
    done: int
    finished: bool
    quarantined: int


@dataclass(frozen=True, slots=True)
class QuarantinedBatch:
    """A batch that does not count, and its samples: positions [begin, end) of the epoch's permutation."""

    feed: int
    epoch: int
    condemned: Condemned
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class _Held:
    """`first`: the batch at which the lease began, the lowest watermark then; None where that was not read."""

    worker: Incarnation
    token: Token
    first: int | None


@dataclass(slots=True)
class _DataShards:
    """One asynchronous feed. Data shards are numbered through all epochs; those below `begun` have been leased at least
    once, and are done unless they are held or returned. `reached`: the lowest watermark of those that were returned,
    where it is known."""

    feed: int
    spec: FeedSpec
    batches_per_data_shard: int
    per_epoch: int
    begun: int = 0
    returned: list[int] = field(default_factory=list)
    held: dict[int, _Held] = field(default_factory=dict)
    reached: dict[int, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return self.per_epoch * self.spec.epochs

    @property
    def done(self) -> int:
        return self.begun - len(self.returned) - len(self.held)

    @property
    def samples_done(self) -> int:
        """Samples of the data shards that are done, over all epochs."""
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
        """[begin, end) of the epoch's permutation."""
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

    def is_done(self, source: DataShardSource) -> bool:
        number = self.number(source)
        return number < self.begun and number not in self.held and number not in self.returned

    def lease(self, number: int) -> DataLease:
        source = self.source(number)
        begin, end = self.span(source)
        return DataLease(source, self.held[number].token, begin, end)

    def held_by(self, worker: Incarnation) -> int | None:
        return next((number for number, held in self.held.items() if held.worker == worker), None)

    def take(self, *, fresh: bool) -> int | None:
        """The next free data shard: a returned one, else a fresh one, if those are given."""
        if self.returned:
            return self.returned.pop(0)
        if self.begun == self.total or not fresh:
            return None
        self.begun += 1
        return self.begun - 1

    def hold(self, number: int, worker: Incarnation, token: Token, *, fresh: bool) -> None:
        """`fresh`: it was never leased before."""
        self.held[number] = _Held(worker, token, 0 if fresh else self.reached.pop(number, None))

    def give_back(self, number: int, reached: int | None) -> None:
        del self.held[number]
        bisect.insort(self.returned, number)
        if reached is not None:
            self.reached = dict(sorted({**self.reached, number: reached}.items()))

    def forget_reached(self) -> None:
        """Partitions went back: where leases begin is not known any more."""
        self.reached.clear()
        self.held = {number: dataclasses.replace(held, first=None) for number, held in self.held.items()}

    def take_again(self, number: int) -> bool:
        """As `take` once did; whether it was fresh. Raises DamagedRecord."""
        if number in self.returned:
            self.returned.remove(number)
            return False
        require(number == self.begun < self.total, f"{self.source(number)} was leased out of order")
        self.begun += 1
        return True


class DataLedger:
    """The data shards of an asynchronous job."""

    def __init__(
        self, *, batches_per_data_shard: int | None, workers_expected: int, next_token: Callable[[], Token]
    ) -> None:
        self._batches = batches_per_data_shard
        self._workers_expected = workers_expected
        self._next_token = next_token
        self._feeds: list[_DataShards] = []
        self.quarantine = Quarantine()
        self._closed: dict[Incarnation, tuple[DataShardSource, Token]] = {}

    def __len__(self) -> int:
        return len(self._feeds)

    def open(self, feed: int, spec: FeedSpec) -> FeedOpening:
        """The first to open a feed decides. Raises FeedConflict, InvalidRequest, TooLarge."""
        _check_opening(feed, spec, [each.spec for each in self._feeds])
        found = self._add(feed, spec) if feed == len(self._feeds) else self._feeds[feed]
        return FeedOpening(found.batches_per_data_shard, found.per_epoch, 0, found.done == found.total)

    def lease(self, feed: int, worker: Incarnation, *, fresh: bool = True) -> DataLease | LeaseWait | FeedDone:
        """A data shard for the worker; the one that it holds already, if any. `fresh`: also one that was never leased.
        Raises NotFound."""
        shards = self._require(feed)
        number = shards.held_by(worker)
        if number is None:
            begun = shards.begun
            number = shards.take(fresh=fresh)
            if number is None and shards.done == shards.total:
                return FeedDone()
            if number is None:
                return LeaseWait(_holders(shards) if shards.held else "data shards that nobody has begun")
            shards.hold(number, worker, self._next_token(), fresh=shards.begun > begun)
        return shards.lease(number)

    def held(self, worker: Incarnation) -> list[DataShardSource]:
        """What is leased to the worker."""
        found = [(shards, shards.held_by(worker)) for shards in self._feeds]
        return [shards.source(number) for shards, number in found if number is not None]

    @property
    def working(self) -> frozenset[Incarnation]:
        """The workers that have something leased."""
        return frozenset(held.worker for shards in self._feeds for held in shards.held.values())

    @property
    def is_drained(self) -> bool:
        """Whether all data shards are done that were ever leased."""
        return not any(shards.held or shards.returned for shards in self._feeds)

    @property
    def holders(self) -> str:
        """The data shards that were begun and are not done, the first ones with their workers; for people."""
        free = [str(shards.source(number)) for shards in self._feeds for number in shards.returned]
        held = [_holders(shards) for shards in self._feeds if shards.held]
        return ", ".join([*held, *(f"{source} (nobody)" for source in free[:HOLDERS_NAMED_MAX])])

    def place(self, feed: int) -> tuple[int, int, int]:
        """Of a feed that is drained: so many epochs have counted, and so many samples of the next one's permutation,
        which are its first; and how many batches its data shards have. Raises NotFound."""
        shards = self._require(feed)
        assert self.is_drained
        epoch, index = divmod(shards.begun, shards.per_epoch)
        begun = shards.span(shards.source(shards.begun - 1))[1] if index else 0
        return epoch, begun, shards.batches_per_data_shard

    def check_begin(self, source: LeasedSource, worker: Incarnation, token: Token, batch: int) -> None:
        """Raises StaleToken, NotFound or InvalidRequest unless the worker may compute the batch now."""
        if not isinstance(source, DataShardSource):
            raise InvalidRequest(f"{source} in an asynchronous job")
        if self.is_closed(source, worker, token):
            raise StaleToken(f"{source} was closed under token {token}", facts={"token": str(token)})
        if batch >= self._feeds[source.feed].batches(source):
            raise InvalidRequest(f"batch {batch} of {source}, which has {self._feeds[source.feed].batches(source)}")

    def first_of(self, source: DataShardSource) -> int | None:
        """The batch at which the lease of a data shard began; None where that is not known, or nobody holds it."""
        shards = self._require(source.feed)
        held = shards.held.get(shards.number(source))
        return None if held is None else held.first

    def release(
        self, worker: Incarnation, reached: Mapping[LeasedSource, int] = MappingProxyType({})
    ) -> list[DataShardSource]:
        """The worker is gone; what it held is the next to be leased. `reached`: where its sources stand for good."""
        freed = []
        for shards in self._feeds:
            number = shards.held_by(worker)
            if number is not None:
                source = shards.source(number)
                shards.give_back(number, reached.get(source))
                freed.append(source)
        self._closed.pop(worker, None)
        return freed

    def is_closed(self, source: DataShardSource, worker: Incarnation, token: Token) -> bool:
        """True where this lease was closed as done before: the worker asks again. False where it holds the lease.
        Raises StaleToken where it does not, NotFound."""
        shards = self._require(source.feed)
        number = shards.number(source)
        if self._closed.get(worker) == (source, token):
            return True
        held = shards.held.get(number)
        if held is None or held.worker != worker or held.token != token:
            now = "nobody" if held is None else f"worker {held.worker} under token {held.token}"
            raise StaleToken(
                f"worker {worker} does not hold {source} under token {token}; {now} does",
                facts={"source": str(source), "token": str(token)},
            )
        return False

    def close(self, source: DataShardSource, worker: Incarnation, token: Token, *, next_sequence: int) -> bool:
        """Ends the lease. `next_sequence` is the lowest next sequence over all partitions. Returns whether the data
        shard is done; if not, it is free again. Raises StaleToken, NotFound."""
        if self.is_closed(source, worker, token):
            return True
        shards = self._feeds[source.feed]
        number = shards.number(source)
        if next_sequence < shards.batches(source):
            shards.give_back(number, next_sequence)
            return False
        self._end(shards, number, worker, token)
        return True

    @property
    def tokens(self) -> list[Token]:
        """Of the leases that are held."""
        return [held.token for shards in self._feeds for held in shards.held.values()]

    @property
    def done(self) -> tuple[DoneDataShards, ...]:
        """The data shards that are closed."""
        return tuple(
            DoneDataShards(each.feed, each.per_epoch, each.begun, frozenset((*each.returned, *each.held)))
            for each in self._feeds
            if each.begun
        )

    def counts(self, last: int) -> tuple[FeedCounts, ...]:
        """Of the `last` feeds opened."""
        return tuple(
            FeedCounts(
                each.feed,
                each.spec.samples,
                each.spec.epochs,
                free=each.total - each.begun + len(each.returned),
                leased=len(each.held),
                done=each.done,
                finished=each.done == each.total,
                quarantined=self._quarantined_in(each.feed),
            )
            for each in self._feeds[-last:]
        )

    def samples_done(self) -> int:
        """Samples counted so far, by the servers' word: those of the data shards that are done."""
        left_out = sum(each.end - each.begin for each in self.quarantined() if self._is_done(each.condemned.source))
        return sum(each.samples_done for each in self._feeds) - left_out

    def quarantined(self) -> Iterator[QuarantinedBatch]:
        """All batches that do not count, in the order of the verdicts."""
        for condemned in self.quarantine:
            source = condemned.source
            assert isinstance(source, DataShardSource)
            begin, end = self._feeds[source.feed].batch_span(source, condemned.sequence)
            yield QuarantinedBatch(source.feed, source.epoch, condemned, begin, end)

    def spec(self, feed: int) -> FeedSpec:
        """Raises NotFound."""
        return self._require(feed).spec

    # ---- records

    def entries(self) -> list[Entry]:
        """Records that make this ledger anew: the feeds, how far each is, then the last lease that each worker has
        closed, and the leases that are held."""
        opened: list[Entry] = []
        leases: list[Entry] = []
        closed = sorted(self._closed.items())
        for shards in self._feeds:
            ended = [(shards.number(end[0]), worker, end[1]) for worker, end in closed if end[0].feed == shards.feed]
            held = sorted(shards.held.items())
            opening = FeedOpening(shards.batches_per_data_shard, shards.per_epoch, 0, done=False)
            opened.append(feed_opened(shards.feed, shards.spec, opening))
            if shards.begun:
                free = sorted([*shards.returned, *(number for number, _, _ in ended), *shards.held])
                reached = [list(each) for each in sorted(shards.reached.items())]
                progress = {"feed": shards.feed, "begun": shards.begun, "free": free, "reached": reached}
                opened.append(("feed_progress", progress))
            for number, worker, token in ended:
                source, end = shards.source(number), shards.batches(shards.source(number))
                leases.append(data_leased(source, worker, token, first=None))
                leases.append(data_closed(source, worker, token, done=True, first=None, reached=end))
            for number, each in held:
                leases.append(data_leased(shards.source(number), each.worker, each.token, first=each.first))
        return [*opened, *leases, *self.quarantine.entries()]

    @property
    def copied(self) -> list[Entry]:
        """As `entries`, for a checkpoint that is begun."""
        return self.entries()

    @property
    def closed(self) -> int:
        """Data shards that are done, over all feeds."""
        return sum(each.done for each in self._feeds)

    @property
    def finished(self) -> bool:
        """Whether there was data, and all of it is done."""
        return bool(self._feeds) and all(each.done == each.total for each in self._feeds)

    def reopen(self, kept: Mapping[str, object]) -> list[DataShardSource]:
        """Data shards that are done, and were not when a checkpoint was begun that had this to say, are free again, and
        given: partitions that were restored from it may lack a part of them. Raises DamagedRecord."""
        then = _read(kept)
        reopened: list[DataShardSource] = []
        for shards in self._feeds:
            before = then._feeds[shards.feed] if shards.feed < len(then._feeds) else None
            begun = 0 if before is None else before.begun
            undone = {*range(begun, shards.begun), *(() if before is None else (*before.returned, *before.held))}
            again = sorted(undone - set(shards.returned) - set(shards.held))
            shards.returned = sorted([*shards.returned, *again])
            shards.forget_reached()
            sources = {shards.source(number): None for number in again}
            reopened += sources
            self._closed = {worker: end for worker, end in self._closed.items() if end[0] not in sources}
        return reopened

    def begin_with(self, kept: Mapping[str, object]) -> None:
        """Takes over what a checkpoint of another run has: what was leased is free. Raises DamagedRecord."""
        assert not self._feeds
        then = _read(kept)
        for shards in then._feeds:
            shards.returned, shards.held = sorted([*shards.returned, *shards.held]), {}
            shards.forget_reached()
            self._feeds.append(shards)
        self.quarantine = then.quarantine

    def take_over(self, steps: StepLedger, step: int) -> list[tuple[DataShardSource, int]]:
        """Takes over the feeds of a job that was synchronous, and stands before `step`: what it has counted is done,
        what is in quarantine stays there. The data shards of which a part is counted, and so many of their batches."""
        assert not self._feeds
        begun: list[tuple[DataShardSource, int]] = []
        for feed in range(len(steps)):
            spec, (epoch, samples) = steps.spec(feed), steps.place(feed, step)
            shards = self._add(feed, spec, steps.batches_per_data_shard(feed) or None)
            # a step begins where a data shard does, or where one of its pushes does
            index, rest = divmod(samples, shards.batches_per_data_shard * spec.batch_size)
            shards.begun = epoch * shards.per_epoch + index
            if rest:
                batch = rest // spec.batch_size
                begun.append((shards.source(shards.begun), batch))
                shards.returned, shards.reached = [shards.begun], {shards.begun: batch}
                shards.begun += 1
        for left_out in steps.quarantined():
            if isinstance(left_out.condemned.source, DataShardSource):  # from before there were steps
                self.quarantine.add(left_out.condemned)
                continue
            shards, size = self._feeds[left_out.feed], steps.spec(left_out.feed).batch_size
            for at in range(left_out.begin, left_out.end, size):
                index, rest = divmod(at, shards.batches_per_data_shard * size)
                source = DataShardSource(left_out.feed, left_out.epoch, index)
                self.quarantine.add(dataclasses.replace(left_out.condemned, source=source, sequence=rest // size))
        return begun

    def loses_finished(self, kept: Mapping[str, object]) -> int | None:
        """The first feed that is finished, and was not when a checkpoint was begun that had this to say."""
        then = _read(kept)
        for shards in self._feeds:
            before = then._feeds[shards.feed] if shards.feed < len(then._feeds) else None
            if shards.done == shards.total and (before is None or before.done < before.total):
                return shards.feed
        return None

    def restore(self, kind: str, body: Body) -> None:
        """Takes a record of `entries`, or one of its kinds. Raises DamagedRecord."""
        if kind == "feed_opened":
            feed, spec = _feed_of(body, len(self._feeds))
            per_shard, per_epoch = body.number("batches_per_data_shard", least=1), body.number("units", least=1)
            self._feeds.append(_DataShards(feed, spec, per_shard, per_epoch))
            return
        if kind == "batch_quarantined":
            condemned = self.quarantine.restore(body)
            require(self._has(condemned), f"#{condemned.sequence} of {condemned.source} does not exist")
            return
        if kind == "feed_closed":
            raise DamagedRecord("a feed of an asynchronous job was closed as a whole")
        shards = self._feeds[body.number("feed", most=len(self._feeds) - 1)]
        if kind == "feed_progress":
            require(not shards.begun, f"feed {shards.feed} begins twice")
            shards.begun = body.number("begun", most=shards.total)
            shards.returned = sorted(body.numbers("free", most=shards.begun - 1))
            require(len(set(shards.returned)) == len(shards.returned), "free: a data shard is there twice")
            for each in body.items("reached"):
                number, reached = checked_items(each, "a data shard and its watermark", count=2)
                known = checked_number(number, "a data shard", most=shards.begun - 1)
                require(known in shards.returned, f"reached: data shard {known} is not free")
                shards.reached[known] = checked_number(reached, "its watermark", most=limits.SEQUENCE_MAX)
            return
        epoch, index = (
            body.number("epoch", most=shards.spec.epochs - 1),
            body.number("index", most=shards.per_epoch - 1),
        )
        source = DataShardSource(shards.feed, epoch, index)
        worker, token = Incarnation(body.number("worker", least=1)), Token(body.number("token", least=1))
        number = shards.number(source)
        if kind == "data_leased":
            shards.hold(number, worker, token, fresh=shards.take_again(number))
            first = None if body.is_null("first") else body.number("first", most=limits.SEQUENCE_MAX)
            shards.held[number] = _Held(worker, token, first)
            return
        held = shards.held.get(number)
        require(
            held is not None and (held.worker, held.token) == (worker, token), f"{source} was closed and is not held"
        )
        if body.flag("done"):
            self._end(shards, number, worker, token)
        else:
            shards.give_back(number, body.number("next", most=limits.SEQUENCE_MAX))

    # ---- within

    def _add(self, feed: int, spec: FeedSpec, per_shard: int | None = None) -> _DataShards:
        """`per_shard`: batches of a data shard; None: that is chosen."""
        batches = spec.units(spec.batch_size, "batch")
        # gradients are accumulated within a data shard
        chosen = -(-(self._batches or self._choose(batches)) // spec.accumulate) * spec.accumulate
        made = _DataShards(feed, spec, per_shard or chosen, -(-batches // (per_shard or chosen)))
        self._feeds.append(made)
        return made

    def _end(self, shards: _DataShards, number: int, worker: Incarnation, token: Token) -> None:
        del shards.held[number]
        self._closed[worker] = (shards.source(number), token)

    def _has(self, condemned: Condemned) -> bool:
        source = condemned.source
        if not isinstance(source, DataShardSource) or source.feed >= len(self._feeds):
            return False
        shards = self._feeds[source.feed]
        known = source.epoch < shards.spec.epochs and source.index < shards.per_epoch
        return known and condemned.sequence < shards.batches(source)

    def _is_done(self, source: LeasedSource) -> bool:
        assert isinstance(source, DataShardSource)
        return self._feeds[source.feed].is_done(source)

    def _quarantined_in(self, feed: int) -> int:
        return sum(isinstance(each.source, DataShardSource) and each.source.feed == feed for each in self.quarantine)

    def _choose(self, batches: int) -> int:
        wanted = batches // (DATA_SHARDS_PER_WORKER_MIN * self._workers_expected)
        return max(1, min(wanted, BATCHES_PER_DATA_SHARD_AUTO_MAX))

    def _require(self, feed: int) -> _DataShards:
        if feed >= len(self._feeds):
            raise NotFound(f"feed {feed} has not been opened; {len(self._feeds)} have", todo="open it first")
        return self._feeds[feed]


def new_data_ledger() -> DataLedger:
    """To read what a checkpoint has; it leases nothing."""
    return DataLedger(batches_per_data_shard=None, workers_expected=1, next_token=lambda: Token(0))


def _read(kept: Mapping[str, object]) -> DataLedger:
    """The ledger that a checkpoint has. Raises DamagedRecord."""
    then = new_data_ledger()
    for kind, body in _entries_of(kept):
        then.restore(kind, body)
    return then


def begun_in(kept: Mapping[str, object]) -> tuple[tuple[DataShardSource, int], ...]:
    """The data shards of which all partitions of a checkpoint have counted the batches before a number as steps of a
    synchronous job, in the ledger that the job goes by since. Raises DamagedRecord."""
    body = Body(kept)
    found: list[tuple[DataShardSource, int]] = []
    for item in body.items("begun") if body.has("begun") else ():
        feed, epoch, index, batch = (
            checked_number(each, "a data shard that is begun") for each in checked_items(item, "begun", count=4)
        )
        found.append((DataShardSource(feed, epoch, index), batch))
    return tuple(found)


def stood_in(kept: Mapping[str, object]) -> int:
    """The step before which all logical ranks stand with a checkpoint that was written when the job was asynchronous,
    in the ledger that it goes by since; 0 for others. Raises DamagedRecord."""
    body = Body(kept)
    return body.number("step", most=limits.SEQUENCE_MAX) if body.has("step") else 0


def done_in(kept: Mapping[str, object]) -> tuple[DoneDataShards, ...]:
    """The data shards that are closed in the ledger that a checkpoint has. Raises DamagedRecord."""
    return _read(kept).done


@dataclass(slots=True)
class _StepRange:
    """A feed as steps of the job; in local mode these are rounds. `batches_per_data_shard`: of one that was dealt by
    data shards before; they have names, and are cut in the same way should it be so again. 0: it never was."""

    spec: FeedSpec
    course: Course
    make_up: MakeUp
    batches_per_data_shard: int = 0
    done: bool = False

    @property
    def first_step(self) -> int:
        return self.course.first

    @property
    def planned_end(self) -> int:
        return self.make_up.planned_end

    def opening(self, *, done: bool) -> FeedOpening:
        begun = self.course.begun_epochs, self.course.begun
        return FeedOpening(self.batches_per_data_shard, self.course.per_epoch, self.first_step, done, begun)

    def batch_span(self, source: DataShardSource, batch: int) -> tuple[int, int]:
        """Of a batch that was one of a data shard."""
        begin = (source.index * self.batches_per_data_shard + batch) * self.spec.batch_size
        return begin, min(begin + self.spec.batch_size, self.spec.samples_by_batches)

    def has_batch(self, source: DataShardSource, batch: int) -> bool:
        known = source.epoch < self.spec.epochs and batch < self.batches_per_data_shard
        begin, end = self.batch_span(source, batch)
        return known and begin < end

    def has(self, step: int) -> bool:
        """Of a step that may be reached already."""
        return self.first_step <= step < self.make_up.reached

    def span(self, rank: int, step: int) -> tuple[int, int, int]:
        """Of a planned step: an epoch, and [begin, end) of its permutation."""
        return self.course.span(step, rank)

    def samples_before(self, step: int) -> int:
        """Samples of this feed in the steps before `step`."""
        taken = self.course.samples_before(self.planned_end if self.done else step)
        return taken - (0 if self.done else self.make_up.lacking(step))


class StepLedger:
    """The feeds of a synchronous job, one after the other: each is a range of steps. `local_steps`: of so many steps of
    a rank by itself each of these consists. With `backup_workers` it goes on behind the planned ones for as long as
    there is something to make up for; `verdicts` says what."""

    def __init__(self, *, logical_ranks: int, local_steps: int = 1, backup_workers: int = 0) -> None:
        self._logical_ranks = logical_ranks
        self._local_steps = local_steps
        self._backup_workers = backup_workers
        self._feeds: list[_StepRange] = []
        self.quarantine = Quarantine()
        self.verdicts = StepVerdicts(logical_ranks, backup_workers)

    def __len__(self) -> int:
        return len(self._feeds)

    def open(self, feed: int, spec: FeedSpec) -> FeedOpening:
        """The first to open a feed decides. Raises FeedConflict, InvalidRequest, TooLarge, and NotReady while it is not
        known where the feed before it ends."""
        _check_opening(feed, spec, [each.spec for each in self._feeds])
        units = spec.cut(self._logical_ranks, self._local_steps)
        if feed == len(self._feeds):
            spec.units(units.samples_per_step, f"step of {self._logical_ranks} logical ranks")
            first = self._feeds[-1].make_up.end if self._feeds else 0
            if first is None:
                raise NotReady(
                    f"data set {feed} begins when all samples of the one before have counted",
                    why="some came late, and are computed again (job.consistency.backup_workers)",
                    todo="go through each job.batches to its end",
                )
            self._add(spec, first, units.per_epoch)
        found = self._feeds[feed]
        if found.course.per_epoch != units.per_epoch:
            raise FeedConflict(
                f"feed {feed} was opened before in another way (steps of the job in an epoch: expected "
                f"{found.course.per_epoch}, got {units.per_epoch})",
                why="the run that it was opened in had another number of local steps in a round",
                todo="set job.consistency.mode and job.consistency.steps to what they were in that run",
                facts={"differs": "steps"},
            )
        return found.opening(done=found.done)

    def never(self, feed: int, spec: FeedSpec) -> FeedOpening | None:
        """Of a job that has stopped: a feed of which there is no step, since nobody knows where the one before it would
        have ended. It is not opened: the next run does that. None for others. Raises InvalidRequest, TooLarge."""
        if feed < len(self._feeds) or not self._feeds or self._feeds[-1].make_up.end is not None:
            return None
        spec.check()
        units = spec.cut(self._logical_ranks, self._local_steps)
        return FeedOpening(0, units.per_epoch, self._feeds[-1].make_up.reached, True)

    def is_closed(self, feed: int) -> bool:
        """Raises NotFound."""
        return self._require(feed).done

    def close(self, feed: int, *, next_sequence: int) -> bool:
        """`next_sequence`: the lowest next step over all logical ranks and partitions. Raises NotFound."""
        found = self._require(feed)
        end = found.make_up.end
        found.done = found.done or (end is not None and next_sequence >= end)
        return found.done

    def counts(self, last: int, *, step: int) -> tuple[FeedCounts, ...]:
        """Of the `last` feeds opened, in steps, when the job is at `step`."""
        counts = []
        for feed in range(max(0, len(self._feeds) - last), len(self._feeds)):
            each = self._feeds[feed]
            total = each.make_up.reached - each.first_step
            done = total if each.done else max(0, min(step - each.first_step, total))
            left_out = sum(self._is_in(feed, condemned) for condemned in self.quarantine)
            counts.append(
                FeedCounts(feed, each.spec.samples, each.spec.epochs, total - done, 0, done, each.done, left_out)
            )
        return tuple(counts)

    def place(self, feed: int, step: int) -> tuple[int, int]:
        """What has counted of a feed when the job stands before `step`: so many epochs, and so many samples of the next
        one's permutation, which are its first. Raises NotFound."""
        found = self._require(feed)
        return (found.spec.epochs, 0) if found.done else found.course.place(step)

    def batches_per_data_shard(self, feed: int) -> int:
        """Of a feed that was dealt by data shards before the job became synchronous; 0 of others. Raises NotFound."""
        return self._require(feed).batches_per_data_shard

    def samples_done(self, *, step: int) -> int:
        """Samples of the steps before `step`, at which the job is."""
        taken = sum(each.samples_before(step) for each in self._feeds)
        return taken - sum(
            each.end - each.begin
            for each in self.quarantined()
            if self._feeds[each.feed].done
            or isinstance(each.condemned.source, DataShardSource)
            or each.condemned.sequence < step
        )

    def check_begin(self, source: LeasedSource, step: int) -> None:
        """Raises NotFound unless the step is one of a feed."""
        if not isinstance(source, RankSource) or source.rank >= self._logical_ranks or self._feed_of(step) is None:
            raise NotFound(f"step {step} of {source}: there is no such step", todo="open the feed first")

    def has_step(self, step: int) -> bool:
        """Whether the step is one of a feed."""
        return self._feed_of(step) is not None

    def quarantined(self) -> Iterator[QuarantinedBatch]:
        """All contributions that do not count, in the order of the verdicts."""
        for condemned in self.quarantine:
            former = condemned.source
            if isinstance(former, DataShardSource):
                begin, end = self._feeds[former.feed].batch_span(former, condemned.sequence)
                yield QuarantinedBatch(former.feed, former.epoch, condemned, begin, end)
                continue
            feed = self._feed_of(condemned.sequence)
            assert isinstance(condemned.source, RankSource)
            batch = None
            if feed is not None:
                batch = self._feeds[feed].make_up.batch(condemned.sequence, condemned.source.rank)
            if feed is None or batch is None:  # of a rank that had nothing there
                continue
            epoch, begin, end = self._feeds[feed].span(batch.rank, batch.step)
            yield QuarantinedBatch(feed, epoch, condemned, begin, end)

    def spec(self, feed: int) -> FeedSpec:
        """Raises NotFound."""
        return self._require(feed).spec

    # ---- of a job that was asynchronous

    def take_over(self, ledger: DataLedger, step: int) -> None:
        """Takes over the feeds of a job that was asynchronous, whose first step is `step`: what its data shards have
        counted is done, and what is in quarantine stays there. All that were begun are done. Raises InvalidRequest
        where steps could not deal the rest."""
        assert not self._feeds
        self.check(ledger)
        for feed in range(len(ledger)):
            spec, (epochs, samples, per_shard) = ledger.spec(feed), ledger.place(feed)
            units = spec.cut(self._logical_ranks, self._local_steps)
            made = self._add(spec, step, units.per_epoch, (epochs, samples), per_shard)
            made.done = epochs == spec.epochs
        for condemned in ledger.quarantine:
            self.quarantine.add(condemned)

    def check(self, ledger: DataLedger) -> None:
        """Raises InvalidRequest where steps could not deal what is left of the feeds of an asynchronous job."""
        *before, _ = ledger.counts(len(ledger))
        for each in before:
            if not each.finished:
                raise InvalidRequest(
                    f"data set {each.feed + 1} was begun before all of data set {each.feed} was done",
                    why="in a synchronous job the steps of one data set follow those of the other",
                    todo="go through each job.batches to its end",
                )
        for feed in range(len(ledger)):
            spec = ledger.spec(feed)
            samples = spec.cut(self._logical_ranks, self._local_steps).samples_per_step
            spec.units(samples, f"step of {self._logical_ranks} logical ranks")

    # ---- backup workers

    def due(self, step: int) -> tuple[Rank, ...] | None:
        """Who is left out if the step is decided now; None where it was, or too few are there."""
        found = self._feed_of(step)
        ranks = [Rank(rank) for rank in range(self._logical_ranks)]
        working = ranks if found is None else [rank for rank in ranks if self._samples(found, step, rank)]
        return self.verdicts.due(step, working)

    def decide(self, step: int, left_out: Sequence[Rank]) -> list[Rank]:
        """The verdict on a step. Those of the ranks that had samples there."""
        for each in self._feeds:
            each.make_up.reach(step)
        self.verdicts.decide(step, left_out)
        found = self._feed_of(step)
        late = list(left_out) if found is None else self._drop(found, step)
        for each in self._feeds:
            each.make_up.reach(step + 1)
        return late

    def made_up(self, feed: int, step: int) -> tuple[dict[Rank, Batch], int | None]:
        """What each rank makes up for at a step behind the planned ones, and the step after the feed's last, where that
        is known. Raises NotFound, InvalidRequest for a planned step, NotReady while that is not decided."""
        make_up = self._require(feed).make_up
        if step < make_up.planned_end:
            raise InvalidRequest(f"what step {step} makes up for; feed {feed} is planned to step {make_up.planned_end}")
        if make_up.end is None and step >= make_up.reached:
            raise NotReady(f"step {step} of feed {feed}: step {self.verdicts.decided} is not decided yet")
        found = {Rank(rank): make_up.batch(step, Rank(rank)) for rank in range(self._logical_ranks)}
        return {rank: batch for rank, batch in found.items() if batch is not None}, make_up.end

    def forget_made_up(self, kept: Mapping[str, object]) -> None:
        """A checkpoint is the newest that has this to say: no partition stands in a feed again that was closed in it.
        Raises DamagedRecord."""
        if not self.verdicts.decided:
            return
        then = self._then(kept)
        condemned = [each.sequence for each in self.quarantine]
        for feed, each in enumerate(self._feeds):
            end = each.make_up.end
            if end is None or not (each.done and feed < len(then) and then.is_closed(feed)):
                break
            if any(each.planned_end <= step < end for step in condemned):  # whose samples are still to be named
                break
            self.verdicts.forget_before(end)
            each.make_up.forget()

    # ---- records

    def entries(self) -> list[Entry]:
        """Records that make this ledger anew."""
        return [*self._opened, *self.verdicts.entries(), *self._closed, *self.verdicts.counters()]

    @property
    def copied(self) -> list[Entry]:
        """As `entries`, for a checkpoint that is begun: the verdicts on steps before the one that it will be of are
        added when that is known."""
        return [*self._opened, *self._closed]

    @property
    def _opened(self) -> list[Entry]:
        opened = [feed_opened(feed, each.spec, each.opening(done=False)) for feed, each in enumerate(self._feeds)]
        return [*opened, *self.quarantine.entries()]

    @property
    def _closed(self) -> list[Entry]:
        return [feed_closed(feed, self.end(feed)) for feed, each in enumerate(self._feeds) if each.done]

    @property
    def tokens(self) -> list[Token]:
        """Of leases: there are none."""
        return []

    @property
    def closed(self) -> int:
        return sum(each.done for each in self._feeds)

    @property
    def finished(self) -> bool:
        """Whether there was data, and all of it is done."""
        return bool(self._feeds) and all(each.done for each in self._feeds)

    def end(self, feed: int) -> int:
        """The step after a feed's last; where that is not known yet, after the last that it is known to have. Raises
        NotFound."""
        return self._require(feed).make_up.reached

    def reopen(self, kept: Mapping[str, object]) -> list[DataShardSource]:
        """Feeds that are done, and were not when a checkpoint was begun that had this to say, are open again:
        partitions that were restored from it may lack their last steps. Raises DamagedRecord."""
        then = self._then(kept)
        for feed, each in enumerate(self._feeds):
            each.done = each.done and feed < len(then) and then.is_closed(feed)
        return []

    def begin_with(self, kept: Mapping[str, object], step: int = 0) -> None:
        """Takes over what a checkpoint of another run has, of that step. Raises DamagedRecord."""
        assert not self._feeds
        entries = list(_entries_of(kept))
        for kind, body in sorted(entries, key=lambda entry: entry[0] == "feed_closed"):  # behind what made them up
            self.restore(kind, body)
        if self._backup_workers and step and not self.verdicts.decided:
            self._decided_before(step)
        decided = self.verdicts.decided
        require(not self._backup_workers or decided >= step, f"a checkpoint of step {step}, and verdicts on {decided}")

    def _then(self, kept: Mapping[str, object]) -> StepLedger:
        then = StepLedger(
            logical_ranks=self._logical_ranks, local_steps=self._local_steps, backup_workers=self._backup_workers
        )
        then.begin_with(kept)
        return then

    def loses_finished(self, kept: Mapping[str, object]) -> int | None:
        """The first feed that is done, and was not when a checkpoint was begun that had this to say."""
        then = self._then(kept)
        done = [feed for feed, each in enumerate(self._feeds) if each.done]
        return next((feed for feed in done if feed >= len(then) or not then.is_closed(feed)), None)

    def restore(self, kind: str, body: Body) -> None:
        """Takes a record of `entries`. Raises DamagedRecord."""
        if kind == "feed_opened":
            self._restore_feed(body)
            return
        if kind == "steps_decided":
            require(self._backup_workers > 0, "verdicts on the steps of a job without backup workers")
            first, steps, dropped = self.verdicts.read(body)
            if first > self.verdicts.decided:
                self._decided_before(first)
            for step, left_out in enumerate(steps, first):
                self.decide(step, left_out)
            self.verdicts.drop(dropped)
            return
        if kind == "contributions_dropped_before":
            self.verdicts.restore_counters(body)
            return
        if kind == "batch_quarantined":
            condemned = self.quarantine.restore(body)
            former = condemned.source
            if isinstance(former, DataShardSource):
                known = former.feed < len(self._feeds)
                known = known and self._feeds[former.feed].has_batch(former, condemned.sequence)
                require(known, f"#{condemned.sequence} of {former} does not exist")
                return
            known = isinstance(condemned.source, RankSource) and condemned.source.rank < self._logical_ranks
            # at which step of a job with backup workers what is made up, later records say
            found = known and (self._backup_workers > 0 or self._feed_of(condemned.sequence) is not None)
            require(found, f"#{condemned.sequence} of {condemned.source} does not exist")
            return
        require(kind == "feed_closed", "data shards in a synchronous job")
        closed = self._feeds[body.number("feed", most=len(self._feeds) - 1)]
        closed.done = True
        if body.has("end"):
            closed.make_up.end = body.number("end", least=closed.planned_end, most=SUM_MAX)

    # ---- within

    def _feed_of(self, step: int) -> int | None:
        return next((feed for feed, each in enumerate(self._feeds) if each.has(step)), None)

    def _is_in(self, feed: int, condemned: Condemned) -> bool:
        former = condemned.source
        return former.feed == feed if isinstance(former, DataShardSource) else self._feeds[feed].has(condemned.sequence)

    def _restore_feed(self, body: Body) -> None:
        _, spec = _feed_of(body, len(self._feeds))
        first, steps = body.number("first_step", most=SUM_MAX), body.number("units", least=1)
        epochs = body.number("begun_epochs", most=spec.epochs) if body.has("begun_epochs") else 0
        samples = body.number("begun_samples", most=spec.samples - 1) if body.has("begun_samples") else 0
        require(not samples or epochs < spec.epochs, f"{samples} samples behind the last epoch")
        self._add(spec, first, steps, (epochs, samples), body.number("batches_per_data_shard"))

    def _add(
        self, spec: FeedSpec, first: int, steps: int, begun: tuple[int, int] = (0, 0), per_shard: int = 0
    ) -> _StepRange:
        units = spec.cut(self._logical_ranks, self._local_steps)
        course = Course(units, steps, spec.epochs, first, *begun)
        make_up = MakeUp(self._logical_ranks, course.end, None if self._backup_workers else course.end)
        feed = len(self._feeds)
        self._feeds.append(_StepRange(spec, course, make_up, per_shard))
        # a run that began with a checkpoint may know more than when the feeds were copied
        for step in range(max(first, self.verdicts.known_from), self.verdicts.decided):
            make_up.reach(step)
            if make_up.end is None:
                self._drop(feed, step)
        make_up.reach(self.verdicts.decided)
        return self._feeds[feed]

    def _decided_before(self, step: int) -> None:
        self.verdicts.decided_before(step)
        for each in self._feeds:
            each.make_up.reach(step)

    def _drop(self, feed: int, step: int) -> list[Rank]:
        """What those had who are left out of a step that was decided; the ranks that had samples."""
        late = []
        for rank in self.verdicts.left_out(step):
            samples = self._samples(feed, step, rank)
            batch = self._feeds[feed].make_up.batch(step, rank)
            if samples and batch is not None:
                self._feeds[feed].make_up.drop(step, batch, samples)
                late.append(rank)
        return late

    def _samples(self, feed: int, step: int, rank: Rank) -> int:
        """That count if the rank's contribution to the step does."""
        found = self._feeds[feed]
        batch = found.make_up.batch(step, rank)
        if batch is None or self.quarantine.has(RankSource(rank), step):
            return 0
        _, begin, end = found.span(batch.rank, batch.step)
        return end - begin

    def _require(self, feed: int) -> _StepRange:
        if feed >= len(self._feeds):
            raise NotFound(f"feed {feed} has not been opened; {len(self._feeds)} have", todo="open it first")
        return self._feeds[feed]


def _entries_of(kept: Mapping[str, object]) -> Iterator[tuple[str, Body]]:
    """The records in a checkpoint's data ledger. Raises DamagedRecord."""
    for item in Body(kept).items("entries"):
        kind, body = checked_items(item, "an entry", count=2)
        require(isinstance(body, dict), "an entry without a body")
        assert isinstance(body, dict)
        yield checked_text(kind, "an entry"), Body(body)


def feed_opened(feed: int, spec: FeedSpec, opening: FeedOpening) -> Entry:
    """The record of a feed, with what was decided about it."""
    epochs, samples = opening.begun
    begun = {"begun_epochs": epochs, "begun_samples": samples} if epochs or samples else {}
    return "feed_opened", {
        "feed": feed,
        **dataclasses.asdict(spec),
        "batches_per_data_shard": opening.batches_per_data_shard,
        "units": opening.units_per_epoch,
        "first_step": opening.first_step,
        **begun,
    }


def feed_closed(feed: int, end: int) -> Entry:
    """`end`: the step after its last."""
    return "feed_closed", {"feed": feed, "end": end}


def data_leased(source: DataShardSource, worker: Incarnation, token: Token, *, first: int | None) -> Entry:
    """`first`: the batch at which the lease begins; None where that was not read."""
    return "data_leased", {**_lease_body(source, worker, token), "first": first}


def data_closed(
    source: DataShardSource, worker: Incarnation, token: Token, *, done: bool, first: int | None, reached: int
) -> Entry:
    """All partitions have the batches below `reached`; those from `first` on were computed under this lease."""
    return "data_closed", {**_lease_body(source, worker, token), "done": done, "first": first, "next": reached}


def _lease_body(source: DataShardSource, worker: Incarnation, token: Token) -> dict[str, object]:
    return {"feed": source.feed, "epoch": source.epoch, "index": source.index, "worker": worker, "token": token}


def _feed_of(body: Body, feed: int) -> tuple[int, FeedSpec]:
    """Raises DamagedRecord unless the record opens feed `feed`, with bounds that a feed has."""
    require(body.number("feed") == feed, f"feed {body.number('feed')} was opened where feed {feed} is the next")
    spec = FeedSpec(
        samples=body.number("samples", least=1, most=limits.SAMPLES_MAX),
        fingerprint=body.text("fingerprint"),
        batch_size=body.number("batch_size", least=1, most=limits.BATCH_SIZE_MAX),
        epochs=body.number("epochs", least=1, most=limits.EPOCHS_MAX),
        shuffle=body.flag("shuffle"),
        drop_last=body.flag("drop_last"),
        # feeds that were opened by a release before have none
        accumulate=body.number("accumulate", least=1, most=limits.ACCUMULATE_MAX) if body.has("accumulate") else 1,
    )
    return feed, spec


def _check_opening(feed: int, spec: FeedSpec, opened: Sequence[FeedSpec]) -> None:
    spec.check()
    if feed >= limits.FEEDS_MAX:
        raise TooLarge(
            f"feed {feed}; a job has at most {limits.FEEDS_MAX}", todo="pass epochs to one call of job.batches"
        )
    if feed > len(opened):
        raise FeedConflict(f"feed {feed} was opened while {len(opened)} feeds are known; expected feed {len(opened)}")
    if feed == len(opened):
        return
    first = opened[feed]
    differing = [
        each.name for each in dataclasses.fields(spec) if getattr(spec, each.name) != getattr(first, each.name)
    ]
    if differing:
        said = ", ".join(
            f"{name}: expected {getattr(first, name)!r}, got {getattr(spec, name)!r}" for name in differing
        )
        raise FeedConflict(f"feed {feed} was opened before in another way ({said})", facts={"differs": differing[0]})


def _holders(shards: _DataShards) -> str:
    held = sorted(shards.held.items())
    named = [f"{shards.source(number)} (worker {each.worker})" for number, each in held[:HOLDERS_NAMED_MAX]]
    more = len(held) - len(named)
    return ", ".join(named) + (f" and {more} more" if more else "")
