"""The simulated clock, threads, network and disk of a module's tests."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.simulator.parallel import Run, run_seeds
from tests.simulator.yard import run_seed, simulation


@pytest.fixture(scope="module")
def simulated() -> Iterator[None]:
    with simulation():
        yield


@pytest.fixture
def run(request: pytest.FixtureRequest) -> Run:
    """Gives the result of each seed. Where tests run side by side, in this process: another one needs 6 s of processor
    time before its first seed. Otherwise in a process for each core."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return run_seeds
    request.getfixturevalue("simulated")

    def here(seeds: Sequence[int], *, kind: str = "") -> Iterator[dict[str, Any]]:
        return (run_seed(seed, kind) for seed in seeds)

    return here
