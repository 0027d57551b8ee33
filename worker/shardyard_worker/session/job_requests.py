"""What a script asks of the coordinator for the whole job: a checkpoint, or the end. Must not know: steps, pushes."""

from __future__ import annotations

import time
from typing import Final

from shardyard.transport.error_codes import from_detail
from shardyard.wire import common_messages, lease_messages, methods
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_worker.session.session import CheckpointTaken, Session

ASK_AGAIN_MS: Final = 100
"""The pause between two calls that ask whether a checkpoint is committed."""


def take_checkpoint(session: Session) -> int:
    """Waits until a checkpoint that begins after now is committed. Returns its number, or raises its error."""
    session.learn()  # the checkpoint's step is the one that workers have reported
    request = wire.TakeCheckpointRequest(caller=common_messages.caller_to_wire(session.caller))
    with session.wait_registry.over(lambda: "a checkpoint of the job to be committed"):
        while True:
            reply = session.ask(methods.TAKE_CHECKPOINT, request)
            if reply.done:
                session.checkpoint = CheckpointTaken(reply.number, reply.step)
                return reply.number
            if reply.HasField("failure"):
                raise from_detail(reply.failure)
            request.ticket = reply.ticket
            time.sleep(ASK_AGAIN_MS / 1000)


def stop_job(session: Session, reason: str) -> None:
    """Stops the job before its data ends, unless it was already told to stop."""
    request = wire.StopJobRequest(caller=common_messages.caller_to_wire(session.caller), reason=reason)
    session.step_barrier.take_stop(lease_messages.stop_from_wire(session.ask(methods.STOP_JOB, request).stop))
    if session.step_barrier.stop_report is not None:
        session.refresh()  # otherwise the others would wait for this worker's next heartbeat
