"""Writes and restores checkpoints of jobs: servers write and read partitions, this process writes the manifests.

Owns: the order of these actions. Invariants: a manifest is written when all servers have reported that their files are
durable. A checkpoint of a synchronous job is of one moment (rule B7); in one of an asynchronous job each partition
comes with its own ledger (rule A9). What is restored was checked. Must not know: when and why a checkpoint is taken.
"""

from __future__ import annotations

import datetime
import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, TypeVar

from shardyard.checkpoints.convert import file_from_wire, tables_from_wire
from shardyard.checkpoints.library import CheckpointLibrary
from shardyard.checkpoints.manifest import (
    FileRef,
    Manifest,
    PartitionEntry,
    PartitionFile,
    ResidualFile,
    TableEntry,
    feedback_path,
    worker_name,
)
from shardyard.config.configuration import parse_job_settings
from shardyard.domain.consistency import UpdateMode
from shardyard.domain.errors import CheckpointDamaged, CheckpointNotFound, InvalidRequest, NotReady, ShardyardError
from shardyard.domain.failpoints import failpoint
from shardyard.domain.ids import Incarnation, PartitionId, Token, Version
from shardyard.domain.layout.layouts import PartitionMap
from shardyard.domain.push_names import DataShardSource
from shardyard.storage.storage import open_storage
from shardyard.wire import common_messages
from shardyard.wire.v1 import parameter_server_pb2 as wire
from shardyard_coordinator.core.effects import Base
from shardyard_coordinator.placement.placement import Server
from shardyard_coordinator.records import Body, DamagedRecord, Entry
from shardyard_coordinator.service.residual_collection import (
    ResidualCollection,
    ResidualCollections,
    ResidualRequest,
    Stage,
)
from shardyard_coordinator.service.server_client import ServerClient
from shardyard_coordinator.storage.checkpoint_book import Draft, Subject
from shardyard_coordinator.storage.restore_point import RestorePoint, of_record
from shardyard_coordinator.work.data_ledger import new_data_ledger
from shardyard_coordinator.work.step_ledger import StepLedger

R = TypeVar("R")

log = logging.getLogger("shardyard.coordinator")

STEP_WAIT_MS: Final = 2_000
"""How long servers wait for the step that was chosen ahead. Then the current step is taken."""
STEPS_AHEAD: Final = 2
STEPS_AHEAD_MAX: Final = 1 << 20
TRIES: Final = 12
HEARTBEATS_TO_HEAR: Final = 3
"""Workers have this many heartbeats to learn of a checkpoint: the next one tells them, unless it is lost or late."""
COPY_WAIT_MS: Final = 1_000
"""How long workers may take to copy their residuals: a push may be under way."""
FEEDBACK_WAIT_MS: Final = 5_000
"""How much longer than the servers' files the workers' files may take. They are begun earlier, and all together are no
larger than a worker's values."""
FILES_PER_ENTRY_MAX: Final = 64
"""A partition whose state lies in more files than this is written whole."""


@dataclass(frozen=True)
class _Ask:
    """What servers are asked to save. `base`: the checkpoint whose unchanged parts are not written again; 0: none."""

    subject: Subject
    map: PartitionMap
    draft: Draft
    folder: str
    base: int
    oldest: int
    logs: Collection[Incarnation]


@dataclass(frozen=True, slots=True)
class _Saved:
    """The files of a partition. `token`: the highest one in its ledger."""

    version: Version
    file: PartitionFile
    token: int
    tables: tuple[TableEntry, ...]


@dataclass(frozen=True, slots=True)
class Taken:
    """A checkpoint that was written as number `number`: the draft's, or the next free one. `step`: the step that it
    holds. `created_s`: seconds since 1970. `feedback`: the workers' residuals."""

    number: int
    step: int
    created_s: int
    feedback: tuple[ResidualFile, ...]


class CheckpointIO:
    """Safe for several threads, one job at a time each. `feedback`: how workers are asked for residuals.
    `heartbeat_ms`: how often they can be asked."""

    def __init__(
        self,
        servers: ServerClient,
        *,
        feedback: ResidualCollections,
        heartbeat_ms: int,
        now: Callable[[], datetime.datetime] | None = None,
    ) -> None:
        self._servers = servers
        self._feedback = feedback
        self._heartbeat_ms = heartbeat_ms
        self._now = now or (lambda: datetime.datetime.now(datetime.UTC))

    def take(
        self,
        subject: Subject,
        map_: PartitionMap,
        draft: Draft,
        *,
        url: str,
        base: int,
        keep: int,
        oldest: int = 0,
        logs: Collection[Incarnation] = (),
        keepers: Collection[Incarnation] = (),
        verdicts: Callable[[int], Sequence[Entry]] = lambda _: (),
    ) -> Taken:
        """Writes a checkpoint and prunes those before. `base`: the number of this run's newest committed one, 0 without
        any; `oldest`, `logs` and `keepers`: as in effects.TakeCheckpoint; `verdicts`: gives those on the steps
        before one that all partitions have reached. Raises NotReady, StorageUnavailable, CheckpointDamaged."""
        library = CheckpointLibrary(open_storage(url))
        draft = replace(draft, number=max(draft.number, library.next_number(subject.name)))
        former = library.load(subject.name, base) if base else None
        folder = f"{url.rstrip('/')}/{subject.name}"
        whole = former is None or any(len(entry.files) > FILES_PER_ENTRY_MAX for entry in former.partitions)
        ask = _Ask(subject, map_, draft, folder, 0 if whole else base, oldest, logs)
        if keepers:
            wanted = ResidualRequest(draft.number, url)
            with self._feedback.open(subject.job, wanted, keepers) as collecting:
                ready_ms = HEARTBEATS_TO_HEAR * self._heartbeat_ms
                self._feedback.await_copies(subject.job, collecting, ready_ms=ready_ms, copied_ms=COPY_WAIT_MS)
                saved = self._save(ask)
                self._feedback.await_files(subject.job, collecting, FEEDBACK_WAIT_MS)
                residuals = _found(library, subject, collecting)
                return self._commit(library, ask, former, saved, residuals, keep, verdicts)
        return self._commit(library, ask, former, self._save(ask), (), keep, verdicts)

    def _commit(
        self,
        library: CheckpointLibrary,
        ask: _Ask,
        former: Manifest | None,
        saved: Mapping[PartitionId, _Saved],
        remembered: tuple[ResidualFile, ...],
        keep: int,
        verdicts: Callable[[int], Sequence[Entry]],
    ) -> Taken:
        subject, draft = ask.subject, ask.draft
        entries = []
        for partition in range(len(subject.layout.partitions)):
            entries.append(_entry(subject, former, PartitionId(partition), saved[PartitionId(partition)]))
        # tokens were given since the ledger was copied, and those of another run must be higher
        before = draft.data_ledger.get("token", 0)
        assert isinstance(before, int)
        token = max(before, *(each.token for each in saved.values()))
        failpoint("checkpoint.before_manifest")
        step = min(entry.version.number for entry in entries) if subject.mode is UpdateMode.SYNC else draft.step
        created = self._now()
        ledger = {**draft.data_ledger, "token": token}
        decided = verdicts(step) if subject.mode is UpdateMode.SYNC else ()
        if decided:  # fewer steps were decided when the ledger was copied
            entries_then = ledger["entries"]
            assert isinstance(entries_then, list)
            ledger["entries"] = [*entries_then, *([kind, body] for kind, body in decided)]
        library.commit(
            Manifest(
                number=draft.number,
                job_name=subject.name,
                job=subject.job,
                seed=subject.seed,
                settings=subject.settings,
                mode=subject.mode,
                step=step,
                created=created.isoformat(timespec="seconds"),
                layout=subject.layout,
                partitions=tuple(entries),
                data_ledger=ledger,
                token_floor=draft.floor,
                feedback=remembered,
            )
        )
        failpoint("checkpoint.after_manifest")
        try:
            # this stays the job's newest until the job knows the new one, whatever others of its name are there
            library.prune(subject.name, keep, also=[former.number] if former is not None else [])
        except ShardyardError as error:  # the checkpoint counts anyway
            log.warning("old checkpoints of job %r were not deleted: %s", subject.name, error.what)
        return Taken(draft.number, step, max(0, int(created.timestamp())), remembered)

    def restore(
        self,
        subject: Subject,
        map_: PartitionMap,
        *,
        url: str,
        bases: Sequence[Base],
        life: int,
        partitions: Collection[PartitionId],
        working: Sequence[Incarnation] = (),
        begun: Sequence[tuple[DataShardSource, int]] = (),
        step: int = 0,
    ) -> None:
        """Gives servers their partitions under a new map. Those in `partitions` are restored from the checkpoint and
        the logs after it, in that life. If the first of `bases` is damaged, the next one, which leads to the same
        state, is tried. Repeating the call does nothing. `working`, `begun`, `step`: as in effects.RestorePartitions.
        Raises NotReady, CheckpointDamaged, CheckpointNotFound, LogDamaged, StorageUnavailable."""
        for base, rest in zip(bases, range(len(bases) - 1, -1, -1), strict=True):
            try:
                self._restore(
                    subject,
                    map_,
                    base,
                    url=url,
                    life=life,
                    partitions=partitions,
                    working=working,
                    begun=begun,
                    step=step,
                )
            except (CheckpointDamaged, CheckpointNotFound) as error:
                if not rest:
                    raise
                log.error("checkpoint %d cannot be restored (%s); the one before it is taken", base.number, error.what)
            else:
                return

    def _restore(
        self,
        subject: Subject,
        map_: PartitionMap,
        base: Base,
        *,
        url: str,
        life: int,
        partitions: Collection[PartitionId],
        working: Sequence[Incarnation],
        begun: Sequence[tuple[DataShardSource, int]],
        step: int,
    ) -> None:
        number = base.number
        manifest = CheckpointLibrary(open_storage(url)).load(subject.name, number)
        if manifest.layout != subject.layout:
            raise CheckpointDamaged(f"checkpoint {number} of job {subject.name!r} is of another layout")
        found = {
            entry.partition: replace(entry, version=Version(life, entry.version.number))
            for entry in manifest.partitions
            if entry.partition in partitions
        }
        folder = f"{url.rstrip('/')}/{subject.name}"

        def give(server: Server, owned: Sequence[PartitionId]) -> None:
            restored = [found[partition] for partition in owned if partition in found]
            self._servers.give(
                subject.job,
                server,
                generation=map_.generation,
                layout=subject.layout,
                partitions=owned,
                mode=subject.mode,
                logical_ranks=subject.logical_ranks,
                durability=subject.durability,
                staleness=subject.staleness,
                stale=subject.stale,
                clipping=subject.clipping,
                backup_workers=subject.backup_workers,
                switches=subject.switches,
                rows_at_once=subject.rows_at_once,
                working=working,
                folder=folder,
                base=base,
                restored=restored,
                wrote=manifest.job,
                begun=begun,
                step=step,
            )

        self._everywhere(map_, give)

    def find(self, url: str, name: str, number: int) -> tuple[RestorePoint, tuple[int, ...]]:
        """A checkpoint to begin with, every byte of it checked, and the newer ones that are damaged. Number 0: the
        newest that is whole. Raises CheckpointNotFound, CheckpointDamaged, StorageUnavailable, ConfigurationError if
        its settings are not this release's."""
        library = CheckpointLibrary(open_storage(url))
        wanted = [number] if number else list(reversed(library.numbers(name)))
        if not wanted:
            raise CheckpointNotFound(f"no checkpoint of job {name!r} in {url}")
        damaged: list[int] = []
        for each in wanted:
            findings = library.verify(name, each)
            if not findings:
                return _origin_of(library.load(name, each), url), tuple(damaged)
            damaged.append(each)
            log.warning("checkpoint %d of job %r: %s: %s", each, name, findings[0].path, findings[0].what)
        raise CheckpointDamaged(
            f"checkpoint {', '.join(map(str, damaged[:8]))} of job {name!r}: {findings[0].path}: {findings[0].what}"
        )

    # ---- inside

    def _save(self, ask: _Ask) -> dict[PartitionId, _Saved]:
        """What each partition was written as."""
        if ask.subject.mode is not UpdateMode.SYNC:
            return self._save_at(ask, None, 0)
        draft = ask.draft
        step, ahead, told = draft.step, 0, False
        for attempt in range(TRIES):
            try:
                return self._save_at(ask, step, attempt)
            except InvalidRequest as error:
                if "newest" not in error.facts:
                    raise
                # it has passed: the one that stands now, and if workers are taking steps, one ahead of them
                step, told = int(error.facts["newest"]) + max(ahead, int("gathering" in error.facts)), True
                ahead = min(4 * max(ahead, STEPS_AHEAD), STEPS_AHEAD_MAX)
            except NotReady:
                if told and ahead == 0:
                    raise
                # nobody takes steps any more, or the job went back since: it is told where it stands
                step, ahead = 0, 0
        raise NotReady(
            f"checkpoint {draft.number} of job {ask.subject.name!r}: no step could be named ahead of the workers"
        )

    def _save_at(self, ask: _Ask, step: int | None, attempt: int) -> dict[PartitionId, _Saved]:
        def save(server: Server, owned: Sequence[PartitionId]) -> list[wire.SavedPartition]:
            reply = self._servers.save(
                ask.subject.job,
                server,
                generation=ask.map.generation,
                folder=ask.folder,
                number=ask.draft.number,
                step=step,
                base=ask.base,
                wait_ms=STEP_WAIT_MS,
                oldest=ask.oldest,
                logs=ask.logs,
                attempt=attempt,
            )
            if sorted(each.partition for each in reply.partitions) != sorted(owned):
                raise NotReady(f"server {server.incarnation} has saved other partitions than it was given")
            return list(reply.partitions)

        found = {}
        for saved in self._everywhere(ask.map, save):
            for each in saved:
                version = common_messages.version_from_wire(each.version)
                found[PartitionId(each.partition)] = _Saved(
                    version, file_from_wire(each.file), each.token, tables_from_wire(each.tables)
                )
        return found

    def _everywhere(self, map_: PartitionMap, ask: Callable[[Server, Sequence[PartitionId]], R]) -> list[R]:
        """Asks all servers of a map at once. Raises the first refusal after all have answered."""
        asked = [
            partial(ask, Server(server, owned[0].address), [owner.partition for owner in owned])
            for server, owned in map_.by_server().items()
        ]
        with ThreadPoolExecutor(len(asked), "archive") as pool:
            futures = [pool.submit(each) for each in asked]
        return [future.result() for future in futures]


def _origin_of(manifest: Manifest, url: str) -> RestorePoint:
    settings = parse_job_settings(json.dumps(dict(manifest.settings)))
    token = manifest.data_ledger.get("token", 0)
    origin = RestorePoint(
        manifest.job_name,
        url,
        manifest.number,
        manifest.job,
        manifest.step,
        manifest.mode,
        settings.logical_rank_count,
        manifest.seed,
        manifest.layout,
        manifest.data_ledger,
        Token(token if isinstance(token, int) else 0),
        manifest.token_floor,
        max(0, int(datetime.datetime.fromisoformat(manifest.created).timestamp())),
        manifest.feedback,
    )
    ranks, backup_workers = settings.logical_rank_count, settings.consistency.backup_workers
    sync = manifest.mode is UpdateMode.SYNC
    feeds = StepLedger(logical_ranks=ranks, backup_workers=backup_workers) if sync else new_data_ledger()
    try:
        feeds.begin_with(manifest.data_ledger)
        # as the journal will return it
        of_record(Body(json.loads(json.dumps(origin.entry[1]))))
    except DamagedRecord as error:
        raise CheckpointDamaged(f"checkpoint {manifest.number} of job {manifest.job_name!r}: {error}") from error
    return origin


def _found(library: CheckpointLibrary, subject: Subject, collecting: ResidualCollection) -> tuple[ResidualFile, ...]:
    """The workers' files that are on the storage. A worker on another machine may have written to a folder of its own.
    Raises StorageUnavailable."""
    number, found = collecting.wanted.number, []
    for worker in sorted(collecting.workers):
        written, name = collecting.files.get(worker), worker_name(worker)
        if written is not None:
            file = FileRef(feedback_path(number, name), written)
            if library.has_file(subject.name, file):
                found.append(ResidualFile(name, file))
                continue
            why = f"{library.storage.locate(subject.name)}/{file.path} is not there, in its length"
        elif collecting.stages.get(worker) is Stage.ENDED and worker not in collecting.failures:
            continue
        else:
            why = collecting.failures.get(worker, "it was not written in time")
        what = f"checkpoint {number} of job {subject.name!r} lacks what worker {worker} has not sent yet"
        log.warning("%s: %s", what, why)
    return tuple(found)


def _entry(subject: Subject, former: Manifest | None, partition: PartitionId, saved: _Saved) -> PartitionEntry:
    blocks, file = len(subject.layout.partitions[partition].blocks), saved.file
    if len(file.blocks) == blocks:
        return PartitionEntry(partition, saved.version, (file,), saved.tables)
    if former is None:
        raise NotReady(f"partition {partition} was written without {blocks - len(file.blocks)} of its blocks")
    return former.partitions[partition].incremental(saved.version, file.file, file.blocks, saved.tables)
