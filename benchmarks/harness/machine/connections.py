"""The traffic of this process's TCP connections, as the kernel counts it (TCP_INFO), and of an interface."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

HEADERS_BYTES = 14 + 20 + 20 + 12
"""Of a packet: Ethernet, IPv4, TCP, and TCP's timestamps, which Linux sends with every segment."""
MAPPED = "::ffff:"
"""Before the address of a peer that is reached over IPv4 by a socket of IPv6."""
_TCP_INFO_BYTES = 240
_SEGMENTS_AGAIN, _BYTES_RECEIVED, _SEGMENTS_OUT = (100, "I"), (128, "Q"), (136, "I")
_DATA_SEGMENTS_OUT, _BYTES_SENT, _BYTES_AGAIN = (156, "I"), (200, "Q"), (208, "Q")
"""Places in struct tcp_info of linux/tcp.h, Linux 4.19 and later."""


@dataclass(frozen=True, slots=True)
class Moved:
    """The traffic of this end of one connection or several."""

    payload_bytes: int = 0
    """Payload of TCP: HTTP/2 with its headers. Retransmissions are not counted."""
    data_segments: int = 0
    """Packets that carried it."""
    bare_segments: int = 0
    """Packets without payload: acknowledgements."""
    again_bytes: int = 0
    again_segments: int = 0
    """Retransmissions."""
    received_bytes: int = 0
    """Received payload."""

    @property
    def data_bytes(self) -> int:
        """Bytes of the packets that carry payload, with headers, without retransmissions."""
        return self.payload_bytes + HEADERS_BYTES * self.data_segments

    @property
    def bare_bytes(self) -> int:
        return HEADERS_BYTES * self.bare_segments

    @property
    def wire_bytes(self) -> int:
        """Bytes of all packets."""
        return self.data_bytes + self.bare_bytes + self.again_bytes + HEADERS_BYTES * self.again_segments

    def __add__(self, other: Moved) -> Moved:
        return Moved(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))

    def __sub__(self, other: Moved) -> Moved:
        return Moved(*(getattr(self, each.name) - getattr(other, each.name) for each in fields(self)))


def moved_by_address() -> dict[str, Moved]:
    """Returns the traffic of this process's open TCP connections by the peer's address, HOST:PORT."""
    found: dict[str, Moved] = {}
    for peer, connection in _connections():
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        if len(info) < _BYTES_AGAIN[0] + 8:
            raise OSError(f"TCP_INFO has {len(info)} bytes here; Linux 4.19 or later is needed")
        segments, data_segments, segments_again, sent, sent_again, received = (
            struct.unpack_from(f"={kind}", info, at)[0]
            for at, kind in (
                _SEGMENTS_OUT,
                _DATA_SEGMENTS_OUT,
                _SEGMENTS_AGAIN,
                _BYTES_SENT,
                _BYTES_AGAIN,
                _BYTES_RECEIVED,
            )
        )
        moved = Moved(
            sent - sent_again,
            data_segments - segments_again,
            segments - data_segments,
            sent_again,
            segments_again,
            received,
        )
        found[peer] = found.get(peer, Moved()) + moved
    return found


def _connections() -> Iterator[tuple[str, socket.socket]]:
    for each in Path("/proc/self/fd").iterdir():
        try:
            if not os.readlink(each).startswith("socket:"):
                continue
            number = os.dup(int(each.name))
        except OSError:
            # closed meanwhile
            continue
        with socket.socket(fileno=number) as connection:
            if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
                continue
            try:
                host, port = connection.getpeername()[:2]
            except OSError:
                # listens, or has ended
                continue
            yield f"{host.removeprefix(MAPPED)}:{port}", connection


def interface_sent_bytes(name: str) -> int:
    """Bytes that an interface of this process's network namespace has sent, Ethernet headers included."""
    for line in Path("/proc/self/net/dev").read_text(encoding="utf-8").splitlines():
        found, _, counters = line.strip().partition(":")
        if found == name:
            return int(counters.split()[8])
    raise OSError(f"/proc/self/net/dev knows no interface named {name}")
