"""Mutations of the rules C: ownership, logs and fences."""

from __future__ import annotations

import dataclasses
from typing import Any

from shardyard.domain.ids import Generation
from shardyard_coordinator.machine.job_directory import JobDirectory
from shardyard_coordinator.members.membership import Membership
from shardyard_coordinator.members.runs import Runs
from shardyard_ps_server.hosting import pushes
from shardyard_ps_server.hosting.worker_clocks import WorkerClocks
from shardyard_ps_server.partition import step_gate as gate
from shardyard_ps_server.partition import sync_step
from shardyard_ps_server.wal.records import Mark
from shardyard_ps_server.wal.segments import END, LogFiles
from shardyard_ps_server.wal.wal import Wal

from .disk import SimulatedOs
from .mutation import Patch, mutation
from .world import SECOND, current_world


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


@mutation("C1", "async-wal", 1)
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


@mutation("C2", "async-wal", 16)
def nobody_looks_for_the_fence(patch: Patch) -> None:
    """a server that was frozen continues a log that another server has taken over"""
    patch.setattr(LogFiles, "is_taken", property(lambda self: False))


@mutation("C2", "async-wal", 16)
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


@mutation("C3", "bounded-checkpoint-lag", 1)
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
