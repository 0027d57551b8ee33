"""Synchronous steps: step t is computed on version t exactly, and is over when all logical ranks have contributed.

A worker computes its logical ranks one after the other (docs/internals/ledger.md, rules B1 to B5). The push of the last
one also pulls the next version. If other workers have taken over all its ranks, it stands by until it gets one.

Owns: the version that the targets hold. Invariants: a contribution was computed on one version, and on rows of that
version, or it is dropped; when the map changes, the servers' ledgers say which step comes next. Must not know: which
work belongs to a rank.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

from shardyard.domain import errors
from shardyard.domain.consistency import UpdateMode
from shardyard.domain.ids import Rank
from shardyard.domain.push_names import PushName, RankSource, SourceKey
from shardyard_worker.consistency.logical_ranks import LogicalRanks
from shardyard_worker.consistency.strategy import LostWork, ModeChanged, Strategy
from shardyard_worker.exchange.fan_out import MapChanged
from shardyard_worker.exchange.requests import ExchangeResult, PullSpec, PushRequest
from shardyard_worker.rows.row_prefetch import RowPrefetch
from shardyard_worker.training.table_binding import Upcoming
from shardyard_worker.training.trainer import SLICE_MS, Trainer, explain
from shardyard_worker.training.variables import StepInput

log = logging.getLogger("shardyard.worker")

R = TypeVar("R")

STOP_SLICE_MS = 20
"""The pause between two checks whether the job stops, which takes a heartbeat of each worker."""


class SyncStrategy(Strategy):
    """Mode `sync`, and the base of `hybrid`, of backup workers, and of the rounds of mode `local`."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self.ranks = LogicalRanks(trainer, self._keys)
        self._version: int | None = None
        self._mixed = False
        """Whether the current work mixes values, or rows, of different versions."""
        self._step = 0
        self._rows: RowPrefetch | None = None
        """Rows that came with the version that the targets hold."""
        self._session.acknowledge_mode(self._session.consistency)

    @property
    def step(self) -> int:
        if self._version is not None:
            self._step = self._version
        return self._step

    def resume(self) -> None:
        """Does nothing: the rank decides the version to compute on."""

    def rest(self) -> None:
        """Does nothing: other workers wait for ranks, whichever worker computes them."""

    def drain(self) -> None:
        """Does nothing: `contribute` returns when the step is complete, so no push is in flight."""

    def leave(self, groups: tuple[tuple[float, ...], ...]) -> None:  # noqa: ARG002 - nothing more is pushed
        """Pushes nothing: a step has room only for its logical ranks."""
        self._trainer.pushes.lose_residual()

    def close(self) -> None:
        """Does nothing: there are no threads."""

    def begin(self) -> None:
        self.catch_up(0)

    def _keys(self, rank: Rank) -> list[SourceKey]:
        """The keys of a rank in the servers' ledgers, first that of its steps."""
        return [SourceKey(RankSource(rank))]

    # ---- a look-up, or values on their way, in the midst of a forward

    def reload(self) -> None:
        before = self._version
        try:
            self.catch_up(0)
        except ModeChanged:  # the work at hand does not count
            self._trainer.pull_newest()
            self._mixed = True
        self._mixed = self._mixed or self._version != before

    def follow_map(self) -> None:
        """The targets stay as they are; they may be of a step that is computed again."""
        with contextlib.suppress(ModeChanged):  # raised when the work is contributed
            self._follow_map()
        self._mixed = True

    def rows_version(self) -> int | None:
        return None if self._mixed else self._version

    def on_rows_version_passed(self, error: errors.NotFound) -> None:
        """That version's step and another one are complete everywhere: another worker did this worker's part, or it
        came too late."""
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
        self._version = None

    def check_mode(self) -> None:
        """Raises ModeChanged if the job no longer takes steps."""
        if self._session.mode is not UpdateMode.SYNC:
            raise ModeChanged

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
        return self.ranks.due(self._version)

    @property
    def on_standby(self) -> bool:
        """True while other workers compute all ranks."""
        self._following(self._refresh_ranks)
        return not self.ranks.held

    def _refresh_ranks(self) -> None:
        offered = self.ranks.drop_taken()
        if offered and not self.ranks.held:
            self._version = None
        for lease in offered:
            self.ranks.open(lease.rank, lease.token)

    def catch_up(self, at_least: int) -> None:
        """Loads one version of all partitions into the targets: that of this worker's ranks; on standby, version
        `at_least` or a later one. That version may be waiting for a rank that this worker is given meanwhile."""
        self._following(partial(self._catch_up, at_least))

    def _catch_up(self, at_least: int) -> None:
        while True:
            self._refresh_ranks()
            if self.ranks.held:
                self._align()
                return
            number = self._trainer.pull_step(at_least, unless=self.ranks.is_offered)
            if number is not None:
                self._step = number
                return

    def prepare_work(self) -> None:
        """Waits until a rank is due. The targets then hold its version. Check `on_standby` first."""
        if self._mixed:  # a look-up outside any batch mixed them
            self._mixed, self._version = False, None
        self._following(self._prepare_work)

    def _prepare_work(self) -> None:
        if self._version is None:
            self._align()
        if self.due() is None:
            self._await_step()

    # ---- a step

    def contribute(self, name: PushName | None, sending: StepInput | None, upcoming: Upcoming | None = None) -> None:
        self._trainer.values.complete()
        self.check_mode()
        if self._mixed:
            log.info("a batch is dropped: it was computed on values, or rows, of different steps")
            self._mixed, self._version = False, None
            self._trainer.pushes.not_counted()
            self._following(self._find_work)
            raise LostWork
        try:
            self._contribute(name, sending, upcoming)
        except MapChanged:
            # the servers' ledgers say whether it counted, and the next batch is the one that they wait for
            self._trainer.pushes.not_counted()
            self._forget_contributions()
            self._follow_map()
            self._following(self._prepare_work)
            raise LostWork from None

    def _find_work(self) -> None:
        if self.ranks.held:
            self._prepare_work()
        else:
            self._await_ranks()

    def _contribute(self, name: PushName | None, sending: StepInput | None, upcoming: Upcoming | None) -> None:
        if name is None:
            rank = self.due()
            if rank is None:
                self._await_ranks()
                log.info("a batch that was computed on standby is dropped")
                return
            name = self.ranks.name_of(rank)
        assert isinstance(name.key.source, RankSource)
        assert self._version is not None
        rank = name.key.source.rank
        if not self._may_begin(self._version):
            log.info("%s does not count: the job stops before step %d", name, self._version)
            self._load_again()  # the forward has changed buffers
            raise LostWork
        others = self.ranks.others_due(self._version, rank)
        try:
            if sending is not None and not self._trainer.pushes.may_count(name, sending, self._version):
                sending = None
            sending = sending and self._trainer.pushes.of_rank(rank, sending)
            answer = self._push(name, sending, upcoming, last=not others)
        except errors.StaleToken as error:
            log.info("%s is another worker's now: %s", name, error.what)
            self._trainer.pushes.not_counted()
            self.ranks.refuse(rank, name.token)
            self._trainer.router.abandon_pull()
            self._session.refresh()
            self._await_step() if self.ranks.held else self._await_ranks()
            raise LostWork from error
        self._recorded(rank, answer, sending, others=others)

    def _push(
        self, name: PushName, sending: StepInput | None, upcoming: Upcoming | None, *, last: bool
    ) -> ExchangeResult:
        """`last`: the push of this worker's last rank, which also pulls the next version and the next step's rows."""
        assert self._version is not None
        request = self._ship(name, sending, upcoming if last else None)
        if not last:
            return self._trainer.router.push(request)
        spec = PullSpec(self._version + 1, exactly=True, wait_ms=SLICE_MS, prefetched=True)
        return self._trainer.router.push_pull(request, spec)

    def _ship(self, name: PushName, sending: StepInput | None, upcoming: Upcoming | None) -> PushRequest:
        assert self._version is not None
        self._trainer.pushes.note_rows(sending)
        ahead = self._trainer.pushes.prefetch_rows(
            self._version + 1, upcoming
        )  # first: the script's ids may be refused
        request = self._trainer.pushes.build(name, sending)
        return request if ahead is None else replace(request, ahead=ahead)

    def _recorded(self, rank: Rank, answer: ExchangeResult, sending: StepInput | None, *, others: bool) -> None:
        """All servers have recorded a contribution. `others`: other ranks of this worker are due at this step."""
        self._trainer.pushes.counted(answer)
        self.ranks.held[rank].next += 1
        self._note(answer, sending)
        if others or answer.missing:
            self._await_step()
        else:
            self._arrive(answer)

    def _forget_contributions(self) -> None:
        """Forgets contributions whose verdict is pending."""

    # ---- versions

    def _await_step(self) -> None:
        """Waits until the step is complete, or this worker has another rank of it to compute (rule B4)."""
        assert self._version is not None
        answer = ExchangeResult()

        def waiting_for() -> str:
            return f"step {self._version} to be complete: {self._explain(answer)}"

        with self._session.wait_registry.over(waiting_for):
            while True:
                self._refresh_ranks()
                if self._version is None or not self.ranks.held:
                    break
                self._bring_verdict(self._version)
                if self.due() is not None:
                    self._trainer.router.abandon_pull()
                    self._load_again()
                    return
                spec = PullSpec(self._version + 1, exactly=True, wait_ms=self._slice_ms, prefetched=True)
                try:
                    answer = self._trainer.router.pull(spec)
                except errors.NotFound as error:
                    self._on_version_passed(error)
                    return
                if not answer.missing:
                    self._judge()
                    self._arrive(answer)
                    return
                self._session.check()
        # all ranks were taken, or exchanged for others, which may be at other steps
        self._judge()
        self._await_ranks()

    def _explain(self, answer: ExchangeResult) -> str:
        return explain(answer)

    def _bring_verdict(self, step: int) -> None:
        """If a verdict decides which ranks count in a step, brings it to the servers with the next pull."""

    @property
    def _slice_ms(self) -> int:
        return SLICE_MS

    def _judge(self) -> None:
        """The last contributions' step is complete, or other workers have its ranks, so it is known what counts."""

    def _on_version_passed(self, error: errors.NotFound) -> None:
        """The servers no longer have the next version."""
        raise error

    def _align(self) -> None:
        """Takes the version of this worker's ranks: the lowest next step among them. Without ranks (other workers may
        have taken them over while it followed a map) it waits for one."""
        self._rows = None  # they are of another version, or of this one in another life
        if not self.ranks.held:
            self._await_ranks()
            return
        version = 0
        answer = ExchangeResult()
        with self._session.wait_registry.over(lambda: f"version {version} to begin with: {explain(answer)}"):
            while True:
                version = self.ranks.lowest_step
                self._trainer.router.abandon_pull()
                answer = self._trainer.router.pull(PullSpec(version, exactly=True, wait_ms=SLICE_MS))
                if not answer.missing:
                    break
                self._session.check()
                self._refresh_ranks()
                if not self.ranks.held:
                    break
        self._begin_at(version)

    def _begin_at(self, version: int) -> None:
        if not self.ranks.held:
            self._await_ranks()
            return
        self._version = version
        self._load()
        self._session.reached(version)

    def _arrive(self, answer: ExchangeResult) -> None:
        assert self._version is not None
        self._trainer.pushes.note_norm(self._version)
        self._version += 1
        self._load(answer.ahead)
        self._session.reached(self._version)

    def _load(self, ahead: RowPrefetch | None = None) -> None:
        """Puts the new version into the targets. `ahead`: rows that came with it."""
        self._rows = ahead
        self._load_again()

    def _load_again(self) -> None:
        """Loads the targets' version again, with its buffers, which a forward may have changed."""
        self._trainer.values.load(self._rows)

    def _await_ranks(self) -> None:
        with self._session.wait_registry.over(lambda: "a logical rank to compute; other workers have them all"):
            while self.on_standby:
                self._session.refresh()
                self._session.check()
                if self._trainer.is_behind:
                    raise MapChanged
                self._trainer.router.pause(SLICE_MS)
        self._align()

    # ---- the step before which the job stops

    def may_compute(self, *, is_long: bool = False) -> bool:
        """Waits until it is settled whether the step of the targets' version is computed, and returns that. `is_long`:
        if it is, the job stops after this step, not before it."""
        assert self._version is not None
        try:
            if is_long:
                return self._may_begin(self._version)
            self._await_stop(self._version)
        except MapChanged:
            self._follow_map()
            return False
        return self._session.step_barrier.permits(self._version) is True

    def _may_begin(self, step: int) -> bool:
        """As `may_compute`, for a contribution that follows at once."""
        while True:
            self._await_stop(step)
            may = self._session.step_barrier.may_begin(step)
            if may is not None:
                return may

    def _await_stop(self, step: int) -> None:
        barrier = self._session.step_barrier
        if barrier.permits(step) is not None:
            return

        def waiting_for() -> str:
            if barrier.halts:
                return f"partitions in the mode that the job goes over to, before step {step}"
            return f"other workers to hear that the job {'stops' if barrier.stop else 'goes over'}, before step {step}"

        with self._session.wait_registry.over(waiting_for):
            while barrier.permits(step) is None:
                self._session.refresh()
                if self._trainer.is_behind:
                    raise MapChanged
                self._trainer.router.pause(SLICE_MS if barrier.halts else STOP_SLICE_MS)
