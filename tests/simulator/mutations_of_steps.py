"""Mutations of the rules B: synchronous steps."""

from __future__ import annotations

from functools import partial
from typing import Any

from shardyard.domain.ids import Rank
from shardyard_coordinator.core.effects import Persist
from shardyard_coordinator.flows import work_verdicts
from shardyard_coordinator.service.mailbox import Mailbox
from shardyard_coordinator.work.ranks import RankBook
from shardyard_coordinator.work.straggler_verdicts import MakeupPlan
from shardyard_ps_server.hosting import admission, pushes
from shardyard_ps_server.partition import step_gate as gate
from shardyard_ps_server.partition import sync_step
from shardyard_ps_server.partition.dense_state import StateCut
from shardyard_ps_server.partition.partition import Partition
from shardyard_ps_server.values.versions import Versions
from shardyard_worker.data import feed as feeds
from shardyard_worker.data.sync_feed import SyncFeed
from shardyard_worker.exchange.norm_sums import NormSums

from .mutation import Patch, change_cuts, mutation


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


@mutation("B3", "sync", 154)
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

    def add(self: NormSums, gathered: Any, owned: Any) -> None:
        for each in gathered:
            self._step = max(self._step, each.step)
            self._squares[each.partition] = each.square_norm

    patch.setattr(NormSums, "add", add)


@mutation("B6", "sync-clip", 179)
def a_verdict_of_another_step(patch: Patch) -> None:
    """a step takes a verdict of another step"""
    patch.setattr(gate.StepGate, "judges", lambda self, verdict: self.awaits_verdict)


@mutation("B6", "sync-wal-clip", 129)
def a_verdict_is_brought_by_the_last_rank_alone(patch: Patch) -> None:
    """a partition does not repeat the norm of a finished step, which other partitions still need for their verdict"""
    real = gate.StepGate.gathered

    def gathered(self: Any, step: int) -> Any:
        return real(self, step) if step == self.step else None

    patch.setattr(gate.StepGate, "gathered", gathered)


@mutation("C1", "sync-wal-clip", 10)
def a_verdict_is_not_in_the_log(patch: Patch) -> None:
    """a verdict takes effect without a log record"""

    def take_verdict(store: Any, hosted: Any, order: Any, verdict: Any) -> None:
        for number in sorted(hosted.partitions):
            if sync_step.awaits_verdict(hosted.partitions[number], verdict):
                check_current = partial(admission.check_still_admitted, store, admission.Admitted(hosted, 0), order)
                sync_step.take_verdict([hosted.partitions[number]], verdict, check_current)

    patch.setattr(pushes, "take_verdict", take_verdict)


@mutation("B6", "sync-backup", 18)
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


@mutation("C8", "async-full", 9)
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


@mutation("B7", "sync-checkpoint", 214)
def contributions_of_the_next_step(patch: Patch) -> None:
    """a checkpoint's ledger has contributions to the next step, which the checkpoint lacks"""
    change_cuts(patch, lambda partition, marks: partition.ledger.marks())
