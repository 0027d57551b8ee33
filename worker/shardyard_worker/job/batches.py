"""`job.batches` and `job.look_ahead` as iterators.

Owns: the rule that one feed is open at a time. When the job changes its mode, another feed continues the same data.
Must not know: which samples a batch has.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from shardyard.domain.consistency import UpdateMode
from shardyard.domain.epochs import EpochPlan
from shardyard.domain.errors import InvalidRequest
from shardyard_worker.consistency.strategy import ModeChanged, Strategy
from shardyard_worker.consistency.synchronous import SyncStrategy
from shardyard_worker.data.dataset import Reader
from shardyard_worker.data.feed import Feed, FeedSettings
from shardyard_worker.data.look_ahead import LookAhead, ReadAhead
from shardyard_worker.data.open_feed import open_feed
from shardyard_worker.job.training_loop import TrainingLoop
from shardyard_worker.replicas.spread_model import SpreadModel
from shardyard_worker.session.interrupts import INTERRUPTS
from shardyard_worker.training.table_binding import Announced

B = TypeVar("B")
OpenFeed = Callable[[Strategy], Feed]

_END = object()


def open_batches(
    loop: TrainingLoop, reader: Reader, settings: FeedSettings, look_ahead: LookAhead | None
) -> Iterator[Any]:
    """Raises InvalidRequest, FeedConflict, JobFailed."""
    loop.session.check()
    if loop.trainer is None:
        raise InvalidRequest("job.batches before job.prepare", todo="call job.prepare first")
    _refuse_nesting(loop)
    settings.check(in_order=reader.in_order)
    if isinstance(loop.replica, SpreadModel):
        samples, ranks = reader.samples, loop.session.logical_ranks or 1
        # a data shard has full batches, and then the rest
        accumulate = 1 if loop.session.mode is UpdateMode.ASYNC else settings.accumulate
        plan = EpochPlan(samples, settings.batch_size, ranks, settings.drop_last, accumulate)
        loop.replica.check_batches(plan)
    own_steps = loop.own_steps or (0 if loop.local is None else loop.local.taken)
    if own_steps and loop.session.mode is UpdateMode.SYNC:
        raise InvalidRequest(
            "job.batches after steps without it, in a synchronous job",
            why="the step says which samples are due, so all steps must come from job.batches or job.sampler, or none",
            todo="use job.batches for all steps, or job.sampler, or a DataLoader of your own",
        )
    if settings.epochs == 0:
        return iter(())
    opened = partial(
        open_feed, loop.trainer, reader, number=loop.feeds_opened, settings=settings, look_ahead=look_ahead
    )
    with INTERRUPTS:
        feed = opened(loop.follow_mode(), local=loop.local, end_round=loop.end_round)
        loop.feeds_opened += 1
    return _iterate(loop, reader, feed, opened)


def _refuse_nesting(loop: TrainingLoop) -> None:
    if loop.sampled is not None and loop.sampled.is_left:
        loop.sampled.close()
    if loop.feed is not None:
        raise InvalidRequest("job.batches inside of job.batches", todo="finish the one before the other")


def _iterate(loop: TrainingLoop, reader: Reader, feed: Feed, opened: OpenFeed) -> Iterator[Any]:
    _refuse_nesting(loop)
    if loop.upcoming is not None:
        raise _two_look_aheads()
    loop.feed = feed
    try:
        with contextlib.closing(_go_through(loop, feed, opened)) as batches:
            while True:
                with INTERRUPTS:
                    batch = next(batches, _END)
                if batch is _END:
                    break
                yield batch
    finally:
        loop.feed = None
        reader.close()
        if loop.trainer is not None:
            loop.trainer.accumulates = False
        if loop.local is not None and not loop.session.has_left:
            loop.local.abandon()
    loop.between_steps()
    loop.session.drain.check()


def _go_through(loop: TrainingLoop, feed: Feed, opened: OpenFeed) -> Generator[Any, None, None]:
    """Yields all batches and follows changes of the job's mode."""
    while True:
        loop.feed = feed
        try:
            yield from feed.batches()
        except ModeChanged:
            feed = opened(loop.follow_mode())
        else:
            return


def announce(loop: TrainingLoop, batches: Iterable[B], ids_of: LookAhead, accumulate: int) -> Iterator[B]:
    """Yields a script's own batches. Each is announced before it is yielded."""
    loop.need_trainer()
    if accumulate < 1:
        raise InvalidRequest(f"accumulate {accumulate}; expected at least 1")
    if loop.session.mode is UpdateMode.SYNC and loop.session.job_settings.consistency.backup_workers:
        return iter(batches)  # a step brings no values
    return _announce(
        loop, ReadAhead(batches, ids_of, window=loop.session.settings.worker.window, accumulate=accumulate)
    )


def _announce(loop: TrainingLoop, ahead: ReadAhead[B]) -> Iterator[B]:
    if loop.upcoming is not None or loop.feed is not None:
        raise _two_look_aheads()

    def upcoming() -> Sequence[Announced]:
        strategy = loop.strategy
        return ahead.announced(len(strategy.ranks.held) if isinstance(strategy, SyncStrategy) else None)

    loop.upcoming = upcoming
    try:
        yield from ahead
    finally:
        loop.upcoming = None


def _two_look_aheads() -> InvalidRequest:
    return InvalidRequest(
        "job.look_ahead together with job.batches, or with another one",
        why="a step brings the rows of one batch, that which follows",
        todo="give look_ahead to job.batches; finish one loop before the other",
    )
