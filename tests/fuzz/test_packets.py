"""Local sockets whose callers send packets that are nearly right: each connection ends, others go on, nothing is left.

The messages are those of the fuzzer's worlds, some of them mutated. They are cut into packets, and then packets are
changed, dropped, repeated and interleaved with descriptors. Whatever comes, the server ends the connection when its
caller has ended it, logs no defect, and answers the next caller.
"""

from __future__ import annotations

import array
import logging
import os
import socket
import threading
from collections.abc import Iterator
from random import Random

import pytest

from shardyard.domain.consistency import UpdateMode
from shardyard.transport.local_listener import LocalListener
from shardyard.transport.local_socket import DESCRIPTORS_MAX, PACKET_BYTES
from shardyard.wire import methods
from tests.fuzz import fuzzing, mutations
from tests.fuzz.worlds import ServerWorld, _Noise
from tests.support.waiting import wait_until

SEED = int(os.environ.get("SHARDYARD_FUZZ_SEED", fuzzing.SEED))
CONNECTIONS = 400
ENDS_WITHIN_S = 20.0
KINDS = (b"m", b"p", b"e", b"d", b"", b"\0", b"\xff")
Packet = tuple[bytes, int]
"""Its bytes, and how many descriptors come with it."""


@pytest.fixture(params=[UpdateMode.ASYNC, UpdateMode.SYNC])
def world(request: pytest.FixtureRequest) -> Iterator[ServerWorld]:
    made = ServerWorld(request.param, tables=True)
    yield made
    made.close()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def packets(dice: Random, messages: list[bytes], others: list[bytes]) -> list[Packet]:
    """A hello, and these messages in packets, some of them spoilt."""
    made: list[Packet] = [(b"m" + b"1", 0)]
    for message in messages:
        sent = mutations.mutate(dice, message, others) if dice.random() < 0.3 else message
        each = dice.choice([PACKET_BYTES, PACKET_BYTES, 1 + len(sent) // 2, 7])
        if len(sent) > 100 * each:
            each = PACKET_BYTES
        cut = [sent[at : at + each] for at in range(0, len(sent), each)] or [b""]
        made += [((b"p" if at < len(cut) - 1 else b"m") + piece, 0) for at, piece in enumerate(cut)]
    for _ in range(dice.choice([0, 0, 1, 3])):
        at = dice.randrange(len(made))
        whole, many = made[at]
        match dice.randrange(7):
            case 0:
                made[at] = dice.choice(KINDS) + whole[1:], many
            case 1:
                made[at] = whole[: dice.randrange(len(whole) + 1)], many
            case 2:
                made.insert(at, made[dice.randrange(len(made))])
            case 3:
                del made[at]
            case 4:
                made[at] = whole + bytes(dice.choice([1, 100, PACKET_BYTES])), many
            case 5:
                made[at] = whole, dice.choice([1, 2, DESCRIPTORS_MAX, DESCRIPTORS_MAX + 1])
            case _:
                made = made[:at]
        if not made:
            break
    return made


def connect(address: str) -> socket.socket:
    caller = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    caller.settimeout(ENDS_WITHIN_S)
    caller.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    caller.connect("\0" + address[1:])
    return caller


def send(caller: socket.socket, packet: Packet) -> bool:
    """Returns False once the server has ended the connection, or the kernel refuses the packet."""
    data, many = packet
    ancillary = []
    if many:
        null = os.open(os.devnull, os.O_RDONLY)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [null] * many))]
    try:
        caller.sendmsg([data], ancillary)
    except OSError:
        return False
    finally:
        if many:
            os.close(null)
    return True


def answers(caller: socket.socket) -> bytes:
    """The kinds of all packets until the server has ended the connection. Raises TimeoutError if it does not."""
    kinds = b""
    try:
        while True:
            data, ancillary, _, _ = caller.recvmsg(1 << 20, socket.CMSG_SPACE(4 * DESCRIPTORS_MAX))
            for _, _, raw in ancillary:
                for number in array.array("i", raw[: len(raw) - len(raw) % 4]):
                    os.close(number)
            if not data:
                return kinds
            kinds += data[:1]
    except ConnectionResetError:
        return kinds


def test_packets_that_are_nearly_right_harm_nobody(world: ServerWorld) -> None:
    print(f"seed {SEED}")
    dice, noise = Random(f"{SEED} {world.mode}"), _Noise()
    (handler,) = [each for method, each in world.service.handlers.items() if method is methods.PUSH_PULL]
    streams = world.calls["PushPull"]
    others = [message for stream in streams for message in stream]
    threads, fds = threading.active_count(), descriptors()
    logging.getLogger("shardyard.serving").addHandler(noise)
    listener = LocalListener(methods.PUSH_PULL, handler, connections_max=4)
    listener.start()
    answered = 0
    try:
        for number in range(CONNECTIONS):
            caller = connect(listener.address)
            sent = packets(dice, list(dice.choice(streams)), others)
            if all(send(caller, packet) for packet in sent) and dice.random() < 0.9:
                caller.shutdown(socket.SHUT_WR)
                answered += answers(caller).count(b"m")
            caller.close()
            if number % 20 == 0:
                # some of those before may still be served, and only so many are at a time
                wait_until(lambda: threading.active_count() <= threads + 1)
                good = connect(listener.address)
                assert all(send(good, packet) for packet in ((b"m1", 0), (b"m" + streams[0][0], 0)))
                good.shutdown(socket.SHUT_WR)
                assert answers(good)[-1:] in (b"d", b"e"), "its stream was not ended in order"
                good.close()
            if number % 50 == 0:
                world.settle()
        wait_until(lambda: threading.active_count() <= threads + 1)
    finally:
        listener.stop()
        logging.getLogger("shardyard.serving").removeHandler(noise)
    assert not noise.records, noise.records[:3]
    assert answered > CONNECTIONS / 10, "packets are too wrong to find anything"
    assert threading.active_count() <= threads
    assert descriptors() <= fds
