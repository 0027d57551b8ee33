"""Where the loops of tables are compiled: in a process of their own, so that a server goes on meanwhile.

    python -m shardyard_ps_server.table_loops [PID]     compiles them to disk, where they are not there yet

A compiler needs the interpreter for half a minute and more, and whatever else a server does would stand still: its
heartbeats, other jobs. What it makes lies in a folder of numba's (beside the source, or $NUMBA_CACHE_DIR), and is read
from there in a second or two.

Owns: the process, and the mark in that folder that says that all loops are there. Invariants: one process at a time for
each folder, which ends with the server that started it, and is waited for by all that need the loops; where it cannot
help, since no folder can be written or it fails, the loops are compiled here, and the log says so. A mark that is wrong
costs time, and no more. Must not know: jobs, what the loops do.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import importlib.metadata
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, cast

import llvmlite.binding as llvm

import shardyard
import shardyard_ps_server
from shardyard.ground.errors import NotReady
from shardyard.runtime.waiting import Vigil
from shardyard_ps_server import partition_tables
from shardyard_ps_server.tables import loops

log = logging.getLogger("shardyard.server")

COMMAND: Final = (sys.executable, "-P", "-m", "shardyard_ps_server.table_loops")
SAID_MAX: Final = 500
"""Of what a process said that has failed, so many characters are told."""
_PR_SET_PDEATHSIG: Final = 1


class TableLoops:
    """Of one process. Safe for several threads."""

    def __init__(
        self,
        vigil: Vigil,
        load: Callable[[], None] = partition_tables.warm,
        is_loaded: Callable[[], bool] = partition_tables.is_warm,
        folder: Callable[[], Path | None] | None = None,
        command: Sequence[str] = COMMAND,
    ) -> None:
        """`load`: compiles all loops, or reads them from disk; `is_loaded`: whether this process has done so. `folder`:
        where numba keeps them, if not the usual one. `command`: what compiles them there; told our process id."""
        self._vigil = vigil
        self._load, self._is_loaded, self._command = load, is_loaded, command
        self._folder = folder or folder_of_loops
        self._loading = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._processes = threading.Lock()
        self._closed = False

    def load(self, what_for: str) -> None:
        """All loops are there when it returns. Raises NotReady where the server is being ended."""
        if self._is_loaded():
            return
        with self._vigil.over(lambda: f"loops for {what_for} to be compiled"), self._loading:
            if self._is_loaded():
                return
            folder = self._folder()
            if folder is None:
                log.warning("loops of tables are compiled here: no folder for them can be written (NUMBA_CACHE_DIR)")
            elif not is_marked(folder):
                self._compile(folder)
            self._load()

    def close(self) -> None:
        """No process is left."""
        with self._processes:
            self._closed = True
            if self._process is not None:
                self._process.kill()

    def _compile(self, folder: Path) -> None:
        """In another process."""
        log.info("loops of tables are compiled to %s, which is done once on a machine", folder)
        try:
            process = self._start()
            _, said = process.communicate()
        except OSError as error:
            log.warning("loops of tables are compiled here: no process can be started (%s)", error)
            return
        with self._processes:
            self._process = None
            if self._closed:
                raise NotReady("loops of tables, on a server that is being ended")
        if process.returncode:
            last = said.decode(errors="replace").strip()[-SAID_MAX:]
            log.warning("loops of tables are compiled here: another process ended by %d (%s)", process.returncode, last)

    def _start(self) -> subprocess.Popen[bytes]:
        with self._processes:
            if self._closed:
                raise NotReady("loops of tables, on a server that is being ended")
            self._process = subprocess.Popen(
                [*self._command, str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(each or os.getcwd() for each in sys.path)},
            )
            return self._process


def folder_of_loops() -> Path | None:
    """Where numba keeps them; None where no folder can be written."""
    stats: Any = cast(Any, loops.push).stats
    return None if stats.cache_path is None else Path(stats.cache_path)


def is_marked(folder: Path) -> bool:
    return _mark_in(folder).exists()


def mark(folder: Path) -> None:
    """All loops lie there, of this source, for this processor."""
    _mark_in(folder).touch()


def _mark_in(folder: Path) -> Path:
    digest = hashlib.blake2b(digest_size=16)
    for package in ("numba", "llvmlite", "numpy"):
        digest.update(f"{package} {importlib.metadata.version(package)}\n".encode())
    digest.update(f"{sys.version} {llvm.get_host_cpu_name()} {llvm.get_host_cpu_features().flatten()}\n".encode())
    for root in (shardyard, shardyard_ps_server):
        top = Path(cast(str, root.__file__)).parent
        for source in sorted(top.rglob("*.py")):
            stat = source.stat()
            digest.update(f"{source.relative_to(top)} {stat.st_size} {int(stat.st_mtime)}\n".encode())
    return folder / f"table_loops-{digest.hexdigest()}.compiled"


def main(arguments: Sequence[str]) -> None:
    if arguments:
        _end_with(int(arguments[0]))
    folder = folder_of_loops()
    if folder is None:
        raise SystemExit("no folder for compiled loops can be written")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "table_loops.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_marked(folder):
            partition_tables.warm()
            mark(folder)


def _end_with(parent: int) -> None:
    """When the thread that has started this process ends, in whatever way, so does this one. Elsewhere than on Linux it
    ends by itself, when it is done."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        raise SystemExit("the process that has started this one is gone")


if __name__ == "__main__":
    main(sys.argv[1:])
