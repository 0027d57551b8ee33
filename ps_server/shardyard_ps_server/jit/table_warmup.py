"""Compiles the loops of tables in a process of its own, so that the server goes on meanwhile.

    python -m shardyard_ps_server.jit.table_warmup [PID]     compiles them to disk, unless they are there already

The compiler needs the interpreter for half a minute and more. In the server's own process, heartbeats and other jobs
would stand still. The other process writes machine code into numba's folder (beside the source, or $NUMBA_CACHE_DIR).
The server reads it from there in a second or two.

Owns: the process. Invariants: there is one at a time for each folder; it ends with the server that started it; all that
need the loops wait for it. If it fails, or no folder can be written, the server compiles the loops itself, and the log
says so. Must not know: jobs, what the loops do.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from shardyard.domain.errors import NotReady
from shardyard.runtime.waits import WaitRegistry
from shardyard_ps_server.jit import cache
from shardyard_ps_server.rows import partition_tables
from shardyard_ps_server.tables.loops import push_loops

log = logging.getLogger("shardyard.server")

KIND: Final = "table_loops"
COMMAND: Final = (sys.executable, "-P", "-m", "shardyard_ps_server.jit.table_warmup")
SAID_MAX: Final = 500
"""The most characters of a failed process's output that the log shows."""
_PR_SET_PDEATHSIG: Final = 1


class TableLoops:
    """The loops of tables in this process. Safe for several threads."""

    def __init__(
        self,
        wait_registry: WaitRegistry,
        load: Callable[[], None] = partition_tables.warm,
        is_loaded: Callable[[], bool] = partition_tables.is_warm,
        folder: Callable[[], Path | None] | None = None,
        command: Sequence[str] = COMMAND,
    ) -> None:
        """`load`: compiles all loops, or reads them from disk; `is_loaded`: whether this process has done so. `folder`:
        gives the folder in which numba keeps them, if not the usual one. `command`: compiles them there; its last
        argument is our process id."""
        self._wait_registry = wait_registry
        self._load, self._is_loaded, self._command = load, is_loaded, command
        self._folder = folder or folder_of_loops
        self._loading = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._processes = threading.Lock()
        self._closed = False

    @property
    def is_loaded(self) -> bool:
        return self._is_loaded()

    def load(self, what_for: str) -> None:
        """Returns when all loops are loaded. Raises NotReady if the server is being ended."""
        if self._is_loaded():
            return
        with self._wait_registry.over(lambda: f"loops for {what_for} to be compiled"), self._loading:
            if self._is_loaded():
                return
            folder = self._folder()
            if folder is None:
                log.warning("loops of tables are compiled here: no folder for them can be written (NUMBA_CACHE_DIR)")
            elif not cache.is_marked(folder, KIND):
                self._compile(folder)
            self._load()

    def close(self) -> None:
        """Ends the process that compiles, if there is one."""
        with self._processes:
            self._closed = True
            if self._process is not None:
                self._process.kill()

    def _compile(self, folder: Path) -> None:
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
    """Returns the folder in which numba keeps the loops; None: no folder can be written."""
    return cache.folder_of(push_loops.push)


def main(arguments: Sequence[str]) -> None:
    if arguments:
        _end_with(int(arguments[0]))
    folder = folder_of_loops()
    if folder is None:
        raise SystemExit("no folder for compiled loops can be written")
    with cache.compiler_lock(folder, KIND):
        if not cache.is_marked(folder, KIND):
            partition_tables.warm()
            cache.mark(folder, KIND)


def _end_with(parent: int) -> None:
    """Makes this process end when the thread that has started it ends, in whatever way. On other systems than Linux it
    ends when it is done."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        raise SystemExit("the process that has started this one is gone")


if __name__ == "__main__":
    main(sys.argv[1:])
