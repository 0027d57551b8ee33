"""Asks for checkpoints of running jobs, until each is written or has failed.

Must not know: command lines, why a checkpoint is taken, who waits how long.
"""

from __future__ import annotations

import time

from shardyard.runtime.waits import ExplainedWait
from shardyard.transport.error_codes import from_detail
from shardyard.wire import methods
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_launcher.terminal.coordinator_client import ASK_AGAIN_S, CoordinatorClient


class WantedCheckpoint:
    """A checkpoint of one job that begins after the first `ask`. `job_name`: empty for the only job that runs."""

    def __init__(self, client: CoordinatorClient, job_name: str) -> None:
        self._client = client
        self._request = wire.TakeCheckpointRequest(job_name=job_name)

    @property
    def job_name(self) -> str:
        return self._request.job_name

    def ask(self) -> wire.TakeCheckpointReply:
        """Asks what became of it. Raises why it was not taken, and CoordinatorUnavailable."""
        reply = self._client.call(methods.TAKE_CHECKPOINT, self._request, "to take a checkpoint")
        if reply.HasField("failure"):
            raise from_detail(reply.failure)
        self._request.job_name, self._request.ticket = reply.job_name, reply.ticket
        return reply


def take_checkpoint(client: CoordinatorClient, job_name: str) -> wire.TakeCheckpointReply:
    """Takes a checkpoint, and waits until it is written. Raises why it was not taken, and CoordinatorUnavailable."""
    wanted = WantedCheckpoint(client, job_name)
    with ExplainedWait(lambda: "the checkpoint") as wait:
        while not (reply := wanted.ask()).done:
            wait.tick()
            time.sleep(ASK_AGAIN_S)
    return reply
