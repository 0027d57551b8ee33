"""Waiting before a step until it is decided whether the job takes it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from shardyard.domain.consistency import SwitchPoint
from shardyard.runtime.waits import WaitRegistry
from shardyard_worker.consistency.step_permit import await_last_step
from shardyard_worker.exchange.fan_out import MapChanged
from shardyard_worker.session.step_barrier import StepBarrier


class Trainer:
    """`news`: the switch point, and whether there is a newer map, after each pause."""

    def __init__(self, *news: tuple[SwitchPoint | None, bool]) -> None:
        self.barrier, self.news = StepBarrier(), list(news)
        self.is_behind = False
        self.session = SimpleNamespace(
            step_barrier=self.barrier,
            wait_registry=WaitRegistry(),
            refresh=lambda: None,
            drain=SimpleNamespace(check=lambda: None),
        )
        self.router = SimpleNamespace(pause=self.take)

    def take(self, _: int = 0) -> None:
        point, self.is_behind = self.news.pop(0)
        self.barrier.take_switch_point(point)


def permitted(trainer: Any, step: int) -> bool:
    return await_last_step(trainer, step, lambda: None)


def test_step_before_the_fixed_one_is_taken_after_the_wait() -> None:
    trainer = Trainer((SwitchPoint(1), False), (SwitchPoint(1, True, 7), False))
    trainer.take()
    assert permitted(trainer, 6)


def test_step_is_taken_when_the_switch_is_cancelled() -> None:
    trainer = Trainer((SwitchPoint(1, True, 7), False), (None, False))
    trainer.take()
    assert permitted(trainer, 7)


def test_step_is_not_taken_under_the_former_map_when_the_switch_is_over() -> None:
    """Both may be learned in one heartbeat, while this thread pauses."""
    trainer = Trainer((SwitchPoint(1, True, 7), False), (None, True))
    trainer.take()
    with pytest.raises(MapChanged):
        permitted(trainer, 7)
