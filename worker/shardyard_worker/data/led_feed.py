"""Batches of asynchronous replicas: the first worker of a replica leases data shards, and tells the others which batch
they compute next (docs/internals/ledger.md, rule D11).

A lease does not outlast the group in which it was opened. When the group ends, the leader gives it back, and whoever
leads next opens it under a higher token: so servers refuse what a member of the former group still pushes.

Owns: who leads and who follows. Must not know: what the members compute, how a push travels.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator
from typing import Any

from shardyard.domain.ids import Token
from shardyard.domain.push_names import DataLease
from shardyard.wire import lease_messages, methods
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_worker.collectives.group_store import GroupLost
from shardyard_worker.consistency.groups.pushed_async import PushedAsync
from shardyard_worker.consistency.groups.work_messages import Told, WorkMessage
from shardyard_worker.data.async_feed import AsyncFeed, DataShardAtHand
from shardyard_worker.data.feed import Work

log = logging.getLogger("shardyard.worker")


class LedFeed(AsyncFeed):
    _strategy: PushedAsync

    def __init__(self, *given: Any, ask: Callable[[], wire.OpenFeedReply], **named: Any) -> None:
        """`ask` asks the coordinator whether all data is done."""
        super().__init__(*given, **named)
        self._ask = ask
        self._leased: DataLease | None = None
        """The lease that this worker leads through."""
        self._held: dict[Token, DataLease] = {}
        """The leases that this worker has opened, and has not returned."""
        self._is_over = False
        """Whether this replica has gone through all data."""
        self._has_begun = False
        """Whether this worker has had a batch."""

    def batches(self) -> Generator[Any, None, None]:
        try:
            while not self._ends and not self._is_over:
                try:
                    if not self._strategy.take_place(self._number, self._is_done):
                        break
                    yield from self._lead() if self._strategy.leads else self._follow()
                except GroupLost as error:
                    log.info("has left its group: %s", error)
                    self._strategy.leave_group()
                finally:
                    self._return_leases()
        finally:
            if not self._is_over:
                self._strategy.leave_group()
        if self._session.drain.asked:
            return
        self._session.learn()  # under an old map a server that was given up may still answer
        self._strategy.load_all()

    def _is_done(self) -> bool:
        """Whether this worker need not take a place for this data: others have gone through it, or have left it before
        this worker came. Without a place it leads nobody, so it computes no data shard that it is leased."""
        if self._ends:
            return True
        opened = self._ask()
        if not opened.done and opened.has_later and not self._has_begun:
            log.info("leaves data set %d before its first batch: other workers have left it", self._number)
            return True
        if not opened.done:
            return False
        lease = self._lease()  # waits for the checkpoint that has all data
        if lease is not None:
            self._give_back(lease, begun=False)
        self._is_over = lease is None
        return self._is_over

    def _return_leases(self) -> None:
        """Also one that this worker does not know of: a worker without a place asks for no more."""
        held = self._held | {each.token: each for each in self._ahead}
        self._leased, self._held, self._ahead = None, {}, []
        if self._is_unsure:
            self._is_unsure = False
            reply = self._session.ask(methods.LEASE_DATA, self._lease_request([*held]))
            if reply.HasField("lease"):
                unknown = lease_messages.data_lease_from_wire(reply.lease)
                held[unknown.token] = unknown
        for lease in held.values():
            self._give_back(lease, begun=False)

    # ---- the leader

    def _lead(self) -> Iterator[Any]:
        self._strategy.resume()
        while not self._ends:
            self._strategy.check()
            lease = self._lease()
            if lease is None:
                break
            self._leased = self._held[lease.token] = lease
            yield from self._go_through(lease)
            if self._leased is not None:  # work was lost: watermarks are read when no push of it is under way
                self._tell(Told.ANSWERED)
                self._strategy.await_answers()
        if not self._session.drain.asked:
            self._tell(Told.ENDS)
            self._is_over = True

    def _tell(self, told: Told) -> None:
        self._strategy.tell(WorkMessage(told))

    def _wait_for_lease(self) -> None:
        if self._strategy.leads:
            self._tell(Told.WAITS)

    def _begin_batch(self, lease: DataLease, work: Work) -> None:
        self._has_begun = True
        name = work.name
        batch = WorkMessage(Told.BATCH, lease, name.first, name.last, work.samples, work.due)
        self._strategy.tell(batch)

    def _contribute(self, work: Work, sending: Any) -> None:
        if sending is None and self._strategy.leads:
            assert self._leased is not None
            self._strategy.tell(WorkMessage(Told.EMPTY, self._leased, work.name.first, work.name.last))
        super()._contribute(work, sending)

    def _close(self, lease: DataLease) -> None:
        """When all members' pushes are answered. Members in the middle of a work are not told."""
        if self.work is None or self.work.taken:
            try:
                self._tell(Told.ANSWERED)
            except GroupLost as error:
                log.debug("%s is returned: %s", lease.source, error)
            else:
                self._strategy.await_answers()
        super()._close(lease)
        self._held.pop(lease.token, None)
        self._leased = None

    def _lease_ahead(self) -> DataLease | None:
        return super()._lease_ahead() if self._strategy.leads else None

    # ---- the others

    def _follow(self) -> Iterator[Any]:
        self._strategy.resume()
        while True:
            message = self._strategy.hear()
            match message.told:
                case Told.BATCH:
                    yield from self._compute(message)
                case Told.EMPTY:
                    self.work = Work(message.name, 0)
                    self._contribute(self.work, None)
                case Told.ANSWERED:
                    self._strategy.await_answers()
                case Told.WAITS:
                    if self._session.drain.asked:
                        return
                case Told.ENDS:
                    self._is_over = True
                    return

    def _compute(self, message: WorkMessage) -> Iterator[Any]:
        lease, name = message.lease, message.name
        assert lease is not None
        self._has_begun = True
        samples = self._order(epoch=lease.source.epoch)[lease.begin : lease.end]
        batches = -(-len(samples) // self._settings.batch_size)
        self._shard = DataShardAtHand(lease.source, samples, batches, lease.announce_until, lease.token, name.last)
        self.work = Work(name, message.samples, message.due)
        self._trainer.accumulates = not message.due
        yield self._fetch(self._seed(lease.source, name.last), self._chosen(samples, name.last))
