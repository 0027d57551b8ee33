"""Bits that flip, and ends that are missing, at a thousand places of each kind of thing that a real job leaves on its
disk; and files that are gone. Of a job whose model has tables, rows that have come, changed and gone, and the filter
that admits them, are among what is damaged.

Each is found and named, with its file, and in a log its byte, by whoever looks and by whoever restores, and nothing is
restored from it. One rule makes damage harmless (docs/guides/durability.md): behind the place up to which a log is
durable, `synced`, is a torn tail, which ends the log; then all that is before it must be there as it was.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import time
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import pytest

from shardyard.checkpoints.library import CheckpointLibrary, read_partition
from shardyard.checkpoints.manifest import NAME, FileRef, Manifest, folder_name
from shardyard.checkpoints.partition_file import PartitionState
from shardyard.domain.consistency import Durability, UpdateMode
from shardyard.domain.errors import CheckpointDamaged, CheckpointNotFound, LogDamaged, StorageUnavailable
from shardyard.domain.ids import Generation, Incarnation, JobId, PartitionId
from shardyard.domain.layout.layouts import JobLayout
from shardyard.runtime.failpoints import EXIT_CODE
from shardyard.storage import tensors
from shardyard.storage.storage import open_storage
from shardyard.wire import push_messages
from shardyard_ps_server.partition.checkpoint_cuts import block_arrays, take_cut
from shardyard_ps_server.partition.partition import Partition
from shardyard_ps_server.partition.update_rules import UpdateRules
from shardyard_ps_server.tables import cuts
from shardyard_ps_server.wal.records import (
    RECORD_HEADER_BYTES,
    SEGMENT_HEADER_BYTES,
    Mark,
    RecordKind,
    decode_mark,
)
from shardyard_ps_server.wal.replay import replay
from shardyard_ps_server.wal.segments import END, FENCED, SYNCED, LogFiles, LogRoot
from tests.chaos import oracle
from tests.chaos.battle import JOB, LOOK_S, Battlefield, battlefield
from tests.chaos.schedules import Plan, draw

LATER = Generation(1_000)
PLACES = 1_000
SEED = 7
SHM = Path("/dev/shm")
FIGHT_S = 60.0
DAMAGE_S_MAX = 300
VICTIM = "server-0"
PAUSE_MS = 80
"""So that a job whose rows are damaged has time for many checkpoints."""
TORN_AT = "wal.before_sync=exit@40"
"""Where the server dies whose log is damaged: a record is written, and not durable."""
TAIL = "torn tail"
ROWS_IN_CHECKPOINTS = frozenset(
    {f"entries of {a_file}: {array}" for a_file in ("a base", "an increment") for array in
     ("header", "ids", "values", "sum", "frequencies", "steps")}
    | {f"removed of an increment: {array}" for array in ("header", "ids")}
    | {f"cells of an increment: {array}" for array in ("header", "cells")}
)  # fmt: skip
ROWS_IN_LOGS = frozenset({"rows", "rows that expire"})
"""What must be there to be damaged, of a job whose rows come and go."""


@dataclass(frozen=True)
class Sight:
    """What looking gives: what it says is damaged, and what it has read else."""

    damage: tuple[str, ...] = ()
    content: object = None


@dataclass(frozen=True)
class Spoilt:
    """A file's content from byte `place` on is not what it was: a bit flipped there, or all is missing."""

    file: Path
    place: int
    cut: bool

    def content(self, whole: bytes, chance: random.Random) -> bytes:
        if self.cut:
            return whole[: self.place]
        changed = bytearray(whole)
        changed[self.place] ^= 1 << chance.randrange(8)
        return bytes(changed)


@dataclass(frozen=True)
class Stretch:
    """Bytes [begin, end) of a file."""

    file: Path
    begin: int
    end: int


class Artifact(ABC):
    """What lies on the disk. `files`: all of it; `looks`: ways to look at it."""

    files: Sequence[Path]
    looks: dict[str, Callable[[], Sight]]

    def __init__(self) -> None:
        self.stretches: dict[str, list[Stretch]] = {}
        """What is damaged, by what it means."""

    def add(self, meaning: str, file: Path, begin: int, end: int) -> None:
        if begin < end:
            self.stretches.setdefault(meaning, []).append(Stretch(file, begin, end))

    def spoil(self, number: int, chance: random.Random) -> Spoilt:
        """Damage `number`: each meaning has its turn."""
        around, turn = divmod(number, len(self.stretches))
        stretch = chance.choice(self.stretches[sorted(self.stretches)[turn]])
        return Spoilt(stretch.file, chance.randrange(stretch.begin, stretch.end), cut=around % 2 == 1)

    @property
    def harmless(self) -> int:
        """So many of the places tried must be such that damage there is harmless."""
        return PLACES // len(self.stretches) if TAIL in self.stretches else 0

    @abstractmethod
    def expected(self, look: str, spoilt: Spoilt) -> Sight | str:
        """What looking must give, or what it must name."""

    @abstractmethod
    def without(self, look: str, file: Path) -> Sight | str:
        """The same, where a file is gone."""


class Checkpoint(Artifact):
    """All files of a job's checkpoints; a server that begins from the newest reads those that it names."""

    def __init__(
        self,
        plan: Plan,
        folder: Path,
        *,
        more: Mapping[str, object],
        pause_ms: int = 0,
        meanings: frozenset[str] = frozenset(),
    ) -> None:
        """`more`: settings of the job; `pause_ms`: before each of its batches; `meanings`: what the newest checkpoint
        must have. Later ones are deleted."""
        super().__init__()
        self._url = oracle.Undisturbed.run(plan, folder / "job", more, pause_ms=pause_ms)
        self._library = CheckpointLibrary(open_storage(self._url))
        numbers = self._library.numbers(JOB)
        self._newest = next(number for number in reversed(numbers) if meanings <= self._meanings(number))
        at = numbers.index(self._newest)
        for later in numbers[at + 1 :]:
            self._library.storage.delete_folder(f"{JOB}/{folder_name(later)}")
        self._library.prune(JOB, 2)
        newest = self._library.load(JOB)
        assert newest.number == self._newest
        manifest = self._path(f"{folder_name(newest.number)}/{NAME}")
        self.add("manifest", manifest, 0, manifest.stat().st_size)
        for file in newest.files():
            for meaning, begin, end in self._arrays(file):
                self.add(meaning, self._path(file.path), begin, end)
        self.files = [manifest, *sorted(self._path(file.path) for file in newest.files())]
        self.looks = {"verify": self._verify, "restore": self._restore}
        self._before = Sight(content=self._standing(numbers[at - 1])) if at else None

    def _path(self, name: str) -> Path:
        return Path(self._url, JOB, name)

    def _meanings(self, number: int) -> set[str]:
        return {meaning for file in self._library.load(JOB, number).files() for meaning, _, _ in self._arrays(file)}

    def _arrays(self, file: FileRef) -> Iterator[tuple[str, int, int]]:
        """What lies in a file, and where."""
        contents = tensors.read_contents(self._library.storage, f"{JOB}/{file.path}")
        said = contents.metadata
        what = "blocks"
        if "kind" in said:  # rows
            what = f"{said['kind']} of {'a base' if said['base'] == '1' else 'an increment'}"
        yield f"{what}: header", 0, min(tensor.begin for tensor in contents.tensors.values())
        for name, tensor in contents.tensors.items():
            yield f"{what}: {name.partition('/')[0]}", tensor.begin, tensor.end

    def _verify(self) -> Sight:
        try:
            return Sight(tuple(finding.path for finding in self._library.verify(JOB, self._newest)))
        except CheckpointNotFound as error:
            return Sight((error.what,))

    def _restore(self) -> Sight:
        try:
            return Sight(content=self._standing(None))
        except (CheckpointDamaged, CheckpointNotFound) as error:
            return Sight((error.what,))

    def _standing(self, number: int | None) -> object:
        """What a checkpoint, or (None) the newest that is there, makes of partitions."""
        manifest = self._library.load(JOB, number)
        return manifest.number, _standing(_partitions(manifest.layout, manifest.mode, self._states(manifest)))

    def _states(self, manifest: Manifest) -> list[PartitionState]:
        storage = open_storage(f"{self._url}/{JOB}")
        return [read_partition(storage, manifest.layout, entry) for entry in manifest.partitions]

    def expected(self, look: str, spoilt: Spoilt) -> Sight | str:
        return self._called(spoilt.file)

    def without(self, look: str, file: Path) -> Sight | str:
        if file.name != NAME:
            return self._called(file)
        if look == "verify":
            return f"no checkpoint {self._newest} of job '{JOB}'"
        return f"no checkpoint of job '{JOB}'" if self._before is None else self._before

    def _called(self, file: Path) -> str:
        return f"{file.parent.name}/{file.name}"


class Log(Artifact):
    """The log of a server that died between writing a record and making it durable, as its successors would have found
    it, with the checkpoint that it follows; then everybody else was killed.

    `read`: all records that are there. `restore`: the partitions, from the checkpoint and what the log says after it.
    """

    def __init__(self, plan: Plan, folder: Path, memory: Path, meanings: frozenset[str] = frozenset()) -> None:
        """`meanings`: what the log must have."""
        super().__init__()
        url, self._files = fight(plan, folder, memory)
        manifests = CheckpointLibrary(open_storage(str(url)))
        numbers = set(manifests.numbers(JOB)) & set(self._files.numbers()[1:])
        self._base = min(numbers)
        manifest = manifests.load(JOB, self._base)
        storage = open_storage(f"{url}/{JOB}")
        self._layout, self._mode = manifest.layout, manifest.mode
        self._states: list[PartitionState] = [
            read_partition(storage, manifest.layout, each) for each in manifest.partitions
        ]
        self._first = self._files.numbers()[0]
        self.files = [self._files.folder / SYNCED, *map(self._files.segment, self._files.numbers())]
        self.looks = {"read": self._read, "restore": self._restore}
        synced = self._files.folder / SYNCED
        self._synced = decode_mark(synced.read_bytes(), synced)
        self._records = self._all_records()
        assert self._records[-1].end > self._synced, "no torn tail"
        self._restored: dict[int, Sight] = {}
        self._divide()
        assert meanings <= self.stretches.keys(), self.stretches.keys()

    def _divide(self) -> None:
        synced = self._files.folder / SYNCED
        self.add(SYNCED, synced, 0, synced.stat().st_size)
        for number in self._files.numbers():
            self.add("header of a segment", self._files.segment(number), 0, SEGMENT_HEADER_BYTES)
        for record in self._records:
            if record.end <= self._synced:
                file, begin = self._files.segment(record.at.segment), record.at.offset
                for meaning, nbytes in record.parts():
                    self.add(meaning, file, begin, begin + nbytes)
                    begin += nbytes
                assert begin == record.end.offset
        tail = self._files.segment(self._synced.segment)
        self.add(TAIL, tail, self._synced.offset, tail.stat().st_size)

    def _read(self) -> Sight:
        try:
            return Sight(content=self._all_records())
        except (LogDamaged, StorageUnavailable) as error:
            return Sight((error.what,))

    def _all_records(self) -> list[_Read]:
        end = self._taken_over()
        return [
            _Read(record.kind, bytes(record.head), bytes(record.payload), record.at, record.end)
            for record in self._files.records(self._first, end)
        ]

    def _restore(self) -> Sight:
        self._taken_over_by_nobody()
        made = _partitions(self._layout, self._mode, self._states)
        try:
            replay(self._files, LATER, self._base, self._layout, made)
        except (LogDamaged, StorageUnavailable) as error:
            return Sight((error.what,))
        return Sight(content=_standing(made))

    def _taken_over(self) -> Mark:
        self._taken_over_by_nobody()
        return self._files.take_over(LATER)

    def _taken_over_by_nobody(self) -> None:
        for name in (FENCED, END):
            (self._files.folder / name).unlink(missing_ok=True)

    def expected(self, look: str, spoilt: Spoilt) -> Sight | str:
        if spoilt.file.name == SYNCED:
            return f"{spoilt.file} at byte 0: "
        segment = int(spoilt.file.stem)
        if segment == self._synced.segment and spoilt.place >= self._synced.offset:
            return self._up_to(look, Mark(segment, spoilt.place))
        if look == "restore" and segment < self._base and spoilt.place >= SEGMENT_HEADER_BYTES:
            return self._up_to(look, self._records[-1].end)  # what came before the checkpoint is not read
        if spoilt.place < SEGMENT_HEADER_BYTES:
            return f"{spoilt.file} at byte 0: "
        if spoilt.cut:
            return f"{spoilt.file} at byte {spoilt.place}: "
        begins = [record.at.offset for record in self._records if record.at.segment == segment]
        return f"{spoilt.file} at byte {begins[bisect_right(begins, spoilt.place) - 1]}: "

    def without(self, look: str, file: Path) -> Sight | str:
        if file.name == SYNCED:
            return f"{file}: No such file or directory"
        segment, begins = int(file.stem), self._first if look == "read" else self._base
        if segment == self._synced.segment or segment == begins:
            return f"{file} at byte 0: it is not there"
        if segment < begins:
            return self._up_to(look, self._records[-1].end)  # what came before the checkpoint is not read
        before = {int(follower.stem): int(each.stem) for each, follower in pairwise(self.files[1:])}
        return f"at byte 0: it does not follow segment {before[segment]}"

    def _up_to(self, look: str, place: Mark) -> Sight:
        """What is there where the log ends with its last record that ends before this place."""
        there = [record for record in self._records if record.end <= place]
        if look == "read":
            return Sight(content=there)
        end = there[-1].end if there[-1].end.segment == place.segment else Mark(place.segment, SEGMENT_HEADER_BYTES)
        if end.offset not in self._restored:
            path = self._files.segment(end.segment)
            with damaged(path, path.read_bytes()[: end.offset]):
                self._restored[end.offset] = self._restore()
        return self._restored[end.offset]


@dataclass(frozen=True)
class _Read:
    kind: RecordKind
    head: bytes
    payload: bytes
    at: Mark
    end: Mark

    def parts(self) -> Iterator[tuple[str, int]]:
        """What its bytes mean, and how many they are, one behind the other."""
        yield "header of a record", RECORD_HEADER_BYTES
        yield "head", len(self.head)
        if self.kind is RecordKind.PUSH:
            order = push_messages.push_from_header(self.head, recorded=True)
            yield "gradients", order.payload_bytes
            yield "rows", order.rows_bytes
            yield "rows that expire", order.expired_bytes


def _partitions(layout: JobLayout, mode: UpdateMode, states: Sequence[PartitionState]) -> dict[PartitionId, Partition]:
    """As a checkpoint has them."""
    made = {}
    rules = UpdateRules(mode, 1, Durability.WAL if mode is UpdateMode.ASYNC else Durability.CHECKPOINT)
    for state in states:
        made[state.partition] = Partition(layout, state.partition, rules)
        made[state.partition].restore(state)
    return made


def _standing(partitions: Mapping[PartitionId, Partition]) -> object:
    """All that partitions are."""
    return [_stands(partition) for _, partition in sorted(partitions.items())]


def _stands(partition: Partition) -> object:
    cut = take_cut(partition)
    try:
        cut.complete()
        arrays = [block_arrays(partition, index, cut) for index in range(len(partition.payload.blocks))]
        values = [(name, array.tobytes()) for each in arrays for name, array in sorted(each.items())]
        tables = [(name, _table(each)) for name, each in sorted(cut.tables.items())]
        return cut.version, values, sorted(cut.marks, key=str), cut.floor, tables
    finally:
        cut.release()


def _table(cut: cuts.TableCut) -> object:
    cells = b"" if cut.cells is None else cut.cells.tobytes()
    rows = {}
    for chunk in cut:
        found = [record.tobytes() for record in chunk.records] + [b""] * (chunk.ids.size - len(chunk.records))
        told = zip(found, chunk.frequencies.tolist(), chunk.steps.tolist(), strict=True)
        rows.update(zip(chunk.ids.tolist(), told, strict=True))
    return cut.updates, cells, rows


def fight(plan: Plan, folder: Path, memory: Path) -> tuple[Path, LogFiles]:
    """Where the checkpoints are of a job that keeps logs, and, in `memory`, the log of a server of its that died at
    TORN_AT."""
    with battlefield(plan, folder / "fight") as field:
        victim = field.places[VICTIM]
        victim.arm(TORN_AT)  # its first process: a second one may come when others have its partitions
        field.begin()
        await_that(field, lambda: any(f"exit code {EXIT_CODE}" in ending for ending in victim.endings))
        for place in field.places.values():
            place.give_up()
        shutil.copytree(field.disks["checkpoints"].folder, folder / "checkpoints")
        shutil.copytree(field.disks["wal"].folder, memory / "wal")
    for job in filter(Path.is_dir, (memory / "wal").iterdir()):
        for server in job.iterdir():
            files = LogRoot(memory / "wal").log(JobId(int(job.name, 16)), Incarnation(int(server.name, 16)))
            mark = decode_mark((files.folder / SYNCED).read_bytes(), files.folder / SYNCED)
            if files.segment(mark.segment).stat().st_size > mark.offset:
                return folder / "checkpoints", files
    raise AssertionError("no log has a torn tail")


def await_that(field: Battlefield, condition: Callable[[], bool]) -> None:
    until = time.monotonic() + FIGHT_S
    while not condition():
        field.tend()
        assert time.monotonic() < until, field.tails()
        time.sleep(LOOK_S)


def drawn(*, tables: bool, sync: bool = False, wal: bool = False) -> Plan:
    """The first plan that is so. With tables, of few partitions, so that each has many rows, and one that forgets."""
    plans = (draw(seed).plan for seed in range(100))
    plan = next(
        plan for plan in plans if plan.sync == sync and plan.tables == tables and plan.wal >= wal and not plan.hybrid
    )
    plan = replace(plan, jumping=(), every_steps=10)
    return replace(plan, partitions=plan.servers, forgetful=True) if tables else plan


def checkpoint(folder: Path, _: Path) -> Artifact:
    return Checkpoint(drawn(sync=True, tables=False), folder, more={})


def checkpoint_with_rows(folder: Path, _: Path) -> Artifact:
    often = {"job.checkpoint.every_steps": 2, "job.checkpoint.keep": 1_000}
    plan = drawn(sync=True, tables=True)
    return Checkpoint(plan, folder, more=often, pause_ms=PAUSE_MS, meanings=ROWS_IN_CHECKPOINTS)


def log(folder: Path, memory: Path) -> Artifact:
    return Log(drawn(wal=True, tables=False), folder, memory)


def log_with_rows(folder: Path, memory: Path) -> Artifact:
    return Log(drawn(wal=True, tables=True), folder, memory, ROWS_IN_LOGS)


@pytest.fixture(
    scope="module",
    params=[checkpoint, checkpoint_with_rows, log, log_with_rows],
    ids=["checkpoint", "checkpoint with rows", "log", "log with rows"],
)
def artifact(
    request: pytest.FixtureRequest, preloaded: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Artifact]:
    """What is damaged. Logs lie in memory, since each reader notes something durably."""
    with tempfile.TemporaryDirectory(
        prefix=f"shardyard-damage-{os.getpid()}-", dir=SHM if SHM.is_dir() else None
    ) as memory:
        yield request.param(tmp_path_factory.mktemp("job"), Path(memory))


@contextmanager
def damaged(file: Path, content: bytes | None) -> Iterator[None]:
    """The file has other content, or (None) is gone, while the block lasts."""
    before = file.read_bytes()
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content)
    try:
        yield
    finally:
        file.write_bytes(before)


def check(artifact: Artifact, expected: Mapping[str, Sight | str], what: object) -> None:
    for name, look in artifact.looks.items():
        found, wanted = look(), expected[name]
        if isinstance(wanted, str):
            assert len(found.damage) == 1, (name, what, found.damage)
            assert wanted in found.damage[0], (name, what, found.damage)
        else:
            assert found == wanted, (name, what, found.damage)


@pytest.mark.long
@pytest.mark.timeout(DAMAGE_S_MAX)
def test_damage_anywhere_is_found_and_named(artifact: Artifact) -> None:
    chance = random.Random(SEED)
    whole = {name: look() for name, look in artifact.looks.items()}
    assert not any(sight.damage for sight in whole.values())
    harmless = 0
    for number in range(PLACES):
        spoilt = artifact.spoil(number, chance)
        expected = {name: artifact.expected(name, spoilt) for name in artifact.looks}
        with damaged(spoilt.file, spoilt.content(spoilt.file.read_bytes(), chance)):
            check(artifact, expected, spoilt)
        harmless += not any(isinstance(wanted, str) for wanted in expected.values())
    check(artifact, whole, "what was damaged and mended")
    assert harmless >= artifact.harmless
    if not artifact.harmless:
        assert not harmless


@pytest.mark.long
@pytest.mark.timeout(DAMAGE_S_MAX)
def test_a_file_that_is_gone_is_found_and_named(artifact: Artifact) -> None:
    """But for the manifest: without it a checkpoint is none, and the one before counts."""
    whole = {name: look() for name, look in artifact.looks.items()}
    for file in artifact.files:
        expected = {name: artifact.without(name, file) for name in artifact.looks}
        with damaged(file, None):
            check(artifact, expected, file)
    check(artifact, whole, "what was gone and came back")
