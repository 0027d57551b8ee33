"""Groups of workers keep the rules under faults (docs/internals/ledger.md, rules D1 to D4, D6 to D8 and D10), and each
rule is needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from shardyard.domain.ids import Incarnation
from shardyard.domain.replica_groups import ReplicaGroup
from shardyard_coordinator.work.replica_book import ReplicaBook
from tests.simulator.groups import (
    Violation,
    Worker,
    Yard,
    YardOfPipelines,
    YardOfPipelinesWithRows,
    YardOfShards,
    YardOfShardsWithRows,
    YardOfStages,
    YardWithRows,
)
from tests.simulator.pushed_stages import YardOfPushes

SEEDS = range(400)
SEEDS_FOR_A_MUTATION = 2_000

KINDS = {
    "variables": Yard,
    "rows": YardWithRows,
    "stages": YardOfStages,
    "pipelines": YardOfPipelines,
    "shards": YardOfShards,
    "pipelines and rows": YardOfPipelinesWithRows,
    "shards and rows": YardOfShardsWithRows,
    "pushes": YardOfPushes,
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_groups_keep_the_rules_under_every_seed(kind: type[Yard]) -> None:
    steps = [kind(seed).run().steps_taken for seed in SEEDS]
    assert sum(steps) > 5 * len(SEEDS)


def forms_without_the_others(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """a group is formed of whoever asks (rule D1)"""
    real = ReplicaBook.form

    def form(self: ReplicaBook, living: Any, now_ms: int) -> Any:
        return real(self, [each for each in living if each in self._asking], now_ms)

    monkeypatch.setattr(ReplicaBook, "form", form)
    return {}


def each_keeps_its_step(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """nobody takes the replica of another (rule D2)"""
    monkeypatch.setattr(Yard, "_join", _join_as_it_is)
    return {}


def _join_as_it_is(self: Yard, worker: Worker, group: ReplicaGroup) -> None:
    if worker.history is None:
        worker.history = self.partitions[0][0]
    worker.group, worker.left, worker.meets, worker.taken = group, group.generation, 0, 0
    same = {each.history for each in self.workers.values() if each.group == group and each.history is not None}
    if len({history[: len(worker.history)] for history in same}) > 1:
        raise Violation(f"members of group {group.generation} have different replicas: {same}")


def nobody_goes_back(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """without a replica the next group begins with what the servers have (rule D3)"""
    monkeypatch.setattr(ReplicaBook, "has_lost_all", lambda *_: False)
    return {}


def nobody_waits_before_it_publishes(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """a member publishes a step that another may lack, and a partition keeps the first state of a step (rule D4)"""
    return {"meets_before": False, "later_group_counts": False}


def takes_a_step_without_the_rows_of_others(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """a member takes a step when it has the sums, and servers have its own rows (rule D6)"""
    return {"awaits_rows": False}


def goes_on_without_its_rows(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """replicas go on although the servers have gone back (rule D6)"""
    return {"is_void": False}


def stages_keep_no_gradients(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """a stage that has lost its group computes the step again, which another stage has taken (rule D7)"""
    return {"keeps_gradients": False}


def replica_of_an_earlier_group_counts(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """a worker that was not in the group before goes on with the stage that it had (rule D7)"""
    return {"was_there": False}


def members_get_any_stage(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """members do not keep their stages (rule D7)"""

    def placed(self: ReplicaBook, former: Any, came: Any) -> list[Incarnation]:
        workers = [*former, *came]
        return workers[: self._in_replicas(min(len(workers), self._members_max))]

    monkeypatch.setattr(ReplicaBook, "_placed", placed)
    return {}


def others_go_on_without_a_stage(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """the stages that are left are a replica (rule D7)"""

    def has_any(self: ReplicaBook, living: Any) -> bool:
        return any(each in living and self._asking.get(each, 0) is not None for each in self.group.members)

    monkeypatch.setattr(ReplicaBook, "_has_replica", has_any)
    return {}


def goes_back_while_a_stage_is_in_its_group(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """partitions go back before the other stages have left their group, and may publish (rule D7)"""
    monkeypatch.setattr(
        ReplicaBook, "has_lost_all", lambda self, living: self._has_trained and not self._has_replica(living)
    )
    return {}


def begins_with_any_published_state(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """other members begin with what the servers have, whichever step that is (rule D8)"""
    monkeypatch.setattr(ReplicaBook, "_have_servers_newest", lambda _: True)
    return {}


def newcomers_come_at_any_step(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """others are taken in without a new cut (rule D8)"""
    real = ReplicaBook.form

    def form(self: ReplicaBook, living: Any, now_ms: int) -> Any:
        self._replica_size = 1
        formed = real(self, living, now_ms)
        self._replica_size = None
        return formed

    monkeypatch.setattr(ReplicaBook, "form", form)
    return {}


def begins_with_the_newest_version(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """other members are not told of which step the servers' state is (rule D8)"""
    real = ReplicaBook._begin

    def begin(self: ReplicaBook, group: ReplicaGroup) -> None:
        real(self, group if group.donor is not None else replace(group, step=None))

    monkeypatch.setattr(ReplicaBook, "_begin", begin)
    return {}


def each_begins_with_its_own_step(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """the workers of a pipeline do not agree on the step that they begin with (rule D10)"""
    return {"agree": False}


def each_decides_alone(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """a worker pushes what is finite in its own stage (rules A4 and D10)"""
    return {"tell": False}


def partitions_keep_one_version(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """a partition that has a step already has its former values no more (rules B3 and D10)"""
    return {"keep": False}


def pushes_of_former_groups_are_taken(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """no token of the group is written to partitions (rules A5 and D10)"""
    return {"opens": False}


def pushes_are_taken_for_replicas(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """the servers go back when all workers with a stage are lost (rule D10)"""
    real = ReplicaBook.__init__

    def init(self: ReplicaBook, **given: Any) -> None:
        real(self, **given | {"has_replicas": True})

    monkeypatch.setattr(ReplicaBook, "__init__", init)
    return {}


@pytest.mark.parametrize(
    ("kind", "mutation"),
    [
        (Yard, forms_without_the_others),
        (Yard, each_keeps_its_step),
        (Yard, nobody_goes_back),
        (Yard, nobody_waits_before_it_publishes),
        (YardOfStages, stages_keep_no_gradients),
        (YardOfStages, others_go_on_without_a_stage),
        (YardOfStages, goes_back_while_a_stage_is_in_its_group),
        (YardOfPipelines, stages_keep_no_gradients),
        (YardOfPipelines, others_go_on_without_a_stage),
        (YardOfPipelines, replica_of_an_earlier_group_counts),
        (YardOfPipelines, members_get_any_stage),
        (YardOfShards, begins_with_any_published_state),
        (YardOfShards, newcomers_come_at_any_step),
        (YardWithRows, takes_a_step_without_the_rows_of_others),
        (YardWithRows, goes_on_without_its_rows),
        (YardOfPipelinesWithRows, takes_a_step_without_the_rows_of_others),
        (YardOfPipelinesWithRows, goes_on_without_its_rows),
        (YardOfPipelinesWithRows, stages_keep_no_gradients),
        (YardOfShardsWithRows, takes_a_step_without_the_rows_of_others),
        (YardOfShardsWithRows, goes_on_without_its_rows),
        (YardOfShardsWithRows, begins_with_the_newest_version),
        (YardOfPushes, forms_without_the_others),
        (YardOfPushes, each_begins_with_its_own_step),
        (YardOfPushes, each_decides_alone),
        (YardOfPushes, partitions_keep_one_version),
        (YardOfPushes, pushes_of_former_groups_are_taken),
        (YardOfPushes, pushes_are_taken_for_replicas),
    ],
    ids=lambda each: each.__name__,
)
def test_without_a_rule_some_seed_is_red(
    monkeypatch: pytest.MonkeyPatch,
    kind: type[Yard],
    mutation: Callable[[pytest.MonkeyPatch], dict[str, bool]],
) -> None:
    given = mutation(monkeypatch)
    for seed in range(SEEDS_FOR_A_MUTATION):
        try:
            kind(seed, **given).run()
        except Violation:
            return
    raise AssertionError(f"{SEEDS_FOR_A_MUTATION} seeds are green although {mutation.__doc__}")
