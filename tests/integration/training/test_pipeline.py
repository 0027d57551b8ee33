"""A pipeline in processes of its own: a stage of the model in each (job.strategy pipeline)."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import shardyard as sy
from shardyard.domain import errors
from shardyard_launcher.cli import main
from shardyard_launcher.yard.local_cluster import LocalCluster
from tests.support import spread_jobs
from tests.support.alone import local_yard
from tests.support.spread_jobs import alone
from tests.support.yards import Probes, finish, running_yard, wait_for_any

SAMPLES, EPOCHS = 80, 5
OPTIONS = ("--samples", str(SAMPLES), "--epochs", str(EPOCHS))
STEPS = SAMPLES * EPOCHS // 8
COUNTED = ("--samples", "48", "--epochs", "4", "--pause-ms", "20")
WANTED = [[4.0] * 48] * 2
WITH_ROWS = {"job__pipeline__cut": "counts.second"}
"""So that each stage has counts in variables, and the second has the table."""


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    given = {"membership.lease_ms": 1_500, "membership.heartbeat_ms": 100}
    with running_yard(tmp_path_factory.mktemp("yard"), servers=1, settings=given) as cluster:
        yield cluster


def settings(yard: LocalCluster, job: str, **more: object) -> dict[str, object]:
    return spread_jobs.settings(yard, job, "pipeline", **more)


@pytest.fixture(scope="module")
def wanted(yard: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one process."""
    with Probes(tmp_path_factory.mktemp("alone")) as probes:
        losses = probes.run("stages", *OPTIONS, **alone(yard, "alone"))["losses"]
    assert len(losses) == STEPS == 50
    return [float(each) for each in losses]


@pytest.mark.long("ZBVZeroBubble")
@pytest.mark.parametrize(
    "schedule", ["1F1B", "GPipe", "LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"]
)
def test_losses_are_those_of_one_process(
    yard: LocalCluster, probes: Probes, wanted: list[float], schedule: str
) -> None:
    common = settings(yard, f"as-{schedule.lower()}", job__pipeline__schedule=schedule)
    started = [probes.start("stages", *OPTIONS, **common) for _ in range(2)]
    results = [finish(script, out) for script, out in started]
    for result in results:
        assert result["losses"] == pytest.approx(wanted, rel=1e-5)
    assert results[0]["digest"] == results[1]["digest"], "both have the whole model at the end"


def test_each_sample_counts_once_in_all_stages(yard: LocalCluster, probes: Probes) -> None:
    """A worker in reserve ends with the others, and has the whole model then, too."""
    common = settings(yard, "counted")
    started = [probes.start("stage-counts", *COUNTED, **common) for _ in range(3)]
    assert [finish(script, out)["counts"] for script, out in started] == [WANTED] * 3


def test_model_is_whole_if_the_checkpoint_of_the_last_step_came_first(
    yard: LocalCluster, probes: Probes, tmp_path: Path
) -> None:
    """It is written before the script asks for the next batch."""
    go_on = tmp_path / "go on"
    common = settings(yard, "early", job__checkpoint__url=tmp_path / "checkpoints", job__checkpoint__every_s=1)
    given = ("stage-counts", "--samples", "8", "--epochs", "1", "--pause-ms", "1500")
    started = [probes.start(*given, "--hold-at", "2", "--hold", str(go_on), **common) for _ in range(2)]
    for script, _ in started:
        script.wait_for("computed 2")
    time.sleep(2.5)
    go_on.touch()
    for script, out in started:
        assert finish(script, out)["counts"] == [[1.0] * 8] * 2


@pytest.mark.long("variables-1-frozen", "rows of tables-0-killed")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("with_rows", [False, True], ids=["variables", "rows of tables"])
def test_promise_2_each_sample_counts_once_when_a_stage_is_lost(
    yard: LocalCluster, probes: Probes, tmp_path: Path, how: signal.Signals, place: int, with_rows: bool
) -> None:
    """A worker in reserve takes its place, and both stages go back to the newest checkpoint. One that freezes does that
    between the two batches of a step. The second stage looks up rows."""
    common = settings(yard, f"lost-{how.name}-{place}-{with_rows}".lower(), **WITH_ROWS if with_rows else {})
    common |= {"job__checkpoint__url": tmp_path, "job__checkpoint__every_steps": 5}
    accumulate, more = "2" if how is signal.SIGSTOP else "1", ("--with-rows",) if with_rows else ()
    given = ("stage-counts", *COUNTED, "--accumulate", accumulate, *more)
    started = [probes.start(*given, **common) for _ in range(3)]
    wait_for_any([script for script, _ in started], "computed 13")
    in_place = [any(f"has place {place} of 2" in line for line in script.lines) for script, _ in started]
    victim, _ = started.pop(in_place.index(True))
    victim.process.send_signal(how)
    for script, out in started:
        assert finish(script, out)["counts"] == [*WANTED, WANTED[0]][: 2 + with_rows]


def test_step_with_rows_that_are_not_finite_changes_neither_rows_nor_variables(
    yard: LocalCluster, probes: Probes
) -> None:
    given = ("stage-counts", "--with-rows", "--samples", "48", "--epochs", "2", "--nan-samples", "3")
    started = [probes.start(*given, **settings(yard, "nan-rows", **WITH_ROWS)) for _ in range(2)]
    for script, out in started:
        first, second, rows = finish(script, out)["counts"]
        assert first == second == rows
        assert 2 * 48 - sum(rows) == 2 * 4, "of one step in each epoch"
    lines = [line for script, _ in started for line in script.lines]
    assert sum("the gradient of 'counts' is not finite; it does not count" in line for line in lines) == 2, lines


@pytest.mark.long("to servers")
@pytest.mark.parametrize(
    "strategies",
    [("pipeline", "parameter_server"), ("parameter_server", "pipeline")],
    ids=["to servers", "from servers"],
)
def test_checkpoint_of_a_pipeline_is_restored_under_another_strategy(
    yard: LocalCluster, probes: Probes, tmp_path: Path, wanted: list[float], strategies: tuple[str, str]
) -> None:
    """AdamW's state moves too: losses go on as those of a run that was not interrupted."""
    job = f"moved-{strategies[0].replace('_', '-')}"
    found: list[list[float]] = []
    for number, strategy in enumerate(strategies):
        common = settings(yard, job) if strategy == "pipeline" else alone(yard, job)
        common |= {"job__checkpoint__url": tmp_path}
        stop = ("--stop-at", "20") if number == 0 else ()
        started = [probes.start("stages", *OPTIONS, *stop, **common) for _ in range(1 + (strategy == "pipeline"))]
        found += [finish(script, out)["losses"] for script, out in started][:1]
        if number == 0:
            order = ["checkpoint", "restore", job, "--url", str(tmp_path), "--coordinator", yard.coordinator]
            assert main([*order, "--state", str(yard._folder)]) == 0
    stopped, went_on = found
    assert [*stopped, *went_on] == pytest.approx(wanted, rel=1e-5)


def test_mistakes_of_a_script_are_told(yard: LocalCluster, probes: Probes) -> None:
    started = [probes.start("stage-mistakes", **settings(yard, "mistakes")) for _ in range(2)]
    for script, out in started:
        result = finish(script, out)
        assert result["errors"] == {
            "step": "optimizer.step() in a job whose job.strategy is pipeline",
            "forward": "the forward of the whole model while its pipeline trains",
            "state": "optimizer.state_dict() in a job whose job.strategy is pipeline",
            "batch": "a batch of 6 samples, and 4 micro-batches",
            "samples": "job.train_step of tensors with 8, 4 samples in a pipeline",
            "last": "a batch of 6 samples (in the last step of an epoch), and 4 micro-batches",
            "no_sync": "job.no_sync in a job whose job.strategy is pipeline",
        }
        assert result["loss"] > 0, "and training goes on"


class RowsInBothStages(torch.nn.Module):
    def __init__(self, *names: str) -> None:
        super().__init__()
        self.first = sy.Embedding(2, table=names[0]) if names[0] else torch.nn.Linear(1, 2)
        self.inner = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(4)))
        self.second = sy.Embedding(2, table=names[1])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.inner(self.first(ids)) + self.second(ids)


@pytest.mark.parametrize(
    ("names", "schedule", "message"),
    [
        (("one", "two"), "1F1B", "embedding tables in the stages of 2 workers"),
        (("", "two"), "InterleavedZeroBubble", "embedding tables in stage 3, and the schedule InterleavedZeroBubble"),
    ],
    ids=["two stages", "zero bubble"],
)
def test_tables_that_a_pipeline_cannot_have_are_refused(
    alone: None, names: tuple[str, ...], schedule: str, message: str
) -> None:
    given = {"job.strategy": "pipeline", "job.pipeline.schedule": schedule, "job.checkpoint.url": "never"}
    with local_yard(given) as (_, connect), connect() as job:
        model = RowsInBothStages(*names)
        with pytest.raises(errors.UnsupportedModel, match=message):
            job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=torch.nn.functional.mse_loss)


def test_prepare_needs_a_loss_and_a_model_that_can_be_cut(alone: None) -> None:
    with local_yard({"job.strategy": "pipeline", "job.checkpoint.url": "never"}) as (_, connect), connect() as job:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(errors.ConfigurationError, match="without a loss in a job with"):
            job.prepare(model, optimizer)
        one = torch.nn.Sequential(torch.nn.Linear(2, 1))
        loss = torch.nn.functional.mse_loss
        with pytest.raises(errors.UnsupportedModel, match="a model of 1 parts"):
            job.prepare(one, torch.optim.SGD(one.parameters(), lr=0.1), loss=loss)
