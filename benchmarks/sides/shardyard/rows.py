"""An embedding table in a job of Shardyard: a training script, as a user would write it, with batches of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch

import shardyard as sy
from harness.machine.slow_network import SlowNetwork
from harness.processes.answers import Conversation, worker_parser
from harness.workloads.rows import EPS, LR, Loop, Task
from shardyard.config import configuration
from shardyard.security.identity import Role
from shardyard.transport.enrolment import own_credentials
from shardyard.transport.grpc_client import GrpcNetwork
from shardyard_worker.job import connect as worker


def main() -> None:
    conversation = Conversation()
    parser = worker_parser()
    Task.add_options(parser)
    parser.add_argument("--ahead", action="store_true", help="rows of the next batch come with the step")
    parser.add_argument("--delay-ms", type=float, default=0, help="so much later each server answers")
    options = parser.parse_args()
    task = Task.of(options)
    targets = task.targets()
    if options.delay_ms:
        settings = configuration.load(None, os.environ, options.settings).settings
        network = GrpcNetwork(own_credentials(settings, Role.WORKER))
        joined = worker.connect(settings, network=SlowNetwork(network, options.delay_ms / 1_000))
    else:
        joined = sy.connect(settings=options.settings)
    with joined as job:
        model = sy.Embedding(task.dim, optimizer=sy.tables.Adagrad(lr=LR, eps=EPS))
        model.table.load(task.first_rows())
        model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=LR))

        def run(batches: Iterator[torch.Tensor]) -> None:
            given = job.look_ahead(batches, lambda ids: {model: ids}) if options.ahead else batches
            for ids in given:
                rows = model(ids)
                optimizer.zero_grad()
                torch.autograd.backward(rows, rows.detach() - targets)
                optimizer.step()

        def read(ids: torch.Tensor) -> torch.Tensor:
            job.pull()  # a push may be under way
            with torch.no_grad():
                return model(ids)

        conversation.answer(Loop(task, run, read).handlers())


if __name__ == "__main__":
    main()
