"""The partitions of one job that a server owns, and what belongs to them.

Owns: which partitions are the job's here, its generation, the rules of its updates, and who is lent or pins what of it.
Invariants: all partitions of a job have its rules; a generation that is not the job's is refused. Must not know: other
jobs, who may ask, protobuf.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

from shardyard.domain.consistency import UpdateMode
from shardyard.domain.errors import InvalidRequest, NotFound, StaleGeneration
from shardyard.domain.ids import Generation, Incarnation, JobId, PartitionId
from shardyard.domain.layout.layouts import JobLayout
from shardyard.domain.push_names import ROW_LANE, DataShardSource, RankSource, SourceKey
from shardyard.domain.tables.table_settings import ExpirySettings
from shardyard.runtime.clock import SystemClock
from shardyard_ps_server.checkpoint.restore import Restore
from shardyard_ps_server.checkpoint.saver import Saver
from shardyard_ps_server.hosting.pacing import SspPacing
from shardyard_ps_server.hosting.pins import Pins
from shardyard_ps_server.partition.partition import Partition
from shardyard_ps_server.partition.update_rules import UpdateRules
from shardyard_ps_server.rows.lookups_in_flight import LookupsInFlight
from shardyard_ps_server.values.shm_regions import ShmRegions
from shardyard_ps_server.values.versions import Bytes
from shardyard_ps_server.wal.wal import Wal


@dataclass(frozen=True)
class Held:
    """Buffers of partitions, theirs who asked for them to read until they are released."""

    buffers: tuple[tuple[Partition, Bytes], ...] = ()

    def release(self) -> None:
        for partition, buffer in self.buffers:
            partition.release(buffer)

    @property
    def nbytes(self) -> int:
        return sum(len(buffer) for _, buffer in self.buffers)


@dataclass(frozen=True)
class TableCount:
    """A table at this server: its rows, and the memory that it takes; the ids of its index, with those that are only
    counted, and for how many there is room; rows that pushes have made and ids that have expired since the partitions
    are here; of the rows, those that lie in a file, what that takes of the disk, and what the disk said if it refuses
    more."""

    name: str
    rows: int
    nbytes: int
    ids: int
    homes: int
    admitted: int
    expired: int
    cold_rows: int
    disk_bytes: int
    disk_refused: str


@dataclass
class HostedJob:
    """The partitions of one job that this server owns. `spare`: others that it has owned, or began to restore, whose
    memory a partition of that number takes over. `lent`: what workers on this machine may still be reading."""

    job: JobId
    layout: JobLayout
    generation: Generation
    rules: UpdateRules
    partitions: dict[PartitionId, Partition]
    regions: ShmRegions
    saver: Saver
    wal: Wal | None = None
    pacing: SspPacing | None = None
    """Of an asynchronous job."""
    open: bool = False
    spare: dict[PartitionId, Partition] = field(default_factory=dict)
    lent: dict[Incarnation, deque[Held]] = field(default_factory=dict)
    pins: Pins = field(default_factory=Pins)
    rows_in_flight: LookupsInFlight = field(default_factory=lambda: LookupsInFlight(SystemClock()))

    @property
    def mode(self) -> UpdateMode:
        return self.rules.mode

    @cached_property
    def rows_fly(self) -> bool:
        """Whether a row may expire between its look-up and its push. What goes with a step says the step by itself."""
        return not self.rules.rows_have_versions and any(each.expiry != ExpirySettings() for each in self.layout.tables)

    @property
    def nbytes(self) -> int:
        """One version of all partitions."""
        return sum(partition.payload_bytes for partition in self.partitions.values())

    def check_generation(self, generation: Generation) -> None:
        if generation != self.generation:
            raise StaleGeneration(
                f"generation {generation} of job {self.job}; this server is at {self.generation}",
                facts={"generation": str(self.generation)},
            )

    def begins_anew(self, generation: Generation, restore: Restore) -> bool:
        """Whether nothing of what is here is to stay: with logs, where a server died before anything was built on first
        values. Raises InvalidRequest where something was."""
        if self.wal is None or generation <= self.generation or restore.url:
            return False
        for number in sorted(self.partitions):
            version, sources = self.partitions[number].describe()
            if version.number or sources:
                raise InvalidRequest(f"partition {number} of job {self.job} to begin anew, which has counted work")
        return True

    def goes_over(
        self, generation: Generation, owned: Collection[PartitionId], mode: UpdateMode, restore: Restore
    ) -> bool:
        """Whether the job goes on in another mode, with all that a checkpoint has: nothing of what is here is to stay,
        and what is under way here counts nowhere. Raises InvalidRequest."""
        if mode is self.mode or generation < self.generation:
            return False
        missing = set(owned) - {entry.partition for entry in restore.entries}
        if generation == self.generation or missing or self.wal is not None:
            raise InvalidRequest(
                f"job {self.job}, which is {self.mode.value} at generation {self.generation}, to be {mode.value} at"
                f" generation {generation}, with {len(restore.entries)} partitions of a checkpoint",
                why="a job goes over to another mode under a higher generation, from a checkpoint, without a log",
            )
        return True

    def check_again(self, generation: Generation, owned: Collection[PartitionId], *, matches: bool) -> None:
        """Of an order for partitions of a job that is here. `matches`: as the method says. Raises StaleGeneration,
        InvalidRequest."""
        if generation < self.generation:
            raise StaleGeneration(
                f"partitions of job {self.job} at generation {generation}; this server is at {self.generation}",
                facts={"generation": str(self.generation)},
            )
        if not matches:
            raise InvalidRequest(
                f"job {self.job} is on this server with another layout, mode, number of ranks, durability, bound, "
                "rules for stale gradients, clipping, backup workers or rows"
            )
        gone = set(self.partitions) - set(owned)
        if gone and generation == self.generation:
            raise InvalidRequest(f"job {self.job} without partition {min(gone)}, which this server has")

    @contextmanager
    def deciding(self) -> Iterator[None]:
        """Nothing is recorded, and nothing that was recorded is under way."""
        if self.wal is None:
            yield
            return
        with self.wal.admission:
            self.wal.drain()
            yield

    def matches(self, layout: JobLayout, rules: UpdateRules, staleness: int | None, switches: int) -> bool:
        """`staleness` may be another one than here after another number of `switches`."""
        agrees = self.pacing is None or self.pacing.agrees(staleness, switches)
        return agrees and (self.layout, self.rules) == (layout, rules)

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

    def describe_tables(self) -> list[TableCount]:
        """What is here of each table."""
        held = [self.partitions[number].tables for number in sorted(self.partitions)]
        found = []
        for settings in self.layout.tables:
            tables = [each[settings.name] for each in held]
            found.append(
                TableCount(
                    settings.name,
                    sum([table.rows for table in tables]),
                    sum([table.nbytes for table in tables]),
                    sum([table.entries for table in tables]),
                    sum([table.homes for table in tables]),
                    sum([table.admitted for table in tables]),
                    sum([table.expired for table in tables]),
                    sum([table.cold_rows for table in tables]),
                    sum([table.disk_bytes for table in tables]),
                    next((table.disk_refused for table in tables if table.disk_refused), ""),
                )
            )
        return found

    def let_go(self) -> None:
        """Nothing of it is the job's any more."""
        for former in self.partitions.values():
            former.keep_no_more()
            former.let_go_tables()

    def find(self, partition: PartitionId) -> Partition:
        found = self.partitions.get(partition)
        if found is None:
            raise NotFound(f"partition {partition} of job {self.job} is not on this server")
        return found
