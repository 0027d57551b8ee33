"""A checkpoint's manifest: the job, its step, and the files of each partition.

    {"manifest":{...},"sha256":"..."}           one line; the digest is that of the inner object's bytes
    {"manifest":{...},"sha256":"...","signature":"..."}       in a yard with an authority, which signs the digest

A partition lies in one file. In an incremental checkpoint it lies in several: the first has the ledger, the version and
the blocks that changed last; the others belong to earlier checkpoints, and `blocks` says which blocks are taken from
each. Each table of a partition has a chain of files with rows: a base, and files with what changed after it.

Owns: the text of a manifest, in both directions. Invariants: a changed bit is found before any value is used; each
block is taken from exactly one file; all files belong to this job, and to this checkpoint or an earlier one. Must not
know: storage, what the files contain, what the data ledger means.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from shardyard.checkpoints import layout as layouts
from shardyard.checkpoints import rows_file
from shardyard.domain import limits
from shardyard.domain.consistency import UpdateMode
from shardyard.domain.errors import CheckpointDamaged, InvalidRequest, TooLarge
from shardyard.domain.ids import Incarnation, JobId, PartitionId, Token, Version
from shardyard.domain.layout.layouts import JobLayout
from shardyard.storage.json_reader import JsonNode, Sealed, canonical, document_of, seal, unseal
from shardyard.storage.storage import Written

FORMAT: Final = "shardyard-checkpoint"
FORMAT_VERSION: Final = 1
NAME: Final = "manifest.json"
MANIFEST_BYTES_MAX: Final = 256 * limits.MIB
CHECKPOINT_NUMBER_MAX: Final = 10**12 - 1
FILES_PER_PARTITION_MAX: Final = 4_096

JOB_NAME: Final = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{limits.JOB_NAME_CHARACTERS_MAX - 1}}}")
FILE_NAME: Final = re.compile(
    r"(?:partition-[0-9]{4}-[0-9a-f]{1,16}|rows-[0-9]{4}-[0-9]{4}-[0-9a-f]{1,16}-[0-9a-f]{1,16}-[0-9]{6}"
    r"|worker-[A-Za-z0-9][A-Za-z0-9._-]{0,127})\.safetensors"
)
_YARD: Final = re.compile(r"[ -~]{0,128}")
_WORKER: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_FILE_PATH: Final = re.compile(rf"([0-9]{{12}})/({FILE_NAME.pattern})")

NOBODY: Final = Incarnation(0)
"""Stands for the server in the names of files that no server wrote."""


def check_job_name(name: str) -> str:
    """Raises InvalidRequest for a name that no job can have."""
    if not JOB_NAME.fullmatch(name):
        raise InvalidRequest(
            f"{name[:200]!r} is no job's name", why="", todo=f"give a name that matches {JOB_NAME.pattern}"
        )
    return name


def folder_name(number: int) -> str:
    return f"{number:012d}"


def partition_path(number: int, partition: PartitionId, server: Incarnation = NOBODY) -> str:
    """The path of a partition's file in checkpoint `number`, from the job's folder. It names the server that writes it,
    so that a server that resumes late cannot overwrite the file of another."""
    return f"{folder_name(number)}/partition-{partition:04d}-{int(server):x}.safetensors"


def rows_path(number: int, partition: PartitionId, table: int, server: Incarnation, cut: int, part: int) -> str:
    """The path of a file with rows in checkpoint `number`, from the job's folder: file `part` of cut `cut` of a server.
    A second attempt is another cut, so it does not overwrite the first."""
    return f"{folder_name(number)}/rows-{partition:04d}-{table:04d}-{int(server):x}-{cut:x}-{part:06d}.safetensors"


def worker_name(worker: Incarnation) -> str:
    return f"{int(worker):x}"


def feedback_path(number: int, worker: str) -> str:
    """The path of a worker's file in checkpoint `number`, from the job's folder. `worker`: from `worker_name`."""
    return f"{folder_name(number)}/worker-{worker}.safetensors"


@dataclass(frozen=True, slots=True)
class FileRef:
    """A file that a manifest names. `path`: from the job's folder."""

    path: str
    written: Written

    @property
    def number(self) -> int:
        """The checkpoint that wrote it."""
        return int(self.path.partition("/")[0])


@dataclass(frozen=True, slots=True)
class PartitionFile:
    """A file, and the blocks that are taken from it, in ascending order."""

    file: FileRef
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TableEntry:
    """The files with the rows of a table in one partition. `base`: files that together have all of it. `increments`:
    files with the changes after that, in their order. `updates`: the number of the table's last update. `rows`, `ids`:
    how many there are; some ids have no row. `now_ms`: the table's clock, if its rows expire by time."""

    updates: int
    rows: int
    ids: int
    base: tuple[FileRef, ...] = ()
    increments: tuple[FileRef, ...] = ()
    now_ms: int = 0

    @property
    def files(self) -> tuple[FileRef, ...]:
        return self.base + self.increments

    @property
    def nbytes(self) -> int:
        return sum(file.written.nbytes for file in self.files)


@dataclass(frozen=True, slots=True)
class PartitionEntry:
    """The files of a partition. The first has the ledger, and is of `version`. `tables`: in the order of the
    layout."""

    partition: PartitionId
    version: Version
    files: tuple[PartitionFile, ...]
    tables: tuple[TableEntry, ...] = ()

    def incremental(
        self, version: Version, file: FileRef, changed: tuple[int, ...], tables: tuple[TableEntry, ...] = ()
    ) -> PartitionEntry:
        """The entry of the next checkpoint: `file` has the ledger and the changed blocks, and the other blocks stay
        where they are. A file from which no block is taken any more is left out."""
        replaced = frozenset(changed)
        earlier = (
            PartitionFile(each.file, tuple(index for index in each.blocks if index not in replaced))
            for each in self.files
        )
        kept = (each for each in earlier if each.blocks)
        return PartitionEntry(self.partition, version, (PartitionFile(file, changed), *kept), tables)


@dataclass(frozen=True, slots=True)
class ResidualFile:
    """The file with what a worker had not sent yet (its error feedback)."""

    worker: str
    file: FileRef


@dataclass(frozen=True, slots=True)
class Manifest:
    """`yard`: the id of the yard whose authority signs it; empty if it is not signed. `created`: ISO 8601 with a time
    zone. `settings`, `data_ledger`: JSON objects, returned as they were given."""

    number: int
    job_name: str
    job: JobId
    seed: int
    settings: Mapping[str, object]
    mode: UpdateMode
    step: int
    created: str
    layout: JobLayout
    partitions: tuple[PartitionEntry, ...]
    data_ledger: Mapping[str, object]
    token_floor: Token = Token(0)
    feedback: tuple[ResidualFile, ...] = ()
    yard: str = ""

    def files(self) -> Iterator[FileRef]:
        """Yields each file once, those of partitions first."""
        seen: set[str] = set()
        every = [each.file for entry in self.partitions for each in entry.files]
        rows = [file for entry in self.partitions for table in entry.tables for file in table.files]
        for file in (*every, *rows, *(each.file for each in self.feedback)):
            if file.path not in seen:
                seen.add(file.path)
                yield file


# ---- writing


def encode(manifest: Manifest, sign: Callable[[bytes], bytes] | None = None) -> bytes:
    """The bytes of a manifest. `sign`: signs as the manifest's yard. Raises InvalidRequest for one that `decode` would
    refuse, TooLarge."""
    text = seal("manifest", _to_document(manifest), None if sign is None else lambda digest: sign(signed_text(digest)))
    if len(text) > MANIFEST_BYTES_MAX:
        raise TooLarge(f"a manifest has {len(text)} bytes; at most {MANIFEST_BYTES_MAX} are allowed")
    try:
        decode(text, f"the manifest of checkpoint {manifest.number}")
    except CheckpointDamaged as error:
        raise InvalidRequest(error.what, why="it could not be restored from") from error
    return text


def signed_text(digest: str) -> bytes:
    """What is signed of a manifest with this digest."""
    return f"{FORMAT} manifest {digest}".encode()


def _to_document(manifest: Manifest) -> dict[str, object]:
    return {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "number": manifest.number,
        "job_name": manifest.job_name,
        "job": int(manifest.job),
        "seed": manifest.seed,
        "settings": manifest.settings,
        "mode": document_of(manifest.mode),
        "step": manifest.step,
        "created": manifest.created,
        "layout": layouts.to_document(manifest.layout),
        "partitions": [
            {
                "partition": entry.partition,
                "life": entry.version.life,
                "number": entry.version.number,
                "files": [{**_file_document(each.file), "blocks": list(each.blocks)} for each in entry.files],
                **({"tables": [_table_document(table) for table in entry.tables]} if entry.tables else {}),
            }
            for entry in manifest.partitions
        ],
        "data_ledger": manifest.data_ledger,
        "token_floor": int(manifest.token_floor),
        "feedback": [{"worker": each.worker, **_file_document(each.file)} for each in manifest.feedback],
        "yard": manifest.yard,
    }


def _table_document(table: TableEntry) -> dict[str, object]:
    return {
        "updates": table.updates,
        "rows": table.rows,
        "ids": table.ids,
        "base": [_file_document(file) for file in table.base],
        "increments": [_file_document(file) for file in table.increments],
        "now_ms": table.now_ms,
    }


def _file_document(file: FileRef) -> dict[str, object]:
    return {"path": file.path, "nbytes": file.written.nbytes, "sha256": file.written.sha256}


# ---- reading


def decode(text: bytes, where: str) -> Manifest:
    """Reads a manifest. `where`: the name of the file, for messages. Raises CheckpointDamaged."""
    return manifest_of(check_digest(text, where))


def check_digest(text: bytes, where: str) -> Sealed:
    """Checks the digest of a manifest. Raises CheckpointDamaged."""
    return unseal(text, "manifest", where)


def manifest_of(sealed: Sealed) -> Manifest:
    """Raises CheckpointDamaged."""
    where, node = sealed.where, sealed.read()
    said = node.mapping()
    if (said.get("format"), said.get("version")) != (FORMAT, FORMAT_VERSION):
        raise CheckpointDamaged(
            f"{where} says that it is {str(said.get('format'))[:100]!r} of version {str(said.get('version'))[:100]};"
            f" expected {FORMAT!r} of version {FORMAT_VERSION}",
            todo="read it with the release of shardyard that wrote it",
        )
    fields = node.fields(_FIELDS)
    number = fields["number"].number(CHECKPOINT_NUMBER_MAX)
    layout = layouts.from_document(fields["layout"])
    if len(canonical(fields["settings"].mapping())) > limits.SETTINGS_BYTES_MAX:
        fields["settings"].refuse(f"at most {limits.SETTINGS_BYTES_MAX} bytes")
    return Manifest(
        number,
        fields["job_name"].text(JOB_NAME, "a job's name"),
        JobId(fields["job"].number((1 << 64) - 1)),
        fields["seed"].number((1 << 64) - 1),
        fields["settings"].mapping(),
        fields["mode"].choice(UpdateMode),
        fields["step"].number(),
        fields["created"].time(),
        layout,
        _partitions(fields["partitions"], number, layout),
        fields["data_ledger"].mapping(),
        Token(fields["token_floor"].number()),
        _feedback(fields["feedback"], number),
        fields["yard"].text(_YARD, "the id of a yard, or nothing"),
    )


_FIELDS: Final = ("format", "version", *Manifest.__dataclass_fields__)


def _partitions(node: JsonNode, number: int, layout: JobLayout) -> tuple[PartitionEntry, ...]:
    found = []
    for index, each in enumerate(node.items(limits.PARTITIONS_MAX)):
        fields = each.fields(("partition", "life", "number", "files", *(["tables"] if layout.tables else [])))
        if fields["partition"].number() != index or index >= len(layout.partitions):
            each.refuse(f"partition {index} of {len(layout.partitions)}")
        files = tuple(
            _partition_file(file, number, PartitionId(index)) for file in fields["files"].items(FILES_PER_PARTITION_MAX)
        )
        if not files or len({file.file.path for file in files}) != len(files):
            fields["files"].refuse("at least one file, and each once")
        taken = sorted(block for file in files for block in file.blocks)
        if taken != list(range(len(layout.partitions[index].blocks))):
            fields["files"].refuse(f"each of {len(layout.partitions[index].blocks)} blocks from one file")
        version = Version(fields["life"].number(), fields["number"].number())
        tables = _tables(fields["tables"], number, index, len(layout.tables)) if layout.tables else ()
        found.append(PartitionEntry(PartitionId(index), version, files, tables))
    if len(found) != len(layout.partitions):
        node.refuse(f"all {len(layout.partitions)} partitions")
    return tuple(found)


def _tables(node: JsonNode, number: int, partition: int, count: int) -> tuple[TableEntry, ...]:
    found = []
    for index, each in enumerate(node.items(count)):
        fields = each.fields(TableEntry.__dataclass_fields__)
        name = f"rows-{partition:04d}-{index:04d}-"
        entry = TableEntry(
            fields["updates"].number(rows_file.STEP_MAX),
            fields["rows"].number(limits.TABLE_ROWS_MAX),
            fields["ids"].number(),
            tuple(_rows_file(file, number, name) for file in fields["base"].items(limits.ROWS_FILES_MAX)),
            tuple(_rows_file(file, number, name) for file in fields["increments"].items(limits.ROWS_FILES_MAX)),
            fields["now_ms"].number(rows_file.STEP_MAX),
        )
        if entry.rows > entry.ids:
            fields["ids"].refuse(f"at least {entry.rows}, as many as rows")
        if len({file.path for file in entry.files}) != len(entry.files):
            each.refuse("each file once")
        found.append(entry)
    if len(found) != count:
        node.refuse(f"all {count} tables")
    return tuple(found)


def _rows_file(node: JsonNode, number: int, name: str) -> FileRef:
    fields = node.fields(("path", "nbytes", "sha256"))
    file = _file(node, fields, number)
    if not file.path.startswith(f"{folder_name(file.number)}/{name}"):
        fields["path"].refuse(f"a file {name}...")
    fields["nbytes"].number(limits.ROWS_FILE_BYTES_MAX)
    return file


def _partition_file(node: JsonNode, number: int, partition: PartitionId) -> PartitionFile:
    fields = node.fields(("path", "nbytes", "sha256", "blocks"))
    file = _file(node, fields, number)
    if not file.path.startswith(f"{folder_name(file.number)}/partition-{partition:04d}-"):
        fields["path"].refuse(f"a file of partition {partition}")
    blocks = fields["blocks"].numbers(limits.BLOCKS_MAX)
    if any(a >= b for a, b in itertools.pairwise(blocks)):
        fields["blocks"].refuse("ascending numbers")
    return PartitionFile(file, blocks)


def _feedback(node: JsonNode, number: int) -> tuple[ResidualFile, ...]:
    found: dict[str, ResidualFile] = {}
    for each in node.items(limits.MEMBERS_MAX):
        fields = each.fields(("worker", "path", "nbytes", "sha256"))
        worker = fields["worker"].text(_WORKER, "a worker's name")
        file = _file(each, fields, number)
        if worker in found or file.path != feedback_path(file.number, worker):
            each.refuse(f"a file of worker {worker}, each worker once")
        found[worker] = ResidualFile(worker, file)
    return tuple(found.values())


def _file(node: JsonNode, fields: Mapping[str, JsonNode], number: int) -> FileRef:
    file = FileRef(fields["path"].text(_FILE_PATH, "a file of a checkpoint"), node.written(limits.JOB_BYTES_MAX))
    if file.number > number:
        fields["path"].refuse(f"a file of checkpoint {number} or an earlier one")
    return file
