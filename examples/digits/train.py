"""Handwritten digits: 1,797 images of 8 x 8 (digits.csv.gz), a small network, at least 97% on images held out.

python examples/digits/train.py                                            alone, in this process
SHARDYARD_COORDINATOR=127.0.0.1:7070 python examples/digits/train.py       in a running yard

digits.csv.gz is the test set of E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits (1998), UCI
Machine Learning Repository, doi.org/10.24432/C50P49, CC BY 4.0. A line has an image's 64 pixels, from 0 to 16, and its
digit.
"""

import argparse
import os
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import shardyard as sy


def read_digits() -> tuple[TensorDataset, TensorDataset]:
    """1,437 images to learn from and 360 held out, the same ones in every process."""
    digits = np.loadtxt(Path(__file__).with_name("digits.csv.gz"), dtype=np.float32, delimiter=",")
    images = torch.from_numpy(digits[:, :64]).reshape(-1, 1, 8, 8) / 16
    labels = torch.from_numpy(digits[:, 64]).long()
    shuffled = torch.randperm(len(images), generator=torch.Generator().manual_seed(7))
    train, held_out = shuffled[360:], shuffled[:360]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[held_out], labels[held_out])


def make_network() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, kernel_size=3, padding=1),
        torch.nn.BatchNorm2d(16),
        torch.nn.ReLU(),
        torch.nn.Conv2d(16, 32, kernel_size=3, padding=1),
        torch.nn.BatchNorm2d(32),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Dropout(0.3),
        torch.nn.Linear(512, 10),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--coordinator", help="HOST:PORT of a running yard")
    parser.add_argument("--config", help="a YAML file, see docs/reference/configuration.md")
    parser.add_argument("--job", default=os.environ.get("SHARDYARD_JOB", "digits"), help="the job's name")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--seed", type=int, help="the job's seed")
    options = parser.parse_args()
    settings = {} if options.seed is None else {"job.seed": options.seed}

    train, held_out = read_digits()
    with sy.connect(options.coordinator, config=options.config, job=options.job, settings=settings) as job:
        model = make_network().to(job.device)
        model, optimizer = job.prepare(model, torch.optim.Adam(model.parameters(), lr=2e-3))
        model.train()
        for images, labels in job.batches(train, batch_size=options.batch_size, epochs=options.epochs):
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            job.log(loss=loss)

        if job.chief:
            model.eval()
            images, labels = (tensor.to(job.device) for tensor in held_out.tensors)
            with torch.no_grad():
                accuracy = (model(images).argmax(dim=1) == labels).float().mean().item()
            print(f"held-out accuracy {accuracy:.1%} after {job.step} steps", flush=True)


if __name__ == "__main__":
    main()
