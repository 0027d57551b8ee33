"""Exchanges through shared memory: a worker offers its memory, and a server lends its values."""

from __future__ import annotations

import dataclasses
import gc
import os
import weakref
from pathlib import Path

import numpy as np
import pytest

from shardyard.domain.consistency import UpdateMode
from shardyard.domain.errors import (
    InvalidRequest,
    MalformedPayload,
    ShapeMismatch,
)
from shardyard.domain.ids import PartitionId, Term
from shardyard.domain.layout.layouts import PartitionLayout
from shardyard.domain.pulls import ShmHandle
from shardyard.domain.pushes import Outcome, PushKind, PushPart
from shardyard.transport.in_process import InProcessDescriptors
from shardyard.transport.shared_memory import SharedMemory
from shardyard.wire import push_messages
from shardyard_ps_server.hosting import orders
from shardyard_ps_server.hosting.hosted_job import CreateRequest
from shardyard_ps_server.hosting.store import Store
from shardyard_ps_server.partition.update_rules import UpdateRules
from shardyard_ps_server.service.exchange_stream import ExchangeStream
from tests.support.exchanges import (
    ELEMENTS,
    GENERATION,
    HERE,
    JOB,
    LAYOUT,
    PART_BYTES,
    Wire,
    attached,
    held,
    others_push,
    refused,
    replies_of,
    server,
    values,
)


def test_offer_that_is_taken_is_said_with_the_servers_own_memory() -> None:
    wire = Wire(server())
    said = wire.attach()
    assert said.attached
    assert not said.not_attached
    assert [ticket.region for ticket in said.regions] == [0]
    assert set(wire.regions) == {0}
    assert (wire.store.counters.streams, wire.store.counters.streams_attached) == (1, 1)
    wire.end()
    assert (wire.store.counters.streams, wire.store.counters.streams_attached) == (0, 0)


def test_offer_that_cannot_be_taken_is_no_error_and_the_stream_goes_on() -> None:
    wire = Wire(server())
    memory = SharedMemory(64, read_only=True)
    said = wire.offer(memory, nbytes=65)
    assert said.attached is False
    assert "the memory has 64 bytes; announced 65" in said.not_attached
    assert said.regions == ()
    assert wire.store.counters.streams_attached == 0
    wire.push(1.0)
    assert values(wire.store) == {-1.0}


def test_server_whose_values_cannot_be_shared_does_not_attach() -> None:
    wire = Wire(server(shareable=False))
    said = wire.attach()
    assert said.attached is False
    assert said.not_attached


def test_regions_are_told_once_on_a_stream_and_again_on_another() -> None:
    wire = attached()
    known = set(wire.regions)
    for number in range(40):
        wire.push(1.0)
        _, view = wire.look(number)  # raises where a region is told twice, or not at all
        assert set(view) == {-float(number + 1)}
    other = Wire(wire.store, worker=11)
    other.attach()
    assert known <= set(other.regions) == set(wire.regions)


def test_another_offer_replaces_the_first() -> None:
    wire = attached()
    wire.push(1.0)
    first = weakref.ref(wire.memory)  # type: ignore[arg-type]
    assert wire.attach().attached
    wire.push(2.0)
    gc.collect()
    assert first() is None
    assert values(wire.store) == {-3.0}
    assert wire.store.counters.streams_attached == 1


def test_payload_is_read_where_it_lies() -> None:
    wire = attached(1024)
    assert wire.memory is not None
    wire.memory.bytes[512 : 512 + 256] = np.full(2 * ELEMENTS, 3.0).view(np.uint8)
    result, _ = wire.ask(wire.order(PushKind.GRADIENT, shared_at=512))
    assert [part.outcome for part in result.push] == [Outcome.APPLIED] * 2
    assert values(wire.store) == {-3.0}


@pytest.mark.parametrize("at", [832, 1024, 1 << 40, (1 << 64) - 256, (1 << 64) - 64, 1, 32, 63, 511])
def test_place_beyond_the_memory_or_misaligned_is_malformed(at: int) -> None:
    wire = attached(1024)
    assert type(refused(wire, wire.order(PushKind.GRADIENT, shared_at=at))) is MalformedPayload
    assert values(wire.store) == {0.0}


def test_last_place_in_the_memory_is_taken() -> None:
    wire = attached(1024)
    wire.ask(wire.order(PushKind.GRADIENT, shared_at=1024 - 256))


def test_place_without_attached_memory_is_refused() -> None:
    wire = Wire(server())
    error = refused(wire, wire.order(PushKind.GRADIENT, shared_at=0))
    assert (type(error), "none was attached" in error.what) == (InvalidRequest, True)


def test_place_with_data_beside_it_is_malformed() -> None:
    wire = attached()
    order = wire.order(PushKind.GRADIENT, shared_at=0)
    assert type(refused(wire, order, np.ones(2 * ELEMENTS).tobytes())) is MalformedPayload


def test_absent_blocks_are_left_where_they_are_in_memory_and_left_out_of_a_stream() -> None:
    store = server()
    through_memory, over_a_stream = Wire(store), Wire(store, worker=11)
    through_memory.attach()
    in_place = (PushPart(PartitionId(0), PART_BYTES, (0,)), PushPart(PartitionId(1), PART_BYTES, (0, 1)))
    through_memory.push(1.0, parts=in_place)
    _, payload = over_a_stream.ask(over_a_stream.order(pull=over_a_stream.wish()))
    found = np.frombuffer(payload, np.float64)
    assert found.tolist() == [0.0] * 8 + [-1.0] * 8 + [0.0] * 16
    left_out = (PushPart(PartitionId(0), 64, (0,)), PushPart(PartitionId(1), 0))
    order = over_a_stream.order(PushKind.GRADIENT, parts=left_out)
    over_a_stream.ask(order, np.ones(8).tobytes())
    _, payload = over_a_stream.ask(over_a_stream.order(pull=over_a_stream.wish()))
    assert np.frombuffer(payload, np.float64).tolist() == [0.0] * 8 + [-2.0] * 8 + [0.0] * 16


def test_part_in_memory_is_in_full_layout() -> None:
    wire = attached()
    short = (PushPart(PartitionId(0), 64, (0,)), PushPart(PartitionId(1), 0))
    assert type(refused(wire, wire.order(PushKind.GRADIENT, parts=short, shared_at=0))) is ShapeMismatch
    wire = Wire(wire.store)
    wire.attach()
    bad = (PushPart(PartitionId(0), PART_BYTES, (2,)),)
    assert type(refused(wire, wire.order(PushKind.GRADIENT, parts=bad, shared_at=0))) is MalformedPayload
    assert values(wire.store) == {0.0}


def test_shared_pull_says_where_the_values_lie() -> None:
    wire = attached()
    result, payload = wire.push(1.0, pull=wire.wish(1, shared=True))
    assert payload == b""
    assert [set(view) for view in wire.at(result)] == [{-1.0}] * 2
    assert [part.version.number for part in result.parts] == [1, 1]


def test_shared_pull_without_attached_memory_is_refused() -> None:
    wire = Wire(server())
    error = refused(wire, wire.order(pull=wire.wish(shared=True)))
    assert (type(error), "without attached memory" in error.what) == (InvalidRequest, True)
    assert held(wire.store.hosted()[0]) == 0


def test_shared_pull_that_is_not_there_yet_lends_nothing() -> None:
    wire = attached()
    result, _ = wire.ask(wire.order(pull=wire.wish(1, shared=True)))
    assert len(result.missing) == 2
    assert result.places == ()
    assert held(wire.store.hosted()[0]) == 0


def test_values_of_a_partition_without_any_need_no_place() -> None:
    layout = dataclasses.replace(LAYOUT, partitions=(*LAYOUT.partitions, PartitionLayout(PartitionId(2), 0, ())))
    store = Store()
    store.become(HERE, Term(1))
    orders.create(
        store,
        CreateRequest(JOB, GENERATION, layout, [PartitionId(0), PartitionId(2)], UpdateRules(UpdateMode.ASYNC, 0)),
    )
    orders.open_partitions(store, JOB, GENERATION)
    wire = Wire(store)
    wire.attach()
    wanted = (PartitionId(2), PartitionId(0))
    result, _ = wire.ask(wire.order(pull=dataclasses.replace(wire.wish(shared=True), partitions=wanted)))
    assert tuple(result.places[0]) == (0, 0)
    assert result.places[1].region in wire.regions


def test_what_was_lent_is_not_written_before_the_exchange_after_the_next() -> None:
    wire = attached()
    first = wire.look()
    others_push(wire.store, 8)
    assert [set(view) for view in first] == [{0.0}] * 2
    second = wire.look()  # the next exchange: the first may still be read, while the answer is on its way
    others_push(wire.store, 8)
    assert [set(view) for view in first] == [{0.0}] * 2
    assert [set(view) for view in second] == [{-8.0}] * 2
    wire.look()  # the one after: now the first may be written
    others_push(wire.store, 8)
    assert [set(view) for view in first] != [{0.0}] * 2
    assert [set(view) for view in second] == [{-8.0}] * 2


@pytest.mark.parametrize("between", ["push", "nothing"])
def test_what_was_lent_stays_while_nothing_else_was(between: str) -> None:
    wire = attached()
    first = wire.look()
    for _ in range(4):
        if between == "push":
            wire.push(1.0)
        else:
            wire.ask(wire.order())
    others_push(wire.store, 8)
    assert [set(view) for view in first] == [{0.0}] * 2


def test_what_was_lent_stays_when_the_next_answer_is_lost_and_the_worker_asks_anew() -> None:
    """The answer names a version that the worker never heard of; it still reads the one before."""
    store = server()
    wire = Wire(store)
    wire.attach()
    first = wire.look()
    others_push(store, 3)
    wire.look()
    wire.break_off()
    again = Wire(store)
    again.attach()
    others_push(store, 8)
    assert [set(view) for view in first] == [{0.0}] * 2
    again.look()
    others_push(store, 8)  # as while that exchange is under way
    assert [set(view) for view in first] == [{0.0}] * 2


def test_number_of_buffers_does_not_grow_with_exchanges() -> None:
    wire = attached()
    for number in range(50):
        wire.push(1.0, pull=wire.wish(number + 1, shared=True))
    assert held(wire.store.hosted()[0]) <= 2 * 2
    assert len(wire.store.hosted()[0].regions.tickets()) <= 2


@pytest.mark.parametrize("how", ["detach", "fence"])
def test_what_was_lent_is_taken_back_from_who_detaches_or_is_dead(how: str) -> None:
    wire = attached()
    wire.look()
    wire.look()
    hosted = wire.store.hosted()[0]
    assert held(hosted) > 0
    if how == "detach":
        wire.ask(wire.order(detach=True))
    else:
        orders.fence(wire.store, [wire.caller.incarnation])
    assert held(hosted) == 0
    assert hosted.lent == {}


def test_stream_that_breaks_off_does_not_take_back_what_was_lent() -> None:
    """The worker may still be reading; it is alive until it is declared dead."""
    wire = attached()
    first = wire.look()
    wire.break_off()
    others_push(wire.store, 8)
    assert [set(view) for view in first] == [{0.0}] * 2
    assert wire.store.counters.streams == wire.store.counters.streams_attached == 0


def test_one_worker_does_not_take_back_what_was_lent_to_another() -> None:
    store = server()
    wires = [Wire(store, worker=10 + number) for number in range(3)]
    for wire in wires:
        wire.attach()
    first = wires[0].look()
    others_push(store, 2)
    for _ in range(3):
        wires[1].look()
    wires[2].ask(wires[2].order(detach=True))
    others_push(store, 8)
    assert [set(view) for view in first] == [{0.0}] * 2


def test_ticket_that_lies_is_refused_without_harm() -> None:
    wire, memory = Wire(server()), SharedMemory(1024, read_only=True)
    assert wire.offer(memory, nbytes=1 << 40).attached is False
    assert type(refused(wire, wire.order(PushKind.GRADIENT, shared_at=0))) is InvalidRequest


def test_ticket_without_a_descriptor_is_refused_without_harm() -> None:
    for descriptors in (None, InProcessDescriptors.pair()[1]):
        wire, memory = Wire(server()), SharedMemory(1024, read_only=True)
        answers = replies_of(ExchangeStream(wire.store, descriptors), wire._frames())
        wire.send(wire.order(attach=memory.ticket()))
        said = push_messages.pulled_from_header(next(answers).header, ())
        assert (said.attached, said.regions) == (False, ())
        assert "its descriptor did not come" in said.not_attached


def test_descriptors_in_the_place_of_memory_are_refused_and_closed(tmp_path: Path) -> None:
    wire = Wire(server())
    for made in (os.open(tmp_path, os.O_RDONLY), os.open("/dev/zero", os.O_RDWR), os.pipe2(0)[0]):
        wire.descriptors.pass_descriptors([made])
        assert wire.ask(wire.order(attach=ShmHandle(0)))[0].attached is False
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(made)


def test_bytes_that_lie_in_shared_memory_are_not_counted_as_moved() -> None:
    store = server()
    wire = Wire(store)
    wire.attach()
    wire.look()
    assert store.counters.bytes_sent == 0
    plain = Wire(store)
    _, payload = plain.ask(plain.order(pull=plain.wish()))
    assert store.counters.bytes_sent == len(payload) > 0
