"""The modules beside this file, and the yards of the integration tests, can be imported by tests under chaos."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.chaos.places import Place
from tests.support.yards import Script, preloaded_scripts


@pytest.fixture(scope="session")
def preloaded() -> Iterator[None]:
    with preloaded_scripts():
        Place.preloaded = Script.preloaded
        yield
        Place.preloaded = None
