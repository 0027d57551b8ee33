"""What the strategies would take, and which one is chosen."""

from __future__ import annotations

import doctest
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from shardyard.config.settings import ClipSettings, JobSettings, ShardedSettings
from shardyard.domain.replica_groups import Between, Strategy
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


def test_a_worker_takes_its_part_of_everything_and_the_whole_model_when_the_data_ends() -> None:
    by_strategy = {cost.strategy: cost for cost in costs_of(model_of(4_000, state=8_000), workers=4, servers=1)}
    assert by_strategy[Strategy.SHARDED].worker == 4_000 + (4_000 + 8_000) // 4
    assert by_strategy[Strategy.PIPELINE].worker == 4_000 + 8_000 // 4
    half = replace(model_of(4_000, state=8_000), cut=2_000)
    assert costs_of(half, workers=4, servers=1)[-1].worker == (4_000 + 4_000 + 8_000) * 5 // 8
    by_strategy = {cost.strategy: cost for cost in costs_of(model_of(4_000, state=8_000), workers=1, servers=1)}
    assert by_strategy[Strategy.PIPELINE].worker == 4 * 4_000, "while it trains"


def test_replicas_side_by_side_are_as_large_as_the_settings_say() -> None:
    """Four workers in two replicas, which add up their gradients in memory of their own."""
    for strategy, settings in (
        (Strategy.PIPELINE, JobSettings(strategy=Strategy.PIPELINE)),
        (Strategy.SHARDED, JobSettings(strategy=Strategy.SHARDED, sharded=ShardedSettings(size=2))),
        (Strategy.TENSOR, JobSettings(strategy=Strategy.TENSOR)),
    ):
        model = replace(model_of(4_000, state=8_000), cut=4_000, settings=settings)
        by_workers = (costs_of(model, workers, servers=1) for workers in (2, 4))
        one, two = (next(each for each in found if each.strategy is strategy) for found in by_workers)
        assert two.worker == one.worker + 4_000 // 2, strategy
        if strategy is Strategy.SHARDED:
            assert (one.busiest, two.busiest) == (6 * 4_000 // 2, 6 * 4_000 // 2 + 4 * 2_000 // 2)


def test_workers_that_push_their_stages_have_no_optimizer_state() -> None:
    settings = JobSettings(strategy=Strategy.PIPELINE, between=Between.PARAMETER_SERVER, workers_expected=4)
    model = replace(model_of(4_000, state=8_000), settings=settings)
    cost = next(each for each in costs_of(model, workers=4, servers=1) if each.strategy is Strategy.PIPELINE)
    assert (cost.worker, cost.servers) == (2 * 4_000, 3 * 4_000 + 8_000 + 2 * 4_000)


def test_workers_that_push_shares_have_no_optimizer_state() -> None:
    model = replace(model_of(40_000, state=80_000), cut=40_000)
    for strategy, size in ((Strategy.SHARDED, {"sharded": {"size": 4}}), (Strategy.TENSOR, {"tensor": {"size": 4}})):
        pushes = JobSettings(strategy=strategy, between=Between.PARAMETER_SERVER, workers_expected=8, **size)
        found = costs_of(replace(model, settings=pushes), workers=8, servers=1)
        cost = next(each for each in found if each.strategy is strategy)
        assert (cost.worker, cost.servers) == (2 * 40_000, 3 * 40_000 + 80_000 + 2 * 40_000)
        if strategy is Strategy.SHARDED:
            assert cost.busiest == 6 * 40_000 * 3 // 4 + 2 * 40_000 // 4


@pytest.mark.parametrize(
    ("strategy", "size"), [(Strategy.PIPELINE, "pipeline"), (Strategy.SHARDED, "sharded"), (Strategy.TENSOR, "tensor")]
)
def test_servers_keep_no_gradients_of_steps_that_do_not_wait(strategy: Strategy, size: str) -> None:
    model = replace(model_of(4_000, state=8_000), cut=4_000)
    given: dict[str, Any] = {size: {"stages" if size == "pipeline" else "size": 2}, "workers_expected": 4}
    pushes = JobSettings(strategy=strategy, between=Between.PARAMETER_SERVER, consistency={"mode": "async"}, **given)
    found = costs_of(replace(model, settings=pushes), workers=4, servers=1)
    assert next(each.servers for each in found if each.strategy is strategy) == 3 * 4_000 + 8_000


def test_strategies_that_cut_say_what_they_cannot_cut() -> None:
    refused = {cost.strategy: cost.refused for cost in costs_of(replace(model_of(4_000), uncut="nothing"), 4, 1)}
    assert (refused[Strategy.SHARDED], refused[Strategy.TENSOR]) == ("", "nothing")
    refused = {cost.strategy: cost.refused for cost in costs_of(replace(model_of(4_000), optimizer="lamb"), 4, 1)}
    assert refused[Strategy.SHARDED] == refused[Strategy.TENSOR] == "lamb needs whole parameters"


def test_more_servers_share_what_a_step_moves() -> None:
    few, many = (costs_of(model_of(4_000), workers=8, servers=servers)[0].busiest for servers in (1, 4))
    assert few == 4 * many == 8 * 2 * 4_000


@pytest.mark.parametrize("module", [costs, dry_run], ids=lambda module: module.__name__)
def test_examples_print_what_they_show(module: ModuleType) -> None:
    found = doctest.testmod(module, extraglobs={"JobSettings": JobSettings, "PlannedModel": PlannedModel})
    assert found.attempted
    assert not found.failed
