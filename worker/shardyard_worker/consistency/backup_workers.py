"""Synchronous steps with backup workers: a step leaves out its latest ranks (docs/internals/ledger.md, rule B6).

The coordinator decides which ranks count in a step. Workers ask it, and bring its verdict to the servers. A
contribution that came late is dropped; its samples are computed again when the data set ends
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
from shardyard.domain.push_names import PushName
from shardyard.domain.pushes import Outcome, StepVerdict
from shardyard.wire import common_messages, methods, push_messages
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_worker.consistency.strategy import LostWork
from shardyard_worker.consistency.synchronous import SyncStrategy
from shardyard_worker.exchange.requests import ExchangeResult, PullSpec
from shardyard_worker.session.session import Session
from shardyard_worker.training.table_binding import Upcoming
from shardyard_worker.training.trainer import SLICE_MS, Trainer, explain
from shardyard_worker.training.variables import StepInput

log = logging.getLogger("shardyard.worker")


class StepVerdicts:
    """Asks the coordinator which ranks count."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._known: tuple[int, tuple[Rank, ...]] | None = None
        self.again_ms = 0
        """When the coordinator wants the next question, in milliseconds; 0: no hurry."""

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
        """How long a worker that comes late to a step waits for the next version, in milliseconds. 0: compute the
        step."""
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
    """A contribution that all servers have; its verdict is pending. `is_kept`: the residual is updated as if it
    counted."""

    rank: Rank
    step: int
    answer: ExchangeResult
    sending: StepInput | None
    is_kept: bool


class BackupWorkersStrategy(SyncStrategy):
    """Mode `sync` with job.consistency.backup_workers."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self._verdicts = StepVerdicts(self._session)
        self._pending: list[_Contribution] = []

    # ---- a step

    def _push(
        self,
        name: PushName,
        sending: StepInput | None,
        upcoming: Upcoming | None,  # noqa: ARG002 - no version is pulled with it
        *,
        last: bool,  # noqa: ARG002
    ) -> ExchangeResult:
        return self._trainer.router.push(self._ship(name, sending, None))

    def _recorded(self, rank: Rank, answer: ExchangeResult, sending: StepInput | None, *, others: bool) -> None:
        """All servers have recorded the contribution, or dropped it as late; then raises LostWork."""
        assert self._version is not None
        given = _Contribution(rank, self._version, answer, sending, is_kept=others)
        if any(result.outcome is Outcome.DROPPED for result in answer.results):
            self._leave_out(given)
            self._rejoin()
            raise LostWork
        self.ranks.held[rank].next += 1
        if given.is_kept:
            self._trainer.pushes.counted(answer)
        self._pending.append(given)
        self._await_step()

    def _forget_contributions(self) -> None:
        self._pending.clear()

    def _explain(self, answer: ExchangeResult) -> str:
        return explain(answer) if answer.missing else "the coordinator says who counts"

    def _bring_verdict(self, step: int) -> None:
        """For ranks that do not count, the step is then over."""
        held = self.ranks.held
        members = self._verdicts.members(step, [rank for rank, position in held.items() if position.next > step])
        self._trainer.router.set_members(self._verdicts.verdict(step))
        for rank, position in held.items():
            if members and rank not in members and position.next == step:
                log.debug("step %d is over for logical rank %d, before it was computed", step, rank)
                position.next = step + 1

    @property
    def _slice_ms(self) -> int:
        return min(self._verdicts.again_ms or SLICE_MS, SLICE_MS)

    def _judge(self) -> None:
        pending, self._pending = self._pending, []
        for each in pending:
            members = self._verdicts.members(each.step, ())
            if members and each.rank not in members:
                self._leave_out(each)
                continue
            if not each.is_kept:
                self._trainer.pushes.counted(each.answer)
            self._note(each.answer, each.sending)

    def _leave_out(self, given: _Contribution) -> None:
        log.info(
            "logical rank %d came late with step %d, taken without it; its samples are computed again at the end",
            given.rank,
            given.step,
        )
        if not given.is_kept:
            self._trainer.pushes.not_counted()

    # ---- behind the others

    def _on_version_passed(self, error: errors.NotFound) -> None:  # noqa: ARG002 - others have taken more steps
        self._rejoin()

    def _rejoin(self) -> None:
        """Other workers have continued without this one: asks the servers for the next steps of its ranks."""
        self._judge()
        self.ranks.reopen()
        self._version = None
        self._align_at(self._version_to_wait_for() if self.ranks.held else None)

    def _version_to_wait_for(self) -> tuple[int, int] | None:
        """If the others are in the middle of a step: the version after it, and how long to wait for it, in
        milliseconds. None: compute the step."""
        under_way = self.ranks.lowest_step
        left_ms = self._verdicts.left_ms(under_way)
        return (under_way + 1, left_ms) if left_ms else None

    def _align(self) -> None:
        self._align_at(None)

    def _align_at(self, aim: tuple[int, int] | None) -> None:
        """Takes the version of this worker's ranks, or a later one if the others are ahead. `aim`: a version, and how
        many milliseconds to wait for it before that of the ranks is taken."""
        self._rows = None
        if not self.ranks.held:
            self._await_ranks()
            return
        version, left_ms = aim or (None, 0)
        answer = ExchangeResult()
        number = 0
        with self._session.wait_registry.over(lambda: f"version {number} to begin with: {explain(answer)}"):
            while True:
                number = self.ranks.lowest_step if version is None else version
                self._trainer.router.abandon_pull()
                wait_ms = min(left_ms, SLICE_MS) or SLICE_MS
                try:
                    answer = self._trainer.router.pull(PullSpec(number, exactly=True, wait_ms=wait_ms))
                except errors.NotFound as error:
                    if "newest" not in error.facts:
                        raise
                    version = int(error.facts["newest"]) + 1  # others take steps meanwhile: wait for the next one
                    continue
                if not answer.missing:
                    break
                self._session.check()
                self._refresh_ranks()
                if not self.ranks.held:
                    break
                left_ms = max(left_ms - wait_ms, 0)
                if version is not None and not left_ms:
                    version = None
                    self.ranks.reopen()
                if number:
                    self._bring_verdict(number - 1)
        if self.ranks.held and version is not None:
            self.ranks.reopen()
        self._begin_at(number)
