"""The launches that have joined a job. tests/unit/coordinator/transcripts/runs.txt has what follows from them."""

from __future__ import annotations

from shardyard.domain.ids import RunName
from shardyard_coordinator.members.runs import RUNS_MAX, Runs


def test_launch_is_recorded_once() -> None:
    runs = Runs()
    assert runs.join(RunName("x", 2)) == [("run_joined", {"run": "x", "number": 2})]
    assert runs.join(RunName("x", 2)) == []
    assert runs.join(None) == []
    assert (runs.number_of("x"), runs.number_of("y")) == (2, None)


def test_of_many_launches_the_latest_are_kept() -> None:
    runs = Runs()
    for number in range(RUNS_MAX + 2):
        runs.join(RunName(str(number)))
    assert runs.number_of("1") is None
    assert runs.number_of("2") == runs.number_of(str(RUNS_MAX + 1)) == 1
    assert len(runs.ids) == RUNS_MAX
