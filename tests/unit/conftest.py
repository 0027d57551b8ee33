"""What tests of several machines share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shardyard.runtime import waits


@pytest.fixture(scope="module", autouse=True)
def short_lives_of_wait_registries() -> Iterator[None]:
    """The thread of a registry of waits ends after two looks without a wait, and hundreds of tests would be kept for
    that. The simulator's time is not touched."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(waits, "_CHECK_MS", 20)
        yield


@pytest.fixture(params=[False, True], ids=["from-all-records", "from-the-snapshot"])
def short(request: pytest.FixtureRequest) -> bool:
    """Whether a coordinator that is restarted reads the snapshot of its journal, and not all that was written."""
    return bool(request.param)
