"""The compiled loops of a server's jobs: loaded in a thread, before the jobs are opened.

A server starts without any loop. When it gets partitions of a job, a thread loads the loops that this job needs, or
compiles them. All servers of the job do so at the same time, while a worker sends the first values. Heartbeats and
other jobs go on, because LLVM runs without the interpreter's lock.

Owns: the threads. Invariants: a caller waits at most WAIT_MS_MAX, which is less than its call may take, and then gets
NotReady, so that it asks again; a loop that could not be loaded is compiled by the first push. Must not know:
partitions.
"""

from __future__ import annotations

import threading
from typing import Final

from shardyard.domain.consistency import Clipping, StaleRule, UpdateMode
from shardyard.domain.errors import NotReady
from shardyard.domain.ids import JobId
from shardyard.domain.layout.layouts import JobLayout
from shardyard.runtime.waits import WaitRegistry
from shardyard_ps_server.jit import optimizer_warmup
from shardyard_ps_server.jit.optimizer_warmup import DenseLoop
from shardyard_ps_server.jit.table_warmup import TableLoops

WAIT_MS_MAX: Final = 4_000


class JobLoops:
    """The loops of one server's jobs. Safe for several threads."""

    def __init__(self, wait_registry: WaitRegistry) -> None:
        self._wait_registry = wait_registry
        self._tables = TableLoops(wait_registry)
        self._lock = threading.Lock()
        self._threads: dict[JobId, threading.Thread] = {}

    def begin(
        self, job: JobId, layout: JobLayout, mode: UpdateMode, stale: StaleRule | None, clipping: Clipping
    ) -> None:
        """Starts a thread that loads what the job needs and this process does not have. Returns at once."""
        loops = optimizer_warmup.missing(optimizer_warmup.needed(layout, mode, stale, clipping))
        needs_tables = bool(layout.tables) and not self._tables.is_loaded
        if not loops and not needs_tables:
            return
        with self._lock:
            if job not in self._threads:
                arguments, name = (job, loops, needs_tables), f"load-loops-of-{job}"
                self._threads[job] = threading.Thread(target=self._load, args=arguments, name=name, daemon=True)
                self._threads[job].start()

    def await_loaded(self, job: JobId, wait_ms: int | None = WAIT_MS_MAX) -> None:
        """Returns when the job's loops are loaded. Raises NotReady after `wait_ms`; None: waits without a bound."""
        thread = self._threads.get(job)
        if thread is None:
            return
        thread.join(None if wait_ms is None else wait_ms / 1000)
        if thread.is_alive():
            raise NotReady(
                f"the loops of job {job} are being compiled on this server",
                why="it is done once on a machine",
                todo="wait; python -m shardyard_ps_server.jit.optimizer_warmup compiles them beforehand",
            )

    def close(self) -> None:
        """Ends the process that compiles loops of tables, if there is one. A thread that compiles ends by itself."""
        self._tables.close()

    def _load(self, job: JobId, loops: list[DenseLoop], needs_tables: bool) -> None:
        try:
            if loops:
                names = ", ".join(map(str, loops))
                with self._wait_registry.over(lambda: f"loops of job {job} to be compiled: {names}"):
                    optimizer_warmup.load(loops)
            if needs_tables:
                self._tables.load(f"the tables of job {job}")
        except NotReady:
            return  # the server is being ended
        finally:
            with self._lock:
                self._threads.pop(job, None)
