"""A whole yard in this process: metrics, how a job is left, and the examples of the documentation."""

from __future__ import annotations

import re
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shardyard as sy
from shardyard.config import configuration
from shardyard.domain import errors
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_launcher.yard.in_process import COORDINATOR, LocalYard
from shardyard_worker.job import connect as worker
from tests.support.alone import SYNC, SYNC_2, Connect, Counted, local_yard, status

pytestmark = pytest.mark.usefixtures("alone")

DOCUMENT = Path(__file__).parents[3] / "docs" / "guides" / "training.md"

# ---- metrics


def test_metrics_are_reported_also_as_tensors() -> None:
    given = {"membership.heartbeat_ms": 10, "log.level": "error"}
    yard = LocalYard(configuration.load(None, {}, given).settings)
    inside = configuration.load(None, {}, given | {"coordinator": "127.0.0.1:1"}).settings
    job = worker.connect(inside.model_copy(update={"coordinator": COORDINATOR}), network=yard.network)
    try:
        loss = torch.nn.Parameter(torch.tensor(2.5))
        job.log(loss=loss * 2, accuracy=0.5, one=torch.ones(1, 1), steps=3)
        expected = {"loss": 5.0, "accuracy": 0.5, "one": 1.0, "steps": 3.0}
        until = time.monotonic() + 10
        while {metric.name: metric.value for metric in status(yard).metrics} != expected:
            assert time.monotonic() < until, status(yard)
            threading.Event().wait(0.005)
    finally:
        job.close()
        yard.close()


@pytest.mark.parametrize(
    "metrics",
    [
        {"loss": torch.zeros(2)},
        {"loss": torch.zeros(0)},
        {"loss": torch.zeros(1, dtype=torch.complex64)},
        {"loss": "good"},
        {"loss": None},
        {"n" * 129: 1.0},
    ],
)
def test_what_is_no_metric_is_refused_at_once(connect: Connect, metrics: dict[str, Any]) -> None:
    job = connect()
    with pytest.raises(errors.InvalidRequest, match="metric"):
        job.log(**metrics)


# ---- leaving


def test_a_script_that_raises_leaves_the_job_failed() -> None:
    with local_yard({}) as (yard, connect):

        def script() -> None:
            with connect() as job:
                job.register({"a": torch.ones(1)})
                assert status(yard).state == wire.JOB_STATE_RUNNING
                raise ZeroDivisionError("by zero")

        with pytest.raises(ZeroDivisionError):
            script()
        found = status(yard)
        assert found.state == wire.JOB_STATE_FAILED
        assert "ZeroDivisionError: by zero" in found.failure.what


def test_a_script_that_ends_leaves_the_job_finished() -> None:
    with local_yard({}) as (yard, connect):
        with connect() as job:
            job.register({"a": torch.ones(1)})
        assert status(yard).state == wire.JOB_STATE_FINISHED
        job.close()


@pytest.mark.parametrize("settings", [{}, SYNC])
def test_after_leaving_every_call_says_so_at_once(connect: Connect, settings: dict[str, Any]) -> None:
    counted = Counted(connect(settings=settings), 8)
    batches = counted.job.batches(counted.data, batch_size=2)
    next(batches)
    counted.job.close()
    counted.job.close()
    calls: list[Callable[[], object]] = [
        counted.optimizer.step,
        lambda: counted.job.push({"0": torch.zeros(8, dtype=torch.float64)}),
        counted.job.pull,
        lambda: counted.job.batches(counted.data),
        lambda: counted.job.register({"a": torch.ones(1)}),
        lambda: next(batches),
    ]
    begin = time.monotonic()
    for call in calls:
        with pytest.raises(errors.InvalidRequest, match="left"):
            call()
    assert time.monotonic() - begin < 2
    counted.job.log(loss=1.0)


def threads() -> set[threading.Thread]:
    return set(threading.enumerate())


def assert_no_more_than(before: set[threading.Thread]) -> None:
    for thread in threads() - before:
        thread.join(5)
    assert threads() <= before


@pytest.mark.parametrize("settings", [{}, SYNC_2])
def test_no_thread_is_left(settings: dict[str, Any]) -> None:
    before = threads()
    with sy.connect(settings={"yard.servers": 3, "log.level": "error"} | settings) as job:
        counted = Counted(job, 8)
        for (index,) in job.batches(counted.data, batch_size=2):
            counted.step(index)
    assert_no_more_than(before)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_device_that_is_not_there_is_an_error_and_leaves_no_thread() -> None:
    before = threads()
    with pytest.raises(errors.ConfigurationError, match="CUDA"):
        sy.connect(settings={"worker.device": "cuda", "log.level": "error"})
    assert_no_more_than(before)


# ---- documentation


def blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", DOCUMENT.read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("number", range(len(blocks())))
def test_the_examples_of_the_documentation_run(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # they write files
    before = threads()
    code = compile(blocks()[number], f"{DOCUMENT.name}, block {number + 1}", "exec")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exec(code, {"__name__": "__main__"})
    assert_no_more_than(before)
