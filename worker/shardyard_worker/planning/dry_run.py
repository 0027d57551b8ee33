"""Runs a script until it calls job.prepare, and takes down what it has given there.

The script runs as it is, in this process, with a yard of its own. But its parameters are on torch's meta device from
the moment when a module gets them, so that only one parameter at a time takes memory. Must not know: what is done with
the sizes.

Source of the method: the `init_empty_weights` of Hugging Face Accelerate.
"""

from __future__ import annotations

import contextlib
import runpy
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import shardyard as sy
from shardyard.config.settings import JobSettings, TensorSettings
from shardyard.domain.errors import ConfigurationError, UnsupportedModel
from shardyard.domain.optimizers import OptimizerSpec, slots_of
from shardyard.runtime.malloc import Kept, tune_malloc
from shardyard_worker.embedding.table import tables_of
from shardyard_worker.job.job import Job
from shardyard_worker.optimizers.server_optimizer import translate
from shardyard_worker.sharding.tensor_plan import plan_for
from shardyard_worker.training.model_variables import buffers_of


@dataclass(frozen=True, slots=True)
class PlannedTable:
    """`row_bytes`: of a row's values, without the optimizer's state."""

    name: str
    dim: int
    row_bytes: int


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """What a script has given to job.prepare, in bytes. `elements`: of the parameters of its optimizer. `parameters`:
    their bytes. `state`: what the optimizer keeps of them. `buffers`: those that are variables of the job. `fixed`:
    what else the model has, which stays in the worker. `cut`: bytes of the parameters of layers that
    job.strategy tensor cuts. `uncut`: why it cuts none."""

    settings: JobSettings
    optimizer: str
    elements: int
    parameters: int
    state: int
    buffers: int
    fixed: int
    tables: tuple[PlannedTable, ...] = ()
    cut: int = 0
    uncut: str = ""


class _Prepared(BaseException):
    """Ends the script where it calls job.prepare. No script catches it by `except Exception`."""

    def __init__(self, found: PlannedModel) -> None:
        self.found = found


def dry_run(script: str, arguments: Sequence[str]) -> PlannedModel:
    """The model of a script. Settings are taken as `sy.connect` takes them, but the coordinator's address. Raises
    ConfigurationError if the script ends without job.prepare, and what the script raises."""
    with _arguments([script, *arguments]), _weights_without_memory(), _alone():
        try:
            runpy.run_path(script, run_name="__main__")
        except _Prepared as ended:
            return ended.found
        except SystemExit as ended:
            raise _unprepared(script, f"exit status {ended.code}") from ended
    raise _unprepared(script, "its end")


def _unprepared(script: str, how: str) -> ConfigurationError:
    return ConfigurationError(
        f"{script} came to {how} without job.prepare",
        why="a plan is made of the model and the optimizer that job.prepare is given",
        todo="call job.prepare(model, optimizer) in the script; its arguments follow it on the command line",
    )


def sizes_of(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, spec: OptimizerSpec, settings: JobSettings
) -> PlannedModel:
    """
    >>> model = torch.nn.Linear(3, 2)
    >>> optimizer = torch.optim.Adam(model.parameters())
    >>> found = sizes_of(model, optimizer, translate(optimizer), JobSettings())
    >>> found.elements, found.parameters, found.state
    (8, 32, 64)
    """
    tables = tables_of(model)
    rows = {table.weight for table in tables.values()}
    buffers = [each.target for each in buffers_of(model)]
    elements = parameters = state = 0
    own = {*rows, *buffers}
    for group, numbers in zip(optimizer.param_groups, spec.groups, strict=True):
        slots = len(slots_of(spec.kind, numbers))
        for parameter in group["params"]:
            if parameter not in rows:
                own.add(parameter)
                elements += parameter.numel()
                parameters += parameter.nbytes
                state += slots * parameter.nbytes
    return PlannedModel(
        settings,
        spec.kind,
        elements,
        parameters,
        state,
        buffers=sum(each.nbytes for each in buffers),
        fixed=sum(each.nbytes for each in (*model.parameters(), *model.buffers()) if each not in own),
        tables=tuple(PlannedTable(name, table.dim, 4 * table.dim) for name, table in sorted(tables.items())),
        **_cut_of(model, settings.tensor),
    )


def _cut_of(model: torch.nn.Module, settings: TensorSettings) -> dict[str, Any]:
    try:
        plan = plan_for(model, settings.size, settings.colwise_patterns, settings.rowwise_patterns)
    except UnsupportedModel as error:
        return {"uncut": error.what}
    layers = [model.get_submodule(name) for name in (*plan.colwise, *plan.rowwise)]
    return {"cut": sum(parameter.nbytes for layer in layers for parameter in layer.parameters())}


@contextlib.contextmanager
def _arguments(given: Sequence[str]) -> Iterator[None]:
    before, path = sys.argv, sys.path[0]
    sys.argv, sys.path[0] = [*given], str(Path(given[0]).resolve().parent)
    try:
        yield
    finally:
        sys.argv, sys.path[0] = before, path


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """`sy.connect` joins no yard, whatever address it is given, and job.prepare ends the script."""

    def connect(_: str | None = None, *, settings: Any = None, **given: Any) -> Job:
        job = joined(settings={**(settings or {}), "coordinator": ""}, **given)
        tune_malloc(Kept.LITTLE)  # the memory of one parameter is given back before the next one comes
        return job

    def prepare(job: Job, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *_: Any, **__: Any) -> None:
        found = sizes_of(model, optimizer, translate(optimizer), job._session.job_settings)
        job.close()
        raise _Prepared(found)

    joined = sy.connect
    with _replaced(sy, "connect", connect), _replaced(Job, "prepare", prepare):
        yield


@contextlib.contextmanager
def _weights_without_memory() -> Iterator[None]:
    """A module's parameters go to the meta device when it gets them, and stay there."""
    module = torch.nn.Module
    take, move = module.register_parameter, module.to

    def register_parameter(self: torch.nn.Module, name: str, param: torch.nn.Parameter | None) -> None:
        if type(param) is torch.nn.Parameter and not param.is_meta:
            param = torch.nn.Parameter(param.detach().to("meta"), param.requires_grad)
        take(self, name, param)

    def to(self: torch.nn.Module, *arguments: Any, **given: Any) -> torch.nn.Module:
        _, dtype, _, _ = torch._C._nn._parse_to(*arguments, **given)
        return self if dtype is None else move(self, dtype)

    def stay(self: torch.nn.Module, *_: Any, **__: Any) -> torch.nn.Module:
        return self

    with contextlib.ExitStack() as replaced:
        replaced.enter_context(_replaced(module, "register_parameter", register_parameter))
        for name, function in (("to", to), ("cuda", stay), ("cpu", stay)):
            replaced.enter_context(_replaced(module, name, function))
        yield


@contextlib.contextmanager
def _replaced(owner: Any, name: str, function: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, function)
    try:
        yield
    finally:
        setattr(owner, name, before)
