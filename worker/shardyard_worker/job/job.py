"""A job, as a training script sees it.

Owns: what `sy.connect()` returns. `training_loop` runs the steps, `prepare` and `batches` do what their names say. Must
not know: how a yard is started, bytes, partitions.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, overload

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from shardyard.domain.consistency import ConsistencyMode, Stop, UpdateMode
from shardyard.domain.errors import InvalidRequest, ShardyardError, UnknownVariable, UnsupportedOptimizer
from shardyard.domain.limits import TEXT_CHARACTERS_MAX
from shardyard.domain.optimizers import KINDS, OptimizerSpec, make_group, setting_names
from shardyard.domain.variables import VariableKind
from shardyard_worker.consistency.local_sgd import refuse_without_optimizer
from shardyard_worker.data.dataset import Reader
from shardyard_worker.data.feed import FeedSettings
from shardyard_worker.data.look_ahead import Depth, LookAhead, ReadAhead
from shardyard_worker.exchange.tensor_types import spec_of
from shardyard_worker.job.batches import announce, open_batches, refuse_nesting
from shardyard_worker.job.callbacks import Callbacks
from shardyard_worker.job.notebook import table
from shardyard_worker.job.prepare import JobOptimizer, prepare
from shardyard_worker.job.training_loop import TrainingLoop
from shardyard_worker.optimizers.grad_scaler import JobScaler
from shardyard_worker.optimizers.lr_schedule import JobScheduler
from shardyard_worker.session.job_requests import stop_job, take_checkpoint
from shardyard_worker.session.metrics import MetricLog, Metrics, checked_metric
from shardyard_worker.session.session import CheckpointTaken, Session
from shardyard_worker.session.tensorboard import TensorBoardWriter
from shardyard_worker.training.variables import StepInput, Variable

Model = TypeVar("Model", bound=torch.nn.Module)
B = TypeVar("B")
StepCallback = TypeVar("StepCallback", bound=Callable[["Job"], object])
LogCallback = TypeVar("LogCallback", bound=Callable[["Job", Metrics], object])
CheckpointCallback = TypeVar("CheckpointCallback", bound=Callable[["Job", CheckpointTaken], object])
StopCallback = TypeVar("StopCallback", bound=Callable[["Job", Stop], object])


class Job:
    """A training run, from one worker's side. Use it as a context manager; leaving it leaves the job.

    Not thread-safe: one thread trains.

    >>> model = torch.nn.Linear(2, 1)
    >>> data = torch.utils.data.TensorDataset(torch.randn(8, 2), torch.randn(8, 1))
    >>> with sy.connect() as job:
    ...     model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    ...     for x, y in job.batches(data, batch_size=4):
    ...         optimizer.zero_grad()
    ...         torch.nn.functional.mse_loss(model(x), y).backward()
    ...         optimizer.step()
    ...     job.step
    2
    """

    def __init__(
        self,
        session: Session,
        device: torch.device,
        metrics: MetricLog,
        files: TensorBoardWriter | None,
        on_close: Callable[[], None] | None,
    ) -> None:
        self._session = session
        self._device = device
        self._metrics = metrics
        self._files = files
        self._on_close = on_close
        self._callbacks: Callbacks[Job] = Callbacks(self, session.checkpoint)
        self._loop = TrainingLoop(session, metrics, self._callbacks)
        self._scaler: JobScaler | None = None
        self._closed = False
        atexit.register(self._close_at_exit)

    # ---- what a script asks about

    @property
    def device(self) -> torch.device:
        """The device that the model should be on."""
        return self._device

    @property
    def name(self) -> str:
        return self._session.settings.job.name

    @property
    def mode(self) -> UpdateMode:
        """Whether updates are synchronous (modes sync, hybrid, local) or asynchronous (async, bounded)."""
        return self._loop.mode

    @property
    def seed(self) -> int:
        return self._session.seed

    @property
    def step(self) -> int:
        """The number of updates applied, as far as this worker has seen. In local mode: the number of local steps that
        each logical rank has taken so far."""
        return self._loop.step

    @property
    def gradient_norm(self) -> float | None:
        """The 2-norm of the last gradient over all parameters, before clipping. Synchronous: of the last step's mean
        gradient. None before the first step, and in a job without job.clip.norm."""
        return None if self._loop.trainer is None else self._loop.trainer.pushes.gradient_norm

    @property
    def step_due(self) -> bool:
        """Whether to call `optimizer.step()` after the current batch. With `accumulate` only the last batch of each
        push is due. Always true without `accumulate`."""
        feed = self._loop.feed
        return feed is None or feed.work is None or feed.work.due

    @property
    def chief(self) -> bool:
        """True in one worker: the living one that joined first. Use it to evaluate, print and save in one process only.

        If the chief dies, another worker becomes chief. If it leaves without an error, no worker is chief afterwards,
        so its work is done once.
        """
        return self._session.chief

    @property
    def should_stop(self) -> bool:
        """True once the job was told to stop and this worker has no more steps to compute. In a synchronous job all
        workers see it at the same step. Ask this in a loop of your own; job.batches ends by itself."""
        return self._loop.should_stop

    @property
    def stopping(self) -> Stop | None:
        """The `reason`, `worker` and `step` of the stop, if this worker knows of one. Otherwise None."""
        return self._loop.stopping

    def stop(self, reason: str = "") -> None:
        """Ends the job for all workers before its data ends. Returns at once.

        Asynchronous: the job ends after the current batch. Synchronous: it ends before a step that all workers agree
        on, this worker's next one or the one after. The first call's reason is kept. A last checkpoint is written when
        all workers have left.

        Raises InvalidRequest for a reason that is too long, JobFailed.

        >>> with sy.connect() as job:
        ...     job.stop("the loss is good enough")
        ...     job.should_stop
        True
        """
        if len(reason) > TEXT_CHARACTERS_MAX:
            raise InvalidRequest(f"a reason of {len(reason)} characters; at most {TEXT_CHARACTERS_MAX}")
        self._session.check()
        with self._session.interrupts:
            stop_job(self._session, reason)

    # ---- what a script is told

    def on_step(self, callback: StepCallback) -> StepCallback:
        """Calls `callback(job)` after each step: of this worker (asynchronous), of the job (synchronous).

        All `on_...` callbacks run in the thread that trains. An error that one raises ends the script unless the script
        catches it. All can be used as decorators.
        """
        self._callbacks.on_step.append(callback)
        return callback

    def on_log(self, callback: LogCallback) -> LogCallback:
        """Calls `callback(job, metrics)` at each `job.log`. `metrics`: numbers and one-element tensors by name."""
        self._callbacks.on_log.append(callback)
        return callback

    def on_checkpoint(self, callback: CheckpointCallback) -> CheckpointCallback:
        """Calls `callback(job, checkpoint)` after a step if there is a newer checkpoint. It has `number` and `step`."""
        self._callbacks.on_checkpoint.append(callback)
        return callback

    def on_stop(self, callback: StopCallback) -> StopCallback:
        """Calls `callback(job, stop)` once `job.should_stop` is true, before job.batches ends. `stop` has `reason`,
        `worker` and `step`."""
        self._callbacks.on_stop.append(callback)
        return callback

    def log(self, **metrics: float | torch.Tensor) -> None:
        """Reports metrics by name: numbers, or tensors of one real element.

        `shardyard status` and the progress display show the last value of each metric, TensorBoard shows all values
        (metrics.tensorboard). Tensors are read when the next heartbeat is due, so the call does not wait for a GPU.
        Raises InvalidRequest for other values, and for a name that is too long.

        >>> with sy.connect() as job:
        ...     job.log(loss=0.25, accuracy=torch.tensor(0.9))
        """
        taken = {name: checked_metric(name, value) for name, value in metrics.items()}
        self._metrics.log(taken)
        if self._files is not None:
            self._files.take(self.step, taken)
        self._callbacks.after_log(taken)

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
        """Moves the optimizer and its parameters to the servers.

        Returns the same model and a `JobOptimizer`. The model's parameters and persistent buffers now hold the job's
        values. The optimizer's `step()` pushes the gradients and pulls the parameters. With a `scheduler`, also returns
        a `JobScheduler`, whose rates are those after as many scheduler steps as the job has taken.

        In local mode any optimizer is accepted, and it stays in this process: `step()` runs it here. The servers get
        the sum of its steps once every `job.consistency.steps` steps.

        Raises UnsupportedOptimizer, UnsupportedModel, VariableConflict, InvalidRequest.

        >>> model = torch.nn.Linear(2, 1)
        >>> with sy.connect() as job:
        ...     model, optimizer = job.prepare(model, torch.optim.Adam(model.parameters(), lr=1e-3))
        ...     model(torch.ones(1, 2)).sum().backward()
        ...     optimizer.step()
        """
        prepared, schedule = prepare(self._loop, model, optimizer, scheduler, self._scaler)
        return (model, prepared) if schedule is None else (model, prepared, schedule)

    def scaler(
        self,
        init_scale: float = 65_536.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2_000,
        *,
        enabled: bool = True,
    ) -> JobScaler:
        """Returns a torch.amp.GradScaler with one scale for all workers. Call it before `prepare`, in all workers
        alike.

        The scale is written into the job's checkpoints and given to workers that join. In a synchronous job a step
        whose gradients overflow in one logical rank is skipped for all. Raises InvalidRequest.
        """
        self._session.check()
        if self._loop.trainer is not None or self._scaler is not None:
            raise InvalidRequest(
                "job.scaler " + ("after job.prepare" if self._scaler is None else "a second time"),
                why="the scale is one of the job's variables",
                todo="call it once, before job.prepare",
            )
        if self._is_local:
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

    @property
    def _is_local(self) -> bool:
        return self._session.job_settings.consistency.mode is ConsistencyMode.LOCAL

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
        """Yields batches of the dataset. Each sample counts once an epoch over all workers, even if processes die.

        Tensors are on `job.device`. `batch_size` is for one worker (asynchronous) or one logical rank (synchronous), in
        samples. Call `optimizer.step()` once for each batch. With `accumulate`, call it where `job.step_due` is true:
        once for `accumulate` batches, whose gradients are one push. `look_ahead(batch)` returns the ids that the
        modules of tables will look up, for example `{model.words: batch[0]}`; each step then fetches the next batch's
        rows too.

        Ends when all samples are counted. If you `break`, the unread batches go to other workers. All workers must make
        the same calls in the same order. Raises UnseekableDataset, FeedConflict, InvalidRequest, JobFailed.
        """
        self._session.check()
        if self._loop.trainer is None:
            raise InvalidRequest("job.batches before job.prepare", todo="call job.prepare first")
        refuse_nesting(self._loop)
        if batch_size < 1 or epochs < 0 or accumulate < 1:
            raise InvalidRequest(
                f"batch_size {batch_size}, epochs {epochs}, accumulate {accumulate}; expected at least 1, 0 and 1"
            )
        settings = FeedSettings(batch_size, epochs, shuffle, drop_last, accumulate)
        return open_batches(self._loop, Reader(dataset, self._device, collate_fn), settings, look_ahead)

    def look_ahead(self, batches: Iterable[B], ids_of: LookAhead, *, accumulate: int = 1) -> Iterator[B]:
        """Yields a script's own batches, read one step ahead, so that each step fetches the next batch's rows too.

        `ids_of(batch)`: as `look_ahead` in job.batches. `accumulate`: the number of batches in a step. Raises
        InvalidRequest.
        """
        self._loop.need_trainer()
        if accumulate < 1:
            raise InvalidRequest(f"accumulate {accumulate}; expected at least 1")
        if self.mode is UpdateMode.SYNC and self._session.job_settings.consistency.backup_workers:
            return iter(batches)  # a step brings no values
        depth = Depth(self._session.settings.worker.window, accumulate)
        return announce(self._loop, ReadAhead(batches, ids_of, depth))

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulates gradients inside the block: backward sends none of them while it computes (worker.overlap), since
        a later backward adds to them before `optimizer.step()`. job.batches' `accumulate` does this by itself."""
        trainer = self._loop.need_trainer()
        before, trainer.accumulates_by_hand = trainer.accumulates_by_hand, True
        try:
            yield
        finally:
            trainer.accumulates_by_hand = before

    # ---- variables without a model

    def register(self, variables: Mapping[str, torch.Tensor], *, optimizer: str = "sgd", **settings: float) -> None:
        """Gives the job named variables with their initial values, and the optimizer that updates them.

        `optimizer` and `settings` are as in docs/reference/optimizers.md, for example `optimizer="adam", lr=1e-3`. All
        workers start from the first worker's values. Raises UnsupportedOptimizer, UnsupportedModel, VariableConflict,
        InvalidRequest.

        >>> with sy.connect() as job:
        ...     job.register({"w": torch.zeros(2)}, optimizer="sgd", lr=0.5)
        ...     job.push({"w": torch.tensor([1.0, 2.0])})
        ...     job.pull()["w"]
        tensor([-0.5000, -1.0000])
        """
        if self._is_local:
            refuse_without_optimizer("job.register")
        if optimizer not in KINDS:
            raise UnsupportedOptimizer(f"optimizer {optimizer!r}", todo=f"use one of {', '.join(sorted(KINDS))}")
        specs = [spec_of(name, tensor, VariableKind.PARAMETER) for name, tensor in variables.items()]
        made = [
            Variable(spec, tensor.detach().clone(memory_format=torch.contiguous_format))
            for spec, tensor in zip(specs, variables.values(), strict=True)
        ]
        groups = (make_group(optimizer, settings),)
        self._loop.begin(made, OptimizerSpec(optimizer, groups), lambda: groups)

    def push(self, gradients: Mapping[str, torch.Tensor], *, samples: float = 1.0, **settings: float) -> None:
        """Pushes gradients by name, each with its variable's shape and dtype. Variables that are not named stay as they
        are. In a synchronous job it returns when the step is complete.

        `samples`: the weight of this push in the mean of a synchronous step. `settings` replace the current ones for
        this push, for example `lr=0.1`. Raises UnknownVariable, ShapeMismatch, DTypeMismatch, JobFailed.
        """
        trainer = self._loop.need_trainer()
        if self._is_local:
            refuse_without_optimizer("job.push")
        self._check_names(gradients)
        groups = self._loop.settings()
        if settings:
            kind = trainer.optimizer.kind
            first = dict(zip(setting_names(kind), groups[0], strict=True))
            groups = (make_group(kind, first | settings),)
        sent = [gradients.get(variable.spec.name) for variable in trainer.variables]
        if trainer.pushes.clipper is not None:  # it clips in place, and these tensors are the script's
            sent = [tensor.detach().clone() if isinstance(tensor, torch.Tensor) else tensor for tensor in sent]
        self._loop.contribute(StepInput(sent, samples, groups))

    def pull(self, names: Sequence[str] | None = None) -> dict[str, torch.Tensor]:
        """Returns copies of the variables by name, of all or of `names`, in their shapes and dtypes. Asynchronous: the
        newest values. Synchronous: those of the current step. Raises UnknownVariable, JobFailed."""
        trainer = self._loop.need_trainer()
        if self.mode is UpdateMode.ASYNC and self._loop.strategy is not None:
            with self._session.interrupts:
                self._loop.follow_mode().begin()
        places = self._loop.places
        chosen = list(places) if names is None else list(names)
        self._check_names(chosen)
        return {name: trainer.variables[places[name]].target.detach().clone() for name in chosen}

    def _check_names(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self._loop.places:
                raise UnknownVariable(f"{name!r}; the job has {', '.join(sorted(self._loop.places)[:8])}")

    # ---- checkpoints, and what compression keeps

    def checkpoint(self) -> int:
        """Takes a checkpoint that contains all that this worker has pushed. Returns its number once it is committed.
        Other workers train on meanwhile.

        Raises InvalidRequest if the job has no checkpoints (job.checkpoint.url), StorageUnavailable and other errors of
        writing it, JobFailed.
        """
        self._loop.need_trainer()
        with self._session.interrupts:
            self._loop.drain()
            number = take_checkpoint(self._session)
        self._loop.between_steps()
        return number

    def compression_state(self) -> dict[str, torch.Tensor]:
        """Returns copies of this worker's compression state by name, for example "residual.fc1.weight"
        (docs/guides/compression.md). It is empty without compression. Call it between two steps."""
        trainer = self._loop.need_trainer()
        with trainer.pushes.between_pushes():
            state = {} if trainer.pushes.feedback is None else trainer.pushes.feedback.state_dict()
        return {name: torch.from_numpy(value.copy()) for name, value in state.items()}

    def load_compression_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Loads what `compression_state` returned, in this worker or another. Raises UnknownVariable, ShapeMismatch and
        DTypeMismatch; then nothing has changed."""
        trainer = self._loop.need_trainer()
        if trainer.pushes.feedback is None:
            if state:
                raise UnknownVariable("compression state for a job without job.compression.push")
            return
        with trainer.pushes.between_pushes():
            trainer.pushes.feedback.load_state_dict(
                {name: value.detach().cpu().numpy() for name, value in state.items()}
            )

    # ---- leaving

    def close(self, error: str = "") -> None:
        """Leaves the job. A second call does nothing. `error`: why the script failed, if it did."""
        if self._closed:
            return
        with self._session.interrupts:
            self._close(error)

    def _close(self, error: str) -> None:
        self._closed = True
        atexit.unregister(self._close_at_exit)
        try:
            self._loop.finish(error)
        except ShardyardError as lost:
            error = error or f"{lost.code}: {lost}"
            raise
        finally:
            files, self._files = self._files, None
            if files is not None:
                files.close()
            if self._loop.trainer is not None:
                self._loop.trainer.close()
            self._session.leave(error)
            if self._on_close is not None:
                self._on_close()

    def _close_at_exit(self) -> None:
        """Leaves the job of a script without `with`. At exit Python still has the script's error, if there was one."""
        error = getattr(sys, "last_value", None)
        self.close("" if error is None else f"{type(error).__name__}: {error}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close("" if kind is None else f"{kind.__name__}: {error}")

    # ---- how it looks

    def __repr__(self) -> str:
        return f"<Job {self.name!r}, {self.mode.value}, step {self.step:,}, {self._state}>"

    def _repr_html_(self) -> str:
        """For notebooks."""
        stop = self.stopping
        rows = [
            ("state", self._state),
            ("worker", f"{self._session.caller.incarnation}{' (chief)' if self.chief else ''}"),
            ("mode", self.mode.value),
            ("step", f"{self.step:,}"),
            ("device", str(self._device)),
            *[(name, f"{float(value):.6g}") for name, value in self._metrics.latest.items()],
            *([] if stop is None else [("told to stop", stop.reason or "without a reason")]),
        ]
        return table(f"job {self.name}", rows)

    @property
    def _state(self) -> str:
        if self._closed:
            return "left"
        return "no variables yet" if self._loop.trainer is None else "training"
