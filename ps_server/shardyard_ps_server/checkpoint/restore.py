"""What partitions are to begin with, where that is a checkpoint.

Owns: what becomes of a partition's state, as a checkpoint has it, before it is the job's. Invariants: incarnations of
workers mean nothing in another job; where a job has gone over to another mode, what has counted has its names in that.
Must not know: files, which partitions are here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from shardyard.checkpoints.manifest import PartitionEntry
from shardyard.checkpoints.partition_file import PartitionState
from shardyard.domain.consistency import UpdateMode
from shardyard.domain.errors import InvalidRequest
from shardyard.domain.ids import Incarnation, JobId, PartitionId, Rank, Token
from shardyard.domain.push_names import DataShardSource, RankSource, SourceKey, SourceMark, WorkerSource
from shardyard_ps_server.partition.update_rules import UpdateRules
from shardyard_ps_server.rows.table_states import Tables


@dataclass(frozen=True)
class Restore:
    """What partitions are to begin with: entries of manifest `number`, and the URL of the job's checkpoints. `logs`:
    the servers, gone, whose logs say what came after, the first owner first."""

    url: str
    entries: tuple[PartitionEntry, ...]
    number: int = 0
    logs: Mapping[PartitionId, tuple[Incarnation, ...]] = field(default_factory=dict)
    job: JobId = JobId(0)
    """Who wrote the checkpoint: incarnations of workers mean nothing in another job."""
    begun: tuple[tuple[DataShardSource, int], ...] = ()
    """Data shards of which all partitions have counted the batches before that number, as steps of a job that was
    synchronous when the checkpoint was written."""
    step: int = 0
    """Before which all of so many logical `ranks` stand, of a job that was asynchronous when it was written; else 0."""
    ranks: int = 0

    def segment_of(self, job: JobId) -> int:
        """The first of a log that follows. Another job's checkpoint has a number that may be above those to come, which
        must begin segments too."""
        return self.number if self.job == job else 0

    def check(self, job: JobId, rules: UpdateRules) -> None:
        """Raises InvalidRequest for a step at which no partition of such a job can stand."""
        newest = max((entry.version.number for entry in self.entries), default=0)
        if self.step and (rules.mode is not UpdateMode.SYNC or newest > self.step):
            raise InvalidRequest(
                f"partitions of job {job}, which is {rules.mode.value}, to stand before step {self.step} with a"
                f" checkpoint whose newest version is {newest}"
            )

    def adapted(self, state: PartitionState, job: JobId) -> PartitionState:
        """As `job` begins with it."""
        marks = state.marks
        if self.job != job:
            marks = tuple([mark for mark in marks if not isinstance(mark.key.source, WorkerSource)])
        known = {mark.key: mark for mark in marks}
        for source, batch in self.begun:
            mark = known.get(SourceKey(source), SourceMark(SourceKey(source), Token(0), 0))
            known[mark.key] = mark._replace(next=max(mark.next, batch))
        for rank in range(self.ranks if self.step else 0):
            key = SourceKey(RankSource(Rank(rank)))
            known[key] = known.get(key, SourceMark(key, Token(0), 0))._replace(next=self.step)
        # those of an asynchronous job differ, and are one from its first step on
        version = replace(state.version, number=max(state.version.number, self.step))
        return replace(state, version=version, marks=tuple(known.values()))


NO_RESTORE = Restore("", ())


@dataclass(frozen=True)
class Loaded:
    """What a partition is to begin with, read and checked, with its tables filled."""

    state: PartitionState
    tables: Tables
