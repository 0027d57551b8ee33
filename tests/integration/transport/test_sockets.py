"""What only a socket can do: ports, health, limits, deadlines, and answers in the receiving thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
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
from shardyard.transport.interfaces import Context, Service
from shardyard.wire import frames, methods
from shardyard.wire.frames import Frame
from shardyard.wire.v1 import coordinator_pb2 as coordinator
from shardyard.wire.v1 import parameter_server_pb2 as server
from tests.support.echoes import (
    BAD,
    DEADLINE_S,
    END,
    HANG,
    MORE,
    QUICK,
    TIMEOUT_MS,
    Echo,
    Stage,
    ask,
    frames_of,
    said,
)
from tests.support.waiting import wait_until


def test_two_listeners_do_not_share_a_port(listener: GrpcServer) -> None:
    listener.start()
    with pytest.raises(errors.AddressInUse, match=str(listener.port)):
        GrpcServer(listener.address, [], None)


def test_address_of_another_machine_is_no_taken_port() -> None:
    # 192.0.2.0/24 belongs to nobody (RFC 5737)
    with pytest.raises(errors.ConfigurationError, match=r"192\.0\.2\.1"):
        GrpcServer("192.0.2.1:0", [], None)


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
    peer = GrpcNetwork(None).connect(listener.address, name="echo")
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
    listener = GrpcServer("127.0.0.1:0", [slow], None, threads=2)
    listener.start()
    peer = GrpcNetwork(None).connect(listener.address, name="slow")
    try:
        with pytest.raises(errors.DeadlineExceeded, match="slow at"):
            peer.call(methods.STATUS, coordinator.StatusRequest(), timeout_ms=50)
    finally:
        release.set()
        peer.close()
        listener.stop()
    assert left == [True]


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
    peer = GrpcNetwork(None).connect(listener.address, name="echo")
    stream = peer.open(methods.PUSH_PULL, timeout_ms=TIMEOUT_MS)
    found = []
    for number in (1, QUICK, QUICK, 3, QUICK, END):
        stream.send([Frame(b"", number, b"ab")])
        found.append(None if number == END else said(stream))
    assert found == [(2, b"ba"), (QUICK, b"ab"), (QUICK, b"ab"), (4, b"ba"), (QUICK, b"ab"), None]
    assert stream.receive(timeout_ms=TIMEOUT_MS) is None
    # the first message is what the handler begins with
    assert [number for number, _, _ in echo.asked_at_once] == [QUICK, QUICK, 3, QUICK, END]
    assert {id_ for _, id_, _ in echo.asked_at_once} == set(echo.ids)
    assert not any(name.startswith("serve") for _, _, name in echo.asked_at_once)
    peer.close()


def test_peer_that_goes_after_an_answer_at_once_leaves_nothing(listener: GrpcServer, echo: Echo) -> None:
    echo.offers = True
    listener.start()
    for _ in range(3):
        peer = GrpcNetwork(None).connect(listener.address, name="echo")
        stream = peer.open(methods.PUSH_PULL, timeout_ms=TIMEOUT_MS)
        for number in (1, QUICK, QUICK):
            stream.send([Frame(b"", number, b"ab")])
            said(stream)
        echo.closed.clear()
        stream.send([Frame(b"", QUICK, b"ab")])
        stream.cancel()
        assert echo.closed.wait(DEADLINE_S)
        peer.close()


@pytest.fixture(params=["direct", "public interface"])
def hanging(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    if request.param == "public interface":
        monkeypatch.setattr(channel, "TRIED", False)
        monkeypatch.setattr(listener_module, "TRIED", False)
    echo = Echo(GrpcNetwork(None))
    found = GrpcServer("127.0.0.1:0", echo.services(), None, threads=4)
    found.start()
    peer = GrpcNetwork(None).connect(found.address, name="echo", unavailable=errors.CoordinatorUnavailable)
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


@pytest.fixture
def two_threads() -> Iterator[Stage]:
    echo = Echo(GrpcNetwork(None))
    found = GrpcServer("127.0.0.1:0", echo.services(), None, threads=2)
    found.start()
    peer = GrpcNetwork(None).connect(found.address, name="echo")
    yield Stage(echo, peer, found.stop)
    peer.close()
    found.stop()


def served_by() -> int:
    return sum(thread.name.startswith("serve") for thread in threading.enumerate())


def test_streams_that_wait_for_a_request_hold_no_thread(two_threads: Stage) -> None:
    """40 on which nothing is sent, and 40 with exchanges by turns, in two threads."""
    silent = [two_threads.peer.open(methods.PUSH_PULL, timeout_ms=TIMEOUT_MS) for _ in range(40)]
    streams = [two_threads.peer.open(methods.PUSH_PULL, timeout_ms=TIMEOUT_MS) for _ in range(40)]
    for number in range(3):
        for stream in streams:
            stream.send(frames_of(number))
        assert [said(stream) for stream in streams] == [(number + 1, b"ba")] * 40
    assert served_by() <= 4  # two for calls, two for streams
    for stream in (*silent, *streams):
        stream.cancel()
    # a silent one never has a handler
    wait_until(lambda: two_threads.echo.ended == 40, "the handlers of all streams to end")


def test_streams_that_wait_for_a_request_end_with_the_server(two_threads: Stage) -> None:
    streams = [two_threads.peer.open(methods.PUSH_PULL, timeout_ms=TIMEOUT_MS) for _ in range(10)]
    for stream in streams:
        stream.send(frames_of(1))
        assert said(stream) == (2, b"ba")
    two_threads.leave()
    assert two_threads.echo.ended == 10
    assert served_by() == 0
    for stream in streams:
        with pytest.raises(errors.ServerUnavailable):
            stream.receive(timeout_ms=TIMEOUT_MS)


def test_nobody_listening_is_the_class_that_was_asked_for(listener: GrpcServer) -> None:
    address = listener.address
    listener.start()
    listener.stop()
    peer = GrpcNetwork(None).connect(address, name="coordinator", unavailable=errors.CoordinatorUnavailable)
    with pytest.raises(errors.CoordinatorUnavailable, match=address):
        peer.call(methods.STATUS, coordinator.StatusRequest(), timeout_ms=TIMEOUT_MS)
    peer.close()


def test_clock_that_is_set_back_keeps_nobody_waiting(listener: GrpcServer, monkeypatch: pytest.MonkeyPatch) -> None:
    address = listener.address
    listener.stop()
    peer = GrpcNetwork(None).connect(address, name="coordinator", unavailable=errors.CoordinatorUnavailable)
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
    GrpcServer(listener.address, [], None).stop()


def test_frames_over_the_socket_are_those_of_a_generated_client(listener: GrpcServer) -> None:
    listener.start()
    with grpc.insecure_channel(listener.address) as channel:
        call = channel.stream_stream(methods.PUSH_PULL.path)
        sent = [server.PushFrame(offset=n, data=b"ab").SerializeToString() for n in range(3)]
        answers = [server.PullFrame.FromString(each) for each in call(iter(sent), timeout=DEADLINE_S)]
    assert answers == [server.PullFrame(offset=n + 1, data=b"ba") for n in range(3)]
    assert frames.decode(answers[0].SerializeToString()) == Frame(b"", 1, b"ba")
