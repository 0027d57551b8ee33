"""`job.prepare`: moves a model's parameters and its optimizer to the servers.

In: model, optimizer, scheduler. Out: an optimizer whose `step()` pushes gradients and pulls parameters. In local mode
its `step()` runs the script's own optimizer, and values are exchanged once a round. Must not know: how a push travels.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch.optim.lr_scheduler import LRScheduler

from shardyard.domain.errors import ConfigurationError, InvalidRequest, UnsupportedModel, UnsupportedOptimizer
from shardyard.domain.optimizers import OptimizerSpec
from shardyard.domain.replica_groups import Between, Strategy
from shardyard_worker.consistency.local_sgd import InnerOptimizer, LocalOptimizer, LocalRounds, outer_optimizer
from shardyard_worker.consistency.synchronous import SyncStrategy
from shardyard_worker.embedding.table import tables_by_path, tables_of
from shardyard_worker.job.training_loop import TrainingLoop
from shardyard_worker.optimizers.grad_scaler import SCALER_COUNTS, JobScaler, unscaler
from shardyard_worker.optimizers.lr_schedule import JobScheduler
from shardyard_worker.optimizers.script_steps import refuse_steps
from shardyard_worker.optimizers.server_optimizer import Scaled, ServerOptimizer, translate
from shardyard_worker.optimizers.torch_state import TorchState, VariableState, from_torch, to_torch
from shardyard_worker.pipeline.pipeline import Pipeline
from shardyard_worker.replicas.replica import Replica
from shardyard_worker.replicas.spread_model import Loss, SpreadModel
from shardyard_worker.sharding.sharded_model import FullyShardedModel, TensorParallelModel
from shardyard_worker.training.model_variables import buffers_of, parameters_of
from shardyard_worker.training.shares import RowShares, Shares, WholeVariables
from shardyard_worker.training.table_binding import TableBinding
from shardyard_worker.training.variables import StepInput, Variable

log = logging.getLogger("shardyard.worker")

JobOptimizer = ServerOptimizer | LocalOptimizer
_GRAD = operator.attrgetter("grad")


def prepare(
    loop: TrainingLoop,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: LRScheduler | None,
    loss: Loss | None = None,
) -> tuple[JobOptimizer, JobScheduler | None]:
    """Raises UnsupportedOptimizer, UnsupportedModel, VariableConflict, ConfigurationError, InvalidRequest."""
    loop.check_first()
    if not isinstance(model, torch.nn.Module) or not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidRequest(
            f"job.prepare({type(model).__name__}, {type(optimizer).__name__})",
            why="it takes a model and then its optimizer",
            todo="call model, optimizer = job.prepare(model, optimizer)",
        )
    if isinstance(optimizer, ServerOptimizer | LocalOptimizer):
        raise UnsupportedOptimizer(
            "an optimizer that job.prepare of another job has returned",
            why="it takes the steps of that job",
            todo="give job.prepare a new optimizer, for example torch.optim.Adam(model.parameters())",
        )
    paths = {name: path for name, (path, _) in tables_by_path(model).items()}
    tables = tables_of(model)
    strategy = loop.session.job_settings.strategy
    if tables and loop.session.job_settings.has_replicas and loop.session.job_settings.clip.norm:
        raise ConfigurationError(
            f"embedding table {next(iter(tables))!r} in a job with job.clip.norm and job.strategy {strategy.value}",
            why="the norm of a step's gradient has parts of rows, on the servers, and of variables, in the workers",
            todo="set job.clip.norm to 0, or job.strategy to parameter_server",
        )
    if tables and loop.is_local:
        raise ConfigurationError(
            f"embedding table {next(iter(tables))!r} in a job with job.consistency.mode local",
            why="a round is steps that a worker takes by itself, and rows are on the servers",
            todo="set job.consistency.mode to sync, hybrid, async or bounded",
        )
    if loop.is_local:
        return _prepare_local(loop, model, optimizer, scheduler)
    spec = translate(optimizer)
    schedule = None if scheduler is None else JobScheduler(scheduler, optimizer, lambda: loop.step)
    parameters, buffers = parameters_of(model, optimizer, tables), buffers_of(model)
    scaler = loop.scaler
    counts = [] if scaler is None else [Variable(SCALER_COUNTS, scaler.state)]
    rows = TableBinding(tables, optimizer.param_groups, paths) if tables else None
    step = _GradientStep(loop, parameters, buffers, rows, scaler, schedule)
    state = _state_of(optimizer, spec, parameters)
    replica = _replica_of(loop, model, parameters, buffers, optimizer, spec, loss)
    fetched = partial(_fetched_state, loop, spec, replica)
    prepared = ServerOptimizer(optimizer, spec.kind, step, rows, fetched)
    variables = [*parameters, *buffers, *counts]
    shares = _shares_of(loop, replica, variables, has_tables=bool(tables))
    loop.begin(
        variables, spec, prepared.settings, model=model, tables=rows, state=state, replica=replica, shares=shares
    )
    loop.at_end.callback(refuse_steps(optimizer, unless=lambda: replica is not None and replica.is_stepping).remove)
    if schedule is not None:
        schedule.follow()
    return prepared, schedule


def _replica_of(
    loop: TrainingLoop,
    model: torch.nn.Module,
    parameters: Sequence[Variable],
    buffers: Sequence[Variable],
    optimizer: torch.optim.Optimizer,
    spec: OptimizerSpec,
    loss: Loss | None,
) -> Replica | SpreadModel | None:
    """The variables, for strategies under which they are in this worker. A running job can switch to one. None if they
    must be on the servers. Raises ConfigurationError, UnsupportedModel."""
    strategy = loop.session.job_settings.strategy
    if loop.scaler is not None:
        if not strategy.uses_groups:
            return None
        raise ConfigurationError(
            f"job.scaler in a job with job.strategy {strategy.value}",
            why="its counts are variables of the servers",
            todo="use bfloat16, which needs no scale, or job.strategy parameter_server",
        )
    if not strategy.is_spread:
        return Replica(parameters, buffers, optimizer, spec)
    if not parameters:
        raise UnsupportedModel(
            f"a model of tables alone in a job with job.strategy {strategy.value}",
            why="rows are on the servers, and nothing is left for the workers to have parts of",
            todo="set job.strategy to parameter_server or multi_worker_mirrored",
        )
    device = parameters[0].target.device
    if device.type != "cpu":
        raise ConfigurationError(
            f"a model on device {device} in a job with job.strategy {strategy.value}",
            why="workers send to each other by gloo, from host memory",
            todo="set worker.device to cpu, or use another job.strategy",
        )
    if loss is None:
        raise ConfigurationError(
            f"job.prepare without a loss in a job with job.strategy {strategy.value}",
            why="the forward and the backward are computed by several workers together",
            todo="call job.prepare(model, optimizer, loss=f), and job.train_step(x, y) for each batch",
        )
    settings, given = loop.session.job_settings, (model, parameters, buffers, optimizer, spec)
    if strategy is Strategy.PIPELINE:
        return Pipeline(*given, settings.pipeline, loss)
    if strategy is Strategy.SHARDED:
        return FullyShardedModel(*given, settings.sharded, loss, shares=settings.shares)
    return TensorParallelModel(*given, settings.tensor, loss)


def _shares_of(
    loop: TrainingLoop, replica: Replica | SpreadModel | None, variables: Sequence[Variable], *, has_tables: bool
) -> Shares | None:
    """What each worker of a replica pushes; None: replicas have no parts that are pushed. Raises ConfigurationError."""
    settings, exchange = loop.session.job_settings, loop.session.settings.worker.exchange
    if settings.between is not Between.PARAMETER_SERVER:
        return None
    if exchange != "blocking":
        raise ConfigurationError(
            f"worker.exchange {exchange} in a job with job.between {settings.between.value}",
            why="the workers of a replica push a gradient after all of them have computed it",
            todo="leave worker.exchange out",
        )
    if has_tables and loop.session.settings.worker.cached_rows_bytes:
        raise ConfigurationError(
            f"worker.cached_rows_bytes in a job with job.between {settings.between.value}",
            why="gradients of cached rows are pushed by other workers too, so the cache would miss updates",
            todo="leave worker.cached_rows_bytes out",
        )
    if isinstance(replica, Pipeline):
        return WholeVariables(replica.places, settings.workers_per_rank)
    return RowShares([each.spec for each in variables], settings.shares)


def adopt_scaler(loop: TrainingLoop, scaler: JobScaler) -> None:
    """Uses the scaler in this job. Raises InvalidRequest."""
    loop.session.check()
    if loop.trainer is not None or loop.scaler is not None:
        raise InvalidRequest(
            "job.scaler " + ("after job.prepare" if loop.scaler is None else "a second time"),
            why="the scale is one of the job's variables",
            todo="call it once, before job.prepare",
        )
    if loop.is_local:
        raise InvalidRequest(
            "job.scaler in a job of local steps",
            why="each worker takes its steps by itself, with an optimizer of its own",
            todo="use torch.amp.GradScaler",
        )
    if scaler.is_enabled():
        loop.scaler = scaler


def _state_of(
    optimizer: torch.optim.Optimizer, spec: OptimizerSpec, parameters: Sequence[Variable]
) -> dict[int, VariableState]:
    """The state that the optimizer has, from steps that it took or from a file, by the places of the parameters."""
    found = {}
    for at, parameter in enumerate(parameters):
        state, group = optimizer.state.get(parameter.target), spec.groups[parameter.spec.group]
        if state:
            given = from_torch(spec.kind, group, state, parameter.target, parameter.spec.name)
            found.update({} if given is None else {at: given})
    return found


def _fetched_state(
    loop: TrainingLoop, spec: OptimizerSpec, replica: Replica | SpreadModel | None
) -> Mapping[torch.Tensor, TorchState]:
    if replica is not None and loop.session.job_settings.strategy.uses_groups:
        return replica.optimizer_state
    if loop.session.has_left:
        raise InvalidRequest(
            "optimizer.state_dict() after the job was left",
            why="the state is on the servers, and this process has left them",
            todo="call it inside of `with sy.connect() as job:`",
        )
    variables = loop.need_trainer().variables
    found = {}
    for at, state in loop.optimizer_state().items():
        variable = variables[at]
        as_torch = to_torch(spec.kind, spec.groups[variable.spec.group], state, variable.spec.shape)
        found.update({variable.target: as_torch} if as_torch else {})
    return found


class _GradientStep:
    """`optimizer.step()`: collects the gradients of parameters and rows, and contributes them."""

    def __init__(
        self,
        loop: TrainingLoop,
        parameters: Sequence[Variable],
        buffers: Sequence[Variable],
        rows: TableBinding | None,
        scaler: JobScaler | None,
        schedule: JobScheduler | None,
    ) -> None:
        self._loop = loop
        self._targets = [parameter.target for parameter in parameters]
        self._buffers = buffers
        self._rows = rows
        self._scaler = scaler
        self._schedule = schedule
        self._warned_of_scaler = False
        self._warned_of_changes = False

    def __call__(self, optimizer: ServerOptimizer, scaled: Scaled | None) -> None:
        if self._schedule is not None:
            self._schedule.follow()
        if self._rows is not None and scaled is not None and self._scaler is None:
            raise UnsupportedModel(
                "a model with embedding tables, and a scaler of torch's",
                why="it looks at parameters of a size, and would leave the gradients of rows scaled",
                todo="use job.scaler(), before job.prepare; or bfloat16, which needs no scale",
            )
        if not self._warned_of_changes:
            self._look_for_changes()
        taken = None if self._rows is None else self._rows.take()
        sent: list[torch.Tensor | None] = [*map(_GRAD, self._targets)]
        overflow = False
        if scaled is not None:
            sent, overflow = self._unscaled(sent, scaled)
        if taken is not None and scaled is not None:
            taken = None if overflow else taken.unscaled(scaled.scale)
        for buffer in self._buffers:
            sent.append(buffer.found)
        if self._scaler is not None:
            sent.append(self._scaler.proposal(None if scaled is None else overflow))
        self._loop.contribute(StepInput(sent, 1.0, optimizer.settings(), overflow=overflow, rows=taken))

    def _look_for_changes(self) -> None:
        trainer = self._loop.trainer
        changed = "" if trainer is None else trainer.values.changed_here()
        if changed:
            self._warned_of_changes = True
            log.warning(
                "the script has changed parameter %r in this process, for example with model.load_state_dict after"
                " job.prepare: the gradient is that of its value, but the servers change theirs, and this step replaces"
                " it; load values before job.prepare",
                changed,
            )

    def _unscaled(self, gradients: list[torch.Tensor | None], scaled: Scaled) -> tuple[list[torch.Tensor | None], bool]:
        """Returns the gradients as they are sent, and whether one overflows its format; then none is sent."""
        if self._scaler is None and not self._warned_of_scaler:
            self._warned_of_scaler = True
            log.warning("a GradScaler of this worker's own: each worker has another scale; job.scaler() is one for all")
        if scaled.overflow:
            return [None] * len(gradients), True
        return [*map(unscaler(scaled.scale, gradients), gradients)], False


def _prepare_local(
    loop: TrainingLoop, model: torch.nn.Module, optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None
) -> tuple[LocalOptimizer, JobScheduler | None]:
    consistency = loop.session.job_settings.consistency
    schedule = None if scheduler is None else JobScheduler(scheduler, optimizer, lambda: loop.step)
    parameters, buffers = [each.in_group(0) for each in parameters_of(model, optimizer, {})], buffers_of(model)
    spec = outer_optimizer(consistency)
    trainer = loop.begin([*parameters, *buffers], spec, lambda: spec.groups, model=model)
    strategy = loop.strategy
    assert isinstance(strategy, SyncStrategy)
    inner, steps = InnerOptimizer(optimizer), consistency.steps
    loop.begin_rounds(LocalRounds(trainer, strategy, inner, schedule, parameters=len(parameters), steps=steps))
    loop.at_end.callback(refuse_steps(optimizer, unless=lambda: inner.is_stepping).remove)
    if schedule is not None:
        schedule.follow()
    return LocalOptimizer(optimizer, loop.step_locally), schedule
