"""`job.batches`: which samples this worker computes next, so that each counts once an epoch.

Asynchronous: data shards leased from the coordinator, gone through from the lowest watermark over all partitions (rules
A5, A6, A12). Synchronous: the samples of (logical rank, step), whoever computes them (rules B1, B4, B5).

Owns: the work that a batch stands for, until `optimizer.step()` takes it. Invariant: every batch that was yielded is
pushed under its name, alone, with others of its data shard, or as a named empty push. Must not know: tensors' contents.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shardyard.domain.consistency import UpdateMode
from shardyard.domain.errors import InvalidRequest, MalformedPayload, ShardyardError, StaleToken
from shardyard.domain.ids import Rank
from shardyard.domain.orders import Indices, order
from shardyard.domain.push_names import DataLease, DataShardSource, PushName, RankSource, SourceKey
from shardyard.domain.units import EpochPlan, StepPlan
from shardyard.wire import common_messages, lease_messages, methods
from shardyard.wire.v1 import common_pb2 as common
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_worker.consistency.local_sgd import LocalRounds
from shardyard_worker.consistency.strategies import AsyncStrategy, LostWork, ModeChanged, Strategy, SyncStrategy
from shardyard_worker.data.dataset import Reader
from shardyard_worker.data.look_ahead import Depth, LookAhead, announced
from shardyard_worker.data.makeup_steps import MakeupSteps, MissedBatch
from shardyard_worker.data.poison_guard import announce
from shardyard_worker.data.seeding import GeneratorStates, restore, seed_everything, states, undisturbed
from shardyard_worker.training.table_binding import Announced, Upcoming
from shardyard_worker.training.trainer import Trainer
from shardyard_worker.training.variables import StepInput

log = logging.getLogger("shardyard.worker")


@dataclass
class Work:
    """What the batch that is being computed stands for. `samples` grows as batches are accumulated into one push.
    `due`: whether optimizer.step() is due after the batch at hand; `stepped`: it was called; `left`: batches that
    belong to it, and come later."""

    name: PushName
    samples: int
    due: bool = True
    left: int = 0
    stepped: bool = False
    taken: bool = False
    lost: bool = False
    highest: int = 0
    """As StepInput has it."""


@dataclass(frozen=True)
class FeedSettings:
    batch_size: int
    epochs: int
    shuffle: bool
    drop_last: bool
    accumulate: int = 1


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
        training: Trainer,
        strategy: Strategy,
        reader: Reader,
        *,
        number: int,
        settings: FeedSettings,
        opened: wire.OpenFeedReply,
        look_ahead: LookAhead | None,
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
        self._look_ahead = look_ahead
        self.upcoming: Upcoming | None = None if look_ahead is None else self._announced
        self.work: Work | None = None

    @property
    def _is_told_to_stop(self) -> bool:
        return self._session.brake.stop is not None

    @abstractmethod
    def batches(self) -> Generator[Any, None, None]:
        """Yields batches until all samples of all epochs are counted, by this worker or others. Raises ModeChanged
        where the job goes on in another mode: `anew` does, with what is left."""

    @abstractmethod
    def _announced(self) -> Sequence[Announced]:
        """The ids of the batches that will be computed on what the next exchange brings, as far as none of them may end
        this process."""

    def anew(self, strategy: Strategy) -> Feed:
        """The same in the mode that the job goes by now."""
        return open_feed(
            self._training,
            strategy,
            self._reader,
            number=self._number,
            settings=self._settings,
            look_ahead=self._look_ahead,
        )

    def push(self, sending: StepInput | None) -> None:
        """Pushes what was computed on the batch (or batches) since the last push. None: it shall not count."""
        work = self.require_work()
        if sending is None:
            self._push_empty(work)
            return
        work.taken = True
        weighted = replace(sending, weight=float(work.samples), highest=work.highest)
        try:
            self._strategy.contribute(work.name, weighted, self.upcoming)
        except LostWork:
            work.lost = True

    def require_work(self) -> Work:
        """That for which a step is taken now. Raises InvalidRequest."""
        work = self.work
        if work is None or work.taken or work.stepped:
            raise InvalidRequest(
                "optimizer.step() twice for one batch",
                why="a batch is one piece of work, and counts once",
                todo="call optimizer.step() once for each batch of job.batches",
            )
        return work

    def _read_before(self, seed: tuple[int, ...], chosen: Indices) -> _Read:
        """A batch, before its turn: random numbers are what they will be then, and those of others are as they were."""
        with undisturbed():
            seed_everything(*seed, devices=False)
            batch, error = None, None
            try:
                batch = self._reader.fetch(chosen)
            except Exception as raised:  # noqa: BLE001 - raised in its turn, when the batches before it are counted
                error = raised
            return _Read(batch, error, states())

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
            self._strategy.contribute(work.name, None, self.upcoming)
        except LostWork:
            work.lost = True


@dataclass(frozen=True)
class _Read:
    """A batch that was read before its turn, or what that raised, and where the generators stood after it."""

    batch: Any
    error: Exception | None
    states: GeneratorStates

    def take(self) -> Any:
        restore(self.states)
        if self.error is not None:
            raise self.error
        return self.batch


@dataclass
class _Shard:
    """A data shard that is gone through: the batch at hand, how many there are, and the first that may be read before
    its turn."""

    source: DataShardSource
    samples: Indices
    batches: int
    careful_below: int
    sequence: int = 0
    read: dict[int, _Read] = field(default_factory=dict)


class AsyncFeed(Feed):
    _strategy: AsyncStrategy
    _shard: _Shard | None = None

    def _announced(self) -> Sequence[Announced]:
        """Of batches of the same data shard."""
        shard = self._shard
        if shard is None or self._look_ahead is None or self._is_told_to_stop:
            return ()
        depth = Depth(self._session.settings.worker.window, self._settings.accumulate)
        due = range(shard.sequence + 1 + depth.begin, min(shard.sequence + 1 + depth.end, shard.batches))
        if not due or due[0] < shard.careful_below:
            return ()
        read = [self._read_ahead(shard, sequence) for sequence in due]
        return announced(self._look_ahead, [each.batch for each in read if each.error is None])

    def _read_ahead(self, shard: _Shard, sequence: int) -> _Read:
        read = self._read_before(self._key(shard.source, sequence), self._chosen(shard.samples, sequence))
        shard.read[sequence] = read
        return read

    def _fetch(self, shard: _Shard, sequence: int) -> Any:
        """The batch at hand; the generators stand where reading it has left them."""
        seed_everything(*self._key(shard.source, sequence))
        read = shard.read.pop(sequence, None)
        return self._reader.fetch(self._chosen(shard.samples, sequence)) if read is None else read.take()

    def _key(self, source: DataShardSource, sequence: int) -> tuple[int, ...]:
        return self._session.seed, 1, source.feed, source.epoch, source.index, sequence

    def _chosen(self, samples: Indices, sequence: int) -> Indices:
        size = self._settings.batch_size
        return samples[sequence * size : (sequence + 1) * size]

    def batches(self) -> Generator[Any, None, None]:
        try:
            while not self._ends and (lease := self._lease()) is not None:
                yield from self._go_through(lease)
        finally:
            self._rest()
        self._session.learn()  # a server that was given up answers who has the map of before, without what came since
        self._rest()  # also to servers that were told to expect it before its work was closed
        self._strategy.begin()

    @property
    def _ends(self) -> bool:
        """Whether the job is told to stop where it is; one with steps stops before one of them."""
        return self._is_told_to_stop and not self._strategy.is_to_go_over

    def _rest(self) -> None:
        """Nobody waits for this worker until it has work again."""
        try:
            self._strategy.rest()
        except ShardyardError as error:  # what ends the job is told by what the script does next
            log.debug("no word that this worker rests: %s", error)

    def _lease(self) -> DataLease | None:
        """A data shard to work on; None when all are done, or the job is told to stop."""
        request = wire.LeaseDataRequest(caller=common_messages.caller_to_wire(self._session.caller), feed=self._number)
        reply = self._session.ask(methods.LEASE_DATA, request)
        with self._session.wait_registry.over(lambda: f"a data shard of feed {self._number}: {reply.wait.waiting_for}"):
            while reply.WhichOneof("answer") == "wait":
                self._strategy.rest()
                if self._strategy.has_gone_over():
                    raise ModeChanged
                self._training.router.pause(min(reply.wait.retry_ms, 1_000))
                self._session.check()
                if self._ends:
                    return None
                reply = self._session.ask(methods.LEASE_DATA, request)
        return lease_messages.data_lease_from_wire(reply.lease) if reply.HasField("lease") else None

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
        self._shard = shard = _Shard(lease.source, samples, -(-len(samples) // size), careful_below)
        for sequence in range(min(nexts), shard.batches):
            if self._is_told_to_stop:
                if pending is not None:
                    self._drop("no optimizer.step() after a batch when the job is told to stop")
                self._give_back(lease)
                return
            chosen = self._chosen(samples, sequence)
            first = sequence if pending is None else pending.name.first
            before = 0 if pending is None else pending.samples
            due = (sequence + 1) % self._settings.accumulate == 0 or (sequence + 1) * size >= len(samples)
            named = PushName(key, lease.token, first, sequence)
            self.work = Work(named, before + len(chosen), due, highest=max(nexts))
            self._training.accumulates = not due
            if sequence < careful_below:
                try:
                    self._strategy.drain()  # what kills this worker now is this batch, not one before
                    verdict = announce(
                        self._training, lease.source, lease.token, sequence, highest=max(*nexts, sequence)
                    )
                except (LostWork, StaleToken):
                    return
                careful_below = shard.careful_below = verdict.careful_below
                if not verdict.counts:
                    self.work = Work(self.work.name, before)
                    if pending is None:
                        self._push_empty(self.work)
                    else:
                        pending = self.work  # the push of the batches before names it too
                    if self.work.lost:
                        return
                    continue
            shard.sequence = sequence
            try:
                yield self._fetch(shard, sequence)
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
        caller = common_messages.caller_to_wire(self._session.caller)
        request = wire.CloseLeaseRequest(caller=caller, data_shard=name, feed=self._number, token=lease.token)
        try:
            self._session.ask(methods.CLOSE_LEASE, request)
        except StaleToken as error:
            log.info("%s is another worker's now: %s", source, error.what)


class SyncFeed(Feed):
    _strategy: SyncStrategy
    _is_long = False
    """Whether a step of the job is a round of steps."""

    @property
    def _units(self) -> EpochPlan:
        settings, session = self._settings, self._session
        return EpochPlan(
            self._reader.samples,
            settings.batch_size,
            session.logical_ranks,
            settings.drop_last,
            settings.accumulate,
            local_steps=session.job_settings.consistency.local_steps or 1,
        )

    def require_work(self) -> Work:
        work = super().require_work()
        if work.left:
            raise InvalidRequest(
                f"optimizer.step() {work.left} batches before the last one of {work.name}",
                why="in a synchronous job the batches of a step are one piece of work, which counts once",
                todo=f"call it after {self._settings.accumulate} batches (accumulate), or where job.step_due says so",
            )
        return work

    def _warn_of_short_steps(self) -> None:
        """A script that counts batches, and does not ask job.step_due, misses the end of a step that has fewer."""
        accumulate, units = self._settings.accumulate, self._units
        share = self._settings.batch_size * accumulate
        last = units.samples_per_epoch % units.samples_per_step % share
        if 0 < last < accumulate:
            log.warning(
                "the last step of an epoch has %d samples for one of the ranks, and so fewer than %d batches: call"
                " optimizer.step() where job.step_due says so, or give drop_last=True",
                last,
                accumulate,
            )

    def __init__(
        self,
        training: Trainer,
        strategy: Strategy,
        reader: Reader,
        *,
        number: int,
        settings: FeedSettings,
        opened: wire.OpenFeedReply,
        look_ahead: LookAhead | None,
    ) -> None:
        super().__init__(
            training, strategy, reader, number=number, settings=settings, opened=opened, look_ahead=look_ahead
        )
        begun = opened.begun_epochs, opened.begun_samples
        if begun[0] > settings.epochs or begun[1] >= reader.samples or (begun[1] and begun[0] == settings.epochs):
            raise MalformedPayload(f"feed {number} of {settings.epochs} epochs, of which {begun} were begun")
        self._course = StepPlan(self._units, opened.units_per_epoch, settings.epochs, opened.first_step, *begun)
        backups = self._session.job_settings.consistency.backup_workers
        if backups:
            self.upcoming = None  # a step brings no values
        self._make_up = MakeupSteps(self._session, number, self._course.end, makes_up=bool(backups))
        self._read: dict[tuple[Rank, int, int], _Read] = {}
        """Batches that were read before their turn, by rank, step and number."""

    @property
    def _end(self) -> int:
        """The step after the last one that is known: that of the data, or, before it, where the job is told to stop."""
        stop = self._session.brake.end
        return self._make_up.end if stop is None else min(self._make_up.end, stop)

    def _has(self, step: int) -> bool:
        """Whether the data set has that step, and the job goes so far."""
        stop = self._session.brake.end
        return (stop is None or step < stop) and self._make_up.has(step)

    def batches(self) -> Generator[Any, None, None]:
        self._warn_of_short_steps()
        while not self._opened.done:
            self._strategy.check_mode()
            if self._strategy.on_standby:
                if self._is_done_on_standby():
                    break
                continue
            self._strategy.prepare_work()
            rank = self._strategy.due()
            if not self._has(self._strategy.step):
                if self._await_done():
                    break
                continue
            if rank is not None and self._strategy.goes_on(begins=self._is_long):
                yield from self._compute(rank)
        if not self._is_told_to_stop:
            self._make_up.settle()
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
        made_up = self._make_up.batch(rank, step)
        if made_up is None:  # others make up for what was dropped
            self.work = Work(name, 0)
            self._push_empty(self.work)
            return
        chosen = self._samples(made_up)
        consistency = self._session.job_settings.consistency
        highest = self._strategy.highest(rank) if consistency.rows_at_once else 0
        self.work = work = Work(name, len(chosen), highest=highest)
        self._read = {key: each for key, each in self._read.items() if key[1] >= step}
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
        batches = list(self._units.batches(len(chosen)))
        for number, batch in enumerate(batches):
            work.due, work.left, work.stepped = batch.due, len(batches) - number - 1, False
            self._training.accumulates = not batch.due
            yield self._fetch(made_up, number, chosen[batch.begin : batch.end])
        if not work.taken:
            self._end_unasked()

    def _announced(self) -> Sequence[Announced]:
        """Of the batches of the next step that this worker's ranks will compute."""
        if self._look_ahead is None or self._is_told_to_stop:
            return ()
        step = self._strategy.step + 1
        if step < self._opened.first_step or not self._has(step):
            return ()
        read: list[_Read] = []
        for rank in self._strategy.ranks:
            if step >= self._strategy.careful_below(rank):
                read += self._read_ahead(MissedBatch(rank, step))
        return announced(self._look_ahead, [each.batch for each in read if each.error is None])

    def _read_ahead(self, of: MissedBatch) -> list[_Read]:
        chosen = self._samples(of)
        found: list[_Read] = []
        for number, batch in enumerate(self._units.batches(len(chosen)) if len(chosen) else ()):
            key = (of.rank, of.step, number)
            if key not in self._read:
                self._read[key] = self._read_before(self._key(of, number), chosen[batch.begin : batch.end])
            found.append(self._read[key])
        return found

    def _fetch(self, of: MissedBatch, number: int, chosen: Indices) -> Any:
        """The batch at hand; the generators stand where reading it has left them."""
        seed_everything(*self._key(of, number))
        read = self._read.pop((of.rank, of.step, number), None)
        return self._reader.fetch(chosen) if read is None else read.take()

    def _key(self, of: MissedBatch, number: int) -> tuple[int, ...]:
        """A step's only batch is seeded by its name alone."""
        return self._session.seed, 0, of.rank, of.step, *((number,) if number else ())

    def _end_unasked(self) -> None:
        """All batches of the work at hand were computed, and nothing was pushed."""
        self._drop("no optimizer.step() after a batch")

    def _samples(self, batch: MissedBatch) -> Indices:
        epoch, begin, end = self._course.span(batch.step, batch.rank)
        return self._orders.of(epoch)[begin:end]

    def _close(self) -> bool:
        caller = common_messages.caller_to_wire(self._session.caller)
        request = wire.CloseLeaseRequest(caller=caller, feed=self._number)
        return self._session.ask(methods.CLOSE_LEASE, request).done

    def _is_done_on_standby(self) -> bool:
        """Waits for a rank, or for the others to be done with all of it: True then."""
        with self._session.wait_registry.over(lambda: "a logical rank to compute; other workers have them all"):
            while self._strategy.on_standby:
                if self._close():
                    return True
                if self._strategy.has_moved():
                    return False
                self._training.router.pause(200)
                self._session.refresh()
        return False

    def _await_done(self) -> bool:
        """Until a checkpoint has all steps. False where the job has gone back meanwhile, and steps are to be computed
        again (rule A11)."""
        with self._session.wait_registry.over(lambda: f"a checkpoint that has step {self._end - 1}"):
            while not self._close():
                self._session.check()
                if self._strategy.has_moved():
                    return False
                self._training.router.pause(50)
        return True


class LocalFeed(SyncFeed):
    """Of a job in local mode: the batches of a round are one piece of work, whatever steps are taken on them."""

    _is_long = True
    _local: LocalRounds
    _end_round: Callable[[], object]

    def follow(self, local: LocalRounds, end_round: Callable[[], object]) -> None:
        """Who takes the steps, and pushes what they have come to."""
        self._local, self._end_round = local, end_round
        local.rounds.add(self._opened.first_step, self._units, self._settings.epochs)

    def enter(self) -> bool:
        """A step is taken after the batch at hand, which may be the round's last: True then. Raises InvalidRequest."""
        work = Feed.require_work(self)
        work.stepped = True
        assert isinstance(work.name.key.source, RankSource)
        self._local.enter(work.name.key.source.rank, work.name.first)
        return not work.left

    def require_work(self) -> Work:
        """That of the round that has ended."""
        assert self.work is not None
        return self.work

    def _end_unasked(self) -> None:
        if self._local.taken:
            self._end_round()
        else:
            self._drop("no optimizer.step() in a round")


def open_feed(
    training: Trainer,
    strategy: Strategy,
    reader: Reader,
    *,
    number: int,
    settings: FeedSettings,
    look_ahead: LookAhead | None = None,
    local: LocalRounds | None = None,
    end_round: Callable[[], object] | None = None,
) -> Feed:
    """Agrees with the coordinator, and so with all workers, on what is read and how. `end_round`: pushes what `local`
    has come to. Raises FeedConflict."""
    session = training.session
    request = wire.OpenFeedRequest(
        caller=common_messages.caller_to_wire(session.caller),
        feed=number,
        samples=reader.samples,
        fingerprint=reader.fingerprint(),
        batch_size=settings.batch_size,
        epochs=settings.epochs,
        shuffle=settings.shuffle,
        drop_last=settings.drop_last,
        accumulate=settings.accumulate,
    )
    opened = session.ask(methods.OPEN_FEED, request)
    given: dict[str, Any] = {"number": number, "settings": settings, "opened": opened, "look_ahead": look_ahead}
    if session.mode is UpdateMode.ASYNC:
        return AsyncFeed(training, strategy, reader, **given)
    if local is None or end_round is None:
        return SyncFeed(training, strategy, reader, **given)
    feed = LocalFeed(training, strategy, reader, **given)
    feed.follow(local, end_round)
    return feed
