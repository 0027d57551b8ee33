"""The variables in one worker, and the optimizer that updates them."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

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


@pytest.mark.parametrize("where", ["before", "after", "of all", "by the profiler", "scheduled", "not at all"])
def test_steps_of_a_replica_are_seen_as_those_of_plain_torch(where: str) -> None:
    model, seen = torch.nn.Linear(2, 1), list[object]()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    replica = Replica(parameters_of(model, optimizer, {}), [], optimizer, translate(optimizer))
    with contextlib.ExitStack() as until_end:
        match where:
            case "before":
                optimizer.register_step_pre_hook(lambda *given: seen.append(given))
            case "after":
                optimizer.register_step_post_hook(lambda *given: seen.append(given))
            case "of all":
                hook = register_optimizer_step_post_hook(lambda *given: seen.append(given))
                until_end.callback(hook.remove)
            case "by the profiler":
                profile = until_end.enter_context(torch.profiler.profile())
            case "scheduled":
                torch.optim.lr_scheduler.StepLR(optimizer, 1)
        before = model.bias.detach().clone()
        replica.step([torch.ones(1, 2), torch.ones(1)])
    assert float(before - model.bias.detach()) == pytest.approx(1.0)
    if where == "by the profiler":
        seen += [each for each in profile.key_averages() if each.key == "Optimizer.step#SGD.step"]
    if where == "scheduled":
        seen += [1] * optimizer._opt_called  # type: ignore[attr-defined]
    assert len(seen) == (where != "not at all")
