"""What every network must keep, over gRPC and in process alike; and what only a socket can do."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from shardyard.domain import errors
from shardyard.domain.limits import FRAME_BYTES, MESSAGE_BYTES_MAX
from shardyard.transport import grpc_client as channel
from shardyard.transport import grpc_server as listener_module
from shardyard.transport.grpc_client import GrpcNetwork
from shardyard.transport.grpc_server import GrpcServer, split_address
from shardyard.transport.in_process import InProcessNetwork
from shardyard.transport.interfaces import Context, Network, Peer, Service, Stream, request_id
from shardyard.wire import frames, methods
from shardyard.wire.frames import Frame
from shardyard.wire.method import Method, Wire
from shardyard.wire.v1 import agent_pb2 as agent
from shardyard.wire.v1 import coordinator_pb2 as coordinator
from shardyard.wire.v1 import parameter_server_pb2 as server
from tests.support.waiting import DEADLINE_S, wait_until

TIMEOUT_MS = 10_000
# offsets at which the handler of PushPull does something else: ends the stream, waits, does not answer, answers often
END, HANG, SILENT, MORE = 99, 77, 55, 1_000
# offsets that a handler which offers to answer at once answers so, and at which that fails
QUICK, BAD = 500, 501


@dataclass
class Echo:
    """Services that say what they were told. `network` is where the coordinator's handler calls on."""

    network: Network
    failure: Exception | None = None
    closed: threading.Event = field(default_factory=threading.Event)
    hangs: threading.Event = field(default_factory=threading.Event)
    hang: threading.Event = field(default_factory=threading.Event)
    ids: list[str] = field(default_factory=list)
    address: str = ""
    read: int = 0
    offers: bool = False
    asked_at_once: list[tuple[int, str, str]] = field(default_factory=list)

    def services(self) -> list[Service]:
        parameter_server = Service("ParameterServer")
        parameter_server.on(methods.PUSH, self.push)
        parameter_server.on(methods.PULL, self.pull)
        parameter_server.on(methods.PUSH_PULL, self.push_pull)
        parameter_server.on(methods.READ_LEDGER, self.note_id)
        yard = Service("Coordinator")
        yard.on(methods.STATUS, self.status)
        yard.on(methods.JOIN_JOB, self.join)
        return [parameter_server, yard]

    def status(self, _request: coordinator.StatusRequest, context: Context) -> coordinator.StatusReply:
        assert context.is_active()
        self.ids.append(request_id.get())
        peer = self.network.connect(self.address, name="itself")
        try:
            peer.call(methods.READ_LEDGER, server.ReadLedgerRequest(), timeout_ms=TIMEOUT_MS)
        finally:
            peer.close()
        return coordinator.StatusReply(term=7)

    def note_id(self, _request: server.ReadLedgerRequest, _: Context) -> server.ReadLedgerReply:
        self.ids.append(request_id.get())
        return server.ReadLedgerReply()

    def join(self, request: coordinator.JoinJobRequest, _: Context) -> coordinator.JoinJobReply:
        if self.failure is not None:
            raise self.failure
        return coordinator.JoinJobReply(settings_json=request.name)

    def push(self, stream: Iterator[Frame], _: Context) -> server.PushReply:
        total = 0
        for frame in stream:
            total += len(frame.data)
            if frame.offset == 13:
                raise errors.SequenceGap("at 13", facts={"next": "12"})
        return server.PushReply(parts=[{"next": total}])

    def pull(self, request: server.PullRequest, _: Context) -> Iterator[Frame]:
        self.ids.append(request_id.get())
        try:
            for number in range(request.wait_ms):
                yield Frame(b"", number, bytes(request.server))
            if self.failure is not None:
                raise self.failure
        finally:
            self.closed.set()

    def answer_at_once(self, frame: Frame) -> Frame | None:
        self.asked_at_once.append((frame.offset, request_id.get(), threading.current_thread().name))
        if frame.offset == BAD:
            raise ValueError("a defect")
        if frame.offset == 13:
            raise errors.StaleToken("said elsewhere")
        return None if frame.offset != QUICK else Frame(b"", QUICK, bytes(frame.data))

    def push_pull(self, stream: Iterator[Frame], context: Context) -> Iterator[Frame]:
        self.ids.append(request_id.get())
        if self.offers:
            context.offer(self.answer_at_once)
        try:
            for frame in stream:
                if frame.offset == 13:
                    raise errors.StaleToken("at 13", facts={"token": "3"})
                if frame.offset == END:
                    return
                if frame.offset == SILENT:
                    self.read += len(frame.data)
                    continue
                if frame.offset == HANG:
                    self.hangs.set()
                    self.hang.wait(DEADLINE_S)
                for more in range(frame.offset // MORE):
                    yield Frame(b"", more, b"more")
                yield Frame(bytes(frame.header), frame.offset + 1, bytes(frame.data)[::-1])
        finally:
            self.closed.set()


@dataclass
class Stage:
    echo: Echo
    peer: Peer
    leave: Callable[[], None]


@pytest.fixture(params=["grpc", "grpc, public interface", "in process"])
def stage(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    before = set(threading.enumerate())
    if request.param == "grpc, public interface":
        monkeypatch.setattr(channel, "TRIED", False)
        monkeypatch.setattr(listener_module, "TRIED", False)
    if request.param.startswith("grpc"):
        network: Network = GrpcNetwork()
        echo = Echo(network)
        listener = GrpcServer("127.0.0.1:0", echo.services(), threads=8)
        listener.start()
        echo.address, leave = listener.address, listener.stop
    else:
        network = in_process = InProcessNetwork()
        echo = Echo(network)
        echo.address = "somewhere:1"
        in_process.listen(echo.address, echo.services())

        def leave() -> None:
            in_process.leave(echo.address)

    peer = network.connect(echo.address, name="echo", unavailable=errors.CoordinatorUnavailable)
    yield Stage(echo, peer, leave)
    echo.hang.set()
    peer.close()
    leave()
    wait_until(lambda: not [each for each in threading.enumerate() if each not in before], "all threads to end")


def frames_of(*offsets: int) -> Iterator[Frame]:
    return (Frame(b"", offset, b"ab") for offset in offsets)


def test_unary_call_is_answered(stage: Stage) -> None:
    reply = stage.peer.call(methods.JOIN_JOB, coordinator.JoinJobRequest(name="ads"), timeout_ms=TIMEOUT_MS)
    assert reply.settings_json == "ads"


def test_peer_says_who_and_where(stage: Stage) -> None:
    assert stage.peer.name == f"echo at {stage.echo.address}"


def test_stream_in_is_answered_once(stage: Stage) -> None:
    reply = stage.peer.send(methods.PUSH, frames_of(0, 2, 4), timeout_ms=TIMEOUT_MS)
    assert reply.parts[0].next == 6
    assert stage.peer.send(methods.PUSH, iter(()), timeout_ms=TIMEOUT_MS).parts[0].next == 0
    sent = [Frame(b"h", 0, bytes(FRAME_BYTES)) for _ in range(8)]
    assert stage.peer.send(methods.PUSH, sent, timeout_ms=TIMEOUT_MS).parts[0].next == 8 * FRAME_BYTES


def test_stream_out_comes_in_order(stage: Stage) -> None:
    found = stage.peer.receive(methods.PULL, server.PullRequest(wait_ms=300, server=3), timeout_ms=TIMEOUT_MS)
    assert [(frame.offset, bytes(frame.data)) for frame in found] == [(n, bytes(3)) for n in range(300)]
    assert list(stage.peer.receive(methods.PULL, server.PullRequest(), timeout_ms=TIMEOUT_MS)) == []


def test_error_of_a_unary_call_arrives_as_it_was(stage: Stage) -> None:
    stage.echo.failure = errors.VariableConflict("two", why="w", todo="t", facts={"variable": "x"})
    with pytest.raises(errors.VariableConflict) as raised:
        stage.peer.call(methods.JOIN_JOB, coordinator.JoinJobRequest(), timeout_ms=TIMEOUT_MS)
    assert vars(raised.value) == vars(stage.echo.failure)
    assert raised.value is not stage.echo.failure


def test_error_in_the_middle_of_a_stream_in_arrives_as_it_was(stage: Stage) -> None:
    with pytest.raises(errors.SequenceGap, match="at 13") as raised:
        stage.peer.send(methods.PUSH, frames_of(0, 13, 15), timeout_ms=TIMEOUT_MS)
    assert raised.value.facts == {"next": "12"}


def test_error_in_the_middle_of_a_stream_out_comes_after_the_answers(stage: Stage) -> None:
    stage.echo.failure = errors.NotFound("no more")
    stream = stage.peer.receive(methods.PULL, server.PullRequest(wait_ms=3), timeout_ms=TIMEOUT_MS)
    assert [next(stream).offset for _ in range(3)] == [0, 1, 2]
    with pytest.raises(errors.NotFound, match="no more"):
        next(stream)


def test_request_id_is_passed_on_and_does_not_stay(stage: Stage) -> None:
    for _ in range(2):
        stage.peer.call(methods.STATUS, coordinator.StatusRequest(), timeout_ms=TIMEOUT_MS)
    one, passed, other, passed_too = stage.echo.ids
    assert one
    assert one == passed
    assert other == passed_too
    assert one != other
    assert request_id.get() == ""


def test_request_ids_of_interleaved_streams_stay_apart(stage: Stage) -> None:
    request = server.PullRequest(wait_ms=3)
    streams = [stage.peer.receive(methods.PULL, request, timeout_ms=TIMEOUT_MS) for _ in range(2)]
    for stream in streams:
        next(stream)
        assert request_id.get() == ""
    for stream in streams:
        assert len(list(stream)) == 2
    assert len(set(stage.echo.ids)) == 2
    assert request_id.get() == ""


# ---- streams that are kept open


@pytest.fixture
def stream(stage: Stage) -> Iterator[Stream]:
    opened = stage.peer.open(methods.PUSH_PULL, timeout_ms=TIMEOUT_MS)
    yield opened
    stage.echo.hang.set()
    opened.cancel()


def said(stream: Stream, *, timeout_ms: int = TIMEOUT_MS) -> tuple[int, bytes]:
    frame = stream.receive(timeout_ms=timeout_ms)
    return frame.offset, bytes(frame.data)


def ask(stream: Stream) -> Frame | None:
    stream.send(frames_of(1))
    found: Frame | None = stream.receive(timeout_ms=TIMEOUT_MS)
    return found


def ask_anew(peer: Peer) -> Frame | None:
    stream = peer.open(methods.PUSH_PULL, timeout_ms=TIMEOUT_MS)
    try:
        return ask(stream)
    finally:
        stream.cancel()


def test_requests_go_out_and_answers_come_in_as_long_as_both_want(stage: Stage, stream: Stream) -> None:
    for number in range(12, 40, 2):
        stream.send([Frame(b"", number, b"ab")])
        assert said(stream) == (number + 1, b"ba")
    assert len(stage.echo.ids) == 1


def test_several_requests_have_several_answers_in_order(stream: Stream) -> None:
    for _ in range(2):
        stream.send(frames_of(1, 2, 3))
        assert [said(stream) for _ in range(3)] == [(2, b"ba"), (3, b"ba"), (4, b"ba")]


def test_a_request_may_have_several_answers(stream: Stream) -> None:
    for _ in range(3):
        stream.send([Frame(b"", 3 * MORE, b"ab")])
        assert [said(stream) for _ in range(4)] == [*((n, b"more") for n in range(3)), (3 * MORE + 1, b"ba")]
    stream.send(frames_of(1))
    assert said(stream) == (2, b"ba")


def test_large_requests_and_answers_pass(stage: Stage, stream: Stream) -> None:
    for number in range(20, 23):
        part = bytes((number,)) * FRAME_BYTES
        stream.send([*(Frame(b"", SILENT, part) for _ in range(16)), Frame(b"", number, part)])
        assert said(stream) == (number + 1, part)
    assert stage.echo.read == 3 * 16 * FRAME_BYTES


def test_request_that_is_sent_in_an_exchange_may_be_made_late(stream: Stream) -> None:
    made = []

    def requests() -> Iterator[Frame]:
        for number in range(3):
            made.append(number)
            yield Frame(b"", number, b"ab")

    stream.send(requests())
    assert said(stream) == (1, b"ba")
    assert [said(stream)[0] for _ in range(2)] == [2, 3]
    assert made == [0, 1, 2]


def test_error_of_the_peer_comes_after_the_answers_before_it_and_as_it_was(stage: Stage, stream: Stream) -> None:
    stream.send(frames_of(1))
    assert said(stream) == (2, b"ba")
    stream.send(frames_of(13))
    with pytest.raises(errors.StaleToken, match="at 13") as raised:
        stream.receive(timeout_ms=TIMEOUT_MS)
    assert raised.value.facts == {"token": "3"}
    assert stage.echo.closed.wait(DEADLINE_S)
    # the peer lives, and another stream to it does
    another = stage.peer.open(methods.PUSH_PULL, timeout_ms=TIMEOUT_MS)
    another.send(frames_of(1))
    assert said(another) == (2, b"ba")
    another.cancel()


def test_error_among_requests_of_one_exchange_comes_after_the_answers_before_it(stream: Stream) -> None:
    stream.send(frames_of(0, 13, 14))
    assert said(stream) == (1, b"ba")
    with pytest.raises(errors.StaleToken, match="at 13"):
        stream.receive(timeout_ms=TIMEOUT_MS)


def test_peer_that_ends_the_stream_in_good_order_is_no_error(stage: Stage, stream: Stream) -> None:
    stream.send(frames_of(1))
    assert said(stream) == (2, b"ba")
    stream.send(frames_of(END))
    assert stream.receive(timeout_ms=TIMEOUT_MS) is None


def test_request_that_follows_the_peers_end_has_no_answer(stage: Stage, stream: Stream) -> None:
    stream.send([Frame(b"", END, b"")])
    assert stream.receive(timeout_ms=TIMEOUT_MS) is None
    with contextlib.suppress(errors.Unavailable):
        assert ask(stream) is None


def test_cancelled_stream_is_unavailable_and_its_handler_ends(stage: Stage, stream: Stream) -> None:
    stream.send(frames_of(1))
    said(stream)
    stream.cancel()
    stream.cancel()
    assert stage.echo.closed.wait(DEADLINE_S)
    with pytest.raises(errors.CoordinatorUnavailable):
        ask(stream)


def test_stream_that_was_never_used_can_be_cancelled(stage: Stage) -> None:
    stage.peer.open(methods.PUSH_PULL, timeout_ms=TIMEOUT_MS).cancel()


def test_streams_side_by_side_are_apart(stage: Stage, stream: Stream) -> None:
    other = stage.peer.open(methods.PUSH_PULL, timeout_ms=TIMEOUT_MS)
    for number in (1, 20, 40):
        stream.send([Frame(b"", number, b"ab")])
        other.send([Frame(b"", number + 100, b"cd")])
        assert said(other) == (number + 101, b"dc")
        assert said(stream) == (number + 1, b"ba")
    other.cancel()
    stream.send(frames_of(5))
    assert said(stream) == (6, b"ba")
    assert len(set(stage.echo.ids)) == 2
    assert request_id.get() == ""


def test_stream_to_nobody_is_the_class_that_was_asked_for(stage: Stage) -> None:
    stage.leave()
    with pytest.raises(errors.CoordinatorUnavailable, match="echo at"):
        ask_anew(stage.peer)


def test_stream_of_a_closed_peer_is_unavailable(stage: Stage) -> None:
    stage.peer.close()
    with pytest.raises(errors.CoordinatorUnavailable, match="echo at"):
        ask_anew(stage.peer)


@pytest.mark.parametrize("how", ["leaves", "is closed"])
def test_stream_ends_with_its_peer(stage: Stage, stream: Stream, how: str) -> None:
    stream.send(frames_of(1))
    assert said(stream) == (2, b"ba")
    if how == "leaves":
        stage.leave()
    else:
        stage.peer.close()
    with contextlib.suppress(errors.CoordinatorUnavailable):
        assert ask(stream) is None


def test_abandoned_stream_lets_the_handler_end(stage: Stage) -> None:
    stream = stage.peer.receive(
        methods.PULL, server.PullRequest(wait_ms=1_000_000, server=FRAME_BYTES), timeout_ms=60_000
    )
    next(stream)
    assert not stage.echo.closed.is_set()
    stream.close()  # type: ignore[attr-defined]
    assert stage.echo.closed.wait(DEADLINE_S)


def test_nobody_there_is_the_class_that_was_asked_for(stage: Stage) -> None:
    stage.leave()
    with pytest.raises(errors.CoordinatorUnavailable, match="echo at"):
        stage.peer.call(methods.STATUS, coordinator.StatusRequest(), timeout_ms=TIMEOUT_MS)
    with pytest.raises(errors.CoordinatorUnavailable):
        stage.peer.send(methods.PUSH, frames_of(0), timeout_ms=TIMEOUT_MS)
    with pytest.raises(errors.CoordinatorUnavailable):
        next(stage.peer.receive(methods.PULL, server.PullRequest(), timeout_ms=TIMEOUT_MS))


@pytest.mark.parametrize("used", [False, True])
def test_closed_peer_does_not_answer(stage: Stage, used: bool) -> None:
    if used:
        stage.peer.call(methods.JOIN_JOB, coordinator.JoinJobRequest(), timeout_ms=TIMEOUT_MS)
    stage.peer.close()
    stage.peer.close()
    with pytest.raises(errors.CoordinatorUnavailable):
        stage.peer.call(methods.JOIN_JOB, coordinator.JoinJobRequest(), timeout_ms=TIMEOUT_MS)
    with pytest.raises(errors.CoordinatorUnavailable):
        stage.peer.send(methods.PUSH, frames_of(0), timeout_ms=TIMEOUT_MS)
    with pytest.raises(errors.CoordinatorUnavailable):
        list(stage.peer.receive(methods.PULL, server.PullRequest(), timeout_ms=TIMEOUT_MS))


def test_unknown_method_is_a_mismatch_of_protocols(stage: Stage) -> None:
    with pytest.raises(errors.ProtocolMismatch, match="does not know this method"):
        stage.peer.call(methods.DROP_JOB, server.DropJobRequest(), timeout_ms=TIMEOUT_MS)
    with pytest.raises(errors.ProtocolMismatch):
        list(stage.peer.receive(methods.WATCH, agent.WatchRequest(), timeout_ms=TIMEOUT_MS))


@pytest.mark.parametrize("make", ["grpc", "in process"])
def test_answer_that_is_no_message_is_malformed(make: str) -> None:
    lying = Service("Coordinator")
    wrong = Method(
        methods.STATUS.service,
        methods.STATUS.name,
        methods.STATUS.request,
        Wire(lambda _: b"\x0a\xff", lambda data: data),
    )
    lying.on(wrong, lambda request, _: None)
    listener = None
    if make == "grpc":
        listener = GrpcServer("127.0.0.1:0", [lying], threads=2)
        listener.start()
        peer: Peer = GrpcNetwork().connect(listener.address, name="liar")
    else:
        network = InProcessNetwork()
        network.listen("liar:1", [lying])
        peer = network.connect("liar:1", name="liar")
    try:
        with pytest.raises(errors.MalformedPayload):
            peer.call(methods.STATUS, coordinator.StatusRequest(), timeout_ms=TIMEOUT_MS)
    finally:
        peer.close()
        if listener is not None:
            listener.stop()


def test_in_process_address_is_held_by_one() -> None:
    network = InProcessNetwork()
    network.listen("here:1", [])
    with pytest.raises(errors.AddressInUse):
        network.listen("here:1", [])
    network.leave("here:1")
    network.listen("here:1", [])


# ---- sockets only


@pytest.fixture
def echo() -> Echo:
    return Echo(GrpcNetwork())


@pytest.fixture
def listener(echo: Echo) -> Iterator[GrpcServer]:
    found = GrpcServer("127.0.0.1:0", echo.services(), threads=4)
    yield found
    found.stop()


def test_two_listeners_do_not_share_a_port(listener: GrpcServer) -> None:
    listener.start()
    with pytest.raises(errors.AddressInUse, match=str(listener.port)):
        GrpcServer(listener.address, [])


def test_address_of_another_machine_is_no_taken_port() -> None:
    # 192.0.2.0/24 belongs to nobody (RFC 5737)
    with pytest.raises(errors.ConfigurationError, match=r"192\.0\.2\.1"):
        GrpcServer("192.0.2.1:0", [])


@pytest.mark.parametrize(
    "address", ["", "7070", ":7070", "host", "host:", "host:x", "host:-1", "host:65536", "host:²", "host:٣"]
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(errors.ConfigurationError, match="HOST:PORT"):
        split_address(address)


def test_addresses_are_split() -> None:
    assert split_address("10.0.0.1:7070") == ("10.0.0.1", 7070)
    assert split_address("[::1]:0") == ("[::1]", 0)


def test_health_serves_when_ready(listener: GrpcServer) -> None:
    listener.start()
    with grpc.insecure_channel(listener.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        def status(name: str) -> int:
            return stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=DEADLINE_S).status

        names = ("", "shardyard.wire.v1.ParameterServer", "shardyard.wire.v1.Coordinator")
        for ready, expected in (
            (False, health_pb2.HealthCheckResponse.NOT_SERVING),
            (True, health_pb2.HealthCheckResponse.SERVING),
            (False, health_pb2.HealthCheckResponse.NOT_SERVING),
        ):
            listener.set_ready(ready=ready)
            assert [status(name) for name in names] == [expected] * 3


def test_health_says_not_serving_before_anybody_is_ready(listener: GrpcServer) -> None:
    listener.start()
    with grpc.insecure_channel(listener.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S)
    assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING


def test_reflection_lists_the_services(listener: GrpcServer) -> None:
    listener.start()
    with grpc.insecure_channel(listener.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol="shardyard.wire.v1.PushHeader"),
        ]
        services, file = stub.ServerReflectionInfo(iter(asked), timeout=DEADLINE_S)
    names = {each.name for each in services.list_services_response.service}
    assert {"shardyard.wire.v1.ParameterServer", "shardyard.wire.v1.Coordinator", "grpc.health.v1.Health"} <= names
    assert file.file_descriptor_response.file_descriptor_proto


def test_message_beyond_the_limit_is_too_large_and_the_server_stays_up(listener: GrpcServer) -> None:
    listener.start()
    request = coordinator.JoinJobRequest(name="x" * MESSAGE_BYTES_MAX)
    peer = GrpcNetwork().connect(listener.address, name="echo")
    with pytest.raises(errors.TooLarge):
        peer.call(methods.JOIN_JOB, request, timeout_ms=TIMEOUT_MS)
    small = peer.call(methods.JOIN_JOB, coordinator.JoinJobRequest(name="x"), timeout_ms=TIMEOUT_MS)
    assert small.settings_json == "x"
    peer.close()
    # a client that knows no limit of its own
    with grpc.insecure_channel(listener.address, options=[("grpc.max_send_message_length", -1)]) as channel:
        call = channel.unary_unary(methods.JOIN_JOB.path)
        with pytest.raises(grpc.RpcError) as raised:
            call(request.SerializeToString(), timeout=DEADLINE_S)
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED  # type: ignore[attr-defined]
        assert call(b"", timeout=DEADLINE_S) == b""


def test_deadline_is_kept() -> None:
    release = threading.Event()
    slow = Service("Coordinator")
    left: list[bool] = []

    def status(_request: coordinator.StatusRequest, context: Context) -> coordinator.StatusReply:
        assert release.wait(DEADLINE_S)
        wait_until(lambda: not context.is_active(), "the caller to be gone")
        left.append(True)
        return coordinator.StatusReply()

    slow.on(methods.STATUS, status)
    listener = GrpcServer("127.0.0.1:0", [slow], threads=2)
    listener.start()
    peer = GrpcNetwork().connect(listener.address, name="slow")
    try:
        with pytest.raises(errors.DeadlineExceeded, match="slow at"):
            peer.call(methods.STATUS, coordinator.StatusRequest(), timeout_ms=50)
    finally:
        release.set()
        peer.close()
        listener.stop()
    assert left == [True]


# ---- answers at once


@pytest.fixture
def offering(stage: Stage) -> Stage:
    stage.echo.offers = True
    return stage


def test_what_is_not_answered_at_once_is_answered_as_ever(offering: Stage) -> None:
    stream = offering.peer.open(methods.PUSH_PULL, timeout_ms=TIMEOUT_MS)
    for number in (1, BAD, 3):
        stream.send([Frame(b"", number, b"ab")])
        assert said(stream) == (number + 1, b"ba")
    stream.send(frames_of(5, 6, 7))
    assert [said(stream)[0] for _ in range(3)] == [6, 7, 8]
    stream.send([Frame(b"", 2 * MORE, b"ab")])
    assert [said(stream)[0] for _ in range(3)] == [0, 1, 2 * MORE + 1]
    stream.send(frames_of(13))
    with pytest.raises(errors.StaleToken, match="at 13"):
        stream.receive(timeout_ms=TIMEOUT_MS)
    stream.cancel()


def test_answers_at_once_stand_between_others_in_order_and_wake_nobody(listener: GrpcServer, echo: Echo) -> None:
    echo.offers = True
    listener.start()
    peer = GrpcNetwork().connect(listener.address, name="echo")
    stream = peer.open(methods.PUSH_PULL, timeout_ms=TIMEOUT_MS)
    found = []
    for number in (1, QUICK, QUICK, 3, QUICK, END):
        stream.send([Frame(b"", number, b"ab")])
        found.append(None if number == END else said(stream))
    assert found == [(2, b"ba"), (QUICK, b"ab"), (QUICK, b"ab"), (4, b"ba"), (QUICK, b"ab"), None]
    assert stream.receive(timeout_ms=TIMEOUT_MS) is None
    assert [number for number, _, _ in echo.asked_at_once] == [1, QUICK, QUICK, 3, QUICK, END]
    assert {id_ for _, id_, _ in echo.asked_at_once} == set(echo.ids)
    assert not any(name.startswith("serve") for _, _, name in echo.asked_at_once)
    peer.close()


def test_peer_that_goes_after_an_answer_at_once_leaves_nothing(listener: GrpcServer, echo: Echo) -> None:
    echo.offers = True
    listener.start()
    for _ in range(3):
        peer = GrpcNetwork().connect(listener.address, name="echo")
        stream = peer.open(methods.PUSH_PULL, timeout_ms=TIMEOUT_MS)
        for number in (1, QUICK, QUICK):
            stream.send([Frame(b"", number, b"ab")])
            said(stream)
        echo.closed.clear()
        stream.send([Frame(b"", QUICK, b"ab")])
        stream.cancel()
        assert echo.closed.wait(DEADLINE_S)
        peer.close()


# ---- streams over sockets


@pytest.fixture(params=["direct", "public interface"])
def hanging(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    if request.param == "public interface":
        monkeypatch.setattr(channel, "TRIED", False)
        monkeypatch.setattr(listener_module, "TRIED", False)
    echo = Echo(GrpcNetwork())
    found = GrpcServer("127.0.0.1:0", echo.services(), threads=4)
    found.start()
    peer = GrpcNetwork().connect(found.address, name="echo", unavailable=errors.CoordinatorUnavailable)
    yield Stage(echo, peer, found.stop)
    echo.hang.set()
    peer.close()
    found.stop()


def test_answer_of_a_stream_that_is_overdue_ends_it(hanging: Stage) -> None:
    stream = hanging.peer.open(methods.PUSH_PULL, timeout_ms=TIMEOUT_MS)
    stream.send(frames_of(1))
    assert said(stream) == (2, b"ba")
    stream.send(frames_of(HANG))
    begun = time.monotonic()
    with pytest.raises(errors.DeadlineExceeded, match=r"echo at .* did not answer .*PushPull in time"):
        stream.receive(timeout_ms=100)
    assert 0.1 <= time.monotonic() - begun < 2
    hanging.echo.hang.set()
    assert hanging.echo.closed.wait(DEADLINE_S)
    with pytest.raises(errors.Unavailable):
        ask(stream)


def test_deadline_is_of_an_answer_and_not_of_the_stream(hanging: Stage) -> None:
    stream = hanging.peer.open(methods.PUSH_PULL, timeout_ms=TIMEOUT_MS)
    pause = threading.Event()
    for number in range(20, 24):
        stream.send(frames_of(number))
        assert said(stream, timeout_ms=400) == (number + 1, b"ba")
        pause.wait(0.3)
    stream.cancel()


def test_peer_that_does_not_read_is_overdue(hanging: Stage) -> None:
    """More is sent than the connection takes while the handler does something else."""
    stream = hanging.peer.open(methods.PUSH_PULL, timeout_ms=200)
    failed: list[errors.ShardyardError] = []

    def exchange() -> None:
        try:
            stream.send([Frame(b"", HANG, b""), *(Frame(b"", 0, bytes(FRAME_BYTES)) for _ in range(64))])
            while True:
                stream.receive(timeout_ms=200)
        except errors.ShardyardError as error:
            failed.append(error)

    thread = threading.Thread(target=exchange)
    thread.start()
    thread.join(3)
    waits = thread.is_alive()
    stream.cancel()
    hanging.echo.hang.set()
    thread.join(DEADLINE_S)
    assert not waits
    assert isinstance(failed[0], errors.DeadlineExceeded)


def test_cancel_wakes_who_waits_for_an_answer(hanging: Stage) -> None:
    stream = hanging.peer.open(methods.PUSH_PULL, timeout_ms=TIMEOUT_MS)
    failed: list[errors.ShardyardError] = []
    stream.send(frames_of(HANG))

    def wait() -> None:
        with pytest.raises(errors.ShardyardError) as raised:
            stream.receive(timeout_ms=TIMEOUT_MS)
        failed.append(raised.value)

    thread = threading.Thread(target=wait)
    thread.start()
    assert hanging.echo.hangs.wait(DEADLINE_S)
    begun = time.monotonic()
    stream.cancel()
    thread.join(DEADLINE_S)
    assert time.monotonic() - begun < 2
    assert type(failed[0]) is errors.CoordinatorUnavailable


def test_peer_that_stops_wakes_who_waits_for_an_answer(hanging: Stage) -> None:
    stream = hanging.peer.open(methods.PUSH_PULL, timeout_ms=TIMEOUT_MS)
    stream.send(frames_of(HANG))
    stopping = threading.Thread(target=hanging.leave)

    def stop() -> None:
        assert hanging.echo.hangs.wait(DEADLINE_S)
        stopping.start()

    starter = threading.Thread(target=stop)
    starter.start()
    begun = time.monotonic()
    with pytest.raises(errors.CoordinatorUnavailable):
        stream.receive(timeout_ms=TIMEOUT_MS)
    assert time.monotonic() - begun < 5
    hanging.echo.hang.set()
    starter.join(DEADLINE_S)
    stopping.join(DEADLINE_S)


def test_idle_streams_of_peers_that_are_gone_keep_no_thread(hanging: Stage) -> None:
    before = set(threading.enumerate())
    streams = [hanging.peer.open(methods.PUSH_PULL, timeout_ms=TIMEOUT_MS) for _ in range(3)]
    for stream in streams:
        stream.send(frames_of(1))
        assert said(stream) == (2, b"ba")
    for stream in streams:
        stream.cancel()
    ours = ("deadlines",)
    wait_until(
        lambda: not [t for t in threading.enumerate() if t not in before and t.name in ours], "its thread to end"
    )


def test_nobody_listening_is_the_class_that_was_asked_for(listener: GrpcServer) -> None:
    address = listener.address
    listener.start()
    listener.stop()
    peer = GrpcNetwork().connect(address, name="coordinator", unavailable=errors.CoordinatorUnavailable)
    with pytest.raises(errors.CoordinatorUnavailable, match=address):
        peer.call(methods.STATUS, coordinator.StatusRequest(), timeout_ms=TIMEOUT_MS)
    peer.close()


def test_clock_that_is_set_back_keeps_nobody_waiting(listener: GrpcServer, monkeypatch: pytest.MonkeyPatch) -> None:
    address = listener.address
    listener.stop()
    peer = GrpcNetwork().connect(address, name="coordinator", unavailable=errors.CoordinatorUnavailable)
    now = time.time()
    times = iter([now])
    jumping = SimpleNamespace(monotonic=time.monotonic, time=lambda: next(times, now - 3_600))
    monkeypatch.setattr(channel, "time", jumping)
    for _ in range(3):
        with pytest.raises(errors.CoordinatorUnavailable):
            peer.call(methods.STATUS, coordinator.StatusRequest(), timeout_ms=TIMEOUT_MS)
    peer.close()


def test_listener_that_never_started_gives_its_port_back(listener: GrpcServer) -> None:
    listener.stop()
    GrpcServer(listener.address, []).stop()


def test_frames_over_the_socket_are_those_of_a_generated_client(listener: GrpcServer) -> None:
    listener.start()
    with grpc.insecure_channel(listener.address) as channel:
        call = channel.stream_stream(methods.PUSH_PULL.path)
        sent = [server.PushFrame(offset=n, data=b"ab").SerializeToString() for n in range(3)]
        answers = [server.PullFrame.FromString(each) for each in call(iter(sent), timeout=DEADLINE_S)]
    assert answers == [server.PullFrame(offset=n + 1, data=b"ba") for n in range(3)]
    assert frames.decode(answers[0].SerializeToString()) == Frame(b"", 1, b"ba")
