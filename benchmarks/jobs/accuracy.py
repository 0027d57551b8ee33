"""Held-out accuracy and wall time of the digits, over seeds, synchronous and asynchronous, in real processes.

    make bench BENCH=accuracy            (with options: ARGS="--seeds 5")

Each run is `shardyard run` with two servers and two workers. The last line is one JSON object.
"""

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
ACCURACY = re.compile(r"held-out accuracy ([0-9.]+)% after (\d+) steps")
RUN_S_MAX = 120


def run(mode: str, seed: int) -> tuple[float, float]:
    """Returns one run's accuracy in percent, and its seconds from start to end, process starts included."""
    command = [sys.executable, "-m", "shardyard_launcher.cli", "run", "-c", f"configs/{mode}.yaml"]
    command += ["--set", f"job.seed={seed}", "examples/digits/train.py"]
    begin = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=RUN_S_MAX, check=True)
    seconds = time.perf_counter() - begin
    found = ACCURACY.findall(done.stdout)
    assert len(found) == 1, done.stdout[-2000:]
    return float(found[0][0]), seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    raw: dict[str, list[tuple[float, float]]] = {"sync": [], "async": []}
    for seed in range(options.seeds):
        for mode, results in raw.items():
            results.append(run(mode, seed))
            print(f"{mode} seed {seed}: {results[-1][0]}% in {results[-1][1]:.1f} s", flush=True)
    facts = {"cores": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()}
    summary = {
        f"{mode}_{name}": {
            "median": statistics.median(values),
            "min": min(values),
            "max": max(values),
        }
        for mode, results in raw.items()
        for name, values in (("accuracy_percent", [r[0] for r in results]), ("seconds", [r[1] for r in results]))
    }
    print(json.dumps({"benchmark": "accuracy", "machine": facts, "raw": raw, "summary": summary}))


if __name__ == "__main__":
    main()
