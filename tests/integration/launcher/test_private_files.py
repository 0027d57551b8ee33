"""What a yard writes: where, and that no other user of the machine can read it."""

from __future__ import annotations

import contextlib
import os
import stat
import threading
import time
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
    script, out = probes.start("count", "--epochs", "2", **settings)
    modes: dict[Path, int] = {}
    until = time.monotonic() + 90
    while script.process.poll() is None:  # the logs of a job are deleted when it ends
        assert time.monotonic() < until, script.output
        modes |= modes_below(yard.state, folder)
        time.sleep(0.05)
    finish(script, out)
    yard.ended()
    modes |= modes_below(yard.state, folder)
    assert any(path.name == "manifest.json" for path in modes), modes
    assert any("wal" in path.parts and path.suffix == ".log" for path in modes), modes
    assert {str(path): oct(mode) for path, mode in modes.items() if mode & 0o077} == {}


def modes_below(*tops: Path) -> dict[Path, int]:
    """The mode of each file and folder that is there. One that is deleted meanwhile is left out."""
    found = {}
    for folder, _, files in (each for top in tops for each in os.walk(top)):
        for path in (Path(folder), *(Path(folder, name) for name in files)):
            with contextlib.suppress(FileNotFoundError):
                found[path] = stat.S_IMODE(path.stat().st_mode)
    return found
