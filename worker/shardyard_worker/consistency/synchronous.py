"""Synchronous steps: step t is computed on version t exactly, and is over when all logical ranks have contributed.

A worker computes its logical ranks one after the other (docs/internals/ledger.md, rules B1 to B5). The push of the last
one also pulls the next version. If other workers have taken over all its ranks, it stands by until it gets one.

Owns: one contribution, from its name to its record. Invariants: a contribution was computed on one version, and on rows
of that version, or it is dropped; when the map changes, the servers' ledgers say which step comes next. Must not know:
which work belongs to a rank, how a version is waited for.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

from shardyard.domain import errors
from shardyard.domain.ids import Rank
from shardyard.domain.push_names import PushName, RankSource, SourceKey
from shardyard_worker.consistency.logical_ranks import LogicalRanks
from shardyard_worker.consistency.step_permit import await_last_step, may_begin
from shardyard_worker.consistency.step_versions import StepVersions
from shardyard_worker.consistency.strategy import LostWork, ModeChanged, Strategy
from shardyard_worker.exchange.fan_out import MapChanged
from shardyard_worker.exchange.requests import ExchangeResult, PullSpec
from shardyard_worker.training.table_binding import Upcoming
from shardyard_worker.training.trainer import Trainer
from shardyard_worker.training.variables import StepInput

log = logging.getLogger("shardyard.worker")

R = TypeVar("R")


class SyncStrategy(Strategy):
    """Modes `sync` and `local`, whose steps are rounds; and the base of `hybrid`."""

    is_synchronous = True

    def __init__(
        self,
        trainer: Trainer,
        versions: Callable[[Trainer, LogicalRanks], StepVersions] = StepVersions,
        ranks: type[LogicalRanks] = LogicalRanks,
    ) -> None:
        super().__init__(trainer)
        self.ranks = ranks(trainer, self._keys)
        self.versions = versions(trainer, self.ranks)
        self._mixed = False
        """Whether the current work mixes values, or rows, of different versions."""
        self._session.acknowledge_mode(self._session.consistency)

    @property
    def step(self) -> int:
        return self.versions.step

    @property
    def may_leave(self) -> bool:
        """Whether this worker may leave before its next step if it is told to."""
        return True

    def end_data(self, end: int) -> None:
        """All steps before `end` were computed, by this worker or others. Afterwards the targets hold that version, or
        a later one."""
        if self.on_standby or self.step < end:
            # together with the news of the end, a rank may have gone to a worker that computed none
            self.catch_up(end)

    def leave(self, groups: tuple[tuple[float, ...], ...]) -> None:  # noqa: ARG002 - nothing more is pushed
        """Pushes nothing: a step has room only for its logical ranks."""
        self._trainer.pushes.lose_residual()

    def warn_of_open_step(self) -> None:
        """Before this worker leaves: warns if it has computed only some of its ranks of a step, with data of the
        script's own, so that the step may never be complete."""
        step, held = self.versions.current, self.ranks.held
        missing = sorted(rank for rank, position in held.items() if position.next == step)
        if step is not None and missing and len(missing) < len(held):
            log.warning(
                "leaves in the middle of step %d: it lacks logical rank %s, so this worker's last batch does not count"
                " unless another worker computes that rank. With data of the script's own, all logical ranks need"
                " equally many batches: a DataLoader with drop_last over equally many samples, or job.batches",
                step,
                ", ".join(map(str, missing)),
            )

    def begin(self) -> None:
        self.catch_up(0)

    def _keys(self, rank: Rank) -> list[SourceKey]:
        """The keys of a rank in the servers' ledgers, first that of its steps."""
        return [SourceKey(RankSource(rank))]

    # ---- a look-up, or values that are still arriving, during a forward

    def reload(self) -> None:
        before = self.versions.current
        try:
            self.catch_up(0)
        except ModeChanged:  # the work at hand does not count
            self._trainer.pull_newest()
            self._mixed = True
        self._mixed = self._mixed or self.versions.current != before

    def follow_map(self) -> None:
        """The targets stay as they are; they may be of a step that is computed again."""
        with contextlib.suppress(ModeChanged):  # raised when the work is contributed
            self._follow_map()
        self._mixed = True

    def rows_version(self) -> int | None:
        return None if self._mixed else self.versions.current

    def on_rows_version_passed(self, error: errors.NotFound) -> None:
        """Later steps are complete on all servers: another worker computed this worker's part, or it came too late."""
        log.info("rows are read as they are now, and the batch does not count: %s", error.what)
        self._mixed = True

    # ---- maps

    def _following(self, do: Callable[[], R]) -> R:
        """Runs `do`, which can be repeated, again whenever partitions have moved or were restored."""
        while True:
            try:
                return do()
            except MapChanged:
                self._follow_map()

    def _follow_map(self) -> None:
        """Under the newest map the job may be at an earlier step, so the servers say what this worker's ranks compute
        next."""
        while True:
            try:
                self._trainer.follow_map()
                self.check_mode()
                for rank, position in sorted(self.ranks.held.items()):
                    self.ranks.open(rank, position.token)
                break
            except MapChanged:
                continue
        self.versions.current = None

    def check_mode(self) -> None:
        """Raises ModeChanged if the job no longer takes steps, or takes them under another strategy."""
        if not self.is_current:
            raise ModeChanged

    def while_halted(self, *, begun: bool) -> None:  # noqa: ARG002 - servers have all that counts
        """Called in waits for the decision on a step. `begun`: its gradients were computed. Raises MapChanged."""
        if self._trainer.is_behind:
            raise MapChanged

    def has_moved(self) -> bool:
        """Whether there is a newer map; then follows it, and the job may be at an earlier step. For code that asks the
        servers nothing, since their answers would have said so."""
        if not self._trainer.is_behind:
            return False
        self._follow_map()
        return True

    # ---- before a step

    def due(self) -> Rank | None:
        """This worker's lowest logical rank that is computed on the targets' version."""
        return self.ranks.due(self.versions.current)

    @property
    def on_standby(self) -> bool:
        """True while other workers compute all ranks."""
        self._following(self.versions.refresh_ranks)
        return not self.ranks.held

    def catch_up(self, at_least: int) -> None:
        """Loads the version of this worker's ranks, or without ranks version `at_least` or a later one."""
        self._following(partial(self.versions.catch_up, at_least))

    def prepare_work(self) -> None:
        """Waits until a rank is due. The targets then hold its version. Check `on_standby` first."""
        if self._mixed:  # a look-up outside any batch mixed them
            self._mixed, self.versions.current = False, None
        self._following(self.versions.find_work)

    def may_compute(self, *, is_long: bool = False) -> bool:
        """Waits until it is decided whether the step on the targets' version is computed, and returns that. `is_long`:
        the step is a round; once it has begun, the job stops only after it."""
        assert self.versions.current is not None
        try:
            permit = may_begin if is_long else await_last_step
            return permit(self._trainer, self.versions.current, partial(self.while_halted, begun=False))
        except MapChanged:
            self._follow_map()
            return False

    # ---- a step

    def contribute(self, name: PushName | None, sending: StepInput | None, upcoming: Upcoming | None = None) -> None:
        self._trainer.values.complete()
        self.check_mode()
        if self._mixed:
            log.info("a batch is dropped: it was computed on values, or rows, of different steps")
            self._mixed, self.versions.current = False, None
            self._trainer.pushes.not_counted()
            self._following(self.versions.find_work)
            raise LostWork
        try:
            self._contribute(name, sending, upcoming)
        except MapChanged:
            # the servers' ledgers say whether it counted, and the next batch is the one that they wait for
            self._trainer.pushes.not_counted()
            self.versions.forget_contributions()
            self._follow_map()
            self._following(self.versions.find_work)
            raise LostWork from None

    def drop(self) -> None:
        if self.versions.current is not None:
            self.versions.load_again()  # the forward has changed buffers

    def _contribute(self, name: PushName | None, sending: StepInput | None, upcoming: Upcoming | None) -> None:
        versions, pushes = self.versions, self._trainer.pushes
        if name is None:
            due = self.due()
            if due is None:
                versions.await_ranks()
                log.info("a batch that was computed on standby is dropped")
                return
            name = self.ranks.name_of(due)
        assert isinstance(name.key.source, RankSource)
        assert versions.current is not None
        rank = name.key.source.rank
        if not may_begin(self._trainer, versions.current, partial(self.while_halted, begun=True)):
            log.info("%s does not count: the job stops before step %d", name, versions.current)
            versions.load_again()  # the forward has changed buffers
            raise LostWork
        others = self.ranks.others_due(versions.current, rank)
        try:
            sending = self._counted(name, rank, sending)
            answer = self._push(name, sending, upcoming, versions.pulled_with(last=not others))
        except errors.StaleToken as error:
            log.info("%s is another worker's now: %s", name, error.what)
            pushes.not_counted()
            self.ranks.refuse(rank, name.token)
            self._trainer.router.abandon_pull()
            self._session.refresh()
            versions.await_step() if self.ranks.held else versions.await_ranks()
            raise LostWork from error
        versions.recorded(rank, answer, sending, others=others)

    def _counted(self, name: PushName, rank: Rank, sending: StepInput | None) -> StepInput | None:
        """What of this work counts."""
        pushes, step = self._trainer.pushes, self.versions.current
        assert step is not None
        if sending is not None and not pushes.may_count(name, sending, step):
            return None
        return sending and pushes.of_rank(rank, sending)

    def _push(
        self, name: PushName, sending: StepInput | None, upcoming: Upcoming | None, pull: PullSpec | None
    ) -> ExchangeResult:
        pushes, router = self._trainer.pushes, self._trainer.router
        pushes.note_rows(sending)
        # before the push is built: the ids that the script announces may be refused
        ahead = None if pull is None else pushes.prefetch_rows(pull.number, upcoming)
        request = pushes.build(name, sending)
        if pull is None:
            return router.push(request)
        return router.push_pull(request if ahead is None else replace(request, ahead=ahead), pull)
