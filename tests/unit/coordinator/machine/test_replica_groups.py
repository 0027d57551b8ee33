"""Replica groups of a mirrored job in the coordinator's machine (docs/internals/ledger.md, rules D1 to D4, D6 and
D8)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardyard.config.settings import CheckpointSettings, ConsistencySettings, JobSettings
from shardyard.domain import errors
from shardyard.domain.consistency import ConsistencyMode
from shardyard.domain.ids import Caller, MemberRole, Token
from shardyard.domain.optimizers import OptimizerSpec, make_group
from shardyard.domain.replica_groups import Between, ReplicaGroup, Strategy
from shardyard.domain.tables.table_settings import TableSettings
from shardyard.domain.variables import DType, VariableSpec
from shardyard_coordinator.core import effects, events
from shardyard_coordinator.core.job_state import JobState
from shardyard_coordinator.members.progress import Report
from shardyard_coordinator.work.feeds import FeedSpec
from shardyard_coordinator.work.replica_book import CHECKPOINT_BEGINS_MS
from tests.support.machine_yards import MachineYard

LEASE_MS = 1_000
GRACE_MS = 300
ROWS = TableSettings("rows", 4, "adam", seed=3)


class Yard(MachineYard):
    """A machine with a mirrored job of one server and two workers."""

    def __init__(
        self,
        *,
        checkpoints: str = "/checkpoints",
        tables: tuple[TableSettings, ...] = (),
        strategy: Strategy = Strategy.MULTI_WORKER_MIRRORED,
        ranks: int = 2,
        workers: int = 2,
        between: Between = Between.ALL_REDUCE,
    ) -> None:
        super().__init__(lease_ms=LEASE_MS)
        self.server = self.register(MemberRole.SERVER, "s:1")
        self.settings = JobSettings(
            strategy=strategy,
            between=between,
            workers_expected=workers,
            consistency=ConsistencySettings(mode=ConsistencyMode.SYNC, logical_ranks=ranks),
            rank_grace_ms=GRACE_MS,
            checkpoint=CheckpointSettings(url=checkpoints, every_s=0, every_steps=10),
        )
        self.first, self.second = self.hire(), self.hire()
        spec = OptimizerSpec("sgd", (make_group("sgd", {"lr": 1.0}),))
        variables = tuple(VariableSpec(name, DType.FLOAT64, (8,)) for name in "vw")
        self.registered = events.VariablesRegistered(self.first, variables, spec, tables)
        pushes_stages = between is Between.PARAMETER_SERVER and strategy is Strategy.PIPELINE
        self.open_job(self.first, variables, spec, tables, (0, 1) if pushes_stages else ())

    def hire(self, host: str = "box") -> Caller:
        return self.join_as(self.register(MemberRole.WORKER, host=host), self.settings)

    def ask(self, caller: Caller, left: int = 0, step: int | None = None) -> ReplicaGroup | None:
        answer = self.handle(events.ReplicaGroupAsked(caller, left, step))
        assert isinstance(answer, effects.ReplicaGroupAnswer)
        assert (answer.group is None) is bool(answer.waiting_for)
        return answer.group

    def form(self, *callers: Caller, left: int = 0, step: int | None = None) -> ReplicaGroup:
        for caller in callers:
            self.ask(caller, left, step)
        found = {self.ask(caller, left, step) for caller in callers}
        assert len(found) == 1
        group = found.pop()
        assert group is not None
        return group

    def pass_time(self, ms: int, *callers: Caller) -> None:
        """These workers, and the server, are alive meanwhile."""
        for _ in range(ms // 100):
            self.now_ms += 100
            for caller in callers:
                self.beat(caller.incarnation)
            self.beat(self.server)
            self.handle(events.Ticked())

    def complete_checkpoint_of(self, step: int) -> None:
        """The checkpoint under way is written."""
        taking = self.latest[effects.TakeCheckpoint]
        assert isinstance(taking, effects.TakeCheckpoint)
        number = taking.draft.number
        self.handle(events.CheckpointTaken(taking.spec.job, number, number, step))

    @property
    def state(self) -> JobState:
        return self.machine.jobs[-1]


def test_first_group_has_the_workers_that_are_expected() -> None:
    yard = Yard()
    assert yard.ask(yard.first) is None
    assert yard.ask(yard.second) == ReplicaGroup(1, (yard.first.incarnation, yard.second.incarnation))
    assert yard.ask(yard.first) == yard.ask(yard.second)


def test_first_group_does_not_wait_for_ever() -> None:
    yard = Yard()
    assert yard.ask(yard.first) is None
    yard.now_ms += GRACE_MS
    assert yard.ask(yard.first) == ReplicaGroup(1, (yard.first.incarnation,))


def test_rule_d1_next_group_waits_for_all_that_live() -> None:
    yard = Yard()
    yard.form(yard.first, yard.second)
    assert yard.ask(yard.first, left=1, step=7) is None
    told = yard.beat(yard.second.incarnation)
    assert (told.replica_generation, told.lost_replica_generation) == (2, 1), "the first has left it"
    assert yard.ask(yard.second, left=1, step=8) == ReplicaGroup(
        2, (yard.first.incarnation, yard.second.incarnation), step=8, donor=1
    )


def test_rule_d1_one_that_is_silent_is_waited_for_until_its_lease_is_over() -> None:
    yard = Yard()
    yard.form(yard.first, yard.second)
    assert yard.ask(yard.first, left=1, step=7) is None
    yard.pass_time(LEASE_MS - 100, yard.first)
    assert yard.ask(yard.first, left=1, step=7) is None
    yard.pass_time(200, yard.first)
    assert yard.ask(yard.first, left=1, step=7) == ReplicaGroup(2, (yard.first.incarnation,), step=7, donor=0)
    with pytest.raises(errors.StaleIncarnation):
        yard.ask(yard.second, left=1, step=9)


def test_rule_d2_newcomer_takes_the_replica_of_another() -> None:
    yard = Yard()
    yard.form(yard.first, yard.second)
    yard.kill(yard.second.incarnation)
    assert yard.form(yard.first, left=1, step=3).members == (yard.first.incarnation,)
    third = yard.hire()
    assert yard.ask(third) is None
    told = yard.beat(yard.first.incarnation)
    assert (told.replica_generation, told.lost_replica_generation) == (3, 0), "nobody is missing; one step may end"
    assert yard.form(yard.first, left=2, step=4).members == (yard.first.incarnation, third.incarnation)
    assert yard.ask(third) == ReplicaGroup(3, (yard.first.incarnation, third.incarnation), step=4, donor=0)


def test_members_on_one_machine_are_neighbours_also_after_one_has_come() -> None:
    yard = Yard(ranks=4)
    there = yard.hire(host="other")
    group = yard.form(yard.first, yard.second)
    yard.ask(there)
    group = yard.form(yard.first, yard.second, left=group.generation, step=3)
    assert group.members == (yard.first.incarnation, yard.second.incarnation, there.incarnation)
    here = yard.hire()
    yard.ask(here)
    group = yard.form(yard.first, there, yard.second, left=group.generation, step=4)
    assert group.members == (yard.first.incarnation, yard.second.incarnation, here.incarnation, there.incarnation)


def test_more_workers_than_ranks_wait_for_a_place() -> None:
    yard = Yard()
    yard.form(yard.first, yard.second)
    third = yard.hire()
    assert yard.ask(third) is None
    assert yard.beat(yard.first.incarnation).replica_generation == 1, "there is no room"
    yard.kill(yard.first.incarnation)
    assert yard.form(yard.second, left=1, step=5).members == (yard.second.incarnation, third.incarnation)


def test_rule_d3_job_without_a_replica_goes_back_to_its_checkpoint() -> None:
    yard = Yard()
    yard.pass_time(200, yard.first, yard.second)
    yard.complete_checkpoint_of(0)
    yard.form(yard.first, yard.second)
    yard.kill(yard.first.incarnation)
    yard.kill(yard.second.incarnation)
    third, fourth = yard.hire(), yard.hire()
    assert yard.ask(third) is None
    yard.pass_time(200, third, fourth)
    restoring = yard.latest[effects.RestorePartitions]
    assert isinstance(restoring, effects.RestorePartitions)
    assert yard.ask(third) is None
    assert yard.ask(fourth) is None, "the servers have nothing yet"
    yard.handle(events.PartitionsRestored(third.job, restoring.map.generation))
    assert yard.form(third, fourth) == ReplicaGroup(2, (third.incarnation, fourth.incarnation))


def test_rule_d3_members_that_are_done_have_published_their_state() -> None:
    yard = Yard(checkpoints="never")
    yard.form(yard.first, yard.second)
    spare = yard.hire()
    assert yard.ask(spare) is None
    for member in (yard.first, yard.second):
        yard.handle(events.ReplicasPublished(member, 1, 5))
        yard.handle(events.MemberLeft(member.incarnation, ""))
    yard.restart(from_snapshot=False)
    assert yard.ask(spare) is None
    yard.pass_time(GRACE_MS, spare)
    assert yard.ask(spare) == ReplicaGroup(2, (spare.incarnation,)), "it begins with what the servers have"


@pytest.mark.parametrize("strategy", [Strategy.PIPELINE, Strategy.TENSOR, Strategy.SHARDED])
def test_rule_d3_worker_in_reserve_gets_the_last_state_alone(strategy: Strategy) -> None:
    """When the members have taken all steps. Alone it could take none."""
    yard = Yard(checkpoints="never", strategy=strategy, ranks=2 if strategy is Strategy.SHARDED else 1)
    spare = yard.hire()
    yard.handle(events.FeedOpened(yard.first, 0, FeedSpec(5, "f", 1, 1, shuffle=False, drop_last=False)))
    yard.form(yard.first, yard.second)
    assert yard.ask(spare) is None
    yard.handle(events.ReplicasPublished(yard.first, 1, 5))
    returned = events.LeaseReturned(yard.first, 0, None, Token(0))
    yard.handle(returned)
    generation = yard.state.deployment.generation
    assert yard.handle(events.LedgerRead(returned, 5, generation)) == effects.LeaseClosed(done=True)
    yard.handle(events.MemberLeft(yard.first.incarnation, ""))
    assert yard.ask(spare) is None, "a member may still publish"
    yard.handle(events.MemberLeft(yard.second.incarnation, ""))
    yard.restart(from_snapshot=False)
    assert yard.ask(spare) is None
    yard.pass_time(GRACE_MS, spare)
    assert yard.ask(spare) == ReplicaGroup(2, (spare.incarnation,))


def test_rule_d6_worker_in_reserve_gets_the_last_checkpoint_alone() -> None:
    """The servers may have rows of the last step without its variables, until they have gone back."""
    yard = Yard(tables=(ROWS,), strategy=Strategy.TENSOR, ranks=1)
    yard.pass_time(200, yard.first, yard.second)
    yard.complete_checkpoint_of(0)
    spare = yard.hire()
    yard.handle(events.FeedOpened(yard.first, 0, FeedSpec(5, "f", 1, 1, shuffle=False, drop_last=False)))
    yard.form(yard.first, yard.second)
    assert yard.ask(spare) is None
    returned = events.LeaseReturned(yard.first, 0, None, Token(0))
    yard.handle(returned)
    yard.handle(events.LedgerRead(returned, 5, yard.state.deployment.generation))
    yard.pass_time(100, yard.first, yard.second, spare)
    assert publish(yard, ReplicaGroup(1, ()), 5), "a checkpoint must have the end"
    yard.pass_time(100, yard.first, yard.second, spare)
    yard.complete_checkpoint_of(5)
    assert yard.handle(returned) == effects.LeaseClosed(done=True)
    for member in (yard.first, yard.second):
        yard.handle(events.MemberLeft(member.incarnation, ""))
    assert yard.ask(spare) is None
    yard.pass_time(100, spare)
    restoring = yard.latest[effects.RestorePartitions]
    assert isinstance(restoring, effects.RestorePartitions)
    yard.handle(events.PartitionsRestored(yard.first.job, restoring.map.generation))
    yard.pass_time(GRACE_MS, spare)
    assert yard.ask(spare) == ReplicaGroup(2, (spare.incarnation,), void_until=1)


def test_rule_d3_job_without_a_checkpoint_ends() -> None:
    yard = Yard(checkpoints="never")
    yard.form(yard.first, yard.second)
    yard.kill(yard.first.incarnation)
    yard.kill(yard.second.incarnation)
    third = yard.hire()
    yard.ask(third)
    with pytest.raises(errors.WorkerFailed, match="lost all its replicas, and has no checkpoint"):
        yard.ask(third)


def test_rule_d4_checkpoint_waits_until_the_replicas_have_published() -> None:
    yard = Yard()
    yard.pass_time(200, yard.first, yard.second)
    yard.complete_checkpoint_of(0)
    group = yard.form(yard.first, yard.second)
    yard.latest.clear()
    yard.beat(yard.first.incarnation, Report(step=12))
    yard.pass_time(200)
    assert effects.TakeCheckpoint not in yard.latest
    assert yard.beat(yard.second.incarnation).publish
    with pytest.raises(errors.StaleGeneration):
        yard.handle(events.ReplicasPublished(yard.first, group.generation + 1, 13))
    yard.handle(events.ReplicasPublished(yard.first, group.generation, 13))
    assert not yard.beat(yard.second.incarnation).publish
    yard.pass_time(200, yard.first, yard.second)
    taken = yard.latest[effects.TakeCheckpoint]
    assert isinstance(taken, effects.TakeCheckpoint)
    assert taken.draft.step == 13


def test_rule_d4_checkpoint_is_not_taken_again_and_again_while_there_is_no_worker() -> None:
    """Workers had taken more steps than a checkpoint is to have, and nobody has them any more."""
    yard = Yard()
    yard.pass_time(200, yard.first, yard.second)
    yard.complete_checkpoint_of(0)
    yard.form(yard.first, yard.second)
    yard.beat(yard.first.incarnation, Report(step=12))
    yard.kill(yard.first.incarnation)
    yard.kill(yard.second.incarnation)
    yard.latest.clear()
    yard.pass_time(500)
    assert effects.TakeCheckpoint not in yard.latest, "the newest checkpoint has all that there is"


def publish(yard: Yard, group: ReplicaGroup, step: int) -> bool:
    """Returns whether members wait for a checkpoint."""
    answer = yard.handle(events.ReplicasPublished(yard.first, group.generation, step))
    assert isinstance(answer, effects.PublishedAnswer)
    return answer.waits


def test_rule_d6_members_wait_until_a_checkpoint_has_what_they_have_published() -> None:
    """With tables: rows change with the next step."""
    yard = Yard(tables=(ROWS,))
    yard.pass_time(200, yard.first, yard.second)
    yard.complete_checkpoint_of(0)
    group = yard.form(yard.first, yard.second)
    assert not publish(yard, group, 7), "no checkpoint wants it"
    yard.beat(yard.first.incarnation, Report(step=12))
    yard.latest.clear()
    yard.pass_time(200, yard.first, yard.second)
    assert effects.TakeCheckpoint not in yard.latest, "the members have gone on since step 7"
    assert publish(yard, group, 13), "it begins in a moment"
    yard.pass_time(100, yard.first, yard.second)
    taken = yard.latest[effects.TakeCheckpoint]
    assert isinstance(taken, effects.TakeCheckpoint)
    assert taken.draft.step == 13
    assert publish(yard, group, 13), "it is being taken"
    yard.complete_checkpoint_of(13)
    assert not publish(yard, group, 13)


def test_rule_d6_members_do_not_wait_for_a_checkpoint_that_fails_or_does_not_begin() -> None:
    yard = Yard(tables=(ROWS,))
    yard.pass_time(200, yard.first, yard.second)
    yard.complete_checkpoint_of(0)
    group = yard.form(yard.first, yard.second)
    yard.beat(yard.first.incarnation, Report(step=12))
    yard.pass_time(100, yard.first, yard.second)
    assert publish(yard, group, 13)
    yard.now_ms += CHECKPOINT_BEGINS_MS
    assert not publish(yard, group, 13)
    yard.pass_time(100, yard.first, yard.second)
    assert publish(yard, group, 14), "it is wanted again"
    yard.pass_time(100, yard.first, yard.second)
    taken = yard.latest[effects.TakeCheckpoint]
    assert isinstance(taken, effects.TakeCheckpoint)
    yard.handle(events.CheckpointFailed(taken.spec.job, taken.draft.number, errors.NotReady("no")))
    assert not publish(yard, group, 14)


@pytest.mark.parametrize("restarts", ["", "from records", "from a snapshot"])
def test_rule_d6_no_replica_counts_after_servers_with_rows_have_gone_back(restarts: str) -> None:
    yard = Yard(tables=(ROWS,))
    yard.pass_time(200, yard.first, yard.second)
    yard.complete_checkpoint_of(0)
    yard.form(yard.first, yard.second)
    assert yard.ask(yard.first, left=1, step=9) is None
    lost, yard.server = yard.server, yard.register(MemberRole.SERVER, "s:2")
    yard.handle(events.MemberLeft(lost, ""))
    yard.pass_time(200, yard.first, yard.second)
    restoring = yard.latest[effects.RestorePartitions]
    assert isinstance(restoring, effects.RestorePartitions)
    yard.handle(events.PartitionsRestored(yard.first.job, restoring.map.generation))
    if restarts:
        yard.restart(from_snapshot=restarts == "from a snapshot")
        assert yard.ask(yard.first, left=1, step=9) is None
    assert yard.beat(yard.second.incarnation).lost_replica_generation == 1, "no member goes on"
    with pytest.raises(errors.StaleGeneration):
        publish(yard, ReplicaGroup(1, ()), 10)
    both = (yard.first.incarnation, yard.second.incarnation)
    group = ReplicaGroup(2, both, void_until=1)
    assert yard.ask(yard.second, left=1, step=10) == group, "from the servers' state"
    assert yard.ask(yard.second, left=1, step=10) == group, "whose answer was lost"


def test_rule_d7_members_keep_their_stages_in_the_next_group() -> None:
    """Of two pipelines on two machines: that which has lost a worker ends, and one that comes gets its stage."""
    yard = Yard(checkpoints="never", strategy=Strategy.TENSOR, workers=4)
    a, b = yard.first, yard.second
    c, d = yard.hire(host="other"), yard.hire(host="other")
    for each in (c, a, d):
        assert yard.ask(each) is None
    places = (a.incarnation, b.incarnation, c.incarnation, d.incarnation)
    assert yard.ask(b) == ReplicaGroup(1, places), "neighbours are on one machine"
    yard.kill(a.incarnation)
    assert yard.ask(b, left=1, step=3) is None
    assert yard.ask(d, left=1, step=4) is None
    assert yard.ask(c, left=1, step=3) == ReplicaGroup(2, (c.incarnation, d.incarnation), step=4, donor=1), (
        "the newest step goes on"
    )
    assert yard.ask(b, left=1, step=3) is None, "it waits in reserve"
    assert yard.beat(c.incarnation).replica_generation == 2, "one that waits is not enough for another pipeline"
    newcomer = yard.hire(host="other")
    assert yard.ask(newcomer) is None
    assert yard.beat(c.incarnation).replica_generation == 3
    ready = [yard.ask(each, left=left, step=step) for each, left, step in ((b, 1, 30), (c, 2, 9), (d, 2, 9))]
    places = (c.incarnation, d.incarnation, b.incarnation, newcomer.incarnation)
    assert ready[-1] == ReplicaGroup(3, places, step=9, donor=0), "what worker b had does not count"


def test_rule_d7_nobody_goes_on_without_a_stage() -> None:
    yard = Yard(checkpoints="never", strategy=Strategy.TENSOR, workers=4)
    c, d = yard.hire(), yard.hire()
    yard.form(yard.first, yard.second, c, d)
    for each in (yard.first, c):
        yard.kill(each.incarnation)
    assert yard.ask(yard.second, left=1, step=3) is None
    with pytest.raises(errors.WorkerFailed, match="lost all its replicas, and has no checkpoint"):
        yard.form(d, left=1, step=3)


def sharded() -> Yard:
    return Yard(checkpoints="never", strategy=Strategy.SHARDED, ranks=3)


def test_rule_d8_same_members_go_on_with_their_shards() -> None:
    yard = sharded()
    yard.form(yard.first, yard.second)
    assert yard.ask(yard.first, left=1, step=3) is None
    both = yard.first.incarnation, yard.second.incarnation
    assert yard.ask(yard.second, left=1, step=4) == ReplicaGroup(2, both, step=4, donor=1)


def test_rule_d8_newcomer_waits_until_the_members_have_published() -> None:
    yard = sharded()
    yard.form(yard.first, yard.second)
    third = yard.hire()
    assert yard.ask(third) is None
    assert yard.beat(yard.first.incarnation).replica_generation == 2, "there is room"
    both = yard.first.incarnation, yard.second.incarnation
    assert yard.form(yard.first, yard.second, left=1, step=3).members == both, "step 3 was not published"
    yard.handle(events.ReplicasPublished(yard.first, 2, 4))
    three = (*both, third.incarnation)
    formed = yard.form(yard.first, yard.second, third, left=2, step=4)
    assert formed == ReplicaGroup(3, three, step=4), "all load it, whatever rows of step 4 the servers have"


@pytest.mark.parametrize("published", [3, 2])
def test_rule_d8_others_go_on_without_a_member_if_the_servers_have_their_step(published: int) -> None:
    yard = sharded()
    yard.form(yard.first, yard.second)
    yard.handle(events.ReplicasPublished(yard.first, 1, published))
    yard.kill(yard.second.incarnation)
    if published == 3:
        assert yard.form(yard.first, left=1, step=3) == ReplicaGroup(2, (yard.first.incarnation,), step=3)
        return
    with pytest.raises(errors.WorkerFailed, match="lost all its replicas, and has no checkpoint"):
        yard.form(yard.first, left=1, step=3)


@pytest.mark.parametrize("from_snapshot", [False, True])
def test_groups_outlive_the_coordinator(from_snapshot: bool) -> None:
    yard = Yard()
    group = yard.form(yard.first, yard.second)
    yard.handle(events.ReplicasPublished(yard.first, 1, 4))
    assert yard.state.replicas is not None
    before = yard.state.replicas.entries()
    yard.restart(from_snapshot=from_snapshot)
    assert yard.state.replicas is not None
    assert yard.state.replicas.entries() == before
    assert (yard.state.replicas.group, yard.state.replicas.published) == (group, 4)
    assert yard.ask(yard.first, left=1, step=5) is None, "the second may still train"
    assert yard.ask(yard.second, left=1, step=5) is not None


def test_groups_are_for_mirrored_jobs() -> None:
    yard = Yard()
    with pytest.raises(errors.InvalidRequest, match="leaves replica group 3; the newest is 0"):
        yard.ask(yard.first, left=3)
    plain = yard.join_as(yard.register(MemberRole.WORKER), JobSettings(name="plain"))
    with pytest.raises(errors.InvalidRequest, match=r"has no replica groups: its job\.strategy"):
        yard.handle(events.ReplicaGroupAsked(plain, 0, None))


def yard_of_pushes() -> Yard:
    """A pipeline of two stages whose variables are on the servers."""
    return Yard(strategy=Strategy.PIPELINE, ranks=1, between=Between.PARAMETER_SERVER)


def test_rule_d10_lost_stages_send_nobody_back() -> None:
    yard = yard_of_pushes()
    assert yard.form(yard.first, yard.second) == ReplicaGroup(1, (yard.first.incarnation, yard.second.incarnation))
    yard.kill(yard.second.incarnation)
    third = yard.hire()
    yard.ask(third)
    assert yard.form(yard.first, left=1).members == (yard.first.incarnation, third.incarnation)
    yard.kill(yard.first.incarnation)
    yard.kill(third.incarnation)
    others = yard.hire(), yard.hire()
    assert yard.form(*others) == ReplicaGroup(3, tuple(each.incarnation for each in others))
    assert effects.RestorePartitions not in yard.latest


def test_worker_in_reserve_is_told_that_it_is() -> None:
    yard = yard_of_pushes()
    yard.form(yard.first, yard.second)
    third = yard.hire()
    answer = yard.handle(events.ReplicaGroupAsked(third, 0, None))
    assert isinstance(answer, effects.ReplicaGroupAnswer)
    assert answer.waiting_for == "a place in a replica, in reserve: 2 other workers have them all"
    yard.kill(yard.second.incarnation)
    answer = yard.handle(events.ReplicaGroupAsked(third, 0, None))
    assert isinstance(answer, effects.ReplicaGroupAnswer)
    assert answer.waiting_for == f"the workers {yard.first.incarnation} of the group before to end their step"


def test_rule_d10_members_keep_their_stages() -> None:
    yard = yard_of_pushes()
    yard.form(yard.first, yard.second)
    yard.kill(yard.first.incarnation)
    third = yard.hire()
    yard.ask(third)
    assert yard.form(yard.second, left=1).members == (third.incarnation, yard.second.incarnation)


def test_rule_d10_checkpoint_waits_for_no_published_state() -> None:
    yard = yard_of_pushes()
    yard.pass_time(200, yard.first, yard.second)
    yard.complete_checkpoint_of(0)
    yard.form(yard.first, yard.second)
    yard.beat(yard.first.incarnation, Report(step=12))
    yard.handle(events.Ticked())
    assert yard.state.book.draft is not None
    assert not yard.beat(yard.first.incarnation).publish
    with pytest.raises(errors.InvalidRequest, match="publish nothing"):
        yard.handle(events.ReplicasPublished(yard.first, 1, 12))


@pytest.mark.parametrize("places", [(), (0,), (0, 2)])
def test_variables_have_places_in_a_pipeline_that_pushes(places: tuple[int, ...]) -> None:
    yard = yard_of_pushes()
    with pytest.raises(errors.InvalidRequest, match="of 2 variables"):
        yard.handle(replace(yard.registered, places=places))
    with pytest.raises(errors.InvalidRequest, match="of 2 variables"):
        Yard().handle(replace(Yard().registered, places=(0, 1)))


def test_layout_of_shares_has_no_places() -> None:
    """Each worker of a sharded replica pushes a share of every variable, and partitions have shares of one worker."""
    yard = Yard(strategy=Strategy.TENSOR, ranks=1, between=Between.PARAMETER_SERVER)
    layout = yard.state.deployment.layout
    assert layout is not None
    found = [{(block.variable, block.offset // 4) for block in part.blocks} for part in layout.partitions]
    assert found == [{(0, 0), (1, 0)}, {(0, 1), (1, 1)}]
