"""The table of all RPCs that the coordinator serves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NoReturn

from shardyard.domain.errors import NotReady
from shardyard.transport.interfaces import Service
from shardyard_coordinator.service.rpcs import checkpoints, data, identities, inspection, jobs, members, replicas
from shardyard_coordinator.service.rpcs.rpc import Backend, Rpc

RPCS: Final[tuple[Rpc, ...]] = (
    *identities.RPCS,
    *members.RPCS,
    *jobs.RPCS,
    *data.RPCS,
    *replicas.RPCS,
    *checkpoints.RPCS,
    *inspection.RPCS,
)


def make_waiting_service(why: Callable[[], str]) -> Service:
    """A coordinator that cannot decide anything yet: NotReady is its answer to every call."""

    def refuse(*_: object) -> NoReturn:
        raise NotReady(f"the coordinator cannot begin yet: {why()}", todo="see its log; it begins by itself")

    service = Service("Coordinator")
    for rpc in RPCS:
        service.on(rpc.method, refuse)
    return service


def make_service(backend: Backend) -> Service:
    service = Service("Coordinator")
    for rpc in RPCS:
        service.on(rpc.method, rpc.handler(backend))
    return service
