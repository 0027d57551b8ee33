"""A running job that is switched: what tests/unit/coordinator/transcripts/switching.txt does not show."""

from __future__ import annotations

import pytest

from shardyard.config.settings import ConsistencySettings, JobSettings
from shardyard.domain import errors, limits
from shardyard.domain.consistency import Consistency, ConsistencyMode
from shardyard.domain.ids import Caller, Generation, MemberRole
from shardyard.domain.push_names import DataLease
from shardyard.wire import lease_messages
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_coordinator.core import effects, events
from shardyard_coordinator.members.progress import Report
from shardyard_coordinator.modes.mode_setting import SWITCHES_MAX, ModeSetting, settings_of, switched
from shardyard_coordinator.service.rpcs import jobs
from shardyard_coordinator.work.feeds import FeedSpec, LeaseWait
from tests.support.machine_yards import MachineYard
from tests.support.switching_yards import ASYNC, BOUNDED, SGD, VARIABLES, SwitchingYard

JOB = JobSettings(partitions=2, workers_expected=2)
FEED = FeedSpec(samples=100, fingerprint="f", batch_size=10, epochs=1, shuffle=True, drop_last=False)


class Yard(SwitchingYard):
    def __init__(self, settings: JobSettings = JOB, checkpoints: str | None = None) -> None:
        super().__init__(settings, checkpoints)

    @property
    def order(self) -> effects.PaceServers:
        (order,) = self.wanted(effects.PaceServers)
        assert isinstance(order, effects.PaceServers)
        return order

    def tell_servers(self) -> None:
        order = self.order
        self.handle(events.ServersPaced(order.job, order.map.generation, order.consistency.number))

    def say(self, caller: Caller, switches: int = 0) -> Consistency | None:
        return self.beat(caller.incarnation, Report(switches=switches)).consistency


def test_job_that_has_no_servers_yet_tells_them_once_they_have_its_partitions() -> None:
    yard = MachineYard()
    yard.register(MemberRole.SERVER, "s:0")
    caller = yard.join_as(yard.register(MemberRole.WORKER), JOB)
    yard.handle(events.SwitchRequested("", BOUNDED, 2))
    assert not yard.wanted(effects.PaceServers)
    yard.handle(events.VariablesRegistered(caller, VARIABLES, SGD))
    (created,) = yard.wanted(effects.CreatePartitions)
    assert isinstance(created, effects.CreatePartitions)
    assert (created.spec.settings.consistency.bound, created.spec.switches) == (2, 1)
    yard.handle(events.PartitionsCreated(caller.job))
    yard.handle(events.VariablesCommitted(caller))
    yard.handle(events.PartitionsOpened(caller.job))
    yard.handle(events.Ticked())
    (order,) = yard.wanted(effects.PaceServers)
    assert isinstance(order, effects.PaceServers)


def test_servers_of_another_map_are_told_again_and_are_given_the_number_with_their_partitions() -> None:
    yard = Yard(checkpoints="/c")
    yard.switch(BOUNDED, 3)
    yard.tell_servers()
    for worker in yard.workers:
        yard.say(worker, 1)
    for feed_opened in [events.FeedOpened(each, 0, FEED) for each in yard.workers]:
        yard.handle(feed_opened)
    for worker in yard.workers:
        yard.handle(events.LeaseRequested(worker, 0))
    yard.register(MemberRole.SERVER, "s:1")
    yard.handle(events.MemberLeft(yard.server, ""))
    yard.tick()
    (restore,) = yard.wanted(effects.RestorePartitions)
    assert isinstance(restore, effects.RestorePartitions)
    assert (restore.spec.settings.consistency.bound, restore.spec.switches) == (3, 1)
    assert restore.leasing == tuple(worker.incarnation for worker in yard.workers)
    assert not yard.wanted(effects.PaceServers)
    yard.handle(events.PartitionsRestored(restore.spec.job, restore.map.generation))
    yard.tick()
    assert yard.order.map == restore.map
    assert yard.say(yard.workers[0], 1) == Consistency(1, BOUNDED, 3), "who has gone over does not go back meanwhile"


def test_new_servers_do_not_expect_who_has_not_gone_over() -> None:
    yard = Yard(checkpoints="/c")
    for worker in yard.workers:
        yard.handle(events.FeedOpened(worker, 0, FEED))
        yard.handle(events.LeaseRequested(worker, 0))
    yard.switch(BOUNDED, 3)
    yard.tell_servers()
    yard.say(yard.workers[1], 1)
    yard.register(MemberRole.SERVER, "s:1")
    yard.handle(events.MemberLeft(yard.server, ""))
    yard.tick()
    (restore,) = yard.wanted(effects.RestorePartitions)
    assert isinstance(restore, effects.RestorePartitions)
    assert restore.leasing == (yard.workers[1].incarnation,)


@pytest.mark.parametrize("bounded", [True, False])
def test_while_partitions_move_a_worker_gets_work_only_if_no_bound_holds(bounded: bool) -> None:
    """The new servers were told which workers have work, and would not wait for it."""
    yard = Yard(checkpoints="/c")
    if bounded:
        yard.switch(BOUNDED, 3)
        yard.tell_servers()
    one, other = yard.workers
    for worker in yard.workers:
        yard.say(worker, int(bounded))
        yard.handle(events.FeedOpened(worker, 0, FEED))
    first = yard.lease(one)
    yard.register(MemberRole.SERVER, "s:1")
    yard.handle(events.MemberLeft(yard.server, ""))
    yard.tick()
    (restore,) = yard.wanted(effects.RestorePartitions)
    assert isinstance(restore, effects.RestorePartitions)
    answer = yard.lease(other)
    assert isinstance(answer, LeaseWait if bounded else DataLease), answer
    assert yard.lease(one) == first, "its answer was lost"
    yard.handle(events.PartitionsRestored(restore.spec.job, restore.map.generation))
    assert isinstance(yard.lease(other), DataLease)


@pytest.mark.parametrize("staleness", [-1, limits.STALENESS_MAX + 1])
def test_bound_that_no_job_can_have_is_refused_and_changes_nothing(staleness: int) -> None:
    yard = Yard()
    before = yard.machine.snapshot()
    with pytest.raises(errors.ConfigurationError, match="staleness"):
        yard.switch(BOUNDED, staleness)
    assert yard.machine.snapshot() == before


@pytest.mark.parametrize("before", list(ConsistencyMode))
@pytest.mark.parametrize("after", list(ConsistencyMode))
def test_a_running_job_goes_over_between_sync_async_and_bounded(
    before: ConsistencyMode, after: ConsistencyMode
) -> None:
    settings = JobSettings(consistency=ConsistencySettings(mode=before))
    if before is after or {before, after} <= {ConsistencyMode.SYNC, ASYNC, BOUNDED}:
        assert switched(settings, after, None).consistency.mode is after
    else:
        with pytest.raises(errors.InvalidRequest, match=f"runs in mode {before.value}") as raised:
            switched(settings, after, None)
        assert "shardyard stop" in raised.value.todo_text


def test_a_job_is_switched_so_many_times_and_no_more() -> None:
    switching = ModeSetting(ASYNC, None)
    switching._switch(Consistency(SWITCHES_MAX, ASYNC))
    switching.end(Generation(1), SWITCHES_MAX)
    with pytest.raises(errors.TooLarge, match="was switched"):
        switching.ask(JobSettings(consistency=ConsistencySettings(mode=BOUNDED)))


def test_who_joins_goes_by_what_all_servers_go_by() -> None:
    yard = Yard()
    yard.switch(BOUNDED, 3)
    order = yard.order
    answer = yard.handle(events.JobJoined(yard.register(MemberRole.WORKER), JOB.name, JOB))
    assert isinstance(answer, effects.Joined)
    assert (answer.settings.consistency.mode, answer.consistency) == (BOUNDED, Consistency(0, ASYNC))
    yard.handle(events.ServersPaced(order.job, Generation(1), 1))
    late = yard.handle(events.JobJoined(yard.register(MemberRole.WORKER), JOB.name, JOB))
    assert isinstance(late, effects.Joined)
    assert late.consistency == Consistency(1, BOUNDED, 3)


def test_records_of_switches_that_do_not_fit_are_refused() -> None:
    yard = Yard()
    yard.switch(BOUNDED, 3)
    yard.tell_servers()
    yard.say(yard.workers[0], 1)
    records = yard.persisted
    kinds = [each.kind for each in records]
    made, over = kinds.index("consistency_switched"), kinds.index("worker_switched")
    odd = {"mode": "sync", "staleness": 3}, {"mode": "bounded", "staleness": None}, {"mode": "hurried"}
    changed = [effects.Persist(records[made].kind, {**records[made].body, **each}) for each in odd]
    for again in (
        [*records[: made + 1], records[made]],
        [*records[:made], records[over]],
        *([*records[:made], each] for each in changed),
    ):
        yard.persisted = again
        with pytest.raises(errors.ConfigurationError, match="cannot be taken"):
            yard.restart()


def test_settings_of_a_job_that_was_never_switched_are_its_own() -> None:
    assert settings_of(JOB, Consistency(0, BOUNDED, 3)) is JOB


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (wire.Consistency(number=1), errors.ShardyardError),
        (wire.Consistency(number=1, mode=wire.CONSISTENCY_MODE_BOUNDED), errors.InvalidRequest),
        (wire.Consistency(number=1, mode=wire.CONSISTENCY_MODE_ASYNC, staleness=1), errors.InvalidRequest),
        (
            wire.Consistency(number=1, mode=wire.CONSISTENCY_MODE_BOUNDED, staleness=limits.STALENESS_MAX + 1),
            errors.TooLarge,
        ),
    ],
)
def test_consistency_that_nobody_can_go_by_is_refused(message: wire.Consistency, error: type[Exception]) -> None:
    with pytest.raises(error):
        lease_messages.consistency_from_wire(message)


def test_consistency_travels_as_it_is() -> None:
    for given in (Consistency(3, BOUNDED, 0), Consistency(1, ASYNC), Consistency(2, ConsistencyMode.SYNC)):
        assert lease_messages.consistency_from_wire(lease_messages.consistency_to_wire(given)) == given


def test_what_is_asked_is_bounded_and_says_what_it_leaves_out() -> None:
    long = "x" * (limits.JOB_NAME_CHARACTERS_MAX + 1)
    with pytest.raises(errors.TooLarge, match="a job's name"):
        jobs.switch_consistency_event(wire.SwitchConsistencyRequest(job_name=long))
    assert jobs.switch_consistency_event(wire.SwitchConsistencyRequest()) == events.SwitchRequested("", None, None)
    asked = wire.SwitchConsistencyRequest(mode=wire.CONSISTENCY_MODE_BOUNDED, staleness=0)
    assert jobs.switch_consistency_event(asked) == events.SwitchRequested("", BOUNDED, 0)


@pytest.mark.parametrize(("before", "after"), [("sync", "async"), ("async", "sync")])
def test_pipelines_with_variables_on_servers_keep_their_mode(before: str, after: str) -> None:
    given = {"strategy": "pipeline", "between": "parameter_server", "consistency": {"mode": before}}
    settings = JobSettings.model_validate(given)
    assert switched(settings, ConsistencyMode(before), None) == settings
    with pytest.raises(errors.InvalidRequest, match=f"mode {before} with strategy pipeline, and cannot switch to"):
        switched(settings, ConsistencyMode(after), None)
