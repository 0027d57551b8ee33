"""What one server holds: its jobs, its identity, and what all requests share.

`Store` is state only. Requests are functions over it: `admission` checks them, `pushes`, `pulls` and `lookups` serve
workers and readers, `orders` carries out what the coordinator decides. Each raises a ShardyardError when it refuses,
and has then changed nothing. All are safe for several threads.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from shardyard.domain import limits
from shardyard.domain.errors import NotFound, ShardyardError
from shardyard.domain.ids import Incarnation, JobId, Term
from shardyard.domain.pushes import Outcome, PartResult
from shardyard.runtime.waits import WaitRegistry
from shardyard.security.request_rates import RequestRates
from shardyard.storage.access import StorageAccess
from shardyard_ps_server.hosting.hosted_job import HostedJob
from shardyard_ps_server.hosting.thread_pool import BatchPool
from shardyard_ps_server.jit.job_loops import JobLoops
from shardyard_ps_server.tables.memory.budget import Budget
from shardyard_ps_server.values.receive_memory import ReceiveMemory
from shardyard_ps_server.wal.segments import LogRoot
from shardyard_ps_server.wal.wal import OnFailure

log = logging.getLogger("shardyard.server")


@dataclass
class Counters:
    """The counters of a server that `shardyard status` shows."""

    pushes_applied: int = 0
    pushes_duplicate: int = 0
    bytes_received: int = 0
    bytes_sent: int = 0
    streams: int = 0
    """Open exchange streams: one per worker and job. `streams_attached` of them use shared memory."""
    streams_attached: int = 0


@dataclass
class Identity:
    """The incarnation under which the coordinator knows this server, and the incarnations that the server refuses."""

    incarnation: Incarnation = Incarnation(0)
    term: Term = Term(0)
    """The highest term of a coordinator that this server has seen."""
    fenced: set[Incarnation] = field(default_factory=set)


def _log_failure(failure: ShardyardError) -> None:
    log.error("this server cannot go on: %s", failure)


@dataclass(kw_only=True, eq=False)
class Store:
    """`shareable`: whether versions are put into shared memory. `logs`: the folder of logs; without one, jobs that need
    a log are refused. `on_failure` is called when the server must stop because a log cannot be written, or memory ran
    out in the middle of a push. `budget`: the memory for rows of tables; None: no bound. `receive_bytes_max`: the
    memory for what is received. `rates`: how many requests a second a job may make; None: no bound. `access`: where
    checkpoints may be."""

    shareable: bool = True
    logs: LogRoot | None = None
    on_failure: OnFailure = _log_failure
    budget: Budget | None = None
    receive_bytes_max: int = limits.JOB_BYTES_MAX
    rates: RequestRates | None = None
    access: StorageAccess = field(default_factory=StorageAccess)
    counters: Counters = field(default_factory=Counters)
    wait_registry: WaitRegistry = field(default_factory=lambda: WaitRegistry(logger=log))
    """All current waits of this server, including those of its log and those for the coordinator."""
    pool: BatchPool = field(default_factory=BatchPool)
    jobs: dict[JobId, HostedJob] = field(default_factory=dict)
    identity: Identity = field(default_factory=Identity)

    def __post_init__(self) -> None:
        self.lock = threading.Lock()
        """Guards `jobs`, `identity`, `counters`, and what jobs lend. Held only briefly."""
        self.epoch = 1
        """Raised with each change after which an admitted request may be stale: a fence, another incarnation of this
        server, a job that moves, is restored or is dropped. A request that was admitted in this epoch would be admitted
        again. Raised with `lock` held; read without it."""
        self.creating = threading.Lock()
        """Held while partitions are created, which may read a whole checkpoint."""
        self.loops = JobLoops(self.wait_registry)
        self.receiving = ReceiveMemory(self.receive_bytes_max, self.wait_registry)

    def close(self) -> None:
        """Drops all jobs, and ends all threads and processes."""
        self.loops.close()
        self.pool.close()
        self.wait_registry.close()
        with self.lock:
            jobs, self.jobs = self.jobs, {}
            self.epoch += 1
        for hosted in jobs.values():
            hosted.regions.close()
            if hosted.wal is not None:
                hosted.wal.close()

    @property
    def incarnation(self) -> Incarnation:
        return self.identity.incarnation

    def become(self, incarnation: Incarnation, term: Term) -> None:
        """Takes the incarnation that the coordinator gave this server at registration."""
        with self.lock:
            self.identity = Identity(incarnation, term, set())
            self.epoch += 1

    def hosted(self) -> list[HostedJob]:
        with self.lock:
            return [self.jobs[job] for job in sorted(self.jobs)]

    def find(self, job: JobId) -> HostedJob:
        with self.lock:
            hosted = self.jobs.get(job)
        if hosted is None:
            raise NotFound(f"job {job} is not on this server")
        return hosted

    def is_fenced(self, worker: Incarnation) -> bool:
        with self.lock:
            return worker in self.identity.fenced

    # ---- counters

    def count_push(self, results: Sequence[PartResult], received: int) -> None:
        applied = not results
        for result in results:
            applied = applied or result.outcome is Outcome.APPLIED or result.outcome is Outcome.RECORDED
        with self.lock:
            self.counters.bytes_received += received
            if applied:
                self.counters.pushes_applied += 1
            else:
                self.counters.pushes_duplicate += 1

    def count_sent(self, nbytes: int) -> None:
        """Counts values that a stream carries. Values in shared memory do not count."""
        with self.lock:
            self.counters.bytes_sent += nbytes

    def begin_stream(self) -> bool:
        """Counts a stream, and returns whether it may stay open between exchanges. Each open stream keeps a thread."""
        with self.lock:
            self.counters.streams += 1
            return self.counters.streams <= limits.EXCHANGE_STREAMS_MAX

    def attach_stream(self) -> None:
        with self.lock:
            self.counters.streams_attached += 1

    def end_stream(self, *, attached: bool) -> None:
        with self.lock:
            self.counters.streams -= 1
            self.counters.streams_attached -= attached
