"""The simulated clock, threads, network and disk of a module's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.simulator.yard import simulation


@pytest.fixture(scope="module")
def simulated() -> Iterator[None]:
    with simulation():
        yield
