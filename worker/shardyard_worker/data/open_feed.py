"""Opens a data set for this worker, for the job's current kind of updates. Must not know: batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

from shardyard.domain.consistency import UpdateMode
from shardyard.wire import common_messages, methods
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_worker.consistency.groups.pushed_async import PushedAsync
from shardyard_worker.consistency.local_sgd import LocalRounds
from shardyard_worker.consistency.strategy import Strategy
from shardyard_worker.data.async_feed import AsyncFeed
from shardyard_worker.data.dataset import Reader
from shardyard_worker.data.feed import Feed, FeedSettings
from shardyard_worker.data.led_feed import LedFeed
from shardyard_worker.data.look_ahead import LookAhead
from shardyard_worker.data.sync_feed import LocalFeed, SyncFeed
from shardyard_worker.training.trainer import Trainer


def open_feed(
    trainer: Trainer,
    reader: Reader,
    strategy: Strategy,
    *,
    number: int,
    settings: FeedSettings,
    look_ahead: LookAhead | None = None,
    local: LocalRounds | None = None,
    end_round: Callable[[], object] | None = None,
) -> Feed:
    """Agrees with the coordinator, and so with all workers, on what is read and how. `number`: counts the calls of
    job.batches in this job from 0. `end_round` pushes the sum of the steps in `local`. Raises FeedConflict."""
    session = trainer.session
    request = wire.OpenFeedRequest(
        caller=common_messages.caller_to_wire(session.caller),
        feed=number,
        samples=reader.samples,
        fingerprint=reader.fingerprint(),
        **asdict(settings),
    )
    ask = partial(session.ask, methods.OPEN_FEED, request)
    opened = ask()
    given: dict[str, Any] = {"number": number, "settings": settings, "opened": opened, "look_ahead": look_ahead}
    if isinstance(strategy, PushedAsync):
        return LedFeed(trainer, strategy, reader, ask=ask, **given)
    if session.mode is UpdateMode.ASYNC:
        return AsyncFeed(trainer, strategy, reader, **given)
    if local is None or end_round is None:
        return SyncFeed(trainer, strategy, reader, **given)
    return LocalFeed(trainer, strategy, reader, local=local, end_round=end_round, **given)
