"""How a job gets partitions: they are made, filled from a checkpoint and from logs, then attached to the job.

Owns: the order of these steps. Invariants: everything is read and checked before anything changes; partitions are
filled before they belong to a job, since that takes long and may fail; all are attached in one moment, while nothing is
under way.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from shardyard.checkpoints.library import read_partition
from shardyard.domain.errors import InvalidRequest, ShardyardError, TooLarge
from shardyard.domain.ids import Incarnation, PartitionId
from shardyard_ps_server.checkpoint.restore import Loaded
from shardyard_ps_server.checkpoint.saver import Saver
from shardyard_ps_server.hosting.hosted_job import CreateRequest, HostedJob
from shardyard_ps_server.hosting.store import Store
from shardyard_ps_server.hosting.worker_clocks import WorkerClocks
from shardyard_ps_server.partition.partition import Partition
from shardyard_ps_server.rows.table_states import read_tables
from shardyard_ps_server.values.shm_regions import ShmRegions
from shardyard_ps_server.wal.records import RecordKind
from shardyard_ps_server.wal.replay import begin_head, replay
from shardyard_ps_server.wal.wal import Wal


def load(store: Store, hosted: HostedJob | None, request: CreateRequest) -> list[Loaded]:
    """Reads and checks the partitions that the request restores, except those that are restored already."""
    restore, layout, job = request.restore, request.layout, request.job
    if not restore.entries:
        return []
    foreign = {entry.partition for entry in restore.entries} - set(request.owned)
    if foreign:
        raise InvalidRequest(f"partition {min(foreign)} to be restored, which is not given to this server")
    found = []
    storage = store.access.open(restore.url)
    for entry in restore.entries:
        here = None if hosted is None else hosted.partitions.get(entry.partition)
        if here is None or here.describe()[0].life < entry.version.life:
            what = f"partition {entry.partition} of job {job} to be read from {storage.url}"
            with store.wait_registry.over(lambda what=what: what):  # type: ignore[misc]
                state = replace(read_partition(storage, layout, entry), version=entry.version)
                tables = read_tables(state.tables, store.budget)
                found.append(Loaded(restore.adapted(state, job), tables))
    return found


def begin(
    store: Store, request: CreateRequest, loaded: Sequence[Loaded], clocks: WorkerClocks | None, wal: Wal | None
) -> HostedJob:
    """Makes a job with all its partitions. `wal`: the job's log, if it is here already. Raises what `give` raises, and
    then leaves nothing behind."""
    job, layout = request.job, request.layout
    total = sum(layout.partitions[p].payload_bytes for p in request.owned)
    regions = ShmRegions(total, shareable=store.shareable)
    saver = Saver(store.incarnation, store.wait_registry, layout)
    hosted = HostedJob(job, layout, request.generation, request.rules, {}, regions, saver, wal, clocks)
    try:
        if request.rules.logged and wal is None:
            assert store.logs is not None
            hosted.wal = Wal(
                store.logs.log(job, store.incarnation),
                segment=request.restore.segment_of(job),
                on_failure=store.on_failure,
                wait_registry=store.wait_registry,
            )
        give(store, hosted, request, loaded)
    except ShardyardError:
        regions.close()
        if hosted.wal is not None and wal is None:
            hosted.wal.close(remove=True)
        raise
    return hosted


def give(store: Store, hosted: HostedJob, request: CreateRequest, loaded: Sequence[Loaded]) -> None:
    """Makes and fills partitions, and attaches them to the job. New partitions, and those with a log to replay, are
    filled before that moment; the others are restored in it."""
    owned = request.owned
    restored = {each.state.partition for each in loaded}
    made = _make(store, hosted, [p for p in owned if p not in hosted.partitions], restored=restored)
    partitions = {number: made.get(number) or hosted.partitions[number] for number in owned}
    filled_before = {number for number in restored if number in made or request.restore.logs.get(number)}
    for each in loaded:
        if each.state.partition in filled_before:
            partitions[each.state.partition].restore(each.state, each.tables)
    if hosted.wal is not None:
        _replay(store, request, {number: partitions[number] for number in sorted(filled_before)})
    with hosted.quiescent():
        if hosted.wal is not None:
            head = begin_head(request.generation, [p for p in owned if p in made or p in restored])
            ticket = hosted.wal.append(RecordKind.BEGIN, head)
            hosted.wal.sync(ticket)
            with hosted.wal.turn(ticket):
                pass  # only records after this one belong to these partitions
        with store.lock:  # first, so that pushes under the old one are refused
            hosted.generation = request.generation
            store.epoch += 1
        hosted.pins.clear()
        before, hosted.partitions = hosted.partitions, partitions
        for each in loaded:
            if each.state.partition not in filled_before:
                partitions[each.state.partition].restore(each.state, each.tables)
        gone = {number: former for number, former in before.items() if number not in partitions}
        for former in gone.values():
            former.leave()
        hosted.spare.update(gone)
        for number in partitions:
            hosted.spare.pop(number, None)
        hosted.open = hosted.open or len(loaded) == len(hosted.partitions)


def _replay(store: Store, request: CreateRequest, restored: Mapping[PartitionId, Partition]) -> None:
    """Raises StorageUnavailable, LogDamaged, TooLarge."""
    assert store.logs is not None
    job, restore = request.job, request.restore
    by_owners: dict[tuple[Incarnation, ...], dict[PartitionId, Partition]] = {}
    for number, partition in restored.items():
        by_owners.setdefault(restore.logs.get(number, ()), {})[number] = partition
    for owners, partitions in sorted(by_owners.items()):
        numbers = ", ".join(map(str, sorted(partitions)))
        for server in owners:
            what = f"the log of server {server} to be read, for partition {numbers} of job {job}"
            with store.wait_registry.over(lambda what=what: what):  # type: ignore[misc]
                replay(store.logs.log(job, server), request.generation, restore.number, request.layout, partitions)


def _make(
    store: Store, hosted: HostedJob, numbers: Sequence[PartitionId], *, restored: Collection[PartitionId]
) -> dict[PartitionId, Partition]:
    """`restored`: the partition will be restored, so a spare one will do as well as a new one."""
    found = {}
    for number in numbers:
        spare = hosted.spare.get(number) if number in restored else None
        try:
            found[number] = spare or Partition(
                hosted.layout,
                number,
                hosted.rules,
                hosted.regions.take,
                budget=store.budget,
                in_flight=hosted.rows_in_flight,
            )
        except TooLarge as error:
            raise TooLarge(f"the partitions of job {hosted.job}, one of them with {error.what}") from error
        if number in restored:  # until it belongs to the job
            hosted.spare[number] = found[number]
    return found
