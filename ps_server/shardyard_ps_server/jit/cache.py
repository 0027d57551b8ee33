"""The folder in which numba keeps machine code (beside the source, or $NUMBA_CACHE_DIR).

Owns: the lock of the process that compiles a kind of loops, and the mark that says that all loops of a kind are there.
Invariants: one process at a time compiles a kind; a wrong mark costs time, nothing else. Must not know: what the loops
do.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import llvmlite.binding as llvm
import numba


def start_compiler() -> None:
    """Makes numba set itself up, which takes half a second. So a process that waits for another one's compiler can do
    it meanwhile."""
    cast(Callable[[], None], numba.njit()(_nothing))()


def _nothing() -> None:
    """The least that can be compiled."""


def folder_of(loop: Callable[..., object]) -> Path | None:
    """Returns the folder in which numba keeps a loop; None: no folder can be written."""
    stats: Any = cast(Any, loop).stats
    return None if stats.cache_path is None else Path(stats.cache_path)


@contextmanager
def compiler_lock(folder: Path, kind: str) -> Iterator[None]:
    """Held by the process that compiles loops of this kind. The others wait, and then load what it has compiled. The
    kernel releases the lock of a process that dies. Raises OSError if the folder takes no file."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{kind}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def is_marked(folder: Path, kind: str) -> bool:
    return _mark_in(folder, kind).exists()


def mark(folder: Path, kind: str) -> None:
    """Notes that all loops of that kind are in the folder, compiled from this source for this processor."""
    _mark_in(folder, kind).touch()


def _mark_in(folder: Path, kind: str) -> Path:
    digest = hashlib.blake2b(digest_size=16)
    for package in ("numba", "llvmlite", "numpy"):
        digest.update(f"{package} {importlib.metadata.version(package)}\n".encode())
    digest.update(f"{sys.version} {llvm.get_host_cpu_name()} {llvm.get_host_cpu_features().flatten()}\n".encode())
    for package in ("shardyard", "shardyard_ps_server"):
        found = importlib.util.find_spec(package)
        assert found is not None
        assert found.origin is not None
        top = Path(found.origin).parent
        for source in sorted(top.rglob("*.py")):
            stat = source.stat()
            digest.update(f"{source.relative_to(top)} {stat.st_size} {int(stat.st_mtime)}\n".encode())
    return folder / f"{kind}-{digest.hexdigest()}.compiled"
