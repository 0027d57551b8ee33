"""What constraints.txt pins agrees with what the code was tried with."""

from __future__ import annotations

import re
from pathlib import Path

from shardyard.transport import TRIED_VERSIONS

CONSTRAINTS = Path(__file__).resolve().parents[3] / "constraints.txt"


def test_pinned_grpcio_is_one_whose_private_layer_was_tried() -> None:
    pinned = re.findall(r"^grpcio==(\d+)\.(\d+)\.\d+$", CONSTRAINTS.read_text(), re.MULTILINE)
    assert len(pinned) == 1, "constraints.txt pins grpcio once"
    assert tuple(map(int, pinned[0])) in TRIED_VERSIONS
