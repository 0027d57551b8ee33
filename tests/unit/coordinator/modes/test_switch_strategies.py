"""A synchronous job that switches between parameter servers and replicas while it runs: what a restart of the
coordinator brings back, and which tokens come next. Scenarios: transcripts/switching_strategies.txt."""

from __future__ import annotations

import pytest

from shardyard.config.settings import ConsistencySettings, JobSettings
from shardyard.domain import errors
from shardyard.domain.consistency import Consistency, SwitchPoint
from shardyard.domain.ids import Caller
from shardyard.domain.replica_groups import ReplicaGroup, Strategy
from shardyard.wire import lease_messages
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_coordinator.core import effects, events
from shardyard_coordinator.core.effects import SwitchTaken
from shardyard_coordinator.core.job_state import JobState
from shardyard_coordinator.service.rpcs import jobs
from tests.support.switching_yards import ASYNC, FEED, SYNC, SwitchingYard

SERVERS, MIRRORED = Strategy.PARAMETER_SERVER, Strategy.MULTI_WORKER_MIRRORED
JOB = JobSettings(
    partitions=2, workers_expected=2, rank_grace_ms=0, consistency=ConsistencySettings(mode=SYNC, logical_ranks=2)
)


class Yard(SwitchingYard):
    def __init__(self) -> None:
        super().__init__(JOB, "/c", FEED)

    def switch_to(self, strategy: Strategy) -> SwitchTaken:
        answer = self.handle(events.SwitchRequested("", None, None, strategy))
        assert isinstance(answer, SwitchTaken)
        return answer

    @property
    def state(self) -> JobState:
        return self.machine.jobs[-1]

    def ask(self, caller: Caller, left: int = 0, step: int | None = None) -> ReplicaGroup | None:
        answer = self.handle(events.ReplicaGroupAsked(caller, left, step))
        assert isinstance(answer, effects.ReplicaGroupAnswer)
        return answer.group

    def form(self, left: int = 0, step: int | None = None) -> ReplicaGroup:
        for caller in self.workers:
            self.ask(caller, left, step)
        group = self.ask(self.workers[0], left, step)
        assert group is not None
        return group

    def commit(self, step: int) -> None:
        """Ticks until a checkpoint of this step is begun, and writes it. An older one may come before."""
        for _ in range(10):
            self.beat(self.server)
            for caller in self.workers:
                self.switch_point_told(caller, step)
            if self.state.replicas is not None and self.state.replicas.is_to_publish:
                group = self.state.replicas.group.generation
                self.handle(events.ReplicasPublished(self.workers[0], group, step))
            self.tick()
            if self.wanted(effects.TakeCheckpoint):
                self.complete_checkpoint()
            committed = self.state.book.committed
            if committed is not None and committed.step == step:
                return
        raise AssertionError(self.told)

    def restore_all(self) -> None:
        restore = self.latest[effects.RestorePartitions]
        assert isinstance(restore, effects.RestorePartitions)
        self.restored(restore)

    def go_to(self, strategy: Strategy, step: int, halt: int) -> None:
        self.switch_to(strategy)
        self.settle(reached=step, halt=halt)
        self.commit(step)
        self.tick()
        self.restore_all()


MOMENTS = ["asked", "settled", "committed", "switched", "restored"]


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("to", [MIRRORED, SERVERS], ids=["to replicas", "to servers"])
def test_restart_at_any_moment_goes_on_under_one_strategy(moment: str, to: Strategy, short: bool) -> None:
    yard, halt = Yard(), 1
    if to is SERVERS:
        yard.go_to(MIRRORED, 5, halt=1)
        yard.form()
        halt = 2

    def restart() -> None:
        before = yard.state.settings.strategy, yard.state.pending_switch.switch_point
        yard.restart(from_snapshot=short)
        assert (yard.state.settings.strategy, yard.state.pending_switch.switch_point) == before
        assert (yard.state.replicas is not None) is yard.state.settings.strategy.uses_groups

    yard.switch_to(to)
    for each in MOMENTS:
        if each == "settled":
            yard.settle(reached=7, halt=halt)
            assert yard.state.pending_switch.switch_point == SwitchPoint(halt, True, 7)
        elif each == "committed":
            yard.commit(7)
        elif each == "switched":
            yard.tick()
        elif each == "restored":
            if moment == "switched":
                yard.tick()  # another attempt
            yard.restore_all()
        if each == moment:
            restart()
    assert yard.state.settings.strategy is to
    assert yard.state.pending_switch.switch_point is None
    book = yard.state.replicas
    if book is None:
        assert to is SERVERS
        assert [len(yard.beat(caller.incarnation).ranks) for caller in yard.workers] == [1, 1]
    else:
        assert (yard.form().step, book.published) == (None, 7), "replicas begin with what the servers have"


def test_rule_d6_tokens_of_ranks_and_groups_ascend_over_switches() -> None:
    yard, before = Yard(), 0
    for halt, step in ((1, 5), (3, 11)):
        tokens = [lease.token for caller in yard.workers for lease in yard.beat(caller.incarnation).ranks]
        assert min(tokens) > before
        yard.go_to(MIRRORED, step, halt=halt)
        group = yard.form()
        assert group.generation > max(tokens)
        again = yard.form(left=group.generation, step=step)
        assert again.generation > group.generation
        yard.go_to(SERVERS, step + 3, halt=halt + 1)
        before = again.generation


def test_record_of_a_switch_to_what_the_job_has_is_refused() -> None:
    yard = Yard()
    yard.go_to(MIRRORED, 5, halt=1)
    over = next(each for each in yard.persisted if each.kind == "job_switched")
    at = yard.persisted.index(over)
    for odd in ({"strategy": "none"}, {"mode": "async"}, {"left": 5}):
        changed = effects.Persist(over.kind, {**over.body, **odd})
        yard.persisted = [*yard.persisted[:at], changed]
        with pytest.raises(errors.ConfigurationError, match="cannot be taken"):
            yard.restart()


def test_strategy_travels_as_it_is_and_an_unknown_one_is_refused() -> None:
    for given in (Consistency(3, SYNC, None, MIRRORED), Consistency(1, ASYNC)):
        assert lease_messages.consistency_from_wire(lease_messages.consistency_to_wire(given)) == given
    asked = wire.SwitchConsistencyRequest(strategy="multi_worker_mirrored")
    assert jobs.switch_consistency_event(asked) == events.SwitchRequested("", None, None, MIRRORED)
    with pytest.raises(errors.MalformedPayload, match="strategy 'ring'"):
        jobs.switch_consistency_event(wire.SwitchConsistencyRequest(strategy="ring"))
