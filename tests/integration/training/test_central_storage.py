"""job.strategy central_storage, with a coordinator, servers and workers in one process."""

from __future__ import annotations

from tests.integration.training.test_mirrored import SERVERS, Losses, losses_of, ranks


def test_steps_are_those_of_parameter_servers(alone: None) -> None:
    """Promise 6: the bits do not depend on how many servers there are."""
    given = {**SERVERS, **ranks(2), "yard.servers": 2}
    central = {**given, "job.strategy": "central_storage"}
    assert losses_of(central, 2, Losses()) == losses_of(given, 2, Losses())
