"""Synchronous steps with backup workers: a step leaves out its latest ranks (docs/internals/ledger.md, rule B6).

The coordinator decides which ranks count in a step. Workers ask it, and give its verdict to the servers with their next
pull. A contribution that came late is dropped; its samples are computed again when the data set ends
(`data/makeup_steps.py`). Example with 3 ranks and 1 backup worker: ranks 0 and 2 have arrived, the verdict is (0, 2),
the step is their mean, and rank 1 continues with the next step.

Owns: the verdicts, and the contributions whose verdict is pending. Invariant: a verdict is permanent, so a known one is
not asked for again. Must not know: gradients.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from shardyard.domain import errors
from shardyard.domain.ids import Rank
from shardyard.domain.pushes import Outcome, StepVerdict
from shardyard.wire import common_messages, methods, push_messages
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_worker.consistency.logical_ranks import LogicalRanks
from shardyard_worker.consistency.step_versions import StepVersions
from shardyard_worker.consistency.strategy import LostWork, note_progress
from shardyard_worker.exchange.requests import ExchangeResult, PullSpec
from shardyard_worker.session.session import Session
from shardyard_worker.training.trainer import SLICE_MS, Trainer, explain
from shardyard_worker.training.variables import StepInput

log = logging.getLogger("shardyard.worker")


class StepVerdicts:
    """Asks the coordinator which ranks count."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._known: tuple[int, tuple[Rank, ...]] | None = None
        self.again_ms = 0
        """The time until the coordinator wants to be asked again, in milliseconds; 0: it does not matter."""

    def members(self, step: int, ranks: Iterable[Rank]) -> tuple[Rank, ...] | None:
        """The ranks that count in a step, ascending. None: not decided yet. Empty: no longer known. `ranks`: those
        whose contributions all servers have, as far as this worker knows."""
        if self._known is None or self._known[0] != step:
            reply = self._ask(step, ranks)
            self.again_ms = reply.again_ms
            if not reply.decided:
                return None
            self._known = step, push_messages.ranks_from_wire(reply.members, f"ranks that count in step {step}")
        return self._known[1]

    def left_ms(self, step: int) -> int:
        """How long to wait for the end of this step, which the others are computing, in milliseconds. The coordinator
        estimates it. 0: they have just begun, so it is quicker to take part."""
        return int(self._ask(step - 1, ()).left_ms) if step else 0

    def verdict(self, step: int) -> StepVerdict | None:
        """The step's verdict for the servers, if it is known."""
        if self._known is None or self._known[0] != step or not self._known[1]:
            return None
        return StepVerdict(step, members=self._known[1])

    def _ask(self, step: int, ranks: Iterable[Rank]) -> wire.DecideStepReply:
        caller = common_messages.caller_to_wire(self._session.caller)
        return self._session.ask(
            methods.DECIDE_STEP, wire.DecideStepRequest(caller=caller, step=step, ranks=sorted(ranks))
        )


@dataclass(frozen=True)
class _Contribution:
    """A contribution that all servers have; its verdict is pending. `is_kept`: the residual was updated as if it
    counts, because this worker encodes another rank's push next."""

    rank: Rank
    step: int
    answer: ExchangeResult
    sending: StepInput | None
    is_kept: bool


class BackupVersions(StepVersions):
    """The versions of a job with job.consistency.backup_workers."""

    def __init__(self, trainer: Trainer, ranks: LogicalRanks) -> None:
        super().__init__(trainer, ranks)
        self._verdicts = StepVerdicts(self._session)
        self._pending: list[_Contribution] = []

    # ---- a step

    def pulled_with(self, *, last: bool) -> PullSpec | None:  # noqa: ARG002 - the verdict is not known yet
        return None

    def recorded(self, rank: Rank, answer: ExchangeResult, sending: StepInput | None, *, others: bool) -> None:
        """All servers have recorded the contribution, or dropped it as late. Raises LostWork if it was dropped."""
        assert self.current is not None
        given = _Contribution(rank, self.current, answer, sending, is_kept=others)
        if any(result.outcome is Outcome.DROPPED for result in answer.results):
            self._drop(given)
            self._rejoin()
            raise LostWork
        self._ranks.held[rank].next += 1
        if given.is_kept:
            self._trainer.pushes.counted(answer)
        self._pending.append(given)
        self.await_step()

    def forget_contributions(self) -> None:
        self._pending.clear()

    def _explain(self, answer: ExchangeResult) -> str:
        return explain(answer) if answer.missing else "the coordinator to decide which ranks count"

    def _bring_verdict(self, step: int) -> None:
        """Once the verdict is known, ranks that do not count continue with the next step."""
        held = self._ranks.held
        members = self._verdicts.members(step, [rank for rank, position in held.items() if position.next > step])
        self._trainer.router.set_members(self._verdicts.verdict(step))
        for rank, position in held.items():
            if members and rank not in members and position.next == step:
                log.debug("step %d is over for logical rank %d, before it was computed", step, rank)
                position.next = step + 1

    @property
    def _slice_ms(self) -> int:
        return min(self._verdicts.again_ms or SLICE_MS, SLICE_MS)

    def _count_contributions(self) -> None:
        pending, self._pending = self._pending, []
        for each in pending:
            members = self._verdicts.members(each.step, ())
            if members and each.rank not in members:
                self._drop(each)
                continue
            if not each.is_kept:
                self._trainer.pushes.counted(each.answer)
            note_progress(self._session, each.answer, each.sending, self.step)

    def _drop(self, given: _Contribution) -> None:
        log.info(
            "logical rank %d was late with step %d, which is complete without it; its samples are computed again later",
            given.rank,
            given.step,
        )
        if not given.is_kept:
            self._trainer.pushes.not_counted()

    # ---- behind the others

    def _on_version_passed(self, error: errors.NotFound) -> None:  # noqa: ARG002 - others have taken more steps
        self._rejoin()

    def _rejoin(self) -> None:
        """Other workers have continued without this one: asks the servers for the next steps of its ranks. If the
        others are in the middle of that step, waits for its end first, as long as the coordinator says."""
        self._count_contributions()
        self._ranks.reopen()
        self.current = None
        left_ms = self._verdicts.left_ms(self._ranks.lowest_step) if self._ranks.held else 0
        self.align(self._ranks.lowest_step + 1 if left_ms else None, left_ms)

    def catch_up(self, at_least: int) -> None:
        super().catch_up(at_least)
        while self._ranks.held and self.step < at_least:  # the others have completed steps without this worker's ranks
            self.align(at_least, SLICE_MS)

    def align(self, later: int | None = None, later_ms: int = 0) -> None:
        """Loads the version of this worker's ranks, or a later one if the others are ahead. `later`: a version to wait
        for instead, at most `later_ms` long."""
        self._rows = None
        if not self._ranks.held:
            self.await_ranks()
            return
        answer = ExchangeResult()
        number = 0
        with self._session.wait_registry.over(lambda: f"version {number} to begin with: {explain(answer)}"):
            while True:
                number = self._ranks.lowest_step if later is None else later
                self._trainer.router.abandon_pull()
                wait_ms = min(later_ms, SLICE_MS) or SLICE_MS
                try:
                    answer = self._trainer.router.pull(PullSpec(number, exactly=True, wait_ms=wait_ms))
                except errors.NotFound as error:
                    if "newest" not in error.facts:
                        raise
                    later = int(error.facts["newest"]) + 1  # others take steps meanwhile: wait for the next one
                    continue
                if not self._must_wait(answer):
                    break
                later_ms = max(later_ms - wait_ms, 0)
                if later is not None and not later_ms:
                    later = None
                    self._ranks.reopen()
                if number:
                    self._bring_verdict(number - 1)
        if self._ranks.held and later is not None:
            self._ranks.reopen()
        self._begin_at(number)
