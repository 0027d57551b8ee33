"""Writes logged metrics as TensorBoard event files: one run for each worker or evaluator, with the job's step on the
x-axis.

Owns: the files of one run. Invariants: a tensor is read one call after the one that gave it, when it has been computed,
so that a GPU is not waited for; a run's folder is never written twice. Must not know: where else metrics go.
"""

from __future__ import annotations

import time
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any, Final

from shardyard.domain.errors import ConfigurationError
from shardyard_worker.session.metrics import Metrics

FLUSH_S: Final = 10


class TensorBoardWriter:
    """A new run, in `folder`/JOB/TIME-WHO, such as worker-1.2. Raises ConfigurationError if TensorBoard's package is
    not installed, or the folder cannot be made."""

    def __init__(self, folder: Path, *, job: str, who: str) -> None:
        writer = _writer()
        self.folder = _made(folder / job, time.strftime("%Y%m%d-%H%M%S") + f"-{who}")
        self._writer = writer(str(self.folder), flush_secs=FLUSH_S)
        self._given: tuple[int, Metrics] = 0, {}

    def take(self, step: int, metrics: Metrics) -> None:
        self._write()
        self._given = step, metrics

    def close(self) -> None:
        """Writes what is left. A second call does nothing."""
        try:
            self._write()
        finally:
            self._writer.close()

    def _write(self) -> None:
        (step, metrics), self._given = self._given, (0, {})
        for name, value in metrics.items():
            self._writer.add_scalar(name, float(value), step)


def open_writer(folder: str, *, job: str, who: str) -> TensorBoardWriter | None:
    """The writer of a new run in `folder` (metrics.tensorboard); None if that is empty. Raises ConfigurationError."""
    return TensorBoardWriter(Path(folder), job=job, who=who) if folder else None


def _writer() -> Any:
    try:
        return import_module("torch.utils.tensorboard").SummaryWriter
    except ImportError as error:
        raise ConfigurationError(
            "metrics.tensorboard is set, and the package tensorboard is not installed here",
            why="its own writer makes the files that it reads",
            todo="pip install 'shardyard[tensorboard]', or leave metrics.tensorboard empty",
        ) from error


def _made(parent: Path, name: str) -> Path:
    """Makes the first folder of that name that does not exist yet."""
    for number in count(1):
        folder = parent / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigurationError(
                f"metrics.tensorboard: cannot make {folder}: {error}", why="", todo="give a folder that can be made"
            ) from error
        return folder
    raise AssertionError("numbers do not end")
