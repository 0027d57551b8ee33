"""Which run of which launch a process finds itself in."""

from __future__ import annotations

import os

import pytest

from shardyard.domain.ids import RunName
from shardyard_worker.session.run_name import end_run, run_of


def test_process_without_an_id_is_in_no_run() -> None:
    environment = {"PATH": "/bin"}
    assert run_of(environment) is None
    end_run(environment)
    assert environment == {"PATH": "/bin"}


def test_each_job_that_a_process_has_left_is_a_run() -> None:
    environment = {"SHARDYARD_RUN_ID": "x", "SHARDYARD_PID": str(os.getpid())}
    assert run_of(environment) == RunName("x", 1)
    end_run(environment)
    assert run_of(environment) == RunName("x", 2)


def test_process_that_a_training_process_has_started_is_in_no_run() -> None:
    assert run_of({"SHARDYARD_RUN_ID": "x", "SHARDYARD_PID": str(os.getpid() + 1)}) is None


@pytest.mark.parametrize("number", ["", "two", "-1"])
def test_number_that_is_none_is_the_first(number: str) -> None:
    assert run_of({"SHARDYARD_RUN_ID": "x", "SHARDYARD_RUN_NUMBER": number}) == RunName("x", 1)
