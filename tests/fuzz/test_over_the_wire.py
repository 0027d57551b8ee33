"""A part of the fuzzer over TLS (tests/fuzz/over_the_wire.py has it whole)."""

from __future__ import annotations

import os
from pathlib import Path

import grpc
import pytest

from tests.fuzz import fuzzing
from tests.fuzz.over_the_wire import fuzz_over_the_wire

INPUTS = 3_000
SEED = int(os.environ.get("SHARDYARD_FUZZ_SEED", fuzzing.SEED))


def test_each_role_is_answered_with_a_status_whatever_it_sends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a URL for checkpoints that has changed may be a relative path
    found = fuzz_over_the_wire(INPUTS, seed=SEED, folder=tmp_path)
    print(found)
    assert found.total() >= INPUTS
    for status in (grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.PERMISSION_DENIED):
        assert found[status] > INPUTS / 50, found
    assert not found[grpc.StatusCode.UNAVAILABLE]
