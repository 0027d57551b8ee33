"""Evaluates the digits while others train them (train.py): accuracy on held-out images, the best version kept.

shardyard eval --follow examples/digits/evaluate.py                         beside a yard's `shardyard up`
SHARDYARD_COORDINATOR=127.0.0.1:7070 python examples/digits/evaluate.py     the same by hand
"""

import argparse

import torch
from train import make_network, read_digits

import shardyard as sy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--coordinator", help="HOST:PORT of a running yard")
    parser.add_argument("--config", help="a YAML file, see docs/reference/configuration.md")
    parser.add_argument("--job", help="the job's name; the only one without")
    options = parser.parse_args()

    _, held_out = read_digits()
    with sy.follow(options.coordinator, config=options.config, job=options.job) as run:
        model = make_network().to(run.device)
        model.eval()
        images, labels = (tensor.to(run.device) for tensor in held_out.tensors)
        for _ in run.snapshots(model):
            with torch.no_grad():
                accuracy = (model(images).argmax(dim=1) == labels).float().mean()
            run.report(accuracy=accuracy)
            run.keep_best("accuracy", mode="max")


if __name__ == "__main__":
    main()
