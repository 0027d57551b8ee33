"""How this server hands out values: for a moment, to a worker in shared memory, or pinned for a reader.

In: admitted pulls. Out: the buffers of versions, which do not change until they are released. A pull waits at most
`wait_ms` for its version and for slower workers (`clocks`), then says what is missing. Nothing here changes values.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from shardyard.domain.consistency import SspReport, UpdateMode
from shardyard.domain.errors import InvalidRequest, StaleGeneration
from shardyard.domain.ids import Incarnation, JobId, PartitionId, Version
from shardyard.domain.pulls import NotReadyPart, PinRequest, PulledPart, PullHeader
from shardyard.domain.pushes import ExchangeReply, GatheredPart
from shardyard.security.passes import speaker
from shardyard_ps_server.hosting.admission import admit
from shardyard_ps_server.hosting.hosted_job import HeldValues, HostedJob
from shardyard_ps_server.hosting.pins import await_pin
from shardyard_ps_server.hosting.store import Store
from shardyard_ps_server.partition.partition import Partition
from shardyard_ps_server.partition.reads import await_version, hold_version
from shardyard_ps_server.partition.sync_step import gathered_part
from shardyard_ps_server.values.versions import Bytes


def report_progress(store: Store, hosted: HostedJob, worker: Incarnation, report: SspReport) -> int | None:
    """Notes a worker's progress, after its push was counted. Returns the clock of a worker that joins. Raises
    InvalidRequest in a synchronous job."""
    if hosted.clocks is None:
        raise InvalidRequest(f"the progress of worker {worker} in job {hosted.job}, which is {hosted.mode.value}")
    clock = hosted.clocks.report(worker, report)
    if store.is_fenced(worker):  # it may have been fenced since it was admitted
        hosted.clocks.forget([worker])
    return clock


def hold(
    hosted: HostedJob,
    pull: PullHeader,
    report: SspReport | None = None,
    reply: ExchangeReply | None = None,
    *,
    until: float | None = None,
) -> tuple[ExchangeReply, HeldValues]:
    """Waits for what an admitted pull asks for until `until` (time.monotonic; None: at most `pull.wait_ms`). With a
    `report` it also waits for slower workers. Returns `reply`, or a new one, with the parts or what is missing; and one
    buffer for each part, or none if something is missing. The caller must release or lend them."""
    reply = ExchangeReply() if reply is None else reply
    if pull.pin:
        pinned = hosted.pins.hold(pull.pin, pull.partitions, now_ms())
        reply.parts = tuple([PulledPart(partition.id, version) for partition, version, _ in pinned])
        return reply, HeldValues(tuple([(partition, buffer) for partition, _, buffer in pinned]))
    until = time.monotonic() + pull.wait_ms / 1000 if until is None else until
    if not hosted.open:
        reply.missing = _unopened(pull, pull.partitions)
        return reply, HeldValues()
    if hosted.clocks is not None and report is not None:
        waits_for = hosted.clocks.await_slower(pull.caller.incarnation, report, until)
        if waits_for:
            newest = [(number, hosted.find(number).describe()[0]) for number in pull.partitions]
            reply.missing = tuple([NotReadyPart(number, has, pull.number, waits_for) for number, has in newest])
            return reply, HeldValues()
    held: list[tuple[Partition, Bytes]] = []
    parts: list[PulledPart] = []
    missing: list[NotReadyPart] = []
    try:
        for number in pull.partitions:
            partition = hosted.find(number)
            found = hold_version(partition, pull.number, pull.exactly, until)
            if isinstance(found, NotReadyPart):
                missing.append(found)
                continue
            version, buffer = found
            held.append((partition, buffer))
            parts.append(PulledPart(number, version))
    except BaseException:
        HeldValues(tuple(held)).release()
        raise
    values = HeldValues(tuple(held))
    reply.gathered = _gathered(hosted, pull)
    if missing:
        values.release()
        reply.missing = tuple(missing)
        return reply, HeldValues()
    reply.parts = tuple(parts)
    return reply, values


def _unopened(pull: PullHeader, partitions: Sequence[PartitionId]) -> tuple[NotReadyPart, ...]:
    """What is missing while the job has no values yet, after a moment."""
    time.sleep(min(pull.wait_ms, 50) / 1000)
    first, waits_for = Version(1, 0), "first values from the initializer"
    return tuple([NotReadyPart(number, first, pull.number, waits_for) for number in partitions])


def _gathered(hosted: HostedJob, pull: PullHeader) -> tuple[GatheredPart, ...]:
    """What the verdict on the step that makes the version needs of this server's partitions, in a job that clips by
    norm: of all of them, since a worker may pull some only."""
    if not (hosted.rules.clipping.norm and pull.exactly and pull.number):
        return ()
    found = [gathered_part(partition, pull.number - 1) for partition in hosted.in_order]
    return tuple([part for part in found if part is not None])


def await_version_of_all(hosted: HostedJob, pull: PullHeader, reply: ExchangeReply) -> None:
    """Waits until all partitions have the version of an admitted pull, at most `pull.wait_ms`. The reply gets what is
    missing."""
    if not hosted.open:
        reply.missing = _unopened(pull, [partition.id for partition in hosted.in_order])
        return
    until = time.monotonic() + pull.wait_ms / 1000
    missing: list[NotReadyPart] = []
    for partition in hosted.in_order:
        with partition.lock:
            lacks = await_version(partition, pull.number, until)
        missing += [] if lacks is None else [lacks]
    reply.gathered, reply.missing = _gathered(hosted, pull), tuple(missing)


# ---- buffers that workers on this machine read


def lend(store: Store, hosted: HostedJob, worker: Incarnation, held: HeldValues) -> None:
    """Lends buffers in shared memory to a worker. They come back at its second exchange from now (`reclaim`)."""
    with store.lock:
        fenced = worker in store.identity.fenced
        if not fenced:
            hosted.lent.setdefault(worker, deque()).append(held)
    if fenced:
        held.release()


def reclaim(store: Store, hosted: HostedJob, worker: Incarnation) -> None:
    """Takes back what was lent before the last answer: the worker has begun its next exchange and no longer reads
    it."""
    done: list[HeldValues] = []
    with store.lock:
        lent = hosted.lent.get(worker)
        while lent is not None and len(lent) > 1:
            done.append(lent.popleft())
    for held in done:
        held.release()


def reclaim_all(store: Store, hosted: HostedJob, worker: Incarnation) -> None:
    """Takes back all buffers of a worker that has detached or was declared dead."""
    with store.lock:
        lent = hosted.lent.pop(worker, ())
    for held in lent:
        held.release()
    _forget_base(hosted, worker)


def keep_base(store: Store, hosted: HostedJob, worker: Incarnation, reply: ExchangeReply, held: HeldValues) -> None:
    """Keeps the values on which a worker computes its next step, if the job compensates stale gradients. They are kept
    until the worker pushes again or is refused."""
    if hosted.rules.stale is None or not hosted.rules.stale.compensation:
        return
    for part, (partition, buffer) in zip(reply.parts, held.buffers, strict=False):  # none if values are missing
        partition.remember_base(worker, part.version, buffer)
    if store.is_fenced(worker):  # it may have been fenced since it was admitted
        _forget_base(hosted, worker)


def _forget_base(hosted: HostedJob, worker: Incarnation) -> None:
    if hosted.rules.stale is not None:
        for partition in hosted.in_order:
            partition.forget_bases(worker)


# ---- versions that readers pin


def pin(store: Store, request: PinRequest) -> tuple[tuple[PulledPart, ...], tuple[NotReadyPart, ...]]:
    """Pins a version of all partitions of a job on this server. Returns what the pin has, or what it still lacks.
    Repeating the request renews the lease. Raises InvalidRequest (facts: newest) if that version has passed, NotFound
    if it will not come, NotReady, TooLarge."""
    hosted = admit(store, request.caller, request.server, request.generation, reads=True)
    hosted.check_open()
    partitions = hosted.in_order
    if (request.number is None) is (hosted.mode is UpdateMode.SYNC):
        how = "without" if request.number is None else "at"
        newest = max((each.describe()[0].number for each in partitions), default=0)
        raise InvalidRequest(
            f"a pin of job {hosted.job}, which is {hosted.mode.value}, {how} a version",
            todo="name one that comes (sync), or none (async)",
            facts={"newest": str(newest)} if request.number is None else {},
        )
    taken = hosted.pins.take(
        request.pin, partitions, request.number, now_ms=now_ms(), lease_ms=request.lease_ms, rows=request.rows
    )
    try:
        hosted.check_generation(request.generation)  # partitions may have moved since they were looked up
    except StaleGeneration:
        hosted.pins.release(request.pin)
        raise
    return await_pin(taken, time.monotonic() + request.wait_ms / 1000)


def unpin(store: Store, job: JobId, name: bytes) -> None:
    """Releases a pin, if it exists."""
    speaking = speaker.get()
    if speaking is not None:
        speaking.check(job, Incarnation(0))
    with store.lock:
        hosted = store.jobs.get(job)
    if hosted is not None:
        hosted.pins.release(name)


def expire_pins(store: Store) -> None:
    """Releases the pins of readers whose lease has run out."""
    for hosted in store.hosted():
        hosted.pins.expire(now_ms())


def now_ms() -> int:
    return time.monotonic_ns() // 1_000_000
