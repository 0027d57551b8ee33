"""Rounds of push and pull with torch.distributed.rpc: rank 0 is the server, the others are callers."""

from __future__ import annotations

import os

import torch
from torch.distributed import rpc

from harness.processes.answers import Conversation, peer_parser
from harness.workloads import numbers
from harness.workloads.rounds import Rounds, make_model, run_backward
from sides.torch_peers import rpc_store


def main() -> None:
    conversation = Conversation()
    parser = peer_parser()
    parser.add_argument("--transport", choices=["default", "tcp"], default="default")
    parser.add_argument("--calls", choices=["one", "split"], default="one")
    parser.add_argument("--take", choices=["copy", "rebind"], default="copy")
    parser.add_argument("--torch-threads", type=int, default=1)
    parser.add_argument("--rpc-threads", type=int, default=16)
    parser.add_argument("--tensors", type=int, required=True)
    parser.add_argument("--elements", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.torch_threads)
    name = rpc_store.SERVER if options.rank == 0 else f"caller{options.rank}"
    rpc_store.join(name, options.rank, options.world, options.rendezvous, options.transport, options.rpc_threads)
    model = make_model(options.tensors, options.elements)
    if options.rank == 0:
        rpc_store.hold([parameter.detach() for parameter in model], numbers.LR)
        conversation.answer({})
        return
    parameters = list(model)
    run_backward(parameters)

    def call() -> list[torch.Tensor]:
        gradients = [parameter.grad for parameter in parameters]
        if options.calls == "one":
            values: list[torch.Tensor] = rpc.rpc_sync(rpc_store.SERVER, rpc_store.push_pull, (gradients,))
            return values
        calls = [
            rpc.rpc_async(rpc_store.SERVER, rpc_store.push_pull_one, (index, gradient))
            for index, gradient in enumerate(gradients)
        ]
        return [call.wait() for call in calls]

    def exchange() -> None:
        values = call()
        with torch.no_grad():
            for parameter, value in zip(parameters, values, strict=True):
                if options.take == "rebind":
                    parameter.data = value
                else:
                    parameter.copy_(value)

    conversation.answer(Rounds(model, exchange, alone=options.world == 2).handlers())


if __name__ == "__main__":
    main()
    # no graceful shutdown: all processes end at the same time
    os._exit(0)
