"""The checkpoints in a yard's state folder, with their sizes.

Invariants: nothing is followed out of the folder. Must not know: command lines, who deletes them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from shardyard.checkpoints.library import CheckpointLibrary
from shardyard.domain.errors import CheckpointDamaged, ConfigurationError
from shardyard.storage.storage import open_storage
from shardyard_launcher.terminal.quantities import describe_size


@dataclass(frozen=True)
class KeptJob:
    """A job's checkpoints. `step`: of the newest; None if it cannot be read, or there is none. `nbytes`: of all its
    files, those of its best version and of unfinished checkpoints too."""

    name: str
    checkpoints: int
    step: int | None
    nbytes: int

    def __str__(self) -> str:
        many = f"{self.checkpoints} checkpoint{'s'[: self.checkpoints != 1]}"
        newest = "" if self.step is None else f", the newest of step {self.step:,}"
        return f"job {self.name}: {many}{newest}; {describe_size(self.nbytes)}"


def kept_jobs(folder: Path) -> list[KeptJob]:
    """The jobs that have files in this folder, by name. Raises StorageUnavailable."""
    if not folder.is_dir():
        return []
    library = CheckpointLibrary(open_storage(str(folder)))
    found = (_kept(library, name, folder / name) for name in sorted(library.jobs()))
    return [job for job in found if job.nbytes]


def _kept(library: CheckpointLibrary, name: str, folder: Path) -> KeptJob:
    numbers = library.numbers(name)
    try:
        step = library.load(name, numbers[-1]).step if numbers else None
    except (CheckpointDamaged, ConfigurationError):  # also one that is encrypted
        step = None
    return KeptJob(name, len(numbers), step, _bytes_below(folder))


def _bytes_below(folder: Path) -> int:
    return sum(os.lstat(os.path.join(where, name)).st_size for where, _, names in os.walk(folder) for name in names)
