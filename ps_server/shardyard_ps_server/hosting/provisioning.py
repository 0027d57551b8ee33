"""Partitions that come to be a job's at this server: made, filled from a checkpoint and logs, then given.

Owns: the order of that. Invariants: all that is read is read and checked before anything changes; what takes its time,
or may fail, is put into partitions while they are nobody's; they become the job's in one moment, in which nothing is
under way. Must not know: who may order it, what is done with a job's partitions afterwards.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from shardyard.checkpoints.library import read_partition
from shardyard.domain.errors import InvalidRequest, ShardyardError, TooLarge
from shardyard.domain.ids import Generation, Incarnation, JobId, PartitionId
from shardyard.domain.layout.layouts import JobLayout
from shardyard.runtime.waits import WaitRegistry
from shardyard.storage.storage import open_storage
from shardyard_ps_server.checkpoint.restore import Loaded, Restore
from shardyard_ps_server.checkpoint.saver import Saver
from shardyard_ps_server.hosting.hosted_job import HostedJob
from shardyard_ps_server.hosting.pacing import SspPacing
from shardyard_ps_server.partition.partition import Partition
from shardyard_ps_server.partition.update_rules import UpdateRules
from shardyard_ps_server.rows.table_states import read_tables
from shardyard_ps_server.tables.memory.budget import Budget
from shardyard_ps_server.values.shm_regions import ShmRegions
from shardyard_ps_server.values.versions import NO_BYTES
from shardyard_ps_server.wal.records import RecordKind
from shardyard_ps_server.wal.replay import begin_head, replay
from shardyard_ps_server.wal.segments import LogRoot
from shardyard_ps_server.wal.wal import OnFailure, Wal


class Provisioning:
    """`logs`: where logs are kept, if they are; `on_failure`: is told when one cannot be written; `budget`: of the
    memory for rows of tables."""

    def __init__(
        self,
        *,
        shareable: bool,
        logs: LogRoot | None,
        on_failure: OnFailure,
        budget: Budget | None,
        wait_registry: WaitRegistry,
    ) -> None:
        self._shareable = shareable
        self._logs = logs
        self._on_failure = on_failure
        self._budget = budget
        self._wait_registry = wait_registry

    def begin(
        self,
        job: JobId,
        generation: Generation,
        layout: JobLayout,
        owned: Sequence[PartitionId],
        rules: UpdateRules,
        loaded: Sequence[Loaded],
        restore: Restore,
        *,
        server: Incarnation,
        pacing: SspPacing | None,
        wal: Wal | None,
    ) -> HostedJob:
        """A job with all its partitions. `server`: this one; `wal`: the job's log, where it has one here already.
        Raises as `give`, and leaves nothing behind."""
        total = sum(layout.partitions[p].payload_bytes for p in owned)
        regions = ShmRegions(total, shareable=self._shareable)
        saver = Saver(server, self._wait_registry, layout)
        hosted = HostedJob(job, layout, generation, rules, {}, regions, saver, wal, pacing)
        try:
            if rules.logged and hosted.wal is None:
                assert self._logs is not None
                files, first = self._logs.log(job, server), restore.segment_of(job)
                hosted.wal = Wal(files, segment=first, on_failure=self._on_failure, wait_registry=self._wait_registry)
            self.give(hosted, generation, owned, loaded, restore)
        except ShardyardError:
            regions.close()
            if hosted.wal is not None and wal is None:
                hosted.wal.close(remove=True)
            raise
        return hosted

    def load(
        self,
        job: JobId,
        hosted: HostedJob | None,
        layout: JobLayout,
        owned: Sequence[PartitionId],
        restore: Restore,
    ) -> list[Loaded]:
        """What is to be restored and is not yet, all of it checked."""
        if not restore.entries:
            return []
        strangers = {entry.partition for entry in restore.entries} - set(owned)
        if strangers:
            raise InvalidRequest(f"partition {min(strangers)} to be restored, which is not given to this server")
        found = []
        storage = open_storage(restore.url)
        for entry in restore.entries:
            here = None if hosted is None else hosted.partitions.get(entry.partition)
            if here is None or here.describe()[0].life < entry.version.life:
                what = f"partition {entry.partition} of job {job} to be read from {storage.url}"
                with self._wait_registry.over(lambda what=what: what):  # type: ignore[misc]
                    state = replace(read_partition(storage, layout, entry), version=entry.version)
                    tables = read_tables(state.tables, self._budget)
                    found.append(Loaded(restore.adapted(state, job), tables))
        return found

    def give(
        self,
        hosted: HostedJob,
        generation: Generation,
        owned: Sequence[PartitionId],
        loaded: Sequence[Loaded],
        restore: Restore,
    ) -> None:
        """Makes partitions, and puts in what they begin with; only then are they the job's. What logs say takes its
        time, and may fail, so it is put in while the partitions are nobody's."""
        restored = {each.state.partition for each in loaded}
        made = self._make(hosted, [p for p in owned if p not in hosted.partitions], again=restored)
        partitions = {number: made.get(number) or hosted.partitions[number] for number in owned}
        nobodys = {number for number in restored if number in made or restore.logs.get(number)}
        for each in loaded:
            if each.state.partition in nobodys:
                partitions[each.state.partition].restore(each.state, each.tables)
        if hosted.wal is not None:
            self._replay(hosted, generation, {number: partitions[number] for number in sorted(nobodys)}, restore)
        with hosted.deciding():
            if hosted.wal is not None:
                _begin(hosted.wal, begin_head(generation, [p for p in owned if p in made or p in restored]))
            hosted.generation = generation  # first: what comes under the old one is refused before anything changes
            hosted.pins.clear()
            before, hosted.partitions = hosted.partitions, partitions
            for each in loaded:
                if each.state.partition not in nobodys:
                    partitions[each.state.partition].restore(each.state, each.tables)
            gone = {number: former for number, former in before.items() if number not in partitions}
            for former in gone.values():
                former.keep_no_more()
                former.let_go_tables()
            hosted.spare.update(gone)
            for number in partitions:
                hosted.spare.pop(number, None)
            hosted.open = hosted.open or len(loaded) == len(hosted.partitions)

    def _replay(
        self,
        hosted: HostedJob,
        generation: Generation,
        restored: Mapping[PartitionId, Partition],
        restore: Restore,
    ) -> None:
        """Raises StorageUnavailable, LogDamaged, TooLarge."""
        assert self._logs is not None
        job, layout = hosted.job, hosted.layout
        trails: dict[tuple[Incarnation, ...], dict[PartitionId, Partition]] = {}
        for number, partition in restored.items():
            trails.setdefault(restore.logs.get(number, ()), {})[number] = partition
        for trail, partitions in sorted(trails.items()):
            numbers = ", ".join(map(str, sorted(partitions)))
            for server in trail:
                what = f"the log of server {server} to be read, for partition {numbers} of job {job}"
                with self._wait_registry.over(lambda what=what: what):  # type: ignore[misc]
                    replay(self._logs.log(job, server), generation, restore.number, layout, partitions)

    def _make(
        self, hosted: HostedJob, wanted: Sequence[PartitionId], *, again: Collection[PartitionId]
    ) -> dict[PartitionId, Partition]:
        """`again`: those that will be restored, for which one that was given up will do."""
        found = {}
        for number in wanted:
            spare = hosted.spare.get(number) if number in again else None
            try:
                found[number] = spare or Partition(
                    hosted.layout,
                    number,
                    hosted.rules,
                    hosted.regions.take,
                    budget=self._budget,
                    in_flight=hosted.rows_in_flight,
                )
            except TooLarge as error:
                raise TooLarge(f"the partitions of job {hosted.job}, one of them with {error.what}") from error
            if number in again:  # until it is the job's
                hosted.spare[number] = found[number]
        return found


def _begin(wal: Wal, head: bytes) -> None:
    ticket = wal.append(RecordKind.BEGIN, head, NO_BYTES)
    wal.sync(ticket)
    with wal.turn(ticket):
        """What comes next in the log is theirs."""
