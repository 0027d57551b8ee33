"""`sy.follow()`: a running job as an evaluating script sees it. It yields snapshots and takes metrics.

Owns: what `sy.follow()` returns. Invariant: training never waits for it. Must not know: partitions, pins, how a script
is launched.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Self

import numpy.typing as npt
import torch

from shardyard.config.settings import Settings
from shardyard.domain import errors
from shardyard.domain.ids import JobId, Version
from shardyard.domain.limits import METRICS_MAX
from shardyard.runtime.log import bind_process
from shardyard.runtime.malloc import Kept, tune_malloc
from shardyard.runtime.waits import ExplainedWait
from shardyard.security.identity import Role
from shardyard.transport.enrolment import own_credentials
from shardyard.transport.grpc_client import GrpcNetwork
from shardyard.transport.interfaces import Network
from shardyard_worker.embedding.table import tables_of
from shardyard_worker.reader.best import BestKeeper, Mode
from shardyard_worker.reader.model_values import load_into
from shardyard_worker.reader.pinned_version import View
from shardyard_worker.reader.reader_session import ReaderSession
from shardyard_worker.reader.serving import ServedModel
from shardyard_worker.reader.snapshot_rows import SnapshotRows
from shardyard_worker.reader.snapshots import AGAIN, Snapshots
from shardyard_worker.session.devices import pick_device
from shardyard_worker.session.metrics import checked_metric
from shardyard_worker.session.tensorboard import TensorBoardWriter, open_writer

log = logging.getLogger("shardyard.evaluator")

FOLLOWS_VARIABLE: Final = "SHARDYARD_FOLLOWS"
"""The number of the run that a launched script follows. It stays the same when the script is restarted."""
LOOK_AGAIN_S: Final = 0.2


@dataclass(frozen=True)
class Snapshot:
    """One consistent version of a job's values.

    `step`: the step of a synchronous job; otherwise every partition has at least this many updates. `versions`: (life,
    number of updates) of each partition; a restore raises the life. `names`, `arrays`: the variables, each array in its
    variable's shape.

    Evaluate inside `with snapshot:`. If servers have dropped its rows (VersionPassed), the block ends there without an
    error, and the loop goes on with a newer snapshot.

    >>> with sy.follow("trainer:50051") as run:
    ...     snapshot = next(run.snapshots())
    ...     snapshot.step, snapshot.state_dict()
    (1, {'bias': tensor([-0.5000]), 'weight': tensor([[0.5000, 0.5000]])})
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
    tune_malloc(Kept.TENSORS)
    if settings.worker.threads:
        torch.set_num_threads(settings.worker.threads)
    number = os.environ.get(FOLLOWS_VARIABLE, "")
    if network is None:
        network = GrpcNetwork(own_credentials(settings, Role.READER, Role.WORKER))
    session = ReaderSession(
        network,
        settings.coordinator,
        job=JobId(int(number) if number.isdigit() else 0),
        name=name,
        grace_ms=settings.membership.coordinator_grace_ms,
    )
    try:
        session.begin()
        bind_process(role="evaluator", id=str(os.getpid()), job=session.name)
        files = open_writer(settings.metrics.tensorboard, job=session.name, who=f"evaluator-{os.getpid()}")
    except BaseException:
        session.close()
        raise
    return Run(session, network, settings, files)


class Run:
    """A job that other processes train. Use it as a context manager. Not thread-safe.

    >>> model = torch.nn.Linear(2, 1)
    >>> with sy.follow("trainer:50051") as run:
    ...     for snapshot in run.snapshots(model, every_s=10):
    ...         with snapshot, torch.no_grad():
    ...             run.report(output=model(torch.ones(1, 2)).item())
    ...             run.keep_best("output", mode="max", into="best")
    step 1: output 0.5
    True
    """

    def __init__(
        self, session: ReaderSession, network: Network, settings: Settings, files: TensorBoardWriter | None
    ) -> None:
        self._session = session
        self._network = network
        self._settings = settings
        self._files = files
        self._snapshots = Snapshots(network, session.wait_registry)
        self._rows = SnapshotRows(session, self._snapshots)
        self._best = BestKeeper(session, settings.evaluator.into, settings.storage.key_file)
        self._serving: list[ServedModel] = []
        self._snapshot: Snapshot | None = None
        self._given_up = False
        """Whether the script has stopped evaluating the newest snapshot, since its rows were lost."""
        self._metrics: dict[str, float] = {}
        """Those reported of the newest snapshot."""
        self._closed = False
        self.device = pick_device(settings.worker.device, 0)
        """The device that the model should be on."""

    @property
    def name(self) -> str:
        """The job's name."""
        return self._session.name

    @property
    def job(self) -> JobId:
        """The number of the run."""
        return self._session.job

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
                self._rows.bind(model)
                load_into(model, snapshot.names, snapshot.arrays)
            yield snapshot
            self._rows.release()
            self._session.wait(begun + wait_s)

    def _next(self, *, rows: bool) -> Snapshot | None:
        """Waits for the next version that differs from the last one. Returns None if the job ended with the last one.
        `rows`: rows of tables stay pinned until the next call."""
        self._rows.release()
        why = ""
        with ExplainedWait(lambda: f"a new version of job {self.name}{why}", logger=log) as wait:
            while True:
                news = self._session.ongoing()
                if news.has_ended and news.view is None:
                    log.warning("job %s has ended, and its last values are not on the servers any more", self.name)
                    return None
                try:
                    snapshot = None if news.view is None else self._read(news.view, rows=rows)
                except AGAIN as error:
                    why = f" ({error.what})"
                    log.debug("no snapshot now: %s", error)
                    self._session.wait_for_news(news)
                else:
                    if snapshot is not None:
                        self._snapshot, self._metrics, self._given_up = snapshot, {}, False
                        return snapshot
                    if news.has_ended:
                        return None
                    why = "" if news.view is not None else " (it has no values that can be read now)"
                    self._session.wait(time.monotonic() + LOOK_AGAIN_S)
                wait.tick()

    def _read(self, view: View, *, rows: bool) -> Snapshot | None:
        """Returns None if the newest version is the last snapshot's."""
        held, arrays = self._rows.hold(view, rows=rows), None
        try:
            if self._snapshot is None or self._given_up or held.versions != self._snapshot.versions:
                arrays = self._snapshots.values(held)
        finally:
            if arrays is None or not rows:
                self._rows.release()
        names = tuple(spec.name for spec in view.layout.variables)
        return None if arrays is None else Snapshot(held.step, held.versions, names, arrays, self._give_up)

    def _give_up(self, error: errors.VersionPassed) -> None:
        log.warning("step %d of job %s is not evaluated: %s", self.step, self.name, error.what)
        self._given_up = True

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
        self._session.report(snapshot.step, self._metrics)

    def keep_best(self, metric: str, mode: Mode = "max", *, into: str | None = None, rows: bool = True) -> bool:
        """Keeps the newest snapshot if its reported `metric` is better than that of the kept one, which it then
        replaces. Better means larger (`mode` "max") or smaller ("min"). Returns whether it was kept.

        The snapshot goes to the folder JOB/best of the job's checkpoints, or below `into` (evaluator.into): a folder,
        or a URL of a store. `rows`: also keeps all rows of the tables of the model that was given to
        `snapshots`. They are read from the servers now; if servers have dropped that version, nothing is kept and the
        log says so.

        Raises InvalidRequest for a metric that was not reported, ConfigurationError if there is no such place,
        StorageUnavailable.
        """
        snapshot = self._need_snapshot()
        values = dict(zip(snapshot.names, snapshot.arrays, strict=True))
        all_rows = self._rows.all_rows if rows else lambda _: ()
        return self._best.keep(snapshot.step, values, self._metrics, metric, mode, into, all_rows)

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
        snapshots = Snapshots(self._network, self._session.wait_registry)
        served = ServedModel(self._session, snapshots, chosen, model)
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
            for served in self._serving:
                served.close()
            self._rows.close()
            self._snapshots.close()
        finally:
            self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *ended: object) -> None:
        self.close()
