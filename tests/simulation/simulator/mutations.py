"""The rules of docs/ledger.md, each switched off in the shipped code: with it off, some seed must go red.

Each is a function that patches while a `pytest.MonkeyPatch` lasts, and says in which mode its fault can be seen.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from shardyard.ground.errors import SequenceGap, StraddlingRange
from shardyard.ground.types import PushName, SourceKey, Token
from shardyard_coordinator import data_ledger, recovery, safekeeping
from shardyard_coordinator.ranks import RankBook
from shardyard_ps_server import gate
from shardyard_ps_server.cuts import StateCut
from shardyard_ps_server.ledger import Ledger
from shardyard_ps_server.partition import Partition
from shardyard_ps_server.store import Store
from shardyard_ps_server.versions import Versions
from shardyard_ps_server.wal import Wal
from shardyard_worker import feeds
from shardyard_worker.strategies import SyncStrategy

from .disk import SimulatedOs

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Mutation:
    rule: str
    what: str
    mode: str
    apply: Callable[[Patch], None]
    first: tuple[int, ...] = ()
    """Seeds that were red with it; they are tried first, which saves time and nothing else."""


MUTATIONS: list[Mutation] = []


def mutation(rule: str, mode: str, *first: int) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    def add(apply: Callable[[Patch], None]) -> Callable[[Patch], None]:
        MUTATIONS.append(Mutation(rule, (apply.__doc__ or "").strip(), mode, apply, first))
        return apply

    return add


# ---- A: names and ledgers


@mutation("A1", "async", 5, 6)
def named_by_the_lease(patch: Patch) -> None:
    """work is named by whose lease it is, not by what it is"""
    real = Ledger.open

    def open_(self: Ledger, key: SourceKey, token: Token) -> int:
        entry = self._entries.get(key)
        if entry is not None and token > entry.token:
            entry.next = 0
        return real(self, key, token)

    patch.setattr(Ledger, "open", open_)


@mutation("A2", "async", 6, 14)
def duplicates_count(patch: Patch) -> None:
    """what was counted before counts again"""
    real, advance = Ledger.is_duplicate, Ledger.advance
    patch.setattr(Ledger, "is_duplicate", lambda self, name: bool(real(self, name)) and False)
    patch.setattr(Ledger, "advance", _to_the_last(advance))


@mutation("A2", "async", 17, 19)
def gaps_count(patch: Patch) -> None:
    """work is counted whose predecessors are not"""
    _instead_of(patch, SequenceGap)


@mutation("A4", "async", 10, 12)
def what_shall_not_count_is_not_named(patch: Patch) -> None:
    """a batch that shall not count is not pushed at all"""

    def drop(self: Any, why: str) -> None:
        self.work.taken = True

    patch.setattr(feeds.Feed, "_drop", drop)


@mutation("A5", "async", 5, 14)
def tokens_are_not_looked_at(patch: Patch) -> None:
    """a lease that was overtaken still counts, where its worker could not be fenced"""
    patch.setattr(Ledger, "is_duplicate", _whatever_its_token(Ledger.is_duplicate))
    _nobody_is_fenced(patch)


@mutation("A9", "async-checkpoint")
def the_data_ledger_is_copied_last(patch: Patch) -> None:
    """a checkpoint has the data ledger as it is when the partitions are written"""
    real = safekeeping.Safekeeping.end_checkpoint

    def end_checkpoint(self: Any, taken: Any) -> Any:
        if self.book.draft is not None:
            entries = [[kind, body] for kind, body in self._feeds.entries()]
            late = {"entries": entries, "closed": self._feeds.closed, "token": self._tokens.latest}
            self.book.draft = dataclasses.replace(self.book.draft, data_ledger=late)
        return real(self, taken)

    patch.setattr(safekeeping.Safekeeping, "end_checkpoint", end_checkpoint)


@mutation("A10", "sync-checkpoint", 10, 16)
def lives_are_alike(patch: Patch) -> None:
    """a partition that is restored stays in its life"""
    real = recovery.Recovery.begin

    def begin(self: Any, *given: Any, **more: Any) -> Any:
        found = real(self, *given, **more)
        if found is None:
            return None
        self.attempt = dataclasses.replace(found[0], life=1)
        return self.attempt, found[1]

    patch.setattr(recovery.Recovery, "begin", begin)


@mutation("A11", "async-checkpoint")
def closed_is_closed(patch: Patch) -> None:
    """data shards that a restore has taken back stay closed"""
    patch.setattr(data_ledger.DataLedger, "reopen", lambda self, kept: None)


@mutation("A11", "async-checkpoint")
def the_end_waits_for_no_checkpoint(patch: Patch) -> None:
    """the end of the data is told while no checkpoint has all of it"""
    patch.setattr(safekeeping.Safekeeping, "has_all_data", property(lambda self: True))


@mutation("A12", "async")
def a_straddling_range_counts(patch: Patch) -> None:
    """a range counts of which a part was counted"""
    _instead_of(patch, StraddlingRange)


@mutation("A11", "sync-checkpoint", 10, 27)
def the_last_steps_are_not_looked_at_again(patch: Patch) -> None:
    """who waits for the end of a synchronous job's data does not see that it went back"""
    patch.setattr(SyncStrategy, "has_moved", lambda self: False)


# ---- B: synchronous steps


@mutation("B2", "sync")
def applied_in_the_order_of_arrival(patch: Patch) -> None:
    """a step sums its ranks as they came"""
    real_record, real_take = gate.Gate.record, gate.Gate.take

    def record(self: Any, rank: Any, contribution: Any) -> None:
        self.__dict__.setdefault("came", []).append(contribution)
        real_record(self, rank, contribution)

    def take(self: Any) -> Any:
        real_take(self)
        return tuple(self.__dict__.pop("came"))

    patch.setattr(gate.Gate, "record", record)
    patch.setattr(gate.Gate, "take", take)


@mutation("B3", "sync")
def one_version_is_kept(patch: Patch) -> None:
    """a partition keeps its newest version only"""
    real = Versions.find
    patch.setattr(Versions, "find", lambda self, number: real(self, number) if number == self.newest.number else None)


@mutation("B4", "sync")
def ranks_of_the_dead_are_nobodys(patch: Patch) -> None:
    """a dead worker's ranks go to nobody"""
    patch.setattr(RankBook, "vacate", lambda self, worker, now_ms: self.suspend(worker))


@mutation("B5", "sync")
def random_numbers_are_nobodys(patch: Patch) -> None:
    """random numbers are not those of the rank and the step"""
    patch.setattr(feeds, "seed_everything", lambda *key: None)


@mutation("B7", "sync-checkpoint")
def state_of_the_next_step(patch: Patch) -> None:
    """a checkpoint of a step has optimizer state of the next"""
    patch.setattr(StateCut, "keep", lambda self, begin, end: None)


@mutation("B7", "sync-checkpoint", 16, 18)
def contributions_of_the_next_step(patch: Patch) -> None:
    """a checkpoint of a step counts contributions to the next, which it does not have"""
    real = Partition._cut

    def cut(self: Any) -> Any:
        found = real(self)
        return dataclasses.replace(found, marks=self._ledger.marks())

    patch.setattr(Partition, "_cut", cut)


# ---- C: owning, logging, fences


@mutation("C1", "async-wal", 0, 1)
def acknowledged_before_durable(patch: Patch) -> None:
    """a push is acknowledged before it is in the log"""

    def append(self: Any, kind: Any, head: bytes, payload: Any) -> int:
        with self._changed:
            self._check()
            self._appended += 1
            self._durable = self._appended
            return int(self._appended)

    patch.setattr(Wal, "append", append)


@mutation("C1", "async-wal", 6, 18)
def a_log_is_not_synced(patch: Patch) -> None:
    """a log is written and not brought to the disk"""
    patch.setattr(SimulatedOs, "fdatasync", lambda self, descriptor: None)


@mutation("promise 4", "async")
def the_dead_are_not_refused(patch: Patch) -> None:
    """a server does not refuse whom it was told to"""
    _nobody_is_fenced(patch)


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
    """Counts what that error refuses."""
    real = Ledger.is_duplicate

    def is_duplicate(self: Ledger, name: PushName) -> bool:
        try:
            return real(self, name)
        except refusal:
            return False

    patch.setattr(Ledger, "is_duplicate", is_duplicate)
    patch.setattr(Ledger, "advance", _to_the_last(Ledger.advance))


def _nobody_is_fenced(patch: Patch) -> None:
    real = Store.admit

    def admit(self: Any, *given: Any, **more: Any) -> Any:
        fenced, self._standing.fenced = self._standing.fenced, set()
        try:
            return real(self, *given, **more)
        finally:
            self._standing.fenced = fenced

    patch.setattr(Store, "admit", admit)


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
