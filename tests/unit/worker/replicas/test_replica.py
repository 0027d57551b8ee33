"""The variables in one worker, and the optimizer that updates them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardyard_worker.optimizers.server_optimizer import translate
from shardyard_worker.replicas.replica import Replica
from shardyard_worker.training.model_variables import parameters_of


@pytest.mark.parametrize(
    ("given", "fused"), [({}, True), ({"fused": False}, False), ({"foreach": True}, None), ({"fused": True}, True)]
)
def test_update_of_adam_is_fused_unless_the_script_chooses(given: dict[str, Any], fused: bool | None) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), **given)
    replica = Replica(parameters_of(model, optimizer, {}), [], optimizer, translate(optimizer))
    assert optimizer.param_groups[0]["fused"] is given.get("fused"), "servers may have the variables"
    replica.step([torch.ones(1, 2), torch.ones(1)])
    assert optimizer.param_groups[0]["fused"] is fused
