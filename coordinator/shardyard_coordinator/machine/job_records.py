"""A job's records: the list that rebuilds the job, and which part of the job reads which record.

A record that concerns two parts has a function here; each other record goes to one part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from shardyard.domain.ids import Incarnation, PartitionId
from shardyard_coordinator.core.effects import JobPhase
from shardyard_coordinator.core.job_state import JobState
from shardyard_coordinator.flows import fencing, job_end, mode_switch, recovery, work_verdicts
from shardyard_coordinator.machine import job as life
from shardyard_coordinator.placement.deployment import Stage
from shardyard_coordinator.records import Body, DamagedRecord, Entry, require
from shardyard_coordinator.work.quarantine import source_of
from shardyard_coordinator.work.step_ledger import StepLedger

Restore = Callable[[JobState, str, Body, int], object]
"""Takes the job, the record's kind and body, and the time. Raises DamagedRecord."""


def entries(job: JobState) -> list[Entry]:
    """Records that rebuild this job, in this order."""
    return [
        ("job_started", {"settings": job.settings.model_dump(mode="json"), "owner": job.owner}),
        *job.runs.entries(),
        *job.roster.entries(),
        *job.mode.entries(),
        *job.pending_switch.entries(),
        *job.deployment.entries(),
        *([] if job.ranks is None else job.ranks.entries()),
        *([] if job.replicas is None else job.replicas.entries()),
        *job.feeds.entries(),
        *job.suspects.entries(),
        *job.not_finite.entries(),
        *job.lost_residuals.entries(),
        *([] if job.departed is None else job.departed.entries()),
        *job.checkpoint_residuals.entries(),
        *job.stopping.entries(),
        *job.evaluations.entries(),
        *recovery.entries(job),
        *job.lost_pushes.entries(),
        *([("token_given", {"token": job.tokens.latest})] if job.tokens.latest else []),
        *([job_end.finishing(job)] if job.phase is JobPhase.FINISHING else []),
        *([job_end.ended(job)] if job.phase.ended else []),
    ]


def restore(job: JobState, kind: str, body: Body, now_ms: int) -> None:
    """Applies a record of `entries`, or one of its kinds, except `job_started`. Raises DamagedRecord."""
    # the kind in a damaged record may be of any type
    if not isinstance(kind, str) or kind not in _RESTORE:
        raise DamagedRecord("its kind is unknown to this release")
    _RESTORE[kind](job, kind, body, now_ms)


def _rank_given(job: JobState, _: str, body: Body, now_ms: int) -> None:
    require(job.ranks is not None, "a rank of an asynchronous job")
    assert job.ranks is not None
    job.ranks.restore(body, now_ms)
    job.tokens.seen(body.number("token"))


def _replicas(job: JobState, kind: str, body: Body, _: int) -> None:
    require(job.replicas is not None, "replicas of a job whose strategy has none")
    assert job.replicas is not None
    job.replicas.restore(kind, body)


def _feeds(job: JobState, kind: str, body: Body, _: int) -> None:
    job.feeds.restore(kind, body)
    if kind == "data_leased":
        job.tokens.seen(body.number("token"))
    elif kind == "data_closed":
        work_verdicts.end_lease(job, source_of(body), Incarnation(body.number("worker")), done=body.flag("done"))


def _verdicts(job: JobState, kind: str, body: Body, _: int) -> None:
    require(isinstance(job.feeds, StepLedger), "verdicts on the steps of an asynchronous job")
    job.feeds.restore(kind, body)


def _departed(job: JobState, _: str, body: Body, __: int) -> None:
    require(job.departed is not None, "workers that are gone, of a job that does not go back in part")
    assert job.departed is not None
    job.departed.restore(body)


def _residuals(job: JobState, kind: str, body: Body, _: int) -> None:
    if job.checkpoint_residuals.restore(kind, body):
        job.lost_residuals.add_unknown()


def _deployment(job: JobState, kind: str, body: Body, _: int) -> None:
    job.deployment.restore(kind, body)
    _follow_stage(job)


def _recovery(job: JobState, kind: str, body: Body, now_ms: int) -> None:
    is_same_run = job.origin is None
    recovery.restore(job, kind, body, now_ms)
    mode_switch.note_map(job, restored=kind == "partitions_moved")
    _follow_stage(job)
    if job.deployment.stage is Stage.LOST:
        job.phase = JobPhase.STARTING
    if kind == "partitions_moved" and job.departed is not None and is_same_run:
        job.departed.restored(PartitionId(each) for each in body.numbers("partitions"))


def _follow_stage(job: JobState) -> None:
    if job.deployment.stage is Stage.OPEN and job.phase is JobPhase.STARTING:
        job.phase = JobPhase.RUNNING


def _mode(job: JobState, kind: str, body: Body, _: int) -> None:
    job.mode.restore(kind, body)
    job.apply_mode()


_KINDS: Final[tuple[tuple[str, Restore], ...]] = (
    ("run_joined", lambda job, _, body, __: job.runs.restore(body)),
    ("worker_joined", lambda job, _, body, __: life.restore_joined(job, body)),
    ("worker_gone", lambda job, _, body, now_ms: life.restore_gone(job, body, now_ms)),
    ("worker_freed", lambda job, _, body, now_ms: fencing.restore_freed(job, body, now_ms)),
    ("workers_gone", lambda job, _, body, now_ms: job.roster.restore(body, now_ms)),
    ("rank_given", _rank_given),
    ("replica_group replicas_published", _replicas),
    ("token_given", lambda job, _, body, __: job.tokens.seen(body.number("token"))),
    ("feed_opened feed_progress feed_closed data_leased data_closed batch_quarantined", _feeds),
    ("steps_decided contributions_dropped_before", _verdicts),
    ("batch_begun source_suspected", lambda job, kind, body, _: job.suspects.restore(kind, body)),
    ("not_finite not_finite_before worker_quarantined", lambda job, kind, body, _: job.not_finite.restore(kind, body)),
    ("residuals_lost_before", lambda job, _, body, __: job.lost_residuals.restore(body)),
    ("workers_departed", _departed),
    ("feedback_due feedback_taken feedback_taken_before", _residuals),
    ("variables_registered worker_admitted initializer_chosen partitions_created variables_committed", _deployment),
    ("partitions_opened partitions_restored_later", _deployment),
    ("checkpoint_begun checkpoint_committed checkpoint_waived logs_begun partitions_lost recovery_begun", _recovery),
    ("partitions_moved partitions_placed_again", _recovery),
    ("pushes_lost pushes_lost_before", lambda job, kind, body, _: job.lost_pushes.restore(kind, body)),
    ("stop_asked stop_settled", lambda job, kind, body, _: job.stopping.restore(kind, body)),
    (
        "switch_asked switch_settled switch_cancelled switches_before",
        lambda job, kind, body, _: job.pending_switch.restore(kind, body),
    ),
    ("job_switched", lambda job, _, body, now_ms: mode_switch.restore(job, body, now_ms)),
    ("consistency_switched worker_switched", _mode),
    ("evaluation_reported best_kept", lambda job, kind, body, _: job.evaluations.restore(kind, body)),
    ("job_finishing job_ended", job_end.restore),
)
_RESTORE: Final[Mapping[str, Restore]] = {kind: restore for kinds, restore in _KINDS for kind in kinds.split()}
