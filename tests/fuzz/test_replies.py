"""The reply to any request is lost, and the request is sent again (docs/reference/protocol.md, Retries)."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardyard.domain.consistency import UpdateMode
from shardyard.domain.errors import Internal, ShardyardError
from shardyard.runtime.failpoints import armed
from shardyard.transport.dispatch import REPLY, serve
from shardyard.transport.interfaces import Context
from tests.fuzz.worlds import AgentWorld, CoordinatorWorld, ServerWorld, World

WORLDS = {
    "server, asynchronous": lambda _: ServerWorld(UpdateMode.ASYNC),
    "server, synchronous": lambda _: ServerWorld(UpdateMode.SYNC),
    "server, tables": lambda _: ServerWorld(UpdateMode.ASYNC, tables=True),
    "server, synchronous tables": lambda _: ServerWorld(UpdateMode.SYNC, tables=True),
    "coordinator, asynchronous": lambda _: CoordinatorWorld(UpdateMode.ASYNC),
    "coordinator, synchronous": lambda _: CoordinatorWorld(UpdateMode.SYNC),
    "coordinator, replicas": lambda _: CoordinatorWorld(UpdateMode.SYNC, mirrored=True),
    "agent": AgentWorld,
}
ANOTHER_EACH_TIME = {"Register"}
"""Whose second time is another one: the former member expires. So is Launch, which a world's agent does not do."""


class Lost(OSError):
    """The reply has not gone out."""


def say(world: World, name: str, sent: tuple[bytes, ...]) -> ShardyardError | None:
    """What the call was refused by."""
    method, handler = next(each for each in world.service.handlers.items() if each[0].name == name)
    given = iter(sent) if method.streams_in else sent[0]
    try:
        list(serve(method, handler, given, Context(peer="ipv4:127.0.0.1:1", is_active=lambda: True), "1"))
    except ShardyardError as error:
        return error
    return None


@pytest.mark.parametrize("title", WORLDS)
def test_request_whose_reply_was_lost_has_its_effect_once_when_it_is_sent_again(title: str, tmp_path: Path) -> None:
    world = WORLDS[title](tmp_path)
    lost: list[str] = []

    def lose(place: str) -> None:
        lost.append(place)
        raise Lost(place)

    try:
        for name, calls in world.calls.items():
            for sent in calls:
                with armed(f"{REPLY}.{name.lower()}", lose):
                    first = say(world, name, sent)
                world.settle()
                once = world.state()
                assert isinstance(first, Internal) == bool(lost), (name, first)
                again = say(world, name, sent)
                world.settle()
                assert not isinstance(again, Internal), (name, again)
                if lost and name not in ANOTHER_EACH_TIME:
                    assert world.state() == once, f"{name} has another effect the second time"
                lost.clear()
    finally:
        world.close()


def test_each_method_of_each_service_has_its_reply_lost(tmp_path: Path) -> None:
    for title, make in WORLDS.items():
        world = make(tmp_path)
        try:
            assert {method.name for method in world.service.handlers} == world.calls.keys(), title
        finally:
            world.close()
