"""How far a job is in its data, and what is left out where it cannot be known."""

from __future__ import annotations

import pytest

from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_launcher.terminal.data_progress import data_progress

RUNNING, FINISHED = wire.JOB_STATE_RUNNING, wire.JOB_STATE_FINISHED


def job(*feeds: wire.FeedStatus, state: wire.JobState = RUNNING, **more: object) -> wire.JobStatus:
    return wire.JobStatus(job=9, name="mine", state=state, feeds=feeds, **more)  # type: ignore[arg-type]


def feed(number: int = 0, *, free: int, leased: int, done: int, finished: bool = False) -> wire.FeedStatus:
    return wire.FeedStatus(feed=number, samples=1_000, epochs=4, free=free, leased=leased, done=done, finished=finished)


def test_samples_say_how_far_a_job_is_between_the_bounds_of_its_data_shards() -> None:
    found = data_progress(job(feed(free=20, leased=4, done=16), samples=1_800, samples_per_s=100.0))
    assert found is not None
    assert (found.epoch, found.epochs, found.fraction, found.left_s) == (2, 4, 0.45, 22.0)
    assert str(found) == "epoch 2 of 4, 45%, 22 s left"


@pytest.mark.parametrize(("samples", "fraction"), [(9_000, 0.5), (17, 0.4)])
def test_samples_that_were_computed_twice_or_not_reported_do_not_count(samples: int, fraction: float) -> None:
    found = data_progress(job(feed(free=20, leased=4, done=16), samples=samples))
    assert found is not None
    assert found.fraction == fraction
    assert found.left_s is None, "there is no rate yet"


def test_steps_of_a_synchronous_job_are_exact() -> None:
    found = data_progress(job(feed(free=3, leased=0, done=1), samples=990, samples_per_s=3_000_000.0))
    assert found is not None
    assert (found.epoch, found.fraction) == (2, 0.25)


def test_a_second_data_set_is_said() -> None:
    first = feed(free=0, leased=0, done=40, finished=True)
    found = data_progress(job(first, feed(1, free=30, leased=10, done=0), samples=4_400, samples_per_s=1.0))
    assert str(found) == "data set 2: epoch 1 of 4, 10%, 1 h 0 min left"


def one_pass(number: int, *, done: int) -> wire.FeedStatus:
    return wire.FeedStatus(feed=number, samples=1_000, epochs=1, free=10 - done, done=done, finished=done == 10)


def test_pass_of_a_sampler_is_one_of_a_number_that_nobody_knows() -> None:
    assert str(data_progress(job(one_pass(0, done=4)))) == "pass 1: 40%"
    third = job(*(one_pass(number, done=done) for number, done in enumerate((10, 10, 4))), samples_per_s=100.0)
    third.samples = 2_400
    assert str(data_progress(third)) == "pass 3: 40%, 6 s left"


def test_data_set_of_one_epoch_after_one_of_more_is_no_pass() -> None:
    first = feed(free=0, leased=0, done=40, finished=True)
    assert str(data_progress(job(first, one_pass(1, done=4)))) == "data set 2: epoch 1 of 1, 40%"


def test_all_is_said_as_all_only_at_the_end() -> None:
    found = data_progress(job(feed(free=0, leased=1, done=39), samples=3_999))
    assert str(found) == "epoch 4 of 4, 99%"
    found = data_progress(job(feed(free=0, leased=0, done=40, finished=True), samples=4_000, samples_per_s=9.0))
    assert str(found) == "epoch 4 of 4, 100%"


@pytest.mark.parametrize(
    "more",
    [
        {"samples_per_s": 0.0},
        {"samples_per_s": 1e-9},
        {"recovering": True, "samples_per_s": 9.0},
        {"waits": ["a server for partition 3"], "samples_per_s": 9.0},
        {"stop": wire.Stop(reason="enough"), "samples_per_s": 9.0},
    ],
    ids=["stands", "crawls", "recovering", "waits", "stops"],
)
def test_no_time_is_left_of_a_job_that_does_not_go_on_as_it_did(more: dict[str, object]) -> None:
    found = data_progress(job(feed(free=20, leased=4, done=16), samples=1_800, **more))
    assert found is not None
    assert found.left_s is None


def test_nothing_is_said_of_a_job_that_has_ended_or_reads_data_of_its_own() -> None:
    assert data_progress(job(feed(free=0, leased=0, done=40, finished=True), state=FINISHED)) is None
    assert data_progress(job(samples=100, samples_per_s=9.0)) is None
