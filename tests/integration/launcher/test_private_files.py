"""What a yard writes: where, and that no other user of the machine can read it."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardyard.config import configuration
from shardyard_launcher.yard.local_cluster import LocalCluster
from tests.support.yards import Probes, RoleYard, finish


@pytest.fixture(autouse=True)
def _usual_umask() -> Iterator[None]:
    former = os.umask(0o022)
    yield
    os.umask(former)


def test_checkpoints_of_jobs_that_name_no_place_are_allowed_to_servers_that_are_launched(
    probes: Probes, tmp_path: Path
) -> None:
    folder = tmp_path / "a state"
    given = {"yard.servers": 1, "yard.coordinator_port": 0, "storage.allowed": str(tmp_path / "allowed")}
    cluster = LocalCluster(configuration.load(None, {}, given).settings, folder, tied=True)
    try:
        cluster.start(stop=threading.Event())
        finish(*probes.start("count", "--epochs", "1", coordinator=cluster.coordinator))
        assert list(folder.rglob("checkpoints/*/*")), "at least one checkpoint"
    finally:
        cluster.stop()


def test_files_of_a_yard_are_this_users_alone(yard: RoleYard, probes: Probes, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    settings = {"coordinator": yard.address, "job__checkpoint__url": str(folder), "job__durability": "wal"}
    finish(*probes.start("count", "--epochs", "2", **settings))
    yard.ended()
    found = [path for top in (yard.state, folder) for path in (top, *top.rglob("*"))]
    assert any(path.name == "manifest.json" or path.suffix == ".json" for path in found), found
    assert any("wal" in path.parts for path in found), found
    modes = {str(path): stat.S_IMODE(path.stat().st_mode) for path in found}
    assert {path: oct(mode) for path, mode in modes.items() if mode & 0o077} == {}
