"""A job, as a training script sees it.

Owns: what `sy.connect()` gives back. Must not know: how a yard is started, bytes, partitions.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, overload

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from shardyard.config.settings import Settings
from shardyard.domain.consistency import ConsistencyMode, NonFinite, Stop, UpdateMode
from shardyard.domain.errors import (
    ConfigurationError,
    InvalidRequest,
    ShardyardError,
    UnknownVariable,
    UnsupportedModel,
    UnsupportedOptimizer,
)
from shardyard.domain.ids import Incarnation
from shardyard.domain.limits import METRIC_NAME_CHARACTERS_MAX, METRICS_MAX, TEXT_CHARACTERS_MAX
from shardyard.domain.optimizers import KINDS, OptimizerSpec, make_group, setting_names
from shardyard.domain.variables import VariableKind
from shardyard.transport.grpc_client import GrpcNetwork
from shardyard.transport.interfaces import Network
from shardyard.transport.malloc import tune_malloc
from shardyard_worker.consistency.local_sgd import (
    InnerOptimizer,
    LocalOptimizer,
    LocalRounds,
    outer_optimizer,
    refuse_without_optimizer,
)
from shardyard_worker.consistency.modes import strategy_for
from shardyard_worker.consistency.strategy import LostWork, ModeChanged, Strategy
from shardyard_worker.consistency.synchronous import SyncStrategy
from shardyard_worker.data.dataset import Reader
from shardyard_worker.data.feed import Feed, FeedSettings
from shardyard_worker.data.look_ahead import Depth, LookAhead, ReadAhead
from shardyard_worker.data.open_feed import open_feed
from shardyard_worker.data.seeding import seed_everything
from shardyard_worker.data.sync_feed import LocalFeed
from shardyard_worker.embedding.table import Table, tables_of
from shardyard_worker.exchange.tensor_types import spec_of
from shardyard_worker.job.callbacks import Callbacks, OnCheckpoint, OnLog, OnStep, OnStop
from shardyard_worker.job.notebook import table
from shardyard_worker.optimizers.grad_scaler import SCALER_COUNTS, JobScaler, unscaler
from shardyard_worker.optimizers.lr_schedule import JobScheduler
from shardyard_worker.optimizers.server_optimizer import Scaled, ServerOptimizer, translate
from shardyard_worker.session.session import ProcessPlace, Session
from shardyard_worker.session.tensorboard import TensorBoardWriter
from shardyard_worker.training.remote_rows import RemoteRows
from shardyard_worker.training.table_binding import Announced, TableBinding, Upcoming
from shardyard_worker.training.trainer import Trainer
from shardyard_worker.training.variables import BufferPlace, StepInput, Variable

log = logging.getLogger("shardyard.worker")

Model = TypeVar("Model", bound=torch.nn.Module)
StepCallback = TypeVar("StepCallback", bound=OnStep)
LogCallback = TypeVar("LogCallback", bound=OnLog)
CheckpointCallback = TypeVar("CheckpointCallback", bound=OnCheckpoint)
StopCallback = TypeVar("StopCallback", bound=OnStop)

B = TypeVar("B")

_END = object()
LOOK_AHEAD_METRIC = "look_ahead_hits"
"""Of the rows that forwards have asked for since look-ahead began, the share that was there."""


def connect(settings: Settings, *, network: Network | None = None, on_close: Callable[[], None] | None = None) -> Job:
    """Joins the job of the settings' name in the yard at `settings.coordinator`, else starts it.

    `network`: how to reach it; gRPC unless given. `on_close` is called when the job has been left. Raises
    CoordinatorUnavailable, ConfigurationError, JobFailed.
    """
    tune_malloc()
    if settings.worker.threads:
        torch.set_num_threads(settings.worker.threads)
    place = _place(os.environ)
    session = Session(network or GrpcNetwork(), settings.coordinator, settings, place)
    files: TensorBoardWriter | None = None
    try:
        with session.interrupts:
            device = pick_device(settings.worker.device, place.local_index)
            session.join()
            if settings.metrics.tensorboard:
                who = f"worker-{session.caller.incarnation}"
                files = TensorBoardWriter(Path(settings.metrics.tensorboard), job=settings.job.name, who=who)
    except BaseException:
        if files is not None:
            files.close()
        session.leave("could not join")
        if on_close is not None:
            on_close()
        raise
    seed_everything(session.seed)
    return Job(session, device, on_close, files)


def _place(environment: Mapping[str, str]) -> ProcessPlace:
    agent, index = environment.get("SHARDYARD_AGENT", ""), environment.get("SHARDYARD_LOCAL_INDEX", "0")
    return ProcessPlace(Incarnation(int(agent)) if agent.isdigit() else None, int(index) if index.isdigit() else 0)


def pick_device(wanted: str, local_index: int) -> torch.device:
    """auto: one GPU for each process of a machine, by turns; the CPU where there is none."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigurationError(f"worker.device is {wanted!r}; torch sees no CUDA device here")
    if wanted in ("auto", "cuda"):
        wanted = f"cuda:{local_index % torch.cuda.device_count()}"
    device = torch.device(wanted)
    if (device.index or 0) >= torch.cuda.device_count():
        raise ConfigurationError(f"worker.device is {wanted!r}; torch sees {torch.cuda.device_count()} CUDA devices")
    torch.cuda.set_device(device)
    return device


JobOptimizer = ServerOptimizer | LocalOptimizer


class Job:
    """A training run, from one worker's side. Use it as a context manager; leaving it leaves the job.

    Not thread-safe: one thread trains.
    """

    def __init__(
        self,
        session: Session,
        device: torch.device,
        on_close: Callable[[], None] | None,
        files: TensorBoardWriter | None = None,
    ) -> None:
        self._session = session
        self._device = device
        self._on_close = on_close
        self._training: Trainer | None = None
        self._strategy: Strategy | None = None
        self._local: LocalRounds | None = None
        self._feed: Feed | None = None
        self._feeds = 0
        self._names: dict[str, int] = {}
        self._own_steps = 0
        self._rows: RemoteRows | None = None
        self._upcoming: Upcoming | None = None
        """Of a script's own batches (`look_ahead`)."""
        self._scaler: JobScaler | None = None
        self._told_of_scaler = False
        self._settings_now: Callable[[], tuple[tuple[float, ...], ...]] = tuple
        self._metrics: dict[str, Any] = {}
        self._shown: dict[str, float | torch.Tensor] = {}
        self._files = files
        self._callbacks = Callbacks(self, session.checkpoint)
        self._step_told = 0
        self._metrics_lock = threading.Lock()
        self._closed = False
        session.metrics = self._take_metrics
        atexit.register(self._close_at_exit)

    # ---- what a script asks about

    @property
    def device(self) -> torch.device:
        """Where the model should be."""
        return self._device

    @property
    def name(self) -> str:
        return self._session.settings.job.name

    @property
    def mode(self) -> UpdateMode:
        return self._session.mode

    @property
    def seed(self) -> int:
        return self._session.seed

    @property
    def step(self) -> int:
        """The job's step: the number of updates applied, as far as this worker has seen. In local mode: the steps that
        a logical rank has taken by itself, up to where this worker stands."""
        if self._local is not None:
            return self._local.step
        return 0 if self._strategy is None else self._strategy.step

    @property
    def gradient_norm(self) -> float | None:
        """Where the job clips by norm (job.clip.norm): the 2-norm of the last gradient, over all parameters, before it
        was scaled down; in a synchronous job, of the last step's mean. None without, and before the first."""
        return None if self._training is None else self._training.pushes.gradient_norm

    @property
    def step_due(self) -> bool:
        """Whether `optimizer.step()` is to be called after the batch at hand: it is the last of those whose gradients
        are accumulated (job.batches, `accumulate`). True without that."""
        return self._feed is None or self._feed.work is None or self._feed.work.due

    @property
    def chief(self) -> bool:
        """True in one worker: the living one that joined first. The one to evaluate, print and save.

        If it dies another one is; once it has left well, nobody is, so that what it does is done once.
        """
        return self._session.chief

    @property
    def should_stop(self) -> bool:
        """True once the job is told to stop and this worker has no more steps to compute: in a synchronous job all
        workers see it at the same step. A loop of the script's own asks this; job.batches ends by itself."""
        if self.mode is UpdateMode.ASYNC:
            return self.stopping is not None
        end = self._session.step_barrier.end
        return self.stopping is not None if self._strategy is None else end is not None and self._strategy.step >= end

    @property
    def stopping(self) -> Stop | None:
        """Who has told the job to stop, and why, as far as this worker has heard."""
        return self._session.step_barrier.stop

    def stop(self, reason: str = "") -> None:
        """Ends the job, for all its workers, before its data does: after the batch at hand (asynchronous), or before a
        step that all workers agree on (synchronous), which is this one's next or the one after it. Returns at once.
        The first reason stands. A last checkpoint is written when all have left.

        Raises InvalidRequest for a reason that is too long, JobFailed.
        """
        if len(reason) > TEXT_CHARACTERS_MAX:
            raise InvalidRequest(f"a reason of {len(reason)} characters; at most {TEXT_CHARACTERS_MAX}")
        self._session.check()
        with self._session.interrupts:
            self._session.stop(reason)

    # ---- what a script is told

    def on_step(self, callback: StepCallback) -> StepCallback:
        """`callback(job)` after each step of this worker (asynchronous), each step of the job (synchronous).

        It, and those of the other `on_...`, are called in the thread that trains. What they raise ends the script
        unless that catches it. They can be used as decorators.
        """
        self._callbacks.on_step.append(callback)
        return callback

    def on_log(self, callback: LogCallback) -> LogCallback:
        """`callback(job, metrics)` with each call of `job.log`: numbers, and tensors of one element, by name."""
        self._callbacks.on_log.append(callback)
        return callback

    def on_checkpoint(self, callback: CheckpointCallback) -> CheckpointCallback:
        """`callback(job, checkpoint)` after a step, when this worker has heard of a newer one: `number`, `step`."""
        self._callbacks.on_checkpoint.append(callback)
        return callback

    def on_stop(self, callback: StopCallback) -> StopCallback:
        """`callback(job, stop)` once `job.should_stop` is true, before job.batches ends: `reason`, `worker`, `step`."""
        self._callbacks.on_stop.append(callback)
        return callback

    def _look_around(self) -> None:
        """Between two steps."""
        self._callbacks.look(self._session.checkpoint, self.stopping if self.should_stop else None)

    def log(self, **metrics: float | torch.Tensor) -> None:
        """Reports metrics, by name; the last value of each is shown by `shardyard status` and the progress display,
        all of them by TensorBoard (metrics.tensorboard).

        Tensors are kept as they are and read when the next heartbeat is due, so a GPU is not waited for here.
        Raises InvalidRequest for what is not one real number, and for a name that is too long.
        """
        taken = {name: checked_metric(name, value) for name, value in metrics.items()}
        with self._metrics_lock:
            for name, value in taken.items():
                if len(self._metrics) < METRICS_MAX or name in self._metrics:
                    self._metrics[name] = value
                if len(self._shown) < METRICS_MAX or name in self._shown:
                    self._shown[name] = value
        if self._files is not None:
            self._files.take(self.step, taken)
        self._callbacks.logged(taken)

    def _take_metrics(self) -> dict[str, float]:
        with self._metrics_lock:
            taken, self._metrics = self._metrics, {}
        return {name: float(value) for name, value in taken.items()}

    # ---- training a model

    @overload
    def prepare(self, model: Model, optimizer: torch.optim.Optimizer) -> tuple[Model, JobOptimizer]: ...
    @overload
    def prepare(
        self, model: Model, optimizer: torch.optim.Optimizer, scheduler: LRScheduler
    ) -> tuple[Model, JobOptimizer, JobScheduler]: ...
    def prepare(
        self, model: Model, optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None = None
    ) -> tuple[Model, JobOptimizer] | tuple[Model, JobOptimizer, JobScheduler]:
        """Moves the optimizer, and the parameters that it has, to the servers.

        Gives back the same model, whose parameters and persistent buffers now hold the job's values, an optimizer whose
        `step()` pushes the gradients and pulls the parameters, and, if one was given, the scheduler as a function of
        the job's step: it stands where it would after one call of its `step()` for each step of the job.

        In local mode the optimizer stays here, whatever its kind: `step()` is its own, and the servers hear once a
        round of `job.consistency.steps` what these have come to.

        Raises UnsupportedOptimizer, UnsupportedModel, VariableConflict, InvalidRequest.
        """
        tables = tables_of(model)
        if tables:
            self._check_tables(next(iter(tables)))
        if self._session.job_settings.consistency.mode is ConsistencyMode.LOCAL:
            return self._prepare_local(model, optimizer, scheduler)
        spec = translate(optimizer)
        schedule = None if scheduler is None else JobScheduler(scheduler, optimizer, lambda: self.step)
        parameters, buffers = _parameters(model, optimizer, tables), _buffers(model)
        counts = [] if self._scaler is None else [Variable(SCALER_COUNTS, self._scaler.state)]
        rows = TableBinding(tables, optimizer.param_groups) if tables else None
        self._register([*parameters, *buffers, *counts], spec, model, rows)
        if schedule is not None:
            schedule.follow()

        def contribute(server_optimizer: ServerOptimizer, scaled: Scaled | None) -> None:
            if schedule is not None:
                schedule.follow()
            if rows is not None and scaled is not None and self._scaler is None:
                raise _scaled_rows()
            taken = None if rows is None else rows.take()
            gradients, overflow = self._unscaled([parameter.target.grad for parameter in parameters], scaled)
            if taken is not None and scaled is not None:
                taken = None if overflow else taken.unscaled(scaled.scale)
            sent = [*gradients, *(buffer.found for buffer in buffers)]
            if self._scaler is not None:
                sent.append(self._scaler.proposal(None if scaled is None else overflow))
            self._contribute(StepInput(sent, 1.0, server_optimizer.settings(), overflow=overflow, rows=taken))

        moved = ServerOptimizer(optimizer, spec.kind, contribute, rows)
        self._settings_now = moved.settings
        return (model, moved) if schedule is None else (model, moved, schedule)

    def _check_tables(self, name: str) -> None:
        """Raises UnsupportedModel for what tables cannot be part of here; the coordinator knows the rest."""
        if self._session.job_settings.consistency.mode is ConsistencyMode.LOCAL:
            raise ConfigurationError(
                f"embedding table {name!r} in a job with job.consistency.mode local",
                why="a round is steps that a worker takes by itself, and rows are on the servers",
                todo="set job.consistency.mode to sync, hybrid, async or bounded",
            )

    def scaler(
        self,
        init_scale: float = 65_536.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2_000,
        *,
        enabled: bool = True,
    ) -> JobScaler:
        """Before `prepare`: a torch.amp.GradScaler, with its methods, whose scale is that of the job: one for all
        workers, in its checkpoints, and given to those that join. All workers make the same call.

        In a synchronous job a step that overflows in one logical rank is skipped for all. Raises InvalidRequest.
        """
        self._session.check()
        if self._training is not None or self._scaler is not None:
            raise InvalidRequest(
                "job.scaler " + ("after job.prepare" if self._scaler is None else "a second time"),
                why="the scale is one of the job's variables",
                todo="call it once, before job.prepare",
            )
        if self._session.job_settings.consistency.mode is ConsistencyMode.LOCAL:
            raise InvalidRequest(
                "job.scaler in a job of local steps",
                why="each worker takes its steps by itself, with an optimizer of its own",
                todo="use torch.amp.GradScaler",
            )
        made = JobScaler(
            self._device,
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            enabled=enabled,
            by_steps=self.mode is UpdateMode.SYNC,
        )
        if made.is_enabled():
            self._scaler = made
        return made

    def _unscaled(
        self, gradients: list[torch.Tensor | None], scaled: Scaled | None
    ) -> tuple[list[torch.Tensor | None], bool]:
        """Gradients as they are sent, and whether they are beyond their format, and so not sent."""
        if scaled is None:
            return gradients, False
        if self._scaler is None and not self._told_of_scaler:
            self._told_of_scaler = True
            log.warning("a GradScaler of this worker's own: each worker has another scale; job.scaler() is one for all")
        if scaled.overflow:
            return [None] * len(gradients), True
        return [*map(unscaler(scaled.scale, gradients), gradients)], False

    def _prepare_local(
        self, model: Model, optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None
    ) -> tuple[Model, LocalOptimizer] | tuple[Model, LocalOptimizer, JobScheduler]:
        consistency = self._session.job_settings.consistency
        schedule = None if scheduler is None else JobScheduler(scheduler, optimizer, lambda: self.step)
        parameters, buffers = [each.in_group(0) for each in _parameters(model, optimizer, {})], _buffers(model)
        spec = outer_optimizer(consistency)
        self._register([*parameters, *buffers], spec, model)
        assert self._training is not None
        assert isinstance(self._strategy, SyncStrategy)
        inner = InnerOptimizer(optimizer)
        self._local = LocalRounds(
            self._training, self._strategy, inner, schedule, parameters=len(parameters), steps=consistency.steps
        )
        self._step_told = self.step
        if schedule is not None:
            schedule.follow()
        self._settings_now = lambda: spec.groups
        moved = LocalOptimizer(optimizer, self._step_locally)
        return (model, moved) if schedule is None else (model, moved, schedule)

    def batches(
        self,
        dataset: Dataset[Any],
        *,
        batch_size: int = 32,
        epochs: int = 1,
        shuffle: bool = True,
        drop_last: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        accumulate: int = 1,
        look_ahead: LookAhead | None = None,
    ) -> Iterator[Any]:
        """Batches of the dataset such that over all workers each sample counts once an epoch, whoever dies.

        Tensors come on `job.device`. `batch_size` is for one worker (asynchronous) or one logical rank (synchronous).
        Call `optimizer.step()` once for each batch, or with `accumulate` after so many, whose gradients together are
        one push: where `job.step_due`. `look_ahead(batch)` says what the modules of tables will be given, for example
        `{model.words: batch[0]}`: a step then brings the rows of the next batch along. Ends when all samples are
        counted. All workers must make the same calls in the
        same order. Raises UnseekableDataset, FeedConflict, JobFailed.
        """
        self._session.check()
        if self._training is None or self._strategy is None:
            raise InvalidRequest("job.batches before job.prepare", todo="call job.prepare first")
        self._refuse_nesting()
        own_steps = self._own_steps or (0 if self._local is None else self._local.taken)
        if own_steps and self.mode is UpdateMode.SYNC:
            raise InvalidRequest(
                "job.batches after steps without it, in a synchronous job",
                why="the step says which samples are due, so all steps must come from job.batches, or none",
                todo="use job.batches for all steps, or a DataLoader of your own for all",
            )
        if batch_size < 1 or epochs < 0 or accumulate < 1:
            raise InvalidRequest(
                f"batch_size {batch_size}, epochs {epochs}, accumulate {accumulate}; expected at least 1, 0 and 1"
            )
        reader = Reader(dataset, self._device, collate_fn)
        if epochs == 0:
            return iter(())
        settings = FeedSettings(batch_size, epochs, shuffle, drop_last, accumulate)
        opened = partial(
            open_feed, self._training, reader, number=self._feeds, settings=settings, look_ahead=look_ahead
        )
        with self._session.interrupts:
            feed = opened(self._follow_mode(), local=self._local, end_round=self._end_round)
            self._feeds += 1
        return self._iterate(feed, opened)

    def look_ahead(self, batches: Iterable[B], ids_of: LookAhead, *, accumulate: int = 1) -> Iterator[B]:
        """The same batches, a script's own, with `ids_of(batch)` as job.batches' `look_ahead`: they are read a step
        ahead, and a step brings the rows of the next one along. `accumulate`: of how many batches a step is.

        Raises InvalidRequest.
        """
        self._need_training()
        if accumulate < 1:
            raise InvalidRequest(f"accumulate {accumulate}; expected at least 1")
        if self.mode is UpdateMode.SYNC and self._session.job_settings.consistency.backup_workers:
            return iter(batches)  # a step brings no values
        window = self._session.settings.worker.window
        return self._announce(ReadAhead(batches, ids_of, Depth(window, accumulate)))

    def _announce(self, ahead: ReadAhead[B]) -> Iterator[B]:
        if self._upcoming is not None or self._feed is not None:
            raise _two_look_aheads()

        def upcoming() -> Sequence[Announced]:
            strategy = self._strategy
            return ahead.announced(len(strategy.ranks.held) if isinstance(strategy, SyncStrategy) else None)

        self._upcoming = upcoming
        try:
            yield from ahead
        finally:
            self._upcoming = None

    @property
    def _looks_ahead(self) -> bool:
        return self._upcoming is not None or (self._feed is not None and self._feed.upcoming is not None)

    def _refuse_nesting(self) -> None:
        if self._feed is not None:
            raise InvalidRequest("job.batches inside of job.batches", todo="finish the one before the other")

    def _go_through(self, feed: Feed, opened: Callable[[Strategy], Feed]) -> Generator[Any, None, None]:
        """All batches, in whatever mode the job goes by."""
        while True:
            self._feed = feed
            try:
                yield from feed.batches()
            except ModeChanged:
                feed = opened(self._follow_mode())
            else:
                return

    def _follow_mode(self) -> Strategy:
        """The strategy of the mode that the job goes by now, begun."""
        strategy = self._strategy
        while strategy is None or isinstance(strategy, SyncStrategy) is not (self.mode is UpdateMode.SYNC):
            if strategy is not None:
                strategy.close()
            training = self._need_training()
            if self._scaler is not None:
                self._scaler.follow(by_steps=self.mode is UpdateMode.SYNC)
            strategy = self._strategy = strategy_for(training)
            # which may meet the map of the mode after its own
            with contextlib.suppress(ModeChanged):
                strategy.begin()
        return strategy

    def _iterate(self, feed: Feed, opened: Callable[[Strategy], Feed]) -> Iterator[Any]:
        self._refuse_nesting()
        if self._upcoming is not None:
            raise _two_look_aheads()
        self._feed = feed
        try:
            with contextlib.closing(self._go_through(feed, opened)) as batches:
                while True:
                    with self._session.interrupts:
                        batch = next(batches, _END)
                    if batch is _END:
                        break
                    yield batch
        finally:
            self._feed = None
            if self._training is not None:
                self._training.accumulates = False
            if self._local is not None and not self._closed:
                self._local.abandon()
        self._look_around()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it gradients are accumulated: none is sent while backward computes (worker.overlap), since another
        backward adds to them before `optimizer.step()`. job.batches' `accumulate` does so by itself."""
        training = self._need_training()
        before, training.accumulates_by_hand = training.accumulates_by_hand, True
        try:
            yield
        finally:
            training.accumulates_by_hand = before

    # ---- variables without a model

    def register(self, variables: Mapping[str, torch.Tensor], *, optimizer: str = "sgd", **settings: float) -> None:
        """Gives the job variables by name, with first values, and the optimizer that updates them.

        `optimizer` and `settings` as in docs/optimizers.md, for example `optimizer="adam", lr=1e-3`. The first worker's
        values win. Raises UnsupportedOptimizer, UnsupportedModel, VariableConflict, InvalidRequest.
        """
        if self._session.job_settings.consistency.mode is ConsistencyMode.LOCAL:
            refuse_without_optimizer("job.register")
        if optimizer not in KINDS:
            raise UnsupportedOptimizer(f"optimizer {optimizer!r}", todo=f"use one of {', '.join(sorted(KINDS))}")
        specs = [spec_of(name, tensor, VariableKind.PARAMETER) for name, tensor in variables.items()]
        made = [
            Variable(spec, tensor.detach().clone(memory_format=torch.contiguous_format))
            for spec, tensor in zip(specs, variables.values(), strict=True)
        ]
        groups = (make_group(optimizer, settings),)
        self._register(made, OptimizerSpec(optimizer, groups))
        self._settings_now = lambda: groups

    def push(self, gradients: Mapping[str, torch.Tensor], *, samples: float = 1.0, **settings: float) -> None:
        """Pushes gradients by name; variables that are not named are left alone. In a synchronous job returns when the
        step is complete. `settings` replace those in force for this push, for example `lr=0.1`.

        Raises UnknownVariable, ShapeMismatch, DTypeMismatch, JobFailed.
        """
        training = self._need_training()
        if self._local is not None:
            refuse_without_optimizer("job.push")
        for name in gradients:
            if name not in self._names:
                known = ", ".join(sorted(self._names)[:8])
                raise UnknownVariable(f"{name!r}; the job has {known}")
        groups = self._settings_now()
        if settings:
            kind = training.optimizer.kind
            first = dict(zip(setting_names(kind), groups[0], strict=True))
            groups = (make_group(kind, first | settings),)
        sent = [gradients.get(variable.spec.name) for variable in training.variables]
        if training.pushes.clipper is not None:  # in place, and these are the script's
            sent = [tensor.detach().clone() if isinstance(tensor, torch.Tensor) else tensor for tensor in sent]
        self._contribute(StepInput(sent, samples, groups))

    def pull(self, names: Sequence[str] | None = None) -> dict[str, torch.Tensor]:
        """The values of the variables, copies, by name. Asynchronous: the newest. Synchronous: those of this step."""
        training = self._need_training()
        if self.mode is UpdateMode.ASYNC and self._strategy is not None:
            with self._session.interrupts:
                self._follow_mode().begin()
        chosen = list(self._names) if names is None else list(names)
        for name in chosen:
            if name not in self._names:
                raise UnknownVariable(f"{name!r}; the job has {', '.join(sorted(self._names)[:8])}")
        return {name: training.variables[self._names[name]].target.detach().clone() for name in chosen}

    # ---- checkpoints

    def checkpoint(self) -> int:
        """Has the job written down as it is now, or a little later, with all that this worker has pushed. Returns the
        checkpoint's number when it is committed. Other workers train on meanwhile.

        Raises InvalidRequest where the job is not written down (job.checkpoint.url), StorageUnavailable and other
        errors that kept it from being written, JobFailed.
        """
        self._need_training()
        assert self._strategy is not None
        with self._session.interrupts:
            try:
                self._strategy.drain()
            except LostWork:
                log.info("the last batch was computed by another worker as well; this one's does not count")
            number = self._session.take_checkpoint()
        self._look_around()
        return number

    # ---- leaving

    def close(self, error: str = "") -> None:
        """Leaves the job. The second time does nothing."""
        if self._closed:
            return
        with self._session.interrupts:
            self._close(error)

    def _close(self, error: str) -> None:
        self._closed = True
        atexit.unregister(self._close_at_exit)
        try:
            self._land_last(error)
        except ShardyardError as lost:
            error = error or f"{lost.code}: {lost}"
            raise
        finally:
            files, self._files = self._files, None
            if files is not None:
                files.close()
            if self._training is not None:
                self._training.close()
            self._session.leave(error)
            if self._on_close is not None:
                self._on_close()

    def _land_last(self, error: str) -> None:
        """A push may still be under way: it counts when it was acknowledged, and an error that it meets is told."""
        if self._strategy is None or self._training is None:
            return
        try:
            if error:
                self._training.router.close()
            else:
                if self._local is not None and self._local.owes:
                    self._end_round()  # of a script's own data, whose last round may be a shorter one
                self._strategy.leave(self._settings_now())
                self._training.values.complete()
        except LostWork:
            log.info("the last batch was computed by another worker as well; this one's does not count")
        finally:
            self._strategy.close()

    def _close_at_exit(self) -> None:
        """For a script without `with`. Python keeps there what the script has raised, if it has."""
        error = getattr(sys, "last_value", None)
        self.close("" if error is None else f"{type(error).__name__}: {error}")

    def __enter__(self) -> Self:
        return self

    def __repr__(self) -> str:
        return f"<Job {self.name!r}, {self.mode.value}, step {self.step:,}, {self._standing}>"

    def _repr_html_(self) -> str:
        """For notebooks."""
        with self._metrics_lock:
            shown = [(name, f"{float(value):.6g}") for name, value in self._shown.items()]
        stop = self.stopping
        rows = [
            ("standing", self._standing),
            ("worker", f"{self._session.caller.incarnation}{' (chief)' if self.chief else ''}"),
            ("mode", self.mode.value),
            ("step", f"{self.step:,}"),
            ("device", str(self._device)),
            *shown,
            *([] if stop is None else [("told to stop", stop.reason or "without a reason")]),
        ]
        return table(f"job {self.name}", rows)

    @property
    def _standing(self) -> str:
        if self._closed:
            return "left"
        return "no variables yet" if self._training is None else "training"

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close("" if kind is None else f"{kind.__name__}: {error}")

    # ---- inside

    def _register(
        self,
        variables: Sequence[Variable],
        spec: OptimizerSpec,
        model: torch.nn.Module | None = None,
        tables: TableBinding | None = None,
    ) -> None:
        self._session.check()
        if self._training is not None:
            raise InvalidRequest(
                "a second job.prepare or job.register in one job",
                todo="put the models into one torch.nn.ModuleList, and their parameters into groups of one optimizer",
            )
        with self._session.interrupts:
            self._training = Trainer(self._session, variables, spec, model, tables, context=self._present_strategy)
            if tables is not None:
                self._rows = RemoteRows(
                    self._training, tables, context=self._present_strategy, looks_ahead=lambda: self._looks_ahead
                )
                tables.begin(self._rows)
            self._names = {variable.spec.name: index for index, variable in enumerate(self._training.variables)}
            self._step_told = self._follow_mode().step

    def _present_strategy(self) -> Strategy:
        assert self._strategy is not None
        return self._strategy

    def _contribute(self, sending: StepInput) -> None:
        self._session.check()
        sending = replace(sending, bases=self._need_training().values.bases)
        self._tell_rows()
        if self._feed is None and isinstance(self._strategy, SyncStrategy):
            with self._session.interrupts:
                self._follow_mode()
        with self._session.interrupts:
            counted = self._count(sending)
        if counted and (self.mode is UpdateMode.ASYNC or self.step != self._step_told):
            self._step_told = self.step
            self._callbacks.stepped()
        self._look_around()

    def _tell_rows(self) -> None:
        if self._rows is not None and self._rows.looked_up:
            self._tell({LOOK_AHEAD_METRIC: self._rows.came_ahead / self._rows.looked_up})
        cache = None if self._training is None else self._training.cache
        if cache is not None:
            counts = cache.counts
            found = {"hits": counts.hits, "misses": counts.misses, "age": counts.age}
            self._tell({f"cached_rows_{name}": value for name, value in found.items()})

    def _tell(self, found: Mapping[str, float]) -> None:
        """Metrics that are none of the script's, and shown where those are."""
        with self._metrics_lock:
            self._metrics |= found
            self._shown |= found

    def _step_locally(self, closure: Callable[[], float] | None) -> float | None:
        """`optimizer.step()` in local mode."""
        local = self._local
        assert local is not None
        self._session.check()
        with self._session.interrupts:
            if isinstance(self._feed, LocalFeed):
                is_last = self._feed.enter()
                loss = local.run(closure)
            else:
                local.enter_own()
                loss = local.run(closure)
                is_last = local.taken == local.steps
            if is_last:
                self._end_round()
        self._tell_local_step()
        self._look_around()
        return loss

    def _end_round(self) -> None:
        """Contributes what this worker's steps have come to."""
        local = self._local
        assert local is not None
        sending = local.outer(self._settings_now())
        looked_at = self._session.job_settings.nonfinite is not NonFinite.ALLOW  # on the way, and told
        try:
            self._count(sending if local.finite or looked_at else None)
        finally:
            local.leave(keeps=local.finite)
        lost = {"rounds_dropped": local.dropped, "inner_states_lost": local.lost}
        self._tell({name: count for name, count in lost.items() if count})

    def _tell_local_step(self) -> None:
        # a worker with several ranks takes a step of the same number for each
        if self.step > self._step_told:
            self._step_told = self.step
            self._callbacks.stepped()

    def _count(self, sending: StepInput | None) -> bool:
        """Whether the work is this worker's."""
        if self._feed is not None:
            self._feed.push(sending)
            return self._feed.work is None or not self._feed.work.lost
        assert self._strategy is not None
        self._own_steps += 1
        try:
            self._strategy.contribute(None, sending, self._upcoming)
        except ModeChanged:
            self._own_steps -= 1
            self._follow_mode()
            return False
        except LostWork:
            log.info("the last batch does not count: another worker has computed it as well, or the job has stopped")
            return False
        return True

    # ---- compression

    def compression_state(self) -> dict[str, torch.Tensor]:
        """Copies of what compression keeps in this worker, by name, for example "residual.fc1.weight"
        (docs/compression.md); empty without any. Between two steps."""
        training = self._need_training()
        with training.pushes.between_pushes():
            state = {} if training.pushes.feedback is None else training.pushes.feedback.state_dict()
        return {name: torch.from_numpy(value.copy()) for name, value in state.items()}

    def load_compression_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Takes over what `compression_state` gave, here or in another worker. Raises UnknownVariable, ShapeMismatch
        and DTypeMismatch, having changed nothing."""
        training = self._need_training()
        if training.pushes.feedback is None:
            if state:
                raise UnknownVariable("compression state for a job without job.compression.push")
            return
        with training.pushes.between_pushes():
            training.pushes.feedback.load_state_dict(
                {name: value.detach().cpu().numpy() for name, value in state.items()}
            )

    def _need_training(self) -> Trainer:
        self._session.check()
        if self._training is None:
            raise InvalidRequest("no variables yet", todo="call job.prepare or job.register first")
        return self._training


def _two_look_aheads() -> InvalidRequest:
    return InvalidRequest(
        "job.look_ahead together with job.batches, or with another one",
        why="a step brings the rows of one batch, that which follows",
        todo="give look_ahead to job.batches; finish one loop before the other",
    )


def _scaled_rows() -> UnsupportedModel:
    return UnsupportedModel(
        "a model with embedding tables, and a scaler of torch's",
        why="it looks at parameters of a size, and would leave the gradients of rows scaled",
        todo="use job.scaler(), before job.prepare; or bfloat16, which needs no scale",
    )


def _parameters(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, tables: Mapping[str, Table]
) -> list[Variable]:
    """Without the weights of tables, which have no elements."""
    weights = {table.weight for table in tables.values()}
    names = {parameter: as_written(name) for name, parameter in model.named_parameters()}
    found = []
    for group_index, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            if parameter in weights:
                continue
            name = names.get(parameter, f"optimizer.{group_index}.{index}")
            found.append(Variable(spec_of(name, parameter, VariableKind.PARAMETER, group_index), parameter))
    if not found and not tables:
        raise UnsupportedModel("the optimizer has no parameters", todo="give it model.parameters()")
    return found


def _buffers(model: torch.nn.Module) -> list[Variable]:
    persistent = model.state_dict(keep_vars=True)
    found = []
    for name, buffer in model.named_buffers():
        if name in persistent:
            owner, _, key = name.rpartition(".")
            place = BufferPlace(model.get_submodule(owner), key)
            found.append(Variable(spec_of(as_written(name), buffer, VariableKind.BUFFER), buffer, place))
    return found


def as_written(name: str) -> str:
    """Without what torch.compile puts between: a model has the same names compiled and not."""
    return name.replace("_orig_mod.", "")


def checked_metric(name: str, value: float | torch.Tensor) -> float | torch.Tensor:
    """As it can be logged. Raises InvalidRequest."""
    if len(name) > METRIC_NAME_CHARACTERS_MAX:
        raise InvalidRequest(f"a metric's name of {len(name)} characters; at most {METRIC_NAME_CHARACTERS_MAX}")
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        return value.detach()
    if isinstance(value, torch.Tensor):
        got = f"a tensor of shape {tuple(value.shape)} and dtype {value.dtype}"
        raise InvalidRequest(f"metric {name!r} is {got}; expected one real number", todo="log its mean, for example")
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"metric {name!r} is {value!r:.100}; expected one real number") from error
