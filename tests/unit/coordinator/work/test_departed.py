"""Workers that are gone, and what restored partitions lack of their own pushes (docs/internals/ledger.md, rule A11)."""

from __future__ import annotations

import pytest

from shardyard.domain.ids import Generation, Incarnation, MemberRole, PartitionId
from shardyard_coordinator.core import effects, events
from shardyard_coordinator.members.progress import Report
from shardyard_coordinator.records import Body, DamagedRecord
from shardyard_coordinator.service.status import describe
from shardyard_coordinator.work.losses import DEPARTED_MAX, RETRY_MS, Departed, LostRange
from tests.unit.coordinator.machine.test_end_of_data import Yard

FIRST, SECOND = Incarnation(8), Incarnation(9)
P0, P1 = PartitionId(0), PartitionId(1)


def test_what_restored_partitions_lack_of_what_was_acknowledged_is_lost() -> None:
    found = Departed()
    found.add(FIRST, 9)
    assert found.ask(0) == (), "nothing was restored"
    found.restored([P1])
    assert found.is_due
    assert found.ask(0) == (FIRST,)
    assert found.ask(0) == (), "they are asked"
    # partition 0 was not restored: what it lacks was never acknowledged
    assert found.answer({FIRST: [(P0, 8), (P1, 4)]}) == {FIRST: [LostRange(P1, 4, 8)]}
    assert not found.is_due


def test_other_partitions_know_more_of_a_killed_worker_than_it_has_said() -> None:
    found = Departed()
    found.add(FIRST, 2)
    found.restored([P1])
    assert found.answer({FIRST: [(P0, 6), (P1, 1)]}) == {FIRST: [LostRange(P1, 1, 5)]}


def test_partitions_are_asked_again_after_a_while_where_a_server_did_not_answer() -> None:
    found = Departed()
    found.restored([P0])
    assert not found.is_due
    found.add(FIRST, 2)
    assert found.ask(100) == (FIRST,)
    found.fail(100)
    assert found.ask(99 + RETRY_MS) == ()
    assert found.ask(100 + RETRY_MS) == (FIRST,)


def test_worker_that_goes_while_others_are_asked_about_is_asked_about_next() -> None:
    found = Departed()
    found.restored([P0])
    found.add(FIRST, 2)
    found.ask(0)
    found.add(SECOND, 2)
    found.answer({FIRST: [(P0, 2)]})
    assert found.is_due
    assert found.ask(0) == (FIRST, SECOND)


def test_worker_whose_last_pushes_a_checkpoint_has_is_not_asked_about() -> None:
    found = Departed()
    found.add(FIRST, 2)
    assert found.forget([FIRST, SECOND]) == [FIRST]
    found.restored([P0])
    assert not found.is_due


def test_workers_are_bounded() -> None:
    found = Departed()
    given_up = [each for number in range(DEPARTED_MAX + 2) for each in found.add(Incarnation(number + 1), 1)]
    assert given_up == [1, 2]


def test_records_bring_back_who_is_gone_and_what_was_restored() -> None:
    found = Departed()
    found.add(FIRST, 9)
    found.restored([P1])
    ((kind, body),) = found.entries()
    assert kind == "workers_departed"
    again = Departed()
    again.restore(Body(body))
    assert again.entries() == found.entries()
    assert again.ask(0) == (FIRST,)
    assert Departed().entries() == []
    many = [[number + 1, 1] for number in range(DEPARTED_MAX + 1)]
    with pytest.raises(DamagedRecord):
        Departed().restore(Body({"workers": many, "restored": []}))


# ---- in the machine


def lost_pushes(yard: Yard) -> int:
    (job,) = describe(yard.machine, yard.now_ms).jobs
    return job.lost_pushes


def after_a_loss() -> tuple[Yard, Incarnation, Generation]:
    """A worker has left after seven pushes, and a server is lost since. Returns the map's generation, too."""
    yard = Yard("async")
    yard.checkpoint()
    other = yard.register(MemberRole.WORKER)
    yard.handle(events.JobJoined(other, "default", yard.settings))
    yard.handle(events.MemberLeft(other, "", pushed=7))
    return yard, other, yard.lose_server()


def test_lost_pushes_of_a_worker_that_left_are_counted_and_no_checkpoint_is_begun_before() -> None:
    yard, other, generation = after_a_loss()
    yard.handle(events.CheckpointRequested(yard.caller, None, 0))
    reading = yard.until(effects.ReadDeparted)
    assert reading.workers == (other,)
    yard.handle(events.NotAnswered(yard.caller.job, yard.latest[effects.ReadDeparted]))
    for _ in range(RETRY_MS // 100 - 1):
        yard.now_ms += 100
        yard.handle(events.Ticked())
        assert yard.effects == [], "what was lost could not be told from what a checkpoint has"
    reading = yard.until(effects.ReadDeparted)
    owners = reading.map.owners
    found = ((other, tuple((owner.partition, 3) for owner in owners)),)
    yard.handle(events.DepartedRead(yard.caller.job, generation, found))
    assert lost_pushes(yard) == 4
    assert [each.kind for each in yard.effects if isinstance(each, effects.Persist)] == ["pushes_lost"]
    # a checkpoint that was begun since has nothing more to lose of it
    yard.checkpoint()
    yard.lose_server()
    for _ in range(20):
        yard.now_ms += 100
        yard.handle(events.HeartbeatReceived(yard.server, Report()))
        yard.handle(events.Ticked())
        assert not any(isinstance(each, effects.ReadDeparted) for each in yard.effects)
    assert lost_pushes(yard) == 4


def test_answer_from_before_another_recovery_does_not_count() -> None:
    yard, other, generation = after_a_loss()
    reading = yard.until(effects.ReadDeparted)
    yard.lose_server()
    found = ((other, tuple((owner.partition, 0) for owner in reading.map.owners)),)
    yard.handle(events.DepartedRead(yard.caller.job, generation, found))
    assert lost_pushes(yard) == 0
    assert yard.until(effects.ReadDeparted).map.generation > generation
