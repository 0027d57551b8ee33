"""Which device a training process uses."""

from __future__ import annotations

import pytest
import torch

from shardyard.domain.errors import ConfigurationError
from shardyard_worker.session.devices import pick_device


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("cuda:1 cuda:0", ["cuda:1", "cuda:0", "cuda:1"]),
        ("cpu cuda", ["cpu", "cuda:1", "cpu"]),
        ("auto", ["cuda:0", "cuda:1", "cuda:0"]),
    ],
)
def test_processes_take_the_devices_in_turn(two_gpus: None, wanted: str, found: list[str]) -> None:
    assert [str(pick_device(wanted, index)) for index in range(3)] == found


def test_a_device_that_is_not_there_is_an_error(two_gpus: None) -> None:
    assert str(pick_device("cuda:0 cuda:2", 0)) == "cuda:0"
    with pytest.raises(ConfigurationError, match=r"cuda:2.*2 CUDA devices"):
        pick_device("cuda:0 cuda:2", 1)
