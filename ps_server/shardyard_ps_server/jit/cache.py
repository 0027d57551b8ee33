"""What is known of loops' machine code on disk, in a folder of numba's (beside the source, or $NUMBA_CACHE_DIR).

Owns: the marks in that folder that say that all loops of a kind are there, and the lock of who compiles them.
Invariants: of all processes that use a folder one at a time compiles a kind, which is done once on a machine. A mark
that is wrong costs time, and no more. Must not know: what the loops do.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, cast

import llvmlite.binding as llvm

LOOK_AGAIN_S: Final = 0.1


def folder_of(loop: Callable[..., object]) -> Path | None:
    """Where numba keeps it; None where no folder can be written."""
    stats: Any = cast(Any, loop).stats
    return None if stats.cache_path is None else Path(stats.cache_path)


def is_marked(folder: Path, kind: str) -> bool:
    return _mark_in(folder, kind).exists()


def mark(folder: Path, kind: str) -> None:
    """All loops of that kind lie there, of this source, for this processor."""
    _mark_in(folder, kind).touch()


def once(folder: Path, kind: str, work: Callable[[], None], stop: threading.Event) -> None:
    """Compiles them, by `work`, unless they are there by the time that nobody else does so. Returns at once when `stop`
    is set meanwhile. Raises OSError where the folder takes no file."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{kind}.lock").open("w") as lock:
        while not stop.is_set():
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                stop.wait(LOOK_AGAIN_S)
                continue
            if not is_marked(folder, kind):
                work()
                mark(folder, kind)
            return


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
