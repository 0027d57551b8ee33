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
        ({"workers_expected": 3}, "workers_expected 2 or a multiple, one worker for each part of a replica"),
        ({"workers_expected": 4, "deterministic": True}, "deterministic false with strategy tensor"),
        ({"tensor__size": 1}, "tensor.size"),
    ],
    ids=["workers", "order of ranks", "one part"],
)
def test_members_of_a_tensor_parallel_replica_compute_a_rank_together(given: dict[str, object], message: str) -> None:
    with pytest.raises(errors.ConfigurationError, match=message):
        load("tensor", **given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"workers_expected": 3}, "workers_expected 2 or a multiple, one worker for each part of a replica"),
        ({"consistency__logical_ranks": 1}, r"at least 2 logical ranks with sharded\.size 2, one for each worker"),
        ({"sharded__size": 1}, "sharded.size"),
    ],
    ids=["workers", "ranks", "one shard"],
)
def test_each_worker_with_a_shard_computes_a_rank(given: dict[str, object], message: str) -> None:
    with pytest.raises(errors.ConfigurationError, match=message):
        load("sharded", **{"sharded__size": 2, **given})


def test_workers_are_those_of_the_group() -> None:
    tensor, sharded = load("tensor", tensor__size=4).settings.job, load("sharded", workers_expected=3).settings.job
    assert (tensor.workers_expected, tensor.logical_rank_count, tensor.workers_per_rank) == (4, 1, 4)
    assert (sharded.workers_expected, sharded.logical_rank_count, sharded.workers_per_rank) == (3, 3, 1)
    assert (tensor.workers_per_replica, sharded.workers_per_replica) == (4, None)


@pytest.mark.parametrize(
    ("given", "expected", "ranks"),
    [
        (load("tensor", workers_expected=6), 6, 3),
        (load("tensor", workers_expected=2, consistency__logical_ranks=3), 2, 3),
        (load("sharded", sharded__size=2, workers_expected=6), 6, 6),
        (load("sharded", sharded__size=4), 4, 4),
    ],
    ids=["three replicas", "three ranks on two workers", "three pairs of shards", "as many workers as shards"],
)
def test_replicas_are_side_by_side(given: configuration.Loaded, expected: int, ranks: int) -> None:
    job = given.settings.job
    assert (job.workers_expected, job.logical_rank_count) == (expected, ranks)


def test_patterns_are_parted_by_spaces() -> None:
    job = load("tensor", tensor__colwise="*.q *.k", tensor__rowwise="*.out", sharded__modules="blocks.*").settings.job
    assert (job.tensor.colwise_patterns, job.tensor.rowwise_patterns) == (("*.q", "*.k"), ("*.out",))
    assert job.sharded.patterns == ("blocks.*",)
