"""`job.checkpoint`: when and where checkpoints are written, and how many are kept."""

from __future__ import annotations

from typing import Final

from pydantic import Field

from shardyard.config.settings.values import DURATION_MS_MAX, CheckpointUrl, Section
from shardyard.domain import limits

CHECKPOINTS: Final = "checkpoints"
"""The folder for checkpoints in the coordinator's state folder, for `job.checkpoint.url: auto`."""


class CheckpointSettings(Section):
    """When and where checkpoints are written, and how many are kept."""

    url: CheckpointUrl = Field(
        default="auto",
        description="Where checkpoints are written: a folder that coordinator and servers share, or a URL of a store,"
        " such as s3://bucket/path (see storage.allowed). auto: in the coordinator's state folder. never: no"
        " checkpoints.",
    )
    every_s: int = Field(
        default=60,
        ge=0,
        le=DURATION_MS_MAX // 1_000,
        description="Seconds between two checkpoints; 0: time does not matter.",
    )
    every_steps: int = Field(
        default=0, ge=0, le=1_000_000_000, description="Steps between two checkpoints; 0: steps do not matter."
    )
    every_log_bytes: int = Field(
        default=limits.GIB,
        ge=0,
        le=limits.LOG_BYTES_MAX,
        description="With job.durability wal: a checkpoint is written when one server's log has grown by this"
        " many bytes, because they are read again when that server dies. 0: the log does not matter.",
    )
    keep: int = Field(default=3, ge=2, le=10_000, description="How many checkpoints are kept; at least two.")
