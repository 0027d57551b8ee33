"""What each of several members answers to one question. A member that does not answer is part of the answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeVar

from shardyard.domain.errors import ShardyardError
from shardyard.domain.ids import Incarnation
from shardyard.runtime.waits import WaitRegistry
from shardyard.transport.interfaces import Network
from shardyard.wire.method import Method
from shardyard.wire.v1 import coordinator_pb2 as wire

TIMEOUT_MS: Final = 1_500

Sent = TypeVar("Sent")
Answered = TypeVar("Answered")


def describe_members(
    network: Network, members: Sequence[wire.MemberStatus], role: str, method: Method[Sent, Answered], request: Sent
) -> dict[int, Answered | ShardyardError]:
    """How members of a role describe themselves, or why one does not answer, by incarnation."""
    found: dict[int, Answered | ShardyardError] = {}
    wait_registry = WaitRegistry()
    try:
        with wait_registry.over(
            lambda: f"{len(members) - len(found)} of {len(members)} {role}s to describe themselves"
        ):
            for member in members:
                peer = network.connect(member.address, name=f"{role} {Incarnation(member.incarnation)}")
                try:
                    found[member.incarnation] = peer.call(method, request, timeout_ms=TIMEOUT_MS)
                except ShardyardError as error:
                    found[member.incarnation] = error
                finally:
                    peer.close()
    finally:
        wait_registry.close()
    return found
