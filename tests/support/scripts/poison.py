"""A training script for tests, over a data set with a sample that kills the process that reads it.

Each sample has one coordinate, and its gradient adds 1 to it; in a synchronous job, which takes the mean over samples,
it adds the sample's part of 1 in a step. So lost and doubled samples show.
"""

import argparse
import json
import os
import signal
import time
from pathlib import Path

import torch
from torch.utils.data import Dataset

import shardyard as sy

BATCH = 4


class Poisoned(Dataset[torch.Tensor]):
    """Sample `poison` kills the process that reads it. It is none of those that a fingerprint is made of."""

    def __init__(self, samples: int, poison: int) -> None:
        self._samples = samples
        self._poison = poison

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self._poison:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.tensor(index)


def meet(folder: Path) -> None:
    (folder / str(os.getpid())).touch()
    until = time.monotonic() + 60
    while len(list(folder.iterdir())) < 2:
        assert time.monotonic() < until, "nobody else has come"
        time.sleep(0.01)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--samples", type=int, default=99)
    parser.add_argument("--poison", type=int, default=41)
    parser.add_argument("--factor", type=float, default=1.0, help="of all gradients")
    parser.add_argument("--meet", help="a folder where two workers wait for each other before they train")
    options = parser.parse_args()
    with sy.connect() as job:
        counts = torch.nn.Parameter(torch.zeros(options.samples, dtype=torch.float64))
        model = torch.nn.ParameterList([counts])
        model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        if options.meet:
            meet(Path(options.meet))
        for index in job.batches(Poisoned(options.samples, options.poison), batch_size=BATCH):
            optimizer.zero_grad()
            (-counts[index].sum() * options.factor).backward()
            optimizer.step()
            print("computed", flush=True)
        found = counts.detach().tolist()
    with open(options.out, "w") as file:
        json.dump({"counts": found}, file)


if __name__ == "__main__":
    main()
