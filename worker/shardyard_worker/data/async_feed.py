"""Batches of asynchronous jobs: the coordinator leases data shards (docs/internals/ledger.md, rules A5, A6, A12).

A worker opens a leased data shard on all servers, starts at the lowest watermark over all partitions, and closes the
lease at the end. Example: the partitions expect batches #2, #3 and #2 of a data shard of 5, so the worker begins at #2;
the partition that has #2 skips it.

Owns: the current data shard. Must not know: how a push travels.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from shardyard.domain.epochs import Indices
from shardyard.domain.errors import NotReady, ShardyardError, StaleToken, Unavailable
from shardyard.domain.ids import Token
from shardyard.domain.limits import DATA_LEASES_MAX
from shardyard.domain.push_names import DataLease, DataShardSource, PushName, SourceKey
from shardyard.wire import common_messages, lease_messages, methods
from shardyard.wire.v1 import common_pb2 as common
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_worker.consistency.asynchronous import AsyncStrategy
from shardyard_worker.consistency.strategy import LostWork, ModeChanged
from shardyard_worker.data.feed import Feed, Work
from shardyard_worker.data.loader_processes import Reading, Seed
from shardyard_worker.data.look_ahead import due_batches
from shardyard_worker.training.table_binding import Announced

log = logging.getLogger("shardyard.worker")


@dataclass
class DataShardAtHand:
    """The current data shard: its batches, and the one being computed. Those before `announce_until` are announced, and
    not read before their turn."""

    source: DataShardSource
    samples: Indices
    batches: int
    announce_until: int
    token: Token
    sequence: int = 0


class AsyncFeed(Feed):
    _strategy: AsyncStrategy
    _shard: DataShardAtHand | None = None

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._ahead: list[DataLease] = []
        """Data shards that were leased to be read ahead, in the order in which they are computed."""
        self._is_last = False
        """Whether no more can be leased ahead of the end of the current one."""
        self._is_unsure = False
        """Whether the coordinator may have leased a data shard to this worker, of which it does not know."""

    def batches(self) -> Generator[Any, None, None]:
        try:
            while not self._ends and (lease := self._lease()) is not None:
                yield from self._go_through(lease)
        finally:
            while self._ahead:
                self._give_back(self._ahead.pop(0), begun=False)
            self._rest()
        if self._session.drain.asked:
            return
        self._session.learn()  # under an old map a server that was given up may still answer
        self._rest()  # tells servers too that were told to expect it before its work was closed
        self._strategy.begin()

    @property
    def _ends(self) -> bool:
        """Whether this worker is told to leave, or the job to stop now. A job that changes to steps stops before one of
        them."""
        return self._session.drain.asked or (self._is_told_to_stop and not self._strategy.becomes_synchronous)

    def _rest(self) -> None:
        """Tells the servers that other workers need not wait for this one until it has work again."""
        try:
            self._strategy.rest()
        except ShardyardError as error:  # the script's next call raises the job's failure
            log.debug("the servers were not told that this worker rests: %s", error)

    # ---- leases

    def _lease(self) -> DataLease | None:
        """Leases a data shard, or takes one that was leased ahead. None: all are done, or no more batches are to be
        computed."""
        if self._ahead:
            return self._ahead.pop(0)
        request = self._lease_request()
        reply = self._session.ask(methods.LEASE_DATA, request)
        with self._session.wait_registry.over(lambda: f"a data shard of feed {self._number}: {reply.wait.waiting_for}"):
            while reply.WhichOneof("answer") == "wait":
                self._wait_for_lease()
                if self._strategy.is_now_synchronous():
                    raise ModeChanged
                self._trainer.router.pause(min(reply.wait.retry_ms, 1_000))
                self._session.check()
                if self._ends:
                    return None
                reply = self._session.ask(methods.LEASE_DATA, request)
        return lease_messages.data_lease_from_wire(reply.lease) if reply.HasField("lease") else None

    def _lease_request(self, known: Sequence[int] = ()) -> wire.LeaseDataRequest:
        """`known`: the tokens of the data shards that this worker knows that it holds. If it holds another one, it gets
        that (rule A14)."""
        caller = common_messages.caller_to_wire(self._session.caller)
        return wire.LeaseDataRequest(caller=caller, feed=self._number, known=known)

    def _wait_for_lease(self) -> None:
        """Called before each wait for a data shard."""
        self._strategy.rest()

    def _lease_ahead(self) -> DataLease | None:
        """Leases another data shard before the end of the current one (rule A14). None if there is none now, or the
        coordinator does not answer: that is no reason to wait in the middle of a data shard."""
        shard = self._shard
        if shard is None or self._is_last or self._ends or self._is_told_to_stop:
            return None
        if self._strategy.becomes_synchronous:
            return None
        known = [shard.token, *(each.token for each in self._ahead)]
        try:
            self._session.check()
            reply = self._session.ask_once(methods.LEASE_DATA, self._lease_request(known))
        except (NotReady, Unavailable) as error:
            log.debug("no data shard was leased ahead: %s", error)
            self._is_unsure = True
            reply = wire.LeaseDataReply()
        if not reply.HasField("lease") or len(known) == DATA_LEASES_MAX:
            self._is_last = True
            return None
        self._ahead.append(lease_messages.data_lease_from_wire(reply.lease))
        return self._ahead[-1]

    def _give_back(self, lease: DataLease, *, begun: bool = True) -> None:
        """The batches of the data shard that are not pushed go to other workers."""
        try:
            (self._close if begun else self._end_lease)(lease)
        except ShardyardError as error:
            log.debug("%s was not given back: %s", lease.source, error)

    def _close(self, lease: DataLease) -> None:
        try:
            self._strategy.finish_pushes()
        except LostWork:
            return
        self._end_lease(lease)

    def _end_lease(self, lease: DataLease) -> None:
        source = lease.source
        name = common.DataShardName(feed=source.feed, epoch=source.epoch, index=source.index)
        caller = common_messages.caller_to_wire(self._session.caller)
        request = wire.CloseLeaseRequest(caller=caller, data_shard=name, feed=self._number, token=lease.token)
        try:
            self._session.ask(methods.CLOSE_LEASE, request)
        except StaleToken as error:
            log.info("%s is another worker's now: %s", source, error.what)

    # ---- a data shard

    def _go_through(self, lease: DataLease) -> Iterator[Any]:
        key = SourceKey(lease.source)
        try:
            marks = self._trainer.reach(lambda router: router.open_sources([(key, lease.token)]))[key]
        except StaleToken:
            return
        self._strategy.resume()
        size = self._settings.batch_size
        samples = self._order(epoch=lease.source.epoch)[lease.begin : lease.end]
        nexts = [mark.next for mark in marks]
        pending: Work | None = None
        named_alike = self._seed(lease.source, 0)[:-1]
        self._early = {seed: each for seed, each in self._early.items() if seed[:-1] == named_alike}
        self._shard = shard = DataShardAtHand(
            lease.source, samples, -(-len(samples) // size), lease.announce_until, lease.token
        )
        self._is_last = False
        for sequence in range(min(nexts), shard.batches):
            if self._session.drain.asked:
                self._give_back(lease)
                return
            if self._is_told_to_stop:
                if pending is not None:
                    self._drop("no optimizer.step() after a batch when the job is told to stop")
                self._give_back(lease)
                return
            chosen = self._chosen(samples, sequence)
            first = sequence if pending is None else pending.name.first
            before = 0 if pending is None else pending.samples
            named = PushName(key, lease.token, first, sequence)
            if sequence < shard.announce_until:
                try:
                    counts = self._announce(shard, lease, sequence, highest=max(*nexts, sequence))
                except (LostWork, StaleToken):
                    return
                if not counts:
                    self.work = Work(named, before)
                    if pending is None:
                        self._contribute(self.work, None)
                    else:
                        pending = self.work  # the push of the batches before it names it too
                    if self.work.lost:
                        return
                    continue
            due = (sequence + 1) % self._settings.accumulate == 0 or (sequence + 1) * size >= len(samples)
            due |= sequence + 1 < shard.announce_until  # if the next one does not count, no push of it names this one
            self.work = Work(named, before + len(chosen), due, highest=max(nexts))
            self._trainer.accumulates = not due
            shard.sequence = sequence
            self._begin_batch(lease, self.work)
            try:
                yield self._fetch(self._seed(shard.source, sequence), chosen)
            except (GeneratorExit, KeyboardInterrupt):
                self._give_back(lease)
                raise
            pending = None if self.work.taken else self.work
            if self.work.lost:
                return
        if pending is not None:
            self._drop("no optimizer.step() after the last batch of a data shard")
            if pending.lost:
                return
        self.work = None
        self._close(lease)

    def _begin_batch(self, lease: DataLease, work: Work) -> None:
        """Called before each batch that is computed, the last of `work` so far."""

    def _announce(self, shard: DataShardAtHand, lease: DataLease, sequence: int, *, highest: int) -> bool:
        """Announces a batch at which workers may have died (rule A13). Returns whether it counts. Raises LostWork,
        StaleToken."""
        self._strategy.finish_pushes()  # if this worker dies now, it is because of this batch, not an earlier one
        counts, shard.announce_until = self._begins(lease.source, lease.token, sequence, highest=highest)
        return counts

    def following(self) -> Iterator[Reading]:
        shard = self._shard
        if shard is None:
            return
        for sequence in range(shard.sequence + 1, shard.batches):
            if sequence < shard.announce_until:
                return
            yield self._reading(shard.source, shard.samples, sequence)
        place = 0
        while (lease := self._ahead[place] if place < len(self._ahead) else self._lease_ahead()) is not None:
            samples = self._order(epoch=lease.source.epoch)[lease.begin : lease.end]
            for sequence in range(-(-len(samples) // self._settings.batch_size)):
                if sequence < lease.announce_until:
                    return
                yield self._reading(lease.source, samples, sequence)
            # those before it, and perhaps this one, have been begun meanwhile
            place = next((place + 1 for place, each in enumerate(self._ahead) if each.token == lease.token), 0)

    def _reading(self, source: DataShardSource, samples: Indices, sequence: int) -> Reading:
        return Reading(self._seed(source, sequence), self._chosen(samples, sequence).tolist())

    def _announced(self) -> Sequence[Announced]:
        """The announced ids of later batches of the same data shard."""
        if self._look_ahead is None or self._is_told_to_stop:
            return ()
        due = due_batches(self._session.settings.worker.window, self._settings.accumulate)
        following = list(islice(self.following(), due.stop))
        self._read_early(following)
        return self._ids_of(following[due.start :])

    def _seed(self, source: DataShardSource, sequence: int) -> Seed:
        return self._session.seed, 1, source.feed, source.epoch, source.index, sequence

    def _chosen(self, samples: Indices, sequence: int) -> Indices:
        size = self._settings.batch_size
        return samples[sequence * size : (sequence + 1) * size]
