"""Judges the result of a run.

- Asynchronous jobs. SGD has rate 1, and each sample of each epoch owns a coordinate in every partition, to which its
  batch adds 1. A lost or doubled push shows as a whole number.
- Synchronous jobs. The gradient depends on every bit of all values, so the last bits must equal those of a run without
  faults.
- Rows of tables: as values, in the same pushes. Where a synchronous job updates rows as they come (hybrid), rows count,
  and nothing depends on them. A look-up of rows that count never finds one that has counted twice.
- A server counts nothing from a process that it was told to refuse, or under a token that was overtaken.
- What took effect by a log is what its successors read of the log.
- The checkpoint of the end is undamaged, and has the same values.
- There is no error, except those that people see when peers die.
- No work that a worker has pushed, before it left in order, is computed by another one, unless partitions went back.
- No worker gets values beyond the bound on staleness.
"""

from __future__ import annotations

import itertools

import numpy as np

from shardyard.checkpoints.library import CheckpointLibrary
from shardyard.domain.push_names import DataShardSource
from shardyard.storage.storage import LocalStorage

from .network import Weather
from .rows import NAME as ROWS
from .rows import SHARED_COUNTED, counted, spread
from .state import JOB, Yard


def judge(yard: Yard) -> None:
    wanted = _wanted(yard)
    yard.world.violations += yard.hand_overs.repeated()
    if not yard.plan.stops and any(step is not None for step in yard.stops.values()):
        yard.world.violations.append("the job has stopped, and its script has not asked for that")
    plan = yard.plan
    if {kind for _, kind in plan.faults} == {"kill coordinator"} and plan.weather == Weather() and not plan.thief:
        kills = len(plan.faults)
        if yard.starts > len(yard.hosts) + kills:
            yard.world.violations.append(f"{kills} ends of the coordinator cost others their lives")
    for host, values in sorted(yard.finished.items()):
        _compare(yard, host, values, wanted)
    library = CheckpointLibrary(LocalStorage(yard.checkpoints))
    findings = library.verify(JOB)
    if findings:
        yard.world.violations.append(f"the checkpoints are damaged: {findings[:3]}")
        return
    if not yard.has_checkpoint:
        return  # none could be written in time; a manifest that is there is of one that was given up before
    manifest = library.load(JOB)
    state = dict(library.export_state(manifest))
    saved = {name: np.asarray(array).tobytes() for name, array in state.items()}
    if yard.plan.rows:
        ids, rows = (np.asarray(state[f"{ROWS}.{what}"]) for what in ("ids", "rows"))
        saved[ROWS] = spread(ids, rows, yard.plan.row_coordinates, yard.plan.partitions)
    _compare(yard, f"checkpoint {manifest.number}", saved, wanted)


def _compare(yard: Yard, whose: str, values: dict[str, bytes], wanted: dict[str, bytes]) -> None:
    if yard.plan.counts and any(step is not None for step in yard.stops.values()):
        _look_at_counts(yard, whose, values)
        return
    if yard.plan.stops and not yard.plan.counts:
        wanted = _wanted_at(yard, {name: values[name] for name in wanted})
    if yard.plan.wrong == "nan" and yard.plan.mode == "async":
        wanted = _without_left_out(yard, {name: values[name] for name in wanted}, wanted)
    if yard.plan.lives.age and yard.plan.shares_rows:
        wanted = wanted | {ROWS: _with_those_that_went(yard, values[ROWS], wanted[ROWS])}
    for name in sorted(wanted):
        if values[name] != wanted[name]:
            got = np.frombuffer(values[name], np.float64)
            want = np.frombuffer(wanted[name], np.float64)
            bad = [(i, float(got[i]), float(want[i])) for i in np.flatnonzero(got != want)[:4]]
            yard.world.violations.append(f"{whose}: {name} has (place, got, wanted) {bad}")


def _with_those_that_went(yard: Yard, values: bytes, wanted: bytes) -> bytes:
    """The wanted values of rows that may expire and be created again: whatever they have, between 0 and what they
    would have without expiry. The last rows are in each push, and never expire."""
    found = np.frombuffer(values).reshape(yard.plan.row_coordinates, -1)
    least = np.zeros_like(found)
    most = np.frombuffer(wanted).reshape(found.shape)
    least[-1] = most[-1]
    return np.clip(np.round(found), least, most).tobytes()


def _without_left_out(yard: Yard, values: dict[str, bytes], wanted: dict[str, bytes]) -> dict[str, bytes]:
    """The wanted values without what the coordinator lists as not finite. Of several runs, the one that fits the
    values."""
    ends = []
    for left_out in yard.left_out.values():
        arrays = {name: np.frombuffer(array, np.float64).copy() for name, array in wanted.items()}
        for name, array in arrays.items():
            size = yard.plan.row_coordinates if name == ROWS else yard.plan.coordinates
            array.reshape(size, -1)[sorted(left_out)] = 0.0
        ends.append({name: array.tobytes() for name, array in arrays.items()})
    return values if values in ends else ends[-1]


def _wanted_at(yard: Yard, values: dict[str, bytes]) -> dict[str, bytes]:
    """The wanted values of a synchronous job that was stopped. Of several runs, the one that fits the values."""
    undisturbed = yard.undisturbed
    assert undisturbed is not None
    ends = [undisturbed.versions.get(-1 if step is None else step, undisturbed.values) for step in yard.stops.values()]
    found = [end for end in ends if all(values[name] == end[name] for name in end)]
    return (found or ends)[-1]


def _look_at_counts(yard: Yard, whose: str, values: dict[str, bytes]) -> None:
    """Checks that a stopped job has counted no sample twice."""
    for name in sorted(_wanted(yard)):
        counts = np.frombuffer(values[name], np.float64)
        if not np.isin(counts, (0.0, 1.0)).all():
            yard.world.violations.append(f"{whose}: {name} has counted {sorted(set(counts.tolist()))}")


def _wanted(yard: Yard) -> dict[str, bytes]:
    plan = yard.plan
    if yard.undisturbed is not None:
        undisturbed = yard.undisturbed.values
        if not plan.rows_count or plan.wrong:
            return undisturbed
        pushes = np.frombuffer(undisturbed[ROWS], np.float64)[-1]
        return undisturbed | {ROWS: counted(np.append(np.ones(plan.coordinates), pushes), plan.partitions)}
    counts = np.ones(plan.coordinates)
    for feed, epoch in itertools.product(range(plan.feeds), range(plan.epochs)):
        for shard in range(-(-plan.samples // (plan.batch * plan.per_shard))):
            source = DataShardSource(feed, epoch, shard)
            if yard.plan.drops_last_of(source):
                counts[yard.plan.coordinates_of(source, yard.plan.batches_of(source) - 1)] = 0.0
            for batch in range(yard.plan.batches_of(source) if plan.wrong == "overflow" else 0):
                if yard.plan.is_wrong(source, batch):
                    counts[yard.plan.coordinates_of(source, batch)] = 0.0
    wanted = {f"v{p}": counts.tobytes() for p in range(plan.partitions)}
    if not plan.rows:
        return wanted
    in_rows = np.append(counts, 0.0)
    if plan.shares_rows:
        pushes = np.bincount(np.arange(plan.coordinates) % SHARED_COUNTED, minlength=plan.row_coordinates)
        pushes[-1] = plan.coordinates
        in_rows = np.maximum(pushes - (plan.lives.admitted - 1.0), 0.0)
    return wanted | {ROWS: counted(in_rows, plan.partitions)}
