"""What a script is told of its job, and where its metrics go, in process and over gRPC."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import TensorDataset

import shardyard as sy
from shardyard.domain import errors
from tests.support.alone import SYNC, SYNC_2, Connect
from tests.support.yards import SCRIPTS, Script, running_yard

DATA = TensorDataset(torch.randn(24, 2))


def prepared(job: sy.Job) -> tuple[torch.nn.Module, Any]:
    return job.prepare(model := torch.nn.Linear(2, 1), torch.optim.SGD(model.parameters(), lr=0.1))


def step(model: torch.nn.Module, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    found = EventAccumulator(str(folder)).Reload()
    return {name: [(each.step, each.value) for each in found.Scalars(name)] for name in found.Tags()["scalars"]}


# ---- callbacks


@pytest.mark.parametrize(("settings", "expected"), [({}, 6), (SYNC, 6), (SYNC_2, 3)])
def test_each_step_is_told_once_in_the_thread_that_trains(
    connect: Connect, settings: dict[str, Any], expected: int
) -> None:
    job = connect(settings=settings)
    steps: list[int] = []
    threads: set[threading.Thread] = set()

    @job.on_step
    def count(told: sy.Job) -> None:
        steps.append(told.step)
        threads.add(threading.current_thread())

    assert count is not None
    model, optimizer = prepared(job)
    for (x,) in job.batches(DATA, batch_size=4):
        step(model, optimizer, x)
    assert steps == list(range(1, expected + 1))
    assert threads == {threading.current_thread()}


def test_step_of_variables_without_a_model_is_told(connect: Connect) -> None:
    job = connect()
    steps: list[int] = []
    job.on_step(lambda told: steps.append(told.step))
    job.register({"w": torch.zeros(2)}, lr=0.1)
    job.push({"w": torch.ones(2)})
    job.push({"w": torch.ones(2)})
    assert steps == [1, 2]


def test_metrics_are_told_as_they_were_logged(connect: Connect) -> None:
    job = connect()
    told: list[dict[str, Any]] = []
    job.on_log(lambda _, metrics: told.append(dict(metrics)))
    job.log(loss=torch.tensor([2.0], requires_grad=True), lr=0.5)
    assert told == [{"loss": torch.tensor([2.0]), "lr": 0.5}]
    assert not told[0]["loss"].requires_grad
    with pytest.raises(errors.InvalidRequest):
        job.log(loss="bad")
    assert len(told) == 1


def test_checkpoints_are_told_once_each(connect: Connect, tmp_path: Path) -> None:
    """A checkpoint's step is that of the worker that asks, also where its next heartbeat is far away."""
    job = connect(settings={"job.checkpoint.url": str(tmp_path), "membership.heartbeat_ms": 1_000})
    told: list[tuple[int, int]] = []
    job.on_checkpoint(lambda _, taken: told.append((taken.number, taken.step)))
    job.register({"w": torch.zeros(2)}, lr=0.1)
    numbers = []
    for _ in range(3):
        job.push({"w": torch.ones(2)})
        numbers.append((job.checkpoint(), job.step))
    assert told[-3:] == numbers
    assert len(set(told)) == len(told)


@pytest.mark.parametrize("settings", [{}, SYNC, SYNC_2])
def test_the_stop_is_told_once_and_last(connect: Connect, settings: dict[str, Any]) -> None:
    job = connect(settings=settings)
    told: list[Any] = []
    job.on_step(lambda told_by: told.append(told_by.step))
    job.on_stop(lambda told_by, stop: told.append((told_by.should_stop, stop.reason)))
    model, optimizer = prepared(job)
    for number, (x,) in enumerate(job.batches(DATA, batch_size=4)):
        step(model, optimizer, x)
        if number == 1:
            job.stop("enough")
    assert list(job.batches(DATA, batch_size=4)) == []
    assert told[-1] == (True, "enough")
    assert told[:-1] == list(range(1, job.step + 1))


@pytest.mark.parametrize("occasion", ["on_step", "on_log", "on_stop"])
def test_what_a_callback_raises_is_the_scripts(connect: Connect, occasion: str) -> None:
    job = connect()

    def fail(*_: object) -> None:
        raise ZeroDivisionError(occasion)

    getattr(job, occasion)(fail)
    job.register({"w": torch.zeros(2)}, lr=0.1)
    if occasion == "on_stop":
        job.stop()
    with pytest.raises(ZeroDivisionError, match=occasion):
        job.log(loss=1.0) if occasion == "on_log" else job.push({"w": torch.ones(2)})
    assert job.step == (0 if occasion == "on_log" else 1)


def test_early_stopping_ends_the_loop(connect: Connect) -> None:
    job = connect()
    early = sy.EarlyStopping("loss", patience=2)
    assert job.on_log(early) is early
    model, optimizer = prepared(job)
    for number, (x,) in enumerate(job.batches(DATA, batch_size=2)):
        step(model, optimizer, x)
        job.log(loss=max(5 - number, 3))
    assert job.step == 5
    assert job.stopping is not None
    assert job.stopping.reason == "loss has not got better than 3, of step 3"


# ---- a job as one sees it


def test_job_shows_itself_and_escapes_what_others_wrote(connect: Connect) -> None:
    job = connect(settings={"job.name": "digits"})
    assert repr(job) == "<Job 'digits', async, step 0, no variables yet>"
    job.register({"w": torch.zeros(2)}, lr=0.1)
    job.push({"w": torch.ones(2)})
    job.log(**{"<script>": 0.25}, loss=torch.tensor(0.125))
    job.stop('<img src="x">&')
    shown = job._repr_html_()
    assert set(re.findall(r"</?(\w+)", shown)) == {"table", "caption", "tbody", "tr", "th", "td"}
    for said in ("job digits", "&lt;script&gt;", "0.25", "0.125", "&lt;img src=&quot;x&quot;&gt;&amp;", "training"):
        assert said in shown
    job.close()
    assert repr(job) == "<Job 'digits', async, step 1, left>"
    assert "left" in job._repr_html_()


# ---- event files


def test_metrics_go_into_event_files_by_the_jobs_step(connect: Connect, tmp_path: Path) -> None:
    job = connect(settings={"job.name": "digits", "metrics.tensorboard": str(tmp_path / "runs")})
    model, optimizer = prepared(job)
    logged = []
    for (x,) in job.batches(DATA, batch_size=4):
        loss = step(model, optimizer, x)
        job.log(loss=loss, epoch=0)
        logged.append((job.step, float(loss.detach())))
    job.close()
    job.log(loss=7.0)
    (folder,) = (tmp_path / "runs" / "digits").iterdir()
    assert scalars(folder) == {"loss": logged, "epoch": [(number, 0.0) for number in range(1, 7)]}


def test_job_whose_event_files_cannot_be_made_is_not_begun(connect: Connect, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(errors.ConfigurationError, match=r"metrics\.tensorboard"):
        connect(settings={"metrics.tensorboard": str(tmp_path / "file")})


@pytest.mark.long
def test_workers_over_grpc_are_told_and_write_a_run_each(tmp_path: Path) -> None:
    settings = {"membership.heartbeat_ms": 100, "job.checkpoint.every_steps": 0}
    with running_yard(tmp_path / "yard", settings=settings) as yard:
        environment = {
            "SHARDYARD_COORDINATOR": yard.coordinator,
            "SHARDYARD_JOB": "followed",
            "SHARDYARD_WORKERS": "2",
            "SHARDYARD__METRICS__TENSORBOARD": str(tmp_path / "runs"),
            "SHARDYARD__JOB__CONSISTENCY__MODE": "sync",
            "SHARDYARD__JOB__CHECKPOINT__EVERY_STEPS": "5",
        }
        scripts = [Script([str(SCRIPTS / "following.py")], environment) for _ in range(2)]
        codes = [script.wait() for script in scripts]
    assert codes == [0, 0], [script.output for script in scripts]
    said = [json.loads(next(line for line in script.lines if line.startswith("{"))) for script in scripts]
    (end,) = {each["step"] for each in said}
    for each in said:
        assert each["steps"] == list(range(each["steps"][0], end + 1))
        assert each["checkpoints"] == sorted(set(each["checkpoints"]))
        assert each["checkpoints"]
        assert each["stops"] == ["value has not got better than 1, of step 1"]
    runs = {folder.name.rpartition("-")[2]: scalars(folder) for folder in (tmp_path / "runs" / "followed").iterdir()}
    assert sorted(runs) == sorted(each["worker"] for each in said)
    for each in said:
        assert [at for at, _ in runs[each["worker"]]["value"]] == each["logged"]
