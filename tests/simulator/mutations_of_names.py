"""Mutations of the rules A: names, leases and ledgers."""

from __future__ import annotations

import dataclasses
from functools import partial
from types import MappingProxyType
from typing import Any

import pytest

from shardyard.domain.errors import SequenceGap, StraddlingRange
from shardyard.domain.ids import Incarnation, Token
from shardyard.domain.push_names import DataShardSource, SourceKey
from shardyard.domain.pushes import Outcome, PartResult
from shardyard.transport.membership_client import MembershipClient
from shardyard_coordinator.core.effects import Base
from shardyard_coordinator.core.job_state import JobState
from shardyard_coordinator.flows import checkpointing
from shardyard_coordinator.flows import recovery as recovery_flow
from shardyard_coordinator.machine import job as life
from shardyard_coordinator.storage import recovery
from shardyard_coordinator.storage.checkpoint_book import CheckpointBook
from shardyard_coordinator.work import checkpoint_copy
from shardyard_coordinator.work.data_ledger import DataLedger
from shardyard_coordinator.work.data_shards import DataShards
from shardyard_ps_server.hosting import pushes
from shardyard_ps_server.hosting.store import Store
from shardyard_ps_server.partition.ledger import Ledger
from shardyard_worker.consistency.synchronous import SyncStrategy
from shardyard_worker.data.async_feed import AsyncFeed
from shardyard_worker.data.feed import Feed
from shardyard_worker.job.sampler import SampledEpoch
from shardyard_worker.training.nonfinite import NonFiniteCheck

from .mutation import Patch, instead_of, mutation, nobody_is_fenced, to_the_last, whatever_its_token


@mutation("A1", "async", 5)
def named_by_the_lease(patch: Patch) -> None:
    """a new lease starts its work's numbers at 0, as if work were named by its lease"""
    real = Ledger.open

    def open_(self: Ledger, key: SourceKey, token: Token) -> int:
        entry = self._entries.get(key)
        if entry is not None and token > entry.token:
            entry.next = 0
        return real(self, key, token)

    patch.setattr(Ledger, "open", open_)


@mutation("A2", "async", 17)
def duplicates_count(patch: Patch) -> None:
    """a push that was counted counts again"""
    real, advance = Ledger.is_duplicate, Ledger.advance
    patch.setattr(Ledger, "is_duplicate", lambda self, name: bool(real(self, name)) and False)
    patch.setattr(Ledger, "advance", to_the_last(advance))


@mutation("A2", "async", 30)
def gaps_count(patch: Patch) -> None:
    """a push counts before the pushes that precede it"""
    instead_of(patch, SequenceGap)


@mutation("A3", "async", 112)
def a_store_stays_in_its_epoch(patch: Patch) -> None:
    """a server takes requests like an earlier one, whatever has happened since that was admitted"""
    patch.setattr(Store, "epoch", property(lambda _: 1, lambda _, epoch: None), raising=False)


@mutation("A2", "async-checkpoint", 17)
def counted_in_one_is_counted_in_all(patch: Patch) -> None:
    """a push that was stopped between two partitions of a server is taken as counted in both"""
    real = pushes._apply

    def apply(store: Any, hosted: Any, order: Any, work: Any) -> Any:
        if not any(target.ledger.is_duplicate(order.name) for target, _ in work):
            return real(store, hosted, order, work)
        found = []
        for target, _ in work:
            with target.lock:
                if not target.ledger.is_duplicate(order.name):
                    target.ledger.advance(order.name)
                next_ = target.ledger.next(order.name.key)
                found.append(PartResult(target.id, Outcome.DUPLICATE, next_, target.versions.newest))
        return tuple(found)

    patch.setattr(pushes, "_apply", apply)


@mutation("A4", "async", 12, 10)
def what_shall_not_count_is_not_named(patch: Patch) -> None:
    """a dropped batch is not pushed at all, not even empty"""

    def drop(self: Any, why: str) -> None:
        self.work.taken = True

    patch.setattr(Feed, "_drop", drop)


@mutation("A4", "async-checkpoint-nan", 0, 1)
def what_is_not_finite_is_told_to_nobody(patch: Patch) -> None:
    """a batch with a nonfinite gradient is pushed empty and not reported to the coordinator"""
    patch.setattr(NonFiniteCheck, "_report", lambda self, *said: None)


@mutation("A5", "async", 15)
def tokens_are_not_looked_at(patch: Patch) -> None:
    """pushes under an overtaken token count, and no worker is fenced"""
    patch.setattr(Ledger, "is_duplicate", whatever_its_token(Ledger.is_duplicate))
    nobody_is_fenced(patch)


@mutation("A8", "async-checkpoint", 30)
def single_partitions_go_back_further(patch: Patch) -> None:
    """a single restored partition uses the checkpoint before the newest"""
    real_commit, real_bases = CheckpointBook.commit, recovery_flow.bases

    def commit(self: Any, *given: Any) -> Any:
        before = self.committed
        record = real_commit(self, *given)
        if record is not None:
            self.__dict__["before"] = before
        return record

    def bases(job: Any, partitions: Any) -> Any:
        before = job.book.__dict__.get("before")
        return real_bases(job, partitions) if before is None else (Base(before.number),)

    patch.setattr(CheckpointBook, "commit", commit)
    patch.setattr(recovery_flow, "bases", bases)


@mutation("A9", "async-checkpoint", 30)
def the_data_ledger_is_copied_last(patch: Patch) -> None:
    """a checkpoint copies the data ledger after its partitions are written"""
    real = checkpointing.end

    def end(job: Any, taken: Any) -> Any:
        if job.book.draft is not None:
            entries = [[kind, body] for kind, body in job.feeds.entries()]
            late = {"entries": entries, "closed": job.feeds.closed, "token": job.tokens.latest}
            job.book.draft = dataclasses.replace(job.book.draft, data_ledger=late)
        return real(job, taken)

    patch.setattr(checkpointing, "end", end)


@mutation("A10", "sync-checkpoint", 17)
def lives_are_alike(patch: Patch) -> None:
    """a restored partition does not begin a new life"""
    real = recovery.Recovery.begin

    def begin(self: Any, *given: Any, **more: Any) -> Any:
        found = real(self, *given, **more)
        if found is None:
            return None
        self.attempt = dataclasses.replace(found[0], life=1)
        return self.attempt, found[1]

    patch.setattr(recovery.Recovery, "begin", begin)


@mutation("A11", "async-checkpoint", 6)
def closed_is_closed(patch: Patch) -> None:
    """data shards stay closed after a restore has undone their work"""
    patch.setattr(checkpoint_copy, "reopen", lambda ledger, copy: [])


@mutation("A11", "async-checkpoint", 1)
def the_end_waits_for_no_checkpoint(patch: Patch) -> None:
    """the coordinator announces the end of the data before a checkpoint has all of it"""
    patch.setattr(checkpointing, "has_all_data", lambda job: True)


@mutation("A12", "async", 30)
def a_straddling_range_counts(patch: Patch) -> None:
    """a range of batches counts although a part of it has counted"""
    instead_of(patch, StraddlingRange)


@mutation("A14", "async-rows", 156)
def one_lease_of_the_dead_is_freed(patch: Patch) -> None:
    """only the first lease of a dead worker is freed, not those that it had taken ahead"""

    def release(self: DataLedger, worker: Incarnation, reached: Any = MappingProxyType({})) -> list[DataShardSource]:
        held_by = DataShards.held_by
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(DataShards, "held_by", lambda shards, worker: held_by(shards, worker)[:1])
            return real(self, worker, reached)

    real = DataLedger.release
    patch.setattr(DataLedger, "release", release)


@mutation("A16", "sync-sampler", 17)
def what_was_promised_counts(patch: Patch) -> None:
    """a step on any batch of a loader counts as the feed's current work"""
    real = SampledEpoch.takes_step
    patch.setattr(SampledEpoch, "takes_step", lambda epoch: real(epoch) or (not epoch._ended and not epoch._is_taken))


@mutation("A16", "async-sampler", 12)
def a_loader_ends_with_what_it_has(patch: Patch) -> None:
    """a loader is not kept going at the end of what a worker has"""
    patch.setattr(SampledEpoch, "_must_go_on", False)


@mutation("A11", "sync-checkpoint", 10)
def the_last_steps_are_not_looked_at_again(patch: Patch) -> None:
    """a worker that waits for the end of a synchronous job's data does not notice a restore"""
    patch.setattr(SyncStrategy, "has_moved", lambda self: False)


@mutation("A15", "async-checkpoint", 8, 13)
def work_counts_before_the_first_checkpoint(patch: Patch) -> None:
    """a job without logs acknowledges work before it has a checkpoint to go back to"""
    real = JobState.may_acknowledge.fget
    assert real is not None
    patch.setattr(JobState, "may_acknowledge", property(lambda job: job.log_owners is None or real(job)))


@mutation("A18", "async-drain", 966)
def a_lease_is_given_back_before_its_push_is_there(patch: Patch) -> None:
    """a worker that leaves in order gives its data shard back while a push is in flight"""
    real = AsyncFeed._close

    def close(self: Any, lease: Any) -> None:
        (self._end_lease if self._session.drain.asked else partial(real, self))(lease)

    patch.setattr(AsyncFeed, "_close", close)


@mutation("A18", "async-drain", 2, 4)
def who_leaves_in_order_says_goodbye(patch: Patch) -> None:
    """a worker that leaves in order says goodbye, as if its script were done"""
    real = MembershipClient.leave
    patch.setattr(MembershipClient, "leave", lambda self, *said, **more: real(self, *said, **more | {"drained": False}))


@mutation("A18", "sync-drain", 47)
def work_of_who_leaves_in_order_is_nobodys(patch: Patch) -> None:
    """the work of a worker that leaves in order goes to no other worker"""
    real = life.free

    def free(job: Any, workers: Any, now_ms: int, *, is_awaited: bool = True) -> Any:
        return real(job, workers, now_ms) if is_awaited else []

    patch.setattr(life, "free", free)
