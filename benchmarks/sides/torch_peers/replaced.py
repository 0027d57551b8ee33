"""The same with torch's own means: DistributedDataParallel under torchrun, which starts all workers again when one has
died. They go on from the last checkpoint, with its place in the data."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset

from harness.workloads.replaced import BATCH, EPOCHS, READY, Workload, workload_parser, write_counts


def main() -> None:
    parser = workload_parser()
    parser.add_argument("--checkpoint-s", type=float, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    model = Workload(options)
    optimizer = model.optimizer()
    model.note(READY)
    dist.init_process_group("gloo")
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)
    path: Path = options.out / "checkpoint.pt"
    steps = 0
    if path.exists():
        state = torch.load(path)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        steps = state["steps"]
    data = model.data()
    sampler = DistributedSampler(data)
    per_epoch = len(sampler) // BATCH
    saved_s = time.monotonic()
    for epoch in range(steps // per_epoch, EPOCHS):
        sampler.set_epoch(epoch)
        rest = list(sampler)[steps % per_epoch * BATCH :]
        for index, labels in DataLoader(Subset(data, rest), batch_size=BATCH):
            optimizer.zero_grad()
            torch.autograd.backward(wrapped(index, labels))
            optimizer.step()
            steps += 1
            model.note(steps)
            if dist.get_rank() == 0 and time.monotonic() >= saved_s + options.checkpoint_s:
                saved_s = time.monotonic()
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "steps": steps}
                torch.save(state, path.with_suffix(".part"))
                path.with_suffix(".part").rename(path)
                write_counts(options.out / "counts.json", model.counts.detach(), steps)


if __name__ == "__main__":
    main()
