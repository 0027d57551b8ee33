"""Bounded staleness: the time to train a network when one worker is slow, and the largest staleness of values read.

Four workers learn the digits by plain SGD. Each step sleeps STEP_S, one worker's steps FACTOR times that. The measure
is the time until TARGET_PERCENT of the held-out images are right, which worker 0 evaluates after each of its steps; the
evaluation is not counted. If the same worker is always slow, a bound lets the others take only a few steps more than
it takes: four updates compare with one mean of four gradients. If the slow worker changes at each step (turns), no
worker waits for long. Each mode has its own best rate of RATES, found with seeds from 100 on, which are not measured
here.

The servers count the staleness, over all of these runs and over others in which random steps are slow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from claims import Found
from claims.yard import Trained, Yard, timeline, yard
from harness.machine.delays import Delays
from harness.measuring.pairs import Figures, column, order, ratios, significant
from harness.measuring.report import Panel

WORKERS = 4
STALENESS = 3
BATCH = 32
STEP_S = 0.015
FACTOR = 4.0
TARGET_PERCENT = 95.0
LIMIT_S = 40.0
EPOCHS = 1_000
RATES = (0.2, 0.3, 0.4, 0.5, 0.7, 1.0, 1.4)
SHOWN_S = 0.5
SHOWN_FROM = 8
SYNC: dict[str, object] = {"job.consistency.mode": "sync", "job.consistency.logical_ranks": WORKERS}
DATA: dict[str, object] = {"job.data.batches_per_data_shard": 7}
"""The data is small: what the coordinator would choose is a batch, and a question to it for each step."""
BOUNDED = DATA | {"job.consistency.mode": "bounded", "job.consistency.staleness": STALENESS}
ASYNC = DATA | {"job.consistency.mode": "async"}
ALWAYS = Delays(STEP_S, WORKERS, "last", FACTOR)
TURNS = Delays(STEP_S, WORKERS, "turns", FACTOR)
CHANCE = Delays(STEP_S, WORKERS, "chance", 8.0, 0.1)
CHANCE_EPOCHS = 6
SETTINGS: dict[str, tuple[dict[str, object], float, Delays]] = {
    "sync": (SYNC, 1.4, ALWAYS),
    "bounded": (BOUNDED, 0.3, ALWAYS),
    "async": (ASYNC, 0.4, ALWAYS),
    "sync, by turns": (SYNC, 1.4, TURNS),
    "bounded, by turns": (BOUNDED, 0.5, TURNS),
}
"""Settings, rate, and delays of each run."""


class NotReached(Exception):
    """A run has not reached its target."""


def time_to_target(trained: Trained) -> float:
    """Seconds from the first step of any worker. Raises NotReached."""
    for at, percent in trained.answers[0]["curve"]:
        if percent >= TARGET_PERCENT:
            return float(at - trained.begun_s)
    raise NotReached(
        f"{TARGET_PERCENT:g}% held out are not right after {LIMIT_S:g} s: {trained.answers[0]['curve'][-1]}"
    )


def train(made: Yard, seed: int, settings: dict[str, object], lr: float, delays: Delays, **given: Any) -> Trained:
    return made.train(
        "digits", settings=settings, seed=seed, lr=lr, batch=BATCH, delays=delays, drop_last=True, **given
    )


def measure(seeds: Sequence[int]) -> Found:
    raw: dict[str, list[Figures]] = {name: [] for name in SETTINGS}
    by_chance: list[float] = []
    shown: dict[str, Trained] = {}
    with yard(workers=WORKERS) as made:
        for index, seed in enumerate(seeds):
            for name in order(list(SETTINGS), index):
                settings, lr, delays = SETTINGS[name]
                given = {"epochs": EPOCHS, "target_percent": TARGET_PERCENT, "limit_s": LIMIT_S}
                trained = shown[name] = train(made, seed, settings, lr, delays, **given)
                taken = sum(len(steps) for steps in trained.steps)
                figures = {"seconds": time_to_target(trained), "batches": float(taken)}
                raw[name].append(figures | {"staleness": float(trained.staleness)})
            by_chance.append(float(train(made, seed, BOUNDED, 0.3, CHANCE, epochs=CHANCE_EPOCHS).staleness))
            said = ", ".join(f"{name} {significant(of[-1]['seconds']):g} s" for name, of in raw.items())
            print(f"seed {seed}: {said}; staleness by chance {by_chance[-1]:g}", flush=True)
    bounded = [column(raw[name], "staleness") for name in ("bounded", "bounded, by turns")]
    found = {
        "bounded_time": ratios(raw["bounded"], raw["sync"], "seconds"),
        "bounded_time_by_turns": ratios(raw["bounded, by turns"], raw["sync, by turns"], "seconds"),
        "async_time": ratios(raw["async"], raw["sync"], "seconds"),
        "staleness_max": [max(each) for each in zip(*bounded, by_chance, strict=True)],
    }
    return Found({**raw, "staleness by chance": by_chance}, found, panels(raw, shown))


def panels(raw: dict[str, list[Figures]], shown: dict[str, Trained]) -> dict[str, list[Panel]]:
    slow = f"steps sleep {1e3 * STEP_S:g} ms, worker {WORKERS - 1}'s {FACTOR:g} times that"
    times = Panel(
        f"to {TARGET_PERCENT:g}% of the digits, one of {WORKERS} slowed {FACTOR:g} times",
        "s",
        bars={f"shardyard {name}": column(of, "seconds") for name, of in raw.items()},
    )
    lines = {
        mode: Panel(f"{mode}: {slow}", "s", spans=timeline(shown[mode], begin=SHOWN_FROM, seconds=SHOWN_S))
        for mode in ("sync", "bounded", "async")
    }
    return {"sync": [lines["sync"]], "bounded": [lines["bounded"], times], "async": [lines["async"]]}
