"""`sy.follow()`: a running job as an evaluating script sees it. It yields snapshots, takes metrics, keeps the best.

Owns: what `sy.follow()` returns. Invariants: training never waits for it; `keep_best` keeps the values that were read,
even if the script has changed its model since. Must not know: partitions, pins, how a script is launched.
"""

from __future__ import annotations

import logging
import math
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self

import numpy as np
import numpy.typing as npt
import torch

from shardyard.checkpoints.best import BestFolder, BestManifest
from shardyard.checkpoints.row_exports import row_sources
from shardyard.config.settings import AUTO, Settings
from shardyard.domain import errors
from shardyard.domain.consistency import UpdateMode
from shardyard.domain.ids import JobId, Version
from shardyard.domain.layout.layouts import JobLayout
from shardyard.domain.limits import METRICS_MAX
from shardyard.domain.variables import DType
from shardyard.runtime.log import bind_process
from shardyard.runtime.waits import ExplainedWait
from shardyard.storage.storage import LocalStorage, open_storage
from shardyard.storage.tensors import TensorSource, bytes_of
from shardyard.transport.grpc_client import GrpcNetwork
from shardyard.transport.interfaces import Network
from shardyard.transport.malloc import tune_malloc
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_worker.embedding.table import Table, tables_of
from shardyard_worker.embedding.table_io import Spool, spooled
from shardyard_worker.reader.pinned_rows import PinnedRows, Reads, bind
from shardyard_worker.reader.pinned_version import Leases, PinnedVersion, View
from shardyard_worker.reader.reader_session import JobNews, ReaderSession
from shardyard_worker.reader.serving import ServedModel, ServingOptions
from shardyard_worker.reader.snapshots import AGAIN, Snapshots, Values
from shardyard_worker.session.devices import pick_device
from shardyard_worker.session.metrics import checked_metric
from shardyard_worker.session.tensorboard import TensorBoardWriter
from shardyard_worker.training.model_variables import as_written

log = logging.getLogger("shardyard.evaluator")

FOLLOWS_VARIABLE: Final = "SHARDYARD_FOLLOWS"
"""The number of the run that a launched script follows. It stays the same when the script is restarted."""
LOOK_AGAIN_S: Final = 0.2
TRY_AGAIN_S: Final = 0.5

Mode = Literal["max", "min"]

_ROWS: Final = re.compile(r"(^|\.)table\.(ids|rows|seed)$")
"""Matches a table's entries in a state dict."""


@dataclass(frozen=True)
class Snapshot:
    """One consistent version of a job's values.

    `step`: the step of a synchronous job; otherwise every partition has at least this many updates. `versions`: (life,
    number of updates) of each partition; a restore raises the life. `names`, `arrays`: the variables, each array in its
    variable's shape.

    Evaluate inside `with snapshot:`. If servers have dropped its rows (VersionPassed), the block ends there without an
    error, and the loop goes on with a newer snapshot.
    """

    step: int
    versions: tuple[Version, ...]
    names: tuple[str, ...]
    arrays: tuple[npt.NDArray[Any], ...]
    given_up: Callable[[errors.VersionPassed], None] | None = field(default=None, repr=False, compare=False)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns copies of all values by name, on the CPU, in the variables' shapes."""
        return {name: torch.from_numpy(each.copy()) for name, each in zip(self.names, self.arrays, strict=True)}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if not isinstance(error, errors.VersionPassed) or self.given_up is None:
            return False
        self.given_up(error)
        return True


def follow(settings: Settings, *, name: str, network: Network | None = None) -> Run:
    """Waits for the job `name` (empty: the only one) in the yard at `settings.coordinator`. `network`: how to reach it,
    gRPC by default. Raises CoordinatorUnavailable, InvalidRequest, NotFound, ConfigurationError."""
    tune_malloc()
    if settings.worker.threads:
        torch.set_num_threads(settings.worker.threads)
    number = os.environ.get(FOLLOWS_VARIABLE, "")
    reached = network or GrpcNetwork()
    follower = ReaderSession(
        reached,
        settings.coordinator,
        job=JobId(int(number) if number.isdigit() else 0),
        name=name,
        grace_ms=settings.membership.coordinator_grace_ms,
    )
    files: TensorBoardWriter | None = None
    try:
        follower.begin()
        bind_process(role="evaluator", id=str(os.getpid()), job=follower.name)
        if settings.metrics.tensorboard:
            folder = Path(settings.metrics.tensorboard)
            files = TensorBoardWriter(folder, job=follower.name, who=f"evaluator-{os.getpid()}")
    except BaseException:
        follower.close()
        raise
    return Run(follower, reached, settings, files)


class Run:
    """A job that other processes train. Use it as a context manager. Not thread-safe."""

    def __init__(
        self, follower: ReaderSession, network: Network, settings: Settings, files: TensorBoardWriter | None
    ) -> None:
        self._follower = follower
        self._network = network
        self._snapshots = Snapshots(network, follower.wait_registry)
        self._serving: list[ServedModel] = []
        self._settings = settings
        self._files = files
        self._leases = Leases()
        self._held: PinnedVersion | None = None
        """The pin of the newest snapshot, if its rows are looked up."""
        self._rows: PinnedRows | None = None
        self._model: torch.nn.Module | None = None
        self._rows_of: tuple[JobLayout, UpdateMode] | None = None
        self._renewing = threading.Lock()
        self._is_given_up = False
        self._snapshot: Snapshot | None = None
        self._metrics: dict[str, float] = {}
        self._judged: tuple[str, Mode] | None = None
        self._closed = False
        self.device = pick_device(settings.worker.device, 0)
        """The device that the model should be on."""

    @property
    def name(self) -> str:
        """The job's name."""
        return self._follower.name

    @property
    def job(self) -> JobId:
        """The number of the run."""
        return self._follower.job

    @property
    def step(self) -> int:
        """The step of the newest snapshot; 0 before the first."""
        return 0 if self._snapshot is None else self._snapshot.step

    # ---- snapshots

    def snapshots(self, model: torch.nn.Module | None = None, *, every_s: float | None = None) -> Iterator[Snapshot]:
        """Yields the newest version of the job, each version once, at most one every `every_s` seconds
        (evaluator.every_s). The last one is the job's final version. `model`: its parameters and buffers are set to the
        values, in place; those that the job does not have stay as they are.

        Waits while the job has not begun, partitions move or the coordinator is away. Raises ShapeMismatch,
        DTypeMismatch and UnknownVariable if the model is not the job's, UnsupportedModel if it has tables without rows,
        InvalidRequest for `every_s`, the error that the job failed with, CoordinatorLost.
        """
        wait_s = self._settings.evaluator.every_s if every_s is None else every_s
        if not 0 <= wait_s < math.inf:
            raise errors.InvalidRequest(f"a snapshot every {wait_s} s; expected a number from 0")
        while True:
            begun = time.monotonic()
            snapshot = self._next(rows=model is not None and bool(tables_of(model)))
            if snapshot is None:
                return
            if model is not None:
                self._load(model, snapshot)
            yield snapshot
            self._let_go()
            self._follower.wait(begun + wait_s)

    def _next(self, *, rows: bool) -> Snapshot | None:
        """Waits for the next version that differs from the last one. Returns None if the job ended with the last one.
        `rows`: rows of tables stay pinned until the next call."""
        self._let_go()
        why = ""
        with ExplainedWait(lambda: f"a new version of job {self.name}{why}", logger=log) as wait:
            while True:
                heard = self._heard()
                if heard.has_ended and heard.view is None:
                    log.warning("job %s has ended, and its last values are not on the servers any more", self.name)
                    return None
                try:
                    values = None if heard.view is None else self._read(heard.view, rows=rows)
                except AGAIN as error:
                    why = f" ({error.what})"
                    log.debug("no snapshot now: %s", error)
                    self._try_again(heard)
                else:
                    if values is not None and heard.view is not None:
                        return self._taken(values, heard.view)
                    if heard.has_ended:
                        return None
                    why = "" if heard.view is not None else " (it has no values that can be read now)"
                    self._follower.wait(time.monotonic() + LOOK_AGAIN_S)
                wait.tick()

    def _heard(self) -> JobNews:
        heard = self._follower.heard
        if heard.failure is not None:
            raise heard.failure
        return heard

    def _try_again(self, heard: JobNews) -> None:
        self._follower.wait(time.monotonic() + TRY_AGAIN_S, lambda now: now is not heard)
        if heard.has_ended:
            time.sleep(LOOK_AGAIN_S)

    def _read(self, view: View, *, rows: bool) -> Values | None:
        former = () if self._snapshot is None or self._is_given_up else self._snapshot.versions
        if not rows:
            return self._snapshots.read(view, former)
        held = self._hold_on(self._snapshots.hold(view))  # first: reading the values may take longer than a lease
        try:
            values = None if held.versions == former else self._snapshots.values(held)
        except BaseException:
            self._let_go()
            raise
        if values is None:
            self._let_go()
        return values

    def _taken(self, values: Values, view: View) -> Snapshot:
        names = tuple(spec.name for spec in view.layout.variables)
        self._snapshot = Snapshot(values.step, values.versions, names, values.arrays, self._give_up)
        self._metrics, self._is_given_up = {}, False
        return self._snapshot

    def _give_up(self, error: errors.VersionPassed) -> None:
        log.warning("step %d of job %s is not evaluated: %s", self.step, self.name, error.what)
        self._is_given_up = True

    # ---- rows

    def _load(self, model: torch.nn.Module, snapshot: Snapshot) -> None:
        tables, self._model = tables_of(model), model
        if tables and self._held is not None:
            view = self._held.view
            of = self._rows_of
            if self._rows is None or of is None or of[0] is not view.layout or of[1] is not view.mode:
                # synchronous: rows must be of the parameters' step; otherwise rows of any newer version will do
                self._rows_of = view.layout, view.mode
                self._rows = PinnedRows(view.layout, None if view.mode is UpdateMode.SYNC else self._newer)
            self._rows.show(self._held.look_up, self._held.read_rows)
            bind(tables, view.layout, self._rows)
        load_into(model, snapshot)

    def _newer(self) -> Reads:
        """Pins a newer version after servers have dropped the old one. Raises VersionPassed if the job has ended and
        there is none."""
        why = ""
        with (
            self._renewing,
            ExplainedWait(lambda: f"rows of a new version of job {self.name}{why}", logger=log) as wait,
        ):
            lost, self._held = self._held, None
            if lost is not None and not lost.is_lost:
                self._held = lost
                return lost.look_up, lost.read_rows  # another thread has renewed it already
            if lost is not None:
                self._leases.release(lost)
            while True:
                heard = self._heard()
                if heard.has_ended and heard.view is None:
                    raise errors.VersionPassed(f"rows of job {self.name}, which has ended: servers have let them go")
                try:
                    if heard.view is not None:
                        log.info("rows of job %s are those of a newer version from here on", self.name)
                        held = self._hold_on(self._snapshots.hold(heard.view))
                        return held.look_up, held.read_rows
                except AGAIN as error:
                    why = f" ({error.what})"
                self._try_again(heard)
                wait.tick()

    def _hold_on(self, held: PinnedVersion) -> PinnedVersion:
        self._held = held
        self._leases.keep(held)
        return held

    def _let_go(self) -> None:
        held, self._held = self._held, None
        if self._rows is not None:
            self._rows.show(None)
        if held is not None:
            self._leases.release(held)

    # ---- what was found

    def report(self, **metrics: float | torch.Tensor) -> None:
        """Reports metrics of the newest snapshot. `shardyard status`, standard output and TensorBoard
        (metrics.tensorboard) show them. Returns at once. Raises InvalidRequest for a value that is not one real
        number."""
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

    def keep_best(self, metric: str, mode: Mode = "max", *, into: str | None = None, rows: bool = True) -> bool:
        """Keeps the newest snapshot if its reported `metric` is better than that of the kept one, which it then
        replaces. Better means larger (`mode` "max") or smaller ("min"). Returns whether it was kept.

        The snapshot goes to the folder JOB/best of the job's checkpoints, or below `into` (evaluator.into): a folder,
        or a URL that fsspec knows. `rows`: also keeps all rows of the tables of the model that was given to
        `snapshots`. They are read from the servers now; if servers have dropped that version, nothing is kept and the
        log says so.

        Raises InvalidRequest for a metric that was not reported, ConfigurationError if there is no such place,
        StorageUnavailable.
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
        with self._follower.wait_registry.over(lambda: f"{folder.url} to take the best version"):
            try:
                return self._keep(folder, snapshot, metric, mode, value, rows=rows)
            except errors.VersionPassed as error:
                log.warning("step %d, the best by %s so far, is not kept: %s", snapshot.step, metric, error.what)
                return False

    def _keep(
        self, folder: BestFolder, snapshot: Snapshot, metric: str, mode: Mode, value: float, *, rows: bool
    ) -> bool:
        former = self._former(folder, snapshot, metric, mode)
        if former is not None and not former.is_beaten_by(value):
            return False
        values = dict(zip(snapshot.names, snapshot.arrays, strict=True))
        with ExitStack() as spools:
            folder.keep(
                job=self.job,
                metric=metric,
                mode=mode,
                value=value,
                step=snapshot.step,
                values=values,
                more=list(self._all_rows(spools)) if rows else (),
            )
        kept = wire.KeptBest(metric=metric, lowest=mode == "min", value=value, step=snapshot.step, url=folder.url)
        self._tell(snapshot, kept)
        log.info("step %d is the best by %s so far: %g", snapshot.step, metric, value)
        return True

    def _all_rows(self, spools: ExitStack) -> Iterator[TensorSource]:
        """Yields the rows of the model's tables under their names in its state dict. They are in files until `spools`
        ends. Raises VersionPassed, StorageUnavailable."""
        if self._model is None or self._rows is None:
            return
        found: dict[Table, Spool] = {}
        for path, module in self._model.named_modules(remove_duplicate=False):
            if isinstance(module, Table) and module.source is self._rows:
                prefix = (f"{path}." if path else "").replace("_orig_mod.", "")
                if module not in found:
                    found[module] = _spooled(module, spools)
                spool = found[module]
                yield from row_sources(prefix, spool.count, module.dim, spool.chunks)
                seed = np.array(module.seed, np.int64)
                yield TensorSource(prefix + "seed", DType.INT64, (), partial(bytes_of, seed))

    def _former(self, folder: BestFolder, snapshot: Snapshot, metric: str, mode: Mode) -> BestManifest | None:
        """Returns what is kept now, if it can be compared with this snapshot."""
        try:
            former = folder.load()
            if former is None:
                return None
            if (former.metric, former.mode) != (metric, mode):
                log.warning(
                    "%s has the %s of %s, and gets that of %s now", folder.url, former.mode, former.metric, metric
                )
                return None
            found = folder.contents(former).tensors.values()
            there = {tensor.name: tensor.shape for tensor in found if not _ROWS.search(tensor.name)}
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

    # ---- serving

    def serve(
        self,
        model: torch.nn.Module | None = None,
        *,
        staleness_ms: int | None = None,
        wait_ms: int | None = None,
        cached_rows: int | None = None,
    ) -> ServedModel:
        """Serves the job's rows, and with `model` its parameters, to any threads. Each answer is of one version, which
        was the newest at most `staleness_ms` milliseconds before (serving.staleness_ms).

        `model`: the job's model; the values are put into copies of it. `wait_ms`: how long a request waits for such a
        version (serving.wait_ms). `cached_rows`: how many rows of each table, the most requested ones, this process
        caches while their version is read (serving.cached_rows). Serving ends with the run. Raises InvalidRequest.
        """
        if self._closed:
            raise errors.InvalidRequest(
                f"to serve job {self.name}, which is not followed any more", why="it was closed"
            )
        settings = self._settings.serving
        given = {"staleness_ms": staleness_ms, "wait_ms": wait_ms, "cached_rows": cached_rows}
        changed = {name: value for name, value in given.items() if value is not None}
        try:
            chosen = type(settings).model_validate(settings.model_dump() | changed)
        except ValueError as error:
            raise errors.InvalidRequest(f"to serve with {changed}: {error}") from None
        options = ServingOptions(chosen.staleness_ms, chosen.wait_ms, chosen.cached_rows)
        snapshots = Snapshots(self._network, self._follower.wait_registry)
        served = ServedModel(self._follower, snapshots, options, model, _load_values)
        self._serving.append(served)
        return served

    # ---- leaving

    def close(self) -> None:
        """Stops following the job. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._files is not None:
                self._files.close()
            self._let_go()
            for served in self._serving:
                served.close()
            self._leases.close()
            self._snapshots.close()
        finally:
            self._follower.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _spooled(table: Table, spools: ExitStack) -> Spool:
    """Reads all rows of a table. Raises VersionPassed, StorageUnavailable."""
    try:
        return spools.enter_context(spooled(table.dim, lambda: table.source.pieces(table)))
    except OSError as error:
        raise errors.StorageUnavailable(
            f"rows of table {table.name!r} cannot be kept aside in {tempfile.gettempdir()} ({error})",
            why="they wait there until all have come, to be written as one file",
            todo="make room there, or set TMPDIR to a folder that has room; or keep_best(rows=False)",
        ) from error


def load_into(model: torch.nn.Module, snapshot: Snapshot) -> None:
    """Sets a model's parameters and buffers to the values of their names, in place, once all are checked. Raises
    UnknownVariable, ShapeMismatch, DTypeMismatch, UnsupportedModel."""
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


def _load_values(model: torch.nn.Module, names: Sequence[str], arrays: Sequence[npt.NDArray[Any]]) -> None:
    load_into(model, Snapshot(0, (), tuple(names), tuple(arrays)))
