"""A running job, as an evaluating script sees it: snapshots of its values, what they are worth, the best of them kept.

Owns: what `sy.follow()` gives back. Invariants: training never waits for it; what `keep_best` keeps are the values that
were read, whatever the script has done to its model since. Must not know: partitions, pins, how a script is launched.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self

import numpy.typing as npt
import torch

from shardyard.checkpoints.best import BestFolder, BestManifest
from shardyard.checkpoints.storage import LocalStorage, open_storage
from shardyard.ground import errors
from shardyard.ground.limits import METRICS_MAX
from shardyard.ground.types import JobId, Version
from shardyard.runtime.log import bind_process
from shardyard.runtime.settings import AUTO, Settings
from shardyard.runtime.waiting import ExplainedWait
from shardyard.transport.channel import GrpcNetwork
from shardyard.transport.memory import tune_malloc
from shardyard.transport.peers import Network
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_worker.event_files import EventFiles
from shardyard_worker.follower import Follower
from shardyard_worker.job import as_written, checked_metric, pick_device
from shardyard_worker.snapshots import AGAIN, Snapshots, Values, View
from shardyard_worker.table import tables_of

log = logging.getLogger("shardyard.evaluator")

FOLLOWS_VARIABLE: Final = "SHARDYARD_FOLLOWS"
"""The number of the run that a launched script follows: the same one when it is started again."""
LOOK_AGAIN_S: Final = 0.2
TRY_AGAIN_S: Final = 0.5

Mode = Literal["max", "min"]


@dataclass(frozen=True)
class Snapshot:
    """One consistent version of a job's values. `step`: of a synchronous job its step; else so many updates at least
    have all partitions. `versions`: (life, number) of each partition."""

    step: int
    versions: tuple[Version, ...]
    names: tuple[str, ...]
    arrays: tuple[npt.NDArray[Any], ...]

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Copies of all values by name, on the CPU."""
        return {name: torch.from_numpy(each.copy()) for name, each in zip(self.names, self.arrays, strict=True)}


def follow(settings: Settings, *, name: str, network: Network | None = None) -> Run:
    """Waits for the job `name` (empty: the only one) of the yard at `settings.coordinator`. `network`: how to reach it;
    gRPC unless given. Raises CoordinatorUnavailable, InvalidRequest, NotFound, ConfigurationError."""
    tune_malloc()
    if settings.worker.threads:
        torch.set_num_threads(settings.worker.threads)
    number = os.environ.get(FOLLOWS_VARIABLE, "")
    reached = network or GrpcNetwork()
    follower = Follower(
        reached,
        settings.coordinator,
        job=JobId(int(number) if number.isdigit() else 0),
        name=name,
        grace_ms=settings.membership.coordinator_grace_ms,
    )
    files: EventFiles | None = None
    try:
        follower.begin()
        bind_process(role="evaluator", id=str(os.getpid()), job=follower.name)
        if settings.metrics.tensorboard:
            folder = Path(settings.metrics.tensorboard)
            files = EventFiles(folder, job=follower.name, who=f"evaluator-{os.getpid()}")
    except BaseException:
        follower.close()
        raise
    return Run(follower, Snapshots(reached, follower.vigil), settings, files)


class Run:
    """A job that somebody else trains. Use it as a context manager. Not thread-safe."""

    def __init__(self, follower: Follower, snapshots: Snapshots, settings: Settings, files: EventFiles | None) -> None:
        self._follower = follower
        self._snapshots = snapshots
        self._settings = settings
        self._files = files
        self._snapshot: Snapshot | None = None
        self._metrics: dict[str, float] = {}
        self._judged: tuple[str, Mode] | None = None
        self._closed = False
        self.device = pick_device(settings.worker.device, 0)
        """Where the model should be."""

    @property
    def name(self) -> str:
        """The job's."""
        return self._follower.name

    @property
    def job(self) -> JobId:
        """The number of the run."""
        return self._follower.job

    @property
    def step(self) -> int:
        """Of the newest snapshot."""
        return 0 if self._snapshot is None else self._snapshot.step

    # ---- snapshots

    def snapshots(self, model: torch.nn.Module | None = None, *, every_s: float | None = None) -> Iterator[Snapshot]:
        """Versions of the job, the newest at each time, at most one in `every_s` seconds (evaluator.every_s), each of
        them once; the last one is that with which the job ends. `model`: its parameters and buffers are given the
        values, in place; what the job does not have is left alone.

        A job that has not begun yet, partitions that move and a coordinator that is away are waited for. Raises
        ShapeMismatch, DTypeMismatch and UnknownVariable where the model is another one than the job's, UnsupportedModel
        where it has tables without rows, what the job has failed with, CoordinatorLost.
        """
        wait_s = self._settings.evaluator.every_s if every_s is None else every_s
        if not 0 <= wait_s < math.inf:
            raise errors.InvalidRequest(f"a snapshot every {wait_s} s; expected a number from 0")
        while True:
            begun = time.monotonic()
            snapshot = self._next()
            if snapshot is None:
                return
            if model is not None:
                load_into(model, snapshot)
            yield snapshot
            self._follower.wait(begun + wait_s)

    def _next(self) -> Snapshot | None:
        """The next version that differs from the one before; None: the job has ended with that one."""
        why = ""
        with ExplainedWait(lambda: f"a new version of job {self.name}{why}", logger=log) as wait:
            while True:
                heard = self._follower.heard
                if heard.failure is not None:
                    raise heard.failure
                if heard.has_ended and heard.view is None:
                    log.warning("job %s has ended, and its last values are not on the servers any more", self.name)
                    return None
                try:
                    values = None if heard.view is None else self._read(heard.view)
                except AGAIN as error:
                    why = f" ({error.what})"
                    log.debug("no snapshot now: %s", error)
                    self._follower.wait(time.monotonic() + TRY_AGAIN_S, lambda now, before=heard: now is not before)  # type: ignore[misc]
                    if heard.has_ended:
                        time.sleep(LOOK_AGAIN_S)
                else:
                    if values is not None and heard.view is not None:
                        return self._taken(values, heard.view)
                    if heard.has_ended:
                        return None
                    why = "" if heard.view is not None else " (it has no values that can be read now)"
                    self._follower.wait(time.monotonic() + LOOK_AGAIN_S)
                wait.tick()

    def _read(self, view: View) -> Values | None:
        former = () if self._snapshot is None else self._snapshot.versions
        return self._snapshots.read(view, former)

    def _taken(self, values: Values, view: View) -> Snapshot:
        names = tuple(spec.name for spec in view.layout.variables)
        self._snapshot = Snapshot(values.step, values.versions, names, values.arrays)
        self._metrics = {}
        return self._snapshot

    # ---- what was found

    def report(self, **metrics: float | torch.Tensor) -> None:
        """What the newest snapshot is worth: shown by `shardyard status`, on standard output, and by TensorBoard
        (metrics.tensorboard). Returns at once. Raises InvalidRequest for what is not one real number."""
        snapshot = self._need_snapshot()
        found = {name: float(checked_metric(name, value)) for name, value in metrics.items()}
        if len(self._metrics | found) > METRICS_MAX:
            raise errors.InvalidRequest(f"{len(self._metrics | found)} metrics of a version; at most {METRICS_MAX}")
        self._metrics |= found
        shown = ", ".join(f"{name} {value:.6g}" for name, value in found.items())
        print(f"step {snapshot.step:,}: {shown}", flush=True)  # noqa: T201 - that is its purpose
        if self._files is not None:
            self._files.take(snapshot.step, dict(found))
        self._tell(snapshot, None)

    def keep_best(self, metric: str, mode: Mode = "max", *, into: str | None = None) -> bool:
        """Keeps the newest snapshot, in the place of the one that was the best before, if the reported `metric` says
        that it is better: larger (`mode` "max") or smaller ("min"). Whether it was.

        It is kept in the folder JOB/best of the job's checkpoints, or below `into` (evaluator.into): a folder or any
        URL that fsspec knows. Raises InvalidRequest for a metric that was not reported, ConfigurationError where there
        is no such place, StorageUnavailable.
        """
        snapshot = self._need_snapshot()
        if mode not in ("max", "min"):
            raise errors.InvalidRequest(f"mode {mode!r}; expected max or min")
        if metric not in self._metrics:
            reported = ", ".join(self._metrics) or "nothing"
            raise errors.InvalidRequest(f"to keep the best by {metric!r}; reported of this version: {reported}")
        if self._judged not in (None, (metric, mode)):
            raise errors.InvalidRequest(f"to keep the best by {metric} ({mode}) and by another metric of one job")
        self._judged = metric, mode
        value = self._metrics[metric]
        if not math.isfinite(value):
            return False
        folder = self._folder(into)
        with self._follower.vigil.over(lambda: f"{folder.url} to take the best version"):
            return self._keep(folder, snapshot, metric, mode, value)

    def _keep(self, folder: BestFolder, snapshot: Snapshot, metric: str, mode: Mode, value: float) -> bool:
        former = self._former(folder, snapshot, metric, mode)
        if former is not None and not former.is_beaten_by(value):
            return False
        values = dict(zip(snapshot.names, snapshot.arrays, strict=True))
        folder.keep(job=self.job, metric=metric, mode=mode, value=value, step=snapshot.step, values=values)
        kept = wire.KeptBest(metric=metric, lowest=mode == "min", value=value, step=snapshot.step, url=folder.url)
        self._tell(snapshot, kept)
        log.info("step %d is the best by %s so far: %g", snapshot.step, metric, value)
        return True

    def _former(self, folder: BestFolder, snapshot: Snapshot, metric: str, mode: Mode) -> BestManifest | None:
        """What is kept, where that can be compared with this."""
        try:
            former = folder.load()
            if former is None:
                return None
            if (former.metric, former.mode) != (metric, mode):
                log.warning(
                    "%s has the %s of %s, and gets that of %s now", folder.url, former.mode, former.metric, metric
                )
                return None
            there = {tensor.name: tensor.shape for tensor in folder.contents(former).tensors.values()}
        except (errors.CheckpointDamaged, errors.CheckpointNotFound) as error:
            log.warning("what was the best is damaged, and replaced: %s", error.what)
            return None
        if there != {name: each.shape for name, each in zip(snapshot.names, snapshot.arrays, strict=True)}:
            log.warning("%s has the best of another model, and gets that of this one now", folder.url)
            return None
        return former

    def _folder(self, into: str | None) -> BestFolder:
        url = into or self._settings.evaluator.into
        is_own = url != AUTO
        if not is_own:
            url = self._follower.heard.url
        if not url:
            raise errors.ConfigurationError(
                f"job {self.name} has no checkpoints, so there is no place for its best version",
                why="",
                todo="give a folder or URL: evaluator.into, --into, or keep_best(..., into=...)",
            )
        storage = open_storage(url)
        if not is_own and isinstance(storage, LocalStorage) and not Path(storage.url).is_dir():
            raise errors.ConfigurationError(
                f"{url}, where the checkpoints of job {self.name} are, is not a folder of this machine",
                why="it is one of the coordinator's",
                todo="give a folder or URL: evaluator.into, --into, or keep_best(..., into=...)",
            )
        return BestFolder(storage, self.name)

    def _tell(self, snapshot: Snapshot, best: wire.KeptBest | None) -> None:
        metrics = [wire.Metric(name=name, value=value) for name, value in self._metrics.items() if math.isfinite(value)]
        self._follower.tell(wire.ReportEvaluationRequest(job=self.job, step=snapshot.step, metrics=metrics, best=best))

    def _need_snapshot(self) -> Snapshot:
        if self._snapshot is None:
            raise errors.InvalidRequest("no snapshot yet", todo="iterate over run.snapshots(model) first")
        return self._snapshot

    # ---- leaving

    def close(self) -> None:
        """Leaves the job alone. The second time does nothing."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._files is not None:
                self._files.close()
            self._snapshots.close()
        finally:
            self._follower.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def load_into(model: torch.nn.Module, snapshot: Snapshot) -> None:
    """Gives parameters and buffers of a model the values of their names, in place, having checked all of them. Raises
    UnknownVariable, ShapeMismatch, DTypeMismatch, UnsupportedModel."""
    for name, table in tables_of(model).items():
        if not len(table):
            raise errors.UnsupportedModel(
                f"a model to be followed whose embedding table {name!r} has no rows",
                why="snapshots have variables and no rows, so it would be judged by rows that nobody has trained",
                todo="evaluate in the training script (if job.chief), or put rows into the table first, such as"
                " `shardyard checkpoint export --table` writes them (table.load)",
            )
    there: dict[str, torch.Tensor] = {}
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        there[as_written(name)] = tensor
    found = []
    for name, array in zip(snapshot.names, snapshot.arrays, strict=True):
        target = there.get(name)
        value = torch.from_numpy(array)
        if target is None:
            raise errors.UnknownVariable(
                f"the job has a variable {name!r}, and the model has none of that name", todo="build the job's model"
            )
        if target.shape != value.shape:
            raise errors.ShapeMismatch(f"{name!r} has the shape {tuple(target.shape)}; the job's {tuple(value.shape)}")
        if target.dtype != value.dtype:
            raise errors.DTypeMismatch(f"{name!r} is {target.dtype}; the job's {value.dtype}")
        found.append((target, value))
    with torch.no_grad():
        for target, value in found:
            target.copy_(value)
