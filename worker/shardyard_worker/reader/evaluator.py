"""A running job, as an evaluating script sees it: snapshots of its values, what they are worth, the best of them kept.

Owns: what `sy.follow()` gives back. Invariants: training never waits for it; what `keep_best` keeps are the values that
were read, whatever the script has done to its model since. Must not know: partitions, pins, how a script is launched.
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
"""The number of the run that a launched script follows: the same one when it is started again."""
LOOK_AGAIN_S: Final = 0.2
TRY_AGAIN_S: Final = 0.5

Mode = Literal["max", "min"]

_ROWS: Final = re.compile(r"(^|\.)table\.(ids|rows|seed)$")
"""Of a table, in a state dict."""


@dataclass(frozen=True)
class Snapshot:
    """One consistent version of a job's values. `step`: of a synchronous job its step; else so many updates at least
    have all partitions. `versions`: (life, number) of each partition.

    `with snapshot:` around its evaluation gives it up where servers do not hold its rows any more (VersionPassed): the
    block ends there, and the loop goes on with a newer one.
    """

    step: int
    versions: tuple[Version, ...]
    names: tuple[str, ...]
    arrays: tuple[npt.NDArray[Any], ...]
    given_up: Callable[[errors.VersionPassed], None] | None = field(default=None, repr=False, compare=False)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Copies of all values by name, on the CPU."""
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
    """Waits for the job `name` (empty: the only one) of the yard at `settings.coordinator`. `network`: how to reach it;
    gRPC unless given. Raises CoordinatorUnavailable, InvalidRequest, NotFound, ConfigurationError."""
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
    """A job that somebody else trains. Use it as a context manager. Not thread-safe."""

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
        """Of the newest snapshot, where its rows are looked up."""
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
            snapshot = self._next(rows=model is not None and bool(tables_of(model)))
            if snapshot is None:
                return
            if model is not None:
                self._load(model, snapshot)
            yield snapshot
            self._let_go()
            self._follower.wait(begun + wait_s)

    def _next(self, *, rows: bool) -> Snapshot | None:
        """The next version that differs from the one before; None: the job has ended with that one. `rows`: those of
        tables are held, until the next is asked for."""
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
        held = self._hold_on(self._snapshots.hold(view))  # first: values may take longer to come than a lease lasts
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
                # rows of a step belong to its parameters; of versions that are nobody's together any newer one will do
                self._rows_of = view.layout, view.mode
                self._rows = PinnedRows(view.layout, None if view.mode is UpdateMode.SYNC else self._newer)
            self._rows.show(self._held.look_up, self._held.read_rows)
            bind(tables, view.layout, self._rows)
        load_into(model, snapshot)

    def _newer(self) -> Reads:
        """Reads a version in the place of one that servers do not hold any more. Raises VersionPassed where none will
        come."""
        why = ""
        with (
            self._renewing,
            ExplainedWait(lambda: f"rows of a new version of job {self.name}{why}", logger=log) as wait,
        ):
            lost, self._held = self._held, None
            if lost is not None and not lost.is_lost:
                self._held = lost
                return lost.look_up, lost.read_rows  # another thread has asked
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

    def keep_best(self, metric: str, mode: Mode = "max", *, into: str | None = None, rows: bool = True) -> bool:
        """Keeps the newest snapshot, in the place of the one that was the best before, if the reported `metric` says
        that it is better: larger (`mode` "max") or smaller ("min"). Whether it was, and could be kept. `rows`: with all
        rows of the tables of the model that was given to `snapshots`, which are read from the servers now; a version
        that servers do not hold any more by then is not kept, and the log says so.

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
        """Of the model's tables, by the names that its state dict has for them; they are in files until `spools` ends.
        Raises VersionPassed, StorageUnavailable."""
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
        """The job's rows, and with `model` its parameters, for who answers requests with them, from any threads: each
        answer of one version that was the newest at most `staleness_ms` before (serving.staleness_ms). `model`: the
        job's; copies of it are given the values. `wait_ms`: how long a request waits for such a version
        (serving.wait_ms); `cached_rows`: so many rows of each table, those asked for most, stay in this process for as
        long as their version is read (serving.cached_rows). It ends with the run. Raises InvalidRequest.
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
        """Leaves the job alone. The second time does nothing."""
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
    """All rows of a table. Raises VersionPassed, StorageUnavailable."""
    try:
        return spools.enter_context(spooled(table.dim, lambda: table.source.pieces(table)))
    except OSError as error:
        raise errors.StorageUnavailable(
            f"rows of table {table.name!r} cannot be kept aside in {tempfile.gettempdir()} ({error})",
            why="they wait there until all have come, to be written as one file",
            todo="make room there, or set TMPDIR to a folder that has room; or keep_best(rows=False)",
        ) from error


def load_into(model: torch.nn.Module, snapshot: Snapshot) -> None:
    """Gives parameters and buffers of a model the values of their names, in place, having checked all of them. Raises
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
