"""A whole yard under faults whose job is switched from synchronous to asynchronous updates, or back, or by turns:
whatever dies on the way, it is in one mode, and each sample counts once an epoch (rules B8, B10)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from shardyard.checkpoints.partition_file import PartitionState
from shardyard.domain.ids import JobId
from shardyard_coordinator.core.job_state import JobState
from shardyard_coordinator.flows import mode_switch
from shardyard_coordinator.modes.pending_switch import PendingSwitch
from shardyard_coordinator.work.data_ledger import DataLedger
from shardyard_coordinator.work.data_shards import DataShards
from shardyard_ps_server.checkpoint.restore import Restore
from shardyard_worker.session.step_barrier import StepBarrier
from tests.simulator.mutations import first_red
from tests.simulator.parallel import Run
from tests.simulator.plan import make_plan

SEEDS = 100
SEEDS_FOR_A_MUTATION = 60
RED_FIRST = {"goes_on_behind_the_switch_point": (82,), "settles_once": (30,)}
"""Seeds that were red with a part switched off; they are tried first, which saves time and nothing else."""
KIND = "sync-switch-checkpoint"
TO_STEPS = "async-over-checkpoint"


@pytest.mark.long
@pytest.mark.timeout(1_200)
@pytest.mark.parametrize(
    ("kind", "least"),
    [
        (KIND, {"went over": SEEDS // 2}),
        (TO_STEPS, {"went over to steps": SEEDS // 2, "went over": SEEDS // 6}),
        ("sync-over-checkpoint", {"went over": SEEDS // 2, "went over to steps": SEEDS // 6}),
    ],
)
def test_yard_that_goes_over_counts_each_sample_once_under_every_seed(
    kind: str, least: dict[str, int], run: Run
) -> None:
    met: Counter[str] = Counter()
    for found in run(range(SEEDS), kind=kind):
        assert not found["violations"], f"seed {found['seed']}: {found['violations']}"
        met.update(set(found["happened"]))
    assert all(met[what] >= often for what, often in least.items()), met
    assert met["kill server"] + met["kill coordinator"] + met["kill worker"] >= SEEDS // 2


def test_job_with_logs_stays_as_it_is(run: Run) -> None:
    for kind in ("sync-switch-wal", "async-over-wal"):
        for found in run(range(2), kind=kind):
            assert not found["violations"], f"seed {found['seed']}: {found['violations']}"
            assert not {"went over", "went over to steps"} & set(found["happened"])


def goes_on_behind_the_switch_point(monkeypatch: pytest.MonkeyPatch) -> None:
    real = StepBarrier.permits
    monkeypatch.setattr(StepBarrier, "permits", lambda self, step: real(self, step) is not False)


def takes_any_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goes over from the newest, whatever its step."""
    real: Callable[..., Any] = mode_switch._switch_partitions

    def switch_updates(job: JobState, now_ms: int) -> Any:
        committed = job.book.committed
        if job.pending_switch.step is not None and committed is not None and job.ranks is not None:
            job.book.committed = replace(committed, step=job.pending_switch.step)
        return real(job, now_ms)

    monkeypatch.setattr(mode_switch, "_switch_partitions", switch_updates)


def forgets_what_steps_have_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Data shards that are counted in part begin anew."""
    real = Restore.adapted

    def adapted(restore: Restore, state: PartitionState, job: JobId) -> PartitionState:
        return real(replace(restore, begun=()), state, job)

    monkeypatch.setattr(Restore, "adapted", adapted)


def goes_over_in_the_midst_of_data_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DataLedger, "is_drained", property(lambda _: True))


def begins_data_shards_while_it_drains(monkeypatch: pytest.MonkeyPatch) -> None:
    real: Callable[..., Any] = DataLedger.lease
    monkeypatch.setattr(DataLedger, "lease", lambda self, feed, worker, *, fresh: real(self, feed, worker))


def takes_a_checkpoint_of_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was begun before all data shards were done."""
    real: Callable[..., Any] = PendingSwitch.fix_step
    monkeypatch.setattr(PendingSwitch, "fix_step", lambda self, step, ticket=0: real(self, step, ticket and 1))


def settles_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever partitions go back to since."""
    monkeypatch.setattr(PendingSwitch, "reopen", lambda _: None)


def forgets_where_ranks_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Restore.adapted

    def adapted(restore: Restore, state: PartitionState, job: JobId) -> PartitionState:
        return real(replace(restore, step=0), state, job)

    monkeypatch.setattr(Restore, "adapted", adapted)


def deals_the_epoch_from_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    real = DataShards.place
    monkeypatch.setattr(DataShards, "place", lambda shards: (real(shards)[0], 0))


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("mutation", "kind"),
    [
        (goes_on_behind_the_switch_point, KIND),
        (takes_any_checkpoint, KIND),
        (forgets_what_steps_have_counted, KIND),
        (goes_over_in_the_midst_of_data_shards, TO_STEPS),
        (begins_data_shards_while_it_drains, TO_STEPS),
        (takes_a_checkpoint_of_before, TO_STEPS),
        (settles_once, TO_STEPS),
        (forgets_where_ranks_stand, TO_STEPS),
        (deals_the_epoch_from_its_beginning, TO_STEPS),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
@pytest.mark.usefixtures("simulated")
def test_without_a_part_of_the_rule_some_seed_is_red(mutation: Callable[[pytest.MonkeyPatch], None], kind: str) -> None:
    seeds = (*RED_FIRST.get(mutation.__name__, ()), *range(SEEDS_FOR_A_MUTATION))
    assert first_red((make_plan(seed, kind) for seed in seeds), mutation)
