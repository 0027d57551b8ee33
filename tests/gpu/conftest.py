"""For a machine with a GPU: without one these tests fail, so that nobody takes a skipped run for a passed one."""

from __future__ import annotations

import os

import pytest
import torch


@pytest.fixture(autouse=True)
def cuda(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    assert torch.cuda.is_available(), "torch sees no CUDA device here; `make test` has the tests that need none"
    for name in os.environ:
        if name.startswith("SHARDYARD"):
            monkeypatch.delenv(name)
    return torch.device("cuda", 0)
