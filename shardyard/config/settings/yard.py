"""`yard` and `membership`: what the launcher starts, where, and how the yard notices that a process has died."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Self

from pydantic import Field, model_validator

from shardyard.config.settings.values import (
    AUTO,
    DURATION_MS_MAX,
    NEVER,
    PORT_MAX,
    Auto,
    Folder,
    Host,
    NoticePlace,
    Section,
    impossible,
)
from shardyard.domain import limits

WAL_FOLDER: Final = "wal"
COLD_FOLDER: Final = "cold"
HEARTBEATS_PER_LEASE: Final = 8
HEARTBEATS_PER_LEASE_MIN: Final = 3
"""So many that one lost heartbeat does not count as a death."""
COORDINATOR_GRACE_MS: Final = 60_000
DRAIN_S: Final = 25
MEMORY_BYTES_MAX: Final = 1 << 50


class YardSettings(Section):
    servers: int = Field(
        default=2, ge=1, le=limits.LAUNCH_WORKERS_MAX, description="How many servers the launcher starts."
    )
    workers: int = Field(
        default=2, ge=1, le=limits.LAUNCH_WORKERS_MAX, description="How many training processes the launcher starts."
    )
    bind: Host = Field(default="127.0.0.1", description="The host that the yard's services listen on.")
    coordinator_port: int = Field(default=7070, ge=0, le=PORT_MAX, description="The coordinator's port. 0: a free one.")
    state: Folder = Field(
        default=".shardyard", description="The folder for process id files, logs and the coordinator's journal."
    )
    wal: Folder = Field(
        default=AUTO,
        description="The folder for the write-ahead logs of servers on this machine (job.durability wal). Keep it"
        " when a server dies: its log restores the partitions. auto: wal, in yard.state.",
    )
    memory_bytes_max: int = Field(
        default=0,
        ge=0,
        le=MEMORY_BYTES_MAX,
        description="About how many bytes the rows of embedding tables, with their index, may take in memory on"
        " each server. Colder rows go to a file in yard.cold. 0: no limit, and no file.",
    )
    cold: Folder = Field(
        default=AUTO,
        description="The folder for files with cold rows, on a local disk. The files have no names and disappear"
        " with the server. auto: cold, in yard.state.",
    )
    sockets: str | Auto = Field(
        default=AUTO,
        max_length=64,
        description="The folder of the servers' local sockets, for workers that share it and not the servers' network,"
        " such as other containers. auto: the sockets have no files, and processes of one network find them.",
    )
    restarts_max: int = Field(
        default=10,
        ge=0,
        le=1_000,
        description="How often a process of the yard that has died is started again. Counted for each process,"
        " within yard.restarts_window_ms. The launcher starts the coordinator, servers and agents again, and an agent"
        " its training processes. 0: never.",
    )
    restarts_window_ms: int = Field(
        default=3_600_000,
        ge=1_000,
        le=DURATION_MS_MAX,
        description="The time within which restarts are counted. A process that lives so long has its whole budget"
        " again.",
    )

    @property
    def wal_folder(self) -> Path:
        return Path(self.state) / WAL_FOLDER if self.wal == AUTO else Path(self.wal)

    @property
    def cold_folder(self) -> Path:
        return Path(self.state) / COLD_FOLDER if self.cold == AUTO else Path(self.cold)

    @property
    def sockets_folder(self) -> Path | None:
        return None if self.sockets == AUTO else Path(self.sockets)


class MembershipSettings(Section):
    heartbeat_ms: Annotated[int, Field(ge=10, le=60_000)] | Auto = Field(
        default="auto",
        description="The time between two heartbeats of a member. auto: an eighth of lease_ms.",
    )
    lease_ms: int = Field(
        default=4_000,
        ge=30,
        le=DURATION_MS_MAX,
        description="A member is declared dead when it has been silent for this long.",
    )
    coordinator_grace_ms: int = Field(
        default=COORDINATOR_GRACE_MS,
        ge=1,
        le=DURATION_MS_MAX,
        description="How long a process waits for a coordinator or a server that does not answer, which may be being"
        " restarted, before it counts it as lost. Training continues meanwhile where it can.",
    )
    drain_s: int = Field(
        default=DRAIN_S,
        ge=0,
        le=DURATION_MS_MAX // 1000,
        description="How many seconds a member may take to leave in order, after SIGTERM or `shardyard drain`. Then it"
        " counts as dead. Give the process that stops it a little longer, such as stop_grace_period: 30s in compose.",
    )

    preemption_notice: NoticePlace = Field(
        default=NEVER,
        description="Where a notice appears that this machine is about to be taken away: the absolute path of a file,"
        " or an http or https URL. A server, agent or training process that finds one leaves in order.",
    )

    @property
    def heartbeat_every_ms(self) -> int:
        return self.lease_ms // HEARTBEATS_PER_LEASE if self.heartbeat_ms == "auto" else self.heartbeat_ms

    servers_expected: int = Field(
        default=1,
        ge=1,
        le=limits.MEMBERS_MAX,
        description="How many servers the coordinator waits for before it places partitions, for at most 10 s after the"
        " last server has come. `up` and `run` set it to yard.servers.",
    )

    @property
    def notice_place(self) -> str | None:
        return None if self.preemption_notice == NEVER else self.preemption_notice

    @property
    def drain_ms(self) -> int:
        return self.drain_s * 1000

    @model_validator(mode="after")
    def _lease_outlasts_heartbeats(self) -> Self:
        least_ms = HEARTBEATS_PER_LEASE_MIN * self.heartbeat_every_ms
        if self.lease_ms < least_ms:
            raise impossible(
                ("lease_ms", "heartbeat_ms"),
                f"lease_ms >= {HEARTBEATS_PER_LEASE_MIN} * heartbeat_ms = {least_ms}, so that one lost heartbeat does"
                " not count as a death",
                f"lease_ms {self.lease_ms} with heartbeat_ms {self.heartbeat_ms}",
            )
        return self
