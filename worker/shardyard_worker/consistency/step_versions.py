"""Which version the targets hold in a synchronous job, and the waits for the next one.

A step is over when the servers have the next version. A worker pulls it with the push of its last logical rank. If it
does not come at once, the worker waits here: until the version comes, or until the coordinator gives this worker
another rank of the step, since a worker that had it has died (docs/internals/ledger.md, rule B4). A worker without
ranks waits for one.

Owns: the version, and the rows that came with it. Invariant: what is loaded is one version of all partitions. Must not
know: gradients, why a step lacks a rank.
"""

from __future__ import annotations

import logging

from shardyard.domain import errors
from shardyard.domain.ids import Rank
from shardyard_worker.consistency.logical_ranks import LogicalRanks
from shardyard_worker.consistency.strategy import note_progress
from shardyard_worker.exchange.fan_out import MapChanged
from shardyard_worker.exchange.requests import ExchangeResult, PullSpec
from shardyard_worker.rows.row_prefetch import RowPrefetch
from shardyard_worker.training.trainer import SLICE_MS, Trainer, explain
from shardyard_worker.training.variables import StepInput

log = logging.getLogger("shardyard.worker")


class StepVersions:
    """Every logical rank counts in every step. Each method may raise MapChanged."""

    def __init__(self, trainer: Trainer, ranks: LogicalRanks) -> None:
        self._trainer = trainer
        self._session = trainer.session
        self._ranks = ranks
        self.current: int | None = None
        """The version that the targets hold. None: unknown, so one must be loaded before the next step."""
        self._step = 0
        self._rows: RowPrefetch | None = None
        """Rows that came with the version."""

    @property
    def step(self) -> int:
        """The newest version that this worker has seen."""
        if self.current is not None:
            self._step = self.current
        return self._step

    def refresh_ranks(self) -> None:
        """Gives up ranks that were taken away, and opens those that were given."""
        offered = self._ranks.drop_taken()
        if offered and not self._ranks.held:
            self.current = None
        for lease in offered:
            self._ranks.open(lease.rank, lease.token)

    # ---- before a step

    def find_work(self) -> None:
        """Waits until a rank is due. The targets then hold its version."""
        if not self._ranks.held:
            self.await_ranks()
            return
        if self.current is None:
            self.align()
        if self._ranks.due(self.current) is None:
            self.await_step()

    def align(self) -> None:
        """Loads the version of this worker's ranks, which is the lowest next step among them. If other workers have
        taken over all its ranks while it followed a map, it waits for one."""
        self._rows = None  # they are of another version, or of this one before a restore
        if not self._ranks.held:
            self.await_ranks()
            return
        version = 0
        answer = ExchangeResult()
        with self._session.wait_registry.over(lambda: f"version {version} to begin with: {explain(answer)}"):
            while True:
                version = self._ranks.lowest_step
                self._trainer.router.abandon_pull()
                answer = self._trainer.router.pull(PullSpec(version, exactly=True, wait_ms=SLICE_MS))
                if not self._must_wait(answer):
                    break
        self._begin_at(version)

    def _must_wait(self, answer: ExchangeResult) -> bool:
        """Whether the version has not come, and this worker still has a rank that needs it."""
        if not answer.missing:
            return False
        self._session.check_waiting()
        self.refresh_ranks()
        return bool(self._ranks.held)

    def catch_up(self, at_least: int) -> None:
        """Loads the version of this worker's ranks, or without ranks version `at_least` or a later one. That version
        may be waiting for a rank that this worker is given meanwhile."""
        while True:
            self.refresh_ranks()
            if self._ranks.held:
                self.align()
                return
            number = self._trainer.pull_step(at_least, unless=self._ranks.is_offered)
            if number is not None:
                self._step = number
                return

    def await_ranks(self) -> None:
        with self._session.wait_registry.over(lambda: "a logical rank to compute; other workers have them all"):
            self.refresh_ranks()
            while not self._ranks.held:
                self._session.refresh()
                self._session.check_waiting()
                if self._trainer.is_behind:
                    raise MapChanged
                self._trainer.router.pause(SLICE_MS)
                self.refresh_ranks()
        self.align()

    # ---- after a contribution

    def pulled_with(self, *, last: bool) -> PullSpec | None:
        """The pull that goes with a push, if one does. `last`: the push is of this worker's last rank of the step."""
        return self._next(SLICE_MS) if last else None

    def recorded(self, rank: Rank, answer: ExchangeResult, sending: StepInput | None, *, others: bool) -> None:
        """All servers have recorded a contribution. `others`: other ranks of this worker are due at this step."""
        self._trainer.pushes.counted(answer)
        self._ranks.held[rank].next += 1
        note_progress(self._session, answer, sending, self.step)
        if others or answer.missing:
            self.await_step()
        else:
            self._arrive(answer)

    def forget_contributions(self) -> None:
        """The map has changed, so the servers' ledgers say which contributions count."""

    def await_step(self) -> None:
        """Waits until the next version comes, or this worker has another rank of the step to compute."""
        assert self.current is not None
        answer = ExchangeResult()

        def waiting_for() -> str:
            return f"step {self.current} to be complete: {self._explain(answer)}"

        with self._session.wait_registry.over(waiting_for):
            while True:
                self.refresh_ranks()
                if self.current is None or not self._ranks.held:
                    break
                self._bring_verdict(self.current)
                if self._ranks.due(self.current) is not None:
                    self._trainer.router.abandon_pull()
                    self.load_again()
                    return
                try:
                    answer = self._trainer.router.pull(self._next(self._slice_ms))
                except errors.NotFound as error:
                    self._on_version_passed(error)
                    return
                if not answer.missing:
                    self._count_contributions()
                    self._arrive(answer)
                    return
                self._session.check_waiting()
        # all ranks were taken, or exchanged for others, which may be at other steps
        self._count_contributions()
        self.await_ranks()

    def _next(self, wait_ms: int) -> PullSpec:
        assert self.current is not None
        return PullSpec(self.current + 1, exactly=True, wait_ms=wait_ms, prefetched=True)

    # ---- for a mode in which some ranks do not count

    def _explain(self, answer: ExchangeResult) -> str:
        return explain(answer)

    def _bring_verdict(self, step: int) -> None:
        """If a verdict decides which ranks count in a step, gives it to the servers with the next pull."""

    @property
    def _slice_ms(self) -> int:
        """How long the next pull may take."""
        return SLICE_MS

    def _count_contributions(self) -> None:
        """This worker has no more part in the step, so contributions whose verdict was pending count, or do not."""

    def _on_version_passed(self, error: errors.NotFound) -> None:
        """The servers no longer have the next version."""
        raise error

    # ---- the targets

    def _begin_at(self, version: int) -> None:
        if not self._ranks.held:
            self.await_ranks()
            return
        self._hold(version, None)

    def _arrive(self, answer: ExchangeResult) -> None:
        assert self.current is not None
        self._trainer.pushes.note_norm(self.current)
        self._hold(self.current + 1, answer.ahead)

    def _hold(self, version: int, rows: RowPrefetch | None) -> None:
        """Puts a pulled version into the targets. `rows`: those that came with it."""
        self.current, self._rows = version, rows
        if self._trainer.cache is not None:
            self._trainer.cache.begin(version)
        self.load_again()
        self._session.reached(version)

    def load_again(self) -> None:
        """Loads the version again, with its buffers, which a forward may have changed."""
        self._trainer.values.load(self._rows)
