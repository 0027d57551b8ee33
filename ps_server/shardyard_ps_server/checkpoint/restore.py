"""The state that partitions begin with when they come from a checkpoint.

Owns: how the state in a checkpoint is adapted to the job. Invariants: another job drops the ledger entries of workers,
because their incarnations are not known there; after a change of mode, counted work has the names of the new mode.
Must not know: files, which partitions are here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from shardyard.checkpoints.manifest import PartitionEntry
from shardyard.checkpoints.partition_file import PartitionState
from shardyard.domain.consistency import UpdateMode
from shardyard.domain.errors import InvalidRequest
from shardyard.domain.ids import Incarnation, JobId, PartitionId, Rank, Token, Version
from shardyard.domain.push_names import DataShardSource, RankSource, SourceKey, SourceMark, WorkerSource
from shardyard_ps_server.partition.update_rules import UpdateRules
from shardyard_ps_server.rows.table_states import Tables


@dataclass(frozen=True)
class Restore:
    """What to restore: entries of manifest `number`, and the URL of the job's checkpoints. `logs`: for each partition
    the dead servers whose logs continue the checkpoint, the first owner first."""

    url: str
    entries: tuple[PartitionEntry, ...]
    number: int = 0
    logs: Mapping[PartitionId, tuple[Incarnation, ...]] = field(default_factory=dict)
    job: JobId = JobId(0)
    """The job that wrote the checkpoint."""
    begun: tuple[tuple[DataShardSource, int], ...] = ()
    """Of a checkpoint of a synchronous job for an asynchronous one: data shards, and how many of their batches all
    partitions have counted, as steps."""
    step: int = 0
    """Of a checkpoint of an asynchronous job for a synchronous one: the next step of all `ranks` ranks; else 0."""
    ranks: int = 0

    def segment_of(self, job: JobId) -> int:
        """The number of a new log's first segment. Another job's checkpoint may have a higher number than the next
        checkpoints of this job, which begin segments too."""
        return self.number if self.job == job else 0

    def check(self, job: JobId, rules: UpdateRules) -> None:
        """Raises InvalidRequest for a step that no partition of such a job can be at."""
        newest = max((entry.version.number for entry in self.entries), default=0)
        if self.step and (rules.mode is not UpdateMode.SYNC or newest > self.step):
            raise InvalidRequest(
                f"partitions of job {job}, which is {rules.mode.value}, to stand before step {self.step} with a"
                f" checkpoint whose newest version is {newest}"
            )

    def adapted(self, state: PartitionState, job: JobId) -> PartitionState:
        """Returns the state that `job` begins with."""
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
        # partitions of an asynchronous job have different versions; steps of a synchronous one need the same
        version = Version(state.version.life, max(state.version.number, self.step))
        return replace(state, version=version, marks=tuple(known.values()))


NO_RESTORE = Restore("", ())


@dataclass(frozen=True)
class Loaded:
    """A partition's state that was read and checked, with its tables filled."""

    state: PartitionState
    tables: Tables
