"""A reader's patience with its coordinator."""

from __future__ import annotations

import time

import pytest

from shardyard.domain import errors
from shardyard.domain.ids import JobId
from shardyard.transport.in_process import InProcessNetwork
from shardyard.transport.interfaces import Context, Service
from shardyard.wire import methods
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_worker.reader import reader_session
from shardyard_worker.reader.reader_session import ReaderSession
from tests.support.waiting import wait_until

GRACE_MS = 100


def test_a_coordinator_that_is_not_ready_for_longer_than_the_grace_time_is_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reader_session, "ASK_MS", 2)
    asked: list[float] = []
    full = True

    def follow(_request: wire.FollowJobRequest, _: Context) -> wire.FollowJobReply:
        asked.append(time.monotonic())
        if full and len(asked) > 1:
            raise errors.NotReady("the disk of the journal is full")
        return wire.FollowJobReply(job=7, job_name="digits", state=wire.JOB_STATE_RUNNING)

    service, network = Service("Coordinator"), InProcessNetwork()
    service.on(methods.FOLLOW_JOB, follow)
    network.listen("coordinator:1", [service])
    session = ReaderSession(network, "coordinator:1", job=JobId(7), name="digits", grace_ms=GRACE_MS)
    try:
        session.begin()
        wait_until(lambda: asked[-1] - asked[0] > 3 * GRACE_MS / 1_000, "the grace time to pass")
        full = False
        answered = len(asked) + 2
        wait_until(lambda: len(asked) >= answered, "an answer")
        assert session.news.state == wire.JOB_STATE_RUNNING
    finally:
        session.close()
