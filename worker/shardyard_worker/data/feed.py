"""`job.batches`: which samples this worker computes next, so that each counts once an epoch.

A feed is one call of `job.batches` under one kind of update: `async_feed` or `sync_feed`. When the job changes its
mode, another feed continues with the samples that are left.

Owns: the work that a batch belongs to, until `optimizer.step()` takes it. Invariant: every batch that was yielded is
pushed under its name, alone, with others of its data shard, or as a named empty push. Must not know: tensors' contents.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import chain, islice
from typing import Any

import numpy as np

from shardyard.domain.epochs import Indices, order
from shardyard.domain.errors import InvalidRequest
from shardyard.domain.ids import Token
from shardyard.domain.push_names import LeasedSource, PushName
from shardyard.wire import common_messages, methods
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_worker.consistency.strategy import LostWork, Strategy
from shardyard_worker.data.dataset import Reader
from shardyard_worker.data.loader_processes import ReadBatch, Reading, Seed
from shardyard_worker.data.look_ahead import LookAhead, announced
from shardyard_worker.data.seeding import seed_everything
from shardyard_worker.training.table_binding import Announced, Upcoming
from shardyard_worker.training.trainer import Trainer
from shardyard_worker.training.variables import StepInput

log = logging.getLogger("shardyard.worker")

PAUSE_MS_MAX = 1_000


@dataclass
class Work:
    """The work of the current batch. `samples` grows as batches are accumulated into one push; in a synchronous job
    they are known before, and so is the number of `batches`. `due`: optimizer.step() is due after this batch.
    `stepped`: it was called. `left`: later batches that belong to this work. `taken`: it was pushed. `lost`: another
    worker has it."""

    name: PushName
    samples: int
    due: bool = True
    left: int = 0
    stepped: bool = False
    taken: bool = False
    lost: bool = False
    highest: int = 0
    """As in StepInput."""
    batches: int = 1


@dataclass(frozen=True)
class FeedSettings:
    batch_size: int
    epochs: int
    shuffle: bool
    drop_last: bool
    accumulate: int = 1

    def check(self, *, in_order: bool = False) -> None:
        """`in_order`: the data can only be read in order. Raises InvalidRequest."""
        if self.batch_size < 1 or self.epochs < 0 or self.accumulate < 1:
            got = f"batch_size {self.batch_size}, epochs {self.epochs}, accumulate {self.accumulate}"
            raise InvalidRequest(f"{got}; expected at least 1, 0 and 1")
        if in_order and self.shuffle:
            raise InvalidRequest(
                "a StreamDataset with shuffle=True",
                why="each sample that comes before the last one read would begin the stream anew",
                todo="give shuffle=False, and let the stream shuffle by itself, with a seed that all workers share",
            )


class Feed(ABC):
    """One call of `job.batches`. `work`: the work of the last batch that was yielded."""

    def __init__(
        self,
        trainer: Trainer,
        strategy: Strategy,
        reader: Reader,
        *,
        number: int,
        settings: FeedSettings,
        opened: wire.OpenFeedReply,
        look_ahead: LookAhead | None,
    ) -> None:
        self._trainer = trainer
        self._strategy = strategy
        self._session = trainer.session
        self._reader = reader
        self._number = number
        self._settings = settings
        self._opened = opened
        # two are kept, since workers move between neighbouring epochs
        self._order = lru_cache(2)(
            partial(order, seed=self._session.seed, feed=number, samples=reader.samples, shuffle=settings.shuffle)
        )
        self._early: dict[Seed, ReadBatch] = {}
        """Batches that were read before their turn, by the seed of their turn."""
        self._warned = False
        self._look_ahead = look_ahead
        self.upcoming: Upcoming | None = None if look_ahead is None else self._announced
        self.work: Work | None = None
        self.seed: Seed | None = None
        """That of the last batch that was yielded."""

    @property
    def accumulate(self) -> int:
        """The batches of a step, but for the last of an epoch, which may have fewer."""
        return self._settings.accumulate

    @property
    def _is_told_to_stop(self) -> bool:
        return self._session.step_barrier.stop is not None

    @abstractmethod
    def batches(self) -> Generator[Any, None, None]:
        """Yields batches until all samples of all epochs are counted, by this worker or others. Raises ModeChanged if
        the job changes its mode: another feed of the same number continues with what is left."""

    @abstractmethod
    def _announced(self) -> Sequence[Announced]:
        """The ids of the batches that are computed on the values of the next exchange. Batches that may kill this
        process are left out."""

    def push(self, sending: StepInput | None) -> None:
        """Pushes the result of the batches since the last push. None: they do not count."""
        work = self.require_work()
        if sending is not None:
            sending = replace(sending, weight=float(work.samples), highest=work.highest)
        self._contribute(work, sending)

    def require_work(self) -> Work:
        """The work for which a step is taken now. Raises InvalidRequest."""
        work = self.work
        if work is None or work.taken or work.stepped:
            raise InvalidRequest(
                "optimizer.step() twice for one batch",
                why="a batch is one piece of work, and counts once",
                todo="call optimizer.step() once for each batch of job.batches",
            )
        return work

    def _contribute(self, work: Work, sending: StepInput | None) -> None:
        """`sending` None: a named empty push."""
        work.taken = True
        try:
            self._strategy.contribute(work.name, sending, self.upcoming)
        except LostWork:
            work.lost = True

    def _drop(self, why: str) -> None:
        """Pushes the current work as a named empty push: it does not count, and no process waits for it."""
        work = self.work
        assert work is not None
        if not self._warned:
            log.warning("%s: %s is counted as an empty push", why, work.name)
            self._warned = True
        self._contribute(work, None)

    def _begins(self, source: LeasedSource, token: Token, sequence: int, *, highest: int) -> tuple[bool, int]:
        """Tells the coordinator that this batch, at which workers may have died, is computed next (rule A13).
        `highest`: the highest next sequence of the source over all partitions, when it was opened under this token, and
        after this worker's pushes since.

        Returns whether the batch counts, and before which sequence of the source this must be asked again. Raises
        StaleToken if another worker has the lease, and the job's failure.
        """
        session = self._session
        request = wire.BeginBatchRequest(
            caller=common_messages.caller_to_wire(session.caller),
            source=common_messages.source_to_wire(source),
            token=token,
            sequence=sequence,
            highest=highest,
        )
        reply = session.ask(methods.BEGIN_BATCH, request)
        with session.wait_registry.over(lambda: f"a verdict on #{sequence} of {source}, once the checkpoint is taken"):
            while reply.retry_ms:
                self._trainer.router.pause(min(reply.retry_ms, PAUSE_MS_MAX))
                session.check_waiting()
                reply = session.ask(methods.BEGIN_BATCH, request)
        if reply.quarantined:
            log.warning("#%d of %s is in quarantine; it does not count", sequence, source)
        return not reply.quarantined, reply.announce_until

    # ---- reading

    @abstractmethod
    def following(self) -> Iterator[Reading]:
        """The batches that this worker expects to compute after the current one, in order, as far as they are known.
        Ends before a batch at which workers may have died, so that it is not read before its turn (rule A13)."""

    def _fetch(self, seed: Seed, chosen: Indices) -> Any:
        """The current batch. Afterwards the generators are as reading it has left them."""
        seed_everything(*seed)
        self.seed = seed
        early = self._early.pop(seed, None)
        if early is None and self._reader.reads_ahead:
            early = self._reader.read(seed, chosen, lambda: chain([Reading(seed, chosen.tolist())], self.following()))
        return self._reader.fetch(chosen) if early is None else early.take()

    def _read_early(self, first: Sequence[Reading]) -> None:
        """Reads the first of the batches that follow before their turn, with the random numbers of their turn."""
        for place, reading in enumerate(first):
            if reading.seed not in self._early:
                self._early[reading.seed] = self._reader.read(
                    reading.seed, np.array(reading.indices, np.int64), partial(self._following_from, place)
                )

    def _following_from(self, place: int) -> Iterator[Reading]:
        return islice(self.following(), place, None)

    def _ids_of(self, readings: Iterable[Reading]) -> Sequence[Announced]:
        """The announced ids of batches that were read early."""
        assert self._look_ahead is not None
        found = [self._early.get(reading.seed) for reading in readings]
        return announced(self._look_ahead, [each.batch for each in found if each and not each.error])
