"""Checkpoints of a small job in a library, whole ones and what has changed, drawn from seeds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shardyard.checkpoints.library import CheckpointLibrary
from shardyard.checkpoints.manifest import Manifest, PartitionEntry, PartitionFile, ResidualFile
from shardyard.checkpoints.partition_file import BlockState, PartitionState
from shardyard.domain.consistency import UpdateMode
from shardyard.domain.ids import Incarnation, JobId, Rank, Token, Version
from shardyard.domain.layout.layouts import JobLayout
from shardyard.domain.optimizers import OptimizerSpec, make_group
from shardyard.domain.push_names import DataShardSource, RankSource, SourceKey, SourceMark, WorkerSource
from shardyard.domain.variables import DType, VariableKind, VariableSpec
from shardyard.storage.storage import LocalStorage, open_storage
from shardyard_coordinator.placement.placement import plan
from tests.support.checkpoints import write_state

JOB = "digits"
LAYOUT = plan(
    [
        VariableSpec("layer.weight", DType.FLOAT32, (23, 7)),
        VariableSpec("layer.bias", DType.FLOAT64, (23,)),
        VariableSpec("norm.count", DType.INT64, (), VariableKind.BUFFER),
        VariableSpec("norm.mask", DType.BOOL, (5,), VariableKind.BUFFER),
        VariableSpec("nothing", DType.FLOAT32, (0, 3)),
    ],
    OptimizerSpec("adam", (make_group("adam", {"lr": 0.1}),)),
    partitions=3,
    block_bytes=64,
)
REMEMBERED = {
    "pushes": np.array(41, np.int64),
    "residual.layer.weight": np.arange(161, dtype=np.float32),
    "momentum.layer.weight": np.arange(161, 0, -1).astype(np.float32),
    "factor.layer.weight@0": np.ones((2, 7), np.float32),
}
MARKS = (
    SourceMark(SourceKey(DataShardSource(0, 1, 2)), Token(7), 3),
    SourceMark(SourceKey(RankSource(Rank(3)), 1), Token(9), 0),
    SourceMark(SourceKey(WorkerSource(Incarnation((5 << 32) + 1))), Token(0), 41),
)


def state(
    layout: JobLayout, partition: int, *, seed: int, number: int, blocks: Iterable[int] | None = None
) -> PartitionState:
    """What a partition could hold: `blocks` of it, every value drawn from (seed, partition, block)."""
    part = layout.partitions[partition]
    found = []
    for index in range(len(part.blocks)) if blocks is None else sorted(blocks):
        block = part.blocks[index]
        spec = layout.variables[block.variable]
        rng = np.random.default_rng((seed, partition, index))
        highest = 1 if spec.dtype is DType.BOOL else 100
        drawn = [rng.integers(0, highest + 1, block.length).astype(spec.dtype.value) for _ in range(3)]
        slots = {"exp_avg": drawn[1], "exp_avg_sq": drawn[2]} if spec.kind is VariableKind.PARAMETER else {}
        found.append(BlockState(index, drawn[0], slots, number))
    return PartitionState(part.partition, Version(1, number), tuple(found), MARKS, Token(4))


def manifest_of(number: int, entries: Iterable[PartitionEntry], feedback: tuple[ResidualFile, ...] = ()) -> Manifest:
    return Manifest(
        number=number,
        job_name=JOB,
        job=JobId((2 << 32) + 1),
        seed=3,
        settings={"partitions": 3, "learning": {"rate": 0.1}},
        mode=UpdateMode.ASYNC,
        step=100 * number,
        created="2026-11-21T06:00:00+00:00",
        layout=LAYOUT,
        partitions=tuple(entries),
        data_ledger={"closed": [[0, 1, 2]], "epoch": None},
        token_floor=Token(4),
        feedback=feedback,
    )


def write_whole(
    library: CheckpointLibrary, number: int, *, feedback: bool = False, run: int = 1, step: int | None = None
) -> Manifest:
    """A checkpoint with all blocks, committed."""
    entries = []
    for part in LAYOUT.partitions:
        held = state(LAYOUT, part.partition, seed=number, number=10 * number)
        file = write_state(library, JOB, number, held)
        taken = PartitionFile(file, tuple(range(len(part.blocks))))
        entries.append(PartitionEntry(part.partition, held.version, (taken,)))
    remembered: tuple[ResidualFile, ...] = ()
    if feedback:
        remembered = (library.write_feedback(JOB, number, "w-1", REMEMBERED),)
    manifest = manifest_of(number, entries, remembered)
    manifest = replace(manifest, job=JobId((2 << 32) + run), step=manifest.step if step is None else step)
    library.commit(manifest)
    return manifest


def write_changes(
    library: CheckpointLibrary, base: Manifest, number: int, changed: dict[int, tuple[int, ...]]
) -> Manifest:
    """A checkpoint with the blocks `changed` of each partition, the rest from `base`, committed."""
    entries = []
    for entry in base.partitions:
        if entry.partition not in changed:
            entries.append(entry)
            continue
        blocks = changed[entry.partition]
        held = state(LAYOUT, entry.partition, seed=number, number=10 * number, blocks=blocks)
        entries.append(entry.incremental(held.version, write_state(library, JOB, number, held), blocks))
    manifest = manifest_of(number, entries)
    library.commit(manifest)
    return manifest


@pytest.fixture(params=["folder", "memory"])
def library(request: pytest.FixtureRequest, tmp_path: Path) -> CheckpointLibrary:
    return CheckpointLibrary(open_storage(str(tmp_path) if request.param == "folder" else f"memory://{tmp_path.name}"))


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointLibrary:
    return CheckpointLibrary(LocalStorage(tmp_path))
