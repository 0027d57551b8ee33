"""Runs that begin with a checkpoint because a person ordered it. Scenarios: transcripts/restoring.txt."""

from __future__ import annotations

import dataclasses

import pytest

from shardyard.config.settings import ConsistencySettings
from shardyard.domain.consistency import ConsistencyMode, UpdateMode
from shardyard.domain.errors import ConfigurationError, NotFound
from shardyard.domain.ids import MemberRole
from shardyard_coordinator.core import effects, events
from shardyard_coordinator.work.step_ledger import StepLedger
from tests.support import restoring_yards as orders
from tests.support.restoring_yards import SETTINGS, Yard

ORIGIN = dataclasses.replace(
    orders.ORIGIN,
    mode=UpdateMode.SYNC,
    logical_ranks=3,
    data_ledger={
        "entries": [["steps_decided", {"first": 59, "left_out": [[2]], "dropped": []}]],
        "closed": 0,
        "token": 0,
    },
)


def test_run_with_backup_workers_is_gone_on_with_by_one_that_makes_up_for_what_was_dropped() -> None:
    sync = ConsistencySettings(mode=ConsistencyMode.SYNC)
    yard = Yard()
    yard.order(ORIGIN)
    worker = yard.register(MemberRole.WORKER)
    for backup_workers, said in (0, "of a run with backup workers"), (3, "which has 3 logical ranks"):
        given = SETTINGS.model_copy(
            update={"consistency": sync.model_copy(update={"backup_workers": backup_workers, "logical_ranks": "auto"})}
        )
        with pytest.raises(ConfigurationError, match=said):
            yard.handle(events.JobJoined(worker, "default", given))
    one = SETTINGS.model_copy(update={"consistency": sync.model_copy(update={"backup_workers": 1})})
    answer = yard.handle(events.JobJoined(worker, "default", one))
    assert isinstance(answer, effects.Joined)
    assert answer.job > ORIGIN.job, "no number that the former run's members know"
    feeds = yard.machine.jobs[-1].feeds
    assert isinstance(feeds, StepLedger)
    assert (feeds.verdicts.decided, feeds.verdicts.members(59)) == (60, (0, 1))
    yard.restart(from_snapshot=True)
    again = yard.machine.jobs[-1].feeds
    assert isinstance(again, StepLedger)
    assert again.entries() == feeds.entries()


def began_with(yard: Yard, owner: str) -> int:
    """The step with which the next run of the job begins, if a worker of this owner starts it."""
    worker = yard.register(MemberRole.WORKER)
    yard.handle(events.JobJoined(worker, "default", SETTINGS, owner=owner))
    return yard.machine.jobs[-1].progress.step


@pytest.mark.parametrize(
    ("ordered", "owner", "step"),
    [("eve", "ada", 0), ("eve", "", 0), ("eve", "eve", 60), ("", "ada", 60), ("ada", "ada", 60)],
)
def test_a_person_of_an_owner_orders_the_runs_of_that_owner_only(ordered: str, owner: str, step: int) -> None:
    yard = Yard()
    assert not yard.order(dataclasses.replace(orders.ORIGIN, owner=ordered))
    yard.restart(from_snapshot=True)
    assert began_with(yard, owner) == step


def test_orders_of_two_owners_stand_side_by_side_and_are_cancelled_by_their_own() -> None:
    yard = Yard()
    for owner in ("ada", "eve", ""):
        yard.order(dataclasses.replace(orders.ORIGIN, owner=owner, step=60 + len(owner)))
    yard.handle(events.RestoreCancelled("default", "eve"))
    with pytest.raises(NotFound, match="no restore was ordered"):
        yard.handle(events.RestoreCancelled("default", "eve"))
    yard.restart()
    yard.restart(from_snapshot=True)
    assert began_with(yard, "ada") == 63


def test_a_person_without_an_owner_cancels_the_orders_of_everybody() -> None:
    yard = Yard()
    for owner in ("ada", "eve", ""):
        yard.order(dataclasses.replace(orders.ORIGIN, owner=owner))
    yard.handle(events.RestoreCancelled("default"))
    yard.restart()
    for owner in ("ada", "eve", ""):
        with pytest.raises(NotFound):
            yard.handle(events.RestoreCancelled("default", owner))
    assert began_with(yard, "eve") == 0


def test_a_job_that_runs_does_not_go_back_for_another_owner() -> None:
    yard = Yard()
    began_with(yard, "ada")
    assert not yard.order(dataclasses.replace(orders.ORIGIN, owner="eve"))
