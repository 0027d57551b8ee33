"""All checkpoints below one URL: lists, reads, checks, commits and prunes them.

    <URL>/<job>/<number, 12 digits>/manifest.json             written last
    <URL>/<job>/<number, 12 digits>/partition-0003-<server>.safetensors
    <URL>/<job>/<number, 12 digits>/rows-0003-0000-<server>-<cut>-000000.safetensors
    <URL>/<job>/<number, 12 digits>/worker-<name>.safetensors

A folder with a manifest is a checkpoint. Invariants: a manifest is written once, after all files that it names; a file
that a kept manifest names is not deleted; no value is returned before its digest was checked, and that of the manifest
is signed by the yard, if the yard is known. Only one process at a time commits and prunes the checkpoints of a job (the
coordinator's journal ensures it). Any process may read. Must not know: who takes checkpoints, and when.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from shardyard.checkpoints import manifest as manifests
from shardyard.checkpoints import partition_file, residual_file
from shardyard.checkpoints.manifest import (
    FileRef,
    Manifest,
    PartitionEntry,
    PartitionFile,
    ResidualFile,
    check_job_name,
    feedback_path,
    folder_name,
)
from shardyard.checkpoints.partition_file import BlockState, PartitionState
from shardyard.checkpoints.residual_file import State
from shardyard.checkpoints.table_state import TableState, states_of
from shardyard.domain.errors import CheckpointDamaged, CheckpointNotFound, InvalidRequest
from shardyard.domain.ids import PartitionId, Version
from shardyard.domain.layout.layouts import JobLayout
from shardyard.domain.variables import VariableSpec
from shardyard.security.signatures import YardKeys
from shardyard.storage import tensors
from shardyard.storage.json_reader import Sealed
from shardyard.storage.storage import TEMPORARY_SUFFIX, Storage
from shardyard.storage.tensors import Array, Contents

KEPT_MIN: Final = 2
"""How many checkpoints are kept at least (rule A8)."""

_NUMBER: Final = re.compile(r"[0-9]{12}")
_TEMPORARY: Final = re.compile(rf"\.[^/]+{re.escape(TEMPORARY_SUFFIX)}")


@dataclass(frozen=True, slots=True)
class Listed:
    """A committed checkpoint. If its manifest cannot be read, it has `damage` instead. `signature`: "valid" or "wrong"
    for the yard of the library, "unchecked" if the library knows no yard, "none" if there is none."""

    number: int
    manifest: Manifest | None
    damage: CheckpointDamaged | None = None
    signature: str = "none"


@dataclass(frozen=True, slots=True)
class Finding:
    """What is wrong with a file of a checkpoint. `path`: from the folder of the job."""

    number: int
    path: str
    what: str


@dataclass(frozen=True, slots=True)
class Pruned:
    checkpoints: tuple[int, ...]
    """The numbers of the checkpoints that were deleted."""
    files: int
    nbytes: int


class CheckpointLibrary:
    """As safe for several threads as its storage. `yard`: the keys by which manifests must be signed; None: signatures
    are not checked. All methods raise StorageUnavailable, and InvalidRequest for a name that no job can have."""

    def __init__(self, storage: Storage, yard: YardKeys | None = None) -> None:
        self.storage = storage
        self.yard = yard

    # ---- listing

    def jobs(self) -> tuple[str, ...]:
        """Names of the jobs that have a checkpoint, or began one."""
        return tuple(name for name in self.storage.list_folders("") if manifests.JOB_NAME.fullmatch(name))

    def numbers(self, job: str) -> tuple[int, ...]:
        """The numbers of the committed checkpoints, ascending."""
        return tuple(number for number, files in self._folders(job) if manifests.NAME in files)

    def next_number(self, job: str) -> int:
        """The number for the next checkpoint. It is never one whose folder exists, even without a manifest."""
        taken = [int(name) for name in self._folder_names(job)]
        return max(taken, default=0) + 1

    def list_checkpoints(self, job: str) -> tuple[Listed, ...]:
        """The committed checkpoints, the oldest first, signed or not."""
        found = []
        for number in self.numbers(job):
            try:
                sealed = self._unseal(job, number)
                found.append(Listed(number, _manifest_of(sealed, job, number), signature=self._signature(sealed)))
            except CheckpointDamaged as error:
                found.append(Listed(number, None, error))
        return tuple(found)

    def load(self, job: str, number: int | None = None, *, trusted: str = "") -> Manifest:
        """The manifest of a checkpoint; None: of the newest. If the newest one is damaged, this raises: to use an older
        one instead would set back the whole job (rule A8). `trusted`: the digest that it may have without a signature.

        Raises CheckpointNotFound, CheckpointDamaged.
        """
        return self.load_sealed(job, number, trusted=trusted)[0]

    def load_sealed(self, job: str, number: int | None = None, *, trusted: str = "") -> tuple[Manifest, str]:
        """As `load`, with the digest of the manifest."""
        if number is None:
            numbers = self.numbers(job)
            if not numbers:
                raise CheckpointNotFound(f"no checkpoint of job {job!r} in {self.storage.url}")
            number = numbers[-1]
        sealed = self._unseal(job, number)
        if self.yard is not None and sealed.digest != trusted and self._signature(sealed) != "valid":
            place = shlex.quote(self.storage.url)
            command = f"shardyard checkpoint restore {job} --number {number} --url {place} --trust"
            raise CheckpointDamaged(
                f"{sealed.where} is not signed by this yard ({self.yard.yard})",
                why="it was changed, or it is of another yard, or of one without TLS or with other keys",
                todo=f"if you trust what lies there: `{command}`; `checkpoint verify` and `export` have --trust too",
            )
        return _manifest_of(sealed, job, number), sealed.digest

    def _unseal(self, job: str, number: int) -> Sealed:
        path = f"{_folder(job, number)}/{manifests.NAME}"
        text = self.storage.read_whole(path, manifests.MANIFEST_BYTES_MAX)
        return manifests.check_digest(text, self.storage.locate(path))

    def _signature(self, sealed: Sealed) -> str:
        """As in `Listed`."""
        if not sealed.signature:
            return "none"
        if self.yard is None:
            return "unchecked"
        is_signed = self.yard.have_signed(manifests.signed_text(sealed.digest), sealed.signature)
        return "valid" if is_signed else "wrong"

    def _load_unchecked(self, job: str, number: int) -> Manifest:
        """Whatever the signature is. Raises CheckpointNotFound, CheckpointDamaged."""
        return _manifest_of(self._unseal(job, number), job, number)

    # ---- writing

    def write_feedback(self, job: str, number: int, worker: str, state: State) -> ResidualFile:
        """Writes what a worker has not sent yet (its error feedback's `state_dict`) for the checkpoint that is being
        taken. Raises TooLarge."""
        path = feedback_path(number, worker)
        written = self.storage.write(f"{check_job_name(job)}/{path}", residual_file.pieces(worker, state))
        return ResidualFile(worker, FileRef(path, written))

    def has_file(self, job: str, file: FileRef) -> bool:
        """Whether a file exists and has the length that its writer reported."""
        try:
            return self.storage.size(f"{check_job_name(job)}/{file.path}") == file.written.nbytes
        except CheckpointNotFound:
            return False

    def commit(self, manifest: Manifest, sign: Callable[[bytes], bytes] | None = None) -> None:
        """Writes the manifest, and with it completes the checkpoint. Its number must be above all others. `sign`: signs
        as the manifest's yard.

        Raises InvalidRequest for a manifest that could not be restored from, CheckpointNotFound or CheckpointDamaged if
        a file that it names does not exist or has another length, TooLarge.
        """
        job = manifest.job_name
        newest = max(self.numbers(job), default=0)
        if manifest.number <= newest:
            raise InvalidRequest(
                f"cannot commit checkpoint {manifest.number} of job {job!r}, whose newest is {newest}",
                why="a committed checkpoint is never changed",
                todo="take the next number",
            )
        text = manifests.encode(manifest, sign)
        sizes: dict[int, dict[str, int]] = {}
        for file in manifest.files():
            if file.number not in sizes:
                sizes[file.number] = self.storage.list_files(_folder(job, file.number))
            self._check_size(job, file, sizes[file.number])
        self.storage.write(f"{_folder(job, manifest.number)}/{manifests.NAME}", [text])

    def prune(self, job: str, keep: int, also: Iterable[int] = ()) -> Pruned:
        """Deletes what the newest `keep` checkpoints, and those with the numbers `also`, do not need: first manifests,
        then our files that no kept manifest names. Of earlier runs of the job, the newest checkpoint that has a step
        stays too. Files that are newer than the newest committed checkpoint stay, since they are being written.

        Raises InvalidRequest for fewer than KEPT_MIN. Raises CheckpointDamaged, and deletes nothing, if a manifest that
        is to be kept cannot be read, because it is then unknown which files it needs.
        """
        if keep < KEPT_MIN:
            raise InvalidRequest(
                f"cannot prune to {keep} checkpoints",
                why=f"at least {KEPT_MIN} are kept, in case the newest is damaged",
            )
        folders = self._folders(job)
        committed = [number for number, files in folders if manifests.NAME in files]
        kept = {*committed[-keep:], *(number for number in also if number in committed)}
        if len(committed) > keep:
            kept.update(self._last_of_earlier_runs(job, committed))
        needed = {f"{folder_name(number)}/{manifests.NAME}" for number in kept}
        for number in sorted(kept):
            needed |= {file.path for file in self._load_unchecked(job, number).files()}
        old = [number for number in committed if number not in kept]
        deleted = nbytes = 0
        for number, files in folders:
            if number in old:
                self.storage.delete_file(f"{_folder(job, number)}/{manifests.NAME}")
                deleted, nbytes = deleted + 1, nbytes + files.pop(manifests.NAME)
        for number, files in folders:
            if not committed or number > committed[-1]:
                continue
            folder = _folder(job, number)
            idle = [name for name in files if f"{folder_name(number)}/{name}" not in needed and _is_ours(name)]
            if len(idle) == len(files) and not self.storage.list_folders(folder):
                self.storage.delete_folder(folder)
            else:
                for name in idle:
                    self.storage.delete_file(f"{folder}/{name}")
            deleted, nbytes = deleted + len(idle), nbytes + sum(files[name] for name in idle)
        return Pruned(tuple(old), deleted, nbytes)

    def _last_of_earlier_runs(self, job: str, committed: Sequence[int]) -> Iterator[int]:
        """A run that fails soon has checkpoints too, and must not cost what an earlier one has learned."""
        run = self._load_unchecked(job, committed[-1]).job
        for number in reversed(committed[:-1]):
            try:
                found = self._load_unchecked(job, number)
            except (CheckpointDamaged, CheckpointNotFound):
                continue
            if found.job != run and found.step:
                yield number
                return

    # ---- reading

    def tables(self, manifest: Manifest, table: int) -> tuple[TableState, ...]:
        """A table's part in each partition. Nothing is read yet."""
        folder = check_job_name(manifest.job_name)
        return tuple(
            TableState(self.storage, folder, manifest.layout, entry.partition, table, entry.tables[table])
            for entry in manifest.partitions
        )

    def load_feedback(self, job: str, file: ResidualFile, layout: JobLayout) -> State:
        """What a worker had not sent yet, with every byte checked. `layout`: that of the checkpoint.

        Raises CheckpointDamaged, CheckpointNotFound.
        """
        path = f"{check_job_name(job)}/{file.file.path}"
        return residual_file.read(self.storage, path, file.file.written, layout, file.worker)

    def export_state(self, manifest: Manifest) -> Iterator[tuple[str, Array]]:
        """Yields each variable as a whole, parameters and buffers, in the order of registration; then tables, as
        `export_table` returns them.

        Raises CheckpointDamaged, CheckpointNotFound.
        """
        variables = Variables(self.storage, manifest)
        for index, spec in enumerate(manifest.layout.variables):
            yield spec.name, variables.read(index)
        for table in range(len(manifest.layout.tables)):
            yield from self.export_table(manifest, table).items()

    def export_table(self, manifest: Manifest, table: int) -> dict[str, Array]:
        """A table as `model.state_dict()` has it: `PATH.ids`, ascending, `PATH.rows` and `PATH.seed`, from which ids
        without a row get the same initial values again. All of it is in memory.

        Raises CheckpointDamaged, CheckpointNotFound.
        """
        states, settings = self.tables(manifest, table), manifest.layout.tables[table]
        ids = np.empty(sum(state.entry.rows for state in states), np.int64)
        rows = np.empty((ids.size, settings.dim), np.float32)
        end = 0
        for state in states:
            for found, values in state.rows():
                ids[end : end + found.size], rows[end : end + found.size] = found, values
                end += found.size
        order = np.argsort(ids)
        return {
            f"{settings.path}.ids": ids[order],
            f"{settings.path}.rows": rows[order],
            f"{settings.path}.seed": np.array(settings.seed, np.int64),
        }

    # ---- checking

    def verify(self, job: str, number: int | None = None) -> tuple[Finding, ...]:
        """Reads every byte of one checkpoint, or of all (None), and returns what is wrong. Empty: everything can be
        restored. Raises CheckpointNotFound for a number that does not exist."""
        if number is not None and number not in self.numbers(job):
            raise CheckpointNotFound(f"no checkpoint {number} of job {job!r} in {self.storage.url}")
        damage: dict[Hashable, str | None] = {}
        found: list[Finding] = []
        for each in self.numbers(job) if number is None else (number,):
            try:
                manifest = self.load(job, each)
            except (CheckpointDamaged, CheckpointNotFound) as error:
                found.append(Finding(each, f"{folder_name(each)}/{manifests.NAME}", error.what))
                continue
            for path, key, check in _checks(self, manifest):
                if key not in damage:
                    damage[key] = _damage_found_by(check)
                what = damage[key]
                if what is not None:
                    found.append(Finding(each, path, what))
        return tuple(found)

    def _check_size(self, job: str, file: FileRef, sizes: dict[str, int]) -> None:
        where = self.storage.locate(f"{check_job_name(job)}/{file.path}")
        size = sizes.get(file.path.rpartition("/")[2])
        if size is None:
            raise CheckpointNotFound(f"{where} is not there")
        if size != file.written.nbytes:
            raise CheckpointDamaged(f"{where} has {size} bytes; expected {file.written.nbytes}")

    def _folder_names(self, job: str) -> list[str]:
        return [name for name in self.storage.list_folders(check_job_name(job)) if _NUMBER.fullmatch(name)]

    def _folders(self, job: str) -> list[tuple[int, dict[str, int]]]:
        """Number and files of each folder, ascending."""
        return [
            (int(name), self.storage.list_files(f"{check_job_name(job)}/{name}")) for name in self._folder_names(job)
        ]


def _checks(library: CheckpointLibrary, manifest: Manifest) -> Iterator[tuple[str, Hashable, Callable[[], object]]]:
    """Each file of a checkpoint: its path, what identifies its check (checkpoints share files), and the check."""
    storage, layout, folder = library.storage, manifest.layout, check_job_name(manifest.job_name)
    for entry in manifest.partitions:
        for place, each in enumerate(entry.files):
            version = None if place else entry.version
            check = partial(_check_partition_file, storage, manifest, entry.partition, each, version)
            yield each.file.path, (each, version), check
    for table in range(len(layout.tables)):
        for state in library.tables(manifest, table):
            for file in state.entry.files:
                yield file.path, file, partial(state.read, file)
    for kept in manifest.feedback:
        path, written = f"{folder}/{kept.file.path}", kept.file.written
        yield (
            kept.file.path,
            kept.file,
            partial(residual_file.read, storage, path, written, layout, kept.worker, keep=False),
        )


def _check_partition_file(
    storage: Storage, manifest: Manifest, partition: PartitionId, each: PartitionFile, version: Version | None
) -> None:
    """`version`: the one that the file must have. Raises CheckpointDamaged, CheckpointNotFound."""
    path = f"{check_job_name(manifest.job_name)}/{each.file.path}"
    head = partition_file.check(storage, path, each.file.written, manifest.layout, partition, each.blocks)
    if version is not None and head.version != version:
        raise CheckpointDamaged(
            f"{storage.locate(path)} is of version {head.version.life}.{head.version.number}; the manifest of"
            f" checkpoint {manifest.number} says {version.life}.{version.number}"
        )


def _damage_found_by(check: Callable[[], object]) -> str | None:
    try:
        check()
    except (CheckpointDamaged, CheckpointNotFound) as error:
        return error.what
    return None


def read_partition(storage: Storage, layout: JobLayout, entry: PartitionEntry, *, folder: str = "") -> PartitionState:
    """Reads a partition's state from its files, and checks each of them as a whole. Ledger and version are those of the
    first file, and the number of the version must be that of the entry. Rows of tables are read and checked later, when
    they are needed. `folder`: that of the job, below the storage's URL.

    Raises CheckpointDamaged, CheckpointNotFound, StorageUnavailable.
    """
    blocks: dict[int, BlockState] = {}
    head: PartitionState | None = None
    for each in entry.files:
        path = f"{folder}/{each.file.path}" if folder else each.file.path
        state = partition_file.read(storage, path, each.file.written, layout, entry.partition, each.blocks)
        head = head or state
        blocks.update((block.index, block) for block in state.blocks)
    assert head is not None, "an entry without files"
    missing = set(range(len(layout.partitions[entry.partition].blocks))) - blocks.keys()
    if missing or head.version.number != entry.version.number:
        without = ", ".join(map(str, sorted(missing)[:8])) or "none"
        raise CheckpointDamaged(
            f"{storage.locate(entry.files[0].file.path)} and the other files have version {head.version.number} of "
            f"partition {entry.partition}, without blocks {without}; expected version {entry.version.number}, whole"
        )
    ordered = tuple(blocks[index] for index in sorted(blocks))
    tables = states_of(storage, folder, layout, entry.partition, entry.tables)
    return PartitionState(entry.partition, head.version, ordered, head.marks, head.floor, tables)


class Variables:
    """The variables of a checkpoint, read one at a time. Each file is checked as a whole once, before any of it is
    returned; after that, only the needed parts are read."""

    def __init__(self, storage: Storage, manifest: Manifest) -> None:
        self._storage = storage
        self._manifest = manifest
        self._contents: dict[str, Contents] = {}
        self._places: list[list[tuple[int, PartitionId, int, FileRef]]] = [[] for _ in manifest.layout.variables]
        """For each variable, its blocks: first element, partition, index and file."""
        for part, entry in zip(manifest.layout.partitions, manifest.partitions, strict=True):
            for each in entry.files:
                for index in each.blocks:
                    block = part.blocks[index]
                    self._places[block.variable].append((block.offset, part.partition, index, each.file))

    @property
    def specs(self) -> tuple[VariableSpec, ...]:
        return self._manifest.layout.variables

    def read(self, variable: int) -> Array:
        """The values of a variable, in its shape. Raises CheckpointDamaged, CheckpointNotFound."""
        spec = self.specs[variable]
        values: Array = np.empty(spec.elements, spec.dtype.value)
        for offset, partition, index, file in self._places[variable]:
            path = f"{check_job_name(self._manifest.job_name)}/{file.path}"
            if file.path not in self._contents:
                blocks = next(each.blocks for each in self._manifest.partitions[partition].files if each.file == file)
                layout = self._manifest.layout
                partition_file.check(self._storage, path, file.written, layout, partition, blocks)
                self._contents[file.path] = tensors.read_contents(self._storage, path)
            tensor = self._contents[file.path].tensors[f"{partition_file.VALUES}/{index}"]
            values[offset : offset + tensor.shape[0]] = tensors.read_tensor(self._storage, path, tensor)
        return values.reshape(spec.shape)


def _manifest_of(sealed: Sealed, job: str, number: int) -> Manifest:
    """Raises CheckpointDamaged, also if it is that of another job or number."""
    found = manifests.manifest_of(sealed)
    if (found.job_name, found.number) != (job, number):
        raise CheckpointDamaged(f"{sealed.where} is that of checkpoint {found.number} of job {found.job_name!r}")
    return found


def _folder(job: str, number: int) -> str:
    return f"{check_job_name(job)}/{folder_name(number)}"


def _is_ours(name: str) -> bool:
    return bool(name == manifests.NAME or manifests.FILE_NAME.fullmatch(name) or _TEMPORARY.fullmatch(name))
