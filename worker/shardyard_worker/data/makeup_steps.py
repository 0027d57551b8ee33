"""The steps of a synchronous data set: the planned ones, and those that repeat what came late.

Owns: the coordinator's answers about the latter. With backup workers a late contribution is dropped. Its samples are
computed again after the planned steps, with the same seed, as the logical rank that the coordinator says
(docs/internals/ledger.md, rules B5, B6). Invariant: the coordinator is asked only after the planned steps. Must not
know: samples, servers.
"""

from __future__ import annotations

from typing import NamedTuple

from shardyard.domain.errors import MalformedPayload
from shardyard.domain.ids import Rank
from shardyard.wire import common_messages, methods, push_messages
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_worker.session.session import Session


class MissedBatch(NamedTuple):
    """The planned rank and step whose batch is computed."""

    rank: Rank
    step: int


class MakeupSteps:
    """The steps of one feed, whose planned steps end before `planned_end`. `makes_up`: the job has backup workers."""

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
        """The step after the last known one."""
        return max(self._planned_end, self._step) if self._end is None else self._end

    def has(self, step: int) -> bool:
        """Whether the feed has the job's current step. Asks the coordinator once for each step after the planned
        ones."""
        if step < self._planned_end:
            return True
        if self._end is None:
            self._ask(step)
        return self._end is None or step < self._end

    def batch(self, rank: Rank, step: int) -> MissedBatch | None:
        """The batch of a step that the feed `has`. None: the rank has nothing to repeat."""
        if step < self._planned_end:
            return MissedBatch(rank, step)
        if self._batches is None or self._step != step:
            self._ask(step)
        return None if self._batches is None else self._batches.get(rank)

    def find_end(self) -> None:
        """Once all steps are done, asks where the feed has ended, if that is not known."""
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
