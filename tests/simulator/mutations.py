"""Switches off each rule of docs/internals/ledger.md in the shipped code. Without the rule, some seed must be red.

Each mutation is a function that patches while a `pytest.MonkeyPatch` lasts, and names the mode that shows its fault.
Its docstring completes the sentence "all seeds are green although ...".
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import pytest

from shardyard.domain.errors import NotFound, SequenceGap, StraddlingRange
from shardyard.domain.ids import Generation, Incarnation, Rank, Token
from shardyard.domain.push_names import ROW_LANE, DataShardSource, PushName, SourceKey
from shardyard.domain.pushes import Outcome, PartResult
from shardyard.transport.membership_client import MembershipClient
from shardyard_coordinator.core.effects import Base, Persist
from shardyard_coordinator.core.job_state import JobState
from shardyard_coordinator.flows import checkpointing, work_verdicts
from shardyard_coordinator.flows import recovery as recovery_flow
from shardyard_coordinator.machine import job as life
from shardyard_coordinator.machine.job_directory import JobDirectory
from shardyard_coordinator.members.membership import Membership
from shardyard_coordinator.members.runs import Runs
from shardyard_coordinator.service.mailbox import Mailbox
from shardyard_coordinator.storage import recovery
from shardyard_coordinator.storage.checkpoint_book import CheckpointBook
from shardyard_coordinator.work import checkpoint_copy
from shardyard_coordinator.work.data_ledger import DataLedger
from shardyard_coordinator.work.data_shards import DataShards
from shardyard_coordinator.work.ranks import RankBook
from shardyard_coordinator.work.straggler_verdicts import MakeupPlan
from shardyard_ps_server.hosting import admission, lookups, orders, pulls, pushes
from shardyard_ps_server.hosting.store import Store
from shardyard_ps_server.hosting.worker_clocks import WorkerClocks
from shardyard_ps_server.partition import checkpoint_cuts, sync_step
from shardyard_ps_server.partition import step_gate as gate
from shardyard_ps_server.partition.dense_state import StateCut
from shardyard_ps_server.partition.ledger import Ledger
from shardyard_ps_server.partition.next_version import RowUpdate, update_rows
from shardyard_ps_server.partition.partition import Partition
from shardyard_ps_server.rows import row_sums
from shardyard_ps_server.rows.partition_tables import PartitionTables
from shardyard_ps_server.tables.table import Table as TableOfPartition
from shardyard_ps_server.values.versions import Versions
from shardyard_ps_server.wal import replay
from shardyard_ps_server.wal.records import Mark
from shardyard_ps_server.wal.segments import END, LogFiles
from shardyard_ps_server.wal.wal import Wal
from shardyard_worker.consistency.step_versions import StepVersions
from shardyard_worker.consistency.synchronous import SyncStrategy
from shardyard_worker.data import feed as feeds
from shardyard_worker.data.async_feed import AsyncFeed
from shardyard_worker.data.feed import Feed
from shardyard_worker.data.sync_feed import SyncFeed
from shardyard_worker.exchange.norm_sums import NormSums
from shardyard_worker.job.sampler import SampledEpoch
from shardyard_worker.training.nonfinite import NonFiniteCheck

from .disk import SimulatedOs
from .plan import Plan
from .state import Ending
from .world import SECOND, current_world
from .yard import prepare, run_plan

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Mutation:
    rule: str
    what: str
    mode: str
    apply: Callable[[Patch], None]
    first: tuple[int, ...] = ()
    """Seeds that were red with this mutation. They are tried first, only to save time."""


MUTATIONS: list[Mutation] = []


def mutation(rule: str, mode: str, *first: int) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    def add(apply: Callable[[Patch], None]) -> Callable[[Patch], None]:
        MUTATIONS.append(Mutation(rule, (apply.__doc__ or "").strip(), mode, apply, first))
        return apply

    return add


def first_red(plans: Iterable[Plan], switch_off: Callable[[Patch], object]) -> Ending | None:
    """The first run that is red under a mutation. The run that it is compared with uses the shipped code."""
    for plan in plans:
        prepare(plan)
        with Patch.context() as patch:
            switch_off(patch)
            found = run_plan(plan)
        if found.red:
            return found
    return None


# ---- A: names and ledgers


@mutation("A1", "async", 6)
def named_by_the_lease(patch: Patch) -> None:
    """a new lease starts its work's numbers at 0, as if work were named by its lease"""
    real = Ledger.open

    def open_(self: Ledger, key: SourceKey, token: Token) -> int:
        entry = self._entries.get(key)
        if entry is not None and token > entry.token:
            entry.next = 0
        return real(self, key, token)

    patch.setattr(Ledger, "open", open_)


@mutation("A2", "async", 6, 9)
def duplicates_count(patch: Patch) -> None:
    """a push that was counted counts again"""
    real, advance = Ledger.is_duplicate, Ledger.advance
    patch.setattr(Ledger, "is_duplicate", lambda self, name: bool(real(self, name)) and False)
    patch.setattr(Ledger, "advance", _to_the_last(advance))


@mutation("A2", "async", 17)
def gaps_count(patch: Patch) -> None:
    """a push counts before the pushes that precede it"""
    _instead_of(patch, SequenceGap)


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


@mutation("A5", "async", 112)
def tokens_are_not_looked_at(patch: Patch) -> None:
    """pushes under an overtaken token count, and no worker is fenced"""
    patch.setattr(Ledger, "is_duplicate", _whatever_its_token(Ledger.is_duplicate))
    _nobody_is_fenced(patch)


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


@mutation("A9", "async-checkpoint", 18)
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


@mutation("A10", "sync-checkpoint", 10)
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


@mutation("A11", "async-checkpoint", 3)
def closed_is_closed(patch: Patch) -> None:
    """data shards stay closed after a restore has undone their work"""
    patch.setattr(checkpoint_copy, "reopen", lambda ledger, copy: [])


@mutation("A11", "async-checkpoint", 27)
def the_end_waits_for_no_checkpoint(patch: Patch) -> None:
    """the coordinator announces the end of the data before a checkpoint has all of it"""
    patch.setattr(checkpointing, "has_all_data", lambda job: True)


@mutation("A12", "async", 322)
def a_straddling_range_counts(patch: Patch) -> None:
    """a range of batches counts although a part of it has counted"""
    _instead_of(patch, StraddlingRange)


@mutation("A14", "async-rows", 44)
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


@mutation("A16", "async-sampler", 5)
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


@mutation("A18", "async-drain", 1591)
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


# ---- B: synchronous steps


@mutation("B1", "sync", 4)
def ranks_are_alike(patch: Patch) -> None:
    """the mean of a step is not weighted by samples"""

    def verdict(contributions: Any) -> Any:
        found = gate.verdict(contributions)
        return found._replace(shares=tuple(1.0 / len(found.shares) for _ in found.shares))

    patch.setattr(sync_step, "verdict", verdict)


@mutation("B1", "sync", 0, 1)
def ranks_are_counted_by_their_worker(patch: Patch) -> None:
    """a rank's samples depend on the other ranks of its worker"""
    real = SyncFeed._samples

    def samples(self: Any, batch: Any) -> Any:
        first = min(self._strategy.ranks.held, default=batch.rank)
        return real(self, batch._replace(rank=Rank(batch.rank - first)))

    patch.setattr(SyncFeed, "_samples", samples)


@mutation("B2", "sync", 7, 23)
def applied_in_the_order_of_arrival(patch: Patch) -> None:
    """a step sums its ranks in the order of arrival"""
    real_record = gate.StepGate.record

    def record(self: Any, rank: Any, contribution: Any) -> None:
        self.__dict__.setdefault("came", []).append(contribution)
        real_record(self, rank, contribution)

    def with_last(self: Any, rank: Any, contribution: Any) -> Any:
        return (*self.__dict__.pop("came", ()), contribution)

    patch.setattr(gate.StepGate, "record", record)
    patch.setattr(gate.StepGate, "with_last", with_last)


@mutation("B3", "sync", 10)
def one_version_is_kept(patch: Patch) -> None:
    """a partition keeps only its newest version"""
    real = Versions.find
    patch.setattr(Versions, "find", lambda self, number: real(self, number) if number == self.newest.number else None)


@mutation("B4", "sync", 3)
def ranks_of_the_dead_are_nobodys(patch: Patch) -> None:
    """the ranks of a dead worker go to no other worker"""
    patch.setattr(RankBook, "vacate", lambda self, worker, now_ms: self.suspend(worker))


@mutation("B5", "sync", 1, 2)
def random_numbers_are_nobodys(patch: Patch) -> None:
    """random numbers are not seeded by rank and step"""
    patch.setattr(feeds, "seed_everything", lambda *key: None)


@mutation("B6", "sync", 2)
def each_partition_has_a_verdict_of_its_own(patch: Patch) -> None:
    """each partition leaves the last contribution out of its step"""
    real = gate.StepGate.with_last

    def with_last(self: Any, rank: Any, contribution: Any) -> Any:
        taken = real(self, rank, contribution)
        return tuple(each._replace(groups=None) if each is contribution and len(taken) > 1 else each for each in taken)

    patch.setattr(gate.StepGate, "with_last", with_last)


@mutation("B6", "sync-clip", 6)
def a_verdict_has_parts_of_several_steps(patch: Patch) -> None:
    """a verdict combines the partitions' newest norms, also of different steps"""

    def add(self: NormSums, gathered: Any) -> None:
        for each in gathered:
            self._step = max(self._step, each.step)
            self._squares[each.partition] = each.square_norm

    patch.setattr(NormSums, "add", add)


@mutation("B6", "sync-clip", 46)
def a_verdict_of_another_step(patch: Patch) -> None:
    """a step takes a verdict of another step"""
    patch.setattr(gate.StepGate, "judges", lambda self, verdict: self.awaits_verdict)


@mutation("B6", "sync-wal-clip", 10)
def a_verdict_is_brought_by_the_last_rank_alone(patch: Patch) -> None:
    """a partition does not repeat the norm of a finished step, which other partitions still need for their verdict"""
    real = gate.StepGate.gathered

    def gathered(self: Any, step: int) -> Any:
        return real(self, step) if step == self.step else None

    patch.setattr(gate.StepGate, "gathered", gathered)


@mutation("C1", "sync-wal-clip", 3)
def a_verdict_is_not_in_the_log(patch: Patch) -> None:
    """a verdict takes effect without a log record"""

    def take_verdict(store: Any, hosted: Any, order: Any, verdict: Any) -> None:
        for number in sorted(hosted.partitions):
            if sync_step.awaits_verdict(hosted.partitions[number], verdict):
                check_current = partial(admission.check_still_admitted, store, admission.Admitted(hosted, 0), order)
                sync_step.take_verdict(hosted.partitions[number], verdict, check_current)

    patch.setattr(pushes, "take_verdict", take_verdict)


@mutation("B6", "sync-backup", 14)
def a_verdict_is_told_before_it_is_written_down(patch: Patch) -> None:
    """the coordinator announces a step's verdict without writing it to its journal"""
    real = work_verdicts.decide_step

    def decide_step(job: Any, step: int, ranks: Any, now_ms: int) -> Any:
        return [effect for effect in real(job, step, ranks, now_ms) if not isinstance(effect, Persist)]

    patch.setattr(work_verdicts, "decide_step", decide_step)


@mutation("B6", "sync-backup", 0, 1)
def what_came_late_counts_nowhere(patch: Patch) -> None:
    """a dropped batch is never computed again"""
    patch.setattr(MakeupPlan, "drop", lambda self, step, batch, samples: None)


@mutation("B6", "sync-backup", 6)
def who_came_late_counts_where_he_is_there(patch: Patch) -> None:
    """a partition takes a step with all recorded contributions, also those that the verdict leaves out"""

    def present(self: Any, members: Any) -> Any:
        found = [self._gathered[member] for member in members]
        return None if None in found else tuple([each for each in self._gathered if each is not None])

    patch.setattr(gate.StepGate, "present", present)


@mutation("B6", "sync-backup", 0)
def a_verdict_leaves_the_others_waiting(patch: Patch) -> None:
    """a step does not close for the ranks that its verdict leaves out"""
    patch.setattr(sync_step, "_close", lambda partition, gate, members: gate.name_members(members))


@mutation("C9", "async-leave", 4)
def a_sealed_partition_takes_pushes(patch: Patch) -> None:
    """a partition goes on after the cut from which another server continues"""
    patch.setattr(Partition, "check_unsealed", lambda self: None)


@mutation("C8", "async-full", 0)
def what_was_not_written_down_is_told(patch: Patch) -> None:
    """a coordinator that cannot write its journal answers heartbeats by what it has decided and not written down"""
    real = Mailbox._begin_stall

    def begin_stall(self: Any, error: Exception) -> None:
        ahead = self._machine
        real(self, error)
        self._machine = ahead

    patch.setattr(Mailbox, "_begin_stall", begin_stall)


@mutation("B7", "sync-checkpoint", 131)
def state_of_the_next_step(patch: Patch) -> None:
    """a checkpoint of a step has the optimizer state of the next step"""
    patch.setattr(StateCut, "keep", lambda self, begin, end: None)


@mutation("B7", "sync-checkpoint", 176)
def contributions_of_the_next_step(patch: Patch) -> None:
    """a checkpoint's ledger has contributions to the next step, which the checkpoint lacks"""
    _change_cuts(patch, lambda partition, marks: partition.ledger.marks())


# ---- C: owning, logging, fences


@mutation("B6", "sync-overflow", 0, 5)
def an_overflow_is_that_ranks_alone(patch: Patch) -> None:
    """an overflow of one rank does not skip the step for the other ranks"""
    real = gate.verdict

    def verdict(contributions: Any) -> Any:
        found = real(contributions)
        counted = [member for member in found.members if not member.overflow]
        return real(counted) if counted else found

    patch.setattr(sync_step, "verdict", verdict)


@mutation("B6", "sync-wal-overflow", 10)
def an_overflow_is_not_in_the_log(patch: Patch) -> None:
    """the log does not record an overflow"""
    real = pushes.push_head
    patch.setattr(pushes, "push_head", lambda order: real(dataclasses.replace(order, overflow=False)))


@mutation("C1", "async-wal", 5)
def acknowledged_before_durable(patch: Patch) -> None:
    """a push is acknowledged before its record is in the log"""

    def append(self: Any, kind: Any, head: bytes, *pieces: Any) -> int:
        with self._changed:
            self._check()
            self._appended += 1
            self._durable = self._appended
            return int(self._appended)

    patch.setattr(Wal, "append", append)


@mutation("C1", "async-wal", 6, 18)
def a_log_is_not_synced(patch: Patch) -> None:
    """a log is written but not synced"""
    patch.setattr(SimulatedOs, "fdatasync", lambda self, descriptor: None)


@mutation("C2", "async-wal", 34)
def nobody_looks_for_the_fence(patch: Patch) -> None:
    """a server that was frozen continues a log that another server has taken over"""
    patch.setattr(LogFiles, "is_taken", property(lambda self: False))


@mutation("C2", "async-wal", 34)
def a_log_is_read_before_it_is_fenced(patch: Patch) -> None:
    """a successor looks for a log's end before it raises the fence"""
    real_take_over, real_find_end = LogFiles.take_over, LogFiles._find_end

    def take_over(self: Any, generation: Generation) -> Mark:
        if self.folder.is_dir() and not (self.folder / END).exists():
            self.__dict__["found"] = real_find_end(self)
            current_world().pause(SECOND)
        return real_take_over(self, generation)

    def find_end(self: Any) -> Mark:
        found: Mark | None = self.__dict__.pop("found", None)
        return found or real_find_end(self)

    patch.setattr(LogFiles, "take_over", take_over)
    patch.setattr(LogFiles, "_find_end", find_end)


@mutation("C3", "bounded", 3, 6)
def nobody_waits_for_the_slowest(patch: Patch) -> None:
    """a worker gets values however far behind the slowest worker is"""
    patch.setattr(WorkerClocks, "_slowest_to_await", lambda self, worker, report, bound: None)


@mutation("C3", "bounded-checkpoint-lag", 3)
def nobody_is_expected(patch: Patch) -> None:
    """a server that is new to a job does not wait for workers that it has not heard from"""
    patch.setattr(WorkerClocks, "expect", lambda self, workers: None)


@mutation("A17", "async", 0)
def finished_runs_are_forgotten(patch: Patch) -> None:
    """a coordinator that was restarted does not know which launches had joined a job"""
    patch.setattr(Runs, "restore", lambda self, body: None)


@mutation("A17", "sync", 0)
def finished_run_begins_again(patch: Patch) -> None:
    """a process of a finished run begins a new job"""
    patch.setattr(JobDirectory, "to_join", lambda self, name, run: self.unfinished(name))


@mutation("C4", "coordinator", 2, 5)
def a_restart_renews_no_lease(patch: Patch) -> None:
    """a restarted coordinator does not renew the leases of members"""
    real = Membership.restore

    def restore(self: Any, kind: str, body: Any, now_ms: int) -> None:
        real(self, kind, body, now_ms - self._lease_ms)

    patch.setattr(Membership, "restore", restore)


# ---- rows of tables


@mutation("A2", "async-rows", 17)
def rows_of_a_duplicate_count(patch: Patch) -> None:
    """the rows of a duplicate push count"""

    def apply_push(partition: Any, name: PushName, contribution: Any, check_current: Any) -> Any:
        found = real(partition, name, contribution, check_current)
        if found.outcome is Outcome.DUPLICATE and contribution.rows:
            with partition.turn:
                update_rows(partition, RowUpdate(contribution.rows, contribution.table_groups))
        return found

    real = pushes.apply_push
    patch.setattr(pushes, "apply_push", apply_push)


@mutation("A8", "sync-checkpoint-rows", 17)
def rows_do_not_go_back(patch: Patch) -> None:
    """a restored partition keeps its current rows"""
    real = PartitionTables.become

    def become(self: Any, tables: Any) -> None:
        has_some = bool(getattr(self, "_tables", {})) and any(table.rows for table in self._tables.values())
        real(self, self._tables if tables and has_some else tables)

    patch.setattr(PartitionTables, "become", become)


@mutation("A8", "async-checkpoint-rows-lives", 3)
def how_often_ids_without_a_row_were_pushed_is_not_in_a_checkpoint(patch: Patch) -> None:
    """ids that have no row yet are restored with a frequency of 1"""
    real = TableOfPartition.load

    def load(self: Any, ids: Any, values: Any, state: Any, frequencies: Any, steps: Any) -> None:
        counts = frequencies.copy()
        counts[values.shape[0] :] = 1
        real(self, ids, values, state, counts, steps)

    patch.setattr(TableOfPartition, "load", load)


@mutation("A8", "async-checkpoint-rows-lives", 61)
def filters_do_not_come_back(patch: Patch) -> None:
    """a filter's cells are not restored from a checkpoint"""
    patch.setattr(TableOfPartition, "load_cells", lambda self, cells, begin=None: None)


@mutation("A1", "hybrid-checkpoint", 48)
def rows_have_no_lane(patch: Patch) -> None:
    """rows of a contribution count again if they counted before the checkpoint and its variables did not"""
    patch.setattr(Ledger, "counts_rows", lambda self, name: True)


@mutation("A1", "hybrid-checkpoint", 48)
def the_lane_of_rows_is_not_saved(patch: Patch) -> None:
    """a checkpoint does not record which rows of the next step it has"""
    real = Ledger.marks
    patch.setattr(Ledger, "marks", lambda self: tuple(m for m in real(self) if m.key.lane != ROW_LANE))


@mutation("A1", "hybrid-checkpoint", 48)
def the_lane_of_rows_ends_with_the_step(patch: Patch) -> None:
    """a checkpoint records that no rows of the next step have counted"""

    def end_with_step(partition: Any, marks: Any) -> Any:
        return tuple(mark._replace(next=min(mark.next, partition.steps.gate.step)) for mark in marks)

    _change_cuts(patch, end_with_step)


@mutation("A1", "hybrid-checkpoint", 3)
def rows_of_the_next_step_are_passed_over(patch: Patch) -> None:
    """a checkpoint records that all rows of the next step have counted"""

    def with_all_rows(partition: Any, marks: Any) -> Any:
        ends = {ROW_LANE: partition.steps.gate.step + 1}
        return tuple(mark._replace(next=ends.get(mark.key.lane, mark.next)) for mark in marks)

    _change_cuts(patch, with_all_rows)


@mutation("C3", "hybrid", 1, 2)
def rows_of_a_step_are_used_for_the_next(patch: Patch) -> None:
    """rows that were loaded ahead for a step are used for later steps"""
    real = StepVersions._hold

    def hold(self: Any, version: int, rows: Any) -> None:
        before = self._rows
        real(self, version, rows)
        if before is not None:
            self._rows = before
            self.load_again()

    patch.setattr(StepVersions, "_hold", hold)


@mutation("B1", "sync-rows", 4)
def ranks_are_alike_in_rows(patch: Patch) -> None:
    """the mean of a step's rows is not weighted by samples"""
    real = row_sums.mean_of

    def mean_of(given: Any, shares: Any, limit: float) -> Any:
        return real(given, [1.0 / len(shares) for _ in shares], limit)

    patch.setattr(row_sums, "mean_of", mean_of)


@mutation("B3", "sync-rows", 298)
def rows_are_looked_up_as_they_are(patch: Patch) -> None:
    """a look-up of rows at a version returns the newest rows"""
    real = lookups.look_up_rows

    def look_up_rows(partition: Any, asked: Any, number: int | None = None, until: float = 0.0) -> None:
        with contextlib.suppress(NotFound):
            real(partition, asked, number, until)
        real(partition, asked)

    patch.setattr(lookups, "look_up_rows", look_up_rows)


@mutation("B7", "sync-checkpoint-rows", 57)
def when_a_row_was_pushed_last_is_not_in_a_checkpoint(patch: Patch) -> None:
    """rows are restored with a later step of their last push"""
    real = TableOfPartition.load

    def load(self: Any, ids: Any, values: Any, state: Any, frequencies: Any, steps: Any) -> None:
        real(self, ids, values, state, frequencies, steps + 1)

    patch.setattr(TableOfPartition, "load", load)


@mutation("B6", "sync-overflow-rows", 0, 2)
def rows_of_a_step_that_is_skipped_count(patch: Patch) -> None:
    """an overflow of one rank does not skip the rows of the other ranks"""
    real = sync_step._mean_rows
    patch.setattr(sync_step, "_mean_rows", lambda partition, taken: real(partition, taken._replace(skips=False)))


@mutation("B6", "sync-backup-rows", 3)
def rows_of_who_came_late_count(patch: Patch) -> None:
    """rows of a rank that a verdict leaves out count in partitions that have them"""
    real = sync_step._complete

    def complete(partition: Any, steps: Any, contributions: Any, *more: Any) -> Any:
        left_out = [each for each in steps.gate.recorded if not any(each is other for other in contributions)]
        first = contributions[0]
        rows = tuple(row for each in left_out for row in each.rows)
        if rows and first.rows:
            rows_of_all = [first.rows, *[each.rows for each in left_out]]
            joined = row_sums.mean_of(rows_of_all, [1.0] * (1 + len(left_out)), 0.0)
            contributions = (first._replace(rows=joined), *contributions[1:])
        return real(partition, steps, contributions, *more)

    patch.setattr(sync_step, "_complete", complete)


@mutation("C1", "async-wal-rows", 3)
def rows_are_not_in_the_log(patch: Patch) -> None:
    """a replayed log restores no rows"""
    patch.setattr(replay, "read_rows", lambda *given: ({}, {}))


@mutation("promise 4", "async", 112)
def the_dead_are_not_refused(patch: Patch) -> None:
    """a server accepts calls of fenced workers"""
    _nobody_is_fenced(patch)


def _change_cuts(patch: Patch, change: Callable[[Any, Any], Any]) -> None:
    """Checkpoints' cuts have the marks that `change` returns for a partition and its cut's marks."""
    real = checkpoint_cuts._cut

    def cut(partition: Any, since: Any, **given: Any) -> Any:
        found = real(partition, since, **given)
        return dataclasses.replace(found, marks=change(partition, found.marks))

    patch.setattr(checkpoint_cuts, "_cut", cut)


def _to_the_last(real: Callable[[Ledger, PushName], None]) -> Callable[[Ledger, PushName], None]:
    def advance(self: Ledger, name: PushName) -> None:
        entry = self._find(name.key)
        if entry is None or name.first == entry.next:
            real(self, name)
        else:
            entry.next = max(entry.next, name.last + 1)
            self._next_push = None

    return advance


def _instead_of(patch: Patch, refusal: type[Exception]) -> None:
    """Counts the pushes that this error refuses."""
    real = Ledger.is_duplicate

    def is_duplicate(self: Ledger, name: PushName) -> bool:
        try:
            return real(self, name)
        except refusal:
            return False

    patch.setattr(Ledger, "is_duplicate", is_duplicate)
    patch.setattr(Ledger, "advance", _to_the_last(Ledger.advance))


def _nobody_is_fenced(patch: Patch) -> None:
    real = admission.admit

    def admit(store: Any, *given: Any, **more: Any) -> Any:
        fenced, store.identity.fenced = store.identity.fenced, set()
        try:
            return real(store, *given, **more)
        finally:
            store.identity.fenced = fenced

    for module in (admission, pulls, lookups, orders):
        patch.setattr(module, "admit", admit)


def _whatever_its_token(real: Callable[[Ledger, PushName], bool]) -> Callable[[Ledger, PushName], bool]:
    def is_duplicate(self: Ledger, name: PushName) -> bool:
        entry = self._entries.get(name.key)
        if entry is None or name.token >= entry.token:
            return real(self, name)
        token, entry.token = entry.token, name.token
        try:
            return real(self, name)
        finally:
            entry.token = token

    return is_duplicate
