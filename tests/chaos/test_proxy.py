"""The proxy: what it passes on, cuts, holds, and that nothing of it stays."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tests.chaos.proxy import Proxy, Way

WAIT_S = 10.0


@pytest.fixture
def echo() -> Iterator[str]:
    """Sends back what it is sent."""
    listener = socket.create_server(("127.0.0.1", 0))
    threads: list[threading.Thread] = []

    def answer(connection: socket.socket) -> None:
        with connection:
            try:
                while piece := connection.recv(1 << 16):
                    connection.sendall(piece)
            except OSError:
                return

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threads.append(threading.Thread(target=answer, args=(connection,)))
            threads[-1].start()

    accepting = threading.Thread(target=accept)
    accepting.start()
    yield f"127.0.0.1:{listener.getsockname()[1]}"
    listener.shutdown(socket.SHUT_RDWR)
    accepting.join()
    listener.close()
    for thread in threads:
        thread.join()


@pytest.fixture
def proxy(echo: str) -> Iterator[Proxy]:
    with Proxy(echo) as made:
        yield made


def call(proxy: Proxy) -> socket.socket:
    host, _, port = proxy.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=WAIT_S)


def received(connection: socket.socket) -> bytes:
    """All until the end, however it ends."""
    found = b""
    try:
        while piece := connection.recv(1 << 16):
            found += piece
    except ConnectionError:
        pass
    return found


def test_bytes_are_passed_on_both_ways_in_order(proxy: Proxy) -> None:
    said = bytes(range(256)) * 4_000
    with call(proxy) as connection:
        sending = threading.Thread(target=lambda: (connection.sendall(said), connection.shutdown(socket.SHUT_WR)))
        sending.start()
        assert received(connection) == said
        sending.join()


@pytest.mark.parametrize("way", Way)
def test_connection_is_cut_in_the_middle_of_what_it_says(proxy: Proxy, way: Way) -> None:
    with call(proxy) as first, call(proxy) as second:
        proxy.cut_after(way, 10)
        first.sendall(b"123456")
        assert first.recv(100) == b"123456"
        first.sendall(b"7890abc")
        assert received(first) in (b"7890", b"")
        assert proxy.cuts == 1
        second.sendall(b"still")
        assert second.recv(100) == b"still"


def test_all_connections_are_cut_at_once_and_new_ones_are_taken(proxy: Proxy) -> None:
    with call(proxy) as first, call(proxy) as second:
        for each in (first, second):
            each.sendall(b"x")
            assert each.recv(1) == b"x"
        proxy.cut_now()
        assert received(first) == received(second) == b""
    with call(proxy) as third:
        third.sendall(b"y")
        assert third.recv(1) == b"y"


@pytest.mark.parametrize("way", Way)
def test_what_is_held_comes_when_it_is_let_go(proxy: Proxy, way: Way) -> None:
    with call(proxy) as connection:
        connection.sendall(b"a")
        assert connection.recv(1) == b"a"
        proxy.hold(way)
        connection.sendall(b"b")
        connection.settimeout(0.2)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        connection.settimeout(WAIT_S)
        proxy.let_go()
        assert connection.recv(1) == b"b"


def test_slow_pieces_come_late(proxy: Proxy) -> None:
    proxy.slow(100)
    with call(proxy) as connection:
        begin = time.monotonic()
        connection.sendall(b"a")
        assert connection.recv(1) == b"a"
        assert time.monotonic() - begin > 0.15


def test_without_a_listener_behind_it_a_caller_is_reset(proxy: Proxy) -> None:
    proxy.aim("")
    try:
        with call(proxy) as connection:
            assert received(connection) == b""
    except ConnectionResetError:
        return  # before it was known to be there


def test_a_proxy_that_holds_everything_can_be_closed(echo: str) -> None:
    with Proxy(echo) as proxy, call(proxy) as connection:
        connection.sendall(b"a")
        assert connection.recv(1) == b"a"
        proxy.hold(*Way)
        connection.sendall(b"b")
        proxy.close()
        assert received(connection) == b""
        proxy.close()
