"""Bits that flip, and ends that are missing, at a thousand places of what a real job has left on its disk.

Each is found and named, by whoever verifies and by whoever restores, and nothing is restored from it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import oracle
import pytest
from battle import JOB
from schedules import draw

from shardyard.checkpoints.library import CheckpointLibrary
from shardyard.checkpoints.storage import open_storage
from shardyard.ground.errors import CheckpointDamaged, CheckpointNotFound
from shardyard_ps_server.checkpoints import load

PLACES = 1_000
SEED = 7
WHOLE: list[str] = []
"""What looking finds where nothing is damaged."""


@dataclass(frozen=True)
class Artifact:
    """What lies on the disk: its files, and ways to look at it, each of which gives what it says is damaged."""

    files: tuple[Path, ...]
    looks: dict[str, Callable[[], list[str]]]


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Artifact]:
    """By the kind of thing that is damaged."""
    folder = tmp_path_factory.mktemp("damage")
    return {"checkpoint": checkpoint(folder)}


def checkpoint(folder: Path) -> Artifact:
    """All files of a job's checkpoints; a server that begins from the newest reads those that it names."""
    plan = next(draw(seed).plan for seed in range(100) if draw(seed).plan.sync)
    url = oracle.Undisturbed.run(plan, folder / "job")
    library = CheckpointLibrary(open_storage(url))
    newest = library.load(JOB)
    named = {file.path for file in newest.files()} | {f"{newest.number:012d}/manifest.json"}
    library.prune(JOB, 2)
    files = tuple(sorted(path for name in named if (path := Path(url, JOB, name)).stat().st_size))
    assert len(files) == len(named)

    def verify() -> list[str]:
        return [finding.path for finding in library.verify(JOB, newest.number)]

    def restore() -> list[str]:
        storage = open_storage(f"{url}/{JOB}")
        try:
            manifest = library.load(JOB)
            for entry in manifest.partitions:
                load(storage, manifest.layout, entry)
        except (CheckpointDamaged, CheckpointNotFound) as error:
            return [error.what]
        return WHOLE

    return Artifact(files, {"verify": verify, "restore": restore})


@contextmanager
def damaged(file: Path, content: bytes) -> Iterator[None]:
    """The file has other content while the block lasts."""
    before = file.read_bytes()
    file.write_bytes(content)
    try:
        yield
    finally:
        file.write_bytes(before)


def flipped(content: bytes, chance: random.Random) -> bytes:
    bit = chance.randrange(8 * len(content))
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def truncated(content: bytes, chance: random.Random) -> bytes:
    return content[: chance.randrange(len(content))]


@pytest.mark.parametrize("kind", ["checkpoint"])
@pytest.mark.parametrize("change", [flipped, truncated])
def test_damage_anywhere_is_found_and_named(
    artifacts: dict[str, Artifact], kind: str, change: Callable[[bytes, random.Random], bytes]
) -> None:
    artifact = artifacts[kind]
    chance = random.Random(f"{SEED} {kind}")
    for name, look in artifact.looks.items():
        assert look() == WHOLE, name
    for _ in range(PLACES // 2):
        file = chance.choice(artifact.files)
        with damaged(file, change(file.read_bytes(), chance)):
            for name, look in artifact.looks.items():
                found = look()
                assert len(found) == 1, (name, file, found)
                assert f"{file.parent.name}/{file.name}" in found[0], (name, file, found)
    for name, look in artifact.looks.items():
        assert look() == WHOLE, name
