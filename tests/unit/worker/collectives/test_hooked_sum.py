"""Sums by a communication hook, as operations of a process group."""

from __future__ import annotations

import datetime
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardyard_worker.collectives.hooked_sum import HookBucket, HookedSum

GROUP = SimpleNamespace(size=lambda: 3)


def summed(future: torch.futures.Future[Any], tensor: torch.Tensor) -> HookedSum:
    return HookedSum(lambda _, bucket: future, GROUP, HookBucket(tensor))


def test_mean_of_a_hook_becomes_a_sum_once() -> None:
    future, tensor = torch.futures.Future[Any](), torch.zeros(2)
    work = summed(future, tensor)
    assert not work.is_completed()
    tensor.copy_(torch.tensor([1.0, 2.0]))
    future.set_result(tensor)
    assert work.is_completed()
    assert tensor.tolist() == [1.0, 2.0]
    for _ in range(2):  # it is asked whether it has failed, and then waited for
        work.wait()
    assert tensor.tolist() == [3.0, 6.0]


def test_failure_of_a_hook_is_raised_and_changes_nothing() -> None:
    future, tensor = torch.futures.Future[Any](), torch.ones(2)
    work = summed(future, tensor)
    future.set_exception(RuntimeError("a member is gone"))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="a member is gone"):
            work.wait()
    assert tensor.tolist() == [1.0, 1.0]


def test_wait_ends_with_its_time() -> None:
    work = summed(torch.futures.Future[Any](), torch.ones(2))
    with pytest.raises(RuntimeError, match="not yet"):
        work.wait(datetime.timedelta(milliseconds=5))
