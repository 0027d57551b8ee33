"""What constraints.txt and docker/requirements.txt pin, by themselves and compared with the code."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from shardyard.transport import TRIED_VERSIONS

ROOT = Path(__file__).resolve().parents[3]
CONSTRAINTS = ROOT / "constraints.txt"
PINNED = re.compile(r"^([A-Za-z0-9._-]+)==([^ \\\n]+)", re.MULTILINE)


def test_pinned_grpcio_is_one_whose_private_layer_was_tried() -> None:
    pinned = re.findall(r"^grpcio==(\d+)\.(\d+)\.\d+$", CONSTRAINTS.read_text(), re.MULTILINE)
    assert len(pinned) == 1, "constraints.txt pins grpcio once"
    assert tuple(map(int, pinned[0])) in TRIED_VERSIONS


def test_images_install_what_the_package_needs_by_version_and_hash() -> None:
    """`make lock` writes the file again."""
    text = (ROOT / "docker/requirements.txt").read_text()
    pinned = {canonicalize_name(name): version for name, version in PINNED.findall(text)}
    for each in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]:
        needed = Requirement(each)
        assert needed.specifier.contains(pinned[canonicalize_name(needed.name)]), each
    held = {canonicalize_name(name): version for name, version in PINNED.findall(CONSTRAINTS.read_text())}
    assert {name: version for name, version in pinned.items() if held.get(name, version) != version} == {}
    entries = re.split(r"\n(?=[A-Za-z0-9])", text)[1:]
    assert len(entries) == len(pinned)
    assert all("--hash=sha256:" in entry for entry in entries)
    assert "torch" not in pinned
