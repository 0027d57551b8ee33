"""How a call is served: what becomes of a handler whose answers nobody takes to their end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shardyard.domain.errors import Internal
from shardyard.runtime.failpoints import armed
from shardyard.transport.dispatch import REPLY, serve
from shardyard.transport.interfaces import Context
from shardyard.wire import methods
from shardyard.wire.v1 import agent_pb2 as wire


@pytest.mark.parametrize("how", ["caller leaves", "reply fails"])
def test_handler_that_streams_frees_what_it_holds_when_its_stream_breaks(how: str) -> None:
    """At once, while somebody still refers to the stream."""
    freed: list[str] = []

    def watch(request: wire.WatchRequest, context: Context) -> Iterator[wire.LaunchEvent]:
        try:
            while True:
                yield wire.LaunchEvent(number=request.launch)
        finally:
            freed.append("yes")

    context = Context(peer="in-process", is_active=lambda: True)
    answers = serve(methods.WATCH, watch, wire.WatchRequest(launch=7).SerializeToString(), context, "1")
    assert wire.LaunchEvent.FromString(next(answers)).number == 7
    assert freed == []
    if how == "caller leaves":
        answers.close()  # type: ignore[attr-defined]
    else:
        with armed(f"{REPLY}.watch", fail), pytest.raises(Internal) as raised:
            next(answers)
        assert raised.traceback
    assert freed == ["yes"]


def fail(place: str) -> None:
    raise OSError(place)
