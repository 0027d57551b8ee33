"""The folder in which numba keeps machine code (beside the source, or $NUMBA_CACHE_DIR).

Owns: the lock of the process that compiles a kind of loops, and the mark that says that all loops of a kind are there.
Invariants: one process at a time compiles a kind. A wrong mark costs time, nothing else. Must not know: what the loops
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


def folder_of(loop: Callable[..., object]) -> Path | None:
    """Where numba keeps it; None where no folder can be written."""
    stats: Any = cast(Any, loop).stats
    return None if stats.cache_path is None else Path(stats.cache_path)


@contextmanager
def compiler_lock(folder: Path, kind: str) -> Iterator[None]:
    """Held by the process that compiles loops of this kind; the others wait, and then load what it has compiled. The
    kernel releases the lock of a process that dies. Raises OSError where the folder takes no file."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{kind}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def is_marked(folder: Path, kind: str) -> bool:
    return _mark_in(folder, kind).exists()


def mark(folder: Path, kind: str) -> None:
    """All loops of that kind lie there, of this source, for this processor."""
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
