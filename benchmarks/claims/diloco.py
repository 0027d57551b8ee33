"""Local steps: what DiLoCo loses against synchronous steps on the same samples, and how many bytes it saves.

WORKERS workers, each with one logical rank, learn to predict the next character of Python's standard library: STEPS
steps of each rank with AdamW at a constant rate, each sample once. Both begin with the values that one process has
after FIRST_STEPS steps (Douillard et al. begin with a trained model, too). DiLoCo takes rounds of ROUND_STEPS steps,
with the outer optimizer of the paper. Another run drops half of the outer gradients at random: the gradient of the
round's last step is made NaN, so the round is not finite and does not count. Each has its own best rate of RATES,
found with seeds from 100 on, which are not measured here. `_same_rate`: both with DiLoCo's rate.

The kernel counts the bytes of all connections of the workers, in runs whose payloads travel over streams, for one seed.
Its values must equal those of the run over shared memory, to the last bit.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812

from claims import Found
from claims.yard import Trained, Yard, timeline, yard
from harness.measuring.pairs import Figures, column, order, ratios
from harness.measuring.report import Panel
from harness.workloads import characters

WORKERS = 4
ROUND_STEPS = 100
STEPS = 1_000
BATCH = 32
FIRST_STEPS = 2_000
FIRST_LR = 4e-3
RATES = (2.5e-4, 5e-4, 1e-3, 2e-3)
SHOWN_S = 1.0
SYNC: dict[str, object] = {"job.consistency.mode": "sync", "job.consistency.logical_ranks": WORKERS}
LOCAL: dict[str, object] = {
    "job.consistency.mode": "local",
    "job.consistency.logical_ranks": WORKERS,
    "job.consistency.steps": ROUND_STEPS,
    "job.consistency.outer_lr": 0.7,
    "job.consistency.outer_momentum": 0.9,
    "job.nonfinite_max": 0,
}
OVER_STREAMS: dict[str, object] = {"worker.same_host": "never"}
SETTINGS: dict[str, tuple[dict[str, object], float, float]] = {
    "sync": (SYNC, 1e-3, 0.0),
    "sync, same rate": (SYNC, 2.5e-4, 0.0),
    "DiLoCo": (LOCAL, 2.5e-4, 0.0),
    "DiLoCo, half dropped": (LOCAL, 2.5e-4, 0.5),
}
"""Settings, rate, and the share of outer gradients that is dropped."""


class NotTheSame(Exception):
    """The same training gave different values over streams and over shared memory."""


def save_start(path: Path) -> float:
    """Writes the values with which all runs begin. Returns their loss."""
    learned, held_out = characters.split()
    model = characters.make_network(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=FIRST_LR)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - 0.9 * step / FIRST_STEPS)
    random = torch.Generator().manual_seed(0)
    for _ in range(FIRST_STEPS):
        texts, nexts = learned.take(torch.randint(len(learned), (WORKERS * BATCH,), generator=random).numpy())
        optimizer.zero_grad()
        loss = F.cross_entropy(model(texts), nexts)
        torch.autograd.backward(loss)
        optimizer.step()
        schedule.step()
    torch.save(model.state_dict(), path)
    return characters.held_out_loss(model, held_out)


def train(made: Yard, seed: int, name: str, start: Path, given: dict[str, object] | None = None) -> Trained:
    settings, lr, drop = SETTINGS[name]
    return made.train(
        "characters",
        settings=settings | (given or {}),
        seed=seed,
        lr=lr,
        batch=BATCH,
        steps=STEPS,
        start=str(start),
        drop=drop,
    )


def figures_of(trained: Trained) -> Figures:
    """`loss`: of the servers' values; `seconds`: of the slowest worker; the others: sums over the workers."""
    answers = trained.answers
    return {
        "loss": float(answers[0]["loss"]),
        "seconds": max(float(answer["seconds"]) for answer in answers),
        "dropped": float(sum(answer["dropped"] for answer in answers)),
        "bytes": float(sum(answer["sent"] + answer["received"] for answer in answers)),
    }


def measure(seeds: Sequence[int]) -> Found:
    raw: dict[str, list[Figures]] = {name: [] for name in SETTINGS}
    streams: dict[str, Figures] = {}
    shown: dict[str, Trained] = {}
    with tempfile.TemporaryDirectory(prefix="shardyard-bench-") as folder, yard(workers=WORKERS) as made:
        start = Path(folder, "start.pt")
        first_loss = save_start(start)
        print(f"begins with a loss of {first_loss:.4f}", flush=True)
        digests = {}
        for index, seed in enumerate(seeds):
            for name in order(list(SETTINGS), index):
                trained = shown[name] = train(made, seed, name, start)
                raw[name].append(figures_of(trained))
                digests[seed, name] = trained.answers[0]["digest"]
            said = ", ".join(f"{name} {of[-1]['loss']:.4f} ({of[-1]['seconds']:.1f} s)" for name, of in raw.items())
            print(f"seed {seed}: {said}", flush=True)
        for name in ("sync", "DiLoCo"):
            trained = train(made, seeds[0], name, start, OVER_STREAMS)
            if trained.answers[0]["digest"] != digests[seeds[0], name]:
                raise NotTheSame(name)
            streams[name] = figures_of(trained)
            print(f"{name}: {streams[name]['bytes']:,.0f} bytes there and back over streams", flush=True)
    won = {name: first_loss - statistics.mean(column(of, "loss")) for name, of in raw.items()}
    print("nats won: " + ", ".join(f"{name} {nats:.4f}" for name, nats in won.items()), flush=True)
    dropped = sum(column(raw["DiLoCo, half dropped"], "dropped")) / (len(seeds) * WORKERS * (STEPS // ROUND_STEPS))
    print(f"{100 * dropped:.0f}% of the outer gradients were dropped where half should be", flush=True)
    found = {
        "diloco_loss": ratios(raw["DiLoCo"], raw["sync"], "loss"),
        "diloco_loss_same_rate": ratios(raw["DiLoCo"], raw["sync, same rate"], "loss"),
        "diloco_loss_half_dropped": ratios(raw["DiLoCo, half dropped"], raw["sync"], "loss"),
        "diloco_bytes": [streams["sync"]["bytes"] / streams["DiLoCo"]["bytes"]],
        "diloco_seconds": ratios(raw["DiLoCo"], raw["sync"], "seconds"),
        "diloco_won": [won["DiLoCo"] / won["sync"]],
    }
    losses = {f"shardyard {name}": column(of, "loss") for name, of in raw.items()}
    means = ", ".join(f"{name} {statistics.mean(of):.4f}" for name, of in losses.items())
    print(f"means: {means}", flush=True)
    panels = [
        Panel(
            f"{WORKERS} workers, rounds of {ROUND_STEPS} steps: two cores for all of them",
            "s",
            spans=timeline(shown["DiLoCo"], begin=ROUND_STEPS, seconds=SHOWN_S),
        ),
        Panel(f"characters, held out, {STEPS:,} steps of each rank", "nats", bars=losses),
    ]
    return Found({**raw, "over streams": streams, "first_loss": first_loss}, found, {"local": panels})
