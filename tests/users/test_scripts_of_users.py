"""Scripts as users write them, unchanged but for the lines that the documentation says. Alone and with several workers,
they learn what plain PyTorch learns from the same batches, and each sample counts once an epoch, whoever dies."""

from __future__ import annotations

import runpy
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from shardyard.wire.v1 import coordinator_pb2 as wire
from tests.support.yards import RoleYard, Script
from tests.users import edits

SAMPLES = {"cnn": 3 * 192, "gpt": 2 * 256, "two_tower": 4 * 480}
"""All that count in the epochs of a script."""
BATCH = {"cnn": 16, "gpt": 8, "two_tower": 24}
WAYS = [(name, way) for name in edits.CHANGES for way in edits.CHANGES[name]]
all_ways = pytest.mark.parametrize(("name", "way"), WAYS)


def loss(name: str, learned: dict[str, torch.Tensor]) -> float:
    """Of the script's model with these parameters, over all its data."""
    script = runpy.run_path(str(edits.SCRIPTS / f"{name}.py"))
    match name:
        case "cnn":
            dataset = script["Images"]()
            model, data = script["Net"](), script["collate"]([dataset[index] for index in range(len(dataset))])
        case "gpt":
            model, texts = script["Gpt"](), script["texts"](256)
            data = texts[:, :-1], texts[:, 1:]
        case _:
            model, data = script["TwoTowers"](), script["clicks"]().tensors
    model.load_state_dict(learned)
    *inputs, expected = data
    with torch.no_grad():
        found = model(*inputs)
    if expected.is_floating_point():
        return float(F.binary_cross_entropy_with_logits(found, expected))
    return float(F.cross_entropy(found.flatten(0, -2), expected.flatten()))


def assert_same(name: str, learned: dict[str, torch.Tensor], plain: dict[str, torch.Tensor]) -> None:
    assert loss(name, learned) == pytest.approx(loss(name, plain), abs=1e-6)
    torch.testing.assert_close(learned, plain, rtol=1e-5, atol=1e-5)


class Run:
    """Runs a user's script, plain or changed for a job."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._scripts: list[Script] = []

    def plain(self, name: str, *options: str) -> dict[str, torch.Tensor]:
        """The parameters that the script as it is has learned."""
        script = self._start(edits.SCRIPTS / f"{name}.py", "plain", options, {})
        assert script.wait() == 0, script.output
        return self._learned("plain")

    def workers(
        self, count: int, name: str, way: str, *options: str, coordinator: str = "", **settings: object
    ) -> list[Script]:
        path = self._folder / f"{name}.py"
        path.write_text(edits.edited(name, way))
        clip = {"job__clip__norm": 1.0} if name == "gpt" else {}
        given = {"job__workers_expected": count, "job__consistency__mode": "sync"} | clip | settings
        environment = {f"SHARDYARD__{key.upper()}": str(value) for key, value in given.items()}
        environment |= {"SHARDYARD_JOB": name, "SHARDYARD_COORDINATOR": coordinator}
        return [self._start(path, "job", options, environment) for _ in range(count)]

    def learned(self, scripts: Sequence[Script]) -> dict[str, torch.Tensor]:
        for script in scripts:
            assert script.wait() == 0, script.output
        return self._learned("job")

    def _start(self, path: Path, out: str, options: Sequence[str], environment: dict[str, str]) -> Script:
        self._scripts.append(Script([str(path), str(self._folder / f"{out}.pt"), *options], environment))
        return self._scripts[-1]

    def _learned(self, out: str) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = torch.load(self._folder / f"{out}.pt", weights_only=True)
        return found

    def close(self) -> None:
        for script in self._scripts:
            script.kill()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    yield made
    made.close()


def batch(name: str, workers: int) -> str:
    return f"--batch-size={BATCH[name] // workers}"


@pytest.mark.long("cnn-sampler", "two_tower-loader")
@all_ways
def test_alone_a_script_learns_what_it_learns_without_a_job(run: Run, name: str, way: str) -> None:
    learned = run.learned(run.workers(1, name, way, job__consistency__logical_ranks=1))
    assert_same(name, learned, run.plain(name))


@pytest.mark.long("2-cnn-loader", "2-gpt-loader")
@all_ways
@pytest.mark.parametrize("workers", [2, 4])
def test_synchronous_workers_learn_what_one_process_learns_from_the_same_batches(
    run: Run, yard: RoleYard, name: str, way: str, workers: int
) -> None:
    scripts = run.workers(workers, name, way, batch(name, workers), coordinator=yard.address)
    learned = run.learned(scripts)
    assert_same(name, learned, run.plain(name))
    assert counted(yard) == SAMPLES[name]


@pytest.mark.long("2-two_tower-dataset")
@all_ways
@pytest.mark.parametrize("workers", [1, 2])
def test_asynchronous_workers_count_each_sample_once(
    run: Run, yard: RoleYard, name: str, way: str, workers: int
) -> None:
    scripts = run.workers(workers, name, way, coordinator=yard.address, job__consistency__mode="async")
    learned = run.learned(scripts)
    assert all(value.isfinite().all() for value in learned.values())
    assert counted(yard) == SAMPLES[name]


@pytest.mark.long("sync-cnn-sampler")
@all_ways
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_each_sample_counts_once_if_a_worker_is_killed(
    run: Run, yard: RoleYard, name: str, way: str, mode: str
) -> None:
    settings: dict[str, Any] = {"coordinator": yard.address, "job__consistency__mode": mode}
    scripts = run.workers(2, name, way, batch(name, 2), **settings)
    wait_for_samples(yard, SAMPLES[name] // 3)
    scripts.pop().kill()
    learned = run.learned([*scripts, *run.workers(1, name, way, batch(name, 2), **settings)])
    if mode == "sync":
        assert_same(name, learned, run.plain(name))
    assert counted(yard) == SAMPLES[name]


@pytest.mark.long
def test_bfloat16_is_as_far_from_one_process_as_its_rounding(run: Run, yard: RoleYard) -> None:
    scripts = run.workers(2, "gpt", "loader", batch("gpt", 2), "--bf16", coordinator=yard.address)
    learned = run.learned(scripts)
    assert loss("gpt", learned) == pytest.approx(loss("gpt", run.plain("gpt", "--bf16")), rel=0.01)


def counted(yard: RoleYard) -> int:
    (job,) = yard.ended().jobs
    assert job.state == wire.JOB_STATE_FINISHED
    return job.samples


def wait_for_samples(yard: RoleYard, samples: int) -> None:
    until = time.monotonic() + 60
    while not any(job.samples >= samples for job in yard.status().jobs):
        assert time.monotonic() < until, yard.status()
        time.sleep(0.02)
