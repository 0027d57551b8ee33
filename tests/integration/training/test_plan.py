"""A script is run until its job.prepare, and its parameters take no memory."""

from __future__ import annotations

import contextlib
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

import shardyard as sy
from shardyard.domain.consistency import ConsistencyMode
from shardyard.domain.errors import ConfigurationError, UnsupportedOptimizer
from shardyard.domain.replica_groups import Strategy
from shardyard_launcher.cli import main
from shardyard_worker.planning.dry_run import PlannedModel, PlannedTable, dry_run

SCRIPT = """
import sys
import torch
import shardyard as sy

{before}
with sy.connect("127.0.0.1:1", settings={{"job.consistency.mode": "sync"}}) as job:
    model = {model}
    try:
        model, optimizer = job.prepare(model, torch.optim.{optimizer})
    except Exception:
        pass
    raise AssertionError("a plan ends in job.prepare")
"""


def plan(folder: Path, model: str, optimizer: str = "Adam(model.parameters())", before: str = "") -> PlannedModel:
    script = folder / "script.py"
    script.write_text(SCRIPT.format(model=model, optimizer=optimizer, before=before))
    return dry_run(str(script), ["--steps", "3"])


@contextlib.contextmanager
def address_space(*, more_bytes: int) -> Iterator[None]:
    """This process gets no more than that."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + more_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def test_a_model_of_any_size_takes_no_memory(alone: None, tmp_path: Path) -> None:
    """60 gigabytes, in layers of 100 megabytes."""
    layers = "[torch.nn.Linear(5_000, 5_000, bias=False) for _ in range(600)]"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with address_space(more_bytes=4 << 30):
        found = plan(tmp_path, f"torch.nn.Sequential(*{layers}).to('cpu')")
    assert found.elements == 600 * 5_000**2
    assert (found.parameters, found.state, found.buffers, found.fixed) == (6 * 10**10, 12 * 10**10, 0, 0)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 1 << 20, "in KiB"
    assert found.settings.consistency.mode is ConsistencyMode.SYNC


def test_what_stays_in_the_worker_is_counted_apart(alone: None, tmp_path: Path) -> None:
    model = "torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5).requires_grad_(False)).double()"
    found = plan(tmp_path, model, "SGD(model[0].parameters(), lr=1, momentum=0.5)")
    assert (found.elements, found.parameters, found.state) == (20, 160, 160)
    assert found.buffers == 2 * 40 + 8
    assert found.fixed == 2 * 40


def test_layers_that_can_be_cut_are_counted(alone: None, tmp_path: Path) -> None:
    layers = "torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2), torch.nn.Linear(2, 1))"
    found = plan(tmp_path, layers)
    assert (found.cut, found.uncut) == (4 * (32 + 18), "")
    assert plan(tmp_path, "torch.nn.Linear(3, 1)").uncut.startswith("a model without two linear layers")


def test_tied_weights_count_once(alone: None, tmp_path: Path) -> None:
    before = """
class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Embedding(7, 3)
        self.last = torch.nn.Linear(3, 7, bias=False)
        self.last.weight = self.first.weight
"""
    assert plan(tmp_path, "Tied()", before=before).elements == 21


def test_tables_are_named(alone: None, tmp_path: Path) -> None:
    model = "torch.nn.ModuleDict({'users': sy.Embedding(8), 'top': torch.nn.Linear(8, 1)})"
    found = plan(tmp_path, model, "Adagrad(model.parameters())")
    assert found.tables == (PlannedTable("users", 8, 32),)
    assert found.elements == 9


def test_the_script_sees_its_own_arguments(alone: None, tmp_path: Path) -> None:
    before = "assert sys.argv[1:] == ['--steps', '3'] and sys.argv[0].endswith('script.py')"
    before_here = sys.argv
    assert plan(tmp_path, "torch.nn.Linear(2, 1)", before=before).elements == 3
    assert sys.argv is before_here


def test_everything_is_as_before_afterwards(alone: None, tmp_path: Path) -> None:
    connect, prepare, move = sy.connect, sy.Job.prepare, torch.nn.Module.to
    plan(tmp_path, "torch.nn.Linear(2, 1)")
    assert (sy.connect, sy.Job.prepare, torch.nn.Module.to) == (connect, prepare, move)
    assert not torch.nn.Linear(2, 1).weight.is_meta


@pytest.mark.parametrize("ending", ["pass", "sys.exit(3)"])
def test_a_script_without_prepare_is_an_error(alone: None, tmp_path: Path, ending: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import sys\n{ending}\n")
    with pytest.raises(ConfigurationError, match=r"without job\.prepare"):
        dry_run(str(script), [])


def test_an_optimizer_that_servers_lack_is_an_error(alone: None, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import shardyard as sy, torch\n"
        "model = torch.nn.Linear(2, 1)\n"
        "with sy.connect() as job:\n"
        "    job.prepare(model, torch.optim.LBFGS(model.parameters()))\n"
    )
    with pytest.raises(UnsupportedOptimizer):
        dry_run(str(script), [])


def test_the_command_prints_each_strategy(alone: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "script.py"
    made = {"before": "", "model": "torch.nn.Linear(1_000, 500, bias=False)", "optimizer": "Adam(model.parameters())"}
    script.write_text(SCRIPT.format(**made))
    assert main(["plan", "--workers", "3", "--set", "job.seed=4", str(script), "--steps", "3"]) == 0
    said = capsys.readouterr().out
    assert "500,000 parameters (1.9 MiB); adam keeps 3.8 MiB" in said
    assert all(strategy.value in said for strategy in Strategy)
    assert "each of 3 workers" in said
    assert "would choose job.strategy=multi_worker_mirrored: a step moves fewer bytes" in said
