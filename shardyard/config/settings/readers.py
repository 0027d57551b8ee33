"""`evaluator` and `serving`: processes that read a job's versions."""

from __future__ import annotations

from pydantic import Field

from shardyard.config.settings.values import DURATION_MS_MAX, BestUrl, Section
from shardyard.domain import limits


class EvaluatorSettings(Section):
    """A script that follows a job (docs/guides/evaluation.md)."""

    every_s: int = Field(
        default=10,
        ge=0,
        le=DURATION_MS_MAX // 1_000,
        description="The least number of seconds between two snapshots; 0: evaluate each version, as fast as possible.",
    )
    into: BestUrl = Field(
        default="auto",
        description="Where the best version is stored: a folder, or a URL of a store; auto: beside the"
        " job's checkpoints.",
    )
    restarts_max: int = Field(
        default=3,
        ge=0,
        le=1_000,
        description="How often `shardyard eval` restarts a script that has died, within ten minutes.",
    )


class ServingSettings(Section):
    """A process that answers requests with a job's rows (docs/guides/serving.md)."""

    staleness_ms: int = Field(
        default=1_000,
        ge=10,
        le=DURATION_MS_MAX,
        description="How old the version of an answer may be when the answer begins.",
    )
    wait_ms: int = Field(
        default=10_000,
        ge=1,
        le=DURATION_MS_MAX,
        description="How long a request waits for a version that is new enough, before it is refused.",
    )
    cached_rows: int = Field(
        default=0,
        ge=0,
        le=limits.CACHED_ROWS_MAX,
        description="How many rows of each table the process caches. It caches those that are requested most. 0: none.",
    )
