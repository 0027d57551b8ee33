"""A pipeline with torch.distributed.pipelining over gloo, used bare: each rank is a stage."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from harness.processes.answers import Conversation, peer_parser
from harness.workloads.pipeline import CUT, MICROBATCHES, SCHEDULE, PipelineLoop
from harness.workloads.training import TASKS, make_model


def main() -> None:
    conversation = Conversation()
    parser = peer_parser()
    parser.add_argument("--task", choices=TASKS, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo", init_method=f"file://{options.rendezvous}", rank=options.rank, world_size=options.world
    )
    task = TASKS[options.task]
    model = make_model(task)
    part = (model[:CUT], model[CUT:])[options.rank]
    stage = PipelineStage(part, options.rank, options.world, torch.device("cpu"))
    schedule = get_schedule_class(SCHEDULE)(stage, MICROBATCHES, loss_fn=F.cross_entropy)
    optimizer = torch.optim.SGD(part.parameters(), lr=task.lr)

    def step(inputs: torch.Tensor, labels: torch.Tensor) -> float:
        losses: list[torch.Tensor] = []
        if options.rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=labels, losses=losses, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean().item() if losses else float("nan")

    conversation.answer(PipelineLoop(task, step).handlers())


if __name__ == "__main__":
    main()
    os._exit(0)
