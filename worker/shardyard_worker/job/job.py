"""A job, as a training script sees it.

Owns: what `sy.connect()` returns. `membership` has what a worker has of the job without training, `job_data` how it
reads data. `training_loop` runs the steps; `prepare` and `variables` do what their names say. Must not know: how a yard
is started, bytes, partitions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, overload

import torch
from torch.optim.lr_scheduler import LRScheduler

from shardyard.domain.consistency import Stop, UpdateMode
from shardyard.domain.errors import InvalidRequest, UnknownVariable
from shardyard_worker.job import variables as named
from shardyard_worker.job.job_data import JobData
from shardyard_worker.job.prepare import JobOptimizer, adopt_scaler, prepare
from shardyard_worker.job.train_step import TrainStep, check_loss_function
from shardyard_worker.optimizers.grad_scaler import JobScaler
from shardyard_worker.optimizers.lr_schedule import JobScheduler
from shardyard_worker.replicas.spread_model import Loss
from shardyard_worker.session.interrupts import INTERRUPTS
from shardyard_worker.session.job_requests import take_checkpoint
from shardyard_worker.session.metrics import Metrics, checked_metric
from shardyard_worker.session.session import CheckpointTaken

Model = TypeVar("Model", bound=torch.nn.Module)
StepCallback = TypeVar("StepCallback", bound=Callable[["Job"], object])
LogCallback = TypeVar("LogCallback", bound=Callable[["Job", Metrics], object])
CheckpointCallback = TypeVar("CheckpointCallback", bound=Callable[["Job", CheckpointTaken], object])
StopCallback = TypeVar("StopCallback", bound=Callable[["Job", Stop], object])


class Job(JobData):
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

    _train_step: TrainStep | None = None

    @property
    def gradient_norm(self) -> float | None:
        """The 2-norm of the last gradient over all parameters, before clipping. Synchronous: of the last step's mean
        gradient. None before the first step, and in a job without job.clip.norm."""
        return None if self._loop.trainer is None else self._loop.trainer.pushes.gradient_norm

    # ---- callbacks and metrics

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
    def prepare(
        self, model: Model, optimizer: torch.optim.Optimizer, *, loss: Loss | None = None
    ) -> tuple[Model, JobOptimizer]: ...
    @overload
    def prepare(
        self, model: Model, optimizer: torch.optim.Optimizer, scheduler: LRScheduler, *, loss: Loss | None = None
    ) -> tuple[Model, JobOptimizer, JobScheduler]: ...
    def prepare(
        self,
        model: Model,
        optimizer: torch.optim.Optimizer,
        scheduler: LRScheduler | None = None,
        *,
        loss: Loss | None = None,
    ) -> tuple[Model, JobOptimizer] | tuple[Model, JobOptimizer, JobScheduler]:
        """Moves the optimizer and its parameters to the servers.

        Returns the same model and a `JobOptimizer`. The model's parameters and persistent buffers now hold the job's
        values. The optimizer's `step()` pushes the gradients and pulls the parameters. With a `scheduler`, also returns
        a `JobScheduler`, whose rates are those after as many scheduler steps as the job has taken. `loss`: for
        `train_step`, `loss(model(*inputs), target)`.

        In local mode any optimizer is accepted, and it stays in this process: `step()` runs it here. The servers get
        the sum of its steps once every `job.consistency.steps` steps.

        Raises UnsupportedOptimizer, UnsupportedModel, VariableConflict, InvalidRequest.

        >>> model = torch.nn.Linear(2, 1)
        >>> with sy.connect() as job:
        ...     model, optimizer = job.prepare(model, torch.optim.Adam(model.parameters(), lr=1e-3))
        ...     model(torch.ones(1, 2)).sum().backward()
        ...     optimizer.step()
        """
        check_loss_function(loss)
        prepared, schedule = prepare(self._loop, model, optimizer, scheduler, loss)
        self._train_step = TrainStep(self._loop, model, prepared, schedule, loss)
        return (model, prepared) if schedule is None else (model, prepared, schedule)

    def train_step(self, *batch: Any) -> torch.Tensor:
        """Computes the loss of a batch and its gradients, and takes a step. Returns the loss, detached.

        The last value of the batch is the target; those before it are the model's inputs. The loss is
        `loss(model(*inputs), target)`, by the loss of `prepare`. The optimizer, the scheduler and the scaler of the job
        take a step, and the gradients are dropped. With `accumulate` in job.batches, and in `no_sync`, gradients of
        several batches are averaged, and the last batch of them takes the step. The script does the same by itself
        with `backward()` and `optimizer.step()`.

        Raises InvalidRequest before `prepare`, without a loss, and for a loss that is not one number or does not depend
        on the model; JobFailed.

        >>> model = torch.nn.Linear(2, 1)
        >>> data = torch.utils.data.TensorDataset(torch.randn(8, 2), torch.randn(8, 1))
        >>> with sy.connect() as job:
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ...     model, optimizer = job.prepare(model, optimizer, loss=torch.nn.functional.mse_loss)
        ...     for x, y in job.batches(data, batch_size=4):
        ...         loss = job.train_step(x, y)
        ...     job.step
        2
        """
        trainer = self._loop.need_trainer()
        if self._train_step is None:
            raise InvalidRequest(
                "job.train_step in a job without a model",
                why="job.register gives variables only",
                todo="give the model to job.prepare, or push gradients with job.push",
            )
        feed = self._loop.feed
        is_due = self.step_due and not trainer.accumulates_by_hand
        return self._train_step.take(batch, is_due=is_due, accumulate=1 if feed is None else feed.accumulate)

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

        >>> model = torch.nn.Linear(2, 1)
        >>> with sy.connect() as job:
        ...     scaler = job.scaler(init_scale=1024.0)
        ...     model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        ...     scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        ...     scaler.step(optimizer)
        ...     scaler.update()
        ...     scaler.get_scale()
        1024.0
        """
        made = JobScaler(
            self.device,
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            enabled=enabled,
            by_steps=self.mode is UpdateMode.SYNC,
        )
        adopt_scaler(self._loop, made)
        return made

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
        named.register(self._loop, variables, optimizer, settings)

    def push(self, gradients: Mapping[str, torch.Tensor], *, samples: float = 1.0, **settings: float) -> None:
        """Pushes gradients by name, each with its variable's shape and dtype. Variables that are not named stay as they
        are. In a synchronous job it returns when the step is complete.

        `samples`: the weight of this push in the mean of a synchronous step. `settings` replace the current ones for
        this push. Raises UnknownVariable, ShapeMismatch, DTypeMismatch, JobFailed.

        >>> with sy.connect() as job:
        ...     job.register({"a": torch.zeros(2), "b": torch.zeros(1)}, optimizer="sgd", lr=0.5)
        ...     job.push({"a": torch.tensor([1.0, 2.0])}, lr=0.1)  # "b" stays as it is
        ...     job.pull()
        {'a': tensor([-0.1000, -0.2000]), 'b': tensor([0.])}
        """
        named.push(self._loop, gradients, samples, settings)

    def pull(self, names: Sequence[str] | None = None) -> dict[str, torch.Tensor]:
        """Returns copies of the variables by name, of all or of `names`, in their shapes and dtypes. Asynchronous: the
        newest values. Synchronous: those of the current step. Raises UnknownVariable, JobFailed.

        >>> with sy.connect() as job:
        ...     job.register({"a": torch.ones(2), "b": torch.zeros(3)})
        ...     job.pull(["a"])
        {'a': tensor([1., 1.])}
        """
        return named.pull(self._loop, names)

    # ---- checkpoints, and what compression keeps

    def checkpoint(self) -> int:
        """Takes a checkpoint that contains all that this worker has pushed. Returns its number once it is committed.
        Other workers train on meanwhile.

        Raises InvalidRequest if the job has no checkpoints (job.checkpoint.url), StorageUnavailable and other errors of
        writing it, JobFailed.

        >>> with sy.connect(settings={"job.checkpoint.url": "checkpoints"}) as job:
        ...     job.register({"w": torch.zeros(2)})
        ...     job.push({"w": torch.ones(2)})
        ...     job.checkpoint()  # number 1 has the first values
        2
        """
        self._loop.need_trainer()
        with INTERRUPTS:
            self._loop.finish_pushes()
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
