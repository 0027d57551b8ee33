"""Whether a worker may cache rows of a job for later steps, and for how many steps.

Owns: the checks of the worker's and the job's settings. Invariants: no row is cached if a step must be computed on one
version of all values, or if the version of a partition says which updates its rows miss. If servers bound the
staleness, the bound includes cached rows. Must not know: rows.
"""

from __future__ import annotations

from shardyard.config.settings import JobSettings, WorkerSettings
from shardyard.domain.consistency import ConsistencyMode
from shardyard.domain.errors import ConfigurationError
from shardyard_worker.rows.row_cache import CacheRules


def cache_rules(worker: WorkerSettings, job: JobSettings) -> CacheRules | None:
    """None: no rows are cached. Raises ConfigurationError if the job's mode does not allow a cache."""
    if not worker.cached_rows_bytes:
        return None
    consistency = job.consistency
    given = f"worker.cached_rows_bytes {worker.cached_rows_bytes}"
    if consistency.mode is ConsistencyMode.SYNC:
        raise ConfigurationError(
            f"{given} in a job with job.consistency.mode sync",
            why="a step is computed on rows of exactly its version, and a cached row is of an earlier one",
            todo="set worker.cached_rows_bytes to 0, or job.consistency.mode to hybrid, async or bounded",
        )
    if consistency.stale is not None:
        raise ConfigurationError(
            f"{given} in a job with job.consistency.staleness_scaling {consistency.staleness_scaling}",
            why="rates are divided by the age of a partition's version, and a cached row is older than that",
            todo="set worker.cached_rows_bytes to 0, or job.consistency.staleness_scaling to never",
        )
    return CacheRules(
        bytes_max=worker.cached_rows_bytes,
        staleness=worker.cached_rows_steps,
        includes_own=worker.cached_rows_own == "included",
        under_way=worker.window,
    )


def check_bound(worker: WorkerSettings, bound: int) -> None:
    """Checks a job that is started with a bound on staleness. Raises ConfigurationError."""
    if worker.window + worker.cached_rows_steps > bound:
        raise ConfigurationError(
            f"worker.cached_rows_steps {worker.cached_rows_steps} with worker.exchange {worker.exchange} in a job with"
            f" job.consistency.staleness {bound}",
            why="rows that are used so many steps later are held to the bound of those steps, so a worker would wait"
            " for others to take steps that wait for its own",
            todo=f"set worker.cached_rows_steps to at most {bound - worker.window}, or job.consistency.staleness to"
            f" {worker.window + worker.cached_rows_steps}"
            if bound > worker.window
            else f"set worker.cached_rows_bytes to 0, or job.consistency.staleness to"
            f" {worker.window + worker.cached_rows_steps}",
        )
