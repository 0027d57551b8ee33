"""Settings of a pipeline that exclude each other are refused, and name both."""

from __future__ import annotations

import pytest

from shardyard.config import configuration
from shardyard.domain import errors


def load(**given: object) -> configuration.Loaded:
    named = {f"job.{name.replace('__', '.')}": value for name, value in given.items()}
    return configuration.load(None, {}, {"job.strategy": "pipeline", **named})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("workers_expected", 1, "workers_expected 2 or a multiple, one worker for each part of a replica"),
        ("workers_expected", 3, "workers_expected 2 or a multiple, one worker for each part of a replica"),
        ("consistency__mode", "async", r"consistency\.mode sync with strategy pipeline"),
        ("collectives", "other", "collectives gloo with strategy pipeline"),
        ("durability", "wal", "durability checkpoint with strategy pipeline"),
        ("pipeline__virtual_stages", 2, "virtual_stages 1 with schedule 1F1B"),
    ],
)
def test_what_does_not_fit_is_refused(name: str, value: object, message: str) -> None:
    with pytest.raises(errors.ConfigurationError, match=message):
        load(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("consistency__backup_workers", 1),
        ("compression__push", "int8"),
        ("all_reduce", "bf16"),
        ("collectives", "other"),
    ],
)
def test_what_does_not_fit_to_pushed_stages_is_refused(name: str, value: object) -> None:
    given: dict[str, object] = {"between": "parameter_server", "workers_expected": 4, name: value}
    path = name.replace("__", r"\.")
    with pytest.raises(errors.ConfigurationError, match=rf"{path} .* with (between parameter_server|strategy pipe)"):
        load(**given)


def test_pipelines_with_variables_on_servers_train_in_two_modes() -> None:
    given: dict[str, object] = {"between": "parameter_server", "workers_expected": 4}
    for mode in ("sync", "async"):
        assert load(**given, consistency__mode=mode).settings.job.consistency.mode.value == mode
    for mode in ("bounded", "local", "hybrid"):
        with pytest.raises(errors.ConfigurationError, match=r"consistency\.mode sync or async .* parameter_server"):
            load(**given, consistency__mode=mode)
    job = load(**given, consistency__mode="async", clip__norm=1.0).settings.job
    assert (job.server_clipping.norm, job.clip.norm) == (0.0, 1.0)


def test_parts_are_pushed_by_the_workers_of_a_replica_of_a_known_size() -> None:
    with pytest.raises(errors.ConfigurationError, match="pipeline, sharded or tensor with between parameter_server"):
        load(strategy="multi_worker_mirrored", between="parameter_server")
    with pytest.raises(errors.ConfigurationError, match=r"a number for sharded\.size with between parameter_server"):
        load(strategy="sharded", between="parameter_server")
    job = load(strategy="sharded", between="parameter_server", sharded__size=2, workers_expected=4).settings.job
    assert (job.logical_rank_count, job.workers_per_rank, job.shares, job.has_replicas) == (2, 2, 2, False)
    job = load(strategy="sharded", sharded__size=2, workers_expected=4).settings.job
    assert (job.logical_rank_count, job.workers_per_rank, job.shares) == (4, 1, 1)
    job = load(between="parameter_server", durability="wal", workers_expected=4).settings.job
    assert (job.logical_rank_count, job.has_replicas, job.updates_in_workers) == (2, False, False)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"pipeline__schedule": "ZBVZeroBubble", "pipeline__virtual_stages": 3}, "virtual_stages 2 with schedule ZBV"),
        ({"pipeline__schedule": "Interleaved1F1B", "pipeline__microbatches": 5}, "a multiple of 2 micro-batches"),
    ],
    ids=["stages", "micro-batches"],
)
def test_schedule_says_what_it_needs(given: dict[str, object], message: str) -> None:
    with pytest.raises(errors.ConfigurationError, match=message):
        load(**given)


def test_a_pipeline_expects_a_worker_for_each_stage() -> None:
    job = load(pipeline__stages=3, pipeline__schedule="LoopedBFS", pipeline__microbatches=3).settings.job
    assert (job.workers_expected, job.logical_rank_count, job.pipeline.stages_in_all) == (3, 1, 6)


def test_pipelines_are_side_by_side() -> None:
    job = load(workers_expected=6, pipeline__stages=3, pipeline__microbatches=3, all_reduce="bf16").settings.job
    assert (job.logical_rank_count, job.workers_per_replica) == (2, 3)
