"""Writes and restores checkpoints of jobs: servers write and read partitions, this process writes the manifests.

Owns: the order of these actions. Invariants: a manifest is written when all servers have reported that their files are
durable. A checkpoint of a synchronous job is of one moment (rule B7); in one of an asynchronous job each partition
comes with its own ledger (rule A9). Files are checked before they are restored. Must not know: when and why a
checkpoint is taken.
"""

from __future__ import annotations

import datetime
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Final, TypeVar

from shardyard.checkpoints.convert import file_from_wire, tables_from_wire
from shardyard.checkpoints.library import CheckpointLibrary
from shardyard.checkpoints.manifest import (
    FileRef,
    Manifest,
    PartitionEntry,
    ResidualFile,
    feedback_path,
    worker_name,
)
from shardyard.config.configuration import parse_job_settings
from shardyard.domain.consistency import UpdateMode
from shardyard.domain.errors import CheckpointDamaged, CheckpointNotFound, InvalidRequest, NotReady, ShardyardError
from shardyard.domain.ids import PartitionId, Token, Version
from shardyard.runtime.failpoints import failpoint
from shardyard.security.authority import Authority
from shardyard.storage.access import StorageAccess
from shardyard.wire import common_messages
from shardyard.wire.v1 import parameter_server_pb2 as wire
from shardyard_coordinator.core.effects import Base, JobSpec, RestorePartitions, TakeCheckpoint
from shardyard_coordinator.core.events import CheckpointTaken
from shardyard_coordinator.placement.placement import Server, servers_of
from shardyard_coordinator.records import Body, DamagedRecord, Entry
from shardyard_coordinator.service.residual_collection import (
    ResidualCollection,
    ResidualCollections,
    ResidualRequest,
    Stage,
)
from shardyard_coordinator.service.server_client import ServerClient
from shardyard_coordinator.storage.restore_point import RestorePoint, of_record
from shardyard_coordinator.work import checkpoint_copy
from shardyard_coordinator.work.data_ledger import new_data_ledger
from shardyard_coordinator.work.step_ledger import StepLedger

R = TypeVar("R")

log = logging.getLogger("shardyard.coordinator")

STEP_WAIT_MS: Final = 2_000
"""How long servers wait for the step that was chosen ahead. Then they save the current step."""
STEPS_AHEAD: Final = 2
STEPS_AHEAD_MAX: Final = 1 << 20
TRIES: Final = 12
HEARTBEATS_TO_HEAR: Final = 3
"""Workers have this many heartbeats to learn of a checkpoint: the next one tells them, unless it is lost or late."""
COPY_WAIT_MS: Final = 1_000
"""How long workers may take to copy their residuals: a push may be under way."""
FEEDBACK_WAIT_MS: Final = 5_000
"""How much longer than the servers' files the workers' files may take. Workers begin earlier, and all their files
together are no larger than one worker's values."""
FILES_PER_ENTRY_MAX: Final = 64
"""A partition with more files than this is written whole."""


Verdicts = Callable[[int], Sequence[Entry]]
"""Returns the records of the verdicts on the steps before one that all partitions have reached."""


class CheckpointIO:
    """Safe for several threads, one job at a time each. `feedback`: how workers are asked for residuals.
    `heartbeat_ms`: how often they can be asked. `access`: which URLs are used. `authority`: signs manifests; None: they
    are not signed, and signatures are not checked."""

    def __init__(
        self,
        servers: ServerClient,
        *,
        feedback: ResidualCollections,
        heartbeat_ms: int,
        access: StorageAccess | None = None,
        authority: Authority | None = None,
        now: Callable[[], datetime.datetime] | None = None,
    ) -> None:
        self._servers = servers
        self._feedback = feedback
        self._heartbeat_ms = heartbeat_ms
        self._access = access or StorageAccess()
        self._authority = authority
        self._now = now or (lambda: datetime.datetime.now(datetime.UTC))

    def take(self, wanted: TakeCheckpoint, verdicts: Verdicts = lambda _: ()) -> CheckpointTaken:
        """Writes a checkpoint and deletes old ones. Its number is the draft's, or the next free one. Raises NotReady,
        StorageUnavailable, CheckpointDamaged."""
        library = self._library(wanted.url)
        spec, begun = wanted.spec, wanted.draft.number
        former = library.load(spec.settings.name, wanted.base, trusted=wanted.trusted) if wanted.base else None
        whole = former is None or any(len(entry.files) > FILES_PER_ENTRY_MAX for entry in former.partitions)
        number = max(begun, library.next_number(spec.settings.name))
        wanted = replace(wanted, draft=replace(wanted.draft, number=number), base=0 if whole else wanted.base)
        if wanted.keepers:
            asked = ResidualRequest(number, wanted.url)
            with self._feedback.open(spec.job, asked, wanted.keepers) as collecting:
                ready_ms = HEARTBEATS_TO_HEAR * self._heartbeat_ms
                self._feedback.await_copies(spec.job, collecting, ready_ms=ready_ms, copied_ms=COPY_WAIT_MS)
                saved = self._save(wanted)
                self._feedback.await_files(spec.job, collecting, FEEDBACK_WAIT_MS)
                residuals = _found(library, spec.settings.name, collecting)
                manifest = self._commit(library, wanted, former, saved, residuals, verdicts)
        else:
            manifest = self._commit(library, wanted, former, self._save(wanted), (), verdicts)
        return CheckpointTaken(spec.job, begun, number, manifest.step, _created_s(manifest), manifest.feedback)

    def _commit(
        self,
        library: CheckpointLibrary,
        wanted: TakeCheckpoint,
        former: Manifest | None,
        saved: Mapping[PartitionId, wire.SavedPartition],
        residuals: tuple[ResidualFile, ...],
        verdicts: Verdicts,
    ) -> Manifest:
        spec, draft = wanted.spec, wanted.draft
        entries = tuple(_entry(spec, former, part.partition, saved[part.partition]) for part in spec.layout.partitions)
        # tokens were given since the ledger was copied, and those of another run must be higher
        before = draft.data_ledger.get("token", 0)
        assert isinstance(before, int)
        ledger = {**draft.data_ledger, "token": max(before, *(each.token for each in saved.values()))}
        failpoint("checkpoint.before_manifest")
        step = draft.step
        if spec.mode is UpdateMode.SYNC:
            step = min(entry.version.number for entry in entries)
            decided = verdicts(step)
            if decided:  # fewer steps were decided when the ledger was copied
                entries_then = ledger["entries"]
                assert isinstance(entries_then, list)
                ledger["entries"] = [*entries_then, *([kind, body] for kind, body in decided)]
        manifest = Manifest(
            number=draft.number,
            job_name=spec.settings.name,
            job=spec.job,
            seed=spec.settings.seed,
            settings=spec.settings.model_dump(mode="json"),
            mode=spec.mode,
            step=step,
            created=self._now().isoformat(timespec="seconds"),
            layout=spec.layout,
            partitions=entries,
            data_ledger=ledger,
            token_floor=draft.floor,
            feedback=residuals,
            yard="" if self._authority is None else self._authority.yard,
        )
        library.commit(manifest, None if self._authority is None else self._authority.sign)
        failpoint("checkpoint.after_manifest")
        try:
            # this stays the job's newest until the job knows the new one, whatever others of its name are there
            library.prune(manifest.job_name, wanted.keep, also=[former.number] if former is not None else [])
        except ShardyardError as error:  # the checkpoint counts anyway
            log.warning("old checkpoints of job %r were not deleted: %s", manifest.job_name, error.what)
        return manifest

    def restore(self, wanted: RestorePartitions) -> None:
        """Gives servers their partitions under a new map, and restores those in `wanted.partitions`. If the first of
        the bases is damaged, the next one, which leads to the same state, is used. Repeating the call does nothing.
        Raises NotReady, CheckpointDamaged, CheckpointNotFound, LogDamaged, StorageUnavailable."""
        for base in wanted.bases:
            try:
                self._restore(wanted, base)
                return
            except (CheckpointDamaged, CheckpointNotFound) as error:
                if base is wanted.bases[-1]:
                    raise
                log.error("checkpoint %d cannot be restored (%s); the one before it is used", base.number, error.what)

    def _restore(self, wanted: RestorePartitions, base: Base) -> None:
        name = wanted.spec.settings.name
        manifest = self._library(wanted.url).load(name, base.number, trusted=base.trusted)
        if manifest.layout != wanted.spec.layout:
            raise CheckpointDamaged(f"checkpoint {base.number} of job {name!r} is of another layout")
        found = {
            entry.partition: replace(entry, version=Version(wanted.life, entry.version.number))
            for entry in manifest.partitions
            if entry.partition in wanted.partitions
        }

        def restore(server: Server, owned: Sequence[PartitionId]) -> None:
            entries = [found[partition] for partition in owned if partition in found]
            self._servers.restore(wanted, server, owned, base=base, entries=entries, wrote=manifest.job)

        _on_all(servers_of(wanted.map), restore)

    def find(self, url: str, name: str, number: int, *, trust: bool = False) -> tuple[RestorePoint, tuple[int, ...]]:
        """A checkpoint to begin with, every byte of it checked, and the newer ones that are damaged or not signed.
        Number 0: the newest that is whole. `trust`: it needs no signature. Raises CheckpointNotFound,
        CheckpointDamaged, StorageUnavailable, ConfigurationError if its settings are not this release's."""
        library = self._library(url, checked=not trust)
        wanted = [number] if number else list(reversed(library.numbers(name)))
        if not wanted:
            raise CheckpointNotFound(f"no checkpoint of job {name!r} in {url}")
        damaged: list[int] = []
        newest: CheckpointDamaged | None = None
        for each in wanted:
            findings = library.verify(name, each)
            try:
                manifest, digest = library.load_sealed(name, each)
                if findings:
                    raise CheckpointDamaged(f"{findings[0].path}: {findings[0].what}")
            except CheckpointDamaged as error:
                newest = newest or error
                damaged.append(each)
                log.warning("checkpoint %d of job %r: %s", each, name, error.what)
            else:
                return _origin_of(manifest, url, digest if trust else ""), tuple(damaged)
        assert newest is not None
        raise CheckpointDamaged(
            f"checkpoint {', '.join(map(str, damaged[:8]))} of job {name!r}: {newest.what}",
            why=newest.why_text,
            todo=newest.todo_text,
        )

    # ---- inside

    def _library(self, url: str, *, checked: bool = True) -> CheckpointLibrary:
        keys = None if self._authority is None or not checked else self._authority.keys
        return CheckpointLibrary(self._access.open(url), keys)

    def _save(self, wanted: TakeCheckpoint) -> dict[PartitionId, wire.SavedPartition]:
        """What each partition was written as."""
        if wanted.spec.mode is not UpdateMode.SYNC:
            return self._save_at(wanted, None, 0)
        step, ahead, is_known = wanted.draft.step, 0, False
        for attempt in range(TRIES):
            try:
                return self._save_at(wanted, step, attempt)
            except InvalidRequest as error:
                if "newest" not in error.facts:
                    raise
                # the step has passed: take the present one, or one ahead of it while workers take steps
                step, is_known = int(error.facts["newest"]) + max(ahead, int("gathering" in error.facts)), True
                ahead = min(4 * max(ahead, STEPS_AHEAD), STEPS_AHEAD_MAX)
            except NotReady:
                if is_known and ahead == 0:
                    raise
                # no worker takes steps any more, or the job went back since: a server will say the present step
                step, ahead = 0, 0
        number, name = wanted.draft.number, wanted.spec.settings.name
        raise NotReady(f"checkpoint {number} of job {name!r}: no step could be named ahead of the workers")

    def _save_at(
        self, wanted: TakeCheckpoint, step: int | None, attempt: int
    ) -> dict[PartitionId, wire.SavedPartition]:
        def save(server: Server, owned: Sequence[PartitionId]) -> Sequence[wire.SavedPartition]:
            saved = self._servers.save(wanted, server, step=step, wait_ms=STEP_WAIT_MS, attempt=attempt).partitions
            if sorted(each.partition for each in saved) != sorted(owned):
                raise NotReady(f"server {server.incarnation} has saved other partitions than it was given")
            return saved

        servers, sealed = servers_of(wanted.map), wanted.draft.sealed
        if step is None and sealed:  # last, so that pushes wait for nothing else
            staying = [each for each in servers if each[0].incarnation not in sealed]
            leaving = [each for each in servers if each[0].incarnation in sealed]
            found = [*_on_all(staying, save), *_on_all(leaving, save)]
        else:
            found = _on_all(servers, save)
        return {PartitionId(each.partition): each for saved in found for each in saved}


Owned = tuple[Server, Sequence[PartitionId]]


def _on_all(servers: Sequence[Owned], call: Callable[[Server, Sequence[PartitionId]], R]) -> list[R]:
    """Calls these servers at once. Raises the first refusal after all have answered."""
    if not servers:
        return []
    with ThreadPoolExecutor(len(servers), "checkpoint-io") as pool:
        futures = [pool.submit(call, server, owned) for server, owned in servers]
    return [future.result() for future in futures]


def _created_s(manifest: Manifest) -> int:
    return max(0, int(datetime.datetime.fromisoformat(manifest.created).timestamp()))


def _origin_of(manifest: Manifest, url: str, trusted: str = "") -> RestorePoint:
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
        _created_s(manifest),
        manifest.feedback,
        trusted,
    )
    ranks, backup_workers = settings.logical_rank_count, settings.consistency.backup_workers
    sync = manifest.mode is UpdateMode.SYNC
    feeds = StepLedger(logical_ranks=ranks, backup_workers=backup_workers) if sync else new_data_ledger()
    try:
        checkpoint_copy.begin_with(feeds, manifest.data_ledger)
        # as the journal will return it
        of_record(Body(json.loads(json.dumps(origin.entry[1]))))
    except DamagedRecord as error:
        raise CheckpointDamaged(f"checkpoint {manifest.number} of job {manifest.job_name!r}: {error}") from error
    return origin


def _found(library: CheckpointLibrary, job: str, collecting: ResidualCollection) -> tuple[ResidualFile, ...]:
    """The workers' files that are on the storage. A worker on another machine may have written to a folder of its own.
    Raises StorageUnavailable."""
    number, found = collecting.wanted.number, []
    for worker in sorted(collecting.workers):
        written, name = collecting.files.get(worker), worker_name(worker)
        if written is not None:
            file = FileRef(feedback_path(number, name), written)
            if library.has_file(job, file):
                found.append(ResidualFile(name, file))
                continue
            why = f"{library.storage.locate(job)}/{file.path} is missing, or has another length"
        elif collecting.stages.get(worker) is Stage.ENDED and worker not in collecting.failures:
            continue
        else:
            why = collecting.failures.get(worker, "it was not written in time")
        what = f"checkpoint {number} of job {job!r} lacks the residual of worker {worker}"
        log.warning("%s: %s", what, why)
    return tuple(found)


def _entry(
    spec: JobSpec, former: Manifest | None, partition: PartitionId, saved: wire.SavedPartition
) -> PartitionEntry:
    blocks, file = len(spec.layout.partitions[partition].blocks), file_from_wire(saved.file)
    version, tables = common_messages.version_from_wire(saved.version), tables_from_wire(saved.tables)
    if len(file.blocks) == blocks:
        return PartitionEntry(partition, version, (file,), tables)
    if former is None:
        raise NotReady(f"partition {partition} was written without {blocks - len(file.blocks)} of its blocks")
    return former.partitions[partition].incremental(version, file.file, file.blocks, tables)
