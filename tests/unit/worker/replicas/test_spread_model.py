"""What malloc keeps while a model that is spread over workers trains, and when the script gets the whole model back."""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar

import pytest
import torch

from shardyard.domain.epochs import EpochPlan
from shardyard.domain.replica_groups import Strategy
from shardyard.runtime.malloc import Kept
from shardyard_worker.pipeline.pipeline import Pipeline
from shardyard_worker.replicas import spread_model
from shardyard_worker.replicas.spread_model import SpreadModel
from shardyard_worker.sharding.sharded_model import ShardedModel


class NoModel(SpreadModel):
    """Without any variables."""

    gradients: ClassVar[list[torch.Tensor | None]] = []
    fingerprint = ""
    _unused: ClassVar[Collection[int]] = ()

    def drop_gradients(self) -> None: ...

    def check_batches(self, plan: EpochPlan) -> None: ...


class Stages(NoModel):
    kept = Pipeline.kept


class Shards(NoModel):
    kept = ShardedModel.kept


@pytest.mark.parametrize(("kind", "while_it_trains"), [(Stages, Kept.MESSAGES), (Shards, Kept.LITTLE)])
def test_memory_of_steps_stays_mapped_until_the_whole_model_comes(
    kind: type[NoModel], while_it_trains: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned: list[Kept] = []
    monkeypatch.setattr(spread_model, "tune_malloc", tuned.append)
    model = kind([], [], Strategy.PIPELINE, lambda output, target: output - target)
    for _ in range(2):  # steps
        model.free()
    with model.whole():
        pass
    model.free()
    assert tuned == [while_it_trains, Kept.LITTLE, while_it_trains]
