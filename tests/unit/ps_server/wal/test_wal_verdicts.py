"""NormSums in a server's log: durable before they take effect, and the same bits when they are read (rules B6, C1)."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardyard.domain.consistency import Clipping, UpdateMode
from shardyard.domain.errors import InvalidRequest, LogDamaged, NotReady, StaleGeneration, StaleIncarnation
from shardyard.domain.ids import Caller, Incarnation, PartitionId, Rank
from shardyard.domain.pulls import PullHeader
from shardyard.domain.push_names import RankSource
from shardyard.domain.pushes import GatheredPart, Outcome, StepVerdict
from shardyard.wire.v1 import parameter_server_pb2 as wire
from shardyard_ps_server.hosting import admission, orders, pulls, pushes
from shardyard_ps_server.hosting.store import Store
from shardyard_ps_server.values.versions import NO_BYTES
from shardyard_ps_server.wal.records import RecordKind
from shardyard_ps_server.wal.replay import verdict_head
from shardyard_worker.exchange.norm_sums import NormSums
from tests.support.servers_with_logs import (
    FIRST,
    JOB,
    NEXT,
    OWNED,
    WORKER,
    Yard,
    log_of,
    order_of,
    push,
    state,
    step,
    yard_of,
)

CLIPPING = Clipping(norm=0.5)
BOTH = (RankSource(Rank(0)), RankSource(Rank(1)))


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[Yard]:
    with yard_of(tmp_path, UpdateMode.SYNC, CLIPPING) as made:
        yield made


def told(store: Store, number: int) -> list[GatheredPart]:
    """What a worker hears that wishes the version which that step makes."""
    hosted = store.hosted()[0]
    owned = tuple(sorted(hosted.partitions))
    wish = PullHeader(Caller(JOB, WORKER), store.incarnation, hosted.generation, owned, number + 1, exactly=True)
    result, held = pulls.hold(admission.admit_pull(store, wish), wish)
    held.release()
    return list(result.gathered)


def verdict_of(store: Store, number: int) -> StepVerdict:
    verdicts = NormSums(len(OWNED))
    verdicts.add(told(store, number), OWNED)
    found = verdicts.verdict(number)
    assert found is not None
    return found


def bring(store: Store, verdict: StepVerdict, worker: Incarnation = WORKER) -> None:
    order = order_of(store, 0, worker=worker)
    pushes.take_verdict(store, admission.admit(store, order.caller, order.server, order.generation), order, verdict)


def take_step(store: Store, number: int) -> None:
    step(store, number)
    bring(store, verdict_of(store, number))


def records(yard: Yard) -> list[RecordKind]:
    """Since checkpoint 1. The server's end."""
    log = log_of(yard)
    return [record.kind for record in log.records(1, log.take_over(NEXT), payloads=False)]


@pytest.mark.parametrize("seed", range(4))
def test_promise_3_steps_with_verdicts_come_back_to_the_bit(yard: Yard, seed: int) -> None:
    """Wherever the server dies, between contributions, before a verdict or behind it."""
    rng = random.Random(seed)
    first = yard.first()
    take_step(first, 0)
    saved = yard.save(first, 2)
    rounds = rng.randint(1, 4)
    for number in range(1, rounds):
        take_step(first, number)
    for source in rng.sample(BOTH, rng.randint(0, 2)):
        push(first, rounds, source=source)
    before, sums = state(first), (told(first, rounds), told(first, rounds - 1))
    second = yard.successor(saved, 2, FIRST)
    assert state(second) == before
    if rounds > 1:  # a step that the checkpoint has was taken by all
        assert (told(second, rounds), told(second, rounds - 1)) == sums


def test_step_that_waited_for_its_verdict_waits_on_and_takes_it(yard: Yard, tmp_path: Path) -> None:
    first, saved = yard.begun()
    step(first, 0)
    wanted = verdict_of(first, 0)
    second = yard.successor(saved, 2, FIRST)
    assert push(second, 0, source=BOTH[0]) == {Outcome.DUPLICATE}
    assert verdict_of(second, 0) == wanted
    bring(second, wanted)
    take_step(second, 1)
    with yard_of(tmp_path / "other", UpdateMode.SYNC, CLIPPING) as undisturbed:
        reference = undisturbed.first()
        for number in range(2):
            take_step(reference, number)
        assert state(second) == state(reference)


def test_verdict_takes_effect_once_it_is_durable(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    first = yard.first()
    step(first, 0)
    verdict = verdict_of(first, 0)
    held, go = threading.Event(), threading.Event()

    def slow(_: int) -> None:
        held.set()
        assert go.wait(30)

    monkeypatch.setattr("shardyard_ps_server.wal.wal.os.fdatasync", slow)
    thread = threading.Thread(target=bring, args=(first, verdict))
    thread.start()
    assert held.wait(30)
    versions = [partition.describe()[0].number for partition in first.hosted()[0].partitions.values()]
    go.set()
    thread.join()
    monkeypatch.undo()
    assert versions == [0, 0]
    assert [found[0] for found in state(first).values()] == [1, 1]


def test_verdict_that_comes_again_is_not_logged_again(yard: Yard) -> None:
    first = yard.first()
    step(first, 0)
    verdict = verdict_of(first, 0)
    for _ in range(3):
        bring(first, verdict)
    assert records(yard).count(RecordKind.VERDICT) == 1


def test_verdicts_that_come_at_once_count_once(yard: Yard) -> None:
    first, saved = yard.begun()
    barrier = threading.Barrier(4)

    def work(verdict: StepVerdict) -> None:
        barrier.wait(30)
        bring(first, verdict)

    for number in range(4):
        step(first, number)
        threads = [threading.Thread(target=work, args=(verdict_of(first, number),)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [found[0] for found in state(first).values()] == [number + 1] * 2
    before = state(first)
    assert state(yard.successor(saved, 2, FIRST)) == before


def test_partitions_of_one_server_take_their_verdicts_on_several(yard: Yard) -> None:
    first, saved = yard.begun()
    take_step(first, 0)
    step(first, 1)
    before = state(first)
    second = yard.successor(saved, 2, FIRST, owned=OWNED[:1])
    third = yard.successor(saved, 2, FIRST, owned=OWNED[1:], incarnation=Incarnation(7))
    assert {**state(second), **state(third)} == before
    verdicts = NormSums(len(OWNED))
    verdicts.add([*told(second, 1), *told(third, 1)], OWNED)
    verdict = verdicts.verdict(1)
    assert verdict is not None
    for store in (second, third):
        bring(store, verdict)
    assert [found[0] for found in {**state(second), **state(third)}.values()] == [2, 2]


def test_who_may_not_write_brings_no_verdict(yard: Yard) -> None:
    first = yard.first()
    step(first, 0)
    verdict = verdict_of(first, 0)
    orders.fence(first, [WORKER])
    with pytest.raises(StaleIncarnation):
        bring(first, verdict)
    order = order_of(first, 0, worker=Incarnation(11))
    hosted = admission.admit(first, order.caller, order.server, order.generation)
    hosted.generation = type(hosted.generation)(hosted.generation + 1)  # since it was admitted
    with pytest.raises(StaleGeneration):
        pushes.take_verdict(first, hosted, order, verdict)
    hosted.generation = order.generation
    with pytest.raises(InvalidRequest):
        bring(first, StepVerdict(1, verdict.square_norm), Incarnation(11))
    assert RecordKind.VERDICT not in records(yard)


def test_a_log_that_fails_takes_no_verdict(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    first = yard.first()
    step(first, 0)
    verdict = verdict_of(first, 0)

    def fail(_: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "fdatasync", fail)
    with pytest.raises(NotReady):
        bring(first, verdict)
    monkeypatch.undo()
    assert [found[0] for found in state(first).values()] == [0, 0]


@pytest.mark.parametrize(
    "head",
    [
        b"\xff",
        verdict_head(StepVerdict(0), OWNED),
        verdict_head(StepVerdict(5, 1.0), OWNED),
        wire.VerdictGiven(verdict=wire.StepVerdict(step=0, square_norm=-1.0), partitions=OWNED).SerializeToString(),
        wire.VerdictGiven(verdict=wire.StepVerdict(step=0, square_norm=1e9), partitions=[0, 0]).SerializeToString(),
    ],
)
def test_verdict_that_does_not_follow_is_damage(yard: Yard, head: bytes) -> None:
    first, saved = yard.begun()
    step(first, 0)
    wal = first.hosted()[0].wal
    assert wal is not None
    with wal.order:
        ticket = wal.append(RecordKind.VERDICT, head, NO_BYTES)
    wal.sync(ticket)
    with pytest.raises(LogDamaged, match=r"the record does not fit what came before it"):
        yard.successor(saved, 2, FIRST)


def test_verdict_is_for_the_partitions_that_it_was_given_to(yard: Yard) -> None:
    first, saved = yard.begun()
    step(first, 0)
    wal = first.hosted()[0].wal
    assert wal is not None
    with wal.order:
        ticket = wal.append(RecordKind.VERDICT, verdict_head(verdict_of(first, 0), [PartitionId(1)]), NO_BYTES)
    wal.sync(ticket)
    second = yard.successor(saved, 2, FIRST)
    assert [found[0] for found in state(second).values()] == [0, 1]
