"""Rounds of push and pull with Shardyard: a training script, as a user would write it."""

from __future__ import annotations

import torch

import shardyard as sy
from harness.processes.answers import Conversation, worker_parser
from harness.workloads import numbers
from harness.workloads.rounds import Rounds, make_model, run_backward


def main() -> None:
    conversation = Conversation()
    parser = worker_parser()
    parser.add_argument("--tensors", type=int, required=True)
    parser.add_argument("--elements", type=int, required=True)
    options = parser.parse_args()
    with sy.connect(job="rounds", settings=options.settings) as job:
        model = make_model(options.tensors, options.elements)
        model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=numbers.LR))
        run_backward(list(model))
        conversation.answer(Rounds(model, optimizer.step, alone=options.workers == 1).handlers())


if __name__ == "__main__":
    main()
