"""The audit of a yard: which records of the journal it has, and which of their values.

Invariant: the audit has every lease and its end, every verdict, and everything that was revoked. It
leaves out large values that do not concern these (layouts, maps, a checkpoint's copy of the ledgers). Must not know:
where the audit is kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from shardyard_coordinator.records import Entry

JOB_STARTED: Final = "job_started"
JOB_ENDED: Final = "job_ended"
UNAUDITED: Final = frozenset(
    {
        "batch_begun",
        "checkpoint_begun",
        "initializer_chosen",
        "job_forgotten",
        "logs_begun",
        "partitions_created",
        "variables_committed",
        "variables_registered",
        "worker_admitted",
    }
)
LEFT_OUT: Final[Mapping[str, frozenset[str]]] = {
    "checkpoint_committed": frozenset({"data_ledger"}),
    "partitions_moved": frozenset({"map"}),
}
"""For each kind of record, the values that the audit leaves out."""
_SAID_OF_A_JOB: Final = ("name", "seed", "workers_expected", "consistency", "data")


@dataclass(frozen=True, slots=True)
class Audited:
    """An entry of the audit. `job`: 0 if it is about the yard. `term`, `time`: as in a record. `body` has no job."""

    number: int
    term: int
    time: float
    job: int
    kind: str
    body: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Page:
    """A part of the audit, in order. `reached`: the number up to which entries were examined. `more`: whether more
    follow. `lost`: entries up to this number were deleted."""

    entries: tuple[Audited, ...]
    reached: int
    more: bool
    lost: int


def audited(kind: str, body: Mapping[str, object]) -> tuple[int, Entry] | None:
    """The job of a record, and its entry in the audit; None if the audit does not have it."""
    if kind in UNAUDITED:
        return None
    job = body.get("job", 0)
    assert isinstance(job, int), job
    if kind == JOB_STARTED:
        settings = body["settings"]
        assert isinstance(settings, Mapping)
        return job, (kind, {name: settings[name] for name in _SAID_OF_A_JOB})
    left_out = LEFT_OUT.get(kind, frozenset())
    return job, (kind, {name: value for name, value in body.items() if name != "job" and name not in left_out})
