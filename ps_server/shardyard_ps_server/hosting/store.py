"""What a server holds: jobs and their partitions, who may change them, and what is refused.

Owns: hosted jobs, fenced incarnations, counters. Invariants: a request of a stale incarnation, generation or term
changes nothing; all parts of a push are validated before any is applied (rule A4); memory is asked for only after a
payload's length was held against the layout. Must not know: protobuf, grpc.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import numpy as np

from shardyard.codecs.rows.row_values import encode_rows
from shardyard.domain import limits, optimizers
from shardyard.domain.consistency import SspReport, UpdateMode
from shardyard.domain.errors import (
    Internal,
    InvalidRequest,
    MalformedPayload,
    NotFound,
    NotReady,
    ShapeMismatch,
    ShardyardError,
    StaleGeneration,
    StaleIncarnation,
    StaleTerm,
    TooLarge,
)
from shardyard.domain.failpoints import failpoint
from shardyard.domain.ids import Caller, Generation, Incarnation, JobId, PartitionId, Term, Token, Version
from shardyard.domain.layout.layouts import JobLayout
from shardyard.domain.pulls import (
    LookupRequest,
    NotReadyPart,
    PinRequest,
    PulledPart,
    PullHeader,
    RequestedRows,
    RowCode,
)
from shardyard.domain.push_names import DoneDataShards, SourceKey, Watermark, WorkerSource
from shardyard.domain.pushes import ExchangeReply, GatheredPart, Outcome, PartResult, PushHeader, PushKind, StepVerdict
from shardyard.domain.tables.row_ids import Ids
from shardyard.runtime.waits import WaitRegistry
from shardyard.storage.storage import open_storage
from shardyard_ps_server.checkpoint.restore import NO_RESTORE, Restore
from shardyard_ps_server.checkpoint.saver import Saved, SaveRequest
from shardyard_ps_server.hosting.hosted_job import Held, HostedJob
from shardyard_ps_server.hosting.pacing import SspPacing
from shardyard_ps_server.hosting.pins import await_pin
from shardyard_ps_server.hosting.provisioning import Provisioning
from shardyard_ps_server.hosting.thread_pool import BatchPool
from shardyard_ps_server.jit.job_loops import JobLoops
from shardyard_ps_server.partition.dense_state import Contribution
from shardyard_ps_server.partition.partition import Partition, RowsToRead
from shardyard_ps_server.partition.update_rules import UpdateRules
from shardyard_ps_server.rows.lookups_in_flight import TablePart
from shardyard_ps_server.rows.partition_tables import (
    Floats,
    PushedTableRows,
    RowQuery,
    check_pushed,
    check_wanted,
    read_all_ids,
    table_at,
    unpack_pushed,
)
from shardyard_ps_server.tables.memory.budget import Budget
from shardyard_ps_server.values.versions import NO_BYTES, Bytes, aligned_empty
from shardyard_ps_server.wal.records import RecordKind
from shardyard_ps_server.wal.replay import (
    bases_of,
    open_head,
    pass_over_head,
    pieces_of,
    push_head,
    verdict_head,
)
from shardyard_ps_server.wal.row_records import said_of, with_times
from shardyard_ps_server.wal.segments import LogRoot
from shardyard_ps_server.wal.wal import OnFailure, Wal

log = logging.getLogger("shardyard.server")

NOBODY: Final = Incarnation(0)

Work = tuple[Partition, Contribution]


CREW_BYTES_MIN = limits.MIB
"""A push of at least so much is applied by several threads, a partition each."""


@dataclass
class Counters:
    pushes_applied: int = 0
    pushes_duplicate: int = 0
    bytes_received: int = 0
    bytes_sent: int = 0
    streams: int = 0
    """Exchange streams that are open, one for each worker and job; `streams_attached` of them with shared memory."""
    streams_attached: int = 0


@dataclass
class _JobRecord:
    """Who this server is and whom it refuses."""

    incarnation: Incarnation = Incarnation(0)
    term: Term = Term(0)
    fenced: set[Incarnation] = field(default_factory=set)


class Store:
    """Safe for several threads. Every method raises ShardyardErrors for what it refuses, having changed nothing."""

    def __init__(
        self,
        *,
        shareable: bool = True,
        logs: LogRoot | None = None,
        on_failure: OnFailure | None = None,
        budget: Budget | None = None,
    ) -> None:
        """`logs`: where logs are kept; None: jobs that need one are refused. `on_failure`: is told when one cannot be
        written, or a push was applied in part for want of memory, after which this server must stop. `budget`: of the
        memory for rows of tables."""
        self._lock = threading.Lock()
        self._jobs: dict[JobId, HostedJob] = {}
        self._standing = _JobRecord()
        self._creating = threading.Lock()
        self._logs = logs
        self._on_failure = on_failure or _tell_failure
        self.budget = budget
        self._crew = BatchPool()
        self.counters = Counters()
        self.wait_registry = WaitRegistry(logger=log)
        """Whatever this server waits for is said here: in its log, and to the coordinator."""
        self._loops = JobLoops(self.wait_registry)
        self._hosting = Provisioning(
            shareable=shareable, logs=logs, on_failure=self._on_failure, budget=budget, wait_registry=self.wait_registry
        )

    def close(self) -> None:
        """Forgets all jobs. No thread is left, and no process."""
        self._loops.close()
        self._crew.close()
        self.wait_registry.close()
        with self._lock:
            jobs, self._jobs = self._jobs, {}
        for hosted in jobs.values():
            hosted.regions.close()
            if hosted.wal is not None:
                hosted.wal.close()

    @property
    def incarnation(self) -> Incarnation:
        return self._standing.incarnation

    def become(self, incarnation: Incarnation, term: Term) -> None:
        """The coordinator has registered this server."""
        with self._lock:
            self._standing = _JobRecord(incarnation, term, set())

    def fence(self, incarnations: Iterable[int]) -> None:
        fenced = {Incarnation(number) for number in incarnations}
        with self._lock:
            fresh = fenced - self._standing.fenced
            self._standing.fenced.update(fresh)
        for hosted in self.hosted() if fresh else ():
            for incarnation in sorted(fresh):
                self.take_back(hosted, incarnation)
            hosted.rows_in_flight.forget(fresh)
            if hosted.wal is not None:  # what was recorded before counts, from before this returns
                with suppress(NotReady):
                    hosted.wal.drain()
        for hosted in self.hosted():
            if hosted.pacing is not None:  # which may have been told to expect them since they were fenced
                hosted.pacing.forget(fenced)

    # ---- the coordinator's orders

    def check_coordinator(self, caller: Caller) -> None:
        """Raises StaleTerm for the word of a coordinator that was replaced."""
        with self._lock:
            if caller.term < self._standing.term:
                raise StaleTerm(f"term {caller.term}; this server has seen {self._standing.term}")
            self._standing.term = caller.term

    def create(
        self,
        job: JobId,
        generation: Generation,
        layout: JobLayout,
        owned: Sequence[PartitionId],
        rules: UpdateRules,
        restore: Restore = NO_RESTORE,
        *,
        staleness: int | None = None,
        working: Iterable[Incarnation] = (),
        switches: int = 0,
    ) -> None:
        """Takes over partitions: with zeros for values, or as a checkpoint has them, then open. Partitions that are
        here already stay as they are unless they are restored, in another life; but of a job with logs, where no
        checkpoint is named under a higher generation, all begin anew. Those that are not named under a higher
        generation are not this server's any more. The same order again does nothing. `staleness`: of an asynchronous
        job, its bound, if it has one; `working`: workers that take steps at this moment; `switches`: the number of the
        switch of the job that `staleness` is of.

        Raises InvalidRequest, StaleGeneration, TooLarge, StorageUnavailable, LogDamaged, and what loading raises,
        having changed nothing.
        """
        if staleness is not None and (rules.mode is UpdateMode.SYNC or staleness > limits.STALENESS_MAX):
            raise InvalidRequest(f"a staleness of {staleness} in job {job}, which is {rules.mode.value}")
        rules.check(job, layout)
        restore.check(job, rules)
        if any(partition >= len(layout.partitions) for partition in owned):
            raise InvalidRequest(f"partitions {list(owned)} of a layout with {len(layout.partitions)}")
        if rules.logged and self._logs is None:
            raise InvalidRequest(
                f"partitions of job {job}, which wants a log, on a server that keeps none",
                todo="give the server a folder for logs (yard.wal), or set job.durability to checkpoint",
            )
        self._loops.begin(job, layout, rules.stale, rules.clipping)
        if restore.entries:  # they are open at once; the coordinator waits long for this call
            self._loops.await_loaded(job, wait_ms=None)
        elif layout.tables:
            self._loops.await_loaded(job)
        with self._creating:
            with self._lock:
                hosted = self._jobs.get(job)
            goes_over = hosted is not None and hosted.goes_over(generation, owned, rules.mode, restore)
            if hosted is not None and not goes_over:
                hosted.check_again(generation, owned, matches=hosted.matches(layout, rules, staleness, switches))
                blank = set(owned) - set(hosted.partitions) - {entry.partition for entry in restore.entries}
                if hosted.open and blank and not hosted.begins_anew(generation, restore):
                    raise InvalidRequest(f"partition {min(blank)} of job {job}, which is open, without values")
            loaded = self._hosting.load(job, None if goes_over else hosted, layout, owned, restore)
            if hosted is not None and not goes_over and not hosted.begins_anew(generation, restore):
                if hosted.pacing is not None:
                    hosted.pacing.switch(staleness, switches)
                    if generation > hosted.generation:  # else it came before
                        hosted.pacing.expect(working)
                self._hosting.give(hosted, generation, owned, loaded, restore)
                return
            pacing = None
            if rules.mode is UpdateMode.ASYNC:
                pacing = SspPacing(staleness, switches)
                pacing.expect(working)
            wal = None if hosted is None else hosted.wal
            begun = self._hosting.begin(
                job, generation, layout, owned, rules, loaded, restore, server=self.incarnation, pacing=pacing, wal=wal
            )
            with self._lock:
                self._jobs[job] = begun
            if hosted is not None:
                hosted.pins.clear()
                if goes_over:
                    hosted.generation = generation  # refused is what was admitted, and comes to its partitions now
                    hosted.let_go()
                hosted.regions.close()

    # ---- checkpoints

    def save(
        self, caller: Caller, server: Incarnation, generation: Generation, order: SaveRequest, url: str
    ) -> list[Saved]:
        """Writes all partitions of a job into a checkpoint; with a log, a new segment of it begins before. Raises what
        Saver.save raises."""
        hosted = self.admit(caller, server, generation, reads=True)
        if not hosted.open:
            raise NotReady(f"job {hosted.job} has no first values yet")
        if (order.step is None) is (hosted.mode is UpdateMode.SYNC):
            how = "without" if order.step is None else "at"
            raise InvalidRequest(f"a checkpoint of job {hosted.job}, which is {hosted.mode.value}, {how} a step")
        if hosted.wal is not None:
            with hosted.wal.admission:
                hosted.wal.rotate(order.number)
            hosted.wal.prune(order.oldest)
            assert self._logs is not None
            self._logs.prune(job=hosted.job, server=self.incarnation, generation=generation, needed=order.logs)
        partitions = [hosted.partitions[number] for number in sorted(hosted.partitions)]
        # a part of the next step that was recorded before the new segment would be in neither
        saved = hosted.saver.save(partitions, order, open_storage(url), between=hosted.wal is not None)
        hosted.check_generation(generation)  # else some of them were cut before, some after they were restored
        return saved

    def forget(
        self,
        caller: Caller,
        server: Incarnation,
        generation: Generation,
        done: Sequence[DoneDataShards],
        workers: Sequence[Incarnation],
        floor: Token,
    ) -> None:
        """Rule A7. `workers` are gone: they are refused from now on, here too. Raises InvalidRequest where ranks, whose
        tokens live as long as the job, would be refused."""
        hosted = self.admit(caller, server, generation, reads=True)
        if hosted.mode is UpdateMode.SYNC:
            raise InvalidRequest(f"sources to be forgotten in job {hosted.job}, which is sync")
        self.fence(workers)
        with hosted.deciding():
            for number in sorted(hosted.partitions):
                hosted.partitions[number].forget(done, workers, floor, partial(hosted.check_generation, generation))

    def pass_over(
        self, caller: Caller, server: Incarnation, generation: Generation, worker: Incarnation, next_sequence: int
    ) -> None:
        """Rule A11. Raises InvalidRequest where no worker's own source can be."""
        hosted = self.admit(caller, server, generation, reads=True)
        if hosted.mode is UpdateMode.SYNC or next_sequence > limits.SEQUENCE_MAX:
            raise InvalidRequest(
                f"#{next_sequence} of worker {worker} to go on with in job {hosted.job}, which is {hosted.mode.value}",
                why="ranks are computed again",
            )
        key, check_current = SourceKey(WorkerSource(worker)), partial(hosted.check_generation, generation)
        if hosted.wal is None:
            for number in sorted(hosted.partitions):
                hosted.partitions[number].pass_over(key, next_sequence, check_current)
            return
        with hosted.wal.admission:
            check_current()
            ticket = hosted.wal.append(RecordKind.PASS_OVER, pass_over_head(worker, next_sequence), NO_BYTES)
        hosted.wal.sync(ticket)
        with hosted.wal.turn(ticket):
            for number in sorted(hosted.partitions):
                hosted.partitions[number].pass_over(key, next_sequence, _check_nothing)

    def set_staleness(
        self, caller: Caller, server: Incarnation, generation: Generation, staleness: int | None, switches: int
    ) -> None:
        """Values of an asynchronous job wait for slow workers, for others, or for nobody. `switches`: the number of the
        switch of the job that says so; an order of an earlier one changes nothing. Raises InvalidRequest."""
        hosted = self.admit(caller, server, generation, reads=True)
        if hosted.pacing is None or (staleness is not None and staleness > limits.STALENESS_MAX):
            raise InvalidRequest(f"a staleness of {staleness} in job {hosted.job}, which is {hosted.mode.value}")
        if not hosted.pacing.agrees(staleness, switches):
            raise InvalidRequest(
                f"a staleness of {staleness} in job {hosted.job}, where that switch has set {hosted.pacing.bound}"
            )
        hosted.pacing.switch(staleness, switches)

    def open(self, job: JobId, generation: Generation) -> None:
        """Raises NotReady while the job's loops are being compiled."""
        hosted = self._find(job)
        hosted.check_generation(generation)
        self._loops.await_loaded(job)
        for number in sorted(hosted.partitions):
            hosted.partitions[number].open()
        hosted.open = True

    def drop(self, job: JobId) -> None:
        with self._lock:
            hosted = self._jobs.pop(job, None)
        if hosted is not None:
            hosted.pins.clear()
            hosted.regions.close()
            if hosted.wal is not None:
                hosted.wal.close(remove=True)
                assert self._logs is not None
                self._logs.end_job(job, self.incarnation)

    # ---- workers' requests

    def admit(self, caller: Caller, server: Incarnation, generation: Generation, *, reads: bool = False) -> HostedJob:
        """The job that a request is about. Raises StaleIncarnation, StaleGeneration, NotFound.

        Whoever changes something must say who it is; the coordinator and readers, which have no incarnation, only read.
        """
        with self._lock:
            standing = self._standing
            if server != standing.incarnation:
                raise StaleIncarnation(
                    f"a request for server {server}; here is server {standing.incarnation}",
                    why="the server was started anew and does not have what the other one had",
                    todo="fetch the partition map, and send again to whom it names; a worker does so by itself",
                )
            if caller.incarnation in standing.fenced:
                raise StaleIncarnation(f"a request of member {caller.incarnation}, which was declared dead")
        if caller.incarnation == 0 and not reads:
            raise InvalidRequest("a request without an incarnation", todo="register with the coordinator first")
        hosted = self._find(caller.job)
        hosted.check_generation(generation)
        return hosted

    def admit_push(self, order: PushHeader, before: PushHeader | None = None) -> HostedJob:
        """Everything about a push that can be checked before its payload comes. `before`: an order of the same worker
        that was admitted; parts that are the same object were checked then."""
        hosted = self.admit(order.caller, order.server, order.generation)
        wants_values = order.kind is PushKind.VALUES
        if wants_values == hosted.open:
            if hosted.open:
                raise InvalidRequest(f"first values for job {hosted.job}, which is open")
            raise NotReady(f"job {hosted.job} has no first values yet")
        source = order.name.key.source
        if isinstance(source, WorkerSource) and source.incarnation != order.caller.incarnation:
            raise InvalidRequest(f"{order.name} sent by worker {order.caller.incarnation}")
        if order.name.key.lane != 0:
            raise InvalidRequest(f"lane {order.name.key.lane}; this job has lane 0 only")
        if before is None or order.parts is not before.parts or order.kind is not before.kind:
            self._check_parts(hosted, order)
        if order.kind is PushKind.GRADIENT:
            if order.weight == 0:
                raise InvalidRequest(f"{order.name}: a gradient of weight 0", todo="send an empty push instead")
            if before is None or order.groups is not before.groups:
                optimizers.check_update(hosted.layout.optimizer, order.groups)
        if order.rows:
            check_pushed(hosted.layout.tables, order.rows, None if wants_values else order.table_groups)
        if order.bases and hosted.rules.stale is None:
            raise InvalidRequest(
                f"{order.name} says what it was computed on, in job {hosted.job}, which has no rule for that"
            )
        if order.pull is not None and (before is None or order.pull is not before.pull):
            self.admit_pull(order.pull)
        return hosted

    def _check_parts(self, hosted: HostedJob, order: PushHeader) -> None:
        wants_values = order.kind is PushKind.VALUES
        for part in order.parts:
            partition = hosted.find(part.partition)
            if part.code_bytes and order.kind is not PushKind.EMPTY:
                if wants_values:
                    raise InvalidRequest("first values that are compressed", todo="send them as they are")
                if order.shared_at is not None or order.rest is not None:
                    raise InvalidRequest("codes in shared memory, or ahead of their header", todo="send them as data")
                partition.check_codes(part)
                continue
            expected = 0 if order.kind is PushKind.EMPTY else partition.expected_bytes(part)
            whole = order.shared_at is not None or order.rest is not None
            if whole and part.payload_bytes and order.kind is not PushKind.EMPTY:
                expected = partition.payload_bytes  # read where it lies, whatever is absent
            if wants_values:  # first rows come in pushes of their own
                expected = 0 if order.rows else partition.payload_bytes
            if part.payload_bytes != expected:
                raise ShapeMismatch(f"partition {part.partition} with {part.payload_bytes} bytes; expected {expected}")

    def initialize(self, hosted: HostedJob, order: PushHeader, payload: Bytes, rows: Bytes = NO_BYTES) -> None:
        """Takes admitted first values whose payload is complete: each partition the whole of its values or nothing; or
        rows, over those that it has."""
        if order.rows:
            for partition, given in _by_partition(hosted.layout, order, rows).items():
                hosted.find(partition).set_rows(given, lambda: self._check_current(hosted, order))
            return
        for part, piece in pieces_of(order, payload):
            hosted.find(part).set_values(piece, lambda: self._check_current(hosted, order))

    def push(
        self, hosted: HostedJob, order: PushHeader, payload: Bytes, rows: Bytes = NO_BYTES
    ) -> tuple[PartResult, ...]:
        """Applies an admitted push whose payload is complete: each part once, in its partition's turn. `rows`: the
        bytes of its rows."""
        brought = _by_partition(hosted.layout, order, rows) if order.rows else {}
        if hosted.wal is not None and order.shared_at is not None:
            payload = _aligned(payload)  # the log and the update must read the same (rule C5)
        counted = order.kind is PushKind.GRADIENT
        work: list[Work] = []
        coded = any(part.code_bytes for part in order.parts)
        for part, (partition, piece), base in zip(order.parts, pieces_of(order, payload), bases_of(order), strict=True):
            target = hosted.find(partition)
            if coded and not part.code_bytes and len(piece):
                piece = _aligned(piece)  # behind codes, which end anywhere
            full, present = target.unpack(part, piece)
            groups = order.groups if counted else None
            mine = brought.get(partition, ())
            work.append(
                (
                    target,
                    Contribution(order.weight, groups, full, present, base, order.overflow, mine, order.table_groups),
                )
            )
        failpoint("push.before_apply")
        results = (
            self._apply(hosted, order, work)
            if hosted.wal is None
            else self._record(hosted.wal, hosted, order, payload, work, rows)
        )
        if hosted.rows_fly:
            pushed = [(TablePart(number, each.table), each.ids) for number, rows_ in brought.items() for each in rows_]
            hosted.rows_in_flight.end(order.caller.incarnation, pushed)
        failpoint("push.before_reply")
        sent = len(payload) if order.shared_at is None else 0
        self._count(results, sent + (len(rows) if order.rows_at is None else 0))
        return results

    def _apply(self, hosted: HostedJob, order: PushHeader, work: Sequence[Work]) -> tuple[PartResult, ...]:
        if len(work) > 1:
            for target, contribution in work:
                target.check_push(order.name, contribution)

        def check_current() -> None:
            self._check_current(hosted, order)

        try:
            return self._push_all(order, work, check_current)
        finally:
            self._tell_torn([target for target, _ in work])

    def _push_all(
        self, order: PushHeader, work: Sequence[Work], check_current: Callable[[], None]
    ) -> tuple[PartResult, ...]:
        works = [partial(target.push, order.name, each, check_current) for target, each in work]
        if order.payload_bytes + order.rows_bytes >= CREW_BYTES_MIN:
            return tuple(self._crew.run(works))
        return tuple([each() for each in works])

    def _record(
        self, wal: Wal, hosted: HostedJob, order: PushHeader, payload: Bytes, work: Sequence[Work], rows: Bytes
    ) -> tuple[PartResult, ...]:
        """As `_apply`, once the push is durable. That it counts, and what expires with it, is decided when it is
        appended: from there on nothing but what was appended before can change what becomes of it."""
        with ExitStack() as over:
            with wal.admission:
                self._check_current(hosted, order)
                if order.rows and any(target.is_close_to_full(each) for target, each in work):
                    wal.drain()
                for target, contribution in work:
                    target.check_push(order.name, contribution)
                decided: list[Work] = []
                for target, contribution in work:
                    decided.append((target, target.await_push(contribution)))
                    over.callback(target.end_push, decided[-1][1])
                expired, codes = said_of([(target.id, each.gone) for target, each in decided])
                said = with_times(order.rows, [(target.id, each.rows) for target, each in decided])
                head = push_head(replace(order, rows=said, expired=expired))
                ticket = wal.append(RecordKind.PUSH, head, payload, rows, *codes)
            wal.sync(ticket)
            with wal.turn(ticket):
                try:
                    return self._push_all(order, decided, _check_nothing)
                except BaseException as error:
                    torn = _torn([target for target, _ in decided])
                    if torn is not None:  # what the log says and what is here are two things now
                        raise torn.anew() from error
                    raise

    def take_verdict(self, hosted: HostedJob, order: PushHeader, verdict: StepVerdict) -> None:
        """Gives the verdict that an admitted exchange brings to the partitions that wait for it, if any does. Raises
        InvalidRequest, NotReady where the log has failed, and TooLarge."""
        owned = [hosted.partitions[number] for number in sorted(hosted.partitions)]
        waiting = [partition for partition in owned if partition.awaits(verdict)]
        if not waiting:
            return
        if hosted.wal is None:
            self._give_verdict(waiting, verdict, partial(self._check_current, hosted, order))
            return
        with hosted.wal.admission:
            self._check_current(hosted, order)
            head = verdict_head(verdict, [partition.id for partition in waiting])
            ticket = hosted.wal.append(RecordKind.VERDICT, head, NO_BYTES)
        hosted.wal.sync(ticket)
        with hosted.wal.turn(ticket):
            self._give_verdict(waiting, verdict, _check_nothing)

    def _give_verdict(
        self, partitions: Sequence[Partition], verdict: StepVerdict, check_current: Callable[[], None]
    ) -> None:
        works = [partial(partition.take_verdict, verdict, check_current) for partition in partitions]
        try:
            if sum([partition.payload_bytes for partition in partitions]) >= CREW_BYTES_MIN:
                self._crew.run(works)
                return
            for work in works:
                work()
        finally:
            self._tell_torn(partitions)

    def _tell_torn(self, partitions: Sequence[Partition]) -> None:
        torn = _torn(partitions)
        if torn is not None:
            self._on_failure(torn)

    # ---- rows

    def look_up(self, asked: LookupRequest, codes: Bytes) -> Bytes:
        """The rows that are asked for, one after the other, float32 or coded; of each partition as of one version where
        the job is synchronous. `codes`: of their ids. Changes nothing. Raises InvalidRequest, MalformedPayload,
        TooLarge, NotReady where there are no first values or a version does not come in time, NotFound where it has
        passed."""
        hosted = self.admit(asked.caller, asked.server, asked.generation, reads=True)
        if not hosted.open:
            raise NotReady(f"job {hosted.job} has no first values yet")
        self.admit_wanted(hosted, asked.wanted, code=asked.code)
        until = time.monotonic() + asked.wait_ms / 1000
        rows = self.read_wanted(hosted, asked.wanted, codes)
        found = self.find_rows(hosted, rows, asked.number, until, asked.code, asked.pin, by=asked.caller.incarnation)
        hosted.check_generation(asked.generation)  # else partitions may have gone back, or moved, meanwhile
        return found

    def admit_wanted(
        self,
        hosted: HostedJob,
        wanted: Sequence[RequestedRows],
        bytes_max: int = limits.ROWS_ANSWERED_BYTES_MAX,
        code: RowCode = RowCode.FLOAT32,
    ) -> None:
        """What can be said of rows that are asked for before their ids come. Raises InvalidRequest, MalformedPayload,
        TooLarge."""
        nbytes = check_wanted(hosted.layout.tables, wanted, code)
        if nbytes > bytes_max:
            raise TooLarge(
                f"a look-up of {nbytes} bytes of rows; at most {bytes_max} are given at a time",
                todo="ask for fewer at a time",
            )
        for each in wanted:
            for number in each.partitions:
                hosted.find(number)

    def read_wanted(self, hosted: HostedJob, wanted: Sequence[RequestedRows], codes: Bytes) -> list[RowQuery]:
        """What an admitted look-up asks for. Raises MalformedPayload, InvalidRequest."""
        announced = sum([sum(each.id_bytes) for each in wanted])
        if announced != len(codes):
            raise MalformedPayload(f"{len(codes)} bytes of ids; announced {announced}")
        found, at = [], 0
        for each in wanted:
            ends = [*itertools.accumulate(each.id_bytes, initial=at)]
            parts = [*zip(each.partitions, each.rows, ends, ends[1:], strict=False)]
            for number, ids in zip(each.partitions, read_all_ids(hosted.layout, each.table, parts, codes), strict=True):
                found.append(RowQuery(each.table, number, ids))
            at = ends[-1]
        return found

    def find_rows(
        self,
        hosted: HostedJob,
        asked: Sequence[RowQuery],
        number: int | None = None,
        until: float = 0.0,
        code: RowCode = RowCode.FLOAT32,
        pin: bytes = b"",
        into: Bytes | None = None,
        *,
        by: Incarnation = NOBODY,
    ) -> Bytes:
        """The rows, one after the other, float32 or coded; of each partition as of one version where the job is
        synchronous. `number`: that version, for which is waited until `until` (time.monotonic); None: the newest;
        `pin`: those that a reader holds. `into`: memory of a worker, of just as many bytes, for rows that are not
        coded. `by`: a worker, who may push them; until then they do not expire. Changes nothing else. Raises what
        Partition.look_up, or look_up_held, raises."""
        if by != NOBODY and hosted.rows_fly:
            hosted.rows_in_flight.begin(by, [(TablePart(partition, table), ids) for table, partition, ids in asked])
            if self._is_fenced(by):  # since it was admitted
                hosted.rows_in_flight.forget([by])
        dims = [hosted.layout.tables[each.table].dim for each in asked]
        nbytes = 4 * sum([dim * each.ids.size for dim, each in zip(dims, asked, strict=True)])
        found, at = aligned_empty(nbytes) if into is None else into, 0
        by_partition: dict[PartitionId, list[RowsToRead]] = {}
        answers: list[Floats] = []
        for dim, (table, partition, ids) in zip(dims, asked, strict=True):
            rows = found[at : at + 4 * dim * ids.size].view(np.float32).reshape(ids.size, dim)
            by_partition.setdefault(partition, []).append(RowsToRead(table, ids, rows))
            answers.append(rows)
            at += rows.nbytes
        pinned = hosted.pins.rows(pin, list(by_partition), _now_ms()) if pin else {}
        for partition, of_partition in by_partition.items():
            if pin:
                holder, wanted = pinned[partition]
                holder.look_up_held(of_partition, wanted)
                continue
            hosted.find(partition).look_up(of_partition, number, until)
        if code is not RowCode.FLOAT32:
            found = np.frombuffer(b"".join([encode_rows(rows, code) for rows in answers]), np.uint8)
        if into is None:
            self.note_sent(len(found))
        return found

    def read_rows(
        self,
        caller: Caller,
        server: Incarnation,
        generation: Generation,
        number: PartitionId,
        table: int,
        pin: bytes = b"",
    ) -> Iterator[tuple[Ids, Floats]]:
        """All rows of a table that a partition has, as they are between two of its updates, in pieces. `pin`: as they
        were in the version that a reader holds, as Partition.items_held has it. Raises NotReady while they are read for
        somebody else, and NotFound, VersionPassed where that version is not held."""
        hosted = self.admit(caller, server, generation, reads=True)
        if not hosted.open:
            raise NotReady(f"job {hosted.job} has no first values yet")
        table_at(hosted.layout.tables, table)
        if pin:
            holder, wanted = hosted.pins.rows(pin, [number], _now_ms())[number]
            yield from holder.items_held(table, wanted)
            return
        for chunk in hosted.find(number).items(table):
            yield chunk.ids[: chunk.values.shape[0]], chunk.values

    def admit_pull(self, wish: PullHeader) -> HostedJob:
        hosted = self.admit(wish.caller, wish.server, wish.generation, reads=bool(wish.pin))
        for partition in wish.partitions:
            hosted.find(partition)
        return hosted

    def hear_pace(self, hosted: HostedJob, worker: Incarnation, pace: SspReport) -> int | None:
        """Of an admitted exchange whose push is counted. The clock of a worker that joins. Raises InvalidRequest where
        the job is synchronous."""
        if hosted.pacing is None:
            raise InvalidRequest(f"the pace of worker {worker} in job {hosted.job}, which is {hosted.mode.value}")
        clock = hosted.pacing.hear(worker, pace)
        if self._is_fenced(worker):  # since it was admitted
            hosted.pacing.forget([worker])
        return clock

    def hold(self, hosted: HostedJob, wish: PullHeader, pace: SspReport | None = None) -> tuple[ExchangeReply, Held]:
        """Waits for what an admitted pull wishes, and for slower workers where the asker says its `pace`, at most
        `wish.wait_ms`. The buffers, one for each partition unless something is missing, may be read until they are
        released or lent."""
        if wish.pin:
            return self._hold_pinned(hosted, wish)
        until = time.monotonic() + wish.wait_ms / 1000
        if hosted.pacing is not None and pace is not None and hosted.open:
            waits_for = hosted.pacing.await_others(wish.caller.incarnation, pace, until)
            if waits_for:
                newest = [(number, hosted.find(number).describe()[0]) for number in wish.partitions]
                return ExchangeReply(
                    missing=tuple(NotReadyPart(n, v, wish.number, waits_for) for n, v in newest)
                ), Held()
        if not hosted.open:
            missing = [
                NotReadyPart(partition, Version(1, 0), wish.number, "first values from the initializer")
                for partition in wish.partitions
            ]
            time.sleep(min(wish.wait_ms, 50) / 1000)
            return ExchangeReply(missing=tuple(missing)), Held()
        held: list[tuple[Partition, Bytes]] = []
        gathered: list[GatheredPart] = []
        try:
            parts: list[PulledPart] = []
            missing = []
            for number in wish.partitions:
                partition = hosted.find(number)
                found = partition.hold(wish.number, wish.exactly, until)
                if hosted.rules.clipping.norm and wish.exactly and wish.number:
                    told = partition.gathered(wish.number - 1)
                    gathered += [] if told is None else [told]
                if isinstance(found, NotReadyPart):
                    missing.append(found)
                    continue
                version, buffer = found
                held.append((partition, buffer))
                parts.append(PulledPart(number, version))
        except BaseException:
            Held(tuple(held)).release()
            raise
        if missing:
            Held(tuple(held)).release()
            return ExchangeReply(missing=tuple(missing), gathered=tuple(gathered)), Held()
        return ExchangeReply(parts=tuple(parts), gathered=tuple(gathered)), Held(tuple(held))

    def _hold_pinned(self, hosted: HostedJob, wish: PullHeader) -> tuple[ExchangeReply, Held]:
        found = hosted.pins.hold(wish.pin, wish.partitions, _now_ms())
        parts = tuple([PulledPart(partition.id, version) for partition, version, _ in found])
        return ExchangeReply(parts=parts), Held(tuple([(partition, buffer) for partition, _, buffer in found]))

    def pin(self, wish: PinRequest) -> tuple[tuple[PulledPart, ...], tuple[NotReadyPart, ...]]:
        """A version of all partitions of a job that are here is held for a reader, who gets what that holds, or lacks.
        The same wish again renews the lease. Raises InvalidRequest (facts: newest) where that version has passed,
        NotReady, NotFound where it will not come, TooLarge."""
        hosted = self.admit(wish.caller, wish.server, wish.generation, reads=True)
        if not hosted.open:
            raise NotReady(f"job {hosted.job} has no first values yet")
        partitions = [hosted.partitions[number] for number in sorted(hosted.partitions)]
        if (wish.number is None) is (hosted.mode is UpdateMode.SYNC):
            how = "without" if wish.number is None else "at"
            newest = max((each.describe()[0].number for each in partitions), default=0)
            raise InvalidRequest(
                f"a pin of job {hosted.job}, which is {hosted.mode.value}, {how} a version",
                todo="name one that comes (sync), or none (async)",
                facts={"newest": str(newest)} if wish.number is None else {},
            )
        pin = hosted.pins.take(
            wish.pin, partitions, wish.number, now_ms=_now_ms(), lease_ms=wish.lease_ms, rows=wish.rows
        )
        try:
            hosted.check_generation(wish.generation)  # else partitions may have moved since they were looked up
        except StaleGeneration:
            hosted.pins.release(wish.pin)
            raise
        return await_pin(pin, time.monotonic() + wish.wait_ms / 1000)

    def unpin(self, job: JobId, pin: bytes) -> None:
        """A pin that is not there is no error."""
        with self._lock:
            hosted = self._jobs.get(job)
        if hosted is not None:
            hosted.pins.release(pin)

    def expire_pins(self) -> None:
        """Releases what readers hold that were not heard of for their lease."""
        for hosted in self.hosted():
            hosted.pins.expire(_now_ms())

    def note_sent(self, nbytes: int) -> None:
        """So many bytes of values go to a worker over a stream; what lies in shared memory does not."""
        with self._lock:
            self.counters.bytes_sent += nbytes

    # ---- exchange streams

    def begin_stream(self) -> bool:
        """Whether the stream may stay open between exchanges, as far as there are threads for that."""
        with self._lock:
            self.counters.streams += 1
            return self.counters.streams <= limits.EXCHANGE_STREAMS_MAX

    def note_attached(self) -> None:
        with self._lock:
            self.counters.streams_attached += 1

    def end_stream(self, *, attached: bool) -> None:
        with self._lock:
            self.counters.streams -= 1
            self.counters.streams_attached -= attached

    # ---- what workers on this machine read

    def lend(self, hosted: HostedJob, incarnation: Incarnation, held: Held) -> None:
        """A worker reads from these buffers until `settle`, of its exchange after the next, takes them back."""
        with self._lock:
            fenced = incarnation in self._standing.fenced
            if not fenced:
                hosted.lent.setdefault(incarnation, deque()).append(held)
        if fenced:
            held.release()

    def keep(self, hosted: HostedJob, worker: Incarnation, result: ExchangeReply, held: Held) -> None:
        """A worker is given these values, and computes on them next: where gradients are compensated they are kept
        until it says that it has gone on, or is refused."""
        if hosted.rules.stale is None or not hosted.rules.stale.compensation:
            return
        for part, (partition, buffer) in zip(result.parts, held.buffers, strict=False):  # none while some are missing
            partition.keep(worker, part.version, buffer)
        if self._is_fenced(worker):  # since it was admitted
            self._keep_no_more(hosted, worker)

    def _keep_no_more(self, hosted: HostedJob, worker: Incarnation) -> None:
        if hosted.rules.stale is not None:
            for number in sorted(hosted.partitions):
                hosted.partitions[number].keep_no_more(worker)

    def settle(self, hosted: HostedJob, incarnation: Incarnation) -> None:
        """A worker has begun its next exchange: what was lent before the last answer is not read any more."""
        with self._lock:
            lent = hosted.lent.get(incarnation, ())
            done = [lent.popleft() for _ in range(len(lent) - 1)] if isinstance(lent, deque) else []
        for held in done:
            held.release()

    def take_back(self, hosted: HostedJob, incarnation: Incarnation) -> None:
        """The worker has detached or was declared dead."""
        with self._lock:
            lent = hosted.lent.pop(incarnation, ())
        for held in lent:
            held.release()
        self._keep_no_more(hosted, incarnation)

    def open_sources(
        self, hosted: HostedJob, sources: Sequence[tuple[SourceKey, Token]]
    ) -> list[tuple[SourceKey, list[Watermark]]]:
        """Rule A5. Raises StaleToken, InvalidRequest for a source that the job cannot have, TooLarge."""
        for key, _ in sources:
            hosted.check_leased(key)
        if hosted.wal is None:
            self._check_open(hosted, sources)
            return self._open(hosted, sources)
        generation = hosted.generation
        with hosted.wal.admission:
            hosted.check_generation(generation)
            self._check_open(hosted, sources)
            ticket = hosted.wal.append(RecordKind.OPEN, open_head(sources), NO_BYTES)
        hosted.wal.sync(ticket)
        with hosted.wal.turn(ticket):
            return self._open(hosted, sources)

    def _check_open(self, hosted: HostedJob, sources: Sequence[tuple[SourceKey, Token]]) -> None:
        for key, token in sources:
            for number in sorted(hosted.partitions):
                hosted.partitions[number].check_open(key, token)

    def _open(
        self, hosted: HostedJob, sources: Sequence[tuple[SourceKey, Token]]
    ) -> list[tuple[SourceKey, list[Watermark]]]:
        return [
            (key, [hosted.partitions[p].open_source(key, token) for p in sorted(hosted.partitions)])
            for key, token in sources
        ]

    def read_ledger(
        self, hosted: HostedJob, sources: Sequence[tuple[SourceKey, Token]]
    ) -> list[tuple[SourceKey, list[Watermark]]]:
        return [(key, [hosted.partitions[p].watermark(key) for p in sorted(hosted.partitions)]) for key, _ in sources]

    def hosted(self) -> list[HostedJob]:
        with self._lock:
            return [self._jobs[job] for job in sorted(self._jobs)]

    def _check_current(self, hosted: HostedJob, order: PushHeader) -> None:
        """For partitions, in their turn: what was true when the push was admitted still is."""
        if self.admit(order.caller, order.server, order.generation) is not hosted:
            raise NotFound(f"job {hosted.job} was dropped while {order.name} was on its way")

    def _is_fenced(self, worker: Incarnation) -> bool:
        with self._lock:
            return worker in self._standing.fenced

    def _find(self, job: JobId) -> HostedJob:
        with self._lock:
            hosted = self._jobs.get(job)
        if hosted is None:
            raise NotFound(f"job {job} is not on this server")
        return hosted

    def _count(self, results: Sequence[PartResult], received: int) -> None:
        duplicate = bool(results) and all(result.outcome is Outcome.DUPLICATE for result in results)
        with self._lock:
            self.counters.bytes_received += received
            if duplicate:
                self.counters.pushes_duplicate += 1
            else:
                self.counters.pushes_applied += 1


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000


def _check_nothing() -> None:
    """What may change under a push's feet was checked when it was appended."""


def _tell_failure(failure: ShardyardError) -> None:
    log.error("this server cannot go on: %s", failure)


def _by_partition(layout: JobLayout, order: PushHeader, rows: Bytes) -> dict[PartitionId, list[PushedTableRows]]:
    """What a push brings each partition, all of it checked."""
    found: dict[PartitionId, list[PushedTableRows]] = {}
    for partition, each in unpack_pushed(layout, order.rows, rows):
        found.setdefault(partition, []).append(each)
    return found


def _torn(partitions: Sequence[Partition]) -> Internal | None:
    return next((each.torn for each in partitions if each.torn is not None), None)


def _aligned(piece: Bytes) -> Bytes:
    copy = aligned_empty(len(piece))
    copy[:] = piece
    return copy
