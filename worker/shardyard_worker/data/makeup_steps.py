"""The steps of a synchronous data set: those that are planned, and those that make up for what came late.

Owns: what the coordinator has said of the latter. With backup workers a contribution that came late is dropped; its
samples are computed again behind the planned steps, as whichever logical rank's the coordinator says, with the seed
that they had (docs/internals/ledger.md, rules B5, B6). Invariant: nothing is asked before the planned steps are
through. Must not know: samples, servers.
"""

from __future__ import annotations

from typing import NamedTuple

from shardyard.domain.errors import MalformedPayload
from shardyard.domain.ids import Rank
from shardyard.wire import common_messages, methods, push_messages
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_worker.session.session import Session


class MissedBatch(NamedTuple):
    """What a logical rank has at a planned step."""

    rank: Rank
    step: int


class MakeupSteps:
    """Of one feed, whose planned steps end before `planned_end`. `makes_up`: the job has backup workers."""

    def __init__(self, session: Session, feed: int, planned_end: int, *, makes_up: bool) -> None:
        self._session = session
        self._feed = feed
        self._planned_end = planned_end
        self._makes_up = makes_up
        self._step = planned_end
        self._batches: dict[Rank, MissedBatch] | None = None
        self._end: int | None = None if makes_up else planned_end

    @property
    def end(self) -> int:
        """The step after the last one that is known."""
        return max(self._planned_end, self._step) if self._end is None else self._end

    def has(self, step: int) -> bool:
        """Of a step at which the job stands. Asks the coordinator, once for each step behind the planned ones."""
        if step < self._planned_end:
            return True
        if self._end is None:
            self._ask(step)
        return self._end is None or step < self._end

    def batch(self, rank: Rank, step: int) -> MissedBatch | None:
        """Of a step that the feed `has`. None: the rank has nothing to make up for."""
        if step < self._planned_end:
            return MissedBatch(rank, step)
        if self._batches is None or self._step != step:
            self._ask(step)
        return None if self._batches is None else self._batches.get(rank)

    def find_end(self) -> None:
        """All steps are done: asks where the feed has ended, if that is not known."""
        if self._end is None:
            self._ask(self._planned_end)

    def _ask(self, step: int) -> None:
        if self._step == step and self._batches is not None:
            return
        caller = common_messages.caller_to_wire(self._session.caller)
        request = wire.ReadMakeUpRequest(caller=caller, feed=self._feed, step=step)
        reply = self._session.ask(methods.READ_MAKE_UP, request)
        push_messages.ranks_from_wire([each.rank for each in reply.batches], f"ranks with samples at step {step}")
        for each in reply.batches:
            if each.dropped_step >= self._planned_end or each.dropped_rank >= self._session.logical_ranks:
                raise MalformedPayload(
                    f"logical rank {each.rank} of step {step} makes up for rank {each.dropped_rank} of step "
                    f"{each.dropped_step}; the planned steps end before {self._planned_end}"
                )
        self._end = reply.end if reply.HasField("end") else None
        self._step = step
        self._batches = {
            Rank(each.rank): MissedBatch(Rank(each.dropped_rank), each.dropped_step) for each in reply.batches
        }
