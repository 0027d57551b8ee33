"""What the coordinator orders: partitions created, opened, saved or dropped; members fenced; sources forgotten.

An order that is repeated changes nothing. `admission.check_coordinator` has already refused the orders of a coordinator
that was replaced.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial

from shardyard.domain import limits
from shardyard.domain.consistency import UpdateMode
from shardyard.domain.errors import InvalidRequest, NotReady
from shardyard.domain.ids import Caller, Generation, Incarnation, JobId, Token
from shardyard.domain.push_names import DoneDataShards, SourceKey, WorkerSource
from shardyard_ps_server.checkpoint.restore import Loaded
from shardyard_ps_server.checkpoint.saver import Saved, SaveRequest
from shardyard_ps_server.hosting import provisioning
from shardyard_ps_server.hosting.admission import admit
from shardyard_ps_server.hosting.hosted_job import CreateRequest, HostedJob
from shardyard_ps_server.hosting.pulls import reclaim_all
from shardyard_ps_server.hosting.store import Store
from shardyard_ps_server.hosting.worker_clocks import WorkerClocks
from shardyard_ps_server.partition.push import check_nothing
from shardyard_ps_server.wal.records import RecordKind
from shardyard_ps_server.wal.replay import pass_over_head


def fence(store: Store, incarnations: Iterable[int]) -> None:
    """Refuses these members from now on. What was recorded of theirs before counts, and is applied when this
    returns."""
    fenced = {Incarnation(number) for number in incarnations}
    with store.lock:
        fresh = fenced - store.identity.fenced
        store.identity.fenced.update(fresh)
        store.epoch += bool(fresh)
    for hosted in store.hosted() if fresh else ():
        for incarnation in sorted(fresh):
            reclaim_all(store, hosted, incarnation)
        hosted.rows_in_flight.forget(fresh)
        if hosted.wal is not None:
            with suppress(NotReady):
                hosted.wal.drain()
    for hosted in store.hosted():
        if hosted.clocks is not None:  # a late order may have told the clock to expect them
            hosted.clocks.forget(fenced)


# ---- partitions


def create(store: Store, request: CreateRequest) -> None:
    """Makes this server the owner of partitions, with zeros as values or with the state in a checkpoint.

    Partitions that are here already stay as they are, unless the request restores them; then they start a new life.
    With a higher generation, partitions that the request does not name are removed. A job that changes its mode, or
    begins anew (`HostedJob.begins_anew`), keeps nothing that is here. Repeating a request changes nothing.

    Raises InvalidRequest, StaleGeneration, TooLarge, StorageUnavailable, LogDamaged, and what loading raises. After an
    error nothing has changed.
    """
    _check_create(store, request)
    job = request.job
    store.loops.begin(job, request.layout, request.rules.mode, request.rules.stale, request.rules.clipping)
    if request.restore.entries:  # they open at once; the coordinator allows this call a long time
        store.loops.await_loaded(job, wait_ms=None)
    elif request.layout.tables:
        store.loops.await_loaded(job)
    with store.creating:
        with store.lock:
            hosted = store.jobs.get(job)
        if hosted is None or hosted.changes_mode(request):
            _replace(store, hosted, request, provisioning.load(store, None, request))
            return
        hosted.check_same_job(request)
        begins_anew = hosted.begins_anew(request)
        empty = set(request.owned) - set(hosted.partitions) - {entry.partition for entry in request.restore.entries}
        if hosted.open and empty and not begins_anew:
            raise InvalidRequest(f"partition {min(empty)} of job {job}, which is open, without values")
        loaded = provisioning.load(store, hosted, request)
        if begins_anew:
            _replace(store, hosted, request, loaded)
            return
        if hosted.clocks is not None:
            hosted.clocks.set_bound(request.staleness, request.switches)
            if request.generation > hosted.generation:  # otherwise an earlier call has announced them
                hosted.clocks.expect(request.working)
        provisioning.give(store, hosted, request, loaded)


def _replace(store: Store, hosted: HostedJob | None, request: CreateRequest, loaded: Sequence[Loaded]) -> None:
    """Makes the job with all its partitions, in place of `hosted`, whose log goes on."""
    clocks = None
    if request.rules.mode is UpdateMode.ASYNC:
        clocks = WorkerClocks(request.staleness, request.switches)
        clocks.expect(request.working)
    made = provisioning.begin(store, request, loaded, clocks, None if hosted is None else hosted.wal)
    with store.lock:
        store.jobs[request.job] = made
        if hosted is not None and hosted.rules != made.rules:
            hosted.generation = request.generation
        store.epoch += 1  # now partitions refuse pushes that were admitted before
    if hosted is not None:
        hosted.pins.clear()
        if hosted.rules != made.rules:
            for former in hosted.partitions.values():
                former.leave()
        hosted.regions.close()


def _check_create(store: Store, request: CreateRequest) -> None:
    job, layout, rules, staleness = request.job, request.layout, request.rules, request.staleness
    if staleness is not None and (rules.mode is UpdateMode.SYNC or staleness > limits.STALENESS_MAX):
        raise InvalidRequest(f"a staleness of {staleness} in job {job}, which is {rules.mode.value}")
    rules.check(job, layout)
    request.restore.check(job, rules)
    if any(partition >= len(layout.partitions) for partition in request.owned):
        raise InvalidRequest(f"partitions {list(request.owned)} of a layout with {len(layout.partitions)}")
    if rules.logged and store.logs is None:
        raise InvalidRequest(
            f"partitions of job {job}, which wants a log, on a server that keeps none",
            todo="give the server a folder for logs (yard.wal), or set job.durability to checkpoint",
        )


def open_partitions(store: Store, job: JobId, generation: Generation) -> None:
    """Begins pushes and pulls: first values are complete. Raises NotReady while the job's loops are being compiled."""
    hosted = store.find(job)
    hosted.check_generation(generation)
    store.loops.await_loaded(job)
    for partition in hosted.in_order:
        partition.open()
    hosted.open = True


def drop(store: Store, job: JobId) -> None:
    """Forgets a job that has ended, and deletes its log."""
    with store.lock:
        hosted = store.jobs.pop(job, None)
        store.epoch += 1
    if hosted is not None:
        hosted.pins.clear()
        hosted.regions.close()
        if hosted.wal is not None:
            hosted.wal.close(remove=True)
            assert store.logs is not None
            store.logs.end_job(job, store.incarnation)


# ---- checkpoints, ledgers, staleness


def save(
    store: Store, caller: Caller, server: Incarnation, generation: Generation, request: SaveRequest, url: str
) -> list[Saved]:
    """Writes all partitions of a job into a checkpoint. A job with a log begins a new segment first. Raises what
    Saver.save raises."""
    hosted = admit(store, caller, server, generation, reads=True)
    hosted.check_open()
    if (request.step is None) is (hosted.mode is UpdateMode.SYNC):
        how = "without" if request.step is None else "at"
        raise InvalidRequest(f"a checkpoint of job {hosted.job}, which is {hosted.mode.value}, {how} a step")
    if hosted.wal is not None:
        with hosted.wal.order:
            hosted.wal.rotate(request.number)
        hosted.wal.prune(request.oldest)
        assert store.logs is not None
        store.logs.prune(job=hosted.job, server=store.incarnation, generation=generation, needed=request.logs)
    # with a log, save between steps: parts of the next step in the old segment would be lost; and so would those of a
    # partition that is sealed
    between = hosted.wal is not None or request.seal
    saved = hosted.saver.save(hosted.in_order, request, store.access.open(url), between=between)
    hosted.check_generation(generation)  # otherwise some could be saved before a restore and others after it
    return saved


def forget_sources(
    store: Store,
    caller: Caller,
    server: Incarnation,
    generation: Generation,
    done: Sequence[DoneDataShards],
    workers: Sequence[Incarnation],
    floor: Token,
) -> None:
    """Rule A7. `workers` have left, and are refused from now on. Raises InvalidRequest in a synchronous job, where the
    tokens of ranks live as long as the job."""
    hosted = admit(store, caller, server, generation, reads=True)
    if hosted.mode is UpdateMode.SYNC:
        raise InvalidRequest(f"sources to be forgotten in job {hosted.job}, which is sync")
    fence(store, workers)
    with hosted.quiescent():
        for partition in hosted.in_order:
            partition.forget(done, workers, floor, partial(hosted.check_generation, generation))


def pass_over(
    store: Store, caller: Caller, server: Incarnation, generation: Generation, worker: Incarnation, next_sequence: int
) -> None:
    """Rule A11: a worker's own source continues at `next_sequence` and skips the pushes that a restore has lost. Raises
    InvalidRequest in a synchronous job, which computes them again."""
    hosted = admit(store, caller, server, generation, reads=True)
    if hosted.mode is UpdateMode.SYNC or next_sequence > limits.SEQUENCE_MAX:
        raise InvalidRequest(
            f"worker {worker} to continue at #{next_sequence} in job {hosted.job}, which is {hosted.mode.value}",
            why="ranks are computed again",
        )
    key, check_current = SourceKey(WorkerSource(worker)), partial(hosted.check_generation, generation)
    if hosted.wal is None:
        for partition in hosted.in_order:
            partition.pass_over(key, next_sequence, check_current)
        return
    with hosted.wal.recorded(RecordKind.PASS_OVER, pass_over_head(worker, next_sequence), check_current):
        for partition in hosted.in_order:
            partition.pass_over(key, next_sequence, check_nothing)


def set_staleness(
    store: Store, caller: Caller, server: Incarnation, generation: Generation, staleness: int | None, switches: int
) -> None:
    """Changes the bound of an asynchronous job; None: there is no bound. `switches` numbers the job's mode switches: an
    order of an earlier switch changes nothing. Raises InvalidRequest."""
    hosted: HostedJob = admit(store, caller, server, generation, reads=True)
    clock = hosted.clocks
    if clock is None or (staleness is not None and staleness > limits.STALENESS_MAX):
        raise InvalidRequest(f"a staleness of {staleness} in job {hosted.job}, which is {hosted.mode.value}")
    if not clock.agrees(staleness, switches):
        raise InvalidRequest(f"a staleness of {staleness} in job {hosted.job}, where that switch has set {clock.bound}")
    clock.set_bound(staleness, switches)
