"""What tests of several machines share."""

from __future__ import annotations

import pytest


@pytest.fixture(params=[False, True], ids=["from-all-records", "from-the-snapshot"])
def short(request: pytest.FixtureRequest) -> bool:
    """Whether a coordinator that is restarted reads the snapshot of its journal, and not all that was written."""
    return bool(request.param)
