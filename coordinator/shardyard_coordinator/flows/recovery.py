"""How a job goes back to a checkpoint: for lost partitions, at the beginning of a run, or on command.

Invariants: single partitions go back to the newest committed checkpoint only (rule A8). Work that a recovery takes back
is open again (rule A11). The end of a recovery that was given up changes nothing. Must not know: how servers are
called, what the files contain, the clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardyard.domain import errors
from shardyard.domain.ids import Generation, Incarnation
from shardyard.domain.layout.layouts import PartitionMap, PartitionOwner
from shardyard.domain.optimizers import OptimizerSpec
from shardyard.domain.push_names import DataShardSource
from shardyard.domain.tables.table_settings import TableSettings
from shardyard.domain.variables import VariableSpec
from shardyard_coordinator.core.effects import Base, Effect, JobPhase, LogMessage, RestorePartitions
from shardyard_coordinator.core.job_state import JobState
from shardyard_coordinator.flows.checkpointing import committed, spec_of
from shardyard_coordinator.placement.deployment import RESTORED_LATER, Stage
from shardyard_coordinator.placement.placement import Server
from shardyard_coordinator.placement.registration import check_registration
from shardyard_coordinator.records import Body, Entry, require
from shardyard_coordinator.storage.checkpoint_book import Committed
from shardyard_coordinator.storage.log_owners import LogOwner
from shardyard_coordinator.storage.recovery import Attempt, Restored
from shardyard_coordinator.storage.restore_point import RestorePoint
from shardyard_coordinator.work import checkpoint_copy
from shardyard_coordinator.work.data_ledger import DataLedger

# ---- a run that begins with a checkpoint


def begin_with(job: JobState, origin: RestorePoint) -> list[Effect]:
    """Begins a run from a checkpoint of another run, before any worker joins. Raises DamagedRecord."""
    job.origin = origin
    job.progress.reach(origin.step)
    checkpoint_copy.begin_with(job.feeds, origin.data_ledger, origin.step)
    job.tokens.seen(origin.token)
    begun: Entry = ("job_resumed", {})
    given: Entry = ("token_given", {"token": job.tokens.latest})
    back = job.book.go_back(_committed_of(origin))
    replicas: list[Entry] = []
    if job.replicas is not None:
        job.replicas.begin_after(origin.token, origin.step)
        replicas = job.replicas.entries()
    return job.records([begun, *job.feeds.entries(), back, given, *replicas])


def check_fits(
    job: JobState, variables: Sequence[VariableSpec], optimizer: OptimizerSpec, tables: Sequence[TableSettings]
) -> None:
    """For a job that begins with a checkpoint. Raises VariableConflict unless these are the checkpoint's variables, and
    NotReady until its partitions are restored."""
    assert job.origin is not None
    whose = f"{job.origin}, with which it is to begin,"
    check_registration(job.origin.layout, variables, optimizer, tables, whose)
    if not job.is_whole:
        raise errors.NotReady(
            f"{job.title} begins with {job.origin}: its partitions are being restored",
            why=job.recovery.waits_for or "that takes a moment",
        )


def restore_origin(job: JobState, servers: Sequence[Server], now_ms: int) -> list[Effect]:
    """Restores the checkpoint with which the job begins, now that there are servers for its partitions."""
    origin = job.origin
    assert origin is not None
    job.deployment.place(origin.layout, servers, Stage.RESTORING)
    lost = job.recovery.lose([part.partition for part in origin.layout.partitions], now_ms)
    message = f"{job.title} begins with {origin}, in {origin.url}"
    return [*job.records([job.deployment.registered, RESTORED_LATER, lost]), LogMessage(message)]


# ---- a restore on command


def go_back(job: JobState, origin: RestorePoint, now_ms: int) -> list[Effect]:
    """The whole job goes back while it runs (rule A8). Raises InvalidRequest if its scripts could not follow, NotReady
    while a checkpoint is written or partitions are restored."""
    if job.phase is not JobPhase.RUNNING or job.deployment.stage is not Stage.OPEN:
        raise errors.NotReady(
            f"{job.title} is {job.phase.value}", why="", todo="wait until it runs or has ended, then order it again"
        )
    _check_order(job, origin)
    assert job.deployment.layout is not None
    job.book.want()  # otherwise a checkpoint that the job has gone back from stays the newest
    record = job.book.go_back(_committed_of(origin))
    lost = job.recovery.lose([part.partition for part in job.deployment.layout.partitions], now_ms)
    message = f"{job.title} goes back to {origin}, as ordered"
    return [*job.records([record, lost]), LogMessage(message, warning=True)]


def _check_order(job: JobState, origin: RestorePoint) -> None:
    """Raises InvalidRequest, NotReady."""
    todo = "end its scripts, order it again, and start them: the next run begins with it"
    if job.log_owners is not None:
        raise errors.InvalidRequest(f"{job.title} keeps logs, and cannot go back while it runs", todo=todo)
    of_former_mode = origin.job == job.id and job.mode.is_former_checkpoint(origin.number)
    if origin.mode is not job.updates or of_former_mode:
        raise errors.InvalidRequest(
            f"{job.title} is {job.settings.consistency.mode.value}, and {origin} is {origin.mode.value}"
            + (", of before it was switched" if origin.mode is job.updates else ""),
            why="the job was switched since",
            todo=todo,
        )
    if origin.job != job.id or origin.layout != job.deployment.layout:
        raise errors.InvalidRequest(f"{origin} is of another run than {job.title}", why="", todo=todo)
    finished = checkpoint_copy.finished_since(job.feeds, origin.data_ledger)
    if finished is not None:
        raise errors.InvalidRequest(
            f"{job.title} has gone through data set {finished}, which {origin} has in part",
            why="a script does not go back to a loop that it has left",
            todo=todo,
        )
    if job.recovery.needed or job.book.is_writing:
        raise errors.NotReady(f"a checkpoint of {job.title} is being written or restored at this moment")


# ---- partitions that lost their server


def owned_by(job: JobState, server: Incarnation) -> list[PartitionOwner]:
    """The partitions that a server has, or is about to get."""
    map_, attempt, lost = job.deployment.map, job.recovery.attempt, job.recovery.lost
    had = [] if map_ is None else [owner for owner in map_.owners if owner.partition not in lost]
    found = {owner.partition: owner for owner in had if owner.server == server}
    if attempt is not None:
        found |= {owner.partition: owner for owner in attempt.map.owners if owner.server == server}
    return [found[partition] for partition in sorted(found)]


def can_go_back(job: JobState) -> bool:
    return job.deployment.stage in (Stage.OPEN, Stage.RESTORING) and job.book.committed is not None


def can_begin_again(job: JobState) -> bool:
    """Whether nothing depends on the first values yet, so that they may be given again. No worker reads them before
    they are committed, and none is told that they are before work may be acknowledged."""
    if job.book.committed is not None or job.deployment.stage is Stage.EMPTY:
        return False
    return not job.may_acknowledge or not job.deployment.is_committed


def lose(job: JobState, lost: Sequence[PartitionOwner], server: Server, how: str, now_ms: int) -> list[Effect]:
    """Partitions were lost with their server, and there is a checkpoint to go back to."""
    newest = job.book.committed
    assert newest is not None
    job.book.abandon()
    record = job.recovery.lose([owner.partition for owner in lost], now_ms)
    what = "the job goes back to" if job.goes_back_whole else "its partitions go back to"
    if job.replays_logs:
        what = "its log is read from"
    message = f"{job.title}: server {server.incarnation} {how}; {what} checkpoint {newest.number}"
    return [*job.records([record]), LogMessage(f"{message} of step {newest.step:,}", warning=True)]


def lose_replicas(job: JobState, now_ms: int) -> list[Effect]:
    """A mirrored job has lost all its replicas. What the servers have may be of several steps, since a member may have
    died while it published, so all partitions go back to the newest checkpoint. Raises WorkerFailed if there is
    none."""
    newest = job.book.committed
    if newest is None or not can_go_back(job):
        raise errors.WorkerFailed(
            f"{job.title} has lost all its replicas, and has no checkpoint",
            why="its variables were in its workers",
            todo="set job.checkpoint.url and job.checkpoint.every_s, and start the script again",
        )
    assert job.deployment.layout is not None
    job.book.abandon()
    record = job.recovery.lose([part.partition for part in job.deployment.layout.partitions], now_ms)
    message = f"{job.title} has lost all its replicas; it goes back to checkpoint {newest.number}"
    return [*job.records([record]), LogMessage(f"{message} of step {newest.step:,}", warning=True)]


def lose_values(
    job: JobState, lost: Sequence[PartitionOwner], server: Server, how: str, now_ms: int, *, at_once: bool = False
) -> list[Effect]:
    """Partitions were lost with their server, and `can_begin_again` is true. `at_once`: the server does not come
    back."""
    job.book.abandon()
    record = job.recovery.lose([owner.partition for owner in lost], now_ms, at_once=at_once)
    job.deployment.lose_values()
    message = f"{job.title}: server {server.incarnation} {how} before the first checkpoint"
    return [*job.records([record]), LogMessage(f"{message}; first values are given again", warning=True)]


def begin(job: JobState, servers: Sequence[Server], now_ms: int) -> list[Effect]:
    """Begins to restore lost partitions if there are servers for them."""
    layout, map_, newest, logs = job.deployment.layout, job.deployment.map, job.book.committed, job.log_owners
    assert layout is not None
    assert map_ is not None
    sizes = [part.payload_bytes for part in layout.partitions]
    if newest is None:
        return _place_again(job, map_, sizes, servers, now_ms)
    url = newest.url or job.book.url
    assert url is not None
    folders = None
    if logs is not None and job.replays_logs:
        unsealed = job.recovery.lost - job.recovery.sealed
        folders = {partition: logs.log_folder(partition, newest.number) for partition in unsealed}
    whole = job.goes_back_whole and job.recovery.goes_back
    started = job.recovery.begin(map_, sizes, servers, whole=whole, now_ms=now_ms, folders=folders)
    if started is None:
        return []
    attempt, record = started
    # a worker that does not follow a staleness bound yet does not report that it has no more work
    workers = frozenset(filter(job.mode.follows_latest, job.workers))
    leases = job.feeds.leases if isinstance(job.feeds, DataLedger) else []
    restore = RestorePartitions(
        spec_of(job),
        attempt.map,
        url,
        bases(job, attempt),
        attempt.life,
        attempt.partitions,
        tuple(sorted({lease.worker for lease in leases} & workers)),
        checkpoint_copy.begun_in_steps(newest.data_ledger),
        checkpoint_copy.first_step(newest.data_ledger),
    )
    return [*job.records([record]), restore]


def bases(job: JobState, attempt: Attempt) -> tuple[Base, ...]:
    """The newest checkpoint; with logs, older ones too, if all logs after them can be read."""
    committed, logs = job.book.committed, job.log_owners
    assert committed is not None
    if logs is None or not job.replays_logs:
        return (Base(committed.number, trusted=committed.trusted),)
    unsealed = sorted(attempt.partitions - attempt.sealed)
    after = {each: logs.of(each, committed.number) for each in unsealed}
    newest = Base(committed.number, after, committed.trusted)
    if attempt.sealed:
        return (newest,)
    return (
        newest,
        *(
            Base(number, {each: logs.of(each, number) for each in unsealed})
            for number in reversed(logs.kept)
            if number < newest.number and all(logs.reaches(each, number) for each in unsealed)
        ),
    )


def whole_of(job: JobState, generation: Generation) -> Committed | None:
    """The checkpoint, with its URL, to which the attempt of that generation restores all partitions. None if it does
    not restore all of them, or if logs have what came after the checkpoint."""
    attempt, layout, newest = job.recovery.attempt, job.deployment.layout, job.book.committed
    if attempt is None or attempt.map.generation != generation or layout is None:
        return None
    if len(attempt.partitions) < len(layout.partitions) or job.replays_logs or not attempt.goes_back:
        return None
    assert newest is not None
    return replace(newest, url=newest.url or job.book.url or "")


def end(job: JobState, generation: Generation, now_ms: int) -> list[Effect]:
    """All partitions have servers again. The map of that generation becomes the job's."""
    attempt = job.recovery.end(generation, now_ms, restored=True)
    if attempt is None:
        return []
    newest, logs = job.book.committed, job.log_owners
    assert newest is not None
    message = f"{job.title}: partitions {', '.join(map(str, sorted(attempt.partitions)[:8]))} are restored"
    reopened = [
        [each.feed, each.epoch, each.index] for each in _take_map(job, attempt.map, goes_back=attempt.goes_back)
    ]
    if not attempt.goes_back:
        return _end_move(job, attempt, newest.number)
    job.restored = Restored(
        newest.number, newest.step, newest.created_s, len(attempt.partitions), len(reopened), job.replays_logs
    )
    if logs is not None and job.replays_logs:
        job.book.want()  # so that the next recovery has little to read
        moved = logs.move(
            {
                owner.partition: LogOwner(owner.server, newest.number, attempt.logs[owner.server])
                for owner in attempt.map.owners
                if owner.partition in attempt.partitions
            }
        )
        records = job.records([job.deployment.with_map("partitions_moved"), moved])
        return [*records, LogMessage(f"{message}, with all that was acknowledged")]
    if job.origin is not None:
        job.book.want()
    begun = [] if logs is None else [_begin_logs(job, attempt)]
    _has_begun(job)
    kind, body = job.deployment.with_map("partitions_moved")
    taken_back = {"partitions": sorted(attempt.partitions), "checkpoint": newest.number, "leased_again": reopened}
    return [*job.records([(kind, {**body, **taken_back}), *begun]), LogMessage(f"{message}, of step {newest.step:,}")]


def _end_move(job: JobState, attempt: Attempt, checkpoint: int) -> list[Effect]:
    """The partitions of a server that leaves in order have other servers, with all that they have acknowledged."""
    moved = {owner.partition: owner for owner in attempt.map.owners if owner.partition in attempt.partitions}
    kind, body = job.deployment.with_map("partitions_moved")
    records: list[Entry] = [(kind, {**body, "partitions": sorted(moved), "checkpoint": checkpoint, "leased_again": []})]
    if job.log_owners is not None:
        owners = {
            partition: LogOwner(owner.server, checkpoint, attempt.logs[owner.server])
            for partition, owner in moved.items()
        }
        records.append(job.log_owners.continue_from(checkpoint, owners))
    servers = ", ".join(map(str, sorted({owner.server for owner in moved.values()})))
    message = f"{job.title}: partitions {', '.join(map(str, sorted(moved)[:8]))} have moved to server {servers}"
    return [*job.records(records), LogMessage(f"{message}, with all that was acknowledged")]


def fail(job: JobState, generation: Generation, failure: errors.ShardyardError, now_ms: int) -> list[Effect]:
    """Another attempt follows. Raises the failure if no attempt can succeed."""
    current = job.recovery.attempt
    if current is None or current.map.generation != generation:
        return []
    job.recovery.end(generation, now_ms, restored=False)
    if isinstance(failure, errors.CheckpointDamaged | errors.CheckpointNotFound | errors.LogDamaged):
        raise failure
    return [LogMessage(f"{job.title}: its partitions are not restored yet: {failure.what}", warning=True)]


def _place_again(
    job: JobState, map_: PartitionMap, sizes: Sequence[int], servers: Sequence[Server], now_ms: int
) -> list[Effect]:
    """Lost partitions have servers again. All partitions begin again with first values."""
    begun = job.recovery.begin(map_, sizes, servers, whole=True, now_ms=now_ms)
    if begun is None:
        return []
    attempt, record = begun
    job.recovery.end(attempt.map.generation, now_ms, restored=True)
    job.deployment.place_again(attempt.map)
    placed = job.deployment.with_map("partitions_placed_again")
    return job.records([record, placed, *([] if job.log_owners is None else [_begin_logs(job, attempt)])])


def _take_map(job: JobState, map_: PartitionMap, *, goes_back: bool) -> list[DataShardSource]:
    """The job has this map now. Without logs, partitions that go back have what the newest checkpoint has. Work that
    was closed since is opened again (rule A11) and returned."""
    assert job.book.committed is not None
    job.deployment.map = map_
    if job.replicas is not None and goes_back:
        job.replicas.went_back(job.workers, job.book.committed.step, with_rows=job.has_tables)
    if job.deployment.stage is Stage.RESTORING:
        job.deployment.stage = Stage.OPEN
        return []
    if job.log_owners is not None or not goes_back:
        return []
    return checkpoint_copy.reopen(job.feeds, job.book.committed.data_ledger)


def _has_begun(job: JobState) -> None:
    """The job's partitions exist, so a job without logs has begun."""
    if job.log_owners is None:
        job.origin = None


def _begin_logs(job: JobState, attempt: Attempt) -> Entry:
    assert job.log_owners is not None
    return job.log_owners.begin(
        {each.partition: LogOwner(each.server, 0, attempt.logs[each.server]) for each in attempt.map.owners}
    )


def _committed_of(origin: RestorePoint) -> Committed:
    return Committed(
        origin.number,
        origin.step,
        origin.data_ledger,
        floor=origin.floor,
        url=origin.url,
        created_s=origin.created_s,
        feedback=origin.feedback,
        trusted=origin.trusted,
    )


# ---- records


def entries(job: JobState) -> list[Entry]:
    """Records that rebuild checkpoints and recovery, after those of the deployment and the feeds."""
    return [
        *([("job_resumed", {})] if job.origin is not None else []),
        *job.book.entries(),
        *([] if job.log_owners is None else job.log_owners.entries()),
        *job.recovery.entries(),
    ]


def restore(job: JobState, kind: str, body: Body, now_ms: int) -> None:
    """Applies a record of `entries`, or of any map after the first. Raises DamagedRecord."""
    match kind:
        case "checkpoint_begun" | "checkpoint_committed" | "checkpoint_waived":
            job.book.restore(kind, body)
            # a checkpoint that was not begun here is from another run
            if kind == "checkpoint_committed" and body.number("draft"):
                committed(job, body.number("number"))
        case "logs_begun":
            require(job.log_owners is not None, "logs of a job that has none")
            assert job.log_owners is not None
            job.log_owners.restore(body)
        case "partitions_moved":
            require(job.book.committed is not None, "partitions are restored without a checkpoint")
            job.deployment.restore(kind, body)
            assert job.deployment.map is not None
            goes_back = job.recovery.goes_back
            job.recovery.restored()
            _has_begun(job)
            _take_map(job, job.deployment.map, goes_back=goes_back)
        case "partitions_placed_again":
            job.deployment.restore(kind, body)
            job.recovery.restored()
        case _:
            job.recovery.restore(kind, body, now_ms)
            if job.recovery.needed and can_begin_again(job):
                job.deployment.lose_values()
