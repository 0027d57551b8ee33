"""A memory cgroup for one process, its page cache counted and without swap: version 2, or 1. Needs root."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


class NoCgroup(Exception):
    """This machine cannot make a memory cgroup."""


@contextmanager
def memory_cgroup(bytes_max: int) -> Iterator[Path]:
    """Yields its folder. A process joins with `join`. Removed when all have left. Raises NoCgroup."""
    second = (ROOT / "cgroup.controllers").exists()
    folder = (ROOT if second else ROOT / "memory") / f"shardyard-benchmark-{os.getpid()}"
    try:
        if second and "memory" not in (ROOT / "cgroup.subtree_control").read_text().split():
            (ROOT / "cgroup.subtree_control").write_text("+memory")
        folder.mkdir()
    except OSError as error:
        raise NoCgroup(f"no memory cgroup in {folder.parent} ({error.strerror}): run it as root") from error
    try:
        (folder / ("memory.max" if second else "memory.limit_in_bytes")).write_text(str(bytes_max))
        swap = folder / ("memory.swap.max" if second else "memory.swappiness")
        if swap.exists():
            swap.write_text("0")
        yield folder
    except OSError as error:
        raise NoCgroup(f"a memory cgroup in {folder} that takes no limit ({error.strerror})") from error
    finally:
        folder.rmdir()


def join(folder: Path) -> None:
    """Adds this process, before it takes memory."""
    (folder / "cgroup.procs").write_text(str(os.getpid()))


def most_bytes(folder: Path) -> int:
    """The peak of its memory, page cache included."""
    for name in ("memory.peak", "memory.max_usage_in_bytes"):
        if (folder / name).exists():
            return int((folder / name).read_text())
    return 0
