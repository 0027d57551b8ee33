"""One job on this server: its partitions, its generation and rules, and which buffers are lent or pinned.

Invariants: all partitions of a job have its rules; a request with another generation is refused. Must not know: other
jobs, which callers are allowed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from shardyard.domain.consistency import UpdateMode
from shardyard.domain.errors import InvalidRequest, NotFound, NotReady, StaleGeneration
from shardyard.domain.ids import Generation, Incarnation, JobId, PartitionId
from shardyard.domain.layout.layouts import JobLayout
from shardyard.domain.push_names import ROW_LANE, DataShardSource, RankSource, SourceKey
from shardyard.domain.tables.table_settings import ExpirySettings
from shardyard.runtime.clock import SystemClock
from shardyard.wire.v1 import parameter_server_pb2 as wire
from shardyard_ps_server.checkpoint.restore import NO_RESTORE, Restore
from shardyard_ps_server.checkpoint.saver import Saver
from shardyard_ps_server.hosting.pins import Pins
from shardyard_ps_server.hosting.worker_clocks import WorkerClocks
from shardyard_ps_server.partition.partition import Partition
from shardyard_ps_server.partition.update_rules import UpdateRules
from shardyard_ps_server.rows.lookups_in_flight import LookupsInFlight
from shardyard_ps_server.values.shm_regions import ShmRegions
from shardyard_ps_server.values.versions import Bytes
from shardyard_ps_server.wal.wal import Wal


@dataclass(frozen=True)
class CreateRequest:
    """The partitions `owned`, which the coordinator gives to this server, and their initial state.

    `staleness`: the bound of an asynchronous job, if it has one. Mode switch number `switches` set it. `working`: the
    workers that take steps now."""

    job: JobId
    generation: Generation
    layout: JobLayout
    owned: Sequence[PartitionId]
    rules: UpdateRules
    restore: Restore = NO_RESTORE
    staleness: int | None = None
    working: Sequence[Incarnation] = ()
    switches: int = 0


class HeldValues(NamedTuple):
    """Buffers of partitions' versions. They do not change until they are released."""

    buffers: tuple[tuple[Partition, Bytes], ...] = ()

    def release(self) -> None:
        for partition, buffer in self.buffers:
            partition.release(buffer)

    @property
    def nbytes(self) -> int:
        return sum(len(buffer) for _, buffer in self.buffers)


@dataclass
class HostedJob:
    job: JobId
    layout: JobLayout
    generation: Generation
    rules: UpdateRules
    partitions: dict[PartitionId, Partition]
    regions: ShmRegions
    saver: Saver
    wal: Wal | None = None
    clocks: WorkerClocks | None = None
    """Only in an asynchronous job."""
    open: bool = False
    spare: dict[PartitionId, Partition] = field(default_factory=dict)
    """Partitions that this server owned earlier, or began to restore. A new one of the same number reuses the
    memory."""
    lent: dict[Incarnation, deque[HeldValues]] = field(default_factory=dict)
    """Buffers that workers on this machine may still be reading."""
    pins: Pins = field(default_factory=Pins)
    rows_in_flight: LookupsInFlight = field(default_factory=lambda: LookupsInFlight(SystemClock()))

    @property
    def mode(self) -> UpdateMode:
        return self.rules.mode

    @cached_property
    def protects_looked_up_rows(self) -> bool:
        """Whether a row could expire between its look-up and its push. Never in a synchronous job, where the step
        decides what expires."""
        return not self.rules.rows_have_versions and any(each.expiry != ExpirySettings() for each in self.layout.tables)

    @property
    def in_order(self) -> list[Partition]:
        """The partitions, in the order of their numbers."""
        return [self.partitions[number] for number in sorted(self.partitions)]

    @property
    def nbytes(self) -> int:
        """Bytes of one version of all partitions."""
        return sum(partition.payload.nbytes for partition in self.partitions.values())

    def find(self, partition: PartitionId) -> Partition:
        found = self.partitions.get(partition)
        if found is None:
            raise NotFound(f"partition {partition} of job {self.job} is not on this server")
        return found

    def check_open(self) -> None:
        if not self.open:
            raise NotReady(f"job {self.job} has no first values yet")

    def check_generation(self, generation: Generation) -> None:
        if generation != self.generation:
            raise StaleGeneration(
                f"generation {generation} of job {self.job}; this server is at {self.generation}",
                facts={"generation": str(self.generation)},
            )

    def begins_anew(self, request: CreateRequest) -> bool:
        """Whether empty partitions replace those that are here. A job begins anew, under a higher generation and
        without a checkpoint, when a server has died before any work counted. Raises InvalidRequest if work has counted
        here."""
        if request.generation <= self.generation or request.restore.url:
            return False
        for partition in self.in_order:
            version, sources = partition.describe()
            if version.number or sources:
                raise InvalidRequest(
                    f"partition {partition.id} of job {self.job} to begin anew, which has counted work"
                )
        return True

    def changes_mode(self, request: CreateRequest) -> bool:
        """Whether the job changes its kind of updates, or whether variables are in its workers. Then partitions of a
        checkpoint replace those that are here, and pushes under way do not count. Raises InvalidRequest."""
        mode, generation, entries = request.rules.mode, request.generation, request.restore.entries
        is_same = (mode, request.rules.mirrored) == (self.mode, self.rules.mirrored)
        if is_same or generation < self.generation:
            return False
        missing = set(request.owned) - {entry.partition for entry in entries}
        if generation == self.generation or missing or self.wal is not None:
            raise InvalidRequest(
                f"job {self.job}, which is {self.mode.value} at generation {self.generation}, to be {mode.value} at"
                f" generation {generation}, with {len(entries)} partitions of a checkpoint",
                why="a job changes its mode under a higher generation, from a checkpoint, and without a log",
            )
        return True

    def check_same_job(self, request: CreateRequest) -> None:
        """Raises StaleGeneration, and InvalidRequest for partitions that do not fit the job on this server."""
        if request.generation < self.generation:
            raise StaleGeneration(
                f"partitions of job {self.job} at generation {request.generation}; this server is at {self.generation}",
                facts={"generation": str(self.generation)},
            )
        same_bound = self.clocks is None or self.clocks.agrees(request.staleness, request.switches)
        if not same_bound or (self.layout, self.rules) != (request.layout, request.rules):
            raise InvalidRequest(
                f"job {self.job} is on this server with another layout, mode, number of ranks, durability, bound, "
                "rules for stale gradients, clipping, backup workers or rows"
            )
        gone = set(self.partitions) - set(request.owned)
        if gone and request.generation == self.generation:
            raise InvalidRequest(f"job {self.job} without partition {min(gone)}, which this server has")

    @contextmanager
    def quiescent(self) -> Iterator[None]:
        """Inside, the log accepts no records, and all earlier records have been applied."""
        if self.wal is None:
            yield
            return
        with self.wal.order:
            self.wal.drain()
            yield

    def check_leased(self, key: SourceKey) -> None:
        """Raises InvalidRequest unless the job leases sources of this kind."""
        source = key.source
        if self.mode is UpdateMode.SYNC:
            leased = isinstance(source, RankSource) and source.rank < self.rules.logical_ranks
        else:
            leased = isinstance(source, DataShardSource)
        lanes = (0, ROW_LANE) if self.rules.rows_at_once else (0,)
        if not leased or key.lane not in lanes:
            raise InvalidRequest(
                f"{source}, lane {key.lane}, to be opened in job {self.job}, which is {self.mode.value}"
                + (f" with {self.rules.logical_ranks} logical ranks" if self.mode is UpdateMode.SYNC else ""),
                todo="open data shards in an asynchronous job, logical ranks in a synchronous one, lane 0; in a"
                " hybrid one also the lane of rows",
            )

    def describe_tables(self) -> list[wire.DescribedTable]:
        """Returns what this server has of each table, all its partitions together."""
        found = [wire.DescribedTable(job=self.job, name=settings.name) for settings in self.layout.tables]
        for partition in self.in_order:
            tables = partition.tables
            for into in found if tables else ():  # a partition that leaves this server has none any more
                table = tables[into.name].use()
                into.rows += table.rows
                into.bytes += table.nbytes
                into.ids += table.ids
                into.homes += table.homes
                into.admitted += table.admitted
                into.expired += table.expired
                into.cold_rows += table.cold_rows
                into.disk_bytes += table.disk_bytes
                into.disk_refused = into.disk_refused or table.disk_refused
        return found
