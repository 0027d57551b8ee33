"""A pipeline with Shardyard: a training script, as a user would write it, with batches of its own."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

import shardyard as sy
from harness.processes.answers import Conversation, worker_parser
from harness.workloads.pipeline import PipelineLoop
from harness.workloads.training import TASKS, make_model


def main() -> None:
    conversation = Conversation()
    parser = worker_parser()
    parser.add_argument("--task", choices=TASKS, required=True)
    options = parser.parse_args()
    task = TASKS[options.task]
    with sy.connect(job="pipeline", settings=options.settings) as job:
        model = make_model(task)
        job.prepare(model, torch.optim.SGD(model.parameters(), lr=task.lr), loss=F.cross_entropy)
        conversation.answer(PipelineLoop(task, lambda x, y: job.train_step(x, y).item()).handlers())


if __name__ == "__main__":
    main()
