"""Training against a parameter server of torch.distributed.rpc: rank 0 is the server, the others are workers."""

from __future__ import annotations

import os

import torch
from torch.distributed import rpc

from harness.processes.answers import Conversation, peer_parser
from harness.workloads.training import TASKS, Loop, make_data, make_model
from sides.torch_peers import rpc_model, rpc_store


def main() -> None:
    conversation = Conversation()
    parser = peer_parser()
    parser.add_argument("--task", choices=TASKS, required=True)
    parser.add_argument("--transport", choices=["default", "tcp"], default="default")
    parser.add_argument("--update", choices=["live", "clone", "foreach", "fused", "flat"], default="live")
    options = parser.parse_args()
    torch.set_num_threads(1)
    name = rpc_store.SERVER if options.rank == 0 else f"worker{options.rank}"
    rpc_store.join(name, options.rank, options.world, options.rendezvous, options.transport, options.world)
    task = TASKS[options.task]
    model = make_model(task)
    parameters = list(model.parameters())
    flat = options.update == "flat"
    if flat:
        joined = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
        offset = 0
        for parameter in parameters:
            parameter.data = joined[offset : offset + parameter.numel()].view(parameter.shape)
            offset += parameter.numel()
    if options.rank == 0:
        rpc_model.hold([torch.nn.Parameter(joined)] if flat else parameters, task.lr, options.update)
        conversation.answer({})
        return

    def exchange() -> None:
        if flat:
            gradient = torch.cat([parameter.grad.view(-1) for parameter in parameters if parameter.grad is not None])
            joined.copy_(rpc.rpc_sync(rpc_store.SERVER, rpc_model.push_pull, ([gradient],))[0])
            return
        gradients = [parameter.grad for parameter in parameters]
        values = rpc.rpc_sync(rpc_store.SERVER, rpc_model.push_pull, (gradients,))
        with torch.no_grad():
            for parameter, value in zip(parameters, values, strict=True):
                parameter.copy_(value)

    data = make_data(task, options.rank - 1, options.world - 1)
    conversation.answer(Loop(model, data, exchange=exchange, zero=model.zero_grad, worker=options.rank - 1).handlers())


if __name__ == "__main__":
    main()
    # no graceful shutdown: all processes end at the same time
    os._exit(0)
