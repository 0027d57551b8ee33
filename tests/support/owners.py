"""A yard of real processes, and members that belong to different owners."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch

from shardyard.config import configuration
from shardyard.security.authority import Authority, make_credentials
from shardyard.security.credentials import Credentials, write_credentials
from shardyard.security.identity import Role
from shardyard.transport.grpc_client import GrpcNetwork, GrpcPeer
from shardyard_launcher.yard.local_cluster import LocalCluster
from shardyard_worker.job import connect as worker


class OwnersYard:
    """`settings`: those that are not the default ones, by path."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        given = {"yard.servers": 1, "yard.workers": 1, "yard.coordinator_port": 0, **settings}
        self.folder = folder
        self.cluster = LocalCluster(configuration.load(None, {}, given).settings, folder, tied=True)
        self.cluster.start(stop=threading.Event())

    @property
    def coordinator(self) -> str:
        return self.cluster.coordinator

    def network(self, role: Role, owner: str) -> GrpcNetwork:
        folder = self.folder / "identity" / f"{role.value}-of-{owner}"
        authority = Authority(self.folder / "identity" / "authority")
        write_credentials(folder, make_credentials(authority, role, role.value, 3_600, owner))
        return GrpcNetwork(Credentials(folder))

    def operator(self, owner: str) -> GrpcPeer:
        return self.network(Role.OPERATOR, owner).connect(self.coordinator, name="coordinator")

    def join(self, owner: str, name: str, values: int = 20, **settings: Any) -> Any:
        """A worker of that owner, in a job with a variable w of so many values."""
        given = {"coordinator": self.coordinator, "job.name": name, "log.level": "error", **settings}
        loaded = configuration.load(None, {}, given).settings
        job = worker.connect(loaded, network=self.network(Role.WORKER, owner))
        try:
            job.register({"w": torch.arange(float(values))}, lr=0.5)
        except BaseException:
            job.close()
            raise
        return job
