"""`job.batches`: which samples this worker computes next, so that each counts once an epoch.

Asynchronous: data shards leased from the coordinator, gone through from the lowest watermark over all partitions (rules
A5, A6, A12). Synchronous: the samples of (logical rank, step), whoever computes them (rules B1, B4, B5).

Owns: the work that a batch stands for, until `optimizer.step()` takes it. Invariant: every batch that was yielded is
pushed under its name, alone, with others of its data shard, or as a named empty push. Must not know: tensors' contents.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

from shardyard.ground.errors import InvalidRequest, ShardyardError, StaleToken
from shardyard.ground.orders import Indices, order
from shardyard.ground.types import DataLease, PushName, Rank, RankSource, SourceKey, UpdateMode
from shardyard.wire import convert, methods
from shardyard.wire.v1 import common_pb2 as common
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_worker.caution import announce
from shardyard_worker.dataset import Reader
from shardyard_worker.randomness import seed_everything
from shardyard_worker.strategies import LostWork, Strategy, SyncStrategy
from shardyard_worker.training import Sending, Training

log = logging.getLogger("shardyard.worker")


@dataclass
class Work:
    """What the batch that is being computed stands for. `samples` grows as batches are accumulated into one push."""

    name: PushName
    samples: int
    taken: bool = False
    lost: bool = False


@dataclass(frozen=True)
class FeedSettings:
    batch_size: int
    epochs: int
    shuffle: bool
    drop_last: bool


@dataclass
class Orders:
    """Permutations of the epochs in use; a few are kept, since workers move between neighbouring epochs."""

    seed: int
    feed: int
    samples: int
    shuffle: bool
    _kept: dict[int, Indices] = field(default_factory=dict)

    def of(self, epoch: int) -> Indices:
        if epoch not in self._kept:
            while len(self._kept) >= 2:
                del self._kept[min(self._kept)]
            self._kept[epoch] = order(
                seed=self.seed, feed=self.feed, epoch=epoch, samples=self.samples, shuffle=self.shuffle
            )
        return self._kept[epoch]


class Feed(ABC):
    """One call of `job.batches`. `work` is what the batch yielded last stands for."""

    def __init__(
        self,
        training: Training,
        strategy: Strategy,
        reader: Reader,
        *,
        number: int,
        settings: FeedSettings,
        opened: wire.OpenFeedReply,
    ) -> None:
        self._training = training
        self._strategy = strategy
        self._session = training.session
        self._reader = reader
        self._number = number
        self._settings = settings
        self._opened = opened
        self._orders = Orders(self._session.seed, number, reader.samples, settings.shuffle)
        self._warned = False
        self.work: Work | None = None

    @property
    def _is_told_to_stop(self) -> bool:
        return self._session.brake.stop is not None

    @abstractmethod
    def batches(self) -> Generator[Any, None, None]:
        """Yields batches until all samples of all epochs are counted, by this worker or others."""

    def push(self, sending: Sending) -> None:
        """Pushes what was computed on the batch (or batches) since the last push."""
        work = self.work
        if work is None or work.taken:
            raise InvalidRequest(
                "optimizer.step() twice for one batch",
                why="a batch is one piece of work, and counts once",
                todo="call optimizer.step() once for each batch of job.batches",
            )
        work.taken = True
        weighted = Sending(sending.tensors, float(work.samples), sending.groups)
        try:
            self._strategy.contribute(work.name, weighted)
        except LostWork:
            work.lost = True

    def _drop(self, why: str) -> None:
        """Pushes the current work as a named empty push: it does not count, and nobody waits for it."""
        work = self.work
        assert work is not None
        if not self._warned:
            log.warning("%s: %s is counted as an empty push", why, work.name)
            self._warned = True
        self._push_empty(work)

    def _push_empty(self, work: Work) -> None:
        work.taken = True
        try:
            self._strategy.contribute(work.name, None)
        except LostWork:
            work.lost = True


class AsyncFeed(Feed):
    def batches(self) -> Generator[Any, None, None]:
        try:
            while not self._is_told_to_stop and (lease := self._lease()) is not None:
                yield from self._go_through(lease)
        finally:
            self._rest()
        self._strategy.begin()

    def _rest(self) -> None:
        """Nobody waits for this worker until it has work again."""
        try:
            self._strategy.rest()
        except ShardyardError as error:  # what ends the job is told by what the script does next
            log.debug("no word that this worker rests: %s", error)

    def _lease(self) -> DataLease | None:
        """A data shard to work on; None when all are done, or the job is told to stop."""
        request = wire.LeaseDataRequest(caller=convert.caller_to_wire(self._session.caller), feed=self._number)
        reply = self._session.ask(methods.LEASE_DATA, request)
        with self._session.vigil.over(lambda: f"a data shard of feed {self._number}: {reply.wait.waiting_for}"):
            while reply.WhichOneof("answer") == "wait":
                self._strategy.rest()
                self._training.router.pause(min(reply.wait.retry_ms, 1_000))
                self._session.check()
                if self._is_told_to_stop:
                    return None
                reply = self._session.ask(methods.LEASE_DATA, request)
        return convert.data_lease_from_wire(reply.lease) if reply.HasField("lease") else None

    def _go_through(self, lease: DataLease) -> Iterator[Any]:
        key = SourceKey(lease.source)
        try:
            marks = self._training.reach(lambda router: router.open_sources([(key, lease.token)]))[key]
        except StaleToken:
            return
        self._strategy.resume()
        size = self._settings.batch_size
        samples = self._orders.of(lease.source.epoch)[lease.begin : lease.end]
        nexts = [mark.next for mark in marks]
        careful_below = lease.careful_below
        pending: Work | None = None
        for sequence in range(min(nexts), -(-len(samples) // size)):
            if self._is_told_to_stop:
                if pending is not None:
                    self._drop("no optimizer.step() after a batch when the job is told to stop")
                self._give_back(lease)
                return
            chosen = samples[sequence * size : (sequence + 1) * size]
            first = sequence if pending is None else pending.name.first
            before = 0 if pending is None else pending.samples
            self.work = Work(PushName(key, lease.token, first, sequence), before + len(chosen))
            if sequence < careful_below:
                try:
                    self._strategy.drain()  # what kills this worker now is this batch, not one before
                    verdict = announce(
                        self._training, lease.source, lease.token, sequence, highest=max(*nexts, sequence)
                    )
                except (LostWork, StaleToken):
                    return
                careful_below = verdict.careful_below
                if not verdict.counts:
                    self.work = Work(self.work.name, before)
                    if pending is None:
                        self._push_empty(self.work)
                    else:
                        pending = self.work  # the push of the batches before names it too
                    if self.work.lost:
                        return
                    continue
            seed_everything(self._session.seed, 1, lease.source.feed, lease.source.epoch, lease.source.index, sequence)
            try:
                yield self._reader.fetch(chosen)
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

    def _give_back(self, lease: DataLease) -> None:
        """The script has left its loop: what is left of the data shard is for others."""
        try:
            self._close(lease)
        except ShardyardError as error:
            log.debug("%s was not given back: %s", lease.source, error)

    def _close(self, lease: DataLease) -> None:
        try:
            self._strategy.drain()
        except LostWork:
            return
        source = lease.source
        name = common.DataShardName(feed=source.feed, epoch=source.epoch, index=source.index)
        caller = convert.caller_to_wire(self._session.caller)
        request = wire.CloseLeaseRequest(caller=caller, data_shard=name, feed=self._number, token=lease.token)
        try:
            self._session.ask(methods.CLOSE_LEASE, request)
        except StaleToken as error:
            log.info("%s is another worker's now: %s", source, error.what)


class SyncFeed(Feed):
    _strategy: SyncStrategy

    @property
    def _end(self) -> int:
        """The step after the last one: that of the data, or, before it, where the job is told to stop."""
        end = self._opened.first_step + self._opened.units_per_epoch * self._settings.epochs
        stop = self._session.brake.end
        return end if stop is None else min(end, stop)

    def batches(self) -> Generator[Any, None, None]:
        while not self._opened.done:
            if self._strategy.on_standby:
                if self._is_done_on_standby():
                    break
                continue
            self._strategy.prepare_work()
            rank = self._strategy.due()
            if self._strategy.step >= self._end:
                if self._await_done():
                    break
                continue
            if rank is not None and self._strategy.goes_on():
                yield from self._compute(rank)
        if self._strategy.on_standby or self._strategy.step < self._end:
            # a rank may have come with the news of the end, to somebody who computed none
            self._strategy.catch_up(self._end)

    def _compute(self, rank: Rank) -> Iterator[Any]:
        name = self._strategy.name_of(rank)
        step = name.first
        if step < self._opened.first_step:
            raise InvalidRequest(
                f"step {step} before the first step of this data set, {self._opened.first_step}",
                why="in a synchronous job the steps of one data set follow those of the other",
                todo="go through each job.batches to its end, and call it for the same data sets, in the same order,"
                " on all workers",
            )
        chosen = self._samples(rank, step)
        self.work = Work(name, len(chosen))
        if len(chosen) == 0:
            self._warned = True  # the last step of an epoch may have less work than ranks
            self._drop("no samples")
            return
        if step < self._strategy.careful_below(rank):
            try:
                highest = self._strategy.highest(rank)
                verdict = announce(self._training, RankSource(rank), name.token, step, highest=highest)
            except StaleToken as error:
                log.info("%s is another worker's now: %s", name, error.what)
                self._session.refresh()
                return
            if not verdict.counts:
                self._push_empty(self.work)
                return
        seed_everything(self._session.seed, 0, rank, step)
        yield self._reader.fetch(chosen)
        if not self.work.taken:
            self._drop("no optimizer.step() after a batch")

    def _samples(self, rank: Rank, step: int) -> Indices:
        epoch, index = divmod(step - self._opened.first_step, self._opened.units_per_epoch)
        size = self._settings.batch_size
        begin = (index * self._session.logical_ranks + rank) * size
        return self._orders.of(epoch)[begin : begin + size]

    def _close(self) -> bool:
        caller = convert.caller_to_wire(self._session.caller)
        request = wire.CloseLeaseRequest(caller=caller, feed=self._number)
        return self._session.ask(methods.CLOSE_LEASE, request).done

    def _is_done_on_standby(self) -> bool:
        """Waits for a rank, or for the others to be done with all of it: True then."""
        with self._session.vigil.over(lambda: "a logical rank to compute; other workers have them all"):
            while self._strategy.on_standby:
                if self._close():
                    return True
                self._training.router.pause(200)
                self._session.refresh()
        return False

    def _await_done(self) -> bool:
        """Until a checkpoint has all steps. False where the job has gone back meanwhile, and steps are to be computed
        again (rule A11)."""
        with self._session.vigil.over(lambda: f"a checkpoint that has step {self._end - 1}"):
            while not self._close():
                self._session.check()
                if self._strategy.has_moved():
                    return False
                self._training.router.pause(50)
        return True


def open_feed(training: Training, strategy: Strategy, reader: Reader, *, number: int, settings: FeedSettings) -> Feed:
    """Agrees with the coordinator, and so with all workers, on what is read and how. Raises FeedConflict."""
    session = training.session
    request = wire.OpenFeedRequest(
        caller=convert.caller_to_wire(session.caller),
        feed=number,
        samples=reader.samples,
        fingerprint=reader.fingerprint(),
        batch_size=settings.batch_size,
        epochs=settings.epochs,
        shuffle=settings.shuffle,
        drop_last=settings.drop_last,
    )
    opened = session.ask(methods.OPEN_FEED, request)
    kind = SyncFeed if session.mode is UpdateMode.SYNC else AsyncFeed
    return kind(training, strategy, reader, number=number, settings=settings, opened=opened)
