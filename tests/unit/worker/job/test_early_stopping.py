"""When a job is told to stop since a metric gets no better, against a job that only listens."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from shardyard.domain.errors import InvalidRequest
from shardyard_worker.job.early_stopping import EarlyStopping


class Listener:
    """What EarlyStopping needs of a job."""

    def __init__(self) -> None:
        self.step = 0
        self.stopping: str | None = None

    def stop(self, reason: str) -> None:
        assert self.stopping is None, "told twice"
        self.stopping = reason


def stops_at(values: list[float], **settings: Any) -> int | None:
    """The index of the value at which the job is told to stop."""
    job, early = Listener(), EarlyStopping("loss", **settings)
    for index, value in enumerate(values):
        job.step += 1
        early(job, {"loss": value, "other": 1.0})  # type: ignore[arg-type]
        if job.stopping is not None:
            return index
    return None


@pytest.mark.parametrize(
    ("values", "settings", "expected"),
    [
        ([3, 2, 1, 0], {"patience": 1}, None),
        ([3, 3, 3, 3], {"patience": 2}, 2),
        ([3, 4, 2, 3, 3, 3, 1], {"patience": 3}, 5),
        ([3, 2.9, 2.8, 2.7], {"patience": 2, "min_delta": 0.5}, 2),
        ([3, 2.6, 2.4, 2.3], {"patience": 2, "min_delta": 0.5}, None),
        ([1, 2, 3, 3, 2], {"patience": 2, "mode": "max"}, 4),
        ([3, 2, math.nan], {}, 2),
        ([math.inf], {}, 0),
        ([1, 2, 3, 4], {}, 3),
    ],
)
def test_job_stops_after_so_many_values_that_are_no_better(
    values: list[float], settings: dict[str, Any], expected: int | None
) -> None:
    assert stops_at(values, **settings) == expected


def test_best_value_and_its_step_are_kept_and_the_reason_names_them() -> None:
    job, early = Listener(), EarlyStopping("loss", patience=1)
    for value in (2.0, torch.tensor([1.5]), 1.75):
        job.step += 10
        early(job, {"loss": value})  # type: ignore[arg-type]
    assert (early.best, early.best_step, early.waited) == (1.5, 20, 1)
    assert job.stopping == "loss has not got better than 1.5, of step 20"


def test_other_metrics_and_a_job_that_stops_already_are_passed_over() -> None:
    job, early = Listener(), EarlyStopping("loss", patience=1)
    early(job, {"accuracy": math.nan})  # type: ignore[arg-type]
    assert job.stopping is None
    job.stopping = "somebody else"
    early(job, {"loss": math.nan})  # type: ignore[arg-type]
    assert (job.stopping, early.best) == ("somebody else", None)


@pytest.mark.parametrize("wrong", [{"patience": 0}, {"min_delta": -1.0}, {"min_delta": math.nan}, {"mode": "least"}])
def test_settings_that_mean_nothing_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        EarlyStopping("loss", **wrong)
