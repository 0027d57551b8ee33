"""How a push is recorded, and how it reaches the partitions of this server.

In: admitted headers with complete payloads. Out: one result for each part. All parts of a push are validated before
any is applied (rule A4). With a log, the push is durable before it is applied. Whether it counts is decided when its
record is appended, because only earlier records can change the outcome.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Final, TypeVar

from shardyard.domain import limits
from shardyard.domain.errors import Internal
from shardyard.domain.ids import PartitionId, Token
from shardyard.domain.layout.layouts import JobLayout
from shardyard.domain.push_names import SourceKey, Watermark
from shardyard.domain.pushes import PartResult, PushHeader, StepVerdict
from shardyard.runtime.failpoints import failpoint
from shardyard_ps_server.hosting.admission import Admitted, check_still_admitted
from shardyard_ps_server.hosting.hosted_job import HostedJob
from shardyard_ps_server.hosting.store import Store
from shardyard_ps_server.partition import sync_step
from shardyard_ps_server.partition.contribution import Contribution, parts_of
from shardyard_ps_server.partition.partition import Partition
from shardyard_ps_server.partition.push import (
    apply_push,
    apply_to_all,
    begin_logged,
    check_nothing,
    check_push,
    end_logged,
)
from shardyard_ps_server.rows.lookups_in_flight import TablePart
from shardyard_ps_server.rows.pushed_rows import PushedTableRows, unpack_pushed
from shardyard_ps_server.values.versions import NO_BYTES, Bytes, aligned_copy
from shardyard_ps_server.wal.records import RecordKind
from shardyard_ps_server.wal.replay import open_head, push_head, verdict_head
from shardyard_ps_server.wal.row_records import encode_expired, with_times
from shardyard_ps_server.wal.wal import Wal

T = TypeVar("T")
Work = tuple[Partition, Contribution]

POOL_BYTES_MIN: Final = limits.MIB
"""Pushes of at least this many bytes use several threads, one partition each."""


def initialize(store: Store, admitted: Admitted, header: PushHeader, payload: Bytes, rows: Bytes = NO_BYTES) -> None:
    """Sets first values: all values of a partition or none of them; or first rows, over the rows that are there."""
    hosted, check_current = admitted.hosted, partial(check_still_admitted, store, admitted, header)
    if header.rows:
        for partition, given in _rows_by_partition(hosted.layout, header, rows).items():
            hosted.find(partition).set_rows(given, check_current)
        return
    for part, piece, _ in parts_of(header, payload):
        hosted.find(part.partition).set_values(piece, check_current)


def push(
    store: Store, admitted: Admitted, header: PushHeader, payload: Bytes, rows: Bytes = NO_BYTES
) -> tuple[PartResult, ...]:
    """Applies each part of a push once, when its partition's turn comes. `rows`: the bytes of its table rows."""
    hosted = admitted.hosted
    by_partition = _rows_by_partition(hosted.layout, header, rows) if header.rows else {}
    if hosted.wal is not None and header.shared_at is not None:
        payload = aligned_copy(payload)  # the log and the update must read the same bytes (rule C5)
    work: list[Work] = []
    coded = False
    for part, piece, base in parts_of(header, payload):
        target = hosted.find(part.partition)
        if part.code_bytes:
            coded = True
        elif coded and len(piece):
            piece = aligned_copy(piece)  # the code before this piece may end at any byte
        table_rows = by_partition.get(part.partition, ())
        work.append((target, target.payload.contribution(header, part, piece, base, table_rows)))
    failpoint("push.before_apply")
    if hosted.wal is None:
        results = _apply(store, admitted, header, work)
    else:
        results = _record_and_apply(store, hosted.wal, admitted, header, payload, work, rows)
    if hosted.protects_looked_up_rows:
        pushed = [(TablePart(number, each.table), each.ids) for number, some in by_partition.items() for each in some]
        hosted.rows_in_flight.end(header.caller.incarnation, pushed)
    failpoint("push.before_reply")
    sent = len(payload) if header.shared_at is None else 0
    store.count_push(results, sent + (len(rows) if header.rows_at is None else 0))
    return results


def _apply(store: Store, admitted: Admitted, header: PushHeader, work: Sequence[Work]) -> tuple[PartResult, ...]:
    check_current = partial(check_still_admitted, store, admitted, header)
    try:
        return _push_all(store, header, work, check_current, checked=False)
    except BaseException:
        _report_torn(store, [target for target, _ in work])
        raise


def _record_and_apply(
    store: Store, wal: Wal, admitted: Admitted, header: PushHeader, payload: Bytes, work: Sequence[Work], rows: Bytes
) -> tuple[PartResult, ...]:
    """Like `_apply`, but first makes the push durable. Appending decides whether it counts, and which rows expire with
    it."""
    with ExitStack() as over:
        with wal.order:
            check_still_admitted(store, admitted, header)
            if header.rows and any(target.rows.is_close(each.rows) for target, each in work):
                wal.drain()
            for target, contribution in work:
                check_push(target, header.name, contribution)
            decided: list[Work] = []
            for target, contribution in work:
                decided.append((target, begin_logged(target, contribution)))
                over.callback(end_logged, *decided[-1])
            expired, codes = encode_expired([(target.id, each.gone) for target, each in decided])
            timed_rows = with_times(header.rows, [(target.id, each.rows) for target, each in decided])
            head = push_head(replace(header, rows=timed_rows, expired=expired))
            ticket = wal.append(RecordKind.PUSH, head, payload, rows, *codes)
        wal.sync(ticket)
        with wal.turn(ticket):
            try:
                return _push_all(store, header, decided, check_nothing, checked=True)
            except BaseException as error:
                torn = _torn([target for target, _ in decided])
                if torn is not None:  # now the log and the partitions differ
                    raise torn.anew() from error
                raise


def _push_all(
    store: Store, header: PushHeader, work: Sequence[Work], check_current: Callable[[], None], *, checked: bool
) -> tuple[PartResult, ...]:
    """`checked`: the push was checked in each partition, and nothing has changed since."""
    if header.payload_bytes + header.rows_bytes < POOL_BYTES_MIN or len(work) == 1:
        return apply_to_all(work, header.name, check_current)
    for target, each in work if not checked else ():
        check_push(target, header.name, each)
    works = [partial(apply_push, target, header.name, each, check_current) for target, each in work]
    return tuple(store.pool.run(works))


def take_verdict(store: Store, hosted: HostedJob, header: PushHeader, verdict: StepVerdict) -> None:
    """Gives a step's verdict to the partitions that wait for it. Raises InvalidRequest, TooLarge, and NotReady if the
    log has failed."""
    waiting = [partition for partition in hosted.in_order if sync_step.awaits_verdict(partition, verdict)]
    if not waiting:
        return
    check_current = partial(check_still_admitted, store, Admitted(hosted, epoch=0), header)
    if hosted.wal is None:
        _give_verdict(store, waiting, verdict, check_current)
        return
    head = verdict_head(verdict, [partition.id for partition in waiting])
    with hosted.wal.recorded(RecordKind.VERDICT, head, check_current):
        _give_verdict(store, waiting, verdict, check_nothing)


def _give_verdict(
    store: Store, partitions: Sequence[Partition], verdict: StepVerdict, check_current: Callable[[], None]
) -> None:
    try:
        if sum([partition.payload.nbytes for partition in partitions]) < POOL_BYTES_MIN:
            sync_step.take_verdict(partitions, verdict, check_current)
        else:
            store.pool.run([partial(sync_step.take_verdict, [each], verdict, check_current) for each in partitions])
    finally:
        _report_torn(store, partitions)


def open_sources(
    hosted: HostedJob, sources: Sequence[tuple[SourceKey, Token]]
) -> list[tuple[SourceKey, list[Watermark]]]:
    """Announces tokens to all partitions, and returns their watermarks (rule A5). Raises StaleToken, TooLarge, and
    InvalidRequest for a source that this job cannot have."""

    def on_all(call: Callable[[Partition, SourceKey, Token], T]) -> list[tuple[SourceKey, list[T]]]:
        owned = hosted.in_order
        return [(key, [call(partition, key, token) for partition in owned]) for key, token in sources]

    for key, _ in sources:
        hosted.check_leased(key)
    if hosted.wal is None:
        on_all(Partition.check_open)
        return on_all(Partition.open_source)
    generation = hosted.generation

    def check_current() -> None:
        hosted.check_generation(generation)
        on_all(Partition.check_open)

    with hosted.wal.recorded(RecordKind.OPEN, open_head(sources), check_current):
        return on_all(Partition.open_source)


def read_ledger(
    hosted: HostedJob, sources: Sequence[tuple[SourceKey, Token]]
) -> list[tuple[SourceKey, list[Watermark]]]:
    return [(key, [partition.watermark(key) for partition in hosted.in_order]) for key, _ in sources]


def _rows_by_partition(layout: JobLayout, header: PushHeader, rows: Bytes) -> dict[PartitionId, list[PushedTableRows]]:
    """Returns the table rows of a push, all of them checked."""
    found: dict[PartitionId, list[PushedTableRows]] = {}
    for partition, each in unpack_pushed(layout, header.rows, rows):
        found.setdefault(partition, []).append(each)
    return found


def _report_torn(store: Store, partitions: Sequence[Partition]) -> None:
    torn = _torn(partitions)
    if torn is not None:
        store.on_failure(torn)


def _torn(partitions: Sequence[Partition]) -> Internal | None:
    return next((each.torn for each in partitions if each.torn is not None), None)
