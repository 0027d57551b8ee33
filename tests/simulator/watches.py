"""Watches shipped code while yards run: records of the coordinator, ledgers and logs of the servers, and tracebacks."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import greenlet

from shardyard.domain.ids import Generation, Incarnation, JobId, Token
from shardyard.domain.push_names import DataShardSource
from shardyard.domain.pushes import Outcome
from shardyard_coordinator.machine.job import DRAINED
from shardyard_coordinator.service.journal import Journal
from shardyard_ps_server.hosting import orders, pushes
from shardyard_ps_server.hosting.store import Store
from shardyard_ps_server.partition.ledger import Ledger
from shardyard_ps_server.wal.records import Mark, decode_mark
from shardyard_ps_server.wal.segments import END, LogFiles
from shardyard_ps_server.wal.wal import Wal

from .hand_overs import SETBACKS
from .state import Yard, current_yard, running
from .world import EPOCH_S, MS, Task, current


class SimulatedJournal(Journal):
    """The journal that ships, on its own file. Its process may die before and after each write."""

    def __init__(self, folder: Path | None, **_: object) -> None:
        super().__init__(folder, wall_clock=lambda: float(EPOCH_S))
        self._process = current().process
        self._process.at_end[self.close] = None

    def append(self, entries: Any) -> None:
        world = self._process.world
        self._require_room()
        world.pause(world.rng.randrange(2 * MS))
        super().append(entries)
        for kind, body in entries:
            _note(current_yard(), kind, body)
        world.pause(world.rng.randrange(2 * MS))

    def replace(self, entries: Any) -> None:
        self._require_room()
        super().replace(entries)

    def make_room(self) -> None:
        """The disk is as full as a run says, whatever is in the file."""

    def free_bytes(self) -> int | None:
        return None

    def _require_room(self) -> None:
        if self._process.world.now < current_yard().journal_full_until:
            raise sqlite3.OperationalError("database or disk is full")

    def close(self) -> None:
        self._process.at_end.pop(self.close, None)
        super().close()


def _note(yard: Yard, kind: str, body: Any) -> None:
    """The coordinator has written this record."""
    if kind in SETBACKS:
        yard.hand_overs.set_back()
    if kind == "job_started":
        yard.unfinished[body["job"]] = None
        yard.stops[body["job"]] = None
        yard.left_out[body["job"]] = set()
    elif kind == "batch_quarantined" and yard.plan.mode == "async":
        source = DataShardSource(body["feed"], body["epoch"], body["index"])
        yard.left_out[body["job"]].update(yard.plan.coordinates_of(source, body["sequence"]))
        yard.happened.append("not finite")
    elif kind == "job_ended":
        yard.unfinished.pop(body["job"], None)
        code = "" if body["failure"] is None else body["failure"]["code"]
        # the coordinator does not know that a script is done if its process was killed before it said goodbye
        unheard = code == "WorkerFailed" and bool(yard.finished) and not yard.goodbyes
        # a job has no checkpoint to go back to if the disk has refused all of them
        lost = code == "ServerLost" and not yard.has_checkpoint and len(yard.finished) == yard.plan.workers
        if code == "ServerLost" and not lost and not yard.waived:
            yard.world.violations.append(f"a server ended a job: {body['failure']['what']}")
        # likewise it ends without a last checkpoint
        unwritten = code == "StorageUnavailable" and not yard.has_checkpoint and yard.disk.has_refused
        if code == "StorageUnavailable" and not unwritten:
            yard.world.violations.append(f"a checkpoint ended a job: {body['failure']['what']}")
        finished = body["state"] == "finished" or unheard or lost or unwritten
        yard.jobs_finished += finished
        yard.jobs_failed += not finished  # the script is launched again
    elif kind == "consistency_switched":
        yard.paces.switched(JobId(body["job"]), body["number"])
        yard.happened.append("switch")
    elif kind == "job_switched":
        yard.paces.switched(JobId(body["job"]), body["number"])
        yard.happened.append("went over to steps" if body["mode"] == "sync" else "went over")
    elif kind == "worker_switched":
        yard.happened.append("gone over")
    elif kind == "stop_settled":
        yard.stops[body["job"]] = body["step"]
        yard.happened.append("stop")
    elif kind == "member_removed":
        if body["how"] == DRAINED:
            yard.hand_overs.left(Incarnation(body["incarnation"]))
            yard.happened.append("left in order")
    elif kind == "worker_gone":
        yard.goodbyes += body["goodbye"]
        yard.paces.goes(Incarnation(body["worker"]))
    elif kind == "checkpoint_committed":
        yard.has_checkpoint = True
    elif kind == "checkpoint_waived":
        yard.waived = True


class Watch(logging.Handler):
    """Reports a traceback in a log as a violation."""

    def emit(self, record: logging.LogRecord) -> None:
        if running and current_yard().world.trace is not None:
            task = greenlet.getcurrent()
            who = task.process if isinstance(task, Task) else "-"
            current_yard().world.say(f"{who} {record.name.removeprefix('shardyard.')}: {record.getMessage()}")
        if record.exc_info and running and not current_yard().world.over:
            self.format(record)
            text = logging.Formatter().formatException(record.exc_info)  # type: ignore[arg-type]
            current_yard().world.violations.append(f"{record.getMessage()}: {text}")


def watch_ledgers() -> Callable[[], None]:
    """Watches that servers count nothing under an overtaken token, and nothing from a fenced worker."""
    real_open, real_advance, real_restore = Ledger.open, Ledger.advance, Ledger.restore
    real_fence, real_push, real_become = orders.fence, pushes.push, Store.become

    def open_(self: Any, key: Any, token: Token) -> int:
        found = real_open(self, key, token)
        seen = self.__dict__.setdefault("seen", {})
        seen[key] = max(token, seen.get(key, 0))
        return found

    def advance(self: Any, name: Any) -> None:
        real_advance(self, name)
        if name.token < self.__dict__.get("seen", {}).get(name.key, 0):
            current_yard().world.violations.append(
                f"{name} was counted under token {name.token}, which had been overtaken"
            )

    def restore(self: Any, marks: Any, floor: Any) -> None:
        self.__dict__.pop("seen", None)
        real_restore(self, marks, floor)

    def become(self: Any, incarnation: Any, term: Any) -> None:
        self.__dict__["told"] = set()
        real_become(self, incarnation, term)

    def fence(store: Any, incarnations: Any) -> None:
        real_fence(store, incarnations)
        store.__dict__.setdefault("told", set()).update(Incarnation(each) for each in incarnations)

    def push(store: Any, hosted: Any, push_order: Any, *payloads: Any) -> Any:
        told = push_order.caller.incarnation in store.__dict__.get("told", ())
        results = real_push(store, hosted, push_order, *payloads)
        if told and any(result.outcome not in (Outcome.DUPLICATE, Outcome.DROPPED) for result in results):
            current_yard().world.violations.append(f"{push_order.name} of a fenced worker was counted")
        return results

    Ledger.open, Ledger.advance, Ledger.restore = open_, advance, restore  # type: ignore[method-assign]
    orders.fence, pushes.push, Store.become = fence, push, become  # type: ignore[method-assign]

    def undo() -> None:
        Ledger.open, Ledger.advance, Ledger.restore = real_open, real_advance, real_restore  # type: ignore[method-assign]
        orders.fence, pushes.push, Store.become = real_fence, real_push, real_become  # type: ignore[method-assign]

    return undo


def watch_logs() -> Callable[[], None]:
    """Watches that successors read of a log all that took effect by it (rule C2)."""
    real_append, real_end_turn, real_take_over = Wal.append, Wal._end_turn, LogFiles.take_over

    def check(folder: Path, end: Mark) -> None:
        effective = current_yard().effective.get(folder, end)
        if effective > end:
            current_yard().world.violations.append(
                f"{folder.name} has acknowledged {effective}; its log is read to {end}"
            )

    def append(self: Any, *given: Any) -> int:
        ticket = real_append(self, *given)
        self.__dict__.setdefault("ends", {})[ticket] = Mark(self._segment, self._offset)
        return ticket

    def end_turn(self: Any, ticket: int) -> None:
        real_end_turn(self, ticket)
        folder, mark = self._files.folder, self.__dict__.get("ends", {}).pop(ticket, None)
        if mark is not None:
            current_yard().effective[folder] = max(mark, current_yard().effective.get(folder, mark))
            if (end := folder / END).exists():
                check(folder, decode_mark(end.read_bytes(), end))

    def take_over(self: Any, generation: Generation) -> Mark:
        end = real_take_over(self, generation)
        check(self.folder, end)
        return end

    Wal.append, Wal._end_turn, LogFiles.take_over = append, end_turn, take_over  # type: ignore[method-assign]

    def undo() -> None:
        Wal.append, Wal._end_turn, LogFiles.take_over = real_append, real_end_turn, real_take_over  # type: ignore[method-assign]

    return undo
