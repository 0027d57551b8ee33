"""Settings of jobs whose variables are cut over workers: what excludes each other is refused, and names both."""

from __future__ import annotations

import pytest

from shardyard.config import configuration
from shardyard.domain import errors


def load(strategy: str, **given: object) -> configuration.Loaded:
    named = {f"job.{name.replace('__', '.')}": value for name, value in given.items()}
    return configuration.load(None, {}, {"job.strategy": strategy, **named})


COMMON = [
    ("consistency__mode", "async", r"consistency\.mode sync with strategy"),
    ("collectives", "other", "collectives gloo with strategy"),
    ("durability", "wal", "durability checkpoint with strategy"),
]
OF_SHARDS = [
    ("deterministic", True, "deterministic false with strategy"),
    ("all_reduce", "bf16", "all_reduce whole with strategy"),
]


@pytest.mark.parametrize(
    ("strategy", "name", "value", "message"),
    [("sharded", *each) for each in (*COMMON, *OF_SHARDS)] + [("tensor", *each) for each in COMMON],
)
def test_what_does_not_fit_is_refused(strategy: str, name: str, value: object, message: str) -> None:
    with pytest.raises(errors.ConfigurationError, match=f"{message} {strategy}"):
        load(strategy, **{name: value})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"workers_expected": 3}, "workers_expected 2, one worker for each of 2 parts"),
        ({"consistency__logical_ranks": 2}, r"consistency\.logical_ranks 1 with strategy tensor"),
        ({"tensor__size": 1}, "tensor.size"),
    ],
    ids=["workers", "ranks", "one part"],
)
def test_a_tensor_parallel_group_is_one_rank(given: dict[str, object], message: str) -> None:
    with pytest.raises(errors.ConfigurationError, match=message):
        load("tensor", **given)


def test_workers_are_those_of_the_group() -> None:
    tensor, sharded = load("tensor", tensor__size=4).settings.job, load("sharded", workers_expected=3).settings.job
    assert (tensor.workers_expected, tensor.logical_rank_count, tensor.workers_per_rank) == (4, 1, 4)
    assert (sharded.workers_expected, sharded.logical_rank_count, sharded.workers_per_rank) == (3, 3, 1)


def test_patterns_are_parted_by_spaces() -> None:
    job = load("tensor", tensor__colwise="*.q *.k", tensor__rowwise="*.out", sharded__modules="blocks.*").settings.job
    assert (job.tensor.colwise_patterns, job.tensor.rowwise_patterns) == (("*.q", "*.k"), ("*.out",))
    assert job.sharded.patterns == ("blocks.*",)
