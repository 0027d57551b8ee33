"""`run.keep_best`: keeps the best version of a job by a metric.

Owns: the comparison with the version that is kept, and where it is kept. Invariant: the values that were read are kept,
even if the script has changed its model since. Must not know: how values and rows are read.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, Literal

import numpy.typing as npt

from shardyard.checkpoints.best import BestFolder, BestManifest
from shardyard.config.settings import AUTO
from shardyard.domain import errors
from shardyard.storage.encryption import encrypted, keys_in
from shardyard.storage.storage import LocalStorage, open_storage
from shardyard.storage.tensors import TensorSource
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_worker.reader.reader_session import ReaderSession

log = logging.getLogger("shardyard.evaluator")

Mode = Literal["max", "min"]
Values = Mapping[str, npt.NDArray[Any]]

_ROWS: Final = re.compile(r"(^|\.)table\.(ids|rows|seed)$")
"""Matches a table's entries in a state dict."""


class BestKeeper:
    """Keeps the best version of one job. `into`: the folder or URL if a call names none. `key_file`: as
    storage.key_file."""

    def __init__(self, session: ReaderSession, into: str, key_file: str) -> None:
        self._session = session
        self._into = into
        self._keys = keys_in(key_file)
        self._judged: tuple[str, Mode] | None = None

    def keep(
        self,
        step: int,
        values: Values,
        metrics: Mapping[str, float],
        metric: str,
        mode: Mode,
        into: str | None,
        rows: Callable[[ExitStack], Iterable[TensorSource]],
    ) -> bool:
        """Keeps this version if it is better than the kept one. `rows`: returns the tables' rows. Returns whether it
        was kept. Raises as `Run.keep_best`."""
        if mode not in ("max", "min"):
            raise errors.InvalidRequest(f"mode {mode!r}; expected max or min")
        if metric not in metrics:
            reported = ", ".join(metrics) or "nothing"
            raise errors.InvalidRequest(f"to keep the best by {metric!r}; reported of this version: {reported}")
        if self._judged not in (None, (metric, mode)):
            raise errors.InvalidRequest(f"to keep the best by {metric} ({mode}) and by another metric of one job")
        self._judged = metric, mode
        value = metrics[metric]
        if not math.isfinite(value):
            return False
        folder = self._folder(into)
        with self._session.wait_registry.over(lambda: f"{folder.url} to take the best version"), ExitStack() as spools:
            former = _former(folder, values, metric, mode)
            if former is not None and not former.is_beaten_by(value):
                return False
            try:
                more = list(rows(spools))
            except errors.VersionPassed as error:
                log.warning("step %d, the best by %s so far, is not kept: %s", step, metric, error.what)
                return False
            job = self._session.job
            folder.keep(job=job, metric=metric, mode=mode, value=value, step=step, values=dict(values), more=more)
        kept = wire.BestModel(metric=metric, lowest=mode == "min", value=value, step=step, url=folder.url)
        self._session.report(step, metrics, kept)
        log.info("step %d is the best by %s so far: %g", step, metric, value)
        return True

    def _folder(self, into: str | None) -> BestFolder:
        url, name = into or self._into, self._session.name
        is_own = url != AUTO
        if not is_own:
            url = self._session.news.url
        if not url:
            raise errors.ConfigurationError(
                f"job {name} has no checkpoints, so there is no place for its best version",
                why="",
                todo="give a folder or URL: evaluator.into, --into, or keep_best(..., into=...)",
            )
        storage = open_storage(url)
        if not is_own and isinstance(storage, LocalStorage) and not Path(storage.url).is_dir():
            raise errors.ConfigurationError(
                f"{url}, where the checkpoints of job {name} are, is not a folder of this machine",
                why="it is one of the coordinator's",
                todo="give a folder or URL: evaluator.into, --into, or keep_best(..., into=...)",
            )
        return BestFolder(encrypted(storage, self._keys), name)


def _former(folder: BestFolder, values: Values, metric: str, mode: Mode) -> BestManifest | None:
    """Returns what is kept now, if it can be compared with these values."""
    try:
        former = folder.load()
        if former is None:
            return None
        if (former.metric, former.mode) != (metric, mode):
            log.warning("%s has the %s of %s, and gets that of %s now", folder.url, former.mode, former.metric, metric)
            return None
        found = folder.contents(former).tensors.values()
        there = {tensor.name: tensor.shape for tensor in found if not _ROWS.search(tensor.name)}
    except (errors.CheckpointDamaged, errors.CheckpointNotFound) as error:
        log.warning("what was the best is damaged, and replaced: %s", error.what)
        return None
    if there != {name: each.shape for name, each in values.items()}:
        log.warning("%s has the best of another model, and gets that of this one now", folder.url)
        return None
    return former
