"""equivalence.py MODEL OUT: 50 steps of a model of the examples in float64, the same script under every strategy.

Writes, for each batch, the step, the loss and the samples; and at the end what the model makes of a few samples, if it
can be asked for that.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import shardyard as sy

ROOT = Path(__file__).resolve().parents[3]
for example in ("digits", "gpt"):
    sys.path.append(str(ROOT / "examples" / example))

STEPS, STEP_SAMPLES = 50, 8
IDS, DIM = 60, 4


class Clicks(torch.nn.Module):
    """Rows of a table and numbers, as in the recommender; `rows` makes the vectors of two ids."""

    def __init__(self, rows: torch.nn.Module) -> None:
        super().__init__()
        self.rows = rows
        self.bottom = torch.nn.Sequential(torch.nn.Linear(3, DIM), torch.nn.ReLU()).double()
        self.top = torch.nn.Sequential(torch.nn.Linear(3 * DIM, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)).double()

    def forward(self, numbers: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        vectors = self.rows(ids).double().flatten(1)
        found: torch.Tensor = self.top(torch.cat([self.bottom(numbers), vectors], dim=1)).squeeze(1)
        return found


def digits() -> torch.nn.Module:
    """That of the example without what differs between a batch and its halves, normalization and dropout, and with a
    layer more, so that there are two to cut."""
    from train import make_network

    kept = [layer for layer in make_network() if not isinstance(layer, torch.nn.BatchNorm2d | torch.nn.Dropout)]
    return torch.nn.Sequential(*kept[:-1], torch.nn.Linear(512, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)).double()


def gpt() -> torch.nn.Module:
    from model import GPT, Shape

    return GPT(Shape(layers=2, heads=2, width=16, block=12, vocabulary=32)).double()


def rows_of_servers() -> torch.nn.Module:
    return sy.Embedding(DIM, table="ids", optimizer=sy.tables.SGD(lr=0.5), initial=sy.tables.zeros())


def data_of(name: str) -> tuple[torch.Tensor, ...]:
    """Inputs, then the targets; the same in every process."""
    samples, chance = STEPS * STEP_SAMPLES, torch.Generator().manual_seed(7)
    if name == "digits":
        from train import read_digits

        images, labels = read_digits()[0].tensors
        return images[:samples].double(), labels[:samples]
    if name == "gpt":
        tokens = (torch.randint(0, 32, (samples, 1), generator=chance) + 3 * torch.arange(13)) % 32
        return tokens[:, :-1], tokens[:, 1:]
    numbers = torch.randn(samples, 3, dtype=torch.float64, generator=chance)
    ids = torch.randint(0, IDS, (samples, 2), generator=chance)
    return numbers, ids, (numbers.sum(1) + ids.sum(1) % 3 > 1).double()


def loss_of(name: str, found: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if name == "digits":
        return F.cross_entropy(found, target)
    if name == "gpt":
        return F.cross_entropy(found.flatten(0, 1), target.flatten())
    return F.binary_cross_entropy_with_logits(found, target)


MODELS = ("digits", "gpt", "recommender")


def made(name: str, make_rows: Callable[[], torch.nn.Module] = rows_of_servers) -> torch.nn.Module:
    """The same values in every process. `make_rows`: of a recommender, with zeros."""
    if name == "recommender":
        rows = make_rows()
    torch.manual_seed(3)
    return digits() if name == "digits" else gpt() if name == "gpt" else Clicks(rows)


def optimizer_of(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("out")
    parser.add_argument("--batch-size", type=int, default=STEP_SAMPLES)
    parser.add_argument("--accumulate", type=int, default=1)
    options = parser.parse_args()
    data = TensorDataset(torch.arange(STEPS * STEP_SAMPLES), *data_of(options.model))
    taken = []
    with sy.connect() as job:
        model = made(options.model)
        job.prepare(
            model, optimizer_of(model.parameters()), loss=lambda found, target: loss_of(options.model, found, target)
        )
        often = {"batch_size": options.batch_size, "accumulate": options.accumulate}
        for samples, *inputs, target in job.batches(data, **often, drop_last=True):
            step = job.step
            loss = job.train_step(*inputs, target)
            taken.append([step, loss.item(), samples.tolist()])
    Path(options.out).write_text(json.dumps({"taken": taken}))


if __name__ == "__main__":
    main()
