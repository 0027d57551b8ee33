"""What the strategies would take, and which one is chosen."""

from __future__ import annotations

import doctest
from types import ModuleType

import pytest

from shardyard.config.settings import ClipSettings, JobSettings
from shardyard.domain.replica_groups import Strategy
from shardyard_worker.planning import costs, dry_run
from shardyard_worker.planning.costs import choose, costs_of
from shardyard_worker.planning.dry_run import PlannedModel, PlannedTable

USERS = PlannedTable("users", 8, 32)


def model_of(parameters: int, *tables: PlannedTable, state: int = 0, norm: float = 0.0) -> PlannedModel:
    settings = JobSettings(clip=ClipSettings(norm=norm))
    return PlannedModel(settings, "adam", parameters // 4, parameters, state, 0, 0, tables)


@pytest.mark.parametrize(
    ("model", "workers", "memory", "strategy"),
    [
        (model_of(4_000), 4, 1 << 30, Strategy.MULTI_WORKER_MIRRORED),
        (model_of(4_000), 1, 1 << 30, Strategy.PARAMETER_SERVER),
        (model_of(4_000, state=1 << 30), 4, 1 << 30, Strategy.PARAMETER_SERVER),
        (model_of(4_000, USERS), 4, 1 << 30, Strategy.MULTI_WORKER_MIRRORED),
        (model_of(4_000, USERS, norm=1.0), 4, 1 << 30, Strategy.PARAMETER_SERVER),
    ],
    ids=["alike", "one worker", "too large a state", "tables", "tables whose norm is clipped"],
)
def test_the_choice_says_why(model: PlannedModel, workers: int, memory: int, strategy: Strategy) -> None:
    chosen = choose(costs_of(model, workers, servers=2), workers, memory)
    assert chosen.strategy is strategy
    assert chosen.why


def test_more_servers_share_what_a_step_moves() -> None:
    few, many = (costs_of(model_of(4_000), workers=8, servers=servers)[0].busiest for servers in (1, 4))
    assert few == 4 * many == 8 * 2 * 4_000


@pytest.mark.parametrize("module", [costs, dry_run], ids=lambda module: module.__name__)
def test_examples_print_what_they_show(module: ModuleType) -> None:
    found = doctest.testmod(module, extraglobs={"JobSettings": JobSettings, "PlannedModel": PlannedModel})
    assert found.attempted
    assert not found.failed
