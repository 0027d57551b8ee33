"""`worker`: a training process, its calls and the rows that it keeps."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from shardyard.config.settings.values import DURATION_MS_MAX, Device, Section
from shardyard.domain import limits


class WorkerSettings(Section):
    device: Device = Field(
        default="auto",
        description="Where the model is; auto: on a GPU if there is one, else on the CPU. Several devices, parted by"
        " spaces: one for each training process of a machine, in turn.",
    )
    threads: int = Field(
        default=1, ge=0, le=1_024, description="torch's threads in each training process; 0: torch chooses."
    )
    rpc_deadline_ms: int = Field(
        default=30_000, ge=100, le=DURATION_MS_MAX, description="The deadline of one call to a peer."
    )
    same_host: Literal["auto", "never"] = Field(
        default="auto",
        description="auto: payloads to and from servers on this machine are in shared memory, and so is what"
        " the workers of replicas on this machine sum with each other; never: it travels over the network.",
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
        description="About how many bytes of table rows a training process caches for its next steps. It caches"
        " those that it looks up most. 0: none. Not in sync and local mode.",
    )
    cached_rows_steps: int = Field(
        default=2,
        ge=1,
        le=limits.CACHED_ROWS_STEPS_MAX,
        description="A cached row is used for this many steps after the step for which it was read. In bounded"
        " mode job.consistency.staleness includes it.",
    )
    cached_rows_own: Literal["included", "lacking"] = Field(
        default="included",
        description="included: a cached row has all pushes of this worker. So a row that the worker pushes is"
        " read again, except in tables with plain SGD. lacking: a cached row may miss your own recent"
        " pushes, as it may miss those of others.",
    )

    @property
    def window(self) -> int:
        """How many pushes are in flight while an asynchronous worker computes its next gradient."""
        return int(self.exchange == "delayed")
