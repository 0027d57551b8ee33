"""What a yard writes, no other user of the machine can read."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from tests.support.yards import Probes, RoleYard, finish


@pytest.fixture(autouse=True)
def _usual_umask() -> object:
    former = os.umask(0o022)
    yield
    os.umask(former)


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
