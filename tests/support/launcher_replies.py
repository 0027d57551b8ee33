"""What a coordinator says to the launcher's commands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from shardyard.transport.grpc_server import GrpcServer
from shardyard.transport.interfaces import Context, Service
from shardyard.wire.v1 import common_pb2 as common
from shardyard.wire.v1 import coordinator_pb2 as wire

BOUNDED: Final = wire.Consistency(number=2, mode=wire.CONSISTENCY_MODE_BOUNDED, staleness=3)


@contextmanager
def serving(handlers: dict[Any, Callable[[Any, Context], Any]]) -> Iterator[str]:
    """The address of a coordinator that has only these methods."""
    service = Service("Coordinator")
    for method, handler in handlers.items():
        service.on(method, handler)
    listener = GrpcServer("127.0.0.1:0", [service], None, threads=1)
    listener.start()
    try:
        yield listener.address
    finally:
        listener.stop()


def yard_status(state: wire.JobState = wire.JOB_STATE_RUNNING) -> wire.StatusReply:
    return wire.StatusReply(
        term=1,
        uptime_ms=61_000,
        members=[
            wire.MemberStatus(incarnation=1, role=wire.ROLE_SERVER, address="h:1", pid=1, host="h"),
            wire.MemberStatus(incarnation=2, role=wire.ROLE_AGENT, address="h:2", pid=2, host="h"),
            wire.MemberStatus(incarnation=3, role=wire.ROLE_WORKER, pid=3, job=8, step=7, ranks=[0], host="h"),
            wire.MemberStatus(incarnation=4, role=wire.ROLE_WORKER, pid=4, job=9, waiting_for="server 1", host="h"),
        ],
        jobs=[
            wire.JobStatus(job=8, name="other", state=wire.JOB_STATE_RUNNING),
            wire.JobStatus(
                job=9,
                name="mine",
                state=state,
                mode=common.UPDATE_MODE_SYNC,
                logical_ranks=2,
                workers=1,
                step=1200,
                samples=15360,
                samples_per_s=811.6,
                metrics=[wire.Metric(name="loss", value=0.123456)],
                map=common.PartitionMap(
                    generation=1,
                    owners=[
                        common.PartitionOwner(partition=0, server=1, address="h:1"),
                        common.PartitionOwner(partition=1, server=1, address="h:1"),
                    ],
                ),
                feeds=[wire.FeedStatus(feed=0, samples=1797, epochs=2, done=3)],
            ),
        ],
    )
