"""A training script for tests, which writes down what it is told of its job, as JSON."""

import json

import torch
from torch.utils.data import TensorDataset

import shardyard as sy


def main() -> None:
    with sy.connect() as job:
        told: dict[str, list[object]] = {"steps": [], "checkpoints": [], "stops": [], "logged": []}
        job.on_step(lambda job: told["steps"].append(job.step))
        job.on_checkpoint(lambda job, taken: told["checkpoints"].append(taken.number))
        job.on_stop(lambda job, stop: told["stops"].append(stop.reason))
        if job.chief:
            job.on_log(sy.EarlyStopping("value", patience=30))
        data = TensorDataset(torch.randn(64, 2))  # before job.prepare, where all workers have the job's seed
        model = torch.nn.Linear(2, 1)
        model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
        for (x,) in job.batches(data, batch_size=4, epochs=1_000):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            job.log(value=1.0)
            told["logged"].append(job.step)
        worker = repr(job._session.caller.incarnation)
    print(json.dumps({**told, "step": job.step, "worker": worker}), flush=True)


if __name__ == "__main__":
    main()
