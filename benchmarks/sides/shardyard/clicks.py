"""A recommender in a job of Shardyard: a training script, as a user would write it, with batches of its own."""

from __future__ import annotations

import torch

import shardyard as sy
from harness.processes.answers import Conversation, worker_parser
from harness.workloads.clicks import LR, Loop, Recommender


def main() -> None:
    conversation = Conversation()
    options = worker_parser().parse_args()
    with sy.connect(job="clicks", settings=options.settings) as job:
        model = Recommender()
        model, optimizer = job.prepare(model, torch.optim.Adam(model.parameters(), lr=LR))
        ahead = lambda batches: job.look_ahead(batches, lambda batch: {model.rows: batch[1]})  # noqa: E731
        conversation.answer(Loop(model, optimizer, ahead, options.worker).handlers())


if __name__ == "__main__":
    main()
