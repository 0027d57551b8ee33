"""Training with Shardyard: a training script, as a user would write it, with batches of its own."""

from __future__ import annotations

import torch

import shardyard as sy
from harness.processes.answers import Conversation, worker_parser
from harness.workloads.training import TASKS, Loop, make_data, make_model
from shardyard_worker.collectives import shared_members


def main() -> None:
    conversation = Conversation()
    parser = worker_parser()
    parser.add_argument("--task", choices=TASKS, required=True)
    parser.add_argument("--machines", nargs="+", help="of the workers, as many on each: they share memory inside")
    options = parser.parse_args()
    if options.machines:
        machine = options.machines[options.worker * len(options.machines) // options.workers]
        shared_members.this_machine = lambda: machine
    task = TASKS[options.task]
    with sy.connect(job="training", settings=options.settings) as job:
        model = make_model(task).to(job.device)
        model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=task.lr))
        data = make_data(task, options.worker, options.workers)
        conversation.answer(
            Loop(model, data, exchange=optimizer.step, zero=optimizer.zero_grad, worker=options.worker).handlers()
        )


if __name__ == "__main__":
    main()
