"""Bits that flip, and ends that are missing, at a thousand places of each kind of thing that a real job leaves on its
disk.

Each is found and named, with its file, and in a log its byte, by whoever looks and by whoever restores, and nothing is
restored from it. One rule makes damage harmless (docs/durability.md): behind the place up to which a log is durable,
`synced`, is a torn tail, which ends the log; then all that is before it must be there as it was.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import time
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import oracle
import pytest
from battle import JOB, LOOK_S, Battlefield, battlefield
from schedules import draw

from shardyard.checkpoints.library import CheckpointLibrary, read_partition
from shardyard.checkpoints.partition_file import PartitionState
from shardyard.checkpoints.storage import open_storage
from shardyard.ground.errors import CheckpointDamaged, CheckpointNotFound, LogDamaged
from shardyard.ground.failpoints import EXIT_CODE
from shardyard.ground.types import Generation, Incarnation, JobId
from shardyard_ps_server.partition import Partition
from shardyard_ps_server.replay import replay
from shardyard_ps_server.rules import UpdateRules
from shardyard_ps_server.wal_files import END, FENCED, SYNCED, LogFiles, LogRoot
from shardyard_ps_server.wal_records import SEGMENT_HEADER_BYTES, Mark, decode_mark

LATER = Generation(1_000)
PLACES = 1_000
SEED = 7
SHM = Path("/dev/shm")
FIGHT_S = 60.0
VICTIM = "server-0"
TORN_AT = "wal.before_sync=exit@40"
"""Where the server dies whose log is damaged: a record is written, and not durable."""
TAIL_EVERY = 50
"""One place of so many is drawn from a log's torn tail, which is small, the others from all of its files."""


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


class Artifact(ABC):
    """What lies on the disk. `files`: what is damaged; `looks`: ways to look at it."""

    files: Sequence[Path]
    looks: dict[str, Callable[[], Sight]]
    harmless = 0
    """So many of the places tried must be such that damage there is harmless."""

    def spoil(self, number: int, chance: random.Random) -> Spoilt:
        """Damage `number`."""
        file = chance.choice(self.files)
        return Spoilt(file, chance.randrange(file.stat().st_size), cut=number % 2 == 1)

    @abstractmethod
    def expected(self, look: str, spoilt: Spoilt) -> Sight | str:
        """What looking must give, or what it must name."""


class Checkpoint(Artifact):
    """All files of a job's checkpoints; a server that begins from the newest reads those that it names."""

    def __init__(self, folder: Path, _: Path) -> None:
        plan = next(plan for seed in range(100) if (plan := draw(seed).plan).sync and not plan.tables)
        self._url = oracle.Undisturbed.run(plan, folder / "job")
        self._library = CheckpointLibrary(open_storage(self._url))
        newest = self._library.load(JOB)
        self._newest = newest.number
        named = {file.path for file in newest.files()} | {f"{newest.number:012d}/manifest.json"}
        self._library.prune(JOB, 2)
        self.files = sorted(path for name in named if (path := Path(self._url, JOB, name)).stat().st_size)
        assert len(self.files) == len(named)
        self.looks = {"verify": self._verify, "restore": self._restore}

    def _verify(self) -> Sight:
        return Sight(tuple(finding.path for finding in self._library.verify(JOB, self._newest)))

    def _restore(self) -> Sight:
        storage = open_storage(f"{self._url}/{JOB}")
        try:
            manifest = self._library.load(JOB)
            for entry in manifest.partitions:
                read_partition(storage, manifest.layout, entry)
        except (CheckpointDamaged, CheckpointNotFound) as error:
            return Sight((error.what,))
        return Sight()

    def expected(self, look: str, spoilt: Spoilt) -> Sight | str:
        return f"{spoilt.file.parent.name}/{spoilt.file.name}"


class Log(Artifact):
    """The log of a server that died between writing a record and making it durable, as its successors would have found
    it, with the checkpoint that it follows; then everybody else was killed.

    `read`: all records that are there. `restore`: the partitions, from the checkpoint and what the log says after it.
    """

    harmless = PLACES // TAIL_EVERY

    def __init__(self, folder: Path, memory: Path) -> None:
        url, self._files = fight(folder, memory)
        manifests = CheckpointLibrary(open_storage(str(url)))
        numbers = set(manifests.numbers(JOB)) & set(self._files.numbers()[1:])
        self._base = min(numbers)
        manifest = manifests.load(JOB, self._base)
        storage = open_storage(f"{url}/{JOB}")
        self._layout, self._mode = manifest.layout, manifest.mode
        self._states: list[PartitionState] = [
            read_partition(storage, manifest.layout, each) for each in manifest.partitions
        ]
        self.files = [self._files.folder / SYNCED, *map(self._files.segment, self._files.numbers())]
        self.looks = {"read": self._read, "restore": self._restore}
        synced = self._files.folder / SYNCED
        self._synced = decode_mark(synced.read_bytes(), synced)
        self._records = self._all_records()
        assert self._records[-1].end > self._synced, "no torn tail"
        self._restored: dict[int, Sight] = {}

    def _read(self) -> Sight:
        try:
            return Sight(content=self._all_records())
        except LogDamaged as error:
            return Sight((error.what,))

    def _all_records(self) -> list[_Read]:
        end = self._taken_over()
        first = self._files.numbers()[0]
        return [
            _Read(bytes(record.head), bytes(record.payload), record.at, record.end)
            for record in self._files.records(first, end)
        ]

    def _restore(self) -> Sight:
        self._taken_over_by_nobody()
        made = {}
        for state in self._states:
            partition = made[state.partition] = Partition(self._layout, state.partition, UpdateRules(self._mode, 1))
            partition.restore(state)
        try:
            replay(self._files, LATER, self._base, self._layout, made)
        except LogDamaged as error:
            return Sight((error.what,))
        return Sight(content=[_standing(partition) for partition in made.values()])

    def _taken_over(self) -> Mark:
        self._taken_over_by_nobody()
        return self._files.take_over(LATER)

    def _taken_over_by_nobody(self) -> None:
        for name in (FENCED, END):
            (self._files.folder / name).unlink(missing_ok=True)

    def spoil(self, number: int, chance: random.Random) -> Spoilt:
        if number % TAIL_EVERY:
            return super().spoil(number, chance)
        file = self._files.segment(self._synced.segment)
        place = chance.randrange(self._synced.offset, file.stat().st_size)
        return Spoilt(file, place, cut=number % (2 * TAIL_EVERY) == 0)

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
    head: bytes
    payload: bytes
    at: Mark
    end: Mark


def _standing(partition: Partition) -> object:
    """All that a partition is."""
    cut = partition.cut()
    try:
        cut.complete()
        arrays = [partition.arrays(index, cut) for index in range(partition.blocks)]
        values = [(name, array.tobytes()) for each in arrays for name, array in sorted(each.items())]
        return cut.version, values, sorted(cut.marks, key=str), cut.floor
    finally:
        cut.release()


def fight(folder: Path, memory: Path) -> tuple[Path, LogFiles]:
    """Where the checkpoints are of a job that keeps logs, and, in `memory`, the log of a server of its that died at
    TORN_AT."""
    plan = next(plan for seed in range(100) if (plan := draw(seed).plan).wal and not (plan.sync or plan.tables))
    plan = replace(plan, jumping=(), every_steps=10)
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


KINDS: dict[str, Callable[[Path, Path], Artifact]] = {"checkpoint": Checkpoint, "log": Log}


@pytest.fixture(scope="module")
def artifacts(preloaded: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Artifact]]:
    """By the kind of thing that is damaged. Logs lie in memory, since each reader notes something durably."""
    with tempfile.TemporaryDirectory(
        prefix=f"shardyard-damage-{os.getpid()}-", dir=SHM if SHM.is_dir() else None
    ) as memory:
        yield {kind: make(tmp_path_factory.mktemp(kind), Path(memory)) for kind, make in KINDS.items()}


@contextmanager
def damaged(file: Path, content: bytes) -> Iterator[None]:
    """The file has other content while the block lasts."""
    before = file.read_bytes()
    file.write_bytes(content)
    try:
        yield
    finally:
        file.write_bytes(before)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_damage_anywhere_is_found_and_named(artifacts: dict[str, Artifact], kind: str) -> None:
    artifact = artifacts[kind]
    chance = random.Random(f"{SEED} {kind}")
    whole = {name: look() for name, look in artifact.looks.items()}
    assert not any(sight.damage for sight in whole.values())
    harmless = 0
    for number in range(PLACES):
        spoilt = artifact.spoil(number, chance)
        expected = {name: artifact.expected(name, spoilt) for name in artifact.looks}
        with damaged(spoilt.file, spoilt.content(spoilt.file.read_bytes(), chance)):
            for name, look in artifact.looks.items():
                found, wanted = look(), expected[name]
                if isinstance(wanted, str):
                    assert len(found.damage) == 1, (name, spoilt, found.damage)
                    assert wanted in found.damage[0], (name, spoilt, found.damage)
                else:
                    assert found == wanted, (name, spoilt, found.damage)
        harmless += not any(isinstance(wanted, str) for wanted in expected.values())
    assert {name: look() for name, look in artifact.looks.items()} == whole
    assert harmless >= artifact.harmless
    if not artifact.harmless:
        assert not harmless
