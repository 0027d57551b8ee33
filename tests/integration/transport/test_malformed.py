"""A real server and a real coordinator behind sockets, and clients that do it wrong: typed errors, nothing changed.

A plain generated client, which knows nothing but the protos, does it right first. The package ships no generated stubs,
so they are generated here.
"""

from __future__ import annotations

import queue
import random
import runpy
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from shardyard.config.settings import MembershipSettings
from shardyard.domain import errors
from shardyard.domain.ids import Incarnation, Term
from shardyard.domain.limits import FRAME_BYTES_MAX, PROTOCOL, PUSH_BYTES_MAX
from shardyard.runtime.clock import SystemClock
from shardyard.transport import grpc_server
from shardyard.transport.error_codes import DETAIL_KEY
from shardyard.transport.grpc_client import GrpcNetwork
from shardyard.transport.grpc_server import GrpcServer
from shardyard.wire.v1 import common_pb2 as common
from shardyard.wire.v1 import coordinator_pb2 as coordinator
from shardyard.wire.v1 import parameter_server_pb2 as wire
from shardyard_coordinator.service.journal import Journal
from shardyard_coordinator.service.service import Coordinator
from shardyard_ps_server.hosting.store import Store
from shardyard_ps_server.service.servicer import Servicer
from tests.support.shop import CALLER, GRADIENT, JOB, ORDERS, SERVER, TERM, VALUES, WORKER, header, layout, stock, wish

DEADLINE_S = 10.0
PROTOS = Path(__file__).resolve().parents[3] / "protos"
WIRE = "shardyard/wire/v1"


@dataclass
class Shop:
    """A ParameterServer with one asynchronous job of two partitions, and a generated client's stubs."""

    address: str
    channel: grpc.Channel
    stub: Any
    members: Any
    stub_of: Callable[[grpc.Channel], Any]

    def values(self) -> bytes:
        return b"".join(frame.data for frame in self.stub.Pull(wish(), timeout=DEADLINE_S))

    def state(self) -> tuple[bytes, bytes]:
        """All that there is to see: what DescribeServer and ReadLedger say, and the values."""
        described = self.stub.DescribeServer(wire.DescribeServerRequest(), timeout=DEADLINE_S)
        described.ClearField("bytes_sent")
        sources = [wire.SourceToken(source=source) for source in ({"worker": WORKER}, {"logical_rank": 0})]
        request = wire.ReadLedgerRequest(caller=CALLER, server=SERVER, generation=1, sources=sources)
        ledger = self.stub.ReadLedger(request, timeout=DEADLINE_S)
        return described.SerializeToString() + ledger.SerializeToString(), self.values()

    def push(self, *frames: wire.PushFrame) -> wire.PushReply:
        return self.stub.Push(iter(frames), timeout=DEADLINE_S)


@pytest.fixture(scope="module")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Callable[[grpc.Channel], Any]]:
    """The classes of a generated client, by service."""
    folder = tmp_path_factory.mktemp("stubs")
    protos = [PROTOS / WIRE / name for name in ("coordinator.proto", "parameter_server.proto")]
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTOS}", f"--grpc_python_out={folder}"]
    subprocess.run([*command, *map(str, protos)], check=True, timeout=60)
    found: dict[str, Callable[[grpc.Channel], Any]] = {}
    for path in sorted((folder / WIRE).glob("*_pb2_grpc.py")):
        found.update((name, value) for name, value in runpy.run_path(str(path)).items() if name.endswith("Stub"))
    return found


@pytest.fixture(scope="module")
def shop(stubs: dict[str, Callable[[grpc.Channel], Any]]) -> Iterator[Shop]:
    store = Store()
    store.become(Incarnation(SERVER), Term(TERM))
    journal = Journal(None)
    yard = Coordinator(network=GrpcNetwork(None), journal=journal, clock=SystemClock(), membership=MembershipSettings())
    yard.start()
    # one thread for calls and one for streams, made before the first test, so that each test finds what it leaves
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grpc_server, "MALFORMED_PER_S", 1 << 20)  # all are refused at once
        listener = GrpcServer("127.0.0.1:0", [Servicer(store).service(), yard.service], None, threads=1)
    listener.start()
    with grpc.insecure_channel(listener.address) as channel:
        stub = stubs["ParameterServerStub"](channel)
        streams = {"Initialize"}

        def send(name: str, message: object) -> object:
            sent = iter([message]) if name in streams else message
            return getattr(stub, name)(sent, timeout=DEADLINE_S)

        stock(send)
        assert not list(stub.PushPull(iter(()), timeout=DEADLINE_S))
        members = stubs["CoordinatorStub"](channel)
        yield Shop(listener.address, channel, stub, members, stubs["ParameterServerStub"])
    listener.stop()
    yard.stop()
    journal.close()


def refused(call: Callable[[], object]) -> str:
    """The code of the error that the call raises."""
    with pytest.raises(grpc.RpcError) as raised:
        call()
    assert isinstance(raised.value, grpc.Call)
    trailers = dict(raised.value.trailing_metadata())
    assert DETAIL_KEY in trailers, raised.value
    detail = common.ErrorDetail.FromString(trailers[DETAIL_KEY])
    assert detail.code in errors.BY_CODE
    assert detail.what
    return detail.code


# ---- right


def each(parts: Iterable[Any]) -> list[Any]:
    """The answers for partitions 0 and 1, those that are alike written out."""
    found: list[Any] = []
    for part in parts:
        assert part.partition == len(found)
        for _ in range(part.alike + 1):
            found.append(type(part).FromString(part.SerializeToString()))
            found[-1].partition = len(found) - 1
    assert len(found) == 2
    return found


def next_sequence(shop: Shop) -> int:
    request = wire.ReadLedgerRequest(
        caller=CALLER, server=SERVER, generation=1, sources=[wire.SourceToken(source={"worker": WORKER})]
    )
    marks = shop.stub.ReadLedger(request, timeout=DEADLINE_S).sources[0].watermarks
    assert len({mark.next for mark in marks}) == 1
    return marks[0].next


@pytest.mark.parametrize("frame_bytes", [128, 48, 1])
def test_generated_client_pushes_and_pulls(shop: Shop, frame_bytes: int) -> None:
    before, sequence = shop.values(), next_sequence(shop)
    frames = [
        wire.PushFrame(header=header(sequence) if at == 0 else None, offset=at, data=GRADIENT[at : at + frame_bytes])
        for at in range(0, len(GRADIENT), frame_bytes)
    ]
    reply = shop.push(*frames)
    assert [(p.partition, p.outcome, p.next) for p in each(reply.parts)] == [
        (0, wire.OUTCOME_APPLIED, sequence + 1),
        (1, wire.OUTCOME_APPLIED, sequence + 1),
    ]
    old, step = struct.unpack("<20f", before[:80]), struct.unpack("<20f", GRADIENT[:80])
    stepped = struct.pack("<20f", *(value - 0.5 * gradient for value, gradient in zip(old, step, strict=True)))
    assert shop.values()[:80] == stepped
    again = shop.push(*frames)
    assert [part.outcome for part in each(again.parts)] == [wire.OUTCOME_DUPLICATE] * 2
    assert shop.values()[:80] == stepped


def test_generated_client_does_both_in_one_round_trip(shop: Shop) -> None:
    sequence = next_sequence(shop)
    asked = header(sequence)
    asked.pull.CopyFrom(wish())
    answers = list(shop.stub.PushPull(iter([wire.PushFrame(header=asked, data=GRADIENT)]), timeout=DEADLINE_S))
    assert [part.outcome for part in each(answers[0].header.push.parts)] == [wire.OUTCOME_APPLIED] * 2
    assert [(part.partition, part.alike) for part in answers[0].header.parts] == [(0, 1)]
    assert b"".join(frame.data for frame in answers) == shop.values()
    later = wish(number=1_000_000)
    (answer,) = shop.stub.Pull(later, timeout=DEADLINE_S)
    assert [(m.partition, m.want) for m in answer.header.not_yet.missing] == [(0, 1_000_000), (1, 1_000_000)]
    assert answer.data == b""


def test_generated_client_exchanges_again_and_again_on_one_stream(shop: Shop) -> None:
    sequence, before = next_sequence(shop), struct.unpack("<20f", shop.values()[:80])
    sent: queue.SimpleQueue[wire.PushFrame | None] = queue.SimpleQueue()
    answers = shop.stub.PushPull(iter(sent.get, None), timeout=DEADLINE_S)
    step = struct.unpack("<20f", GRADIENT[:80])

    def stepped(pushes: int) -> bytes:
        return struct.pack("<20f", *(old - 0.5 * pushes * each for old, each in zip(before, step, strict=True)))

    # all is said once, as a plan; the frames are as small as one likes
    first = header(sequence)
    first.plan = 1
    first.pull.CopyFrom(wire.PullRequest(partitions=[0, 1]))
    sent.put(wire.PushFrame(header=first, data=GRADIENT[:100]))
    sent.put(wire.PushFrame(offset=100, data=GRADIENT[100:]))
    answer = next(answers)
    assert [part.next for part in each(answer.header.push.parts)] == [sequence + 1] * 2
    start = each(answer.header.parts)[0].version.number
    assert answer.data[:80] == stepped(1)

    # then only what differs: name and version
    for number in (1, 2, 3):
        named = {"plan": 1, "first": sequence + number, "last": sequence + number, "number": start + number}
        sent.put(wire.PushFrame(header=wire.PushHeader(step=named), data=GRADIENT))
        answer = next(answers)
        life = answer.header.words[2]
        pushed = [wire.OUTCOME_APPLIED, sequence + number + 1, life, start + number]
        assert list(answer.header.words) == [*pushed * 2, *[life, start + number] * 2]
        assert answer.data[:80] == stepped(number + 1)

    # the last push once more; one partition alone; no push at all; no pull at all; what is not there yet
    sent.put(wire.PushFrame(header=wire.PushHeader(step=named), data=GRADIENT))
    answer = next(answers)
    assert [answer.header.words[at] for at in (0, 4)] == [wire.OUTCOME_DUPLICATE] * 2
    who = {"caller": CALLER, "server": SERVER, "generation": 1}
    one = wire.PushHeader(**who, kind=wire.PUSH_KIND_NOTHING, pull={"partitions": [1]})
    sent.put(wire.PushFrame(header=one))
    answer = next(answers)
    assert not answer.header.HasField("push") or not answer.header.push.parts
    assert [(part.partition, part.alike) for part in answer.header.parts] == [(1, 0)]
    assert answer.data[:16] == stepped(4)[64:]
    sent.put(wire.PushFrame(header=wire.PushHeader(**who, kind=wire.PUSH_KIND_NOTHING)))
    assert next(answers) == wire.PullFrame()
    later = wire.PushHeader(**who, kind=wire.PUSH_KIND_NOTHING, pull={"partitions": [0, 1], "number": start + 9})
    sent.put(wire.PushFrame(header=later))
    answer = next(answers)
    assert [(m.partition, m.want) for m in answer.header.not_yet.missing] == [(0, start + 9), (1, start + 9)]
    assert answer.data == b""

    # in good order, the worker ends it
    sent.put(None)
    assert list(answers) == []
    assert shop.values()[:80] == stepped(4)


def test_generated_client_registers_with_the_coordinator(shop: Shop) -> None:
    request = coordinator.RegisterRequest(role=coordinator.ROLE_WORKER, protocol=PROTOCOL, release="other", host="box")
    reply = shop.members.Register(request, timeout=DEADLINE_S)
    assert reply.incarnation
    assert reply.heartbeat_ms
    caller = common.Caller(incarnation=reply.incarnation)
    shop.members.Heartbeat(coordinator.HeartbeatRequest(caller=caller), timeout=DEADLINE_S)
    shop.members.Leave(coordinator.LeaveRequest(caller=caller), timeout=DEADLINE_S)
    code = refused(lambda: shop.members.Heartbeat(coordinator.HeartbeatRequest(caller=caller), timeout=DEADLINE_S))
    assert code == "StaleIncarnation"


# ---- wrong


def spoiled(spoil: Callable[[wire.PushHeader], object], *, sequence: int) -> wire.PushFrame:
    message = header(sequence)
    spoil(message)
    return wire.PushFrame(header=message, data=GRADIENT)


WRONG: dict[str, tuple[Callable[[wire.PushHeader], object], str]] = {
    "too short for its partition": (lambda h: setattr(h.parts[0], "payload_bytes", 60), "ShapeMismatch"),
    "too long for its partition": (lambda h: setattr(h.parts[1], "payload_bytes", 128), "ShapeMismatch"),
    "beyond all limits": (lambda h: setattr(h.parts[0], "payload_bytes", PUSH_BYTES_MAX + 1), "TooLarge"),
    "large, though within the limits": (
        lambda h: setattr(h.parts[0], "payload_bytes", PUSH_BYTES_MAX - 64),
        "ShapeMismatch",
    ),
    "partition of another server": (lambda h: setattr(h.parts[0], "partition", 2), "NotFound"),
    "partition that does not exist": (lambda h: setattr(h.parts[0], "partition", 4_000_000_000), "NotFound"),
    "partition twice": (lambda h: setattr(h.parts[0], "partition", 1), "MalformedPayload"),
    "absent block that does not exist": (lambda h: h.parts[0].absent_blocks.append(1), "MalformedPayload"),
    "absent block twice": (lambda h: h.parts[0].absent_blocks.extend([0, 0]), "MalformedPayload"),
    "absent block with its payload": (lambda h: h.parts[0].absent_blocks.append(0), "ShapeMismatch"),
    "unknown job": (lambda h: setattr(h.caller, "job", 99), "NotFound"),
    "nobody's": (lambda h: setattr(h.caller, "incarnation", 0), "InvalidRequest"),
    "in another worker's name": (lambda h: setattr(h.caller, "incarnation", 10), "InvalidRequest"),
    "for another server": (lambda h: setattr(h, "server", 3), "StaleIncarnation"),
    "of an old generation": (lambda h: setattr(h, "generation", 0), "StaleGeneration"),
    "of a later generation": (lambda h: setattr(h, "generation", 2), "StaleGeneration"),
    "with a gap": (lambda h: (setattr(h.name, "last", 1 << 40), setattr(h.name, "first", 1 << 40)), "SequenceGap"),
    "to the end of all numbers": (lambda h: setattr(h.name, "last", (1 << 64) - 1), "TooLarge"),
    "in another lane": (lambda h: setattr(h.name, "lane", 1), "InvalidRequest"),
    "of a lease that was not opened": (
        lambda h: h.name.CopyFrom(common.PushName(source={"data_shard": {}}, token=5)),
        "InvalidRequest",
    ),
    "without a name": (lambda h: h.ClearField("name"), "MalformedPayload"),
    "without a kind": (lambda h: h.ClearField("kind"), "MalformedPayload"),
    "of weight 0": (lambda h: setattr(h, "weight", 0.0), "InvalidRequest"),
    "of no number's weight": (lambda h: setattr(h, "weight", float("nan")), "InvalidRequest"),
    "without settings": (lambda h: h.ClearField("groups"), "InvalidRequest"),
    "with a setting missing": (lambda h: h.groups[0].values.pop(), "InvalidRequest"),
    "first values": (lambda h: setattr(h, "kind", wire.PUSH_KIND_VALUES), "InvalidRequest"),
    "empty with a payload": (lambda h: setattr(h, "kind", wire.PUSH_KIND_EMPTY), "MalformedPayload"),
}


def test_wrong_header_is_refused_and_changes_nothing(shop: Shop) -> None:
    before, sequence = shop.state(), next_sequence(shop)
    found = {
        name: refused(lambda s=spoil: shop.push(spoiled(s, sequence=sequence))) for name, (spoil, _) in WRONG.items()
    }  # type: ignore[misc]
    assert found == {name: code for name, (_, code) in WRONG.items()}
    assert shop.state() == before


def test_wrong_frames_are_refused_and_change_nothing(shop: Shop) -> None:
    before = shop.state()
    sequence = next_sequence(shop)
    head = wire.PushFrame(header=header(sequence), data=GRADIENT[:48])
    streams = {
        "no frame": [],
        "no header": [wire.PushFrame(data=GRADIENT)],
        "torn": [head],
        "torn within": [head, wire.PushFrame(offset=48, data=GRADIENT[48:100])],
        "gap": [head, wire.PushFrame(offset=64, data=GRADIENT[64:])],
        "overlap": [head, wire.PushFrame(offset=40, data=GRADIENT[40:])],
        "offset at the end of all numbers": [head, wire.PushFrame(offset=(1 << 64) - 1, data=GRADIENT[48:])],
        "too much at once": [head, wire.PushFrame(offset=48, data=GRADIENT[48:] + b"x")],
        "too much afterwards": [
            wire.PushFrame(header=header(sequence), data=GRADIENT),
            wire.PushFrame(offset=128, data=b"x"),
        ],
        "first offset": [wire.PushFrame(header=header(sequence), offset=1, data=GRADIENT)],
    }
    found = {name: refused(lambda f=frames: shop.push(*f)) for name, frames in streams.items()}  # type: ignore[misc]
    assert found == dict.fromkeys(streams, "MalformedPayload")
    large = wire.PushFrame(header=header(sequence), data=bytes(FRAME_BYTES_MAX + 1))
    with grpc.insecure_channel(shop.address, options=[("grpc.max_send_message_length", -1)]) as channel:
        stub = shop.stub_of(channel)
        assert refused(lambda: stub.Push(iter([large]), timeout=DEADLINE_S)) == "TooLarge"
    assert shop.state() == before


def test_client_that_hangs_up_in_the_middle_of_a_push_changes_nothing(shop: Shop) -> None:
    before = shop.state()
    head = wire.PushFrame(header=header(next_sequence(shop)), data=GRADIENT[:48])
    sent, hang_up = threading.Event(), threading.Event()

    def stream() -> Iterator[wire.PushFrame]:
        yield head
        sent.set()
        hang_up.wait(DEADLINE_S)

    call = shop.stub.Push.future(stream(), timeout=DEADLINE_S)
    assert sent.wait(DEADLINE_S)
    call.cancel()
    hang_up.set()
    # the one thread of the server answers this when it has done with the other
    assert shop.state() == before


def test_wrong_pulls_and_leases_are_refused_and_change_nothing(shop: Shop) -> None:
    before = shop.state()

    def pulled(**changes: object) -> str:
        request = wish()
        request.MergeFrom(wire.PullRequest(**changes))  # type: ignore[arg-type]
        return refused(lambda: list(shop.stub.Pull(request, timeout=DEADLINE_S)))

    assert pulled(server=3) == "StaleIncarnation"
    assert pulled(generation=2) == "StaleGeneration"
    assert pulled(caller=common.Caller(job=99)) == "NotFound"
    assert pulled(partitions=[2]) == "NotFound"
    assert pulled(partitions=[1]) == "MalformedPayload"
    assert pulled(wait_ms=1_001) == "InvalidRequest"
    assert pulled(pin=bytes(15)) == "MalformedPayload"
    assert pulled(pin=bytes(16), number=1) == "InvalidRequest"

    def pinned(**changes: object) -> str:
        given = {"caller": CALLER, "server": SERVER, "generation": 1, "pin": bytes(16), "lease_ms": 1_000}
        request = wire.PinRequest(**{**given, **changes})  # type: ignore[arg-type]
        return refused(lambda: shop.stub.Pin(request, timeout=DEADLINE_S))

    assert pinned(server=3) == "StaleIncarnation"
    assert pinned(generation=2) == "StaleGeneration"
    assert pinned(caller=common.Caller(job=99)) == "NotFound"
    assert pinned(pin=b"") == "MalformedPayload"
    assert pinned(number=1) == "InvalidRequest"
    assert pinned(lease_ms=0) == "InvalidRequest"
    assert pinned(lease_ms=60_001) == "InvalidRequest"
    assert pinned(wait_ms=1_001) == "InvalidRequest"
    unpinning = wire.UnpinRequest(caller=CALLER, pin=bytes(17))
    assert refused(lambda: shop.stub.Unpin(unpinning, timeout=DEADLINE_S)) == "MalformedPayload"
    opening = wire.OpenSourcesRequest(caller=CALLER, server=SERVER, generation=1, sources=[wire.SourceToken(token=4)])
    assert refused(lambda: shop.stub.OpenSources(opening, timeout=DEADLINE_S)) == "MalformedPayload"
    values = iter([wire.PushFrame(header=header(kind=wire.PUSH_KIND_VALUES), data=VALUES)])
    assert refused(lambda: list(shop.stub.PushPull(values, timeout=DEADLINE_S))) == "InvalidRequest"
    values = iter([wire.PushFrame(header=header(kind=wire.PUSH_KIND_VALUES), data=VALUES)])
    assert refused(lambda: shop.stub.Initialize(values, timeout=DEADLINE_S)) == "InvalidRequest"
    assert shop.state() == before


def test_wrong_exchanges_are_refused_and_those_before_them_count(shop: Shop) -> None:
    nothing = wire.PushHeader(caller=CALLER, server=SERVER, generation=1, kind=wire.PUSH_KIND_NOTHING)
    good = wire.PushHeader()
    good.CopyFrom(nothing)
    good.pull.partitions.extend([0, 1])
    step = wire.PushHeader(step={"plan": 1})
    wrong: dict[str, tuple[list[wire.PushFrame], str]] = {
        "a step, at first": ([wire.PushFrame(header=step)], "MalformedPayload"),
        "nothing, with data": ([wire.PushFrame(header=nothing, data=b"x")], "MalformedPayload"),
        "no header, at first": ([wire.PushFrame(data=b"x")], "MalformedPayload"),
        "ahead, beyond the end": (
            [wire.PushFrame(header=good), wire.PushFrame(offset=128, data=b"x")],
            "MalformedPayload",
        ),
        "the rest of nothing": (
            [wire.PushFrame(header=good), wire.PushFrame(header=changed(header(0), rest=0))],
            "MalformedPayload",
        ),
        "a rest that leaves a gap": (
            [
                wire.PushFrame(header=good),
                wire.PushFrame(data=GRADIENT[:64]),
                wire.PushFrame(header=changed(header(0), rest=63), offset=65, data=GRADIENT[65:]),
            ],
            "MalformedPayload",
        ),
        "a rest that is not all there": (
            [
                wire.PushFrame(header=good),
                wire.PushFrame(offset=64, data=GRADIENT[64:]),
                wire.PushFrame(header=changed(header(0), rest=64), data=GRADIENT[:63]),
            ],
            "MalformedPayload",
        ),
        "shared, not attached": ([wire.PushFrame(header=changed(good, shared=True))], "InvalidRequest"),
        "shared_at, not attached": ([wire.PushFrame(header=changed(header(0), shared_at=0))], "InvalidRequest"),
        "rows requested at a place, not attached": (
            [
                wire.PushFrame(
                    header=changed(
                        nothing,
                        pull={"partitions": [0, 1], "number": 0},
                        requested=[{"table": 0, "partitions": [0], "rows": [1]}],
                        requested_at=0,
                    )
                )
            ],
            "InvalidRequest",
        ),
        "shared_at, with data": (
            [wire.PushFrame(header=changed(header(0), shared_at=0), data=GRADIENT)],
            "MalformedPayload",
        ),
        "memory without end": (
            [wire.PushFrame(header=changed(nothing, attach={"bytes": 1 << 47}))],
            "TooLarge",
        ),
        "too long a wait": ([wire.PushFrame(header=changed(good, wait_ms=1_001))], "InvalidRequest"),
        "another's partition": ([wire.PushFrame(header=changed(good, partitions=[2]))], "NotFound"),
        "another job": (
            [
                wire.PushFrame(header=good),
                wire.PushFrame(header=changed(good, caller={"job": 8, "incarnation": WORKER})),
            ],
            "NotFound",
        ),
        "another server": (
            [wire.PushFrame(header=good), wire.PushFrame(header=changed(good, server=3))],
            "StaleIncarnation",
        ),
        "torn": ([wire.PushFrame(header=header(next_sequence(shop)), data=GRADIENT[:100])], "MalformedPayload"),
    }
    before = shop.state()
    found = {}
    for name, (sent, _) in wrong.items():
        answers = shop.stub.PushPull(iter(sent), timeout=DEADLINE_S)
        if len(sent) > 1:
            assert len(next(answers).data) == 128
        found[name] = refused(lambda answers=answers: list(answers))  # type: ignore[misc]
    assert found == {name: code for name, (_, code) in wrong.items()}
    assert shop.state() == before


def changed(of: wire.PushHeader, **changes: Any) -> wire.PushHeader:
    """Fields of a pull are changed in its pull."""
    found = wire.PushHeader()
    found.CopyFrom(of)
    for name, value in changes.items():
        if name in ("shared", "wait_ms", "partitions"):
            found.pull.MergeFrom(wire.PullRequest(**{name: value}))
        else:
            found.MergeFrom(wire.PushHeader(**{name: value}))
    return found


def test_wrong_orders_are_refused_and_change_nothing(shop: Shop) -> None:
    before = shop.state()
    old = common.Caller(job=JOB)
    orders: list[tuple[Callable[..., object], object, str]] = [
        (shop.stub.DropJob, wire.DropJobRequest(caller=old), "StaleTerm"),
        (shop.stub.Fence, wire.FenceRequest(caller=old, incarnations=[WORKER]), "StaleTerm"),
        (shop.stub.OpenPartitions, wire.OpenPartitionsRequest(caller=old), "StaleTerm"),
        (shop.stub.OpenPartitions, wire.OpenPartitionsRequest(caller=ORDERS, generation=5), "StaleGeneration"),
        (shop.stub.CreatePartitions, wire.CreatePartitionsRequest(caller=ORDERS, server=3), "NotReady"),
    ]
    for spoil in (
        lambda r: setattr(r.caller, "term", 0),
        lambda r: setattr(r, "mode", 0),
        lambda r: setattr(r.layout.partitions[0], "payload_bytes", 1 << 50),
        lambda r: setattr(r.layout.partitions[0].blocks[0], "length", 1 << 50),
        lambda r: r.layout.variables[0].shape.append(1 << 60),
        lambda r: r.partitions.append(3),
    ):
        request = wire.CreatePartitionsRequest(
            caller=common.Caller(job=8, term=TERM),
            generation=1,
            layout=layout(),
            partitions=[0],
            mode=common.UPDATE_MODE_ASYNC,
            server=SERVER,
        )
        spoil(request)
        orders.append((shop.stub.CreatePartitions, request, ""))
    for call, request, expected in orders:
        code = refused(lambda call=call, request=request: call(request, timeout=DEADLINE_S))  # type: ignore[misc]
        assert code not in ("Internal", "ShardyardError")
        assert not expected or code == expected
    assert shop.state() == before


def services() -> list[tuple[str, bool, bool]]:
    return [
        (f"/{service.full_name}/{method.name}", method.client_streaming, method.server_streaming)
        for file in (wire, coordinator)
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    ]


def code_of(call: Callable[..., object], sent: object, streams_out: bool) -> str | None:
    """The code of the error with which the call ends; None where it ends well."""
    try:
        answer = call(sent, timeout=DEADLINE_S)
        if streams_out:
            list(answer)  # type: ignore[call-overload]
    except grpc.RpcError as error:
        return common.ErrorDetail.FromString(dict(error.trailing_metadata())[DETAIL_KEY]).code  # type: ignore[attr-defined]
    return None


def test_random_bytes_to_every_method_are_refused_and_change_nothing(shop: Shop) -> None:
    before = shop.state()
    members = shop.members.Status(coordinator.StatusRequest(), timeout=DEADLINE_S).members
    dice = random.Random(20)
    junk = [b"\x0a\xff\xff\xff\xff\x0f", b"\xff" * 40, *(dice.randbytes(dice.randrange(1, 200)) for _ in range(6))]
    for path, streams_in, streams_out in services():
        kind = ("stream" if streams_in else "unary") + "_" + ("stream" if streams_out else "unary")
        call = getattr(shop.channel, kind)(path)
        for index, data in enumerate(junk):
            code = code_of(call, iter([data]) if streams_in else data, streams_out)
            assert code not in ("Internal", "ShardyardError"), (path, data)
            assert index > 1 or code == "MalformedPayload", (path, data, code)
    assert shop.state() == before
    assert len(shop.members.Status(coordinator.StatusRequest(), timeout=DEADLINE_S).members) == len(members)
