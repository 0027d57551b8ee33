"""Who counts in a synchronous step with backup workers: what the coordinator has decided (docs/ledger.md, rule B6).

Owns: the question, and the newest answers. Invariant: a verdict is permanent, so one that was heard is not asked for
again. Must not know: servers, which bring no verdict of their own, gradients.
"""

from __future__ import annotations

from collections.abc import Iterable

from shardyard.domain.ids import Rank
from shardyard.domain.pushes import StepVerdict
from shardyard.wire import common_messages, methods, push_messages
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_worker.session.session import Session


class Decisions:
    """Of one job."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._known: tuple[int, tuple[Rank, ...]] | None = None
        self.again_ms = 0
        """How soon the coordinator wants to be asked again; 0: there is no hurry."""

    def ask(self, step: int, ranks: Iterable[Rank]) -> tuple[Rank, ...] | None:
        """The ranks that count in a step, ascending; None while it is not decided, nobody where it is not known any
        more. `ranks`: those whose contributions all servers have, as far as this worker knows."""
        if self._known is None or self._known[0] != step:
            reply = self._ask(step, ranks)
            self.again_ms = reply.again_ms
            if not reply.decided:
                return None
            self._known = step, push_messages.ranks_from_wire(reply.members, f"ranks that count in step {step}")
        return self._known[1]

    def left_ms(self, step: int) -> int:
        """For one who comes late while a step is under way: how long the version behind it is worth waiting for. 0: the
        step is to be computed."""
        return int(self._ask(step - 1, ()).left_ms) if step else 0

    def verdict(self, step: int) -> StepVerdict | None:
        """What servers are to be told about a step, where it was heard of."""
        if self._known is None or self._known[0] != step or not self._known[1]:
            return None
        return StepVerdict(step, members=self._known[1])

    def _ask(self, step: int, ranks: Iterable[Rank]) -> wire.DecideStepReply:
        caller = common_messages.caller_to_wire(self._session.caller)
        return self._session.ask(
            methods.DECIDE_STEP, wire.DecideStepRequest(caller=caller, step=step, ranks=sorted(ranks))
        )
