"""Rules of docs/internals/ledger.md that a simulated yard cannot show, for want of shared memory, of threads that run
out, or of a fault for which no other rule makes up: each in a scenario of one server, which goes wrong where the rule
is switched off."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from shardyard.domain.consistency import Durability, UpdateMode
from shardyard.domain.errors import NotFound, RateMismatch, StaleIncarnation, StaleTerm
from shardyard.domain.ids import Caller, Generation, Incarnation, PartitionId, Rank, Term, Token
from shardyard.domain.layout.layouts import JobLayout
from shardyard.domain.optimizers import OptimizerSpec, make_group
from shardyard.domain.pulls import PullHeader
from shardyard.domain.push_names import DataShardSource, PushName, RankSource, SourceKey
from shardyard.domain.pushes import PartResult, PushHeader, PushKind, PushPart
from shardyard.runtime import failpoints
from shardyard_ps_server.hosting import admission, orders, pulls, pushes
from shardyard_ps_server.hosting.hosted_job import CreateRequest
from shardyard_ps_server.hosting.store import Store
from shardyard_ps_server.partition.push import apply_push
from shardyard_ps_server.partition.update_rules import UpdateRules
from shardyard_ps_server.values.versions import aligned_empty
from shardyard_ps_server.wal.records import RecordKind
from shardyard_ps_server.wal.segments import FENCED, LogFiles, LogRoot
from tests.simulation.exactly_once import JOB, Groups, incarnation_of, layout_of, newest_values

HERE = incarnation_of(0)
GENERATION, TERM, TOKEN = Generation(1), Term(2), Token(1)
WORKER = Caller(JOB, Incarnation(1_000), TERM)
OWNED = (PartitionId(0), PartitionId(1))
ELEMENTS = 8
RATE: Groups = (make_group("sgd", {"lr": 1.0}),)
OTHER_RATE: Groups = (make_group("sgd", {"lr": 0.5}),)
LAYOUT: JobLayout = layout_of(len(OWNED), ELEMENTS, OptimizerSpec("sgd", RATE))
SHARD = SourceKey(DataShardSource(0, 0, 0))
RANKS = [SourceKey(RankSource(Rank(rank))) for rank in range(2)]
SLICE_MS = 20
PATIENCE_S = 0.5
FOR_EVER_S = 60.0


@contextlib.contextmanager
def serving(mode: UpdateMode, logs: LogRoot | None = None) -> Iterator[Store]:
    """A server with two partitions, where the worker has opened what there is."""
    store = Store(logs=logs)
    durability = Durability.CHECKPOINT if logs is None else Durability.WAL
    store.become(HERE, TERM)
    orders.create(
        store, CreateRequest(JOB, GENERATION, LAYOUT, OWNED, UpdateRules(mode, len(RANKS), durability=durability))
    )
    orders.open_partitions(store, JOB, GENERATION)
    keys = RANKS if mode is UpdateMode.SYNC else [SHARD]
    pushes.open_sources(store.hosted()[0], [(key, TOKEN) for key in keys])
    try:
        yield store
    finally:
        store.close()


def order(
    key: SourceKey, *, listed: Sequence[PartitionId] = OWNED, groups: Groups = RATE, shared_at: int | None = None
) -> PushHeader:
    parts = tuple(PushPart(number, LAYOUT.partitions[number].payload_bytes) for number in listed)
    name = PushName(key, TOKEN, 0, 0)
    return PushHeader(WORKER, HERE, GENERATION, name, PushKind.GRADIENT, parts, 1.0, groups, None, shared_at)


def send(store: Store, sent: PushHeader) -> None:
    payload = aligned_empty(sent.payload_bytes)
    payload.view(np.float64)[:] = 1.0
    pushes.push(store, admission.admit_push(store, sent), sent, payload)


# ---- scenarios: each tells what went wrong


def a_push_that_one_partition_refuses(_: Path) -> list[str]:
    """The second has the other rank's contribution under other rates, the first has none."""
    with serving(UpdateMode.SYNC) as store:
        send(store, order(RANKS[0], listed=OWNED[1:]))
        with contextlib.suppress(RateMismatch):
            send(store, order(RANKS[1], groups=OTHER_RATE))
        ((_, marks),) = pushes.read_ledger(store.hosted()[0], [(RANKS[1], TOKEN)])
    return [f"partition {mark.partition} has counted what was refused" for mark in marks if mark.next]


def a_large_push_that_one_partition_refuses(folder: Path) -> list[str]:
    with patch.object(pushes, "POOL_BYTES_MIN", 0):
        return a_push_that_one_partition_refuses(folder)


def an_order_of_a_coordinator_that_was_replaced(_: Path) -> list[str]:
    """It slept while the next one was told of a worker, which it takes for dead."""
    with serving(UpdateMode.ASYNC) as store:
        admission.check_coordinator(store, Caller(JOB, term=Term(TERM + 1)))
        with contextlib.suppress(StaleTerm):
            admission.check_coordinator(store, Caller(JOB, term=TERM))
            orders.fence(store, [WORKER.incarnation])
        try:
            send(store, order(SHARD))
        except StaleIncarnation as error:
            return [f"a living worker is refused: {error.what}"]
    return []


def a_push_that_was_admitted_before_its_worker_was_fenced(_: Path) -> list[str]:
    with serving(UpdateMode.ASYNC) as store:
        sent = order(SHARD)
        with failpoints.armed("push.before_apply", lambda _: orders.fence(store, [WORKER.incarnation])):
            with contextlib.suppress(StaleIncarnation):
                send(store, sent)
        ((_, marks),) = pushes.read_ledger(store.hosted()[0], [(SHARD, TOKEN)])
    return [f"partition {mark.partition} has counted a push of a fenced worker" for mark in marks if mark.next]


def a_push_that_was_admitted_before_its_job_was_dropped(_: Path) -> list[str]:
    """It comes back as another job of the same number, which has no work yet."""
    with serving(UpdateMode.ASYNC) as store:
        sent, hosted = order(SHARD), store.hosted()[0]
        with failpoints.armed("push.before_apply", lambda _: orders.drop(store, JOB)):
            with contextlib.suppress(NotFound):
                send(store, sent)
        ((_, marks),) = pushes.read_ledger(hosted, [(SHARD, TOKEN)])
    return [f"partition {mark.partition} of a job that was dropped has counted a push" for mark in marks if mark.next]


def a_gradient_that_changes_while_it_is_logged(folder: Path) -> list[str]:
    """It lies in memory that is the worker's to write."""
    logs = LogRoot(folder)
    with serving(UpdateMode.ASYNC, logs) as store:
        sent = order(SHARD, shared_at=0)
        payload = aligned_empty(sent.payload_bytes)
        payload.view(np.float64)[:] = 1.0

        def write(_: str) -> None:
            payload.view(np.float64)[:] = 2.0

        admitted = admission.admit_push(store, sent)
        with failpoints.armed("wal.before_apply", write):
            pushes.push(store, admitted, sent, payload)
        applied = -newest_values(store, OWNED[0])
        log = logs.log(JOB, HERE)
        (logged,) = (
            record.payload.view(np.float64)[:ELEMENTS].copy()
            for record in log.records(0, log.take_over(GENERATION))
            if record.kind is RecordKind.PUSH
        )
    return [] if np.array_equal(applied, logged) else [f"{applied} was applied, {logged} is in the log"]


def pulls_of_what_a_push_will_bring(_: Path) -> list[str]:
    """As many as a server has threads."""
    with serving(UpdateMode.ASYNC) as store, ThreadPoolExecutor(2) as threads:
        hosted = store.hosted()[0]
        wish = PullHeader(WORKER, HERE, GENERATION, OWNED, 1, exactly=False, wait_ms=SLICE_MS)
        waiting = [threads.submit(pulls.hold, hosted, wish) for _ in range(2)]
        pushed = threads.submit(send, store, order(SHARD))
        done, _ = wait([pushed], PATIENCE_S)
        if not done:
            send(store, order(SHARD))
        for pull in waiting:
            _, held = pull.result()
            held.release()
    return [] if done else ["a push waits for the threads that wait for it"]


def a_log_that_was_taken_over_after_an_order(folder: Path) -> list[str]:
    logs = LogRoot(folder)
    taken = logs.log(JOB, HERE)
    taken.folder.mkdir(parents=True)
    (taken.folder / FENCED).write_bytes(b"3\n")
    logs.prune(JOB, incarnation_of(1), Generation(2), ())
    return [] if taken.folder.exists() else ["an order of generation 2 deletes a log fenced under generation 3"]


# ---- the rules, switched off


def parts_are_not_judged_beforehand(patch: pytest.MonkeyPatch) -> None:
    def one_by_one(work: Sequence[pushes.Work], name: PushName, current: Callable[[], None]) -> tuple[PartResult, ...]:
        return tuple([apply_push(partition, name, contribution, current) for partition, contribution in work])

    patch.setattr(pushes, "apply_to_all", one_by_one)
    patch.setattr(pushes, "check_push", lambda *_: None)


def terms_are_not_looked_at(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(admission, "check_coordinator", lambda *_: None)


def what_was_admitted_is_not_looked_at_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(pushes, "check_still_admitted", lambda *_: None)


def the_epoch_stays(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Store, "epoch", property(lambda _: 1, lambda _, epoch: None), raising=False)


def shared_memory_is_not_copied(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(pushes, "aligned_copy", lambda piece: piece)


def reads_are_held_for_as_long_as_it_takes(patch: pytest.MonkeyPatch) -> None:
    real = pulls.hold_version
    patch.setattr(pulls, "hold_version", lambda *given: real(*given[:-1], time.monotonic() + FOR_EVER_S))


def fences_are_of_any_generation(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LogFiles, "fenced_under", property(lambda self: Generation(0) if self.is_fenced else None))


@dataclass(frozen=True)
class Case:
    rule: str
    scenario: Callable[[Path], list[str]]
    switch_off: Callable[[pytest.MonkeyPatch], None]


CASES = (
    Case("A3", a_push_that_was_admitted_before_its_worker_was_fenced, what_was_admitted_is_not_looked_at_again),
    Case("A3", a_push_that_was_admitted_before_its_worker_was_fenced, the_epoch_stays),
    Case("A3", a_push_that_was_admitted_before_its_job_was_dropped, the_epoch_stays),
    Case("A4", a_push_that_one_partition_refuses, parts_are_not_judged_beforehand),
    Case("A4", a_large_push_that_one_partition_refuses, parts_are_not_judged_beforehand),
    Case("C2", a_log_that_was_taken_over_after_an_order, fences_are_of_any_generation),
    Case("C4", an_order_of_a_coordinator_that_was_replaced, terms_are_not_looked_at),
    Case("C5", a_gradient_that_changes_while_it_is_logged, shared_memory_is_not_copied),
    Case("C6", pulls_of_what_a_push_will_bring, reads_are_held_for_as_long_as_it_takes),
)


@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"{case.rule}-{case.scenario.__name__}-{case.switch_off.__name__}"
)
def test_without_a_rule_a_server_goes_wrong(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert case.scenario(tmp_path / "with") == []
    case.switch_off(monkeypatch)
    assert case.scenario(tmp_path / "without") != []
