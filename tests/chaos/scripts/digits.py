"""The job under fire: the digits, and beside them three counts, at the beginning, in the middle and at the end of the
forward, where a sample's gradient adds 1 to its own coordinate. With tables: also to a row of its own, and what the
digits' pixels say is looked up in rows that are learned. Forgetful: also in rows that ids have late, and not for long.

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
from shardyard_worker.collectives import shared_members

FAR = 1_000_003
"""Between the ids of two samples' rows."""
SHADES = 17
NEIGHBOURS = 4
"""So many samples share an id of the forgetful table."""


class Counts(torch.nn.Module):
    """Adds to what comes in a number of its own for each sample."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.counts = torch.nn.Parameter(torch.zeros(samples, dtype=torch.float64))

    def forward(self, index: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        return given + self.counts[index]


class Net(torch.nn.Module):
    """`is_plain`: without what a batch that is cut up changes."""

    def __init__(self, samples: int, *, tables: bool, forgetful: bool, is_plain: bool) -> None:
        super().__init__()
        self.first, self.between, self.last = Counts(samples), Counts(samples), Counts(samples)
        self.look = torch.nn.Sequential(
            torch.nn.Conv2d(1, 8, kernel_size=3, padding=1),
            *([] if is_plain else [torch.nn.BatchNorm2d(8)]),
            torch.nn.ReLU(),
            torch.nn.MaxPool2d(2),
            torch.nn.Flatten(),
            *([] if is_plain else [torch.nn.Dropout(0.2)]),
        )
        self.judge = torch.nn.Sequential(torch.nn.Linear(128, 12), torch.nn.ReLU(), torch.nn.Linear(12, 10))
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
        """Logits, and what was counted for each of these samples."""
        counted = self.first(index, torch.zeros_like(index, dtype=torch.float64))
        seen = self.look(images)
        counted = self.between(index, counted)
        logits = self.judge(seen)
        counted = self.last(index, counted)
        if self.tables is not None:
            rows, *learned = [module(ids) for module, ids in self.look_ups(images, index).items()]
            counted = counted + rows.double().flatten()
            for each in learned:
                logits = logits + each
        return logits, counted

    def rows_seen(self, samples: int) -> list[float]:
        """Of each sample."""
        if self.tables is None:
            return []
        with torch.no_grad():
            return self.tables["seen"]((torch.arange(samples) - 7) * FAR).flatten().tolist()


def read_digits(samples: int) -> TensorDataset:
    digits = load_digits()
    images = torch.tensor(digits.images[:samples], dtype=torch.get_default_dtype()).unsqueeze(1) / 16
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
    parser.add_argument("--double", action="store_true", help="compute in float64")
    parser.add_argument("--plain", action="store_true", help="without BatchNorm and Dropout")
    parser.add_argument("--train-step", action="store_true", help="take steps by job.train_step")
    parser.add_argument("--two-machines", action="store_true", help="share memory with processes of the same parity")
    parser.add_argument("--pause-ms", type=float, default=0)
    parser.add_argument("--gate", type=Path, help="wait until this file is there before the job is joined")
    options = parser.parse_args()
    if options.two_machines:
        shared_members.this_machine = lambda: f"machine {os.getpid() % 2}"
    parent = os.getppid()
    while options.gate is not None and not options.gate.exists():
        if os.getppid() != parent:
            sys.exit("nobody is there to open the gate")
        time.sleep(0.01)
    if any(options.out.glob("*.json")):
        return  # on a slow machine it comes when the others have done all, and would begin the job anew
    computed = os.open(options.out / "computed", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with sy.connect() as job:
        torch.manual_seed(job.seed)
        if options.double:
            torch.set_default_dtype(torch.float64)
        dataset = read_digits(options.samples)
        model = Net(options.samples, tables=options.tables, forgetful=options.forgetful, is_plain=options.plain)
        counts = [model.first.counts, model.between.counts, model.last.counts]
        learned = [each for name, each in model.named_parameters() if not name.endswith(".counts")]
        optimizer = torch.optim.SGD(
            [{"params": learned, "lr": 0.03, "momentum": 0.9}, {"params": counts, "lr": 1.0}], lr=0.03
        )

        def loss_of(found: tuple[torch.Tensor, torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
            logits, counted = found
            return F.cross_entropy(logits, labels) - options.parts * options.batch_size * counted.mean()

        model, moved = job.prepare(model, optimizer, loss=loss_of)
        model.train()
        ahead = {"look_ahead": lambda batch: model.look_ups(batch[0], batch[2])} if options.look_ahead else {}
        batches = job.batches(dataset, batch_size=options.batch_size, epochs=options.epochs, **ahead)
        for images, labels, index in batches:
            time.sleep(options.pause_ms / 1000)
            line = json.dumps([os.getpid(), index.tolist()]).encode() + b"\n"
            if options.train_step:
                os.write(computed, line)
                loss = job.train_step(images, index, labels)
            else:
                loss = loss_of(model(images, index), labels)
                moved.zero_grad()
                loss.backward()
                os.write(computed, line)
                moved.step()
            job.log(loss=loss)
        found = [each.detach().tolist() for each in counts]
        result = {"counts": found, "rows": model.rows_seen(options.samples), "step": job.step}
    os.close(computed)
    part = options.out / f"{os.getpid()}.part"
    part.write_text(json.dumps(result))
    part.rename(options.out / f"{os.getpid()}.json")


if __name__ == "__main__":
    main()
