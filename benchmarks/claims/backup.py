"""Backup workers: the time of a synchronous step when random steps are slow, and the accuracy that is reached.

WORKERS workers, each with one logical rank, learn the digits by SGD with momentum. Each step sleeps STEP_S, slow steps
FACTOR times that. A step of the job ends when the first worker has its values. All steps count, including those that
make up for dropped contributions. Slow is a SHARE of the steps that each worker begins, or a share of its time
(OF_TIME): a worker that sleeps through ten steps of the job cannot become slow again during them, so the first is a
third of its time. Steps with BACKUP backup workers and without are compared with the steps of the same job without
slow workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from claims import Found
from claims.yard import Trained, timeline, yard
from harness.machine.delays import Delays
from harness.measuring.intervals import paired
from harness.measuring.pairs import order, significant
from harness.measuring.report import Panel

WORKERS = 8
BACKUP = 2
STEP_S = 0.05
FACTOR = 10.0
SHARE = 0.05
OF_TIME = SHARE / (FACTOR - (FACTOR - 1) * SHARE)
"""Of the steps begun, where slow ones take SHARE of all time."""
BATCH = 8
EPOCHS = 4
LR = 0.1
MOMENTUM = 0.9
SHOWN_FROM = 4
SHOWN_S = 1.5
SYNC: dict[str, object] = {"job.consistency.mode": "sync", "job.consistency.logical_ranks": WORKERS}
WITH: dict[str, object] = SYNC | {"job.consistency.backup_workers": BACKUP}
ALIKE = Delays(STEP_S, WORKERS)
SLOW = Delays(STEP_S, WORKERS, "chance", FACTOR, SHARE)
SLOW_OF_TIME = Delays(STEP_S, WORKERS, "chance", FACTOR, OF_TIME)
UNDISTURBED, BACKUPS, BACKUPS_OF_TIME = "sync, undisturbed", "backup", "backup, of time"
SETTINGS: dict[str, tuple[dict[str, object], Delays]] = {
    UNDISTURBED: (SYNC, ALIKE),
    "sync, of time": (SYNC, SLOW_OF_TIME),
    BACKUPS: (WITH, SLOW),
    BACKUPS_OF_TIME: (WITH, SLOW_OF_TIME),
}


def step_times_s(trained: Trained) -> list[float]:
    """The time of each step of the job but the first, from the end of the step before it."""
    over: dict[int, float] = {}
    for steps in trained.steps:
        for number, _, _, at in steps:
            over[int(number)] = min(at, over.get(int(number), at))
    return [later - earlier for earlier, later in pairwise(sorted(over.values()))]


def measure(seeds: Sequence[int]) -> Found:
    times_s: dict[str, list[float]] = {name: [] for name in SETTINGS}
    accuracy: dict[str, list[float]] = {name: [] for name in SETTINGS}
    shown: dict[str, Trained] = {}
    with yard(workers=WORKERS) as made:
        for index, seed in enumerate(seeds):
            for name in order(list(SETTINGS), index):
                settings, delays = SETTINGS[name]
                trained = shown[name] = made.train(
                    "digits",
                    settings=settings,
                    delays=delays,
                    seed=seed,
                    lr=LR,
                    momentum=MOMENTUM,
                    batch=BATCH,
                    epochs=EPOCHS,
                    drop_last=True,
                )
                found = step_times_s(trained)
                times_s[name] += found
                accuracy[name].append(trained.answers[0]["accuracy_percent"])
                print(f"seed {seed}, {name}: {accuracy[name][-1]:.2f}%, {_said(found)}", flush=True)
    for name in SETTINGS:
        points = paired(accuracy[name], accuracy[UNDISTURBED])
        print(f"{name}: {points} points against {UNDISTURBED}; {_said(times_s[name])}", flush=True)
    p50 = float(np.percentile(times_s[UNDISTURBED], 50))
    ratios = {
        "backup_p99": [float(np.percentile(times_s[BACKUPS], 99)) / p50],
        "backup_mean": [float(np.mean(times_s[BACKUPS])) / p50],
        "backup_p99_of_time": [float(np.percentile(times_s[BACKUPS_OF_TIME], 99)) / p50],
        "sync_p99_of_time": [float(np.percentile(times_s["sync, of time"], 99)) / p50],
        "backup_points": [a - b for a, b in zip(accuracy[BACKUPS], accuracy[UNDISTURBED], strict=True)],
    }
    raw = {"accuracy_percent": accuracy, "step_ms": {n: [1e3 * each for each in of] for n, of in times_s.items()}}
    return Found(raw, ratios, {"backup": panels(times_s, shown[BACKUPS])})


def _said(times_s: Sequence[float]) -> str:
    p50, p95, p99 = (significant(1e3 * float(each)) for each in np.percentile(times_s, (50, 95, 99)))
    return f"{len(times_s)} steps, p50 {p50:g} ms, p95 {p95:g}, p99 {p99:g}, mean {1e3 * np.mean(times_s):.1f}"


def panels(times_s: Mapping[str, Sequence[float]], shown: Trained) -> list[Panel]:
    shares = (50, 75, 90, 95, 98, 99)
    lines = {
        name: {float(share): 1e3 * float(np.percentile(of, share)) for share in shares} for name, of in times_s.items()
    }
    slow = f"{WORKERS - BACKUP}+{BACKUP} workers, {100 * SHARE:g}% of steps sleep {FACTOR:g} times {1e3 * STEP_S:g} ms"
    return [
        Panel(slow, "s", spans=timeline(shown, begin=SHOWN_FROM, seconds=SHOWN_S)),
        Panel("steps of the job", "ms", lines=lines, x="percentile"),
    ]
