"""Callers that send nothing, or read nothing: they cost no thread for ever, and others are served meanwhile."""

from __future__ import annotations

import contextlib
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shardyard.security import door
from shardyard.security.identity import Role
from shardyard.transport import grpc_private, grpc_server
from shardyard.transport.grpc_client import GrpcNetwork
from shardyard.transport.grpc_private import CallThreads
from shardyard.transport.grpc_server import GrpcServer
from shardyard.transport.interfaces import Context, Service
from shardyard.transport.tls import ServerSecurity
from shardyard.wire import frames, methods
from shardyard.wire.frames import Frame
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard.wire.v1 import parameter_server_pb2 as server_wire
from tests.support.attacks import attacks, http2
from tests.support.identities import Identities, OpenDoor, raw_channel
from tests.support.waiting import wait_until

CALL_MS = 10_000
IDLE = 200
"""Calls at a time, on servers with two threads."""


@contextmanager
def serving(*services: Service, **more: Any) -> Iterator[str]:
    listener = GrpcServer("127.0.0.1:0", list(services), None, threads=2, **more)
    listener.start()
    try:
        yield listener.address
    finally:
        listener.stop()


def coordinator(on_status: Callable[[], None] = lambda: None) -> Service:
    def status(_: wire.StatusRequest, __: Context) -> wire.StatusReply:
        on_status()
        return wire.StatusReply(term=7)

    service = Service("Coordinator")
    service.on(methods.STATUS, status)
    service.on(methods.HEARTBEAT, lambda _, __: wire.HeartbeatReply(term=8))
    return service


def ask(address: str) -> int:
    peer = GrpcNetwork(None).connect(address, name="coordinator")
    try:
        return peer.call(methods.STATUS, wire.StatusRequest(), timeout_ms=CALL_MS).term
    finally:
        peer.close()


def serving_threads() -> int:
    return sum(thread.name.startswith("serve") for thread in threading.enumerate())


def silent(stop: threading.Event) -> Iterator[bytes]:
    """A caller that has begun and sends nothing."""
    stop.wait(60)
    yield from ()


@pytest.mark.parametrize("path", [methods.STATUS.path, methods.HEARTBEAT.path])
def test_calls_without_a_message_take_no_thread(path: str) -> None:
    """Unary calls, as 64 of them on one connection stopped a coordinator."""
    stop, before = threading.Event(), serving_threads()
    with serving(coordinator()) as address, raw_channel(address, "coordinator", None) as channel:
        calls = [channel.stream_unary(path).future(silent(stop)) for _ in range(IDLE)]
        try:
            assert ask(address) == 7
            assert serving_threads() - before <= 3
        finally:
            stop.set()
            for call in calls:
                call.cancel()


def test_streams_without_a_message_take_no_thread() -> None:
    stop, before = threading.Event(), serving_threads()
    service = Service("ParameterServer")
    service.on(methods.PUSH_PULL, lambda stream, _: iter(()))
    service.on(methods.PUSH, lambda stream, _: server_wire.PushReply(parts=[{"next": sum(1 for _ in stream)}]))
    with serving(service, coordinator()) as address, raw_channel(address, "server", None) as channel:
        calls = [channel.stream_stream(methods.PUSH_PULL.path)(silent(stop)) for _ in range(IDLE)]
        calls += [channel.stream_unary(methods.PUSH.path).future(silent(stop)) for _ in range(IDLE)]
        try:
            assert ask(address) == 7
            assert serving_threads() - before <= 3
        finally:
            stop.set()
            for call in calls:
                call.cancel()


def test_caller_that_reads_nothing_loses_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread waits for room in the connection's window, at most so long."""
    monkeypatch.setattr(grpc_private, "STALL_S", 0.2)
    ended: list[int] = []

    def pull(_: server_wire.PullRequest, __: Context) -> Iterator[Frame]:
        try:
            while True:
                yield Frame(b"", 0, bytes(1 << 20))
        finally:
            ended.append(1)

    service = Service("ParameterServer")
    service.on(methods.PULL, pull)
    with serving(service, coordinator()) as address, raw_channel(address, "server", None) as channel:
        calls = [channel.unary_stream(methods.PULL.path)(b"") for _ in range(4)]
        wait_until(lambda: len(ended) == 4, "the handlers of calls that nobody reads to end")
        assert ask(address) == 7
        for call in calls:
            with pytest.raises(grpc.RpcError):
                list(call)


def test_call_that_is_reset_before_its_message_is_whole_has_no_thread_and_no_handler() -> None:
    """As 400 a second took a third of the steps of a job."""
    begun: list[int] = []

    def push_pull(stream: Iterator[Frame], _: Context) -> Iterator[Frame | None]:
        begun.append(1)
        yield None
        next(stream, None)

    paths = (methods.PUSH_PULL.path, methods.STATUS.path)
    half = http2.message(b"part", claims_bytes=100)
    numbers = range(1, 2 * IDLE, 2)
    calls = [http2.call(each, paths[each % 4 == 1]) + http2.data(each, half) for each in numbers]
    before, service = serving_threads(), Service("ParameterServer")
    service.on(methods.PUSH_PULL, push_pull)
    with serving(service, coordinator(lambda: begun.append(2))) as address, connected(address) as raw:
        raw.sendall(http2.begin() + b"".join(calls))
        assert ask(address) == 7
        raw.sendall(b"".join(map(http2.reset, numbers)))
        assert ask(address) == 7
        assert begun == [2, 2]
        assert serving_threads() - before <= 2


def test_last_answers_that_nobody_reads_take_no_thread() -> None:
    with serving(coordinator()) as address, connected(address) as raw:
        raw.sendall(unread(IDLE))
        wait_until(lambda: _received(raw, http2.HEADERS) > 0, "the first of them to be answered")
        assert ask(address) == 7


def test_last_answer_that_nobody_reads_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_private, "STALL_S", 0.2)
    with serving(coordinator()) as address, connected(address) as raw:
        raw.sendall(unread(IDLE))
        ended = 0

        def all_have_ended() -> bool:
            nonlocal ended
            ended += _received(raw, http2.RST_STREAM)
            return ended == IDLE

        wait_until(all_have_ended, "the calls to end")


def test_malformed_messages_beyond_a_number_a_second_are_refused_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """As 200 a second took a quarter of the steps of a job."""
    with serving(coordinator()) as address, raw_channel(address, "server", None) as channel:
        calls = malformed(channel)
        assert ask(address) == 7
        wait_until(lambda: ended(calls) >= grpc_server.MALFORMED_PER_S, "the first of them to be refused")
        time.sleep(0.2)
        assert ended(calls) < IDLE / 2
    monkeypatch.setattr(grpc_private, "STALL_S", 0.2)
    with serving(coordinator()) as address, raw_channel(address, "server", None) as channel:
        calls = malformed(channel)
        wait_until(lambda: ended(calls) == IDLE, "all of them to be refused")
        assert {call.code() for call in calls} == {grpc.StatusCode.INVALID_ARGUMENT}


def malformed(channel: grpc.Channel) -> list[Any]:
    return [channel.unary_unary(methods.STATUS.path).future(b"\xff\xff\xff") for _ in range(IDLE)]


def ended(calls: list[Any]) -> int:
    return sum(call.done() for call in calls)


def connected(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=CALL_MS / 1_000)


def unread(calls: int) -> bytes:
    """Calls of a client that has no room for answers."""
    whole = http2.message(b"")
    numbers = range(1, 2 * calls, 2)
    sent = [http2.call(each, methods.STATUS.path) + http2.data(each, whole, last=True) for each in numbers]
    return http2.begin({http2.INITIAL_WINDOW_SIZE: 0}) + b"".join(sent)


def _received(raw: socket.socket, kind: int) -> int:
    """How many frames of a kind have come, of what is there. Frames are small, and come whole."""
    raw.settimeout(0.05)
    found, at = bytearray(), 0
    with contextlib.suppress(TimeoutError):
        while True:
            found += raw.recv(1 << 16)
    count = 0
    while at < len(found):
        count += found[at + 3] == kind
        at += 9 + int.from_bytes(found[at : at + 3], "big")
    return count


def test_answer_of_a_handler_that_waits_for_the_next_is_sent_at_once() -> None:
    """As a watched launch, which prints a line and then nothing for long."""
    go_on = threading.Event()

    def pull(_: server_wire.PullRequest, __: Context) -> Iterator[Frame]:
        yield Frame(b"", 1, b"")
        go_on.wait(60)
        yield Frame(b"", 2, b"")

    service = Service("ParameterServer")
    service.on(methods.PULL, pull)
    with serving(service) as address:
        peer = GrpcNetwork(None).connect(address, name="server 1")
        answers = peer.receive(methods.PULL, server_wire.PullRequest(), timeout_ms=CALL_MS)
        assert next(answers).offset == 1
        go_on.set()
        assert [each.offset for each in answers] == [2]
        peer.close()


def test_caller_that_stops_within_a_request_loses_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_private, "STALL_S", 0.2)
    stop, took = threading.Event(), []

    def push(stream: Iterator[Frame], _: Context) -> server_wire.PushReply:
        took.append(sum(1 for _ in stream))
        return server_wire.PushReply()

    def half() -> Iterator[bytes]:
        yield frames.encode(Frame(b"h", 0, b"data"))
        stop.wait(60)

    service = Service("ParameterServer")
    service.on(methods.PUSH, push)
    with serving(service, coordinator()) as address, raw_channel(address, "server", None) as channel:
        calls = [channel.stream_unary(methods.PUSH.path).future(half()) for _ in range(4)]
        try:
            wait_until(lambda: len(took) == 4, "the handlers to be released")
            assert ask(address) == 7
            for call in calls:
                with pytest.raises(grpc.RpcError):
                    call.result(10)
        finally:
            stop.set()


def test_connections_take_half_of_the_files_that_a_process_may_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Further ones are closed at once, and those that were there are served."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (20, 20))
    with serving(coordinator()) as address, contextlib.ExitStack() as opened:
        peer = GrpcNetwork(None).connect(address, name="coordinator")
        opened.callback(peer.close)
        assert peer.call(methods.STATUS, wire.StatusRequest(), timeout_ms=CALL_MS).term == 7
        host, _, port = address.rpartition(":")
        for _ in range(30):
            opened.enter_context(socket.create_connection((host, int(port))))
        silent_ones = opened.pop_all()
        wait_until(lambda: files_of_clients(port) <= 10, "the others to be closed")
        assert files_of_clients(port) == 10
        assert peer.call(methods.STATUS, wire.StatusRequest(), timeout_ms=CALL_MS).term == 7
        silent_ones.close()


def test_connection_whose_caller_answers_no_settings_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "grpc.http2.settings_timeout"
    assert dict(grpc_server.OPTIONS)[name] == 10_000
    shorter = [(each, 200 if each == name else value) for each, value in grpc_server.OPTIONS]
    monkeypatch.setattr(grpc_server, "OPTIONS", tuple(shorter))
    with serving(coordinator()) as address:
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=10) as caller:
            caller.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)))
            while caller.recv(1 << 16):
                pass


def files_of_clients(port: str) -> int:
    """How many connections the server at this port of this process has."""
    found = psutil.Process().net_connections("tcp")
    return sum(each.laddr.port == int(port) and each.status == psutil.CONN_ESTABLISHED for each in found)


def test_heartbeats_are_served_while_all_other_threads_are_taken() -> None:
    hold, began = threading.Event(), threading.Semaphore(0)

    def block() -> None:
        began.release()
        hold.wait(60)

    vital = frozenset((methods.HEARTBEAT.path,))
    with serving(coordinator(block), vital=vital) as address, raw_channel(address, "coordinator", None) as channel:
        calls = [channel.unary_unary(methods.STATUS.path).future(b"") for _ in range(8)]
        try:
            assert began.acquire(timeout=10)
            assert began.acquire(timeout=10)
            peer = GrpcNetwork(None).connect(address, name="coordinator")
            for _ in range(20):
                assert peer.call(methods.HEARTBEAT, wire.HeartbeatRequest(), timeout_ms=2_000).term == 8
            peer.close()
            assert not began.acquire(timeout=0.1), "the others have no thread"
        finally:
            hold.set()
            for call in calls:
                call.result(20)


def test_health_is_served_while_all_other_threads_are_taken() -> None:
    """By calls of its own services too, which send nothing: reflection and Watch."""
    stop = threading.Event()
    paths = ("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", "/grpc.health.v1.Health/Watch")
    with serving(coordinator()) as address, raw_channel(address, "coordinator", None) as channel:
        calls = [channel.stream_stream(path)(silent(stop)) for path in paths for _ in range(8)]
        calls += [channel.stream_stream("/grpc.health.v1.Health/Check")(silent(stop)) for _ in range(IDLE)]
        try:
            check = health_pb2_grpc.HealthStub(channel).Check
            for _ in range(20):
                assert check(health_pb2.HealthCheckRequest(), timeout=5).status
            with pytest.raises(grpc.RpcError) as found:
                check(health_pb2.HealthCheckRequest(service="other"), timeout=5)
            assert found.value.code() is grpc.StatusCode.NOT_FOUND
        finally:
            stop.set()
            for call in calls:
                call.cancel()


def test_one_caller_takes_half_of_the_threads_at_most(tmp_path: Any) -> None:
    """Of 4 threads, one that blocks has 2; a second caller is served meanwhile. All is done in the end."""
    hold, running = threading.Event(), threading.Semaphore(0)

    def block() -> None:
        running.release()
        hold.wait(60)

    identities = Identities(tmp_path)
    greedy, modest = identities.of(Role.WORKER, "greedy"), identities.of(Role.WORKER, "modest")
    security = ServerSecurity(identities.of(Role.COORDINATOR), OpenDoor())
    listener = GrpcServer("127.0.0.1:0", [coordinator(block)], security, threads=4)
    listener.start()
    try:
        with raw_channel(listener.address, "coordinator", greedy) as channel:
            calls = [channel.unary_unary(methods.STATUS.path).future(b"") for _ in range(10)]
            for _ in range(2):
                assert running.acquire(timeout=10)
            assert not running.acquire(timeout=0.3)
            peer = GrpcNetwork(modest).connect(listener.address, name="coordinator")
            assert peer.call(methods.HEARTBEAT, wire.HeartbeatRequest(), timeout_ms=CALL_MS).term == 8
            peer.close()
            hold.set()
            for call in calls:
                call.result(20)
    finally:
        hold.set()
        listener.stop()


def test_work_of_a_caller_is_done_in_its_order_and_none_is_lost() -> None:
    threads, done, lock = CallThreads(4), [], threading.Lock()

    def work(caller: str, number: int) -> Callable[[], None]:
        def run() -> None:
            time.sleep(0.0005)
            with lock:
                done.append((caller, number))

        return run

    for number in range(200):
        for caller in ("a", "b", ""):
            threads.run(work(caller, number), caller)
    wait_until(lambda: len(done) == 600, "all works")
    threads.close()
    assert threads._running == {}
    assert threads._waiting == {}
    for caller in ("a", "b"):
        mine = [number for who, number in done if who == caller]
        # two run at a time: when one is done, at most one of those before it is not
        assert all(len(set(range(number)) - set(mine[:place])) <= 1 for place, number in enumerate(mine)), mine


def test_one_caller_has_so_many_open_calls_and_others_are_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "CALLS_MAX", 5)
    identities, stop = Identities(tmp_path), threading.Event()
    with identities.serving(coordinator(), Role.COORDINATOR) as address:
        ada, eve = (raw_channel(address, "coordinator", identities.of(Role.OPERATOR, name)) for name in ("ada", "eve"))
        with ada, eve:
            status, ask = ada.unary_unary(methods.STATUS.path), ada.stream_unary(methods.STATUS.path)
            calls = [ask.future(silent(stop)) for _ in range(5)]

            def refused() -> bool:
                try:
                    status(b"", timeout=5)
                except grpc.RpcError as error:
                    return "operator ada has 5 open calls" in str(error)
                return False

            def all_open() -> bool:
                """A call that came while this asks was one too many, and is made again."""
                calls[:] = [ask.future(silent(stop)) if call.done() else call for call in calls]
                return refused()

            wait_until(all_open, "all calls to be open")
            eve.unary_unary(methods.STATUS.path)(b"", timeout=5)
            for call in calls:
                call.cancel()
            wait_until(lambda: not refused(), "the calls to have ended")
            stop.set()


def test_call_whose_answer_nobody_reads_is_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "CALLS_MAX", 5)
    identities = Identities(tmp_path)
    eve = identities.of(Role.OPERATOR, "eve")
    with (
        identities.serving(coordinator(), Role.COORDINATOR) as address,
        attacks.Victim(address, "Coordinator", eve.folder).secure(unread(5)),
        raw_channel(address, "coordinator", eve) as channel,
    ):

        def refused() -> bool:
            try:
                channel.unary_unary(methods.STATUS.path)(b"", timeout=5)
            except grpc.RpcError as error:
                return "operator eve has 5 open calls" in str(error)
            return False

        wait_until(refused, "all calls to be open")
