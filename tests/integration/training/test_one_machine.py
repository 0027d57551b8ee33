"""Strategies of one machine, with a coordinator, servers and workers in one process."""

from __future__ import annotations

import pytest

from tests.support.mirrored import MIRRORED, SERVERS, Losses, losses_of, ranks


def test_steps_are_those_of_parameter_servers(alone: None) -> None:
    """Promise 6: the bits do not depend on how many servers there are."""
    given = {**SERVERS, **ranks(2), "yard.servers": 2}
    central = {**given, "job.strategy": "central_storage"}
    assert losses_of(central, 2, Losses()) == losses_of(given, 2, Losses())


def test_replicas_on_the_devices_of_one_machine(alone: None) -> None:
    devices = {"job.strategy": "mirrored", "worker.device": "cpu cpu"}
    wanted = losses_of({**SERVERS, **ranks(2)}, 2, Losses())
    assert losses_of({**MIRRORED, **ranks(2), **devices}, 2, Losses()) == pytest.approx(wanted, rel=1e-9)
