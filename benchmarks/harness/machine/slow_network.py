"""A network whose servers answer late: each call, and each exchange on a stream, takes some milliseconds more.

Owns: the delay. It is a sleep, so it costs no processor. Must not know: what is called.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

from shardyard.domain import errors
from shardyard.security.credentials import Credentials
from shardyard.transport.interfaces import Descriptors, LocalAddress, Network, Peer, Stream
from shardyard.wire.method import Method

SLOW = "server"
"""What the names of peers begin with that answer late."""


class SlowNetwork:
    def __init__(self, inner: Network, delay_s: float) -> None:
        self._inner, self._delay_s = inner, delay_s

    @property
    def job_pass(self) -> bytes:
        return self._inner.job_pass

    @job_pass.setter
    def job_pass(self, job_pass: bytes) -> None:
        self._inner.job_pass = job_pass

    def connect(
        self, address: str, *, name: str, unavailable: type[errors.Unavailable] = errors.ServerUnavailable
    ) -> Peer:
        peer = self._inner.connect(address, name=name, unavailable=unavailable)
        return _SlowPeer(peer, self._delay_s) if name.startswith(SLOW) else peer


class _SlowPeer:
    def __init__(self, inner: Peer, delay_s: float) -> None:
        self._inner, self._delay_s = inner, delay_s

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def credentials(self) -> Credentials | None:
        return self._inner.credentials

    def call(self, method: Method[Any, Any], request: Any, *, timeout_ms: int) -> Any:
        time.sleep(self._delay_s)
        return self._inner.call(method, request, timeout_ms=timeout_ms)

    def send(self, method: Method[Any, Any], requests: Iterable[Any], *, timeout_ms: int) -> Any:
        time.sleep(self._delay_s)
        return self._inner.send(method, requests, timeout_ms=timeout_ms)

    def receive(self, method: Method[Any, Any], request: Any, *, timeout_ms: int) -> Iterator[Any]:
        time.sleep(self._delay_s)
        return self._inner.receive(method, request, timeout_ms=timeout_ms)

    def open(self, method: Method[Any, Any], *, timeout_ms: int, socket: LocalAddress | None = None) -> Stream:
        return _SlowStream(self._inner.open(method, timeout_ms=timeout_ms, socket=socket), self._delay_s)

    def close(self) -> None:
        self._inner.close()


class _SlowStream:
    """Delays answers. Requests are sent at once."""

    def __init__(self, inner: Stream, delay_s: float) -> None:
        self._inner, self._delay_s = inner, delay_s

    @property
    def descriptors(self) -> Descriptors | None:
        return self._inner.descriptors

    def send(self, requests: Iterable[Any], *, answered: bool = True) -> None:
        self._inner.send(requests, answered=answered)

    def receive(self, *, timeout_ms: int) -> Any:
        time.sleep(self._delay_s)
        return self._inner.receive(timeout_ms=timeout_ms)

    def cancel(self) -> None:
        self._inner.cancel()
