"""One real worker of a job, and many clients beside it that send its exchange again under their own names.

All gradients are 1, so every parameter tells how many of them were counted.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
from typing import Any

import torch

from harness.processes.answers import Conversation, worker_parser
from harness.workloads.recorded import Client, Recorder, train
from shardyard.config import configuration
from shardyard.transport.grpc_client import GrpcNetwork
from shardyard_worker.job import connect as worker

JOB = "many"
ELEMENTS = 1_024
LR = 2.0**-20


def main() -> None:
    conversation = Conversation()
    parser = worker_parser()
    parser.add_argument("--clients", type=int, required=True)
    options = parser.parse_args()
    given = {**options.settings, "job.name": JOB, "worker.same_host": "never"}
    settings = configuration.load(None, os.environ, given).settings
    network = GrpcNetwork(None)
    recorder = Recorder(network)
    with worker.connect(settings, network=recorder) as job:
        weight = torch.nn.Parameter(torch.zeros(ELEMENTS))
        _, optimizer = job.prepare(torch.nn.ParameterList([weight]), torch.optim.SGD([weight], lr=LR))
        torch.autograd.backward(weight.sum())
        optimizer.step()
        assert recorder.exchange is not None
        coordinator = network.connect(os.environ["SHARDYARD_COORDINATOR"], name="the coordinator")
        sent = json.dumps(settings.job.model_dump(mode="json"))
        clients = [Client(coordinator, JOB, recorder.exchange, sent) for _ in range(options.clients)]
        ended = threading.Event()

        def beat() -> None:
            while not ended.wait(clients[0].heartbeat_s):
                for client in clients:
                    client.beat()

        heart = threading.Thread(target=beat, name="heartbeats")
        heart.start()
        loop = asyncio.new_event_loop()

        def measure(seconds: float, clients_: int) -> dict[str, Any]:
            each_s = loop.run_until_complete(train(clients[:clients_], recorder.address, seconds))
            return {"each_s": each_s}

        def count() -> dict[str, Any]:
            return {"pushes": sum(client.pushes for client in clients) + 1}

        def read() -> dict[str, Any]:
            job.pull()
            return {"pushes": [float(each) / -LR for each in weight.detach().aminmax()]}

        conversation.answer({"measure": measure, "count": count, "read": read})
        ended.set()
        heart.join()
        for client in clients:
            client.leave()


if __name__ == "__main__":
    main()
