"""`worker`: a training process, its calls and the rows that it keeps."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from shardyard.config.settings.values import DURATION_MS_MAX, Device, Section, impossible
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
    pull: Literal["copy", "view"] = Field(
        default="copy",
        description="copy: pulled values are copied into the parameters; view: parameters become views on them.",
    )
    overlap: Literal["never", "always"] = Field(
        default="never",
        description="always: gradients that travel are sent while backward computes others; never: with step().",
    )
    prefetch: Literal["never", "always"] = Field(
        default="never",
        description="always: step() returns while values that travel still arrive, those first that are used first.",
    )
    window: int = Field(
        default=0,
        ge=0,
        le=1,
        description="Pushes under way while the next gradient is computed (async); 0: step() waits for its push.",
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

    @model_validator(mode="after")
    def _one_overlap_at_a_time(self) -> Self:
        if self.window and self.overlap == "always":
            raise impossible(
                ("window", "overlap"),
                "overlap never with a window, since the stream is then busy with the push before",
                f"window {self.window} with overlap {self.overlap}",
            )
        return self
