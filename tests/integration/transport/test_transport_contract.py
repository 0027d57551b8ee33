"""What every network must keep, over gRPC and in process alike."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import psutil
import pytest

from shardyard.domain import errors
from shardyard.domain.limits import FRAME_BYTES
from shardyard.transport.grpc_client import GrpcNetwork
from shardyard.transport.grpc_server import GrpcServer
from shardyard.transport.in_process import InProcessNetwork
from shardyard.transport.interfaces import Peer, Service, Stream, request_id
from shardyard.wire import methods
from shardyard.wire.frames import Frame
from shardyard.wire.method import Method, Wire
from shardyard.wire.v1 import agent_pb2 as agent
from shardyard.wire.v1 import coordinator_pb2 as coordinator
from shardyard.wire.v1 import parameter_server_pb2 as server
from tests.support.echoes import (
    DEADLINE_S,
    END,
    MORE,
    SILENT,
    TIMEOUT_MS,
    Stage,
    ask,
    frames_of,
    said,
)
from tests.support.waiting import wait_until


def test_unary_call_is_answered(stage: Stage) -> None:
    reply = stage.peer.call(methods.JOIN_JOB, coordinator.JoinJobRequest(name="ads"), timeout_ms=TIMEOUT_MS)
    assert reply.settings_json == "ads"


def test_peer_says_who_and_where(stage: Stage) -> None:
    assert stage.peer.name == f"server echo at {stage.echo.address}"


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


@pytest.fixture
def stream(stage: Stage) -> Iterator[Stream]:
    opened = stage.peer.open(methods.PUSH_PULL, timeout_ms=TIMEOUT_MS)
    yield opened
    stage.echo.hang.set()
    opened.cancel()


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


def test_error_among_requests_of_one_exchange_is_its_answer(stream: Stream) -> None:
    stream.send(frames_of(0))
    assert said(stream) == (1, b"ba")

    def exchange() -> None:
        stream.send(frames_of(SILENT, 13, SILENT, 14))  # raises the error if it comes before all is sent
        stream.receive(timeout_ms=TIMEOUT_MS)

    with pytest.raises(errors.StaleToken, match="at 13"):
        exchange()


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


def test_stream_that_is_cancelled_while_it_sends_leaves_no_connection(stage: Stage) -> None:
    """Another thread may cancel a stream whose request is just being sent. Its answer is never asked for then."""
    stream = stage.peer.open(methods.PUSH_PULL, timeout_ms=TIMEOUT_MS)

    def requests() -> Iterator[Frame]:
        yield from frames_of(1)
        canceller = threading.Thread(target=stream.cancel)
        canceller.start()
        canceller.join()

    with contextlib.suppress(errors.Unavailable):
        stream.send(requests())
    stage.peer.close()
    port = int(stage.echo.address.rpartition(":")[2])

    def is_gone() -> bool:
        found = psutil.Process().net_connections("tcp")
        return not any(each.status == psutil.CONN_ESTABLISHED and each.laddr.port == port for each in found)

    wait_until(is_gone, "the connection to be closed")
    with contextlib.suppress(errors.Unavailable):  # in process the answer was there before
        stream.receive(timeout_ms=TIMEOUT_MS)
    stream.cancel()


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
        listener = GrpcServer("127.0.0.1:0", [lying], None, threads=2)
        listener.start()
        peer: Peer = GrpcNetwork(None).connect(listener.address, name="liar")
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
