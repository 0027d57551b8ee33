"""Shardyard: a parameter server for PyTorch.

    import shardyard as sy

    with sy.connect() as job:
        model, optimizer = job.prepare(model, torch.optim.Adam(model.parameters(), lr=1e-3))
        for x, y in job.batches(dataset, batch_size=64, epochs=5):
            ...

Importing this costs no torch. The names users import are found here, lazily (PEP 562); it is the one module of the
library that may reach upwards, to the worker and the launcher.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardyard.config.configuration import Loaded
    from shardyard.domain import errors
    from shardyard_worker.data.sources.record_files import FixedRecords, FramedRecords, TextLines
    from shardyard_worker.data.sources.stream_dataset import StreamDataset
    from shardyard_worker.embedding import api as tables
    from shardyard_worker.embedding.modules import Embedding, EmbeddingBag, EmbeddingCollection
    from shardyard_worker.job.early_stopping import EarlyStopping
    from shardyard_worker.job.job import Job
    from shardyard_worker.optimizers import extra as optim
    from shardyard_worker.reader.evaluator import Run, Snapshot

__all__ = [
    "EarlyStopping",
    "Embedding",
    "EmbeddingBag",
    "EmbeddingCollection",
    "FixedRecords",
    "FramedRecords",
    "Job",
    "Run",
    "Snapshot",
    "StreamDataset",
    "TextLines",
    "__version__",
    "connect",
    "errors",
    "follow",
    "optim",
    "tables",
]


def connect(
    coordinator: str | None = None,
    *,
    job: str | None = None,
    config: str | Path | None = None,
    settings: Mapping[str, object] | None = None,
) -> Job:
    """Joins a job, or starts it. Without an address anywhere, the yard is in this process.

    `coordinator`: HOST:PORT. `job`: the job's name. `config`: a YAML file. `settings`: values by dotted name, for
    example `{"job.consistency.mode": "sync"}`. What is not given is taken from the environment, then from the file,
    then from the defaults (docs/reference/configuration.md). Raises ConfigurationError, CoordinatorUnavailable,
    JobFailed.

    >>> with sy.connect(settings={"job.seed": 3}) as job:
    ...     print(job.name, job.seed, job.step)
    default 3 0
    """
    loaded = _load(coordinator, job, config, settings)
    if loaded.settings.coordinator:
        import shardyard_worker.job.connect

        return shardyard_worker.job.connect.connect(loaded.settings, owns_process=True)
    import shardyard_launcher.yard.in_process

    return shardyard_launcher.yard.in_process.connect(loaded.settings)


def follow(
    coordinator: str | None = None,
    *,
    job: str | None = None,
    config: str | Path | None = None,
    settings: Mapping[str, object] | None = None,
) -> Run:
    """Follows a job of a running yard, to evaluate or serve it, without being its worker. Waits until the job begins.

    The arguments are those of `connect`. Without a name anywhere it follows the only job that runs. See
    docs/guides/evaluation.md. Raises ConfigurationError, CoordinatorUnavailable, InvalidRequest.

    >>> sy.follow()  # doctest: +IGNORE_EXCEPTION_DETAIL
    Traceback (most recent call last):
    ConfigurationError: sy.follow() does not know which coordinator to ask
    """
    from shardyard.config.assignments import Layer
    from shardyard.domain.errors import ConfigurationError

    loaded = _load(coordinator, job, config, settings)
    if not loaded.settings.coordinator:
        raise ConfigurationError(
            "sy.follow() does not know which coordinator to ask",
            why="a job without a yard can be read only in its own process",
            todo='give the address: sy.follow("HOST:PORT"), or SHARDYARD_COORDINATOR',
        )
    import shardyard_worker.reader.evaluator

    is_named = loaded.origins["job.name"].layer is not Layer.DEFAULT
    return shardyard_worker.reader.evaluator.follow(loaded.settings, name=loaded.settings.job.name if is_named else "")


def _load(
    coordinator: str | None, job: str | None, config: str | Path | None, settings: Mapping[str, object] | None
) -> Loaded:
    import logging
    import os

    from shardyard.config import configuration
    from shardyard.runtime import log

    file = config or os.environ.get(configuration.CONFIG_VARIABLE)
    given = {
        "coordinator": configuration.Flag(coordinator, "the argument coordinator"),
        "job.name": configuration.Flag(job, "the argument job"),
        **{path: configuration.Flag(value, "the argument settings") for path, value in (settings or {}).items()},
    }
    loaded = configuration.load(Path(file) if file else None, os.environ, given)
    if not logging.getLogger().handlers:
        log.setup(loaded.settings.log.format, loaded.settings.log.level)
    for notice in loaded.notices:
        logging.getLogger("shardyard").warning("%s", notice)
    return loaded


_MODULES = {
    "EarlyStopping": "shardyard_worker.job.early_stopping",
    "Embedding": "shardyard_worker.embedding.modules",
    "EmbeddingBag": "shardyard_worker.embedding.modules",
    "EmbeddingCollection": "shardyard_worker.embedding.modules",
    "FixedRecords": "shardyard_worker.data.sources.record_files",
    "FramedRecords": "shardyard_worker.data.sources.record_files",
    "Job": "shardyard_worker.job.job",
    "Run": "shardyard_worker.reader.evaluator",
    "Snapshot": "shardyard_worker.reader.evaluator",
    "StreamDataset": "shardyard_worker.data.sources.stream_dataset",
    "TextLines": "shardyard_worker.data.sources.record_files",
}
"""Where each class is that is imported when it is first used."""
_ALIASES = {
    "errors": "shardyard.domain.errors",
    "optim": "shardyard_worker.optimizers.extra",
    "tables": "shardyard_worker.embedding.api",
}
"""Modules under another name."""


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    if name in _ALIASES:
        return import_module(_ALIASES[name])
    if name == "__version__":
        from importlib.metadata import version

        found = globals()["__version__"] = version("shardyard")  # from a file, which is read once
        return found
    raise AttributeError(f"module 'shardyard' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
