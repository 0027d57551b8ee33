"""The table of all RPCs that the coordinator serves."""

from __future__ import annotations

from typing import Final

from shardyard.transport.interfaces import Service
from shardyard_coordinator.service.rpcs import checkpoints, data, inspection, jobs, members
from shardyard_coordinator.service.rpcs.rpc import Backend, Rpc

RPCS: Final[tuple[Rpc, ...]] = (*members.RPCS, *jobs.RPCS, *data.RPCS, *checkpoints.RPCS, *inspection.RPCS)


def make_service(backend: Backend) -> Service:
    service = Service("Coordinator")
    for rpc in RPCS:
        service.on(rpc.method, rpc.handler(backend))
    return service
