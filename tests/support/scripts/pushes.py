"""A training script for tests: pushes 1 to all values until the file given is there."""

import sys
import time
from pathlib import Path

import torch

import shardyard as sy


def main() -> None:
    end = Path(sys.argv[1])
    with sy.connect() as job:
        names = [f"v{index}" for index in range(4)]
        job.register({name: torch.zeros(16, dtype=torch.float64) for name in names}, optimizer="sgd", lr=1.0)
        pushed = 0
        while not end.exists():
            time.sleep(0.02)
            job.push({name: -torch.ones(16, dtype=torch.float64) for name in names})
            pushed += 1
        print(f"pushed {pushed}, step {job.step}", flush=True)


if __name__ == "__main__":
    main()
