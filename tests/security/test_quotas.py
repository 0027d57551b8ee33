"""One owner takes no more of a yard than its quota, and other owners are served meanwhile: promise S7."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from shardyard.domain import errors
from tests.support.owners import OwnersYard

PER_S = 100
BIG = 1_500_000
"""Values of a variable of 6 MB, of which two at a time are more than one job may have on its way to a server."""


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnersYard]:
    quotas = {"jobs_max": 3, "bytes_max": 20_000_000, "requests_per_s_max": PER_S, "receive_bytes_max": 16 << 20}
    folder = tmp_path_factory.mktemp("yard") / "state"
    begun = OwnersYard(folder, **{f"quotas.{name}": value for name, value in quotas.items()})
    yield begun
    begun.cluster.stop()


def value_of(job: Any) -> float:
    return float(job.pull()["w"][0])


@pytest.mark.parametrize("same_host", ["auto", "never"])
def test_a_job_takes_no_more_steps_a_second_than_its_quota(yard: OwnersYard, same_host: str) -> None:
    job = yard.join("ada", f"fast-{same_host}", **{"worker.same_host": same_host})
    job.push({"w": torch.ones(20)})
    steps, begun_s = 1, time.monotonic()
    while (took_s := time.monotonic() - begun_s) < 2.5:
        job.push({"w": torch.ones(20)})
        steps += 1
    # a second of steps at once, and then the rate
    assert steps <= PER_S * (took_s + 1) + 2
    assert steps > PER_S
    assert value_of(job) == -0.5 * steps  # each counts once
    job.close()


def test_another_job_is_served_while_one_has_used_its_quota(yard: OwnersYard) -> None:
    greedy, modest = yard.join("ada", "greedy"), yard.join("eve", "modest")
    stop, taken = threading.Event(), []

    def push_on() -> None:
        while not stop.is_set():
            greedy.push({"w": torch.ones(20)})
            taken.append(1)

    pushing = threading.Thread(target=push_on)
    pushing.start()
    try:
        while len(taken) < PER_S:  # what it may send at once
            time.sleep(0.01)
        begun_s = time.monotonic()
        for _ in range(50):
            modest.push({"w": torch.ones(20)})
        took_s = time.monotonic() - begun_s
    finally:
        stop.set()
        pushing.join()
    assert value_of(modest) == -25.0
    assert value_of(greedy) == -0.5 * len(taken)
    assert len(taken) <= PER_S * (took_s + 2) + 2
    greedy.close()
    modest.close()


def test_pushes_that_find_no_memory_are_sent_again_and_count_once(yard: OwnersYard) -> None:
    jobs = [yard.join("ada", "big", BIG, **{"worker.same_host": "never"}) for _ in range(3)]

    def push(job: Any) -> None:
        for _ in range(5):
            job.push({"w": torch.ones(BIG)})

    threads = [threading.Thread(target=push, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert value_of(jobs[0]) == -0.5 * 15
    for job in jobs:
        job.close()


def test_owner_starts_no_more_jobs_and_no_larger_ones_than_its_quota(yard: OwnersYard) -> None:
    jobs = [yard.join("bo", f"bos-{number}") for number in range(3)]
    with pytest.raises(errors.QuotaExceeded, match=r"jobs of bo have 3 unfinished ones; quotas\.jobs_max is 3"):
        yard.join("bo", "bos-4")
    jobs.pop().close()
    with pytest.raises(errors.QuotaExceeded, match=r"20,000,160 bytes of variables with job 'large'"):
        yard.join("bo", "large", 5_000_000)
    yard.join("cy", "cys").close()
    for job in jobs:
        job.close()
