"""Clicks, day after day: DLRM or DeepFM, on synthetic clicks or on files in Criteo's format; tested on the day after.

python examples/recommender/train.py                                           alone, in this process
shardyard run -c configs/recommender.yaml examples/recommender/train.py        in a yard of its own, two workers
SHARDYARD_COORDINATOR=127.0.0.1:7070 python examples/recommender/train.py      in a running yard
python examples/recommender/train.py --train day_0 day_1 --test day_2          files of one's own
"""

import argparse
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from clicks import Clicks, World, auc, best_auc, parse_criteo, read_criteo
from models import MODELS, Model
from torch.utils.data import Dataset, TensorDataset

import shardyard as sy

TELL_EVERY_S = 5.0
TESTED_AT_ONCE = 4_096

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Day(NamedTuple):
    """What is trained on before what comes after it."""

    name: str
    dataset: Dataset[Any]
    collate: Callable[[Sequence[str]], Tensors] | None


class Scores:
    """Log-odds that a model gave, and what happened."""

    def __init__(self) -> None:
        self._found: list[tuple[torch.Tensor, torch.Tensor]] = []

    def add(self, log_odds: torch.Tensor, labels: torch.Tensor) -> None:
        self._found.append((log_odds.detach(), labels))

    def __len__(self) -> int:
        return sum(len(labels) for _, labels in self._found)

    def auc(self) -> float:
        log_odds, labels = (torch.cat(each).cpu().numpy() for each in zip(*self._found, strict=True))
        return auc(log_odds, labels)


class ScoringLoss:
    """Adds what the model gives to `scores`, before it is learned from."""

    def __init__(self) -> None:
        self.scores = Scores()

    def __call__(self, log_odds: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.scores.add(log_odds, labels)
        return F.binary_cross_entropy_with_logits(log_odds, labels)


def tensors(clicks: Clicks) -> Tensors:
    return torch.from_numpy(clicks.numbers), torch.from_numpy(clicks.ids), torch.from_numpy(clicks.labels)


def world(options: argparse.Namespace) -> World:
    return World(options.world, options.items)


def days(options: argparse.Namespace) -> Iterator[Day]:
    """Those that are trained on, in order."""
    for path in options.train or ():
        yield Day(path.name, sy.TextLines([path]), lambda lines: tensors(parse_criteo(lines)))
    if not options.train:
        for number in range(options.days - 1):
            clicks = world(options).day(number, options.clicks)
            yield Day(f"day {number}", TensorDataset(*tensors(clicks)), None)


def last_day(options: argparse.Namespace) -> Iterator[Clicks]:
    """Batches of the one after those, which is never trained on."""
    if options.test:
        yield from read_criteo(options.test, TESTED_AT_ONCE)
    else:
        whole = world(options).day(options.days - 1, options.clicks)
        for begin in range(0, len(whole), TESTED_AT_ONCE):
            part = slice(begin, begin + TESTED_AT_ONCE)
            yield Clicks(whole.numbers[part], whole.ids[part], whole.labels[part], whole.chances[part])


def train(job: sy.Job, model: Model, loss_of: ScoringLoss, day: Day, options: argparse.Namespace) -> Scores:
    """One day. The scores of this worker's clicks, each from before it was learned from for the first time."""
    before = loss_of.scores = Scores()
    told, trained = time.monotonic(), 0
    for epoch in range(options.epochs):
        batches = job.batches(
            day.dataset,
            batch_size=options.batch_size,
            collate_fn=day.collate,
            look_ahead=lambda batch: model.asked(batch[1]),
        )
        if epoch:
            loss_of.scores = Scores()  # of clicks that were learned from
        for numbers, ids, labels in batches:
            loss = job.train_step(numbers, ids, labels)
            job.log(loss=loss)
            trained += len(labels)
            if (passed := time.monotonic() - told) >= TELL_EVERY_S:
                print(f"step {job.step:,}: loss {loss.item():.3f}, {trained / passed:,.0f} clicks/s", flush=True)
                told, trained = time.monotonic(), 0
    return before


def test(job: sy.Job, model: torch.nn.Module, batches: Iterator[Clicks]) -> str:
    scores, chances = Scores(), []
    model.eval()
    with torch.no_grad():
        for clicks in batches:
            numbers, ids, labels = tensors(clicks)
            scores.add(model(numbers.to(job.device), ids).cpu(), labels)
            if clicks.chances is not None:
                chances.append(clicks.chances)
    found = f"AUC {scores.auc():.4f} of {len(scores):,} clicks of the day after"
    return found + (f"; the best possible is {best_auc(np.concatenate(chances)):.4f}" if chances else "")


def rows_of(model: torch.nn.Module) -> int:
    return sum(len(table) for table in sy.tables.tables_of(model).values())


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--coordinator", help="HOST:PORT of a running yard")
    parser.add_argument("--config", help="a YAML file, see docs/reference/configuration.md")
    parser.add_argument("--job", default=os.environ.get("SHARDYARD_JOB", "recommender"), help="the job's name")
    parser.add_argument("--seed", type=int, help="the job's seed")
    parser.add_argument("--model", choices=MODELS, default="dlrm")
    parser.add_argument("--dim", type=int, default=16, help="of a category's vector")
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--epochs", type=int, default=1, help="over each day, before the next one begins")
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate of the layers, for Adam")
    parser.add_argument("--row-rate", type=float, default=0.05, help="learning rate of the rows, for Adagrad")
    parser.add_argument("--save", type=Path, help="a file for the model's state_dict, rows included")
    files = parser.add_argument_group("files in Criteo's format")
    files.add_argument("--train", type=Path, nargs="+", metavar="FILE", help="one a day, in the order of the days")
    files.add_argument("--test", type=Path, nargs="+", metavar="FILE", help="of the day after; may be packed (.gz)")
    synthetic = parser.add_argument_group("synthetic clicks")
    synthetic.add_argument("--days", type=int, default=5, help="the last one is the day to test on")
    synthetic.add_argument("--clicks", type=int, default=100_000, help="a day")
    synthetic.add_argument("--items", type=int, default=World.items, help="ids that each category has on a day")
    synthetic.add_argument("--world", type=int, default=World.seed, help="the seed of all that is drawn")
    options = parser.parse_args()
    if bool(options.train) != bool(options.test):
        parser.error("--train and --test go together: files to learn from, and files of the day after")
    if options.days < 2:
        parser.error("--days: at least 2, one to learn from and one to test on")
    for path in options.train or ():
        if path.suffix == ".gz":
            parser.error(f"{path} is packed, and lines to learn from are read at their places: gunzip it first")
    return options


def main() -> None:
    options = parse()
    settings = {} if options.seed is None else {"job.seed": options.seed}
    with sy.connect(options.coordinator, config=options.config, job=options.job, settings=settings) as job:
        model = MODELS[options.model](options.dim, options.row_rate).to(job.device)
        loss_of = ScoringLoss()
        job.prepare(model, torch.optim.Adam(model.parameters(), lr=options.rate), loss=loss_of)
        for day in days(options):
            before = train(job, model, loss_of, day, options)
            if job.chief and len(before):
                print(f"{day.name}: AUC {before.auc():.4f} of {len(before):,} clicks, before they were learned from")

        if job.chief:
            print(f"{rows_of(model):,} rows after {job.step:,} steps")
            print(test(job, model, last_day(options)))
            print(f"{rows_of(model):,} rows after the test", flush=True)
            if options.save:
                torch.save(model.state_dict(), options.save)


if __name__ == "__main__":
    main()
