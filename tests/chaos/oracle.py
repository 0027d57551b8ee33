"""What must be true when a job has ended, whatever happened to it on the way.

Owns: the checks, and the undisturbed run that synchronous ones are held against. Must not know: which faults there
were.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from shardyard.checkpoints.library import CheckpointLibrary
from shardyard.checkpoints.manifest import Manifest
from shardyard.domain.ids import PartitionId
from shardyard.domain.push_names import DataShardSource, RankSource, SourceKey
from shardyard.domain.replica_groups import Between, Strategy
from shardyard.runtime.failpoints import EXIT_CODE
from shardyard.storage.storage import open_storage
from shardyard.storage.tensors import Array
from shardyard.wire.v1 import coordinator_pb2 as wire
from tests.chaos.battle import (
    BATCH,
    BATCHES,
    EPOCHS,
    JOB,
    SAMPLES,
    Outcome,
    as_environment,
    job_settings,
    script_arguments,
)
from tests.chaos.places import KEPT_ENVIRONMENT
from tests.chaos.schedules import Plan
from tests.support.checkpoints import load_partition

COUNTS = "counts"
OF_SAMPLES = ("first.counts", "between.counts", "last.counts")
"""The variables that count samples."""
ROWS = "rows"
SEEN = "tables.seen.table"
"""The table that has a row for each sample."""
RELATIVE, ABSOLUTE = 1e-6, 1e-9
ALONE_S_MAX = 120
BATCHES_PER_EPOCH = SAMPLES // BATCH

EXPECTED_ENDINGS = tuple(
    re.compile(pattern)
    for pattern in (
        f"exit code {EXIT_CODE}:",
        "is no member of this yard",
        "does not answer",
        "did not answer",
        r"^server-\d+, .*/wal/.*: No space left on device$",
    )
)
"""How a process may end that nobody killed: at a failpoint; since it was declared dead; since a peer was stopped or cut
off for longer than its patience; a server, since its log's disk was full."""


Blocks = dict[tuple[int, str], Array]
"""By partition and number of a block: its values and the optimizer's state."""


def check(plan: Plan, outcome: Outcome, undisturbed: Undisturbed) -> None:
    """Raises AssertionError. `undisturbed`: how synchronous jobs end where nothing goes wrong."""
    check_scripts(plan, outcome)
    check_processes(outcome)
    library = CheckpointLibrary(open_storage(outcome.checkpoints))
    findings = library.verify(JOB)
    assert not findings, findings
    manifest = library.load(JOB)
    check_counts(plan, library, manifest)
    check_ledgers(plan, library, manifest)
    if plan.sync:
        assert manifest.step == BATCHES // plan.logical_ranks, manifest.step
    if plan.has_bits:
        assert digest(library, manifest) == undisturbed.digest(plan), "other bits than those of the undisturbed run"
    if plan.has_values:
        check_values(blocks_of(library, manifest), undisturbed.blocks(plan))


def check_scripts(plan: Plan, outcome: Outcome) -> None:
    """What the workers say: each sample's coordinate and row, and that each was computed at least once an epoch."""
    assert outcome.results, "no worker has come to the end"
    for result in outcome.results:
        check_counts_of_worker(result)
        if plan.tables:
            assert wrong(result[ROWS]) == {}, "rows of samples, as a worker has looked them up"
    least = EPOCHS * (1 if plan.strategy is Strategy.SHARDED else plan.parts)
    missing = {sample: outcome.computed[sample] for sample in range(SAMPLES) if outcome.computed[sample] < least}
    assert missing == {}, "samples that were computed less than once an epoch, by each part of the model"


def check_counts_of_worker(result: Mapping[str, object]) -> None:
    found = result[COUNTS]
    assert isinstance(found, list)
    assert len(found) == len(OF_SAMPLES)
    for name, counts in zip(OF_SAMPLES, found, strict=True):
        assert wrong(counts) == {}, f"{name}: coordinates of samples, as a worker has them"


def check_processes(outcome: Outcome) -> None:
    assert outcome.job_state == wire.JOB_STATE_FINISHED, outcome.job_state
    # a place to die at may be passed as late as this
    off = {name: code for name, code in outcome.codes.items() if code not in (None, 0, EXIT_CODE)}
    assert off == {}, f"services that did not end well: {off}"
    strange = [ending for ending in outcome.endings if not any(each.search(ending) for each in EXPECTED_ENDINGS)]
    assert not strange, strange


def check_counts(plan: Plan, library: CheckpointLibrary, manifest: Manifest) -> None:
    """Each sample's coordinate and row, as the last checkpoint has them."""
    state = dict(library.export_state(manifest))
    for name in OF_SAMPLES:
        assert wrong(state[name].tolist()) == {}, f"{name}: coordinates of samples, in the last checkpoint"
    assert plan.tables == (f"{SEEN}.rows" in state)
    if plan.tables:
        assert wrong(state[f"{SEEN}.rows"].flatten().tolist()) == {}, "rows of samples, in the last checkpoint"


def check_ledgers(plan: Plan, library: CheckpointLibrary, manifest: Manifest) -> None:
    """In every partition each source stands where all of its work is counted, or was forgotten since a checkpoint has
    it (rule A7)."""
    for partition in range(len(manifest.layout.partitions)):
        state = load_partition(library, manifest, PartitionId(partition))
        marks = {mark.key: mark.next for mark in state.marks}
        found = (
            (key, marks.get(key), wanted) for key, wanted in wanted_marks(plan) if state.floor == 0 or key in marks
        )
        off = {str(key.source): (next_, wanted) for key, next_, wanted in found if next_ != wanted}
        assert off == {}, f"watermarks of partition {partition}: found, wanted"


def wanted_marks(plan: Plan) -> Iterator[tuple[SourceKey, int]]:
    """Every source, and its next sequence at the end."""
    if plan.sync:
        keys = [SourceKey(RankSource(rank)) for rank in range(plan.logical_ranks)]
        keys += [key.of_rows for key in keys if plan.hybrid]
        yield from ((key, BATCHES // plan.logical_ranks) for key in keys)
        return
    per_shard = plan.batches_per_data_shard
    for epoch in range(EPOCHS):
        for index, begin in enumerate(range(0, BATCHES_PER_EPOCH, per_shard)):
            yield SourceKey(DataShardSource(0, epoch, index)), min(per_shard, BATCHES_PER_EPOCH - begin)


def wrong(counts: object) -> Mapping[int, float]:
    """Coordinates that are not one for each epoch; whole numbers, so that none is nearly right."""
    assert isinstance(counts, list)
    assert len(counts) == SAMPLES, len(counts)
    return {sample: count for sample, count in enumerate(counts) if count != EPOCHS}


def blocks_of(library: CheckpointLibrary, manifest: Manifest) -> Blocks:
    """Joined, by their variable: how it is cut, and which partition has them, depends on the strategy."""
    pieces: dict[tuple[int, str], dict[int, Array]] = {}
    for part in manifest.layout.partitions:
        for place, block in zip(part.blocks, load_partition(library, manifest, part.partition).blocks, strict=True):
            for name, values in {"values": block.values, **block.slots}.items():
                pieces.setdefault((place.variable, name), {})[place.offset] = np.array(values)
    return {key: np.concatenate([found[offset] for offset in sorted(found)]) for key, found in pieces.items()}


def check_values(found: Blocks, wanted: Blocks) -> None:
    """In float64: what is not summed in another order is far from it."""
    assert found.keys() == wanted.keys()
    far = {
        key: float(np.abs(found[key] - wanted[key]).max())
        for key in wanted
        if not np.allclose(found[key], wanted[key], rtol=RELATIVE, atol=ABSOLUTE)
    }
    assert far == {}, "blocks with other values than those of the undisturbed run, and by how much they differ"


def digest(library: CheckpointLibrary, manifest: Manifest) -> str:
    """SHA-256 of all values and all optimizer state, with the number of updates of each block, and of all rows."""
    found = hashlib.sha256()
    for partition in range(len(manifest.layout.partitions)):
        for block in load_partition(library, manifest, PartitionId(partition)).blocks:
            found.update(f"{partition} {block.index} {block.count}".encode())
            for name, values in sorted({"values": block.values, **block.slots}.items()):
                found.update(name.encode() + np.ascontiguousarray(values).tobytes())
    for table in range(len(manifest.layout.tables)):
        for name, rows in library.export_table(manifest, table).items():
            found.update(name.encode() + rows.tobytes())
    return found.hexdigest()


class Undisturbed:
    """How plans' jobs end, each run once, alone in one process on a server, and kept."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ends: dict[tuple[object, ...], tuple[CheckpointLibrary, Manifest]] = {}

    def digest(self, plan: Plan) -> str:
        return digest(*self._end(plan))

    def blocks(self, plan: Plan) -> Blocks:
        return blocks_of(*self._end(plan))

    def _end(self, plan: Plan) -> tuple[CheckpointLibrary, Manifest]:
        key = plan.logical_ranks, plan.partitions, plan.tables, plan.has_values, plan.is_plain
        if key not in self._ends:
            url = self.run(plan, self._folder / "-".join(map(str, key)))
            library = CheckpointLibrary(open_storage(url))
            self._ends[key] = library, library.load(JOB)
            check_counts(plan, *self._ends[key])
        return self._ends[key]

    @staticmethod
    def run(plan: Plan, folder: Path, more: Mapping[str, object] | None = None, *, pause_ms: int = 0) -> str:
        """Runs the plan's job; the URL of its checkpoints. `more`: settings beside the plan's; `pause_ms`: before each
        batch."""
        folder.mkdir(parents=True)
        calm = replace(plan, every_steps=0, wal=False)
        settings = job_settings(calm) | {
            "job.strategy": Strategy.PARAMETER_SERVER.value,
            "job.between": Between.ALL_REDUCE.value,
            "job.checkpoint.url": folder / "checkpoints",
            "yard.servers": 1,
            **(more or {}),
        }
        done = subprocess.run(
            [sys.executable, *script_arguments(plan, folder), "--pause-ms", str(pause_ms)],
            env={**KEPT_ENVIRONMENT, "OMP_NUM_THREADS": "1", "SHARDYARD_JOB": JOB, **as_environment(settings)},
            capture_output=True,
            text=True,
            timeout=ALONE_S_MAX,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return str(folder / "checkpoints")
