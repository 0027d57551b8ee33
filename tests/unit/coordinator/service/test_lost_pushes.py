"""Workers' own sources after a restore (rule A11): what is lost is told exactly, written down, and passed over."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardyard.domain import errors
from shardyard.domain.consistency import UpdateMode
from shardyard.domain.ids import Caller, Generation, Incarnation, JobId, PartitionId, Term, Token
from shardyard.domain.layout.layouts import Block, JobLayout, PartitionLayout
from shardyard.domain.optimizers import OptimizerSpec, make_group
from shardyard.domain.push_names import SourceKey, WorkerSource
from shardyard.domain.variables import DType, VariableSpec
from shardyard.transport.in_process import InProcessNetwork
from shardyard.wire import common_messages, methods
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard.wire.v1 import parameter_server_pb2 as server_wire
from shardyard_coordinator.records import Body, DamagedRecord
from shardyard_coordinator.service.journal import Journal
from shardyard_coordinator.work.losses import LostPushes, LostRange, described
from shardyard_ps_server.hosting import orders, pushes
from shardyard_ps_server.hosting.hosted_job import CreateRequest
from shardyard_ps_server.hosting.store import Store
from shardyard_ps_server.partition.update_rules import UpdateRules
from shardyard_ps_server.service.servicer import Servicer
from tests.support.coordinator_yards import ASYNC, Worker, Yard, begin, sync_settings

FIRST, SECOND = Incarnation(8), Incarnation(9)


def lost(partition: int, first: int, last: int) -> LostRange:
    return LostRange(PartitionId(partition), first, last)


# ---- the count


def test_push_that_several_partitions_lack_counts_once_and_what_is_found_again_too() -> None:
    found = LostPushes()
    found.add(FIRST, [lost(0, 3, 5), lost(2, 4, 8)])
    assert found.count == 6
    found.add(FIRST, [lost(0, 3, 9)])
    assert found.count == 7
    found.add(SECOND, [lost(0, 3, 3)])
    found.add(FIRST, [lost(0, 20, 21)])
    assert found.count == 10


def test_lost_pushes_of_workers_that_are_gone_stay_counted_in_no_memory() -> None:
    found = LostPushes()
    for number in range(1, 100):
        found.add(Incarnation(number), [lost(0, 1, 2), lost(1, 2, 3)])
        found.forget(Incarnation(number))
    found.forget(FIRST)
    assert found.count == 3 * 99
    assert found.entries() == [("pushes_lost_before", {"count": 297})]


def test_records_bring_back_what_was_lost() -> None:
    found = LostPushes()
    found.add(FIRST, [lost(0, 3, 5), lost(0, 9, 9), lost(2, 4, 8)])
    found.add(SECOND, [lost(1, 0, 0)])
    found.forget(SECOND)
    again = LostPushes()
    for kind, body in found.entries():
        again.restore(kind, Body(body))
    assert (again.count, again.entries()) == (8, found.entries())
    again.add(FIRST, [lost(0, 3, 6)])
    assert again.count == 8


@pytest.mark.parametrize("item", [[0, 5, 4], [4096, 0, 0], [0, 0], [0, 0, 1 << 63]])
def test_record_of_no_range_is_refused(item: list[int]) -> None:
    with pytest.raises(DamagedRecord, match="a range"):
        LostPushes().restore("pushes_lost", Body({"worker": 8, "lost": [item]}))


def test_ranges_are_told_once_with_their_partitions() -> None:
    assert described([lost(3, 5, 9), lost(0, 5, 9), lost(1, 7, 7)]) == "#5 to #9 in partition 0, 3; #7 in partition 1"


# ---- on a server

JOB, GENERATION, HERE, SERVER_TERM = JobId(5), Generation(2), Incarnation(1), Term(4)


def store(mode: UpdateMode = UpdateMode.ASYNC) -> Store:
    made = Store()
    made.become(HERE, SERVER_TERM)
    layout = JobLayout(
        (VariableSpec("v", DType.FLOAT32, (16,)),),
        OptimizerSpec("sgd", (make_group("sgd", {"lr": 1.0}),)),
        (PartitionLayout(PartitionId(0), 64, (Block(0, 0, 16, 0),)),),
    )
    orders.create(made, CreateRequest(JOB, GENERATION, layout, [PartitionId(0)], UpdateRules(mode, 1)))
    orders.open_partitions(made, JOB, GENERATION)
    return made


def order(
    term: int = SERVER_TERM, generation: int = GENERATION, next_sequence: int = 5, worker: int = FIRST
) -> server_wire.PassOverRequest:
    caller = common_messages.caller_to_wire(Caller(JOB, term=Term(term)))
    return server_wire.PassOverRequest(
        caller=caller, server=HERE, generation=generation, worker=worker, next=next_sequence
    )


def send(to: Store, request: server_wire.PassOverRequest) -> None:
    network = InProcessNetwork()
    network.listen("here:1", [Servicer(to).service()])
    network.connect("here:1", name="server").call(methods.PASS_OVER, request, timeout_ms=5_000)


def test_partitions_go_on_where_the_coordinator_says() -> None:
    here = store()
    send(here, order())
    send(here, order(next_sequence=3))
    key = SourceKey(WorkerSource(FIRST))
    ((_, marks),) = pushes.read_ledger(here.hosted()[0], [(key, Token(0))])
    assert [mark.next for mark in marks] == [5]


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (order(term=SERVER_TERM - 1), errors.StaleTerm),
        (order(generation=GENERATION - 1), errors.StaleGeneration),
        (order(next_sequence=1 << 63), errors.InvalidRequest),
        (order(worker=1 << 63), errors.TooLarge),
    ],
)
def test_order_that_is_out_of_date_changes_nothing(
    request_: server_wire.PassOverRequest, error: type[errors.ShardyardError]
) -> None:
    here = store()
    with pytest.raises(error):
        send(here, request_)
    assert here.hosted()[0].partitions[PartitionId(0)].describe()[1] == 0


def test_nothing_is_passed_over_in_a_synchronous_job() -> None:
    with pytest.raises(errors.InvalidRequest, match="which is sync"):
        send(store(UpdateMode.SYNC), order())


def test_order_that_meets_a_restore_under_way_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    here = store()
    hosted = here.hosted()[0]
    partition = hosted.partitions[PartitionId(0)]
    pass_over = partition.pass_over

    def late(key: SourceKey, next_sequence: int, check: object) -> None:
        hosted.generation = Generation(GENERATION + 1)
        pass_over(key, next_sequence, check)  # type: ignore[arg-type]

    monkeypatch.setattr(partition, "pass_over", late)
    with pytest.raises(errors.StaleGeneration):
        send(here, order())
    assert partition.describe()[1] == 0


# ---- by the coordinator


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[Yard]:
    before = set(threading.enumerate())
    found = begin(Journal(tmp_path / "state"))
    yield found
    found.coordinator.stop()
    found.journal.close()
    assert [each.name for each in threading.enumerate() if each not in before] == []


def stands_at(yard: Yard, worker: Worker, nexts: list[int]) -> None:
    """Server by server, for all its partitions."""
    for fake, each in zip(yard.servers.values(), nexts, strict=True):
        fake.next_of[SourceKey(WorkerSource(worker.incarnation))] = each


def lost_pushes(yard: Yard) -> int:
    return yard.peer().call(methods.STATUS, wire.StatusRequest(), timeout_ms=1).jobs[0].lost_pushes


def kinds(yard: Yard) -> list[str]:
    return [record.kind for record in yard.journal.records()]


def test_what_is_lost_is_written_down_before_servers_pass_over_it(yard: Yard) -> None:
    (worker,) = yard.run_job(ASYNC)
    stands_at(yard, worker, [9, 5])
    written: list[list[str]] = []
    second = list(yard.servers.values())[1]
    second.on_call["pass over"] = lambda: written.append(kinds(yard))
    owned = second.partitions
    assert worker.rebase(8) == [(partition, 5, 7) for partition in owned]
    assert [each[-1] for each in written] == ["pushes_lost"]
    (asked,) = second.named("pass over")
    assert isinstance(asked, server_wire.PassOverRequest)
    assert (asked.worker, asked.next, asked.caller.term) == (worker.incarnation, 8, 1)
    assert lost_pushes(yard) == 3


def test_rebase_that_is_asked_for_again_counts_nothing_twice(yard: Yard) -> None:
    (worker,) = yard.run_job(ASYNC)
    stands_at(yard, worker, [8, 5])
    second = list(yard.servers.values())[1]
    second.refuse["pass over"] = errors.NotReady("not now")
    for _ in range(2):
        with pytest.raises(errors.NotReady):
            worker.rebase(8)
    second.refuse.clear()
    assert [span[1:] for span in worker.rebase(8)] == [(5, 7)] * len(second.partitions)
    assert worker.rebase(8) == []
    assert lost_pushes(yard) == 3


def test_source_that_lacks_nothing_is_left_alone(yard: Yard) -> None:
    (worker,) = yard.run_job(ASYNC)
    stands_at(yard, worker, [8, 9])
    before = kinds(yard)
    assert worker.rebase(8) == []
    assert kinds(yard) == before
    assert all(not fake.named("pass over") for fake in yard.servers.values())


def test_lost_pushes_are_known_to_the_next_coordinator(yard: Yard, tmp_path: Path) -> None:
    first, second = yard.run_job(ASYNC, workers=2)
    stands_at(yard, first, [8, 5])
    stands_at(yard, second, [1, 1])
    first.rebase(8)
    second.rebase(3)
    second.leave()
    assert lost_pushes(yard) == 5
    yard.coordinator.stop()
    yard.journal.close()
    again = begin(Journal(tmp_path / "state"), yard.network)
    try:
        assert lost_pushes(again) == 5
        assert kinds(again).count("pushes_lost_before") == 1, "of a worker that is gone the number is kept"
    finally:
        again.coordinator.stop()
        again.journal.close()


def test_ranks_have_no_source_to_rebase(yard: Yard) -> None:
    (worker,) = yard.run_job(sync_settings(1))
    with pytest.raises(errors.InvalidRequest, match="is synchronous"):
        worker.rebase(3)


def test_rebase_beyond_all_sequences_is_refused(yard: Yard) -> None:
    (worker,) = yard.run_job(ASYNC)
    with pytest.raises(errors.TooLarge):
        worker.rebase((1 << 63) + 1)
