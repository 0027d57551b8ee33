"""What a server holds: who is admitted, what is refused before and after the payload comes, and what is counted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import numpy as np
import pytest

from shardyard.domain import limits
from shardyard.domain.consistency import UpdateMode
from shardyard.domain.errors import (
    InvalidRequest,
    MalformedPayload,
    NotFound,
    NotReady,
    RateMismatch,
    SequenceGap,
    ShapeMismatch,
    ShardyardError,
    StaleGeneration,
    StaleIncarnation,
    StaleTerm,
    TooLarge,
)
from shardyard.domain.ids import Caller, Generation, Incarnation, JobId, PartitionId, Rank, Term, Token, Version
from shardyard.domain.layout.layouts import Block, JobLayout, PartitionLayout
from shardyard.domain.optimizers import OptimizerSpec, make_group
from shardyard.domain.pulls import PullHeader
from shardyard.domain.push_names import DataShardSource, PushName, RankSource, Source, SourceKey, WorkerSource
from shardyard.domain.pushes import ExchangeReply, Outcome, PartResult, PushHeader, PushKind, PushPart
from shardyard.domain.variables import DType, VariableSpec
from shardyard.transport.shared_memory import SharedMemory
from shardyard_ps_server.checkpoint.restore import Restore
from shardyard_ps_server.hosting import admission, orders, pulls, pushes
from shardyard_ps_server.hosting.hosted_job import CreateRequest, HostedJob
from shardyard_ps_server.hosting.store import Counters, Store
from shardyard_ps_server.partition import dense_state, partition
from shardyard_ps_server.partition.update_rules import UpdateRules
from shardyard_ps_server.service import servicer
from shardyard_ps_server.values import receive_memory, shm_regions, versions
from shardyard_ps_server.values.versions import Bytes, aligned_empty

JOB = JobId(1)
HERE = Incarnation(3)
GENERATION = Generation(4)
WORKER = Caller(JOB, Incarnation(10))
RATE = (make_group("sgd", {"lr": 1.0}),)
TOKEN = Token(1)
SHARD = DataShardSource(0, 0, 0)
PART_BYTES = 2 * limits.BLOCK_ALIGN_BYTES
LAYOUT = JobLayout(
    tuple(VariableSpec(name, DType.FLOAT64, (8,)) for name in "abcdef"),
    OptimizerSpec("sgd", RATE),
    tuple(
        PartitionLayout(PartitionId(p), PART_BYTES, (Block(2 * p, 0, 8, 0), Block(2 * p + 1, 0, 8, 64)))
        for p in range(3)
    ),
)
OWNED = [PartitionId(0), PartitionId(2)]
MOVED = Restore("/checkpoints", ())
"""Of a server that keeps its partitions, while others are restored elsewhere."""


def server(mode: UpdateMode = UpdateMode.ASYNC, *, ranks: int = 2, opened: bool = True) -> Store:
    """Holds partitions 0 and 2; what the mode leases, SHARD or all ranks, is open under TOKEN."""
    found = Store()
    found.become(HERE, Term(2))
    orders.create(found, CreateRequest(JOB, GENERATION, LAYOUT, OWNED, UpdateRules(mode, ranks)))
    if opened:
        orders.open_partitions(found, JOB, GENERATION)
    keys = [SourceKey(SHARD)]
    if mode is UpdateMode.SYNC:
        keys = [SourceKey(RankSource(Rank(rank))) for rank in range(ranks)]
    pushes.open_sources(admission.admit(found, WORKER, HERE, GENERATION), [(key, TOKEN) for key in keys])
    return found


def parts(owned: Iterable[int] = OWNED, payload_bytes: int = PART_BYTES) -> tuple[PushPart, ...]:
    return tuple(PushPart(PartitionId(p), payload_bytes) for p in owned)


def order(source: Source = SHARD, sequence: int = 0, **changed: object) -> PushHeader:
    """A gradient for both partitions."""
    name = PushName(SourceKey(source), TOKEN, sequence, sequence)
    found = PushHeader(WORKER, HERE, GENERATION, name, PushKind.GRADIENT, parts(), 1.0, RATE)
    return dataclasses.replace(found, **changed)  # type: ignore[arg-type]


def empty(source: Source = SHARD, sequence: int = 0, owned: Iterable[int] = OWNED) -> PushHeader:
    return order(source, sequence, kind=PushKind.EMPTY, parts=parts(owned, 0), weight=0.0, groups=())


def first_values(**changed: object) -> PushHeader:
    return order(WorkerSource(WORKER.incarnation), kind=PushKind.VALUES, weight=0.0, groups=(), **changed)


def payload(order: PushHeader, fill: float = 1.0) -> Bytes:
    found = aligned_empty(order.payload_bytes)
    found.view(np.float64)[:] = fill
    return found


def send(to: Store, order: PushHeader, fill: float = 1.0) -> tuple[PartResult, ...]:
    return pushes.push(to, admission.admit_push(to, order), order, payload(order, fill))


def wish(*wanted: int, number: int = 0, exactly: bool = False, wait_ms: int = 0) -> PullHeader:
    found = tuple(PartitionId(p) for p in wanted)
    return PullHeader(WORKER, HERE, GENERATION, found, number, exactly, wait_ms)


def values(of: Store) -> dict[int, list[float]]:
    result, held = pulls.hold(admission.admit_pull(of, wish(0, 2)), wish(0, 2))
    try:
        return {
            part.partition: buffer.view(np.float64).tolist()
            for part, (_, buffer) in zip(result.parts, held.buffers, strict=True)
        }
    finally:
        held.release()


def state(of: Store) -> object:
    """All that a push could change in the partitions."""
    hosted = of.hosted()[0]
    sources = [SHARD, WorkerSource(WORKER.incarnation), RankSource(Rank(0)), RankSource(Rank(1))]
    ledger = pushes.read_ledger(hosted, [(SourceKey(source), Token(0)) for source in sources])
    described = [hosted.partitions[p].describe() for p in sorted(hosted.partitions)]
    return ledger, described, values(of) if hosted.open else None


# ---- who is admitted


def test_request_for_another_server_is_refused() -> None:
    for other in (Incarnation(0), Incarnation(2), Incarnation(4)):
        with pytest.raises(StaleIncarnation, match=f"a request for server {other}; this is server {HERE}"):
            admission.admit(server(), WORKER, other, GENERATION)


def test_promise_4_fenced_worker_can_neither_push_nor_pull_nor_open() -> None:
    here = server()
    orders.fence(here, [WORKER.incarnation])
    for ask in (
        lambda: admission.admit_push(here, order()),
        lambda: admission.admit_pull(here, wish(0)),
        lambda: admission.admit(here, WORKER, HERE, GENERATION),
    ):
        with pytest.raises(StaleIncarnation, match="which was declared dead"):
            ask()
    assert here.counters == Counters()
    assert admission.admit(here, Caller(JOB, Incarnation(11)), HERE, GENERATION).job == JOB


def test_server_that_registers_anew_has_fenced_nobody() -> None:
    here = server()
    orders.fence(here, [WORKER.incarnation])
    here.become(Incarnation(9), Term(3))
    assert here.incarnation == 9
    assert admission.admit(here, WORKER, Incarnation(9), GENERATION).job == JOB


@pytest.mark.parametrize("generation", [3, 5])
def test_rule_a3_other_generation_is_refused(generation: int) -> None:
    with pytest.raises(StaleGeneration) as refused:
        admission.admit(server(), WORKER, HERE, Generation(generation))
    assert refused.value.facts == {"generation": "4"}


def test_caller_without_an_incarnation_only_reads() -> None:
    here, nobody = server(), Caller(JOB)
    with pytest.raises(InvalidRequest, match="a request without an incarnation"):
        admission.admit(here, nobody, HERE, GENERATION)
    assert admission.admit(here, nobody, HERE, GENERATION, reads=True).job == JOB


def test_job_that_is_not_here_is_not_found() -> None:
    with pytest.raises(NotFound, match="job 8 is not on this server"):
        admission.admit(server(), Caller(JobId(8), Incarnation(10)), HERE, GENERATION)


def test_rule_c4_coordinator_of_a_lower_term_is_refused_and_a_higher_one_is_remembered() -> None:
    here = server()
    admission.check_coordinator(here, Caller(term=Term(2)))
    admission.check_coordinator(here, Caller(term=Term(5)))
    with pytest.raises(StaleTerm, match="term 4; this server has seen 5"):
        admission.check_coordinator(here, Caller(term=Term(4)))
    admission.check_coordinator(here, Caller(term=Term(5)))


# ---- the coordinator's orders


def test_same_order_to_create_again_keeps_what_is_there() -> None:
    here = server()
    send(here, order())
    before = values(here)
    orders.create(here, CreateRequest(JOB, GENERATION, LAYOUT, list(reversed(OWNED)), UpdateRules(UpdateMode.ASYNC, 2)))
    assert values(here) == before
    assert here.hosted()[0].open


def test_same_order_of_a_later_generation_moves_the_generation_and_never_back() -> None:
    here = server()
    orders.create(here, CreateRequest(JOB, Generation(6), LAYOUT, OWNED, UpdateRules(UpdateMode.ASYNC, 2), MOVED))
    with pytest.raises(StaleGeneration):
        orders.create(here, CreateRequest(JOB, Generation(5), LAYOUT, OWNED, UpdateRules(UpdateMode.ASYNC, 2), MOVED))
    assert admission.admit(here, WORKER, HERE, Generation(6)).generation == 6


@pytest.mark.parametrize(
    ("owned", "mode", "ranks"),
    [
        ([PartitionId(0)], UpdateMode.SYNC, 2),
        ([PartitionId(0), PartitionId(1)], UpdateMode.SYNC, 2),
        (OWNED, UpdateMode.ASYNC, 2),
        (OWNED, UpdateMode.SYNC, 3),
    ],
)
def test_another_order_for_a_job_that_is_here_is_refused(
    owned: list[PartitionId], mode: UpdateMode, ranks: int
) -> None:
    here = server(UpdateMode.SYNC, ranks=2)
    with pytest.raises(
        InvalidRequest, match=r"with another layout, mode, number of ranks|to be async at|without (partition 2|values)"
    ):
        orders.create(here, CreateRequest(JOB, GENERATION, LAYOUT, owned, UpdateRules(mode, ranks)))
    assert here.hosted()[0].mode is UpdateMode.SYNC


@pytest.mark.parametrize("ranks", [0, limits.LOGICAL_RANKS_MAX + 1])
def test_synchronous_job_has_a_bounded_number_of_ranks(ranks: int) -> None:
    with pytest.raises(InvalidRequest, match=f"{ranks} logical ranks"):
        orders.create(Store(), CreateRequest(JOB, GENERATION, LAYOUT, OWNED, UpdateRules(UpdateMode.SYNC, ranks)))


def test_partitions_must_be_of_the_layout() -> None:
    with pytest.raises(InvalidRequest, match="of a layout with 3"):
        orders.create(
            Store(), CreateRequest(JOB, GENERATION, LAYOUT, [PartitionId(3)], UpdateRules(UpdateMode.ASYNC, 0))
        )


@pytest.mark.parametrize("shareable", [True, False])
def test_job_for_which_there_is_no_memory_is_refused_and_not_half_there(
    shareable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def enough_for_one(nbytes: int) -> Bytes:
        asked.append(nbytes)
        if len(asked) > 1:
            raise TooLarge(f"{nbytes} bytes, for which this server has no memory")
        return aligned_empty(nbytes)

    if shareable:
        monkeypatch.setattr(SharedMemory, "populate", lambda _, at, nbytes: enough_for_one(PART_BYTES))
    else:
        monkeypatch.setattr(shm_regions, "aligned_empty", enough_for_one)
    here = Store(shareable=shareable)
    with pytest.raises(TooLarge, match="job 1, one of them with 128 bytes, for which this server has no memory"):
        orders.create(here, CreateRequest(JOB, GENERATION, LAYOUT, OWNED, UpdateRules(UpdateMode.ASYNC, 0)))
    assert here.hosted() == []
    assert len(asked) == 2


def test_dropped_job_is_gone_and_can_be_dropped_again() -> None:
    here = server()
    orders.drop(here, JOB)
    orders.drop(here, JOB)
    assert here.hosted() == []
    with pytest.raises(NotFound):
        admission.admit(here, WORKER, HERE, GENERATION)


def test_push_on_its_way_while_its_job_is_dropped_and_made_anew_is_not_counted() -> None:
    here = server()
    admitted = admission.admit_push(here, order())
    orders.drop(here, JOB)
    with pytest.raises(NotFound):
        pushes.push(here, admitted, order(), payload(order()))
    orders.create(here, CreateRequest(JOB, GENERATION, LAYOUT, OWNED, UpdateRules(UpdateMode.ASYNC, 2)))
    with pytest.raises(
        NotFound, match="job 1 was dropped while data shard 0.0.0 #0 was on its way".replace(".", r"\.")
    ):
        pushes.push(here, admitted, order(), payload(order()))
    assert here.counters.pushes_applied == 0


def test_opening_takes_the_present_generation() -> None:
    here = server(opened=False)
    with pytest.raises(StaleGeneration):
        orders.open_partitions(here, JOB, Generation(3))
    assert not here.hosted()[0].open
    with pytest.raises(NotFound):
        orders.open_partitions(here, JobId(8), GENERATION)


# ---- first values


def initialize(to: Store, order: PushHeader, fill: float) -> None:
    pushes.initialize(to, admission.admit_push(to, order), order, payload(order, fill))


def test_first_values_are_what_is_pulled_after_opening() -> None:
    here = server(opened=False)
    initialize(here, first_values(), 3.0)
    initialize(here, first_values(), 5.0)
    orders.open_partitions(here, JOB, GENERATION)
    assert values(here) == {0: [5.0] * 16, 2: [5.0] * 16}


def test_gradient_before_the_first_values_is_not_ready() -> None:
    here = server(opened=False)
    for push in (order(), empty()):
        with pytest.raises(NotReady, match="job 1 has no first values yet"):
            admission.admit_push(here, push)


def test_first_values_after_opening_are_refused() -> None:
    here = server()
    with pytest.raises(InvalidRequest, match="first values for job 1, which is open"):
        admission.admit_push(here, first_values())


def test_first_values_whose_sender_was_fenced_on_the_way_are_not_taken() -> None:
    here = server(opened=False)
    initialize(here, first_values(), 5.0)
    admitted = admission.admit_push(here, first_values())
    orders.fence(here, [WORKER.incarnation])
    with pytest.raises(StaleIncarnation):
        pushes.initialize(here, admitted, first_values(), payload(first_values(), 7.0))
    here.become(HERE, Term(2))
    orders.open_partitions(here, JOB, GENERATION)
    assert values(here)[0] == [5.0] * 16


def test_first_values_that_arrive_after_opening_are_not_taken() -> None:
    here = server(opened=False)
    initialize(here, first_values(), 5.0)
    admitted = admission.admit_push(here, first_values())
    orders.open_partitions(here, JOB, GENERATION)
    with pytest.raises(InvalidRequest, match="which is open"):
        pushes.initialize(here, admitted, first_values(), payload(first_values(), 7.0))
    assert values(here)[0] == [5.0] * 16


def test_first_values_must_be_all_of_them() -> None:
    here = server(opened=False)
    for part in (PushPart(PartitionId(0), 64, (1,)), PushPart(PartitionId(0), 0), PushPart(PartitionId(0), 64)):
        with pytest.raises(ShapeMismatch, match="expected 128"):
            admission.admit_push(here, first_values(parts=(part,)))


# ---- what is refused before the payload comes


REFUSED: list[tuple[Callable[[], PushHeader], type[ShardyardError], str]] = [
    (lambda: order(WorkerSource(Incarnation(11))), InvalidRequest, "worker 11 #0 sent by worker 10"),
    (lambda: order(name=PushName(SourceKey(SHARD, lane=1), TOKEN, 0, 0)), InvalidRequest, "this job has lane 0 only"),
    (lambda: order(weight=0.0), InvalidRequest, "a gradient of weight 0"),
    (lambda: order(groups=()), InvalidRequest, "settings for 0 parameter groups"),
    (lambda: order(groups=(make_group("sgd", {"momentum": 0.9}),)), InvalidRequest, "momentum was 0"),
    (lambda: order(parts=parts([0, 1])), NotFound, "partition 1 of job 1 is not on this server"),
    (lambda: order(parts=parts(payload_bytes=PART_BYTES + 64)), ShapeMismatch, "192 bytes; expected 128"),
    (lambda: order(parts=parts(payload_bytes=1 << 60)), ShapeMismatch, "expected 128"),
    (lambda: order(parts=(PushPart(PartitionId(0), 128, (1,)),)), ShapeMismatch, "128 bytes; expected 64"),
    (lambda: order(parts=(PushPart(PartitionId(0), 64, (2,)),)), MalformedPayload, "absent blocks"),
    (lambda: dataclasses.replace(empty(), parts=parts()), ShapeMismatch, "128 bytes; expected 0"),
    (lambda: order(pull=wish(1)), NotFound, "partition 1"),
    (lambda: order(pull=dataclasses.replace(wish(0), generation=Generation(3))), StaleGeneration, "generation 3"),
]


@pytest.mark.parametrize(("make", "kind", "said"), REFUSED)
def test_push_that_does_not_fit_is_refused_before_memory_is_asked_for(
    make: Callable[[], PushHeader], kind: type[ShardyardError], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = server()
    before = state(here)

    def never(nbytes: int) -> Bytes:
        raise AssertionError(f"asked for {nbytes} bytes")

    for module in (receive_memory, servicer, shm_regions, partition, dense_state, versions):
        monkeypatch.setattr(module, "aligned_empty", never)
    with pytest.raises(kind, match=said):
        admission.admit_push(here, make())
    assert state(here) == before


# ---- pushes


def test_each_partition_takes_its_own_piece_of_the_payload() -> None:
    here = server()
    push = order(parts=(PushPart(PartitionId(2), 128), PushPart(PartitionId(0), 64, (0,))))
    memory = aligned_empty(192)
    memory.view(np.float64)[:] = np.arange(24)
    results = pushes.push(here, admission.admit_push(here, push), push, memory)
    assert [result.partition for result in results] == [2, 0]
    assert values(here) == {0: [0.0] * 8 + [-float(x) for x in range(16, 24)], 2: [-float(x) for x in range(16)]}


def test_rule_a4_all_parts_are_judged_before_any_is_applied() -> None:
    here = server()
    send(here, order(sequence=0))
    send(here, order(sequence=1, parts=parts([0])))
    before = state(here)
    with pytest.raises(SequenceGap) as refused:  # next in partition 0, beyond the next in partition 2
        send(here, order(sequence=2))
    assert refused.value.facts == {"partition": "2", "next": "1"}
    assert state(here) == before


def test_rule_a4_rates_that_one_partition_refuses_are_recorded_by_none() -> None:
    here = server(UpdateMode.SYNC)
    other = (make_group("sgd", {"lr": 0.5}),)
    send(here, order(RankSource(Rank(1)), parts=parts([2]), groups=other))
    before = state(here)
    with pytest.raises(RateMismatch):
        send(here, order(RankSource(Rank(0))))
    assert state(here) == before


@pytest.mark.parametrize("change", ["fenced", "moved"])
def test_rule_a3_push_that_was_overtaken_after_it_was_admitted_changes_nothing(change: str) -> None:
    here = server()
    admitted = admission.admit_push(here, order())
    before = state(here)
    if change == "fenced":
        orders.fence(here, [WORKER.incarnation])
    else:
        orders.create(here, CreateRequest(JOB, Generation(5), LAYOUT, OWNED, UpdateRules(UpdateMode.ASYNC, 2), MOVED))
    with pytest.raises(StaleIncarnation if change == "fenced" else StaleGeneration):
        pushes.push(here, admitted, order(), payload(order()))
    here.become(HERE, Term(2))
    hosted = here.hosted()[0]
    hosted.generation = GENERATION
    assert state(here) == before


def test_rule_a5_opening_writes_the_token_to_every_partition_and_brings_back_the_watermarks() -> None:
    here = server()
    send(here, order(parts=parts([2])))
    hosted = admission.admit(here, WORKER, HERE, GENERATION)
    ((key, marks),) = pushes.open_sources(hosted, [(SourceKey(SHARD), Token(2))])
    assert key == SourceKey(SHARD)
    assert [(mark.partition, mark.next, mark.version.number) for mark in marks] == [(0, 0, 0), (2, 1, 1)]
    for owned in OWNED:
        with pytest.raises(ShardyardError, match="which has seen 2"):
            send(here, order(sequence=1 if owned == 2 else 0, parts=parts([owned])))


def test_reading_the_ledger_makes_no_entry() -> None:
    here = server()
    hosted = here.hosted()[0]
    before = [hosted.partitions[p].describe() for p in OWNED]
    found = pushes.read_ledger(hosted, [(SourceKey(DataShardSource(0, 7, 7)), Token(3))])
    assert [mark.next for mark in found[0][1]] == [0, 0]
    assert [hosted.partitions[p].describe() for p in OWNED] == before


# ---- pulls


def pull(from_: Store, asked: PullHeader) -> ExchangeReply:
    hosted = admission.admit_pull(from_, asked)
    result, held = pulls.hold(hosted, asked)
    assert [buffer.size for _, buffer in held.buffers] == [PART_BYTES for _ in result.parts]
    assert [partition for partition, _ in held.buffers] == [hosted.partitions[part.partition] for part in result.parts]
    held.release()
    return result


def test_pull_answers_all_parts_or_says_what_is_missing() -> None:
    here = server()
    send(here, order(parts=parts([0])))
    whole = pull(here, wish(2, 0))
    assert [(part.partition, part.version.number) for part in whole.parts] == [(2, 0), (0, 1)]
    torn = pull(here, wish(0, 2, number=1))
    assert torn.parts == ()
    assert [(missing.partition, missing.want, missing.waiting_for) for missing in torn.missing] == [(2, 1, "a push")]


def test_pull_before_opening_waits_for_the_initializer() -> None:
    result = pull(server(opened=False), wish(0, 2))
    assert [missing.waiting_for for missing in result.missing] == ["first values from the initializer"] * 2


def test_pull_of_a_partition_that_is_elsewhere_is_not_found() -> None:
    with pytest.raises(NotFound):
        admission.admit_pull(server(), wish(0, 1))


def held_buffers(hosted: HostedJob) -> int:
    return sum(len(partition.versions._readers) for partition in hosted.partitions.values())


def test_buffers_are_held_until_they_are_released_and_not_at_all_by_a_pull_that_fails() -> None:
    here = server(UpdateMode.SYNC, ranks=1)
    hosted = here.hosted()[0]
    _, held = pulls.hold(hosted, wish(0, 2))
    assert held_buffers(hosted) == len(held.buffers) == 2
    held.release()
    assert held_buffers(hosted) == 0
    send(here, order(RankSource(Rank(0)), 0))
    for step in (1, 2):
        send(here, order(RankSource(Rank(0)), step, parts=parts([2])))
    with pytest.raises(NotFound, match="version 1 of partition 2"):
        pulls.hold(hosted, wish(0, 2, number=1, exactly=True))
    assert held_buffers(hosted) == 0
    result, held = pulls.hold(hosted, wish(2, 0, number=3))
    assert [missing.partition for missing in result.missing] == [0]
    assert held.buffers == ()
    assert held_buffers(hosted) == 0


# ---- counters


def test_pushes_and_bytes_are_counted() -> None:
    here = server()
    send(here, order())
    send(here, order())
    send(here, empty(sequence=1))
    send(here, order(sequence=2, parts=parts([0])))
    send(here, order(sequence=2))  # applied by one partition
    pull(here, wish(0, 2))
    pull(here, wish(0, number=99))
    counters = here.counters
    assert (counters.pushes_applied, counters.pushes_duplicate) == (4, 1)
    assert counters.bytes_received == 7 * PART_BYTES
    assert counters.bytes_sent == 0  # noted where they are sent
    here.count_sent(5)
    assert counters.bytes_sent == 5


@pytest.mark.parametrize("outcome", [Outcome.DUPLICATE, Outcome.DROPPED])
def test_push_without_effect_in_all_its_partitions_does_not_count_as_applied(outcome: Outcome) -> None:
    without_effect, applied = (
        PartResult(PartitionId(0), each, 1, Version(0, 1)) for each in (outcome, Outcome.APPLIED)
    )
    here = Store()
    here.count_push([without_effect, without_effect], 0)
    here.count_push([without_effect, applied], 0)
    assert (here.counters.pushes_applied, here.counters.pushes_duplicate) == (1, 1)


def test_refused_push_is_not_counted() -> None:
    here = server()
    with pytest.raises(SequenceGap):
        send(here, order(sequence=1))
    assert here.counters == Counters()
