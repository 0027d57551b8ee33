"""Ledgers of jobs with backup workers, by chance: at any time their records make an equal one anew, with the same
batches to make up for."""

from __future__ import annotations

import contextlib
import json
import random

from shardyard.domain.errors import ShardyardError
from shardyard.domain.ids import Incarnation, Rank
from shardyard.domain.push_names import RankSource
from shardyard_coordinator.records import Body
from shardyard_coordinator.work import checkpoint_copy
from shardyard_coordinator.work.feeds import FeedSpec
from shardyard_coordinator.work.quarantine import QuarantinedWork
from shardyard_coordinator.work.step_ledger import StepLedger

SEEDS = range(60)
WORKER = Incarnation(7)


class Chance:
    """A ledger, and what happens to it."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.ranks = self.random.choice((2, 3, 4))
        self.backup_workers = self.random.randrange(1, self.ranks)
        self.ledger = self._empty()
        self.made_up = self.forgotten = 0

    def _empty(self) -> StepLedger:
        return StepLedger(logical_ranks=self.ranks, backup_workers=self.backup_workers)

    def step(self) -> None:
        chance = self.random.random()
        if chance < 0.1:
            self._open()
        elif chance < 0.8:
            self._decide()
        elif chance < 0.9:
            self._condemn()
        elif chance < 0.97:
            for each in self.ledger.opened:
                each.close(self.random.randrange(self.ledger.verdicts.decided + 1))
        else:
            copy = {"entries": [list(entry) for entry in checkpoint_copy.entries_for_copy(self.ledger)]}
            known_from = self.ledger.verdicts.known_from
            checkpoint_copy.forget_made_up(self.ledger, copy)
            self.forgotten += self.ledger.verdicts.known_from > known_from

    def _open(self) -> None:
        samples, batch = self.random.choice((5, 12, 19, 45)), self.random.choice((1, 2, 5))
        spec = FeedSpec(samples, "f", batch, self.random.choice((1, 2)), shuffle=True, drop_last=False)
        with contextlib.suppress(ShardyardError):
            self.ledger.open(len(self.ledger.opened), spec)

    def _decide(self) -> None:
        ledger, step = self.ledger, self.ledger.verdicts.decided
        ledger.verdicts.tell(step, [Rank(rank) for rank in range(self.ranks) if self.random.random() < 0.7])
        left_out = ledger.verdicts.due(step, ledger.working(step))
        if left_out is not None:
            late = ledger.decide(step, left_out)
            ledger.verdicts.drop([(WORKER, len(late))] if late else [])
            feed = ledger.feed_of(step)
            self.made_up += feed is not None and step >= ledger.opened[feed].planned_end

    def _condemn(self) -> None:
        """As a worker's report does that has the rank (flows/work_verdicts.py)."""
        step = max(0, self.ledger.verdicts.decided + self.random.choice((-3, -1, 0, 0, 1, 2)))
        source = RankSource(Rank(self.random.randrange(self.ranks)))
        known = self.ledger.feed_of(step) is not None and source.rank not in self.ledger.verdicts.left_out(step)
        if known and not self.ledger.quarantine.has(source, step):
            self.ledger.quarantine.add(QuarantinedWork(source, step, 1))

    def check(self) -> None:
        entries = self.ledger.entries()
        made_anew = self._empty()
        for kind, body in entries:
            made_anew.restore(kind, Body(json.loads(json.dumps(body))))
        assert made_anew.opened == self.ledger.opened
        assert made_anew.entries() == entries


def test_ledger_with_backup_workers_is_made_anew_from_its_records_at_any_time() -> None:
    made_up = forgotten = 0
    for seed in SEEDS:
        chance = Chance(seed)
        for _ in range(chance.random.choice((10, 40, 80))):
            chance.step()
            chance.check()
        made_up += chance.made_up
        forgotten += chance.forgotten
    assert made_up >= len(SEEDS)
    assert forgotten >= len(SEEDS) / 4
