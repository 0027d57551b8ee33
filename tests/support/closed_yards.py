"""A yard of real processes with certificates, as `shardyard up` starts it, and a job in it."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from shardyard.config import configuration
from shardyard.domain import errors
from shardyard.security.authority import Authority, make_credentials
from shardyard.security.credentials import Credentials, write_credentials
from shardyard.security.identity import Role
from shardyard.transport.grpc_client import GrpcNetwork, GrpcPeer
from shardyard.wire.v1 import common_pb2 as common
from shardyard_launcher.yard.local_cluster import LocalCluster
from shardyard_worker.job import connect as worker


class Yard:
    def __init__(self, folder: Path) -> None:
        given = {"yard.servers": 1, "yard.workers": 1, "yard.coordinator_port": 0}
        self.folder = folder
        self.cluster = LocalCluster(configuration.load(None, {}, given).settings, folder, tied=True)
        self.cluster.start(stop=threading.Event())

    @property
    def server(self) -> str:
        return self.cluster.state.address_of("server")

    def network(self, role: Role, name: str) -> GrpcNetwork:
        folder = self.folder / "identity" / name
        authority = Authority(self.folder / "identity" / "authority")
        write_credentials(folder, make_credentials(authority, role, name, 3_600))
        return GrpcNetwork(Credentials(folder))

    def coordinator(self, network: GrpcNetwork) -> GrpcPeer:
        return network.connect(self.cluster.coordinator, name="coordinator", unavailable=errors.CoordinatorUnavailable)


class Job:
    """The job of ada, with 20 values. `check` says that nothing has touched it. `more`: settings of her worker."""

    def __init__(self, yard: Yard, more: Mapping[str, object] | None = None) -> None:
        settings = {"coordinator": yard.cluster.coordinator, "job.name": "ada", "log.level": "error", **(more or {})}
        loaded = configuration.load(None, {}, settings).settings
        self.network = yard.network(Role.WORKER, "ada")
        self.inner: Any = worker.connect(loaded, network=self.network)
        self.inner.register({"w": torch.arange(20.0)}, lr=0.5)
        self.values = self.inner.pull()["w"].clone()
        session = self.inner._session
        self.id, self.member = session.caller.job, session.caller.incarnation

    @property
    def caller(self) -> common.Caller:
        return common.Caller(job=self.id, incarnation=self.member)

    def check(self) -> None:
        assert torch.equal(self.inner.pull()["w"], self.values)

    def close(self) -> None:
        self.inner.close()
