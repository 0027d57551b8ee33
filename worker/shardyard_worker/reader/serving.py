"""Serves a job's rows and parameters to request handlers while other processes train it.

Every answer is of one version: one step of a synchronous job, otherwise one version of each partition, all pinned at
one moment. A version's age counts from a moment at which it was still the newest. A background thread takes the next
version before the current one is too old, and first fetches the rows that were requested most, so that requests do not
wait. A request waits only if no version is young enough.

Owns: the versions that are read, and their replacement. Invariants: a version is at most `staleness_ms` old when an
answer from it begins, unless the job has ended; a version is released when its last reader has left; training never
waits for serving, and serving never waits for training. Safe for several threads. Must not know: pins, how rows travel.
"""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final, Self

import numpy as np
import torch

from shardyard.config.settings import ServingSettings
from shardyard.domain import errors
from shardyard.domain.consistency import UpdateMode
from shardyard.domain.ids import Version
from shardyard.runtime.waits import ExplainedWait
from shardyard_worker.embedding.modules import flat_ids
from shardyard_worker.embedding.table import tables_of
from shardyard_worker.reader.model_values import load_into
from shardyard_worker.reader.pinned_rows import PinnedRows, bind
from shardyard_worker.reader.pinned_version import Leases, PinnedVersion, View, numbers_of
from shardyard_worker.reader.reader_session import ReaderSession
from shardyard_worker.reader.snapshots import AGAIN, Snapshots
from shardyard_worker.rows.dedup import Float32s, UniqueIds, unique_ids
from shardyard_worker.rows.frequency_cache import FrequencyCache
from shardyard_worker.rows.row_prefetch import Bools, RowQuery, complete

log = logging.getLogger("shardyard.serving")

STEP_WAIT_SHARE: Final = 4
"""The wait for a step that was named ahead is at most a quarter of the staleness."""
STEP_WAIT_MS_MAX: Final = 2_000
REFRESH_SHARE: Final = 2
"""The next version is taken when the current one has half its maximum age."""
TRY_AGAIN_MS: Final = 100
SLICE_MS: Final = 200
CLOSE_MS: Final = 4_000
SPARE_MODELS_MAX: Final = 2
"""Unused copies of the model that are kept for later versions."""


@dataclass(frozen=True)
class ServedRows:
    """Rows of one version. `rows`: by table, shape (*ids.shape, dim), float32. `step`, `versions`: as in Snapshot.
    `age_ms`: the version's age when the answer began, in milliseconds."""

    rows: dict[str, torch.Tensor]
    step: int
    versions: tuple[Version, ...]
    age_ms: float


@dataclass
class ServingCounts:
    """Counts since serving began. `rows`: unique ids looked up; `hits`: those whose rows were cached; `versions`:
    versions taken; `waits`: requests that waited for a version."""

    rows: int = 0
    hits: int = 0
    versions: int = 0
    waits: int = 0

    @property
    def hit_share(self) -> float:
        return self.hits / self.rows if self.rows else 0.0


class ServedVersion:
    """One version, valid inside its `with` block. Safe for several threads."""

    def __init__(
        self,
        held: PinnedVersion,
        hot: FrequencyCache | None,
        count: Callable[[int, int], None],
        model: torch.nn.Module | None,
    ) -> None:
        self._held = held
        self._hot = hot
        self._count = count
        self._model = model
        self._partitions = len(held.view.layout.partitions)
        self._numbers = numbers_of(held.view.layout)
        self.as_of = held.as_of
        self.is_last = held.view.ended
        self.users = 0
        self.is_retired = False

    @property
    def step(self) -> int:
        """The step of a synchronous job; otherwise every partition has at least this many updates."""
        return self._held.step

    @property
    def versions(self) -> tuple[Version, ...]:
        """(life, number of updates) of each partition; a restore raises the life."""
        return self._held.versions

    @property
    def age_ms(self) -> float:
        """Milliseconds since it was taken, or was last seen to be the newest."""
        return (time.monotonic() - self.as_of) * 1000

    @property
    def model(self) -> torch.nn.Module:
        """A copy of the model that was given to `serve`, with this version's parameters and rows. All readers of the
        version share it: use it under `torch.no_grad()`, and do not change it. Raises InvalidRequest."""
        if self._model is None:
            raise errors.InvalidRequest("the model of a version, where none was given", todo="run.serve(model)")
        return self._model

    def look_up(self, ids: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns rows by table, shape (*ids.shape, dim), float32, for ids of any shape, int64 or int32. All tables
        take one round trip. An id without a row reads as its initial values. Raises VersionPassed if servers have
        dropped the version, InvalidRequest for a table that the job does not have, DTypeMismatch, TooLarge."""
        asked: list[RowQuery] = []
        found: list[UniqueIds] = []
        for name, each in ids.items():
            number = self._numbers.get(name)
            if number is None:
                known = ", ".join(self._numbers) or "none"
                raise errors.InvalidRequest(f"rows of table {name!r}; the job's tables are {known}")
            found.append(unique_ids(flat_ids(each), self._partitions))
            asked.append(RowQuery(number, found[-1], self._held.view.layout.tables[number].dim))
        rows = self.fetch(asked)
        return {
            name: torch.from_numpy(values[once.places]).view(*each.shape, values.shape[1])
            for (name, each), once, values in zip(ids.items(), found, rows, strict=True)
        }

    def fetch(self, asked: Sequence[RowQuery]) -> Sequence[Float32s]:
        """Returns the rows of each table's unique ids, shape (m, dim). Each table is named at most once."""
        self._held.check()
        if self._hot is None:
            self._count(sum([each.found.ids.size for each in asked]), 0)
            return self._held.look_up(asked)
        hot, read = self._hot, 0

        def take(each: RowQuery) -> tuple[Float32s, Bools | None]:
            rows = np.empty((each.found.ids.size, each.dim), np.float32)
            return rows, hot.take(each.table, each.found.ids, rows)[0]

        def look_up(more: Sequence[RowQuery]) -> Sequence[Float32s]:
            nonlocal read
            values = self._held.look_up(more)
            for each, rows in zip(more, values, strict=True):
                hot.put(each.table, each.found.ids, rows)
                read += each.found.ids.size
            return values

        given = complete(asked, take, look_up)
        wanted = sum([each.found.ids.size for each in asked])
        self._count(wanted, wanted - read)
        return given


class ServedModel:
    """Serves rows and parameters of a job, each answer from one version. Use it as a context manager, from any
    thread."""

    def __init__(
        self,
        session: ReaderSession,
        snapshots: Snapshots,
        settings: ServingSettings,
        model: torch.nn.Module | None,
    ) -> None:
        self._session = session
        self._snapshots = snapshots
        self._settings = settings
        self._given = model
        self._leases = Leases()
        self._changed = threading.Condition()
        self._current: ServedVersion | None = None
        self._models: list[torch.nn.Module] = []
        self._failed: errors.ShardyardError | None = None
        self._why = ""
        self._counts = ServingCounts()
        self._readers = 0
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="serving", daemon=True)
        self._thread.start()

    # ---- reading

    def look_up(self, ids: Mapping[str, torch.Tensor]) -> ServedRows:
        """Returns rows by table for ids of any shape, int64 or int32, all of one version. If that version is lost
        meanwhile, because a server died or partitions moved, it starts again with another one.

        Raises DeadlineExceeded if there was no version that is young enough within `wait_ms`, InvalidRequest for a
        table that the job does not have, DTypeMismatch, TooLarge, the error that the job failed with, CoordinatorLost,
        NotFound if the job has ended and its servers have dropped it.
        """
        until = time.monotonic() + self._settings.wait_ms / 1000
        while True:
            with self._version(until) as (version, age_ms):
                try:
                    return ServedRows(version.look_up(ids), version.step, version.versions, age_ms)
                except errors.VersionPassed as error:
                    if time.monotonic() >= until:
                        raise
                    self._replace(version, error)

    @contextmanager
    def version(self) -> Iterator[ServedVersion]:
        """Gives one version that does not change inside the block: for several look-ups, or for the model. Raises as
        `look_up`; inside the block it raises VersionPassed if servers have dropped the version."""
        with self._version(time.monotonic() + self._settings.wait_ms / 1000) as (version, _):
            try:
                yield version
            except errors.VersionPassed as error:
                self._replace(version, error)
                raise

    @property
    def counts(self) -> ServingCounts:
        with self._changed:
            return replace(self._counts)

    @contextmanager
    def _version(self, until: float) -> Iterator[tuple[ServedVersion, float]]:
        """Gives a version, and the age in milliseconds at which it was found young enough."""
        version, age_ms = self._take(until)
        try:
            yield version, age_ms
        finally:
            self._leave(version)

    def _take(self, until: float) -> tuple[ServedVersion, float]:
        with self._changed:
            entered = self._enter()
            if entered is not None:
                return entered
            self._counts.waits += 1
        with ExplainedWait(self._waiting_for, logger=log) as wait:
            while True:
                self._wake.set()
                with self._changed:
                    entered = self._enter()
                    if entered is not None:
                        return entered
                    left = until - time.monotonic()
                    if left <= 0:
                        raise errors.DeadlineExceeded(
                            f"{self._waiting_for()} within {self._settings.wait_ms} ms",
                            why="each answer is of one version that is young enough, or there is none",
                            todo="see `shardyard status` for the state of the servers; raise serving.wait_ms, or "
                            "serving.staleness_ms",
                        )
                    self._changed.wait(min(left, SLICE_MS / 1000))
                wait.tick()

    def _enter(self) -> tuple[ServedVersion, float] | None:
        """Returns the current version and its age in milliseconds, if it is young enough, and counts one more reader of
        it. Called with the lock held. Raises what the job, or serving, has ended with."""
        if self._stop.is_set():
            raise errors.InvalidRequest("rows of a job that is not served any more", why="it was closed", todo="")
        if self._failed is not None:
            raise self._failed.anew()
        version = self._current
        if version is None or version._held.is_lost:
            return None
        age_ms = version.age_ms
        if not version.is_last and age_ms > self._settings.staleness_ms:
            return None
        version.users += 1
        self._readers += 1
        return version, age_ms

    def _waiting_for(self) -> str:
        why = f" ({self._why})" if self._why else ""
        return f"a version of job {self._session.name} that is at most {self._settings.staleness_ms} ms old{why}"

    def _leave(self, version: ServedVersion) -> None:
        with self._changed:
            version.users -= 1
            self._readers -= 1
            ends = version.is_retired and not version.users
            if not self._readers:
                self._changed.notify_all()
        if ends:
            self._end(version)

    def _replace(self, version: ServedVersion, error: errors.VersionPassed) -> None:
        """Marks the version as lost: the next one is taken at once."""
        with self._changed:
            self._why = error.what
        log.info("version at step %d of job %s is lost: %s", version.step, self._session.name, error.what)
        self._wake.set()

    def _count(self, rows: int, hits: int) -> None:
        with self._changed:
            self._counts.rows += rows
            self._counts.hits += hits

    # ---- versions

    def _run(self) -> None:
        while not self._stop.is_set() and self._failed is None:
            self._wake.clear()
            begun = time.monotonic()
            try:
                is_taken = self._refresh()
            except AGAIN as error:
                self._explain(error.what)
                is_taken = False
            except errors.ShardyardError as error:
                self._fail(error)
                return
            except Exception as error:
                # a defect here must not look like a job that makes no progress
                log.exception("the job is not served any more")
                self._fail(errors.Internal(f"the job is not served any more: {type(error).__name__}: {error}"))
                return
            pause_ms = self._settings.staleness_ms / REFRESH_SHARE if is_taken else TRY_AGAIN_MS
            if not is_taken:
                self._stop.wait(TRY_AGAIN_MS / 1000)
            self._wake.wait(max(0.0, begun + pause_ms / 1000 - time.monotonic()))

    def _refresh(self) -> bool:
        """Returns whether the newest version is now the current one."""
        news = self._session.ongoing()
        if news.view is None:
            if news.has_ended:
                self._fail(
                    errors.NotFound(f"values of job {self._session.name}, which has ended: servers have dropped them")
                )
                return True
            self._explain("it has no values that can be read now")
            return False
        current = self._current
        if current is not None and current.is_last and not current._held.is_lost:
            return True
        step_wait_ms = min(STEP_WAIT_MS_MAX, self._settings.staleness_ms // STEP_WAIT_SHARE)
        held = self._snapshots.hold(news.view, step_wait_ms=step_wait_ms)
        if current is not None and _is_same(current._held, held):
            held.release()
            with self._changed:
                current.as_of, current.is_last = held.as_of, held.view.ended
                self._changed.notify_all()
            return True
        self._leases.keep(held)  # first: reading the values may take longer than a lease
        try:
            version = self._make_version(held, current)
        except BaseException:
            self._leases.release(held)
            raise
        with self._changed:
            self._current, self._why = version, ""
            self._counts.versions += 1
            if current is not None:
                current.is_retired = True
            ends = current is not None and not current.users
            self._changed.notify_all()
        if ends and current is not None:
            self._end(current)
        return True

    def _make_version(self, held: PinnedVersion, former: ServedVersion | None) -> ServedVersion:
        hot = FrequencyCache(self._settings.cached_rows) if self._settings.cached_rows else None
        if hot is not None and former is not None and former._hot is not None:
            hottest = former._hot.hottest(len(held.view.layout.partitions))
            if hottest:
                hot.begin(hottest, held.look_up([asked for asked, _ in hottest]))
        model = None if self._given is None else self._model_of(held.view)
        version = ServedVersion(held, hot, self._count, model)
        if model is not None:
            self._fill(model, held, former)
            for table in tables_of(model).values():
                if isinstance(table.source, PinnedRows):
                    table.source.show(version.fetch)
        return version

    def _fill(self, model: torch.nn.Module, held: PinnedVersion, former: ServedVersion | None) -> None:
        if former is not None and former._held.versions == held.versions:  # it already has these values
            with torch.no_grad():
                for target, source in zip(_tensors(model), _tensors(former.model), strict=True):
                    target.copy_(source)
            return
        load_into(model, [spec.name for spec in held.view.layout.variables], self._snapshots.values(held))

    def _model_of(self, view: View) -> torch.nn.Module:
        """Returns a copy that no version uses."""
        assert self._given is not None
        with self._changed:
            if self._models:
                return self._models.pop()
        model = copy.deepcopy(self._given)
        tables = tables_of(model)
        if tables:
            bind(tables, view.layout, PinnedRows(view.layout))
        return model

    def _end(self, version: ServedVersion) -> None:
        """Releases a version without readers."""
        if version._model is not None:
            with self._changed:
                if len(self._models) < SPARE_MODELS_MAX:
                    self._models.append(version._model)
        self._leases.release(version._held)

    def _explain(self, why: str) -> None:
        with self._changed:
            self._why = why

    def _fail(self, error: errors.ShardyardError) -> None:
        with self._changed:
            self._failed = error
            self._changed.notify_all()

    # ---- leaving

    def close(self) -> None:
        """Releases all versions. A second call does nothing."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._wake.set()
        with self._changed:
            self._changed.notify_all()
        self._thread.join(CLOSE_MS / 1000)
        with self._changed:  # readers that began before still use their version
            self._changed.wait_for(lambda: not self._readers, CLOSE_MS / 1000)
        self._leases.close()
        self._snapshots.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *ended: object) -> None:
        self.close()


def _is_same(current: PinnedVersion, newest: PinnedVersion) -> bool:
    """Whether both give the same values. Rows of a hybrid job change within a step, and a reader cannot tell a hybrid
    job from a synchronous one."""
    if current.is_lost or current.versions != newest.versions or current.view.map != newest.view.map:
        return False
    view = newest.view
    return view.ended or view.mode is UpdateMode.ASYNC or not view.layout.tables


def _tensors(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()
