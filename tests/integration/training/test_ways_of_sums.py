"""In which way gradients of replicas are summed, and what a group does that is lost meanwhile."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import pytest
import torch

from shardyard.domain import errors
from shardyard_worker.collectives import collectives, shared_members, shared_sums
from shardyard_worker.collectives.collectives import Collectives
from shardyard_worker.collectives.group_store import GroupLost
from shardyard_worker.collectives.hooked_sum import Hook
from shardyard_worker.collectives.shared_members import LARGEST_BYTES, OfferedMemory, SharedMembers
from shardyard_worker.collectives.shared_sums import WHOLE_BYTES, SharedSums
from shardyard_worker.replicas import gradient_buckets
from shardyard_worker.replicas.gradient_buckets import GradientBuckets
from tests.support.alone import Counted, local_yard, workers_of
from tests.support.mirrored import (
    BATCH,
    EPOCHS,
    MIRRORED,
    SAMPLES,
    SERVERS,
    Values,
    losses_of,
    ranks,
    side_by_side,
)
from tests.support.waiting import wait_until


@pytest.mark.parametrize(
    ("largest", "whole"), [(LARGEST_BYTES, WHOLE_BYTES), (32, WHOLE_BYTES), (32, 8)], ids=["whole", "pieces", "parts"]
)
@pytest.mark.parametrize("machines", ["aab", "aba", "abb", "abab", "abcb"])
def test_sums_go_inside_machines_first(
    alone: None, monkeypatch: pytest.MonkeyPatch, machines: str, largest: int, whole: int
) -> None:
    """Each worker is on a machine of this name. Then the bits are the same in all, and values those of servers.
    `largest`: the bytes of a piece; above `whole` of them each member adds up a part."""
    place, between = threading.local(), dict.fromkeys(machines, 0)
    sum_between = Collectives._sum_between

    def sum_noted(collectives: Collectives, tensor: torch.Tensor, hook: Hook | None) -> Any:
        assert tensor.nbytes <= largest
        between[place.machine] += 1
        return sum_between(collectives, tensor, hook)

    monkeypatch.setattr(Collectives, "_sum_between", sum_noted)
    monkeypatch.setattr(shared_members, "this_machine", lambda: place.machine)
    monkeypatch.setattr(collectives, "LARGEST_BYTES", largest)
    monkeypatch.setattr(shared_sums, "WHOLE_BYTES", whole)
    if whole < WHOLE_BYTES:  # some are sent within the backward
        monkeypatch.setattr(gradient_buckets, "FIRST_BYTES", 64)
        monkeypatch.setattr(gradient_buckets, "BUCKET_BYTES", 128)
    workers = len(machines)
    values = [Values(torch.optim.SGD) for _ in machines]
    with local_yard({**MIRRORED, **ranks(workers)}) as (_, connect):
        jobs = [connect() for _ in machines]

        def train(at: int) -> None:
            place.machine = machines[at]
            values[at].train(jobs[at])

        side_by_side(workers, train)
    assert all(each.values == values[0].values for each in values)
    assert len({*between.values()}) == 1, "one member of each machine sums with the others"
    assert between["a"] >= SAMPLES * EPOCHS // (workers * BATCH)
    servers = Values(torch.optim.SGD)
    losses_of({**SERVERS, **ranks(workers)}, workers, servers)
    assert [*chain(*values[0].values)] == pytest.approx([*chain(*servers.values)], rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("machines", ["aa", "ab", "aab", "aabb", "abcb"])
def test_sums_are_compressed_between_machines_only(alone: None, monkeypatch: pytest.MonkeyPatch, machines: str) -> None:
    """All members have the same bits. On one machine they are those of uncompressed sums."""
    place = threading.local()
    monkeypatch.setattr(shared_members, "this_machine", lambda: place.machine)
    monkeypatch.setattr(collectives, "LARGEST_BYTES", 64)  # larger ones in pieces, on one machine over gloo

    def trained(how: str) -> list[float]:
        values = [Values(torch.optim.SGD) for _ in machines]
        with local_yard({**MIRRORED, **ranks(len(machines)), "job.all_reduce": how}) as (_, connect):
            jobs = [connect() for _ in machines]

            def train(at: int) -> None:
                place.machine = machines[at]
                values[at].train(jobs[at])

            side_by_side(len(machines), train)
        assert all(each.values == values[0].values for each in values)
        return [*chain(*values[0].values)]

    whole, narrow = trained("whole"), trained("bf16")
    assert narrow == pytest.approx(whole, rel=0.05, abs=0.01)
    assert (narrow != whole) is (len({*machines}) > 1)


def test_group_that_is_lost_within_a_backward_does_not_end_the_script(
    alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two members finds a loss when it begins the third sum of its hooks. Both form the next group."""
    monkeypatch.setattr(gradient_buckets, "FIRST_BYTES", 64)
    monkeypatch.setattr(gradient_buckets, "BUCKET_BYTES", 64)
    calls = iter(range(10_000))
    send_next = GradientBuckets._send_next

    def lose_one(buckets: GradientBuckets) -> None:
        if buckets is chosen[0] and next(calls) == 2:
            lost.append(sys._getframe(1).f_code.co_name)
            raise GroupLost("for the test")
        send_next(buckets)

    lost: list[str] = []
    chosen: list[GradientBuckets] = []
    monkeypatch.setattr(GradientBuckets, "join", joined_first(chosen))
    monkeypatch.setattr(GradientBuckets, "_send_next", lose_one)
    values = [Values(torch.optim.SGD) for _ in range(2)]
    with local_yard({**MIRRORED, **ranks(2)}) as (_, connect):
        jobs = [connect() for _ in range(2)]
        side_by_side(2, lambda at: values[at].train(jobs[at]))
    assert lost == ["_take_early"]
    assert values[0].values == values[1].values
    servers = Values(torch.optim.SGD)
    losses_of({**SERVERS, **ranks(2)}, 2, servers)
    assert [*chain(*values[0].values)] == pytest.approx([*chain(*servers.values)], rel=1e-9, abs=1e-12)


def joined_first(chosen: list[GradientBuckets]) -> Callable[[GradientBuckets, Collectives], None]:
    """GradientBuckets.join, which notes the first that joins."""
    join, lock = GradientBuckets.join, threading.Lock()

    def noted(buckets: GradientBuckets, members: Collectives) -> None:
        with lock:
            chosen.extend([] if chosen else [buckets])
        join(buckets, members)

    return noted


@pytest.mark.parametrize("machines", ["aaa", "abb"])
def test_all_use_gloo_if_one_cannot_open_the_memory_of_another(
    alone: None, monkeypatch: pytest.MonkeyPatch, machines: str
) -> None:
    this, join = threading.local(), OfferedMemory.join

    def refused(memory: OfferedMemory, *given: Any) -> SharedMembers:
        joined = join(memory, *given)
        if this.at != 2:
            return joined
        joined.leave()
        raise errors.NotShareable("this one cannot")

    monkeypatch.setattr(OfferedMemory, "join", refused)
    monkeypatch.setattr(shared_members, "this_machine", lambda: machines[this.at])
    monkeypatch.setattr(SharedSums, "begin", None)
    values = [Values() for _ in machines]
    with local_yard({**MIRRORED, **ranks(3)}) as (_, connect):
        jobs = [connect() for _ in machines]

        def train(at: int) -> None:
            this.at = at
            values[at].train(jobs[at])

        side_by_side(3, train)
    assert all(each.values == values[0].values for each in values)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "through shared memory, over gloo above 4 MiB"),
        ({"worker.same_host": "never"}, "over gloo"),
        ({"job.deterministic": True}, "in the order of the ranks over gloo"),
        ({"job.all_reduce": "bf16"}, "through shared memory, over gloo above 4 MiB"),
        ({"job.all_reduce": "fp16", "worker.same_host": "never"}, "in fp16 over gloo"),
        ({"job.all_reduce": "powersgd"}, "in powersgd over gloo"),
    ],
    ids=lambda each: "" if isinstance(each, str) else "-".join(each) or "plain",
)
def test_status_says_how_gradients_are_summed(alone: None, given: Mapping[str, object], told: str) -> None:
    """Until a worker is alone."""
    with local_yard({**MIRRORED, **ranks(2), **given}) as (yard, connect):
        jobs = [connect() for _ in range(2)]

        def train(at: int) -> None:
            counted = Counted(jobs[at], SAMPLES)
            with jobs[at] as job:
                for (index,) in job.batches(counted.data, batch_size=BATCH):
                    if job.step == 1:
                        wait_until(lambda: [each.sums for each in workers_of(yard)] == [told] * 2)
                    if at and job.step == 2:
                        return
                    if job.step == 4:
                        wait_until(lambda: [each.sums for each in workers_of(yard)] == [""])
                    counted.step(index, 2.0)

        side_by_side(2, train)
