"""Runs that begin with a checkpoint because a person ordered it. Scenarios: transcripts/restoring.txt."""

from __future__ import annotations

import dataclasses

import pytest

from shardyard.config.settings import ConsistencySettings
from shardyard.domain.consistency import ConsistencyMode, UpdateMode
from shardyard.domain.errors import ConfigurationError
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
