"""Training in replica groups, whose workers are killed and started again by their agent."""

from __future__ import annotations

import os

import torch

import shardyard as sy
from harness.workloads.replaced import BATCH, EPOCHS, READY, Workload, workload_parser, write_counts


def main() -> None:
    options = workload_parser().parse_args()
    torch.set_num_threads(1)
    with sy.connect() as job:
        model = Workload(options)
        sgd = model.optimizer()  # the first one of a process imports for seconds
        model.note(READY)
        model, optimizer = job.prepare(model, sgd)
        for index, labels in job.batches(model.data(), batch_size=BATCH, epochs=EPOCHS):
            optimizer.zero_grad()
            torch.autograd.backward(model(index, labels))
            optimizer.step()
            model.note(job.step)
            if (options.out / "stop").exists():
                job.stop("measured")
        write_counts(options.out / f"{os.getpid()}.json", model.counts.detach(), job.step)


if __name__ == "__main__":
    main()
