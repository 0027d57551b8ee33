"""What every network must keep, over gRPC and in process alike; and what only a socket can do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from shardyard.ground import errors
from shardyard.ground.limits import FRAME_BYTES, MESSAGE_BYTES_MAX
from shardyard.transport.channel import GrpcNetwork
from shardyard.transport.in_process import InProcessNetwork
from shardyard.transport.listener import Listener, split_address
from shardyard.transport.peers import Context, Network, Peer, Service, request_id
from shardyard.wire import frames, methods
from shardyard.wire.frames import Frame
from shardyard.wire.v1 import agent_pb2 as agent
from shardyard.wire.v1 import coordinator_pb2 as coordinator
from shardyard.wire.v1 import parameter_server_pb2 as server

DEADLINE_S = 10.0
TIMEOUT_MS = 10_000


def wait_until(condition: Callable[[], bool], what: str) -> None:
    pause = threading.Event()
    give_up = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < give_up, f"waited {DEADLINE_S} s for {what}"
        pause.wait(0.005)


@dataclass
class Echo:
    """Services that say what they were told. `network` is where the coordinator's handler calls on."""

    network: Network
    failure: Exception | None = None
    closed: threading.Event = field(default_factory=threading.Event)
    ids: list[str] = field(default_factory=list)
    address: str = ""

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

    def push_pull(self, stream: Iterator[Frame], _: Context) -> Iterator[Frame]:
        for frame in stream:
            if frame.offset == 13:
                raise errors.StaleToken("at 13")
            yield Frame(bytes(frame.header), frame.offset + 1, bytes(frame.data)[::-1])


@dataclass
class Stage:
    echo: Echo
    peer: Peer
    leave: Callable[[], None]


@pytest.fixture(params=["grpc", "in process"])
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    before = set(threading.enumerate())
    if request.param == "grpc":
        network: Network = GrpcNetwork()
        echo = Echo(network)
        listener = Listener("127.0.0.1:0", echo.services(), threads=8)
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


def test_streams_both_ways(stage: Stage) -> None:
    found = stage.peer.exchange(methods.PUSH_PULL, frames_of(1, 2, 3), timeout_ms=TIMEOUT_MS)
    assert [(frame.offset, bytes(frame.data)) for frame in found] == [(2, b"ba"), (3, b"ba"), (4, b"ba")]


def test_answer_comes_before_the_stream_in_has_ended(stage: Stage) -> None:
    answers: list[int] = []
    got = threading.Event()

    def sent() -> Iterator[Frame]:
        yield Frame(b"", 0, b"ab")
        assert got.wait(DEADLINE_S)
        yield Frame(b"", 7, b"cd")

    for frame in stage.peer.exchange(methods.PUSH_PULL, sent(), timeout_ms=TIMEOUT_MS):
        answers.append(frame.offset)
        got.set()
    assert answers == [1, 8]


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


def test_error_in_the_middle_of_an_exchange_comes_after_the_answers(stage: Stage) -> None:
    stream = stage.peer.exchange(methods.PUSH_PULL, frames_of(0, 13, 14), timeout_ms=TIMEOUT_MS)
    assert next(stream).offset == 1
    with pytest.raises(errors.StaleToken, match="at 13"):
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
    with pytest.raises(errors.CoordinatorUnavailable):
        next(stage.peer.exchange(methods.PUSH_PULL, frames_of(0), timeout_ms=TIMEOUT_MS))


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
    wrong = methods.Method(
        methods.STATUS.service,
        methods.STATUS.name,
        methods.STATUS.request,
        methods.Wire(lambda _: b"\x0a\xff", lambda data: data),
    )
    lying.on(wrong, lambda request, _: None)
    listener = None
    if make == "grpc":
        listener = Listener("127.0.0.1:0", [lying], threads=2)
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
def listener() -> Iterator[Listener]:
    echo = Echo(GrpcNetwork())
    found = Listener("127.0.0.1:0", echo.services(), threads=4)
    yield found
    found.stop()


def test_two_listeners_do_not_share_a_port(listener: Listener) -> None:
    listener.start()
    with pytest.raises(errors.AddressInUse, match=str(listener.port)):
        Listener(listener.address, [])


def test_address_of_another_machine_is_no_taken_port() -> None:
    # 192.0.2.0/24 belongs to nobody (RFC 5737)
    with pytest.raises(errors.ConfigurationError, match=r"192\.0\.2\.1"):
        Listener("192.0.2.1:0", [])


@pytest.mark.parametrize(
    "address", ["", "7070", ":7070", "host", "host:", "host:x", "host:-1", "host:65536", "host:²", "host:٣"]
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(errors.ConfigurationError, match="HOST:PORT"):
        split_address(address)


def test_addresses_are_split() -> None:
    assert split_address("10.0.0.1:7070") == ("10.0.0.1", 7070)
    assert split_address("[::1]:0") == ("[::1]", 0)


def test_health_serves_when_ready(listener: Listener) -> None:
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


def test_health_says_not_serving_before_anybody_is_ready(listener: Listener) -> None:
    listener.start()
    with grpc.insecure_channel(listener.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S)
    assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING


def test_reflection_lists_the_services(listener: Listener) -> None:
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


def test_message_beyond_the_limit_is_too_large_and_the_server_stays_up(listener: Listener) -> None:
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
    listener = Listener("127.0.0.1:0", [slow], threads=2)
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


def test_nobody_listening_is_the_class_that_was_asked_for(listener: Listener) -> None:
    address = listener.address
    listener.start()
    listener.stop()
    peer = GrpcNetwork().connect(address, name="coordinator", unavailable=errors.CoordinatorUnavailable)
    with pytest.raises(errors.CoordinatorUnavailable, match=address):
        peer.call(methods.STATUS, coordinator.StatusRequest(), timeout_ms=TIMEOUT_MS)
    peer.close()


def test_listener_that_never_started_gives_its_port_back(listener: Listener) -> None:
    listener.stop()
    Listener(listener.address, []).stop()


def test_frames_over_the_socket_are_those_of_a_generated_client(listener: Listener) -> None:
    listener.start()
    with grpc.insecure_channel(listener.address) as channel:
        call = channel.stream_stream(methods.PUSH_PULL.path)
        sent = [server.PushFrame(offset=n, data=b"ab").SerializeToString() for n in range(3)]
        answers = [server.PullFrame.FromString(each) for each in call(iter(sent), timeout=DEADLINE_S)]
    assert answers == [server.PullFrame(offset=n + 1, data=b"ba") for n in range(3)]
    assert frames.decode(answers[0].SerializeToString()) == Frame(b"", 1, b"ba")
