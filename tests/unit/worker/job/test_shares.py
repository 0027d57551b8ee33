"""What the workers of a replica push, and the settings under which they cannot."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from shardyard.config.settings import JobSettings
from shardyard.domain.errors import ConfigurationError
from shardyard_worker.job.prepare import _shares_of


def loop_of(between: str, **worker: Any) -> Any:
    given: dict[str, Any] = {"strategy": "tensor", "between": between, "workers_expected": 2}
    settings = SimpleNamespace(worker=SimpleNamespace(**{"exchange": "blocking", "cached_rows_bytes": 0, **worker}))
    return SimpleNamespace(session=SimpleNamespace(job_settings=JobSettings(**given), settings=settings))


def test_parts_that_are_not_pushed_have_no_shares() -> None:
    assert _shares_of(loop_of("all_reduce", exchange="delayed"), None, [], has_tables=True) is None


@pytest.mark.parametrize(
    "worker", [{"exchange": "delayed"}, {"exchange": "overlapped"}, {"cached_rows_bytes": 1 << 20}]
)
def test_workers_that_push_parts_refuse_what_needs_whole_gradients(worker: dict[str, Any]) -> None:
    (name,) = worker
    with pytest.raises(ConfigurationError, match=rf"worker\.{name} .*job\.between parameter_server"):
        _shares_of(loop_of("parameter_server", **worker), None, [], has_tables=True)


def test_rows_may_be_cached_where_there_are_none() -> None:
    found = _shares_of(loop_of("parameter_server", cached_rows_bytes=1 << 20), None, [], has_tables=False)
    assert found is not None
    assert found.count == 2
