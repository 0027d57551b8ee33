"""Training with DistributedDataParallel over gloo: each rank is a worker."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from harness.processes.answers import Conversation, peer_parser
from harness.workloads.training import TASKS, Loop, make_data, make_model


def main() -> None:
    conversation = Conversation()
    parser = peer_parser()
    parser.add_argument("--task", choices=TASKS, required=True)
    parser.add_argument("--wrap", choices=["plain", "view", "static"], default="plain")
    parser.add_argument("--fused", action="store_true")
    parser.add_argument("--hook", choices=["fp16"], help="a communication hook that compresses gradients")
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo", init_method=f"file://{options.rendezvous}", rank=options.rank, world_size=options.world
    )
    task = TASKS[options.task]
    model = make_model(task)
    wrapped = DistributedDataParallel(
        model, gradient_as_bucket_view=options.wrap != "plain", static_graph=options.wrap == "static"
    )
    if options.hook:
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=task.lr, fused=True if options.fused else None)
    data = make_data(task, options.rank, options.world)
    loop = Loop(model, data, exchange=optimizer.step, zero=optimizer.zero_grad, forward=wrapped, worker=options.rank)
    conversation.answer(loop.handlers())


if __name__ == "__main__":
    main()
    os._exit(0)
