"""Which worker has which samples of an asynchronous job, and which are done (promise 2; rules A1, A6).

Owns: a job's feeds as data shards, each free, leased under a token, or done; the batches in quarantine, which do not
count. Invariants: a data shard is leased to one worker at a time. Tokens only grow. A data shard is done only when the
servers' watermarks say so, and stays done. Memory does not grow with the number of epochs or samples. Must not know:
servers, members, time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Final

from shardyard.domain import limits
from shardyard.domain.errors import InvalidRequest, NotFound, StaleToken
from shardyard.domain.ids import Incarnation, Token
from shardyard.domain.push_names import DataLease, DataShardSource, LeasedSource
from shardyard_coordinator.records import Body, DamagedRecord, Entry, require
from shardyard_coordinator.work.data_shards import (
    HOLDERS_NAMED_MAX,
    DataShards,
    HeldShard,
    closed_lease,
    data_closed,
    data_leased,
    feed_progress,
    restore_lease,
    restore_progress,
)
from shardyard_coordinator.work.feeds import (
    FeedCounts,
    FeedDone,
    FeedOpening,
    FeedSpec,
    LeaseWait,
    QuarantinedBatch,
    check_opening,
    feed_of,
    feed_opened,
)
from shardyard_coordinator.work.quarantine import Quarantine

DATA_SHARDS_PER_WORKER_MIN: Final = 4
"""Data shards of an epoch for each expected worker, where the coordinator chooses: so many that the end of an epoch is
not spent waiting for one worker."""
BATCHES_PER_DATA_SHARD_AUTO_MAX: Final = 64


class DataLedger:
    def __init__(
        self, *, batches_per_data_shard: int | None, workers_expected: int, next_token: Callable[[], Token]
    ) -> None:
        self._batches = batches_per_data_shard
        self._workers_expected = workers_expected
        self._next_token = next_token
        self.opened: list[DataShards] = []
        self.quarantine = Quarantine()
        self.last_closed: dict[Incarnation, tuple[DataShardSource, Token]] = {}

    def __len__(self) -> int:
        return len(self.opened)

    def feed(self, number: int) -> DataShards:
        """Raises NotFound."""
        if number >= len(self.opened):
            raise NotFound(f"feed {number} has not been opened; {len(self.opened)} have", todo="open it first")
        return self.opened[number]

    def open(self, feed: int, spec: FeedSpec) -> FeedOpening:
        """The first worker that opens a feed decides its spec. Raises FeedConflict, InvalidRequest, TooLarge."""
        check_opening(feed, spec, [each.spec for each in self.opened])
        found = self._add(feed, spec) if feed == len(self.opened) else self.opened[feed]
        has_later, done = feed + 1 < len(self.opened), found.done == found.total
        return FeedOpening(found.batches_per_data_shard, found.per_epoch, 0, done, has_later=has_later)

    def lease(
        self, feed: int, worker: Incarnation, *, known: Collection[Token] = (), fresh: bool = True
    ) -> DataLease | LeaseWait | FeedDone:
        """A data shard for the worker; one that it holds already, if there is one that it does not know of. `known`:
        the tokens of those that it knows of. `fresh`: also a data shard that was never leased. Raises NotFound."""
        shards = self.feed(feed)
        number = self._unknown(shards, worker, known)
        if number is None:
            begun = shards.begun
            number = shards.take(fresh=fresh)
            if number is None and shards.done == shards.total:
                return FeedDone()
            if number is None:
                return LeaseWait(shards.holders if shards.held else "data shards that no worker has begun")
            shards.hold(number, worker, self._next_token(), fresh=shards.begun > begun)
        return shards.lease(number)

    @staticmethod
    def _unknown(shards: DataShards, worker: Incarnation, known: Collection[Token]) -> int | None:
        return next((each for each in shards.held_by(worker) if shards.held[each].token not in known), None)

    def has_unknown(self, feed: int, worker: Incarnation, known: Collection[Token]) -> bool:
        """Whether the worker holds a data shard of the feed that it does not know of. Raises NotFound."""
        return self._unknown(self.feed(feed), worker, known) is not None

    def held(self, worker: Incarnation) -> list[DataShardSource]:
        """The data shards that are leased to the worker."""
        return [shards.source(number) for shards in self.opened for number in shards.held_by(worker)]

    @property
    def leases(self) -> list[HeldShard]:
        """The leases that are held."""
        return [held for shards in self.opened for held in shards.held.values()]

    @property
    def is_drained(self) -> bool:
        """Whether all data shards that were ever leased are done."""
        return not any(shards.held or shards.returned for shards in self.opened)

    @property
    def holders(self) -> str:
        """For people: the data shards that were begun and are not done. The first ones are named with their workers."""
        free = [str(shards.source(number)) for shards in self.opened for number in shards.returned]
        held = [shards.holders for shards in self.opened if shards.held]
        return ", ".join([*held, *(f"{source} (nobody)" for source in free[:HOLDERS_NAMED_MAX])])

    def check_begin(self, source: LeasedSource, worker: Incarnation, token: Token, batch: int) -> None:
        """Raises StaleToken, NotFound or InvalidRequest unless the worker may compute the batch now."""
        if not isinstance(source, DataShardSource):
            raise InvalidRequest(f"{source} in an asynchronous job")
        if self.is_closed(source, worker, token):
            raise StaleToken(f"{source} was closed under token {token}", facts={"token": str(token)})
        if batch >= self.opened[source.feed].batches(source):
            raise InvalidRequest(f"batch {batch} of {source}, which has {self.opened[source.feed].batches(source)}")

    def release(
        self, worker: Incarnation, reached: Mapping[LeasedSource, int] = MappingProxyType({})
    ) -> list[DataShardSource]:
        """The worker departed. What it held is leased next. `reached`: the final next sequence of each of its
        sources."""
        freed = []
        for shards in self.opened:
            for number in shards.held_by(worker):
                source = shards.source(number)
                shards.give_back(number, reached.get(source))
                freed.append(source)
        self.last_closed.pop(worker, None)
        return freed

    def is_closed(self, source: DataShardSource, worker: Incarnation, token: Token) -> bool:
        """True if this lease was closed as done before: the worker asks again. False if the worker holds the lease.
        Raises StaleToken if it does not, NotFound."""
        shards = self.feed(source.feed)
        number = shards.number(source)
        if self.last_closed.get(worker) == (source, token):
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
        """Ends the lease. Returns whether the data shard is done; if not, it is free again. `next_sequence`: the lowest
        next sequence over all partitions. Raises StaleToken, NotFound."""
        if self.is_closed(source, worker, token):
            return True
        shards = self.opened[source.feed]
        number = shards.number(source)
        if next_sequence < shards.batches(source):
            shards.give_back(number, next_sequence)
            return False
        self._end(shards, number, worker, token)
        return True

    def counts(self, last: int) -> tuple[FeedCounts, ...]:
        """The counts of the `last` feeds opened."""
        return tuple(
            each.counts(
                sum(
                    isinstance(left.source, DataShardSource) and left.source.feed == each.feed
                    for left in self.quarantine
                )
            )
            for each in self.opened[-last:]
        )

    def samples_done(self) -> int:
        """The samples of the data shards that are done, as the servers' watermarks say."""
        left_out = 0
        for each in self.quarantined():
            source = each.condemned.source
            assert isinstance(source, DataShardSource)
            left_out += each.end - each.begin if self.opened[source.feed].is_done(source) else 0
        return sum(each.samples_done for each in self.opened) - left_out

    def quarantined(self) -> Iterator[QuarantinedBatch]:
        """All batches that do not count, in the order of the verdicts."""
        for condemned in self.quarantine:
            source = condemned.source
            assert isinstance(source, DataShardSource)
            begin, end = self.opened[source.feed].batch_span(source, condemned.sequence)
            yield QuarantinedBatch(source.feed, source.epoch, condemned, begin, end)

    # ---- records

    def entries(self) -> list[Entry]:
        """Records that rebuild this ledger: the feeds, how far each is, the last lease that each worker has closed, and
        the leases that are held."""
        opened: list[Entry] = []
        leases: list[Entry] = []
        closed = sorted(self.last_closed.items())
        for shards in self.opened:
            ended = [(shards.number(end[0]), worker, end[1]) for worker, end in closed if end[0].feed == shards.feed]
            held = sorted(shards.held.items())
            opening = FeedOpening(shards.batches_per_data_shard, shards.per_epoch, 0, done=False)
            opened.append(feed_opened(shards.feed, shards.spec, opening))
            if shards.begun:
                opened.append(feed_progress(shards, [number for number, _, _ in ended]))
            for number, worker, token in ended:
                source, end = shards.source(number), shards.batches(shards.source(number))
                leases.append(data_leased(source, worker, token, first=None))
                leases.append(data_closed(source, worker, token, done=True, first=None, reached=end))
            for number, each in held:
                leases.append(data_leased(shards.source(number), each.worker, each.token, first=each.first))
        return [*opened, *leases, *self.quarantine.entries()]

    @property
    def closed(self) -> int:
        """How many data shards are done, over all feeds."""
        return sum(each.done for each in self.opened)

    @property
    def finished(self) -> bool:
        """Whether there was data, and all of it is done."""
        return bool(self.opened) and all(each.done == each.total for each in self.opened)

    def continue_feed(
        self, spec: FeedSpec, epoch: int, samples: int, per_shard: int | None
    ) -> tuple[DataShardSource, int] | None:
        """Adds a feed of which whole epochs were counted as steps, and `samples` of the epoch after them. Returns the
        data shard that is partly counted, with the number of its batches that are; None if there is none. `per_shard`:
        batches of a data shard; None: the ledger chooses."""
        shards = self._add(len(self.opened), spec, per_shard)
        # a step begins at the start of a data shard, or of one of its pushes
        index, rest = divmod(samples, shards.batches_per_data_shard * spec.batch_size)
        shards.begun = epoch * shards.per_epoch + index
        if not rest:
            return None
        batch = rest // spec.batch_size
        begun = shards.source(shards.begun), batch
        shards.returned, shards.reached = [shards.begun], {shards.begun: batch}
        shards.begun += 1
        return begun

    def restore(self, kind: str, body: Body) -> None:
        """Applies a record of `entries`, or one of its kinds. Raises DamagedRecord."""
        if kind == "feed_opened":
            feed, spec = feed_of(body, len(self.opened))
            per_shard, per_epoch = body.number("batches_per_data_shard", least=1), body.number("units", least=1)
            self.opened.append(DataShards(feed, spec, per_shard, per_epoch))
            return
        if kind == "batch_quarantined":
            condemned = self.quarantine.restore(body)
            source = condemned.source
            known = isinstance(source, DataShardSource) and any(
                shards.feed == source.feed and shards.has(source, condemned.sequence) for shards in self.opened
            )
            require(known, f"#{condemned.sequence} of {source} does not exist")
            return
        if kind == "feed_closed":
            raise DamagedRecord("a feed of an asynchronous job was closed as a whole")
        shards = self.opened[body.number("feed", most=len(self.opened) - 1)]
        if kind == "feed_progress":
            restore_progress(shards, body)
        elif kind == "data_leased":
            restore_lease(shards, body)
        else:
            number, worker, token = closed_lease(shards, body)
            if body.flag("done"):
                self._end(shards, number, worker, token)
            else:
                shards.give_back(number, body.number("next", most=limits.SEQUENCE_MAX))

    # ---- within

    def _add(self, feed: int, spec: FeedSpec, per_shard: int | None = None) -> DataShards:
        """`per_shard`: batches of a data shard; None: the ledger chooses."""
        batches = spec.units(spec.batch_size, "batch")
        # gradients are accumulated within a data shard
        wanted = batches // (DATA_SHARDS_PER_WORKER_MIN * self._workers_expected)
        wanted = self._batches or max(1, min(wanted, BATCHES_PER_DATA_SHARD_AUTO_MAX))
        chosen = -(-wanted // spec.accumulate) * spec.accumulate
        made = DataShards(feed, spec, per_shard or chosen, -(-batches // (per_shard or chosen)))
        self.opened.append(made)
        return made

    def _end(self, shards: DataShards, number: int, worker: Incarnation, token: Token) -> None:
        del shards.held[number]
        self.last_closed[worker] = (shards.source(number), token)


def new_data_ledger() -> DataLedger:
    """A ledger to read a checkpoint's records into. It leases nothing."""
    return DataLedger(batches_per_data_shard=None, workers_expected=1, next_token=lambda: Token(0))
