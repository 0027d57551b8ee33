"""The job under fire: the digits, and beside them a count, where a sample's gradient adds 1 to its own coordinate. With
tables: also to a row of its own, and what the digits' pixels say is looked up in rows that are learned. Forgetful: also
in rows that ids have late, and not for long.

So a push that was lost or counted twice shows as a whole number that is wrong. What a batch was computed on goes into
the file OUT/computed, one line a batch, before it is pushed; when the script ends well, OUT/PID.json has what came out.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

import shardyard as sy

FAR = 1_000_003
"""Between the ids of two samples' rows."""
SHADES = 17
NEIGHBOURS = 4
"""So many samples share an id of the forgetful table."""


class Net(torch.nn.Module):
    def __init__(self, samples: int, *, tables: bool, forgetful: bool) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(1, 8, kernel_size=3, padding=1),
            torch.nn.BatchNorm2d(8),
            torch.nn.ReLU(),
            torch.nn.MaxPool2d(2),
            torch.nn.Flatten(),
            torch.nn.Dropout(0.2),
            torch.nn.Linear(128, 10),
        )
        self.counts = torch.nn.Parameter(torch.zeros(samples, dtype=torch.float64))
        self.tables: torch.nn.ModuleDict | None = None
        if tables:
            seen = sy.tables.Table(1, name="seen", optimizer=sy.tables.SGD(lr=1.0), initial=sy.tables.zeros())
            pixels = sy.tables.Table(10, name="pixels", optimizer=sy.tables.Adagrad(lr=0.01))
            self.tables = torch.nn.ModuleDict(
                {"seen": sy.Embedding(1, table=seen), "pixels": sy.EmbeddingBag(10, "sum", table=pixels)}
            )
            if forgetful:
                lately = sy.tables.Table(
                    10,
                    name="lately",
                    optimizer=sy.tables.Adagrad(lr=0.01),
                    admission=sy.tables.AdmitAfter(2, cells=64),
                    expiry=sy.tables.Expiry(age_steps=6),
                )
                self.tables["lately"] = sy.Embedding(10, table=lately)

    def look_ups(self, images: torch.Tensor, index: torch.Tensor) -> dict[torch.nn.Module, torch.Tensor]:
        """What modules of tables will be given for a batch."""
        if self.tables is None:
            return {}
        shades = (images.flatten(1) * 16).round().long()
        pixels = torch.arange(shades.shape[1]) * SHADES + shades
        ids = {"seen": (index - 7) * FAR, "pixels": pixels, "lately": index // NEIGHBOURS}
        return {module: ids[name] for name, module in self.tables.items()}

    def forward(self, images: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits, and the sum of the counts of these samples."""
        logits, counts = self.layers(images), self.counts[index].sum()
        if self.tables is not None:
            seen, *learned = [module(ids) for module, ids in self.look_ups(images, index).items()]
            counts = counts + seen.double().sum()
            for rows in learned:
                logits = logits + rows
        return logits, counts

    def rows_seen(self, samples: int) -> list[float]:
        """Of each sample."""
        if self.tables is None:
            return []
        with torch.no_grad():
            return self.tables["seen"]((torch.arange(samples) - 7) * FAR).flatten().tolist()


def read_digits(samples: int) -> TensorDataset:
    digits = load_digits()
    images = torch.tensor(digits.images[:samples], dtype=torch.float32).unsqueeze(1) / 16
    return TensorDataset(images, torch.tensor(digits.target[:samples]), torch.arange(samples))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--parts", type=int, required=True, help="of a step, whose mean is taken; 1: there is none")
    parser.add_argument("--tables", action="store_true")
    parser.add_argument("--forgetful", action="store_true", help="with tables: one whose rows come late, and go")
    parser.add_argument("--look-ahead", action="store_true", help="say which rows will be looked up")
    parser.add_argument("--pause-ms", type=float, default=0)
    parser.add_argument("--gate", type=Path, help="wait until this file is there before the job is joined")
    options = parser.parse_args()
    dataset = read_digits(options.samples)
    parent = os.getppid()
    while options.gate is not None and not options.gate.exists():
        if os.getppid() != parent:
            sys.exit("nobody is there to open the gate")
        time.sleep(0.01)
    computed = os.open(options.out / "computed", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with sy.connect() as job:
        torch.manual_seed(job.seed)
        model = Net(options.samples, tables=options.tables, forgetful=options.forgetful)
        learned = [parameter for name, parameter in model.named_parameters() if name != "counts"]
        optimizer = torch.optim.SGD(
            [{"params": learned, "lr": 0.03, "momentum": 0.9}, {"params": [model.counts], "lr": 1.0}], lr=0.03
        )
        model, moved = job.prepare(model, optimizer)
        model.train()
        ahead = {"look_ahead": lambda batch: model.look_ups(batch[0], batch[2])} if options.look_ahead else {}
        batches = job.batches(dataset, batch_size=options.batch_size, epochs=options.epochs, **ahead)
        for images, labels, index in batches:
            time.sleep(options.pause_ms / 1000)
            logits, counts = model(images, index)
            loss = F.cross_entropy(logits, labels)
            moved.zero_grad()
            (loss - options.parts * counts).backward()
            os.write(computed, json.dumps([os.getpid(), index.tolist()]).encode() + b"\n")
            moved.step()
            job.log(loss=loss)
        counts = model.counts.detach().tolist()
        result = {"counts": counts, "rows": model.rows_seen(options.samples), "step": job.step}
    os.close(computed)
    part = options.out / f"{os.getpid()}.part"
    part.write_text(json.dumps(result))
    part.rename(options.out / f"{os.getpid()}.json")


if __name__ == "__main__":
    main()
