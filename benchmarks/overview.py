"""Draws what several benchmarks have measured against a peer: one bar for each ratio, of the JSON lines on its input.

for name in latency training push_pull tables; do make bench BENCH=$name; done | tee all.txt
.venv/bin/python benchmarks/overview.py < all.txt            (or: ... FOLDER)
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "performance"
SHOWN = {
    "push_pull_same_host": "64 MiB there and back, one machine",
    "push_pull_tcp": "64 MiB there and back, TCP",
    "latency_4k": "4 KiB step, one machine",
    "latency_4k_8_callers": "4 KiB steps of 8 workers, one machine",
    "latency_4k_tcp": "4 KiB step, TCP",
    "training_async": "MLP, async, one machine",
    "training_async_tcp": "MLP, async, TCP",
    "training_sync": "MLP, sync, one machine (DDP)",
    "training_sync_tcp": "MLP, sync, TCP (DDP)",
    "training_25m_async": "25M parameters, async",
    "training_25m_sync": "25M parameters, sync (DDP)",
    "tables_steps": "embedding table, 1 worker",
    "tables_steps_2_workers": "embedding table, 2 workers",
    "tables_steps_window": "embedding table, push in flight",
}


def main() -> None:
    found: dict[str, dict[str, float]] = {}
    for line in sys.stdin:
        if line.startswith('{"benchmark"'):
            found |= json.loads(line)["ratios"]
    shown = [(text, found[name]) for name, text in SHOWN.items() if name in found]
    figure, axis = plt.subplots(figsize=(8, 0.36 * len(shown) + 0.9), layout="constrained")
    for place, (text, ratio) in enumerate(reversed(shown)):
        axis.barh(place, ratio["median"], height=0.62, color="#3b6ea5" if ratio["median"] >= 1 else "#c46b5d")
        axis.plot([ratio["min"], ratio["max"]], [place, place], color="black", linewidth=1)
        axis.text(max(ratio["max"], ratio["median"]), place, f"  {ratio['median']:.2f}", va="center", fontsize=8)
        print(f"| {text} | {ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f}) |")
    axis.set_yticks(range(len(shown)), [text for text, _ in reversed(shown)], fontsize=8)
    axis.axvline(1, color="#888888", linewidth=1)
    axis.set_xlabel("times as fast as torch.distributed.rpc, or DDP", fontsize=9)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(Path(sys.argv[1] if len(sys.argv) > 1 else FOLDER) / "overview.png", dpi=110)


if __name__ == "__main__":
    main()
