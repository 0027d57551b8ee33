"""`worker`: a training process, its calls and the rows that it keeps."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from shardyard.config.settings.values import DURATION_MS_MAX, Device, Section
from shardyard.domain import limits


class WorkerSettings(Section):
    device: Device = Field(default="auto", description="Where the model is; auto: a GPU if there is one, else the CPU.")
    threads: int = Field(
        default=1, ge=0, le=1_024, description="torch's threads per training process; 0 leaves torch's own choice."
    )
    rpc_deadline_ms: int = Field(
        default=30_000, ge=100, le=DURATION_MS_MAX, description="The deadline of one call to a peer."
    )
    same_host: Literal["auto", "never"] = Field(
        default="auto",
        description="auto: payloads to and from servers on this machine lie in shared memory; never: streams.",
    )
    exchange: Literal["blocking", "overlapped", "delayed"] = Field(
        default="blocking",
        description="How a step hides its exchange with the servers. blocking: step() waits for the new values and"
        " copies them; overlapped: gradients leave during backward, values arrive during forward, with the same"
        " results; delayed: an async worker computes its next gradient while a push is in flight.",
    )
    cached_rows_bytes: int = Field(
        default=0,
        ge=0,
        le=limits.CACHED_ROWS_BYTES_MAX,
        description="About so much memory for rows of tables that a training process has read and keeps for its next"
        " steps, those that are asked for most; 0: none. Not in sync and local mode.",
    )
    cached_rows_steps: int = Field(
        default=2,
        ge=1,
        le=limits.CACHED_ROWS_STEPS_MAX,
        description="For so many steps after the one that it was read for a row is used from there. In bounded mode"
        " it is a part of job.consistency.staleness.",
    )
    cached_rows_own: Literal["included", "lacking"] = Field(
        default="included",
        description="included: a row from there has all that this worker has pushed, so that a row which it pushes is"
        " read anew, but of tables with plain SGD; lacking: it may lack own pushes as those of others.",
    )
    retry_budget_ms: int = Field(
        default=8_000,
        ge=0,
        le=DURATION_MS_MAX,
        description="How long a worker goes on trying a peer that does not answer before it is called lost.",
    )

    @property
    def window(self) -> int:
        """How many pushes are in flight while an asynchronous worker computes its next gradient."""
        return int(self.exchange == "delayed")
