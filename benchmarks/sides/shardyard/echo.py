"""Sends back what it gets: over a stream of gRPC as Shardyard uses it, and over a plain socket."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

from harness.processes.answers import Conversation
from harness.workloads.echoes import ECHO, HEAD_BYTES, SERVICE, sizes_in
from shardyard.runtime.malloc import tune_malloc
from shardyard.transport.grpc_server import GrpcServer
from shardyard.transport.interfaces import Context, Service


def answer(messages: Iterator[bytes], _: Context) -> Iterator[bytes | None]:
    """The first message says how many there are."""
    while True:
        yield None
        first = next(messages, None)
        if first is None:
            return
        count, _ = sizes_in(first)
        yield from [first, *(next(messages) for _ in range(count - 1))]


def serve(listener: socket.socket) -> None:
    """Reads all bytes of a message into one buffer before it sends them back."""
    connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    buffer = bytearray()
    with suppress(ConnectionError):
        while True:
            head = connection.recv(HEAD_BYTES, socket.MSG_WAITALL | socket.MSG_PEEK)
            if len(head) < HEAD_BYTES:
                return
            count, nbytes = sizes_in(head)
            if len(buffer) != count * nbytes:
                buffer = bytearray(count * nbytes)
            at = 0
            while at < len(buffer):
                at += connection.recv_into(memoryview(buffer)[at:])
            connection.sendall(buffer)


def main() -> None:
    conversation = Conversation()
    tune_malloc()
    service = Service(SERVICE)
    service.on(ECHO, answer)
    server = GrpcServer("127.0.0.1:0", [service], None)
    server.start()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        port = listener.getsockname()[1]
        conversation.answer({"addresses": lambda: {"grpc": server.address, "socket": port}})
    server.stop()


if __name__ == "__main__":
    main()
