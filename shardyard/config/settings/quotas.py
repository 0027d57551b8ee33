"""`quotas`: how much of a yard one owner, or one job, may take."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from shardyard.config.settings.values import Auto, Section
from shardyard.domain import limits


class QuotaSettings(Section):
    jobs_max: int = Field(
        default=0,
        ge=0,
        le=limits.JOBS_MAX,
        description="Unfinished jobs of an owner. Of the coordinator. 0: no quota.",
    )
    workers_max: int = Field(
        default=0,
        ge=0,
        le=limits.MEMBERS_MAX,
        description="Living workers in all jobs of one owner. Of the coordinator. 0: no quota.",
    )
    bytes_max: int = Field(
        default=0,
        ge=0,
        le=limits.JOB_BYTES_MAX,
        description="Bytes of dense variables in all unfinished jobs of one owner, without the optimizer's state and"
        " copies. Of the coordinator. 0: no quota.",
    )
    partitions_max: int = Field(
        default=0,
        ge=0,
        le=limits.JOBS_MAX * limits.PARTITIONS_MAX,
        description="Partitions of all unfinished jobs of one owner. Of the coordinator. 0: no quota.",
    )
    rows_max: int = Field(
        default=0,
        ge=0,
        le=limits.SEQUENCE_MAX,
        description="Rows of embedding tables in all unfinished jobs of one owner. When there are more, the job that"
        " began last stops in order, with a checkpoint. Of the coordinator. 0: no quota.",
    )
    requests_per_s_max: int = Field(
        default=0,
        ge=0,
        le=1_000_000,
        description="Requests that a server takes in a second from one job, and the coordinator from one certificate."
        " Steps beyond it wait, other requests are to be sent again. Of both. 0: no quota.",
    )
    receive_bytes_max: Annotated[int, Field(ge=limits.MESSAGE_BYTES_MAX, le=limits.JOB_BYTES_MAX)] | Auto = Field(
        default="auto",
        description="Bytes of gradients that a server receives over the network at a time. One job has at most half"
        " of it. Pushes beyond it wait. Of servers. auto: half of the machine's memory, or of the container's.",
    )
